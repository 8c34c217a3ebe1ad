"""However many timers are due at once, a task fires them in steps: bounded, and open for barriers in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from alarms import Alarms
from batches import ONE_ROW_BYTES, batch, values
from frozen_tables import tables_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from link import ATTEMPT, BY_X, UNALIGNED, Subject, Summing, barrier, describe, node, only, sent

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_descriptor import TaskDescriptor, TaskStatus
from tidegate.actors.task.turn_pacer import ROWS_UNLIMITED, TURN_MS_MAX
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction, Rows
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.keyed_state import ListState
from tidegate.operators.state.timers import TimeDomain
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, BarrierOptions, Element, EndOfData, Watermark
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, OperatorUid, VertexId
from tidegate.storage.state.snapshot import StateTable

PROCESSING = ev.TaskTimer.PROCESSING_TIME
X = pa.schema([("x", pa.int64())])
SESSIONS = pa.schema([("x", pa.int64()), ("t", pa.int64()), ("rows", pa.int64())])
STEP = 3


class Sessions(ProcessFunction):
    """Counts the rows of a key until none comes for a while; it goes by timestamps alone, as the guide says."""

    def __init__(self, gap_ms: int) -> None:
        self._gap_ms = gap_ms

    def open(self, context: ProcessContext) -> None:
        self.times = context.state(ListState("times", pa.int64()))

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        self.times.add(row["t"])
        context.timer_service.register_event_time_timer(row["t"] + self._gap_ms)
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[dict[str, Any]]:
        session = [time for time in self.times.get() if time < timestamp]
        if session and max(session) + self._gap_ms == timestamp:
            yield {**context.current_key, "t": timestamp, "rows": len(session)}
            self.times.update(time for time in self.times.get() if time >= timestamp)


def alarms(domain: TimeDomain, limits: BufferLimits) -> TaskDescriptor:
    """`Alarms` between one channel and one output."""
    source = node("source")
    keyed = node("keyed", (source, BY_X), factory=lambda: ProcessOperator(Alarms(domain), (("x",),), schema=X))
    return describe(
        translate([source, keyed, node("down", (keyed, BY_X), factory=Summing)]), VertexId("keyed"), limits=limits
    )


def source_alarms(domain: TimeDomain) -> TaskDescriptor:
    """A source with `Alarms` in its chain, and one output."""
    source = node("source", rows=[0])
    keyed = node("keyed", (source, None), factory=lambda: ProcessOperator(Alarms(domain), (("x",),), schema=X))
    graph = translate([source, keyed, node("down", (keyed, BY_X), factory=Summing)])
    return describe(graph, VertexId("source"), limits=limits_of(STEP))


def sessions(turn_rows_max: int) -> TaskDescriptor:
    """Sessions, and sessions of those by a generator's event time, in one chain."""
    source = node("source")
    first = node("first", (source, BY_X), factory=lambda: _sessions(5))
    times = node("times", (first, None), factory=lambda: WatermarkGenerator("t"))
    second = node("second", (times, None), factory=lambda: _sessions(12))
    graph = translate([source, first, times, second, node("down", (second, BY_X), factory=Summing)])
    descriptor = describe(graph, VertexId("first"), limits=limits_of(turn_rows_max))
    assert [spec.uid for spec in descriptor.operators] == ["first", "times", "second"]
    return descriptor


def _sessions(gap_ms: int) -> ProcessOperator:
    return ProcessOperator(Sessions(gap_ms), (("x",),), ("t",), SESSIONS)


def limits_of(turn_rows_max: int) -> BufferLimits:
    """Steps of so many timers; everything leaves at once."""
    return BufferLimits(frame_bytes_min=1, turn_rows_max=turn_rows_max)


def started(descriptor: TaskDescriptor) -> Subject:
    """It is 1,000 ms."""
    subject = Subject(descriptor)
    subject.start()
    return subject


Tables = list[tuple[OperatorUid, tuple[StateTable, ...]]]


def restored(descriptor: TaskDescriptor, tables: Tables, found: list[do.TaskInstruction]) -> Subject:
    """A new task from the tables of the snapshot among these, with what it holds of the input."""
    parts = [part for written in only(found, do.PersistChannelState) for part in written.channels]
    assert all(part.direction is do.Direction.INPUT for part in parts), "all output has left"
    subject = Subject(descriptor)
    in_flight = tuple((part.channel, part.elements) for part in parts)
    subject.tell(ev.TaskRestored(subject.at_ms, tuple(tables), False, in_flight))
    subject.tell(ev.TasksStarted(subject.at_ms))
    return subject


def rows_of(found: list[do.TaskInstruction]) -> list[dict[str, Any]]:
    """All rows that were sent, in order."""
    return [row for element in sent(found) if isinstance(element, pa.RecordBatch) for row in element.to_pylist()]


def told(found: list[do.TaskInstruction]) -> list[Any]:
    """What was sent: rows as numbers, other elements as they are."""
    return [x for e in sent(found) for x in (values(e) if isinstance(e, pa.RecordBatch) else [e])]


def tables_in(found: list[do.TaskInstruction]) -> Tables:
    """What the one snapshot among these holds. It is read once."""
    (persist,) = only(found, do.PersistSnapshot)
    return [(s.uid, tuple(t for state in s.states for t in tables_of(state))) for s in persist.snapshots]


def timers_in(tables: Tables) -> list[int]:
    """The moments of the timers among them."""
    (timers,) = (table.rows for _, of in tables for table in of if table.state == "_tidegate_timers")
    return sorted(timers.column("_tidegate_timer_timestamp_ms").to_pylist())


def test_a_watermark_with_many_timers_fills_the_queue_no_further_than_a_step() -> None:
    """Each step waits for room; a barrier that overtakes gets through meanwhile, with a snapshot of what is left."""
    queue_bytes = 10 * ONE_ROW_BYTES
    limits = BufferLimits(
        credit_bytes=1, queue_bytes_max=queue_bytes, frame_bytes_min=1, frame_bytes_max=1, turn_rows_max=STEP
    )
    subject = started(alarms(TimeDomain.EVENT_TIME, limits))
    found = subject.feed(0, batch(*range(1, 201)), Watermark(500))
    assert not subject.machine.runnable, "no room"
    assert queue_bytes <= subject.machine.outputs.queued_bytes < queue_bytes + STEP * ONE_ROW_BYTES

    cut = subject.arrive(0, barrier(1, UNALIGNED))
    assert sent(cut) == [barrier(1, UNALIGNED)]
    (written,) = only(cut, do.PersistChannelState)
    (overtaken,) = written.channels
    before = [x for b in overtaken.elements if isinstance(b, pa.RecordBatch) for x in values(b)]
    left = timers_in(tables_in(cut))
    assert told(found) + before == [-x for x in range(1, 201) if x not in left]
    assert len(left) > 150

    granted_bytes = 0
    while not any(isinstance(element, Watermark) for element in sent(found)):
        granted_bytes += ONE_ROW_BYTES
        assert granted_bytes <= 300 * ONE_ROW_BYTES
        found += subject.grant(granted_bytes) + subject.turns()
        assert subject.machine.outputs.queued_bytes < queue_bytes + STEP * ONE_ROW_BYTES
    assert told(found) == [*(-x for x in range(1, 201)), Watermark(500)]


def test_what_comes_behind_a_watermark_waits_for_its_last_step() -> None:
    """Rows, an aligned barrier and the end of the data are input: they are taken when all is done; an abort is not."""
    subject = started(alarms(TimeDomain.EVENT_TIME, limits_of(STEP)))
    end = EndOfData(drain=True)
    elements = [Watermark(10), barrier(2), batch(11), Watermark(MAX_WATERMARK_MS), end]
    subject.arrive(0, batch(*range(1, 11)), *elements)
    found = subject.turns(5)
    assert told(found) == [-1, -2, -3], "four turns for the rows, and the first step with the watermark"

    found += subject.tell(ev.CheckpointAborted(1_000, ATTEMPT, barrier(1).checkpoint_id))
    found += subject.turns()
    rows = [-x for x in range(1, 11)]
    assert told(found) == [*rows, Watermark(10), barrier(2), -11, Watermark(MAX_WATERMARK_MS), end]


def test_timers_of_the_clock_fire_in_steps_and_those_left_survive() -> None:
    """Between two steps of one moment a snapshot holds those that have not fired; they fire after a restore."""
    descriptor = alarms(TimeDomain.PROCESSING_TIME, limits_of(STEP))
    subject = started(descriptor)
    subject.feed(0, batch(*range(1_001, 1_011)))
    assert told(subject.timer(PROCESSING, 1_050) + subject.turns(1)) == [-1_001, -1_002, -1_003]
    assert told(subject.turns(1)) == [-1_004, -1_005, -1_006]

    cut = subject.arrive(0, barrier(1, UNALIGNED))
    left = [1_007, 1_008, 1_009, 1_010]
    tables = tables_in(cut)
    assert timers_in(tables) == left
    rest = subject.turns()
    assert told(rest) == [-x for x in left]
    assert only(cut + rest, do.SetTaskTimer) == [], "nothing is asked of the clock for moments that are past"

    again = restored(descriptor, tables, cut)
    assert told(again.timer(PROCESSING, 1_050) + again.turns()) == [-x for x in left]


@pytest.mark.parametrize("kind", [SnapshotKind.SUSPEND, SnapshotKind.TERMINATE])
def test_a_source_that_stops_does_the_steps_of_watermarks_first(kind: SnapshotKind) -> None:
    """Stopped between two steps, or with all timers due by the last watermark: the data ends when they are done."""
    subject = started(source_alarms(TimeDomain.EVENT_TIME))
    read = subject.reads.pop()
    subject.tell(ev.SourceBatchRead(1_000, read.read, batch(*range(1, 11)), 10, False))
    subject.turns()
    stop = BarrierOptions(kind=kind)
    drain = kind is SnapshotKind.TERMINATE
    found = subject.trigger(1, stop)
    assert told(found) == [-1, -2, -3] * drain, "one step at once, as with any watermark"
    assert subject.machine.status is TaskStatus.FINISHING
    found += subject.turns()

    rows = [*(-x for x in range(1, 11)), Watermark(MAX_WATERMARK_MS)] if drain else []
    assert told(found) == [*rows, EndOfData(drain, stop=CheckpointId(1)), barrier(1, stop)]


@pytest.mark.parametrize("kind", [SnapshotKind.SUSPEND, SnapshotKind.TERMINATE])
def test_a_source_that_stops_drops_what_is_left_of_the_clocks_steps(kind: SnapshotKind) -> None:
    """No processing-time timer fires behind the last row; suspended, those that are left are in the savepoint."""
    subject = started(source_alarms(TimeDomain.PROCESSING_TIME))
    read = subject.reads.pop()
    subject.tell(ev.SourceBatchRead(1_000, read.read, batch(*range(1_001, 1_006)), 5, False))
    subject.turns()
    assert told(subject.timer(PROCESSING, 1_050) + subject.turns(1)) == [-1_001, -1_002, -1_003]

    stop = BarrierOptions(kind=kind)
    found = subject.trigger(1, stop) + subject.turns()
    if kind is SnapshotKind.SUSPEND:
        assert told(found) == [EndOfData(drain=False, stop=CheckpointId(1)), barrier(1, stop, at_ms=1_050)]
        assert timers_in(tables_in(found)) == [1_004, 1_005]
    else:
        last = Watermark(MAX_WATERMARK_MS)
        assert told(found) == [last, EndOfData(drain=True, stop=CheckpointId(1)), barrier(1, stop, at_ms=1_050)]


def test_a_source_reads_on_and_takes_nothing_while_timers_fire() -> None:
    """What was read waits for the last step."""
    subject = started(source_alarms(TimeDomain.PROCESSING_TIME))
    read = subject.reads.pop()
    subject.tell(ev.SourceBatchRead(1_000, read.read, batch(*range(1_001, 1_006)), 5, False))
    subject.turns()
    subject.timer(PROCESSING, 1_050)
    subject.turns(1)

    read = subject.reads.pop()
    found = subject.tell(ev.SourceBatchRead(1_050, read.read, batch(1_006), 6, False))
    assert len(only(found, do.ReadSource)) == 1
    assert told(subject.turns(1)) == [-1_004, -1_005]
    assert only(subject.turns(), do.SetTaskTimer) == [do.SetTaskTimer(PROCESSING, 1_006)]


def test_steps_become_shorter_where_timers_are_slow() -> None:
    """A timer that takes a millisecond is followed by steps of a tenth of a second, whatever rows have cost."""
    subject = started(alarms(TimeDomain.EVENT_TIME, limits_of(ROWS_UNLIMITED)))
    subject.feed(0, batch(*range(1, 5_001)))
    subject.arrive(0, Watermark(9_999))
    fired = [0]
    while subject.machine.runnable:
        done = told(subject.tell(ev.TurnGranted(1_000, last_turn_ms=fired[-1])))
        fired.append(sum(isinstance(row, int) for row in done))
    assert sum(fired) == 5_000
    assert max(fired[5:]) <= TURN_MS_MAX
    assert sum(fired[5:]) > TURN_MS_MAX / 2 * len(fired[5:])


@st.composite
def scripts(draw: st.DrawFn) -> list[Element]:
    """Rows in any order within bounds, and watermarks that are true."""
    elements: list[Element] = []
    watermark_ms = 0
    for count in draw(st.lists(st.integers(0, 6), min_size=1, max_size=8)):
        if count == 0:
            watermark_ms += draw(st.integers(1, 25))
            elements.append(Watermark(watermark_ms))
            continue
        times = draw(st.lists(st.integers(1, 30), min_size=count, max_size=count))
        keys = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        columns = {"x": pa.array(keys, pa.int64()), "t": pa.array([watermark_ms + t for t in times], pa.int64())}
        elements.append(pa.record_batch(columns))
    return elements


MANY = pa.record_batch({"x": list(range(4)) * 5, "t": list(range(1, 21))})


@settings(max_examples=25, deadline=None)
@given(scripts(), scripts(), st.integers(1, 4), st.integers(0, 40))
@example([MANY, Watermark(100)], [Watermark(1)], 1, 27)
def test_a_snapshot_between_any_two_steps_restores_to_the_uninterrupted_result(
    before: list[Element], after: list[Element], step: int, turns: int
) -> None:
    """Whatever was done by then; and the order in which timers fire is that of one long step."""
    shift = max((e.timestamp_ms for e in before if isinstance(e, Watermark)), default=0)
    rest = [*(_later(element, shift) for element in after), Watermark(MAX_WATERMARK_MS), EndOfData(drain=True)]
    whole = started(sessions(ROWS_UNLIMITED))
    expected = rows_of(whole.feed(0, *before, *rest))

    descriptor = sessions(step)
    subject = started(descriptor)
    found = subject.arrive(0, *before) + subject.turns(turns)
    cut = subject.arrive(0, barrier(1, UNALIGNED))
    assert rows_of(cut) == [], "everything that was emitted left before the barrier"
    assert expected == rows_of(found) + rows_of(subject.feed(0, *rest))

    again = restored(descriptor, tables_in(cut), cut)
    assert _sorted(expected) == _sorted(rows_of(found) + rows_of(again.feed(0, *rest)))


def _later(element: Element, by_ms: int) -> Element:
    if isinstance(element, Watermark):
        return Watermark(element.timestamp_ms + by_ms)
    assert isinstance(element, pa.RecordBatch)
    times = [time + by_ms for time in element.column("t").to_pylist()]
    return pa.record_batch({"x": element.column("x"), "t": pa.array(times, pa.int64())})


def _sorted(rows: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return sorted(tuple(row.values()) for row in rows)


class EverySecond(ProcessFunction):
    """Emits the moment of its timer, and sets it for the next full second."""

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        self._again(context)
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        self._again(context)
        return [{"x": timestamp}]

    def _again(self, context: ProcessContext) -> None:
        now_ms = context.timer_service.current_processing_time()
        context.timer_service.register_processing_time_timer((now_ms // 1_000 + 1) * 1_000)


def test_a_timer_that_goes_by_the_clock_does_not_come_twice_where_that_is_set_back() -> None:
    """As in Flink, the current time is never before that of the timer: a clock that runs late set it again for now."""
    source = node("source")
    keyed = node("keyed", (source, BY_X), factory=lambda: ProcessOperator(EverySecond(), (("x",),), schema=X))
    graph = translate([source, keyed, node("down", (keyed, BY_X), factory=Summing)])
    subject = started(describe(graph, VertexId("keyed"), limits=limits_of(ROWS_UNLIMITED)))
    subject.feed(0, batch(7))

    found = subject.tell(ev.TimerDue(1_990, PROCESSING, 2_000)) + subject.turns(3)

    assert told(found) == [2_000]
    assert [t.due_at_ms for t in only(found, do.SetTaskTimer) if t.timer is PROCESSING] == [3_000]
