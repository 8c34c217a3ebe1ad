"""A source whose splits have nothing: pauses, and reads that try many of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from source_reads import FIRST, SECOND, answer, at, cursor, read_of, unbounded

from tidegate.actors.task.source_cursor import (
    IDLENESS_PARTS,
    PATIENCE_MS,
    PAUSE_MAX_MS,
    TRIED_MAX,
    SourceCursor,
)
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import SourceSplit
from tidegate.operators.source_splits import SourceSplits
from tidegate.storage.ids import CheckpointId


def missed(source: SourceCursor) -> list[int | None]:
    """What four answers say in which there is nothing."""
    pauses = []
    for _ in range(4):
        pauses.append(source.batch_read(answer(read_of(source), 0)))
        assert not source.has_batch
        source.resume()
    return pauses


def test_a_pause_comes_when_no_split_has_anything() -> None:
    """It is longer each time, up to a limit; rows of any split make the next one a quarter as long."""
    source = unbounded(SplitPosition(FIRST), SplitPosition(SECOND))
    assert missed(source) == [None, 1, None, 2]
    assert missed(source) == [None, 4, None, 8]

    assert source.batch_read(answer(read_of(source), 1)) is None
    source.take()
    assert missed(source) == [None, 4, None, 8]
    for _ in range(5):
        longest = missed(source)
    assert longest == [None, PAUSE_MAX_MS, None, PAUSE_MAX_MS]


def test_nothing_is_asked_for_in_a_pause() -> None:
    """The position stays what it was."""
    source = unbounded(SplitPosition(SECOND, 3))
    assert source.batch_read(answer(read_of(source), 0)) == 1
    assert source.next_read() is None
    assert not source.has_batch, "an answer without rows needs no turn"
    assert not source.at_end

    source.resume()
    assert read_of(source).offset == 3
    assert source.freeze(CheckpointId(1)).positions == (SplitPosition(SECOND, 3),)


def test_who_has_nothing_is_asked_again_when_the_rows_before_are_processed() -> None:
    """So what a source is asked for says how far the task is."""
    source = unbounded(SplitPosition(SECOND))
    for rows in (2, 0):
        source.batch_read(answer(read_of(source), rows))
    source.resume()
    assert source.next_read() is None
    source.take()
    assert read_of(source).offset == 2


def test_splits_in_order_wait_for_the_one_that_has_nothing() -> None:
    """The next one begins when this one has ended."""
    source = cursor(SplitPosition(FIRST), SplitPosition(SECOND))
    assert source.batch_read(answer(read_of(source), 0)) == 1
    source.resume()
    assert read_of(source).split == FIRST


THIRD = SourceSplit("c", b"")


def paused(*splits: SourceSplit, idleness_ms: int | None = None) -> tuple[SourceCursor, SourceSplits]:
    """A cursor after the first pause: each of the splits had nothing."""
    turns = SourceSplits()
    source = SourceCursor([SplitPosition(split) for split in splits], 2, 9, turns, idleness_ms)
    for _ in splits:
        source.batch_read(answer(read_of(source), 0))
    source.resume()
    assert not source.has_batch
    return source, turns


def test_after_a_pause_one_read_tries_many_splits() -> None:
    """Until one has rows; then they are read one by one again, from the next one on."""
    source, _ = paused(FIRST, SECOND, THIRD)
    read = read_of(source)
    assert [read.split, *(split for split, _ in read.others)] == [FIRST, SECOND, THIRD]
    found = replace(answer(replace(read, offset=read.others[0][1]), 2), empty=1)
    assert source.batch_read(found) is None
    assert source.take()[0] == found.batch
    assert [p.next_offset for p in source.freeze(CheckpointId(1)).positions] == [0, 2, 0]

    read = read_of(source)
    assert (read.split, [split for split, _ in read.others]) == (THIRD, [FIRST, SECOND])


def test_a_source_pauses_again_when_all_that_one_read_tried_had_nothing() -> None:
    """Whoever reads may stop at any of them: then the others are tried next."""
    source, _ = paused(FIRST, SECOND, THIRD)
    assert source.batch_read(replace(answer(read_of(source), 0), empty=2)) == 2
    source.resume()
    assert source.batch_read(answer(read_of(source), 0)) is None
    read = read_of(source)
    assert [read.split, *(split for split, _ in read.others)] == [SECOND, THIRD, FIRST]
    assert source.batch_read(replace(answer(read, 0), empty=1)) == 4


def test_one_read_tries_so_many_splits_at_most() -> None:
    """A task that is closed must not wait for hundreds of them."""
    source, _ = paused(*(SourceSplit(str(number), b"") for number in range(TRIED_MAX + 7)))
    assert len(read_of(source).others) == TRIED_MAX - 1


def test_splits_that_one_read_tried_become_idle() -> None:
    """Each after so long without rows, as if it had been asked alone."""
    source, turns = paused(FIRST, SECOND, THIRD, idleness_ms=50)
    found = replace(answer(read_of(source), 2), empty=2)
    assert source.batch_read(at(found, 50)) is None
    while source.has_batch:
        source.take()
    assert turns.idle == {0, 1}


def tired(source: SourceCursor, splits: int) -> list[int]:
    """How long each read may go on, and after how long it tries again at first."""
    patience = []
    for _ in range(10):
        patience.append((read := read_of(source)).patience_ms)
        source.batch_read(replace(answer(read, 0), empty=splits - 1))
        source.resume()
    return patience


def test_a_read_goes_on_when_nothing_has_come_for_a_while() -> None:
    """So a source that waits does not wake up its task at every try. Rows make the pauses of a read shorter."""
    source, _ = paused(FIRST, SECOND, THIRD)
    assert tired(source, 3) == [PATIENCE_MS] * 10
    read = read_of(source)
    assert read.pause_ms == PAUSE_MAX_MS
    assert source.batch_read(answer(read, 1)) is None
    source.take()
    read = read_of(source)
    assert (read.patience_ms, read.pause_ms) == (PATIENCE_MS, PAUSE_MAX_MS // 4)
    assert read_of(unbounded(SplitPosition(FIRST))).patience_ms == 0


def test_a_read_does_not_go_on_while_others_could_have_rows() -> None:
    """One that cannot try all splits comes back for the rest, and one that leaves out splits that wait for others."""
    source, _ = paused(*(SourceSplit(str(number), b"") for number in range(TRIED_MAX + 1)))
    for _ in range(40):
        read = read_of(source)
        assert read.patience_ms == 0
        source.batch_read(replace(answer(read, 0), empty=TRIED_MAX - 1))
        source.resume()


def test_a_split_becomes_idle_in_time_whatever_a_read_waits_for() -> None:
    """An answer says so: so a read goes on for a part of that time only."""
    for idleness_ms, expected_ms in ((2_000, 2_000 // IDLENESS_PARTS), (3_600_000, PATIENCE_MS)):
        source, _ = paused(FIRST, SECOND, idleness_ms=idleness_ms)
        assert tired(source, 2)[-1] == expected_ms


@given(st.data())
@settings(max_examples=80)
def test_every_row_of_every_split_comes_once_and_in_order(data: st.DataObject) -> None:
    """However rows come, and however far each read gets. A pause begins only when every split has just had nothing."""
    count = data.draw(st.integers(1, 5), "splits")
    source = SourceCursor(
        [SplitPosition(SourceSplit(str(number), b"")) for number in range(count)], 2, 2, SourceSplits()
    )
    there, read_rows, had_nothing = [0] * count, [0] * count, set[str]()
    for step in range(60):
        if step < 40 and data.draw(st.booleans(), "rows come"):
            there[data.draw(st.integers(0, count - 1), "to")] += 1
        source.resume()
        if (read := source.next_read()) is not None:
            places = [(read.split, read.offset), *read.others]
            stops_at = data.draw(st.integers(1, len(places)), "tries")
            for empty, (split, offset) in enumerate(places[:stops_at]):  # noqa: B007
                rows = min(2, there[int(split.split_id)] - offset)
                if rows:
                    had_nothing.clear()
                    break
                had_nothing.add(split.split_id)
            told = replace(answer(replace(read, split=split, offset=offset), rows), empty=empty)
            if source.batch_read(told) is not None:
                assert len(had_nothing) == count
                had_nothing.clear()
        while source.has_batch:
            taken = source.take()[0]
            if taken is not None:
                number = next(
                    n for n, p in enumerate(source.freeze(CheckpointId(1)).positions) if p.next_offset > read_rows[n]
                )
                assert taken.column(0).to_pylist() == list(range(read_rows[number], read_rows[number] + len(taken)))
                read_rows[number] += len(taken)
    assert read_rows == [p.next_offset for p in source.freeze(CheckpointId(1)).positions]
    if sum(there) <= 20:
        assert read_rows == there
