"""`TableCompactor`: puts small files of a job's tables together, and deletes what nobody needs, beside its commits.

`CoordinatorEffects` has one.

Rules:

- A step after a commit, on a thread that commits do not need. While a step is under way no other begins.
- Small files are put together first. Then files are deleted that the table has not shown for its history.
- A step that fails changes nothing, and neither fails the job nor a checkpoint. The next one tries again, but where a
  file of the table is damaged or lost: that is for whoever reads the table to find out, and is said once.
- Before the files of the job are swept, what is under way ends; it looks for that at each file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tidegate.actors.drivers.job_context import JobContext
from tidegate.protocol.failure_reasons import log_failure
from tidegate.storage.checkpoints.layout import parse_checkpoint_name
from tidegate.storage.errors import StorageError, TableError, may_be_awaited
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.compaction.running_compaction import RunningCompaction
from tidegate.storage.tables.compaction.running_vacuum import RunningVacuum
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The job is over."""


class TableCompactor:
    """The compactions and vacuums of one job's tables, by one coordinator. Thread-safe."""

    def __init__(
        self,
        context: JobContext,
        open_store: OpenStore,
        log_of: Callable[[str], TableLog],
        now_ms: Callable[[], int],
    ) -> None:
        self._context = context
        self._open_store = open_store
        self._log_of = log_of
        self._lock = threading.Lock()
        self._stopped = False
        self._now_ms = now_ms
        self._tables: dict[str, RunningCompaction] = {}
        self._vacuums: dict[str, RunningVacuum] = {}
        self._given_up: set[tuple[str, str]] = set()

    @property
    def compacts(self) -> bool:
        """Whether there is any table to look at."""
        return bool(self._context.compactions or self._context.histories) and not self._stopped

    def step(self) -> None:
        """Look at each table, put together what is due, once, and delete some of what is due."""
        if self._stopped or not self._lock.acquire(blocking=False):
            return
        try:
            for url in self._context.compactions:
                self._step(url, "the small files of {} are put together", lambda: self._of(url))  # noqa: B023
            for url in self._context.histories:
                self._step(url, "old files of {} are deleted", lambda: self._vacuum_of(url))  # noqa: B023
        except _StoppedError:
            log.debug("a compaction of %s is left, because the job is over", self._context.job_id)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Begin nothing any more, and end what is under way soon."""
        self._stopped = True

    def close(self) -> None:
        """Stop, wait until nothing is under way, and delete what was written for nothing. Raises StorageError.

        Nothing is deleted of a table whose log has lost entries: its files are all that is left of their rows.
        """
        self.stop()
        with self._lock:
            for url in self._context.compactions:
                try:
                    self._of(url).close()
                except TableError as error:
                    log.error("files of compactions are not deleted: %s", error)

    def _step(self, url: str, what: str, of: Callable[[], RunningCompaction | RunningVacuum]) -> None:
        """`what` is done, in words, with the table in the place of {}."""
        if (url, what) in self._given_up:
            return
        try:
            of().step(self._may_go_on)
        except _StoppedError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is: the job is worth more than the size of its files)
            if isinstance(error, StorageError) and may_be_awaited(error):
                log.warning("%s later: %s", what.format(url), error)
                return
            self._given_up.add((url, what))
            log_failure(log, f"no longer: {what.format(url)}", error)

    def _of(self, url: str) -> RunningCompaction:
        if url not in self._tables:
            settings = self._context.compactions[url]
            store, table_log = self._open_store(url), self._log_of(url)
            self._tables[url] = RunningCompaction(store, table_log, self._context.job_id, settings)
        return self._tables[url]

    def _vacuum_of(self, url: str) -> RunningVacuum:
        if url not in self._vacuums:
            store, table_log, context = self._open_store(url), self._log_of(url), self._context
            self._vacuums[url] = RunningVacuum(
                store, table_log, context.job_id, context.histories[url], self._checkpoints, self._now_ms
            )
        return self._vacuums[url]

    def _checkpoints(self) -> tuple[CheckpointId, ...]:
        """The checkpoints of the job that are there, whatever state they are in. StorageError."""
        names = self._open_store(self._context.root).list(self._context.layout.job_dir())
        return tuple(found for found in map(parse_checkpoint_name, names) if found is not None)

    def _may_go_on(self) -> None:
        if self._stopped:
            raise _StoppedError
