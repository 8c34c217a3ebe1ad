"""Functions of sessions with an allowed lateness: what has come out is taken back when a session grows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_changing_sessions import STEPS, Model, held
from window_harness import Backend, Windows, applied_operator, dropped, follow, rows_batch

import tidegate as tg
from tidegate.operators.windows import row_windows
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.row_windows import WindowBuffer
from tidegate.operators.windows.window_calls import WindowCall, WindowCalls
from tidegate.operators.windows.window_specs import Session
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError

TOLD = pa.schema([pa.field("n", pa.int64(), nullable=False), ("values", pa.string())])
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb", "crowded"])
_LONG_AGO = -(10**9)


def ordered(rows: pa.Table) -> dict[str, Any]:
    """The values, in the order in which they came."""
    return {"n": rows.num_rows, "values": " ".join(map(str, rows.column("x").to_pylist()))}


def some(rows: pa.Table) -> dict[str, Any] | None:
    """The values in their own order; nothing for some sessions."""
    return told_of(rows.column("x").to_pylist())


def told_of(values: list[int]) -> dict[str, Any] | None:
    """What is told of values."""
    return {"n": len(values), "values": " ".join(map(str, sorted(values)))} if sum(values) % 4 else None


class OfFunction(Model):
    """What the function returns."""

    def _result(self, key: Any, session: list[tuple[int, int]]) -> tuple[Any, ...]:
        told = told_of([value for _, value in session])
        head = (key,) if self._keyed else ()
        return () if told is None else (*head, session[0][0], self._end(session), *told.values())

    def told(self) -> Any:
        """Nothing is told of some sessions."""
        told = super().told()
        del told[()]
        return told


def sessions(
    gap_ms: int,
    lateness_ms: int,
    keys: tuple[str, ...] = ("k",),
    backend: Backend = "columnar",
    fn: WindowCall = ordered,
    restored: Any = (),
) -> Windows:
    """The operator, alone."""

    def made() -> WindowBuffer:
        calls = WindowCalls(fn, keys, TOLD, pa.int64(), lateness_ms > 0)
        return applied_operator(Session(gap_ms), calls, keys, lateness_ms=lateness_ms)

    return Windows(made, keys, backend=backend, restored=restored)


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 25), st.booleans(), st.sampled_from([1, 3, 100]), STEPS)
def test_changes_come_to_what_a_plain_program_has(
    gap_ms: int, lateness_ms: int, keyed: bool, batch_rows: int, steps: list[tuple[str, Any]]
) -> None:
    """After each step, in batches of any size, at any parallelism and with any backend, also between two steps."""
    model = OfFunction(gap_ms, lateness_ms, False, keyed)
    windows = sessions(gap_ms, lateness_ms, ("k",) if keyed else (), fn=some)

    def same(windows: Windows) -> None:
        assert held(windows.rows) == model.told()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 2)
        patch.setattr(row_windows, "DROPPED_ROWS", 1)
        windows, _ = follow(windows, model, steps, after=same, batch_rows=batch_rows)
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(1, 25), st.booleans(), STEPS)
def test_rows_between_two_steps_are_neither_lost_nor_doubled(
    gap_ms: int, lateness_ms: int, moves: bool, steps: list[tuple[str, Any]]
) -> None:
    """Rows that come while a watermark is worked off meet sessions that are due, and others that are over."""
    model, windows, reached = (
        OfFunction(gap_ms, lateness_ms, False, True),
        sessions(gap_ms, lateness_ms, fn=some),
        _LONG_AGO,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_windows, "STEP_ROWS", 1)
        patch.setattr(row_windows, "DROPPED_ROWS", 1)
        for kind, what in steps:
            if kind == "rows":
                windows.process(rows_batch(what))
                model.process(what)
            elif kind == "watermark" and what[0] > reached:
                reached, first_steps = what
                model.watermark(reached)
                windows.watermark(reached, first_steps)
                windows = windows.moved(3, "rocksdb") if moves else windows
        windows.watermark(100)
        model.watermark(100)
    assert held(windows.rows) == model.told()
    windows.watermark(MAX_WATERMARK_MS)
    assert windows.stored_rows() == 0
    windows.close()


def kinds(windows: Windows, since: int = 0) -> list[tuple[Any, ...]]:
    """What was told: kind, bounds and values."""
    return [(r["row_kind"], r["window_start"], r["window_end"], r["values"]) for r in windows.rows[since:]]


@BACKENDS
def test_late_rows_change_a_session_that_has_come_out(backend: Backend) -> None:
    """Within its bounds it is replaced. If it joins another one, both are taken back; in time, that is for later.

    The function gets the rows that it has got before those that it has not.
    """
    windows = sessions(10, 100, backend=backend)
    windows.process(rows_batch([(1, 0, 1), (1, 25, 4), (1, 6, 2)]))
    windows.watermark(40)
    assert kinds(windows) == [("+I", 0, 16, "1 2"), ("+I", 25, 35, "4")]
    windows = windows.moved(2, backend)
    windows.process(rows_batch([(1, 3, 8)]))
    assert kinds(windows, 2) == [("-U", 0, 16, "1 2"), ("+U", 0, 16, "1 2 8")]
    windows.process(rows_batch([(1, 16, 16)]))
    windows.process(rows_batch([(2, 20, 7)]))
    assert kinds(windows, 4) == [
        ("-D", 25, 35, "4"),
        ("-D", 0, 16, "1 2 8"),
        ("+I", 0, 35, "1 4 2 8 16"),
        ("+I", 20, 30, "7"),
    ]
    windows = windows.moved(3, backend)
    windows.process(rows_batch([(1, 45, 32), (1, 35, 64)]))
    assert kinds(windows, 8) == [("-D", 0, 35, "1 4 2 8 16")], "it goes on beyond the watermark"
    windows = windows.moved(1, backend)
    windows.watermark(55)
    assert kinds(windows, 9) == [("+I", 0, 55, "1 4 2 8 16 32 64")]
    windows.process(rows_batch([(1, -60, 0)]))
    assert dropped(windows) == 1
    windows.watermark(154)
    assert windows.stored_rows() == 8, "seven rows and what came out of them"
    windows.watermark(155)
    assert windows.stored_rows() == 0
    windows.close()


def test_a_session_of_which_nothing_is_told_any_more_is_taken_back() -> None:
    """What holds of a session is what the function has returned last."""
    windows = sessions(10, 100, fn=some)
    windows.process(rows_batch([(1, 0, 1)]))
    windows.watermark(40)
    windows.process(rows_batch([(1, 0, 3)]))
    windows.process(rows_batch([(1, 0, 3)]))
    assert kinds(windows) == [("+I", 0, 10, "1"), ("-D", 0, 10, "1"), ("+I", 0, 10, "1 3 3")]
    windows.close()


class Calls(tg.ProcessWindowFunction):
    """Counts its calls for a key."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind the count."""
        self.calls = context.state(tg.ValueState("calls", int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Count a call."""
        assert context.window is not None
        self.calls.update((self.calls.value() or 0) + 1)
        return {"n": self.calls.value(), "values": f"{context.window.start_ms} {context.window.end_ms}"}


def test_a_function_knows_the_session_and_remembers_the_key() -> None:
    """Its state is there for each new result, after a move too."""

    def made() -> WindowBuffer:
        return applied_operator(Session(10), FunctionCalls(Calls(), ("k",), TOLD, pa.int64(), True), lateness_ms=100)

    windows = Windows(made)
    windows.process(rows_batch([(1, 0, 1), (2, 0, 1)]))
    windows.watermark(40)
    windows = windows.moved(2, "rocksdb")
    windows.process(rows_batch([(1, 10, 3)]))
    assert [(r["row_kind"], r["k"], r["n"], r["values"]) for r in windows.rows[2:]] == [
        ("-D", 1, 1, "0 10"),
        ("+I", 1, 2, "0 20"),
    ]
    windows.close()


@BACKENDS
def test_sessions_that_came_out_once_go_on_with_a_lateness(backend: Backend) -> None:
    """A checkpoint without it restores: its sessions have not come out. The other way it is refused."""
    before = sessions(10, 0)
    before.process(rows_batch([(1, 0, 1), (1, 30, 2)]))
    stored = before.stored()
    before.close()
    windows = sessions(10, 50, backend=backend, restored=stored)
    windows.process(rows_batch([(1, 5, 4)]))
    windows.watermark(20)
    assert kinds(windows) == [("+I", 0, 15, "1 4")]
    with pytest.raises(ConfigurationError, match="keep allowed_lateness"):
        sessions(10, 0, restored=windows.stored())
    windows.close()


REFUSED = {
    "columns that are not known": (None, "give schema= with the columns"),
    "the column of kinds": (pa.schema([("row_kind", pa.string())]), "give the column another name"),
    "a dictionary": (pa.schema([("d", pa.dictionary(pa.int8(), pa.string()))]), "give string in schema="),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_taken_back_is_refused(what: str) -> None:
    """When the program is written."""
    schema, words = REFUSED[what]
    with pytest.raises(ConfigurationError, match=words):
        applied_operator(Session(5), WindowCalls(ordered, ("k",), schema, pa.int64(), True), lateness_ms=5)
