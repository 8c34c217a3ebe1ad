"""Task machines driven by hand, and a fake link that joins two of them, as h11 tests its two sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import pyarrow as pa
from batches import ONE_ROW_BYTES

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.channels import InFlightElement
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.actors.task.task_descriptor import TaskDescriptor, describe_task
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.sinks.table_sink import TableSink
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import (
    ALIGNED_BARRIER,
    Alignment,
    Barrier,
    BarrierOptions,
    CancelBarrier,
    Element,
    Watermark,
)
from tidegate.storage.checkpoints.metadata import DataFile, StateHandle, StateKind
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex, VertexId
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateChunk, StateTable

ATTEMPT = AttemptNumber(3)
SOURCE, WORK = VertexId("source"), VertexId("work")
BY_X = Partitioning(PartitioningKind.HASH, ("x",))
SCHEMA = pa.schema([("x", pa.int64())])
UNALIGNED = BarrierOptions(Alignment.UNALIGNED)
FORCED = BarrierOptions(Alignment.FORCED_ALIGNED)
AS_SENT = BufferLimits(merged_rows_max=1)
"""Every batch is processed by itself, so that a log tells them apart."""
TIGHT = replace(AS_SENT, credit_bytes=ONE_ROW_BYTES, queue_bytes_max=100 * ONE_ROW_BYTES, frame_bytes_min=1)
"""One row may leave, the others wait in the output queue."""
InstructionT = TypeVar("InstructionT")


@dataclass(frozen=True)
class FrozenSum:
    total: int
    state: str = "sum"
    kind: StateKind = StateKind.UNION
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        yield StateChunk(pa.record_batch({"total": [self.total]}))


class Summing(Operator):
    """Passes batches on and sums `x`. Before a barrier it may emit its sum, at the end it emits it negated."""

    def __init__(self, log: list[str] | None = None, emit_before_barrier: bool = False) -> None:
        self.log = log if log is not None else []
        self.total = 0
        self._emit_before_barrier = emit_before_barrier

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        super().open(context, restored)
        self.log.append("open")
        self.total = sum(table.rows.column("total")[0].as_py() for table in restored)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        values = batch.column("x").to_pylist()
        self.log.append(f"process {values}")
        self.total += sum(values)
        emit(batch)

    def prepare_snapshot(self, emit: Emit) -> None:
        self.log.append("prepare")
        if self._emit_before_barrier:
            emit(pa.record_batch({"x": [self.total]}))

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        self.log.append("snapshot")
        return OperatorSnapshot(self.context.uid, (FrozenSum(self.total),))

    def finish(self, emit: Emit) -> Iterator[None]:
        self.log.append("finish")
        emit(pa.record_batch({"x": [-self.total]}))
        yield

    def close(self) -> None:
        self.log.append("close")


def node(
    name: str,
    *inputs: tuple[StreamNode, Partitioning | None],
    parallelism: int = 1,
    rows: Sequence[int] = (),
    factory: Callable[[], Operator] | None = None,
    table: str | None = None,
) -> StreamNode:
    """A node of a logical graph; a source over `rows` when it has no inputs."""
    source = None if inputs else MemorySource.of(pa.table({"x": pa.array(rows, pa.int64())}), parallelism)
    return StreamNode(OperatorUid(name), name, parallelism, SCHEMA, source, factory, table, inputs)


def work_graph(
    factory: Callable[[], Operator] = Summing,
    *,
    sources: int = 1,
    rows: Sequence[int] = (),
    downstream: bool = False,
    sink: bool = False,
) -> JobGraph:
    """`sources` subtasks of `source` -> one of `work` (-> sink in its chain) (-> one of `down`)."""
    source = node("source", parallelism=sources, rows=rows)
    nodes = [source, node("work", (source, BY_X), factory=factory)]
    if sink:
        nodes.append(node("sink", (nodes[-1], None), factory=TableSink, table="memory://table"))
    if downstream:
        nodes.append(node("down", (nodes[-1], BY_X), factory=Summing))
    return translate(nodes)


def describe(
    graph: JobGraph, vertex: VertexId, subtask: int = 0, limits: BufferLimits | None = None, rows_max: int = 2
) -> TaskDescriptor:
    """Descriptor of one task, as a runtime would make it."""
    task = TaskId(vertex, SubtaskIndex(subtask))
    source = graph.vertex(vertex).source
    splits = () if source is None else tuple(SplitPosition(s) for s in source.source.splits())
    mine = splits[subtask :: graph.vertex(vertex).parallelism]
    return describe_task(graph, task, ATTEMPT, mine, limits or AS_SENT, rows_max)


class Subject:
    """One machine; every method tells it a fact and returns what it asks for."""

    def __init__(self, descriptor: TaskDescriptor) -> None:
        self.machine = TaskMachine(descriptor)
        self.descriptor = descriptor
        self.at_ms = 1_000
        self.reads: list[do.ReadSource] = []
        self._sequence: dict[ChannelId, int] = {}

    def tell(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        instructions = self.machine.handle(event)
        self.reads += only(instructions, do.ReadSource)
        return instructions

    def start(
        self,
        *tables: tuple[str, StateTable],
        finished: bool = False,
        in_flight: Sequence[tuple[ChannelId, tuple[InFlightElement, ...]]] = (),
    ) -> list[do.TaskInstruction]:
        """Restored and, a source, started."""
        by_uid = tuple((OperatorUid(uid), (table,)) for uid, table in tables)
        found = self.tell(ev.TaskRestored(self.at_ms, by_uid, finished, tuple(in_flight)))
        return found + self.tell(ev.TasksStarted(self.at_ms))

    def arrive(self, upstream: int, *elements: Element, attempt: AttemptNumber = ATTEMPT) -> list[do.TaskInstruction]:
        """The next elements of an input channel."""
        channel = self.descriptor.inputs[upstream]
        first = self._sequence.get(channel, 0)
        if attempt == ATTEMPT:
            self._sequence[channel] = first + len(elements)
        return self.tell(ev.FrameArrived(self.at_ms, attempt, channel, first, elements))

    def turns(self, turns_max: int = 1_000) -> list[do.TaskInstruction]:
        """Process while there is something to process."""
        found: list[do.TaskInstruction] = []
        for _ in range(turns_max):
            if not self.machine.runnable:
                break
            found += self.tell(ev.TurnGranted(self.at_ms))
        return found

    def feed(self, upstream: int, *elements: Element) -> list[do.TaskInstruction]:
        """Arrive and process."""
        return self.arrive(upstream, *elements) + self.turns()

    def read_all(self) -> list[do.TaskInstruction]:
        """Answer every read, and process what was read."""
        assert self.descriptor.source is not None
        reader = self.descriptor.source.source.reader()
        found = self.turns()
        while self.reads:
            read = self.reads.pop(0)
            result = reader.read(read.split, read.offset, read.rows_max)
            found += self.tell(
                ev.SourceBatchRead(self.at_ms, read.read, result.batch, result.next_offset, result.at_end)
            )
            found += self.turns()
        return found

    def trigger(
        self, checkpoint_id: int, options: BarrierOptions = ALIGNED_BARRIER, attempt: AttemptNumber = ATTEMPT
    ) -> list[do.TaskInstruction]:
        return self.tell(ev.CheckpointTriggered(self.at_ms, attempt, _id(checkpoint_id), self.at_ms, options))

    def abort(self, checkpoint_id: int, attempt: AttemptNumber = ATTEMPT) -> list[do.TaskInstruction]:
        return self.tell(ev.CheckpointAborted(self.at_ms, attempt, _id(checkpoint_id))) + self.turns()

    def persisted(self, checkpoint_id: int, path: str | None = "state") -> list[do.TaskInstruction]:
        return self.tell(ev.SnapshotPersisted(self.at_ms, _id(checkpoint_id), handle_of(path)))

    def channels_persisted(self, checkpoint_id: int, path: str | None = "channels") -> list[do.TaskInstruction]:
        return self.tell(ev.ChannelStatePersisted(self.at_ms, _id(checkpoint_id), handle_of(path)))

    def failed(self, checkpoint_id: int, error: str = "disk full", channels: bool = False) -> list[do.TaskInstruction]:
        return self.tell(ev.SnapshotFailed(self.at_ms, _id(checkpoint_id), error, channels))

    def timer(self, timer: ev.TaskTimer, at_ms: int) -> list[do.TaskInstruction]:
        """The time has come; nothing else is done yet."""
        self.at_ms = at_ms
        return self.tell(ev.TimerDue(at_ms, timer))

    def grant(self, total_bytes: int = 10**9, output: int = 0) -> list[do.TaskInstruction]:
        """Credit for one of the output channels."""
        channel = [c for edge in self.descriptor.outputs for c in edge.channels][output]
        return self.tell(ev.CreditGranted(self.at_ms, ATTEMPT, channel, total_bytes, 10**9))

    def staged(self, index: int) -> list[do.TaskInstruction]:
        return self.tell(ev.FileStaged(self.at_ms, OperatorUid("sink"), index, file_of(index)))

    def completed(self, checkpoint_id: int) -> list[do.TaskInstruction]:
        return self.tell(ev.CheckpointCompleted(self.at_ms, ATTEMPT, _id(checkpoint_id)))


class Link:
    """Two machines joined: frames go down, credit goes up, in order; both take turns until nothing moves."""

    def __init__(self, up: Subject, down: Subject) -> None:
        self.up, self.down = up, down
        self.delivered: list[Element] = []
        self.queued_bytes_max = 0

    def carry(self, instructions: Sequence[do.TaskInstruction]) -> list[do.TaskInstruction]:
        """Carry out what the link can carry, with all that follows; returns the rest."""
        rest: list[do.TaskInstruction] = []
        todo = list(instructions)
        while True:
            while todo:
                instruction = todo.pop(0)
                if isinstance(instruction, do.SendFrame) and instruction.channel in self.down.descriptor.inputs:
                    self.delivered += instruction.elements
                    todo += self.down.arrive(
                        self.down.descriptor.inputs.index(instruction.channel), *instruction.elements
                    )
                elif isinstance(instruction, do.GrantCredit):
                    grant = instruction.channel, instruction.total_bytes, instruction.window_bytes
                    todo += self.up.tell(ev.CreditGranted(0, instruction.attempt, *grant))
                elif isinstance(instruction, do.SetTaskTimer):
                    todo += self.up.tell(ev.TimerDue(instruction.due_at_ms, instruction.timer))
                else:
                    rest.append(instruction)
            self.queued_bytes_max = max(self.queued_bytes_max, self.up.machine.outputs.queued_bytes)
            todo += self.down.turns(1) or self.up.turns(1)
            if not todo and not self.up.machine.runnable and not self.down.machine.runnable:
                return rest


def only(instructions: Sequence[do.TaskInstruction], kind: type[InstructionT]) -> list[InstructionT]:
    """The instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def kinds(instructions: Sequence[do.TaskInstruction]) -> list[str]:
    """Names of the instructions, in order."""
    return [type(i).__name__ for i in instructions]


def sent(instructions: Sequence[do.TaskInstruction]) -> list[Element]:
    """All elements of all frames, in order."""
    return [element for frame in only(instructions, do.SendFrame) for element in frame.elements]


def handle_of(path: str | None) -> StateHandle | None:
    """A handle, or None for a stateless task."""
    return None if path is None else StateHandle(path, None, 10, "sum", ())


def file_of(index: int) -> DataFile:
    """The data file of a sink with this number."""
    return DataFile(f"data/{index}", 1, 1, "sum")


def _id(checkpoint_id: int) -> CheckpointId:
    return CheckpointId(checkpoint_id)


def barrier(checkpoint_id: int, options: BarrierOptions = ALIGNED_BARRIER, at_ms: int = 1_000) -> Barrier:
    """A barrier of this checkpoint, triggered at `at_ms`."""
    return Barrier(CheckpointId(checkpoint_id), at_ms, options)


def cancel(checkpoint_id: int) -> CancelBarrier:
    """A cancel barrier of this checkpoint."""
    return CancelBarrier(CheckpointId(checkpoint_id))


def timed(timeout_ms: int, alignment: Alignment = Alignment.ALIGNED) -> BarrierOptions:
    """Aligned, and unaligned so long after the trigger."""
    return BarrierOptions(alignment, timeout_ms)


def stored(instructions: Sequence[do.TaskInstruction]) -> dict[tuple[str, int], list[list[int] | Watermark]]:
    """What the one `PersistChannelState` among these holds: by direction and the channel's upstream, or target."""
    (persist,) = only(instructions, do.PersistChannelState)
    return {
        (
            part.direction.value,
            int(part.channel.upstream if part.direction is do.Direction.INPUT else part.channel.downstream),
        ): [e if isinstance(e, Watermark) else e.column("x").to_pylist() for e in part.elements]
        for part in persist.channels
    }


def sums(instructions: Sequence[do.TaskInstruction]) -> list[int]:
    """The sums in the one snapshot among these."""
    (persist,) = only(instructions, do.PersistSnapshot)
    return [state.total for s in persist.snapshots for state in s.states if isinstance(state, FrozenSum)]


def worker(
    sources: int = 2,
    log: list[str] | None = None,
    *,
    limits: BufferLimits | None = None,
    exactly_once: bool = True,
    in_flight: dict[int, tuple[InFlightElement, ...]] | None = None,
    **options: bool,
) -> Subject:
    """A started task between `sources` channels and one output; `in_flight` is restored on these channels."""
    emit = options.pop("emit_before_barrier", False)
    graph = work_graph(partial(Summing, log, emit), sources=sources, downstream=True, **options)
    subject = Subject(replace(describe(graph, WORK, limits=limits), exactly_once=exactly_once))
    recovered = {subject.descriptor.inputs[upstream]: batches for upstream, batches in (in_flight or {}).items()}
    subject.start(in_flight=tuple(recovered.items()))
    return subject
