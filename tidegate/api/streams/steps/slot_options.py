"""`SlotOptions`: the keywords of a step that put it into slots of its own kind (`docs/placement.md`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from tidegate.actors.graph.resources import Resources


class SlotOptions(TypedDict, total=False):
    """What each subtask of a step reserves on Ray. The names are those of `ray.remote`."""

    num_cpus: float
    """CPUs; 1 where only others are named."""
    num_gpus: float
    """GPUs, also parts of one. The process of a subtask sees those that it has, and no others."""
    resources: Mapping[str, float]
    """Resources of nodes by the names that they were started with (`ray start --resources`)."""


def resources_of(step: str, slot: SlotOptions | None) -> Resources | None:
    """What the keywords of a step say. ConfigurationError for wrong amounts, TypeError for other keywords."""
    if slot is None:
        return None
    if unknown := sorted(set(slot) - SlotOptions.__optional_keys__):
        raise TypeError(f"{step}: unexpected keyword argument {unknown[0]!r}")
    return Resources.of(step, slot.get("num_cpus"), slot.get("num_gpus"), slot.get("resources"))
