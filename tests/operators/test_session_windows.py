"""Sessions give what a plain program gives: merged across batches, restores, parallelisms and backends."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import VALUES, Backend, Windows, dropped, follow, rows_batch, told_of

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.windows import session_windows
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.window_specs import Session
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

Row = tuple[int, int, int | None]
AGGREGATES = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("x"), "mean": tg.mean("x")}
Results = Counter[tuple[Any, ...]]


def sessions(gap_ms: int, keys: tuple[str, ...] = ("k",), backend: Backend = "columnar") -> Windows:
    """The operator, alone."""
    return Windows(lambda: SessionWindows(keys, Session(gap_ms), AGGREGATES, "t"), keys, backend=backend)


class Model:
    """The same in plain Python: rows wait, and are looked at all together when time goes on."""

    def __init__(self, gap_ms: int, keyed: bool) -> None:
        self._gap_ms, self._keyed = gap_ms, keyed
        self._rows: dict[Any, list[tuple[int, int | None]]] = defaultdict(list)
        self._watermark_ms = -(10**9)
        self.late = 0
        self.emitted: Results = Counter()

    def process(self, rows: list[Row]) -> None:
        """A batch."""
        for key, time_ms, value in rows:
            if time_ms + self._gap_ms <= self._watermark_ms:
                self.late += 1
            else:
                self._rows[key if self._keyed else None].append((time_ms, value))

    def watermark(self, moment_ms: int) -> None:
        """Time goes on: sessions that have ended come out."""
        self._watermark_ms = max(self._watermark_ms, moment_ms)
        for key, rows in self._rows.items():
            found: list[list[tuple[int, int | None]]] = []
            for row in sorted(rows, key=lambda row: row[0]):
                if found and row[0] - found[-1][-1][0] <= self._gap_ms:
                    found[-1].append(row)
                else:
                    found.append([row])
            for session in found:
                end = session[-1][0] + self._gap_ms
                if end <= self._watermark_ms:  # a row at the end itself belongs to the session
                    values = [value for _, value in session]
                    bounds = (session[0][0], end)
                    head = (key,) if self._keyed else ()
                    result = (*head, *bounds, *told_of(values))
                    self.emitted[result] += 1
                    for row in session:
                        rows.remove(row)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 60), VALUES), min_size=1, max_size=10)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-30, 80), st.none() | st.integers(1, 2)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb"]))),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 12), st.booleans(), STEPS)
def test_sessions_are_those_of_a_plain_program(gap_ms: int, keyed: bool, steps: list[tuple[str, Any]]) -> None:
    """Each once, also when a checkpoint comes between two steps."""
    model, windows = Model(gap_ms, keyed), sessions(gap_ms, ("k",) if keyed else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_windows, "OUTPUT_ROWS_MAX", 2)
        windows, late = follow(windows, model, steps)
    assert Counter(tuple(row.values()) for row in windows.rows) == model.emitted
    assert late == model.late
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb"])


@BACKENDS
def test_sessions_grow_together_after_a_restore(backend: Backend) -> None:
    """A row between two stored sessions makes them one; one at the gap's end belongs to it, as in Flink."""
    windows = sessions(10, backend=backend)
    windows.process(rows_batch([(1, 0, 1), (1, 15, 2), (2, 0, 4), (1, 40, 8)]))
    windows = windows.moved(3, backend)
    windows.process(rows_batch([(1, 8, 16), (2, 10, 32)]))
    windows.watermark(25)
    found = sorted((row["k"], row["window_start"], row["window_end"], row["total"]) for row in windows.rows)
    assert found == [(1, 0, 25, 19), (2, 0, 20, 36)]
    assert windows.stored_rows() == 1
    windows.process(rows_batch([(1, 14, 64)]))
    windows.watermark(MAX_WATERMARK_MS)
    assert [(row["k"], row["window_start"], row["total"]) for row in windows.rows[2:]] == [(1, 40, 8)]
    assert dropped(windows) == 1, "what has ended does not open again"
    windows.close()


@BACKENDS
def test_a_watermark_that_ends_nothing_reads_nothing(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first end to come is known; after a restore it is found once."""
    windows = sessions(10, backend=backend)
    windows.process(rows_batch([(key, 100, 1) for key in range(9)]))
    windows = windows.moved(1, backend)
    windows.watermark(50)
    (operator,) = windows.operators
    assert isinstance(operator, SessionWindows)
    table = operator._state.table
    monkeypatch.setattr(type(table), "scan_namespace", lambda *_: pytest.fail("it was read"))
    windows.watermark(109)
    monkeypatch.undo()
    windows.watermark(110)
    assert len(windows.rows) == 9
    windows.close()
