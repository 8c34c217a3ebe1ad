"""Every operator with state, and every verb that makes one, describes what its state means."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from programs import inputs_of, nodes_of

import tidegate as tg
from tidegate import operators
from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.streams.connected_streams import ConnectedStreams
from tidegate.api.streams.sources import change_stream
from tidegate.api.streams.step import Step, StepOptions
from tidegate.api.streams.stream import KeyedStream, Stream
from tidegate.api.streams.windowed_stream import WindowedStream
from tidegate.connectors.formats.row_versions import UNCHANGED, version_schema
from tidegate.operators.functions.async_map import AsyncMap
from tidegate.operators.operator import Operator
from tidegate.operators.sinks.table_sink import PartitionedTableSink, TableSink

ROWS = pa.table({"k": [1, 2, 1], "t": [0, 1000, 2000], "v": [3, 4, 5]})
N = pa.schema({"n": pa.int64()})
Program = Callable[[Stream], Any]


class _Rows(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """Nothing."""


class _Batches(tg.ProcessFunction):
    def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> None:
        """Nothing."""


class _Two(tg.CoProcessFunction):
    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """Nothing."""

    process2 = process1


class _Rules(tg.BroadcastProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        """Nothing."""

    def process_broadcast(self, row: dict[str, Any], context: Any) -> None:
        """Nothing."""


class _KeyedRules(tg.KeyedBroadcastProcessFunction):
    process = _Rules.process
    process_broadcast = _Rules.process_broadcast


class _Window(tg.ProcessWindowFunction):
    def process(self, rows: Any, context: Any) -> dict[str, Any]:
        return {"n": rows.num_rows}


async def _call(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _keyed(stream: Stream) -> KeyedStream:
    return stream.key_by("k")


def _changes(stream: Stream) -> Stream:
    return _keyed(stream).aggregate(n=tg.count(), emit="changes")


def _right(stream: Stream) -> Stream:
    return stream.select("k", "t", w="v")


TUMBLING, CLOCK = tg.Tumbling("1s"), {"time": "processing"}

VERBS: dict[str, list[Program]] = {
    "Stream.aggregate": [
        lambda s: s.aggregate(n=tg.count(), emit="final"),
        lambda s: s.aggregate(n=tg.count()),
        lambda s: s.aggregate(n=tg.count(), emit="changes"),
        lambda s: _changes(s).aggregate(n=tg.sum("n"), emit="changes"),
        lambda s: s.aggregate(n=tg.count_distinct("v"), emit="final"),
    ],
    "KeyedStream.aggregate": [
        lambda s: _keyed(s).aggregate(n=tg.count(), emit="final"),
        lambda s: _keyed(s).aggregate(n=tg.count(), ttl="1h"),
        lambda s: _keyed(s).aggregate(n=tg.count(), m=tg.count_distinct("v"), emit="each"),
        _changes,
        lambda s: _changes(s).key_by("n").aggregate(m=tg.count(), emit="changes"),
        lambda s: _keyed(s).aggregate(n=tg.count_distinct("v"), emit="final"),
        lambda s: _keyed(s).aggregate(n=tg.count_distinct("v"), emit="changes"),
        lambda s: _keyed(s).aggregate(n=tg.count_distinct("v"), m=tg.count_distinct("v").where(pl.col("v") > 3)),
        lambda s: _changes(s).key_by("n").aggregate(m=tg.count_distinct("k"), emit="changes"),
    ],
    "Stream.process": [lambda s: s.process(_Rows(), schema=N), lambda s: s.process(_Batches(), schema=N)],
    "KeyedStream.process": [
        lambda s: _keyed(s).process(_Rows(), schema=N),
        lambda s: _keyed(s).process(_Batches(), schema=N),
        lambda s: _keyed(s).process(_Rows(), schema=N, in_order=True),
    ],
    "KeyedStream.deduplicate": [
        lambda s: _keyed(s).deduplicate(),
        lambda s: _keyed(s).deduplicate("t", keep="last"),
        lambda s: _keyed(s).deduplicate(ttl="1s"),
    ],
    "Stream.distinct": [lambda s: s.distinct("v")],
    "Stream.limit": [lambda s: s.limit(2)],
    "KeyedStream.stateful_map": [
        lambda s: _keyed(s).stateful_map(lambda n, row: (1, row), state=int, schema=ROWS.schema)
    ],
    "KeyedStream.reduce": [lambda s: _keyed(s).reduce(lambda one, other: other)],
    "KeyedStream.map_groups": [lambda s: _keyed(s).map_groups(lambda rows: {"n": rows.num_rows}, schema=N)],
    "KeyedStream.top_n": [
        lambda s: _keyed(s).top_n(2, by="v"),
        lambda s: _keyed(s).top_n(2, by="v", emit="changes"),
    ],
    "ConnectedStreams.process": [
        lambda s: _keyed(s).connect(_keyed(_right(s))).process(_Two(), schema=N),
        lambda s: s.connect(s.broadcast()).process(_Rules(), schema=N),
        lambda s: _keyed(s).connect(s.broadcast()).process(_KeyedRules(), schema=N),
    ],
    "WindowedStream.aggregate": [
        lambda s: _keyed(s).window(TUMBLING).aggregate(n=tg.count()),
        lambda s: _keyed(s).window(tg.Session("1s")).aggregate(n=tg.count()),
        lambda s: _keyed(s).window(tg.Session("v")).aggregate(n=tg.count()),
        lambda s: _keyed(s).window(tg.Count(5)).aggregate(n=tg.count()),
        lambda s: _keyed(s).window(tg.Count(5, slide=1)).aggregate(n=tg.count()),
        lambda s: _keyed(s).window(TUMBLING).aggregate(n=tg.count_distinct("v")),
        lambda s: s.window(TUMBLING).aggregate(n=tg.count()),
    ],
    "WindowedStream.apply": [
        lambda s: _keyed(s).window(TUMBLING).apply(lambda rows: {"n": rows.num_rows}, schema=N),
        lambda s: _keyed(s).window(tg.Session("1s")).apply(lambda rows: {"n": rows.num_rows}, schema=N),
        lambda s: _keyed(s).window(tg.Session("v")).apply(lambda rows: {"n": rows.num_rows}, schema=N),
        lambda s: _keyed(s).window(tg.Count(5)).apply(lambda rows: {"n": rows.num_rows}, schema=N),
        lambda s: _keyed(s).window(tg.Count(5, slide=1)).apply(lambda rows: {"n": rows.num_rows}, schema=N),
        lambda s: _keyed(s).window(TUMBLING, time="processing").apply(lambda rows: {"n": rows.num_rows}, schema=N),
    ],
    "WindowedStream.process": [lambda s: _keyed(s).window(TUMBLING).process(_Window(), schema=N)],
    "WindowedStream.top_n": [
        lambda s: _keyed(s).window(TUMBLING).top_n(2, by="v"),
        lambda s: s.window(TUMBLING).top_n(2, by="v"),
    ],
    "Stream.join": [
        lambda s: s.join(_right(s), on="k"),
        lambda s: s.join(_right(s), on="k", window=TUMBLING),
    ],
    "Stream.interval_join": [lambda s: s.interval_join(_right(s), on="k", between=(-1000, 1000))],
    "Stream.join_asof": [lambda s: s.join_asof(_right(s), on="k")],
    "Stream.join_latest": [lambda s: s.join_latest(_right(s), on="k")],
    "Stream.map_async": [lambda s: s.map_async(_call, schema=s.schema)],
}
"""Programs by the verb that makes state: each operator with state is made by one of them."""

SOURCES: dict[str, list[Program]] = {"from_kafka, with changes": [lambda s: _newest(s)]}
"""Programs of sources that add a step of their own."""

STATELESS = {
    *["allowed_lateness", "as_changes", "assign_timestamps", "bad_rows", "broadcast", "connect", "filter", "flat_map"],
    *["key_by", "lookup_join", "map", "map_batches", "rebalance", "select", "side_output", "union"],
    *["branch", "cast", "drop", "explode", "peek", "pipe", "print", "rename", "show", "where"],
    *["window", "with_columns", "dead_letters", "late_rows", "early_results"],
    *["collect", "for_each_checkpoint", "to_delta", "to_files", "to_sink", "to_table"],
    *["to_iceberg", "to_kafka", "to_postgres", "to_sql"],
}
"""Verbs whose operators keep nothing, or what tidegate's own files mean."""

SINKS = (TableSink, PartitionedTableSink)
"""They keep numbers of tidegate's own, which no program chooses."""


def _newest(stream: Stream) -> Stream:
    """The step that `from_kafka` adds for a format of change data."""
    operator = nodes_of(stream.map_batches(lambda batch: batch, schema=stream.schema))[-1].factory
    assert operator is not None
    schema = version_schema(stream.schema)
    versions = stream._then(Step(operator=operator, schema=schema, options=StepOptions("versions"), own=(UNCHANGED,)))
    return change_stream(versions, ["k"], StepOptions("changes"), "")


def _nodes(step: Program) -> list[StreamNode]:
    with tg.StreamEnvironment.local(2) as env:
        made = step(env.from_batches(ROWS, timestamp="t"))
        return nodes_of(made)


def _stateful() -> Iterator[tuple[str, StreamNode, Operator]]:
    for verb, steps in (VERBS | SOURCES).items():
        for number, step in enumerate(steps):
            for node in _nodes(step):
                if node.factory is not None and _keeps_state(operator := node.factory()):
                    yield f"{verb} {number}", node, operator


def _keeps_state(operator: Operator | type[Operator]) -> bool:
    of = operator if isinstance(operator, type) else type(operator)
    return of.snapshot is not Operator.snapshot


def _below(kind: type[Operator]) -> Iterator[type[Operator]]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)


@pytest.mark.slow
def test_every_operator_with_state_has_a_meaning() -> None:
    """Each is made by one of the verbs, and whatever these make and keeps state is described."""
    for found in pkgutil.walk_packages(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(found.name)
    kinds = {kind for kind in _below(Operator) if kind.__module__.startswith(operators.__name__) and _keeps_state(kind)}
    reached = set()
    for verb, node, operator in _stateful():
        assert node.meaning is not None, f"{verb}: {type(operator).__name__} keeps state without a meaning"
        reached.add(type(operator))
    left = {kind.__name__ for kind in kinds - reached if not kind.__subclasses__() and kind not in SINKS}
    assert not left, "no program of VERBS makes these operators: add one, with a meaning"
    assert AsyncMap in reached


@pytest.mark.slow
def test_every_verb_with_state_is_described() -> None:
    """A verb that is new stands in one of the two lists, and each program of VERBS keeps state."""
    verbs = {
        f"{owner.__name__}.{name}"
        for owner in (Stream, KeyedStream, WindowedStream, ConnectedStreams)
        for name in dir(owner)
        if not name.startswith("_") and callable(getattr(owner, name)) and name not in STATELESS
    }
    assert verbs == set(VERBS)
    made = {verb for verb, _, _ in _stateful()}
    assert made == {f"{verb} {number}" for verb, steps in (VERBS | SOURCES).items() for number in range(len(steps))}


def test_meanings_differ_where_expressions_do() -> None:
    """Two filters of one aggregate, and a calculation in place of a column."""
    texts = set()
    for aggregate in (
        tg.sum("v"),
        tg.sum(pl.col("v") * 2),
        tg.sum("v").where(pl.col("v") > 3),
        tg.sum("v").where(pl.col("v") > 4),
    ):

        def step(s: Stream, aggregate: tg.Aggregate = aggregate) -> Any:
            return _keyed(s).aggregate(x=aggregate)

        (meaning,) = [node.meaning for node in _nodes(step) if node.name == "aggregate" and node.meaning is not None]
        texts.add(meaning.parts)
    assert len(texts) == 4


class _Counts(tg.ProcessWindowFunction):
    def process(self, rows: pa.Table, context: tg.ProcessWindowContext) -> dict[str, int]:
        """How many."""
        return {"n": rows.num_rows}


BY_KEY: dict[str, Callable[[KeyedStream], Any]] = {
    "aggregate": lambda keyed: keyed.aggregate(x=tg.sum(pl.col("v") * 2)),
    "final aggregate": lambda keyed: keyed.aggregate(x=tg.sum("v"), emit="final"),
    "aggregate of each row": lambda keyed: keyed.aggregate(x=tg.sum("v"), emit="each"),
    "distinct values": lambda keyed: keyed.aggregate(x=tg.count_distinct("v"), emit="final"),
    "top_n": lambda keyed: keyed.top_n(2, by="v"),
    "deduplicate": lambda keyed: keyed.deduplicate(),
    "process": lambda keyed: keyed.process(_Rows(), schema=N),
    "process in order": lambda keyed: keyed.process(_Rows(), schema=N, in_order=True),
    "reduce": lambda keyed: keyed.reduce(lambda a, b: a),
    "stateful_map": lambda keyed: keyed.stateful_map(lambda row, n: ({"n": 1}, 1), state=int, schema=N),
    "map_groups": lambda keyed: keyed.map_groups(lambda rows: {"n": rows.num_rows}, schema=N),
    "window aggregate": lambda keyed: keyed.window(tg.Tumbling(10)).aggregate(x=tg.sum(pl.col("v") * 2)),
    "sessions": lambda keyed: keyed.window(tg.Session(10)).aggregate(x=tg.sum("v")),
    "rows": lambda keyed: keyed.window(tg.Count(3)).aggregate(x=tg.sum("v")),
    "window function": lambda keyed: keyed.window(tg.Tumbling(10)).process(_Counts(), schema=N),
    "apply": lambda keyed: keyed.window(tg.Sliding(10, 5)).apply(lambda rows: {"n": 1}, schema=N),
    "window top": lambda keyed: keyed.window(tg.Tumbling(10)).top_n(2, by="v"),
    "connected": lambda keyed: keyed.connect(keyed).process(_Two(), schema=N),
    "broadcast": lambda keyed: keyed.connect(keyed.stream.broadcast()).process(_KeyedRules(), schema=N),
}
"""Each verb of a keyed stream that makes state."""


@pytest.mark.parametrize("verb", BY_KEY)
def test_the_expression_of_a_key_is_a_part_of_the_meaning(verb: str) -> None:
    """Two expressions under one name give keys of two meanings, in every step that keeps state by key."""

    def meanings(divisor: int) -> list[tuple[str, ...]]:
        nodes = _nodes(lambda stream: BY_KEY[verb](stream.key_by((pl.col("k") % divisor).alias("part"))))
        return [tuple(part.label for part in node.meaning.parts) for node in nodes if node.meaning is not None]

    by_2, by_3 = meanings(2), meanings(3)
    assert len(by_2) == len(by_3)
    assert by_2 != by_3


@pytest.mark.parametrize(
    "query",
    [
        "SELECT k % {} AS part, count(*) AS n FROM rows GROUP BY k % {}",
        "SELECT a.k FROM rows AS a JOIN others AS b ON a.k % {} = b.k",
    ],
)
def test_keys_that_sql_computes_are_a_part_of_the_meaning(query: str) -> None:
    """GROUP BY an expression, and a join ON one."""

    def meanings(divisor: int) -> list[Any]:
        with tg.StreamEnvironment.local() as env:
            for view in ("rows", "others"):
                env.create_temporary_view(view, env.from_batches(ROWS))
            made = env.sql(query.format(divisor, divisor))
            found, left = [], inputs_of(made)
            while left:
                node = left.pop()
                found += [] if node.meaning is None else [node.meaning.parts]
                left += [before for before, _ in node.inputs]
            return found

    assert meanings(2) != meanings(3)
    assert meanings(2) == meanings(2)
