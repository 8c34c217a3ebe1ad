"""Windows with an allowed lateness, state and timers of their own give what a plain program gives, in its order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_applied_windows import ROWS, applied_late, out
from test_sliced_windows import windows_of
from window_harness import Backend, Windows, applied_operator, dropped, follow, rows_batch

import tidegate as tg
from tidegate.operators.windows import row_windows
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.row_windows import KEPT_STATE, ROWS_STATE, WindowBuffer
from tidegate.operators.windows.window_operator import FIRED_STATE
from tidegate.operators.windows.window_specs import Clock, Count, Cumulating, Session, Sliding, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError

Spec = Tumbling | Sliding | Cumulating
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
OUTPUT = pa.schema(
    [("at", pa.int64()), ("values", pa.list_(pa.int64())), ("calls", pa.list_(pa.int64())), ("total", pa.int64())]
)
_NEVER_MS = -(10**9)


def timers_of(values: list[int], end_ms: int) -> tuple[list[int], list[int]]:
    """The timers that a call with these rows registers, and those that it deletes."""
    last = end_ms - 1
    added = [last + values[0] % 9, last - values[-1] % 30, *([last + 4] if values[-1] % 2 else [])]
    return added, [last + 4] if values[0] % 5 == 0 else []


class Watching(tg.ProcessWindowFunction):
    """Counts in state of all kinds, and registers timers that register others."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind all of it."""
        self.total = context.state(tg.ValueState("total", int))
        self.calls = context.window_state(tg.ValueState("calls", int))
        self.sizes = context.window_state(tg.ListState("sizes", int))
        self.fired = context.window_state(tg.MapState("timers of mine", int, int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Count a call."""
        values = rows.column("x").to_pylist()
        assert context.window is not None
        self.total.update((self.total.value() or 0) + len(values))
        self.calls.update((self.calls.value() or 0) + 1)
        self.sizes.add(len(values))
        added, deleted = timers_of(values, context.window.end_ms)
        for moment in added:
            context.timer_service.register_event_time_timer(moment)
        for moment in deleted:
            context.timer_service.delete_event_time_timer(moment)
        return self._row(None, values)

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Count a timer."""
        self.fired.put(timestamp, (self.fired.get(timestamp) or 0) + 1)
        self.total.update((self.total.value() or 0) + 100)
        if timestamp % 4 == 0:
            context.timer_service.register_event_time_timer(timestamp + 3)
        return self._row(timestamp, [])

    def _row(self, at: int | None, values: list[int]) -> dict[str, Any]:
        calls = [self.calls.value(), *self.sizes, *(part for item in sorted(self.fired.items()) for part in item)]
        return {"at": at, "values": values, "calls": calls, "total": self.total.value()}


class Model:
    """The same in plain Python, key by key and moment by moment."""

    def __init__(self, spec: Spec, lateness_ms: int, keyed: bool) -> None:
        self._spec, self._lateness_ms, self._keyed = spec, lateness_ms, keyed
        self._rows: dict[tuple[Any, int, int], list[int]] = defaultdict(list)
        self._waiting: set[tuple[Any, int, int]] = set()
        self._timers: set[tuple[int, Any, int, int]] = set()
        self._totals: dict[Any, int] = defaultdict(int)
        self._calls: dict[tuple[Any, int, int], list[int]] = defaultdict(list)
        self._fired: dict[tuple[Any, int, int], dict[int, int]] = defaultdict(dict)
        self._reached_ms = _NEVER_MS
        self.told: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
        self.late = 0

    def process(self, rows: list[tuple[int, int, int]]) -> None:
        """A batch."""
        again: set[tuple[Any, int, int]] = set()
        for of, time_ms, value in rows:
            key = of if self._keyed else None
            over = True
            for start, end in windows_of(self._spec, time_ms):
                if end - 1 + self._lateness_ms <= self._reached_ms:
                    continue
                over = False
                window = (key, start, end)
                self._rows[window].append(value)
                (self._waiting if end - 1 > self._reached_ms else again).add(window)
            self.late += over
        for window in sorted(again, key=lambda window: window[2]):
            self._call(window)

    def watermark(self, moment_ms: int) -> None:
        """Time goes on."""
        self._reached_ms = max(self._reached_ms, moment_ms)
        for key in {window[0] for window in self._rows}:
            self._advance(key)
        for window in [w for w in self._rows if w[2] - 1 + self._lateness_ms <= self._reached_ms]:
            assert not any(timer[1:] == window for timer in self._timers)
            for held in (self._rows, self._calls, self._fired):
                held.pop(window, None)

    def _advance(self, key: Any) -> None:
        while True:
            windows = [(w[2] - 1, 0, w) for w in self._waiting if w[0] == key and w[2] - 1 <= self._reached_ms]
            timers = [(t[0], 1, t[1:]) for t in self._timers if t[1] == key and t[0] <= self._reached_ms]
            if not windows and not timers:
                return
            moment, kind, window = min([*windows, *timers], key=lambda due: (due[0], due[1], due[2][2]))
            if kind == 0:
                self._waiting.remove(window)
                self._call(window)
            else:
                self._timers.remove((moment, *window))
                self._fired[window][moment] = self._fired[window].get(moment, 0) + 1
                self._totals[key] += 100
                if moment % 4 == 0:
                    self._register(window, moment + 3)
                self._tell(window, moment, [])

    def _call(self, window: tuple[Any, int, int]) -> None:
        values = self._rows[window]
        self._totals[window[0]] += len(values)
        self._calls[window].append(len(values))
        added, deleted = timers_of(values, window[2])
        for moment in added:
            self._register(window, moment)
        for moment in deleted:
            self._timers.discard((moment, *window))
        self._tell(window, None, values)

    def _register(self, window: tuple[Any, int, int], moment: int) -> None:
        if moment <= window[2] - 1 + self._lateness_ms:
            self._timers.add((moment, *window))

    def _tell(self, window: tuple[Any, int, int], at: int | None, values: list[int]) -> None:
        sizes = self._calls[window]
        calls = [len(sizes), *sizes, *(part for item in sorted(self._fired[window].items()) for part in item)]
        self.told[window[0]].append((*window[1:], at, tuple(values), tuple(calls), self._totals[window[0]]))


STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("watermark"), st.tuples(st.integers(-30, 80), st.none() | st.integers(1, 4)))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb", "crowded"]))),
    max_size=14,
)
SPECS = st.sampled_from([Tumbling(10), Sliding(20, 5), Sliding(9, 6, 2), Cumulating(5, 20)])


def watched(
    spec: Spec,
    lateness_ms: int = 0,
    keys: tuple[str, ...] = ("k",),
    backend: Backend = "columnar",
    function: Callable[[], tg.ProcessWindowFunction] = Watching,
) -> Windows:
    """The operator, alone."""

    def made() -> WindowBuffer:
        calls = FunctionCalls(function(), keys, OUTPUT if function is Watching else None, pa.int64(), lateness_ms > 0)
        return applied_operator(spec, calls, keys, lateness_ms=lateness_ms)

    return Windows(made, keys, backend=backend)


def by_key(windows: Windows, keyed: bool) -> dict[Any, list[tuple[Any, ...]]]:
    """What came out for each key, in order."""
    found: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for row in out(windows):
        found[row[0] if keyed else None].append(row[1:] if keyed else row)
    return found


@pytest.mark.slow
@settings(max_examples=50)
@given(SPECS, st.sampled_from([0, 3, 15]), st.booleans(), st.sampled_from([1, 2, 1000]), STEPS)
def test_state_and_timers_of_windows_are_those_of_the_model(
    spec: Spec, lateness_ms: int, keyed: bool, timers_max: int, steps: list[tuple[str, Any]]
) -> None:
    """Of each key in the same order, with any watermarks and steps, at any parallelism, also after restores."""
    model, windows = Model(spec, lateness_ms, keyed), watched(spec, lateness_ms, ("k",) if keyed else ())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 2)
        patch.setattr(row_windows, "DROPPED_ROWS", 3)
        windows, late = follow(windows, model, steps, before=partial(pace, timers_max=timers_max))
    assert late == model.late
    assert by_key(windows, keyed) == model.told
    left = {table.state for table in windows.stored() if table.kind is StateKind.KEYED and table.rows.num_rows}
    assert left <= {"total"}, "state of windows is left when time is over"
    windows.close()


def pace(windows: Windows, timers_max: int) -> None:
    """Steps fire so many timers."""
    for operator in windows.operators:
        operator.context.pace.timers_max = timers_max


@pytest.mark.slow
@settings(max_examples=25)
@given(SPECS, st.lists(st.tuples(ROWS, st.integers(-30, 80), st.integers(0, 3), st.booleans()), max_size=8))
def test_the_last_result_of_a_window_has_all_its_rows(spec: Spec, steps: list[tuple[Any, ...]]) -> None:
    """Also where late rows come between two steps of a watermark, after a restore: no row is lost, none comes twice."""
    windows = applied_late(spec, 10**6)
    rows: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 2)
        for batch, moment_ms, first_steps, moves in steps:
            windows.watermark(moment_ms, first_steps or None)
            if moves:
                windows = windows.moved(2, "rocksdb")
            windows.process(rows_batch(batch))
            for key, time_ms, value in batch:
                for start, end in windows_of(spec, time_ms):
                    rows[key, start, end].append(value)
        windows.watermark(1000)
    last = {row[:3]: row[3] for row in out(windows)}
    assert last == {window: tuple(values) for window, values in rows.items()}
    windows.watermark(MAX_WATERMARK_MS)
    assert windows.stored_rows() == 0
    windows.close()


@BACKENDS
def test_a_late_row_gives_the_window_again_until_it_is_over(backend: Backend) -> None:
    """With all its rows, once a batch; one that comes later is late."""
    windows = applied_late(Tumbling(10), 5, backend=backend)
    windows.process(rows_batch([(1, 1, 1), (2, 2, 2)]))
    windows.watermark(9)
    windows.process(rows_batch([(1, 3, 3), (1, 4, 4), (3, 5, 5)]))
    assert sorted(out(windows)) == [(1, 0, 10, (1,)), (1, 0, 10, (1, 3, 4)), (2, 0, 10, (2,)), (3, 0, 10, (5,))]
    windows = windows.moved(2, backend)
    windows.watermark(13)
    windows.process(rows_batch([(2, 9, 6)]))
    assert out(windows)[-1] == (2, 0, 10, (2, 6))
    windows.watermark(14)
    windows.process(rows_batch([(2, 9, 7)]))
    assert (len(windows.rows), dropped(windows), windows.stored_rows()) == (5, 1, 0)
    windows.close()


def test_less_lateness_than_before_lets_go_of_what_was_kept() -> None:
    """A program may change it, and go on from its savepoint."""
    windows = applied_late(Tumbling(10), 50)
    windows.process(rows_batch([(1, 1, 1), (1, 11, 2)]))
    windows.watermark(9)
    stored = windows.stored()
    windows.close()
    without = applied_late(Tumbling(10), 0, restored=stored)
    assert without.stored_rows() == 2
    without.watermark(9)
    assert (without.stored_rows(), without.rows) == (1, [])
    without.close()


@BACKENDS
def test_a_savepoint_from_before_windows_were_kept_restores(backend: Backend) -> None:
    """It has the rows that wait, and nothing else. A function that has state and timers of windows gets them."""
    before = applied_late(Tumbling(10), 0)
    before.process(rows_batch([(1, 1, 1), (1, 2, 3), (2, 11, 2)]))
    stored = [table for table in before.stored() if table.state != KEPT_STATE]
    before.close()
    assert {table.state for table in stored} == {ROWS_STATE, FIRED_STATE}

    def made() -> WindowBuffer:
        return applied_operator(
            Tumbling(10), FunctionCalls(Watching(), ("k",), OUTPUT, pa.int64(), True), lateness_ms=5
        )

    windows = Windows(made, backend=backend, restored=stored)
    windows.watermark(9)
    windows.process(rows_batch([(1, 3, 5)]))
    assert [row["values"] for row in windows.rows if row["at"] is None] == [[1, 3], [1, 3, 5]]
    windows.watermark(MAX_WATERMARK_MS)
    assert [row["values"] for row in windows.rows if row["at"] is None] == [[1, 3], [1, 3, 5], [2]]
    assert any(row["at"] is not None for row in windows.rows)
    windows.close()


class Misusing(tg.ProcessWindowFunction):
    """Does what it may not."""

    def __init__(self, where: str) -> None:
        self.where = where

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind."""
        if self.where == "ttl":
            context.window_state(tg.ValueState("n", int, ttl=tg.StateTtl("1h")))
        self.n = context.window_state(tg.ValueState("n", int))
        if self.where == "open":
            self.n.value()

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> Any:
        """Return too much, or ask for timers that do not exist."""
        if self.where == "timers":
            context.timer_service.register_event_time_timer(1)
        return [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("ttl", "remove ttl="),
        ("open", "kept per key"),
        ("timers", r"on_timer\(self, timestamp, context\), but the function has no such method"),
        ("rows", r"returned 2 rows for a window; with allowed_lateness .* Misusing\.process in the window \[0, 10\)"),
    ],
)
def test_what_functions_may_not_do(where: str, words: str) -> None:
    """The job fails, and says why."""
    with pytest.raises((OperatorError, ConfigurationError), match=words):  # noqa: PT012 - some fail when they open
        windows = watched(Tumbling(10), 5, function=lambda: Misusing(where))
        windows.process(rows_batch([(1, 1, 1)]))
        windows.watermark(9)


class Failing(Watching):
    """Fails for a timer."""

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Fail."""
        raise ValueError("no")


def test_a_timer_that_fails_is_named() -> None:
    """With its moment, the window and the key."""
    windows = watched(Tumbling(10), function=Failing)
    windows.process(rows_batch([(1, 1, 9)]))
    with pytest.raises(OperatorError, match=r"no; Failing\.on_timer at 0 in the window \[0, 10\) ms of key .{'k': 1}"):
        windows.watermark(9)
    windows.close()


@pytest.mark.parametrize("spec", [Session(5), Count(2), Tumbling(10)])
def test_windows_that_are_given_once_have_neither(spec: Any) -> None:
    """Timers are refused when the program is written, state when the function binds it."""

    def made(function: tg.ProcessWindowFunction) -> WindowBuffer:
        calls = FunctionCalls(function, ("k",), None, pa.int64())
        return applied_operator(spec, calls, time=Clock() if isinstance(spec, Tumbling) else "t")

    with pytest.raises(ConfigurationError, match=r"Watching\.process: on_timer needs tg\.Tumbling"):
        made(Watching())
    with pytest.raises(ConfigurationError, match=r"state 'n' of a window needs tg\.Tumbling"):
        Windows(lambda: made(Misusing("open")))


@pytest.mark.parametrize("spec", [Session(5), Tumbling(10)])
def test_no_row_is_late_for_the_clock(spec: Any) -> None:
    """A lateness is refused."""
    calls = FunctionCalls(Misusing("rows"), ("k",), OUTPUT, pa.int64(), True)
    with pytest.raises(ConfigurationError, match="allowed_lateness does not apply to processing time"):
        applied_operator(spec, calls, time=Clock(), lateness_ms=5)
