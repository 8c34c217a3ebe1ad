"""Emits what leaves a task: rows are partitioned over the channels of every edge, queued, and sent in frames.

The operator chain emits into it. The task machine lets it send at the end of each event.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from tidegate.actors.task.channels.output_gate import OutputGate
from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import TaskTimer
from tidegate.actors.task.pipeline.partitioners import CombiningPartitioner, Partitioner, make_partitioner
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.side_outputs import SideOutput
from tidegate.protocol.stream_elements import Watermark, WatermarkStatus


class Emitter:
    """The output side of a task, as its operators see it."""

    def __init__(self, descriptor: TaskDescriptor, instruct: Callable[[do.TaskInstruction], None]) -> None:
        d = self._descriptor = descriptor
        self._instruct = instruct
        self._flush_armed = False
        self._starved: dict[ChannelId, int] | None = None
        """Channels that waited for credit when the timer was set; None: no timer is set."""
        self._edges: dict[SideOutput | None, list[tuple[Partitioner, dict[int, ChannelId]]]] = {None: []}
        """Edges by the side output whose rows they take; None: the output of the chain."""
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

    @property
    def outputs(self) -> tuple[Callable[[pa.RecordBatch], None], Callable[[int], None], Callable[[bool], None]]:
        """What takes the rows, the watermarks and the idleness of a chain."""
        return self.emit, self.emit_watermark, self.emit_idle

    def emit(self, batch: pa.RecordBatch) -> None:
        """Partition a batch for each edge of the output, and queue the parts."""
        self._emit(batch, None)

    def emit_aside(self, side: SideOutput, batch: pa.RecordBatch) -> None:
        """The same for each edge of a side output; dropped if there is none."""
        self._emit(batch, side)

    def _emit(self, batch: pa.RecordBatch, side: SideOutput | None) -> None:
        if not batch.num_rows:
            return
        for partitioner, channels in self._edges.get(side, ()):
            for target, part in partitioner.split(batch):
                self.gate[channels[target]].put(part)

    def emit_watermark(self, watermark_ms: int) -> None:
        """Queue a watermark on every channel."""
        self.gate.broadcast(Watermark(watermark_ms))

    def emit_idle(self, idle: bool) -> None:
        """Say on every channel that this task is idle in event time, or active again."""
        self.gate.broadcast(WatermarkStatus(idle))

    def flush_due(self) -> None:
        """The linger time of queued output is over."""
        self._flush_armed = False

    def probe_due(self) -> None:
        """Where no credit has come since the timer was set, a grant may be lost: ask for it with an empty frame."""
        before, self._starved = self._starved or {}, None
        for channel, credit_bytes in self.gate.starved().items():
            if before.get(channel) == credit_bytes:
                next_sequence = self.gate[channel].next_sequence
                self._instruct(do.SendFrame(self._descriptor.attempt, channel, next_sequence, ()))

    def send(self, at_ms: int, flush: bool = False) -> None:
        """Send the frames that may and should leave now; what lingers gets a timer."""
        for channel, first_sequence, elements in self.gate.take_frames(flush):
            exhausted = self.gate[channel].exhausted
            self._instruct(do.SendFrame(self._descriptor.attempt, channel, first_sequence, elements, exhausted))
        if not self._flush_armed and self.gate.lingering:
            self._flush_armed = True
            self._instruct(do.SetTaskTimer(TaskTimer.FLUSH, at_ms + self._descriptor.limits.linger_ms))
        if self._starved is None and self.gate.starving:
            self._starved = self.gate.starved()
            self._instruct(do.SetTaskTimer(TaskTimer.CREDIT, at_ms + self._descriptor.limits.probe_ms))
