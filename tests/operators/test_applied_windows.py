"""Functions get the rows of each window once, as a plain program has them: through batches, restores and steps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sliced_windows import windows_of
from window_harness import Backend, Windows, applied_operator, follow, rows_batch

from tidegate.operators.windows import row_windows
from tidegate.operators.windows.row_windows import WindowBuffer
from tidegate.operators.windows.window_calls import WindowCalls, WindowResult, derived_schema
from tidegate.operators.windows.window_specs import Clock, Count, Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.snapshot import StateTable

SCHEMA = rows_batch([(1, 1, 1)]).schema
Spec = Tumbling | Sliding | Cumulating | Session
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])


def values(rows: pa.Table) -> dict[str, Any]:
    """All values, in the order in which they came."""
    assert rows.schema.names == SCHEMA.names
    return {"values": rows.column("x").to_pylist()}


def applied(
    spec: Spec | Count,
    fn: Callable[[pa.Table], WindowResult] = values,
    keys: tuple[str, ...] = ("k",),
    backend: Backend = "columnar",
    schema: pa.Schema | None = None,
    time: str | Clock = "t",
) -> Windows:
    """The operator, alone."""

    def made() -> WindowBuffer:
        calls = WindowCalls(fn, keys, schema, None if isinstance(spec, Count) else pa.int64())
        return applied_operator(spec, calls, keys, time)

    return Windows(made, keys, backend=backend)


def applied_late(
    spec: Spec, lateness_ms: int, backend: Backend = "columnar", restored: Sequence[StateTable] = ()
) -> Windows:
    """The operator with an allowed lateness."""

    def made() -> WindowBuffer:
        calls = WindowCalls(values, ("k",), None, pa.int64(), lateness_ms > 0)
        return applied_operator(spec, calls, lateness_ms=lateness_ms)

    return Windows(made, backend=backend, restored=restored)


def out(windows: Windows, since: int = 0) -> list[tuple[Any, ...]]:
    """What came out, row by row."""
    return [
        tuple(tuple(value) if isinstance(value, list) else value for value in row.values())
        for row in windows.rows[since:]
    ]


class Model:
    """The same in plain Python."""

    def __init__(self, spec: Spec, keyed: bool) -> None:
        self._spec, self._keyed = spec, keyed
        self._rows: list[tuple[Any, int, int]] = []
        self._reached_ms = -(10**9)
        self.told: Counter[tuple[Any, ...]] = Counter()
        self.late = 0

    def process(self, rows: list[tuple[int, int, int]]) -> None:
        """A batch."""
        for key, time_ms, value in rows:
            if max(end for _, end in self._windows(time_ms)) - 1 <= self._reached_ms:
                self.late += 1
            else:
                self._rows.append((key if self._keyed else None, time_ms, value))

    def watermark(self, moment_ms: int) -> None:
        """Time goes on."""
        before_ms, self._reached_ms = self._reached_ms, max(self._reached_ms, moment_ms)
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        if isinstance(self._spec, Session):
            self._sessions(groups, self._spec.gap_ms)
        else:
            for key, time_ms, value in self._rows:
                for start, end in self._windows(time_ms):
                    if before_ms < end - 1 <= self._reached_ms:
                        groups[key, start, end].append(value)
        for (key, start, end), found in groups.items():
            self.told[(*((key,) if self._keyed else ()), start, end, tuple(found))] += 1

    def _sessions(self, groups: dict[tuple[Any, ...], list[int]], gap_ms: int) -> None:
        for key in {key for key, _, _ in self._rows}:
            found: list[list[tuple[Any, int, int]]] = []
            for row in sorted((row for row in self._rows if row[0] == key), key=lambda row: row[1]):
                if found and row[1] - found[-1][-1][1] <= gap_ms:
                    found[-1].append(row)
                else:
                    found.append([row])
            for session in found:
                start, end = session[0][1], session[-1][1] + gap_ms
                if end - 1 <= self._reached_ms:
                    members = [row for row in self._rows if row[0] == key and start <= row[1] < end]
                    groups[key, start, end] = [value for _, _, value in members]
                    self._rows = [row for row in self._rows if row not in members]

    def _windows(self, time_ms: int) -> list[tuple[int, int]]:
        if isinstance(self._spec, Session):
            return [(time_ms, time_ms + self._spec.gap_ms)]
        return list(windows_of(self._spec, time_ms))


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 60), st.integers(0, 99)), min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-30, 80), st.none() | st.integers(1, 2)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=12,
)
SPECS = st.sampled_from([Tumbling(10), Sliding(20, 5), Sliding(9, 6, 2), Cumulating(5, 20), Session(7)])


@pytest.mark.slow
@settings(max_examples=30)
@given(SPECS, st.booleans(), STEPS)
def test_each_window_is_given_once_with_all_its_rows(spec: Spec, keyed: bool, steps: list[tuple[str, Any]]) -> None:
    """In the order in which they came, also when a checkpoint comes between two steps."""
    model, windows = Model(spec, keyed), applied(spec, keys=("k",) if keyed else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 2)
        windows, late = follow(windows, model, steps)
    assert late == model.late
    assert {(*row[:-1], tuple(sorted(row[-1]))): 1 for row in out(windows)} == {
        (*row[:-1], tuple(sorted(row[-1]))): n for row, n in model.told.items()
    }
    assert len(windows.rows) == model.told.total()
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.just(0), st.integers(0, 99)), min_size=1, max_size=9)),
)
def test_windows_of_so_many_rows_are_given_in_order(
    size: int, keyed: bool, batches: list[list[tuple[int, int, int]]]
) -> None:
    """Of each key, whatever batches they come in, and through restores."""
    windows = applied(Count(size), keys=("k",) if keyed else ())
    held: dict[Any, list[int]] = defaultdict(list)
    expected: Counter[tuple[Any, ...]] = Counter()
    for number, batch in enumerate(batches):
        windows.process(rows_batch(batch))
        if number % 2:
            windows = windows.moved(2, "rocksdb" if number % 4 == 1 else "columnar")
        for key, _, value in batch:
            rows = held[key if keyed else None]
            rows.append(value)
            if len(rows) == size:
                expected[(*((key,) if keyed else ()), tuple(rows))] += 1
                rows.clear()
    assert Counter(out(windows)) == expected
    assert windows.stored_rows() == sum(map(len, held.values()))
    windows.close()


@BACKENDS
def test_rows_come_in_the_order_of_arrival(backend: Backend) -> None:
    """Also those before a restore; a key's window is one call."""
    windows = applied(Tumbling(10), backend=backend)
    windows.process(rows_batch([(1, 9, 1), (2, 3, 2), (1, 0, 3)]))
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 5, 4), (1, 12, 5)]))
    windows.watermark(9)
    assert sorted(out(windows)) == [(1, 0, 10, (1, 3, 4)), (2, 0, 10, (2,))]
    assert windows.stored_rows() == 1
    windows.close()


@pytest.mark.parametrize("spec", [Tumbling(10), Session(3)])
def test_what_is_looked_at_grows_with_what_is_due(spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of four rows, 1,000 rows of 250 windows are not looked at 250 times."""
    looked = 0
    scanned = WindowBuffer.scanned

    def counting(self: WindowBuffer, number: int, columns: list[str]) -> Any:
        nonlocal looked
        found = scanned(self, number, columns)
        looked += len(found[0])
        return found

    monkeypatch.setattr(row_windows, "STEP_ROWS", 4)
    monkeypatch.setattr(WindowBuffer, "scanned", counting)
    windows = applied(spec)
    windows.process(rows_batch([(1, number // 4 * 10, number) for number in range(1000)]))
    windows.watermark(MAX_WATERMARK_MS)
    assert len(out(windows)) == 250
    assert looked < 10 * 1000
    windows.close()


RETURNED: dict[str, tuple[Callable[[pa.Table], WindowResult], list[int]]] = {
    "a dict": (lambda rows: {"n": rows.num_rows}, [3]),
    "dicts": (lambda rows: ({"n": n} for n in range(rows.num_rows)), [0, 1, 2]),
    "a table": (lambda rows: pa.table({"n": rows.column("x")}), [5, 6, 7]),
    "a batch": (lambda rows: pa.record_batch({"n": [rows.num_rows]}), [3]),
    "a frame": (lambda rows: pl.DataFrame(rows).select(n=pl.col("x").sum()), [18]),
    "nothing": (lambda rows: None, []),
    "no rows": (lambda rows: [], []),
}


@pytest.mark.parametrize("what", RETURNED)
def test_what_a_function_may_return(what: str) -> None:
    """Each row of it has the key and the window."""
    fn, expected = RETURNED[what]
    windows = applied(Tumbling(10), fn)
    windows.process(rows_batch([(1, 1, 5), (1, 2, 6), (1, 3, 7)]))
    windows.watermark(9)
    assert out(windows) == [(1, 0, 10, n) for n in expected]
    windows.close()


WRONG: dict[str, tuple[Callable[[pa.Table], Any], str]] = {
    "it raises": (lambda rows: rows.column("y"), r"KeyError.*<lambda> in the window \[0, 10\) ms of key .{'k': 1}"),
    "a number": (lambda rows: 7, "returned int"),
    "numbers": (lambda rows: [7], "a row must be a dict, not int"),
    "a column of the key": (lambda rows: {"k": 1}, r"\['k'\], which the result has anyway"),
    "a column of the window": (lambda rows: {"window_end": 1}, "Remove them from its rows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors_name_the_function_the_window_and_the_key(what: str) -> None:
    """The job fails with them."""
    fn, words = WRONG[what]
    windows = applied(Tumbling(10), fn)
    windows.process(rows_batch([(1, 1, 5)]))
    with pytest.raises(OperatorError, match=words) as raised:
        windows.watermark(9)
    assert "<lambda>" in str(raised.value)
    windows.close()


def test_the_columns_are_those_for_no_rows_if_the_function_can_do_without() -> None:
    """Otherwise they are known when the job runs."""
    assert derived_schema(lambda rows: rows.select(["x"]), SCHEMA) == pa.schema([("x", pa.int64())])
    frames = derived_schema(lambda rows: pl.DataFrame(rows).select(m=pl.col("x").mean()), SCHEMA)
    assert frames == pa.schema([("m", pa.float64())])
    assert derived_schema(lambda rows: {"n": rows.num_rows}, SCHEMA) == pa.schema([("n", pa.int64())])
    assert derived_schema(values, SCHEMA) is None, "of lists without values nobody knows the type"
    assert derived_schema(lambda rows: None, SCHEMA) is None
    assert derived_schema(lambda rows: {"n": rows.column("x")[0].as_py()}, SCHEMA) is None
    with pytest.raises(ConfigurationError, match="which the result has anyway"):
        WindowCalls(values, ("k",), pa.schema([("k", pa.int64())]), None)


def test_windows_by_the_clock_are_given_when_their_end_has_come() -> None:
    """And what is open when the input ends, if that was asked for."""
    windows = applied(Tumbling(10), time=Clock(fires_at_end=True))
    windows.at(5)
    windows.process(rows_batch([(1, 10**9, 1)]))
    windows.tick(10)
    assert out(windows) == [(1, 0, 10, (1,))]
    windows.process(rows_batch([(1, 10**9, 2)]))
    windows.finish()
    assert out(windows, 1) == [(1, 10, 20, (2,))]
    windows.close()
