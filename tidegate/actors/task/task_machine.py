"""`TaskMachine`: the state machine of one subtask, which turns events into instructions.

`TaskDriver` calls `handle(event)`, carries out the returned instructions, and reports the results as new events. There
is no I/O, clock, thread or randomness in this module. `TaskStatus` has the states of a task, `invariants.py` its rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import singledispatchmethod
from typing import TypeGuard, get_args

import pyarrow as pa

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.barrier_aligner import make_handler
from tidegate.actors.task.emitter import Emitter
from tidegate.actors.task.input_gate import InputChannel, InputGate
from tidegate.actors.task.instructions import GrantCredit
from tidegate.actors.task.invariants import check_process, may_leave, may_obey
from tidegate.actors.task.operator_chain import OperatorChain, ProcessingTimeTimer
from tidegate.actors.task.snapshots import ChangelogWriter
from tidegate.actors.task.source_cursor import SourceCursor, begin_source, report_ready
from tidegate.actors.task.subtask_checkpoints import SnapshotParts, SubtaskCheckpoints
from tidegate.actors.task.task_commits import COMMITS_BEHIND_MAX
from tidegate.actors.task.task_descriptor import TaskDescriptor, TaskStatus
from tidegate.actors.task.turn_pacer import Debloater, TaskPacers
from tidegate.connectors.bad_rows import BAD_ROWS, RECORDS_LOST
from tidegate.connectors.committing_sink import PENDING_COMMITS
from tidegate.connectors.source import PENDING_RECORDS, PENDING_RECORDS_MAX
from tidegate.operators.user_metrics import UserMetric, UserMetrics
from tidegate.protocol.edges import RECORDS_IN_ERRORS, SideOutput
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import (
    ALIGNED_BARRIER,
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
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

STAGED_FILES_IN_FLIGHT_MAX = 4  # while this many sink files are being written, the task processes nothing


class TaskMachine:
    """The state machine of one subtask in one attempt."""

    def __init__(self, descriptor: TaskDescriptor) -> None:
        d = self.descriptor = descriptor
        self.attempt: AttemptNumber = d.attempt
        assert (d.source is not None) != bool(d.inputs), "a task has a source or inputs"
        self.status = TaskStatus.CREATED
        self._instructions: list[do.TaskInstruction] = []
        self.inputs = InputGate(
            d.inputs,
            window_bytes=d.limits.first_window_bytes,
            merged_rows_max=d.limits.merged_rows_max,
            credit_bytes_max=d.limits.credit_bytes,
        )
        self._emitter = Emitter(d, self._instructions.append)
        self.outputs = self._emitter.gate
        self.chain = OperatorChain(
            d.operators,
            subtask=d.task.subtask,
            parallelism=d.parallelism,
            max_parallelism=d.max_parallelism,
            output=self._emitter.emit,
            output_watermark=self._emitter.emit_watermark,
            output_idle=self._emitter.emit_idle,
            backend=d.backend,
            output_aside=self._emitter.emit_aside,
        )
        self.watermarks = WatermarkValve(d.inputs)
        self.checkpoints = SubtaskCheckpoints(
            d,
            make_handler(frozenset(d.inputs), d.exactly_once),
            self.inputs,
            self.outputs,
            SnapshotParts(
                prepare=self.chain.prepare_snapshot,
                send=lambda: self._emitter.send(self._at_ms),
                stage=lambda: self._stage(force=True),
                freeze=self._freeze,
                finished=lambda: self._operators_finished,
                changed_rows=self.chain.changed_rows,
            ),
            self._instructions.append,
            ChangelogWriter.of(d.backend, self.chain, self._instructions.append),
        )
        self.source: SourceCursor | None = None
        self._source_metrics = UserMetrics("" if d.source is None else d.source.name)
        self._sink_metrics = {spec.uid: UserMetrics(spec.name) for spec in d.operators if spec.committing is not None}
        self._finishing: Iterator[None] = iter(())
        self._end = EndOfData(drain=True)
        self._restored: ev.TaskRestored | None = None
        """The restored data with which the task starts, until its prepared rows are committed, else None."""
        self.covered_by: CheckpointId | None = None  # the completed checkpoint that lets the task end
        self._input_index = dict(zip(d.inputs, d.input_indices, strict=True))
        self._endings = InputEndings(self._input_index)
        self._induced = InducedCheckpoints()
        self.fence = CoordinatorFence()
        self._pacer = TaskPacers(d.turn_rows, d.limits.turn_rows_max, bool(d.limits.debloat_target_ms))
        self._windows = InputWindows(d, self.inputs, self._pacer)
        self._processing_time = ProcessingTimeTimer(self.chain, self._instructions.append)
        self._at_ms = 0
        self._operators_finished = False

    @property
    def user_metrics(self) -> tuple[UserMetric, ...]:
        """Returns the metrics of the user's functions, of the source (bad, lost and unread records), and of the
        sinks' commits.
        """
        source = self.descriptor.source
        if self.source is not None and (behind := self.source.behind):
            self._source_metrics.gauge(PENDING_RECORDS).set(sum(behind))
            self._source_metrics.gauge(PENDING_RECORDS_MAX).set(max(behind))
        of_sinks: tuple[UserMetric, ...] = ()
        for uid, metrics in self._sink_metrics.items():
            metrics.gauge(PENDING_COMMITS).set(self.checkpoints.tracker.commits[uid].behind)
            of_sinks += metrics.read(uid)
        of_source = () if source is None else self._source_metrics.read(source.uid)
        return of_source + self.chain.user_metrics + of_sinks

    @property
    def runnable(self) -> bool:
        """Returns whether the task has work for a turn, such as input, and room for the output of that work."""
        if self.status not in (TaskStatus.RUNNING, TaskStatus.FINISHING, TaskStatus.END_OF_DATA):
            return False
        tracker = self.checkpoints.tracker
        staging = tracker.files_in_flight >= STAGED_FILES_IN_FLIGHT_MAX or tracker.commits_behind >= COMMITS_BEHIND_MAX
        waits = self.chain.callers.blocked and self.status is not TaskStatus.END_OF_DATA
        if staging or waits or self.outputs.over_limit:
            return False
        if self.status is TaskStatus.FINISHING or (self.status is TaskStatus.RUNNING and self._processing_time.due):
            return True
        if self.source is not None:
            return self.status is TaskStatus.RUNNING and (self.source.has_batch or self.source.at_end)
        return self.inputs.next_channel(self.checkpoints.blocks, self.checkpoints.blocks_for) is not None

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        """Handles one event, and returns the instructions to carry out, in order.

        Raises ProtocolError for an event that is not allowed. Any exception, also of an operator, fails the task.
        """
        assert not self._instructions
        if self.fence.refuses(event):
            return []
        self._at_ms = event.at_ms
        self.chain.set_time(event.at_ms)
        self._handler_of(type(event))(self, event)
        self._emitter.send(event.at_ms, isinstance(event, ev.TimerDue) and event.timer is ev.TaskTimer.FLUSH)
        self._finish_task_if_over()
        self.checkpoints.settle(event.at_ms)
        if self.status is TaskStatus.RUNNING and not self._operators_finished:
            self._processing_time.set()
        self._instructions += self.chain.callers.take_calls(self.status)
        self._instructions += self.checkpoints.tracker.next_commits()
        self._read_ahead()
        instructions = list(self._instructions)
        self._instructions[:] = ()
        return instructions

    def close(self) -> None:
        """Closes the operators, in any status of the task. May be called again."""
        self.chain.close()

    def hand_over(self) -> Mapping[OperatorUid, KeyedBackend]:
        """Returns the keyed state backends that the next attempt can reuse, by operator. Only `close` may be
        called afterwards.
        """
        goes_on = self.status in (TaskStatus.READY, TaskStatus.RUNNING) and not self._operators_finished
        return self.chain.hand_over() if goes_on else {}

    # --- events ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.TaskEvent) -> None:
        raise ProtocolError(
            f"a task does not take events of type {type(event).__name__}, which is not a task event; this is a bug in "
            "tidegate, please report it"
        )

    @_on.register
    def _on_restored(self, event: ev.TaskRestored) -> None:
        if self.status is not TaskStatus.CREATED or self._restored is not None:
            raise ProtocolError(
                f"{self.descriptor.task} is {self.status.value} and got `TaskRestored` again; this is a bug in "
                "tidegate, please report it"
            )
        for rows in event.prepared:
            self.checkpoints.tracker.commits[rows.uid].restored((rows,))
        self._restored = event
        self._begin_if_committed()

    @_on.register
    def _on_rows_committed(self, event: ev.RowsCommitted) -> None:
        self.checkpoints.tracker.commits[event.uid].committed(event.rows)
        self._begin_if_committed()

    def _begin_if_committed(self) -> None:
        """Opens the operators of a restored task, once the prepared rows of its checkpoint are committed."""
        event = self._restored
        if event is None or not self.checkpoints.tracker.all_committed:
            return
        self._restored = None
        tables = dict(event.tables)
        self.source = begin_source(self.descriptor, self.chain, tables, event.finished)
        self.checkpoints.restored(event.lineage)
        self._operators_finished = event.finished
        if not event.finished:
            self.chain.open(tables, event.checkpoint_id, event.kept)
        for channel, elements in event.in_flight:
            if event.finished:
                raise ProtocolError(
                    f"{self.descriptor.task} has finished and was restored with input of {channel}; this is a bug in "
                    "tidegate, please report it"
                )
            self.inputs.recover(channel, elements)
        # Not RUNNING yet: sources, restored input and due timers would emit to tasks that may not be there.
        self.status = TaskStatus.READY
        self._instructions.append(report_ready(self.descriptor, self.source, event))

    @_on.register
    def _on_started(self, event: ev.TasksStarted) -> None:
        if self.status is TaskStatus.READY:
            self.status = TaskStatus.RUNNING
            if self.chain.splits.all_idle:
                # All its splits only find others. Without rows no turn would report that the task is idle.
                self.chain.splits_moved()

    @_on.register
    def _on_took_over(self, event: ev.CoordinatorTookOver) -> None:
        if event.attempt == self.attempt:
            self._instructions.append(
                answer_to(
                    event,
                    self.status,
                    covered_by=self.covered_by,
                    snapshotted=self.checkpoints.taken,
                    collecting=self.checkpoints.handler.pending,
                )
            )

    @_on.register
    def _on_frame(self, event: ev.FrameArrived) -> None:
        if event.attempt == self.attempt:
            new = self.inputs[event.channel].accept(event.first_sequence, event.elements)
            if not event.elements:
                self._instructions.append(self._windows.grant(self.inputs[event.channel]))
            self.checkpoints.arrived(event.channel, new, event.at_ms)

    @_on.register
    def _on_credit(self, event: ev.CreditGranted) -> None:
        if event.attempt == self.attempt:
            self.outputs[event.channel].grant(event.total_bytes, event.window_bytes)

    @_on.register
    def _on_timer(self, event: ev.TimerDue) -> None:
        match event.timer:
            case ev.TaskTimer.FLUSH:
                self._emitter.flush_due()
            case ev.TaskTimer.CREDIT:
                self._emitter.probe_due()
            case ev.TaskTimer.ALIGNMENT:
                self.checkpoints.timer(max(event.at_ms, event.due_at_ms))
            case ev.TaskTimer.PROCESSING_TIME:
                self._processing_time.fired(max(event.at_ms, event.due_at_ms))
            case _ if self.source is not None:
                self.source.timer_due(event.timer)

    @_on.register
    def _on_turn(self, event: ev.TurnGranted) -> None:
        self._pacer.next_turn(self.chain.pace, event.last_turn_ms)
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
        self.outputs.turn_over(self.chain.pace.rows)
        self._windows.turn_over(self.inputs.waits(self.checkpoints.blocks, self.checkpoints.blocks_for))

    @_on.register
    def _on_batch_read(self, event: ev.SourceBatchRead) -> None:
        if self.source is None:
            raise ProtocolError(
                f"{self.descriptor.task} has no source, but got the result of a read; this is a bug in tidegate, "
                "please report it"
            )
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
            self.checkpoints.decline(event.checkpoint_id, reason, f"task {self.descriptor.task} is {self.status.value}")
            return
        reading = self.source is not None and self.status is TaskStatus.RUNNING
        barrier = Barrier(event.checkpoint_id, event.triggered_at_ms, event.options, event.base)
        if reading and self.descriptor.externally_induced and not event.options.kind.is_savepoint:
            self._induced.triggered(barrier)
            return
        if reading and event.options.kind.stops:
            # The data ends first, so that the savepoint's barrier comes after everything (FLIP-147, revised steps).
            self._end_data(EndOfData(event.options.kind is SnapshotKind.TERMINATE, event.checkpoint_id))
        self.checkpoints.trigger(barrier, event.at_ms)

    @_on.register
    def _on_abort(self, event: ev.CheckpointAborted) -> None:
        if event.attempt == self.attempt:
            self._induced.aborted(event.checkpoint_id)
            self.checkpoints.abort(event.checkpoint_id, event.at_ms)

    @_on.register
    def _on_complete(self, event: ev.CheckpointCompleted) -> None:
        if event.attempt != self.attempt:
            return
        self.chain.checkpoint_completed(event.checkpoint_id)
        if self.source is not None:
            self._instructions += self.source.completed(event.checkpoint_id)
        snapshot = self.checkpoints.completed(event.checkpoint_id)
        if snapshot is not None and (snapshot.finished or event.checkpoint_id == self.checkpoints.stopping):
            self.covered_by = event.checkpoint_id

    @_on.register
    def _on_written(self, event: ev.WriteAnswered) -> None:
        self.checkpoints.written(event)

    @_on.register
    def _on_staged(self, event: ev.FileStaged) -> None:
        self.checkpoints.tracker.staged(event)

    @_on.register
    def _on_answered(self, event: ev.CallsAnswered) -> None:
        self.chain.callers.answered(event.answers, self.status)
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
                self.chain.splits_moved()
            if induces is not None:
                self.checkpoints.trigger(self._induced.induced(induces, self._at_ms), self._at_ms)
        elif source.at_end:
            self._end_data(EndOfData(drain=True))

    def _set_aside(self, bad: pa.RecordBatch) -> None:
        """Sends records that the source could not decode to their side output, and counts them.

        Called in the turn in which the position advances beyond these records.
        """
        assert self.descriptor.source is not None
        self._source_metrics.counter(RECORDS_IN_ERRORS).inc(bad.num_rows)
        self._emitter.emit_aside(SideOutput(self.descriptor.source.uid, BAD_ROWS), bad)

    def _process_input(self, at_ms: int) -> None:
        channel = self.inputs.next_channel(self.checkpoints.blocks, self.checkpoints.blocks_for)
        assert channel is not None
        element = channel.take(self._pacer.rows_within(self.outputs.turn_rows_max))
        self.inputs.served()
        self._process(channel.channel, element, at_ms)
        self._instructions += self._windows.taken(channel, self.chain.pace.rows)

    def _process(self, channel: ChannelId, element: Element, at_ms: int) -> None:
        check_process(self.checkpoints.blocks(channel))
        if isinstance(element, pa.RecordBatch):
            self._process_batch(element, self._input_index[channel])
        elif isinstance(element, Barrier):
            self.checkpoints.barrier(channel, element, at_ms)
        elif isinstance(element, CancelBarrier):
            self.checkpoints.cancel_barrier(channel, element.checkpoint_id, at_ms)
        elif isinstance(element, Watermark):
            self._advance(self.watermarks.watermark(channel, element))
        elif isinstance(element, WatermarkStatus):
            self._advance(self.watermarks.status(channel, element))
        elif isinstance(element, EndOfData):
            self._end_input(self._endings.end_data(channel, element))
        else:
            assert isinstance(element, EndOfPartition)
            self._endings.end_partition(channel)
            self.checkpoints.channel_ended(channel, at_ms)

    def _process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._operators_finished:
            raise ProtocolError(
                f"{self.descriptor.task} got {batch.num_rows} rows after its operators had finished; this is a bug in "
                "tidegate, please report it"
            )
        self.chain.process(batch, input_index)
        self._stage(force=False)

    def _advance(self, elements: list[Watermark | WatermarkStatus]) -> None:
        """Passes watermarks to the operator chain, and idle or active statuses to the outputs."""
        for element in elements:
            if isinstance(element, Watermark) and not self._operators_finished:
                self.chain.advance_watermark(element.timestamp_ms)
                self._stage(force=False)
            else:
                self.outputs.broadcast(element)

    def _end_input(self, index: int | None) -> None:
        """Handles the end of a channel's data. `index`: the input whose last channel has ended, or None if it has
        open channels.
        """
        if index is not None and self._endings.end.drain and not self._operators_finished:
            self.chain.end_input(index)
            self._stage(force=False)
        if self._endings.data_over:
            self._end_data(self._endings.end)

    def _end_data(self, end: EndOfData) -> None:
        self._end = end
        if not self._operators_finished:
            self._finishing = self.chain.finish(end.drain)
        if end.drain and self.source is not None:
            self._advance([Watermark(MAX_WATERMARK_MS)])
        self.status = TaskStatus.FINISHING
        self.checkpoints.hold()
        for barrier in self._induced.take_rest():
            self.checkpoints.trigger(barrier, self._at_ms)

    def _finish_step(self) -> None:
        """Makes the operators emit one more step of their remaining rows. After the last step the data has ended."""
        for _ in self._finishing:
            self._stage(force=False)
            return
        self._operators_finished = self._operators_finished or self._end.drain
        self.status = TaskStatus.END_OF_DATA
        self.outputs.broadcast(self._end)
        self._instructions.append(do.ReportEndOfData(self.attempt, self._end.stop))
        self.checkpoints.release(self._at_ms)

    def _finish_task_if_over(self) -> None:
        """Ends the task, if a completed checkpoint covers it and all its output was sent."""
        covered = self.covered_by is not None
        ended = self.status is TaskStatus.END_OF_DATA
        committed = self.checkpoints.tracker.all_committed
        if not (ended and may_leave(covered, self._endings.partitions_over, self.outputs.empty, committed)):
            return
        self.chain.close()
        self.outputs.broadcast(EndOfPartition())
        self._emitter.send(self._at_ms)
        self.status = TaskStatus.FINISHED
        self._instructions.append(do.ReportFinished(self.attempt))

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _freeze(self, cut: Cut) -> tuple[OperatorSnapshot, ...]:
        snapshots = [] if self._operators_finished else self.chain.snapshot(cut)
        if self.source is not None and (source := self.descriptor.source) is not None:
            snapshots.insert(0, OperatorSnapshot(source.uid, (self.source.freeze(self.checkpoints.taken),)))
        return tuple(snapshots)

    def _stage(self, force: bool) -> None:
        taken = self.chain.take_pending(force)
        self._instructions += self.checkpoints.tracker.stage(taken, self.checkpoints.taken)

    # --- output and reading ---------------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        if self.source is None or self.status is not TaskStatus.RUNNING:
            return
        rows_max = None if self.outputs.over_limit else self._pacer.rows_within(self.outputs.turn_rows_max)
        self._instructions += self.source.next_steps(rows_max, self._at_ms)


_ORDERS: tuple[type, ...] = get_args(ev.CoordinatorOrder)


def is_order(event: ev.TaskEvent) -> TypeGuard[ev.CoordinatorOrder]:
    """Returns whether an event is an order, which only a coordinator sends."""
    return isinstance(event, _ORDERS)


class CoordinatorFence:
    """Makes a task obey only the newest coordinator that has sent it a message.

    A replaced coordinator may not have noticed its replacement, and may still send orders. `TaskDriver` and
    `TaskMachine` check the fence before they handle an event. The rule itself is `may_obey` in `invariants.py`.
    """

    def __init__(self) -> None:
        self.generation = ev.UNFENCED

    def refuses(self, event: ev.TaskEvent) -> bool:
        """Returns whether an event is an order of a replaced coordinator, and must be ignored. Stores a newer
        generation.
        """
        if not is_order(event):
            return False
        generation = event.generation
        if not may_obey(generation, self.generation):
            return True
        self.generation = generation
        return False


def answer_to(
    event: ev.CoordinatorTookOver,
    status: TaskStatus,
    covered_by: CheckpointId | None,
    snapshotted: CheckpointId,
    collecting: CheckpointId | None,
) -> do.AnswerTakeover:
    """Returns the status of the task for a new coordinator.

    `TaskAnswered` explains `covered_by`, `snapshotted` and `collecting`.
    """
    return do.AnswerTakeover(
        event.attempt,
        event.generation,
        started=status not in (TaskStatus.CREATED, TaskStatus.READY),
        ended=status in (TaskStatus.END_OF_DATA, TaskStatus.FINISHED),
        finished=status is TaskStatus.FINISHED,
        covered_by=covered_by,
        snapshotted=snapshotted,
        collecting=collecting,
    )


class WatermarkValve:
    """Computes the watermark of a task: the smallest watermark of its active channels (Flink's StatusWatermarkValve).

    If all channels are idle, it is the greatest watermark of the channels, because the task waits for none of them. A
    channel that ends without the last watermark stops the task's watermark.
    """

    def __init__(self, channels: Sequence[ChannelId]) -> None:
        self._watermark_ms = dict.fromkeys(channels, MIN_WATERMARK_MS)
        self._idle: set[ChannelId] = set()
        self._emitted_ms = MIN_WATERMARK_MS
        self._all_idle = False

    @property
    def reached_ms(self) -> int | None:
        """Returns the watermark of the task in ms since 1970, or None before all inputs have one."""
        return None if self._emitted_ms == MIN_WATERMARK_MS else self._emitted_ms

    def watermark(self, channel: ChannelId, watermark: Watermark) -> list[Watermark | WatermarkStatus]:
        """Handles a new watermark of a channel, and returns the elements to pass on. A watermark lower than the
        channel's previous one is ignored.
        """
        if watermark.timestamp_ms > self._watermark_ms[channel]:
            self._watermark_ms[channel] = watermark.timestamp_ms
        return self._advance()

    def status(self, channel: ChannelId, status: WatermarkStatus) -> list[Watermark | WatermarkStatus]:
        """Handles a channel that became idle or active, and returns the elements to pass on."""
        if status.idle:
            self._idle.add(channel)
        else:
            self._idle.discard(channel)
        all_idle = len(self._idle) == len(self._watermark_ms)
        changed: list[Watermark | WatermarkStatus] = []
        if all_idle != self._all_idle:
            self._all_idle = all_idle
            changed.append(WatermarkStatus(all_idle))
        advanced = self._advance()
        return advanced + changed if all_idle else changed + advanced

    def _advance(self) -> list[Watermark | WatermarkStatus]:
        active = [ms for channel, ms in self._watermark_ms.items() if channel not in self._idle]
        # If all are idle no channel is waited for: the greatest watermark counts, in whatever order they became idle.
        reached_ms = min(active) if active else max(self._watermark_ms.values())
        if reached_ms <= self._emitted_ms:
            return []
        self._emitted_ms = reached_ms
        return [Watermark(reached_ms)]


class InputEndings:
    """Tracks which inputs of a task have ended.

    `EndOfData` ends the data of a channel: when all data has ended, the task machine finishes the operators.
    `EndOfPartition` ends the channel itself: the task ends only when all channels have ended.
    """

    def __init__(self, indices: Mapping[ChannelId, int]) -> None:
        self._indices = indices
        self._data_open = set(indices)
        self._partitions_open = set(indices)
        self.end = EndOfData(drain=True)
        """The combined `EndOfData` of the channels so far. It drains if all channels drain. `stop` comes from the
        newest one.
        """

    @property
    def data_over(self) -> bool:
        """Returns whether the data of all channels has ended."""
        return not self._data_open

    @property
    def partitions_over(self) -> bool:
        """Returns whether all channels have delivered their last element. True for a task without channels."""
        return not self._partitions_open

    def end_data(self, channel: ChannelId, end: EndOfData) -> int | None:
        """Handles the end of a channel's data. Returns the input whose last channel has ended by that, or None."""
        self._data_open.discard(channel)
        self.end = EndOfData(self.end.drain and end.drain, end.stop)
        index = self._indices[channel]
        return None if any(self._indices[c] == index for c in self._data_open) else index

    def end_partition(self, channel: ChannelId) -> None:
        """Records that a channel has delivered its last element."""
        self._partitions_open.discard(channel)


class InputWindows:
    """Sets how many bytes the senders of a task may have in flight (the window), and grants credit to them.

    The task machine calls it when turns begin and end. `Debloater` computes the size. Rules:

    - Without a target time (`debloat_target_ms`) every window is the whole credit. With one it may be larger, because
      it is also the size of the sender's queue.
    - A smaller window is announced to the sender at once. Otherwise no grant would come before all elements in flight
      were processed. A larger window is announced with the next grant.
    - The window of a channel whose data has ended is shared among the other channels.
    """

    def __init__(self, descriptor: TaskDescriptor, gate: InputGate, pacer: TaskPacers) -> None:
        limits = descriptor.limits
        self._attempt = descriptor.attempt
        self._gate = gate
        self._pacer = pacer
        self._debloater: Debloater | None = None
        if descriptor.inputs and limits.debloat_target_ms:
            first_bytes = limits.first_window_bytes
            most_bytes = limits.widest_window_bytes
            least_bytes = min(limits.window_bytes_min, most_bytes)
            self._debloater = Debloater(limits.debloat_target_ms, first_bytes, least_bytes, most_bytes)
        self._taken_bytes = self._taken_rows = 0
        """Bytes and rows that were processed in this turn."""
        self._waiting = False
        """True if input was queued when the last turn ended."""

    def next_turn(self, last_turn_ms: int, waited_ms: int) -> Iterator[GrantCredit]:
        """Begins a turn, and yields grants for windows that have become smaller.

        The last turn took `last_turn_ms` and ended `waited_ms` ago.
        """
        debloater = self._debloater
        if debloater is None:
            return
        debloater.took(self._taken_bytes, self._taken_rows, last_turn_ms + (waited_ms if self._waiting else 0))
        self._taken_bytes = self._taken_rows = 0
        if not debloater.resize(self._gate.open_channels, self._pacer.fixed_ms, self._pacer.rows_min):
            return
        for channel in self._gate:
            shrinks = debloater.window_bytes < channel.window_bytes
            channel.window_bytes = debloater.window_bytes
            if shrinks and not channel.data_over:
                yield self.grant(channel)

    def taken(self, channel: InputChannel, rows: int) -> Iterator[GrantCredit]:
        """Counts an element, or a batch of `rows` rows, that was processed. Yields a credit grant if one is due."""
        self._taken_bytes += channel.last_bytes
        self._taken_rows += rows
        if channel.credit_to_grant() is not None:
            yield self.grant(channel)

    def turn_over(self, waiting: bool) -> None:
        """Ends a turn of the task. `waiting`: more input is queued."""
        self._waiting = waiting

    def grant(self, channel: InputChannel) -> GrantCredit:
        """Returns the instruction that sends a channel's total granted credit and its window, in bytes."""
        return GrantCredit(self._attempt, channel.channel, channel.granted_bytes, channel.window_bytes)


class InducedCheckpoints:
    """The triggered checkpoints of an externally induced source, whose reader decides at which row a checkpoint begins.

    A trigger of the coordinator waits for the reader. The reader may also begin a checkpoint before its trigger
    arrives.
    """

    def __init__(self) -> None:
        self._waiting: dict[CheckpointId, Barrier] = {}

    def triggered(self, barrier: Barrier) -> None:
        """Stores a checkpoint trigger of the coordinator until the reader begins the checkpoint."""
        self._waiting[barrier.checkpoint_id] = barrier

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """Drops the trigger of a checkpoint that the coordinator has aborted."""
        self._waiting.pop(checkpoint_id, None)

    def induced(self, checkpoint_id: CheckpointId, at_ms: int) -> Barrier:
        """Returns the barrier of the checkpoint that the reader begins now. Drops older triggers."""
        known = self._waiting.get(checkpoint_id, Barrier(checkpoint_id, at_ms, ALIGNED_BARRIER))
        self._waiting = {n: barrier for n, barrier in self._waiting.items() if n > checkpoint_id}
        return known

    def take_rest(self) -> list[Barrier]:
        """Removes and returns the triggers that wait for the reader, because the reader has ended and begins no more
        checkpoints.
        """
        rest = list(self._waiting.values())
        self._waiting = {}
        return rest
