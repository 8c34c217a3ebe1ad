"""Results of windows every so often: what has changed since they last came out, and nothing else."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sliced_windows import windows_of
from window_harness import Backend, Windows, rows_batch

from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.windows import sliced_windows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS

AGGREGATES = {"n": tg.count(), "total": tg.sum("x")}
EVERY_MS = 100
Spec = Tumbling | Sliding | Cumulating
Place = tuple[tuple[int, int], Any]
"""A window and a key."""


class Model:
    """The same in plain Python: what every window holds, and where that has changed."""

    def __init__(self, spec: Spec, keyed: bool) -> None:
        self._spec, self._keyed = spec, keyed
        self._rows: dict[Place, list[int]] = defaultdict(list)
        self._changed: set[Place] = set()
        self._watermark_ms = -(10**9)
        self.emitted: Counter[tuple[Any, ...]] = Counter()

    def process(self, rows: list[tuple[int, int, int]]) -> None:
        """A batch."""
        for key, time_ms, value in rows:
            for window in windows_of(self._spec, time_ms):
                if window[1] - 1 > self._watermark_ms:
                    place = window, key if self._keyed else None
                    self._rows[place].append(value)
                    self._changed.add(place)

    def moved(self) -> None:
        """After a restore nobody knows what had come out."""
        self._changed = {place for place in self._rows if place[0][1] - 1 > self._watermark_ms}

    def tick(self) -> None:
        """What has changed comes out."""
        self._emit({place for place in self._changed if place[0][1] - 1 > self._watermark_ms})

    def watermark(self, moment_ms: int) -> None:
        """Windows that end come out where they have changed."""
        self._watermark_ms = max(self._watermark_ms, moment_ms)
        self._emit({place for place in self._changed if place[0][1] - 1 <= self._watermark_ms})

    def _emit(self, places: set[Place]) -> None:
        for window, key in places:
            values = self._rows[window, key]
            self.emitted[*((key,) if self._keyed else ()), *window, len(values), sum(values)] += 1
        self._changed -= places


SPECS = st.sampled_from([Tumbling(10), Tumbling(7, 3), Sliding(20, 5), Sliding(9, 6), Cumulating(5, 20)])
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(-20, 40), st.integers(-9, 9)), min_size=1, max_size=9)
STEPS = st.lists(
    st.tuples(st.just("rows"), ROWS)
    | st.tuples(st.just("tick"), st.none())
    | st.tuples(st.just("watermark"), st.integers(-30, 60))
    | st.tuples(st.just("move"), st.tuples(st.integers(1, 3), st.sampled_from(["columnar", "rocksdb"]))),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=30)
@given(SPECS, st.booleans(), st.sampled_from(["columnar", "rocksdb"]), STEPS)
def test_what_has_changed_comes_out_once(
    spec: Spec, keyed: bool, backend: Backend, steps: list[tuple[str, Any]]
) -> None:
    """At each moment, and when a window ends; all that has not ended after a restore."""
    keys = ("k",) if keyed else ()
    model = Model(spec, keyed)
    windows = Windows(lambda: SlicedWindows(keys, spec, AGGREGATES, "t", emit_every_ms=EVERY_MS), keys, 1, backend)
    now_ms, reached = 1_000, -(10**9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_windows, "_STEP_ROWS", 1)
        for kind, what in steps:
            if kind == "rows":
                windows.process(rows_batch(what))
                model.process(what)
            elif kind == "tick":
                now_ms += EVERY_MS
                windows.tick(now_ms)
                model.tick()
            elif kind == "watermark" and what > reached:
                reached = what
                windows.watermark(what)
                model.watermark(what)
            elif kind == "move":
                windows = windows.moved(*what)
                model.moved()
        windows.watermark(MAX_WATERMARK_MS)
        model.watermark(10**9)
    assert Counter(tuple(row.values()) for row in windows.rows) == model.emitted
    assert windows.stored_rows() == 0
    windows.close()


@pytest.mark.slow
@settings(max_examples=30)
@given(SPECS, st.booleans(), st.sampled_from(["columnar", "rocksdb"]), STEPS)
def test_what_has_changed_comes_out_as_event_time_goes_on(
    spec: Spec, keyed: bool, backend: Backend, steps: list[tuple[str, Any]]
) -> None:
    """When the watermark passes a multiple of the interval, and with the first one; the clock has no part."""
    every_ms = 10
    keys = ("k",) if keyed else ()
    model = Model(spec, keyed)
    make = lambda: SlicedWindows(  # noqa: E731
        keys, spec, AGGREGATES, "t", emit_every_ms=every_ms, emit_by_event=True
    )
    windows = Windows(make, keys, 1, backend)
    now_ms, reached, passed = 1_000, -(10**9), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_windows, "_STEP_ROWS", 1)
        for kind, what in steps:
            if kind == "rows":
                windows.process(rows_batch(what))
                model.process(what)
            elif kind == "tick":
                now_ms += EVERY_MS
                windows.tick(now_ms)
            elif kind == "watermark" and what > reached:
                reached = what
                windows.watermark(what)
                model.watermark(what)
                if passed is None or what // every_ms > passed:
                    model.tick()
                passed = what // every_ms
            elif kind == "move":
                windows, passed = windows.moved(*what), None
                model.moved()
        windows.watermark(MAX_WATERMARK_MS)
        model.watermark(10**9)
    assert Counter(tuple(row.values()) for row in windows.rows) == model.emitted
    assert windows.stored_rows() == 0
    windows.close()


def test_so_many_changes_do_not_wait_for_event_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered stays bounded while the watermark stands still. A watermark between two steps is no harm."""
    monkeypatch.setattr(sliced_windows, "CHANGED_MAX", 3)
    windows = Windows(
        lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t", emit_every_ms=EVERY_MS, emit_by_event=True)
    )
    windows.process(rows_batch([(1, 3, 1), (1, 13, 2)]))
    assert windows.operators[0].next_processing_time_ms() is None
    windows.process(rows_batch([(1, 23, 5)]))
    steps = windows.operators[0].on_processing_time(0, windows.emit)
    next(steps)
    assert results(windows) == [(1, 0, 10, 1, 1)]
    windows.watermark(12)
    assert results(windows) == [(1, 0, 10, 1, 1)], "it ends"
    assert list(steps)
    assert results(windows) == [(1, 10, 20, 1, 2), (1, 20, 30, 1, 5)]
    windows.close()


def results(windows: Windows) -> list[tuple[int, ...]]:
    """What has come out since it was last asked for."""
    found = [tuple(row.values()) for row in windows.rows]
    windows.rows.clear()
    return sorted(found)


@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_moments_are_multiples_of_the_interval(backend: Backend) -> None:
    """The first after a change; without a change there is none. A clock that is set back delays nothing for long."""
    make = lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t", emit_every_ms=EVERY_MS)  # noqa: E731
    windows = Windows(make, backend=backend)
    operator = windows.operators[0]
    assert operator.next_processing_time_ms() is None
    operator.context.time.now_ms = 1_234
    windows.process(rows_batch([(1, 3, 1), (1, 13, 2), (2, 3, 5)]))
    assert operator.next_processing_time_ms() == 1_300
    windows.tick(1_299)
    assert results(windows) == []
    windows.tick(1_300)
    assert results(windows) == [(1, 0, 10, 1, 1), (1, 10, 20, 1, 2), (2, 0, 10, 1, 5)]
    assert operator.next_processing_time_ms() is None
    windows.process(rows_batch([(2, 4, 1)]))
    operator.context.time.now_ms = 150
    assert operator.next_processing_time_ms() == 200
    windows.watermark(9)
    assert results(windows) == [(2, 0, 10, 2, 6)], "what came out before, and has not changed, comes again"
    windows.close()


def test_an_emission_that_is_cut_short_loses_nothing() -> None:
    """By the end of the input, when its steps are dropped, or by a restore."""
    make = lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t", emit_every_ms=EVERY_MS)  # noqa: E731
    for ends in (False, True):
        windows = Windows(make)
        windows.process(rows_batch([(1, 3, 1), (1, 13, 2), (1, 23, 3)]))
        windows.tick(1_300, steps=1)
        assert results(windows) == [(1, 0, 10, 1, 1)]
        if not ends:
            windows = windows.moved(2, "columnar")
            windows.tick(1_400)
            assert results(windows) == [(1, 0, 10, 1, 1), (1, 10, 20, 1, 2), (1, 20, 30, 1, 3)]
        windows.watermark(MAX_WATERMARK_MS)
        assert {(1, 10, 20, 1, 2), (1, 20, 30, 1, 3)} <= {*results(windows)} or not ends
        windows.close()


@pytest.mark.parametrize("keys", [("k",), ()])
def test_so_many_changes_come_out_at_once(keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key counts once for each slice. Only what has changed comes out, and what is remembered starts anew."""
    monkeypatch.setattr(sliced_windows, "CHANGED_MAX", 3)
    windows = Windows(lambda: SlicedWindows(keys, Tumbling(10), AGGREGATES, "t", emit_every_ms=EVERY_MS), keys)
    operator = windows.operators[0]
    windows.process(rows_batch([(9, 93, 9)]))
    windows.tick(100)
    results(windows)
    windows.process(rows_batch([(1, 3, 1), (1, 4, 2), (1, 13, 2)]))
    assert operator.next_processing_time_ms() == 200
    windows.process(rows_batch([(1, 23, 5)]))
    windows.tick(101)
    assert [row[len(keys) :] for row in results(windows)] == [(0, 10, 2, 3), (10, 20, 1, 2), (20, 30, 1, 5)]
    windows.process(rows_batch([(1, 3, 1), (1, 13, 2)]))
    assert operator.next_processing_time_ms() == 200
    windows.watermark(9)
    windows.process(rows_batch([(1, 33, 2)]))
    assert operator.next_processing_time_ms() == 200, "a window that is over counts no longer"
    windows.close()


@pytest.mark.parametrize("restored", [False, True])
def test_windows_may_end_between_two_steps(restored: bool) -> None:
    """Then they come out as they end, once they are not early any more, and the others go on."""
    windows = Windows(lambda: SlicedWindows(("k",), Sliding(20, 10), AGGREGATES, "t", emit_every_ms=EVERY_MS))
    windows.process(rows_batch([(1, 3, 1), (1, 13, 2), (1, 23, 3)]))
    if restored:
        windows = windows.moved(1, "columnar")
    operator = windows.operators[0]
    operator.context.time.now_ms = 1_000
    steps = operator.on_processing_time(1_000, windows.emit)
    next(steps)
    assert results(windows) == [(1, -10, 10, 1, 1)]
    windows.watermark(19)
    assert results(windows) == [(1, -10, 10, 1, 1), (1, 0, 20, 2, 3)]
    windows.process(rows_batch([(2, 24, 7)]))
    assert list(steps)
    early = [(1, 10, 30, 2, 5), (1, 20, 40, 1, 3)]
    assert [row for row in results(windows) if row[0] == 1] == early
    windows.tick(1_100)
    assert results(windows) == [(2, 10, 30, 1, 7), (2, 20, 40, 1, 7)]
    windows.watermark(MAX_WATERMARK_MS)
    assert results(windows) == [], "all of it was out"
    windows.close()


def test_late_rows_within_the_lateness_come_out_at_once() -> None:
    """Of windows that have ended; the others wait for the moment."""
    windows = Windows(lambda: SlicedWindows(("k",), Tumbling(10), AGGREGATES, "t", "final", 20, EVERY_MS))
    windows.process(rows_batch([(1, 3, 1)]))
    windows.watermark(9)
    assert results(windows) == [(1, 0, 10, 1, 1)]
    windows.process(rows_batch([(1, 4, 1), (1, 14, 7)]))
    assert results(windows) == [(1, 0, 10, 2, 2)]
    windows.tick(1_000)
    assert results(windows) == [(1, 10, 20, 1, 7)]
    windows.close()
