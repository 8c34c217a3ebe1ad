"""Stop with savepoint, mixed ends, two inputs of which one ends, and checkpoints around the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from link import (
    ATTEMPT,
    BY_X,
    SOURCE,
    UNALIGNED,
    FrozenSum,
    Subject,
    Summing,
    barrier,
    describe,
    node,
    only,
    sent,
    stored,
    timed,
    worker,
)

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import FrozenPositions
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    Alignment,
    Barrier,
    BarrierOptions,
    CancelBarrier,
    Element,
    EndOfData,
    EndOfPartition,
    Watermark,
)
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, VertexId

SUSPEND, TERMINATE = BarrierOptions(kind=SnapshotKind.SUSPEND), BarrierOptions(kind=SnapshotKind.TERMINATE)
ENDS = (EndOfData(drain=True), EndOfData(drain=False))


def controls(found: list[do.TaskInstruction]) -> list[Element]:
    """What was sent, batches left out."""
    return [e for e in sent(found) if not isinstance(e, pa.RecordBatch)]


def source_with_sum(log: list[str]) -> Subject:
    """A started source of six rows with `Summing` in its chain, of which two rows were processed."""
    source = node("source", rows=range(1, 7))
    total = node("sum", (source, None), factory=lambda: Summing(log))
    subject = Subject(describe(translate([source, total, node("down", (total, BY_X), factory=Summing)]), SOURCE))
    subject.start()
    answer(subject)
    assert log == ["open", "process [1, 2]"]
    return subject


def answer(subject: Subject) -> list[do.TaskInstruction]:
    """Answer one read, and process what there is."""
    assert subject.descriptor.source is not None
    read = subject.reads.pop(0)
    result = subject.descriptor.source.source.reader().read(read.split, read.offset, read.rows_max)
    told = ev.SourceBatchRead(subject.at_ms, read.read, result.batch, result.next_offset, result.at_end)
    return subject.tell(told) + subject.turns()


# --- at a source --------------------------------------------------------------------------------------------------


def test_a_drained_source_ends_for_good_before_the_savepoint() -> None:
    """Last watermark, finish, EndOfData(drain), then the barrier: the savepoint has the finished operators."""
    log: list[str] = []
    subject = source_with_sum(log)

    found = subject.trigger(1, TERMINATE) + subject.turns()

    barrier_out = barrier(1, TERMINATE)
    assert controls(found) == [Watermark(MAX_WATERMARK_MS), EndOfData(True, CheckpointId(1)), barrier_out]
    assert only(found, do.ReportEndOfData) == [do.ReportEndOfData(ATTEMPT, CheckpointId(1))]
    assert [values(e) for e in sent(found) if isinstance(e, pa.RecordBatch)] == [[1, 2], [-3]]
    assert log[2:] == ["finish"]
    assert only(subject.persisted(1), do.Acknowledge)[0].state.finished


def test_a_source_that_has_finished_names_its_splits_in_the_checkpoint() -> None:
    """Later checkpoints, without this task, repeat them. A source that still reads has its splits in its state."""
    subject = source_with_sum([])
    subject.trigger(1)
    assert only(subject.persisted(1), do.Acknowledge)[0].state.read_splits == ()
    while subject.reads:
        answer(subject)
    subject.trigger(2)
    state = only(subject.persisted(2), do.Acknowledge)[0].state
    splits = FrozenPositions(subject.descriptor.splits).splits
    assert (state.finished, state.read_splits, len(splits)) == (True, splits, 1)


def test_a_suspended_source_stops_without_an_end() -> None:
    """No last watermark and no finish: the savepoint has the operators as they were, to go on from."""
    log: list[str] = []
    subject = source_with_sum(log)

    found = subject.trigger(1, SUSPEND) + subject.turns()

    assert controls(found) == [EndOfData(False, CheckpointId(1)), barrier(1, SUSPEND)]
    assert log[2:] == ["prepare", "snapshot"]
    (persist,) = only(found, do.PersistSnapshot)
    assert persist.snapshots[1].states == (FrozenSum(3),)
    assert not only(subject.persisted(1), do.Acknowledge)[0].state.finished


@pytest.mark.parametrize("options", [SUSPEND, TERMINATE])
def test_a_stopping_source_processes_no_further_row(options: BarrierOptions) -> None:
    """Neither what was read ahead nor what a read under way still brings; nothing new is read."""
    log: list[str] = []
    subject = source_with_sum(log)
    subject.trigger(1, options)

    found = answer(subject)

    assert only(found, do.ReadSource) == []
    assert "process [3, 4]" not in log
    assert subject.machine.status is TaskStatus.END_OF_DATA


def test_a_task_ends_after_exactly_its_savepoint() -> None:
    """A checkpoint from before the stop, or one after a savepoint that failed, does not end a suspended task."""
    subject = source_with_sum([])
    subject.trigger(1)
    subject.persisted(1)
    subject.trigger(2, SUSPEND)
    subject.turns()
    assert only(subject.completed(1), do.ReportFinished) == []
    subject.abort(2)
    subject.trigger(3)
    subject.persisted(3)
    assert only(subject.completed(3), do.ReportFinished) == []
    subject.trigger(4, SUSPEND)
    subject.persisted(4)

    found = subject.completed(4)

    assert only(found, do.ReportFinished) == [do.ReportFinished(ATTEMPT)]
    assert sent(found) == [EndOfPartition()]


# --- downstream ---------------------------------------------------------------------------------------------------


def test_a_drained_task_finishes_before_the_savepoint() -> None:
    """Everything is emitted and the savepoint holds the task as finished."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    subject.feed(0, batch(4), Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1, TERMINATE))

    found = subject.feed(1, Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1, TERMINATE))

    assert controls(found) == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1, TERMINATE)]
    assert log[1:] == ["process [4]", "finish"]
    assert only(subject.persisted(1, None), do.Acknowledge)[0].state.finished


def test_a_suspended_task_ends_after_the_savepoint_and_all_inputs() -> None:
    """Its state is stored as it was; it is over when the savepoint is complete and every channel has ended."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    end = EndOfData(False, CheckpointId(1))
    subject.feed(0, batch(4), end, barrier(1, SUSPEND))
    found = subject.feed(1, end, barrier(1, SUSPEND))

    assert controls(found) == [end, barrier(1, SUSPEND)]
    assert only(found, do.ReportEndOfData) == [do.ReportEndOfData(ATTEMPT, CheckpointId(1))]
    assert log[1:] == ["process [4]", "prepare", "snapshot"]
    (ack,) = only(subject.persisted(1), do.Acknowledge)
    assert not ack.state.finished
    subject.completed(1)
    subject.feed(0, EndOfPartition())
    assert subject.machine.status is TaskStatus.END_OF_DATA

    found = subject.feed(1, EndOfPartition())

    assert (sent(found), subject.machine.status) == ([EndOfPartition()], TaskStatus.FINISHED)


@pytest.mark.parametrize("ends", [ENDS, ENDS[::-1]])
def test_one_suspended_input_suspends_the_task(ends: tuple[Element, Element]) -> None:
    """An input that ended for good does not finish a task whose other input will go on some day."""
    log: list[str] = []
    subject = worker(sources=2, log=log)

    found = subject.feed(0, ends[0]) + subject.feed(1, ends[1])

    assert controls(found) == [EndOfData(drain=False)]
    assert log == ["open"]


class TwoInputs(Operator):
    """Logs what comes by which input."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        self._log.append(f"{index}: {values(batch)}")

    def end_input(self, index: int, emit: Emit) -> None:
        self._log.append(f"{index}: end")

    def finish(self, emit: Emit) -> Iterator[None]:
        self._log.append("finish")
        return iter(())


def test_an_input_ends_when_all_its_channels_have() -> None:
    """Two inputs, the first over two channels: each end is told once, and the other input goes on."""
    log: list[str] = []
    left, right = node("left", parallelism=2), node("right")
    join = replace(node("join", (left, BY_X), (right, BY_X), factory=lambda: TwoInputs(log)), ordinals=(0, 1))
    subject = Subject(describe(translate([left, right, join]), VertexId("join")))
    subject.start()

    subject.feed(0, batch(1), EndOfData(drain=True), EndOfPartition())
    assert log == ["0: [1]"]
    subject.feed(1, EndOfData(drain=True))
    subject.feed(2, batch(2))
    assert log[1:] == ["0: end", "1: [2]"]
    subject.feed(2, EndOfData(drain=True))

    assert log[3:] == ["1: end", "finish"]


# --- checkpoints around the end -----------------------------------------------------------------------------------


class LeavesTwo(Operator):
    """Emits two batches in the end."""

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Nothing comes out before the end."""

    def finish(self, emit: Emit) -> Iterator[None]:
        for n in (1, 2):
            emit(batch(n))
            yield


def finishing() -> Subject:
    """A task of two inputs that has emitted the first batch of what it has left, and waits for room."""
    limits = BufferLimits(credit_bytes=1, queue_bytes_max=ONE_ROW_BYTES, frame_bytes_min=1)
    source = node("source", parallelism=2)
    work = node("work", (source, BY_X), factory=LeavesTwo)
    graph = translate([source, work, node("down", (work, BY_X), factory=Summing)])
    subject = Subject(describe(graph, VertexId("work"), limits=limits))
    subject.start()
    subject.feed(0, EndOfData(drain=True))
    subject.feed(1, EndOfData(drain=True))
    assert subject.machine.status is TaskStatus.FINISHING
    return subject


def test_an_unaligned_barrier_waits_until_the_operators_have_finished() -> None:
    """Half of what is left cannot be restored: the snapshot is taken afterwards, and holds the task as finished."""
    subject = finishing()
    found = subject.arrive(0, barrier(1, UNALIGNED)) + subject.arrive(1, barrier(1, UNALIGNED))
    assert only(found, do.PersistSnapshot) == []

    found = subject.grant() + subject.turns()

    assert [p.checkpoint_id for p in only(found, do.PersistSnapshot)] == [1]
    assert ENDS[0] in sent(found)
    assert barrier(1, UNALIGNED) in sent(found)
    acks = found + subject.persisted(1, None) + subject.channels_persisted(1)
    assert [a.state.finished for a in only(acks, do.Acknowledge)] == [True]


def test_an_alignment_timeout_waits_until_the_operators_have_finished() -> None:
    """The timer that is due meanwhile counts afterwards, if it is still needed then."""
    subject = finishing()
    subject.arrive(0, barrier(1, timed(100)))
    assert only(subject.timer(ev.TaskTimer.ALIGNMENT, 1_100), do.PersistSnapshot) == []

    found = subject.grant() + subject.turns()

    assert [p.checkpoint_id for p in only(found, do.PersistSnapshot)] == [1]
    assert only(found, do.PersistChannelState) == [], "the barrier of channel 1 is not here yet"


def test_several_triggers_wait_in_order_until_the_operators_have_finished() -> None:
    """None is lost and none overtakes another."""
    subject = source_with_sum([])
    subject.trigger(1, SUSPEND)
    subject.trigger(2)
    subject.trigger(3)
    assert subject.machine.status is TaskStatus.FINISHING

    found = subject.turns()

    assert controls(found) == [EndOfData(False, CheckpointId(1)), barrier(1, SUSPEND), barrier(2), barrier(3)]


def ended_upstream() -> Subject:
    """A task whose upstream tasks have ended, with all they have sent still queued."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1), EndOfData(drain=True), EndOfPartition())
    subject.arrive(1, batch(2), EndOfData(drain=True))
    return subject


def test_a_task_without_running_upstream_tasks_is_triggered_itself() -> None:
    """Aligned: the snapshot is taken when every channel has ended, and so with the task finished."""
    subject = ended_upstream()
    assert only(subject.trigger(1) + subject.turns(), do.PersistSnapshot) == []

    found = subject.feed(1, EndOfPartition())

    assert sent(found)[-1] == barrier(1)
    assert only(found, do.PersistSnapshot)[0].snapshots == ()
    assert only(subject.persisted(1, None), do.Acknowledge)[0].state.finished


def test_an_unaligned_trigger_overtakes_what_ended_channels_have_sent() -> None:
    """What is queued up to the end of each channel is in flight, also an end that has not arrived yet."""
    subject = ended_upstream()
    found = subject.trigger(1, UNALIGNED)
    assert only(found, do.PersistSnapshot)[0].snapshots[0].states == (FrozenSum(0),)
    assert only(found, do.PersistChannelState) == []

    found = subject.arrive(1, EndOfPartition())

    assert stored(found) == {("input", 0): [[1]], ("input", 1): [[2]]}
    subject.turns()
    subject.persisted(1)
    (ack,) = only(subject.channels_persisted(1), do.Acknowledge)
    assert not ack.state.finished, "the cut was before its finish"
    assert only(subject.completed(1), do.ReportFinished) == []


def test_a_trigger_after_the_end_is_declined() -> None:
    """The checkpoint that was being triggered as the task finished fails, for that reason, and only that one."""
    subject = source_with_sum([])
    subject.trigger(1, TERMINATE)
    subject.turns()
    subject.persisted(1)
    subject.completed(1)

    (decline,) = only(subject.trigger(2), do.Decline)

    assert (decline.checkpoint_id, decline.reason) == (2, CheckpointFailureReason.TASK_CLOSING)


@pytest.mark.parametrize("options", [SUSPEND, TERMINATE])
def test_a_stop_is_taken_part_in_where_barriers_block_nothing(options: BarrierOptions) -> None:
    """Every channel ends its data before the barrier of a stop: one that was counted already stays."""
    subject = worker(exactly_once=False)
    stop = Barrier(CheckpointId(2), 0, replace(options, alignment=Alignment.AT_LEAST_ONCE))
    end = EndOfData(drain=options is TERMINATE)
    subject.feed(0, batch(1), barrier(1), end, stop)

    found = subject.feed(1, batch(2), end, stop)

    assert {decline.checkpoint_id for decline in only(found, do.Decline)} == {1}
    assert controls(found)[-1] == stop
    (persist,) = only(found, do.PersistSnapshot)
    assert persist.checkpoint_id == 2


def test_an_aborted_savepoint_is_cancelled_downstream() -> None:
    """A stop that is aborted while the operators finish sends no barrier, but a cancellation, at once."""
    subject = source_with_sum([])
    found = subject.trigger(1, TERMINATE)

    found += subject.abort(1)

    assert controls(found) == [
        Watermark(MAX_WATERMARK_MS),
        CancelBarrier(CheckpointId(1)),
        EndOfData(True, CheckpointId(1)),
    ]
    assert only(found, do.PersistSnapshot) == []
