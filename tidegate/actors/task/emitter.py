"""`Emitter`: partitions the rows that leave a task over the channels of every edge, queues them, and sends frames.

The operator chain emits rows into it. The task machine makes it send frames at the end of each event. Each outgoing
edge has a `Partitioner`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from tidegate.actors.task import instructions as do
from tidegate.actors.task.events import TaskTimer
from tidegate.actors.task.output_gate import OutputGate
from tidegate.actors.task.task_descriptor import TaskDescriptor
from tidegate.operators.local_aggregation import LocalAggregation, may_pay
from tidegate.protocol.edges import Partitioning, PartitioningKind, SideOutput
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Watermark, WatermarkStatus
from tidegate.state.kernels.columns import key_forms
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import compact, gather, partition, subtask_table

if TYPE_CHECKING:
    from tidegate.operators.combiner import Combiner


class Emitter:
    """The output side of a task, into which its operators emit rows."""

    def __init__(self, descriptor: TaskDescriptor, instruct: Callable[[do.TaskInstruction], None]) -> None:
        d = self._descriptor = descriptor
        self._instruct = instruct
        self._flush_armed = False
        self._starved: dict[ChannelId, int] | None = None
        """The credit in bytes of each channel that waited for credit when the timer was set. None if no timer is
        set.
        """
        self._edges: dict[SideOutput | None, list[tuple[Partitioner, dict[int, ChannelId]]]] = {None: []}
        """The outgoing edges, by the side output that they carry. The key None is the output of the chain."""
        for edge in d.outputs:
            partitioner = make_partitioner(
                edge.partitioning, d.task.subtask, edge.downstream_parallelism, d.max_parallelism
            )
            if edge.combines is not None:
                partitioner = CombiningPartitioner(edge.combines, partitioner)
            channels = {int(channel.downstream): channel for channel in edge.channels}
            self._edges.setdefault(edge.side, []).append((partitioner, channels))
        every = [channel for edge in d.outputs for channel in edge.channels]
        unawaited = [channel for edge in d.outputs if not edge.event_time for channel in edge.channels]
        self.gate = OutputGate(every, d.limits, unawaited)

    def emit(self, batch: pa.RecordBatch) -> None:
        """Partitions a batch of the chain's output for each edge, and queues the parts."""
        self._emit(batch, None)

    def emit_aside(self, side: SideOutput, batch: pa.RecordBatch) -> None:
        """Partitions a batch of a side output for each of its edges, and queues the parts. Without edges the
        batch is dropped.
        """
        self._emit(batch, side)

    def _emit(self, batch: pa.RecordBatch, side: SideOutput | None) -> None:
        if not batch.num_rows:
            return
        for partitioner, channels in self._edges.get(side, ()):
            for target, part in partitioner.split(batch):
                self.gate[channels[target]].put(part)

    def emit_watermark(self, watermark_ms: int) -> None:
        """Queues a watermark on every channel."""
        self.gate.broadcast(Watermark(watermark_ms))

    def emit_idle(self, idle: bool) -> None:
        """Announces on every channel that this task is idle in event time (`idle`), or active again."""
        self.gate.broadcast(WatermarkStatus(idle))

    def flush_due(self) -> None:
        """Records that the timer for lingering output has fired. The next `send` sends that output."""
        self._flush_armed = False

    def probe_due(self) -> None:
        """Sends an empty frame on each channel that got no new credit since the timer was set, to request its grant
        again.

        The receiver's grant may have been lost.
        """
        before = self._starved or {}
        self._starved = None
        for channel, credit_bytes in self.gate.starved().items():
            if before.get(channel) == credit_bytes:
                next_sequence = self.gate[channel].next_sequence
                self._instruct(do.SendFrame(self._descriptor.attempt, channel, next_sequence, ()))

    def send(self, at_ms: int, flush: bool = False) -> None:
        """Sends the frames that may and should be sent now. Sets timers for lingering output and for missing credit.

        `flush`: send lingering output too.
        """
        for channel, first_sequence, elements in self.gate.take_frames(flush):
            exhausted = self.gate[channel].exhausted
            self._instruct(do.SendFrame(self._descriptor.attempt, channel, first_sequence, elements, exhausted))
        if not self._flush_armed and self.gate.lingering:
            self._flush_armed = True
            self._instruct(do.SetTaskTimer(TaskTimer.FLUSH, at_ms + self._descriptor.limits.linger_ms))
        if self._starved is None and self.gate.starving:
            self._starved = self.gate.starved()
            self._instruct(do.SetTaskTimer(TaskTimer.CREDIT, at_ms + self._descriptor.limits.probe_ms))


Split = list[tuple[int, pa.RecordBatch]]


class Partitioner(Protocol):
    """Distributes the rows of a batch over the subtasks at the other end of an edge.

    The task's `Emitter` has one for each outgoing edge. Rules:

    - Rows that are sent to one subtask keep their order.
    - Every row is sent to exactly one subtask or, with broadcast, to every subtask.
    - No returned batch is empty. Each owns its memory, because a slice would send its larger parent with a message.
    """

    def split(self, batch: pa.RecordBatch) -> Split:
        """Returns pairs of a downstream subtask and a non-empty, compact batch for it. Each subtask occurs at most
        once.
        """
        ...


class HashPartitioner:
    """Sends a row to the subtask that owns the key group of its key."""

    def __init__(self, columns: Sequence[str], max_parallelism: int, parallelism: int) -> None:
        self._columns = tuple(columns)
        self._parallelism = parallelism
        self._table = subtask_table(max_parallelism, parallelism)
        self._checked: pa.Schema | None = None
        """Schema of the last batch whose key columns were checked, or None."""

    def split(self, batch: pa.RecordBatch) -> Split:
        """Splits a batch by the key groups of its keys.

        Raises ConfigurationError if a key column is missing or has a type that cannot be a key.
        """
        if self._parallelism == 1 or batch.num_rows == 0:
            self._check(batch)
            return [(0, compact(batch))] if batch.num_rows else []
        parts = partition(hash_columns(batch, self._columns), self._table, self._parallelism)
        bounds = parts.bounds
        filled = [t for t in range(self._parallelism) if bounds[t] < bounds[t + 1]]
        if len(filled) == 1:
            return [(filled[0], compact(batch))]
        return [(t, gather(batch, parts.rows[bounds[t] : bounds[t + 1]])) for t in filled]

    def _check(self, batch: pa.RecordBatch) -> None:
        """Raises ConfigurationError for columns that cannot be keys. Called where no hash is computed, because the hash
        function would raise the error.
        """
        if self._checked is None or not self._checked.equals(batch.schema):
            key_forms(batch.slice(0, 0), self._columns)
            self._checked = batch.schema


class RebalancePartitioner:
    """Sends each batch to one downstream subtask, in round-robin order."""

    def __init__(self, parallelism: int, start: int) -> None:
        assert 0 <= start < parallelism
        self._parallelism = parallelism
        self._next = start

    def split(self, batch: pa.RecordBatch) -> Split:
        """Returns the batch for the downstream subtask whose turn it is."""
        if batch.num_rows == 0:
            return []
        target = self._next
        self._next = (target + 1) % self._parallelism
        return [(target, compact(batch))]


class BroadcastPartitioner:
    """Sends every batch to every subtask."""

    def __init__(self, parallelism: int) -> None:
        self._parallelism = parallelism

    def split(self, batch: pa.RecordBatch) -> Split:
        """Returns the same batch for each subtask."""
        if batch.num_rows == 0:
            return []
        whole = compact(batch)
        return [(target, whole) for target in range(self._parallelism)]


class ForwardPartitioner:
    """Sends every batch to the subtask with the same index as the sender."""

    def __init__(self, subtask: int) -> None:
        self._subtask = subtask

    def split(self, batch: pa.RecordBatch) -> Split:
        """Returns the batch for the downstream subtask with the sender's index."""
        return [(self._subtask, compact(batch))] if batch.num_rows else []


class CombiningPartitioner:
    """Combines (pre-aggregates) the rows of each batch, if that saves more than it costs, before another partitioner
    splits the batch.
    """

    def __init__(self, combines: LocalAggregation, partitioner: Partitioner) -> None:
        self._combines = combines
        self._combiner: Combiner | None = None
        self._partitioner = partitioner

    def split(self, batch: pa.RecordBatch) -> Split:
        """Combines the rows of a batch, and splits it with the other partitioner."""
        if may_pay(self._combines.mode, batch.num_rows):
            if self._combiner is None:
                # It brings along all aggregates and windows, which the task of a source has no use for.
                from tidegate.operators.combiner import Combiner

                self._combiner = Combiner(self._combines)
            batch = self._combiner.combine(batch)
        return self._partitioner.split(batch)


def make_partitioner(spec: Partitioning, subtask: int, parallelism_down: int, max_parallelism: int) -> Partitioner:
    """Returns the partitioner of one upstream subtask. Each subtask starts rebalancing at a different downstream
    subtask.
    """
    match spec.kind:
        case PartitioningKind.HASH:
            return HashPartitioner(spec.keys, max_parallelism, parallelism_down)
        case PartitioningKind.REBALANCE:
            return RebalancePartitioner(parallelism_down, subtask % parallelism_down)
        case PartitioningKind.BROADCAST:
            return BroadcastPartitioner(parallelism_down)
        case PartitioningKind.FORWARD:
            assert subtask < parallelism_down, "a forward edge joins equal parallelisms"
            return ForwardPartitioner(subtask)
