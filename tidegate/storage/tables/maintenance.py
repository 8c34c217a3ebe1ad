"""Compacts small files of a table, and vacuums old ones, while the table's job runs.

Rules of any compaction:

- A compaction of a table that no job writes becomes the owner of the table. Only the owner commits, so no other commit
  can happen meanwhile, and the compaction is fenced when a job claims the table.
- One line of jobs at a time is compacted. Rows of different lines never meet in a file, because a restored job hides
  rows of its own line and of no other.
- The replaced entries stay in the log, and their files stay: any checkpoint can be restored, and any version read.
- Rows keep their order within a line and a partition. In an upsert table only the newest row of a key stays in a file.
- A row that marks its key as deleted is kept as long as an older row of the key may be visible with it. It is dropped
  from the first file of a partition if only one line of jobs has ever claimed the table, because all other visible
  files are newer. With several lines, older rows may become visible later.
- A file that is large enough is not read; the commit names it again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import InvariantError
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.schemas.column_names import DELETED_COLUMN
from tidegate.storage.tables.log.entries import TableEntry, TableFold, covers, in_order
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.partitions import DATA_FILE_SUFFIX, folder_of
from tidegate.storage.tables.table_files import (
    compacted_dir,
    compacted_name,
    delete_unfinished,
    files_there,
    newest_rows,
    read_rows,
    stored_schema,
    write_data_file,
    write_joined_file,
)
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog


class RunningCompaction:
    """Compacts small files of the table at the store's root while the job `job_id` owns and writes it. Not thread-safe.

    `log` is the `TableLog` with which this process commits.
    """

    def __init__(self, store: Store, log: TableLog, job_id: JobId, settings: CompactionSettings) -> None:
        assert settings.file_bytes > 0 and settings.fan_in >= 2
        self._store = store
        self._log = log
        self._job_id = job_id
        self._settings = settings
        self._nonce = uuid.uuid4().hex[:8]
        self._units: list[Unit] | None = None
        """The visible units of the owner's line, in order, up to entry `_read_to`. None if they must be read again."""
        self._read_to = -1
        self._mark: int | None = None
        """A number that identifies this process in file names.

        None until the process has registered as the compactor.
        """
        self._steps = 0

    def step(self, may_go_on: Callable[[], None] = lambda: None) -> bool:
        """Performs one compaction if one is due, and returns whether it did.

        `may_go_on` is called before each file, and may raise an exception to stop the work. Raises StorageError, after
        which `step` can be called again, and CorruptionError or NotFoundError for a damaged or lost file.
        """
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or fold.pending:
            self._units = None
            return False
        known = self._known()
        level, units = next_compaction(known, self._settings)
        mark = self._take_charge() if units else None
        if mark is None:
            return False
        members = {unit.seq for unit in units}
        files = [file for entry in sorted(self._log.entries_of(members), key=in_order) for file in entry.files]
        self._steps += 1
        # File names contain the mark, so a replaced process that still writes uses other names.
        prefix, folder = compacted_name(mark, self._steps), compacted_dir(self._job_id)
        rewrites = rewrites_of(files, self._settings.file_bytes)
        # `has_one_line` reads the whole log, through a new `TableLog` as in `_known`. Rare: only for the first units.
        begins = fold.info.deletes and units[0] is known[0] and TableLog(self._store).has_one_line()
        new = rewritten(self._store, fold.info, folder, prefix, rewrites, may_go_on, from_beginning=begins)
        if not self._log.compact(self._job_id, self._nonce, members, level, new):
            self._units, self._mark = None, None
            return False
        return True

    def close(self) -> None:
        """Deletes files of unfinished compactions at the end of the job. Raises StorageError."""
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or not fold.compactor:
            return  # No process has ever compacted, so there are no files.
        mark = self._log.take_compacting(self._job_id, self._nonce)
        if mark is not None:
            delete_unfinished(self._store, self._job_id, mark + 1)

    def _take_charge(self) -> int | None:
        if self._mark is None:
            self._mark = self._log.take_compacting(self._job_id, self._nonce)
            if self._mark is not None:
                delete_unfinished(self._store, self._job_id, self._mark)
        return self._mark

    def _known(self) -> list[Unit]:
        if self._units is not None:
            entries = self._log.entries_after(self._read_to)
            if not any(entry.claim is not None for entry in entries):
                self._units = self._with(self._units, entries)
                self._read_to = max([self._read_to, *(entry.seq for entry in entries)])
                return self._units
        # Read through a separate log, because `self._log` would keep all of it in memory.
        fold, shown = TableLog(self._store).shown_entries()
        if fold.owner != self._job_id or fold.pending:
            self._units = None
            return []
        self._units = [self._unit(entry) for entry in shown if self._is_own(fold, entry)]
        self._read_to = fold.seq
        return self._units

    def _with(self, units: list[Unit], entries: Iterable[TableEntry]) -> list[Unit]:
        """Returns the compaction units after these newer entries of the owner are applied."""
        for entry in entries:
            if entry.rewrite is not None:
                replaced = [n for n, unit in enumerate(units) if covers(entry.rewrite.replaces, unit.seq)]
                units = [*units[: replaced[0]], self._unit(entry), *units[replaced[-1] + 1 :]]
            elif entry.files:
                units = [*units, self._unit(entry)]
        return units

    def _is_own(self, fold: TableFold, entry: TableEntry) -> bool:
        """Returns whether a visible entry was written by the owner's line of jobs."""
        assert fold.claim is not None
        return entry.job_id == self._job_id or covers(fold.claim.own, entry.seq)

    def _unit(self, entry: TableEntry) -> Unit:
        small_bytes = sum(file.size_bytes for file in entry.files if is_small(file, self._settings.file_bytes))
        return Unit(entry.seq, 0 if entry.rewrite is None else entry.rewrite.level, len(entry.files), small_bytes)


FILES_A_STEP = 500
LOOKS_A_HISTORY = 20
FIRST_LOOK_MS = 60_000
"""Maximum delay in ms before the first vacuum of a process. A shorter job does not vacuum."""
LOOK_EVERY_MS_MAX = 24 * 3_600_000


class RunningVacuum:
    """Deletes old files of the table at the store's root while the job `job_id` owns and writes it. Not thread-safe.

    `log` is the `TableLog` with which this process commits. `history_ms` is how long old versions are kept.
    `checkpoints` returns the existing checkpoints of the job.
    """

    def __init__(
        self,
        store: Store,
        log: TableLog,
        job_id: JobId,
        history_ms: int,
        checkpoints: Callable[[], tuple[CheckpointId, ...]],
        now_ms: Callable[[], int],
    ) -> None:
        self._store = store
        self._log = log
        self._job_id = job_id
        self._history_ms = history_ms
        self._checkpoints = checkpoints
        self._now_ms = now_ms
        self._look_at_ms = now_ms() + min(history_ms // LOOKS_A_HISTORY, FIRST_LOOK_MS)
        self._due: tuple[str, ...] = ()
        """Paths of files that a vacuum in the log has declared deleted, and that were not deleted yet."""
        self._looked: Retention | None = None
        """Retention of the last vacuum, or None once the log was cut after it."""

    def step(self, may_go_on: Callable[[], None] = lambda: None) -> bool:
        """Deletes some files that are due, or else cuts the log. Returns whether it did either.

        `may_go_on` is called first, and may raise an exception to stop the work. Raises StorageError, after which
        `step` can be called again, and TableError or CorruptionError if the log is damaged.
        """
        if not self._due:
            self._look()
        worked = bool(self._due)
        if self._due:
            may_go_on()
            self._store.delete_all(self._due[:FILES_A_STEP])
            self._due = self._due[FILES_A_STEP:]
        if not self._due and self._looked is not None:
            may_go_on()
            reading = TableLog(self._store, now_ms=self._now_ms)
            worked |= reading.cut(self._looked, lambda paths: files_there(self._store, paths))
            self._looked = None
        return worked

    def _look(self) -> None:
        now_ms = self._now_ms()
        if now_ms < self._look_at_ms:
            return
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or fold.pending:
            return
        # List checkpoints before reading the log: rows of a later checkpoint are visible then, or not in the log yet.
        checkpoints = self._checkpoints()
        reading = TableLog(self._store, now_ms=self._now_ms)
        kept_ms = max(self._history_ms, reading.delta_retention_ms())
        retention = Retention(now_ms - kept_ms, checkpoints=checkpoints)
        deletable, _ = reading.vacuum(retention)
        self._looked = retention
        self._due = files_there(self._store, deletable)
        self._look_at_ms = now_ms + min(self._history_ms // LOOKS_A_HISTORY, LOOK_EVERY_MS_MAX)


FAN_IN = 10
FILES_A_UNIT_MAX = 5_000
READ_FACTOR = 8
"""Limit of the bytes that one compaction reads, as a multiple of the target file size."""
_SEALED = 1_000_000


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """The target file size in stored bytes, and the number of units of one level that are compacted together
    (`fan_in`).
    """

    file_bytes: int
    fan_in: int = FAN_IN


@dataclass(frozen=True, slots=True)
class Unit:
    """A visible log entry that may be compacted: its number, how often its rows were compacted (`level`), the number of
    its files, and the total bytes of its small files.
    """

    seq: int
    level: int
    files: int
    small_bytes: int


def next_compaction(units: Sequence[Unit], settings: CompactionSettings) -> tuple[int, tuple[Unit, ...]]:
    """Returns the level of the result of the next compaction, and the adjacent units to compact.

    Returns no units if there is nothing to compact.
    """
    levels = [_SEALED if unit.files >= FILES_A_UNIT_MAX else unit.level for unit in units]
    for at in range(len(levels) - 2, -1, -1):
        levels[at] = max(levels[at], levels[at + 1])
    end = len(units)
    while end > 0 and levels[end - 1] < _SEALED:
        # Lower levels are at the end, and are compacted first.
        start = levels.index(levels[end - 1])
        if end - start >= settings.fan_in:
            return levels[start] + 1, _bounded(units[start:end], settings)
        end = start
    return 0, ()


def _bounded(units: Sequence[Unit], settings: CompactionSettings) -> tuple[Unit, ...]:
    """Returns the first units whose total size is within the limit, but at least `fan_in` units."""
    taken = sum_bytes = 0
    bytes_max = settings.file_bytes * READ_FACTOR
    for unit in units:
        sum_bytes += unit.small_bytes
        if taken >= settings.fan_in and sum_bytes > bytes_max:
            break
        taken += 1
    return tuple(units[:taken])


FILE_BYTES = 64 << 20
"""The default target file size, in stored bytes."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files of one partition whose rows are merged into one file. A single file stays unchanged."""

    files: tuple[DataFile, ...]
    is_first: bool = False
    """True if these are the oldest of the compacted files in their partition."""

    @property
    def folder(self) -> str:
        """Partition folder of the files, relative to the folder of an attempt. Empty without partitions."""
        return folder_of(self.files[0].path)


def is_small(file: DataFile, file_bytes: int) -> bool:
    """Returns whether a file is small enough to be merged with others: below half of the target size `file_bytes`."""
    return file.size_bytes < file_bytes // 2


def rewrites_of(files: Iterable[DataFile], file_bytes: int) -> list[Rewrite]:
    """Plans how to merge files: adjacent small files of a partition become one file of up to `file_bytes`.

    A file is small below half of `file_bytes`.
    """
    done: list[Rewrite] = []
    runs: dict[str, list[DataFile]] = {}
    sizes: dict[str, int] = {}
    begun: set[str] = set()

    def end(folder: str, run: list[DataFile]) -> None:
        done.append(Rewrite(tuple(run), folder not in begun))
        begun.add(folder)

    for file in files:
        folder = folder_of(file.path)
        run = runs.setdefault(folder, [])
        small = is_small(file, file_bytes)
        if run and (not small or sizes[folder] + file.size_bytes > file_bytes):
            end(folder, run)
            run.clear()
        if small:
            sizes[folder] = file.size_bytes + (sizes[folder] if run else 0)
            run.append(file)
        else:
            end(folder, [file])
    for folder, run in runs.items():
        if run:
            end(folder, run)
    return done


def worth_it(rewrites: Sequence[Rewrite]) -> bool:
    """Returns whether the planned rewrites would reduce the number of files."""
    return any(len(rewrite.files) > 1 for rewrite in rewrites)


def rewritten(
    store: Store,
    info: TableInfo,
    folder: str,
    prefix: str,
    rewrites: Sequence[Rewrite],
    may_go_on: Callable[[], None] = lambda: None,
    *,
    from_beginning: bool = False,
) -> tuple[DataFile, ...]:
    """Writes the merged files of all rewrites, and returns the files that replace the originals, in order.

    The new files are in `folder` or its partition folders, with names that begin with `prefix`. `may_go_on` is called
    before each file is read, and may raise an exception to stop the work. `from_beginning`: no older rows can ever
    become visible with these files, so rows that mark deleted keys can be dropped.
    """

    def written(number: int, rewrite: Rewrite) -> DataFile:
        if len(rewrite.files) == 1:
            return rewrite.files[0]
        path = f"{folder}/{rewrite.folder}".rstrip("/") + f"/{prefix}{number:06d}{DATA_FILE_SUFFIX}"
        forgets = from_beginning and rewrite.is_first and info.deletes
        return _write(store, info, path, rewrite, may_go_on, forgets)

    return tuple(written(number, rewrite) for number, rewrite in enumerate(rewrites))


def _write(
    store: Store, info: TableInfo, path: str, rewrite: Rewrite, may_go_on: Callable[[], None], forgets: bool
) -> DataFile:
    """Writes the rows of a rewrite as one file. `forgets` drops rows that mark their key as deleted."""

    def tables() -> Iterator[pa.Table]:
        for file in rewrite.files:
            may_go_on()
            yield read_rows(store, info, file)

    rows = sum(file.rows for file in rewrite.files)
    if info.mode == "append":
        written = write_joined_file(store, path, stored_schema(info), tables())
        found = written.rows
    else:
        table = pa.concat_tables(tables()).unify_dictionaries()
        found = table.num_rows
        newest = newest_rows(table, info)
        if forgets:
            newest = newest.filter(pc.invert(newest.column(DELETED_COLUMN)))
        batches = newest.combine_chunks().to_batches()
        written = write_data_file(store, path, batches or [pa.RecordBatch.from_pylist([], newest.schema)])
    if found != rows:
        store.delete(path)
        raise InvariantError(
            f"the files {rewrite.files} have {found} rows, but {rows} rows according to the log of the table; restore "
            "the files from a copy of the table"
        )
    return written
