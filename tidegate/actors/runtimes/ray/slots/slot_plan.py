"""Which slots a job needs, in which bundle each of its tasks belongs, and how bundles lie on nodes. Pure.

Rules:

- Steps without resources share the common slots: slot i holds subtask i of each of their vertices, and a process takes
  its part of the slot's CPU.
- A vertex with resources has slots of its own: a bundle for each subtask, which holds just what the step asks for, in a
  placement group of the job (Flink: a slot sharing group). So whatever is restarted, or moved with a lost node, finds
  the same resources reserved, and no other job can take them meanwhile.
- Spare processes take the place of tasks in common slots alone. One that waits reserves nothing, and Ray cannot give it
  a GPU later; if it reserved one, it would keep a GPU idle.
- "spread" deals the slots out over the bundles in turn, "pack" and "strict_pack" fill one bundle after the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.resources import SLOT_CPUS, STEPS_OF_ONE, Resources
from tidegate.actors.protocol.identity import TaskId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import VertexId
from tidegate.storage.user_values import repr_text

Placement: TypeAlias = Literal["spread", "pack", "strict_pack"]
"""How bundles lie on nodes: on as many as can be, on as few as can be, or all on one."""
Strategy: TypeAlias = Literal["SPREAD", "PACK", "STRICT_PACK"]
"""The same, as Ray calls it."""

SLOT_BUNDLE: Mapping[str, float] = {"CPU": SLOT_CPUS}
"""What a common slot reserves, without an executor beside it."""
_STRATEGIES: Mapping[str, Strategy] = {"spread": "SPREAD", "pack": "PACK", "strict_pack": "STRICT_PACK"}


def strategy_of(placement: object) -> Strategy:
    """Ray's word for a placement. ConfigurationError for anything else."""
    if not isinstance(placement, str) or placement not in _STRATEGIES:
        raise ConfigurationError(f"placement={repr_text(placement)}: it is one of {', '.join(map(repr, _STRATEGIES))}")
    return _STRATEGIES[placement]


def slot_order(bundles: int, slots_a_bundle: int, placement: Placement) -> tuple[int, ...]:
    """The bundle of each slot. A job takes neighbouring slots."""
    slots = range(bundles * slots_a_bundle)
    return tuple(slot % bundles if placement == "spread" else slot // slots_a_bundle for slot in slots)


@dataclass(frozen=True, slots=True)
class OwnSlots:
    """The slots of a vertex with resources: bundle `first` and those after it, one for each subtask."""

    first: int
    slots: int
    resources: Resources
    label: str
    """What people call the vertex."""


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The slots of a job. `width`: how many common ones. `share`: CPUs of a process in one of them."""

    width: int
    share: float
    own: Mapping[VertexId, OwnSlots]

    def own_bundle(self, task: TaskId) -> int | None:
        """The bundle of a task that has a slot of its own; None if it is in a common one."""
        own = self.own.get(task.vertex)
        return None if own is None else own.first + task.subtask

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The bundles of all slots that belong to one vertex each."""
        return [own.resources.bundle for own in self.own.values() for _ in range(own.slots)]

    @property
    def labels(self) -> list[str]:
        """For each of these bundles what people call its vertex."""
        return [own.label for own in self.own.values() for _ in range(own.slots)]


def slot_plan(graph: JobGraph, labels: Mapping[VertexId, str]) -> SlotPlan:
    """The slots that a job needs. Every job has sources, so it has common slots."""
    common = [vertex for vertex in graph.vertices if vertex.resources is None]
    own: dict[VertexId, OwnSlots] = {}
    first = 0
    for vertex in graph.vertices:
        if vertex.resources is not None:
            own[vertex.vertex] = OwnSlots(first, vertex.parallelism, vertex.resources, labels[vertex.vertex])
            first += vertex.parallelism
    # Ray counts in ten-thousandths.
    share = max(1, math.floor(STEPS_OF_ONE / max(1, len(common)))) / STEPS_OF_ONE
    return SlotPlan(max((vertex.parallelism for vertex in common), default=0), share, own)
