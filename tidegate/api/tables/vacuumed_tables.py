"""`vacuum_table`: deletes files of a table that nobody needs any more: those behind rows that were hidden long ago.

Rules:

- What goes is said in the table's log first (`tidegate/storage/tables/log/log_vacuum.py`). Then it is deleted. Whoever
  is killed in between leaves files behind, and the next vacuum deletes them.
- A job may run meanwhile. What it can fall back to stays: its checkpoints are looked up where its claim says they are.
- What names deleted files alone is left out of the log afterwards (`tidegate/storage/tables/log/log_cut.py`).
- Files that no entry of the log names are not touched. They may be on their way into it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta

from tidegate.recovery.checkpoints import list_checkpoints
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, StorageError, TableError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.log.log_vacuum import Retention
from tidegate.storage.tables.table_files import files_there
from tidegate.storage.tables.table_log import TableLog
from tidegate.storage.units import parse_duration_ms

log = logging.getLogger(__name__)

RETAIN_DEFAULT = "7d"


@dataclass(frozen=True, slots=True)
class TableVacuumed:
    """What a vacuum has deleted, or, of a dry run, would delete: files, their bytes, and their paths in the table.

    `readable_from`: the number of a commit. That one and all later ones can be read, and their checkpoints restored.
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
    """Delete what the table at `url` has not shown for as long as `retain`, but for the newest commits.

    Raises TableError if there is no table, or its rows are handed to a function; ConfigurationError for a wrong
    argument; StorageError, also where nobody can tell what checkpoints the owner has.
    """
    retain_ms = parse_duration_ms(retain, setting="retain")
    if isinstance(retain_commits, bool) or not isinstance(retain_commits, int) or retain_commits < 1:
        raise ConfigurationError(f"retain_commits={retain_commits!r}: the newest commit at least stays; give 1 or more")
    store = open_store(url)
    if newest_mark(store)[0]:
        raise TableError(f"rows of the table at {url} are handed to a function, and deleted then: vacuum other tables")
    table_log = TableLog(store)
    retention = Retention(now_ms() - retain_ms, retain_commits, _checkpoints_of_owner(table_log, url, open_store))
    deletable, readable_from = table_log.vacuum(retention, dry_run=dry_run)
    there = files_there(store, deletable)
    if not dry_run:
        store.delete_all(there)
        table_log.cut(retention, lambda paths: files_there(store, paths))
    return TableVacuumed(len(there), sum(deletable[path].size_bytes for path in there), there, readable_from)


def _checkpoints_of_owner(table_log: TableLog, url: str, open_store: OpenStore) -> tuple[CheckpointId, ...]:
    """Those that a running job can fall back to."""
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
            f"nobody can tell what job {owner.job_id}, which owns the table at {url}, may fall back to, because its "
            f"checkpoints cannot be read: {error}. See that {owner.home} can be read"
        ) from error
    return tuple(CheckpointId(summary.checkpoint_id) for summary in found if summary.job_id == owner.job_id)
