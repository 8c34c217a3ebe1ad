"""`Stream`: what a driver script strings together. Nothing runs before `StreamEnvironment.execute`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.actors.operators.batch_rows import check_batch_rows
from tidegate.actors.operators.batches.expressions import FilterExpr, Select, WithColumns
from tidegate.actors.operators.batches.stateless import BatchResult, FilterRows, FlatMap, Map, MapBatches, Row
from tidegate.actors.operators.batches.table_sink import TableSink
from tidegate.actors.operators.batches.watermark_generator import WatermarkGenerator, check_timestamp_column
from tidegate.actors.operators.operator import OperatorFactory
from tidegate.actors.operators.rows.process_operator import ProcessOperator
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.api.given_names import location
from tidegate.api.keyed_stream import KeyedStream
from tidegate.api.output_tables import CollectedRows, OutputTable
from tidegate.api.process_functions import ConnectedStreams, ProcessFunction
from tidegate.api.stream_columns import (
    columns_of,
    computed_columns,
    name_after,
    passed_columns,
    reads_only,
    schema_after,
)
from tidegate.api.updating import Updating
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.tables.table_log import IfExists, TableInfo, TableMode
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    from tidegate.api.environment import StreamEnvironment

log = logging.getLogger(__name__)

StreamInput = tuple[StreamNode, Partitioning | None]


class Stream:
    """Batches of rows with the same columns. `schema` is None where it is known only when the job runs.

    Every method that adds an operator takes `name` (shown to people), `uid` (names its state in checkpoints; set it on
    operators whose state must survive a changed program) and `parallelism` (default: the environment's). Those that
    call a function with rows take `batch_rows`: the least and the most rows of a call (see `docs/batches.md`).
    """

    def __init__(
        self,
        env: StreamEnvironment,
        inputs: tuple[StreamInput, ...],
        keyed_by: tuple[str, ...] = (),
        timestamp: str | None = None,
        updating: Updating | None = None,
    ) -> None:
        self._env = env
        self._inputs = inputs
        self._updating = updating
        """What the rows are versions of; None where each row stands for itself."""
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
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Call `fn` with each Arrow batch. It returns a batch, a table, a polars DataFrame, or None.

        `schema` is that of the result; give it where a table or an aggregation follows. Behind an aggregate that emits
        updates `fn` must keep every row and its keys.
        """
        updating = self._updates_with(schema, name)
        return self._then(lambda: MapBatches(fn, schema), schema, name, uid, parallelism, batch_rows, updating=updating)

    def map(
        self,
        fn: Callable[[Row], Mapping[str, Any]],
        *,
        schema: pa.Schema | None = None,
        name: str = "map",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Call `fn` with each row as a dict; it returns the new row. Row-wise, so slower than `with_columns`."""
        updating = self._updates_with(schema, name)
        return self._then(lambda: Map(fn, schema), schema, name, uid, parallelism, batch_rows, updating=updating)

    def flat_map(
        self,
        fn: Callable[[Row], Iterable[Mapping[str, Any]]],
        *,
        schema: pa.Schema | None = None,
        name: str = "flat_map",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Call `fn` with each row as a dict; it returns any number of new rows."""
        return self._then(lambda: FlatMap(fn, schema), schema, name, uid, parallelism, batch_rows)

    def filter(
        self,
        condition: Callable[[Row], bool] | pl.Expr,
        *,
        name: str = "filter",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Keep the rows for which a polars expression, or a function of the row, is true.

        An expression must work row by row, here and in `with_columns` and `select`: ConfigurationError for `cum_sum`,
        `shift`, `over` and others that look at more than one row.
        """
        if not isinstance(condition, pl.Expr):
            return self._then(partial(FilterRows, condition), self.schema, name, uid, parallelism, batch_rows)
        schema_after(FilterExpr(condition), self.schema)
        updating = self._updating
        if updating is not None and not reads_only(condition, updating.keys):
            raise updating.refuse(repr(name), "it would drop newer versions of rows whose old ones have passed")
        return self._then(partial(FilterExpr, condition), self.schema, name, uid, parallelism, updating=updating)

    def with_columns(
        self, *expressions: pl.Expr, name: str = "with_columns", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Add columns computed by polars expressions, or replace those of the same name."""
        schema = schema_after(WithColumns(*expressions), self.schema)
        untouched = {column: column for column in self._own_columns() - computed_columns(expressions, self.schema)}
        passed = {**untouched, **passed_columns(expressions, self.schema)}
        return self._computed(lambda: WithColumns(*expressions), schema, passed, name, uid, parallelism)

    def select(
        self, *expressions: pl.Expr | str, name: str = "select", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Keep only these columns: names, or polars expressions. Event time follows its column to another name."""
        schema = schema_after(Select(*expressions), self.schema)
        passed = passed_columns(expressions, self.schema)
        return self._computed(lambda: Select(*expressions), schema, passed, name, uid, parallelism)

    def union(self, *others: Stream) -> Stream:
        """All rows of several streams of the same columns, in no particular order."""
        for stream in (self, *others):
            if stream._updating is not None:
                raise stream._updating.refuse("union")
        for other in others:
            if other._env is not self._env:
                raise ConfigurationError("union: the streams belong to different environments")
            if self.schema is not None and other.schema is not None and not self.schema.equals(other.schema):
                mine, theirs = columns_of(self.schema), columns_of(other.schema)
                raise ConfigurationError(f"union: the streams have different columns: {mine} and {theirs}")
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
        updating = self._updating
        timed = self._then(
            lambda: WatermarkGenerator(column, delay_ms), self.schema, name, uid, parallelism, updating=updating
        )
        return Stream(self._env, timed._inputs, (), column, updating)

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: pa.Schema | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
    ) -> Stream:
        """Call a `tg.ProcessFunction` with each row. Without key_by there is neither keyed state nor timers.

        `schema` is that of the rows that it returns; give it where a table, an aggregation or a key follows.
        """
        timestamps = (self.timestamp,)
        (factory := partial(ProcessOperator, function, ((),), timestamps, schema))()
        return self._then(factory, schema, name, uid, parallelism, batch_rows)

    def rebalance(self) -> Stream:
        """Deal batches out evenly over the subtasks of the next operator."""
        if self._updating is not None:
            raise self._updating.refuse("rebalance", "versions of one row would overtake each other")
        return self._partitioned(Partitioning(PartitioningKind.REBALANCE))

    def broadcast(self) -> Stream:
        """Send every batch to every subtask of the next operator."""
        if self._updating is not None:
            raise self._updating.refuse("broadcast")
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
                    raise ConfigurationError(f"key_by: there is no column {key!r}; there are {columns_of(self.schema)}")
        return KeyedStream(self, keys)

    def to_table(
        self,
        url: str | os.PathLike[str],
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
        aggregates, whose keys it must have. Rows of a key keep their order as long as one subtask makes them. A new job
        refuses a table that has rows unless `if_exists` says "append" or "overwrite"; a job restored from a checkpoint
        goes on where it was. Old rows are replaced with the first completed checkpoint, in one step. A table whose
        owner lives is refused.
        """
        info = self._table_info(mode, tuple(keys), name)
        if self._updating is not None:
            self._updating.check_upsert(repr(name), tuple(keys))
        table = OutputTable(location(url, f"to_table {name!r}"), info, if_exists, self._env.open_store)
        self._env.add_table(table)
        rows = self if mode == "append" else self._together(tuple(keys), parallelism)
        sink = partial(TableSink, mode, tuple(keys))
        rows._then(sink, self.schema, name, uid, parallelism, table=table.url, updating=self._updating)
        return table

    def collect(self, *, name: str = "collect", uid: str | None = None) -> CollectedRows:
        """Collect the rows of a bounded job, exactly once; read them with `to_arrow()` after it.

        Of an aggregate that emits updates these are all versions of its rows.
        """
        rows = CollectedRows(self._env.new_uid(name, uid), self._table_info("append", (), name), self._env.open_store)
        self._env.add_collected(rows)
        sink = partial(TableSink, "append", ())
        self._then(sink, self.schema, name, rows.uid, None, table=rows.placeholder, updating=self._updating)
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
        inputs = tuple((node, partitioning) for node, _ in self._inputs)
        return Stream(self._env, inputs, (), self.timestamp, self._updating)

    def _keyed(self, keys: tuple[str, ...], updates: bool) -> Stream:
        """This stream of an aggregate: a row of a key comes from one subtask, as one of many versions or for good."""
        node = self._inputs[0][0]
        updating = Updating(keys, f"{node.name!r} (uid {node.uid!r})") if updates else None
        return Stream(self._env, self._inputs, keys, self.timestamp, updating)

    def _in_order(self, parallelism: int | None) -> Stream:
        """This stream, so partitioned that versions of a row do not overtake each other at another parallelism."""
        upstream, partitioning = self._inputs[0]
        parallelism = parallelism if parallelism is not None else self._env.parallelism
        if self._updating is None or partitioning is not None or upstream.parallelism == parallelism:
            return self
        return self._partitioned(Partitioning(PartitioningKind.HASH, self._updating.keys))

    def _own_columns(self) -> set[str]:
        """Columns of the stream, as far as they matter and are known."""
        if self.schema is not None:
            return set(self.schema.names)
        keys = () if self._updating is None else self._updating.keys
        return {*keys, *(() if self.timestamp is None else (self.timestamp,))}

    def _updates_with(self, schema: pa.Schema | None, name: str) -> Updating | None:
        """The updates after a function that keeps each row; its result must have the keys."""
        if self._updating is None or schema is None:
            return self._updating
        return self._updating.renamed(repr(name), {column: column for column in schema.names})

    def _computed(
        self,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        passed: Mapping[str, str],
        name: str,
        uid: str | None,
        parallelism: int | None,
    ) -> Stream:
        """What expressions make of the rows, of which they pass some columns on as they are."""
        updating = None if self._updating is None else self._updating.renamed(repr(name), passed)
        result = self._then(factory, schema, name, uid, parallelism, updating=updating)
        renamed = None if self.timestamp is None else name_after(self.timestamp, passed)
        if self.timestamp is not None and renamed is None and result.timestamp is None:
            said = "%s (uid %r) drops the column of event time, %r: rows after it have no timestamp; keep the column"
            log.warning(said, name, result._inputs[0][0].uid, self.timestamp)
        return Stream(self._env, result._inputs, (), renamed or result.timestamp, updating)

    def _then(
        self,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        name: str,
        uid: str | None,
        parallelism: int | None,
        batch_rows: tuple[int, int] | None = None,
        table: str | None = None,
        second: Stream | None = None,
        updating: Updating | None = None,
    ) -> Stream:
        """The stream behind a new operator. `updating` says that it can follow updates, and what its own rows are."""
        for stream in (self,) if second is None else (self, second):
            if stream._updating is not None and updating is None:
                raise stream._updating.refuse(repr(name))
        inputs = (self._in_order(parallelism)._inputs, () if second is None else second._inputs)
        node = StreamNode(
            uid=self._env.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._env.parallelism,
            schema=schema,
            factory=factory,
            table=table,
            inputs=inputs[0] + inputs[1],
            ordinals=(0,) * len(inputs[0]) + (1,) * len(inputs[1]),
            batch_rows=check_batch_rows(name, batch_rows),
        )
        self._env.add_node(node)
        kept = schema is None or self.timestamp in schema.names
        return Stream(self._env, ((node, None),), (), self.timestamp if kept else None, updating)
