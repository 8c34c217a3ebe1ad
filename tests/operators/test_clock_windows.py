"""Windows of processing time fire by the clock, which never goes back, and count each row as often as they must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import Windows, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.operator import Operator
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Clock, Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

AGGREGATES = {"n": tg.count(), "total": tg.sum("x")}


def by_clock(spec: Tumbling | Sliding | Cumulating | Session, fires_at_end: bool = False) -> Callable[[], Operator]:
    """Makes the operator."""
    clock = Clock(fires_at_end)
    if isinstance(spec, Session):
        return lambda: SessionWindows(("k",), spec, AGGREGATES, clock)
    return lambda: SlicedWindows(("k",), spec, AGGREGATES, clock)


def out(windows: Windows, since: int = 0) -> list[tuple[Any, ...]]:
    """Key, bounds and sum of what came out."""
    return [
        (r["k"], *(int(r[b].timestamp() * 1_000) for b in ("window_start", "window_end")), r["total"])
        for r in windows.rows[since:]
    ]


def feed(windows: Windows, now_ms: int, *rows: tuple[int, int]) -> None:
    """Rows of key and value come at a moment. Their own time is far away."""
    windows.at(now_ms)
    windows.process(rows_batch([(key, 10**9, value) for key, value in rows]))


def test_a_window_fires_when_its_end_has_come() -> None:
    """Neither before nor by a watermark; the task is asked to come back then, and has no reason to when all is out."""
    windows = Windows(by_clock(Tumbling(10)))
    feed(windows, 5, (1, 1))
    feed(windows, 9, (1, 2))
    feed(windows, 10, (1, 4))
    (operator,) = windows.operators
    assert operator.next_processing_time_ms() == 10
    windows.watermark(MAX_WATERMARK_MS)
    assert not windows.rows
    windows.tick(10)
    assert out(windows) == [(1, 0, 10, 3)]
    assert operator.next_processing_time_ms() == 20
    windows.tick(33)
    assert out(windows, 1) == [(1, 10, 20, 4)]
    assert operator.next_processing_time_ms() is None
    assert windows.stored_rows() == 0
    windows.close()


def test_sessions_end_when_nothing_has_come_for_the_gap() -> None:
    """A row within the gap prolongs one, also when it comes after a restore."""
    windows = Windows(by_clock(Session(10)))
    feed(windows, 5, (1, 1), (2, 8))
    windows = windows.moved(2, "columnar")
    feed(windows, 12, (1, 2))
    windows.tick(15)
    assert out(windows) == [(2, 5, 15, 8)]
    windows.tick(22)
    assert out(windows, 1) == [(1, 5, 22, 3)]
    assert all(operator.next_processing_time_ms() is None for operator in windows.operators)
    windows.close()


@pytest.mark.parametrize("restored", [False, True])
def test_a_clock_that_goes_back_opens_no_window_again(restored: bool) -> None:
    """Rows that come before the time has caught up belong to the first window that has not fired."""
    windows = Windows(by_clock(Tumbling(10)))
    feed(windows, 25, (1, 1))
    windows.tick(30)
    if restored:
        windows = windows.moved(3, "rocksdb")
    feed(windows, 21, (1, 2), (2, 4))
    windows.tick(39)
    assert out(windows) == [(1, 20, 30, 1)]
    windows.tick(40)
    assert sorted(out(windows, 1)) == [(1, 30, 40, 2), (2, 30, 40, 4)]
    windows.close()


@pytest.mark.parametrize("fires", [True, False])
@pytest.mark.parametrize("spec", [Tumbling(10), Session(10)])
def test_the_end_of_the_input_fires_if_that_was_asked_for(spec: Tumbling | Session, fires: bool) -> None:
    """What is open then comes out with its own bounds; else it stays in the state."""
    windows = Windows(by_clock(spec, fires))
    feed(windows, 10, (1, 1))
    windows.finish()
    assert out(windows) == ([(1, 10, 20, 1)] if fires else [])
    assert windows.stored_rows() == (0 if fires else 1)
    windows.close()


EVENTS = st.lists(
    st.tuples(st.just("rows"), st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=4))
    | st.tuples(st.just("time"), st.integers(-15, 30))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb"]))),
    max_size=15,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from([(Tumbling(10), 1), (Sliding(20, 5), 4), (Cumulating(5, 5), 1), (Session(7), 1)]),
    EVENTS,
)
def test_each_row_counts_as_often_as_it_has_windows(
    spec: tuple[Tumbling | Sliding | Cumulating | Session, int], events: list[tuple[str, Any]]
) -> None:
    """Whatever the clock does, and wherever the state goes."""
    windows, times = Windows(by_clock(spec[0], fires_at_end=True)), spec[1]
    now_ms, total, rows = 100, 0, 0
    for kind, what in events:
        if kind == "rows":
            feed(windows, now_ms, *what)
            total, rows = total + sum(value for _, value in what), rows + len(what)
        elif kind == "time":
            now_ms = max(0, now_ms + what)
            windows.tick(now_ms)
        else:
            windows = windows.moved(*what)
    windows.finish()
    assert sum(row["n"] for row in windows.rows) == times * rows
    assert sum(row["total"] for row in windows.rows) == times * total
    bounds = [(row["k"], row["window_start"], row["window_end"]) for row in windows.rows]
    assert len(set(bounds)) == len(bounds), "a window came out twice"
    assert windows.stored_rows() == 0
    windows.close()
