"""`OutputTable` and `CollectedRows`: the rows that a job writes. Rows are visible as soon as a completed checkpoint
covers them.

`Stream.to_table` and `Stream.collect` return them. `open_table` opens a table in a program that does not write it.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from tidegate.api.name_checks import location
from tidegate.api.tables.shown_rows import (
    ROWS_IN_NOTEBOOK,
    ROWS_SHOWN,
    check_count,
    grid,
    html_columns,
    html_rows,
    rows_of,
)
from tidegate.recovery.checkpoints import list_checkpoints
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.lease import is_alive
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import (
    ConfigurationError,
    FencedError,
    JobFailedError,
    JobTimeoutError,
    StorageError,
    TableError,
    TidegateError,
)
from tidegate.storage.extras import need
from tidegate.storage.files.file_system_store import join_url, open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.schemas.polars_frames import check_polars_has, in_zones_of_polars
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.log.versions import AsOf, TableCommit
from tidegate.storage.tables.maintenance import FILE_BYTES, CompactionSettings, rewrites_of, rewritten, worth_it
from tidegate.storage.tables.partitions import PartitionFilter, matching_files
from tidegate.storage.tables.table_files import (
    DATA_FOLDER,
    data_dir,
    delete_unreferenced,
    files_there,
    read_files,
    read_head,
    read_table,
)
from tidegate.storage.tables.table_info import IfExists, TableInfo
from tidegate.storage.tables.table_log import TableLog
from tidegate.storage.units import parse_duration_ms, parse_size_bytes

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import ray.data
    from pyspark.sql import DataFrame, SparkSession

LOOK_MS = 100
"""How often, in ms, `CollectedRows.rows` checks for rows of a new checkpoint while the job runs."""

_OVER = ("finished", "failed", "cancelled", "suspended")
"""Statuses of a job that writes no more rows."""

RETAIN_DEFAULT = "7d"


class OutputTable:
    """A table that a job writes exactly once. It can be read at any time, also while the job runs and after a crash.

    Parameters that many methods have in common:

    - `as_of`: the number of a commit (see `history`), or a datetime with a time zone. The method then returns the rows
      that were visible after that commit, or at that time. By default it uses the newest commit.
    - `filters`: conditions on partitions, such as `[("carrier", "=", "AA")]`. Files of other partitions are not opened.

    In upsert mode a table shows the newest row of each key.
    """

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
        """Returns the committed rows as a Spark DataFrame.

        - `spark`: a SparkSession.
        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist, ConfigurationError for a wrong filter.
        """
        from tidegate.spark_bridge import table_to_dataframe

        return table_to_dataframe(spark, self.url, as_of=as_of, filters=filters)

    def to_arrow(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pa.Table:
        """Returns the committed rows as an Arrow table.

        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist, ConfigurationError for a wrong filter.
        """
        return read_table(self._store, as_of, filters)

    def to_polars(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pl.DataFrame:
        """Returns the committed rows as a Polars DataFrame.

        Times in a zone that Polars lacks, such as +05:30, are converted to UTC.

        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist, ConfigurationError for a wrong filter or a column type that
        Polars lacks.
        """
        return _in_polars(self.to_arrow(as_of=as_of, filters=filters))

    def to_pandas(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> pd.DataFrame:
        """Returns the committed rows as a pandas DataFrame.

        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist, ConfigurationError for a wrong filter.
        """
        frame: pd.DataFrame = self.to_arrow(as_of=as_of, filters=filters).to_pandas()
        return frame

    def head(self, n: int = ROWS_SHOWN) -> pa.Table:
        """Returns the first `n` committed rows as an Arrow table.

        In append mode only the files with these rows are read.
        """
        return read_head(self._store, check_count("head", n))[0]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the committed rows as dicts."""
        yield from rows_of(self.to_arrow())

    def show(self, n: int = ROWS_SHOWN) -> None:
        """Prints the first `n` committed rows as a table."""
        found, more = read_head(self._store, check_count("show", n))
        print(grid(found, f"only the first {n:,} rows" if more else ""))

    def _repr_html_(self) -> str:
        """Returns the columns and the first committed rows as HTML, for notebooks."""
        try:
            found, more = read_head(self._store, ROWS_IN_NOTEBOOK)
        except TidegateError as error:
            return html_columns(f"{self!r}: {error}", self.info.arrow_schema)
        return html_rows(
            found, f"{self.url}, {self.info.mode}" + (f"; the first {ROWS_IN_NOTEBOOK} rows" if more else "")
        )

    def to_ray(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> ray.data.Dataset:
        """Returns the committed rows as a lazy `ray.data.Dataset`.

        Tasks of Ray Data read the files, and in upsert mode find the newest row of each key. The dataset does not
        include later commits. In append mode the rows are in commit order if Ray Data preserves the order of blocks. In
        upsert mode they have no order. Do not pass the folder of the table to `ray.data.read_parquet`, because some
        files in it are not part of the table.

        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist. Raises ConfigurationError for a wrong filter, for a table in
        memory, and if Ray Data is not installed (`pip install 'ray[data]'`).
        """
        need("table.to_ray", "ray")
        try:
            from tidegate.connectors.ray_data import table_to_dataset
        except ImportError as error:
            raise ConfigurationError(
                f"table.to_ray needs Ray Data, which cannot be imported ({error}): pip install 'ray[data]'"
            ) from error
        return table_to_dataset(self._store, as_of=as_of, filters=filters)

    def files(self, *, as_of: AsOf | None = None, filters: Sequence[PartitionFilter] = ()) -> list[str]:
        """Returns the URLs of the Parquet files of the committed rows, for engines that read Parquet.

        Do not read other files of the folder. Their rows are not committed, or are no longer part of the table.

        - `as_of`, `filters`: see `OutputTable`.

        Raises TableError if the commit does not exist, and in upsert mode, where files also contain older rows of a
        key. Raises ConfigurationError for a wrong filter.
        """
        snapshot = self.log.snapshot(as_of)
        if snapshot.info.mode == "upsert":
            raise TableError(
                f"files of the upsert table at {self.url} also hold older rows of a key, so they cannot be read on "
                "their own: read it with to_arrow, to_polars or read"
            )
        chosen = matching_files(snapshot.info, snapshot.files, filters)
        return [join_url(self.url, file.path) for file in chosen]

    def history(self) -> tuple[TableCommit, ...]:
        """Returns all commits of the table, oldest first: number, time, job, checkpoint, rows and files of each."""
        return TableLog(self._store).history()

    def compact(self, *, file_bytes: int = FILE_BYTES) -> TableCompaction:
        """Merges many small files into few files of up to `file_bytes` bytes. Readers see the same rows.

        No job may write the table meanwhile. Checkpoints can still be restored, and earlier commits can still be read.
        See `docs/tables.md`.

        - `file_bytes`: the largest size of a new file, in bytes.

        Raises ConfigurationError while the job that owns the table lives, FencedError if a new job becomes its owner
        meanwhile.
        """
        return compact_table(self.url, self._open_store, file_bytes)

    def vacuum(
        self,
        *,
        retain: str | timedelta | int = RETAIN_DEFAULT,
        retain_commits: int = 1,
        dry_run: bool = False,
    ) -> TableVacuumed:
        """Deletes files that have not been part of the table for the time `retain`.

        These are files whose rows a restored job has written again, files that were overwritten, and files that were
        compacted. Files that were part of the table within this time stay for readers, `as_of` and checkpoints.
        Afterwards earlier commits may be unreadable, and restoring an earlier checkpoint may raise a TableError. A job
        may write the table meanwhile. See `docs/tables.md`.

        - `retain`: how long files stay after they were last part of the table, a duration.
        - `retain_commits`: the number of newest commits whose files stay in any case, at least 1.
        - `dry_run`: with True no file is deleted, and the result names the files that would be deleted.

        Raises TableError, ConfigurationError for a wrong argument, and StorageError.
        """
        return vacuum_table(self.url, self._open_store, retain, retain_commits, dry_run)

    def rows_committed(self) -> int:
        """Returns the number of rows in committed files. In upsert mode this includes older rows of a key."""
        return TableLog(self._store).rows()

    @property
    def log(self) -> TableLog:
        """Returns the table's commit log."""
        return TableLog(self._store)

    @property
    def _store(self) -> Store:
        return self._open_store(self.url)


def open_table(url: str | os.PathLike[str], *, open_store: OpenStore = open_store) -> OutputTable:
    """Returns the table at a URL, for reading, whether or not a job is writing it.

    - `url`: the folder or URL that was given to `to_table`.

    Raises TableError if there is no table at this URL.
    """
    place = location(url, "open_table")
    return OutputTable(place, TableLog(open_store(place)).snapshot().info, open_store=open_store)


class CollectedRows:
    """The rows of `Stream.collect`, stored in the folder of the job in its checkpoint storage.

    With `handed_on` these are the rows of `Stream.for_each_checkpoint`, which are deleted as soon as the user's
    function has received them.
    """

    PREFIX = "collect:"
    """The prefix of the text that is used in place of the URL until the job has an id (see `placeholder`)."""

    def __init__(self, uid: OperatorUid, info: TableInfo, open_store: OpenStore, *, handed_on: bool = False) -> None:
        self.uid = uid
        self.info = info
        self.handed_on = handed_on
        self._open_store = open_store
        self._table: OutputTable | None = None
        self._status: Callable[[], str] | None = None
        self._wait: Callable[[int | None], object] | None = None
        self._endless: str | None = None
        self._folder: object = None

    @property
    def placeholder(self) -> str:
        """Returns a text that is used in place of the URL of the rows until the job has an id.

        It contains the uid of the step.
        """
        return f"{self.PREFIX}{self.uid}"

    def bind(self, url: str) -> OutputTable:
        """Sets the URL of the rows, once the job has an id, and returns their table."""
        self._table = OutputTable(url, self.info, TableOptions("append"), self._open_store)
        return self._table

    @property
    def url(self) -> str:
        """URL of the rows. Only available after the job was submitted."""
        assert self._table is not None, "a place is found when the job is submitted"
        return self._table.url

    def follow(
        self,
        status: Callable[[], str],
        wait: Callable[[int | None], object],
        endless: str | None = None,
        folder: object = None,
    ) -> None:
        """Connects the rows to their job, when the job has been submitted.

        - `status`: returns the status of the job.
        - `wait`: returns when the job is over. Raises JobFailedError if it failed, and JobTimeoutError after the given
          number of ms.
        - `endless`: name of a source of the job that never ends, or None if all end.
        - `folder`: for a job without storage the `TemporaryJob`, which keeps the folder with the rows while it is
          referred to. Otherwise None.
        """
        self._status, self._wait, self._endless, self._folder = status, wait, endless, folder

    def to_arrow(self, *, wait: bool = True) -> pa.Table:
        """Waits until a bounded job has finished, and returns all its rows as an Arrow table.

        - `wait`: with False the method returns at once the rows that completed checkpoints cover so far.

        Raises JobFailedError if the job failed. Raises ConfigurationError before the job is submitted, if the job was
        cancelled before its input had ended, and while the job reads a source that never ends. Use `head` or `rows` for
        such a job.
        """
        table = self._submitted()
        if wait and self._wait is not None and self._status is not None:
            if self._endless is not None and self._status() not in _OVER:
                raise ConfigurationError(
                    f"collect (uid {self.uid!r}): the job reads {self._endless}, which never ends, so there is no last "
                    "row to wait for. For rows so far call head(n), rows() or to_arrow(wait=False); for all rows call "
                    "job.stop() or job.cancel() first"
                )
            self._wait(None)
            if self._endless is None and self._status() == "cancelled":
                raise ConfigurationError(
                    f"collect (uid {self.uid!r}): the job was cancelled before its input had ended, by job.cancel() or "
                    "because its environment was closed, so not all rows are there. For the rows that checkpoints "
                    "cover call to_arrow(wait=False); for all rows execute it again, and call job.wait() before the "
                    "environment is closed"
                )
        return table.to_arrow()

    def head(self, n: int = ROWS_SHOWN) -> pa.Table:
        """Returns the first `n` rows that completed checkpoints cover so far.

        Raises ConfigurationError before the job is submitted.
        """
        return self._submitted().head(n)

    def rows_committed(self) -> int:
        """Returns the number of rows that completed checkpoints cover so far, without opening a file."""
        return self._submitted().rows_committed()

    def show(self, n: int = ROWS_SHOWN) -> None:
        """Prints the first `n` rows that completed checkpoints cover so far as a table."""
        self._submitted().show(n)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields the rows as dicts, as soon as completed checkpoints cover them, until the job is over.

        Each row is yielded once, also when the job restarts. Leaving the loop does not end the job.

        Raises ConfigurationError before the job is submitted. If the job fails, raises JobFailedError after the
        committed rows. Raises TableError if newer checkpoints are damaged and the job restarts from an older one, so
        that rows which were already yielded are no longer valid.

        Example:

            for row in rows.rows():
                print(row)
        """
        table = self._submitted()
        return self._rows_of(table)

    def _rows_of(self, table: OutputTable) -> Iterator[dict[str, Any]]:
        seen: list[str] = []
        failed = None
        while True:
            over = self._wait is None
            try:
                if self._wait is not None:
                    self._wait(LOOK_MS)
                    over = True
            except JobTimeoutError:
                pass
            except JobFailedError as error:
                over, failed = True, error
            files = table.log.snapshot().files
            if [file.path for file in files[: len(seen)]] != seen:
                raise TableError(
                    f"collect (uid {self.uid!r}): the job has returned to an older checkpoint, because newer ones are "
                    "damaged. Some rows that were returned already are taken back and computed again. Call rows() "
                    "again to read all rows from the first one"
                )
            for file in files[len(seen) :]:
                yield from rows_of(read_files(table._store, table.info, [file]))
                seen.append(file.path)
            if failed is not None:
                raise failed
            if over:
                return

    def _submitted(self) -> OutputTable:
        if self._table is None:
            raise ConfigurationError(
                f"collect (uid {self.uid!r}): there are no rows before the job runs: call env.execute(...) first"
            )
        return self._table

    def to_polars(self, *, wait: bool = True) -> pl.DataFrame:
        """Returns the rows as a Polars DataFrame.

        Waits and raises errors like `to_arrow`. See also `OutputTable.to_polars`.
        """
        return _in_polars(self.to_arrow(wait=wait))

    def to_pandas(self, *, wait: bool = True) -> pd.DataFrame:
        """Returns the rows as a pandas DataFrame. Waits and raises errors like `to_arrow`."""
        frame: pd.DataFrame = self.to_arrow(wait=wait).to_pandas()
        return frame

    def _repr_html_(self) -> str:
        """Returns the first committed rows as HTML, for notebooks. Before the job is submitted, returns the columns."""
        if self._table is None or self._status is None:
            return html_columns(f"Rows of collect ({self.uid}), not executed yet", self.info.arrow_schema)
        try:
            found, more = read_head(self._table._store, ROWS_IN_NOTEBOOK)
        except TidegateError as error:
            return html_columns(f"{self!r}: {error}", self.info.arrow_schema)
        shown = f"; the first {ROWS_IN_NOTEBOOK} rows" if more else ""
        return html_rows(found, f"collect ({self.uid}), the job is {self._status()}{shown}")

    def __repr__(self) -> str:
        status = "not executed yet" if self._status is None else f"the job is {self._status()}"
        return f"CollectedRows({self.uid!r}, {status}: {columns_text(self.info.arrow_schema)})"


def _in_polars(table: pa.Table) -> pl.DataFrame:
    """Returns a table as a Polars DataFrame. Raises ConfigurationError for a column type that Polars lacks."""
    import polars as pl

    schema = pa.schema([field.with_type(in_zones_of_polars(field.type)) for field in table.schema])
    check_polars_has(schema, "polars cannot hold; read the table with to_arrow")
    frame = pl.from_arrow(table.cast(schema))
    assert isinstance(frame, pl.DataFrame)
    return frame


HISTORY_DEFAULT = "7d"
SchemaEvolution = Literal["add_columns"]


@dataclass(frozen=True, slots=True)
class TableOptions:
    """Options of a table: what happens to rows of an existing table, the target size of files, and how files are
    compacted and deleted.
    """

    if_exists: IfExists = "error"
    file_bytes: int = FILE_BYTES
    compaction: CompactionSettings | None = None
    """How small files are compacted while the job runs, or None if they are not compacted."""
    history_ms: int | None = None
    """How long, in ms, files are kept after they were last part of the table, while the job runs.

    None keeps them until a vacuum.
    """
    evolves: bool = False
    """True if the columns that the job adds are also added to an existing table."""

    @staticmethod
    def of(
        where: str,
        if_exists: IfExists,
        target_file_size: str | int,
        auto_compact: bool,
        schema_evolution: SchemaEvolution | None,
        history: str | timedelta | int | None,
    ) -> TableOptions:
        """Makes the options from the arguments that a user has given.

        Raises ConfigurationError for an unknown value. Its text begins with `where`.
        """
        if schema_evolution not in (None, "add_columns"):
            raise ConfigurationError(
                f'{where}: schema_evolution={schema_evolution!r} is not known; give "add_columns", or remove it'
            )
        file_bytes = parse_size_bytes(target_file_size, setting=f"{where}: target_file_size")
        if file_bytes == 0:
            raise ConfigurationError(f"{where}: target_file_size must be greater than 0; remove it for 64 MB")
        history_ms = None if history is None else parse_duration_ms(history, setting=f"{where}: history")
        if history_ms == 0:
            raise ConfigurationError(f"{where}: history must be greater than 0; None keeps everything until a vacuum")
        return TableOptions(
            if_exists,
            file_bytes,
            CompactionSettings(file_bytes) if auto_compact else None,
            history_ms,
            schema_evolution is not None,
        )


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TableVacuumed:
    """The result of a vacuum: the files that it has deleted, or would delete in a dry run, with their number, total
    bytes, and paths in the table.

    `readable_from` is the number of the first commit that can still be read. Checkpoints from this commit on can still
    be restored.
    """

    files: int
    bytes: int
    paths: tuple[str, ...]
    readable_from: int


def vacuum_table(
    url: str,
    open_store: OpenStore,
    retain: str | timedelta | int = RETAIN_DEFAULT,
    retain_commits: int = 1,
    dry_run: bool = False,
) -> TableVacuumed:
    """Deletes files that have not been part of the table at `url` for the time `retain`.

    The files of the newest `retain_commits` commits stay.

    With `dry_run` no file is deleted. Raises TableError if there is no table, or if it contains the rows of
    `for_each_checkpoint`. Raises ConfigurationError for a wrong argument. Raises StorageError, also if the checkpoints
    of the owning job cannot be listed.
    """
    retain_ms = parse_duration_ms(retain, setting="retain")
    if isinstance(retain_commits, bool) or not isinstance(retain_commits, int) or retain_commits < 1:
        raise ConfigurationError(
            f"retain_commits={retain_commits!r}: give 1 or more, because the newest commit must stay"
        )
    store = open_store(url)
    if newest_mark(store)[0]:
        raise TableError(
            f"the rows of the table at {url} are handed to a function of for_each_checkpoint and then deleted, so it "
            "cannot be vacuumed; remove this call"
        )
    table_log = TableLog(store)
    retention = Retention(now_ms() - retain_ms, retain_commits, _checkpoints_of_owner(table_log, url, open_store))
    deletable, readable_from = table_log.vacuum(retention, dry_run=dry_run)
    there = files_there(store, deletable)
    if not dry_run:
        store.delete_all(there)
        table_log.cut(retention, lambda paths: files_there(store, paths))
    return TableVacuumed(len(there), sum(deletable[path].size_bytes for path in there), there, readable_from)


def _checkpoints_of_owner(table_log: TableLog, url: str, open_store: OpenStore) -> tuple[CheckpointId, ...]:
    """Returns the checkpoints from which the job that owns the table may restart. Empty if no job owns the table."""
    owner = table_log.owner()
    if owner is None or owner.home is None:
        return ()
    try:
        found = list_checkpoints(owner.home, owner.job_id, open_store=open_store)
    except (StorageError, ConfigurationError) as error:
        if "memory" in owner.home.partition(":")[0]:
            # Checkpoints in memory end with their process, and so has the job.
            log.warning("the checkpoints of %s, which owns the table at %s, are gone: %s", owner.job_id, url, error)
            return ()
        raise StorageError(
            f"cannot vacuum the table at {url}, because the checkpoints of job {owner.job_id}, which owns it, cannot "
            f"be read: {error}. Make sure that {owner.home} can be read"
        ) from error
    return tuple(CheckpointId(summary.checkpoint_id) for summary in found if summary.job_id == owner.job_id)


_PREFIX = "compaction_"
"""Prefix of the job ids that compactions use in the log of a table. Ids of jobs have no underscore."""


@dataclass(frozen=True, slots=True)
class TableCompaction:
    """The result of a compaction: the number of files of the table before and after."""

    files_before: int
    files_after: int


def compact_table(url: str, open_store: OpenStore, file_bytes: int) -> TableCompaction:
    """Compacts the files of the table at `url` into files of up to `file_bytes` bytes.

    Files are only merged with files of the same job, or of jobs that were restored from it.

    Raises TableError if there is no table, if it contains the rows of `for_each_checkpoint`, or if it is a Delta table
    with features that tidegate cannot write. Raises ConfigurationError while the owning job lives, FencedError if a new
    job became the owner meanwhile, and StorageError.
    """
    if file_bytes <= 0:
        raise ConfigurationError(f"compact: file_bytes={file_bytes} must be greater than 0")
    store = open_store(url)
    if newest_mark(store)[0]:
        # The compaction would look like a new commit, and its rows would be handed on again.
        raise TableError(
            f"the rows of the table at {url} are handed to a function of for_each_checkpoint and then deleted, so it "
            "cannot be compacted; remove this call"
        )
    log = TableLog(store)
    log.check_delta()
    by_line = log.files_by_line()
    found = log.owner()
    owner = None if found is None else found.job_id
    check_owner_is_gone(url, JobId(_PREFIX), open_store, now_ms())
    before = after = sum(len(files) for files in by_line.values())
    swept = False
    for line, files in by_line.items():
        if not worth_it(rewrites_of(files, file_bytes)):
            continue
        job_id = JobId(f"{_PREFIX}{uuid.uuid4().hex[:12]}")
        files, owner = log.claim_compaction(job_id, line, owner), job_id
        if not swept:
            swept = _sweep(store, job_id)
        after -= len(files) - _compact(store, log, job_id, files, file_bytes)
    return TableCompaction(before, after)


def _compact(store: Store, log: TableLog, job_id: JobId, files: tuple[DataFile, ...], file_bytes: int) -> int:
    info, folder, committing = log.snapshot().info, data_dir(job_id, AttemptNumber(0)), False
    try:
        begins = info.deletes and log.has_one_line()
        new = rewritten(store, info, folder, "", rewrites_of(files, file_bytes), from_beginning=begins)
        committing = True
        log.commit(job_id, CheckpointId(0), new)
    except BaseException as error:
        # A commit that failed for another reason may have taken effect, and then needs its files.
        if not committing or isinstance(error, FencedError):
            delete_unreferenced(store, job_id, None)
        raise
    return len(new)


def _sweep(store: Store, own: JobId) -> bool:
    """Deletes the files of earlier compactions that were not committed. Returns True.

    They can no longer be committed, because the compaction `own` has claimed the table.
    """
    for name in store.list(DATA_FOLDER):
        if name.startswith(_PREFIX) and name != own:
            delete_unreferenced(store, JobId(name), None)
    return True


def check_owner_is_gone(url: str, job_id: JobId, open_store: OpenStore, now_ms: int) -> None:
    """Raises ConfigurationError if the table at `url` is owned by a living job other than `job_id`.

    Raises StorageError if the lease of that job cannot be read.
    """
    if f"/{CheckpointLayout(job_id).taskowned_dir()}/" in url:
        return  # A copy of collected rows in the job's own folder. The owner of the original does not own the copy.
    owner = TableLog(open_store(url)).owner()
    if owner is None or owner.job_id == job_id or owner.home is None:
        return
    try:
        alive = is_alive(open_store(owner.home), owner.job_id, now_ms)
    except (StorageError, ConfigurationError) as error:
        if isinstance(error, StorageError) and "memory" not in owner.home.partition(":")[0]:
            raise StorageError(
                f"cannot check whether job {owner.job_id}, which owns the table at {url}, lives, because its "
                f"checkpoints cannot be read: {error}. Make sure that {owner.home} can be read, or write to another url"
            ) from error
        # Checkpoints in memory end with their process, and so has the job.
        log.warning(
            "the table at %s belongs to job %s, and %s does not show whether that job lives: %s",
            url, owner.job_id, owner.home, error,
        )  # fmt: skip
        return
    if alive:
        raise ConfigurationError(
            f"the table at {url} is being written by job {owner.job_id}, which is alive (its checkpoints are under "
            f"{owner.home}): wait for its end, or stop or cancel it first, or write to another url. A job that was "
            "killed on another machine counts as alive until its lease has expired"
        )
