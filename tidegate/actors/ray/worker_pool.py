"""`WorkerPool`: the worker processes of a job on Ray, with their slots and names, and the spare processes (standbys).

Rules:

- A living process gets the next attempt of its subtasks. A dead process is replaced: by a standby that has started, if
  possible of the same bundle, else by a standby that is starting, else by a new process in the bundle of the worker's
  slot.
- A standby has loaded its imports and kernels. It reserves no resources, keeps its name `job/standby#k` when it
  replaces a worker (`tasks()` of a job shows what runs where), and is replaced in the background.
- Names are for people: `job/slot 1 of 2#0`, where `#k` counts the processes that a worker has had under one
  coordinator. Ray renames no actor, and reads its `repr` only once.
- A started standby may follow the subtasks of a worker: it is notified of each checkpoint, copies their state, and
  replaces that worker (`warm_standby.py`). The coordinator's decisions do not depend on it.
- Nodes that may be lost are avoided (`lost_nodes.py`). Without a reservation processes start on other nodes, else in
  free slots of the reservation on other nodes (`placement.py`). The same holds for a process whose bundle has lost its
  node. If a standby is lost with its node, that does not count as a failure of standbys.
- An evicted process counts as dead at once. A process in doubt gets no subtasks (`heartbeats.py`), nor does a process
  whose connection broke, until it answers (`lost_nodes.py`).
- The driver starts the first process of each worker at submission, while the coordinator is still importing its modules
  (`start_workers`). Both create it under the same name, so it exists once. The job also works without the driver's
  part.
- All actors are detached: they outlive the coordinator's process, and a new coordinator finds them (`discovery.py`). A
  process ends by itself when the coordinator is gone for good (`coordinator_liveness.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import ray
from ray.exceptions import ActorAlreadyExistsError, RayError

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.slot_plan import SlotPlan, WorkerId
from tidegate.actors.ray.actor_calls import find_actor
from tidegate.actors.ray.control_channel import ControlChannel
from tidegate.actors.ray.exit_probe import ExitProbe, death_of, last_lines, memory_death, went_with_its_node
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.placement import (
    NOWHERE,
    JobSlots,
    Nodes,
    Place,
    PoolOptions,
    Slot,
    best_follower,
    bundles_elsewhere,
    must_wait,
    next_bundle,
    node_elsewhere,
)
from tidegate.actors.ray.task_deployment import Handle, Peer, ProcessStatus
from tidegate.actors.ray.worker_actor import WorkerProcess
from tidegate.protocol.failures import bounded_text, error_text
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import TidegateError
from tidegate.storage.ids import Generation

log = logging.getLogger(__name__)

PROCESSES_A_WORKER_MAX = 10_000
STANDBY_FAILURES_MAX = 3

Dead = Callable[[BaseException], object]
Again = Callable[[], object]

GROUPS = {"data": 1, "control": 1, "live": 1, "pulse": 1}


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process of a lost coordinator that was found by its name, and its status."""

    name: str
    handle: Handle
    held: ProcessStatus


@cache
def worker_actor() -> Any:
    """Returns the Ray actor class of the worker processes."""
    # Ray's type hints lack concurrency groups.
    remote: Any = ray.remote
    return remote(max_restarts=0, max_task_retries=0, concurrency_groups=GROUPS)(WorkerProcess)


def first_names(prefix: str, plan: SlotPlan, taken: Container[str]) -> dict[WorkerId, str]:
    """Returns an unused actor name for the first process of each worker. `taken`: names of existing actors."""
    return {
        worker: next(full for k in range(PROCESSES_A_WORKER_MAX) if (full := f"{prefix}/{name}#{k}") not in taken)
        for worker, name in plan.names.items()
    }


def start_workers(graph: JobGraph, context: ray.ObjectRef[Any], coordinator: Handle, options: PoolOptions) -> None:
    """Starts the first process of each worker that has a name in `options.first_names`. Does not wait for the
    processes.

    The coordinator creates its workers when it has imported its modules and replayed its log. By then these processes
    have started. On two cores the first row arrives a third earlier.
    """
    slots = JobSlots(graph, options)
    for worker, name in options.first_names.items():
        _start(name, slots.of(worker), slots.plan.shown(worker), context, coordinator, options)


def _start(
    name: str,
    slot: Slot,
    shown_as: str,
    context: ray.ObjectRef[Any],
    coordinator: Handle,
    options: PoolOptions,
    spare: bool = False,
    elsewhere: str | None = None,
    exists: bool = True,
) -> Handle:
    """Starts a worker process in a slot, or returns the existing actor of this name.

    Raises ActorAlreadyExistsError for an existing actor unless `exists`. `elsewhere`: the preferred node, or None.
    """
    actor = worker_actor().options(
        name=name,
        namespace=options.namespace,
        lifetime="detached",
        get_if_exists=exists,
        **slot.actor_options(elsewhere),
    )
    started: Handle = actor.remote(context, coordinator, options.open_store, spare, slot.bundle, shown_as)
    return started


@dataclass(slots=True)
class WorkerPool:
    """The processes of one job. All methods run on the coordinator's mailbox, and `post` runs callbacks there."""

    graph: JobGraph
    context: ray.ObjectRef[Any]
    coordinator: Handle
    options: PoolOptions
    post: Callable[[Callable[[], object]], None]
    node_id: str = ""
    """Node of the coordinator's process."""
    broke: Callable[[WorkerHandle, BaseException | None, Dead, Again], bool] = lambda *_: False
    """Callback that returns whether only the connection to a process broke, and then finds out whether the process
    lives.

    See `LostNodes.broke`.
    """
    identified: Callable[[WorkerHandle], object] = lambda _: None
    """Callback for each process that has started and reported its `info`."""
    died: Callable[[WorkerHandle, BaseException | None], object] = lambda *_: None
    """Callback for each process that has died, with the error that Ray raised, or None."""
    members: dict[WorkerId, WorkerHandle] = field(default_factory=dict)
    standbys: list[WorkerHandle] = field(default_factory=list)
    """Spare processes, also such that have not started yet."""
    _counts: dict[str, int] = field(default_factory=dict)
    _standby_failures: int = 0
    _newest: dict[TaskId, RestorePoint] = field(default_factory=dict)
    """The newest completed checkpoint of each task that a standby follows."""
    _nodes: Nodes = field(default_factory=dict)
    """The node of each bundle at the last deployment. Empty if unknown."""
    _closed: bool = False
    slots: JobSlots = field(init=False)
    """The slots of the job."""
    _first: dict[WorkerId, str] = field(init=False)
    """Names of processes that the driver may have started and that this pool has not used yet."""

    def __post_init__(self) -> None:
        self.slots = JobSlots(self.graph, self.options)
        self._first = dict(self.options.first_names)

    @property
    def closed(self) -> bool:
        """True once all processes were ended at the end of the job."""
        return self._closed

    @property
    def ready_standbys(self) -> int:
        """Returns the number of standbys that have started. May be read from any thread."""
        return sum(member.info is not None and member.usable for member in list(self.standbys))

    @property
    def starting_standbys(self) -> int:
        """Returns the number of standbys that have not started yet. May be read from any thread."""
        return sum(member.info is None and member.usable for member in list(self.standbys))

    def started(self) -> list[WorkerHandle]:
        """Returns the worker processes that have started and are neither dead nor evicted."""
        return [m for m in (*self.members.values(), *self.standbys) if m.usable and m.info is not None]

    def has(self, name: str, actor_id: str) -> bool:
        """Returns whether the process with this actor name and actor id belongs to the pool and is neither dead nor
        evicted. May be called from any thread.
        """
        if name in list(self._first.values()):
            return True
        # A standby that replaces a worker is in neither list for a moment. Its process sends two requests.
        spare = list(self.standbys)
        members = [m for m in (*spare, *list(self.members.values())) if m.usable]
        return any(m.name == name if m.info is None else m.info.actor_id == actor_id for m in members)

    def is_kept(self, member: WorkerHandle) -> bool:
        """Returns whether the pool still uses this process: it runs a worker, or is a standby."""
        return member in self.standbys or member in self.members.values()

    def neighbour_of(self, member: WorkerHandle) -> WorkerHandle | None:
        """Returns another process on the same node, preferably one that answers, or None."""
        assert member.info is not None
        neighbours = [m for m in self.started() if m is not member and m.is_on((member.info.node_id,))]
        return min(neighbours, key=lambda m: m.doubted, default=None)

    def worker_of(self, task: TaskId) -> WorkerId:
        """Returns the worker (slot) that runs a subtask."""
        return self.slots.plan.workers[task]

    def shown_as(self, task: TaskId) -> str:
        """Returns the name of the worker of a subtask, with the steps that it runs."""
        return self.slots.plan.shown(self.worker_of(task))

    def _workers(self, tasks: Iterable[TaskId]) -> list[WorkerId]:
        """Returns the workers that run these subtasks, in order, without duplicates."""
        return list(dict.fromkeys(self.worker_of(task) for task in tasks))

    def lacks(self, tasks: Collection[TaskId], avoided: Collection[str], nodes: Nodes = NOWHERE) -> bool:
        """Returns whether these tasks need new processes that would have to start in bundles on avoided nodes."""
        lost = [worker for worker in self._workers(tasks) if self.is_lost(worker, avoided)]
        common = [worker for worker in lost if not self.slots.of(worker).own]
        own = len(lost) - len(common)
        if len(self._elsewhere(common, avoided, nodes)) == len({self.slots.plan.slots[worker] for worker in common}):
            common = []
        spare = sum(m.fit and m.info is not None and not m.is_on(avoided) for m in self.standbys)
        reserved = self.options.placement is not None
        return bool(avoided) and must_wait(len(common), own, spare, reserved=reserved)

    def starts_in_bundles(self, tasks: Collection[TaskId], avoided: Collection[str]) -> bool:
        """Returns whether these tasks need more processes in common slots than there are ready standbys."""
        workers = self._workers(tasks)
        common = [w for w in workers if not self.slots.of(w).own and not self._has_started(w, avoided)]
        ready = sum(m.fit and m.info is not None and not m.is_on(avoided) for m in self.standbys)
        return self.options.placement is not None and len(common) > ready

    def staff(
        self, tasks: Collection[TaskId], avoided: Collection[str] = (), nodes: Nodes = NOWHERE
    ) -> dict[TaskId, WorkerHandle]:
        """Returns a living process for each of these tasks, on a node that is not avoided. Starts missing processes.

        `nodes`: the node of each bundle, empty if unknown. A process that waits in a bundle without a node is replaced
        if the reservation has a free slot.
        """
        self._nodes = nodes
        self._end_homeless_standbys()
        workers = self._workers(tasks)
        lost = [worker for worker in workers if self.is_lost(worker, avoided)]
        waiting = [worker for worker in workers if worker not in lost and self._is_homeless(self.members[worker])]
        elsewhere = self._elsewhere([*lost, *waiting], avoided, nodes)
        for worker in waiting:
            if self.slots.plan.slots[worker] in elsewhere:
                self.kill(self.members[worker])
                lost.append(worker)
        for worker in lost:
            slot = self.slots.of(worker)
            bundle = slot.bundle if slot.own else elsewhere.get(self.slots.plan.slots[worker], slot.bundle)
            standby = None if slot.own else self._take_standby(worker, bundle, avoided)
            there = slot if bundle == slot.bundle else self.slots.spare(bundle)
            name, shown_as = self.slots.plan.names[worker], self.slots.plan.shown(worker)
            first = None if standby or there != slot or avoided else self._take_first(worker, slot, shown_as)
            self.members[worker] = standby or first or self._create(name, there, shown_as, avoided=avoided)
        self._end_unused()
        return {task: self.members[self.worker_of(task)] for task in tasks}

    def _has_started(self, worker: WorkerId, avoided: Container[str]) -> bool:
        return not self.is_lost(worker, avoided) and self.members[worker].info is not None

    def _is_homeless(self, member: WorkerHandle) -> bool:
        """Returns whether a process cannot start, because its bundle has no node."""
        in_bundle = member.info is None and member.bundle is not None
        return in_bundle and bool(self._nodes) and member.bundle not in self._nodes

    def _end_homeless_standbys(self) -> None:
        """Ends standbys that cannot start, because no other standby is started while one is starting."""
        for member in [m for m in self.standbys if self._is_homeless(m)]:
            self.standbys.remove(member)
            self.kill(member)

    def is_lost(self, worker: WorkerId, avoided: Container[str]) -> bool:
        """Returns whether a worker has no usable process, or has one on an avoided node."""
        member = self.members.get(worker)
        return member is None or not member.fit or member.is_on(avoided)

    def _elsewhere(self, lost: Iterable[WorkerId], avoided: Collection[str], nodes: Nodes) -> dict[int, int]:
        """Returns the bundle to use now for each common slot of these workers, by slot. Slots without a free
        bundle are missing.
        """
        if not nodes:
            return {}
        slot_of = self.slots.plan.slots
        slots = {slot_of[w]: bundle for w in lost if (bundle := self.slots.of(w).bundle) is not None}
        living = {w: m for w, m in self.members.items() if w in slot_of and not self.is_lost(w, avoided)}
        there = {(slot_of[w], m.bundle) for w, m in living.items()}
        used = Counter(bundle for _, bundle in there if bundle is not None)
        return bundles_elsewhere(sorted(slots.items()), self.slots.bundles, used, nodes, avoided)

    def inherit(
        self, workers: Mapping[WorkerId, FoundProcess], standbys: Iterable[FoundProcess]
    ) -> dict[TaskId, WorkerHandle]:
        """Adopts processes of a lost coordinator. Returns the process of each subtask that was deployed to one of
        them.
        """
        # The search has found the processes that have started. Late ones end when they contact this coordinator.
        self._first.clear()
        members: dict[TaskId, WorkerHandle] = {}
        for worker, found in workers.items():
            self.members[worker] = self._inherited(found)
            members |= dict.fromkeys(found.held.tasks, self.members[worker])
        self.standbys += [self._inherited(found) for found in standbys]
        return members

    def left_behind(self, found: FoundProcess) -> WorkerHandle:
        """Returns a handle of a lost coordinator's process that this job cannot use. The caller evicts the process."""
        return self._inherited(found)

    def _inherited(self, found: FoundProcess) -> WorkerHandle:
        member = self._member(found.name, found.handle, found.held.bundle)
        self._located(member, found.held.info)
        follows = () if found.held.tasks else found.held.follows
        member.follows = next((self.worker_of(task) for task in follows), None)
        return member

    def refill(self) -> None:
        """Starts a standby if one is missing, and none is starting.

        Each standby occupies a processor for seconds while it starts, and several at once would slow down the tasks.
        """
        if self._closed or self._standby_failures >= STANDBY_FAILURES_MAX or self.starting_standbys:
            return
        if len(self.standbys) < self.options.standbys:
            self.standbys.append(self._create("standby", self.slots.spare(self._next_bundle()), "standby", spare=True))

    def completed(self, task: TaskId, restore: RestorePoint) -> None:
        """Makes the standby that follows a task's worker copy the state of a completed checkpoint."""
        if task not in self.options.followed:
            return
        self._newest[task], worker = restore, self.worker_of(task)
        standby = next((m for m in self.standbys if m.usable and m.follows == worker), None)
        if standby is None:
            self._have_followed(worker)
        else:
            standby.handle.follow.remote(task, restore)

    def _have_followed(self, worker: WorkerId) -> None:
        """Makes a started standby copy the state of this worker, from the newest checkpoint.

        Uses a standby that copies no other worker's state.
        """
        free = [m for m in self.standbys if m.usable and m.info is not None and m.follows is None]
        if not free:
            return
        primary = self.members.get(worker)
        standby = free[best_follower(None if primary is None else place_of(primary), [place_of(m) for m in free])]
        standby.follows = worker
        for task, restore in self._newest.items():
            if self.worker_of(task) == worker:
                standby.handle.follow.remote(task, restore)

    def kill(self, member: WorkerHandle) -> None:
        """Kills a process at once."""
        member.dead = True
        ray.kill(member.handle, no_restart=True)

    def dismiss(self, generation: Generation) -> None:
        """Ends all processes when this coordinator stops, except processes that obey a newer coordinator."""
        self._closed = True
        self._first.clear()
        for member in (*self.members.values(), *self.standbys):
            if not member.dead:
                member.handle.leave.remote(generation)

    def close(self) -> list[Future[None]]:
        """Kills all processes after the end of the job. Returns futures that are done when the processes have
        ended.
        """
        self._closed = True
        self._end_unused()
        members = [m for m in (*self.members.values(), *self.standbys) if not m.dead]
        for member in members:
            self.kill(member)
        self.standbys.clear()
        return [member.gone for member in members]

    def _take_first(self, worker: WorkerId, slot: Slot, shown_as: str) -> WorkerHandle | None:
        """Returns the process that the driver has started for a worker, or None."""
        name = self._first.pop(worker, None)
        if name is None:
            return None
        base, _, number = name.rpartition("#")
        self._counts[base] = int(number) + 1
        handle = _start(name, slot, shown_as, self.context, self.coordinator, self.options)
        return self._new_member(name, handle, slot)

    def _end_unused(self) -> None:
        """Kills the processes that the driver has started and that this pool does not use."""
        unused, self._first = [*self._first.values()], {}
        for name in unused:
            if (handle := find_actor(name, self.options.namespace)) is not None:
                ray.kill(handle, no_restart=True)

    def _create(
        self, name: str, slot: Slot, shown_as: str, spare: bool = False, avoided: Collection[str] = ()
    ) -> WorkerHandle:
        elsewhere = None
        if avoided:
            busy = [m.info.node_id for m in self.started() if m.info is not None]
            elsewhere = node_elsewhere(avoided, busy, self.node_id)
        full_name, handle = self._create_named(f"{self.options.prefix}/{name}", slot, shown_as, spare, elsewhere)
        return self._new_member(full_name, handle, slot)

    def _new_member(self, name: str, handle: Handle, slot: Slot) -> WorkerHandle:
        member = self._member(name, handle, slot.bundle)
        self.identify(member)
        return member

    def identify(self, member: WorkerHandle) -> None:
        """Requests the identity (`info`) of a process. The process answers once it has started."""
        member.handle.identify.remote().future().add_done_callback(partial(self._has_answered, member))

    def _has_answered(self, member: WorkerHandle, future: Future[ProcessInfo]) -> None:
        # `live` reports the end of a process.
        if not self.broke(member, future.exception(), lambda _: None, partial(self.identify, member)):
            self.post(lambda: self.answered(member, future))

    def _member(self, name: str, handle: Handle, bundle: int | None) -> WorkerHandle:
        member = WorkerHandle(name, handle, bundle, Future())
        self._watch_life(member)
        return member

    def _watch_life(self, member: WorkerHandle) -> None:
        member.gone = member.handle.live.remote().future()
        member.gone.add_done_callback(lambda future: self._gone(member, future.exception()))

    def _gone(self, member: WorkerHandle, error: BaseException | None) -> None:
        if not self.broke(member, error, partial(self.lost, member), partial(self._watch_life, member)):
            self.post(lambda: self.lost(member, error))

    def _create_named(
        self, name: str, slot: Slot, shown_as: str, spare: bool, elsewhere: str | None
    ) -> tuple[str, Handle]:
        context, coordinator, options = self.context, self.coordinator, self.options
        first = self._counts.get(name, 0)
        for number in range(first, first + PROCESSES_A_WORKER_MAX):
            self._counts[name] = number + 1
            full_name = f"{name}#{number}"
            try:
                handle = _start(
                    full_name, slot, shown_as, context, coordinator, options, spare, elsewhere, exists=False
                )
                return full_name, handle
            except ActorAlreadyExistsError:
                # A predecessor of this coordinator has used the number.
                continue
        raise TidegateError(
            f"no free actor name {name}#k: {PROCESSES_A_WORKER_MAX} actors have this name; end old jobs"
        )

    def _take_standby(self, worker: WorkerId, bundle: int | None, avoided: Container[str]) -> WorkerHandle | None:
        """Removes and returns the best standby for a worker, or None.

        A standby that copies the state of this worker is best. Otherwise prefers, in this order, a started standby, a
        standby that copies no other state, and a standby in the same bundle.
        """
        alive = [m for m in self.standbys if m.fit and not m.is_on(avoided)]
        if not alive:
            return None
        best = max(
            alive, key=lambda m: (m.follows == worker, m.info is not None, m.follows is None, m.bundle == bundle)
        )
        best.follows = None
        self.standbys.remove(best)
        return best

    def answered(self, member: WorkerHandle, future: Future[ProcessInfo]) -> None:
        """Handles the answer of a process to `identify`. The process has started, unless the call has failed."""
        if future.exception() is None:
            self._located(member, future.result())
            if member in self.standbys:
                self._standby_failures = 0
                for worker in self._workers(self._newest):
                    if all(m.follows != worker for m in self.standbys):
                        self._have_followed(worker)
                self.refill()

    def _located(self, member: WorkerHandle, info: ProcessInfo) -> None:
        member.info = info
        if info.node_id == self.node_id and not member.dead:
            member.exit_probe = ExitProbe(info.pid)
        self.identified(member)

    def lost(self, member: WorkerHandle, error: BaseException | None) -> None:
        """Handles the death of a process, and replaces a standby. `error` is what Ray has raised, or None."""
        member.dead = True
        # `died` may request at once how the process has ended, so `forget` runs later.
        self.died(member, error)
        self.post(member.forget)
        if member in self.standbys:
            self.standbys.remove(member)
            self._standby_failures += not went_with_its_node(error)
            log.warning("a standby died: %s", "" if error is None else reason_of(member, error))
            if self._standby_failures >= STANDBY_FAILURES_MAX:
                log.warning("standbys do not stay alive: no more are started")
            self.refill()

    def _next_bundle(self) -> int | None:
        """Returns the bundle index for the next standby, or None without common slots."""
        bundles = [bundle for bundle in self.slots.bundles if bundle in self._nodes] or self.slots.bundles
        return next_bundle(bundles, places_of(self.members.values()), places_of(self.standbys)) if bundles else None


END_WAIT_MS = 200
"""Time in ms to wait until the end of a process is visible after its connections broke."""


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One process of the pool: its Ray actor and what the coordinator has found out about it."""

    name: str
    handle: Handle
    bundle: int | None
    """Index of the bundle of the common slots in which the process runs. None if nothing is reserved, or in its
    own slot.
    """
    gone: Future[None]
    """Future that fails with Ray's error when the process has died."""
    info: ProcessInfo | None = None
    """The process's pid, node and addresses. None until it has started."""
    answered_at_ms: int | None = None
    """Time of the process's last answer to a heartbeat, in ms since the epoch. None before the first answer."""
    dead: bool = False
    exit_probe: ExitProbe | None = None
    """Reads the exit code of the process. None unless it runs on the coordinator's node."""
    evicted: bool = False
    """True if the process was evicted: it gets no more tasks, and is killed once the log has recorded that
    (`Evictions`).
    """
    doubted: bool = False
    """True if the process has not answered for too long, and a last request is pending. It gets no task
    meanwhile.
    """
    cut_off: bool = False
    """True if a call to the process broke, and it is unknown whether it lives (`lost_nodes.py`). It gets no task
    meanwhile.
    """
    follows: WorkerId | None = None
    """The worker whose state this standby copies, or None."""
    acting: TaskId | None = None
    """The subtask that was active at the last answer, or None."""
    channel: ControlChannel = field(init=False)
    """The channel for events of the coordinator to the process."""

    def __post_init__(self) -> None:
        self.channel = ControlChannel(self.handle, {})

    @property
    def usable(self) -> bool:
        """Returns whether the process is neither dead nor evicted, so that it receives events."""
        return not self.dead and not self.evicted

    @property
    def fit(self) -> bool:
        """Returns whether the process may get tasks: it is usable and not in doubt."""
        return self.usable and not self.doubted and not self.cut_off

    @property
    def process_id(self) -> str:
        """Returns Ray's unique id of the actor, or its name until the process has started."""
        return self.name if self.info is None else self.info.actor_id or self.name

    def as_peer(self) -> Peer:
        """Returns the actor and addresses of the process for its peers. The process must have started."""
        assert self.info is not None
        return Peer(self.handle, self.process_id, self.info.node_id, self.info.address)

    def is_on(self, nodes: Container[str]) -> bool:
        """Returns whether the process runs on one of these nodes. False until it has started."""
        return self.info is not None and self.info.node_id in nodes

    def forget(self) -> None:
        """Closes the exit probe of the process, because the process has ended."""
        if self.exit_probe is not None:
            self.exit_probe.close()


def places_of(members: Iterable[WorkerHandle]) -> list[Place]:
    """Returns the bundle and node of each usable process that is in a bundle of the common slots."""
    return [place_of(m) for m in members if m.usable and m.bundle is not None]


def place_of(member: WorkerHandle) -> Place:
    """Returns the bundle and node of a process. The bundle is -1 if the process is in no common slot."""
    return Place(-1 if member.bundle is None else member.bundle, None if member.info is None else member.info.node_id)


def reason_of(member: WorkerHandle, error: BaseException) -> str:
    """Returns one line of text about a failed call to a process: its name, how it ended, and its last lines of
    stderr.
    """
    if not isinstance(error, RayError):
        return error_text(error)
    info, end = member.info, None if member.exit_probe is None else member.exit_probe.end(END_WAIT_MS)
    end = memory_death(str(error)) or end
    known = f"{end}: " if end else ""
    where = member.name if info is None else f"{member.name}, pid {info.pid},"
    words = "" if info is None else last_lines(info.stderr_path)
    if words:
        how = f"; the last lines of its stderr: {words}"
    elif end:
        how = ""
    else:
        how = f", and how is unknown here: {death_of(error)}"
    place = "" if info is None or words else f". Its log on node {info.node_id}: {info.stderr_path}"
    return bounded_text(f"{known}the process {where} has ended{how}{place}")
