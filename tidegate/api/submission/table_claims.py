"""Makes a job the owner of its tables. Keeps the rows of a restored checkpoint, and refuses a table of a living job.

Rules:

- A table is refused while the job that owns it lives (`check_owner_is_gone`).
- A job may die after it has completed a checkpoint, and before it has committed it. A job that restores the checkpoint
  gets its sink files: the claim includes them, and the first commit shows them.
- A job that is restored from a final checkpoint processes nothing and completes no checkpoint. It commits at once.
- The log of a table must have all entries that the restored checkpoint lists: its newest entry, and the commits of
  earlier checkpoints. A missing commit is made again from its checkpoint while that is retained, and is an error
  otherwise.
- Sink files that are not committed must exist before a commit names them. The end of a job deletes the files of a
  savepoint that it has given up, but the savepoint may be completed later.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from tidegate.api.tables.output_tables import OutputTable, check_owner_is_gone
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, DataFile, TableHead, is_own_sink
from tidegate.storage.errors import ConfigurationError, TableError
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

EPOCH_BITS = 40
"""Number of upper bits of a row's version in an upsert table. They hold the number of claims, so rows of a later job
have greater versions.
"""

Files = list[tuple[CheckpointId, tuple[DataFile, ...]]]
"""Completed checkpoints, and the files of one table that each covers."""
LeftOver = dict[str, Files]


def check_tables(
    tables: Sequence[OutputTable],
    job_id: JobId,
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
    now_ms: int,
) -> None:
    """Raises the errors of `claim_tables` before any expensive work. Also refuses tables of living jobs."""
    for table in tables:
        check_owner_is_gone(table.url, job_id, open_store, now_ms)
        options = table.options
        table_log = _whole_log(table.log, table.url, covering)
        table_log.check_claim(table.info, job_id, _origin(covering), options.if_exists, evolves=options.evolves)


def _whole_log(table_log: TableLog, url: str, covering: Sequence[CheckpointMetadata]) -> TableLog:
    """Returns the log of a table.

    Raises TableError, now or in a later call, if the log has lost entries that the restored checkpoint lists.
    """
    if covering:
        restored = covering[-1]
        head, expected = restored.head_of(url), restored.expected_commits(url)
        if head.commit is None and not expected and not table_log.exists():
            return table_log  # The table was deleted, and had no rows of the job.
        table_log.expect(restored.job_id, head)
        retained = [
            metadata.checkpoint_id
            for metadata in covering
            if any(c.table == url for subtask in metadata.subtasks for c in subtask.committables)
        ]
        table_log.check_commits((restored.job_id, restored.checkpoint_id), expected, retained)
    return table_log


def claim_tables(
    tables: Sequence[OutputTable],
    job_id: JobId,
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
    home: str,
) -> tuple[Mapping[str, int], tuple[TableHead, ...]]:
    """Makes a job the owner of its tables.

    - `covering`: the restored checkpoint, after the older checkpoints that still exist.
    - `home`: the checkpoint root of the job.

    Returns the first version of the job in each table, by URL, and the newest log entry of each table. Raises
    TableError, ConfigurationError and StorageError.
    """
    urls = {table.url for table in tables}
    left = _left_over(covering, urls, open_store)
    for url, items in left.items():
        _check_there(open_store(url), items)
    for url in [url for url in left if url not in urls]:
        _commit_elsewhere(url, covering, left.pop(url), open_store)
    first_versions, heads = {}, []
    for table in tables:
        table_log = _whole_log(table.log, table.url, covering)
        table_log.create(table.info, evolves=table.options.evolves, history_ms=table.options.history_ms)
        files = tuple(file for _, files in left.get(table.url, ()) for file in files)
        head = table_log.claim(job_id, _origin(covering), table.options.if_exists, home=home, uncommitted=files)
        if covering and covering[-1].final:
            head = table_log.commit(job_id, CheckpointId(0), ())
        first_versions[table.url] = table_log.claims() << EPOCH_BITS
        heads.append(head)
    return first_versions, tuple(heads)


def _origin(covering: Sequence[CheckpointMetadata]) -> tuple[JobId, CheckpointId] | None:
    return (covering[-1].job_id, covering[-1].checkpoint_id) if covering else None


def _left_over(covering: Sequence[CheckpointMetadata], urls: Collection[str], open_store: OpenStore) -> LeftOver:
    """Returns files that completed checkpoints cover and no commit shows, by table, oldest checkpoint first.

    `urls` are the tables of the job.
    """
    left: LeftOver = {}
    for metadata in covering:
        files: dict[str, list[DataFile]] = {}
        for subtask in metadata.subtasks:
            for committable in (c for c in subtask.committables if not is_own_sink(c.table)):
                files.setdefault(committable.table, []).extend(committable.files)
        for url, found in files.items():
            left.setdefault(url, []).append((metadata.checkpoint_id, tuple(found)))
    gone = []
    for url, items in list(left.items()):
        numbers = _uncommitted(url, covering[-1], items, open_store)
        if numbers is None:
            gone.append(url)
        left[url] = [item for item in items if item[0] in (numbers or ())]
    if gone:
        _log_gone(gone, [url for url in urls if url not in left], covering, open_store)
    return {url: items for url, items in left.items() if items}


def _check_there(table: Store, items: Files) -> None:
    """Raises TableError if a file that is about to be committed is missing, because the table could not be read
    then.
    """
    files = [file for _, found in items for file in found]
    if gone := [file for file in files if not table.exists(file.path)]:
        raise TableError(
            f"the restored checkpoint covers {sum(file.rows for file in gone)} rows of the table at {table.url} that "
            f"were never committed, and their files are gone (the first is {gone[0].path}); restore another checkpoint"
        )


def _uncommitted(
    url: str, origin: CheckpointMetadata, items: Files, open_store: OpenStore
) -> tuple[CheckpointId, ...] | None:
    numbers = [checkpoint_id for checkpoint_id, _ in items]
    return TableLog(open_store(url)).uncommitted(origin.job_id, origin.checkpoint_id, numbers)


def _log_gone(
    gone: Sequence[str], fresh: Sequence[str], covering: Sequence[CheckpointMetadata], open_store: OpenStore
) -> None:
    """Logs, for tables that no longer exist, whether rows may be missing.

    No rows are missing if the tables were moved: the other tables of the job then include a copy of each, with all
    commits.
    """
    numbers: Files = [(metadata.checkpoint_id, ()) for metadata in covering]
    copies = [found for url in fresh if (found := _uncommitted(url, covering[-1], numbers, open_store)) is not None]
    if len(copies) >= len(gone) and not any(copies):
        log.info("the tables at %s were moved, and the copies have all rows of the restored checkpoint", gone)
        return
    for url in gone:
        log.warning(
            "the table at %s is gone, and its rows that the restored checkpoint covers are not written again. No rows "
            "are missing if the table was complete, as after a stop with a savepoint",
            url,
        )


def _commit_elsewhere(
    url: str,
    covering: Sequence[CheckpointMetadata],
    items: Sequence[tuple[CheckpointId, tuple[DataFile, ...]]],
    open_store: OpenStore,
) -> None:
    """Commits files to a table of the old job that the new job does not write.

    Raises ConfigurationError if another job has claimed the table.
    """
    job_id = covering[-1].job_id
    table_log = _whole_log(TableLog(open_store(url)), url, covering)
    owner = table_log.owner()
    if owner is None or owner.job_id != job_id:
        rows = sum(file.rows for _, files in items for file in files)
        raise ConfigurationError(
            f"the checkpoint covers {rows} rows of the table at {url} that were never committed, because another job "
            "has claimed that table; let this job write to it too, or restore another checkpoint"
        )
    for checkpoint_id, files in items:
        table_log.commit(job_id, checkpoint_id, files)
