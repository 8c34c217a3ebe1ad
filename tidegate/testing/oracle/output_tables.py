"""Checks which rows tables show, and injects the loss of entries of their logs as a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import CheckpointMetadata, DataFile, is_own_sink
from tidegate.storage.codec import decode
from tidegate.storage.files.envelope import HEADER_BYTES
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import TableEntry, TableEntryKind
from tidegate.storage.tables.table_files import newest_rows, read_files, shown_rows
from tidegate.storage.tables.table_log import TableLog, TableSnapshot
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.world.disk import TABLE_LOG, SimulatedDisk, SimulatedStore

T = TypeVar("T")
Covered = Mapping[tuple[JobId, CheckpointId], frozenset[str]]
"""The full names of all data files that each checkpoint covers, including the files that earlier checkpoints cover."""


class TablesOracle:
    """Checks what the tables of one job show, and when that changes.

    It does not use the format of the log. The files that a checkpoint covers follow from the metadata of the
    checkpoints before it: first the checkpoints of its attempt, then the ones before the checkpoint from which the
    attempt was restored, even if that belongs to another job. Rules:

    - After the commit of checkpoint N, a table shows exactly the files that N covers, each once. It shows no file from
      after a checkpoint from which the job has been restored.
    - Nothing else changes what a table shows: no claim, no restart, no truncation of the log. A compaction changes the
      files but not the rows, which `MergedFiles` checks.

    `inherited` are the files that checkpoints of earlier jobs cover. `histories` has, for each table URL, for how many
    ms the table keeps files that it no longer shows.
    """

    def __init__(
        self,
        disk: SimulatedDisk,
        job_id: JobId,
        merged: MergedFiles,
        inherited: Covered | None = None,
        histories: Mapping[str, int] | None = None,
    ) -> None:
        self._disk = disk
        self._merged = merged
        self._histories = {url.rstrip("/"): ms for url, ms in (histories or {}).items()}
        self._job_id = job_id
        self.covered: dict[tuple[JobId, CheckpointId], frozenset[str]] = dict(inherited or {})
        self._origin: frozenset[str] = frozenset()
        """Files that the checkpoint covers from which the job was started."""
        self._start: frozenset[str] = frozenset()
        """Files that the newest completed checkpoint of the attempt covers, or else the checkpoint it was restored
        from.
        """
        self._committed: dict[str, int] = {}
        self._readers: dict[str, TableLog] = {}
        self._shown: dict[str, list[str]] = {}
        self._hidden_ms: dict[str, int] = {}
        """Virtual time at which each file that a table had shown was hidden, in ms."""
        self._holes: dict[str, int] = {}
        """First lost entry of each table's log, until it was made again."""
        disk.created.append(self._file_created)

    def restored(self, job_id: JobId, checkpoint_id: CheckpointId) -> None:
        """Records that the job was started from this checkpoint."""
        self._origin = self._start = self.covered[job_id, checkpoint_id]

    def deployed(self, restored: int | None) -> None:
        """Records the start of an attempt from a checkpoint of the job itself. None means the checkpoint from which the
        job was started.
        """
        own = None if restored is None else self.covered.get((self._job_id, CheckpointId(restored)))
        self._start = self._origin if own is None else own

    def completed(self, metadata: CheckpointMetadata) -> None:
        """Records a completed checkpoint."""
        files = data_files_of(metadata)
        self._start |= files
        self.covered[self._job_id, metadata.checkpoint_id] = self._start

    def referenced(self, table: str) -> set[str]:
        """Returns the full names of all data files that a table's log refers to."""
        return {f"{table}/{path}" for path in self._reading(lambda: TableLog(self._store(table)).referenced_paths())}

    def may_go(self, name: str, checkpoints: Iterable[int]) -> bool:
        """Returns whether a data file of a task or of a compaction may be deleted.

        No table may show it or have shown it within its history. The rows that each of these checkpoints covers must
        still exist: in larger files or, for a file that a compaction wrote, in the files that it merged. If the table
        belongs to another job by now, the checkpoints of this job do not count.
        """
        if any(name in shown for shown in self._shown.values()):
            return False
        hidden_ms = self._hidden_ms.get(name)
        if hidden_ms is not None:
            history_ms = next((ms for table, ms in self._histories.items() if name.startswith(f"{table}/")), 0)
            if self._disk.world.now_ms - hidden_ms < history_ms:
                return False
        reader = self._readers[next(table for table in self._readers if name.startswith(f"{table}/data/"))]
        owner = self._reading(reader.owner)
        if owner is not None and owner.job_id != self._job_id:
            return True
        covered = [self.covered[self._job_id, CheckpointId(number)] for number in checkpoints]
        compactions = self._merged.compactions_of(name)
        originals = {file for made_of in compactions for file in made_of} if compactions else {name}
        return all(
            file in self._disk.files or self._merged.stand_for(file, names)
            for names in covered
            for file in originals & names
        )

    def is_merged(self, name: str) -> bool:
        """Returns whether a compaction has written this file."""
        return bool(self._merged.compactions_of(name))

    def lost(self, table: str, first: int) -> None:
        """Records that the log of a table has lost its entries from number `first` on.

        From then on the earlier rows are expected.
        """
        self._holes[table] = min(first, self._holes.get(table, first))
        self._readers.pop(table, None)
        self._shown.pop(table, None)
        reader = self._readers[table] = TableLog(self._store(table))
        snapshot = self._reading(reader.snapshot)
        head = self._reading(lambda: reader.head(self._job_id))
        self._shown[table] = [f"{table}/{file.path}" for file in snapshot.files]
        self._committed[table] = -1 if head.commit is None else int(head.commit)

    def is_whole(self, table: str) -> bool:
        """Returns whether the log of a table still has all its entries."""
        return table.rstrip("/") not in self._holes

    # --- what a table shows ---------------------------------------------------------------------------------------

    def _file_created(self, name: str, data: bytes) -> None:
        table, found, number = name.partition(f"/{TABLE_LOG}")
        if not found or not number.isdigit():
            return
        entry: TableEntry = decode(memoryview(data)[HEADER_BYTES:])
        hole = self._holes.pop(table, None)
        if hole is not None and entry.seq > hole:
            self._holes[table] = hole
            return  # The entry was created behind a hole, and is taken back.
        known = table in self._readers
        reader = self._readers.setdefault(table, TableLog(self._store(table)))
        snapshot = self._reading(reader.snapshot)
        if snapshot.seq != entry.seq:
            return  # The entry was created where the log is truncated, and is taken back.
        before = self._shown.get(table, [])
        shown = self._shown[table] = [f"{table}/{file.path}" for file in snapshot.files]
        hidden = set(before).difference(shown)
        self._hidden_ms |= dict.fromkeys(hidden, entry.at_ms or 0)
        if entry.kind is TableEntryKind.COMPACTED:
            return  # `MergedFiles` has checked it.
        if entry.kind is not TableEntryKind.COMMITTED:
            if known and shown != before:
                raise InvariantViolated(
                    6, f"{table}: a claim of job {entry.job_id} changes the rows that the table shows"
                )
        elif entry.job_id == self._job_id:
            self._committed_to(table, int(entry.checkpoint_id or 0), self._merged.originals(shown))

    def _committed_to(self, table: str, number: int, shown: list[str]) -> None:
        if number <= self._committed.get(table, -1):
            raise InvariantViolated(
                6, f"{table}: checkpoint {number} was committed after checkpoint {self._committed[table]}"
            )
        self._committed[table] = number
        if len(set(shown)) < len(shown):
            raise InvariantViolated(6, f"{table}: the commit of checkpoint {number} has a file twice")
        covered = self.covered.get((self._job_id, CheckpointId(number)))
        if covered is None:
            raise InvariantViolated(6, f"{table}: checkpoint {number} was committed, but is not complete")
        expected = {name for name in covered if name.startswith(f"{table}/data/")}
        extra = set(shown) - expected
        missing = expected - set(shown)
        if extra:
            raise InvariantViolated(
                6, f"{table}: the commit of checkpoint {number} shows {min(extra)}, which the checkpoint does not have"
            )
        if missing:
            raise InvariantViolated(
                6, f"{table}: the commit of checkpoint {number} lacks {min(missing)}, which the checkpoint has"
            )
        # Files that a compaction has replaced may have been deleted. The files that the table shows must exist.
        gone = set(self._shown[table]) - self._disk.files.keys()
        if gone:
            raise InvariantViolated(5, f"{table}: {min(gone)} was committed, but does not exist")

    def _store(self, table: str) -> SimulatedStore:
        return SimulatedStore(self._disk, table)

    def _reading(self, read: Callable[[], T]) -> T:
        reliable = self._disk.reliable
        self._disk.reliable = True
        try:
            return read()
        finally:
            self._disk.reliable = reliable


def data_files_of(metadata: CheckpointMetadata) -> frozenset[str]:
    """Returns the full names of the data files that the commit of a checkpoint includes."""
    return frozenset(
        f"{committable.table.rstrip('/')}/{file.path}"
        for subtask in metadata.subtasks
        for committable in subtask.committables
        if not is_own_sink(committable.table)
        for file in committable.files
    )


class MergedFiles:
    """Checks, for all tables of a simulation, that a compaction does not change the rows that a table shows.

    It does not use the format of the log. It compares the files that a table shows before and after an entry, and reads
    the rows of both. A compaction may drop rows that only mark a key as deleted. In that case the whole table must show
    the same rows without them.
    """

    def __init__(self, disk: SimulatedDisk, coverage: Coverage) -> None:
        self._disk = disk
        self._coverage = coverage
        self._readers: dict[str, TableLog] = {}
        self._before: dict[str, TableSnapshot] = {}
        self._holes: dict[str, int] = {}
        self._merged: list[tuple[frozenset[str], frozenset[str]]] = []
        """For each compaction its new files and the files that they replace, by full name, oldest first."""
        disk.created.append(self._file_created)

    def originals(self, names: list[str]) -> list[str]:
        """Returns the files that tasks wrote and from which compactions made these files. The order is undefined."""
        found = Counter(names)
        for new, replaced in reversed(self._merged):
            if all(found[name] for name in new):
                found.subtract(new)
                found.update(replaced)
        return list(found.elements())

    def stand_for(self, name: str, covered: frozenset[str]) -> bool:
        """Returns whether other existing files contain the rows of a file, and apart from them only rows of
        `covered` files.
        """
        return any(
            name in originals and originals <= covered and new <= self._disk.files.keys()
            for new, _ in self._merged
            for originals in [set(self.originals(list(new)))]
        )

    def compactions_of(self, name: str) -> list[frozenset[str]]:
        """Returns the original files of each compaction that has written this file."""
        return [frozenset(self.originals(list(new))) for new, _ in self._merged if name in new]

    def lost(self, table: str, first: int) -> None:
        """Records that the log of a table has lost its entries from number `first` on."""
        self._holes[table] = min(first, self._holes.get(table, first))
        self._readers.pop(table, None)
        self._before.pop(table, None)

    def _file_created(self, name: str, data: bytes) -> None:
        table, found, number = name.partition(f"/{TABLE_LOG}")
        if not found or not number.isdigit():
            return
        entry: TableEntry = decode(memoryview(data)[HEADER_BYTES:])
        hole = self._holes.pop(table, None)
        if hole is not None and entry.seq > hole:
            self._holes[table] = hole
            return
        reader = self._readers.setdefault(table, TableLog(SimulatedStore(self._disk, table)))
        reliable = self._disk.reliable
        self._disk.reliable = True
        try:
            snapshot = reader.snapshot()
            before = self._before.get(table)
            self._before[table] = snapshot
            if snapshot.seq == entry.seq and entry.kind is TableEntryKind.COMPACTED and before is not None:
                self._check(table, before, snapshot)
        finally:
            self._disk.reliable = reliable

    def _check(self, table: str, before: TableSnapshot, after: TableSnapshot) -> None:
        earlier = {f.path: f for f in before.files}
        later = {f.path: f for f in after.files}
        gone = tuple(file for path, file in earlier.items() if path not in later)
        new = tuple(file for path, file in later.items() if path not in earlier)
        replaced = self._rows(table, after, gone)
        merged = self._rows(table, after, new)
        same = replaced == merged
        if after.info.deletes and merged <= replaced:
            same = self._shown(table, after, before.files) == self._shown(table, after, after.files)
        if not same:
            raise InvariantViolated(6, f"{table}: a compaction has changed the rows of the table")
        if new:
            self._coverage.saw("files_put_together")
            self._merged.append(
                (frozenset(f"{table}/{f.path}" for f in new), frozenset(f"{table}/{f.path}" for f in gone))
            )

    def _shown(self, table: str, snapshot: TableSnapshot, files: tuple[DataFile, ...]) -> Counter[str]:
        """Returns the rows that readers of these files see, with the number of each."""
        rows: pa.Table = read_files(SimulatedStore(self._disk, table), snapshot.info, files)
        return Counter(map(repr, shown_rows(newest_rows(rows, snapshot.info)).to_pylist() if files else ()))

    def _rows(self, table: str, snapshot: TableSnapshot, files: tuple[DataFile, ...]) -> Counter[str]:
        rows: pa.Table = read_files(SimulatedStore(self._disk, table), snapshot.info, files)
        if files and snapshot.info.mode == "upsert":
            rows = newest_rows(rows, snapshot.info)
        return Counter(map(repr, rows.to_pylist()))


REPORT = "has lost entries"
"""Part of the error message with which a job reports the loss of entries."""
LOST_MAX = 3
"""The largest number of entries that are lost at once."""
_SNAPSHOT = "snapshot-"


class TableLosses:
    """Deletes acknowledged entries of table logs, as if storage had been reset to an older state.

    The newest entries disappear before the next commit, or between two jobs. Rules:

    - The next commit or restore reports the loss (`REPORT`), or the missing rows are committed again, so that the table
      is correct. `TablesOracle` detects a commit that omits them. The comparison at the end detects a job that finishes
      without them.
    - An entry that is contained in a snapshot of the log is not lost with its file, so it is not deleted. The first
      entry is not deleted either, because without it the table does not exist.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.tables: set[str] = set()
        """The tables whose logs have lost entries."""
        self.listeners: list[Callable[[str, int], None]] = []
        """Called with the URL of a table and the number of its first lost entry."""
        disk.creating.append(self._before_commit)

    def between_jobs(self) -> None:
        """Lets each table lose entries, with the probability `table_loss`, while no job runs."""
        for table in sorted({name.partition(f"/{TABLE_LOG}")[0] for name in self._disk.files if TABLE_LOG in name}):
            self._maybe_lose(table)

    def _before_commit(self, name: str, data: bytes) -> None:
        table, found, number = name.partition(f"/{TABLE_LOG}")
        if found and number.isdigit() and decode(memoryview(data)[HEADER_BYTES:]).kind is TableEntryKind.COMMITTED:
            self._maybe_lose(table)

    def _maybe_lose(self, table: str) -> None:
        world = self._disk.world
        names = self._disk.names(f"{table}/{TABLE_LOG}".rstrip("/"))
        kept = max((int(name.removeprefix(_SNAPSHOT)) for name in names if name.startswith(_SNAPSHOT)), default=0)
        numbers = [int(name) for name in names if name.isdigit() and int(name) > kept]
        if not numbers or not world.chance("table_loss"):
            return
        lost = numbers[-world.between(1, LOST_MAX) :]
        for number, name in ((int(name), name) for name in names if name.isdigit()):
            if number in lost:
                self._disk.remove(f"{table}/{TABLE_LOG}{name}")
        world.note("entries", *lost, "of", table, "are lost")
        self.tables.add(table)
        for listener in self.listeners:
            listener(table, lost[0])
