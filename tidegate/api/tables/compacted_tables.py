"""`compact_table`: the small files of a table at rest become few large ones.

Rules:

- A compaction owns the table while it works, as a job does. It refuses a table whose owner lives. If a job takes the
  table meanwhile, the job wins, and the compaction has changed nothing.
- Each line of jobs is compacted on its own, with a commit of its own, and only if that makes fewer files.
- Files that a compaction has written and not committed are deleted: by itself, or, if it was killed, by the next one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from tidegate.api.tables.table_owners import check_owner_is_gone
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, FencedError, TableError
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.tables.compaction.small_files import rewrites_of, rewritten, worth_it
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.table_files import DATA_FOLDER, data_dir, delete_unreferenced
from tidegate.storage.tables.table_log import TableLog

_PREFIX = "compaction_"
"""No id of a job begins so: these have no underscores."""


@dataclass(frozen=True, slots=True)
class TableCompaction:
    """How many files the table had before it was compacted, and how many after."""

    files_before: int
    files_after: int


def compact_table(url: str, open_store: OpenStore, file_bytes: int) -> TableCompaction:
    """Compact the table at `url`, line of jobs by line of jobs, into files of up to `file_bytes` bytes.

    Raises TableError if there is no table, its rows are handed to a function, or it is a Delta table that others have
    given features which tidegate does not write; ConfigurationError while its owner lives; FencedError if a job has
    taken the table meanwhile; StorageError.
    """
    if file_bytes <= 0:
        raise ConfigurationError(f"file_bytes must be positive, not {file_bytes}")
    store = open_store(url)
    if newest_mark(store)[0]:
        # The compaction would look like a new commit, and its rows would be handed on again.
        raise TableError(f"rows of the table at {url} are handed to a function, and deleted then: compact other tables")
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
        # A commit that failed for another reason may be there all the same, and needs its files.
        if not committing or isinstance(error, FencedError):
            delete_unreferenced(store, job_id, None)
        raise
    return len(new)


def _sweep(store: Store, own: JobId) -> bool:
    """Delete what earlier compactions left. They are fenced by now, so they cannot commit it any more."""
    for name in store.list(DATA_FOLDER):
        if name.startswith(_PREFIX) and name != own:
            delete_unreferenced(store, JobId(name), None)
    return True
