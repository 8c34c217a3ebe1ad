"""The task machine: one subtask as a function of what happened to it.

`handle(event)` returns instructions; the runtime carries them out and reports results as further events. There is no
I/O, clock, thread or randomness in here. The life of a task is in `status.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatchmethod

import pyarrow as pa

from tidegate.actors.elements import (
    MAX_WATERMARK_MS,
    Barrier,
    CancelBarrier,
    Element,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
)
from tidegate.actors.failures import CheckpointFailureReason
from tidegate.actors.identity import ChannelId
from tidegate.actors.operators.partitioners import Partitioner, make_partitioner
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.aligner import BarrierAligner, Outcome
from tidegate.actors.task.chain import OperatorChain
from tidegate.actors.task.descriptor import TaskDescriptor
from tidegate.actors.task.inputs import InputGate
from tidegate.actors.task.metrics import SnapshotMetrics
from tidegate.actors.task.outputs import OutputGate
from tidegate.actors.task.snapshots import SnapshotTracker, TaskSnapshot
from tidegate.actors.task.source import SourceCursor, positions_from_tables
from tidegate.actors.task.status import TaskStatus
from tidegate.actors.task.watermarks import WatermarkValve
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex
from tidegate.storage.metadata import SubtaskState
from tidegate.storage.state import OperatorSnapshot

STAGED_FILES_IN_FLIGHT_MAX = 4

TRIGGER = ChannelId(-1, SubtaskIndex(0), SubtaskIndex(0))
"""The channel by which the coordinator's triggers reach a source: a trigger is its barrier."""


class TaskMachine:
    """One subtask of one attempt."""

    def __init__(self, descriptor: TaskDescriptor) -> None:
        d = self._descriptor = descriptor
        assert (d.source is not None) != bool(d.inputs), "a task has a source or inputs"
        self.status = TaskStatus.CREATED
        self._instructions: list[do.TaskInstruction] = []
        self._inputs = InputGate(d.inputs, d.limits.credit_bytes)
        self._outputs = OutputGate([c for edge in d.outputs for c in edge.channels], d.limits)
        self._partitioners: list[tuple[Partitioner, dict[int, ChannelId]]] = [
            (
                make_partitioner(edge.partitioning, d.task.subtask, edge.downstream_parallelism, d.max_parallelism),
                {int(channel.downstream): channel for channel in edge.channels},
            )
            for edge in d.outputs
        ]
        self._chain = OperatorChain(d.operators, d.task.subtask, d.parallelism, d.max_parallelism, self._emit)
        self._aligner = BarrierAligner(frozenset(d.inputs) if d.inputs else frozenset({TRIGGER}))
        self._watermarks = WatermarkValve(d.inputs)
        self._snapshots = SnapshotTracker(
            d.task.subtask, {spec.uid: spec.table for spec in d.operators if spec.table is not None}
        )
        self._source: SourceCursor | None = None
        self._operators_finished = False
        self._finishing: Iterator[None] = iter(())
        self._drain = True
        self._held_triggers: list[ev.CheckpointTriggered] = []
        self._final_complete = False
        self._data_ended: set[ChannelId] = set()
        self._partition_ended: set[ChannelId] = set()
        self._flush_armed = False

    @property
    def descriptor(self) -> TaskDescriptor:
        """What this task was told about its place in the job."""
        return self._descriptor

    @property
    def attempt(self) -> AttemptNumber:
        """The execution attempt that this task belongs to."""
        return self._descriptor.attempt

    @property
    def output_queue_bytes(self) -> int:
        """Bytes that wait for credit on all output channels."""
        return self._outputs.queued_bytes

    @property
    def backpressured(self) -> bool:
        """Whether the task takes no input because an output queue is full."""
        return self._outputs.over_limit

    @property
    def runnable(self) -> bool:
        """Whether a `TurnGranted` would process something: input is there and room for its output."""
        if self.status not in (TaskStatus.RUNNING, TaskStatus.FINISHING, TaskStatus.END_OF_DATA):
            return False
        if self._outputs.over_limit or self._snapshots.files_in_flight >= STAGED_FILES_IN_FLIGHT_MAX:
            return False
        if self.status is TaskStatus.FINISHING:
            return True
        if self._source is not None:
            return self.status is TaskStatus.RUNNING and (self._source.has_batch or self._source.at_end)
        return self._inputs.next_channel(self._aligner.blocks) is not None

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        """Take in one fact; returns what has to be done about it, in order.

        Raises ProtocolError for what cannot happen, and whatever an operator raises; either way the task has failed.
        """
        assert not self._instructions
        self._on(event)
        self._acknowledge_durable_snapshots(event.at_ms)
        self._send(flush=isinstance(event, ev.TimerDue), at_ms=event.at_ms)
        self._read_ahead()
        instructions, self._instructions = self._instructions, []
        return instructions

    def close(self) -> None:
        """The task ends here, whatever its status: let the operators release what they hold. May be called again."""
        self._chain.close()

    # --- events ---------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: ev.TaskEvent) -> None:
        raise ProtocolError(f"a task is not told {type(event).__name__}")

    @_on.register
    def _on_restored(self, event: ev.TaskRestored) -> None:
        self._expect(TaskStatus.CREATED, event)
        tables = dict(event.tables)
        source = self._descriptor.source
        if source is not None:
            positions = self._descriptor.splits
            if source.uid in tables:
                positions = positions_from_tables(tables[source.uid])
            self._source = SourceCursor(positions, self._descriptor.source_rows_max)
        self._operators_finished = event.finished
        self._chain.open(tables)
        self.status = TaskStatus.READY if source is not None else TaskStatus.RUNNING
        self._instructions.append(do.ReportReady(self.attempt))

    @_on.register
    def _on_started(self, event: ev.SourcesStarted) -> None:
        if self._source is not None and self.status is TaskStatus.READY:
            self.status = TaskStatus.RUNNING

    @_on.register
    def _on_frame(self, event: ev.FrameArrived) -> None:
        if event.attempt == self.attempt:
            self._inputs[event.channel].accept(event.first_sequence, event.elements)

    @_on.register
    def _on_credit(self, event: ev.CreditGranted) -> None:
        if event.attempt == self.attempt:
            self._outputs[event.channel].grant(event.total_bytes)

    @_on.register
    def _on_timer(self, event: ev.TimerDue) -> None:
        self._flush_armed = False

    @_on.register
    def _on_turn(self, event: ev.TurnGranted) -> None:
        if not self.runnable:
            return
        if self.status is TaskStatus.FINISHING:
            self._finish_step()
            return
        if self._source is not None:
            self._process_source(self._source)
            return
        channel = self._inputs.next_channel(self._aligner.blocks)
        assert channel is not None
        element = channel.take()
        self._inputs.served()
        self._process(channel.channel, element, event.at_ms)
        total_bytes = channel.credit_to_grant()
        if total_bytes is not None:
            self._instructions.append(do.GrantCredit(self.attempt, channel.channel, total_bytes))

    @_on.register
    def _on_batch_read(self, event: ev.SourceBatchRead) -> None:
        if self._source is None:
            raise ProtocolError(f"{self._descriptor.task} has no source and was read for")
        self._source.batch_read(event)

    @_on.register
    def _on_trigger(self, event: ev.CheckpointTriggered) -> None:
        if event.attempt != self.attempt:
            return
        if self._source is None or self.status in (TaskStatus.CREATED, TaskStatus.READY, TaskStatus.FINISHED):
            reason = f"task {self._descriptor.task} is {self.status.value}, or no source"
            self._instructions.append(
                do.Decline(self.attempt, event.checkpoint_id, CheckpointFailureReason.TASK_NOT_READY, reason)
            )
            return
        if self.status is TaskStatus.FINISHING:
            # A barrier goes before or after all that finishing emits, never between: half of it cannot be restored.
            self._held_triggers.append(event)
            return
        barrier = Barrier(event.checkpoint_id, event.triggered_at_ms)
        self._follow(self._aligner.barrier(TRIGGER, barrier, event.at_ms), event.at_ms)

    @_on.register
    def _on_abort(self, event: ev.CheckpointAborted) -> None:
        if event.attempt != self.attempt:
            return
        self._follow(self._aligner.abort(event.checkpoint_id), event.at_ms)
        handle = self._snapshots.abort(event.checkpoint_id)
        if handle is not None:
            self._instructions.append(do.DiscardState(handle))

    @_on.register
    def _on_complete(self, event: ev.CheckpointCompleted) -> None:
        if event.attempt != self.attempt:
            return
        snapshot = self._snapshots.complete(event.checkpoint_id)
        for handle in self._snapshots.abort_before(event.checkpoint_id):
            self._instructions.append(do.DiscardState(handle))
        if snapshot is not None and snapshot.finished:
            self._final_complete = True
            self._finish_task_if_over()

    @_on.register
    def _on_persisted(self, event: ev.SnapshotPersisted) -> None:
        handle = self._snapshots.persisted(event.checkpoint_id, event.handle)
        if handle is not None:
            self._instructions.append(do.DiscardState(handle))

    @_on.register
    def _on_persist_failed(self, event: ev.SnapshotFailed) -> None:
        if self._snapshots.failed(event.checkpoint_id):
            self._instructions.append(
                do.Decline(self.attempt, event.checkpoint_id, CheckpointFailureReason.ASYNC_PART_FAILED, event.error)
            )

    @_on.register
    def _on_staged(self, event: ev.FileStaged) -> None:
        self._snapshots.files[event.uid].durable(event.index, event.file)

    # --- processing -----------------------------------------------------------------------------------------------

    def _process_source(self, source: SourceCursor) -> None:
        if source.has_batch:
            batch = source.take()
            if batch is not None:
                self._process_batch(batch)
        elif source.at_end:
            self._outputs.broadcast(Watermark(MAX_WATERMARK_MS))
            self._end_data(drain=True)

    def _process(self, channel: ChannelId, element: Element, at_ms: int) -> None:
        assert not self._aligner.blocks(channel), "nothing of a blocked channel is processed (invariant 2)"
        if isinstance(element, pa.RecordBatch):
            self._process_batch(element)
        elif isinstance(element, Barrier):
            self._follow(self._aligner.barrier(channel, element, at_ms), at_ms)
        elif isinstance(element, CancelBarrier):
            self._follow(self._aligner.cancel_barrier(channel, element.checkpoint_id), at_ms)
        elif isinstance(element, Watermark):
            for out in self._watermarks.watermark(channel, element):
                self._outputs.broadcast(out)
        elif isinstance(element, WatermarkStatus):
            for out in self._watermarks.status(channel, element):
                self._outputs.broadcast(out)
        elif isinstance(element, EndOfData):
            self._data_ended.add(channel)
            if len(self._data_ended) == len(self._descriptor.inputs):
                self._end_data(element.drain)
        else:
            assert isinstance(element, EndOfPartition)
            self._partition_ended.add(channel)
            self._follow(self._aligner.channel_ended(channel), at_ms)
            self._finish_task_if_over()

    def _process_batch(self, batch: pa.RecordBatch) -> None:
        if self._operators_finished:
            raise ProtocolError(f"{self._descriptor.task} has finished its operators and got {batch.num_rows} rows")
        self._chain.process(batch)
        self._stage(force=False)

    def _emit(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        for partitioner, channels in self._partitioners:
            for target, part in partitioner.split(batch):
                self._outputs[channels[target]].put(part)

    def _end_data(self, drain: bool) -> None:
        self._drain = drain
        if drain and not self._operators_finished:
            self._finishing = self._chain.finish()
        self.status = TaskStatus.FINISHING

    def _finish_step(self) -> None:
        """Let the operators emit one more batch of what they have left; after the last one the data has ended."""
        for _ in self._finishing:
            self._stage(force=False)
            return
        self._operators_finished = True
        self.status = TaskStatus.END_OF_DATA
        self._outputs.broadcast(EndOfData(self._drain))
        self._instructions.append(do.ReportEndOfData(self.attempt))
        held, self._held_triggers = self._held_triggers, []
        for trigger in held:
            self._on_trigger(trigger)

    def _finish_task_if_over(self) -> None:
        if not self._final_complete or self.status is not TaskStatus.END_OF_DATA:
            return
        if len(self._partition_ended) < len(self._descriptor.inputs):
            return
        self._chain.close()
        self._outputs.broadcast(EndOfPartition())
        self.status = TaskStatus.FINISHED
        self._instructions.append(do.ReportFinished(self.attempt))

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _follow(self, outcome: Outcome, at_ms: int) -> None:
        for checkpoint_id in outcome.cancelled:
            self._outputs.broadcast(CancelBarrier(checkpoint_id))
        if outcome.snapshot is not None:
            self._take_snapshot(outcome.snapshot, at_ms)

    def _take_snapshot(self, barrier: Barrier, at_ms: int) -> None:
        """T1: prepare, barrier out, synchronous part; the asynchronous part is the runtime's."""
        if not self._operators_finished:
            self._chain.prepare_snapshot()
        self._outputs.broadcast(barrier)
        self._send(flush=False, at_ms=at_ms)
        self._stage(force=True)
        self._snapshots.begin(
            TaskSnapshot(
                checkpoint_id=barrier.checkpoint_id,
                finished=self._operators_finished,
                start_delay_ms=max(0, at_ms - barrier.triggered_at_ms - self._aligner.alignment_ms(at_ms)),
                alignment_ms=self._aligner.alignment_ms(at_ms),
                started_at_ms=at_ms,
                ends=self._snapshots.ends(),
            )
        )
        self._instructions.append(
            do.PersistSnapshot(
                barrier.checkpoint_id, self._freeze(), self._inputs.positions(), self._outputs.positions()
            )
        )

    def _freeze(self) -> tuple[OperatorSnapshot, ...]:
        snapshots = [] if self._operators_finished else self._chain.snapshot()
        if self._source is not None:
            assert self._descriptor.source is not None
            snapshots.insert(0, OperatorSnapshot(self._descriptor.source.uid, (self._source.freeze(),)))
        return tuple(snapshots)

    def _acknowledge_durable_snapshots(self, at_ms: int) -> None:
        task = self._descriptor.task
        for snapshot, committables in self._snapshots.to_acknowledge():
            self._instructions.append(
                do.Acknowledge(
                    self.attempt,
                    CheckpointId(snapshot.checkpoint_id),
                    SubtaskState(task.vertex, task.subtask, snapshot.handle, committables, snapshot.finished),
                    SnapshotMetrics(
                        start_delay_ms=snapshot.start_delay_ms,
                        alignment_ms=snapshot.alignment_ms,
                        async_ms=max(0, at_ms - snapshot.started_at_ms),
                    ),
                )
            )

    def _stage(self, force: bool) -> None:
        for uid, batches in self._chain.take_pending(force):
            index = self._snapshots.files[uid].start()
            self._instructions.append(do.StageFile(uid, index, batches))

    # --- output and reading ---------------------------------------------------------------------------------------

    def _send(self, flush: bool, at_ms: int) -> None:
        for channel, first_sequence, elements in self._outputs.take_frames(flush):
            exhausted = self._outputs[channel].exhausted
            self._instructions.append(do.SendFrame(self.attempt, channel, first_sequence, elements, exhausted))
        if not self._flush_armed and self._outputs.lingering:
            self._flush_armed = True
            self._instructions.append(do.SetTaskTimer(ev.TaskTimer.FLUSH, at_ms + self._descriptor.limits.linger_ms))

    def _read_ahead(self) -> None:
        if self._source is None or self.status is not TaskStatus.RUNNING or self._outputs.over_limit:
            return
        read = self._source.next_read()
        if read is not None:
            self._instructions.append(read)

    def _expect(self, status: TaskStatus, event: ev.TaskEvent) -> None:
        if self.status is not status:
            raise ProtocolError(f"{self._descriptor.task} is {self.status.value} and was told {type(event).__name__}")
