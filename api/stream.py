"""Streams: what a driver script strings together. Nothing runs before `StreamEnvironment.execute`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import polars as pl
import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.actors.operators.aggregates import Aggregate
from tidegate.actors.operators.base import Operator, OperatorContext, OperatorFactory
from tidegate.actors.operators.expressions import FilterExpr, Select, WithColumns
from tidegate.actors.operators.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.partitioning import Partitioning, PartitioningKind
from tidegate.actors.operators.process import ProcessOperator
from tidegate.actors.operators.stateless import BatchResult, FilterRows, FlatMap, Map, MapBatches, Row
from tidegate.actors.operators.table_sink import TableSink
from tidegate.actors.operators.watermarks import WatermarkGenerator, check_timestamp_column
from tidegate.process import ConnectedStreams, ProcessFunction
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.table_log import IfExists, TableInfo, TableMode
from tidegate.storage.units import parse_duration_ms
from tidegate.tables import CollectedRows, OutputTable

if TYPE_CHECKING:
    from tidegate.environment import StreamEnvironment

StreamInput = tuple[StreamNode, Partitioning | None]


class Stream:
    """Batches of rows with the same columns. `schema` is None where it is known only when the job runs.

    Every method that adds an operator takes `name` (shown to people), `uid` (names its state in checkpoints; set it on
    operators whose state must survive a changed program) and `parallelism` (default: the environment's).
    """

    def __init__(
        self,
        env: StreamEnvironment,
        inputs: tuple[StreamInput, ...],
        keyed_by: tuple[str, ...] = (),
        timestamp: str | None = None,
    ) -> None:
        self._env = env
        self._inputs = inputs
        self.timestamp = timestamp
        """Column of event time, as far as the rows have it; None where none was named."""
        self._keyed_by = keyed_by
        """Columns whose values decide in which subtask a row is; empty where that is not known."""

    @property
    def schema(self) -> pa.Schema | None:
        """Columns, if they are known already."""
        return self._inputs[0][0].schema

    @property
    def is_broadcast(self) -> bool:
        """Whether every subtask of the next operator gets all rows."""
        return all(p is not None and p.kind is PartitioningKind.BROADCAST for _, p in self._inputs)

    @property
    def environment(self) -> StreamEnvironment:
        """The environment that the stream was made in."""
        return self._env

    def map_batches(
        self,
        fn: Callable[[pa.RecordBatch], BatchResult],
        *,
        schema: pa.Schema | None = None,
        name: str = "map_batches",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call `fn` with each Arrow batch. It returns a batch, a table, a polars DataFrame, or None.

        `schema` is that of the result; give it where a table or an aggregation follows.
        """
        return self._then(lambda: MapBatches(fn, schema), schema, name, uid, parallelism)

    def map(
        self,
        fn: Callable[[Row], Mapping[str, Any]],
        *,
        schema: pa.Schema | None = None,
        name: str = "map",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call `fn` with each row as a dict; it returns the new row. Row-wise, so slower than `with_columns`."""
        return self._then(lambda: Map(fn, schema), schema, name, uid, parallelism)

    def flat_map(
        self,
        fn: Callable[[Row], Iterable[Mapping[str, Any]]],
        *,
        schema: pa.Schema | None = None,
        name: str = "flat_map",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call `fn` with each row as a dict; it returns any number of new rows."""
        return self._then(lambda: FlatMap(fn, schema), schema, name, uid, parallelism)

    def filter(
        self,
        condition: Callable[[Row], bool] | pl.Expr,
        *,
        name: str = "filter",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Keep the rows for which a polars expression, or a function of the row, is true.

        An expression must work row by row, here and in `with_columns` and `select`: ConfigurationError for `cum_sum`,
        `shift`, `over` and others that look at more than one row.
        """
        if isinstance(condition, pl.Expr):
            expression = condition
            _schema_after(FilterExpr(expression), self.schema)
            return self._then(lambda: FilterExpr(expression), self.schema, name, uid, parallelism)
        fn = condition
        return self._then(lambda: FilterRows(fn), self.schema, name, uid, parallelism)

    def with_columns(
        self, *expressions: pl.Expr, name: str = "with_columns", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Add columns computed by polars expressions, or replace those of the same name."""
        schema = _schema_after(WithColumns(*expressions), self.schema)
        return self._then(lambda: WithColumns(*expressions), schema, name, uid, parallelism)

    def select(
        self, *expressions: pl.Expr | str, name: str = "select", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Keep only these columns: names, or polars expressions."""
        schema = _schema_after(Select(*expressions), self.schema)
        return self._then(lambda: Select(*expressions), schema, name, uid, parallelism)

    def union(self, *others: Stream) -> Stream:
        """All rows of several streams of the same columns, in no particular order."""
        for other in others:
            if other._env is not self._env:
                raise ConfigurationError("union: the streams belong to different environments")
            if self.schema is not None and other.schema is not None and not self.schema.equals(other.schema):
                raise ConfigurationError(
                    f"union: the streams have different columns: {_columns(self.schema)} and {_columns(other.schema)}"
                )
        timestamp = self.timestamp if all(other.timestamp == self.timestamp for other in others) else None
        return Stream(self._env, tuple(i for stream in (self, *others) for i in stream._inputs), (), timestamp)

    def connect(self, other: Stream | KeyedStream) -> ConnectedStreams:
        """This stream and another one, for one operator to process: `a.connect(b).key_by("k", "k2").process(...)`."""
        return ConnectedStreams(self, other)

    def assign_timestamps(
        self,
        column: str,
        max_out_of_orderness: str | timedelta | int = 0,
        *,
        name: str = "assign_timestamps",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Take event time from a column: a timestamp, a date, or int64 milliseconds since 1970.

        After each batch a watermark says that no row with a timestamp more than `max_out_of_orderness` (a duration)
        before the greatest so far is expected any more. It takes the place of earlier event time.
        """
        if self.schema is not None:
            check_timestamp_column(self.schema, column)
        delay_ms = parse_duration_ms(max_out_of_orderness, setting="max_out_of_orderness")
        # In the subtasks that make the rows: a watermark is best where the order is still that of the source.
        parallelism = parallelism if parallelism is not None else self._inputs[0][0].parallelism
        timed = self._then(lambda: WatermarkGenerator(column, delay_ms), self.schema, name, uid, parallelism)
        return Stream(self._env, timed._inputs, (), column)

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: pa.Schema | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row. Without key_by there is neither keyed state nor timers.

        `schema` is that of the rows that it returns; give it where a table, an aggregation or a key follows.
        """
        timestamps = (self.timestamp,)
        ProcessOperator(function, ((),), timestamps, schema)
        return self._then(lambda: ProcessOperator(function, ((),), timestamps, schema), schema, name, uid, parallelism)

    def rebalance(self) -> Stream:
        """Deal batches out evenly over the subtasks of the next operator."""
        return self._partitioned(Partitioning(PartitioningKind.REBALANCE))

    def broadcast(self) -> Stream:
        """Send every batch to every subtask of the next operator."""
        return self._partitioned(Partitioning(PartitioningKind.BROADCAST))

    def key_by(self, *keys: str) -> KeyedStream:
        """Send rows of the same key to the same subtask. Keys are columns: ints, floats, strings, dates, nulls."""
        if not keys:
            raise ConfigurationError("key_by needs at least one column")
        if len(set(keys)) < len(keys):
            raise ConfigurationError(f"key_by({', '.join(keys)}): a column is named twice")
        if self.schema is not None:
            for key in keys:
                if key not in self.schema.names:
                    raise ConfigurationError(f"key_by: there is no column {key!r}; there are {_columns(self.schema)}")
        return KeyedStream(self, keys)

    def to_table(
        self,
        url: str,
        *,
        mode: TableMode = "append",
        keys: tuple[str, ...] | list[str] = (),
        if_exists: IfExists = "error",
        name: str = "to_table",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> OutputTable:
        """Write to a table, exactly once: rows are visible when the checkpoint that covers them is complete.

        mode="append" keeps every row; mode="upsert" keeps the newest row of each key in `keys`; use it for running
        aggregates. Rows of a key keep their order as long as one subtask makes them. A new job refuses a table that has
        rows unless `if_exists` says "append" or "overwrite"; a job restored from a checkpoint goes on where it was.
        """
        info = self._table_info(mode, tuple(keys), name)
        table = OutputTable(url, info, if_exists, self._env.open_store)
        self._env.add_table(table)
        rows = self if mode == "append" else self._together(tuple(keys), parallelism)
        rows._then(lambda: TableSink(mode, tuple(keys)), self.schema, name, uid, parallelism, table=table.url)
        return table

    def collect(self, *, name: str = "collect", uid: str | None = None) -> CollectedRows:
        """Collect the rows of a bounded job, exactly once; read them with `to_arrow()` after it."""
        rows = CollectedRows(self._env.new_uid(name, uid), self._table_info("append", (), name), self._env.open_store)
        self._env.add_collected(rows)
        self._then(lambda: TableSink("append", ()), self.schema, name, rows.uid, None, table=rows.placeholder)
        return rows

    def _table_info(self, mode: TableMode, keys: tuple[str, ...], name: str) -> TableInfo:
        if self.schema is None:
            raise ConfigurationError(
                f"{name}: the columns of the stream are not known yet; give schema= to the map, flat_map or "
                "map_batches before it"
            )
        return TableInfo.of(self.schema, mode, keys)

    def _together(self, keys: tuple[str, ...], parallelism: int | None) -> Stream:
        """This stream, so partitioned that rows of the same `keys` meet in one subtask of the next operator."""
        upstream, partitioning = self._inputs[0]
        parallelism = parallelism if parallelism is not None else self._env.parallelism
        stay = len(self._inputs) == 1 and partitioning is None and upstream.parallelism == parallelism
        if stay and self._keyed_by and set(self._keyed_by) <= set(keys):
            return self
        return self._partitioned(Partitioning(PartitioningKind.HASH, keys))

    def _partitioned(self, partitioning: Partitioning) -> Stream:
        return Stream(self._env, tuple((node, partitioning) for node, _ in self._inputs), (), self.timestamp)

    def joined_by(
        self,
        other: Stream,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        name: str,
        uid: str | None,
        parallelism: int | None,
    ) -> Stream:
        """What an operator with two inputs, this stream and another one, makes of them."""
        return self._then(factory, schema, name, uid, parallelism, second=other)

    def _then(
        self,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        name: str,
        uid: str | None,
        parallelism: int | None,
        table: str | None = None,
        second: Stream | None = None,
    ) -> Stream:
        inputs = (self._inputs, () if second is None else second._inputs)
        node = StreamNode(
            uid=self._env.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._env.parallelism,
            schema=schema,
            factory=factory,
            table=table,
            inputs=inputs[0] + inputs[1],
            ordinals=(0,) * len(inputs[0]) + (1,) * len(inputs[1]),
        )
        self._env.add_node(node)
        kept = schema is None or self.timestamp in schema.names
        return Stream(self._env, ((node, None),), (), self.timestamp if kept else None)


class KeyedStream:
    """A stream partitioned by key."""

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self.stream = stream
        """The rows, not partitioned yet."""
        self.keys = keys
        """The key columns."""

    def partitioned(self) -> Stream:
        """The rows, partitioned by key on their way into the next operator."""
        return self.stream._partitioned(Partitioning(PartitioningKind.HASH, self.keys))

    def connect(self, other: KeyedStream | Stream) -> ConnectedStreams:
        """This stream and another keyed one, for one operator to process: rows of one key meet, and share its state.

        Or a broadcast one, all of whose rows meet all keys: `connect(rules.broadcast())`.
        """
        return ConnectedStreams(self, other)

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: pa.Schema | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row, with state and timers of the row's key.

        `schema` is that of the rows that it returns; give it where a table, an aggregation or a key follows.
        """
        keys, timestamps = (self.keys,), (self.stream.timestamp,)
        ProcessOperator(function, keys, timestamps, schema)
        return self.partitioned()._then(
            lambda: ProcessOperator(function, keys, timestamps, schema), schema, name, uid, parallelism
        )

    def aggregate(
        self,
        *,
        emit: Literal["update", "final"] = "update",
        name: str = "aggregate",
        uid: str | None = None,
        parallelism: int | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregate each key: `aggregate(n=tg.count(), worst=tg.max("delay"))`.

        emit="update": after each batch one row for every key in it, with the values so far. emit="final": one row a
        key when a bounded input has ended. The columns are the keys, then the aggregates.
        """
        keys, schema = self.keys, self.stream.schema
        operator = KeyedAggregate(keys, aggregates, emit)
        output = None if schema is None else operator.output_schema(schema)
        result = self.partitioned()._then(
            lambda: KeyedAggregate(keys, aggregates, emit), output, name, uid, parallelism
        )
        return Stream(result._env, result._inputs, keyed_by=keys, timestamp=result.timestamp)


def _schema_after(operator: Operator, schema: pa.Schema | None) -> pa.Schema | None:
    """Columns that polars expressions make, found by evaluating them on no rows. OperatorError if they cannot be."""
    if schema is None:
        return None
    operator.open(OperatorContext(OperatorUid("plan"), "plan", SubtaskIndex(0), 1, 1), ())
    emitted: list[pa.RecordBatch] = []
    operator.process(pa.RecordBatch.from_pylist([], schema), emitted.append)
    return emitted[0].schema if emitted else schema


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
