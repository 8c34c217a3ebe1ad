"""Rows after a restore from between two steps of a watermark find what they would have found after the last step.

This holds for sessions, and for windows with functions: a watermark moves their event time before the first step. The
event time of windows of slices moves with each window that fires, so a row still joins one that has not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import Windows, applied_operator, dropped, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.operator import Operator
from tidegate.operators.windows import row_windows, session_windows
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Cumulating, EventTimeWindow, Session, Sliding, Tumbling
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

AGGREGATES = {"n": tg.count(), "total": tg.sum("x")}
TOLD = pa.schema([pa.field("n", pa.int64(), nullable=False), ("values", pa.string())])
SESSION = Session(10)


def told(rows: pa.Table) -> dict[str, Any]:
    """The values in their own order."""
    return {"n": rows.num_rows, "values": " ".join(map(str, sorted(rows.column("x").to_pylist())))}


def aggregated(spec: EventTimeWindow, lateness_ms: int, emit: Literal["final", "changes"] = "final") -> Operator:
    """Aggregates of sessions."""
    assert isinstance(spec, Session)
    return SessionWindows(("k",), spec, AGGREGATES, "t", emit, lateness_ms)


def changing(spec: EventTimeWindow, lateness_ms: int) -> Operator:
    """Aggregates of sessions, which come out with each batch."""
    return aggregated(spec, lateness_ms, "changes")


def applied(spec: EventTimeWindow, lateness_ms: int) -> Operator:
    """A function over windows."""
    calls = WindowCalls(told, ("k",), TOLD, pa.int64(), lateness_ms > 0)
    return applied_operator(spec, calls, lateness_ms=lateness_ms)


def result_of(windows: Windows) -> Counter[tuple[Any, ...]]:
    """Returns the results that hold at the end: changes are applied, and a window's new result replaces the old one."""
    found: Counter[tuple[Any, ...]] = Counter()
    newest: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in windows.rows:
        kind = row.get("row_kind")
        values = tuple(value for name, value in row.items() if name != "row_kind")
        if kind is None:
            key = values[:3]
            found -= Counter([newest[key]] if key in newest else [])
            newest[key] = values
        if kind in ("-U", "-D"):
            assert found[values] > 0, f"{row} is taken back, and had not come"
            found[values] -= 1
        else:
            found[values] += 1
    return +found


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 60), st.integers(-9, 9)), min_size=1, max_size=8)
STEPS = st.lists(st.tuples(ROWS, st.integers(-30, 80), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=8)
KINDS: dict[str, tuple[Callable[..., Operator], EventTimeWindow, int]] = {
    "aggregates": (aggregated, SESSION, 0),
    "aggregates, late": (aggregated, SESSION, 5),
    "changing aggregates": (changing, SESSION, 0),
    "changing aggregates, late": (changing, SESSION, 5),
} | {
    f"function of {type(spec).__name__}, {lateness_ms}": (applied, spec, lateness_ms)
    for spec in (Tumbling(10), Sliding(15, 5), Cumulating(5, 20), SESSION)
    for lateness_ms in (0, 5, 25)
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(STEPS)
def test_they_find_what_they_find_after_the_last_step(kind: str, steps: list[tuple[Any, ...]]) -> None:
    """At any parallelism: the same windows come out, and the same rows are late."""
    make, spec, lateness_ms = KINDS[kind]
    whole, cut = (Windows(lambda: make(spec, lateness_ms)) for _ in range(2))
    late, reached = 0, -(10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 1)
        patch.setattr(row_windows, "DROPPED_ROWS", 1)
        patch.setattr(session_windows, "OUTPUT_ROWS_MAX", 1)
        for rows, moment_ms, first_steps, parallelism in steps:
            reached = max(reached, moment_ms)
            whole.watermark(reached)
            cut.watermark(reached, first_steps)
            late += dropped(cut)
            cut = cut.moved(parallelism, "columnar")
            for windows in (whole, cut):
                windows.process(rows_batch(rows))
        for windows in (whole, cut):
            windows.watermark(MAX_WATERMARK_MS)
    assert result_of(cut) == result_of(whole)
    assert late + dropped(cut) == dropped(whole)
    for windows in (whole, cut):
        assert windows.stored_rows() == 0, "state is left when time is over"
        windows.close()


@pytest.mark.parametrize("make", [aggregated, applied])
@pytest.mark.parametrize("lateness_ms", [0, 5])
def test_no_row_joins_a_session_that_is_over(
    make: Callable[..., Operator], lateness_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions are over at once, and a checkpoint comes when one of them has come out."""
    monkeypatch.setattr(row_windows, "STEP_ROWS", 1)
    monkeypatch.setattr(session_windows, "OUTPUT_ROWS_MAX", 1)
    windows = Windows(lambda: make(SESSION, lateness_ms))
    windows.process(rows_batch([(key, 0, key) for key in (1, 2, 3)]))
    windows.watermark(10 + lateness_ms, steps=1)
    windows = windows.moved(2, "columnar")
    windows.process(rows_batch([(key, 6, 10 * key) for key in (1, 2, 3)]))
    windows.watermark(100)
    expected = [(key, start, start + 10, 1) for key in (1, 2, 3) for start in (0, 6)]
    assert sorted((r["k"], r["window_start"], r["window_end"], r["n"]) for r in windows.rows) == expected
    windows.close()
