"""`Stream` and `KeyedStream`: the classes with which a driver script describes its job.

Nothing runs before `StreamEnvironment.execute`. A method adds one step to the program, or a few, and checks its
arguments: an error that can be found before the job runs is a ConfigurationError of the call that causes it. The other
modules of this folder build the operators, and `_then` adds the operator that a builder describes (`Step`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, Unpack, overload

import pyarrow as pa

from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.api.program import Program, all_or_nothing
from tidegate.api.streams import column_steps, database_steps, join_steps, kafka_steps, output_steps, row_steps
from tidegate.api.streams.aggregate_steps import keyed_aggregate, total_aggregate
from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.api.streams.connected_streams import ConnectedStreams
from tidegate.api.streams.database_steps import TableArguments
from tidegate.api.streams.event_time import assigned_timestamps, uses_event_time
from tidegate.api.streams.expression_columns import (
    aggregates_and_options,
    check_keys,
    expressions_and_options,
    known_schema,
)
from tidegate.api.streams.join_steps import On
from tidegate.api.streams.kafka_steps import KafkaOptions, RecordParts
from tidegate.api.streams.other_names import KEYED_STREAMS, STREAMS, OtherNames
from tidegate.api.streams.ranking_steps import RankEmit, ranked_stream, ranked_windows, ranking_of
from tidegate.api.streams.state_meanings import column_of, meaning, ttl_text, with_computed_columns, with_rows
from tidegate.api.streams.step import SlotOptions, Step, StepOptions, slot_of
from tidegate.api.streams.step_checks import check_function, check_stream
from tidegate.api.streams.windowed_stream import WindowedStream, WindowsTaken, WindowTime
from tidegate.api.tables.lookup_tables import LookedUp
from tidegate.api.tables.output_tables import (
    HISTORY_DEFAULT,
    CollectedRows,
    OutputTable,
    SchemaEvolution,
    TableOptions,
)
from tidegate.api.tables.shown_rows import ROWS_SHOWN, check_count, grid, html_columns
from tidegate.connectors.bad_rows import BAD_ROWS
from tidegate.connectors.committing_sink import CommittingSink
from tidegate.connectors.files.encoders import WrittenFormat
from tidegate.connectors.formats.named import PayloadFormat
from tidegate.connectors.formats.registry import SchemaRegistry
from tidegate.connectors.iceberg.options import CatalogLike
from tidegate.connectors.kafka.sink import Delivery
from tidegate.connectors.sink import Sink
from tidegate.connectors.sql.options import TOKEN_TABLE, OnConflict, WriteMode
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.batch_rows import check_batch_rows
from tidegate.operators.changes import CHANGE
from tidegate.operators.functions.batch_functions import BatchFunction, BatchResult, Row
from tidegate.operators.functions.process_functions import MapGroups, ProcessFunction, Reduce, StatefulMap
from tidegate.operators.joins.join_operator import JoinHow
from tidegate.operators.joins.latest_join import LatestEmit
from tidegate.operators.ranking.deduplicate import Deduplicate
from tidegate.operators.sinks.sink import FLUSH_BYTES
from tidegate.operators.state.ttl import StateTtl
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WindowEnd
from tidegate.operators.windows.window_specs import Sliding, Tumbling
from tidegate.protocol.edges import OutputTag, Partitioning, PartitioningKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.tables.maintenance import FILE_BYTES
from tidegate.storage.tables.table_info import IfExists, TableMode
from tidegate.storage.units import parse_duration_ms

if TYPE_CHECKING:
    import polars as pl

P = ParamSpec("P")
R = TypeVar("R")
StreamInput = tuple[StreamNode, Partitioning | None]


@all_or_nothing(lambda stream: stream._program, "pipe", "show")
class Stream(OtherNames):
    """A stream of rows with the same columns, which are processed in batches.

    Parameters that many methods have in common:

    - `name`: the name of the step in logs and on the job page.
    - `uid`: the unique id of the step in the program, by which checkpoints find its state. Set it on steps whose state
      must survive a changed program. By default it is made of the name and the position of the step in the program.
    - `parallelism`: the number of subtasks, at least 1. By default it is set by the environment, or by the step before
      if both run as one task.
    - `batch_rows`: the least and the most rows that a function gets in one call, such as `(1_000, 10_000)`
      (`docs/batches.md`).
    - `schema`: the columns that a function returns: `{"k": str, "n": int}`, a dataclass, or a `pa.Schema`. Without it
      they are taken from the return annotation of the function, or are known only when the job runs. A table, an
      aggregate, and a key need them.
    - `errors_to`: the name of a side output, or a `tg.OutputTag`. A row for which the function raises goes there, with
      the column `error`, and does not fail the job (see `side_output`).
    - `num_cpus`, `num_gpus`, `resources`: the resources that each subtask reserves on Ray.
    - `slot_sharing_group`: the name of the slots that the step shares with other steps. By default the group of its
      inputs (`docs/placement.md`).
    - Durations are strings such as "10s", "5min" and "2d", timedeltas, or milliseconds.
    """

    _other_names = STREAMS

    def __init__(
        self,
        program: Program,
        inputs: tuple[StreamInput, ...],
        keyed_by: tuple[str, ...] = (),
        timestamp: str | None = None,
        changelog: ChangelogMode | None = None,
        errors_of: StreamNode | None = None,
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._keyed_by = keyed_by
        """The key columns by which the rows are already partitioned. Empty if not known."""
        self.timestamp = timestamp
        """The event-time column, or None if the stream has no event time, or if a step has dropped the column."""
        self._changelog = changelog
        """How rows replace or retract earlier rows, or None if they never do."""
        self._errors_of = errors_of
        """An earlier step with side outputs that `side_output` also finds on this stream, or None."""

    @property
    def schema(self) -> pa.Schema | None:
        """Returns the columns and their types, or None if they are known only when the job runs."""
        return self._inputs[0][0].schema

    @property
    def columns(self) -> list[str]:
        """Returns the names of the columns, in their order.

        Raises ConfigurationError if they are known only when the job runs.
        """
        return list(known_schema(self, "columns").names)

    def __repr__(self) -> str:
        columns = "columns known when the job runs" if self.schema is None else columns_text(self.schema)
        return f"{type(self).__name__}({self._inputs[0][0].uid!r}: {columns})"

    def _repr_html_(self) -> str:
        """Returns the columns and their types, for notebooks."""
        return html_columns(f"{type(self).__name__} {self._inputs[0][0].uid}", self.schema)

    # --- rows -----------------------------------------------------------------------------------------------------

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
    ) -> Stream:
        """Calls `fn` with each row. `fn` returns the new row.

        - `fn`: takes the row as a dict, and returns a dict or an object with the new columns.
        - `traced`: whether a function that only calculates and compares may be computed for whole batches, if that
          gives the same results (`docs/batches.md`). With False `fn` is called with each row in any case.

        Raises ConfigurationError if `fn` cannot be called.

        Example:

            >>> orders.map(lambda row: {"user": row["user"], "cents": row["amount"] * 100}).show()
            +------+-------+
            | user | cents |
            +------+-------+
            | ann  |  3000 |
            | bob  |   500 |
            | ann  |  1200 |
            +------+-------+
        """
        options = StepOptions(name, uid, parallelism, batch_rows, slot)
        return row_steps.mapped_rows(self, fn, schema, traced, errors_to, options)

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
    ) -> Stream:
        """Calls `fn` with each row. `fn` returns any number of new rows.

        - `fn`: takes the row as a dict, and returns an iterable of dicts.

        Raises ConfigurationError if `fn` cannot be called.

        Example:

            >>> def letters(row):
            ...     return [{"letter": letter} for letter in row["user"]]
            >>> orders.flat_map(letters, schema={"letter": str}).columns
            ['letter']
        """
        options = StepOptions(name, uid, parallelism, batch_rows, slot)
        return row_steps.flat_mapped_rows(self, fn, schema, errors_to, options)

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
    ) -> Stream:
        """Keeps the rows for which a condition is true.

        - `condition`: a polars expression that works row by row, or a function of the row, a dict.
        - `traced`, `errors_to`: for functions only, as in `map`.

        Raises ConfigurationError for expressions that look at more than one row, such as `cum_sum`, `shift` and `over`.

        Example:

            >>> orders.filter(pl.col("amount") > 10).show()
            +------+--------+------+
            | user | amount |   at |
            +------+--------+------+
            | ann  |     30 |    0 |
            | ann  |     12 | 2000 |
            +------+--------+------+
        """
        options = StepOptions(name, uid, parallelism, batch_rows, slot)
        return row_steps.filtered_rows(self, condition, traced, errors_to, options)

    def where(
        self,
        condition: Callable[[Row], bool] | pl.Expr,
        *,
        name: str = "where",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Keeps the rows for which a condition is true. Does the same as `filter`, with the name that SQL uses.

        - `condition`: a polars expression, or a function of the row.

        Raises ConfigurationError as `filter` does.

        Example:

            >>> orders.where(pl.col("user") == "bob").columns
            ['user', 'amount', 'at']
        """
        return self.filter(condition, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to)

    def branch(
        self, condition: Callable[[Row], bool] | pl.Expr, *, name: str = "branch", uid: str | None = None
    ) -> tuple[Stream, Stream]:
        """Splits a stream in two: the rows for which a condition is true, and all other rows.

        The condition is computed twice for each row. Rows for which an expression is null are among the other rows.

        - `condition`: a polars expression, or a function of the row.

        Raises ConfigurationError as `filter` does.

        Example:

            >>> large, small = orders.branch(pl.col("amount") > 10)
            >>> small.show()
            +------+--------+------+
            | user | amount |   at |
            +------+--------+------+
            | bob  |      5 | 1000 |
            +------+--------+------+
        """
        return row_steps.branches(self, condition, name, uid)

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
    ) -> Stream:
        """Calls `fn` with each Arrow batch of rows.

        After an aggregate that emits updates, `fn` must keep every row and its keys.

        - `fn`: takes a `pa.RecordBatch`, and returns a batch, a table, a polars DataFrame, or None for no rows. A
          `tg.BatchFunction` is opened once in each subtask, for example to load a model.
        - `errors_to`: a batch for which `fn` raises is halved and tried again, down to single rows. Side effects of
          `fn` happen again then.

        Raises ConfigurationError if `fn` cannot be called.

        Example:

            >>> def first_row(batch):
            ...     return batch.slice(0, 1)
            >>> orders.map_batches(first_row, schema=orders.schema, batch_rows=(3, 3)).show()
            +------+--------+----+
            | user | amount | at |
            +------+--------+----+
            | ann  |     30 |  0 |
            +------+--------+----+
        """
        options = StepOptions(name, uid, parallelism, batch_rows, slot)
        return row_steps.mapped_batches(self, fn, schema, errors_to, options)

    def map_async(
        self,
        fn: Callable[[Any], Any],
        *,
        schema: SchemaLike | None = None,
        capacity: int = 100,
        timeout: str | timedelta | int = "5s",
        ordered: bool = True,
        retries: int = 0,
        batch_size: int | None = None,
        batch_timeout: str | timedelta | int | None = None,
        errors_to: OutputTag | str | None = None,
        name: str = "map_async",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Maps rows by asynchronous calls, for example of a service, a database, or a remote model.

        Checkpoints contain the rows whose calls have not returned, and a restored job makes these calls again: each
        result is emitted exactly once, and each call is made at least once (`docs/batches.md`).

        - `fn`: an `async def`, or a function that returns a future of `concurrent.futures`. It takes a row as a dict,
          and returns the new row, or None for no row. With `batch_size` it takes Arrow batches, and returns what `fn`
          of `map_batches` may return.
        - `capacity`: the most calls at the same time in each subtask.
        - `timeout`: how long a call may take, a duration.
        - `ordered`: whether results keep the order of their rows. With False they do not overtake watermarks.
        - `retries`: how often a call that raises, or takes too long, is repeated before the job fails, or its rows go
          to `errors_to`.
        - `batch_size`: the most rows of a batch. `batch_timeout`: how long rows wait for a full batch, a duration of
          processing time; without it a batch has the rows that have arrived.

        Raises ConfigurationError for values out of range.

        Example:

            >>> async def with_country(row):
            ...     return {**row, "country": "NL"}
            >>> orders.map_async(with_country, schema={"user": str, "country": str}).columns
            ['user', 'country']
        """
        return row_steps.awaited_calls(
            self,
            fn,
            schema,
            capacity=capacity,
            timeout=timeout,
            ordered=ordered,
            retries=retries,
            batch_size=batch_size,
            batch_timeout=batch_timeout,
            errors_to=errors_to,
            options=StepOptions(name, uid, parallelism, slot=slot),
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
    ) -> Stream:
        """Calls a `tg.ProcessFunction` with each row or batch.

        Without `key_by` the function has neither keyed state nor timers.

        - `function`: an object with `process(row, context)`, which yields new rows as dicts, or with
          `process_batch(batch, context)`.
        - `side_outputs`: tags of side outputs to which the function may emit rows (see `side_output`).
        - `errors_to`: needs `schema`. Rows that a failed call has emitted, and changes of state, are rolled back.

        Raises ConfigurationError if a method is missing or takes other parameters.

        Example:

            >>> class Doubled(tg.ProcessFunction):
            ...     def process(self, row, context):
            ...         yield {"amount": row["amount"] * 2}
            >>> orders.process(Doubled(), schema={"amount": int}).columns
            ['amount']
        """
        options = StepOptions(name, uid, parallelism, batch_rows, slot)
        return row_steps.processed_rows(self, function, schema, side_outputs, errors_to, options)

    def limit(self, n: int, *, name: str = "limit", uid: str | None = None) -> Stream:
        """Keeps the first `n` rows that arrive, exactly once over restarts.

        One subtask counts the rows. The job still reads its input to the end.

        - `n`: the number of rows, at least 0.

        Raises ConfigurationError for a negative `n`, and for a stream of updates or changes.

        Example:

            >>> orders.limit(1).show()
            +------+--------+----+
            | user | amount | at |
            +------+--------+----+
            | ann  |     30 |  0 |
            +------+--------+----+
        """
        return row_steps.limited_rows(self, n, name, uid)

    def explode(
        self,
        column: str,
        *,
        outer: bool = False,
        name: str = "explode",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Emits a row for each element of a list column. The other columns are repeated.

        - `column`: a column of lists.
        - `outer`: whether a row whose list is null or empty is kept, with null in the column, as with Spark's
          `explode_outer`. By default it is dropped, as with `explode`.

        Raises ConfigurationError for a column that is not a list.

        Example:

            >>> env.from_rows([{"id": 1, "tags": ["a", "b"]}]).explode("tags").show()
            +----+------+
            | id | tags |
            +----+------+
            |  1 | a    |
            |  1 | b    |
            +----+------+
        """
        return row_steps.exploded_rows(self, column, outer, StepOptions(name, uid, parallelism))

    def peek(
        self,
        fn: Callable[[Row], object],
        *,
        name: str = "peek",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Calls `fn` with each row, for example to log or count rows, and emits the rows unchanged.

        After a restart `fn` is called again with rows that are replayed.

        - `fn`: takes the row as a dict. Its result, and changes of the dict, are ignored.
        - `errors_to`: a row for which `fn` raises goes to this side output, and is not passed on.

        Raises ConfigurationError if `fn` cannot be called.

        Example:

            >>> orders.peek(lambda row: None).columns
            ['user', 'amount', 'at']
        """
        return row_steps.peeked_rows(self, fn, errors_to, StepOptions(name, uid, parallelism))

    def print(
        self, prefix: str = "", *, name: str = "print", uid: str | None = None, parallelism: int | None = None
    ) -> Stream:
        """Prints each row as a dict, and emits the rows unchanged.

        The tasks print the rows. In a local environment they run in this process. On Ray the driver shows the output of
        the tasks. After a restart rows that are replayed are printed again. If the stream has updates, all of them are
        printed.

        - `prefix`: a string in front of each row.

        Raises ConfigurationError if `prefix` is not a string.

        Example:

            >>> orders.print("order: ").columns
            ['user', 'amount', 'at']
        """
        return row_steps.printed_rows(self, prefix, StepOptions(name, uid, parallelism))

    def pipe(self, fn: Callable[Concatenate[Stream, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Returns `fn(stream, *args, **kwargs)`, so that functions of streams can be chained.

        Example:

            >>> def over(stream, least):
            ...     return stream.filter(pl.col("amount") > least)
            >>> orders.pipe(over, 10).columns
            ['user', 'amount', 'at']
        """
        return fn(self, *args, **kwargs)

    # --- columns --------------------------------------------------------------------------------------------------

    def with_columns(
        self,
        *expressions: pl.Expr | Mapping[str, pl.Expr | str],
        name: str | pl.Expr = "with_columns",
        uid: str | pl.Expr | None = None,
        parallelism: int | str | pl.Expr | None = None,
        **named: pl.Expr | str,
    ) -> Stream:
        """Adds columns that polars expressions compute, or replaces columns of the same name.

        - `expressions`: expressions that have a name, or dicts of new columns.
        - `named`: expressions, or names of columns, by new column. An expression under the word `name`, `uid` or
          `parallelism` is a column as well; a string under such a word is the option, so write
          `with_columns({"name": "full_name"})` for a column that is called `name`.

        Raises ConfigurationError for expressions that cannot be computed, or look at more than one row.

        Example:

            >>> orders.with_columns(cents=pl.col("amount") * 100).limit(1).show()
            +------+--------+----+-------+
            | user | amount | at | cents |
            +------+--------+----+-------+
            | ann  |     30 |  0 |  3000 |
            +------+--------+----+-------+
        """
        given, step = expressions_and_options(
            "with_columns",
            expressions,
            named,
            {"name": (name, "with_columns"), "uid": (uid, None), "parallelism": (parallelism, None)},
            self.schema,
        )
        return self._with_columns(given, StepOptions(step["name"], step["uid"], step["parallelism"]))

    def select(
        self,
        *expressions: pl.Expr | str | Mapping[str, pl.Expr | str] | Sequence[pl.Expr | str],
        name: str | pl.Expr = "select",
        uid: str | pl.Expr | None = None,
        parallelism: int | str | pl.Expr | None = None,
        **named: pl.Expr | str,
    ) -> Stream:
        """Keeps only some columns, given by names or polars expressions.

        If the event-time column is renamed, it is still the event time.

        - `expressions`: names, expressions, lists of these, or dicts of new columns.
        - `named`: expressions, or names of columns, by new column; see `with_columns`.

        Raises ConfigurationError for columns that do not exist, and for expressions that look at more than one row.

        Example:

            >>> orders.select("user", cents=pl.col("amount") * 100).columns
            ['user', 'cents']
        """
        given, step = expressions_and_options(
            "select",
            expressions,
            named,
            {"name": (name, "select"), "uid": (uid, None), "parallelism": (parallelism, None)},
            self.schema,
        )
        return self._select(given, StepOptions(step["name"], step["uid"], step["parallelism"]))

    def drop(self, *columns: str | Iterable[str], name: str = "drop", uid: str | None = None) -> Stream:
        """Drops columns.

        - `columns`: names, or lists of names.

        Raises ConfigurationError for columns that do not exist, and if no column would remain.

        Example:

            >>> orders.drop("amount").columns
            ['user', 'at']
        """
        return column_steps.without_columns(self, columns, name, uid)

    def rename(
        self,
        mapping: Mapping[str, str] | Callable[[str], str],
        *,
        name: str = "rename",
        uid: str | None = None,
    ) -> Stream:
        """Renames columns. Columns that are not mentioned keep their names.

        - `mapping`: new names by old name, or a function of the name, such as `str.lower`.

        Raises ConfigurationError for columns that do not exist, and if two columns would have the same name.

        Example:

            >>> orders.rename({"user": "customer"}).columns
            ['customer', 'amount', 'at']
        """
        return column_steps.renamed(self, mapping, name, uid)

    def cast(self, types: Mapping[str, Any], *, name: str = "cast", uid: str | None = None) -> Stream:
        """Changes the types of columns.

        A value that cannot be converted, such as "x" to a number, fails the job. Floats lose their fraction when they
        become integers, as in Spark.

        - `types`: by column, a Python type, a dataclass, or a pyarrow type such as `pa.decimal128(9, 2)`.

        Raises ConfigurationError for columns that do not exist, and for casts that are not possible.

        Example:

            >>> orders.cast({"amount": float}).schema.field("amount").type
            DataType(double)
        """
        return column_steps.cast(self, types, name, uid)

    # --- several streams ------------------------------------------------------------------------------------------

    def union(self, *others: Stream, by_name: bool = False, allow_missing: bool = False) -> Stream:
        """Merges the rows of several streams with the same columns. The order between the streams is not defined.

        - `others`: streams of the same environment.
        - `by_name`: columns may be in any order, and a type may be wider in one stream, such as int64 and int32.
        - `allow_missing`: with `by_name`, a column that a stream lacks is null in its rows.

        Raises ConfigurationError for streams with different columns, and for a column whose types have no common type.

        Example:

            >>> orders.union(orders.filter(pl.col("amount") > 10)).columns
            ['user', 'amount', 'at']
        """
        for other in others:
            check_stream(other, Stream, "union")
        return column_steps.union((self, *others), by_name, allow_missing)

    def connect(self, other: Stream | KeyedStream) -> ConnectedStreams:
        """Connects this stream to another one, so that one operator processes both.

        - `other`: a stream of the same environment, usually with other columns, or a broadcast one.

        Raises ConfigurationError for streams of different environments.

        Example:

            >>> connected = orders.connect(payments).key_by("user", "user")
        """
        return _connected(self, other)

    def join(
        self,
        other: Stream,
        *,
        on: On,
        window: Tumbling | Sliding | None = None,
        how: JoinHow = "inner",
        ttl: str | timedelta | int | None = None,
        suffix: str = "_right",
        name: str = "join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Joins the rows of two streams that have the same key, in the same window or, without a window, at any
        time.

        With a window, rows are joined when the watermarks of both streams have passed the end of the window; rows that
        arrive later are dropped. The result has `window_start` and `window_end`.

        Without a window every row is stored, and is joined with every row of its key. Both streams may have changes.
        The result has changes as well, except for an inner join of streams without changes: for example, a row without
        a partner is retracted when a partner arrives. See `docs/joins.md`.

        - `other`: the right stream.
        - `on`: the columns that must be equal: a name in both streams, a pair of names, left and right, or a list of
          these. The result has the columns of the left stream, and of the right stream without its keys.
        - `window`: `tg.Tumbling` or `tg.Sliding`, of event time.
        - `how`: "inner", "left", "right" or "full"; in windows also "semi" and "anti".
        - `ttl`: without a window, how long rows are kept, a duration of event time; by default for ever.
        - `suffix`: is appended to columns of the right stream whose names the left stream has as well.

        Raises ConfigurationError for columns that do not exist or whose types differ.

        Example:

            >>> orders.join(payments, on="user", window=tg.Tumbling("1min")).columns
            ['user', 'amount', 'at', 'paid', 'at_right', 'window_start', 'window_end']
        """
        check_stream(other, Stream, "join")
        options = StepOptions(name, uid, parallelism)
        if window is None:
            return join_steps.regular_join(self, other, on, how, ttl, suffix, options)
        if ttl is not None:
            raise ConfigurationError("join: a window determines how long rows are kept; remove ttl= or window=")
        return join_steps.window_join(self, other, on, window, how, suffix, options)

    def interval_join(
        self,
        other: Stream,
        *,
        on: On,
        between: tuple[str | timedelta | int, str | timedelta | int],
        how: JoinHow = "inner",
        suffix: str = "_right",
        name: str = "interval_join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Joins rows with the same key whose event times are within an interval of each other.

        A pair is emitted when its later row arrives. For any `how` but "inner", a row without a partner is emitted when
        the watermark of both streams has passed its interval. Late rows are dropped.

        - `between`: the smallest and the greatest difference "time of the right row minus time of the left row", both
          inclusive: durations that may be negative, such as `("-5min", "10min")`.
        - `other`, `on`, `how`, `suffix`: as in `join`.

        Raises ConfigurationError for streams without event time, and as `join` does.

        Example:

            >>> orders.interval_join(payments, on="user", between=("0s", "10min")).columns
            ['user', 'amount', 'at', 'paid', 'at_right']
        """
        check_stream(other, Stream, "interval_join")
        return join_steps.interval_join(self, other, on, between, how, suffix, StepOptions(name, uid, parallelism))

    def join_asof(
        self,
        other: Stream,
        *,
        on: On,
        by: str | tuple[str, str] | None = None,
        how: Literal["left", "inner"] = "left",
        suffix: str = "_right",
        name: str = "join_asof",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Joins each row with the version of its key that was valid at its event time.

        A row of `other` is valid from its event time until the event time of the next row with its key. A left row
        waits until the watermark of both streams has passed its time. Late rows are dropped. The result has the event
        time of the left stream.

        - `by`: the event-time columns of both streams. Optional, because the streams already define them: it only
          documents the program.
        - `how`: "left" keeps rows without a version, with nulls; "inner" drops them.
        - `other`, `on`, `suffix`: as in `join`.

        Raises ConfigurationError for streams without event time, and as `join` does.

        Example:

            >>> orders.join_asof(payments, on="user").columns
            ['user', 'amount', 'at', 'paid', 'at_right']
        """
        check_stream(other, Stream, "join_asof")
        return join_steps.asof_join(self, other, on, by, how, suffix, StepOptions(name, uid, parallelism))

    def join_latest(
        self,
        other: Stream,
        *,
        on: On,
        emit: LatestEmit = "complete",
        ttl: str | timedelta | int | None = None,
        suffix: str = "_right",
        name: str = "join_latest",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Joins the newest rows of each key in two streams. The newest row is the row that arrived last.

        - `emit`: "complete" emits a pair as soon as both streams have a row of the key, and then removes both rows.
          "always" emits each row with the newest row of the other stream, or with nulls if there is none yet, and keeps
          the newest row of both streams.
        - `ttl`: how long a key is kept, a duration of event time; by default for ever.
        - `other`, `on`, `suffix`: as in `join`.

        Raises ConfigurationError for streams of updates or changes, and as `join` does.

        Example:

            >>> orders.join_latest(payments, on="user", emit="always").columns
            ['user', 'amount', 'at', 'paid', 'at_right']
        """
        check_stream(other, Stream, "join_latest")
        return join_steps.latest_join(self, other, on, emit, ttl, suffix, StepOptions(name, uid, parallelism))

    def lookup_join(
        self,
        table: LookedUp,
        *,
        on: On,
        how: Literal["left", "inner"] = "left",
        refresh: str | timedelta | int | None = None,
        max_stale: str | timedelta | int | None = None,
        max_rows: int = 10_000_000,
        suffix: str = "_right",
        name: str = "lookup_join",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Joins each row with a table, in the version that was read last.

        Each subtask has the whole table in memory.

        A `DatabaseTable` is not in memory: its rows are queried by the keys of each batch. The version of the table
        with which a row is joined depends on when the row is processed (`docs/joins.md`).

        - `table`: an Arrow table, a polars DataFrame, a table of tidegate or its URL, the URL of a Delta Lake table or
          of Parquet files, a function that returns an Arrow table or a polars DataFrame, or a `DatabaseTable`.
        - `refresh`: how often the table is read again, a duration; by default never. If reading fails, the old version
          is used for at most `max_stale`, by default three times `refresh`; then the task fails.
        - `max_rows`: the most rows that the table may have. For a `DatabaseTable` the most rows for one batch.
        - `on`, `suffix`: as in `join`. `how`: "left" or "inner".

        Raises ConfigurationError for columns that do not exist or whose types differ.

        Example:

            >>> countries = pa.table({"user": ["ann", "bob"], "country": ["NL", "DE"]})
            >>> orders.lookup_join(countries, on="user").limit(2).show()
            +------+--------+------+---------+
            | user | amount |   at | country |
            +------+--------+------+---------+
            | ann  |     30 |    0 | NL      |
            | bob  |      5 | 1000 | DE      |
            +------+--------+------+---------+
        """
        options = StepOptions(name, uid, parallelism)
        return join_steps.lookup_join(self, table, on, how, refresh, max_stale, max_rows, suffix, options)

    # --- keys, windows and aggregates -----------------------------------------------------------------------------

    def key_by(self, *keys: str | pl.Expr) -> KeyedStream:
        """Partitions the stream by key: rows of the same key go to the same subtask.

        - `keys`: columns of ints, floats, strings or dates, which may be null; or polars expressions, which add a
          column under their name, or replace the column of that name.

        Raises ConfigurationError for columns that do not exist, or cannot be keys.

        Example:

            >>> orders.key_by("user").keys
            ('user',)
            >>> orders.key_by((pl.col("amount") % 2).alias("odd")).keys
            ('odd',)
        """
        if not keys:
            raise ConfigurationError(
                'key_by needs at least one column: give a name or an expression, such as key_by("user")'
            )
        stream = self
        names = tuple(map(str, keys))
        replaced = frozenset[str]()
        if not all(isinstance(key, str) for key in keys):
            from tidegate.api.streams.aggregate_inputs import key_expressions

            names, expressions, replaced = key_expressions(keys, self.schema)
            if expressions:
                options = StepOptions("key_by", None, self._input_parallelism)
                stream = self._with_columns(expressions, options, are_keys=True)
        check_keys(names, stream.schema)
        if self._changelog is not None:
            self._changelog.check_kind_is_no_key("key_by", names)
        return KeyedStream(stream, names, replaced)

    def distinct(
        self,
        *columns: str,
        ttl: str | timedelta | int | None = None,
        name: str = "distinct",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Keeps the first row of each combination of values: `key_by(*columns).deduplicate(ttl=ttl)`.

        - `columns`: names of columns; by default all.
        - `ttl`: how long a combination is stored, a duration of event time; by default for ever.

        Raises ConfigurationError for columns that cannot be keys.

        Example:

            >>> orders.distinct("user").show()
            +------+--------+------+
            | user | amount |   at |
            +------+--------+------+
            | ann  |     30 |    0 |
            | bob  |      5 | 1000 |
            +------+--------+------+
        """
        keys = columns or tuple(known_schema(self, name).names)
        return self.key_by(*keys).deduplicate(ttl=ttl, name=name, uid=uid, parallelism=parallelism)

    def aggregate(
        self,
        mapping: Mapping[str, Aggregate] | None = None,
        /,
        *,
        emit: Literal["update", "changes", "final"] | Aggregate = "update",
        name: str | Aggregate = "aggregate",
        uid: str | Aggregate | None = None,
        errors_to: OutputTag | str | Aggregate | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregates all rows. Each subtask aggregates its batches, and one subtask merges the results.

        - `aggregates`: aggregates such as `tg.count()` and `tg.sum("x")`, by output column.
        - `mapping`: the same as a dict, for columns whose names are parameters of this method.
        - `emit`: "update" emits a row after each batch, which replaces the row before. "changes" retracts the row
          before (`docs/changes.md`). "final" emits one row at the end of a bounded input.
        - `errors_to`: see `KeyedStream.aggregate`.

        Raises ConfigurationError for columns that do not fit.

        Example:

            >>> orders.aggregate(n=tg.count(), total=tg.sum("amount"), emit="final").show()
            +---+-------+
            | n | total |
            +---+-------+
            | 3 |    47 |
            +---+-------+
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {
                "emit": (emit, "update"),
                "name": (name, "aggregate"),
                "uid": (uid, None),
                "errors_to": (errors_to, None),
            },
        )
        options = StepOptions(step["name"], step["uid"])
        return total_aggregate(self, found, emit=step["emit"], errors_to=step["errors_to"], options=options)

    def window(self, spec: WindowsTaken, *, time: WindowTime = "event", fire_at_end: bool = False) -> WindowedStream:
        """Assigns all rows to windows, in one subtask. See `KeyedStream.window`.

        Example:

            >>> orders.window(tg.Tumbling("2s")).aggregate(n=tg.count()).show()
            +--------------+------------+---+
            | window_start | window_end | n |
            +--------------+------------+---+
            |            0 |       2000 | 2 |
            |         2000 |       4000 | 1 |
            +--------------+------------+---+
        """
        return WindowedStream(self, (), spec, time, fire_at_end)

    # --- event time, order and changes ----------------------------------------------------------------------------

    def assign_timestamps(
        self,
        column: str | pl.Expr,
        max_out_of_orderness: str | timedelta | int = 0,
        *,
        idleness: str | timedelta | int | None = None,
        nulls_to: str | None = None,
        punctuated_by: str | pl.Expr | None = None,
        alignment: WatermarkAlignment | None = None,
        name: str = "assign_timestamps",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Defines a column as the event time of the stream, in place of any earlier event time.

        The watermark follows the greatest timestamp so far. Directly after an unbounded source each split has a
        separate watermark, and the slowest split determines event time. Rows with a null timestamp are kept, and do not
        advance event time.

        - `column`: a column of timestamps, dates, or int64 milliseconds since 1970. A polars expression adds a column.
        - `max_out_of_orderness`: how far the watermark stays behind the greatest timestamp, a duration. Rows behind the
          watermark are late.
        - `idleness`: a split without rows for this long, a duration of processing time, no longer holds event time
          back.
        - `nulls_to`: the name of a side output for rows whose timestamp is null.
        - `punctuated_by`: a column of booleans, or an expression; only rows for which it is true advance event time.
        - `alignment`: a `tg.WatermarkAlignment`; splits that are far ahead of others are not read meanwhile.

        Raises ConfigurationError for a column that does not exist or is not a time.

        Example:

            >>> rows = env.from_rows([{"seconds": 5}])
            >>> rows.assign_timestamps((pl.col("seconds") * 1000).alias("at"), "1min").timestamp
            'at'
        """
        options = StepOptions(name, uid, parallelism)
        return assigned_timestamps(
            self, column, max_out_of_orderness, idleness, nulls_to, punctuated_by, alignment, options
        )

    def as_changes(self, keys: Sequence[str]) -> Stream:
        """Interprets the rows as recorded changes: the column `row_kind` marks inserted and retracted rows.

        `row_kind` is "+I" or "+U" for an inserted row, and "-U" or "-D" for a retracted row, which must equal the row
        that was inserted.

        - `keys`: the columns that identify a row. All rows of a key are in one split of the source, in their order.

        Raises ConfigurationError for columns that do not exist, or if there is no string column `row_kind`.

        Example:

            >>> changes = env.from_rows([{"id": 1, "row_kind": "+I"}, {"id": 1, "row_kind": "-D"}])
            >>> changes.as_changes(["id"]).columns
            ['id', 'row_kind']
        """
        if self._changelog is not None:
            raise self._changelog.refuse("as_changes")
        names = column_names(keys, "as_changes(keys=...)")
        schema = known_schema(self, "as_changes")
        missing = [name for name in (*names, CHANGE) if name not in schema.names]
        if missing:
            raise ConfigurationError(
                f"as_changes(keys={list(names)}): the stream needs the columns of keys= and {CHANGE!r}, and has no "
                f"column {missing[0]!r}; its columns are {schema.names}"
            )
        if not names or CHANGE in names:
            raise ConfigurationError(
                f"as_changes(keys={list(names)}): name at least one key column, and not {CHANGE!r}; the columns are "
                f"{schema.names}"
            )
        found = schema.field(CHANGE).type
        if not pa.types.is_string(found):
            raise ConfigurationError(f"as_changes: column {CHANGE!r} is {found}; cast it to string before this step")
        changelog = ChangelogMode(names, f"as_changes({list(names)})", changes=True, recorded=True)
        return self._derived(timestamp=self.timestamp, changelog=changelog)

    def rebalance(self) -> Stream:
        """Distributes batches evenly over the subtasks of the next operator.

        Raises ConfigurationError for a stream of updates or changes, whose order would be lost.

        Example:

            >>> orders.rebalance().columns
            ['user', 'amount', 'at']
        """
        if self._changelog is not None:
            raise self._changelog.refuse("rebalance", "versions of one row would overtake each other")
        return self._partitioned(Partitioning(PartitioningKind.REBALANCE))

    def broadcast(self) -> Stream:
        """Sends every batch to every subtask of the next operator.

        Raises ConfigurationError for a stream of updates or changes.

        Example:

            >>> connected = orders.key_by("user").connect(payments.broadcast())
        """
        if self._changelog is not None:
            raise self._changelog.refuse("broadcast")
        return self._partitioned(Partitioning(PartitioningKind.BROADCAST))

    # --- side outputs ---------------------------------------------------------------------------------------------

    def side_output(self, tag: OutputTag | str) -> Stream:
        """Returns the rows that the previous step has emitted to one of its side outputs, exactly once.

        Call this method on the stream that the step returned. Rows of side outputs that are not read are dropped.

        - `tag`: a `tg.OutputTag`, or its name.

        Raises ConfigurationError if the step has no such side output.

        Example:

            >>> parsed = orders.map(lambda row: {"n": int(row["user"])}, schema={"n": int}, errors_to="bad")
            >>> parsed.side_output("bad").columns
            ['user', 'amount', 'at', 'error']
        """
        if len(self._inputs) > 1:
            raise ConfigurationError(
                "side_output: several streams are united here; call it on the stream that the step returned"
            )
        name = tag.name if isinstance(tag, OutputTag) else tag
        made = self._inputs[0][0]
        if self._errors_of is not None and name in [known.name for known in self._errors_of.side_outputs]:
            made = self._errors_of
        aside = made.side_output(name)
        has_time = aside.schema is not None and self.timestamp in aside.schema.names
        # Rows of a side output are not results of a window, even if a column of theirs is called `window_end`.
        timestamp = self.timestamp if has_time and not isinstance(self.timestamp, WindowEnd) else None
        return self._derived(inputs=((aside, None),), timestamp=timestamp)

    def late_rows(self) -> Stream:
        """Returns the rows that were too late for the windows of the previous step.

        Call this method on the stream that the step returned, such as the result of `aggregate`.

        Raises ConfigurationError if the step has no late rows.

        Example:

            >>> hours = orders.key_by("user").window(tg.Tumbling("1h")).aggregate(n=tg.count())
            >>> hours.late_rows().columns
            ['user', 'amount', 'at']
        """
        return self.side_output("late")

    def bad_rows(self) -> Stream:
        """Returns the rows that a source with `bad_rows="side"` could not read, exactly once.

        Each row has columns with its place in the source (`docs/sources.md`), its bytes in `raw`, and the reason in
        `error`.

        Raises ConfigurationError if the stream has several sources, or its source keeps no bad rows.

        Example:

            >>> _ = open("in.csv", "w").write("n\\n1\\ntwo\\n")
            >>> numbers = env.from_files("in.csv", schema={"n": int}, bad_rows="side")
            >>> "error" in numbers.bad_rows().columns
            True
        """
        node = self._inputs[0][0].maker
        while node.source is None and len(node.inputs) == 1:
            node = node.inputs[0][0].maker
        if len(self._inputs) > 1 or node.source is None:
            raise ConfigurationError("bad_rows: this stream has several sources; call it on the stream of one source")
        if not node.side_outputs:
            raise ConfigurationError(
                f'bad_rows: source {node.name!r} (uid {node.uid!r}) keeps no bad rows; give it bad_rows="side"'
            )
        return self._derived(inputs=((node.side_output(BAD_ROWS), None),))

    # --- outputs --------------------------------------------------------------------------------------------------

    def to_table(
        self,
        url: str | os.PathLike[str],
        *,
        mode: TableMode = "append",
        keys: str | Sequence[str] = (),
        order_by: str | None = None,
        partition_by: str | Sequence[str] = (),
        if_exists: IfExists = "error",
        target_file_size: str | int = FILE_BYTES,
        auto_compact: bool = True,
        schema_evolution: SchemaEvolution | None = None,
        history: str | timedelta | int | None = HISTORY_DEFAULT,
        name: str = "to_table",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> OutputTable:
        """Writes the rows to a table, exactly once: rows become visible when the checkpoint that covers them is
        complete.

        A restored job continues in its table. `execute` raises an error if the job that owns the table is another one
        and still running.

        - `url`: a folder, or a place in a bucket.
        - `mode`: "append" keeps every row. "upsert" keeps the newest row of each key; rows of a key stay in order as
          long as one subtask makes them. A retracted row deletes its key. Running aggregates need "upsert".
        - `keys`: for "upsert", the columns that identify a row. After a running aggregate these are its keys.
        - `order_by`: a column. For "upsert", the row with the greatest value is kept, whichever arrived last.
        - `partition_by`: columns whose values have folders of their own (`carrier=AA`).
        - `if_exists`: whether a new job may write to a table that has rows: "error", "append", or "overwrite", which
          replaces the old rows in one step when the first checkpoint completes.
        - `target_file_size`: the size of files, such as "128mb". A subtask writes a file at each checkpoint, or as soon
          as its rows have this size.
        - `auto_compact`: whether the coordinator merges small files while the job runs.
        - `schema_evolution`: "add_columns" adds new nullable columns at the end to an existing table. Without it the
          columns must be the same.
        - `history`: how long files are kept that the table no longer shows, a duration. After that older commits cannot
          be read, and older savepoints cannot be restored. None keeps everything until `vacuum`.

        Raises ConfigurationError for columns that do not exist, and for updates or changes that the mode cannot apply.

        Example:

            >>> table = orders.to_table("orders-table")
            >>> _ = env.execute(progress="off").wait()
            >>> table.to_arrow().num_rows
            3
        """
        table_options = TableOptions.of(
            f"to_table {name!r}", if_exists, target_file_size, auto_compact, schema_evolution, history
        )
        options = StepOptions(name, uid, parallelism)
        return output_steps.to_table(self, url, mode, keys, order_by, partition_by, table_options, options)

    @overload
    def to_delta(
        self,
        url: str | os.PathLike[str],
        *,
        mode: Literal["append"] = "append",
        keys: tuple[()] = (),
        partition_by: str | Sequence[str] = (),
        if_exists: IfExists = "error",
        target_file_size: str | int = FILE_BYTES,
        auto_compact: bool = True,
        schema_evolution: SchemaEvolution | None = None,
        history: str | timedelta | int | None = HISTORY_DEFAULT,
        name: str = "to_delta",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> OutputTable: ...

    @overload
    def to_delta(
        self,
        url: str | os.PathLike[str],
        *,
        mode: Literal["upsert"],
        keys: str | Sequence[str],
        partition_by: str | Sequence[str] = (),
        history: str | timedelta | int | None = HISTORY_DEFAULT,
        name: str = "to_delta",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> None: ...

    def to_delta(
        self,
        url: str | os.PathLike[str],
        *,
        mode: TableMode = "append",
        keys: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        if_exists: IfExists = "error",
        target_file_size: str | int = FILE_BYTES,
        auto_compact: bool = True,
        schema_evolution: SchemaEvolution | None = None,
        history: str | timedelta | int | None = HISTORY_DEFAULT,
        name: str = "to_delta",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> OutputTable | None:
        """Writes the rows to a Delta Lake table, exactly once.

        Spark, Polars, DuckDB and Trino can read the table without tidegate.

        Each completed checkpoint that has rows is one transaction of Delta. Other programs may write to the table as
        well. Needs `pip install 'tidegate[delta]'`; see `docs/delta.md`.

        - `url`: the folder or URL of the table.
        - `mode`: "append" adds rows, and returns the table. "upsert" replaces the row with the same `keys`, and deletes
          retracted rows of a stream of changes, by a MERGE into a table that is created unless it exists. It
          returns None.
        - `history`: how long a new table keeps its log and the files of older versions. In an existing table the
          property `delta.deletedFileRetentionDuration` counts if it is longer.
        - `partition_by`: as in `to_table`. With mode="upsert" for a new table.
        - `if_exists`, `target_file_size`, `auto_compact` and `schema_evolution`: for mode="append", as in `to_table`.

        Raises ConfigurationError for a stream of updates or changes with mode="append", and TableError for columns that
        Delta or the existing table cannot store.

        Example:

            >>> table = orders.to_delta("orders-delta")
        """
        table_options = TableOptions.of(
            f"to_delta {name!r}", if_exists, target_file_size, auto_compact, schema_evolution, history
        )
        options = StepOptions(name, uid, parallelism)
        return output_steps.to_delta(self, url, mode, keys, partition_by, table_options, options)

    def to_iceberg(
        self,
        *,
        catalog: CatalogLike,
        table: str,
        mode: TableMode = "append",
        keys: str | Sequence[str] = (),
        create: bool = False,
        partition_by: str | Sequence[str] = (),
        target_file_size: str | int = FILE_BYTES,
        name: str = "to_iceberg",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> None:
        """Writes the rows to an Apache Iceberg table, exactly once.

        Each completed checkpoint with rows is one snapshot.

        Needs `pip install 'tidegate[iceberg]'`; see `docs/iceberg.md`.

        - `catalog`: the name of a catalog in pyiceberg's configuration, or its properties, such as `{"type": "rest",
          "uri": "http://..."}`, or an object of pyiceberg.
        - `table`: namespace and name, "shop.orders".
        - `mode`: "append" adds rows. "upsert" replaces the row with the same `keys`, and deletes retracted rows of a
          stream of changes, by rewriting files.
        - `create`: creates the table with the columns of the stream unless it exists.
        - `partition_by`: for a new table, columns, "day(column)" (or year, month, hour), "bucket(16, column)" or
          "truncate(8, column)".
        - `target_file_size`: a subtask begins another file after this many bytes of rows in memory.
        - `uid`: names prepared rows in checkpoints, so set it.

        Raises ConfigurationError if there is no such table, TableError if the columns of the stream do not fit it.

        Example:

            >>> orders.to_iceberg(catalog="lake", table="shop.orders", uid="orders")  # doctest: +SKIP
        """
        options = StepOptions(name, uid, parallelism)
        output_steps.to_iceberg(self, catalog, table, mode, keys, create, partition_by, target_file_size, options)

    def to_files(
        self,
        url: str | os.PathLike[str],
        *,
        format: WrittenFormat = "parquet",
        compression: str | None = None,
        target_file_size: str | int = FILE_BYTES,
        name: str = "to_files",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> None:
        """Writes files to a folder, exactly once, for other systems. See `docs/formats.md`.

        A file appears complete, after the checkpoint that covers its rows. Each checkpoint gives one file or more for
        each subtask that had rows. To read the rows back as one table use `to_table`.

        - `url`: a folder on any storage of files. Files that are there stay as they are.
        - `format`: "parquet", "avro", "csv" (with a header) or "json" (an object in each line), or a `tg.AvroFormat`
          with a schema or a `tg.CsvFormat` with options.
        - `compression`: of Avro "deflate" (default) or "none"; of Parquet "zstd" (default), "snappy", "gzip", "lz4" or
          "none".
        - `target_file_size`: a subtask begins another file after about this many bytes.
        - `uid`: names prepared files in checkpoints, so set it.

        Raises ConfigurationError for columns that the format cannot hold. A row that it cannot hold, such as NaN in
        JSON, fails the job.

        Example:

            >>> orders.to_files("orders", format="json", uid="orders")
            >>> _ = env.execute(progress="off").wait()
        """
        options = StepOptions(name, uid, parallelism, slot=slot)
        output_steps.to_files(self, url, format, compression, target_file_size, options)

    def to_sink(
        self,
        sink: Sink | CommittingSink,
        *,
        keys: str | Sequence[str] = (),
        flush_bytes: str | int = FLUSH_BYTES,
        name: str = "to_sink",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> None:
        """Writes the rows to another system through a user-defined sink, exactly once. See `docs/own-sinks.md`.

        - `sink`: prepares rows for a checkpoint. When the checkpoint is complete, they are committed: by the
          coordinator all at once (`tg.Sink`), or by each subtask (`tg.CommittingSink`).
        - `keys`: columns. Rows of one key go to one subtask, in their order. After a running aggregate
          (`emit="update"`) these are its keys, and the sink must replace the row with the same keys.
        - `flush_bytes`: the size of the batches that `write` gets, such as "8mb". A checkpoint flushes smaller ones.
        - `uid`: names prepared rows in checkpoints, so set it.

        Raises ConfigurationError if `sink` is neither, and for a stream of changes, unless `sink` is a
        `tg.CommittingSink` that accepts changes.

        Example:

            >>> class Printed(tg.Sink):
            ...     def write(self, batch):
            ...         print(batch.num_rows)
            ...     def prepare(self, checkpoint_id):
            ...         return None
            ...     def commit(self, prepared, context):
            ...         pass
            >>> orders.to_sink(Printed(), uid="printed")
        """
        output_steps.to_sink(self, sink, keys, flush_bytes, StepOptions(name, uid, parallelism, slot=slot))

    def to_postgres(
        self,
        dsn: str,
        table: str,
        *,
        mode: WriteMode = "append",
        keys: str | Sequence[str] = (),
        on_conflict: OnConflict | None = None,
        create: bool = False,
        token_table: str = TOKEN_TABLE,
        name: str = "to_postgres",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> None:
        """Writes the rows to a table of PostgreSQL, exactly once: one transaction for each subtask and completed
        checkpoint.

        The transaction also stores a token in a separate table, so a repeated commit changes nothing. This call
        connects to the server and checks columns and keys. Needs `pip install 'tidegate[databases]'`; see
        `docs/databases.md`.

        - `dsn`: an address of libpq, such as "postgresql://user@host/database". Leave passwords to `~/.pgpass`.
        - `table`: a name, or "schema.table". It must exist, unless `create` is True.
        - `mode`: "append" inserts every row. "upsert" replaces the row with the same `keys`, and a retracted row of a
          stream of changes deletes it. Running aggregates need "upsert".
        - `keys`: for "upsert", the columns of the primary key or of a unique index.
        - `on_conflict`: what happens to a row whose key exists. For "append" "error", the default, or "ignore". For
          "upsert" "update", the default, or "ignore".
        - `create`: whether to create the table if it does not exist.
        - `token_table`: the table for tokens, which is created if it does not exist.

        Raises ConfigurationError for a table that does not fit, and if the server does not answer.

        Example:

            >>> orders.to_postgres("postgresql://ann@db/shop", "orders", uid="orders")  # doctest: +SKIP
        """
        given = TableArguments(dsn, table, mode, keys, on_conflict, create, token_table)
        database_steps.to_database(self, "to_postgres", given, StepOptions(name, uid, parallelism))

    def to_sql(
        self,
        url: str,
        table: str,
        *,
        mode: WriteMode = "append",
        keys: str | Sequence[str] = (),
        on_conflict: OnConflict | None = None,
        create: bool = False,
        token_table: str = TOKEN_TABLE,
        name: str = "to_sql",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> None:
        """Writes the rows to a table of SQLite, MySQL or MariaDB through SQLAlchemy, exactly once.

        The method works like `to_postgres`, and is slower, because these drivers take one Python value at a time. Needs
        `pip install 'tidegate[databases]'` and the driver of the database; see `docs/databases.md`.

        - `url`: a URL of SQLAlchemy, such as "sqlite:////folder/file.db" or "mysql+pymysql://user@host/database".
        - All other parameters are as in `to_postgres`.

        Raises ConfigurationError for a table that does not fit, and if the database does not answer.

        Example:

            >>> orders.to_sql("sqlite:///orders.db", "orders", create=True, uid="orders")
            >>> _ = env.execute(progress="off").wait()
        """
        given = TableArguments(url, table, mode, keys, on_conflict, create, token_table)
        database_steps.to_database(self, "to_sql", given, StepOptions(name, uid, parallelism))

    def to_kafka(
        self,
        servers: str,
        *,
        topic: str | pl.Expr,
        key: str | Sequence[str] = (),
        value: str | Sequence[str] | None = None,
        format: PayloadFormat = "json",
        key_format: PayloadFormat | None = None,
        registry: SchemaRegistry | str | None = None,
        headers: Mapping[str, str] | str | None = None,
        partition: str | None = None,
        timestamp: str | None = None,
        delivery: Delivery = "exactly_once",
        create: bool | int = False,
        partitioner: str = "murmur2_random",
        delivery_timeout: str | timedelta | int = "1min",
        token_topic: str = "tidegate-commits",
        transactional_id_prefix: str = "tidegate",
        properties: Mapping[str, object] | None = None,
        errors_to: OutputTag | str | None = None,
        name: str = "to_kafka",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Writes the rows to a topic of Kafka. Needs `pip install 'tidegate[kafka]'`. See `docs/kafka.md`.

        A stream of changes or updates needs `key`. The records are upserts: the newest record of a key is its current
        row, and a retracted row becomes a tombstone.

        - `servers`: the brokers, "host:port,host:port".
        - `topic`: a name, or a column with names, as `pl.col("topic")`.
        - `key`: the columns of the key. One column of strings or bytes is written as it is; otherwise the key is an
          object in `key_format`.
        - `value`: the columns of the value; by default all that are not the topic, the partition or the headers.
        - `format`: the format of values: "json", "avro", "json_schema", "protobuf", "csv", "text" or "raw" (one column;
          null is a tombstone), or an object such as `tg.AvroFormat(...)`. See `docs/formats.md`. For a stream of
          changes also "upsert" (JSON, with the keys of the stream as the default of `key`), and "debezium" or a
          `tg.DebeziumFormat` (events with the row before and the row after; `docs/change-data.md`).
        - `key_format`: the format of keys, as `format`.
        - `registry`: for "avro", "json_schema" and "protobuf", and for "debezium" in Avro: the address of the schema
          registry, or a `tg.SchemaRegistry`.
        - `headers`: a column for each header, by name, or one column with a list of structs (key, value).
        - `partition`: a column with the number of the partition. A null leaves the choice to `partitioner`.
        - `timestamp`: a column of timestamps, or of milliseconds since 1970; by default the time of sending.
        - `delivery`: "exactly_once": records become visible after each checkpoint, in a transaction. Readers need
          `isolation.level=read_committed`. "at_least_once": records are sent as they come, and come again after a
          failure.
        - `create`: True creates the topic if it does not exist, a number creates it with this many partitions.
        - `partitioner`: of librdkafka; the default is the one of Kafka's Java clients.
        - `delivery_timeout`: how long the client tries to deliver a record, a duration. With "exactly_once" a commit
          that fails is repeated anyway; its first attempt takes 10 s at most, and later ones up to this time.
        - `token_topic`: the compacted topic of commit tokens; created if it does not exist.
        - `transactional_id_prefix`: how transactional ids begin, for access rules of the brokers.
        - `properties`: settings of librdkafka.
        - `errors_to`: a side output for rows that cannot be a record, such as one that is too large; by default such a
          row fails the job.
        - `uid`: names prepared records in checkpoints, so set it.

        Returns the stream of records, which is needed for `side_output` only.

        Raises ConfigurationError for wrong settings and columns. `execute` raises it for topics that do not exist.

        Example:

            >>> _ = orders.to_kafka("broker:9092", topic="orders", key="user", uid="orders")  # doctest: +SKIP
        """
        parts = RecordParts(topic, key, value, format, key_format, registry, headers, partition, timestamp)
        kafka = KafkaOptions(
            delivery, create, partitioner, delivery_timeout, token_topic, transactional_id_prefix, properties
        )
        options = StepOptions(name, uid, parallelism, slot=slot)
        return kafka_steps.to_kafka(self, servers, parts, kafka, errors_to, options)

    def collect(self, *, name: str = "collect", uid: str | None = None) -> CollectedRows:
        """Collects the rows of the stream for this driver, exactly once.

        `to_arrow()` of the result waits for the end of a bounded job and returns all rows. `rows()`, `head(n)` and
        `show(n)` return the rows that checkpoints cover while the job runs. If an aggregate emits updates, all updates
        are collected, not only the newest row of each key.

        Raises ConfigurationError if the columns are not known.

        Example:

            >>> rows = orders.select("user").collect()
            >>> job = env.execute(progress="off")
            >>> rows.to_arrow()["user"].to_pylist()
            ['ann', 'bob', 'ann']
        """
        return output_steps.collected_rows(self, name, uid, handed_on=False)

    def show(self, n: int = ROWS_SHOWN, *, timeout: str | timedelta | int = "10s") -> None:
        """Runs the program up to this stream, and prints the first rows as a table.

        A separate job reads the sources from their beginning, and ends as soon as it has enough rows. Its folder is
        deleted, and the program can still be executed afterwards. Tables and other sinks are not written. Functions may
        be called with more rows than are printed. All versions of the rows of aggregates are printed, as with
        `collect`.

        - `n`: the number of rows, at least 0.
        - `timeout`: how long to wait for rows of a source that does not end, a duration.

        Raises JobFailedError, and the errors of `StreamEnvironment.execute`.

        Example:

            >>> orders.show(1)
            +------+--------+----+
            | user | amount | at |
            +------+--------+----+
            | ann  |     30 |  0 |
            +------+--------+----+
            only the first 1 rows
        """
        found, note = output_steps.first_rows(self, check_count("show", n), timeout)
        print(grid(found, note))

    def for_each_checkpoint(
        self,
        fn: Callable[[Any, int], object],
        *,
        retries: int = 3,
        max_behind: int = 10,
        name: str = "for_each_checkpoint",
        uid: str | None = None,
    ) -> None:
        """Calls `fn(df, checkpoint_id)` in this driver with the rows of each completed checkpoint, one after the other.

        This corresponds to Spark's `foreachBatch`, with checkpoints in place of micro-batches
        (`docs/for-each-checkpoint.md`). Rows arrive at least once: after a failure `fn` is called again with the same
        rows and id. Ids increase, and an id is never used for other rows, also in a restored job. Write `fn` so that a
        second call with the same id changes nothing. Checkpoints without rows of this stream are skipped. `job.wait()`
        returns when `fn` has had all rows.

        - `fn`: its first argument is a Spark DataFrame, or an Arrow table if the environment has no Spark. The
          DataFrame is valid only during the call.
        - `retries`: how often `fn` is called again if it raises, after growing pauses, before the job fails.
        - `max_behind`: while more checkpoints than this wait for `fn`, the sources read no input.

        Raises ConfigurationError if `fn` cannot be called with two arguments, and for values out of range.

        Example:

            >>> orders.for_each_checkpoint(lambda rows, checkpoint_id: print(rows.num_rows))
        """
        output_steps.rows_to_function(self, fn, retries, max_behind, name, uid)

    # --- what the builders of steps use ---------------------------------------------------------------------------

    @property
    def _input_parallelism(self) -> int:
        """Returns the number of subtasks of the previous operator.

        A step with the same parallelism is chained to it.
        """
        return self._inputs[0][0].parallelism

    @property
    def _is_broadcast(self) -> bool:
        """Returns True if every subtask of the next operator receives all rows."""
        return all(p is not None and p.kind is PartitioningKind.BROADCAST for _, p in self._inputs)

    def _with_columns(
        self,
        expressions: Sequence[pl.Expr | str],
        options: StepOptions,
        *,
        own: Collection[str] = (),
        are_keys: bool = False,
    ) -> Stream:
        return column_steps.with_columns(self, expressions, options, own=own, are_keys=are_keys)

    def _select(self, expressions: Sequence[pl.Expr | str], options: StepOptions) -> Stream:
        return column_steps.selected(self, expressions, options)

    def _derived(
        self,
        *,
        inputs: tuple[StreamInput, ...] | None = None,
        keyed_by: tuple[str, ...] = (),
        timestamp: str | None = None,
        changelog: ChangelogMode | None = None,
        errors_of: StreamNode | None = None,
    ) -> Stream:
        """Returns a stream of the same program with these properties.

        Its rows come from `inputs`, or from the inputs of this stream if it is None.
        """
        rows = self._inputs if inputs is None else inputs
        return Stream(self._program, rows, keyed_by, timestamp, changelog, errors_of)

    def _with_errors_of(self, node: StreamNode | None) -> Stream:
        """Returns this stream with a `side_output` that also finds the side outputs of the earlier step `node`, if it
        is not None.
        """
        if node is None:
            return self
        return Stream(self._program, self._inputs, self._keyed_by, self.timestamp, self._changelog, node)

    def _partitioned(self, partitioning: Partitioning) -> Stream:
        inputs = tuple((node, partitioning) for node, _ in self._inputs)
        return self._derived(inputs=inputs, timestamp=self.timestamp, changelog=self._changelog)

    def _by_keys(self, keys: tuple[str, ...]) -> Stream:
        """Returns this stream, partitioned so that rows with equal keys are processed in one subtask of the next
        operator.
        """
        return self._partitioned(Partitioning(PartitioningKind.HASH, keys))

    def _in_order(self, parallelism: int | None) -> Stream:
        """Returns this stream.

        If it has updates, and a different parallelism would change the order of rows, it is partitioned by their keys.
        """
        upstream, partitioning = self._inputs[0]
        wanted = parallelism if parallelism is not None else self._program.parallelism
        if self._changelog is None or partitioning is not None or upstream.parallelism == wanted:
            return self
        return self._by_keys(self._changelog.keys)

    def _then(self, step: Step, *, second: Stream | None = None) -> Stream:
        """Adds an operator, and returns the stream of its results.

        `second` is the second input of an operator with two inputs. Raises ConfigurationError if the operator cannot
        follow a stream of updates or changes.
        """
        options = step.options
        name, parallelism = options.name, options.parallelism
        streams = (self,) if second is None else (self, second)
        before = [stream._changelog for stream in streams if stream._changelog is not None]
        for found in before:
            if not (found.changes if step.takes_changes else step.changelog):
                raise found.refuse(repr(name))
        if self._changelog is not None and not step.takes_changes:
            parallelism = self._changelog.parallelism(repr(name), parallelism, self._input_parallelism)
        inputs = (self._in_order(parallelism)._inputs, () if second is None else second._inputs)
        resources, slot_group = slot_of(name, options.slot)
        combines = step.combines
        node = StreamNode(
            uid=self._program.new_uid(name, options.uid),
            name=name,
            parallelism=parallelism if parallelism is not None else self._program.parallelism,
            schema=step.schema,
            factory=step.operator,
            table=step.table,
            sink=step.sink,
            committing=step.committing,
            calls=step.calls,
            combines=combines if combines is not None and combines.is_exact else None,
            inputs=inputs[0] + inputs[1],
            ordinals=(0,) * len(inputs[0]) + (1,) * len(inputs[1]),
            batch_rows=check_batch_rows(name, options.batch_rows),
            resources=resources,
            slot_group=slot_group,
            side_outputs=tuple(step.side_outputs),
            retracts=before[0].made_by if before and (step.takes_changes or step.deletes) else None,
            meaning=None if step.meaning is None else with_computed_columns(step.meaning, inputs),
            computes=step.computes,
            key_texts=step.key_texts,
            retimes=step.retimes,
            event_time_check=step.event_time_check,
        )
        self._program.add_node(node, step.own)
        has_time = step.schema is None or self.timestamp in step.schema.names
        timestamp = self.timestamp if has_time else None
        return self._derived(inputs=((node, None),), timestamp=timestamp, changelog=step.changelog)


@all_or_nothing(lambda keyed: keyed.stream._program)
class KeyedStream(OtherNames):
    """A stream that is partitioned by key. `Stream` describes the parameters that its methods have in common."""

    _other_names = KEYED_STREAMS
    _before = ("stream", "key_by")

    def __init__(self, stream: Stream, keys: tuple[str, ...], replaced: frozenset[str] = frozenset()) -> None:
        """Made by `Stream.key_by`. `replaced` names the columns that key expressions of the same name have replaced."""
        self.stream = stream
        """The stream before it is partitioned by key."""
        self.keys = keys
        """Names of the key columns."""
        self._replaced = replaced

    def __repr__(self) -> str:
        return f"KeyedStream(by {', '.join(self.keys)}; {self.stream!r})"

    def _repr_html_(self) -> str:
        """Returns the keys, and the columns and their types, for notebooks."""
        return html_columns(f"KeyedStream by {', '.join(self.keys)}", self.stream.schema)

    def aggregate(
        self,
        mapping: Mapping[str, Aggregate] | None = None,
        /,
        *,
        emit: Literal["update", "each", "changes", "final"] | Aggregate = "update",
        name: str | Aggregate = "aggregate",
        uid: str | Aggregate | None = None,
        parallelism: int | Aggregate | None = None,
        ttl: str | timedelta | int | Aggregate | None = None,
        ttl_time: Literal["event", "processing"] | Aggregate = "event",
        errors_to: OutputTag | str | Aggregate | None = None,
        **aggregates: Aggregate,
    ) -> Stream:
        """Aggregates the rows of each key.

        - `aggregates`: aggregates such as `tg.count()` and `tg.sum("x")`, by output column.
        - `mapping`: the same as a dict, for columns whose names are parameters of this method: `aggregate({"name":
          tg.first("full_name")})`.
        - `emit`: when results are emitted.
            - "update": after each batch, the current values of each key in it. A row replaces the row before with
              the
              same key, for example in a table with mode="upsert".
            - "each": for each row, the values of all rows of its key up to it, such as a running total.
              `tg.last("x")`
              is the column "x" of the row itself.
            - "changes": like "update", but the row before is retracted. The column `row_kind` marks inserted and
              retracted rows (`docs/changes.md`).
            - "final": once for each key, at the end of a bounded input.
        - `ttl`: with "update" and "each", how long a key without new rows is kept, a duration. Afterwards its
          aggregates start again.
        - `ttl_time`: whether `ttl` is "event" or "processing" time (Flink's `table.exec.state.ttl`).
        - `errors_to`: for functions of the program (`tg.udaf`). A row that makes `accumulate` of a function raise, when
          it is tried in an empty group, goes to this side output and counts for no aggregate. Errors of `merge` and
          `result` fail the job.

        Raises ConfigurationError for columns that do not fit.

        Example:

            >>> orders.key_by("user").aggregate(n=tg.count(), total=tg.sum("amount"), emit="final").show()
            +------+---+-------+
            | user | n | total |
            +------+---+-------+
            | ann  | 2 |    42 |
            | bob  | 1 |     5 |
            +------+---+-------+
        """
        found, step = aggregates_and_options(
            "aggregate",
            mapping,
            aggregates,
            {
                "emit": (emit, "update"),
                "name": (name, "aggregate"),
                "uid": (uid, None),
                "parallelism": (parallelism, None),
                "ttl": (ttl, None),
                "ttl_time": (ttl_time, "event"),
                "errors_to": (errors_to, None),
            },
        )
        return keyed_aggregate(
            self.stream,
            self.keys,
            self._replaced,
            found,
            emit=step["emit"],
            ttl=step["ttl"],
            ttl_time=step["ttl_time"],
            errors_to=step["errors_to"],
            options=StepOptions(step["name"], step["uid"], step["parallelism"]),
        )

    def window(self, spec: WindowsTaken, *, time: WindowTime = "event", fire_at_end: bool = False) -> WindowedStream:
        """Assigns the rows of each key to windows.

        - `spec`: `tg.Tumbling`, `tg.Sliding`, `tg.Cumulating`, `tg.Session` or `tg.Count`.
        - `time`: "event", or "processing": the time of a row is then the time at which it is processed.
        - `fire_at_end`: whether windows of processing time, and count windows, that are open at the end of the input
          are emitted.

        Raises ConfigurationError for windows of event time if the stream has no event time.

        Example:

            >>> orders.key_by("user").window(tg.Session("1s")).aggregate(n=tg.count()).columns
            ['user', 'window_start', 'window_end', 'n']
        """
        return WindowedStream(self.stream, self.keys, spec, time, fire_at_end, replaced=self._replaced)

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
        fire_at_end: bool = False,
        errors_to: OutputTag | str | None = None,
        in_order: bool = False,
        **slot: Unpack[SlotOptions],
    ) -> Stream:
        """Calls a `tg.ProcessFunction` with each row or batch. The function has state and timers of the row's key.

        - `function`: an object with `process(row, context)`, which yields new rows as dicts, or with
          `process_batch(batch, context)`.
        - `side_outputs`: tags of side outputs to which the function may emit rows (see `Stream.side_output`).
        - `fire_at_end`: fires the processing-time timers that are pending when the input ends.
        - `errors_to`: needs `schema`. If the function raises, the row, or for a timer a row of the key columns, goes to
          this side output. Emitted rows, state and timers of the failed call are rolled back.
        - `in_order`: whether rows are sorted by event time: a row waits until the watermark has passed its time, and
          timers with earlier times fire before it. Late rows are dropped, counted in the metric
          `numLateRecordsDropped`, and are in `late_rows()` of the result. A function with `process_batch` gets sorted
          batches, and its timers fire after the rows of their watermark.

        Raises ConfigurationError if a method is missing or takes other parameters.

        Example:

            >>> class Counter(tg.ProcessFunction):
            ...     def open(self, context):
            ...         self.seen = context.state(tg.ValueState("seen", int))
            ...     def process(self, row, context):
            ...         number = (self.seen.value() or 0) + 1
            ...         self.seen.update(number)
            ...         yield {"user": row["user"], "number": number}
            >>> orders.key_by("user").process(Counter(), schema={"user": str, "number": int}).show()
            +------+--------+
            | user | number |
            +------+--------+
            | ann  |      1 |
            | bob  |      1 |
            | ann  |      2 |
            +------+--------+
        """
        return row_steps.processed_by_key(
            self.stream,
            self.keys,
            function,
            schema,
            side_outputs,
            errors_to,
            StepOptions(name, uid, parallelism, batch_rows, slot),
            fire_at_end=fire_at_end,
            in_order=in_order,
        )

    def stateful_map(
        self,
        fn: Callable[[Any, Row], tuple[Any, Any]],
        *,
        state: Any,
        schema: SchemaLike | None = None,
        ttl: StateTtl | str | timedelta | int | None = None,
        name: str = "stateful_map",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Maps each row with a state of its key: `fn(state, row)` returns the new state and the new row.

        - `fn`: the state is None for a key that has none yet. Returning None as the state clears it.
        - `state`: the type of the state, as `tg.ValueState` takes it: `int`, `list[float]`, a dataclass, a type of
          Arrow, or `tg.Pickled`.
        - `schema`: the columns of the new rows; an annotation such as `-> tuple[int, Total]` gives them as well.
        - `ttl`: how long the state is kept, a duration of processing time, or a `tg.StateTtl`.
        - `errors_to`: as in `process`.

        Raises ConfigurationError if `fn` cannot be called.

        Example:

            >>> def running(total, row):
            ...     total = (total or 0) + row["amount"]
            ...     return total, {"user": row["user"], "total": total}
            >>> orders.key_by("user").stateful_map(running, state=int, schema={"user": str, "total": int}).show()
            +------+-------+
            | user | total |
            +------+-------+
            | ann  |    30 |
            | bob  |     5 |
            | ann  |    42 |
            +------+-------+
        """
        check_function(fn, name, "the state and a row", "state", "row")
        given = as_schema(schema, f"{name}(schema=)") or returned_schema(fn, part=1)
        lifetime = ttl if ttl is None or isinstance(ttl, StateTtl) else StateTtl(ttl)
        return self.process(
            StatefulMap(fn, state, lifetime),
            schema=given,
            name=name,
            uid=uid,
            parallelism=parallelism,
            errors_to=errors_to,
        )

    def reduce(
        self,
        fn: Callable[[Row, Row], Row],
        *,
        name: str = "reduce",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Combines the rows of each key: `fn(before, row)` returns the combined row.

        Each row has a result, as with Flink's `reduce`. The result of the first row of a key is the row itself. The
        stream has no updates: all results are rows of the stream. `reduce(fn).key_by(...).deduplicate(keep="last")`, or
        an upsert table, keeps the newest of each key.

        - `fn`: takes two dicts, and returns a dict with the columns of the stream.

        Raises ConfigurationError if `fn` cannot be called, or the columns are not known.

        Example:

            >>> def larger(before, row):
            ...     return before if before["amount"] >= row["amount"] else row
            >>> orders.key_by("user").reduce(larger).columns
            ['user', 'amount', 'at']
        """
        check_function(fn, name, "two rows", "before", "row")
        schema = known_schema(self.stream, name)
        return self.process(
            Reduce(fn, schema), schema=schema, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to
        )

    def map_groups(
        self,
        fn: Callable[[pa.Table], Any],
        *,
        schema: SchemaLike | None = None,
        name: str = "map_groups",
        uid: str | None = None,
        parallelism: int | None = None,
        errors_to: OutputTag | str | None = None,
    ) -> Stream:
        """Calls `fn` once for each key, with all of its rows, when a bounded input has ended.

        All rows are stored as state until then. For an input that does not end use `window(...).apply(fn)`.

        - `fn`: takes a `pa.Table`, and returns a `pa.Table`, a polars DataFrame, a row as a dict, an iterable of rows,
          or None.

        Raises ConfigurationError if `fn` cannot be called, or the columns are not known.

        Example:

            >>> def largest(rows):
            ...     return {"user": rows["user"][0].as_py(), "largest": max(rows["amount"].to_pylist())}
            >>> orders.key_by("user").map_groups(largest, schema={"user": str, "largest": int}).columns
            ['user', 'largest']
        """
        check_function(fn, name, "an Arrow table", "rows", may_yield=True)
        rows = known_schema(self.stream, name)
        given = as_schema(schema, f"{name}(schema=)") or returned_schema(fn) or returned_schema(fn, many=True)
        return self.process(
            MapGroups(fn, rows), schema=given, name=name, uid=uid, parallelism=parallelism, errors_to=errors_to
        )

    def deduplicate(
        self,
        by: str | None = None,
        *,
        keep: Literal["first", "last"] = "first",
        ttl: str | timedelta | int | None = None,
        name: str = "deduplicate",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Keeps one row of each key: the first or the last.

        Without `by`, keep="first" emits the first row of each key and nothing else. In all other cases the stream has
        updates: a row replaces the row before with the same key, as after an aggregate with emit="update".

        - `by`: the column that orders the rows; by default they are in the order of arrival.
        - `keep`: "first" or "last".
        - `ttl`: how long a key is stored, a duration of event time. A row that is at least this much later than the
          last emitted row of its key counts as a new key. Rows that are `ttl` or more behind the watermark are dropped,
          and counted in the metric `numLateRecordsDropped`.

        Raises ConfigurationError for a column that does not exist, and for a `ttl` without event time.

        Example:

            >>> orders.key_by("user").deduplicate(by="amount", keep="last", uid="best").columns
            ['user', 'amount', 'at']
        """
        stream, keys = self.stream, self.keys
        ttl_ms = None if ttl is None else parse_duration_ms(ttl, setting="deduplicate(ttl=...)")
        column = None if by is None else column_names(by, "deduplicate(by=...)")[0]
        if ttl_ms is not None and stream.timestamp is not None:
            uses_event_time("deduplicate(ttl=...)", stream._inputs)
        operator = partial(Deduplicate, keys, column, keep, stream.timestamp, ttl_ms)
        made = operator()
        if stream.schema is not None:
            made.validate(stream.schema)
        means = meaning(
            "deduplicate",
            {
                "keys": keys,
                "keep": keep,
                "by": "arrival" if column is None else column_of(column),
                "ttl": ttl_text(ttl_ms, stream.timestamp),
            },
            rows={"": (stream.schema, keys)},
        )
        if column is not None and stream.schema is not None:
            means = with_rows(means, by=pa.schema([stream.schema.field(column)]))
        step = Step(operator=operator, schema=stream.schema, options=StepOptions(name, uid, parallelism), meaning=means)
        rows = stream._by_keys(keys)._then(step)
        has_updates = column is not None or keep == "last"
        changelog = ChangelogMode.of(rows._inputs[0][0], keys) if has_updates else None
        return rows._derived(keyed_by=keys, timestamp=rows.timestamp, changelog=changelog)

    def top_n(
        self,
        n: int,
        by: str | Sequence[str],
        *,
        descending: bool | Sequence[bool] = True,
        nulls_last: bool | Sequence[bool] | None = None,
        rank: str | None = None,
        emit: RankEmit = "changes",
        ties: bool = False,
        ttl: str | timedelta | int | None = None,
        name: str = "top_n",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> Stream:
        """Keeps the first `n` rows of each key, in the order of the columns `by`. See `docs/top-n.md`.

        - `n`: the number of rows, at least 1.
        - `by`: a column, or several, the most important first. Of rows that are equal in all of them the one that
          arrived first is first.
        - `descending`: whether the greatest value is first; one value for all of `by`, or one for each.
        - `nulls_last`: by default nulls are last if the order descends, and first if it ascends, as in Spark.
        - `rank`: the name of a column for the rank, which counts from 1.
        - `emit`: "changes" retracts a row that drops out or changes its rank. "update", which needs `rank`, emits a row
          that replaces the one with its key and rank. "final" is for results of windows, keyed by `window_end` among
          others: the first rows are emitted once, when the window ends. For plain rows see `WindowedStream.top_n`.
        - `ties`: with "final", rows that are equal in the order share a rank, so there may be more than `n`.
        - `ttl`: a key is removed when its newest row among the first `n` is this far behind the watermark, a duration.

        Raises ConfigurationError for columns that do not exist or cannot be ordered.

        Example:

            >>> orders.key_by("user").top_n(1, by="amount", rank="place").columns
            ['user', 'amount', 'at', 'place', 'row_kind']
        """
        options = StepOptions(name, uid, parallelism)
        ranking = ranking_of(self.keys, n, by, descending, rank, emit, ties, nulls_last)
        if emit != "final":
            return ranked_stream(self.stream, ranking, ttl, options)
        if ttl is not None:
            raise ConfigurationError(
                f'{name}: with emit="final" rows are forgotten when their window ends; remove ttl='
            )
        return ranked_windows(self.stream, ranking, None, options)

    def connect(self, other: KeyedStream | Stream) -> ConnectedStreams:
        """Connects this stream to another keyed stream, so that one operator processes both.

        Rows with the same key share state.

        - `other`: a keyed stream, or a broadcast stream (`rules.broadcast()`), whose rows are sent to all subtasks.

        Raises ConfigurationError for keys that do not correspond.

        Example:

            >>> connected = orders.key_by("user").connect(payments.key_by("user"))
        """
        return _connected(self, other)


def _connected(first: Stream | KeyedStream, second: Stream | KeyedStream) -> ConnectedStreams:
    """Returns both streams as `ConnectedStreams`, with their keys. A stream that is not keyed has no keys."""
    if not isinstance(second, KeyedStream):
        check_stream(second, Stream, "connect")
    streams = [each.stream if isinstance(each, KeyedStream) else each for each in (first, second)]
    keys = [each.keys if isinstance(each, KeyedStream) else () for each in (first, second)]
    return ConnectedStreams(streams[0], streams[1], (keys[0], keys[1]))
