"""Chooses where the processes of a job run: `PoolOptions` of the driver, the slots of a job, and pure rules for
standbys (`standbys_kept`: how many, `next_bundle`: where).

Rules:

- A worker in a common slot takes the CPU of the slot, or its share of it. A worker in a slot of its own takes the whole
  bundle. A spare process is in a bundle of the common slots and takes nothing. Without a reservation Ray chooses nodes.
- A slot keeps its bundle if the bundle is on a node that is not avoided, because its other processes and local copies
  may be there. Else it gets a free slot of a bundle on such a node, of the bundle with the most free slots. So a job
  does not wait for Ray (15 s after the loss of a node) if its reservation has free slots on living nodes.
- A slot counts as free if it has no process of this job. Another job may have it. So a process that stands in takes no
  share of its processor by Ray's count, and never waits for one.
- The number of standbys is the configured one. "auto" is one for each free slot of the reservation, because each
  replaces a lost process, but not more than there are tasks and not more than `AUTO_MAX`. There is at least one.
- Standbys of "auto" begin later than configured ones: each takes a processor for seconds, and a job that ends earlier
  has lost nothing. Only tasks in common slots count. A followed task has a standby of its own, in addition.
- Standbys are spread over nodes first, then over bundles. On a node without one, or with as many as any other node,
  they are in bundles with tasks, where the local copies are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tidegate.actors.drivers.job_context import (
    AUTO_STANDBY_DELAY_MS,
    SLOT_REQUEST_TIMEOUT_MS,
    STANDBY_DELAY_MS,
    Standbys,
)
from tidegate.actors.graph.job_graph import JobGraph, vertex_labels
from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.slot_plan import WorkerId, slot_plan
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import VertexId
from tidegate.storage.process_id import ProcessId


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """The slots that are reserved for a job: `bundles[s]` is the bundle of `placement_group` that contains slot s, one
    of its CPUs.
    """

    placement_group: PlacementGroup
    bundles: tuple[int, ...]

    @property
    def slots(self) -> int:
        """Returns the number of slots."""
        return len(self.bundles)


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the processes of a job. Subtask i is in slot `first_slot + i`."""

    prefix: str
    namespace: str
    placement: SlotPlacement | None
    first_slot: int
    standbys: int
    open_store: OpenStore
    driver: ProcessId | None = None
    """The process that has submitted the job. All processes of the job end with it. None for a detached job."""
    slot_request_timeout_ms: int = SLOT_REQUEST_TIMEOUT_MS
    """Time limit, in ms, for an attempt to wait for slots."""
    followed: frozenset[TaskId] = frozenset()
    """Tasks that each have a standby with their state."""
    standby_delay_ms: int = STANDBY_DELAY_MS
    """Time in ms between a deployment and the start of the first standby."""
    own_slots: PlacementGroup | None = None
    """The bundles of tasks that are not in common slots, in the order of `SlotPlan.bundles`."""
    first_names: Mapping[WorkerId, str] = field(default_factory=dict)
    """Actor names of the first process of each worker, if the driver starts these processes (`start_workers`)."""


NOTHING = Resources(0.0)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a process: its bundle, and the resources that it uses.

    `own` is whether the process is alone in the bundle. `group` is None if nothing is reserved.
    """

    takes: Resources
    group: PlacementGroup | None = None
    index: int | None = None
    """Index of the bundle in that group."""
    own: bool = False

    @property
    def bundle(self) -> int | None:
        """Returns the bundle of a common slot. None for a slot of its own, where spare processes must not run."""
        return None if self.own else self.index

    def actor_options(self, elsewhere: str | None = None) -> dict[str, Any]:
        """Returns Ray's options for the actor. `elsewhere` is the preferred node if nothing is reserved."""
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
    """The slots of one job."""

    def __init__(self, graph: JobGraph, options: PoolOptions) -> None:
        self.plan = slot_plan(graph, vertex_labels(graph))
        self._common = options.placement
        self._first = options.first_slot
        self._own = options.own_slots
        assert self._own is not None or not self.plan.own, "slots of steps with resources are reserved at submission"

    def of(self, worker: WorkerId) -> Slot:
        """Returns the slot of a worker."""
        own = self.plan.own_bundle(worker)
        if own is not None:
            return Slot(self.plan.own[VertexId(worker.group)].resources, self._own, own, own=True)
        if self._common is None:
            return Slot(NOTHING)
        bundles = self._common.bundles
        bundle = bundles[(self._first + self.plan.slots[worker]) % len(bundles)]
        return Slot(Resources(self.plan.share), self._common.placement_group, bundle)

    def spare(self, bundle: int | None) -> Slot:
        """Returns the slot of a spare process in a bundle of the common slots."""
        return Slot(NOTHING, None if self._common is None else self._common.placement_group, bundle)

    @property
    def groups(self) -> list[tuple[PlacementGroup, Mapping[int, str]]]:
        """Returns the placement groups of the job. The result also has the purpose of each bundle that serves only one
        step.
        """
        found: list[tuple[PlacementGroup, Mapping[int, str]]] = []
        if self._common is not None:
            found.append((self._common.placement_group, {}))
        if self._own is not None:
            found.append((self._own, dict(enumerate(self.plan.labels))))
        return found

    @property
    def bundles(self) -> Sequence[int]:
        """Returns the bundles of the common slots, beginning with the first slot of the job."""
        if self._common is None:
            return ()
        return (*self._common.bundles[self._first :], *self._common.bundles[: self._first])


Nodes: TypeAlias = Mapping[int, str]
"""The known nodes of bundles."""
NOWHERE: Nodes = {}


def bundles_elsewhere(
    slots: Sequence[tuple[int, int]],
    bundles: Sequence[int],
    used: Mapping[int, int],
    nodes: Nodes,
    avoided: Container[str],
) -> dict[int, int]:
    """Returns the bundle to use for now for each of these slots. A slot that can start nowhere is missing.

    `slots` has number and bundle of each slot. `bundles` has the bundle of each slot of the reservation. `used` has,
    for each bundle, the number of slots with processes of this job.
    """
    reached = {bundle for bundle in bundles if nodes.get(bundle) and nodes[bundle] not in avoided}
    found = {slot: bundle for slot, bundle in slots if bundle in reached}
    free = Counter(bundle for bundle in bundles if bundle in reached)
    free.subtract({bundle: number for bundle, number in used.items() if bundle in reached})
    # A slot that keeps its bundle is not free, although its processes are gone.
    free.subtract(Counter(found.values()))
    for slot, _ in slots:
        best = max(free, key=lambda bundle: (free[bundle], -bundle), default=None)
        if slot not in found and best is not None and free[best] > 0:
            found[slot] = best
            free[best] -= 1
    return found


AUTO_MAX = 4


@dataclass(frozen=True, slots=True)
class Place:
    """The bundle of a process, and its node once it has started."""

    bundle: int
    node: str | None


def standbys_kept(wanted: Standbys, free_slots: int, tasks: int, followed: int = 0) -> int:
    """Returns the number of spare processes (standbys) that a job keeps.

    `free_slots`: slots of the reservation that no job has. `tasks`: number of tasks in common slots. `followed`: tasks
    that have a standby each, in addition.
    """
    if isinstance(wanted, int):
        return wanted
    return followed + max(1, min(free_slots, tasks, AUTO_MAX))


def standby_delay_ms(wanted: Standbys) -> int:
    """Returns the time in ms between a deployment and the start of the first spare process."""
    return AUTO_STANDBY_DELAY_MS if wanted == "auto" else STANDBY_DELAY_MS


def must_wait(common: int, own: int, spare: int, *, reserved: bool) -> bool:
    """Returns whether tasks without a process must wait, because a new process might start in a bundle on an avoided
    node.

    `common`, `own`: number of such tasks in common slots and in slots of their own, which are always reserved. `spare`:
    processes on other nodes that can take over at once. `reserved`: whether the common slots are reserved.
    """
    return own > 0 or (reserved and common > spare)


def best_follower(task: Place | None, standbys: Sequence[Place]) -> int:
    """Returns the index of the standby that should follow a task: one on another node if possible, else one in another
    bundle.

    The first of equal ones. If the node of the task is lost, a standby elsewhere already has the state.
    """
    return max(range(len(standbys)), key=lambda i: (_apart(task, standbys[i]), -i))


def _apart(task: Place | None, standby: Place) -> int:
    if task is None:
        return 0
    return 2 * (task.node != standby.node) + (task.bundle != standby.bundle)


def node_elsewhere(avoided: Container[str], busy: Sequence[str], own: str) -> str:
    """Returns the node for a process without a bundle while some nodes are avoided.

    `busy`: the node of each process that answers. The node with the fewest of them is chosen, or `own`, the node of the
    coordinator, if all others are avoided.
    """
    counts = Counter(node for node in busy if node not in avoided)
    return min(counts, key=lambda node: (counts[node], node), default=own)


def next_bundle(bundles: Sequence[int], tasks: Sequence[Place], standbys: Sequence[Place]) -> int:
    """Returns the bundle for one more spare process, given the places of the living processes.

    The first of equal ones in `bundles`, which may contain a bundle several times. A bundle without a started process
    counts as a node of its own.
    """
    nodes: dict[int, str | int] = {bundle: bundle for bundle in bundles}
    nodes |= {place.bundle: place.node for place in (*tasks, *standbys) if place.node is not None}
    on_node = Counter(nodes[place.bundle] for place in standbys)
    in_bundle = Counter(place.bundle for place in standbys)
    with_tasks = {place.bundle for place in tasks}
    return min(bundles, key=lambda bundle: (on_node[nodes[bundle]], in_bundle[bundle], bundle not in with_tasks))
