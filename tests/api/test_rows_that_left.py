"""A row, a batch or a value that a function has handed over does not change with the function's own object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidegate as tg

_OUT = pa.schema({"y": pa.int64(), "more": pa.list_(pa.int64()), "deep": pa.struct({"n": pa.list_(pa.int64())})})
_DATA = pa.table({"k": [0, 0, 0], "x": [1, 2, 3]})
_X = pa.schema({"x": pa.int64()})
_SIDE = tg.OutputTag("side", _OUT)


def _twice(number: int) -> Iterator[dict[str, Any]]:
    """One dict, two rows: `number` and `-number`, everywhere in it."""
    row: dict[str, Any] = {"y": number, "more": [number], "deep": {"n": [number]}}
    yield row
    row["y"] = -number
    row["more"][0] = -number
    row["deep"]["n"][0] = -number
    yield row


class _Process(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        return _twice(row["x"])


class _OnTimer(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        context.timer_service.register_event_time_timer(row["x"])

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        return _twice(timestamp)


class _Finish(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        return None

    def finish(self, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        for number in (1, 2, 3):
            yield from _twice(number)


class _Aside(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        for out in _twice(row["x"]):
            context.emit("side", out)


class _Window(tg.ProcessWindowFunction):
    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> Iterator[dict[str, Any]]:
        for number in rows["x"].to_pylist():
            yield from _twice(number)


class _InState(tg.ProcessFunction):
    """What was put into state, and what was got from it, are the function's own again."""

    def open(self, context: tg.ProcessContext) -> None:
        self.value = context.state(tg.ValueState("value", pa.list_(pa.int64())))
        self.list = context.state(tg.ListState("list", pa.struct({"n": pa.list_(pa.int64())})))
        self.map = context.state(tg.MapState("map", str, list[int]))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        value = [row["x"]]
        element = {"n": value}
        self.value.update(value)
        self.list.update([element])
        self.map.put("a", value)
        value[0] = 0
        for got in (self.value.value(), self.list.get()[0]["n"], self.map.get("a"), next(iter(self.list))["n"]):
            got[0] = -1
        yield {"y": row["x"], "more": self.value.value(), "deep": self.list.get()[0]}
        yield {"y": -row["x"], "more": [-n for n in self.map.get("a")], "deep": {"n": [-row["x"]]}}


def _shared_list(stream: tg.Stream) -> tg.Stream:
    rows: list[dict[str, Any]] = []

    def reuse(row: dict[str, Any]) -> list[dict[str, Any]]:
        rows[:] = [dict(out, more=list(out["more"]), deep={"n": list(out["more"])}) for out in _twice(row["x"])]
        return rows

    return stream.flat_map(reuse, schema=_OUT)


def _shared_dict(stream: tg.Stream) -> tg.Stream:
    shared: dict[str, Any] = {"more": [0], "deep": {"n": [0]}}

    def reuse(row: dict[str, Any]) -> dict[str, Any]:
        shared["y"] = shared["more"][0] = shared["deep"]["n"][0] = row["y"]
        return shared

    return stream.flat_map(lambda row: _twice(row["x"]), schema=_OUT).map(reuse, schema=_OUT)


STEPS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "flat_map": lambda s: s.flat_map(lambda row: _twice(row["x"]), schema=_OUT),
    "flat_map, without a schema": lambda s: s.flat_map(lambda row: _twice(row["x"])).map_batches(
        lambda batch: batch, schema=_OUT
    ),
    "flat_map, failures aside": lambda s: s.flat_map(lambda row: _twice(row["x"]), schema=_OUT, errors_to="bad"),
    "flat_map, one list": _shared_list,
    "map": _shared_dict,
    "process": lambda s: s.process(_Process(), schema=_OUT),
    "process, with a key": lambda s: s.key_by("k").process(_Process(), schema=_OUT),
    "on_timer": lambda s: s.key_by("k").process(_OnTimer(), schema=_OUT),
    "finish": lambda s: s.process(_Finish(), schema=_OUT),
    "side output": lambda s: s.process(_Aside(), schema=_OUT, side_outputs=[_SIDE]).side_output(_SIDE),
    "window": lambda s: s.window(tg.Count(3)).process(_Window(), schema=_OUT),
    "apply": lambda s: s.window(tg.Count(3)).apply(
        lambda rows: (row for x in rows["x"].to_pylist() for row in _twice(x)), schema=_OUT
    ),
    "state": lambda s: s.key_by("k").process(_InState(), schema=_OUT),
}


@pytest.mark.parametrize("step", STEPS)
def test_a_row_that_left_stays_as_it_was(step: str) -> None:
    """Each row shows what was in it when it was handed over, in lists and dicts within it as well."""
    with tg.StreamEnvironment.local(1) as env:
        out = STEPS[step](env.from_batches(_DATA, splits=1)).collect()
        env.execute("left", progress="off").wait()
    expected = [{"y": n, "more": [n], "deep": {"n": [n]}} for x in (1, 2, 3) for n in (x, -x)]
    assert out.to_arrow().select(["y", "more", "deep"]).to_pylist() == expected


class _Buffer(tg.BatchFunction):
    """A model that writes into one buffer."""

    def open(self, context: Any) -> None:
        self.out = np.zeros(100, dtype=np.int64)

    def process(self, batch: pa.RecordBatch) -> Any:
        view = self.out[: batch.num_rows]
        np.multiply(batch["x"].to_numpy(), 10, out=view)
        return pa.record_batch([view], names=["x"])


class _BufferWithState(tg.ProcessFunction):
    """The same beside state, whose values are views of the buffer too."""

    def open(self, context: tg.ProcessContext) -> None:
        self.out = np.zeros(100, dtype=np.int64)
        self.last = context.state(tg.ValueState("last", pa.int64()))

    def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> pa.RecordBatch:
        before = self.last.get_many().fill_null(-1)
        view = self.out[: batch.num_rows]
        np.multiply(batch["x"].to_numpy(), 10, out=view)
        self.last.put_many(view)
        view += 1
        after = self.last.get_many().to_pylist()
        view -= 1
        assert after == view.tolist(), before
        return pa.record_batch([view], names=["x"])


class _BufferOfSource:
    """A source whose reader fills one buffer."""

    schema = pa.schema({"x": pa.int64()})

    def splits(self) -> list[tg.SourceSplit]:
        return [tg.SourceSplit("all", b"", 12)]

    def reader(self) -> _BufferOfSource:
        self.buffer = np.zeros(4, dtype=np.int64)
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        rows = min(4, rows_max, 12 - offset)
        self.buffer[:rows] = np.arange(offset, offset + rows) * 10
        batch = pa.record_batch([self.buffer[:rows]], schema=self.schema)
        return tg.ReadResult(batch, offset + rows, offset + rows >= 12)

    def close(self) -> None:
        return None


class _BufferOfAggregate(tg.BatchAggregateFunction):
    """A sum whose state and result are views of one buffer."""

    state = pa.schema({"n": pa.int64()})
    output = pa.int64()
    initial = {"n": 0}  # noqa: RUF012

    def _view(self, values: Any) -> pa.Array:
        if not hasattr(self, "out"):
            self.out = np.zeros(100, dtype=np.int64)
        self.out[: len(values)] = values
        return pa.array(self.out[: len(values)])

    def accumulate(self, state: pa.RecordBatch, groups: Any, *columns: pa.Array) -> Any:
        totals = state["n"].to_numpy().copy()
        np.add.at(totals, groups, columns[0].to_numpy())
        return {"n": self._view(totals)}

    def merge(self, state: pa.RecordBatch, groups: Any, other: pa.RecordBatch) -> Any:
        return self.accumulate(state, groups, other["n"])

    def result(self, state: pa.RecordBatch) -> pa.Array:
        return self._view(state["n"].to_numpy() * 10)


_LONG = pa.table({"x": range(12)})
BUFFERS: dict[str, Callable[[tg.StreamEnvironment], tg.Stream]] = {
    "map_batches": lambda env: env.from_batches(_LONG, splits=1).map_batches(_Buffer(), schema=_X, batch_rows=(1, 4)),
    "map_batches, a table": lambda env: env.from_batches(_LONG, splits=1).map_batches(
        _TableOf(_Buffer()), schema=_X, batch_rows=(1, 4)
    ),
    "process_batch": lambda env: (
        env.from_batches(_LONG, splits=1)
        .with_columns(k="x")
        .key_by("k")
        .process(_BufferWithState(), schema=_BufferOfSource.schema)
    ),
    "a source": lambda env: env.from_source(_BufferOfSource()),  # type: ignore[arg-type]
    "udaf": lambda env: (
        env.from_batches(_LONG, splits=1)
        .with_columns(k="x")
        .key_by("k")
        .window(tg.Count(1))
        .aggregate(x=tg.udaf(_BufferOfAggregate(), "x"))
        .select("x")
    ),
}


class _TableOf(tg.BatchFunction):
    def __init__(self, inner: _Buffer) -> None:
        self.inner = inner

    def open(self, context: Any) -> None:
        self.inner.open(context)

    def process(self, batch: pa.RecordBatch) -> Any:
        return pa.Table.from_batches([self.inner.process(batch)])


@pytest.mark.parametrize("step", BUFFERS)
def test_a_buffer_may_be_used_again(step: str) -> None:
    """Batches that are views of one NumPy buffer keep their values when the buffer is written to again."""
    with tg.StreamEnvironment.local(
        1, config={"task.merged-rows": 4}, options=tg.DataPlaneOptions(source_rows_max=4)
    ) as env:
        out = BUFFERS[step](env).collect()
        env.execute("left", progress="off").wait()
    assert sorted(out.to_arrow()["x"].to_pylist()) == [10 * x for x in range(12)]


def test_rows_in_memory_belong_to_the_job() -> None:
    """A NumPy array behind a table may change once `from_batches` has it."""
    own = np.arange(5)
    with tg.StreamEnvironment.local(1) as env:
        out = env.from_batches(pa.table({"x": own}), splits=1).collect()
        own[:] = -1
        env.execute("left", progress="off").wait()
    assert out.to_arrow()["x"].to_pylist() == [0, 1, 2, 3, 4]


def test_the_results_of_asynchronous_calls_are_copied() -> None:
    """A call that goes on with one shared dict changes no result that has come before."""
    shared: dict[str, Any] = {"more": [0]}

    async def reuse(row: dict[str, Any]) -> dict[str, Any]:
        shared["x"] = shared["more"][0] = row["x"]
        return shared

    schema = pa.schema({"x": pa.int64(), "more": pa.list_(pa.int64())})
    with tg.StreamEnvironment.local(1) as env:
        out = env.from_batches(_LONG, splits=1).map_async(reuse, schema=schema).collect()
        env.execute("left", progress="off").wait()
    assert out.to_arrow().to_pylist() == [{"x": x, "more": [x]} for x in range(12)]
