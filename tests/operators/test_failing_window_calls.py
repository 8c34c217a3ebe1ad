"""A call of a window function that fails leaves a dead letter, and else nothing: neither state nor timers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from window_harness import Backend, Windows, applied_operator, rows_batch

import tidegate as tg
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.row_windows import WindowBuffer
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import EventTimeWindow, Session, Tumbling
from tidegate.protocol.failures import OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.errors import StorageError

COUNTED = pa.schema([("n", pa.int64())])
BAD = error_tag("bad", pa.schema([("k", pa.int64()), ("window_start", pa.int64()), ("window_end", pa.int64())]), "w")


def applied(spec: EventTimeWindow, lateness_ms: int, fails: Any) -> Windows:
    """Counts the rows of windows, but fails for some counts."""

    def counted(rows: pa.Table) -> dict[str, int]:
        if rows.num_rows in fails:
            raise ValueError(f"{rows.num_rows} rows")
        return {"n": rows.num_rows}

    def made() -> WindowBuffer:
        calls = WindowCalls(counted, ("k",), COUNTED, pa.int64(), lateness_ms > 0, BAD)
        return applied_operator(spec, calls, lateness_ms=lateness_ms)

    return Windows(made)


def test_each_call_for_late_rows_is_judged_alone() -> None:
    """A window that has failed may have a result later, and the result of one that fails later stays."""
    windows = applied(Tumbling(10), 90, fails=(1, 3))
    windows.process(rows_batch([(1, 1, 0)]))
    windows.watermark(20)
    for moment in (2, 3, 4):
        windows.process(rows_batch([(1, moment, 0)]))
    windows.watermark(MAX_WATERMARK_MS)
    assert [row["n"] for row in windows.rows] == [2, 4]
    bounds = {"k": 1, "window_start": 0, "window_end": 10}
    assert windows.aside == [{**bounds, "error": f"ValueError: {n} rows"} for n in (1, 3)]
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


def test_a_session_that_fails_when_it_grows_has_no_result() -> None:
    """What came out of it before is taken back. When it grows again it is given again."""
    windows = applied(Session(5), 200, fails=(3,))
    windows.process(rows_batch([(1, 1, 0), (1, 2, 0)]))
    windows.watermark(50)
    windows.process(rows_batch([(1, 4, 0)]))
    windows.process(rows_batch([(1, 6, 0)]))
    windows.watermark(MAX_WATERMARK_MS)
    told = [(row["row_kind"], row["window_start"], row["window_end"], row["n"]) for row in windows.rows]
    assert told == [("+I", 1, 7, 2), ("-D", 1, 7, 2), ("+I", 1, 11, 4)]
    assert windows.aside == [{"k": 1, "window_start": 1, "window_end": 9, "error": "ValueError: 3 rows"}]
    assert windows.stored_rows() == 0, "state is left when time is over"
    windows.close()


class AllKinds(tg.ProcessWindowFunction):
    """Changes state of all kinds and timers, shows what it had, and fails for rows and timers with a null."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind the states."""
        self.value = context.state(tg.ValueState("value", int))
        self.items = context.state(tg.ListState("items", int))
        self.entries = context.state(tg.MapState("entries", int, int))
        self.of_window = context.window_state(tg.ListState("of_window", int))
        self.map_of_window = context.window_state(tg.MapState("map_of_window", int, int))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> Iterator[dict[str, str]]:
        """Change all, then fail for a null."""
        assert context.window is not None
        values = rows["x"].to_pylist()
        for after_ms in (4, 5, 6):
            context.timer_service.register_event_time_timer(context.window.end_ms + after_ms)
        yield from self.change(len(values), context)
        sum(values)

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> Iterator[dict[str, str]]:
        """Change all, then fail for some moments."""
        yield from self.change(timestamp, context)
        1 // (timestamp % 3)

    def change(self, number: int, context: tg.ProcessWindowContext) -> Iterator[dict[str, str]]:
        """Show all, and change it."""
        assert context.window is not None
        shown = (
            self.value.value(),
            [*self.items.get()],
            dict(self.entries.items()),
            [*self.of_window.get()],
            dict(self.map_of_window.items()),
        )
        yield {"shown": repr(shown)}
        self.value.update((self.value.value() or 0) + 1)
        self.items.add(number)
        self.entries.remove(number - 1)
        self.entries.put(number, context.window.end_ms)
        self.of_window.add(number)
        self.map_of_window.put(number, number)
        if number < context.window.end_ms + 8:
            context.timer_service.register_event_time_timer(max(number + 2, context.window.end_ms + 1))
            context.timer_service.delete_event_time_timer(context.window.end_ms + 5)


def all_kinds(backend: Backend, batches: list[list[tuple[int, int, int | None]]]) -> Windows:
    """Runs the function over rows, and moves its state to another backend in the middle."""

    def made() -> WindowBuffer:
        calls = FunctionCalls(AllKinds(), ("k",), pa.schema([("shown", pa.string())]), pa.int64(), True, BAD)
        return applied_operator(Tumbling(10), calls, lateness_ms=12)

    windows = Windows(made, backend=backend)
    for number, batch in enumerate(batches):
        if batch:
            windows.process(rows_batch(batch))
        windows.watermark(number * 10 + 9)
        if number == 2:
            windows = windows.moved(2, backend)
    windows.watermark(MAX_WATERMARK_MS)
    return windows


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["columnar", "rocksdb"])
def test_state_is_that_of_a_run_without_the_calls_that_fail(backend: Backend) -> None:
    """Windows that fail for one run have no rows in the other; results, timers and state are the same."""
    batches: list[list[tuple[int, int, int | None]]] = [
        [(key, 10 * n + at, None if (n + key) % 3 == 0 and at == 5 else at) for key in (1, 2, 3) for at in (1, 5)]
        for n in range(6)
    ]
    without = [[row for row in batch if ((row[1] // 10) + row[0]) % 3] for batch in batches]
    failing, plain = all_kinds(backend, batches), all_kinds(backend, without)
    assert failing.rows == plain.rows
    assert len(failing.rows) > 12
    of_rows = [row for row in failing.aside if not row["error"].startswith("timer at ")]
    of_timers = [row for row in failing.aside if row["error"].startswith("timer at ")]
    assert [(row["k"], row["window_end"]) for row in of_rows] == [
        (key, 10 * n + 10) for n in range(6) for key in (1, 2, 3) if (n + key) % 3 == 0
    ]
    assert of_timers == plain.aside
    assert of_timers
    for windows in (failing, plain):
        windows.close()


def test_a_fault_of_storage_fails_the_job() -> None:
    """It is no fault of the window, so it is no dead letter."""

    def unlucky(rows: pa.Table) -> None:
        raise StorageError("the disk is gone")

    windows = Windows(
        lambda: applied_operator(Tumbling(10), WindowCalls(unlucky, ("k",), COUNTED, pa.int64(), False, BAD))
    )
    windows.process(rows_batch([(1, 1, 0)]))
    with pytest.raises(OperatorError, match="the disk is gone"):
        windows.watermark(20)
    assert windows.aside == []
    windows.close()
