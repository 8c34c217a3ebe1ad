"""`AttemptSupervisor`: deploys attempts on workers, watches how they end, and measures recovery times.

Rules:

- An attempt is sent to the processes of its workers as one `TaskDeployment` each, once these processes and their
  neighbours have started, because a deployment contains the addresses of the neighbours. Each process reports the end
  of its subtasks (`Ended`). If a process dies, all its unfinished subtasks fail at once.
- If only the connection broke and the process answers, messages that may be lost are sent again (`lost_nodes.py`).
  Receivers ignore a repeated message.
- All events for the subtasks of a worker in one round of the mailbox go in one message (`flush`).
- An attempt is deployed when all living processes have stopped the previous attempt (`AttemptDrain`). A process that
  does not stop in time is evicted (`Evictions`).
- While a node may be lost, an attempt waits for spare processes elsewhere, or until Ray reports whether the node is
  lost (`lost_nodes.py`). A wait for resources of the cluster is logged, and fails the attempt in the end
  (`resource_waits.py`).
- A subtask that has finished does not need its process any more. Messages to it may get lost.
- A new coordinator finds the processes of the lost one (`discovery.py`). A subtask without a process has failed. The
  supervisor reports that when the machine sends `CoordinatorTookOver` to the subtask.
- The machine ignores reports about an attempt that is not current.
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

_TaskMessage: TypeAlias = tuple[TaskId, AttemptNumber, ev.TaskEvent]


@dataclass(frozen=True, slots=True)
class _WaitingDeployment:
    """A deployment to one process that has not been sent yet. `peers` has the process of each neighbour task in
    another worker.
    """

    member: WorkerHandle
    tasks: tuple[TaskId, ...]
    peers: dict[TaskId, WorkerHandle]
    attempt: AttemptNumber
    restore: RestorePoint | None


class AttemptSupervisor:
    """Deploys the attempts of one job on its processes.

    All methods run on the coordinator's mailbox, except `processes`, `standbys`, `waits_for`, `suspect_nodes` and
    `rows_reported`.
    """

    def __init__(
        self,
        workers: WorkerPool,
        report: Callable[[CoordinatorEvent], None],
        mailbox: Mailbox,
        heartbeat_timeout_ms: int = TIMEOUT_MS,
        join: Callable[[WorkerHandle], object] = lambda _: None,
    ) -> None:
        """Creates the supervisor. `join` is called with each process that has started, and connects to it."""
        self._workers = workers
        self._report = report
        self._mailbox = mailbox
        self._attempt = AttemptNumber(-1)
        """Number of the newest attempt."""
        self._attempts: dict[TaskId, AttemptNumber] = {}
        """The attempt of each task. Attempts of tasks differ, because a region may restart alone."""
        self._members: dict[TaskId, WorkerHandle] = {}
        self._finished: set[TaskId] = set()
        """Tasks that have finished in their attempt, and need no process any more."""
        self._cancelled: dict[TaskId, AttemptNumber] = {}
        """The newest cancelled attempt of each task. Its events are no longer sent."""
        self._neighbours = workers.graph.neighbours()
        self._unsent: dict[WorkerHandle, list[_TaskMessage]] = {}
        """Events for the next message to each process."""
        self._waiting: list[_WaitingDeployment] = []
        """Deployments that wait until all processes involved have started."""
        self._join = join
        workers.died, workers.identified = self._has_died, self._identified
        self._due: do.DeployAttempt | None = None
        """The next attempt, while processes have not stopped the previous one yet, or None."""
        self.generation = ev.UNFENCED
        """The generation of this coordinator. Processes ignore messages of older generations."""
        self._has_looked = False
        """True once this coordinator has looked for the processes of a lost one."""
        self._why_gone: str | None = None
        """The reason why processes were gone when this coordinator took over, if Ray reports one."""
        self._evictions = Evictions(workers, report)
        suspects = SuspectNodes(workers.node_id, heartbeat_timeout_ms)
        again = Reconnections(limit_ms(heartbeat_timeout_ms))
        self._lost_nodes = LostNodes(mailbox, self.evict, self._deploy_if_free, suspects, again, workers.is_kept)
        self._broke = workers.broke = self._lost_nodes.broke
        self._drain = AttemptDrain(mailbox, self._broke, self.evict, self._deploy_if_free)
        self._room: RoomWatch | None = None
        """Watches whether the cluster has free resources for the slots of the job. None if the job reserves no
        slots.
        """
        self._bundles: BundleNodes | None = None
        """Finds the node of each placement group bundle. None if the job has no common slots."""
        if (placement := workers.options.placement) is not None:
            self._bundles = BundleNodes(mailbox, partial(nodes_of, placement), self._deploy_if_free)
        if workers.slots.groups:
            wait_ms_max = workers.options.slot_request_timeout_ms
            self._room = RoomWatch(mailbox, partial(look_at, workers.slots), self._starting, self._no_room, wait_ms_max)
        self.recoveries = RecoveryWatch(workers.graph)
        """Measures the durations of recoveries under this coordinator."""

    def evict(self, member: WorkerHandle, why: str) -> None:
        """Stops using a process, and kills it once the event log has recorded that. `why` names the process and
        the reason.
        """
        self._evictions.evict(member, why)

    def _evict_all(self, members: Iterable[WorkerHandle], why: str) -> None:
        for member in members:
            self.evict(member, f"{member.name} {why}")

    def kill(self, process: str) -> None:
        """Kills a process whose eviction is recorded in the event log. `process` is its id."""
        self._evictions.kill(process)

    def silent(self, node: str, others_ms: Sequence[int]) -> None:
        """Records that a process on a node does not answer.

        `others_ms`: how long, in ms, each other process on the node has not answered.
        """
        self._lost_nodes.silent(node, others_ms)

    def take_over(self, state: CoordinatorState, job_id: JobId) -> None:
        """Finds the processes of a lost coordinator, and watches their subtasks. `state` was replayed from the
        log.
        """
        if not self._has_looked:
            self._has_looked = True
            options, running = self._workers.options, {task for task in state.ready if task not in state.down}
            self._inherit(*find_processes(options.prefix, options.namespace, job_id, running), state.given_up)
            if running - self._members.keys():
                self._why_gone = memory_death_of_tasks(options.prefix)
        self._attempt = state.attempt
        for task in self._workers.graph.tasks():
            attempt = state.attempt_of(task)
            if task not in state.down and self._attempts.get(task) != attempt:
                self._attempts[task] = attempt

    def _inherit(self, found: Sequence[FoundProcess], silent: Mapping[str, Handle], given_up: Collection[str]) -> None:
        workers, standbys, useless = by_worker(found, self._workers.slots.plan.workers, given_up)
        self._members = self._workers.inherit(workers, standbys)
        log.info("%d processes of workers and %d spare ones are still there", len(workers), len(standbys))
        left = [self._workers.left_behind(one) for one in useless]
        left += [WorkerHandle(name, handle, None, Future()) for name, handle in silent.items()]
        # Later, because the first log entry of this coordinator must be its takeover.
        self._mailbox.post(partial(self._evict_all, left, "is left over from a lost coordinator"))
        self._mailbox.call_later(self._workers.options.standby_delay_ms, self._workers.refill)

    def deploy(self, instruction: do.DeployAttempt) -> None:
        """Deploys an attempt, once all living processes have stopped their tasks of the previous attempt."""
        self._due = instruction
        self._deploy_if_free()

    def _deploy_if_free(self) -> None:
        if not self._drain.is_over or self._due is None:
            return
        tasks = self._workers.graph.tasks() if self._due.tasks is None else self._due.tasks
        doubtful = self._lost_nodes.doubtful
        if self._bundles is not None:
            starts = self._workers.starts_in_bundles(tasks, doubtful)
            self._bundles.ask(doubtful, self._due.attempt if starts else None)
            if starts and not doubtful and not self._bundles.settled:
                return
        if self._workers.lacks(tasks, doubtful, self._nodes):
            log.warning("attempt %d waits until Ray reports whether nodes are lost", self._due.attempt)
            return
        due, self._due = self._due, None
        self._deploy(due)

    @property
    def _nodes(self) -> Nodes:
        """Returns the node of each bundle, or `NOWHERE` if the job has no common slots."""
        return NOWHERE if self._bundles is None else self._bundles.nodes

    def _without(self, tasks: Sequence[TaskId]) -> do.DeployAttempt | None:
        """Returns the attempt that waits to be deployed, without `tasks`. None if none waits, or if no task remains."""
        if self._due is None:
            return None
        due = self._workers.graph.tasks() if self._due.tasks is None else self._due.tasks
        left = tuple(task for task in due if task not in tasks)
        return replace(self._due, tasks=left) if left else None

    def _deploy(self, instruction: do.DeployAttempt) -> None:
        """Assigns each task of an attempt to a process, and sends the deployments as soon as the processes have
        started.
        """
        tasks = self._workers.graph.tasks() if instruction.tasks is None else instruction.tasks
        # Before the new attempt begins, so that a message lost here does not count as its failure.
        self.flush()
        self._attempt = instruction.attempt
        self._attempts |= dict.fromkeys(tasks, instruction.attempt)
        self._finished.difference_update(tasks)
        at_ms = now_ms()
        self.recoveries.deployed(instruction.attempt, tasks, at_ms)
        known = {id(member) for member in self._members.values()}
        self._members |= self._workers.staff(tasks, self._lost_nodes.doubtful, self._nodes)
        fresh = dict.fromkeys(m.name for task in tasks if id(m := self._members[task]) not in known)
        for left in {m for m in self._members.values() if m.fit and not self._workers.is_kept(m)}:
            # It still has tasks of another region. They continue in the process that has taken its place.
            self.evict(left, f"{left.name} was replaced, because its node may be lost")
        for member, of_member in self._by_member(tasks).items():
            neighbours = {peer for task in of_member for peer in self._neighbours[task]} - set(of_member)
            peers = {peer: self._members[peer] for peer in sorted(neighbours)}
            self._waiting.append(_WaitingDeployment(member, of_member, peers, instruction.attempt, instruction.restore))
        self._send_deployments()
        log.info(
            "attempt %d of %s is deployed from %s%s; new to it: %s",
            instruction.attempt,
            "the job" if instruction.tasks is None else f"{len(tasks)} of {len(self._members)} tasks",
            "nothing" if instruction.restore is None else instruction.restore.pointer,
            self.recoveries.since_failure(at_ms),
            ", ".join(fresh) or "none",
        )
        if self._room is not None:
            self._room.watch()
        self._mailbox.call_later(self._workers.options.standby_delay_ms, self._workers.refill)

    def _identified(self, member: WorkerHandle) -> None:
        """Connects to a process that has started, and sends the deployments that waited for it."""
        self._join(member)
        self._send_deployments()

    def _send_deployments(self) -> None:
        """Sends the waiting deployments for which all processes involved have started, with the addresses of the
        neighbours.
        """
        all_waiting, self._waiting = self._waiting, []
        for waiting in all_waiting:
            tasks = tuple(t for t in waiting.tasks if self._is_current(t, waiting.attempt))
            # Neighbours of cancelled tasks are dropped, because a process of another region may never start.
            neighbours = {peer for task in tasks for peer in self._neighbours[task]}
            members = {peer: member for peer, member in waiting.peers.items() if peer in neighbours}
            if tasks and any(member.info is None for member in (waiting.member, *members.values())):
                self._waiting.append(waiting)
            elif tasks:
                peers = {peer: member.as_peer() for peer, member in members.items()}
                slot = self._workers.shown_as(tasks[0])
                deployment = TaskDeployment(tasks, waiting.attempt, waiting.restore, peers, self.generation, slot)
                self._send(tasks, waiting.member, partial(waiting.member.handle.deploy.remote, deployment))

    def _is_current(self, task: TaskId, attempt: AttemptNumber) -> bool:
        """Returns whether the attempt is the current one of the task and is not cancelled."""
        return self._attempts.get(task) == attempt and self._cancelled.get(task, -1) < attempt

    def _by_member(self, tasks: Iterable[TaskId]) -> dict[WorkerHandle, tuple[TaskId, ...]]:
        """Returns the processes of `tasks`, each with its tasks. Tasks without a process are omitted."""
        found: dict[WorkerHandle, list[TaskId]] = {}
        for task in tasks:
            if (member := self._members.get(task)) is not None:
                found.setdefault(member, []).append(task)
        return {member: tuple(of_member) for member, of_member in found.items()}

    def cancel(self, instruction: do.CancelAttempt) -> None:
        """Orders each living process to stop an attempt. A process that does not stop in time is evicted."""
        attempt = instruction.attempt
        tasks = tuple(self._workers.graph.tasks() if instruction.tasks is None else instruction.tasks)
        self._due = self._without(tasks)
        self._cancelled |= dict.fromkeys(tasks, attempt)
        self._waiting = [o for o in self._waiting if any(self._is_current(task, o.attempt) for task in o.tasks)]
        for member, of_member in self._by_member(tasks).items():
            if member.usable:
                self._drain.stop(member, of_member, attempt, self.generation)

    def send(self, task: TaskId, event: ev.TaskEvent) -> None:
        """Queues an event for the current attempt of a task, which `flush` sends. Drops the event if the process of the
        task is dead.
        """
        member = self._members.get(task)
        if member is not None and member.usable:
            self._unsent.setdefault(member, []).append((task, self._attempts[task], event))
        elif isinstance(event, ev.CoordinatorTookOver):
            why = "" if self._why_gone is None else f": {self._why_gone}"
            reason = f"its process was gone when a new coordinator took over{why}"
            self._report(co.TaskFailed(now_ms(), event.attempt, task, reason))

    def flush(self) -> None:
        """Sends the queued events to the tasks, as one message to each process."""
        if self._unsent:
            unsent, self._unsent = self._unsent, {}
            for member, events in unsent.items():
                tasks = tuple(dict.fromkeys(task for task, _, _ in events))
                self._send(tasks, member, partial(member.channel.send, "deliver", tuple(events)))

    def completed(self, task: TaskId, event: ev.CheckpointCompleted, state: CoordinatorState) -> None:
        """Notifies the standby process that follows a task's state of a completed checkpoint, unless it was
        deleted already.
        """
        spec, number = state.spec, event.checkpoint_id
        if spec is not None and number in state.kept:
            self._workers.completed(task, RestorePoint(spec.root, spec.job_id, number, final=False))

    def membership(self, name: str, actor_id: str, in_charge: bool) -> Membership:
        """Returns this coordinator's generation, and whether the named process belongs to the job.

        The second value is None if this coordinator does not control the job. May be called from any thread.
        """
        return Membership(self.generation, self._workers.has(name, actor_id) if in_charge else None)

    def found_hung(self, member: WorkerHandle) -> Callable[[str], object]:
        """Returns a function that fails the unfinished subtasks of a process that was found hung. Its argument is the
        error text.

        The subtask that was last active comes first, so that the failure of the attempt names it.
        """
        tasks = sorted(self._unfinished(member), key=lambda task: task != member.acting)
        attempts = {task: self._attempts.get(task, self._attempt) for task in tasks}

        def report(text: str) -> None:
            for task, attempt in attempts.items():
                self._record_failure(attempt, task, member)
                self._report(co.TaskFailed(now_ms(), attempt, task, bounded_text(text)))

        self._deploy_if_free()
        return report

    def _unfinished(self, member: WorkerHandle) -> list[TaskId]:
        """Returns the unfinished subtasks of a process."""
        return [task for task, m in self._members.items() if m is member and task not in self._finished]

    def dismiss(self) -> None:
        """Ends all processes when this coordinator stops, except processes that obey a newer coordinator."""
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        self._due = None
        self._waiting.clear()
        self._workers.dismiss(self.generation)

    def close(self) -> list[Future[None]]:
        """Ends all processes after the end of the job. Returns futures that are done when the processes have
        ended.
        """
        for look in (self._room, self._bundles):
            if look is not None:
                look.close()
        self._waiting.clear()
        return self._workers.close()

    def processes(self) -> tuple[TaskProcessInfo, ...]:
        """Returns the living process of each task, unless it has not started yet."""
        return tuple(
            TaskProcessInfo(task, member.name, member.info.pid, member.info.node_id, self._attempts.get(task, 0))
            for task, member in list(self._members.items())
            if member.info is not None and not member.dead
        )

    def standbys(self) -> tuple[int, int]:
        """Returns the number of spare processes that are ready, and the number of spare processes that are
        starting.
        """
        return self._workers.ready_standbys, self._workers.starting_standbys

    def waits_for(self) -> str | None:
        """Returns text about the cluster resources, or the nodes, for which the job waits, or None. May be called
        from any thread.
        """
        if self._due is not None and (nodes := self._lost_nodes.doubtful):
            return f"word of {', '.join(sorted(nodes))}: no process there answers, and Ray has not given it up"
        return None if self._room is None else self._room.waits_for

    @property
    def suspect_nodes(self) -> int:
        """Returns the number of nodes that may be lost. May be read from any thread."""
        return len(self._lost_nodes.doubtful)

    def observe(self, event: CoordinatorEvent) -> None:
        """Logs failures and ready tasks, and passes them to the measurement of recoveries."""
        if isinstance(event, co.TaskFailed) and event.attempt == self._attempts.get(event.task):
            self.recoveries.failed(event.at_ms)
            log.warning("task %s of attempt %d failed: %s", event.task, event.attempt, logged_text(event.reason))
        elif isinstance(event, co.TaskReady) and event.attempt == self._attempt:
            self.recoveries.ready(event.attempt, event.task, event.at_ms)
            origin = "" if event.origin is None else f" with its state from {event.origin.value}"
            log.info("task %s is ready%s%s", event.task, origin, self.recoveries.since_failure(event.at_ms))

    def rows_reported(self, attempt: AttemptNumber, task: TaskId, rows_in: int) -> None:
        """Records the number of rows that a task has received. The first row ends a recovery."""
        at_ms = now_ms()
        if (member := self._members.get(task)) is not None:
            member.answered_at_ms = at_ms
        if rows_in > 0 and (words := self.recoveries.row_came_in(attempt, task, at_ms)) is not None:
            log.info("attempt %d: the first rows came into %s %s", attempt, task, words)

    def doing(self, task: TaskId) -> Future[str] | None:
        """Requests from a task's process what it is doing. Returns a future of the text, or None if no process of
        the task lives.
        """
        member = self._members.get(task)
        return None if member is None or not member.usable else member.handle.doing.remote().future()

    def _record_failure(self, attempt: AttemptNumber, task: TaskId, member: WorkerHandle) -> None:
        """Records that a process failed at some time since its last answer, to measure the recovery."""
        if attempt == self._attempts.get(task) and member.answered_at_ms is not None:
            at_ms = now_ms()
            self.recoveries.failed(at_ms, max(0, at_ms - member.answered_at_ms))

    def ended(self, ended: Ended) -> None:
        """Handles the end of a subtask's attempt in its process. Reports a failure to the coordinator."""
        attempt, task, outcome = ended.attempt, ended.task, ended.outcome
        if attempt != self._attempts.get(task):
            return
        if outcome.kind == "finished":
            self._finished.add(task)
            return
        if outcome.unfit and (member := self._members.get(task)) is not None:
            self.evict(member, f"{member.name} can start no thread or open no file any more")
        reason = outcome.reason or "no reason given"
        self._report(co.TaskFailed(now_ms(), attempt, task, reason, outcome.permanent, outcome.fingerprint))

    def _has_died(self, member: WorkerHandle, error: BaseException | None) -> None:
        if self._workers.closed:  # The job is over: its processes were killed, some before they could report.
            return
        tasks = self._unfinished(member)
        reason = "" if error is None or not tasks else reason_of(member, error)
        for task in tasks:
            attempt = self._attempts.get(task, self._attempt)
            self._record_failure(attempt, task, member)
            self._report(co.TaskFailed(now_ms(), attempt, task, reason))

    def _starting(self) -> list[str]:
        starting = (member.name for member in self._members.values() if member.usable and member.info is None)
        return list(dict.fromkeys(starting))

    def _no_room(self, why: str) -> None:
        task = next((t for t, m in self._members.items() if m.usable and m.info is None), None)
        if task is not None:
            self._report(co.TaskFailed(now_ms(), self._attempts[task], task, bounded_text(why)))

    def _send(self, tasks: Sequence[TaskId], member: WorkerHandle, call: Callable[[], Watched]) -> None:
        """Sends a message to the subtasks of a process by `call`. If it does not arrive, their attempts fail."""
        attempts = {task: self._attempts[task] for task in tasks}

        def concerned() -> list[TaskId]:
            if self._workers.closed:
                return []
            return [t for t, attempt in attempts.items() if attempt == self._attempts[t] and t not in self._finished]

        def lost(error: BaseException) -> None:
            # After a grace period (`actor_calls.py`): if the process has died, its death is the failure.
            self._mailbox.call_later(LOST_CALL_GRACE_MS, lambda: fail(error))

        def fail(error: BaseException) -> None:
            for task in concerned():
                reason = f"a message to it did not arrive: {error}"
                self._report(co.TaskFailed(now_ms(), attempts[task], task, reason))

        def again() -> None:
            if any(self._cancelled.get(task, -1) < attempts[task] for task in concerned()):
                self._send(tasks, member, call)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None and not self._broke(member, error, lost, again):
                self._mailbox.post(lambda: lost(error))

        call().future().add_done_callback(done)


class Evictions:
    """Kills processes of one job after the event log has recorded their eviction. Methods run on the
    coordinator's mailbox.
    """

    def __init__(self, workers: WorkerPool, report: Callable[[CoordinatorEvent], None]) -> None:
        self._workers = workers
        self._report = report
        self._waiting: dict[str, WorkerHandle] = {}
        """Evicted processes, by id, until the log has recorded their eviction."""

    def evict(self, member: WorkerHandle, why: str) -> None:
        """Stops using a process, and requests the log entry that allows killing it. `why` names the process and
        the reason.
        """
        member.evicted = True
        if member.process_id not in self._waiting:
            self._waiting[member.process_id] = member
            log.warning("a process is given up: %s", why)
            self._report(co.ProcessGivenUp(now_ms(), member.process_id, bounded_text(why)))

    def kill(self, process: str) -> None:
        """Kills a process whose eviction is recorded in the event log. `process` is its id."""
        member = self._waiting.pop(process, None)
        if member is None:
            return
        self._workers.kill(member)
        info = member.info
        if info is None:
            return
        # Ray requests that a process ends itself, and a stopped process does not receive that.
        neighbour: Any = self._workers.neighbour_of(member)
        if info.node_id == self._workers.node_id:
            kill_process(info.pid, info.stack_descriptor)
        elif neighbour is not None:
            neighbour.handle.kill_peer.remote(info)


DROP_TIMEOUT_MS = 10_000


Broke: TypeAlias = Callable[
    [WorkerHandle, BaseException | None, Callable[[BaseException], object], Callable[[], object]], bool
]
"""A function that handles a failed call to a process. See `LostNodes.broke`."""


class AttemptDrain:
    """Waits until processes have stopped an attempt, before the next one is deployed. Methods run on the coordinator's
    mailbox.

    `look` is called when a process has stopped its subtasks, or is evicted.
    """

    def __init__(
        self, mailbox: Mailbox, broke: Broke, evict: Callable[[WorkerHandle, str], object], look: Callable[[], object]
    ) -> None:
        self._mailbox, self._broke, self._evict, self._look = mailbox, broke, evict, look
        self._asked: list[tuple[WorkerHandle, Future[None]]] = []
        """Processes that were ordered to stop subtasks, each with the future of its answer."""

    @property
    def is_over(self) -> bool:
        """Returns whether all processes have stopped their subtasks of the attempt.

        Processes that have not started yet are ignored.
        """
        self._asked = [(member, dropped) for member, dropped in self._asked if member.usable and not dropped.done()]
        return all(member.info is None for member, _ in self._asked)

    def stop(
        self, member: WorkerHandle, tasks: tuple[TaskId, ...], attempt: AttemptNumber, generation: Generation
    ) -> None:
        """Orders a process to stop subtasks of an attempt. `generation` is the generation of the coordinator."""

        def done(future: Future[None]) -> None:
            self._broke(
                member, future.exception(), lambda _: None, partial(self.stop, member, tasks, attempt, generation)
            )
            self._mailbox.post(self._look)

        dropped = member.handle.drop.remote(tasks, attempt, generation).future()
        self._asked.append((member, dropped))
        dropped.add_done_callback(done)
        self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))

    def _look_at(self, member: WorkerHandle, attempt: AttemptNumber, dropped: Future[None]) -> None:
        if dropped.done() or not member.usable:
            return
        if member.info is None:
            self._mailbox.call_later(DROP_TIMEOUT_MS, partial(self._look_at, member, attempt, dropped))
        else:
            self._evict(member, f"{member.name} has not stopped attempt {attempt} within {DROP_TIMEOUT_MS} ms")
            self._look()
