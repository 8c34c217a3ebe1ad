"""Where a batch is cut: whoever judges by the watermark at a piece judges each row as by its own, and not too often."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.operators.source_splits import DueByAge, as_they_are
from tidegate.operators.watermarks import watermark_generator
from tidegate.operators.watermarks.watermark_generator import Piece, Times, pieces_of
from tidegate.operators.windows.window_specs import (
    Cumulating,
    DueByWindows,
    EventTimeWindow,
    Session,
    Sliding,
    Tumbling,
)
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS

TIMES = st.lists(st.integers(-200, 200) | st.just(MIN_WATERMARK_MS), min_size=1, max_size=60)
BEFORE = st.just(MIN_WATERMARK_MS) | st.integers(-200, 200)


def windows(size_ms: int, allowed_ms: int = 0) -> watermark_generator.Due:
    """Judges by windows of a size."""

    def due(times: Times, watermarks: Times) -> Times:
        assert (times > MIN_WATERMARK_MS).all()
        return times // size_ms * size_ms + size_ms - 1 + allowed_ms

    return due


def own_watermarks(times: Sequence[int], before_ms: int, delay_ms: int) -> list[int]:
    """For each row the watermark of the rows before it."""
    greatest = [max(before_ms, *times[:row], MIN_WATERMARK_MS) for row in range(len(times))]
    return [max(MIN_WATERMARK_MS, newest - delay_ms) for newest in greatest]


@given(TIMES, BEFORE, st.integers(1, 60), st.sampled_from([(1,), (10,), (10, 70)]), st.integers(0, 30))
def test_a_piece_judges_each_row_as_its_own_watermark_does(
    times: list[int], before_ms: int, delay_ms: int, sizes: tuple[int, ...], allowed_ms: int
) -> None:
    """For all that judge; the pieces are the whole batch, in order, and say what is newest before and behind them."""
    dues = [as_they_are if size == 1 else windows(size, allowed_ms) for size in sizes]
    pieces = pieces_of(np.array(times), before_ms, delay_ms, dues)

    assert [row for piece in pieces for row in range(piece.start, piece.stop)] == list(range(len(times)))
    for piece in pieces:
        assert piece.newest_ms == max(before_ms, *times[: piece.stop])
    own = own_watermarks(times, before_ms, delay_ms)
    at_piece = [own[piece.start] for piece in pieces for _ in range(piece.start, piece.stop)]
    for due in dues:
        dated = [row for row, time in enumerate(times) if time > MIN_WATERMARK_MS]
        moments = np.array([times[row] for row in dated], np.int64)
        limits = dict(zip(dated, due(moments, moments).tolist(), strict=True))
        assert [limits[row] <= own[row] for row in dated] == [limits[row] <= at_piece[row] for row in dated]


WINDOWS: list[EventTimeWindow] = [
    Tumbling(10, offset=3),
    Sliding(10, 10),
    Sliding(20, 10),
    Sliding(25, 10),
    Sliding(25, 10, offset=4),
    Cumulating(5, 20),
    Tumbling("1d", timezone="Europe/Berlin"),
]


def open_windows(spec: EventTimeWindow, time: int, watermark: int) -> list[int]:
    """The ends of the windows that a row of a time is in and that are not over by a watermark, by their definition."""
    match spec:
        case Sliding():
            starts = range(time - spec.size_ms + 1, time + 1)
            ends = [s + spec.size_ms for s in starts if (s - spec.offset_ms) % spec.slide_ms == 0]
        case Cumulating():
            first = time // spec.max_ms * spec.max_ms
            ends = [first + step for step in range(spec.step_ms, spec.max_ms + 1, spec.step_ms) if first + step > time]
        case _:
            ends = spec.last_end_ms(np.array([time])).tolist()
    return [end for end in ends if end - 1 > watermark]


@given(TIMES, BEFORE, st.integers(1, 60), st.sampled_from(WINDOWS), st.integers(0, 30))
def test_a_row_meets_the_windows_that_are_open_by_its_own_watermark(
    times: list[int], before_ms: int, delay_ms: int, spec: EventTimeWindow, allowed_ms: int
) -> None:
    """Each of them, and not only the last one: else rows of a large batch count where those of small ones are late."""
    pieces = pieces_of(np.array(times), before_ms, delay_ms, [DueByWindows(spec, allowed_ms)])
    own = own_watermarks(times, before_ms, delay_ms)
    for piece in pieces:
        for row in range(piece.start, piece.stop):
            if times[row] > MIN_WATERMARK_MS:
                by_own = open_windows(spec, times[row], own[row] - allowed_ms)
                assert open_windows(spec, times[row], own[piece.start] - allowed_ms) == by_own


@given(TIMES, BEFORE, st.integers(1, 60), st.integers(1, 30), st.integers(0, 30))
def test_a_row_meets_the_sessions_that_are_open_by_its_own_watermark(
    times: list[int], before_ms: int, delay_ms: int, gap_ms: int, allowed_ms: int
) -> None:
    """Whichever sessions there are; a row that is late is so by the watermark of its piece."""
    pieces = pieces_of(np.array(times), before_ms, delay_ms, [DueByWindows(Session(gap_ms), allowed_ms)])
    own = own_watermarks(times, before_ms, delay_ms)
    for piece in pieces:
        for row in range(piece.start, piece.stop):
            if times[row] == MIN_WATERMARK_MS:
                continue
            late, at_piece = (times[row] + gap_ms + allowed_ms <= mark for mark in (own[row], own[piece.start]))
            assert late == at_piece
            if not late:
                might_join = [end for end in range(times[row], 300) if end + allowed_ms <= own[row]]
                assert all(end + allowed_ms <= own[piece.start] for end in might_join)


@given(TIMES, BEFORE, st.integers(1, 60), st.integers(1, 30))
def test_a_row_is_too_old_by_its_own_watermark(times: list[int], before_ms: int, delay_ms: int, age_ms: int) -> None:
    """For what forgets keys after a time."""
    pieces = pieces_of(np.array(times), before_ms, delay_ms, [DueByAge(age_ms)])
    own = own_watermarks(times, before_ms, delay_ms)
    for piece in pieces:
        for row in range(piece.start, piece.stop):
            if times[row] > MIN_WATERMARK_MS:
                assert (times[row] <= own[row] - age_ms) == (times[row] <= own[piece.start] - age_ms)


def test_times_that_have_no_windows_are_no_error_here() -> None:
    """A filter before the windows may take them out; those that it leaves are refused by the windows."""
    times = np.array([0, -(2**60), 10])
    for spec in WINDOWS:
        assert sum(piece.stop - piece.start for piece in pieces_of(times, 2**40, 1, [DueByWindows(spec)])) == 3


@given(TIMES, st.integers(1, 60), st.integers(1, 5))
def test_pieces_are_bounded(times: list[int], delay_ms: int, rows_max: int) -> None:
    """Also where nothing is late."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watermark_generator, "PIECE_ROWS", rows_max)
        pieces = pieces_of(np.array(times), MIN_WATERMARK_MS, delay_ms, [as_they_are])
        assert all(0 < piece.stop - piece.start <= rows_max for piece in pieces)
        in_order = pieces_of(np.sort(np.array(times)), MIN_WATERMARK_MS, delay_ms, [as_they_are])
    assert len(in_order) == -(-len(times) // rows_max)


def test_there_is_one_cut_for_each_window_that_is_done() -> None:
    """However many rows of it are late: else a stream that is out of order would come row by row."""
    times = np.arange(10_000) - np.where(np.arange(10_000) % 2, 300, 0)
    by_window = pieces_of(times, MIN_WATERMARK_MS, 100, [windows(1_000)])
    assert [piece.start for piece in by_window] == [0, *range(101, 10_000, 1_000)]


def test_rows_in_order_are_one_piece() -> None:
    """Up to the bound that was named, to the millisecond."""
    times = np.array([100, 91, 100])
    assert pieces_of(times, 95, 10, [as_they_are]) == [Piece(0, 3, 100)]
    assert [piece.start for piece in pieces_of(np.array([100, 90, 100]), 95, 10, [as_they_are])] == [0, 1]
