"""`JobSlots`: where each worker of a job goes: the plan (`slot_plan.py`), in the placement groups that it was given.

A worker in a common slot takes the slot's CPU, or its share of it; one in a slot of its own takes the whole bundle. A
spare process goes into a bundle of the common slots, and takes nothing. Where nothing is reserved Ray chooses the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.slot_plan import WorkerId, slot_plan
from tidegate.actors.graph.vertex_labels import vertex_labels
from tidegate.actors.ray.fleet_options import FleetOptions
from tidegate.storage.ids import VertexId

NOTHING = Resources(0.0)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a process goes, and what it takes. `own`: nobody else is in it. Without `group` nothing is reserved."""

    takes: Resources
    group: PlacementGroup | None = None
    index: int | None = None
    """The bundle in that group."""
    own: bool = False

    @property
    def bundle(self) -> int | None:
        """That of the common slots; None for a slot of its own: spare processes have no business there."""
        return None if self.own else self.index

    def actor_options(self, elsewhere: str | None = None) -> dict[str, Any]:
        """What Ray is told of a process. `elsewhere`: the node for one that belongs in no bundle."""
        takes = self.takes
        options: dict[str, Any] = {"num_cpus": takes.cpus}
        if takes.gpus:
            options["num_gpus"] = takes.gpus
        if takes.custom:
            options["resources"] = dict(takes.custom)
        if self.group is not None:
            strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index or 0)
            options["scheduling_strategy"] = strategy
        elif elsewhere is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(elsewhere, soft=True)
        return options


class JobSlots:
    """Those of one job."""

    def __init__(self, graph: JobGraph, options: FleetOptions) -> None:
        self.plan = slot_plan(graph, vertex_labels(graph))
        self._common = options.placement
        self._first = options.first_slot
        self._own = options.own_slots
        assert self._own is not None or not self.plan.own, "slots of steps with resources are reserved at submission"

    def of(self, worker: WorkerId) -> Slot:
        """The slot of a worker."""
        own = self.plan.own_bundle(worker)
        if own is not None:
            return Slot(self.plan.own[VertexId(worker.group)].resources, self._own, own, own=True)
        if self._common is None:
            return Slot(NOTHING)
        bundles = self._common.bundles
        bundle = bundles[(self._first + self.plan.slots[worker]) % len(bundles)]
        return Slot(Resources(self.plan.share), self._common.placement_group, bundle)

    def spare(self, bundle: int | None) -> Slot:
        """The slot of a spare process, in a bundle of the common slots."""
        return Slot(NOTHING, None if self._common is None else self._common.placement_group, bundle)

    @property
    def groups(self) -> list[tuple[PlacementGroup, Mapping[int, str]]]:
        """All that is reserved for the job, and what bundles are for that are not for all of it."""
        found: list[tuple[PlacementGroup, Mapping[int, str]]] = []
        if self._common is not None:
            found.append((self._common.placement_group, {}))
        if self._own is not None:
            found.append((self._own, dict(enumerate(self.plan.labels))))
        return found

    @property
    def bundles(self) -> Sequence[int]:
        """The bundles of the common slots; those of the job come first."""
        if self._common is None:
            return ()
        return (*self._common.bundles[self._first :], *self._common.bundles[: self._first])
