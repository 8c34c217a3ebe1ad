"""Ends processes of workers that Ray has not started and whose job is gone.

A worker's process is a detached actor, so that it outlives its coordinator, and it ends by itself when the coordinator
is gone for good (`lifeline.py`). One that waits for room in the cluster cannot do that: it would keep its name, and
Ray its demand, for ever. So the living processes of such a job end the waiting ones before they end themselves, and
each environment and each submission does the same for whatever is left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from tidegate.actors.ray.process.calls import NAMESPACE
from tidegate.protocol.failure_reasons import error_text

log = logging.getLogger(__name__)

WORKER_CLASS = "WorkerProcess"
COORDINATOR_SUFFIX = "/coordinator"
_WAITS = ("DEPENDENCIES_UNREADY", "PENDING_CREATION")
_DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class ActorRow:
    """What Ray knows of an actor. `ray_job`: the driver that it was made for, directly or not."""

    name: str
    class_name: str
    ray_job: str
    state: str


def orphans(actors: Iterable[ActorRow]) -> list[str]:
    """The names of processes of workers that wait for room, and whose coordinator is dead. Pure.

    A coordinator of the same name in another Ray job is that of another job.
    """
    known = [actor for actor in actors if actor.name and actor.state != _DEAD]
    jobs = [(a.name.removesuffix("coordinator"), a.ray_job) for a in known if a.name.endswith(COORDINATOR_SUFFIX)]
    return [
        actor.name
        for actor in known
        if actor.class_name == WORKER_CLASS
        and actor.state in _WAITS
        and not any(actor.name.startswith(prefix) and actor.ray_job == ray_job for prefix, ray_job in jobs)
    ]


def end_orphans(namespace: str = NAMESPACE) -> None:
    """End them. What Ray does not answer is logged: the next environment tries again."""
    try:
        actors: Any = ray._private.state.actors()
        rows = [ActorRow(a["Name"], a["ActorClassName"], a["JobID"], a["State"]) for a in actors.values()]
        for name in orphans(rows):
            log.info("%s waits for room, and its job is gone: it is ended", name)
            try:
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
            except ValueError:
                continue  # It is gone meanwhile, or belongs to another namespace.
    except (RayError, ConnectionError, RuntimeError) as error:
        log.warning("processes of jobs that are gone could not be looked for: %s", error_text(error))
