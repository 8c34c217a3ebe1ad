"""Keeps a table's files few and its history short: compaction of small files, and vacuums, while its job runs.

Rules of any compaction:

- A compaction of a table at rest owns the table meanwhile. Only the owner commits, so nothing is committed behind its
  back, and it is fenced itself when a job takes the table.
- One line of jobs at a time is compacted. Rows of different lines never meet in a file, because a restored job hides
  rows of its own line and of no other.
- What is replaced stays in the log, and its files stay: any checkpoint can be restored, and any version read.
- Rows keep their order within a line and a partition. In an upsert table only the newest row of a key stays in a file.
- A row that marks its key as deleted stays as long as an older row of the key may show with it. It is dropped from
  what becomes the first file of a partition, if only one line of jobs has ever claimed the table: everything else that
  shows with that file is newer. A restored job of another line may show rows that are older, also rows that are not
  committed yet.
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
from tidegate.storage.tables.table_info import DELETED_COLUMN, TableInfo
from tidegate.storage.tables.table_log import TableLog


class RunningCompaction:
    """The compaction of the table at the store's root, which one job owns, by one process of it. Not thread-safe.

    `log` is the one with which the process commits.
    """

    def __init__(self, store: Store, log: TableLog, job_id: JobId, settings: CompactionSettings) -> None:
        assert settings.file_bytes > 0 and settings.fan_in >= 2
        self._store = store
        self._log = log
        self._job_id = job_id
        self._settings = settings
        self._nonce = uuid.uuid4().hex[:8]
        self._units: list[Unit] | None = None
        """What shows of the line, in order, after entry `_read_to`; None: to be read anew."""
        self._read_to = -1
        self._mark: int | None = None
        """The number under which this process compacts; None: it has not said that it does."""
        self._steps = 0

    def step(self, may_go_on: Callable[[], None] = lambda: None) -> bool:
        """Put together what is due, once; whether anything was. `may_go_on` may raise to end the work, at any file.

        Raises StorageError, to be called again later; CorruptionError or NotFoundError where a file is damaged or lost.
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
        # No other process ever writes files of these names, however long it takes to notice that it is not in charge.
        prefix, folder = compacted_name(mark, self._steps), compacted_dir(self._job_id)
        rewrites = rewrites_of(files, self._settings.file_bytes)
        # The second reads the whole log, through one of its own as in `_known`: seldom, for the first units alone.
        begins = fold.info.deletes and units[0] is known[0] and TableLog(self._store).has_one_line()
        new = rewritten(self._store, fold.info, folder, prefix, rewrites, may_go_on, from_beginning=begins)
        if not self._log.compact(self._job_id, self._nonce, members, level, new):
            self._units, self._mark = None, None
            return False
        return True

    def close(self) -> None:
        """The job is over: delete what was written for nothing. StorageError."""
        fold = self._log.state()
        if fold is None or fold.owner != self._job_id or not fold.compactor:
            return  # Where nobody has ever said that he compacts there is nothing.
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
        # Read through a log of its own: the other one would keep all of it in memory.
        fold, shown = TableLog(self._store).shown_entries()
        if fold.owner != self._job_id or fold.pending:
            self._units = None
            return []
        self._units = [self._unit(entry) for entry in shown if self._is_own(fold, entry)]
        self._read_to = fold.seq
        return self._units

    def _with(self, units: list[Unit], entries: Iterable[TableEntry]) -> list[Unit]:
        """The units after these entries, all of which are the owner's."""
        for entry in entries:
            if entry.rewrite is not None:
                replaced = [n for n, unit in enumerate(units) if covers(entry.rewrite.replaces, unit.seq)]
                units = [*units[: replaced[0]], self._unit(entry), *units[replaced[-1] + 1 :]]
            elif entry.files:
                units = [*units, self._unit(entry)]
        return units

    def _is_own(self, fold: TableFold, entry: TableEntry) -> bool:
        """Whether an entry that shows is of the owner's line."""
        assert fold.claim is not None
        return entry.job_id == self._job_id or covers(fold.claim.own, entry.seq)

    def _unit(self, entry: TableEntry) -> Unit:
        small_bytes = sum(file.size_bytes for file in entry.files if is_small(file, self._settings.file_bytes))
        return Unit(entry.seq, 0 if entry.rewrite is None else entry.rewrite.level, len(entry.files), small_bytes)


FILES_A_STEP = 500
LOOKS_A_HISTORY = 20
FIRST_LOOK_MS = 60_000
"""When a process looks for the first time, if its history is long. A short job does not look at all."""
LOOK_EVERY_MS_MAX = 24 * 3_600_000


class RunningVacuum:
    """The vacuums of the table at the store's root, which one job owns, by one process of it. Not thread-safe.

    `log` is the one with which the process commits. `checkpoints` lists the checkpoints of the job that are there.
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
        """Files that are to be deleted, by the log."""
        self._looked: Retention | None = None
        """What the newest look has kept; None where the log was cut after it."""

    def step(self, may_go_on: Callable[[], None] = lambda: None) -> bool:
        """Delete some of what is due, or cut the log after that; whether anything was done.

        `may_go_on` may raise to end the work before that.

        Raises StorageError, to be called again later; TableError or CorruptionError where the log is damaged.
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
        # Before the log is read: what a later checkpoint covers is shown by then, or not in the log yet.
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
"""What one compaction reads, in times the size that files are to have."""
_SEALED = 1_000_000


@dataclass(frozen=True, slots=True)
class CompactionSettings:
    """How large files are to become, in bytes as they are stored, and after how many units of a level."""

    file_bytes: int
    fan_in: int = FAN_IN


@dataclass(frozen=True, slots=True)
class Unit:
    """An entry that shows: its number, how many compactions its rows went through, its files, bytes of small ones."""

    seq: int
    level: int
    files: int
    small_bytes: int


def next_compaction(units: Sequence[Unit], settings: CompactionSettings) -> tuple[int, tuple[Unit, ...]]:
    """The level that comes of putting units together now, and these, next to each other; none: nothing is due."""
    levels = [_SEALED if unit.files >= FILES_A_UNIT_MAX else unit.level for unit in units]
    for at in range(len(levels) - 2, -1, -1):
        levels[at] = max(levels[at], levels[at + 1])
    end = len(units)
    while end > 0 and levels[end - 1] < _SEALED:
        # Lower levels come last, and first in turn.
        start = levels.index(levels[end - 1])
        if end - start >= settings.fan_in:
            return levels[start] + 1, _bounded(units[start:end], settings)
        end = start
    return 0, ()


def _bounded(units: Sequence[Unit], settings: CompactionSettings) -> tuple[Unit, ...]:
    """The first units, at least as many as are needed, with so many bytes to read."""
    taken = sum_bytes = 0
    bytes_max = settings.file_bytes * READ_FACTOR
    for unit in units:
        sum_bytes += unit.small_bytes
        if taken >= settings.fan_in and sum_bytes > bytes_max:
            break
        taken += 1
    return tuple(units[:taken])


FILE_BYTES = 64 << 20
"""How large files become, in bytes as they are stored."""


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Files whose rows go into one, all of one partition; a single file stays as it is."""

    files: tuple[DataFile, ...]
    is_first: bool = False
    """Whether none of the files that are put together is before these in their partition."""

    @property
    def folder(self) -> str:
        """That of their partition, below the folder of an attempt; empty for none."""
        return folder_of(self.files[0].path)


def is_small(file: DataFile, file_bytes: int) -> bool:
    """Whether a file is to be put together with others, where files are to have `file_bytes`."""
    return file.size_bytes < file_bytes // 2


def rewrites_of(files: Iterable[DataFile], file_bytes: int) -> list[Rewrite]:
    """What to make of a line's files: small ones next to each other in a partition become one of `file_bytes` at most.

    A file counts as small below half of `file_bytes`.
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
    """Whether there are fewer files afterwards."""
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
    """The files that take the place of all these, in order; those that are new are written.

    They are in `folder`, and below it in those of their partitions, with names that begin with `prefix`. `may_go_on` is
    called before each file is read; what it raises ends the work. `from_beginning`: whether nothing older than these
    files can ever show with them: they begin what the one line of the table shows.
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
    """`forgets`: leave out the rows that say that their key was deleted."""

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
        raise InvariantError(f"{rewrite.files} have {found} rows, which is not what the log says")
    return written
