"""The oracle of output tables: what a table shows, and when that changes.

It knows nothing of how a log says it. What a checkpoint covers follows from the metadata of the checkpoints behind it:
those of its attempt, then those before the one that the attempt was restored from, also where that is another job's.

- After a commit of checkpoint N a table shows just the files that N covers: nothing twice, nothing left out, nothing of
  what came after a checkpoint from which the job has gone on.
- Nothing else changes what is shown: no claim, no restart, no truncation of the log. A compaction changes the files,
  and not the rows; `MergedFiles` looks at that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from tidegate.storage.checkpoints.metadata import CheckpointMetadata, is_own_sink
from tidegate.storage.codec import decode
from tidegate.storage.files.envelope import HEADER_BYTES
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import TableEntry, TableEntryKind
from tidegate.storage.tables.table_log import TableLog
from tidegate.testing.oracle.files.merged_files import MergedFiles
from tidegate.testing.oracle.violation import InvariantViolated
from tidegate.testing.world.disk import TABLE_LOG, SimulatedDisk, SimulatedStore

T = TypeVar("T")
Covered = Mapping[tuple[JobId, CheckpointId], frozenset[str]]
"""Full names of all data files that a checkpoint covers, with those that the checkpoints before it cover."""


class TablesOracle:
    """Watches the tables that one job writes.

    `inherited`: what checkpoints of the jobs before it cover. `histories`: for how many ms each table keeps what it has
    shown, by URL.
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
        """What the checkpoint covers from which the job was started."""
        self._start: frozenset[str] = frozenset()
        """What the newest completed checkpoint of the attempt covers, or the one that it was restored from."""
        self._committed: dict[str, int] = {}
        self._readers: dict[str, TableLog] = {}
        self._shown: dict[str, list[str]] = {}
        self._hidden_ms: dict[str, int] = {}
        """When each file was hidden that a table has shown."""
        self._holes: dict[str, int] = {}
        """The first entry of each table's log that is lost, until somebody has made it again."""
        disk.created.append(self._file_created)

    def restored(self, job_id: JobId, checkpoint_id: CheckpointId) -> None:
        """The job was started from this checkpoint."""
        self._origin = self._start = self.covered[job_id, checkpoint_id]

    def deployed(self, restored: int | None) -> None:
        """An attempt starts, from a checkpoint of the job itself or (None) from where the job was started."""
        own = None if restored is None else self.covered.get((self._job_id, CheckpointId(restored)))
        self._start = self._origin if own is None else own

    def completed(self, metadata: CheckpointMetadata) -> None:
        """A checkpoint is complete."""
        files = data_files_of(metadata)
        self._start |= files
        self.covered[self._job_id, metadata.checkpoint_id] = self._start

    def referenced(self, table: str) -> set[str]:
        """Full names of all data files that a table's log refers to."""
        return {f"{table}/{path}" for path in self._reading(lambda: TableLog(self._store(table)).referenced_paths())}

    def may_go(self, name: str, checkpoints: Iterable[int]) -> bool:
        """Whether a data file may be deleted, of a task or of a compaction.

        No table shows it, or has shown it within its history. The rows that each of these checkpoints covers are still
        there: in this file's place others stand, larger ones or, for a file of a compaction, those that it was made of.
        Where another job owns the table by now, the checkpoints of this one do not count.
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
        """Whether a compaction has made a file."""
        return bool(self._merged.compactions_of(name))

    def lost(self, table: str, first: int) -> None:
        """The log of a table has lost its entries from this one on: what the table shows is what it showed before."""
        self._holes[table] = min(first, self._holes.get(table, first))
        self._readers.pop(table, None)
        self._shown.pop(table, None)
        reader = self._readers[table] = TableLog(self._store(table))
        snapshot, head = self._reading(reader.snapshot), self._reading(lambda: reader.head(self._job_id))
        self._shown[table] = [f"{table}/{file.path}" for file in snapshot.files]
        self._committed[table] = -1 if head.commit is None else int(head.commit)

    def is_whole(self, table: str) -> bool:
        """Whether the log of a table has all that it has ever had."""
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
            return  # It was created behind a hole, and is taken back.
        known = table in self._readers
        reader = self._readers.setdefault(table, TableLog(self._store(table)))
        snapshot = self._reading(reader.snapshot)
        if snapshot.seq != entry.seq:
            return  # It was created where the log is truncated, and is taken back.
        before = self._shown.get(table, [])
        shown = self._shown[table] = [f"{table}/{file.path}" for file in snapshot.files]
        hidden = set(before).difference(shown)
        self._hidden_ms |= dict.fromkeys(hidden, entry.at_ms or 0)
        if entry.kind is TableEntryKind.COMPACTED:
            return  # `MergedFiles` has looked at it.
        if entry.kind is not TableEntryKind.COMMITTED:
            if known and shown != before:
                raise InvariantViolated(6, f"{table}: a claim of {entry.job_id} changes what is shown")
        elif entry.job_id == self._job_id:
            self._committed_to(table, int(entry.checkpoint_id or 0), self._merged.originals(shown))

    def _committed_to(self, table: str, number: int, shown: list[str]) -> None:
        if number <= self._committed.get(table, -1):
            raise InvariantViolated(
                6, f"{table}: checkpoint {number} was committed after checkpoint {self._committed[table]}"
            )
        self._committed[table] = number
        if len(set(shown)) < len(shown):
            raise InvariantViolated(6, f"{table}: checkpoint {number} commits a file twice")
        covered = self.covered.get((self._job_id, CheckpointId(number)))
        if covered is None:
            raise InvariantViolated(6, f"{table}: checkpoint {number} was committed, and is not complete")
        expected = {name for name in covered if name.startswith(f"{table}/data/")}
        extra, missing = set(shown) - expected, expected - set(shown)
        if extra:
            raise InvariantViolated(6, f"{min(extra)} is shown with checkpoint {number}, which does not cover it")
        if missing:
            raise InvariantViolated(6, f"checkpoint {number} covers {min(missing)}, and its commit leaves it out")
        # Files that larger ones stand for may have been deleted: those that show must be there.
        gone = set(self._shown[table]) - self._disk.files.keys()
        if gone:
            raise InvariantViolated(5, f"{min(gone)} was committed, and is not there")

    def _store(self, table: str) -> SimulatedStore:
        return SimulatedStore(self._disk, table)

    def _reading(self, read: Callable[[], T]) -> T:
        reliable, self._disk.reliable = self._disk.reliable, True
        try:
            return read()
        finally:
            self._disk.reliable = reliable


def data_files_of(metadata: CheckpointMetadata) -> frozenset[str]:
    """Full names of the data files that a checkpoint asks to be committed."""
    return frozenset(
        f"{committable.table.rstrip('/')}/{file.path}"
        for subtask in metadata.subtasks
        for committable in subtask.committables
        if not is_own_sink(committable.table)
        for file in committable.files
    )
