"""Windows of all kinds whose aggregates keep strings, lists, and what functions of programs declare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pytest
from user_functions import Product
from window_harness import Backend, Windows

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.multisets import with_value_sets
from tidegate.operators.operator import Operator
from tidegate.operators.windows.count_windows import CountWindows
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Count, Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

_WHAT: Mapping[str, Aggregate] = {
    "least": tg.min("text"),
    "late": tg.last("text", by="t"),
    "every": tg.collect_list("text", limit=1000),
    "product": tg.udaf(Product(), "i"),
    **with_value_sets({"distinct": tg.count_distinct("text")}, pa.schema({"text": pa.string()})),
}
_ROWS = [
    {"k": n % 3, "t": (n * 37) % 100 + n // 8, "text": None if n % 11 == 4 else f"text {n * 29 % 24}", "i": n % 9 + 1}
    for n in range(80)
]
_SCHEMA = pa.schema({"k": pa.int64(), "t": pa.timestamp("ms"), "text": pa.string(), "i": pa.int64()})
_MAKE: dict[str, Callable[[], Operator]] = {
    "tumbling": lambda: SlicedWindows(("k",), Tumbling(20), _WHAT, "t"),
    "sliding": lambda: SlicedWindows(("k",), Sliding(30, 10), _WHAT, "t"),
    "cumulating": lambda: SlicedWindows(("k",), Cumulating(10, 30), _WHAT, "t"),
    "sessions": lambda: SessionWindows(("k",), Session(3), _WHAT, "t"),
    "counted": lambda: CountWindows(("k",), Count(7), _WHAT),
}


def _windows(kind: str) -> list[list[dict[str, Any]]]:
    """The rows of each window, in plain Python."""
    found: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    by_key: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in _ROWS:
        key, time = row["k"], row["t"]
        bounds = {
            "tumbling": [(time // 20 * 20, 20)],
            "sliding": [(time // 10 * 10 - back, 30) for back in (0, 10, 20)],
            "cumulating": [(time // 30 * 30, size) for size in (10, 20, 30) if time % 30 < size],
        }.get(kind, [])
        for window in bounds:
            found[key, window].append(row)
        by_key[key].append(row)
    if kind == "counted":
        return [rows[start : start + 7] for rows in by_key.values() for start in range(0, len(rows) - 6, 7)]
    if kind == "sessions":
        for key, rows in by_key.items():
            session = 0
            ordered = sorted(rows, key=lambda row: row["t"])
            for before, row in zip([None, *ordered], ordered, strict=False):
                session += before is not None and row["t"] - before["t"] > 3
                found[key, session].append(row)
    return list(found.values())


def _expected(kind: str) -> list[tuple[Any, ...]]:
    results = []
    for rows in _windows(kind):
        known = [row["text"] for row in rows if row["text"] is not None]
        last = max(enumerate(rows), key=lambda row: (row[1]["t"], row[0]))[1]["text"]
        results.append(
            (rows[0]["k"], min(known, default=None), last, sorted(known), Product().of_rows(rows), len({*known}))
        )
    return sorted(results, key=repr)


def _run(kind: str, batch_rows: int, moved: tuple[int, Backend] | None) -> list[tuple[Any, ...]]:
    windows = Windows(_MAKE[kind])
    for start in range(0, len(_ROWS), batch_rows):
        windows.process(pa.RecordBatch.from_pylist(_ROWS[start : start + batch_rows], _SCHEMA))
        if moved is not None and start % (3 * batch_rows) == 0:
            windows = windows.moved(*moved)
    windows.watermark(MAX_WATERMARK_MS)
    rows = [(r["k"], r["least"], r["late"], sorted(r["every"]), r["product"], r["distinct"]) for r in windows.rows]
    windows.close()
    return sorted(rows, key=repr)


@pytest.mark.parametrize("kind", _MAKE)
def test_windows_keep_values_of_any_width(kind: str) -> None:
    """Rows of any order in batches of any size: what slices, sessions and open windows hold is merged as it should."""
    expected = _expected(kind)
    assert len(expected) > 6
    for batch_rows in (80, 9):
        assert _run(kind, batch_rows, None) == expected


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
@pytest.mark.parametrize("kind", _MAKE)
def test_they_are_restored(kind: str, backend: Backend) -> None:
    """At another parallelism, on either backend."""
    assert _run(kind, 7, (2, backend)) == _expected(kind)
