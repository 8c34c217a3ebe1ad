"""Functions of windows know the window and the key, and remember something of the key, wherever its state goes."""

from __future__ import annotations

from typing import Any, Literal

import pyarrow as pa
import pytest
from window_harness import Backend, Windows, applied_operator, rows_batch

import tidegate as tg
from tidegate.operators.windows.process_windows import FunctionCalls
from tidegate.operators.windows.row_windows import ROWS_STATE, WindowBuffer
from tidegate.protocol.failures import OperatorError
from tidegate.storage.errors import ConfigurationError

SCHEMA = rows_batch([(1, 1, 1)]).schema
BACKENDS = pytest.mark.parametrize("backend", ["columnar", "rocksdb"])


class SumsSoFar(tg.ProcessWindowFunction):
    """The sum of a key's windows so far, and what the context says."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind the state."""
        self.total = context.state(tg.ValueState("total", pa.int64()))

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Add a window."""
        self.total.update((self.total.value() or 0) + sum(rows.column("x").to_pylist()))
        window = None if context.window is None else [context.window.start_ms, context.window.end_ms]
        return {
            "total": self.total.value(),
            "key": str(context.current_key),
            "of": window,
            "at": context.current_watermark,
        }


OUTPUT = pa.schema([("total", pa.int64()), ("key", pa.string()), ("of", pa.list_(pa.int64())), ("at", pa.int64())])


def processed(
    spec: tg.Tumbling | tg.Session | tg.Count,
    function: tg.ProcessWindowFunction | None = None,
    keys: tuple[str, ...] = ("k",),
    backend: Literal["columnar", "rocksdb"] = "columnar",
) -> Windows:
    """The operator, alone."""

    def made() -> WindowBuffer:
        bounds = None if isinstance(spec, tg.Count) else pa.int64()
        calls = FunctionCalls(function or SumsSoFar(), keys, OUTPUT if function is None else None, bounds)
        return applied_operator(spec, calls, keys)

    return Windows(made, keys, backend=backend)


@BACKENDS
def test_state_of_a_key_outlives_its_windows_and_restores(backend: Backend) -> None:
    """With the rows that wait, at another parallelism and in another backend."""
    windows = processed(tg.Tumbling(10), backend=backend)
    windows.process(rows_batch([(1, 1, 1), (2, 2, 10), (1, 12, 2), (1, 3, 4)]))
    windows.watermark(9)
    assert sorted((row["k"], row["total"], row["key"], row["of"], row["at"]) for row in windows.rows) == [
        (1, 5, "{'k': 1}", [0, 10], 9),
        (2, 10, "{'k': 2}", [0, 10], 9),
    ]
    windows = windows.moved(3, "rocksdb" if backend == "columnar" else "columnar")
    windows.process(rows_batch([(2, 13, 20), (1, 25, 8)]))
    windows.watermark(99)
    found = sorted((row["k"], row["window_start"], row["total"]) for row in windows.rows[2:])
    assert found == [(1, 10, 7), (1, 20, 15), (2, 10, 30)]
    windows.close()


def test_windows_of_all_rows_have_one_state() -> None:
    """Several of them in one step, too; there is no key column."""
    windows = processed(tg.Session(3), keys=())
    windows.process(rows_batch([(1, 1, 1), (2, 2, 10), (1, 12, 2)]))
    windows.watermark(99)
    assert [(row["total"], row["key"], row["of"]) for row in windows.rows] == [(11, "{}", [1, 5]), (13, "{}", [12, 15])]
    windows.close()


def test_windows_of_so_many_rows_have_no_bounds() -> None:
    """The context says None; state is kept while a window fills."""
    windows = processed(tg.Count(2))
    windows.process(rows_batch([(1, 0, 1), (1, 0, 2), (1, 0, 4)]))
    windows = windows.moved(2, "rocksdb")
    windows.process(rows_batch([(1, 0, 8)]))
    assert [(row["k"], row["total"], row["of"]) for row in windows.rows] == [(1, 3, None), (1, 15, None)]
    windows.close()


class Fragile(tg.ProcessWindowFunction):
    """Tells when it is closed, and fails."""

    def __init__(self, closed: list[str]) -> None:
        self.closed = closed

    def __deepcopy__(self, memo: object) -> Fragile:
        return Fragile(self.closed)

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> None:
        """Fail."""
        raise ValueError("no")

    def close(self) -> None:
        """Tell."""
        self.closed.append("closed")


def test_a_function_is_named_in_its_errors_and_closed() -> None:
    """With the window and the key."""
    closed: list[str] = []
    windows = processed(tg.Tumbling(10), Fragile(closed))
    windows.process(rows_batch([(1, 1, 1)]))
    with pytest.raises(OperatorError, match=r"no; Fragile\.process in the window \[0, 10\) ms of key .{'k': 1}"):
        windows.watermark(9)
    windows.close()
    assert closed == ["closed"]


class Forgetful(tg.ProcessWindowFunction):
    """Binds no state."""

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> None:
        """Nothing."""


class LateBinding(tg.ProcessWindowFunction):
    """Binds a state where it is too late."""

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> None:
        """Bind."""
        context.state(tg.ValueState("late", pa.int64()))


class Impolite(tg.ProcessWindowFunction):
    """Takes the name of the rows."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind."""
        context.state(tg.ValueState(ROWS_STATE, pa.int64()))


WORDS = ("timers", "fired", "windows", "window rows", "window rows kept", "window results", "window timers", "state")


class ManyNames(tg.ProcessWindowFunction):
    """Counts windows in states that are called as what tidegate keeps beside them."""

    def open(self, context: tg.ProcessWindowContext) -> None:
        """Bind all of them."""
        self.counts = [context.state(tg.ValueState(word, pa.int64())) for word in WORDS]

    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """Count, and register a timer of the window."""
        for count in self.counts:
            count.update((count.value() or 0) + 1)
        assert context.window is not None
        context.timer_service.register_event_time_timer(context.window.end_ms + 2)
        return self._found(rows.num_rows)

    def on_timer(self, timestamp: int, context: tg.ProcessWindowContext) -> dict[str, Any]:
        """What there is."""
        return self._found(-1)

    def _found(self, rows: int) -> dict[str, Any]:
        return {"rows": rows, "counts": [count.value() for count in self.counts]}


@BACKENDS
def test_states_may_be_called_as_anything_but_what_is_reserved(backend: Backend) -> None:
    """Their names never meet those of the rows, results, timers and progress of windows, also over a restore."""

    def made() -> WindowBuffer:
        schema = pa.schema([("rows", pa.int64()), ("counts", pa.list_(pa.int64()))])
        calls = FunctionCalls(ManyNames(), ("k",), schema, pa.int64(), True)
        return applied_operator(tg.Tumbling(10), calls, lateness_ms=5)

    windows = Windows(made, backend=backend)
    windows.process(rows_batch([(1, 1, 1), (1, 12, 2)]))
    windows.watermark(9)
    windows = windows.moved(2, backend)
    assert set(WORDS) < {table.state for table in windows.stored()}
    windows.process(rows_batch([(1, 3, 3)]))
    windows.watermark(99)
    found = [(row["rows"], set(row["counts"])) for row in windows.rows]
    assert found == [(1, {1}), (2, {2}), (-1, {2}), (1, {3}), (-1, {3})]
    windows.close()


def test_what_is_refused() -> None:
    """State that no function binds, that has a name of tidegate's, or comes too late; and what is no function."""
    windows = processed(tg.Tumbling(10))
    windows.process(rows_batch([(1, 1, 1), (1, 11, 1)]))
    windows.watermark(9)
    stored = windows.stored()
    windows.close()
    calls = [FunctionCalls(function, ("k",), None, pa.int64()) for function in (Forgetful(), Impolite(), LateBinding())]
    makes = [lambda each=each: applied_operator(tg.Tumbling(10), each) for each in calls]
    with pytest.raises(ConfigurationError, match="'total' that the function does not bind"):
        Windows(makes[0], restored=stored)
    with pytest.raises(
        ConfigurationError, match="state '_tidegate_window_rows': names that begin with '_tidegate_' are reserved"
    ):
        Windows(makes[1])
    late = Windows(makes[2])
    late.process(rows_batch([(1, 1, 1)]))
    with pytest.raises(OperatorError, match="bound too late"):
        late.watermark(9)
    late.close()
    with pytest.raises(ConfigurationError, match="a plain function belongs to apply"):
        FunctionCalls(lambda rows: None, (), None, None)  # type: ignore[arg-type]
