"""`AttemptSupervisor`: deploys attempts on workers, watches how they end, and measures recovery times.

Rules:

- An attempt is sent to the processes of its workers as one `TaskDeployment` each, once these processes and their
  neighbours have started, because a deployment contains the addresses of the neighbours. Each process reports how its
  subtasks end (`Ended`). If a process dies, all its unfinished subtasks fail at once.
- If only the connection broke and the process answers, messages that may be lost are sent again (`lost_nodes.py`).
  Receivers ignore a message that comes twice.
- What the subtasks of a worker receive in one round of the mailbox goes in one message (`flush`).
- An attempt is deployed when all living processes have stopped the one before it (`AttemptDrain`). A process that does
  not stop in time is evicted (`Evictions`). A stuck process gets no subtasks.
- While a node may be lost, an attempt waits for spare processes elsewhere, or until Ray reports what became of the node
  (`lost_nodes.py`). A wait for resources of the cluster is logged, and fails the attempt in the end
  (`resource_waits.py`).
- A subtask that has finished does not need its process any more. Messages to it may get lost.
- A coordinator that takes over finds the processes of its predecessor (`discovery.py`). A subtask without a process has
  failed. That is reported when the machine asks the subtask.
- Reports about an attempt that is not current reach the machine, which ignores them by their number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import TIMEOUT_MS
from tidegate.actors.ray.actor_calls import LOST_CALL_GRACE_MS, Ended, Watched
from tidegate.actors.ray.coordinator_liveness import Membership
from tidegate.actors.ray.discovery import by_worker, find_processes, memory_death_of_tasks
from tidegate.actors.ray.health_endpoint import kill_process
from tidegate.actors.ray.lost_nodes import LostNodes, Reconnections, SuspectNodes, limit_ms
from tidegate.actors.ray.mailbox import Mailbox
from tidegate.actors.ray.placement import NOWHERE, Nodes
from tidegate.actors.ray.resource_waits import BundleNodes, RoomWatch, look_at, nodes_of
from tidegate.actors.ray.task_deployment import Handle, TaskDeployment
from tidegate.actors.ray.worker_pool import FoundProcess, WorkerHandle, WorkerPool, reason_of
from tidegate.actors.runtimes.job_metrics import RecoveryWatch
from tidegate.actors.runtimes.running_job import TaskProcessInfo
from tidegate.actors.task import events as ev
from tidegate.protocol.failures import bounded_text
from tidegate.protocol.identity import TaskId
from tidegate.storage.clock import now_ms
from tidegate.storage.ids import AttemptNumber, Generation, JobId
from tidegate.storage.user_values import logged_text

log = logging.getLogger(__name__)

_Told: TypeAlias = tuple[TaskId, AttemptNumber, ev.TaskEvent]


@dataclass(frozen=True, slots=True)
class _Unsent:
    """An order that is to be sent. `peers`: for each neighbour in another worker its process."""

    member: WorkerHandle
    tasks: tuple[TaskId, ...]
    peers: dict[TaskId, WorkerHandle]
    attempt: AttemptNumber
    restore: RestorePoint | None


class AttemptSupervisor:
    """The current attempt. All on the coordinator's mailbox, save `processes`, `standbys`, `waits_for`, `heard`."""

    def __init__(
        self,
        fleet: WorkerPool,
        tell_coordinator: Callable[[CoordinatorEvent], None],
        mailbox: Mailbox,
        heartbeat_timeout_ms: int = TIMEOUT_MS,
        join: Callable[[WorkerHandle], object] = lambda _: None,
    ) -> None:
        """`join`: connects to a process that has identified itself."""
        self._fleet = fleet
        self._tell_coordinator = tell_coordinator
        self._mailbox = mailbox
        self._attempt = AttemptNumber(-1)
        """The newest one."""
        self._attempts: dict[TaskId, AttemptNumber] = {}
        """The attempt of each task: regions restart on their own."""
        self._members: dict[TaskId, WorkerHandle] = {}
        self._finished: set[TaskId] = set()
        """Tasks that need no process any more in their attempt."""
        self._cancelled: dict[TaskId, AttemptNumber] = {}
        """The newest attempt of which each task was told to let go: nothing of it is said again."""
        self._neighbours = fleet.graph.neighbours()
        self._unsent: dict[WorkerHandle, list[_Told]] = {}
        """What processes are told with the next message."""
        self._orders: list[_Unsent] = []
        """Orders that wait until processes have identified themselves."""
        self._join = join
        fleet.died, fleet.identified = self._has_died, self._identified
        self._due: do.DeployAttempt | None = None
        """An attempt that waits for processes to let go of the one before."""
        self.generation = ev.UNFENCED
        """That of the coordinator, with which processes are told what to do."""
        self._has_looked = False
        """Whether the processes that a predecessor has left were looked for."""
        self._why_gone: str | None = None
        """Why processes were gone when this coordinator took over, if Ray reports that."""
        self._given_up = Evictions(fleet, tell_coordinator)
        self.give_up, self.kill = self._given_up.give_up, self._given_up.kill
        suspects = SuspectNodes(fleet.node_id, heartbeat_timeout_ms)
        again = Reconnections(limit_ms(heartbeat_timeout_ms))
        self._lost_nodes = LostNodes(mailbox, self.give_up, self._deploy_if_free, suspects, again, fleet.is_kept)
        self._broke = fleet.broke = self._lost_nodes.broke
        self._letting_go = AttemptDrain(mailbox, self._broke, self.give_up, self._deploy_if_free)
        self.silent = self._lost_nodes.silent
        self._room: RoomWatch | None = None
        """None where nothing is reserved."""
        self._bundles: BundleNodes | None = None
        """None where there are no common slots."""
        if (placement := fleet.options.placement) is not None:
            self._bundles = BundleNodes(mailbox, partial(nodes_of, placement), self._deploy_if_free)
        if fleet.slots.groups:
            wait_ms_max = fleet.options.slot_request_timeout_ms
            self._room = RoomWatch(mailbox, partial(look_at, fleet.slots), self._starting, self._no_room, wait_ms_max)
        self.recoveries = RecoveryWatch(fleet.graph)
        """Those under this coordinator."""

    def take_over(self, state: CoordinatorState, job_id: JobId) -> None:
        """A predecessor was lost, and the log says what its tasks are: find their processes, and watch how they end."""
        if not self._has_looked:
            self._has_looked = True
            options, running = self._fleet.options, {task for task in state.ready if task not in state.down}
            self._inherit(*find_processes(options.prefix, options.namespace, job_id, running), state.given_up)
            if running - self._members.keys():
                self._why_gone = memory_death_of_tasks(options.prefix)
        self._attempt = state.attempt
        for task in self._fleet.graph.tasks():
            attempt = state.attempt_of(task)
            if task not in state.down and self._attempts.get(task) != attempt:
                self._attempts[task] = attempt

    def _inherit(self, found: Sequence[FoundProcess], silent: Mapping[str, Handle], given_up: Collection[str]) -> None:
        workers, standbys, useless = by_worker(found, self._fleet.slots.plan.workers, given_up)
        self._members = self._fleet.inherit(workers, standbys)
        log.info("%d processes of workers and %d spare ones are still there", len(workers), len(standbys))
        left = [self._fleet.left_behind(one) for one in useless]
        left += [WorkerHandle(name, handle, None, Future()) for name, handle in silent.items()]
        # Later: the first entry of this coordinator says that it takes over.
        self._mailbox.post(lambda: [self.give_up(member, f"{member.name} is left over") for member in left])
        self._mailbox.call_later(self._fleet.options.standby_delay_ms, self._fleet.refill)

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Give every task of an attempt to a process, once those that live have let go of the one before."""
        self._due = instruction
        self._deploy_if_free()

    def _deploy_if_free(self) -> None:
        if not self._letting_go.is_over or self._due is None:
            return
        tasks = self._fleet.graph.tasks() if self._due.tasks is None else self._due.tasks
        doubtful = self._lost_nodes.doubtful
        if self._bundles is not None:
            starts = self._fleet.starts_in_bundles(tasks, doubtful)
            self._bundles.ask(doubtful, self._due.attempt if starts else None)
            if starts and not doubtful and not self._bundles.settled:
                return
        if self._fleet.lacks(tasks, doubtful, self._nodes):
            log.warning("attempt %d waits until Ray knows whether nodes are lost", self._due.attempt)
            return
        due, self._due = self._due, None
        self._deploy(due)

    @property
    def _nodes(self) -> Nodes:
        """Where bundles are, as far as that matters now."""
        return NOWHERE if self._bundles is None else self._bundles.nodes

    def _without(self, tasks: Sequence[TaskId]) -> do.DeployAttempt | None:
        """What is left of the attempt that waits, once these are cancelled: a region of its own goes on waiting."""
        if self._due is None:
            return None
        due = self._fleet.graph.tasks() if self._due.tasks is None else self._due.tasks
        left = tuple(task for task in due if task not in tasks)
        return replace(self._due, tasks=left) if left else None

    def _deploy(self, instruction: do.DeployAttempt) -> None:
        """Give every task of an attempt to a process."""
        tasks = self._fleet.graph.tasks() if instruction.tasks is None else instruction.tasks
        # Before the new attempt is known: what of these messages is lost is no failure of it.
        self.flush()
        self._attempt = instruction.attempt
        self._attempts |= dict.fromkeys(tasks, instruction.attempt)
        self._finished.difference_update(tasks)
        at_ms = now_ms()
        self.recoveries.deployed(instruction.attempt, tasks, at_ms)
        known = {id(member) for member in self._members.values()}
        self._members |= self._fleet.staff(tasks, self._lost_nodes.doubtful, self._nodes)
        fresh = dict.fromkeys(m.name for task in tasks if id(m := self._members[task]) not in known)
        for left in {m for m in self._members.values() if m.fit and not self._fleet.is_kept(m)}:
            # It still has tasks of another region: they go on in the process that has its place.
            self.give_up(left, f"{left.name} was replaced, because its node may be lost")
        for member, of_member in self._by_member(tasks).items():
            neighbours = {peer for task in of_member for peer in self._neighbours[task]} - set(of_member)
            peers = {peer: self._members[peer] for peer in sorted(neighbours)}
            self._orders.append(_Unsent(member, of_member, peers, instruction.attempt, instruction.restore))
        self._give_orders()
        log.info(
            "attempt %d of %s is deployed from %s%s; new to it: %s",
            instruction.attempt,
            "the job" if instruction.tasks is None else f"{len(tasks)} of {len(self._members)} tasks",
            "nothing" if instruction.restore is None else instruction.restore.pointer,
            self.recoveries.since_failure(at_ms),
            ", ".join(fresh) or "nobody",
        )
        if self._room is not None:
            self._room.watch()
        self._mailbox.call_later(self._fleet.options.standby_delay_ms, self._fleet.refill)

    def _identified(self, member: WorkerHandle) -> None:
        """A process has started, and is known to be there."""
        self._join(member)
        self._give_orders()

    def _give_orders(self) -> None:
        """Send the orders whose processes have all identified themselves: each is told how it reaches the others."""
        orders, self._orders = self._orders, []
        for order in orders:
            tasks = tuple(t for t in order.tasks if self._is_current(t, order.attempt))
            # Not those of tasks that were cancelled: a process of another region may never start.
            neighbours = {peer for task in tasks for peer in self._neighbours[task]}
            members = {peer: member for peer, member in order.peers.items() if peer in neighbours}
            if tasks and any(member.info is None for member in (order.member, *members.values())):
                self._orders.append(order)
            elif tasks:
                peers = {peer: member.as_peer() for peer, member in members.items()}
                slot = self._fleet.shown_as(tasks[0])
                told = TaskDeployment(tasks, order.attempt, order.restore, peers, self.generation, slot)
                self._tell(tasks, order.member, partial(order.member.handle.deploy.remote, told))

    def _is_current(self, task: TaskId, attempt: AttemptNumber) -> bool:
        """Whether this is the attempt of a task, and was not cancelled."""
        return self._attempts.get(task) == attempt and self._cancelled.get(task, -1) < attempt

    def _by_member(self, tasks: Iterable[TaskId]) -> dict[WorkerHandle, tuple[TaskId, ...]]:
        """The processes of these tasks, and which of the tasks each has."""
        found: dict[WorkerHandle, list[TaskId]] = {}
        for task in tasks:
            if (member := self._members.get(task)) is not None:
                found.setdefault(member, []).append(task)
        return {member: tuple(of_member) for member, of_member in found.items()}

    def cancel(self, instruction: do.CancelAttempt) -> None:
        """Have every process that lives let go of an attempt; one that does not is killed."""
        attempt = instruction.attempt
        tasks = tuple(self._fleet.graph.tasks() if instruction.tasks is None else instruction.tasks)
        self._due = self._without(tasks)
        self._cancelled |= dict.fromkeys(tasks, attempt)
        self._orders = [o for o in self._orders if any(self._is_current(task, o.attempt) for task in o.tasks)]
        for member, of_member in self._by_member(tasks).items():
            if member.usable:
                self._letting_go.tell(member, of_member, attempt, self.generation)

    def tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        """Send an event to a task in its current attempt with the next message, if its process lives."""
        member = self._members.get(task)
        if member is not None and member.usable:
            self._unsent.setdefault(member, []).append((task, self._attempts[task], event))
        elif isinstance(event, ev.CoordinatorTookOver):
            why = "" if self._why_gone is None else f": {self._why_gone}"
            reason = f"its process was gone when a new coordinator took over{why}"
            self._tell_coordinator(co.TaskFailed(now_ms(), event.attempt, task, reason))

    def flush(self) -> None:
        """Send what processes were told since the last message."""
        if self._unsent:
            unsent, self._unsent = self._unsent, {}
            for member, told in unsent.items():
                tasks = tuple(dict.fromkeys(task for task, _, _ in told))
                self._tell(tasks, member, partial(member.line.say, "tell", tuple(told)))

    def completed(self, task: TaskId, event: ev.CheckpointCompleted, state: CoordinatorState) -> None:
        """A task was told of a checkpoint: whoever follows it is told as well, unless it has gone meanwhile."""
        spec, number = state.spec, event.checkpoint_id
        if spec is not None and number in state.kept:
            self._fleet.completed(task, RestorePoint(spec.root, spec.job_id, number, final=False))

    def knows(self, name: str, actor_id: str, in_charge: bool) -> Membership:
        """Whether a process is one of this job's; only who is in charge can tell. From any thread."""
        return Membership(self.generation, self._fleet.has(name, actor_id) if in_charge else None)

    def found_hung(self, member: WorkerHandle) -> Callable[[str], object]:
        """A process lives and does not get on; what is returned takes the failure of the subtasks that it has.

        The one that acted last comes first: the failure of the attempt names it.
        """
        tasks = sorted(self._unfinished(member), key=lambda task: task != member.acting)
        attempts = {task: self._attempts.get(task, self._attempt) for task in tasks}

        def tell(text: str) -> None:
            for task, attempt in attempts.items():
                self._noticed(attempt, task, member)
                self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, bounded_text(text)))

        self._deploy_if_free()
        return tell

    def _unfinished(self, member: WorkerHandle) -> list[TaskId]:
        """The subtasks that a process has, and needs."""
        return [task for task, m in self._members.items() if m is member and task not in self._finished]

    def dismiss(self) -> None:
        """This coordinator cannot go on: processes end, unless they obey another one."""
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        self._due = None
        self._orders.clear()
        self._fleet.dismiss(self.generation)

    def close(self) -> list[Future[None]]:
        """The job is over. End all processes; the futures are done when they have gone."""
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        self._orders.clear()
        return self._fleet.close()

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """The process of each task, of those that live and have started."""
        return tuple(
            TaskProcessInfo(task, member.name, member.info.pid, member.info.node_id, self._attempts.get(task, 0))
            for task, member in list(self._members.items())
            if member.info is not None and not member.dead
        )

    def standbys(self) -> tuple[int, int]:
        """Spare processes that have started and wait, and those that are starting."""
        return self._fleet.ready_standbys, self._fleet.starting_standbys

    def waits_for(self) -> str | None:
        """What the cluster lacks that the job needs, if it waits for that. From any thread."""
        if self._due is not None and (nodes := self._lost_nodes.doubtful):
            return f"word of {', '.join(sorted(nodes))}: nobody there answers, and Ray has not given it up"
        return None if self._room is None else self._room.waits_for

    @property
    def suspect_nodes(self) -> int:
        """How many nodes may be lost. From any thread."""
        return len(self._lost_nodes.doubtful)

    def observe(self, event: CoordinatorEvent) -> None:
        """Note when an attempt failed, to tell how long recovery takes."""
        if isinstance(event, co.TaskFailed) and event.attempt == self._attempts.get(event.task):
            self.recoveries.failed(event.at_ms)
            log.warning("task %s of attempt %d failed: %s", event.task, event.attempt, logged_text(event.reason))
        elif isinstance(event, co.TaskReady) and event.attempt == self._attempt:
            self.recoveries.ready(event.attempt, event.task, event.at_ms)
            origin = "" if event.origin is None else f" with its state from {event.origin.value}"
            log.info("task %s is ready%s%s", event.task, origin, self.recoveries.since_failure(event.at_ms))

    def heard(self, attempt: AttemptNumber, task: TaskId, rows_in: int) -> None:
        """A task has told how many rows have come in. The first ones behind the sources end a recovery."""
        at_ms = now_ms()
        if (member := self._members.get(task)) is not None:
            member.heard_at_ms = at_ms
        if rows_in > 0 and (words := self.recoveries.row_came_in(attempt, task, at_ms)) is not None:
            log.info("attempt %d: the first rows came into %s %s", attempt, task, words)

    def doing(self, task: TaskId) -> Future[str] | None:
        """Ask the process of a task what it is doing; None if it has none that lives."""
        member = self._members.get(task)
        return None if member is None or not member.usable else member.handle.doing.remote().future()

    def _noticed(self, attempt: AttemptNumber, task: TaskId, member: WorkerHandle) -> None:
        """A process that says nothing any more has failed its task: this is how long nobody may have noticed."""
        if attempt == self._attempts.get(task) and member.heard_at_ms is not None:
            at_ms = now_ms()
            self.recoveries.failed(at_ms, max(0, at_ms - member.heard_at_ms))

    def ended(self, ended: Ended) -> None:
        """A process reports how an attempt of a subtask has ended in it."""
        attempt, task, outcome = ended.attempt, ended.task, ended.outcome
        if attempt != self._attempts.get(task):
            return
        if outcome.kind == "finished":
            self._finished.add(task)
            return
        if outcome.unfit and (member := self._members.get(task)) is not None:
            self.give_up(member, f"{member.name} can start no thread or open no file any more")
        reason = outcome.reason or "no reason given"
        self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, reason, outcome.permanent, outcome.fingerprint))

    def _has_died(self, member: WorkerHandle, error: BaseException | None) -> None:
        if self._fleet.closed:  # The job is over: its processes were killed, some before they could say so.
            return
        tasks = self._unfinished(member)
        reason = "" if error is None or not tasks else reason_of(member, error)
        for task in tasks:
            attempt = self._attempts.get(task, self._attempt)
            self._noticed(attempt, task, member)
            self._tell_coordinator(co.TaskFailed(now_ms(), attempt, task, reason))

    def _starting(self) -> list[str]:
        starting = (member.name for member in self._members.values() if member.usable and member.info is None)
        return list(dict.fromkeys(starting))

    def _no_room(self, why: str) -> None:
        task = next((t for t, m in self._members.items() if m.usable and m.info is None), None)
        if task is not None:
            self._tell_coordinator(co.TaskFailed(now_ms(), self._attempts[task], task, bounded_text(why)))

    def _tell(self, tasks: Sequence[TaskId], member: WorkerHandle, call: Callable[[], Watched]) -> None:
        """Send something to subtasks of a process. What does not arrive fails the attempts that it was for."""
        attempts = {task: self._attempts[task] for task in tasks}

        def concerned() -> list[TaskId]:
            if self._fleet.closed:
                return []
            return [t for t, attempt in attempts.items() if attempt == self._attempts[t] and t not in self._finished]

        def lost(error: BaseException) -> None:
            # After a while (`actor_calls.py`): if the process has died, that is the failure.
            self._mailbox.call_later(LOST_CALL_GRACE_MS, lambda: fail(error))

        def fail(error: BaseException) -> None:
            for task in concerned():
                reason = f"a message to it did not arrive: {error}"
                self._tell_coordinator(co.TaskFailed(now_ms(), attempts[task], task, reason))

        def again() -> None:
            if any(self._cancelled.get(task, -1) < attempts[task] for task in concerned()):
                self._tell(tasks, member, call)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None and not self._broke(member, error, lost, again):
                self._mailbox.post(lambda: lost(error))

        call().future().add_done_callback(done)


class Evictions:
    """Those of one job. Everything runs on the coordinator's mailbox."""

    def __init__(self, fleet: WorkerPool, tell_coordinator: Callable[[CoordinatorEvent], None]) -> None:
        self._fleet = fleet
        self._tell_coordinator = tell_coordinator
        self._waiting: dict[str, WorkerHandle] = {}
        """Processes that are ended once the log says that they were given up, by their ids."""

    def give_up(self, member: WorkerHandle, why: str) -> None:
        """A process is of no use any more. `why` says which it is."""
        member.given_up = True
        if member.process_id not in self._waiting:
            self._waiting[member.process_id] = member
            log.warning("a process is given up: %s", why)
            self._tell_coordinator(co.ProcessGivenUp(now_ms(), member.process_id, bounded_text(why)))

    def kill(self, process: str) -> None:
        """The log says that a process was given up: end it."""
        member = self._waiting.pop(process, None)
        if member is None:
            return
        self._fleet.kill(member)
        info = member.info
        if info is None:
            return
        # Ray asks a process to end itself, and a stopped one does not hear it.
        neighbour: Any = self._fleet.neighbour_of(member)
        if info.node_id == self._fleet.node_id:
            kill_process(info.pid, info.stack_descriptor)
        elif neighbour is not None:
            neighbour.handle.kill_peer.remote(info)


DROP_TIMEOUT_MS = 10_000


Broke: TypeAlias = Callable[
    [WorkerHandle, BaseException | None, Callable[[BaseException], object], Callable[[], object]], bool
]
"""Looks at how a call of a process ended: `LostNodes.broke`."""


class AttemptDrain:
    """Those of one job. All on the coordinator's mailbox. `look` is called when one has let go, or is given up."""

    def __init__(
        self, mailbox: Mailbox, broke: Broke, give_up: Callable[[WorkerHandle, str], object], look: Callable[[], object]
    ) -> None:
        self._mailbox, self._broke, self._give_up, self._look = mailbox, broke, give_up, look
        self._told: list[tuple[WorkerHandle, Future[None]]] = []
        """Processes that were told, and their answers."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is waited for."""
        self._told = [(member, dropped) for member, dropped in self._told if member.usable and not dropped.done()]
        return all(member.info is None for member, _ in self._told)

    def tell(
        self, member: WorkerHandle, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation
    ) -> None:
        """Have a process let go of an attempt of subtasks. `generation` is that of the coordinator."""

        def done(future: Future[None]) -> None:
            self._broke(
                member, future.exception(), lambda _: None, partial(self.tell, member, tasks, attempt, generation)
            )
            self._mailbox.post(self._look)

        dropped = member.handle.drop.remote(tasks, attempt, generation).future()
        self._told.append((member, dropped))
        dropped.add_done_callback(done)
        self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))

    def _look_at(self, member: WorkerHandle, attempt: AttemptNumber, dropped: Future[None]) -> None:
        if dropped.done() or not member.usable:
            return
        if member.info is None:
            self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))
        else:
            self._give_up(member, f"{member.name} has not let go of attempt {attempt} within {DROP_TIMEOUT_MS} ms")
            self._look()
