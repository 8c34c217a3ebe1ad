"""Plans the slots of a job: which worker runs each subtask, and in which placement group bundle the worker runs. Pure
functions.

Rules:

- Steps without resources share the slots of their slot sharing group: slot i of a group holds subtask i of each of its
  vertices. One worker runs these subtasks, and uses the CPU of the slot. The slots of the groups are numbered
  consecutively.
- A pipeline that shares no channel with other pipelines, and is narrower than its group, begins in the slot after the
  last slot of the previous such pipeline. When a process dies, all pipelines in its slot restart, so few pipelines
  should share a slot.
- Without slot sharing every subtask has its own worker, which gets its part of the slot's CPU.
- A vertex with resources has its own slots: a bundle for each subtask, with the requested resources, in a placement
  group of the job. A restarted or moved subtask finds the same resources reserved, and no other job can take them
  meanwhile.
- Spare processes take the place of workers in common slots only. A waiting one reserves nothing, and Ray cannot give it
  a GPU later.
- "spread" deals the slots out over the bundles in turn, "pack" and "strict_pack" fill one bundle after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from tidegate.actors.graph.job_graph import DEFAULT_GROUP, JobGraph
from tidegate.actors.graph.resources import SLOT_CPUS, STEPS_OF_ONE, Resources
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import SubtaskIndex, VertexId
from tidegate.storage.user_values import repr_text

Placement: TypeAlias = Literal["spread", "pack", "strict_pack"]
"""The distribution of bundles over nodes: over many nodes ("spread"), few nodes ("pack"), or one node
("strict_pack").
"""
Strategy: TypeAlias = Literal["SPREAD", "PACK", "STRICT_PACK"]
"""Ray's name of a placement strategy."""

STEPS_SHOWN_MAX = 6
"""Limit of the step names in the name of a worker in Ray's dashboard."""
SLOT_BUNDLE: Mapping[str, float] = {"CPU": SLOT_CPUS}
"""The resources of the bundle of a common slot. A Spark executor in the bundle adds its own."""
_STRATEGIES: Mapping[str, Strategy] = {"spread": "SPREAD", "pack": "PACK", "strict_pack": "STRICT_PACK"}


def strategy_of(placement: object) -> Strategy:
    """Returns Ray's name of a placement strategy. Raises ConfigurationError for an unknown placement."""
    if not isinstance(placement, str) or placement not in _STRATEGIES:
        raise ConfigurationError(
            f"placement={repr_text(placement)} is unknown; give one of {', '.join(map(repr, _STRATEGIES))}"
        )
    return _STRATEGIES[placement]


def slot_order(bundles: int, slots_a_bundle: int, placement: Placement) -> tuple[int, ...]:
    """Returns the index of the bundle for each common slot."""
    slots = range(bundles * slots_a_bundle)
    return tuple(slot % bundles if placement == "spread" else slot // slots_a_bundle for slot in slots)


@dataclass(frozen=True, slots=True)
class OwnSlots:
    """The slots of a vertex with its own resources. `first` is the index of its first bundle, `slots` the number
    of bundles.
    """

    first: int
    slots: int
    resources: Resources
    label: str
    """Short name of the vertex, for people."""


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """Identifies a worker of a job: its index within a slot sharing group, or within a vertex that shares no
    slots.
    """

    group: str
    index: int


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The slots of a job, and the worker of each subtask.

    `width` is the number of common slots, which several vertices share. `share` is the number of CPUs of each worker in
    a common slot.
    """

    width: int
    share: float
    groups: Mapping[str, int]
    """Number of common slots of each slot sharing group, by name, in the order of their slots."""
    own: Mapping[VertexId, OwnSlots]
    workers: Mapping[TaskId, WorkerId]
    """The worker of each subtask."""
    slots: Mapping[WorkerId, int]
    """The index of the common slot of each worker that uses one."""
    names: Mapping[WorkerId, str]
    """The name of each worker, for people."""
    steps: Mapping[WorkerId, tuple[str, ...]]
    """The short names of the vertices in each worker."""

    def shown(self, worker: WorkerId) -> str:
        """Returns the name of a worker with the names of its steps, for Ray's dashboard."""
        steps = self.steps[worker]
        if len(steps) == 1 and self.names[worker].startswith(steps[0]):
            return self.names[worker]
        more = f", and {len(steps) - STEPS_SHOWN_MAX} more" if len(steps) > STEPS_SHOWN_MAX else ""
        return f"{self.names[worker]} ({', '.join(steps[:STEPS_SHOWN_MAX])}{more})"

    def own_bundle(self, worker: WorkerId) -> int | None:
        """Returns the index of the bundle of a worker with its own slot, or None for a worker in a common slot."""
        own = self.own.get(VertexId(worker.group))
        return None if own is None or worker in self.slots else own.first + worker.index

    @property
    def groups_text(self) -> str:
        """Returns text with the number of common slots of each slot sharing group, or "" if there is only the
        default group.
        """
        if set(self.groups) <= {DEFAULT_GROUP}:
            return ""
        return ", ".join(f"{slots} for slot sharing group {group!r}" for group, slots in self.groups.items())

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Returns the bundles of the vertices with their own resources, one for each subtask."""
        return [own.resources.bundle for own in self.own.values() for _ in range(own.slots)]

    @property
    def labels(self) -> list[str]:
        """Returns the short name of the vertex for each bundle in `bundles`."""
        return [own.label for own in self.own.values() for _ in range(own.slots)]


def slot_plan(graph: JobGraph, labels: Mapping[VertexId, str]) -> SlotPlan:
    """Returns the plan of the slots that a job needs. `labels` has a short name for each vertex.

    A job has common slots unless all steps have their own resources.
    """
    common = [vertex for vertex in graph.vertices if vertex.resources is None]
    widths: dict[str, int] = {}
    for vertex in common:
        widths[vertex.slot_group] = max(widths.get(vertex.slot_group, 0), vertex.parallelism)
    firsts = dict(zip(widths, accumulate((0, *widths.values())), strict=False))
    own: dict[VertexId, OwnSlots] = {}
    workers: dict[TaskId, WorkerId] = {}
    slots: dict[WorkerId, int] = {}
    names: dict[WorkerId, str] = {}
    steps: dict[WorkerId, list[str]] = {}
    first = 0
    begins = _begins(graph, widths)
    for vertex in graph.vertices:
        shares = vertex.resources is None and graph.slot_sharing
        group = f"group {vertex.slot_group}" if shares else str(vertex.vertex)
        for index in range(vertex.parallelism):
            at = (begins[vertex.vertex] + index) % widths[vertex.slot_group] if shares else index
            worker = WorkerId(group, at)
            workers[TaskId(vertex.vertex, SubtaskIndex(index))] = worker
            steps.setdefault(worker, []).append(labels[vertex.vertex])
            if vertex.resources is None:
                slots[worker] = firsts[vertex.slot_group] + at
            names[worker] = f"{labels[vertex.vertex]} ({index + 1}/{vertex.parallelism})"
            if shares:
                of = "" if vertex.slot_group == DEFAULT_GROUP else f"{vertex.slot_group} "
                names[worker] = f"{of}slot {at + 1} of {widths[vertex.slot_group]}"
        if vertex.resources is not None:
            own[vertex.vertex] = OwnSlots(first, vertex.parallelism, vertex.resources, labels[vertex.vertex])
            first += vertex.parallelism
    together = Counter(slots.values())
    # Ray counts in ten-thousandths.
    share = max(1, math.floor(STEPS_OF_ONE / max(together.values(), default=1))) / STEPS_OF_ONE
    inside = {worker: tuple(of_worker) for worker, of_worker in steps.items()}
    return SlotPlan(sum(widths.values()), share, widths, own, workers, slots, names, inside)


def _begins(graph: JobGraph, widths: Mapping[str, int]) -> dict[VertexId, int]:
    """Returns, for each vertex without own resources, the slot of its group that contains its first subtask."""
    pipelines = _pipelines(graph)
    begins: dict[VertexId, int] = {}
    next_slot = dict.fromkeys(widths, 0)
    of_pipeline: dict[tuple[VertexId, str], int] = {}
    common = [vertex for vertex in graph.vertices if vertex.resources is None]
    for vertex in common:
        place = pipelines[vertex.vertex], vertex.slot_group
        if place not in of_pipeline:
            together = [v for v in common if (pipelines[v.vertex], v.slot_group) == place]
            widest = max(v.parallelism for v in together)
            is_narrow = widest < widths[vertex.slot_group]
            of_pipeline[place] = next_slot[vertex.slot_group] if is_narrow else 0
            next_slot[vertex.slot_group] += widest if is_narrow else 0
        begins[vertex.vertex] = of_pipeline[place]
    return begins


def _pipelines(graph: JobGraph) -> dict[VertexId, VertexId]:
    """Returns, for each vertex, the first vertex of its pipeline. A pipeline is a connected component of the job
    graph.
    """
    first = {vertex.vertex: vertex.vertex for vertex in graph.vertices}
    for edge in graph.edges:
        one = first[edge.upstream]
        other = first[edge.downstream]
        if one != other:
            first = {vertex: one if of == other else of for vertex, of in first.items()}
    return first
