"""Chooses where the processes of a job run: `PoolOptions`, the slots of a job, and rules for spare processes
(standbys).

The rules are pure functions: `standbys_kept` returns how many standbys a job keeps, `next_bundle` where they run.
Rules:

- A worker in a common slot uses the CPU of the slot, or its share of it. A worker with its own slot uses the whole
  bundle. A standby is in a bundle of the common slots and reserves nothing. Without a reservation Ray chooses nodes.
- A slot keeps its bundle if the bundle is on a node that is not avoided, because its other processes and local copies
  may be there. Otherwise it gets a free slot of a bundle on such a node, of the bundle with the most free slots. So a
  job does not wait for Ray (15 s after the loss of a node) if its reservation has free slots on living nodes.
- A slot counts as free if it has no process of this job. Another job may use it. So a process in such a slot reserves
  no CPU in Ray, and never waits for one.
- The number of standbys is the configured one. "auto" is one for each free slot of the reservation, because each
  replaces a lost process, but not more than there are tasks and not more than `AUTO_MAX`. There is at least one.
- Standbys of "auto" start later than configured ones: each occupies a processor for seconds, and a job that ends
  earlier does not need them. Only tasks in common slots count. A followed task has a separate standby in addition.
- Standbys are spread over nodes first, then over bundles. On a node without a standby, or with as many as any other
  node, they are in bundles with tasks, where the local copies are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

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
    """The common slots that are reserved for a job, one CPU each.

    `bundles[s]` is the index of the bundle of `placement_group` that contains slot s.
    """

    placement_group: PlacementGroup
    bundles: tuple[int, ...]

    @classmethod
    def of_session(cls, session: SlottedSession) -> SlotPlacement:
        """Returns the slots of a session of Ray and Spark."""
        return cls(session.placement_group, tuple(session.bundle_of_slot(slot) for slot in range(session.slots)))

    @property
    def slots(self) -> int:
        """Returns the number of common slots that are reserved."""
        return len(self.bundles)


class SlottedSession(Protocol):
    """A session that has reserved a placement group with slots for tasks."""

    @property
    def placement_group(self) -> PlacementGroup:
        """Returns the reserved placement group."""
        ...

    @property
    def slots(self) -> int:
        """Returns the number of slots."""
        ...

    def bundle_of_slot(self, slot: int) -> int:
        """Returns the index of the bundle that contains a slot."""
        ...


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the processes of a job. The job's common slots begin with slot `first_slot` of the reservation."""

    prefix: str
    namespace: str
    placement: SlotPlacement | None
    first_slot: int
    standbys: int
    open_store: OpenStore
    driver: ProcessId | None = None
    """The process that has submitted the job, with which all processes of the job end. None for a detached job."""
    slot_request_timeout_ms: int = SLOT_REQUEST_TIMEOUT_MS
    """Time in ms for which an attempt waits for slots before it fails."""
    followed: frozenset[TaskId] = frozenset()
    """Tasks that each have a standby which copies their state."""
    standby_delay_ms: int = STANDBY_DELAY_MS
    """Time in ms between a deployment and the start of the first standby."""
    own_slots: PlacementGroup | None = None
    """The placement group of steps with resources. Its bundles are in the order of `SlotPlan.bundles`. None
    without such steps.
    """
    first_names: Mapping[WorkerId, str] = field(default_factory=dict)
    """Names of Ray actors for the first process of each worker, if the driver starts these processes
    (`start_workers`).
    """


NOTHING = Resources(0.0)


@dataclass(frozen=True, slots=True)
class Slot:
    """The bundle in which a process runs, and the resources that the process reserves there.

    `own`: the process is alone in the bundle. `group` is the placement group, or None if nothing is reserved.
    """

    takes: Resources
    group: PlacementGroup | None = None
    index: int | None = None
    """Index of the bundle in `group`."""
    own: bool = False

    @property
    def bundle(self) -> int | None:
        """Returns the index of the bundle of a common slot, or None for a worker's own slot, in which no standby
        may run.
        """
        return None if self.own else self.index

    def actor_options(self, elsewhere: str | None = None) -> dict[str, Any]:
        """Returns Ray's options for an actor in this slot. `elsewhere` is the preferred node if nothing is
        reserved.
        """
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
    """The slots of one job, common slots and slots of steps with resources."""

    def __init__(self, graph: JobGraph, options: PoolOptions) -> None:
        self.plan = slot_plan(graph, vertex_labels(graph))
        self._common = options.placement
        self._first = options.first_slot
        self._own = options.own_slots
        assert self._own is not None or not self.plan.own, "slots of steps with resources are reserved at submission"

    def of(self, worker: WorkerId) -> Slot:
        """Returns the slot in which the process of a worker runs."""
        own = self.plan.own_bundle(worker)
        if own is not None:
            return Slot(self.plan.own[VertexId(worker.group)].resources, self._own, own, own=True)
        if self._common is None:
            return Slot(NOTHING)
        bundles = self._common.bundles
        bundle = bundles[(self._first + self.plan.slots[worker]) % len(bundles)]
        return Slot(Resources(self.plan.share), self._common.placement_group, bundle)

    def spare(self, bundle: int | None) -> Slot:
        """Returns the slot for a standby: in this bundle of the common slots, or anywhere if `bundle` is None."""
        return Slot(NOTHING, None if self._common is None else self._common.placement_group, bundle)

    @property
    def groups(self) -> list[tuple[PlacementGroup, Mapping[int, str]]]:
        """Returns the placement groups of the job. For each, the result has the name of the step that uses each
        bundle, if any.
        """
        found: list[tuple[PlacementGroup, Mapping[int, str]]] = []
        if self._common is not None:
            found.append((self._common.placement_group, {}))
        if self._own is not None:
            found.append((self._own, dict(enumerate(self.plan.labels))))
        return found

    @property
    def bundles(self) -> Sequence[int]:
        """Returns the bundle index of each common slot of the reservation, beginning with the first slot of the
        job.
        """
        if self._common is None:
            return ()
        return (*self._common.bundles[self._first :], *self._common.bundles[: self._first])


Nodes: TypeAlias = Mapping[int, str]
"""The node id of each bundle index, as far as known."""
NOWHERE: Nodes = {}


def bundles_elsewhere(
    slots: Sequence[tuple[int, int]],
    bundles: Sequence[int],
    used: Mapping[int, int],
    nodes: Nodes,
    avoided: Container[str],
) -> dict[int, int]:
    """Returns the bundle to use now for each of these slots, by slot. Slots for which no bundle is free are missing.

    `slots` has pairs of a slot and its normal bundle. `bundles` has the bundle of each slot of the reservation. `used`
    has, for each bundle, the number of slots with processes of this job.
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
    """The location of a process: the index of its bundle, and its node, or None until it has started."""

    bundle: int
    node: str | None


def standbys_kept(wanted: Standbys, free_slots: int, tasks: int, followed: int = 0) -> int:
    """Returns the number of spare processes (standbys) that a job keeps.

    `free_slots`: slots of the reservation that no job uses. `tasks`: number of workers in common slots. `followed`:
    number of workers whose state is copied by a standby of their own.
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

    `common`, `own`: number of such tasks in common slots, and in their own slots, which are always reserved. `spare`:
    standbys on other nodes that can take over at once. `reserved`: whether the common slots are reserved.
    """
    return own > 0 or (reserved and common > spare)


def best_follower(task: Place | None, standbys: Sequence[Place]) -> int:
    """Returns the index of the standby that should follow a task: on another node if possible, else in another bundle.

    If the node of the task is lost, a standby on another node already has its state. The first of equal standbys is
    returned.
    """
    return max(range(len(standbys)), key=lambda i: (_apart(task, standbys[i]), -i))


def _apart(task: Place | None, standby: Place) -> int:
    if task is None:
        return 0
    return 2 * (task.node != standby.node) + (task.bundle != standby.bundle)


def node_elsewhere(avoided: Container[str], busy: Sequence[str], own: str) -> str:
    """Returns the node for a new process without a bundle, while some nodes are avoided.

    `busy`: the node of each process that answers. The node with the fewest processes is returned, or the coordinator's
    node `own` if all others are avoided.
    """
    counts = Counter(node for node in busy if node not in avoided)
    return min(counts, key=lambda node: (counts[node], node), default=own)


def next_bundle(bundles: Sequence[int], tasks: Sequence[Place], standbys: Sequence[Place]) -> int:
    """Returns the bundle index for one more standby, given the places of the living processes.

    `bundles` may contain a bundle several times, and the first of equally good bundles is returned. A bundle without a
    started process counts as a separate node.
    """
    nodes: dict[int, str | int] = {bundle: bundle for bundle in bundles}
    nodes |= {place.bundle: place.node for place in (*tasks, *standbys) if place.node is not None}
    on_node = Counter(nodes[place.bundle] for place in standbys)
    in_bundle = Counter(place.bundle for place in standbys)
    with_tasks = {place.bundle for place in tasks}
    return min(bundles, key=lambda bundle: (on_node[nodes[bundle]], in_bundle[bundle], bundle not in with_tasks))
