"""Reads the tables that a lookup join accepts.

These are Arrow and polars tables, tables of tidegate and Delta Lake, Parquet files, and functions that return a table.
All of them are read as a whole. For tables of a database see `DatabaseLookup`, which queries single keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from tidegate.api.name_checks import location
from tidegate.api.tables.output_tables import OutputTable, open_table
from tidegate.connectors.formats.parquet import whole_parquet
from tidegate.connectors.sql.lookup import DatabaseTable
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.file_system_store import HOSTED_SCHEMES, join_url, open_store
from tidegate.storage.schemas.arrow_types import plain_schema, settled_type
from tidegate.storage.schemas.polars_frames import arrow_of, is_polars_frame
from tidegate.storage.tables.delta_mirror import (
    check_place,
    imported,
    padded_column,
    partition_of_bytes,
    storage_options,
)

if TYPE_CHECKING:
    import polars as pl

LookedUp: TypeAlias = (
    "pa.Table | pl.DataFrame | OutputTable | DatabaseTable | str | os.PathLike[str] | "
    "Callable[[], pa.Table | pl.DataFrame]"
)


def reader_of(table: LookedUp) -> tuple[Callable[[], pa.Table], pa.Schema, bool]:
    """Returns three values: a function that reads the table, the columns of the table, and whether the table may
    change.

    A table that is given as a function or a path is read once to find its columns. Raises ConfigurationError if the
    object is not a table, or cannot be read.
    """
    if isinstance(table, DatabaseTable):
        raise ConfigurationError(
            "a DatabaseTable is for Stream.lookup_join. Queries of env.sql read a table as a whole, so register a "
            "function that returns the rows"
        )
    if isinstance(table, str | os.PathLike):
        table = _at(location(table, "lookup_join"))
    if isinstance(table, OutputTable):
        return table.to_arrow, plain_schema(table.info.arrow_schema), True
    if callable(table):
        read = partial(_checked, table)
        return read, read().schema, True
    fixed = _checked(lambda: table)
    return (lambda: fixed), fixed.schema, False


def with_keys_of(stream: pa.Schema, table: pa.Schema, keys: tuple[Sequence[str], Sequence[str]]) -> pa.Schema:
    """Returns the schema of a table, with the types of the stream's keys for key columns whose types are equivalent,
    such as string and large string.

    Arrow streams have strings and polars reads large strings, so without this the user would have to cast one side.
    `keys` are the key columns of the stream and the key columns of the table, in the same order.
    """
    for left, right in zip(*keys, strict=True):
        wanted, index = stream.field(left).type, table.get_field_index(right)
        if settled_type(table.field(index).type) == settled_type(wanted):
            table = table.set(index, table.field(index).with_type(wanted))
    return table


def _at(url: str) -> OutputTable | Callable[[], pa.Table]:
    """Returns an object that reads the table at a URL: a function for a Delta Lake table or Parquet files, or an
    `OutputTable`.
    """
    store = open_store(url)
    if store.list("_delta_log"):
        return partial(_delta, url)
    try:
        return open_table(url)
    except TableError:
        return partial(_parquet, url)


def _delta(url: str) -> pa.Table:
    import pyarrow.dataset as ds

    where = open_store(url).url
    check_place(where)
    table = imported().DeltaTable(where, storage_options=storage_options(where))
    if (name := partition_of_bytes(table)) is not None:
        raise ConfigurationError(
            f"lookup_join: the Delta table at {url} is partitioned by the bytes of {name!r}, which its writers write "
            "in different ways. Give a function that returns the rows"
        )
    if (declared := padded_column(table)) is not None:
        raise ConfigurationError(
            f"lookup_join: the Delta table at {url} declares column {declared}, whose values readers of Spark fill "
            "with spaces. Give a function that returns the rows"
        )
    # Delta's timestamps are microseconds. Arrow would read the INT96 timestamps of Spark's files in nanoseconds, which
    # cannot represent years before 1678 and after 2261.
    micros = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
    return table.to_pyarrow_dataset(parquet_read_options=micros).to_table()


def _parquet(url: str) -> pa.Table:
    """Returns the rows of one Parquet file, or of all Parquet files in a folder and its subfolders."""
    store = open_store(url)
    found = [file.path for file in store.walk("", follow_links=True) if file.path.endswith(".parquet")]
    folder, _, name = store.url.rpartition("/")
    # After "s3:/" the name of a bucket follows, which is not a file.
    is_bucket = folder.endswith(":/") and folder[:-2] in HOSTED_SCHEMES
    if not found and name and not is_bucket:
        above = open_store(f"{folder}/")
        if above.exists(name):
            store, found = above, [name]
    if not found:
        raise ConfigurationError(
            f"lookup_join: there is neither a table nor a Parquet file at {url}"
            "; correct the URL, or write the table before the job starts"
        )
    tables = [whole_parquet(pa.BufferReader(store.read(path)), join_url(store.url, path)) for path in found]
    return pa.concat_tables(tables, promote_options="default")


def _checked(function: Callable[[], object]) -> pa.Table:
    """Calls a user's function, and returns its result as an Arrow table.

    Raises ConfigurationError if the result is not a table.
    """
    found = function()
    if type(found).__module__.partition(".")[0] == "pyspark":
        raise ConfigurationError(
            "lookup_join: tasks have no Spark, so they cannot read a Spark DataFrame. Give its rows (toPandas and "
            "pa.Table.from_pandas), the place to which Spark writes it now and then, or, instead of spark.read.jdbc, a "
            "function that reads the database itself, as in pl.read_database(query, connection)"
        )
    if is_polars_frame(found):
        found = arrow_of(found)
    elif hasattr(found, "to_arrow"):
        found = found.to_arrow()
    if isinstance(found, pa.RecordBatch):
        found = pa.Table.from_batches([found])
    if not isinstance(found, pa.Table):
        raise ConfigurationError(
            f"lookup_join: {type(found).__name__} is not a table; give an Arrow table, a polars DataFrame, a table of "
            "tidegate, the URL of one, of a Delta table or of Parquet files, or a function that returns the rows"
        )
    return found.cast(plain_schema(found.schema))
