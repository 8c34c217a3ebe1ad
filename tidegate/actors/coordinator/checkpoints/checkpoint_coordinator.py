"""Takes the checkpoints of one job: from the request, through the trigger, to the last acknowledgement.

The coordinator machine passes events of checkpoints to `CheckpointCoordinator`. `checkpoint_finalizer.py` continues
after the last acknowledgement. Rules:

- `checkpoint_requests.py` decides which checkpoint starts, and when. None starts while the event log cannot be written.
- No task is triggered before every master hook has answered.
- An acknowledgement counts once. If it is refused, its files are deleted.
- If the failure of a checkpoint affects the whole job, it is recorded in the context as a verdict. The machine carries
  verdicts out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoint_requests import (
    CheckpointProperties,
    CheckpointRequest,
    Demand,
    Pause,
    Start,
    barrier_options,
    decide,
    enqueue,
)
from tidegate.actors.coordinator.checkpoint_statistics import SubtaskStatistics
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import CheckpointCleaner
from tidegate.actors.coordinator.checkpoints.checkpoint_finalizer import CheckpointFinalizer, SinkCommitter
from tidegate.actors.coordinator.checkpoints.savepoint_copies import SavepointCopies
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import NEVER_MS, AcknowledgeResult, PendingCheckpoint
from tidegate.actors.coordinator.invariants import check_trigger, may_trigger
from tidegate.actors.coordinator.job_spec import JobEdgeInfo, JobSpec, drawn
from tidegate.actors.coordinator.phases import JobStatus, PendingInput, PendingPhase
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StateKind, SubtaskState
from tidegate.storage.ids import CheckpointId, VertexId

_STOPPING = "the job is being stopped"
_RUNS_SOON = (JobStatus.DEPLOYING, JobStatus.RESTARTING)
_LATE = {
    PendingPhase.HOOKS: "its master hooks have not answered",
    PendingPhase.ACKNOWLEDGED: "another one was still being written",
    PendingPhase.EXPORTING: "it was still being copied",
}


class CheckpointCoordinator:
    """Takes the checkpoints of one job: accepts requests, triggers tasks and collects acknowledgements.

    `finalizer`, `commits`, `aborter`, `cleaner` and `copies` carry out the later stages.
    """

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self.cleaner = CheckpointCleaner(context)
        self.commits = SinkCommitter(context, self.cleaner)
        self.aborter = CheckpointAborter(context, self.cleaner)
        self.copies = SavepointCopies(context, self.aborter, self.cleaner)
        self.finalizer = CheckpointFinalizer(context, self.aborter, self.commits, self.cleaner, self.copies)

    # --- request --------------------------------------------------------------------------------------------------

    def request(self, event: ev.CheckpointRequested) -> None:
        """Queues a user's request for a checkpoint, savepoint or stop. Refuses the request if the job cannot take a
        checkpoint, or if the queue is full.

        A request for a stop is also accepted while the attempt is still being deployed or restarted, and waits until it
        runs.
        """
        state = self._context.state
        if state.status is not JobStatus.RUNNING and not (event.kind.stops and state.status in _RUNS_SOON):
            reason = Reason.NOT_ALL_REQUIRED_TASKS_RUNNING
            detail = f"the job is {state.status.value}"
            self.aborter.refuse((event.request,), reason, detail)
            return
        if (
            state.stopping is not None
            or state.ends_as is not None
            or any(r.properties.kind.stops for r in state.requests)
        ):
            self.aborter.refuse((event.request,), Reason.SCHEDULER_SHUTDOWN, _STOPPING)
            return
        if event.kind.is_savepoint and event.target is None:
            self.aborter.refuse((event.request,), Reason.SAVEPOINT_NOT_WRITTEN, "no folder was given for it")
            return
        if event.kind.stops:
            if not invariants.may_copy(state, event.kind):
                self._refuse_copy((event.request,))
                return
            self._shut_down_scheduler(event.at_ms)
        request = CheckpointRequest(
            event.request,
            event.at_ms,
            CheckpointProperties(event.kind, event.target if event.kind.is_savepoint else None, event.savepoint_format),
        )
        state.requests, refused = enqueue(state.requests, request)
        if refused is not None:
            self.aborter.refuse((refused.request,), Reason.TOO_MANY_REQUESTS, f"{len(state.requests)} wait already")

    def _refuse_copy(self, requests: tuple[str, ...]) -> None:
        detail = (
            f"{invariants.copies_under_way(self._context.state)} savepoints are still being copied into their folders, "
            f"or deleted there after a failure, and {invariants.COPIES_MAX} may be; wait for them, and look whether "
            "their storage can be reached"
        )
        self.aborter.refuse(requests, Reason.TOO_MANY_REQUESTS, detail)

    def _shut_down_scheduler(self, at_ms: int) -> None:
        """Refuses the queued requests and aborts the open checkpoints, because the savepoint that ends the job comes
        next.
        """
        self.aborter.refuse_queued(Reason.SCHEDULER_SHUTDOWN, _STOPPING)
        self.aborter.give_up_open(Reason.SCHEDULER_SHUTDOWN, at_ms, _STOPPING)

    # --- trigger --------------------------------------------------------------------------------------------------

    def start_periodic(self, at_ms: int) -> None:
        """Schedules the first periodic checkpoint of an attempt, after a random delay between the minimum pause and the
        interval.
        """
        settings = self._context.settings
        if settings.interval_ms is None:
            return
        low_ms = min(settings.min_pause_ms, settings.interval_ms)
        attempt = self._context.state.attempt
        delay_ms = low_ms + drawn(self._context.spec.seed, attempt) % (settings.interval_ms - low_ms + 1)
        self._context.instruct(do.SetTimer(f"periodic:{attempt}", at_ms + delay_ms))

    def timer(self, name: str, argument: str, at_ms: int) -> None:
        """Carries out the action of a checkpoint timer that fired, such as "timeout" or "commit". `argument`: the
        number of the checkpoint or attempt for which the timer was set.
        """
        number = int(argument)
        if name == "periodic":
            self.tick(at_ms)
            return
        if name == "final":
            # The wait is over, even if the clock was set back and shows an earlier time.
            self._context.state.final_not_before_ms = NEVER_MS
            return
        act: dict[str, Callable[[CheckpointId], object]] = {
            "timeout": lambda n: self._expire(n, at_ms),
            "export": lambda n: None if self.copies.repeat(n) else self.finalizer.repeat_export(n),
            "copy": lambda n: self.copies.expire(n, at_ms),
            "void": self.finalizer.repeat_void,
            "commit": self.commits.repeat,
            "discard": self.cleaner.repeat,
            "discard-savepoint": self.cleaner.repeat_savepoint,
        }
        if name in act:
            act[name](CheckpointId(number))

    def trigger_if_due(self, at_ms: int) -> None:
        """Starts the checkpoints that are due and allowed to start."""
        while not self._context.state.storage_away and may_trigger(self._context.state):
            decision = decide(self._demand(at_ms), self._context.settings, at_ms)
            if isinstance(decision, Start):
                self._context.state.requests = decision.queue
                self.start_checkpoint(decision, at_ms)
                continue
            if isinstance(decision, Pause):
                state = self._context.state
                state.due_since_ms = None
                self._context.instruct(do.SetTimer(f"periodic:{state.attempt}", decision.until_ms))
            return

    def _demand(self, at_ms: int) -> Demand:
        state = self._context.state
        return Demand(
            queue=state.requests,
            due=state.due_since_ms is not None,
            final=self._wants_final(at_ms),
            pending=len(state.pending),
            commits_waiting=len(state.commits),
            stopping=state.stopping is not None or state.ends_as is not None,
            last_completed_at_ms=state.last_completed_at_ms,
            savepoints=sum(pending.properties.kind.is_savepoint for pending in state.pending.values()),
            hooks=any(pending.phase is PendingPhase.HOOKS for pending in state.pending.values()),
        )

    def _wants_final(self, at_ms: int) -> bool:
        """Returns whether a final checkpoint is due: all operators have finished, and no completed checkpoint contains
        their end.
        """
        state = self._context.state
        all_ended = len(state.ended) == len(self._context.spec.tasks)
        return all_ended and at_ms >= state.final_not_before_ms and state.ends_as is None

    def tick(self, at_ms: int) -> None:
        """Marks a periodic checkpoint as due. It starts as soon as it is allowed to. Until then there are no further
        ticks.
        """
        if self._context.settings.interval_ms is not None and self._context.state.due_since_ms is None:
            self._context.state.due_since_ms = at_ms

    def _wait_for_next_tick(self, at_ms: int) -> None:
        """Sets the timer of the next periodic checkpoint when one starts. The interval counts from its due time."""
        state = self._context.state
        interval_ms = self._context.settings.interval_ms
        if state.due_since_ms is not None:
            assert interval_ms is not None
            # If the clock was set back, the rhythm is lost: the next tick is an interval from now.
            since_ms = min(state.due_since_ms, at_ms)
            missed = (at_ms - since_ms) // interval_ms
            next_ms = since_ms + (missed + 1) * interval_ms
            state.due_since_ms = None
            self._context.instruct(do.SetTimer(f"periodic:{state.attempt}", next_ms))

    def start_checkpoint(self, start: Start, at_ms: int) -> None:
        """Assigns the next checkpoint id, and triggers the master hooks or the tasks of a new checkpoint."""
        state = self._context.state
        spec = self._context.spec
        properties = start.properties
        requests = start.requests
        if not properties.kind.is_savepoint:
            self._wait_for_next_tick(at_ms)
        elif not invariants.may_copy(state, properties.kind):
            self._refuse_copy(requests)
            return
        plan = make_plan(spec, state.ready, state.finished)
        if isinstance(plan, NoPlan):
            self.aborter.refuse(requests, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, f"{plan.missing} is not running")
            return
        check_trigger(state)
        checkpoint_id = state.next_checkpoint_id
        state.next_checkpoint_id = CheckpointId(checkpoint_id + 1)
        pending = PendingCheckpoint(
            checkpoint_id,
            state.attempt,
            at_ms,
            dict.fromkeys(plan.wait),
            plan.finished,
            plan.trigger,
            properties,
            requests,
            start.retries,
            base=self._base(properties),
            phase=PendingPhase.HOOKS if spec.hooks else PendingPhase.COLLECTING,
        )
        state.pending[checkpoint_id] = pending
        state.statistics.was_triggered()
        if properties.kind.stops:
            state.stopping = checkpoint_id
        if spec.hooks:
            self._context.instruct(do.TriggerHooks(checkpoint_id, at_ms))
        else:
            self._trigger_tasks(pending)
        self._context.instruct(do.SetTimer(f"timeout:{checkpoint_id}", at_ms + self._context.settings.timeout_ms))

    def _trigger_tasks(self, pending: PendingCheckpoint) -> None:
        options = barrier_options(self._context.settings, pending.properties)
        number = pending.checkpoint_id
        at_ms = pending.triggered_at_ms
        for attempt, tasks in self._context.state.by_attempt(pending.trigger):
            self._context.instruct(do.TriggerCheckpoint(attempt, number, at_ms, tasks, options, pending.base))

    def _base(self, properties: CheckpointProperties) -> CheckpointId | None:
        """Returns the newest retained checkpoint on which an incremental checkpoint can be based, or None.

        A task that did not acknowledge the base checkpoint writes all of its state.
        """
        state = self._context.state
        if properties.canonical:
            return None
        retained = (c.checkpoint_id for c in reversed(state.completed))
        return next((number for number in retained if state.shared.can_be_base(number)), None)

    # --- collect --------------------------------------------------------------------------------------------------

    def hooks_triggered(self, event: ev.HooksTriggered) -> None:
        """Triggers the tasks of a checkpoint, because all of its master hooks have answered."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if pending is not None and pending.phase is PendingPhase.HOOKS:
            pending.advance(PendingInput.HOOKS_ANSWERED)
            pending.hooks = event.states
            self._trigger_tasks(pending)

    def hook_failed(self, event: ev.HookFailed) -> None:
        """Aborts a checkpoint whose master hook failed."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if pending is not None and pending.phase is PendingPhase.HOOKS:
            self.aborter.give_up(pending, Reason.HOOK_FAILED, event.at_ms, event.error)

    def acknowledged(self, event: ev.CheckpointAcknowledged) -> None:
        """Adds a task's acknowledgement to its checkpoint. Deletes the files of an acknowledgement that is refused."""
        state = self._context.state
        pending = state.pending.get(event.checkpoint_id)
        if invariants.is_counted(state, event.checkpoint_id, event.task):
            result = AcknowledgeResult.DUPLICATE
        elif pending is None or not state.takes_part(pending, event.task, event.attempt):
            known = self.cleaner.has_completed(event.checkpoint_id)
            result = AcknowledgeResult.DUPLICATE if known else AcknowledgeResult.DISCARDED
        elif event.kind is not pending.properties.kind:
            # An externally induced source began before it learned of the savepoint: it made a checkpoint's snapshot.
            self.cleaner.state_of(event.checkpoint_id, event.state)
            message = f"{event.task} had begun {event.checkpoint_id} as a {event.kind.value} before it was told"
            if pending.phase in (PendingPhase.HOOKS, PendingPhase.COLLECTING, PendingPhase.ACKNOWLEDGED):
                self.aborter.give_up(pending, Reason.DECLINED, event.at_ms, message)
            return
        else:
            result = pending.acknowledge(event.task, event.state)
        if result is AcknowledgeResult.SUCCESS:
            assert pending is not None
            self._remember(pending, event)
        elif result is not AcknowledgeResult.DUPLICATE:
            self.cleaner.state_of(event.checkpoint_id, event.state)

    def _remember(self, pending: PendingCheckpoint, event: ev.CheckpointAcknowledged) -> None:
        # The time is from the task's clock, which may be behind the coordinator's.
        elapsed_ms = max(0, event.at_ms - pending.triggered_at_ms)
        pending.subtasks[event.task] = SubtaskStatistics.of(elapsed_ms, event.metrics, event.state)
        self._look_for_union(event.state)
        if pending.fully_acknowledged:
            pending.advance(PendingInput.ALL_ACKNOWLEDGED)
        else:
            self._context.nothing_follows = True

    def _look_for_union(self, subtask: SubtaskState) -> None:
        if subtask.handle is not None:
            for section in subtask.handle.sections:
                if section.kind is StateKind.UNION:
                    self._context.state.union_operators[section.uid] = None

    def declined(self, event: ev.CheckpointDeclined) -> None:
        """Aborts a checkpoint that a task has declined."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if (
            pending is not None
            and self._context.state.takes_part(pending, event.task, event.attempt)
            and pending.phase in (PendingPhase.COLLECTING, PendingPhase.ACKNOWLEDGED)
        ):
            reason = event.reason
            if reason is Reason.STORAGE_AWAY and event.away_ms >= self._context.spec.storage_outage_ms:
                reason = Reason.ASYNC_PART_FAILED
            self.aborter.give_up(pending, reason, event.at_ms, f"{event.task}: {event.message}")

    def task_finished(self, task: TaskId, at_ms: int) -> None:
        """Aborts the checkpoints that wait for a task which has finished, because it will never acknowledge them."""
        for pending in list(self._context.state.pending.values()):
            if pending.attempt == self._context.state.attempt and task in pending.waiting:
                self.aborter.give_up(pending, Reason.TASK_FINISHED, at_ms, str(task))

    def storage_went_away(self, event: ev.StorageWentAway) -> None:
        """Aborts open checkpoints, because the event log cannot be written. Savepoints continue."""
        self._context.state.storage_away = True
        for pending in list(self._context.state.pending.values()):
            if pending.phase.open and pending.properties.subsumable:
                self.aborter.give_up(pending, Reason.STORAGE_AWAY, event.at_ms, event.error)

    def storage_came_back(self, at_ms: int) -> None:
        """Ends the pause of an outage of storage. In a running job a periodic checkpoint is due at once."""
        self._context.state.storage_away = False
        if self._context.state.status is JobStatus.RUNNING:
            self.tick(at_ms)

    def _expire(self, checkpoint_id: CheckpointId, at_ms: int) -> None:
        pending = self._context.state.pending.get(checkpoint_id)
        if pending is None or not pending.phase.open:
            return
        if pending.phase is PendingPhase.COLLECTING:
            detail = f"{len(pending.waiting)} tasks missing, {next(iter(pending.waiting))} among them"
        else:
            detail = _LATE[pending.phase]
        self.aborter.give_up(pending, Reason.EXPIRED, at_ms, detail)

    # --- the attempt, the coordinator, or the job is over ---------------------------------------------------------

    def drop(self, reason: Reason, at_ms: int, detail: str = "") -> None:
        """Aborts all pending checkpoints whose `_metadata` is not being written yet, and refuses all queued requests.

        Called at the end of an attempt or of the job.
        """
        self.aborter.give_up_open(reason, at_ms, detail)
        self.aborter.refuse_queued(reason, detail)

    def take_over(self, at_ms: int) -> None:
        """Repeats the instructions of the lost coordinator whose answers may be lost.

        Pending deletions are repeated before checkpoints are aborted, because an abort starts further deletions. If
        such a deletion were sent twice, the second answer would be taken for the answer to the next step, which deletes
        shared files.
        """
        self.cleaner.take_over()
        self.aborter.give_up_open(Reason.COORDINATOR_LOST, at_ms)
        if not self._context.state.adopting:
            self.aborter.refuse_queued(Reason.COORDINATOR_LOST)
        self.aborter.take_over()
        self.copies.take_over(at_ms)
        self.finalizer.take_over()
        self.commits.take_over()


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The tasks of a checkpoint: to trigger, to wait for, and already finished. Each field is in the order of the job's
    tasks.
    """

    trigger: tuple[TaskId, ...]
    wait: tuple[TaskId, ...]
    finished: tuple[TaskId, ...]


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Result of `make_plan` if no checkpoint is possible, because the task `missing` neither runs nor has finished."""

    missing: TaskId


def make_plan(
    spec: JobSpec, running: Mapping[TaskId, None], finished: Mapping[TaskId, None]
) -> CheckpointPlan | NoPlan:
    """Returns the plan of a checkpoint: which tasks to trigger, which to wait for, and which have finished.

    The rules are Flink's (`DefaultCheckpointPlanCalculator`):

    - Every task that has not finished is waited for, and is notified of the end of the checkpoint.
    - The coordinator triggers a task that no barrier can reach any more: a source, or a task whose upstream tasks have
      all finished. Over an all-to-all edge these are all tasks of the upstream vertex, over a pointwise edge a single
      task.
    - There is no plan while a task neither runs nor has finished.

    The cost is linear in tasks and edges. `running` may contain finished tasks.
    """
    if not finished:
        missing = _first_missing(spec.tasks, running)
        return CheckpointPlan(spec.sources, spec.tasks, ()) if missing is None else NoPlan(missing)
    wait = tuple(task for task in spec.tasks if task not in finished)
    missing = _first_missing(wait, running)
    if missing is not None:
        return NoPlan(missing)
    over = tuple(task for task in spec.tasks if task in finished)
    unfinished_vertices = Counter(task.vertex for task in wait)
    sources = frozenset(task.vertex for task in spec.sources)
    edges: dict[VertexId, list[JobEdgeInfo]] = {}
    for edge in spec.edges:
        edges.setdefault(edge.downstream, []).append(edge)

    def has_no_upstream(task: TaskId) -> bool:
        if task.vertex in sources:
            return True
        # Without a known edge the upstream tasks are unknown too: it waits for their barriers.
        return bool(edges.get(task.vertex)) and all(
            TaskId(edge.upstream, task.subtask) in finished
            if edge.pointwise
            else not unfinished_vertices[edge.upstream]
            for edge in edges[task.vertex]
        )

    return CheckpointPlan(tuple(task for task in wait if has_no_upstream(task)), wait, over)


def _first_missing(tasks: tuple[TaskId, ...], running: Mapping[TaskId, None]) -> TaskId | None:
    return next((task for task in tasks if task not in running), None)
