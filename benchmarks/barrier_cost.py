"""What a barrier costs a task with more and more channels: CPU of one task machine, without a runtime around it.

    python benchmarks/barrier_cost.py [--channels 16,128,1024] [--checkpoints 9] [--unaligned]

A task has so many input and so many output channels. Of each checkpoint a barrier arrives on every input; the task
takes a turn where it can, and hands the barrier on to every output with the last one. Prints a row a size: the least
of the checkpoints, for each barrier, and the ratio to the row before. 1.0 is as it should be: a checkpoint then costs a
task as much as it has channels, and not the square. Exit code 1 if a barrier costs more than three times as much with
the most channels as with the fewest.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_descriptor import describe_task
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Alignment, Barrier, BarrierOptions
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex, VertexId

ATTEMPT = AttemptNumber(1)
AT_MS = 1_000
ROWS = pa.table({"x": pa.array([], pa.int64())})
BY_X = Partitioning(PartitioningKind.HASH, ("x",))
GROWTH_MAX = 3.0


class _PassingOn(Operator):
    """Hands rows on; it has no state."""

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """One batch."""
        emit(batch)

    def finish(self, emit: Emit) -> Iterator[None]:
        """Nothing is left."""
        return iter(())


class _Task:
    """One subtask between `channels` sources and as many receivers."""

    def __init__(self, channels: int) -> None:
        source = _node("source", channels, MemorySource.of(ROWS, channels))
        work = _node("work", 1, None, (source, BY_X))
        graph = translate([source, work, _node("down", channels, None, (work, BY_X))])
        task = TaskId(VertexId("work"), SubtaskIndex(0))
        self._inputs = (descriptor := describe_task(graph, task, ATTEMPT, (), BufferLimits(), 1)).inputs
        self._machine = TaskMachine(descriptor)
        self._machine.handle(ev.TaskRestored(AT_MS, (), False, ()))
        self._machine.handle(ev.TasksStarted(AT_MS))
        self._taken = 0

    def checkpoint(self, options: BarrierOptions) -> float:
        """One of them; CPU seconds of its barriers."""
        number = CheckpointId(self._taken + 1)
        barrier = Barrier(number, AT_MS, options)
        done: list[do.TaskInstruction] = []
        started = time.process_time()
        for channel in self._inputs:
            done += self._machine.handle(ev.FrameArrived(AT_MS, ATTEMPT, channel, self._taken, (barrier,)))
            while self._machine.runnable:
                done += self._machine.handle(ev.TurnGranted(AT_MS))
        seconds = time.process_time() - started
        sent = sum(isinstance(each, do.SendFrame) for each in done)
        assert sent == len(self._inputs), f"{sent} frames with a barrier for {len(self._inputs)} receivers"
        self._taken += 1
        self._machine.handle(ev.SnapshotPersisted(AT_MS, number, None))
        self._machine.handle(ev.ChannelStatePersisted(AT_MS, number, None))
        self._machine.handle(ev.CheckpointCompleted(AT_MS, ATTEMPT, number))
        return seconds


def _node(
    name: str, parallelism: int, source: MemorySource | None, *inputs: tuple[StreamNode, Partitioning | None]
) -> StreamNode:
    factory = None if source else _PassingOn
    return StreamNode(OperatorUid(name), name, parallelism, ROWS.schema, source, factory, None, inputs)


def main() -> int:
    """Measure; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", default="16,128,1024", help="on each side of the task (default 16,128,1024)")
    parser.add_argument("--checkpoints", type=int, default=9, help="the quickest counts (default 9)")
    parser.add_argument("--unaligned", action="store_true", help="barriers overtake")
    arguments = parser.parse_args()
    options = BarrierOptions(Alignment.UNALIGNED if arguments.unaligned else Alignment.ALIGNED)
    print(f"{'channels':>9} {'us a barrier':>13} {'growth':>7}")
    costs: list[float] = []
    for channels in (int(text) for text in arguments.channels.split(",")):
        task = _Task(channels)
        costs.append(min(task.checkpoint(options) for _ in range(arguments.checkpoints)) / channels * 1e6)
        growth = f"{costs[-1] / costs[-2]:.2f}" if len(costs) > 1 else "-"
        print(f"{channels:>9,} {costs[-1]:>13.1f} {growth:>7}")
    return int(costs[-1] > GROWTH_MAX * costs[0])


if __name__ == "__main__":
    sys.exit(main())
