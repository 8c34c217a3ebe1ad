"""The task machine through its one door: snapshots, aborts, finishing, back-pressure, and what is ignored."""

from __future__ import annotations

import pyarrow as pa
from batches import batch, values
from frozen_tables import tables_of
from link import (
    ATTEMPT,
    SOURCE,
    WORK,
    FrozenSum,
    Subject,
    barrier,
    cancel,
    describe,
    file_of,
    kinds,
    only,
    sent,
    work_graph,
    worker,
)

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.split_positions import SplitPosition, positions_from_tables
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import EndOfData, EndOfPartition
from tidegate.storage.ids import CheckpointId

# --- the order of a snapshot --------------------------------------------------------------------------------------


def test_the_barrier_leaves_before_state_is_written_and_after_what_belongs_before_it() -> None:
    """What `prepare_snapshot` emits, then the barrier, then the synchronous part, then the asynchronous one."""
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
    """Positions at the cut: rows taken from each input and queued on each output."""
    subject = worker(sources=2)
    subject.feed(0, batch(1, 2), batch(3), barrier(1))
    found = subject.feed(1, batch(4), barrier(1), batch(5))

    (persist,) = only(found, do.PersistSnapshot)
    first, second = subject.descriptor.inputs
    assert persist.input_positions == ((first, 3), (second, 1))
    assert [position for _, position in persist.output_positions] == [4]


# --- alignment ----------------------------------------------------------------------------------------------------


def test_nothing_of_a_blocked_channel_is_processed_before_the_snapshot() -> None:
    """Invariant 2: after its barrier a channel waits, the others go on, and receiving never stops."""
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
        (1_040, lambda: subject.feed(0, barrier(1))),
        (1_070, lambda: subject.feed(1, barrier(1))),
    ]:
        subject.at_ms = at_ms
        step()
    subject.at_ms = 1_170

    (ack,) = only(subject.persisted(1), do.Acknowledge)

    told = ack.metrics
    assert (told.start_delay_ms, told.alignment_ms, told.async_ms) == (40, 30, 100)
    assert (told.state_bytes, told.in_flight_bytes, told.unaligned) == (10, 0, False)


def test_an_ended_channel_does_not_hold_a_checkpoint_up() -> None:
    """EndOfPartition counts as the barrier of every later checkpoint."""
    subject = worker(sources=2)
    subject.feed(0, EndOfData(drain=True), EndOfPartition())

    found = subject.feed(1, barrier(4))

    assert only(found, do.PersistSnapshot)[0].checkpoint_id == 4


# --- aborts -------------------------------------------------------------------------------------------------------


def test_an_abort_during_alignment_unblocks_and_is_sent_on() -> None:
    """The blocked channel goes on at once, and whoever is downstream need not wait either."""
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


# --- one winner ---------------------------------------------------------------------------------------------------


def test_state_that_becomes_durable_after_the_abort_is_discarded() -> None:
    """The abort wins, so the write that ends later is thrown away and nothing is acknowledged."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1))
    subject.abort(1)

    assert subject.persisted(1, "late") == [do.DiscardState(("late",))]


def test_an_abort_after_the_write_discards_what_was_not_acknowledged() -> None:
    """Durable state whose files were not is discarded by the task; acknowledged state is the coordinator's."""
    waiting = worker(sources=1, sink=True)
    waiting.feed(0, batch(1), barrier(1))
    waiting.persisted(1, "waits for its file")
    acknowledged = worker(sources=1)
    acknowledged.feed(0, barrier(1))
    acknowledged.persisted(1)

    assert only(waiting.abort(1), do.DiscardState) == [do.DiscardState(("waits for its file",))]
    assert only(acknowledged.abort(1), do.DiscardState) == []


def test_a_write_that_fails_declines_the_checkpoint_once() -> None:
    """SnapshotFailed is a decline with the reason; of a cancelled snapshot nobody wants to know."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1), barrier(2))
    subject.abort(2)
    reason = CheckpointFailureReason.ASYNC_PART_FAILED

    assert subject.failed(1, "disk full") == [do.Decline(ATTEMPT, CheckpointId(1), reason, "disk full")]
    assert subject.failed(1, "disk full") == []
    assert subject.failed(2, "disk full") == []


def test_the_state_of_a_snapshot_whose_abort_was_lost_is_discarded() -> None:
    """A newer completed checkpoint ends older snapshots, so that a lost message leaves no file behind."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1), barrier(2))
    subject.persisted(2)
    subject.completed(2)

    assert subject.persisted(1, "old") == [do.DiscardState(("old",))]


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
    """A task without state takes part in every checkpoint, with nothing to store."""
    subject = worker(sources=1)
    subject.feed(0, barrier(1))

    (ack,) = only(subject.persisted(1, None), do.Acknowledge)

    assert (ack.state.handle, ack.state.committables, ack.state.finished) == (None, (), False)
    assert (ack.state.vertex, ack.state.subtask) == (WORK, 0)


def test_a_trigger_that_cannot_be_followed_is_declined() -> None:
    """A source that does not run yet, or any more, declines a trigger rather than keeping silent."""
    subject = Subject(describe(work_graph(), SOURCE))
    subject.tell(ev.TaskRestored(0, ()))

    (decline,) = only(subject.trigger(1), do.Decline)

    assert decline.reason is CheckpointFailureReason.TASK_NOT_READY
    assert "source[0] is ready" in decline.message


# --- sources ------------------------------------------------------------------------------------------------------


def test_a_source_reads_after_the_start_only() -> None:
    """Rows must not leave before every task of the attempt is ready to take them."""
    subject = Subject(describe(work_graph(rows=range(3)), SOURCE))
    assert kinds(subject.tell(ev.TaskRestored(0, ()))) == ["ReportReady"]

    assert [(r.offset, r.rows_max) for r in only(subject.tell(ev.TasksStarted(0)), do.ReadSource)] == [(0, 2)]


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
    (table,) = [table for state in persist.snapshots[0].states for table in tables_of(state)]

    assert positions_from_tables([table]) == (SplitPosition(read.split, 2, False),)
    again = Subject(describe(graph, SOURCE))
    again.start(("source", table))
    rest = [e for e in sent(again.read_all()) if isinstance(e, pa.RecordBatch)]
    assert [x for e in rest for x in values(e)] == [2, 3, 4, 5, 6]
