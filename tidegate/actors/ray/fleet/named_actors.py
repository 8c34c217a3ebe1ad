"""Finds an actor by its name: coordinators, processes of tasks and held programs have names that others look for."""

from __future__ import annotations

import ray

from tidegate.actors.ray.process.orders import Handle


def find_actor(name: str, namespace: str) -> Handle | None:
    """The actor of this name, None if there is none, or none any more."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None
