"""Time at a task: watermarks and the clock make timers of its operators fire."""

from __future__ import annotations

import pyarrow as pa
from alarms import Alarms
from batches import ONE_ROW_BYTES, batch, values
from frozen_tables import tables_of
from link import ATTEMPT, BY_X, Subject, Summing, barrier, describe, node, only, sent

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.state.timers import TimeDomain
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, BarrierOptions, EndOfData, Watermark
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, VertexId

PROCESSING = ev.TaskTimer.PROCESSING_TIME
SCHEMA = pa.schema([("x", pa.int64())])


def alarms(domain: TimeDomain, sources: int = 1, limits: BufferLimits | None = None) -> Subject:
    """A started task with `Alarms`, between `sources` channels and one output. It is 1,000 ms."""
    source = node("source", parallelism=sources)
    operator = node("alarms", (source, BY_X), factory=lambda: ProcessOperator(Alarms(domain), (("x",),), schema=SCHEMA))
    graph = translate([source, operator, node("down", (operator, BY_X), factory=Summing)])
    subject = Subject(describe(graph, VertexId("alarms"), limits=limits))
    subject.start()
    return subject


def test_watermarks_fire_event_time_timers_before_they_go_on() -> None:
    """The minimum of the channels counts; what a timer emits leaves before the watermark that fired it."""
    subject = alarms(TimeDomain.EVENT_TIME, sources=2)
    assert sent(subject.feed(0, batch(5), batch(7), Watermark(6))) == []

    found = subject.feed(1, Watermark(5))
    assert (values(sent(found)[0]), sent(found)[1:]) == ([-5], [Watermark(5)])

    found = subject.feed(1, Watermark(9)) + subject.feed(0, Watermark(MAX_WATERMARK_MS))
    assert [e if isinstance(e, Watermark) else values(e) for e in sent(found)] == [Watermark(6), [-7], Watermark(9)]


def test_the_last_watermark_fires_all_event_time_timers_before_the_end() -> None:
    """A bounded input leaves no event-time timer behind."""
    subject = alarms(TimeDomain.EVENT_TIME)
    found = subject.feed(0, batch(10**15), Watermark(MAX_WATERMARK_MS), EndOfData(drain=True))

    assert values(sent(found)[0]) == [-(10**15)]
    assert sent(found)[1:] == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True)]


def test_the_clock_fires_processing_time_timers_in_a_turn() -> None:
    """The task asks for the earliest moment, once; when it has come, a turn emits what is due."""
    subject = alarms(TimeDomain.PROCESSING_TIME)
    found = subject.feed(0, batch(1_050), batch(1_080), batch(1_020))
    assert only(found, do.SetTaskTimer) == [do.SetTaskTimer(PROCESSING, 1_050), do.SetTaskTimer(PROCESSING, 1_020)]

    assert sent(subject.timer(PROCESSING, 1_055)) == []
    found = subject.turns() + subject.timer(ev.TaskTimer.FLUSH, 1_055)

    assert [x for e in sent(found) for x in values(e)] == [-1_020, -1_050]
    assert [t for t in only(found, do.SetTaskTimer) if t.timer is PROCESSING] == [do.SetTaskTimer(PROCESSING, 1_080)]
    assert not subject.machine.runnable


def test_a_due_timer_waits_for_room_without_asking_for_time_again() -> None:
    """Under back-pressure it fires when there is room; asking for a moment that is past would never end."""
    limits = BufferLimits(credit_bytes=1, queue_bytes_max=ONE_ROW_BYTES, frame_bytes_min=1)
    subject = alarms(TimeDomain.PROCESSING_TIME, limits=limits)
    subject.feed(0, batch(1_001), batch(1_002), batch(1_003))
    for at_ms in (1_001, 1_002):
        subject.timer(PROCESSING, at_ms)
        subject.turns()
    assert not subject.machine.runnable, "one row has left, one waits"

    assert subject.timer(PROCESSING, 1_003) == []
    assert subject.timer(PROCESSING, 1_004) == []
    found = subject.grant() + subject.turns()

    assert [x for e in sent(found) for x in values(e)] == [-1_002, -1_003]


def test_processing_time_timers_are_dropped_at_the_end_of_the_input() -> None:
    """As in Flink: neither what was due already nor what comes later fires after the data has ended."""
    for end in (EndOfData(drain=True), EndOfData(drain=False)):
        subject = alarms(TimeDomain.PROCESSING_TIME)
        subject.feed(0, batch(1_020), batch(1_040))
        subject.timer(PROCESSING, 1_020)
        subject.arrive(0, end)
        subject.tell(ev.TurnGranted(subject.at_ms))
        fired = subject.turns()
        ended = fired + subject.timer(PROCESSING, 1_040) + subject.turns()

        assert sent(ended)[-1] == end
        assert [values(e) for e in sent(ended) if isinstance(e, pa.RecordBatch)] == [[-1_020]]


def test_a_timer_that_is_due_as_the_data_ends_does_not_fire_behind_the_end() -> None:
    """A source that is stopped before its due timer had a turn emits nothing after its savepoint."""
    source = node("source", rows=[1_020, 1_040])
    keyed = node(
        "keyed",
        (source, None),
        factory=lambda: ProcessOperator(Alarms(TimeDomain.PROCESSING_TIME), (("x",),), schema=SCHEMA),
    )
    graph = translate([source, keyed, node("down", (keyed, BY_X), factory=Summing)])
    subject = Subject(describe(graph, VertexId("source")))
    subject.start()
    read = subject.reads.pop()
    subject.tell(ev.SourceBatchRead(1_000, read.read, batch(1_020, 1_040), 2, False))
    subject.turns()
    subject.timer(PROCESSING, 1_030)
    stop = BarrierOptions(kind=SnapshotKind.SUSPEND)

    found = subject.trigger(1, stop) + subject.turns()

    assert sent(found) == [EndOfData(drain=False, stop=CheckpointId(1)), barrier(1, stop, at_ms=1_030)]


def test_restored_timers_wait_until_every_task_is_ready() -> None:
    """They may be due at once, and what they emit needs somebody to take it."""
    subject = alarms(TimeDomain.PROCESSING_TIME)
    (persist,) = only(subject.feed(0, batch(1_020), barrier(1)), do.PersistSnapshot)
    tables = tuple((s.uid, tuple(t for state in s.states for t in tables_of(state))) for s in persist.snapshots)
    again = Subject(subject.descriptor)
    again.at_ms = 9_000
    assert again.tell(ev.TaskRestored(9_000, tables)) == [do.ReportReady(ATTEMPT)]

    assert again.tell(ev.TasksStarted(9_000)) == [do.SetTaskTimer(PROCESSING, 1_020)]
    again.timer(PROCESSING, 9_000)
    assert [values(e) for e in sent(again.turns() + again.timer(ev.TaskTimer.FLUSH, 9_100))] == [[-1_020]]
