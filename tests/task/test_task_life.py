"""The end of a task, what it ignores or refuses, back-pressure; and two tasks joined by a link."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from frozen_tables import tables_of
from link import (
    ATTEMPT,
    SOURCE,
    WORK,
    FrozenSum,
    Link,
    Subject,
    Summing,
    barrier,
    describe,
    kinds,
    only,
    sent,
    work_graph,
    worker,
)

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.actors.task.task_machine import STAGED_FILES_IN_FLIGHT_MAX
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
    element_size_bytes,
)
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid

# --- the end ------------------------------------------------------------------------------------------------------


def finish_source(subject: Subject) -> list[do.TaskInstruction]:
    """Start a source task and read it to its end."""
    subject.start()
    return subject.read_all()


def test_a_bounded_source_ends_with_the_last_watermark_and_end_of_data() -> None:
    """After the last row: event time ends, then the data; the task still takes part in checkpoints."""
    subject = Subject(describe(work_graph(rows=[1, 2, 3]), SOURCE))
    found = finish_source(subject)

    assert sent(found)[-2:] == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True)]
    assert only(found, do.ReportEndOfData) == [do.ReportEndOfData(ATTEMPT)]
    assert subject.machine.status is TaskStatus.END_OF_DATA
    assert only(subject.trigger(1), do.PersistSnapshot)[0].checkpoint_id == 1


def test_a_task_ends_after_the_final_checkpoint_and_the_end_of_all_inputs() -> None:
    """EndOfData -> operators finish -> final checkpoint -> EndOfPartition on all inputs -> finished, in this order."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    subject.feed(0, batch(5), EndOfData(drain=True))
    assert "finish" not in log

    ended = subject.feed(1, EndOfData(drain=True))
    assert log[-1] == "finish"
    assert values(sent(ended)[-2]) == [-5]
    assert sent(ended)[-1] == EndOfData(drain=True)

    subject.feed(0, barrier(1))
    subject.feed(1, barrier(1))
    (ack,) = only(subject.persisted(1, None), do.Acknowledge)
    assert ack.state.finished
    assert only(subject.completed(1), do.ReportFinished) == []
    assert only(subject.feed(0, EndOfPartition()), do.ReportFinished) == []
    last = subject.feed(1, EndOfPartition())

    assert (sent(last), log[-1]) == ([EndOfPartition()], "close")
    assert only(last, do.ReportFinished) == [do.ReportFinished(ATTEMPT)]
    assert subject.machine.status is TaskStatus.FINISHED
    assert log.count("finish") == log.count("close") == 1


def test_only_a_checkpoint_that_covers_the_finish_ends_the_task() -> None:
    """A checkpoint from before the finish that completes afterwards is one of many; the next one is the final one."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1), EndOfData(drain=True), barrier(2), EndOfPartition())
    (first,) = only(subject.persisted(1), do.Acknowledge)
    assert not first.state.finished
    assert subject.completed(1) == []
    (second,) = only(subject.persisted(2), do.Acknowledge)
    assert second.state.finished

    assert kinds(subject.completed(2)) == ["SendFrame", "ReportFinished"]


def test_finished_operators_do_not_run_again() -> None:
    """A task restored as finished passes on the end of its data without processing or finishing anything."""
    log: list[str] = []
    graph = work_graph(partial(Summing, log), downstream=True)
    subject = Subject(describe(graph, WORK))
    subject.start(finished=True)

    found = subject.feed(0, Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1))

    assert log == [], "operators that have finished are not even opened"
    assert sent(found) == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1)]
    assert only(found, do.PersistSnapshot)[0].snapshots == ()
    with pytest.raises(ProtocolError, match="got 1 rows after its operators had finished"):
        subject.feed(0, batch(1))


def test_closing_a_task_closes_its_operators_once() -> None:
    """A task that ends in the middle, by failure or cancellation, releases what its operators hold."""
    log: list[str] = []
    subject = worker(log=log)

    subject.machine.close()
    subject.machine.close()

    assert log == ["open", "close"]


def test_operators_that_were_never_opened_are_not_closed() -> None:
    """There is nothing to release before the state is there."""
    log: list[str] = []
    subject = Subject(describe(work_graph(partial(Summing, log)), WORK))

    subject.machine.close()

    assert log == []


# --- what is ignored, and what is refused -------------------------------------------------------------------------


def test_messages_of_another_attempt_are_ignored() -> None:
    """What was meant for a former attempt changes nothing: frames, credit, triggers, aborts, completions."""
    old = AttemptNumber(ATTEMPT - 1)
    log: list[str] = []
    subject = worker(sources=1, log=log)
    subject.feed(0, barrier(1), barrier(2))
    output = subject.descriptor.outputs[0].channels[0]

    assert subject.arrive(0, batch(1), attempt=old) == []
    assert subject.tell(ev.CreditGranted(0, old, output, 10**9, 10**9)) == []
    assert subject.tell(ev.CheckpointCompleted(0, old, CheckpointId(1))) == []
    assert subject.abort(1, attempt=old) == []
    assert "process [1]" not in log
    assert only(subject.persisted(1), do.Acknowledge), "the abort of another attempt did not count"
    source = Subject(describe(work_graph(), SOURCE))
    source.start()
    assert source.trigger(1, attempt=old) == []


def test_a_repeated_frame_is_processed_once_and_a_gap_refused() -> None:
    """Invariant 1 at the machine's door."""
    log: list[str] = []
    subject = worker(sources=1, log=log)
    channel = subject.descriptor.inputs[0]
    frame = ev.FrameArrived(0, ATTEMPT, channel, 0, (batch(1),))
    subject.tell(frame)
    subject.tell(frame)
    subject.turns()

    assert log.count("process [1]") == 1
    with pytest.raises(ProtocolError, match="element 5 arrived where 1 was due"):
        subject.tell(ev.FrameArrived(0, ATTEMPT, channel, 5, (batch(1),)))


def test_a_task_is_restored_once() -> None:
    """A second TaskRestored is a fault of the runtime."""
    subject = worker()
    with pytest.raises(ProtocolError, match="is running and got `TaskRestored` again"):
        subject.start()


def test_a_turn_without_work_does_nothing() -> None:
    """A turn that was granted while the work vanished is no error."""
    assert worker().tell(ev.TurnGranted(0)) == []


def test_event_time_is_combined_and_sent_on() -> None:
    """Watermarks and idleness of the inputs come out as the valve combines them."""
    subject = worker(sources=2)
    found = subject.feed(0, Watermark(5)) + subject.feed(1, Watermark(3), WatermarkStatus(idle=True))

    assert sent(found) == [Watermark(3), Watermark(5)]


# --- back-pressure and output -------------------------------------------------------------------------------------


def test_a_full_output_stops_input_until_credit_comes() -> None:
    """Invariant 10: without credit the task queues up to its limit, then takes no turn; credit sets it going again."""
    row_bytes = ONE_ROW_BYTES
    limits = BufferLimits(credit_bytes=row_bytes, queue_bytes_max=3 * row_bytes, frame_bytes_min=1)
    graph = work_graph(downstream=True)
    subject = Subject(describe(graph, WORK, limits=limits))
    subject.start()

    subject.feed(0, *(batch(n) for n in range(10)))

    assert not subject.machine.runnable
    assert subject.machine.outputs.queued_bytes == 3 * row_bytes
    output = subject.descriptor.outputs[0].channels[0]
    found = subject.tell(ev.CreditGranted(0, ATTEMPT, output, 3 * row_bytes, 10**9))
    assert [values(e) for e in sent(found)] == [[1], [2]]
    assert subject.machine.runnable


def test_a_source_without_room_reads_no_further() -> None:
    """Back-pressure reaches the source: nothing is read while its output is full."""
    limits = BufferLimits(credit_bytes=1, queue_bytes_max=1, frame_bytes_min=1)
    subject = Subject(describe(work_graph(rows=range(100)), SOURCE, limits=limits))
    subject.start()
    subject.read_all()

    assert not subject.machine.runnable
    assert subject.machine.status is TaskStatus.RUNNING
    output = subject.descriptor.outputs[0].channels[0]
    subject.tell(ev.CreditGranted(0, ATTEMPT, output, 10**9, 10**9))
    subject.read_all()
    assert subject.machine.status is TaskStatus.END_OF_DATA


def test_a_sink_that_writes_too_many_files_at_once_stops_input() -> None:
    """Files under way are bounded: further rows wait until one is durable."""
    subject = worker(sources=1, sink=True)
    for n in range(STAGED_FILES_IN_FLIGHT_MAX):
        subject.feed(0, batch(n), barrier(n + 1))
    subject.arrive(0, batch(99))
    assert not subject.machine.runnable

    subject.staged(0)

    assert subject.machine.runnable


def test_little_output_waits_for_the_linger_time_with_one_timer() -> None:
    """A small batch arms one timer; when it is due the batch leaves, and the next one arms it again."""
    subject = worker(sources=1)
    first = subject.feed(0, batch(1))
    assert only(first, do.SetTaskTimer) == [
        do.SetTaskTimer(ev.TaskTimer.FLUSH, subject.at_ms + BufferLimits().linger_ms)
    ]
    assert kinds(subject.feed(0, batch(2))) == []

    flushed = subject.tell(ev.TimerDue(subject.at_ms, ev.TaskTimer.FLUSH))

    assert [values(e) for e in sent(flushed)] == [[1], [2]]
    assert kinds(subject.feed(0, batch(3))) == ["SetTaskTimer"]


# --- two machines -------------------------------------------------------------------------------------------------


def joined(rows: int, limits: BufferLimits) -> tuple[Link, list[do.TaskInstruction]]:
    """A source of so many rows joined to a worker, both started; and what they asked for."""
    graph = work_graph(rows=range(rows))
    link = Link(Subject(describe(graph, SOURCE, limits=limits)), Subject(describe(graph, WORK, limits=limits)))
    return link, link.carry(link.down.start() + link.up.start())


def run(link: Link, read_rows: int | None = None) -> list[do.TaskInstruction]:
    """Answer reads until the source has no question, or `read_rows` rows were read."""
    reader = link.up.descriptor.source.source.reader()
    found: list[do.TaskInstruction] = []
    rows = 0
    while link.up.reads and (read_rows is None or rows < read_rows):
        read = link.up.reads.pop(0)
        result = reader.read(read.split, read.offset, read.rows_max)
        rows = result.next_offset
        found += link.carry(
            link.up.tell(ev.SourceBatchRead(0, read.read, result.batch, result.next_offset, result.at_end))
        )
    return found


def test_a_job_of_two_tasks_runs_to_its_end() -> None:
    """Source and worker over a link with little credit: everything arrives, and both end after the final checkpoint."""
    limits = BufferLimits(credit_bytes=500, queue_bytes_max=500, frame_bytes_min=100, frame_bytes_max=400)
    link, _ = joined(101, limits)
    ended = run(link)
    assert len(only(ended, do.ReportEndOfData)) == 2

    snapshots = link.carry(link.up.trigger(1))
    assert len(only(snapshots, do.PersistSnapshot)) == 2
    acks = link.carry(link.up.persisted(1)) + link.carry(link.down.persisted(1))
    assert all(a.state.finished for a in only(acks, do.Acknowledge))
    last = link.carry(link.up.completed(1) + link.down.completed(1))

    assert len(only(last, do.ReportFinished)) == 2
    rows = [x for e in link.delivered if isinstance(e, pa.RecordBatch) for x in values(e)]
    assert rows == list(range(101))
    assert link.queued_bytes_max <= 500 + element_size_bytes(batch(1, 2))


def test_the_cuts_of_two_tasks_fit_together_and_a_restored_pair_counts_every_row_once() -> None:
    """Invariant 3: rows before the cut are in the receiver's state, rows after it are read again by the source."""
    link, _ = joined(20, BufferLimits(frame_bytes_min=1))
    run(link, read_rows=9)
    up, down = only(link.carry(link.up.trigger(1)), do.PersistSnapshot)
    assert up.output_positions == down.input_positions
    (source_table,) = [table for s in up.snapshots[0].states for table in tables_of(s)]
    (sum_table,) = [table for s in down.snapshots[0].states for table in tables_of(s)]

    graph = work_graph(rows=range(20))
    again = Link(Subject(describe(graph, SOURCE)), Subject(describe(graph, WORK)))
    again.carry(again.down.start(("work", sum_table)) + again.up.start(("source", source_table)))
    run(again)
    (final,) = [p for p in only(again.carry(again.up.trigger(1)), do.PersistSnapshot) if p.input_positions]

    reread = [x for e in again.delivered if isinstance(e, pa.RecordBatch) for x in values(e)]
    assert sum(reread) + sum_table.rows.column("total")[0].as_py() == sum(range(20))
    assert final.snapshots == (), "the operators have finished, so their state is over"


def test_state_tables_reach_the_operator_they_belong_to() -> None:
    """Restored tables are matched by uid; an operator without any opens fresh."""
    (table,) = tables_of(FrozenSum(40))
    subject = Subject(describe(work_graph(downstream=True), WORK))
    subject.start(("work", table))
    subject.feed(0, batch(2))

    (persist,) = only(subject.feed(0, barrier(1)), do.PersistSnapshot)

    assert [(s.uid, s.states) for s in persist.snapshots] == [(OperatorUid("work"), (FrozenSum(42),))]


def test_a_sender_whose_credit_stays_away_asks_for_it() -> None:
    """A grant may be lost, and where all credit is used up no other follows: an empty frame is answered by it."""
    tight = BufferLimits(credit_bytes=1, frame_bytes_min=1, probe_ms=500)
    up, down = worker(sources=1, limits=tight), worker(sources=1, limits=tight)
    found = up.feed(0, batch(1), batch(2))
    timers = [t for t in only(found, do.SetTaskTimer) if t.timer is ev.TaskTimer.CREDIT]
    assert [t.due_at_ms - up.at_ms for t in timers] == [500]

    (probe,) = only(up.tell(ev.TimerDue(up.at_ms, ev.TaskTimer.CREDIT)), do.SendFrame)

    assert (probe.first_sequence, probe.elements) == (1, ())
    down.feed(0, batch(1))
    channel = down.descriptor.inputs[0]
    granted = only(down.tell(ev.FrameArrived(0, ATTEMPT, channel, 1, ())), do.GrantCredit)
    assert [g.total_bytes > 1 for g in granted] == [True]


def test_a_sender_that_got_credit_meanwhile_does_not_ask() -> None:
    """The question is for grants that are lost, not for a receiver that is slow."""
    up = worker(sources=1, limits=BufferLimits(credit_bytes=1, frame_bytes_min=1))
    up.feed(0, batch(1), batch(2), batch(3))
    up.grant(2)

    assert [
        f.elements for f in only(up.tell(ev.TimerDue(up.at_ms, ev.TaskTimer.CREDIT)), do.SendFrame) if not f.elements
    ] == []
