"""`RunningVacuum`: deletes files that a table has not shown for its `history`, while the job that owns it commits.

The process of the coordinator that commits does it, beside its commits. Rules:

- What goes is decided as for any vacuum (`log_vacuum.py`), and is in the log before a file is deleted. Everything that
  the table showed within its history stays. So does what a checkpoint of the owner covers that is there. So readers,
  `as_of`, savepoints of that time and the job itself find their files. A restore from further back is refused, and the
  error names the vacuum.
- It reads the log through a `TableLog` of its own. The one that commits neither waits for it nor keeps what it read. A
  commit that loses the race for an entry against it looks again, as against any other writer.
- It looks a few times in each history, and deletes a bounded number of files after a commit. A process that is killed
  in between leaves files behind. The next look finds them: it looks for all files that are gone by the log and are
  there.
- When all that had to go is deleted, the entries that named it are left out of the log (`log_cut.py`). So the log is
  about as long as the history of the table, however long the job runs.
- A Delta table is kept for as long as its own property `delta.deletedFileRetentionDuration` says, if that is longer.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.log_vacuum import Retention
from tidegate.storage.tables.table_files import files_there
from tidegate.storage.tables.table_log import TableLog

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
