"""Sessions that come out more than once: what has come out is taken back when a session grows, or joins another one."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from window_harness import Backend, Windows, follow, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.windows import session_windows
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.window_specs import Session

Row = tuple[int, int, int]
AGGREGATES = {"n": tg.count(), "total": tg.sum("x"), "least": tg.min("x"), "mean": tg.mean("x")}
EmitMode = Literal["final", "changes"]
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
_LONG_AGO = -(10**9)


def sessions(
    gap_ms: int,
    lateness_ms: int,
    emit: EmitMode = "final",
    keys: tuple[str, ...] = ("k",),
    backend: Backend = "columnar",
) -> Windows:
    """The operator, alone."""
    return Windows(
        lambda: SessionWindows(keys, Session(gap_ms), AGGREGATES, "t", emit, lateness_ms), keys, backend=backend
    )


class Model:
    """The same in plain Python: for each key, sessions as lists of rows."""

    def __init__(self, gap_ms: int, lateness_ms: int, every_batch: bool, keyed: bool) -> None:
        self._gap_ms, self._lateness_ms, self._every_batch, self._keyed = gap_ms, lateness_ms, every_batch, keyed
        self._watermark_ms = _LONG_AGO
        self._kept: dict[Any, list[list[tuple[int, int]]]] = {}
        self._gone: Counter[tuple[Any, ...]] = Counter()

    def process(self, rows: list[Row]) -> None:
        """A batch."""
        for key, time_ms, value in rows:
            if time_ms + self._gap_ms - 1 + self._lateness_ms > self._watermark_ms:
                kept = self._kept.setdefault(key if self._keyed else None, [])
                near = [s for s in kept if s[0][0] - self._gap_ms <= time_ms <= s[-1][0] + self._gap_ms]
                for session in near:
                    kept.remove(session)
                kept.append(sorted([row for session in near for row in session] + [(time_ms, value)]))

    def watermark(self, moment_ms: int) -> None:
        """Time goes on."""
        self._watermark_ms = max(self._watermark_ms, moment_ms - 1)  # a row at the end of a session belongs to it
        for key, kept in self._kept.items():
            for session in [s for s in kept if self._end(s) - 1 + self._lateness_ms <= self._watermark_ms]:
                kept.remove(session)
                self._gone[self._result(key, session)] += 1

    def told(self) -> Counter[tuple[Any, ...]]:
        """The results that hold now."""
        told = Counter(self._gone)
        for key, kept in self._kept.items():
            for session in kept:
                if self._every_batch or self._end(session) - 1 <= self._watermark_ms:
                    told[self._result(key, session)] += 1
        return told

    def _end(self, session: list[tuple[int, int]]) -> int:
        return session[-1][0] + self._gap_ms

    def _result(self, key: Any, session: list[tuple[int, int]]) -> tuple[Any, ...]:
        values = [value for _, value in session]
        head = (key,) if self._keyed else ()
        mean = sum(values) / len(values)
        return (*head, session[0][0], self._end(session), len(values), sum(values), min(values), mean)


def held(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    """What changes come to; each row that is taken back must have come."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        *values, kind = row.values()
        if kind in ("+I", "+U"):
            found[tuple(values)] += 1
        else:
            assert found[tuple(values)] > 0, f"{row} is taken back, and had not come"
            found[tuple(values)] -= 1
    return +found


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 60), st.integers(-9, 9)), min_size=1, max_size=8)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-30, 80), st.none() | st.integers(1, 2)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb"]))),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 25), st.sampled_from(["final", "changes"]), st.booleans(), STEPS)
def test_changes_come_to_what_a_plain_program_has(
    gap_ms: int, lateness_ms: int, emit: EmitMode, keyed: bool, steps: list[tuple[str, Any]]
) -> None:
    """After each step, at any parallelism and with any backend, also when a checkpoint comes between two steps."""
    model = Model(gap_ms, lateness_ms, emit == "changes", keyed)
    windows = sessions(gap_ms, lateness_ms, emit, ("k",) if keyed else ())

    def same(windows: Windows) -> None:
        assert held(windows.rows) == model.told()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session_windows, "OUTPUT_ROWS_MAX", 2)
        windows, _ = follow(windows, model, steps, after=same)
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


def kinds(windows: Windows, since: int = 0) -> list[tuple[Any, ...]]:
    """What was told: kind, bounds and sum."""
    return [(r["row_kind"], r["window_start"], r["window_end"], r["total"]) for r in windows.rows[since:]]


@BACKENDS
def test_late_rows_change_a_session_that_has_come_out(backend: Backend) -> None:
    """Within its bounds it is replaced. If it joins another one, both are taken back; in time, that is for later."""
    windows = sessions(10, 100, backend=backend)
    windows.process(rows_batch([(1, 0, 1), (1, 6, 2), (1, 25, 4)]))
    windows.watermark(40)
    assert kinds(windows) == [("+I", 0, 16, 3), ("+I", 25, 35, 4)]
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 3, 8)]))
    assert kinds(windows, 2) == [("-U", 0, 16, 3), ("+U", 0, 16, 11)]
    windows.process(rows_batch([(1, 16, 16)]))
    assert kinds(windows, 4) == [("-D", 0, 16, 11), ("-D", 25, 35, 4), ("+I", 0, 35, 31)]
    windows.process(rows_batch([(1, 35, 32)]))
    assert kinds(windows, 7) == [("-D", 0, 35, 31)], "it goes on beyond the watermark"
    windows.watermark(45)
    assert kinds(windows, 8) == [("+I", 0, 45, 63)]
    windows.watermark(144)
    assert windows.stored_rows() == 1
    windows.watermark(145)
    assert windows.stored_rows() == 0
    windows.close()


def test_rows_between_two_steps_move_no_session_past_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two sessions of a key become one when the second ones are told: what was the third one is told too."""
    monkeypatch.setattr(session_windows, "OUTPUT_ROWS_MAX", 1)
    windows = sessions(10, 100)
    windows.process(rows_batch([(1, 0, 1), (1, 20, 2), (1, 40, 4), (2, 20, 8), (2, 0, 8)]))
    (operator,) = windows.operators
    for number, _ in enumerate(operator.advance_watermark(90, windows.emit)):
        if number == 2:
            windows.process(rows_batch([(1, 10, 16)]))
    assert held(windows.rows) == Counter(
        {(1, 0, 30, 3, 19, 1, 19 / 3): 1, (1, 40, 50, 1, 4, 4, 4.0): 1}
        | {(2, 0, 10, 1, 8, 8, 8.0): 1, (2, 20, 30, 1, 8, 8, 8.0): 1}
    )
    windows.close()
