"""`StreamSteps`: the methods that turn a stream into another of the same kind, such as maps, filters and event time.

`Stream` (`stream.py`) inherits them and adds those that lead to keyed streams, connected streams and tables. A method
only adds an operator to the `Program`, and checks what can be checked before the job runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.program import Program
from tidegate.api.streams.steps.columns import computed_columns, passed_columns, schema_after, time_after
from tidegate.api.streams.steps.event_time_use import gives_other_times
from tidegate.api.streams.steps.given import check_function
from tidegate.api.streams.steps.meanings import column_texts, computed_text, with_computed_keys
from tidegate.api.streams.steps.method_checks import check_methods
from tidegate.api.streams.steps.named_columns import expressions_and_options
from tidegate.api.streams.steps.other_names import STREAMS, OtherNames
from tidegate.api.streams.steps.slot_options import SlotOptions, slot_of
from tidegate.api.streams.steps.updating import Updating, after_function
from tidegate.api.tables.shown_rows import html_columns
from tidegate.operators.batch_rows import check_batch_rows
from tidegate.operators.functions.async_map import AsyncFunction
from tidegate.operators.functions.batch_functions import (
    BatchFunction,
    BatchResult,
    FilterRows,
    FlatMap,
    Map,
    Row,
    batch_operator,
)
from tidegate.operators.functions.failing_rows import (
    GuardedFilter,
    GuardedFlatMap,
    GuardedMap,
    GuardedMapBatches,
    error_tag,
)
from tidegate.operators.functions.process_batches import process_operator
from tidegate.operators.functions.process_functions import ProcessFunction
from tidegate.operators.local_aggregation.local_aggregation import LocalAggregation
from tidegate.operators.operator import OperatorFactory
from tidegate.operators.sinks.sink import Sink
from tidegate.operators.watermarks.kept_time import KeptTime
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.protocol.side_outputs import OutputTag
from tidegate.storage.checkpoints.state_meaning import StateMeaning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.polars_frames import is_polars_expression
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema

if TYPE_CHECKING:
    import polars as pl

log = logging.getLogger(__name__)

StreamInput = tuple[StreamNode, Partitioning | None]


class StreamSteps(OtherNames):
    """Batches of rows with the same columns, as they pass from operator to operator."""

    _other_names = STREAMS

    def __init__(
        self,
        program: Program,
        inputs: tuple[StreamInput, ...],
        keyed_by: tuple[str, ...] = (),
        timestamp: str | None = None,
        updating: Updating | None = None,
        errors_of: StreamNode | None = None,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._updating = updating
        """Set if a row replaces earlier ones with its keys; None if each row stands for itself."""
        self.timestamp = timestamp
        """The column of event time; None if none was named, or a step has dropped it."""
        self._keyed_by = keyed_by
        """The key columns by which the rows are spread over subtasks already; empty if that is not known."""
        self._errors_of = errors_of
        """A step before the last one that sets rows aside in its name; None if there is none."""

    @property
    def schema(self) -> pa.Schema | None:
        """The columns; None if they are known only when the job runs."""
        return self._inputs[0][0].schema

    def __repr__(self) -> str:
        columns = "columns known when the job runs" if self.schema is None else columns_text(self.schema)
        return f"{type(self).__name__}({self._inputs[0][0].uid!r}: {columns})"

    def _repr_html_(self) -> str:
        """The columns and their types, for notebooks."""
        return html_columns(f"{type(self).__name__} {self._inputs[0][0].uid}", self.schema)

    @property
    def _input_parallelism(self) -> int:
        """Subtasks of the operator before: a step with as many is chained to it."""
        return self._inputs[0][0].parallelism

    @property
    def _is_broadcast(self) -> bool:
        """Whether every subtask of the next operator gets all rows."""
        return all(p is not None and p.kind is PartitioningKind.BROADCAST for _, p in self._inputs)

    def map_batches(
        self,
        fn: Callable[[pa.RecordBatch], BatchResult] | BatchFunction,
        *,
        schema: SchemaLike | None = None,
        name: str = "map_batches",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Call `fn` with each Arrow batch. It returns a batch, a table, a polars DataFrame, or None for no rows.

        A `tg.BatchFunction` is opened once in each subtask, which loads a model, and then called with the batches.

        `schema` is that of the result; give it if a table or an aggregate follows. After an aggregate that emits
        updates, `fn` must keep every row and its keys.

        With `errors_to`, a batch for which `fn` raises is halved and tried again, down to single rows. Those that fail
        go to the side output of that name, as in `map`. What `fn` does besides returning rows is then done again.
        """
        if not isinstance(fn, BatchFunction):
            check_function(fn, name, "a batch, or an object of a class derived from tg.BatchFunction")
        schema = as_schema(schema, f"{name}(schema=)")
        updating = after_function(self._updating, schema, repr(name))
        factory = batch_operator(fn, schema, name)
        if errors_to is not None:
            tag = error_tag(errors_to, self.schema, name)
            made = partial(GuardedMapBatches, factory, tag)
            return self._then(made, schema, name, uid, parallelism, batch_rows, slot, side_outputs=(tag,))
        return self._then(factory, schema, name, uid, parallelism, batch_rows, slot, updating=updating)

    def map(
        self,
        fn: Callable[[Row], Mapping[str, Any]],
        *,
        schema: SchemaLike | None = None,
        traced: bool = True,
        name: str = "map",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Call `fn` with each row as a dict; it returns the new row.

        If `fn` only calculates and compares, it is computed for whole batches where that gives the same
        (`docs/batches.md`); `traced=False` calls it with each row in any case.
        With `errors_to` a row for which `fn` raises does not fail the job: it goes to the side output of that name,
        with the column `error` (see `Stream.side_output`).
        """
        check_function(fn, name, "a row, a dict")
        schema = self._mapped_schema(fn, schema, traced, name)
        kept = self._kept_time(schema)
        if errors_to is not None:
            tag = error_tag(errors_to, self.schema, name)
            made = partial(GuardedMap, fn, schema, tag, kept)
            return self._then(
                made, schema, name, uid, parallelism, batch_rows, slot, side_outputs=(tag,), kept_time=kept
            )
        mapping, updating = partial(Map, fn, schema, traced, kept), after_function(self._updating, schema, repr(name))
        return self._then(mapping, schema, name, uid, parallelism, batch_rows, slot, updating=updating, kept_time=kept)

    def flat_map(
        self,
        fn: Callable[[Row], Iterable[Mapping[str, Any]]],
        *,
        schema: SchemaLike | None = None,
        name: str = "flat_map",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Call `fn` with each row as a dict; it returns any number of new rows. `errors_to` as in `map`."""
        check_function(fn, name, "a row, a dict")
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(fn, many=True)
        kept = self._kept_time(schema)
        if errors_to is not None:
            tag = error_tag(errors_to, self.schema, name)
            made = partial(GuardedFlatMap, fn, schema, tag, kept)
            return self._then(
                made, schema, name, uid, parallelism, batch_rows, slot, side_outputs=(tag,), kept_time=kept
            )
        factory = partial(FlatMap, fn, schema, kept)
        return self._then(factory, schema, name, uid, parallelism, batch_rows, slot, kept_time=kept)

    def _kept_time(self, schema: pa.Schema | None) -> KeptTime | None:
        """What holds that a function hands on event time; None if its rows have none."""
        if self.timestamp is None or (schema is not None and self.timestamp not in schema.names):
            return None
        return KeptTime(self.timestamp)

    def filter(
        self,
        condition: Callable[[Row], bool] | pl.Expr,
        *,
        traced: bool = True,
        name: str = "filter",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Keep the rows for which a polars expression, or a function of the row, is true.

        An expression must work row by row, here and in `with_columns` and `select`: ConfigurationError for `cum_sum`,
        `shift`, `over` and others that look at more than one row. `errors_to`, `traced`: for functions, as in `map`.
        """
        if not is_polars_expression(condition):
            check_function(condition, name, 'a row, a dict, or a polars expression such as pl.col("x") > 1')
        if errors_to is not None:
            if is_polars_expression(condition):
                raise ConfigurationError(f"{name}: errors_to is for functions; an expression fails for no single row")
            tag = error_tag(errors_to, self.schema, name)
            made = partial(GuardedFilter, condition, tag)
            return self._then(made, self.schema, name, uid, parallelism, batch_rows, slot, side_outputs=(tag,))
        if not is_polars_expression(condition):
            factory = partial(FilterRows, condition, traced)
            return self._then(factory, self.schema, name, uid, parallelism, batch_rows, slot)
        from tidegate.operators.functions.expressions import FilterExpr

        schema_after(FilterExpr(condition), self.schema, name)
        if (updating := self._updating) is not None:
            updating.check_filter(repr(name), condition, self.schema)
        return self._then(
            partial(FilterExpr, condition),
            self.schema,
            name,
            uid,
            parallelism,
            slot=slot,
            updating=updating,
            computes=computed_text("filter", [condition]),
        )

    def with_columns(
        self,
        *expressions: pl.Expr | Mapping[str, pl.Expr | str],
        name: str | pl.Expr = "with_columns",
        uid: str | pl.Expr | None = None,
        parallelism: int | str | pl.Expr | None = None,
        **named: pl.Expr | str,
    ) -> Self:
        """Add columns computed by polars expressions, or replace those of the same name: `with_columns(x=pl.col("y"))`.

        `name`, `uid` and `parallelism` are those of the step. An expression under such a word is a column of that name,
        and a mapping has columns only: `with_columns({"name": "full_name"})`.
        """
        given, step = expressions_and_options(
            "with_columns",
            expressions,
            named,
            {"name": name, "uid": uid, "parallelism": parallelism},
            {"name": "with_columns", "uid": None, "parallelism": None},
            self.schema,
        )
        return self._with_columns(given, step["name"], step["uid"], step["parallelism"])

    def _with_columns(
        self,
        given: Sequence[pl.Expr | str],
        name: str,
        uid: str | None,
        parallelism: int | None,
        own: Collection[str] = (),
        are_keys: bool = False,
    ) -> Self:
        """Add columns. `own`: those that are tidegate's own. `are_keys`: whether they are keys of the next step."""
        from tidegate.operators.functions.expressions import WithColumns

        expressions: Any = given  # `WithColumns` refuses what is no expression
        if self._updating is not None:
            self._updating.check_kind_is_not_read(repr(name), given, self.schema)
        schema = schema_after(WithColumns(*expressions), self.schema, name)
        untouched = {column: column for column in self._own_columns() - computed_columns(expressions, self.schema)}
        passed = {**untouched, **passed_columns(expressions, self.schema)}
        computes = computed_text("with_columns", expressions)
        return self._computed(
            lambda: WithColumns(*expressions), schema, passed, name, uid, parallelism, own, computes, expressions,
            key_texts=column_texts(expressions) if are_keys else None,
        )  # fmt: skip

    def select(
        self,
        *expressions: pl.Expr | str | Mapping[str, pl.Expr | str] | Sequence[pl.Expr | str],
        name: str | pl.Expr = "select",
        uid: str | pl.Expr | None = None,
        parallelism: int | str | pl.Expr | None = None,
        **named: pl.Expr | str,
    ) -> Self:
        """Keep only these columns: names, or polars expressions, also by keyword: `select("k", x=pl.col("y") * 2)`.

        A list stands for its items: `select(["k", "x"])`.

        `name`, `uid` and `parallelism` are those of the step. An expression under such a word is a column of that name,
        and a mapping has columns only: `select("id", {"name": "full_name"})`. Event time follows its column to another
        name.
        """
        given, step = expressions_and_options(
            "select",
            expressions,
            named,
            {"name": name, "uid": uid, "parallelism": parallelism},
            {"name": "select", "uid": None, "parallelism": None},
            self.schema,
        )
        return self._select(given, step["name"], step["uid"], step["parallelism"])

    def _select(
        self, expressions: Sequence[pl.Expr | str], name: str, uid: str | None, parallelism: int | None
    ) -> Self:
        """Keep only these columns."""
        from tidegate.operators.functions.expressions import Select

        if self._updating is not None:
            self._updating.check_kind_is_not_read(repr(name), expressions, self.schema)
            expressions = self._updating.with_kind(expressions, self.schema)
        schema = schema_after(Select(*expressions), self.schema, name)
        passed = passed_columns(expressions, self.schema)
        computes = computed_text("select", expressions)
        return self._computed(
            lambda: Select(*expressions), schema, passed, name, uid, parallelism, (), computes, expressions
        )

    def process(
        self,
        function: ProcessFunction,
        *,
        schema: SchemaLike | None = None,
        name: str = "process",
        uid: str | None = None,
        parallelism: int | None = None,
        batch_rows: tuple[int, int] | None = None,
        side_outputs: Sequence[OutputTag] = (),
        errors_to: OutputTag | str | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Self:
        """Call a `tg.ProcessFunction` with each row or batch. Without key_by there is neither keyed state nor timers.

        `schema` is that of the rows that it returns; give it if a table, an aggregate or a key follows. With
        `side_outputs` it may emit rows under these tags as well (see `Stream.side_output`).

        With `errors_to`, which needs `schema`, a row for which the function raises goes to the side output of that
        name, as in `map`. All that it has emitted, and put into state, is taken back.
        """
        check_methods(function)
        schema = as_schema(schema, f"{name}(schema=)") or returned_schema(function, many=True, method="process")
        errors = () if errors_to is None else (error_tag(errors_to, self.schema, name),)
        of_stream = ((),), (self.timestamp,), schema, side_outputs, False, errors
        (factory := partial(process_operator, function, *of_stream))()
        return self._then(
            factory,
            schema,
            name,
            uid,
            parallelism,
            batch_rows,
            slot,
            side_outputs=(*side_outputs, *errors),
            meaning=StateMeaning("process without keys"),
        )

    def _mapped_schema(
        self, fn: Callable[[Row], Mapping[str, Any]], given: SchemaLike | None, traced: bool, name: str
    ) -> pa.Schema | None:
        """Returns the columns that `map` makes, by `schema=`, the annotation of `fn`, or its trace. None if unknown."""
        schema = as_schema(given, f"{name}(schema=)") or returned_schema(fn)
        if schema is not None or not traced or self.schema is None:
            return schema
        from tidegate.operators.functions.trace import traced_schema

        return traced_schema(fn, self.schema)

    def rebalance(self) -> Self:
        """Deal batches out evenly over the subtasks of the next operator."""
        if self._updating is not None:
            raise self._updating.refuse("rebalance", "versions of one row would overtake each other")
        return self._partitioned(Partitioning(PartitioningKind.REBALANCE))

    def broadcast(self) -> Self:
        """Send every batch to every subtask of the next operator."""
        if self._updating is not None:
            raise self._updating.refuse("broadcast")
        return self._partitioned(Partitioning(PartitioningKind.BROADCAST))

    def _partitioned(self, partitioning: Partitioning) -> Self:
        inputs = tuple((node, partitioning) for node, _ in self._inputs)
        return type(self)(self._program, inputs, (), self.timestamp, self._updating)

    def _in_order(self, parallelism: int | None) -> Self:
        """This stream; if it has updates and the parallelism changes, partitioned by their keys to keep their order."""
        upstream, partitioning = self._inputs[0]
        parallelism = parallelism if parallelism is not None else self._program.parallelism
        if self._updating is None or partitioning is not None or upstream.parallelism == parallelism:
            return self
        return self._partitioned(Partitioning(PartitioningKind.HASH, self._updating.keys))

    def _own_columns(self) -> set[str]:
        """All columns; without a schema those that matter here: the keys of updates, and event time."""
        if self.schema is not None:
            return set(self.schema.names)
        keys = () if self._updating is None else self._updating.keys
        return {*keys, *(() if self.timestamp is None else (self.timestamp,))}

    def _computed(
        self,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        passed: Mapping[str, str],
        name: str,
        uid: str | None,
        parallelism: int | None,
        own: Collection[str] = (),
        computes: str = "",
        expressions: Sequence[pl.Expr | str] = (),
        key_texts: Mapping[str, str] | None = None,
    ) -> Self:
        """The stream after polars expressions. `passed` maps output columns to the input columns that they copy."""
        updating = None if self._updating is None else self._updating.renamed(repr(name), passed)
        retimes = None
        if self.timestamp is not None and time_after(self.timestamp, passed) is None:
            retimes = self.timestamp if gives_other_times(expressions, self.timestamp, self.schema) else None
        result = self._then(
            factory, schema, name, uid, parallelism, updating=updating, own=own, computes=computes, retimes=retimes,
            key_texts=key_texts,
        )  # fmt: skip
        timestamp = time_after(self.timestamp, passed) or result.timestamp
        if timestamp is None and type(self.timestamp) is str:  # a WindowEnd was named by nobody
            said = "%s (uid %r) drops the column of event time, %r: rows after it have no timestamp; keep the column"
            log.warning(said, name, result._inputs[0][0].uid, self.timestamp)
        return type(self)(self._program, result._inputs, (), timestamp, updating)

    def _with_errors_of(self, node: StreamNode | None) -> Self:
        """The same, with the side outputs of a step before as well."""
        if node is None:
            return self
        return type(self)(self._program, self._inputs, self._keyed_by, self.timestamp, self._updating, node)

    def _then(
        self,
        factory: OperatorFactory,
        schema: pa.Schema | None,
        name: str,
        uid: str | None,
        parallelism: int | None,
        batch_rows: tuple[int, int] | None = None,
        slot: SlotOptions | None = None,
        table: str | None = None,
        second: StreamSteps | None = None,
        updating: Updating | None = None,
        side_outputs: Sequence[OutputTag] = (),
        takes_changes: bool = False,
        deletes: bool = False,
        sink: Sink | None = None,
        calls: AsyncFunction | None = None,
        combines: LocalAggregation | None = None,
        own: Collection[str] = (),
        meaning: StateMeaning | None = None,
        computes: str = "",
        retimes: str | None = None,
        kept_time: KeptTime | None = None,
        key_texts: Mapping[str, str] | None = None,
    ) -> Self:
        """Add an operator, and return the stream behind it.

        An operator that may follow updates is given `updating`, which describes its own rows; one that
        `takes_changes` has inputs by key. To that, and to one that `deletes`, each change must come once. `second` is
        the other input of an operator that has two. `own` are columns of the result that are tidegate's own.
        ConfigurationError if the operator may not follow updates.
        """
        before = [s._updating for s in ((self,) if second is None else (self, second)) if s._updating is not None]
        for found in before:
            if not (found.changes if takes_changes else updating):
                raise found.refuse(repr(name))
        if self._updating is not None and not takes_changes:
            parallelism = self._updating.parallelism(repr(name), parallelism, self._input_parallelism)
        inputs = (self._in_order(parallelism)._inputs, () if second is None else second._inputs)
        resources, slot_group = slot_of(name, slot)
        node = StreamNode(
            uid=self._program.new_uid(name, uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._program.parallelism,
            schema=schema,
            factory=factory,
            table=table,
            sink=sink,
            calls=calls,
            combines=combines if combines is not None and combines.is_exact else None,
            inputs=inputs[0] + inputs[1],
            ordinals=(0,) * len(inputs[0]) + (1,) * len(inputs[1]),
            batch_rows=check_batch_rows(name, batch_rows),
            resources=resources,
            slot_group=slot_group,
            side_outputs=tuple(side_outputs),
            takes_back=before[0].made_by if before and (takes_changes or deletes) else None,
            meaning=None if meaning is None else with_computed_keys(meaning, inputs),
            computes=computes,
            key_texts=key_texts or {},
            retimes=retimes,
            kept_time=kept_time,
        )
        self._program.add_node(node, own)
        kept = schema is None or self.timestamp in schema.names
        return type(self)(self._program, ((node, None),), (), self.timestamp if kept else None, updating)
