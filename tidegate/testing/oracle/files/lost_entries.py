"""Loses acknowledged entries of a table's log, as a storage does that is taken back to an older state.

The newest entries vanish: before the next commit, or between two jobs. Rules:

- Whoever commits or restores next reports it (`REPORT`), or the table is right all the same, because the rows that are
  missing are committed again. `TablesOracle` sees a commit that leaves them out, and the comparison at the end a job
  that finishes without them.
- An entry that a snapshot of the log stands for is not lost by losing its file, so it stays. The first entry stays too,
  because without it there is no table to look at.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.storage.codec import decode
from tidegate.storage.files.envelope import HEADER_BYTES
from tidegate.storage.tables.log.entries import TableEntryKind
from tidegate.testing.world.disk import TABLE_LOG, SimulatedDisk

REPORT = "has lost entries"
"""What the error of a job says that has noticed it."""
LOST_MAX = 3
"""Entries that vanish at a time."""
_SNAPSHOT = "snapshot-"


class TableLosses:
    """Loses entries of all tables of one simulation."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.tables: set[str] = set()
        """Tables whose logs have lost entries."""
        self.told: list[Callable[[str, int], None]] = []
        """Whoever watches a table's log: its url, and the first entry that is gone."""
        disk.creating.append(self._before_commit)

    def between_jobs(self) -> None:
        """Nobody runs: each table may lose entries."""
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
        for listener in self.told:
            listener(table, lost[0])
