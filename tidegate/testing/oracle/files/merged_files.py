"""The oracle of compactions: what a table shows has the same rows before and after, and later files stand for earlier.

It knows nothing of how a log says it: it compares the files that a table shows before an entry is there with those that
it shows after it, and reads the rows of both. Of rows that only say that their key was deleted some may go. Then the
whole table has to show the same rows without them.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.codec import decode
from tidegate.storage.files.envelope import HEADER_BYTES
from tidegate.storage.tables.log.entries import TableEntry, TableEntryKind
from tidegate.storage.tables.table_files import newest_rows, read_files, shown_rows
from tidegate.storage.tables.table_log import TableLog, TableSnapshot
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.violation import InvariantViolated
from tidegate.testing.world.disk import TABLE_LOG, SimulatedDisk, SimulatedStore


class MergedFiles:
    """Watches all tables of a simulation, whatever jobs write them."""

    def __init__(self, disk: SimulatedDisk, coverage: Coverage) -> None:
        self._disk = disk
        self._coverage = coverage
        self._readers: dict[str, TableLog] = {}
        self._before: dict[str, TableSnapshot] = {}
        self._holes: dict[str, int] = {}
        self._merged: list[tuple[frozenset[str], frozenset[str]]] = []
        """Full names of the files of a compaction, and of those that they stand for, oldest first."""
        disk.created.append(self._file_created)

    def originals(self, names: list[str]) -> list[str]:
        """What these files stand for, with files of compactions undone; in no certain order."""
        found = Counter(names)
        for new, replaced in reversed(self._merged):
            if all(found[name] for name in new):
                found.subtract(new)
                found.update(replaced)
        return list(found.elements())

    def stand_for(self, name: str, covered: frozenset[str]) -> bool:
        """Whether files that are there have the rows of a file, with others of what a checkpoint covers alone."""
        return any(
            name in originals and originals <= covered and new <= self._disk.files.keys()
            for new, _ in self._merged
            for originals in [set(self.originals(list(new)))]
        )

    def compactions_of(self, name: str) -> list[frozenset[str]]:
        """What the compactions stand for that have made this file; none of a file that none has made."""
        return [frozenset(self.originals(list(new))) for new, _ in self._merged if name in new]

    def lost(self, table: str, first: int) -> None:
        """The log of a table has lost its entries from this one on."""
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
        reliable, self._disk.reliable = self._disk.reliable, True
        try:
            snapshot = reader.snapshot()
            before, self._before[table] = self._before.get(table), snapshot
            if snapshot.seq == entry.seq and entry.kind is TableEntryKind.COMPACTED and before is not None:
                self._check(table, before, snapshot)
        finally:
            self._disk.reliable = reliable

    def _check(self, table: str, before: TableSnapshot, after: TableSnapshot) -> None:
        earlier, later = {f.path: f for f in before.files}, {f.path: f for f in after.files}
        gone = tuple(file for path, file in earlier.items() if path not in later)
        new = tuple(file for path, file in later.items() if path not in earlier)
        replaced, merged = self._rows(table, after, gone), self._rows(table, after, new)
        same = replaced == merged
        if after.info.deletes and merged <= replaced:
            same = self._shown(table, after, before.files) == self._shown(table, after, after.files)
        if not same:
            raise InvariantViolated(6, f"{table}: a compaction shows other rows than there were")
        if new:
            self._coverage.saw("files_put_together")
            self._merged.append(
                (frozenset(f"{table}/{f.path}" for f in new), frozenset(f"{table}/{f.path}" for f in gone))
            )

    def _shown(self, table: str, snapshot: TableSnapshot, files: tuple[DataFile, ...]) -> Counter[str]:
        """What readers see of files."""
        rows: pa.Table = read_files(SimulatedStore(self._disk, table), snapshot.info, files)
        return Counter(map(repr, shown_rows(newest_rows(rows, snapshot.info)).to_pylist() if files else ()))

    def _rows(self, table: str, snapshot: TableSnapshot, files: tuple[DataFile, ...]) -> Counter[str]:
        rows: pa.Table = read_files(SimulatedStore(self._disk, table), snapshot.info, files)
        if files and snapshot.info.mode == "upsert":
            rows = newest_rows(rows, snapshot.info)
        return Counter(map(repr, rows.to_pylist()))
