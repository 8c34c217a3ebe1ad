"""Sessions whose gap is one of each row give what a plain program gives, of aggregates and of functions.

The value of a row is its gap as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_applied_sessions import TOLD, OfFunction, ordered, some
from test_changing_sessions import EmitMode, Model, held
from test_session_windows import AGGREGATES
from window_harness import Backend, Windows, applied_operator, dropped, follow, rows_batch

from tidegate.operators.windows import row_windows, session_windows
from tidegate.operators.windows.row_windows import WindowBuffer
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.window_calls import WindowCall, WindowCalls
from tidegate.operators.windows.window_columns import WINDOW_START
from tidegate.operators.windows.window_specs import Session
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

GAPS = Session("x")
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])


class OwnGaps(Model):
    """Rows are stretches of time, and those that overlap or touch are one session."""

    late = 0

    def process(self, rows: list[tuple[int, int, int]]) -> None:
        """A batch."""
        for key, time_ms, gap_ms in rows:
            if time_ms + gap_ms - 1 + self._lateness_ms <= self._watermark_ms:
                self.late += 1
                continue
            kept = self._kept.setdefault(key if self._keyed else None, [])
            near = [s for s in kept if s[0][0] <= time_ms + gap_ms and time_ms <= self._end(s)]
            for session in near:
                kept.remove(session)
            kept.append(sorted([row for session in near for row in session] + [(time_ms, gap_ms)]))

    def _end(self, session: list[tuple[int, int]]) -> int:
        return max(time_ms + gap_ms for time_ms, gap_ms in session)


class OwnGapsOfFunction(OwnGaps, OfFunction):
    """What the function returns."""


def sessions(lateness_ms: int, emit: EmitMode = "final", keyed: bool = True, backend: Backend = "columnar") -> Windows:
    """Aggregates of sessions."""
    keys = ("k",) if keyed else ()
    return Windows(lambda: SessionWindows(keys, GAPS, AGGREGATES, "t", emit, lateness_ms), keys, backend=backend)


def applied(lateness_ms: int, keyed: bool = True, backend: Backend = "columnar", fn: WindowCall = some) -> Windows:
    """A function over sessions."""
    keys = ("k",) if keyed else ()

    def made() -> WindowBuffer:
        calls = WindowCalls(fn, keys, TOLD, pa.int64(), lateness_ms > 0)
        return applied_operator(GAPS, calls, keys, lateness_ms=lateness_ms)

    return Windows(made, keys, backend=backend)


ROWS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-20, 60), st.integers(1, 5) | st.integers(1, 40)), min_size=1, max_size=8
)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-30, 80), st.none() | st.integers(1, 2)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=14,
)


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
@settings(max_examples=25)
@given(
    st.just(0) | st.integers(1, 25),
    st.sampled_from(["final", "changes"]),
    st.booleans(),
    st.sampled_from([1, 3, 100]),
    STEPS,
)
def test_sessions_are_those_of_a_plain_program(
    function: bool, lateness_ms: int, emit: EmitMode, keyed: bool, batch_rows: int, steps: list[tuple[str, Any]]
) -> None:
    """After each step, in batches of any size, on any backend, also when a checkpoint comes between two steps."""
    every_batch = emit == "changes" and not function
    model = (OwnGapsOfFunction if function else OwnGaps)(0, lateness_ms, every_batch, keyed)
    windows = applied(lateness_ms, keyed) if function else sessions(lateness_ms, emit, keyed)
    has_kinds = lateness_ms > 0 or every_batch

    def same(windows: Windows) -> None:
        told = held(windows.rows) if has_kinds else Counter(tuple(row.values()) for row in windows.rows)
        assert told == model.told()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_windows, "OUTPUT_ROWS_MAX", 2)
        patch.setattr(row_windows, "STEP_ROWS", 2)
        patch.setattr(row_windows, "DROPPED_ROWS", 1)
        size = None if every_batch else batch_rows
        windows, late = follow(windows, model, steps, after=same, batch_rows=size)
    assert late == model.late
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 25), st.booleans(), STEPS)
def test_rows_between_two_steps_are_neither_lost_nor_doubled(
    lateness_ms: int, moves: bool, steps: list[tuple[str, Any]]
) -> None:
    """Rows that come while a watermark is worked off, in sessions that hold others whole that are over.

    Such a row may join a session that is due and has not come out yet, or open another one.
    """
    model, windows, reached = OwnGaps(0, lateness_ms, False, True), applied(lateness_ms, fn=ordered), -(10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 1)
        patch.setattr(row_windows, "DROPPED_ROWS", 1)
        rows: Counter[tuple[int, int]] = Counter()
        for kind, what in steps:
            if kind == "rows":
                windows.process(rows_batch(what))
                late = model.late
                for row in what:
                    model.process([row])
                    rows[row[0], row[2]] += model.late == late
                    late = model.late
            elif kind == "watermark" and what[0] > reached:
                reached, first_steps = what
                model.watermark(reached)
                windows.watermark(reached, first_steps)
                windows = windows.moved(3, "rocksdb") if moves else windows
        windows.watermark(200)
    found: Counter[tuple[int, int]] = Counter()
    for (key, start, end, _, values), times in held(windows.rows).items():
        assert start < end
        for value in values.split():
            found[key, int(value)] += times
    assert found == +rows
    windows.watermark(MAX_WATERMARK_MS)
    assert windows.stored_rows() == 0
    windows.close()


@BACKENDS
@pytest.mark.parametrize("function", [False, True])
def test_a_row_holds_its_session_open_for_its_own_gap(function: bool, backend: Backend) -> None:
    """Also across a restore: a long gap reaches rows that come later, and a short one after it does not shorten it."""
    windows = applied(0, backend=backend) if function else sessions(0, backend=backend)
    windows.process(rows_batch([(1, 0, 31), (1, 5, 2), (2, 0, 5), (2, 8, 3)]))
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 31, 1), (2, 5, 2)]))
    windows.watermark(MAX_WATERMARK_MS)
    bounds = sorted((row["k"], row["window_start"], row["window_end"], row["n"]) for row in windows.rows)
    assert bounds == [(1, 0, 32, 3), (2, 0, 7, 2), (2, 8, 11, 1)]
    assert dropped(windows) == 0
    windows.close()


@BACKENDS
def test_a_session_that_is_over_keeps_its_rows_within_a_later_one(backend: Backend) -> None:
    """Until it goes. The later one begins before it ends, and changes with its own rows alone."""
    windows = applied(1, backend=backend, fn=ordered)
    windows.process(rows_batch([(1, 0, 10), (1, 7, 1)]))
    windows.watermark(12, steps=1)
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 5, 20)]))
    windows.watermark(25, steps=1)
    windows = windows.moved(1, backend)
    windows.process(rows_batch([(1, 24, 9)]))
    windows.watermark(MAX_WATERMARK_MS)
    assert held(windows.rows) == Counter([(1, 0, 10, 2, "10 1"), (1, 5, 33, 2, "20 9")])
    assert windows.stored_rows() == 0
    windows.close()


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (pa.array([5, None, 0], pa.int64()), "the gap of a row is null"),
        (pa.array([5, 0, None], pa.int32()), "the gap of a row is .0. .*row 1 of the batch"),
        (pa.array([5, 2**64 - 1, 1], pa.uint64()), "the gap of a row is .18446744073709551615. "),
        (pa.array([5_000, 999, 1], pa.duration("us")), "the gap of a row is .999. us .*1 ms or more"),
        (pa.array([5, 2**62, 1], pa.duration("s")), "the gap of a row is .4611686018427387904. s "),
        (pa.array([5, -2, 1], pa.duration("ms")), "the gap of a row is .-2. ms "),
        (pa.array([5.0, 2.0, 1.0]), "column 'x' is double; a gap is a duration, or a whole number of milliseconds"),
        (pa.array(["5s", "2s", "1s"]), "column 'x' is string; a gap is a duration"),
    ],
)
def test_a_row_without_a_gap_is_refused_with_its_values(function: bool, gap: pa.Array, words: str) -> None:
    """Null, not greater than 0, too long for any window, or of a type that is no gap."""
    batch = rows_batch([(1, 0, 1), (1, 1, 2), (1, 2, 3)]).set_column(2, "x", gap)
    keys, spec = ("k",), Session(pl.col("x"))

    def made() -> Any:
        if not function:
            return SessionWindows(keys, spec, {"n": AGGREGATES["n"]}, "t")
        from tidegate.operators.windows.function_windows import FunctionSessions

        calls = WindowCalls(lambda rows: {"n": rows.num_rows}, keys, pa.schema({"n": pa.int64()}), pa.int64())
        return FunctionSessions(keys, spec, "t", batch.schema, calls)

    windows = Windows(made)
    with pytest.raises(OperatorError, match=words):
        windows.process(batch)
    windows.close()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_gaps_of_all_units_are_durations(unit: str) -> None:
    """Two rows are two seconds apart. A gap of a second does not reach, one of two does."""
    for seconds, expected in ((1, 2), (2, 1)):
        gaps = pa.array(np.array([seconds, seconds]) * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit])
        batch = rows_batch([(1, 0, 1), (1, 2_000, 1)]).set_column(2, "x", gaps.cast(pa.duration(unit)))
        windows = Windows(lambda: SessionWindows(("k",), GAPS, {"n": AGGREGATES["n"]}, "t"))
        windows.process(batch)
        windows.watermark(MAX_WATERMARK_MS)
        assert len(windows.rows) == expected
        windows.close()


def test_bounds_of_seconds_are_milliseconds() -> None:
    """A gap may be less than a second."""
    windows = sessions(0)
    windows.process(rows_batch([(1, 1_000, 300)], pa.timestamp("s")))
    windows.watermark(MAX_WATERMARK_MS)
    (row,) = windows.rows
    assert (row["window_end"] - row[WINDOW_START]).total_seconds() == 0.3
    windows.close()


def test_a_gap_beyond_the_last_moment_is_refused() -> None:
    """Bounds of nanoseconds end in the year 2262."""
    windows = sessions(0)
    with pytest.raises(OperatorError, match="bounds of windows have the type of event time, timestamp"):
        windows.process(rows_batch([(1, 0, 2**49)], pa.timestamp("ns")))
    windows.close()


def test_a_text_is_a_duration_or_the_name_of_a_column() -> None:
    """What is neither is refused when it is written. An expression of a column alone is its name."""
    assert Session("30min").gap_ms == 1_800_000
    assert Session("PT5S").gap_ms == 5_000
    assert Session("gap") == Session(pl.col("gap"))
    assert (Session("gap").gap_ms, Session("gap").column) == (None, "gap")
    assert Session(pl.col("5s")) != Session("5s")
    assert Session(pl.col("x") * 2) == Session(pl.col("x") * 2) != Session(pl.col("x") * 3)
    with pytest.raises(ConfigurationError, match="unknown unit 'minuts'"):
        Session("30 minuts")
