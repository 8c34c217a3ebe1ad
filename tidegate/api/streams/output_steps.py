"""Builds the steps that write the rows of a stream: tables, Delta tables, sinks, `collect` and `for_each_checkpoint`.

Each builder raises ConfigurationError for a stream that the target cannot write correctly: a stream without known
columns, or with updates or changes that the target cannot apply.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from tidegate.api.checkpoint_calls import CheckpointFunction, check_function
from tidegate.api.name_checks import location
from tidegate.api.streams.expression_columns import known_schema
from tidegate.api.streams.step import Step, StepOptions
from tidegate.api.tables.output_tables import CollectedRows, OutputTable, TableOptions
from tidegate.connectors.committing_sink import BUCKETS_MAX, DEFAULT_BUCKETS, CommittingSink
from tidegate.connectors.delta.client import DeltaPlace
from tidegate.connectors.delta.sink import DeltaUpsert, check_delta_keys
from tidegate.connectors.files.encoders import WrittenFormat, file_encoding
from tidegate.connectors.files.sink import FileSink
from tidegate.connectors.iceberg.client import TableLayout, TablePlace, check_writable
from tidegate.connectors.iceberg.options import CatalogLike, CatalogOptions, check_columns
from tidegate.connectors.iceberg.sink import IcebergAppend, IcebergUpsert
from tidegate.connectors.sink import Sink
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.changes import CHANGE
from tidegate.operators.operator_errors import own_copy
from tidegate.operators.sinks.sink import FLUSH_BYTES, UserSinkOperator
from tidegate.operators.sinks.table_sink import table_sink
from tidegate.operators.state.keys import key_schema
from tidegate.storage.argument_checks import check_methods_run_at_once
from tidegate.storage.checkpoints.metadata import own_sink_place
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.delta_mirror import check_delta_schema
from tidegate.storage.tables.maintenance import FILE_BYTES
from tidegate.storage.tables.partitions import check_partitioning
from tidegate.storage.tables.table_info import TableInfo, TableMode
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from tidegate.api.streams.stream import Stream


def to_table(
    stream: Stream,
    url: str | os.PathLike[str],
    mode: TableMode,
    keys: str | Sequence[str],
    order_by: str | None,
    partition_by: str | Sequence[str],
    table_options: TableOptions,
    options: StepOptions,
) -> OutputTable:
    """Builds the step of `Stream.to_table`."""
    where = f"to_table {options.name!r}"
    if order_by is not None and stream._changelog is not None:
        raise stream._changelog.refuse(where, "the newest row of a key counts: remove order_by=")
    by = None if order_by is None else column_names(order_by, f"{where}: order_by=")[0]
    names = column_names(keys, f"{where}: keys=")
    parts = column_names(partition_by, f"{where}: partition_by=")
    info = _table_info(stream, options.name, mode, names, parts, order_by=by)
    return _written(stream, location(url, where), info, table_options, options)


def to_delta(
    stream: Stream,
    url: str | os.PathLike[str],
    mode: TableMode,
    keys: str | Sequence[str],
    partition_by: str | Sequence[str],
    table_options: TableOptions,
    options: StepOptions,
) -> OutputTable | None:
    """Builds the step of `Stream.to_delta`. Returns the table for mode "append", and None for mode "upsert"."""
    where = f"to_delta {options.name!r}"
    names = column_names(keys, f"{where}: keys=")
    parts = column_names(partition_by, f"{where}: partition_by=")
    if mode == "upsert":
        _merged_into_delta(stream, location(url, where), names, parts, table_options, options)
        return None
    if stream._changelog is not None:
        raise stream._changelog.refuse(where)
    info = _table_info(stream, options.name, mode, names, parts, f"tidegate-{uuid.uuid4()}")
    assert stream.schema is not None
    check_delta_schema(stream.schema)
    return _written(stream, location(url, where), info, table_options, options)


def _merged_into_delta(
    stream: Stream,
    url: str,
    keys: tuple[str, ...],
    partition_by: tuple[str, ...],
    table_options: TableOptions,
    options: StepOptions,
) -> None:
    where = f"to_delta {options.name!r}"
    usual = TableOptions.of(where, "error", FILE_BYTES, auto_compact=True, schema_evolution=None, history=None)
    if replace(table_options, history_ms=None) != usual:
        raise ConfigurationError(
            f'{where}: if_exists, target_file_size, auto_compact and schema_evolution are for mode="append"; remove '
            'them. mode="upsert" changes a table that exists, as MERGE does'
        )
    info = _table_info(stream, where, "upsert", keys)
    check_delta_keys(info.arrow_schema, keys, where)
    check_partitioning(info.arrow_schema, partition_by, ())
    place = DeltaPlace(open_store(url).url, info.arrow_schema, partition_by, table_options.history_ms)
    place.check()
    _upserted(stream, DeltaUpsert(place, keys), info, options)


def _written(
    stream: Stream, url: str, info: TableInfo, table_options: TableOptions, options: StepOptions
) -> OutputTable:
    changelog = stream._changelog
    if changelog is not None:
        changelog.check_upsert(repr(options.name), info.keys)
    table = OutputTable(url, info, table_options, stream._program.open_store)
    stream._program.add_table(table)
    rows = stream if info.mode == "append" else partitioned_by_key(stream, info.keys, options.parallelism)
    rows._then(
        Step(
            operator=partial(table_sink, info),
            schema=stream.schema,
            options=options,
            table=table.url,
            changelog=changelog,
            deletes=info.deletes and changelog is not None and not changelog.recorded,
        )
    )
    return table


def to_sink(
    stream: Stream,
    sink: Sink | CommittingSink,
    keys: str | Sequence[str],
    flush_bytes: str | int,
    options: StepOptions,
) -> None:
    """Builds the step of `Stream.to_sink`."""
    name = options.name
    if not isinstance(sink, Sink | CommittingSink):
        what = f"{sink.__name__} is a class; give an object" if isinstance(sink, type) else "give a tg.Sink"
        raise ConfigurationError(f"to_sink {name!r}: {what}, derived from tg.Sink or tg.CommittingSink, not {sink!r}")
    check_methods_run_at_once(sink, Sink if isinstance(sink, Sink) else CommittingSink, may_yield=("prepare",))
    if isinstance(sink, CommittingSink):
        parallelism = options.parallelism if options.parallelism is not None else stream._program.parallelism
        check_buckets(f"to_sink {name!r}", sink, parallelism)
    own_copy(sink)
    columns = column_names(keys, f"to_sink {name!r}: keys=")
    flushed = parse_size_bytes(flush_bytes, setting="flush_bytes")
    if flushed <= 0:
        raise ConfigurationError(f"to_sink {name!r}: flush_bytes must be greater than 0, not {flush_bytes!r}")
    if stream.schema is not None and (unknown := [column for column in columns if column not in stream.schema.names]):
        raise ConfigurationError(
            f"to_sink {name!r}: there is no column {unknown[0]!r} for keys; name one of {stream.schema.names}"
        )
    changelog = stream._changelog
    if changelog is not None:
        if changelog.changes and not (isinstance(sink, CommittingSink) and sink.accepts_changes):
            raise changelog.refuse(repr(name), f"{type(sink).__name__} cannot retract rows")
        changelog.check_kind_is_no_key(repr(name), columns)
        changelog.check_upsert(repr(name), columns)
    rows = partitioned_by_key(stream, columns, options.parallelism) if columns else stream
    node_uid = stream._program.new_uid(name, options.uid)
    rows._then(
        Step(
            operator=partial(UserSinkOperator, flushed),
            schema=stream.schema,
            options=StepOptions(name, node_uid, options.parallelism, slot=options.slot),
            table=own_sink_place(node_uid) if isinstance(sink, Sink) else None,
            changelog=changelog,
            takes_changes=changelog is not None and changelog.changes,
            deletes=changelog is not None and changelog.changes and not changelog.recorded,
            sink=sink if isinstance(sink, Sink) else None,
            committing=sink if isinstance(sink, CommittingSink) else None,
        )
    )


def to_files(
    stream: Stream,
    url: str | os.PathLike[str],
    format: WrittenFormat,
    compression: str | None,
    target_file_size: str | int,
    options: StepOptions,
) -> None:
    """Builds `Stream.to_files`."""
    where = f"to_files {options.name!r}"
    place = location(url, where)
    file_bytes = parse_size_bytes(target_file_size, setting="to_files(target_file_size)")
    if file_bytes <= 0:
        raise ConfigurationError(f"{where}: target_file_size must be greater than 0, not {target_file_size!r}")
    encoding = file_encoding(format, known_schema(stream, options.name), compression)
    buckets = stream._program.max_parallelism or DEFAULT_BUCKETS
    sink = FileSink(open_store(place).url, encoding, file_bytes, buckets)
    to_sink(stream, sink, (), FLUSH_BYTES, options)


def check_buckets(where: str, sink: CommittingSink, parallelism: int) -> None:
    """Raises ConfigurationError if the number of buckets of a sink is not valid, or is less than the number of
    subtasks.

    Each subtask needs a bucket.
    """
    buckets = sink.buckets
    if not isinstance(buckets, int) or isinstance(buckets, bool) or not 1 <= buckets <= BUCKETS_MAX:
        raise ConfigurationError(
            f"{where}: buckets of {type(sink).__name__} must be a whole number from 1 to {BUCKETS_MAX}, not {buckets!r}"
        )
    if parallelism > buckets:
        raise ConfigurationError(
            f"{where}: {parallelism} subtasks cannot share the {buckets} buckets of {type(sink).__name__}: give the "
            f"step parallelism={buckets} or less, or the sink more buckets before it writes for the first time"
        )


def to_iceberg(
    stream: Stream,
    catalog: CatalogLike,
    table: str,
    mode: TableMode,
    keys: str | Sequence[str],
    create: bool,
    partition_by: str | Sequence[str],
    target_file_size: str | int,
    options: StepOptions,
) -> None:
    """Builds the step of `Stream.to_iceberg`."""
    where = f"to_iceberg {options.name!r}"
    file_bytes = parse_size_bytes(target_file_size, setting="to_iceberg(target_file_size)")
    if file_bytes <= 0:
        raise ConfigurationError(f"{where}: target_file_size must be greater than 0, not {target_file_size!r}")
    if not isinstance(table, str) or "." not in table.strip("."):
        raise ConfigurationError(f"{where}: table={table!r}; give namespace and name, such as 'shop.orders'")
    names = column_names(keys, f"{where}: keys=")
    info = _table_info(stream, where, mode, names)
    place = TablePlace(CatalogOptions.of(catalog, where), table)
    parts = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by)
    if create:
        place.create(info.arrow_schema, parts, where)
    elif parts:
        raise ConfigurationError(f"{where}: partition_by= is for a new table: give create=True, or remove it")
    found = place.load()
    check_writable(found, place)
    check_columns(found.schema(), info.arrow_schema, f"{where}: {place.named}")
    layout = TableLayout.of(found)
    sink = IcebergUpsert(place, layout, names, file_bytes) if names else IcebergAppend(place, layout, file_bytes)
    _upserted(stream, sink, info, options)


def _upserted(stream: Stream, sink: Sink, info: TableInfo, options: StepOptions) -> None:
    """Adds a sink that stores the newest row of each key, or every row if there are no keys."""
    changelog = stream._changelog
    if changelog is not None:
        changelog.check_upsert(repr(options.name), info.keys)
    rows = partitioned_by_key(stream, info.keys, options.parallelism) if info.keys else stream
    node_uid = stream._program.new_uid(options.name, options.uid)
    rows._then(
        Step(
            operator=partial(UserSinkOperator, FLUSH_BYTES, info.deletes),
            schema=stream.schema,
            options=StepOptions(options.name, node_uid, options.parallelism, slot=options.slot),
            table=own_sink_place(node_uid),
            changelog=changelog,
            sink=sink,
        )
    )


def collected_rows(stream: Stream, name: str, uid: str | None, *, handed_on: bool) -> CollectedRows:
    """Builds the step of `Stream.collect`. With `handed_on` the rows are for a function of `for_each_checkpoint`."""
    info = _table_info(stream, name)
    program = stream._program
    rows = CollectedRows(program.new_uid(name, uid), info, program.open_store, handed_on=handed_on)
    stream._then(
        Step(
            operator=partial(table_sink, info),
            schema=stream.schema,
            options=StepOptions(name, rows.uid),
            table=rows.placeholder,
            changelog=stream._changelog,
        )
    )
    program.collected.append(rows)
    return rows


def rows_to_function(
    stream: Stream, fn: Callable[[Any, int], object], retries: int, max_behind: int, name: str, uid: str | None
) -> None:
    """Builds the step of `Stream.for_each_checkpoint`."""
    check_function(fn, retries, max_behind, name)
    rows = collected_rows(stream, name, uid, handed_on=True)
    stream._program.functions.append(CheckpointFunction(fn, rows, retries, max_behind))


def first_rows(stream: Stream, n: int, timeout: str | timedelta | int) -> tuple[pa.Table, str]:
    """Runs the program up to a stream. Returns up to `n` rows, and a note about rows that are not included."""
    return stream._program.preview(stream, n, parse_duration_ms(timeout, setting="show(timeout)"))


def _table_info(
    stream: Stream,
    name: str,
    mode: TableMode = "append",
    keys: tuple[str, ...] = (),
    partition_by: tuple[str, ...] = (),
    delta_id: str | None = None,
    order_by: str | None = None,
) -> TableInfo:
    columns = known_schema(stream, name)
    changelog = stream._changelog
    if mode not in get_args(TableMode):
        raise ConfigurationError(f'{name}: mode must be "append" or "upsert", not {mode!r}')
    if mode == "upsert" and not keys:
        raise ConfigurationError(
            f'{name}: mode="upsert" needs keys=[...], the columns that identify a row; of each key the newest row is '
            "kept"
        )
    if changelog is not None:
        changelog.check_kind_is_no_key(repr(name), keys)
    if mode == "append" and keys:
        raise ConfigurationError(f'{name}: keys={list(keys)} are for mode="upsert"; mode="append" keeps every row')
    if keys and set(keys) <= set(columns.names):
        try:
            key_schema(columns, keys)
        except ConfigurationError as error:
            raise ConfigurationError(f"{name}: keys={list(keys)}: {error}") from error
    deletes = mode == "upsert" and changelog is not None and changelog.changes
    schema = columns.remove(columns.get_field_index(CHANGE)) if deletes else columns
    return TableInfo.of(schema, mode, keys, partition_by, delta_id, deletes, order_by)


def partitioned_by_key(stream: Stream, keys: tuple[str, ...], parallelism: int | None) -> Stream:
    """Returns the stream, partitioned so that rows with the same `keys` are processed in one subtask of the next
    operator.
    """
    upstream, partitioning = stream._inputs[0]
    wanted = parallelism if parallelism is not None else stream._program.parallelism
    stays = len(stream._inputs) == 1 and partitioning is None and upstream.parallelism == wanted
    if stays and stream._keyed_by and set(stream._keyed_by) <= set(keys):
        return stream
    return stream._by_keys(keys)
