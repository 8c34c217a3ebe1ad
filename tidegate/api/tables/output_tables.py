"""`OutputTable` and `CollectedRows`: the rows that a job writes. Visible are those that completed checkpoints cover.

`Stream.to_table` and `Stream.collect` return them. `open_table` opens a table in a program that does not write it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.api.given_names import location
from tidegate.api.tables.compacted_tables import TableCompaction, compact_table
from tidegate.api.tables.table_options import TableOptions
from tidegate.api.tables.vacuumed_tables import RETAIN_DEFAULT, TableVacuumed, vacuum_table
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.schemas.columns_text import columns_text
from tidegate.storage.schemas.polars_frames import check_polars_has, in_zones_of_polars
from tidegate.storage.tables.compaction.small_files import FILE_BYTES
from tidegate.storage.tables.log.log_versions import AsOf, TableCommit
from tidegate.storage.tables.partition_filters import PartitionFilter, matching_files
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_log import TableInfo, TableLog

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

_OVER = ("finished", "failed", "cancelled", "suspended")
"""A job in one of these states writes no more rows."""


class OutputTable:
    """A table that a job writes exactly once. It can be read at any time, also while the job runs or after a crash."""

    def __init__(
        self, url: str, info: TableInfo, options: TableOptions | None = None, open_store: OpenStore = open_store
    ) -> None:
        self.url = open_store(url).url
        self.info = info
        self.options = TableOptions() if options is None else options
        self._open_store = open_store

    def __repr__(self) -> str:
        keys = f", keys {list(self.info.keys)}" if self.info.keys else ""
        return f"OutputTable({self.url!r}, {self.info.mode}{keys}: {columns_text(self.info.arrow_schema)})"

    def read(
        self, spark: SparkSession, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()
    ) -> DataFrame:
        """The rows that are committed now, as a Spark DataFrame; in upsert mode the newest row of each key.

        `as_of` is the number of a commit (see `history`), or a datetime with a time zone: the rows are those that the
        table showed then. `filters`, such as `[("carrier", "=", "AA")]`, choose partitions: other files are not opened.
        Raises TableError if there is no such commit, ConfigurationError for a wrong filter.
        """
        from tidegate.spark_bridge import table_to_dataframe

        return table_to_dataframe(spark, self.url, as_of=as_of, filters=filters)

    def to_arrow(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pa.Table:
        """The rows that are committed now, or were then, as an Arrow table; arguments as those of `read`."""
        return read_table(self._store, as_of, filters)

    def to_polars(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pl.DataFrame:
        """The rows that are committed now, or were then, as a Polars DataFrame; arguments as those of `read`.

        Times of a zone that Polars lacks, such as +05:30, come in UTC. Raises ConfigurationError for a column type
        that Polars lacks.
        """
        return _in_polars(self.to_arrow(as_of=as_of, filters=filters))

    def to_pandas(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pd.DataFrame:
        """The rows that are committed now, or were then, as a pandas DataFrame; arguments as those of `read`."""
        frame: pd.DataFrame = self.to_arrow(as_of=as_of, filters=filters).to_pandas()
        return frame

    def files(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> list[str]:
        """URLs of the Parquet files whose rows are committed now, or were then, for engines that read Parquet.

        Read no other files of the folder: their rows are not committed, or were taken back. Arguments as those of
        `read`. TableError in upsert mode, where files hold older rows of a key, too.
        """
        snapshot = self.log.snapshot(as_of)
        if snapshot.info.mode == "upsert":
            raise TableError(
                f"files of the table at {self.url} hold several rows of a key, of which the newest counts (upsert): "
                "read it with to_arrow, to_polars or read"
            )
        chosen = matching_files(snapshot.info, snapshot.files, filters)
        return [join_url(self.url, file.path) for file in chosen]

    def history(self) -> tuple[TableCommit, ...]:
        """Every commit of the table, oldest first: its number, time, job, checkpoint, rows and files."""
        return TableLog(self._store).history()

    def compact(self, *, file_bytes: int = FILE_BYTES) -> TableCompaction:
        """Put the rows of many small files into few files of up to `file_bytes` bytes; readers see the same rows.

        For a table at rest: ConfigurationError while the job that owns it lives, FencedError if a job takes it
        meanwhile. Checkpoints and earlier commits stay as restorable and readable as they were. See `docs/tables.md`.
        """
        return compact_table(self.url, self._open_store, file_bytes)

    def vacuum(
        self,
        *,
        retain: str | timedelta | int = RETAIN_DEFAULT,
        retain_commits: int = 1,
        dry_run: bool = False,
    ) -> TableVacuumed:
        """Delete files that the table has not shown for as long as `retain`, but for those of the newest commits.

        Such are rows that a restored job has written again, that were overwritten, and small files that were put
        together. Whatever was shown since then stays: readers, `as_of`, checkpoints. Earlier commits may be unreadable
        afterwards, and restoring earlier checkpoints may be refused, with a TableError. With `dry_run` nothing is
        deleted. A job may run meanwhile. See `docs/tables.md`.
        """
        return vacuum_table(self.url, self._open_store, retain, retain_commits, dry_run)

    def rows_committed(self) -> int:
        """Number of rows in committed files; in upsert mode older rows of a key count, too."""
        return TableLog(self._store).rows()

    @property
    def log(self) -> TableLog:
        """The table's commit log."""
        return TableLog(self._store)

    @property
    def _store(self) -> Store:
        return self._open_store(self.url)


def open_table(url: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> OutputTable:
    """The table at a URL, for reading, whether or not a job writes it. Raises TableError if there is no table."""
    place = location(url, "open_table")
    return OutputTable(place, TableLog(open_store(place)).snapshot().info, open_store=open_store)


class CollectedRows:
    """The rows of `Stream.collect`, stored in the job's folder of the checkpoint storage.

    With `handed_on` they are those of `Stream.for_each_checkpoint`, and are deleted once the function had them.
    """

    PREFIX = "collect:"
    """How a placeholder begins."""

    def __init__(self, uid: OperatorUid, info: TableInfo, open_store: OpenStore, *, handed_on: bool = False) -> None:
        self.uid = uid
        self.info = info
        self.handed_on = handed_on
        self._open_store = open_store
        self._table: OutputTable | None = None
        self._status: Callable[[], str] | None = None
        self._folder: object = None

    @property
    def placeholder(self) -> str:
        """Stands for the url, which is not known before the job has an id."""
        return f"{self.PREFIX}{self.uid}"

    def bind(self, url: str) -> OutputTable:
        """Name the URL of the rows, once the job has an id."""
        self._table = OutputTable(url, self.info, TableOptions("append"), self._open_store)
        return self._table

    @property
    def url(self) -> str:
        """Where the rows are, once the job was submitted."""
        assert self._table is not None, "a place is found when the job is submitted"
        return self._table.url

    def follow(self, status: Callable[[], str], folder: object = None) -> None:
        """Learn how the job stands, once it was submitted: `status` returns it.

        `folder` keeps the folder of a job without storage, in which the rows are, for as long as it is referred to.
        """
        self._status, self._folder = status, folder

    def to_arrow(self) -> pa.Table:
        """The committed rows: all rows, once a bounded job has finished.

        While the job runs they are those that its checkpoints cover so far, and a warning says so. Raises
        ConfigurationError before the job was submitted.
        """
        if self._table is None:
            raise ConfigurationError(
                f"collect (uid {self.uid!r}): there are no rows before the job runs: call env.execute(...) first, and "
                "wait() of the job that it returns"
            )
        status = None if self._status is None else self._status()
        found = self._table.to_arrow()
        if status is not None and status not in _OVER:
            log.warning(
                "collect (uid %r): the job is %s, so these are the %d rows that its checkpoints cover so far. Call "
                "job.wait() first for all rows",
                self.uid,
                status,
                found.num_rows,
            )
        return found

    def to_polars(self) -> pl.DataFrame:
        """The same rows as a Polars DataFrame; see `OutputTable.to_polars`."""
        return _in_polars(self.to_arrow())

    def to_pandas(self) -> pd.DataFrame:
        """The same rows as a pandas DataFrame."""
        frame: pd.DataFrame = self.to_arrow().to_pandas()
        return frame

    def __repr__(self) -> str:
        status = "not executed yet" if self._status is None else f"the job is {self._status()}"
        return f"CollectedRows({self.uid!r}, {status}: {columns_text(self.info.arrow_schema)})"


def _in_polars(table: pa.Table) -> pl.DataFrame:
    """Returns a table as a Polars DataFrame. ConfigurationError for a column type that Polars lacks."""
    import polars as pl

    schema = pa.schema([field.with_type(in_zones_of_polars(field.type)) for field in table.schema])
    check_polars_has(schema, "polars cannot hold; read the table with to_arrow")
    frame = pl.from_arrow(table.cast(schema))
    assert isinstance(frame, pl.DataFrame)
    return frame
