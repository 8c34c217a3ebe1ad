"""`TaskMachine`: takes all decisions of one subtask.

`TaskHost` calls `handle(event)`, carries out the instructions that it returns, and reports the results as new events.
There is no I/O, clock, thread or randomness in here. `task_status.py` has its life, `invariants.py` its rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import singledispatchmethod

import pyarrow as pa

from tidegate.actors.task.barriers import make_handler
from tidegate.actors.task.channels.input_endings import InputEndings
from tidegate.actors.task.channels.input_gate import InputGate
from tidegate.actors.task.channels.turn_pacer import TaskPacers
from tidegate.actors.task.channels.watermark_valve import WatermarkValve
from tidegate.actors.task.checkpoints.changelog_writer import ChangelogWriter
from tidegate.actors.task.checkpoints.induced_checkpoints import InducedCheckpoints
from tidegate.actors.task.checkpoints.snapshot_parts import SnapshotParts
from tidegate.actors.task.checkpoints.subtask_checkpoints import SubtaskCheckpoints
from tidegate.actors.task.fence import CoordinatorFence, answer_to
from tidegate.actors.task.invariants import check_process, may_leave
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.pipeline.input_windows import InputWindows
from tidegate.actors.task.pipeline.operator_chain import OperatorChain
from tidegate.actors.task.pipeline.processing_timers import ProcessingTimeTimer
from tidegate.actors.task.pipeline.record_emitter import Emitter
from tidegate.actors.task.pipeline.source_cursor import SourceCursor
from tidegate.actors.task.pipeline.source_start import begin_source, report_ready
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.actors.task.task_status import TaskStatus
from tidegate.connectors.bad_rows import BAD_ROWS, RECORDS_LOST
from tidegate.operators.user_metrics import UserMetric, UserMetrics
from tidegate.protocol.failure_reasons import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.side_outputs import RECORDS_IN_ERRORS, SideOutput
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    Barrier,
    CancelBarrier,
    Element,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
)
from tidegate.state.common.backend import KeyedBackend
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot

STAGED_FILES_IN_FLIGHT_MAX = 4  # while so many sink files are being written, the task processes nothing


class TaskMachine:
    """One subtask of one attempt."""

    def __init__(self, descriptor: TaskDescriptor) -> None:
        d = self.descriptor = descriptor
        self.attempt: AttemptNumber = d.attempt
        assert (d.source is not None) != bool(d.inputs), "a task has a source or inputs"
        self.status = TaskStatus.CREATED
        self._instructions: list[do.TaskInstruction] = []
        self.inputs = self._inputs = InputGate(d.inputs, *d.limits.of_inputs)
        out = self._emitter = Emitter(d, self._instructions.append)
        self.outputs = self._outputs = self._emitter.gate
        place = d.task.subtask, d.parallelism, d.max_parallelism
        self.chain = self._chain = OperatorChain(d.operators, *place, *out.outputs, d.backend, out.emit_aside)
        self.watermarks = WatermarkValve(d.inputs)
        self._checkpoints = SubtaskCheckpoints(
            d,
            make_handler(frozenset(d.inputs), d.exactly_once),
            self._inputs,
            self._outputs,
            SnapshotParts(
                prepare=self._chain.prepare_snapshot,
                send=lambda: self._emitter.send(self._at_ms),
                stage=lambda: self._stage(force=True),
                freeze=self._freeze,
                finished=lambda: self._operators_finished,
                changed_rows=self._chain.changed_rows,
            ),
            self._instructions.append,
            ChangelogWriter.of(d.backend, self._chain, self._instructions.append),
        )
        self.source: SourceCursor | None = None
        self._source_metrics = UserMetrics("" if d.source is None else d.source.name)
        self._finishing: Iterator[None] = iter(())
        self._end = EndOfData(drain=True)
        self.covered_by: CheckpointId | None = None  # the completed checkpoint that lets the task end
        self._input_index = dict(zip(d.inputs, d.input_indices, strict=True))
        self._endings = InputEndings(self._input_index)
        self._induced, self.fence = InducedCheckpoints(), CoordinatorFence()
        self._pacer = TaskPacers(d.turn_rows, d.limits.turn_rows_max, bool(d.limits.debloat_target_ms))
        self._windows = InputWindows(d, self._inputs, self._pacer)
        self._processing_time = ProcessingTimeTimer(self._chain, self._instructions.append)
        self._at_ms, self._operators_finished = 0, False

    @property
    def user_metrics(self) -> tuple[UserMetric, ...]:
        """What functions of the user have counted, and how many records of the source were bad."""
        source = self.descriptor.source
        return (() if source is None else self._source_metrics.read(source.uid)) + self._chain.user_metrics

    @property
    def runnable(self) -> bool:
        """Whether a turn would process something: there is input, and room for its output."""
        if self.status not in (TaskStatus.RUNNING, TaskStatus.FINISHING, TaskStatus.END_OF_DATA):
            return False
        staging = self._checkpoints.tracker.files_in_flight >= STAGED_FILES_IN_FLIGHT_MAX
        waits = self._chain.callers.blocked and self.status is not TaskStatus.END_OF_DATA
        if staging or waits or self._outputs.over_limit:
            return False
        if self.status is TaskStatus.FINISHING or (self.status is TaskStatus.RUNNING and self._processing_time.due):
            return True
        if self.source is not None:
            return self.status is TaskStatus.RUNNING and (self.source.has_batch or self.source.at_end)
        return self._inputs.next_channel(self._checkpoints.blocks, self._checkpoints.blocks_for) is not None

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        """Take in one event, and return the instructions that follow. ProtocolError for what cannot happen.

        Whatever it raises, also of an operator, has failed the task."""
        assert not self._instructions
        if self.fence.refuses(event):
            return []
        self._at_ms = event.at_ms
        self._chain.set_time(event.at_ms)
        self._handler_of(type(event))(self, event)
        self._emitter.send(event.at_ms, isinstance(event, ev.TimerDue) and event.timer is ev.TaskTimer.FLUSH)
        self._finish_task_if_over()
        self._checkpoints.settle(event.at_ms)
        if self.status is TaskStatus.RUNNING and not self._operators_finished:
            self._processing_time.set()
        self._instructions += self._chain.callers.take_calls(self.status)
        self._read_ahead()
        instructions, self._instructions[:] = list(self._instructions), ()
        return instructions

    def close(self) -> None:
        """The task ends here, whatever its status: let the operators release what they hold. May be called again."""
        self._chain.close()

    def hand_over(self) -> Mapping[OperatorUid, KeyedBackend]:
        """Keyed state that the next attempt may go on with. Nothing but `close` is called afterwards."""
        goes_on = self.status in (TaskStatus.READY, TaskStatus.RUNNING) and not self._operators_finished
        return self._chain.hand_over() if goes_on else {}

    # --- events ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.TaskEvent) -> None:
        raise ProtocolError(f"a task is not told {type(event).__name__}")

    @_on.register
    def _on_restored(self, event: ev.TaskRestored) -> None:
        if self.status is not TaskStatus.CREATED:
            raise ProtocolError(f"{self.descriptor.task} is {self.status.value} and was told that it is restored")
        tables = dict(event.tables)
        self.source = begin_source(self.descriptor, self._chain, tables, event.finished)
        self._checkpoints.restored(event.lineage)
        self._operators_finished = event.finished
        if not event.finished:
            self._chain.open(tables, event.checkpoint_id, event.kept)
        for channel, elements in event.in_flight:
            if event.finished:
                raise ProtocolError(f"{self.descriptor.task} has finished and was restored with input of {channel}")
            self._inputs.recover(channel, elements)
        # Not RUNNING yet: sources, restored input and due timers would emit to tasks that may not be there.
        self.status = TaskStatus.READY
        self._instructions.append(report_ready(self.descriptor, self.source, event))

    @_on.register
    def _on_started(self, event: ev.TasksStarted) -> None:
        if self.status is TaskStatus.READY:
            self.status = TaskStatus.RUNNING

    @_on.register
    def _on_took_over(self, event: ev.CoordinatorTookOver) -> None:
        if event.attempt == self.attempt:
            known = self.covered_by, self._checkpoints.taken, self._checkpoints.handler.pending
            self._instructions.append(answer_to(event, self.status, *known))

    @_on.register
    def _on_frame(self, event: ev.FrameArrived) -> None:
        if event.attempt == self.attempt:
            new = self._inputs[event.channel].accept(event.first_sequence, event.elements)
            if not event.elements:
                self._instructions.append(self._windows.grant(self._inputs[event.channel]))
            self._checkpoints.arrived(event.channel, new, event.at_ms)

    @_on.register
    def _on_credit(self, event: ev.CreditGranted) -> None:
        if event.attempt == self.attempt:
            self._outputs[event.channel].grant(event.total_bytes, event.window_bytes)

    @_on.register
    def _on_timer(self, event: ev.TimerDue) -> None:
        match event.timer:
            case ev.TaskTimer.FLUSH:
                self._emitter.flush_due()
            case ev.TaskTimer.CREDIT:
                self._emitter.probe_due()
            case ev.TaskTimer.ALIGNMENT:
                self._checkpoints.timer(max(event.at_ms, event.due_at_ms))
            case ev.TaskTimer.PROCESSING_TIME:
                self._processing_time.fired(max(event.at_ms, event.due_at_ms))
            case _ if self.source is not None:
                self.source.timer_due(event.timer)

    @_on.register
    def _on_turn(self, event: ev.TurnGranted) -> None:
        self._pacer.next_turn(self._chain.pace, event.last_turn_ms)
        self._instructions += self._windows.next_turn(event.last_turn_ms, event.waited_ms)
        if not self.runnable:
            return
        if self.status is TaskStatus.FINISHING:
            self._finish_step()
        elif self.status is TaskStatus.RUNNING and self._processing_time.due:
            self._processing_time.run(event.at_ms)
            self._stage(force=False)
        elif self.source is not None:
            self._process_source(self.source)
        else:
            self._process_input(event.at_ms)
        self._outputs.turn_over(self._chain.pace.rows)
        self._windows.turn_over(self._inputs.waits(self._checkpoints.blocks, self._checkpoints.blocks_for))

    @_on.register
    def _on_batch_read(self, event: ev.SourceBatchRead) -> None:
        if self.source is None:
            raise ProtocolError(f"{self.descriptor.task} has no source and was read for")
        if (pause_ms := self.source.batch_read(event)) is not None:
            self._instructions.append(do.SetTaskTimer(ev.TaskTimer.SOURCE, event.at_ms + pause_ms))

    @_on.register
    def _on_told_of_source(self, event: ev.SplitsAssigned | ev.WatermarkAnnounced) -> None:
        if self.source is not None and event.attempt == self.attempt:
            self.source.told(event)

    @_on.register
    def _on_trigger(self, event: ev.CheckpointTriggered) -> None:
        if event.attempt != self.attempt:
            return
        if self.status in (TaskStatus.CREATED, TaskStatus.READY, TaskStatus.FINISHED):
            over = self.status is TaskStatus.FINISHED
            reason = CheckpointFailureReason.TASK_CLOSING if over else CheckpointFailureReason.TASK_NOT_READY
            self._checkpoints.decline(
                event.checkpoint_id, reason, f"task {self.descriptor.task} is {self.status.value}"
            )
            return
        reading = self.source is not None and self.status is TaskStatus.RUNNING
        barrier = Barrier(event.checkpoint_id, event.triggered_at_ms, event.options, event.base)
        if reading and self.descriptor.externally_induced and not event.options.kind.is_savepoint:
            self._induced.triggered(barrier)
            return
        if reading and event.options.kind.stops:
            # The data ends first, so that the savepoint's barrier comes after everything (FLIP-147, revised steps).
            self._end_data(EndOfData(event.options.kind is SnapshotKind.TERMINATE, event.checkpoint_id))
        self._checkpoints.trigger(barrier, event.at_ms)

    @_on.register
    def _on_abort(self, event: ev.CheckpointAborted) -> None:
        if event.attempt == self.attempt:
            self._induced.aborted(event.checkpoint_id)
            self._checkpoints.abort(event.checkpoint_id, event.at_ms)

    @_on.register
    def _on_complete(self, event: ev.CheckpointCompleted) -> None:
        if event.attempt != self.attempt:
            return
        self._chain.checkpoint_completed(event.checkpoint_id)
        snapshot = self._checkpoints.completed(event.checkpoint_id)
        if snapshot is not None and (snapshot.finished or event.checkpoint_id == self._checkpoints.stopping):
            self.covered_by = event.checkpoint_id

    @_on.register
    def _on_written(self, event: ev.WriteAnswered) -> None:
        self._checkpoints.written(event)

    @_on.register
    def _on_staged(self, event: ev.FileStaged) -> None:
        self._checkpoints.tracker.files[event.uid].durable(event.index, event.file)

    @_on.register
    def _on_answered(self, event: ev.CallsAnswered) -> None:
        self._chain.callers.answered(event.answers, self.status)
        self._stage(force=False)

    _handler_of = staticmethod(_on.dispatcher.dispatch)  # as in `CoordinatorMachine`: `self._on` makes functions

    # --- processing -----------------------------------------------------------------------------------------------

    def _process_source(self, source: SourceCursor) -> None:
        if source.has_batch:
            batch, bad, lost, induces = source.take()
            if lost:
                self._source_metrics.counter(RECORDS_LOST).inc(lost)
            if bad is not None:
                self._set_aside(bad)
            if batch is not None:
                self._process_batch(batch, 0)
            else:
                self._chain.splits_moved()
            if induces is not None:
                self._checkpoints.trigger(self._induced.induced(induces, self._at_ms), self._at_ms)
        elif source.at_end:
            self._end_data(EndOfData(drain=True))

    def _set_aside(self, bad: pa.RecordBatch) -> None:
        """Count dead letters, and send them to whatever reads them: in the same turn in which the position moves on."""
        assert self.descriptor.source is not None
        self._source_metrics.counter(RECORDS_IN_ERRORS).inc(bad.num_rows)
        self._emitter.emit_aside(SideOutput(self.descriptor.source.uid, BAD_ROWS), bad)

    def _process_input(self, at_ms: int) -> None:
        channel = self._inputs.next_channel(self._checkpoints.blocks, self._checkpoints.blocks_for)
        assert channel is not None
        element = channel.take(self._pacer.rows_within(self._outputs.turn_rows_max))
        self._inputs.served()
        self._process(channel.channel, element, at_ms)
        self._instructions += self._windows.taken(channel, self._chain.pace.rows)

    def _process(self, channel: ChannelId, element: Element, at_ms: int) -> None:
        check_process(self._checkpoints.blocks(channel))
        if isinstance(element, pa.RecordBatch):
            self._process_batch(element, self._input_index[channel])
        elif isinstance(element, Barrier):
            self._checkpoints.barrier(channel, element, at_ms)
        elif isinstance(element, CancelBarrier):
            self._checkpoints.cancel_barrier(channel, element.checkpoint_id, at_ms)
        elif isinstance(element, Watermark):
            self._advance(self.watermarks.watermark(channel, element))
        elif isinstance(element, WatermarkStatus):
            self._advance(self.watermarks.status(channel, element))
        elif isinstance(element, EndOfData):
            self._end_input(self._endings.end_data(channel, element))
        else:
            assert isinstance(element, EndOfPartition)
            self._endings.end_partition(channel)
            self._checkpoints.channel_ended(channel, at_ms)

    def _process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._operators_finished:
            raise ProtocolError(f"{self.descriptor.task} has finished its operators and got {batch.num_rows} rows")
        self._chain.process(batch, input_index)
        self._stage(force=False)

    def _advance(self, elements: list[Watermark | WatermarkStatus]) -> None:
        """Pass on a new watermark, or that the inputs became idle or active."""
        for element in elements:
            if isinstance(element, Watermark) and not self._operators_finished:
                self._chain.advance_watermark(element.timestamp_ms)
                self._stage(force=False)
            else:
                self._outputs.broadcast(element)

    def _end_input(self, index: int | None) -> None:
        """A channel's data has ended. `index`: the input whose last channel this was; None: others are still open."""
        if index is not None and self._endings.end.drain and not self._operators_finished:
            self._chain.end_input(index)
            self._stage(force=False)
        if self._endings.data_over:
            self._end_data(self._endings.end)

    def _end_data(self, end: EndOfData) -> None:
        self._end = end
        if not self._operators_finished:
            self._finishing = self._chain.finish(end.drain)
        if end.drain and self.source is not None:
            self._advance([Watermark(MAX_WATERMARK_MS)])
        self.status = TaskStatus.FINISHING
        self._checkpoints.hold()
        for barrier in self._induced.take_rest():
            self._checkpoints.trigger(barrier, self._at_ms)

    def _finish_step(self) -> None:
        """Let the operators emit one more step of what they have left. After the last step the data has ended."""
        for _ in self._finishing:
            self._stage(force=False)
            return
        self._operators_finished = self._operators_finished or self._end.drain
        self.status = TaskStatus.END_OF_DATA
        self._outputs.broadcast(self._end)
        self._instructions.append(do.ReportEndOfData(self.attempt, self._end.stop))
        self._checkpoints.release(self._at_ms)

    def _finish_task_if_over(self) -> None:
        """End the task once all its output has left: afterwards it has nothing in flight and gets no barrier."""
        covered, ended = self.covered_by is not None, self.status is TaskStatus.END_OF_DATA
        if not (ended and may_leave(covered, self._endings.partitions_over, self._outputs.empty)):
            return
        self._chain.close()
        self._outputs.broadcast(EndOfPartition())
        self._emitter.send(self._at_ms)
        self.status = TaskStatus.FINISHED
        self._instructions.append(do.ReportFinished(self.attempt))

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _freeze(self, cut: Cut) -> tuple[OperatorSnapshot, ...]:
        snapshots = [] if self._operators_finished else self._chain.snapshot(cut)
        if self.source is not None and (source := self.descriptor.source) is not None:
            snapshots.insert(0, OperatorSnapshot(source.uid, (self.source.freeze(),)))
        return tuple(snapshots)

    def _stage(self, force: bool) -> None:
        self._instructions += self._checkpoints.tracker.stage(self._chain.take_pending(force))

    # --- output and reading ---------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        if self.source is None or self.status is not TaskStatus.RUNNING:
            return
        rows_max = None if self._outputs.over_limit else self._pacer.rows_within(self._outputs.turn_rows_max)
        self._instructions += self.source.next_steps(rows_max, self._at_ms)
