"""Takes the checkpoints of one job: from the request, through the trigger, to the last acknowledgement.

The machine hands `CheckpointKeeper` the events of checkpoints. `completion.py` goes on after the last acknowledgement.
Rules:

- `request_decider.py` decides which checkpoint starts, and when. None starts while the event log cannot be written.
- No task hears of a checkpoint before every master hook has answered.
- An acknowledgement counts once. If it is refused, its files are deleted.
- When a failed checkpoint concerns the whole job, the verdict goes into the context, and the machine carries it out.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.abandonment import Abandoner
from tidegate.actors.coordinator.checkpoints.completion import CheckpointWriter
from tidegate.actors.coordinator.checkpoints.discards import Discarder
from tidegate.actors.coordinator.checkpoints.savepoint_copies import SavepointCopies
from tidegate.actors.coordinator.checkpoints.sink_commits import SinkCommitter
from tidegate.actors.coordinator.job.chance import drawn
from tidegate.actors.coordinator.job.phases import JobStatus, PendingInput, PendingPhase
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.requests.checkpoint_plan import NoPlan, make_plan
from tidegate.actors.coordinator.requests.checkpoint_properties import CheckpointProperties, barrier_options
from tidegate.actors.coordinator.requests.request_decider import (
    CheckpointRequest,
    Demand,
    Pause,
    Start,
    decide,
    enqueue,
)
from tidegate.actors.coordinator.state.checkpoint_statistics import SubtaskStatistics
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import NEVER_MS, AcknowledgeResult, PendingCheckpoint
from tidegate.actors.coordinator.takeover_invariants import check_trigger, may_trigger
from tidegate.protocol.failure_reasons import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import StateKind, SubtaskState
from tidegate.storage.ids import CheckpointId

_STOPPING = "the job is being stopped"
_RUNS_SOON = (JobStatus.DEPLOYING, JobStatus.RESTARTING)
_LATE = {
    PendingPhase.HOOKS: "its master hooks have not answered",
    PendingPhase.ACKNOWLEDGED: "another one was still being written",
    PendingPhase.EXPORTING: "it was still being copied",
}


class CheckpointKeeper:
    """Takes checkpoints. Their later stages are in `writer`, `commits`, `abandoner` and `discards`."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self.discards = Discarder(context)
        self.commits = SinkCommitter(context, self.discards)
        self.abandoner = Abandoner(context, self.discards)
        self.copies = SavepointCopies(context, self.abandoner, self.discards)
        self.writer = CheckpointWriter(context, self.abandoner, self.commits, self.discards, self.copies)

    # --- request --------------------------------------------------------------------------------------------------

    def request(self, event: ev.CheckpointRequested) -> None:
        """A user asks for a checkpoint or a savepoint. It is refused if none can be taken, or too many wait.

        A stop is accepted before the attempt runs as well, and waits for that.
        """
        state = self._context.state
        if state.status is not JobStatus.RUNNING and not (event.kind.stops and state.status in _RUNS_SOON):
            reason, detail = Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, f"the job is {state.status.value}"
            self.abandoner.refuse((event.request,), reason, detail)
            return
        if state.stopping is not None or any(r.properties.kind.stops for r in state.requests):
            self.abandoner.refuse((event.request,), Reason.SCHEDULER_SHUTDOWN, _STOPPING)
            return
        if event.kind.is_savepoint and event.target is None:
            self.abandoner.refuse((event.request,), Reason.SAVEPOINT_NOT_WRITTEN, "no folder was given for it")
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
            self.abandoner.refuse((refused.request,), Reason.TOO_MANY_REQUESTS, f"{len(state.requests)} wait already")

    def _refuse_copy(self, requests: tuple[str, ...]) -> None:
        detail = (
            f"{invariants.copies_under_way(self._context.state)} savepoints are still being copied into their folders, "
            f"or deleted there after a failure, and {invariants.COPIES_MAX} may be; wait for them, and look whether "
            "their storage can be reached"
        )
        self.abandoner.refuse(requests, Reason.TOO_MANY_REQUESTS, detail)

    def _shut_down_scheduler(self, at_ms: int) -> None:
        """Make way for the savepoint that ends the job: nothing else is taken until its fate is known."""
        self.abandoner.refuse_queued(Reason.SCHEDULER_SHUTDOWN, _STOPPING)
        self.abandoner.give_up_open(Reason.SCHEDULER_SHUTDOWN, at_ms, _STOPPING)

    # --- trigger --------------------------------------------------------------------------------------------------

    def start_periodic(self, at_ms: int) -> None:
        """The attempt runs: schedule the first checkpoint, after a random delay in [min pause, interval]."""
        settings = self._context.settings
        if settings.interval_ms is None:
            return
        low_ms = min(settings.min_pause_ms, settings.interval_ms)
        attempt = self._context.state.attempt
        delay_ms = low_ms + drawn(self._context.spec.seed, attempt) % (settings.interval_ms - low_ms + 1)
        self._context.instruct(do.SetTimer(f"periodic:{attempt}", at_ms + delay_ms))

    def timer(self, name: str, argument: str, at_ms: int) -> None:
        """A timer about checkpoints has fired."""
        number = int(argument)
        if name == "periodic":
            self.tick(at_ms)
            return
        if name == "final":
            # The wait is over, even if a clock that was set back says that it is not.
            self._context.state.final_not_before_ms = NEVER_MS
            return
        act: dict[str, Callable[[CheckpointId], object]] = {
            "timeout": lambda n: self._expire(n, at_ms),
            "export": lambda n: None if self.copies.repeat(n) else self.writer.repeat_export(n),
            "copy": lambda n: self.copies.expire(n, at_ms),
            "void": self.writer.repeat_void,
            "commit": self.commits.repeat,
            "discard": self.discards.repeat,
            "discard-savepoint": self.discards.repeat_savepoint,
        }
        if name in act:
            act[name](CheckpointId(number))

    def trigger_if_due(self, at_ms: int) -> None:
        """Start the checkpoints whose time has come."""
        while not self._context.state.storage_away and may_trigger(self._context.state):
            decision = decide(self._demand(at_ms), self._context.settings, at_ms)
            if isinstance(decision, Start):
                self._context.state.requests = decision.queue
                self._trigger(decision, at_ms)
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
            final=len(state.ended) == len(self._context.spec.tasks) and at_ms >= state.final_not_before_ms,
            pending=len(state.pending),
            commits_waiting=len(state.commits),
            stopping=state.stopping is not None,
            last_completed_at_ms=state.last_completed_at_ms,
            savepoints=sum(pending.properties.kind.is_savepoint for pending in state.pending.values()),
            hooks=any(pending.phase is PendingPhase.HOOKS for pending in state.pending.values()),
        )

    def tick(self, at_ms: int) -> None:
        """A periodic checkpoint is due. It starts as soon as it may; until then there are no further ticks."""
        if self._context.settings.interval_ms is not None and self._context.state.due_since_ms is None:
            self._context.state.due_since_ms = at_ms

    def _wait_for_next_tick(self, at_ms: int) -> None:
        """A checkpoint starts: set the next tick, in the rhythm of those before."""
        state, interval_ms = self._context.state, self._context.settings.interval_ms
        if state.due_since_ms is not None:
            assert interval_ms is not None
            # If the clock was set back, the rhythm is lost: the next tick is an interval from now.
            since_ms = min(state.due_since_ms, at_ms)
            missed = (at_ms - since_ms) // interval_ms
            next_ms = since_ms + (missed + 1) * interval_ms
            state.due_since_ms = None
            self._context.instruct(do.SetTimer(f"periodic:{state.attempt}", next_ms))

    def _trigger(self, start: Start, at_ms: int) -> None:
        state, spec, properties, requests = self._context.state, self._context.spec, start.properties, start.requests
        if not properties.kind.is_savepoint:
            self._wait_for_next_tick(at_ms)
        elif not invariants.may_copy(state, properties.kind):
            self._refuse_copy(requests)
            return
        plan = make_plan(spec, state.ready, state.finished)
        if isinstance(plan, NoPlan):
            self.abandoner.refuse(requests, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING, f"{plan.missing} is not running")
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
        number, at_ms = pending.checkpoint_id, pending.triggered_at_ms
        for attempt, tasks in self._context.state.by_attempt(pending.trigger):
            self._context.instruct(do.TriggerCheckpoint(attempt, number, at_ms, tasks, options, pending.base))

    def _base(self, properties: CheckpointProperties) -> CheckpointId | None:
        """The newest retained checkpoint to build on. A task that has no part in it writes all of its state."""
        state = self._context.state
        if properties.canonical:
            return None
        retained = (c.checkpoint_id for c in reversed(state.completed))
        return next((number for number in retained if state.shared.can_be_base(number)), None)

    # --- collect --------------------------------------------------------------------------------------------------

    def hooks_triggered(self, event: ev.HooksTriggered) -> None:
        """Every master hook has answered: trigger the tasks."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if pending is not None and pending.phase is PendingPhase.HOOKS:
            pending.advance(PendingInput.HOOKS_ANSWERED)
            pending.hooks = event.states
            self._trigger_tasks(pending)

    def hook_failed(self, event: ev.HookFailed) -> None:
        """A master hook failed: without the world outside the checkpoint is not whole, and is given up."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if pending is not None and pending.phase is PendingPhase.HOOKS:
            self.abandoner.give_up(pending, Reason.HOOK_FAILED, event.at_ms, event.error)

    def acknowledged(self, event: ev.CheckpointAcknowledged) -> None:
        """A task's part is durable. If the acknowledgement is refused, its files are deleted."""
        state = self._context.state
        pending = state.pending.get(event.checkpoint_id)
        if invariants.is_counted(state, event.checkpoint_id, event.task):
            result = AcknowledgeResult.DUPLICATE
        elif pending is None or not state.takes_part(pending, event.task, event.attempt):
            known = self.discards.has_completed(event.checkpoint_id)
            result = AcknowledgeResult.DUPLICATE if known else AcknowledgeResult.DISCARDED
        elif event.kind is not pending.properties.kind:
            # An externally induced source began before it was told of the savepoint: it made a checkpoint's snapshot.
            self.discards.state_of(event.checkpoint_id, event.state)
            message = f"{event.task} had begun {event.checkpoint_id} as a {event.kind.value} before it was told"
            if pending.phase in (PendingPhase.HOOKS, PendingPhase.COLLECTING, PendingPhase.ACKNOWLEDGED):
                self.abandoner.give_up(pending, Reason.DECLINED, event.at_ms, message)
            return
        else:
            result = pending.acknowledge(event.task, event.state)
        if result is AcknowledgeResult.SUCCESS:
            assert pending is not None
            self._remember(pending, event)
        elif result is not AcknowledgeResult.DUPLICATE:
            self.discards.state_of(event.checkpoint_id, event.state)

    def _remember(self, pending: PendingCheckpoint, event: ev.CheckpointAcknowledged) -> None:
        # The time is that of the task's clock, which may be behind the coordinator's.
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
        """A task cannot take part: the checkpoint has failed."""
        pending = self._context.state.pending.get(event.checkpoint_id)
        if (
            pending is not None
            and self._context.state.takes_part(pending, event.task, event.attempt)
            and pending.phase in (PendingPhase.COLLECTING, PendingPhase.ACKNOWLEDGED)
        ):
            reason = event.reason
            if reason is Reason.STORAGE_AWAY and event.away_ms >= self._context.spec.storage_outage_ms:
                reason = Reason.ASYNC_PART_FAILED
            self.abandoner.give_up(pending, reason, event.at_ms, f"{event.task}: {event.message}")

    def task_finished(self, task: TaskId, at_ms: int) -> None:
        """Give up checkpoints that wait for a task that has left: it will never acknowledge."""
        for pending in list(self._context.state.pending.values()):
            if pending.attempt == self._context.state.attempt and task in pending.waiting:
                self.abandoner.give_up(pending, Reason.TASK_FINISHED, at_ms, str(task))

    def storage_went_away(self, event: ev.StorageWentAway) -> None:
        """The event log cannot be written. Give up what is open, but no savepoints: users wait for those."""
        self._context.state.storage_away = True
        for pending in list(self._context.state.pending.values()):
            if pending.phase.open and pending.properties.subsumable:
                self.abandoner.give_up(pending, Reason.STORAGE_AWAY, event.at_ms, event.error)

    def storage_came_back(self, at_ms: int) -> None:
        """Take a periodic checkpoint soon, without waiting for its tick."""
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
        self.abandoner.give_up(pending, Reason.EXPIRED, at_ms, detail)

    # --- the attempt, the coordinator, or the job is over ---------------------------------------------------------

    def drop(self, reason: Reason, at_ms: int, detail: str = "") -> None:
        """Give up what storage does not decide about, and refuse all requests. No tolerance counts it."""
        self.abandoner.give_up_open(reason, at_ms, detail)
        self.abandoner.refuse_queued(reason, detail)

    def take_over(self, at_ms: int) -> None:
        """Give every order again whose answer may be lost with the coordinator that gave it.

        Old deletions come first. Giving up checkpoints orders new ones, and these must be ordered once: a second answer
        would be taken for that of the next step, the deletion of shared files.
        """
        self.discards.take_over()
        self.abandoner.give_up_open(Reason.COORDINATOR_LOST, at_ms)
        if not self._context.state.adopting:
            self.abandoner.refuse_queued(Reason.COORDINATOR_LOST)
        self.abandoner.take_over()
        self.copies.take_over(at_ms)
        self.writer.take_over()
        self.commits.take_over()
