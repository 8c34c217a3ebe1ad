"""The task machine through its one door: snapshots, aborts, finishing, back-pressure, and what is ignored."""

from __future__ import annotations

from functools import partial

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from link import (
    ATTEMPT,
    SOURCE,
    WORK,
    FrozenSum,
    Link,
    Subject,
    Summing,
    describe,
    file_of,
    handle_of,
    kinds,
    only,
    sent,
    work_graph,
)

from tidegate.actors.elements import (
    MAX_WATERMARK_MS,
    Barrier,
    CancelBarrier,
    EndOfData,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
    element_size_bytes,
)
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.machine import STAGED_FILES_IN_FLIGHT_MAX
from tidegate.actors.task.outputs import BufferLimits
from tidegate.actors.task.source import SplitPosition, positions_from_tables
from tidegate.actors.task.status import TaskStatus
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid
from tidegate.storage.state import StateTable


def barrier(checkpoint_id: int, at_ms: int = 1_000) -> Barrier:
    """A barrier of this checkpoint."""
    return Barrier(CheckpointId(checkpoint_id), at_ms)


def cancel(checkpoint_id: int) -> CancelBarrier:
    """A cancel barrier of this checkpoint."""
    return CancelBarrier(CheckpointId(checkpoint_id))


def worker(sources: int = 2, log: list[str] | None = None, **options: bool) -> Subject:
    """A started task between `sources` channels and one output."""
    emit = options.pop("emit_before_barrier", False)
    graph = work_graph(partial(Summing, log, emit), sources=sources, downstream=True, **options)
    subject = Subject(describe(graph, WORK))
    subject.start()
    return subject


# --- T1: the order of a snapshot ----------------------------------------------------------------------------------


def test_the_barrier_leaves_before_state_is_written_and_after_what_belongs_before_it() -> None:
    """T1: what `prepare_snapshot` emits, then the barrier, then the synchronous part, then the asynchronous one."""
    log: list[str] = []
    subject = worker(sources=1, log=log, emit_before_barrier=True)
    subject.feed(0, batch(2), batch(3))
    log.clear()

    found = subject.feed(0, barrier(1), batch(10))

    assert log == ["prepare", "snapshot", "process [10]"]
    elements = sent(found)
    assert [values(e) for e in elements[:-1]] == [[2], [3], [5]]
    assert elements[-1] == barrier(1)
    assert kinds(found)[:2] == ["SendFrame", "PersistSnapshot"]
    (persist,) = only(found, do.PersistSnapshot)
    assert [s.states for s in persist.snapshots] == [(FrozenSum(5),)]


def test_a_snapshot_says_where_it_cuts_each_channel() -> None:
    """Positions at the cut: elements taken on each input, the barrier among them, and queued on each output."""
    subject = worker(sources=2)
    subject.feed(0, batch(1), batch(2), barrier(1))
    found = subject.feed(1, batch(3), barrier(1))

    (persist,) = only(found, do.PersistSnapshot)
    first, second = subject.descriptor.inputs
    assert persist.input_positions == ((first, 3), (second, 2))
    assert [position for _, position in persist.output_positions] == [4]


# --- T2: alignment ------------------------------------------------------------------------------------------------


def test_nothing_of_a_blocked_channel_is_processed_before_the_snapshot() -> None:
    """T2, invariant 2: after its barrier a channel waits, the others go on, and receiving never stops."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    subject.feed(0, batch(1), barrier(1), batch(2))
    subject.feed(1, batch(3))
    assert log == ["open", "process [1]", "process [3]"]
    assert not subject.machine.runnable

    found = subject.feed(1, barrier(1))

    assert log[3:] == ["prepare", "snapshot", "process [2]"]
    assert [s.states for s in only(found, do.PersistSnapshot)[0].snapshots] == [(FrozenSum(4),)]


def test_durations_of_a_snapshot() -> None:
    """Start delay from the trigger to the first barrier, alignment to the last one, asynchronous part to durable."""
    subject = worker(sources=2)
    for at_ms, step in [
        (1_040, lambda: subject.feed(0, barrier(1, at_ms=1_000))),
        (1_070, lambda: subject.feed(1, barrier(1, at_ms=1_000))),
    ]:
        subject.at_ms = at_ms
        step()
    subject.at_ms = 1_170

    (ack,) = only(subject.persisted(1), do.Acknowledge)

    assert (ack.start_delay_ms, ack.alignment_ms, ack.async_ms) == (40, 30, 100)


def test_an_ended_channel_does_not_hold_a_checkpoint_up() -> None:
    """EndOfPartition counts as the barrier of every later checkpoint."""
    subject = worker(sources=2)
    subject.feed(0, EndOfData(drain=True), EndOfPartition())

    found = subject.feed(1, barrier(4))

    assert only(found, do.PersistSnapshot)[0].checkpoint_id == 4


# --- T5: aborts ---------------------------------------------------------------------------------------------------


def test_an_abort_during_alignment_unblocks_and_is_sent_on() -> None:
    """T5: the blocked channel goes on at once, and whoever is downstream need not wait either."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    subject.feed(0, barrier(1), batch(7))

    found = subject.abort(1)

    assert "process [7]" in log
    assert cancel(1) in sent(found)
    assert only(subject.feed(1, barrier(1)), do.PersistSnapshot) == []


def test_a_cancel_barrier_is_sent_on_once() -> None:
    """A cancel barrier from upstream ends the alignment here and goes downstream once, though told twice."""
    subject = worker(sources=2)
    subject.feed(0, barrier(1))

    found = subject.feed(1, cancel(1)) + subject.abort(1)

    assert sent(found) == [cancel(1)]


def test_an_abort_before_the_barrier_is_remembered() -> None:
    """The barrier that comes after its abort blocks nobody, takes no snapshot, and goes on as a cancellation."""
    subject = worker(sources=2)
    assert subject.abort(1) == []

    found = subject.feed(0, barrier(1), batch(1))

    assert [e for e in sent(found) if not isinstance(e, pa.RecordBatch)] == [cancel(1)]
    assert only(found, do.PersistSnapshot) == []
    assert not subject.machine.runnable


def test_a_source_sends_a_cancellation_for_an_aborted_trigger() -> None:
    """A trigger is a source's barrier: aborted first, it must not start the checkpoint."""
    subject = Subject(describe(work_graph(), SOURCE))
    subject.start()
    subject.abort(1)

    found = subject.trigger(1)

    assert sent(found) == [cancel(1)]
    assert sent(subject.trigger(2)) == [barrier(2)]


# --- T7: one winner -----------------------------------------------------------------------------------------------


def test_state_that_becomes_durable_after_the_abort_is_discarded() -> None:
    """T7: the abort wins, so the write that ends later is thrown away and nothing is acknowledged."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1))
    subject.abort(1)

    assert subject.persisted(1, "late") == [do.DiscardState(handle_of("late"))]


def test_an_abort_after_the_write_discards_what_was_not_acknowledged() -> None:
    """T7: durable state whose files were not is discarded by the task; acknowledged state is the coordinator's."""
    waiting = worker(sources=1, sink=True)
    waiting.feed(0, batch(1), barrier(1))
    waiting.persisted(1, "waits for its file")
    acknowledged = worker(sources=1)
    acknowledged.feed(0, barrier(1))
    acknowledged.persisted(1)

    assert only(waiting.abort(1), do.DiscardState) == [do.DiscardState(handle_of("waits for its file"))]
    assert only(acknowledged.abort(1), do.DiscardState) == []


def test_a_write_that_fails_declines_the_checkpoint_once() -> None:
    """SnapshotFailed is a decline with the reason; of a cancelled snapshot nobody wants to know."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1), barrier(2))
    subject.abort(2)
    failed = partial(ev.SnapshotFailed, 0, error="disk full")

    assert subject.tell(failed(checkpoint_id=CheckpointId(1))) == [do.Decline(ATTEMPT, CheckpointId(1), "disk full")]
    assert subject.tell(failed(checkpoint_id=CheckpointId(2))) == []


def test_the_state_of_a_snapshot_whose_abort_was_lost_is_discarded() -> None:
    """A newer completed checkpoint ends older snapshots, so that a lost message leaves no file behind."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1), barrier(2))
    subject.persisted(2)
    subject.completed(2)

    assert subject.persisted(1, "old") == [do.DiscardState(handle_of("old"))]


# --- acknowledging ------------------------------------------------------------------------------------------------


def test_an_acknowledgement_waits_for_state_and_for_the_files_before_the_barrier() -> None:
    """Rows that a sink got before the barrier are staged by it; the checkpoint is acknowledged when all is durable."""
    subject = worker(sources=1, sink=True)
    found = subject.feed(0, batch(1), barrier(1), batch(2), barrier(2))
    stages = only(found, do.StageFile)
    assert [(s.uid, s.index, [values(b) for b in s.batches]) for s in stages] == [
        ("sink", 0, [[1]]),
        ("sink", 1, [[2]]),
    ]

    assert only(subject.persisted(1), do.Acknowledge) == []
    (first,) = only(subject.staged(0), do.Acknowledge)
    assert only(subject.staged(1), do.Acknowledge) == []
    (second,) = only(subject.persisted(2), do.Acknowledge)

    assert [c.files for c in first.state.committables] == [(file_of(0),)]
    assert [(c.first_index, c.files) for c in second.state.committables] == [(0, (file_of(0), file_of(1)))], (
        "checkpoint 1 is not known to be complete, so its file is asked for again"
    )


def test_a_stateless_task_reports_no_handle() -> None:
    """T8: a task without state takes part in every checkpoint, with nothing to store."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1))

    (ack,) = only(subject.persisted(1, None), do.Acknowledge)

    assert (ack.state.handle, ack.state.committables, ack.state.finished) == (None, (), False)
    assert (ack.state.vertex, ack.state.subtask) == (WORK, 0)


def test_a_trigger_that_cannot_be_followed_is_declined() -> None:
    """C3 from the task's side: a source that does not run yet, or any more, says so rather than keeping silent."""
    subject = Subject(describe(work_graph(), SOURCE))
    subject.tell(ev.TaskRestored(0, ()))

    (decline,) = only(subject.trigger(1), do.Decline)

    assert "source[0] is ready" in decline.reason


# --- sources ------------------------------------------------------------------------------------------------------


def test_a_source_reads_after_the_start_only() -> None:
    """Rows must not leave before every task of the attempt is ready to take them."""
    subject = Subject(describe(work_graph(rows=range(3)), SOURCE))
    assert kinds(subject.tell(ev.TaskRestored(0, ()))) == ["ReportReady"]

    assert [(r.offset, r.rows_max) for r in only(subject.tell(ev.SourcesStarted(0)), do.ReadSource)] == [(0, 2)]


def test_a_source_snapshot_holds_what_was_processed_and_restores_there() -> None:
    """The position in a snapshot is that of the rows sent before the barrier; a restored source reads on from it."""
    graph = work_graph(rows=range(7))
    subject = Subject(describe(graph, SOURCE))
    subject.start()
    reader = graph.vertex(SOURCE).source.source.reader()
    read = subject.reads.pop()
    result = reader.read(read.split, read.offset, read.rows_max)
    subject.tell(ev.SourceBatchRead(0, read.read, result.batch, result.next_offset, result.at_end))
    subject.turns()

    (persist,) = only(subject.trigger(1), do.PersistSnapshot)
    (table,) = [state.materialize() for state in persist.snapshots[0].states]

    assert positions_from_tables([table]) == (SplitPosition(read.split, 2, False),)
    again = Subject(describe(graph, SOURCE))
    again.start(("source", table))
    rest = [e for e in sent(again.read_all()) if isinstance(e, pa.RecordBatch)]
    assert [x for e in rest for x in values(e)] == [2, 3, 4, 5, 6]


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
    assert only(subject.completed(1, final=True), do.ReportFinished) == []
    assert only(subject.feed(0, EndOfPartition()), do.ReportFinished) == []
    last = subject.feed(1, EndOfPartition())

    assert (sent(last), log[-1]) == ([EndOfPartition()], "close")
    assert only(last, do.ReportFinished) == [do.ReportFinished(ATTEMPT)]
    assert subject.machine.status is TaskStatus.FINISHED
    assert log.count("finish") == log.count("close") == 1


def test_a_checkpoint_that_is_not_final_ends_nothing() -> None:
    """While another task still has data, a checkpoint that completes is one of many."""
    subject = Subject(describe(work_graph(), SOURCE))
    finish_source(subject)
    subject.trigger(1)
    subject.persisted(1)
    assert subject.completed(1, final=False) == []
    subject.trigger(2)
    subject.persisted(2)

    assert kinds(subject.completed(2, final=True)) == ["ReportFinished", "SendFrame"]


def test_finished_operators_do_not_run_again() -> None:
    """A task restored as finished passes on the end of its data without processing or finishing anything."""
    log: list[str] = []
    graph = work_graph(partial(Summing, log), downstream=True)
    subject = Subject(describe(graph, WORK))
    subject.start(finished=True)

    found = subject.feed(0, Watermark(MAX_WATERMARK_MS), EndOfData(drain=True), barrier(1))

    assert log == ["open"]
    assert EndOfData(drain=True) in sent(found)
    assert only(found, do.PersistSnapshot)[0].snapshots == ()
    with pytest.raises(ProtocolError, match="has finished its operators and got 1 rows"):
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
    assert subject.tell(ev.CreditGranted(0, old, output, 10**9)) == []
    assert subject.tell(ev.CheckpointCompleted(0, old, CheckpointId(1), final=True)) == []
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
    with pytest.raises(ProtocolError, match="is running and was told TaskRestored"):
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
    assert subject.machine.output_queue_bytes == 3 * row_bytes
    output = subject.descriptor.outputs[0].channels[0]
    found = subject.tell(ev.CreditGranted(0, ATTEMPT, output, 3 * row_bytes))
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
    subject.tell(ev.CreditGranted(0, ATTEMPT, output, 10**9))
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
    assert only(first, do.ArmFlushTimer) == [do.ArmFlushTimer(subject.at_ms + BufferLimits().linger_ms)]
    assert kinds(subject.feed(0, batch(2))) == []

    flushed = subject.tell(ev.FlushDue(subject.at_ms))

    assert [values(e) for e in sent(flushed)] == [[1], [2]]
    assert kinds(subject.feed(0, batch(3))) == ["ArmFlushTimer"]


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
    last = link.carry(link.up.completed(1, final=True) + link.down.completed(1, final=True))

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
    (source_table,) = [s.materialize() for s in up.snapshots[0].states]
    (sum_table,) = [s.materialize() for s in down.snapshots[0].states]

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
    table: StateTable = FrozenSum(40).materialize()
    subject = Subject(describe(work_graph(downstream=True), WORK))
    subject.start(("work", table))
    subject.feed(0, batch(2))

    (persist,) = only(subject.feed(0, barrier(1)), do.PersistSnapshot)

    assert [(s.uid, s.states) for s in persist.snapshots] == [(OperatorUid("work"), (FrozenSum(42),))]
