"""The position of a source subtask: what counts as processed, what is read ahead, and its way through a checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from source_reads import FIRST, SECOND, answer, at, cursor, read_of, unbounded

from tidegate.actors.task.events import SourceBatchRead
from tidegate.actors.task.instructions import NotifySource
from tidegate.actors.task.source_cursor import SourceCursor
from tidegate.actors.task.split_positions import SplitPosition, positions_from_tables
from tidegate.connectors.source import SourceSplit
from tidegate.operators.source_splits import SourceSplits
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, ProtocolError
from tidegate.storage.ids import CheckpointId


def test_splits_are_read_one_after_the_other_to_their_end() -> None:
    """Each read starts where the last one ended; the end of a split leads to the next, the last end to `at_end`."""
    source = cursor(SplitPosition(FIRST), SplitPosition(SECOND))
    asked = []
    for rows, at_end in [(2, False), (2, True), (1, True)]:
        read = read_of(source)
        asked.append((read.split.split_id, read.offset, read.rows_max))
        source.batch_read(answer(read, rows, at_end))
        source.take()

    assert asked == [("a", 0, 2), ("a", 2, 2), ("b", 0, 2)]
    assert source.next_read() is None
    assert source.at_end


def test_only_processed_rows_count() -> None:
    """Rows that were read ahead are not in the position, so that a restore reads them again."""
    source = cursor(SplitPosition(FIRST))
    source.batch_read(answer(read_of(source), 2))
    source.batch_read(answer(read_of(source), 2, at_end=True))
    assert not source.at_end

    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(FIRST, 0, False),)
    source.take()
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(FIRST, 2, False),)
    source.take()
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(FIRST, 4, True),)


def test_read_ahead_is_bounded_and_one_read_is_under_way() -> None:
    """At most one read waits for its answer, and at most `read_ahead` batches wait to be processed."""
    source = cursor(SplitPosition(SECOND), read_ahead=2)
    read = read_of(source)
    assert source.next_read() is None
    source.batch_read(answer(read, 2))
    source.batch_read(answer(read_of(source), 2))

    assert source.next_read() is None
    source.take()
    assert source.next_read() is not None


def test_an_answer_that_comes_twice_is_dropped_and_one_to_no_question_refused() -> None:
    """Answers carry the number of their question."""
    source = cursor(SplitPosition(SECOND))
    first = answer(read_of(source), 2)
    source.batch_read(first)
    source.batch_read(first)
    second = read_of(source)
    source.batch_read(first)

    taken, _, _, induces = source.take()
    assert taken is not None
    assert (taken.num_rows, second.offset, source.has_batch, induces) == (2, 2, False, None)
    with pytest.raises(ProtocolError, match="never ordered"):
        source.batch_read(SourceBatchRead(0, 7, None, 0, True))


def test_an_empty_end_moves_on_without_a_batch() -> None:
    """A split whose end is found without a row gives no batch, and is at its end."""
    source = cursor(SplitPosition(SECOND, 5))
    source.batch_read(answer(read_of(source), 0, at_end=True))

    assert source.take() == (None, None, 0, None)
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(SECOND, 5, True),)
    assert source.at_end


def test_finished_splits_are_not_read_again() -> None:
    """A restored cursor goes on in the first open split, from its offset; without any it is at its end at once."""
    source = cursor(SplitPosition(FIRST, 4, True), SplitPosition(SECOND, 3, False))
    read = read_of(source)
    assert (read.split, read.offset) == (SECOND, 3)

    assert cursor(SplitPosition(FIRST, 4, True)).at_end
    assert cursor().at_end


positions = st.builds(
    SplitPosition,
    st.builds(SourceSplit, st.text(max_size=5), st.binary(max_size=5), st.integers(-1, 2**62)),
    st.integers(0, 2**62),
    st.booleans(),
)


@given(st.lists(st.lists(positions, max_size=4), min_size=1, max_size=3))
@settings(max_examples=60)
def test_positions_come_back_from_their_tables(subtasks: list[list[SplitPosition]]) -> None:
    """Positions of several subtasks survive as list state, in order."""
    tables = [table for p in subtasks for table in tables_of(SourceCursor(p, rows_max=1).freeze(CheckpointId(1)))]

    assert {table.kind for table in tables} <= {StateKind.LIST}
    assert positions_from_tables(tables) == tuple(p for subtask in subtasks for p in subtask)


def test_splits_that_go_on_are_read_in_turn() -> None:
    """A batch of each, whether there is more or not; one that has ended is left out."""
    third = SourceSplit("c", b"")
    source = unbounded(SplitPosition(FIRST), SplitPosition(SECOND, 7), SplitPosition(third))
    asked = []
    for rows, at_end in [(2, False), (0, True), (1, False), (2, False), (2, False)]:
        read = read_of(source)
        asked.append((read.split.split_id, read.offset))
        assert source.batch_read(answer(read, rows, at_end)) is None
        source.take()

    assert asked == [("a", 0), ("b", 7), ("c", 0), ("a", 2), ("c", 1)]
    assert [p.next_offset for p in source.freeze(CheckpointId(1)).positions] == [4, 7, 3]


def test_a_split_is_idle_when_what_came_before_was_taken() -> None:
    """After so long without rows; rows that are still to be processed come first, and the next ones end it."""
    splits = SourceSplits()
    source = SourceCursor([SplitPosition(FIRST), SplitPosition(SECOND)], 2, 9, splits, idleness_ms=50)
    seen = []
    for at_ms, rows in [(0, 1), (0, 1), (49, 0), (49, 1), (50, 0), (99, 0), (100, 1), (120, 0)]:
        source.resume()
        source.batch_read(at(answer(read_of(source), rows), at_ms))
    assert (splits.active, splits.idle) == ({0, 1}, set())
    while source.has_batch:
        batch, *_ = source.take()
        seen.append((batch is not None, splits.current, sorted(splits.active)))

    assert seen == [
        (True, 0, [0, 1]),
        (True, 1, [0, 1]),
        (False, 1, [0, 1]),
        (True, 1, [0, 1]),
        (False, 1, [1]),
        (False, 1, []),
        (True, 0, [0]),
        (False, 0, [0]),
    ]
    assert splits.idle == {1}
    assert not splits.all_idle


def test_without_an_idleness_no_split_is_idle() -> None:
    """However long it has nothing: it may hold rows that are older than all others."""
    splits = SourceSplits()
    source = SourceCursor([SplitPosition(FIRST)], 2, 9, splits)
    for at_ms in (0, 10**9):
        source.resume()
        source.batch_read(at(answer(read_of(source), 0), at_ms))
        assert not source.has_batch
    assert splits.active == {0}


def test_a_split_that_has_ended_is_neither_active_nor_idle() -> None:
    """Its last rows are processed without it: nothing comes behind them."""
    splits = SourceSplits()
    source = SourceCursor([SplitPosition(FIRST), SplitPosition(SECOND)], 2, 9, splits, idleness_ms=0)
    source.batch_read(answer(read_of(source), 1, at_end=True))
    source.batch_read(answer(read_of(source), 0))
    for _ in range(2):
        source.take()
    assert (splits.active, splits.idle, splits.all_idle) == (set(), {1}, True)


def test_a_split_that_is_not_asked_does_not_become_idle() -> None:
    """A job that is held back for long knows nothing about its rows; time counts anew from then on."""
    splits = SourceSplits()
    source = SourceCursor([SplitPosition(FIRST)], 2, 9, splits, idleness_ms=50)
    for at_ms, held, idle in [
        (0, False, False),
        (40, True, False),
        (200, True, False),
        (240, False, False),
        (250, False, True),
    ]:
        source.resume()
        source.batch_read(replace(answer(read_of(source), 0), at_ms=at_ms, held=held))
        assert source.has_batch == idle, "what changes nothing needs no turn"
        if idle:
            source.take()
        assert splits.all_idle == idle


def test_a_payload_counts_with_its_rows() -> None:
    """The next read has it at once, and a checkpoint only when the rows that it came with are processed."""
    source = unbounded(SplitPosition(FIRST))
    source.batch_read(replace(answer(read_of(source), 2), payload=b"two"))
    ahead = read_of(source)
    assert (ahead.split, ahead.offset) == (replace(FIRST, payload=b"two"), 2)
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(FIRST),)

    source.batch_read(answer(ahead, 1))
    for offset in (2, 3):
        source.take()
        assert source.freeze(CheckpointId(1)).positions == (SplitPosition(replace(FIRST, payload=b"two"), offset),)


def test_a_split_that_was_found_is_read_and_stored_with_what_its_finder_remembers() -> None:
    """Both are in the same checkpoints, or it would be found again, or never."""
    finder = SourceSplit("finder", b"none", rows=0)
    source = unbounded(SplitPosition(finder))
    found = replace(answer(read_of(source), 0), payload=b"one", found=(SECOND,))
    assert source.batch_read(found) is None
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(finder),)

    source.take()
    assert source.freeze(CheckpointId(1)).positions == (
        SplitPosition(replace(finder, payload=b"one")),
        SplitPosition(SECOND),
    )
    asked = []
    for _ in range(2):
        read = read_of(source)
        asked.append((read.split.split_id, read.split.payload, read.offset))
        source.batch_read(answer(read, 0, at_end=True))
        source.take()
    assert asked == [("finder", b"one", 0), ("b", b"", 0)]
    assert source.at_end


def test_a_finder_holds_no_event_time_back_and_what_it_found_does() -> None:
    """It never has rows; as long as nothing was found, nobody waits for the subtask."""
    splits = SourceSplits()
    source = SourceCursor([SplitPosition(SourceSplit("finder", b"", rows=0))], 2, 9, splits, idleness_ms=1)
    assert splits.all_idle
    source.batch_read(replace(answer(read_of(source), 0), found=(SECOND,)))
    source.take()

    assert (splits.active, splits.idle, splits.all_idle) == ({1}, {0}, False)


def test_a_split_that_is_found_twice_is_refused() -> None:
    """Its rows would come twice; the error names it and its finder."""
    finder = SourceSplit("finder", b"", rows=0)
    for found in ((FIRST,), (SECOND, SECOND)):
        source = unbounded(SplitPosition(finder), SplitPosition(FIRST))
        event = replace(answer(read_of(source), 0), found=found)
        with pytest.raises(ConfigurationError, match=r"'finder' has found '[ab]', which this subtask reads already"):
            source.batch_read(event)


def test_readers_are_notified_of_the_positions_of_a_completed_checkpoint() -> None:
    """Once, also when an earlier one was given up; without `notified` never."""
    source = cursor(SplitPosition(FIRST))
    other = SourceCursor([SplitPosition(FIRST)], rows_max=2, in_turn=SourceSplits(), notified=True)
    for each in (source, other):
        each.freeze(CheckpointId(1))
        read = read_of(each)
        each.batch_read(replace(answer(read, 2), payload=b"two"))
        each.take()
        each.freeze(CheckpointId(2))
    assert source.completed(CheckpointId(2)) == ()
    assert other.completed(CheckpointId(2)) == (NotifySource(CheckpointId(2), (replace(FIRST, payload=b"two"),)),)
    assert other.completed(CheckpointId(2)) == other.completed(CheckpointId(1)) == ()


def test_the_records_behind_a_position_are_those_of_its_last_answer() -> None:
    """When its rows are processed, and not when they are read ahead. A split at its end has none."""
    source = SourceCursor([SplitPosition(FIRST), SplitPosition(SECOND)], rows_max=2, in_turn=SourceSplits())
    source.batch_read(replace(answer(read_of(source), 2), behind=7))
    assert list(source.behind) == []
    source.take()
    assert list(source.behind) == [7]
    source.batch_read(replace(answer(read_of(source), 2), behind=3))
    source.take()
    assert sorted(source.behind) == [3, 7]
    source.batch_read(answer(read_of(source), 0, at_end=True))
    source.take()
    assert list(source.behind) == [3]
