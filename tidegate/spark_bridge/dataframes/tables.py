"""Returns the committed rows of a tidegate table as a Spark DataFrame.

Rules:

* A DataFrame has the files of one snapshot of the table's log. Later commits do not change it.
* A column that was added to the table later is null in older files. Spark's reader does that by itself.
* In upsert mode it has one row for each key: the one with the highest version. The version column is never included.
* Spark's own Parquet reader reads local files, if Spark and Parquet share all column types. In all other cases
  executors read through tidegate's store, which needs no Hadoop jars and verifies checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.types as types
from fsspec.utils import get_protocol
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tidegate.connectors.staged_parquet import local_root
from tidegate.spark_bridge.dataframes.spark_types import for_spark, spark_schema_of
from tidegate.spark_bridge.spark_calls import run_spark_action
from tidegate.spark_bridge.worker_python import refuse_connect, refuse_unfit_workers
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store
from tidegate.storage.schemas.column_names import DELETED_COLUMN, VERSION_COLUMN
from tidegate.storage.tables.log.versions import AsOf
from tidegate.storage.tables.partitions import PartitionFilter, matching_files
from tidegate.storage.tables.table_files import read_data_file, with_added
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_AS_WRITTEN = {"datetimeRebaseMode": "CORRECTED", "int96RebaseMode": "CORRECTED"}
"""Reader options: dates and times use the Gregorian calendar, independent of the session's setting for old files."""
_GLOB_CHARACTERS = frozenset("*?[]{}\\,")
_FILES_PER_PARTITION = 16


def table_to_dataframe(
    spark: SparkSession,
    url: str,
    *,
    as_of: AsOf | None = None,
    filters: Sequence[PartitionFilter] = (),
    timeout_s: float = 120.0,
) -> DataFrame:
    """Returns the rows of the table at `url` as committed now or at `as_of`. Later commits do not change the result.

    It has the columns of the table, all nullable, with the types of `spark_schema_of`. It is lazy. With `filters` it
    only reads files of matching partitions. `timeout_s` limits the time in seconds for listing the files.

    Raises TableError if there is no table or no such commit, SparkTimeoutError, SparkLostError, and ConfigurationError
    for a column type that Spark lacks, a table in memory, or an invalid filter.
    """
    _check_readable(url)
    refuse_connect(spark, "table.read")
    store = open_store(url)
    snapshot = TableLog(store).snapshot(as_of)
    info = snapshot.info
    stored = _stored_schema(info.arrow_schema, info.mode == "upsert", info.deletes)
    files = matching_files(info, snapshot.files, filters)
    if not files:
        shown = [field for field in stored if field.name not in (VERSION_COLUMN, DELETED_COLUMN)]
        return spark.createDataFrame([], spark_schema_of(pa.schema(shown)))
    rows = _rows_of(spark, store, files, stored, timeout_s, info.added)
    return _latest_rows(rows, info) if info.mode == "upsert" else rows


def files_to_dataframe(
    spark: SparkSession, url: str, schema: pa.Schema, files: tuple[DataFile, ...], *, timeout_s: float = 120.0
) -> DataFrame:
    """Returns the rows of files of the append table at `url` with this schema. At least one file is required.

    Raises ConfigurationError, SparkTimeoutError and SparkLostError in the same cases as `table_to_dataframe`.
    """
    _check_readable(url)
    # Opened again, because it is sent to executors, and the caller's store may be tied to the driver.
    return _rows_of(spark, open_store(url), files, _stored_schema(schema, upsert=False), timeout_s)


def _check_readable(url: str) -> None:
    if get_protocol(url) == "memory":
        raise ConfigurationError(
            f"Spark's executors cannot read {url}: they are other processes and do not see this one's "
            "memory. Read it with Arrow, or write the table to a folder or a bucket."
        )


def _rows_of(
    spark: SparkSession,
    store: Store,
    files: tuple[DataFile, ...],
    stored: pa.Schema,
    timeout_s: float,
    added: tuple[str, ...] = (),
) -> DataFrame:
    root = local_root(store.url)
    paths = [f"file://{root}/{file.path}" for file in files]
    if root is None or not _spark_can_read(paths, stored):
        return _read_through_store(spark, store, files, stored, added)

    def listed() -> DataFrame:
        reader = spark.read.schema(spark_schema_of(stored)).options(**_AS_WRITTEN)
        return reader.parquet(*paths)

    # Spark lists many files in a job, so this is an action.
    return run_spark_action(spark, listed, timeout_s=timeout_s, what=f"listing the files of {store.url}")


def _stored_schema(table_schema: pa.Schema, upsert: bool, deletes: bool = False) -> pa.Schema:
    """Returns the schema for reading the data files.

    All columns are nullable and without metadata. In upsert mode it includes the hidden columns.
    """
    fields = [pa.field(field.name, field.type, nullable=True) for field in table_schema if field.name != VERSION_COLUMN]
    fields += [pa.field(VERSION_COLUMN, pa.int64())] if upsert else []
    return pa.schema([*fields, *([pa.field(DELETED_COLUMN, pa.bool_())] if deletes else [])])


def _spark_can_read(paths: Iterable[str], schema: pa.Schema) -> bool:
    """Returns whether Spark's own Parquet reader returns the same values.

    It lacks some types, interprets some paths as glob patterns, and merges columns with names that differ only in case.
    """
    if len({name.lower() for name in schema.names}) < len(schema):
        return False
    if any(not _GLOB_CHARACTERS.isdisjoint(path) for path in paths):
        return False
    flat = [field.type for field in schema]
    return all(not types.is_nested(t) and not types.is_duration(t) for t in flat) and for_spark(schema).equals(schema)


def _read_through_store(
    spark: SparkSession, store: Store, files: tuple[DataFile, ...], schema: pa.Schema, added: tuple[str, ...]
) -> DataFrame:
    refuse_unfit_workers(spark, "reading a table")
    partitions = -(-len(files) // _FILES_PER_PARTITION)
    seed = spark.range(0, partitions, 1, partitions)
    return seed.mapInArrow(_files_reader(store, files, for_spark(schema), added), spark_schema_of(schema))


def _files_reader(
    store: Store, files: tuple[DataFile, ...], schema: pa.Schema, added: tuple[str, ...]
) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """Returns the function that runs in Spark's Python workers. Partition p reads the p-th group of files."""

    def read_files(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for partition in batch.column(0).to_pylist():
                first = partition * _FILES_PER_PARTITION
                for file in files[first : first + _FILES_PER_PARTITION]:
                    table = with_added(read_data_file(store, file), schema, added)
                    yield from table.select(schema.names).cast(schema).to_batches()

    return read_files


def _latest_rows(rows: DataFrame, info: TableInfo) -> DataFrame:
    # Columns are known by their place: names may have dots, differ in case only, or be those used here.
    names = rows.columns
    places = {name: f"c{place}" for place, name in enumerate(names)}
    shown = [name for name in names if name not in (VERSION_COLUMN, DELETED_COLUMN)]
    order = F.struct(*(places[name] for name in (info.order_by, VERSION_COLUMN) if name is not None))
    of_newest = [F.struct(*(places[name] for name in shown)).alias("row")]
    if info.deletes:
        of_newest.append(F.col(places[DELETED_COLUMN]).alias("deleted"))
    numbered = rows.toDF(*places.values())
    latest = F.max_by(F.struct(*of_newest), order).alias("latest")
    newest = numbered.groupBy(*(places[key] for key in info.keys)).agg(latest)
    if info.deletes:
        newest = newest.where(~F.col("latest.deleted"))
    return newest.select("latest.row.*").toDF(*shown)
