"""`StreamTables`: the methods of a stream that write its rows: to tables, to the driver, to a function per checkpoint.

`Stream` (`stream.py`) inherits them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Unpack, get_args

from tidegate.api.checkpoint_calls import CheckpointFunction, check_function
from tidegate.api.given_names import location
from tidegate.api.streams.steps.event_times import EventTimes
from tidegate.api.streams.steps.known_columns import known_schema
from tidegate.api.streams.steps.slot_options import SlotOptions
from tidegate.api.streams.steps.stream_calls import StreamCalls
from tidegate.api.streams.steps.stream_steps import StreamSteps
from tidegate.api.streams.stream_joins import StreamJoins
from tidegate.api.tables.output_tables import CollectedRows, OutputTable
from tidegate.api.tables.shown_rows import ROWS_SHOWN, check_count, grid
from tidegate.api.tables.table_options import HISTORY_DEFAULT, SchemaEvolution, TableOptions
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.operators.operator_errors import own_copy
from tidegate.operators.sinks.sink import FLUSH_BYTES, OwnSink, Sink
from tidegate.operators.sinks.table_sink import table_sink
from tidegate.operators.state.keys import key_schema
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.storage.checkpoints.metadata import own_sink_place
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.tables.compaction.small_files import FILE_BYTES
from tidegate.storage.tables.delta.delta_schema import check_delta_schema
from tidegate.storage.tables.table_log import IfExists, TableInfo, TableMode
from tidegate.storage.units import parse_duration_ms, parse_size_bytes


class StreamTables(StreamJoins, StreamCalls, EventTimes):
    """A stream whose rows can be written."""

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
        """Write to a table, exactly once: rows become visible when the checkpoint that covers them is complete.

        mode="append" keeps every row. mode="upsert" keeps the newest row of each key in `keys`; running aggregates need
        it, with their own keys. Rows of a key keep their order as long as one subtask makes them. With `order_by` that
        row of a key counts which is greatest in a column, whatever came last. A row of changes that is taken back
        deletes its key. `partition_by` names columns whose values get folders of their own (`carrier=AA`).

        A new job refuses a table that has rows, unless `if_exists` is "append" or "overwrite". With "overwrite" the
        first completed checkpoint replaces the old rows, in one step. A restored job goes on in its table. A table
        whose owner lives is refused, by `execute`.

        `target_file_size`, such as "128mb": how large files become. A subtask writes one for each checkpoint, or as
        soon as it holds so many bytes of rows. While the job runs its coordinator puts small ones together, beside the
        checkpoints; with `auto_compact=False` they stay.

        A table that is there must have the columns of the stream. With `schema_evolution="add_columns"` it gets the
        nullable columns that the stream has behind them; rows that are there have nulls in these.

        `history`, such as "7d": for how long the table keeps what it does not show any more. While the job runs its
        coordinator deletes older files, beside its commits. Older commits can then not be read any more, and older
        savepoints not be restored: both are a TableError that says so. None keeps everything until a `vacuum`.
        """
        options = TableOptions.of(
            f"to_table {name!r}", if_exists, target_file_size, auto_compact, schema_evolution, history
        )
        if order_by is not None and self._updating is not None:
            raise self._updating.refuse(f"to_table {name!r}", "the newest row counts: leave order_by= out")
        by = None if order_by is None else column_names(order_by, f"to_table {name!r}: order_by=")[0]
        names, parts = (
            column_names(given, f"to_table {name!r}: {what}=")
            for what, given in (("keys", keys), ("partition_by", partition_by))
        )
        info = self._table_info(mode, names, name, parts, order_by=by)
        return self._written(location(url, f"to_table {name!r}"), info, options, name, uid, parallelism)

    def to_delta(
        self,
        url: str | os.PathLike[str],
        *,
        partition_by: str | Sequence[str] = (),
        if_exists: IfExists = "error",
        target_file_size: str | int = FILE_BYTES,
        auto_compact: bool = True,
        schema_evolution: SchemaEvolution | None = None,
        history: str | timedelta | int | None = HISTORY_DEFAULT,
        name: str = "to_delta",
        uid: str | None = None,
        parallelism: int | None = None,
    ) -> OutputTable:
        """Write to a Delta Lake table, exactly once, which Spark, Polars, DuckDB and Trino read without tidegate.

        Like `to_table` in mode "append", with one transaction of Delta for each completed checkpoint that has rows.
        Others may add to the table. A Delta table that is made keeps its log and the files of its older versions for
        `history`; of one that is there the property `delta.deletedFileRetentionDuration` counts if it is longer.
        Needs `pip install 'tidegate[delta]'`; see `docs/delta.md`.
        """
        options = TableOptions.of(
            f"to_delta {name!r}", if_exists, target_file_size, auto_compact, schema_evolution, history
        )
        if self._updating is not None:
            raise self._updating.refuse(f"to_delta {name!r}")
        parts = column_names(partition_by, f"to_delta {name!r}: partition_by=")
        info = self._table_info("append", (), name, parts, f"tidegate-{uuid.uuid4()}")
        assert self.schema is not None
        check_delta_schema(self.schema)
        return self._written(location(url, f"to_delta {name!r}"), info, options, name, uid, parallelism)

    def to_sink(
        self,
        sink: Sink,
        *,
        keys: str | Sequence[str] = (),
        flush_bytes: str | int = FLUSH_BYTES,
        name: str = "to_sink",
        uid: str | None = None,
        parallelism: int | None = None,
        **slot: Unpack[SlotOptions],
    ) -> None:
        """Write to a system of your own, exactly once: a `tg.Sink` prepares for a checkpoint, and commits it.

        Rows come to `write` in batches of about `flush_bytes`, and what is left when a checkpoint begins. With `keys`
        rows of one key come to one subtask, in their order. Running aggregates (`emit="update"`) need their own keys
        here, and a sink that lets a row replace the one before it with its keys. See `docs/own-sinks.md`. The uid names
        what waits to be committed in checkpoints, so set it.
        """
        if not isinstance(sink, Sink):
            what = f"{sink.__name__} is a class; give an object" if isinstance(sink, type) else "give a tg.Sink"
            raise ConfigurationError(f"to_sink {name!r}: {what}, derived from tg.Sink, not {sink!r}")
        own_copy(sink)
        keys = column_names(keys, f"to_sink {name!r}: keys=")
        flushed = parse_size_bytes(flush_bytes, setting="flush_bytes")
        if flushed <= 0:
            raise ConfigurationError(f"to_sink {name!r}: flush_bytes must be positive, not {flush_bytes!r}")
        if self.schema is not None and (unknown := [key for key in keys if key not in self.schema.names]):
            raise ConfigurationError(f"to_sink {name!r}: there is no column {unknown[0]!r} for keys")
        if self._updating is not None:
            if self._updating.changes:
                raise self._updating.refuse(repr(name), "a sink of your own would not know what is taken back")
            self._updating.check_upsert(repr(name), keys)
        rows = self._together(keys, parallelism) if keys else self
        node_uid = self._program.new_uid(name, uid)
        rows._then(
            partial(OwnSink, flushed),
            self.schema,
            name,
            node_uid,
            parallelism,
            slot=slot,
            table=own_sink_place(node_uid),
            updating=self._updating,
            sink=sink,
        )

    def _written(
        self, where: str, info: TableInfo, options: TableOptions, name: str, uid: str | None, parallelism: int | None
    ) -> OutputTable:
        if self._updating is not None:
            self._updating.check_upsert(repr(name), info.keys)
        table = OutputTable(where, info, options, self._program.open_store)
        self._program.add_table(table)
        rows = self if info.mode == "append" else self._together(info.keys, parallelism)
        rows._then(
            partial(table_sink, info),
            self.schema,
            name,
            uid,
            parallelism,
            table=table.url,
            updating=self._updating,
            deletes=info.deletes and self._updating is not None and not self._updating.recorded,
        )
        return table

    def collect(self, *, name: str = "collect", uid: str | None = None) -> CollectedRows:
        """Collect the rows, exactly once: `to_arrow()` waits for the end of a bounded job and returns all of them.

        `rows()`, `head(n)` and `show(n)` of what is returned give those that checkpoints cover while the job runs.
        After an aggregate that emits updates these are all updates, not only the newest row of each key.
        """
        return self._collected(name, uid, handed_on=False)

    def show(self, n: int = ROWS_SHOWN, *, timeout: str | timedelta | int = "10s") -> None:
        """Run the program up to here, and print the first `n` rows that come as a table: `orders.show()`.

        A job of its own reads the sources from their beginning, and ends as soon as enough rows are there. Nothing of
        it stays, and the streams can be executed as if nothing had been shown. Tables and other sinks are not written.
        Functions are called, with more rows than are printed. Where a source never ends, what came within `timeout` is
        printed. Rows of aggregates are all versions, as with `collect`. Raises as `execute`, and JobFailedError.
        """
        timeout_ms = parse_duration_ms(timeout, setting="show(timeout)")
        found, note = self._program.preview(self, check_count("show", n), timeout_ms)
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
        """Call `fn(df, checkpoint_id)` in this driver with the rows of each completed checkpoint, one after the other.

        It is to checkpoints what Spark's `foreachBatch` is to micro-batches. `df` is a Spark DataFrame, for any Spark
        writer; if the environment has no Spark, it is an Arrow table. It is valid during the call. Checkpoints without
        rows of this stream are skipped. See `docs/for-each-checkpoint.md`.

        The rows of a checkpoint come at least once: after a failure of `fn`, the driver or the job they come again,
        under the same id. Ids increase. An id is never used for other rows, in this job or one restored from it. So
        write in such a way that a second call with an id changes nothing.

        If `fn` raises an Exception, it is called again, up to `retries` times, after growing pauses; then the job
        fails. While more than `max_behind` checkpoints wait for `fn`, the sources read no more input. `job.wait()`
        returns when `fn` has had all rows. After an aggregate that emits updates, `df` has all updates.
        Raises ConfigurationError.
        """
        check_function(fn, retries, max_behind, name)
        rows = self._collected(name, uid, handed_on=True)
        self._program.functions.append(CheckpointFunction(fn, rows, retries, max_behind))

    def _collected(self, name: str, uid: str | None, *, handed_on: bool) -> CollectedRows:
        info = self._table_info("append", (), name)
        rows = CollectedRows(self._program.new_uid(name, uid), info, self._program.open_store, handed_on=handed_on)
        self._then(
            partial(table_sink, info),
            self.schema,
            name,
            rows.uid,
            None,
            table=rows.placeholder,
            updating=self._updating,
        )
        self._program.collected.append(rows)
        return rows

    def _table_info(
        self,
        mode: TableMode,
        keys: tuple[str, ...],
        name: str,
        partition_by: tuple[str, ...] = (),
        delta_id: str | None = None,
        order_by: str | None = None,
    ) -> TableInfo:
        columns = known_schema(self, name)
        if mode not in get_args(TableMode):
            raise ConfigurationError(f'{name}: a table is written in mode "append" or "upsert", not {mode!r}')
        if mode == "upsert" and not keys:
            raise ConfigurationError(
                f'{name}: mode="upsert" needs keys=[...]: the columns that tell rows apart, of which the newest counts'
            )
        if self._updating is not None:
            self._updating.check_kind_is_no_key(repr(name), keys)
        if mode == "append" and keys:
            raise ConfigurationError(f'{name}: keys={list(keys)} are for mode="upsert"; mode="append" keeps every row')
        if keys and set(keys) <= set(columns.names):
            try:
                key_schema(columns, keys)
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}: keys={list(keys)}: {error}") from error
        schema, deletes = columns, mode == "upsert" and self._updating is not None and self._updating.changes
        if deletes:
            schema = schema.remove(schema.get_field_index(CHANGE))
        return TableInfo.of(schema, mode, keys, partition_by, delta_id, deletes, order_by)

    def _together(self, keys: tuple[str, ...], parallelism: int | None) -> StreamSteps:
        """This stream, partitioned so that rows with the same `keys` meet in one subtask of the next operator."""
        upstream, partitioning = self._inputs[0]
        parallelism = parallelism if parallelism is not None else self._program.parallelism
        stay = len(self._inputs) == 1 and partitioning is None and upstream.parallelism == parallelism
        if stay and self._keyed_by and set(self._keyed_by) <= set(keys):
            return self
        return self._partitioned(Partitioning(PartitioningKind.HASH, keys))
