"""Count windows give what a plain program gives, whatever the batches and restores."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import gcd
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import VALUES, Backend, Windows, applied_operator, rows_batch, told_of

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.windows import count_windows, row_windows, sliding_counts
from tidegate.operators.windows.count_windows import CountWindows
from tidegate.operators.windows.sliding_counts import SlidingCountWindows
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import Count
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

Row = tuple[int, int, int | None]
AGGREGATES = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("x"), "opens": tg.first("x"), "ends": tg.last("x")}


def expected(size: int, keyed: bool, rows: list[Row]) -> dict[int, list[tuple[Any, ...]]]:
    """For each key its windows in order: row by row."""
    held: dict[int, list[int | None]] = defaultdict(list)
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for key, _, value in rows:
        of = key if keyed else 0
        held[of].append(value)
        if len(held[of]) == size:
            values = held.pop(of)
            found[of].append((*told_of(values)[:3], values[0], values[-1]))
    return found


def by_key(rows: list[dict[str, Any]]) -> dict[int, list[tuple[Any, ...]]]:
    """What came out, of each key in order."""
    found: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        found[row.pop("k", 0)].append(tuple(row.values()))
    return found


ROWS = st.lists(st.tuples(st.integers(0, 3), st.just(0), VALUES), min_size=1, max_size=14)
STEPS = st.lists(
    ROWS | st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"])),
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(st.integers(1, 7), st.booleans(), STEPS)
def test_windows_are_those_of_a_plain_program(size: int, keyed: bool, steps: list[Any]) -> None:
    """Every so many rows of a key, at other parallelisms and on other backends; what is not full does not come out."""
    keys = ("k",) if keyed else ()
    windows = Windows(lambda: CountWindows(keys, Count(size), AGGREGATES), keys)
    rows: list[Row] = []
    for step in steps:
        if isinstance(step, list):
            windows.process(rows_batch(step))
            rows += step
        else:
            windows = windows.moved(*step)
    windows.watermark(MAX_WATERMARK_MS)
    for operator in windows.operators:
        assert list(operator.finish(lambda batch: pytest.fail("the rest comes out"))) == []
    counts = [len([row for row in rows if row[0] == key]) for key in range(4)] if keyed else [len(rows)]
    assert windows.stored_rows() == sum(count % size > 0 for count in counts), "a full window leaves state"
    windows.close()
    assert by_key(windows.rows) == expected(size, keyed, rows)


def sliding(size: int, slide: int, keyed: bool, rows: list[Row], at_end: bool) -> dict[int, list[list[int | None]]]:
    """For each key its windows in order: after every `slide` rows the last `size` of them, and at the end the rest."""
    held: dict[int, list[int | None]] = defaultdict(list)
    found: dict[int, list[list[int | None]]] = defaultdict(list)
    for key, _, value in rows:
        values = held[key if keyed else 0]
        values.append(value)
        if len(values) % slide == 0:
            found[key if keyed else 0].append(values[-size:])
    for of, values in held.items():
        since = len(values) % slide
        if at_end and since:
            found[of].append(values[-(size - slide + since) :])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
@settings(max_examples=30)
@given(st.integers(2, 12), st.data(), st.booleans(), st.booleans(), STEPS)
def test_sliding_windows_are_those_of_a_plain_program(
    function: bool, size: int, data: Any, keyed: bool, fires_at_end: bool, steps: list[Any]
) -> None:
    """The last rows after every few, at other parallelisms and on other backends, and however little fits a step."""
    slide = data.draw(st.integers(1, size - 1))
    keys = ("k",) if keyed else ()
    spec = Count(size, slide=slide, fire_at_end=fires_at_end)

    def made() -> Any:
        if not function:
            return SlidingCountWindows(keys, spec, AGGREGATES | {"values": tg.collect_list("x", limit=99)})
        schema = pa.schema({"values": pa.list_(pa.int64())})
        calls = WindowCalls(lambda rows: {"values": rows["x"].to_pylist()}, keys, schema, None, False)
        return applied_operator(spec, calls, keys)

    windows = Windows(made, keys)
    rows: list[Row] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding_counts, "PANES_MAX", 5)
        patch.setattr(row_windows, "STEP_ROWS", 5)
        for step in steps:
            if isinstance(step, list):
                windows.process(rows_batch(step))
                rows += step
            else:
                windows = windows.moved(*step)
        seen = Counter(key if keyed else 0 for key, _, _ in rows)
        assert windows.stored_rows() == sum(kept(size, slide, number, function) for number in seen.values())
        windows.watermark(MAX_WATERMARK_MS)
        windows.finish()
    left = sum(number % slide for number in seen.values())
    counts = [m.value for o in windows.operators for m in o.context.metrics.read(o.context.uid)]
    assert sum(counts) == (0 if fires_at_end else left)
    if fires_at_end:
        ended = [kept(size, slide, number, function) for number in seen.values() if number % slide == 0]
        assert windows.stored_rows() == sum(ended), "a window that has come out leaves state"
    windows.close()
    of_keys: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for key, lists in sliding(size, slide, keyed, rows, fires_at_end).items():
        for values in lists:
            told = (*told_of(values)[:3], values[0], values[-1], [value for value in values if value is not None])
            of_keys[key].append((values,) if function else told)
    assert by_key(windows.rows) == of_keys


def kept(size: int, slide: int, seen: int, function: bool) -> int:
    """How many rows of state a key has after so many rows: those of the next window, or its panes."""
    first = max(0, (seen // slide + 1) * slide - size)
    pane = gcd(size, slide)
    return seen - first if function else 1 + seen // pane - first // pane


def test_sliding_windows_come_out_in_the_order_in_which_rows_complete_them() -> None:
    """Also those of several keys in one batch."""
    windows = Windows(lambda: SlidingCountWindows(("k",), Count(3, slide=1), {"total": tg.sum("x")}))
    windows.process(rows_batch([(1, 0, 1), (2, 0, 10), (1, 0, 2), (2, 0, 20), (1, 0, 4), (1, 0, 8)]))
    assert [tuple(row.values()) for row in windows.rows] == [(1, 1), (2, 10), (1, 3), (2, 30), (1, 7), (1, 14)]
    windows.close()


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_the_first_null_of_a_column_may_open_a_pane(backend: Backend) -> None:
    """A pane that was opened without a value is empty: not 0, nor the end of the type's range."""
    aggregates = {"sum": tg.sum("x"), "min": tg.min("x"), "max": tg.max("x"), "first": tg.first("x")}
    windows = Windows(lambda: SlidingCountWindows(("k",), Count(4, slide=2), aggregates), backend=backend)
    for values in ([1, 1], [None], [None], [None, None]):
        windows.process(rows_batch([(1, 0, value) for value in values]))
    assert [tuple(row.values())[1:] for row in windows.rows] == [(2, 1, 1, 1), (2, 1, 1, 1), (None,) * 4]
    windows.close()


TIMEOUT_MS = 10
TIMED_STEPS = st.lists(
    ROWS
    | st.integers(0, 12)
    | st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]), st.none() | st.just(1)),
    max_size=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
@settings(max_examples=25)
@given(st.integers(1, 7), st.booleans(), st.booleans(), TIMED_STEPS)
def test_windows_with_a_timeout_are_those_of_a_plain_program(
    function: bool, size: int, keyed: bool, fires_at_end: bool, steps: list[Any]
) -> None:
    """So many rows or so long, of aggregates and functions; also with restores, and with one between two time-outs."""
    keys = ("k",) if keyed else ()
    spec = Count(size, timeout=TIMEOUT_MS, fire_at_end=fires_at_end)

    def made() -> Any:
        if not function:
            return CountWindows(keys, spec, {"values": tg.collect_list("x", limit=99)})
        calls = WindowCalls(
            lambda rows: {"values": rows["x"].to_pylist()},
            keys,
            pa.schema({"values": pa.list_(pa.int64())}),
            None,
            False,
        )
        return applied_operator(spec, calls, keys)

    windows = Windows(made, keys)
    held: dict[int, tuple[int, list[int]]] = {}
    expected: Counter[tuple[int, tuple[int, ...]]] = Counter()
    now_ms = 1_000
    for step in steps:
        if isinstance(step, list):
            windows.at(now_ms)
            windows.process(rows_batch([(key, time, value or 0) for key, time, value in step]))
            for key, _, value in step:
                of = key if keyed else 0
                values = held.setdefault(of, (now_ms + TIMEOUT_MS, []))[1]
                values.append(value or 0)
                if len(values) == size:
                    expected[of, tuple(values)] += 1
                    del held[of]
        elif isinstance(step, int):
            now_ms += step
            for of, (due_ms, values) in list(held.items()):
                if due_ms <= now_ms:
                    expected[of, tuple(values)] += 1
                    del held[of]
            windows.tick(now_ms)
        else:
            parallelism, backend, first_steps = step
            if first_steps is not None:
                now_ms += TIMEOUT_MS
                windows.tick(now_ms, first_steps)
            windows = windows.moved(parallelism, backend)
            if first_steps is not None:
                expected.update((of, tuple(values)) for of, (_, values) in held.items())
                held.clear()
                windows.tick(now_ms)
    assert windows.stored_rows() == (sum(len(values) for _, values in held.values()) if function else len(held))
    windows.finish()
    left = sum(len(values) for _, values in held.values())
    counts = [m.value for o in windows.operators for m in o.context.metrics.read(o.context.uid)]
    if fires_at_end:
        expected.update((of, tuple(values)) for of, (_, values) in held.items())
        assert sum(counts) == windows.stored_rows() == 0
    else:
        assert sum(counts) == left
    windows.close()
    assert Counter((row.get("k", 0), tuple(row["values"])) for row in windows.rows) == expected


@pytest.mark.slow
@pytest.mark.parametrize("function", [False, True])
def test_windows_that_become_full_leave_no_timeouts_behind(function: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many come within a time-out; the windows that are open then come out all the same."""
    monkeypatch.setattr(count_windows, "_SPARE", 8)
    spec = Count(2, timeout=TIMEOUT_MS)

    def made() -> Any:
        if not function:
            return CountWindows(("k",), spec, {"values": tg.collect_list("x", limit=99)})
        schema = pa.schema({"values": pa.list_(pa.int64())})
        calls = WindowCalls(lambda rows: {"values": rows["x"].to_pylist()}, ("k",), schema, None, False)
        return applied_operator(spec, calls, ("k",))

    windows = Windows(made, ("k",))
    windows.at(1_000)
    windows.process(rows_batch([(7, 0, 0)]))
    for number in range(100):
        windows.at(1_001 + number // 50)
        windows.process(rows_batch([(1, 0, number)]))
        windows.process(rows_batch([(1, 0, number), (2, 0, number)]))
    operator: Any = windows.operators[0]
    assert len(operator._due._entries) < 30
    windows.process(rows_batch([(1, 0, 100)]))
    windows.tick(1_010)
    assert [row["values"] for row in windows.rows if row["k"] == 7] == [[0]]
    windows.tick(1_012)
    assert [row["values"] for row in windows.rows if row["k"] == 1][-2:] == [[99, 99], [100]]
    windows.close()


@pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
def test_a_batch_may_fill_many_windows(backend: Backend) -> None:
    """Of a key that has an open window, and of one that has none; a restore goes on where it was."""
    windows = Windows(lambda: CountWindows(("k",), Count(3), AGGREGATES), parallelism=2, backend=backend)
    rows = [(1, 0, 1), (1, 0, 2), (2, 0, 9)]
    windows.process(rows_batch(rows))
    assert windows.rows == []
    windows = windows.moved(1, backend)
    more = [(1, 0, 3), (3, 0, 4), (1, 0, 5), (3, 0, 6), (3, 0, 7), (3, 0, 8), *[(1, 0, value) for value in range(7)]]
    windows.process(rows_batch(more))
    windows.close()
    assert by_key(windows.rows) == expected(3, True, rows + more)
    assert len(windows.rows) == 4
