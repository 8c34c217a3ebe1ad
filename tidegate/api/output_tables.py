"""`OutputTable` and `CollectedRows`: what a job writes, of which only completed checkpoints' rows show.

`open_table`: the same of a table that is there, in a program that does not write it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from tidegate.api.given_names import location
from tidegate.api.submission.compacted_tables import TableCompaction, compact_table
from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import OperatorUid
from tidegate.storage.tables.log_versions import AsOf, TableCommit
from tidegate.storage.tables.partition_filters import PartitionFilter, matching_files
from tidegate.storage.tables.small_files import FILE_BYTES
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_log import IfExists, TableInfo, TableLog

if TYPE_CHECKING:
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession


class OutputTable:
    """A table that a job writes exactly once. May be read at any time, also while the job runs or after a crash."""

    def __init__(
        self, url: str, info: TableInfo, if_exists: IfExists = "error", open_store: OpenStore = open_store
    ) -> None:
        self.url = open_store(url).url
        self.info = info
        self.if_exists = if_exists
        self._open_store = open_store

    def read(
        self, spark: SparkSession, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()
    ) -> DataFrame:
        """The rows that are committed now, as a Spark DataFrame; in upsert mode the newest row of each key.

        `as_of`: the number of a commit (see `history`), or a time, for the rows that the table showed then. `filters`,
        such as `[("carrier", "=", "AA")]`, choose partitions: other files are not opened.
        """
        from tidegate.spark_bridge import table_to_dataframe

        return table_to_dataframe(spark, self.url, as_of=as_of, filters=filters)

    def to_arrow(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pa.Table:
        """The rows that are committed now, or were then, as an Arrow table; arguments as of `read`."""
        return read_table(self._store, as_of, filters)

    def to_polars(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pl.DataFrame:
        """The rows that are committed now, or were then, as a Polars DataFrame; arguments as of `read`."""
        import polars as pl

        frame = pl.from_arrow(self.to_arrow(as_of=as_of, filters=filters))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def files(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> list[str]:
        """Places of the Parquet files whose rows are committed now, or were then, for engines that read them.

        Read no others: what lies beside them is not committed, or was taken back. Arguments as of `read`. TableError in
        mode upsert, where files hold older rows of a key too.
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
        """Put the rows of many small files into few of up to `file_bytes`, with one commit; readers see the same rows.

        For a table at rest: it is refused while the job that owns the table lives, and fails if one takes it meanwhile.
        Everything stays as restorable and readable as it was. See `docs/tables.md`.
        """
        return compact_table(self.url, self._open_store, file_bytes)

    def rows_committed(self) -> int:
        """Number of rows in committed files; in upsert mode several may be versions of one."""
        return TableLog(self._store).rows()

    @property
    def log(self) -> TableLog:
        """The table's commit log."""
        return TableLog(self._store)

    @property
    def _store(self) -> Store:
        return self._open_store(self.url)


def open_table(url: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> OutputTable:
    """The table at a url, to be read: any job may be writing it, or none. Raises TableError if there is none."""
    place = location(url, "open_table")
    return OutputTable(place, TableLog(open_store(place)).snapshot().info, open_store=open_store)


class CollectedRows:
    """The rows of `Stream.collect`. They rest in the job's folder of the checkpoint storage.

    Those that are `handed_on`, checkpoint by checkpoint (`Stream.for_each_checkpoint`), rest there until they are.
    """

    PREFIX = "collect:"
    """How a placeholder begins."""

    def __init__(self, uid: OperatorUid, info: TableInfo, open_store: OpenStore, *, handed_on: bool = False) -> None:
        self.uid = uid
        self.info = info
        self.handed_on = handed_on
        self._open_store = open_store
        self._table: OutputTable | None = None

    @property
    def placeholder(self) -> str:
        """Stands for the url, which is not known before the job has an id."""
        return f"{self.PREFIX}{self.uid}"

    def bind(self, url: str) -> OutputTable:
        """The job was submitted: its rows are in the table at this url."""
        self._table = OutputTable(url, self.info, "append", self._open_store)
        return self._table

    @property
    def url(self) -> str:
        """Where they are, once the job was submitted."""
        assert self._table is not None, "a place is found when the job is submitted"
        return self._table.url

    def to_arrow(self) -> pa.Table:
        """All rows that are committed: after a bounded job has finished, all rows."""
        if self._table is None:
            return self.info.arrow_schema.empty_table()
        return self._table.to_arrow()
