"""A window takes the results of another one in time: with any batches, and after restores at other parallelisms."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from window_harness import Backend, Windows, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.operator import Operator
from tidegate.operators.watermarks.watermark_generator import WindowEnd
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Session, Sliding, Tumbling
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

ROWS = [(key, time + key, 1) for time in range(0, 120, 7) for key in (1, 2, 3) if (time * key) % 5]
FIRST: dict[str, Callable[[], Operator]] = {
    "tumbling": lambda: SlicedWindows(("k",), Tumbling(10), {"n": tg.count()}, "t"),
    "sliding": lambda: SlicedWindows(("k",), Sliding(20, 5), {"n": tg.count()}, "t"),
    "sessions": lambda: SessionWindows(("k",), Session(8), {"n": tg.count()}, "t"),
}


def most(kind: str, batch_rows: int, moved: tuple[int, Backend] | None = None) -> list[dict[str, Any]]:
    """The greatest count of any key in 20 ms, from batches of so many rows; moved after each of them."""
    first = Windows(FIRST[kind])
    second = Windows(
        lambda: SlicedWindows((), Tumbling(20), {"most": tg.max("n"), "of": tg.count()}, WindowEnd("window_end")), ()
    )
    for start in range(0, len(ROWS), batch_rows):
        batch = ROWS[start : start + batch_rows]
        first.process(rows_batch(batch))
        _forward(first, second, max(time for _, time, _ in ROWS[: start + len(batch)]) - 4)
        if moved is not None:
            first, second = first.moved(*moved), second.moved(1, moved[1])
    _forward(first, second, MAX_WATERMARK_MS)
    dropped = [m.value for o in second.operators for m in o.context.metrics.read(o.context.uid)]
    assert not any(dropped), "a result came late for its own window"
    rows = second.rows
    for windows in (first, second):
        windows.close()
    return rows


def _forward(first: Windows, second: Windows, watermark_ms: int) -> None:
    """As a task does: results go before the watermark that has made them."""
    first.watermark(watermark_ms)
    if first.rows:
        second.process(pa.RecordBatch.from_pylist(first.rows))
        first.rows.clear()
    second.watermark(watermark_ms)


@pytest.mark.parametrize("kind", FIRST)
def test_results_come_in_time(kind: str) -> None:
    """Those of a batch at a time are those of one batch; the last result of a window is in that window."""
    expected = most(kind, len(ROWS))
    assert sum(row["of"] for row in expected) > len(expected) > 3
    for batch_rows in (1, 4):
        assert most(kind, batch_rows) == expected


def test_a_result_is_in_the_window_that_holds_its_own() -> None:
    """Not in the next one, though that begins where the window of the result ends."""
    counts = Counter((key, time // 10) for key, time, _ in ROWS)
    windows: dict[int, list[int]] = defaultdict(list)
    for (_, ten), count in counts.items():
        windows[ten // 2].append(count)
    expected = [(20 * start, max(found), len(found)) for start, found in sorted(windows.items())]
    assert [(row["window_start"], row["most"], row["of"]) for row in most("tumbling", 5)] == expected


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_results_come_in_time_after_restores(backend: Backend) -> None:
    """At another parallelism."""
    assert most("sliding", 6, (2, backend)) == most("sliding", len(ROWS))
