"""`TaskDriver`: runs one task machine. It carries out the machine's instructions, and sends reports to the
coordinator.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.job_spec import FIRST_PAUSE_MS, RestorePoint, pause_ms
from tidegate.actors.drivers.async_calls import Answered
from tidegate.actors.drivers.committing_sinks import CommitFailedError
from tidegate.actors.drivers.log_lines import log_fields
from tidegate.actors.drivers.outages import OutageNotes
from tidegate.actors.drivers.ports import TaskPort, TryAgain
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.drivers.threads import leave_if_forked
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.failures import interrupts, log_failure
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Barrier, element_size_bytes
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.errors import StorageError, may_be_awaited
from tidegate.storage.ids import CheckpointId, OperatorUid

log = logging.getLogger(__name__)


def answer_of(task: TaskId, at_ms: int, answer: do.AnswerTakeover) -> co.TaskAnswered:
    """Returns the report (`TaskAnswered`) of a task to a coordinator that took over."""
    return co.TaskAnswered(
        at_ms,
        answer.attempt,
        task,
        answer.generation,
        answer.started,
        answer.ended,
        answer.finished,
        answer.covered_by,
        answer.snapshotted,
        answer.collecting,
    )


class TaskDriver:
    """Runs one task's machine, in any runtime. All methods run on the task's thread."""

    def __init__(self, machine: TaskMachine, effects: TaskEffects, port: TaskPort) -> None:
        self.machine = machine
        self._effects = effects
        self._port = port
        self.rows_in = 0
        """Number of rows received, from the source or from channels."""
        self.first_row_at_ms: int | None = None
        """Time of the first row, in ms since the epoch."""
        self.bytes_read = 0
        """Size in bytes of the rows that came from the source."""
        self.times = WorkTimes(port.monotonic_ms())
        self._last_turn_ms = self._turn_over_ms = 0
        self._pid = os.getpid()
        self._outages: list[OutageNotes] = []
        """Outages of storage for which running I/O waits. I/O threads change the list as well."""
        self._barriers_at_ms: dict[CheckpointId, int] = {}
        """Arrival time in ms of the first barrier of each checkpoint. Recorded only if the log level is DEBUG."""
        self._at_ms = 0
        """Time in ms of the last event. Delays of timers count from it."""

    @property
    def finished(self) -> bool:
        """Returns whether the task has finished."""
        return self.machine.status is TaskStatus.FINISHED

    @property
    def waits_for(self) -> str | None:
        """Returns text about the storage that does not answer, and since when, or None. May be called from any
        thread.
        """
        return next((found for each in list(self._outages) if (found := each.waits_for) is not None), None)

    @property
    def oldest_call(self) -> int | None:
        """Returns the number of the oldest running `map_async` call, or None. May be called from any thread."""
        return self._effects.calls.oldest

    def restore(self, restore: RestorePoint | None) -> None:
        """Starts the task: reads its state from the checkpoint. With None it starts without state."""
        self._tell("begins afresh" if restore is None else f"begins from {restore.pointer}")
        self._run_through_outages(lambda: self._effects.restore(restore))

    def _tell(self, what: str, level: int = logging.INFO, checkpoint: CheckpointId | None = None) -> None:
        """Logs an event in the life of the task: `what` completes the sentence, such as "is ready"."""
        task = self.machine.descriptor.task
        attempt = self.machine.attempt
        fields = log_fields(task=str(task), attempt=attempt, checkpoint=checkpoint)
        log.log(level, "Task %s of attempt %d %s", task, attempt, what, extra=fields)

    def _log_arrival(self, event: ev.FrameArrived | ev.CheckpointTriggered) -> None:
        """Logs the barriers that have arrived at the task, at DEBUG."""
        if isinstance(event, ev.CheckpointTriggered):
            self._log_barrier(event.checkpoint_id, event.at_ms, event.triggered_at_ms, "from the coordinator")
            return
        for element in event.elements:
            if isinstance(element, Barrier):
                origin = f"on channel {event.channel}"
                self._log_barrier(element.checkpoint_id, event.at_ms, element.triggered_at_ms, origin)

    def _log_barrier(self, checkpoint_id: CheckpointId, at_ms: int, triggered_at_ms: int, origin: str) -> None:
        for over in [known for known in self._barriers_at_ms if known < checkpoint_id]:
            del self._barriers_at_ms[over]
        self._barriers_at_ms.setdefault(checkpoint_id, at_ms)
        delay_ms = max(0, at_ms - triggered_at_ms)
        what = f"received the barrier of checkpoint {checkpoint_id} {origin}, {delay_ms} ms after its trigger"
        self._tell(what, logging.DEBUG, checkpoint_id)

    def _log_snapshot(self, instruction: do.PersistSnapshot, sync_ms: int) -> None:
        """Logs, at DEBUG, the end of the alignment and of the synchronous part of a snapshot."""
        checkpoint_id = instruction.checkpoint_id
        aligned_ms = max(0, self._at_ms - self._barriers_at_ms.pop(checkpoint_id, self._at_ms))
        self._tell(f"aligned checkpoint {checkpoint_id} in {aligned_ms} ms", logging.DEBUG, checkpoint_id)
        what = f"took the synchronous part of checkpoint {checkpoint_id} in {sync_ms} ms"
        self._tell(what, logging.DEBUG, checkpoint_id)

    def _log_acknowledgement(self, instruction: do.Acknowledge) -> None:
        """Logs, at DEBUG, the end of the asynchronous part of a snapshot."""
        checkpoint_id = instruction.checkpoint_id
        metrics = instruction.metrics
        what = (
            f"completed the asynchronous part of checkpoint {checkpoint_id} in {metrics.async_ms} ms: "
            f"{metrics.incremental_bytes:,} bytes written of {metrics.state_bytes:,} bytes of state"
        )
        self._tell(what, logging.DEBUG, checkpoint_id)

    def handle(self, event: ev.TaskEvent | TryAgain) -> None:
        """Passes one event to the machine, and carries out its instructions. Any exception fails the task."""
        if isinstance(event, ev.DamageFound):
            attempt = self.machine.attempt
            self._port.report(co.CheckpointDamaged(event.at_ms, attempt, event.checkpoint_id, event.reason))
            return
        if isinstance(event, TryAgain):
            self._try_again(event)
            return
        if self.machine.fence.refuses(event):
            return
        if isinstance(event, ev.SourceBatchRead) and event.batch is not None:
            self.rows_in += event.batch.num_rows
            self.bytes_read += element_size_bytes(event.batch)
        elif isinstance(event, ev.FrameArrived):
            self.rows_in += sum(getattr(element, "num_rows", 0) for element in event.elements)
            if log.isEnabledFor(logging.DEBUG):
                self._log_arrival(event)
        elif isinstance(event, ev.CheckpointTriggered) and log.isEnabledFor(logging.DEBUG):
            self._log_arrival(event)
        elif isinstance(event, ev.CallsAnswered):
            self._effects.calls.received(event.answers)
            self._effects.calls.collecting = False
            self._collect()
        elif isinstance(event, ev.FileStaged):
            self._effects.sinks.over(event.uid)
        elif isinstance(event, ev.CheckpointCompleted | ev.CheckpointAborted) and self._effects.keeps_copies:
            self._port.run_io(partial(self._effects.checkpoint_over, event))
        if self.first_row_at_ms is None and self.rows_in:
            self.first_row_at_ms = event.at_ms
        self._at_ms = event.at_ms
        begin_ms = self._port.monotonic_ms()
        self.look(begin_ms)
        instructions = self.machine.handle(event)
        leave_if_forked(self._pid)
        self._perform(instructions, self._port.monotonic_ms() - begin_ms)
        self.times.worked(self._port.monotonic_ms())

    def look(self, now_ms: int) -> None:
        """Adds the time since the last work to the idle or back-pressured time. Called when the task does nothing."""
        if now_ms != self.times.until_ms:
            self.times.waited(now_ms, self.machine.outputs.over_limit)

    def _run_through_outages(self, work: Callable[[], ev.TaskEvent | None], commits: OperatorUid | None = None) -> None:
        """Runs I/O that the task needs to continue, and repeats it during a storage outage, for as long as the settings
        tolerate one.

        `commits` is the sink with the rows that the work commits, or None. An outage of the sink's system is treated
        like an outage of storage.
        """
        port = self._port
        limit_ms = self._effects.storage_outage_ms
        task = self.machine.descriptor.task
        what = f"storage of {task}" if commits is None else f"the system of sink {commits!r} of {task}"
        notes = OutageNotes(what, port.monotonic_ms)
        self._outages.append(notes)

        def attempt(number: int) -> None:
            def tried() -> ev.TaskEvent | TryAgain | None:
                try:
                    event = work()
                except (StorageError, CommitFailedError) as error:
                    passes = error.may_pass if isinstance(error, CommitFailedError) else may_be_awaited(error)
                    if not passes or (away_ms := notes.failed(error, "the task waits for it")) >= limit_ms:
                        raise
                    pause = min(pause_ms(FIRST_PAUSE_MS, number), limit_ms - away_ms)
                    return TryAgain(pause, lambda: attempt(number + 1))
                notes.worked()
                self._outages.remove(notes)
                return event

            port.run_io(tried)

        attempt(1)

    def _try_again(self, event: TryAgain) -> None:
        if self.machine.status is TaskStatus.CREATED:
            descriptor = self.machine.descriptor
            now_ms = self._port.now_ms()
            self._port.report(co.RestoreDelayed(now_ms, descriptor.attempt, descriptor.task))
        self._port.call_later(event.delay_ms, event.again)

    def turn(self) -> bool:
        """Processes one queued input element, or requests source rows. Returns False if the task has nothing to
        do.
        """
        if not self.machine.runnable:
            return False
        begin_ms = self._port.monotonic_ms()
        self.handle(ev.TurnGranted(self._port.now_ms(), self._last_turn_ms, begin_ms - self._turn_over_ms))
        self._turn_over_ms = self._port.monotonic_ms()
        self._last_turn_ms = self._turn_over_ms - begin_ms
        return True

    def hand_over(self) -> Mapping[OperatorUid, KeyedBackend]:
        """Returns the keyed state backends, by operator, that the next attempt of this task can use in the same
        process.

        Allowed only for a task that was stopped, because a failed task may have stopped in the middle of a change.
        Afterwards only `close` may be called.
        """
        return self._effects.kept if self.machine.status is TaskStatus.CREATED else self.machine.hand_over()

    def hurry(self) -> None:
        """Makes running I/O calls return soon, because the task has ended and is closed only after them."""
        self._effects.hurry()

    def close(self) -> None:
        """Releases the task's resources, at any time. Never raises an ordinary error."""
        self._tell("lets go of what it holds")
        for what, close in (("an operator", self.machine.close), ("the source", self._effects.close)):
            try:
                close()
            except BaseException as error:
                if interrupts(error):
                    raise
                log_failure(log, f"{what} of {self.machine.descriptor.task} could not be closed", error)

    def _stage(self, instruction: do.StageFile) -> None:
        """Writes rows of a sink on another thread: files of tables in any order, calls of a user's sink one by
        one.
        """
        work = partial(self._effects.stage, instruction)
        sinks = self._effects.sinks
        if instruction.uid in sinks:
            sinks.begin(instruction.uid, lambda: self._port.run_io(work))
        else:
            self._run_through_outages(work)

    def _call(self, instruction: do.MakeCalls) -> None:
        calls = self._effects.calls
        port = self._port
        if port.virtual:
            for call in instruction.calls:
                port.run_io(partial(self._answered, partial(calls.call_now, instruction.uid, call)))
            return
        calls.ask(instruction)
        self._collect()

    def _collect(self) -> None:
        """Waits for results of `map_async` calls on another thread, unless a thread already waits or no results
        are missing.
        """
        calls = self._effects.calls
        if calls.under_way and not calls.collecting:
            calls.collecting = True
            self._port.run_io(partial(self._answered, calls.collect))

    def _answered(self, answers: Callable[[], Answered]) -> ev.CallsAnswered | None:
        found = answers()
        return ev.CallsAnswered(self._port.now_ms(), found) if found else None

    def _perform(self, instructions: Sequence[do.TaskInstruction], handled_ms: int) -> None:
        task = self.machine.descriptor.task
        port = self._port
        for instruction in instructions:
            match instruction:
                case do.SendFrame():
                    port.send_frame(instruction)
                case do.GrantCredit():
                    port.grant_credit(instruction)
                case do.ReadSource():
                    port.run_io(partial(self._effects.read_source, instruction, patient=not port.virtual))
                case do.NotifySource(splits=splits):
                    self._effects.notify_source(splits)
                case do.PersistSnapshot():
                    # A snapshot's synchronous part is most of what the machine did at this event.
                    if log.isEnabledFor(logging.DEBUG):
                        self._log_snapshot(instruction, handled_ms)
                    port.run_io(lambda i=instruction: self._effects.persist(i, handled_ms))  # type: ignore[misc]
                case do.PersistChannelState():
                    port.run_io(lambda i=instruction: self._effects.persist_channel_state(i))  # type: ignore[misc]
                case do.PersistSegment():
                    port.run_io(lambda i=instruction: self._effects.persist_segment(i))  # type: ignore[misc]
                case do.MakeCalls():
                    self._call(instruction)
                case do.StageFile():
                    self._stage(instruction)
                case do.CommitPrepared():
                    self._run_through_outages(partial(self._effects.commit, instruction), instruction.uid)
                case do.DiscardState():
                    port.run_io(lambda i=instruction: self._effects.discard(i))  # type: ignore[misc]
                case do.SetTaskTimer():
                    port.set_timer(instruction, max(0, instruction.due_at_ms - self._at_ms))
                case do.ReportReady():
                    self._tell("is ready")
                    port.report(
                        co.TaskReady(
                            port.now_ms(),
                            instruction.attempt,
                            task,
                            origin=instruction.origin,
                            splits=instruction.splits,
                            rows_read=instruction.rows_read,
                        )
                    )
                case do.RequestSplits(attempt, first):
                    port.report(co.SplitsRequested(port.now_ms(), attempt, task, first))
                case do.ReportWatermark(attempt, watermark_ms, waits):
                    port.report(co.WatermarkReported(port.now_ms(), attempt, task, watermark_ms, waits))
                case do.AnswerTakeover():
                    port.report(answer_of(task, port.now_ms(), instruction))
                case do.ReportEndOfData():
                    self._tell("has come to the end of its input")
                    port.report(co.TaskReachedEndOfData(port.now_ms(), instruction.attempt, task, instruction.stop))
                case do.ReportFinished():
                    self._tell("has finished")
                    port.report(co.TaskFinished(port.now_ms(), instruction.attempt, task, self.machine.covered_by))
                case do.Acknowledge():
                    if log.isEnabledFor(logging.DEBUG):
                        self._log_acknowledgement(instruction)
                    port.report(
                        co.CheckpointAcknowledged(
                            port.now_ms(),
                            instruction.attempt,
                            task,
                            instruction.checkpoint_id,
                            instruction.state,
                            instruction.metrics,
                            instruction.kind,
                        )
                    )
                case do.Decline():
                    port.report(
                        co.CheckpointDeclined(
                            port.now_ms(),
                            instruction.attempt,
                            task,
                            instruction.checkpoint_id,
                            instruction.reason,
                            instruction.message,
                        )
                    )


class WorkTimes:
    """Measures how long a task has worked, was back-pressured, and was idle, in ms of the monotonic clock.

    The three times add up to the whole time.
    """

    __slots__ = ("back_pressured_ms", "busy_ms", "idle_ms", "until_ms")

    def __init__(self, begin_ms: int) -> None:
        self.busy_ms = self.back_pressured_ms = self.idle_ms = 0
        self.until_ms = begin_ms
        """Monotonic time, in ms, up to which the three times are counted."""

    def waited(self, now_ms: int, held_up: bool) -> None:
        """Adds the time until `now_ms` to the idle or back-pressured time.

        `held_up`: True for back-pressure, when the task may not process input before its output is sent.
        """
        passed_ms = now_ms - self.until_ms
        self.until_ms = now_ms
        if held_up:
            self.back_pressured_ms += passed_ms
        else:
            self.idle_ms += passed_ms

    def worked(self, now_ms: int) -> None:
        """Adds the time until `now_ms` to the time of work."""
        passed_ms = now_ms - self.until_ms
        self.until_ms = now_ms
        self.busy_ms += passed_ms
