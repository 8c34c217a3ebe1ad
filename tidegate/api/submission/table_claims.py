"""Makes a new job the owner of its tables, which is called a claim. The rows that a restored checkpoint covers are
kept.

Rules:

- A job cannot claim a table while another job that owns it lives (`check_owner_is_gone`).
- A job may die after it has completed a checkpoint, and before it has committed the sink files of this checkpoint. The
  job that restores the checkpoint lists these files in its claim, and its first commit makes them visible.
- A job that is restored from a final checkpoint processes no rows and completes no checkpoint, so the claim is followed
  by a commit at once.
- The log of a table must have all entries that the restored checkpoint lists: the newest entry at that time, and the
  commits of earlier checkpoints. If a commit is missing, it is repeated from its checkpoint. If that checkpoint no
  longer exists, the restore is refused.
- Before a commit lists sink files, it is checked that these files exist. They may be missing, because a job that ends
  deletes the files of a savepoint that it gave up, although the savepoint may be completed later.
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
"""Position of the number of claims in the version of a row of an upsert table: the number of claims is shifted left by
this many bits.

So rows of a later job have greater versions.
"""

Files = list[tuple[CheckpointId, tuple[DataFile, ...]]]
"""For one table: ids of completed checkpoints, each with the sink files of this table that the checkpoint covers."""
LeftOver = dict[str, Files]


def check_tables(
    tables: Sequence[OutputTable],
    job_id: JobId,
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
    now_ms: int,
) -> None:
    """Makes the checks of `claim_tables`, and checks that no other living job owns a table. Writes nothing.

    `covering` are the existing checkpoints up to the restored one, oldest first. Raises the errors of `claim_tables`.
    """
    for table in tables:
        check_owner_is_gone(table.url, job_id, open_store, now_ms)
        options = table.options
        table_log = _whole_log(table.log, table.url, covering)
        table_log.check_claim(table.info, job_id, _origin(covering), options.if_exists, evolves=options.evolves)


def _whole_log(table_log: TableLog, url: str, covering: Sequence[CheckpointMetadata]) -> TableLog:
    """Returns the log of a table, which is then expected to have all entries that the restored checkpoint lists.

    Raises TableError if it lacks one of them. This call or a later call to the log may raise it.
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

    - `covering`: the existing checkpoints up to the restored one, oldest first. Empty without a restore.
    - `home`: the checkpoint root of the job.

    Returns the first version of the rows that the job writes, by URL of the table, and the newest log entry of each
    table.

    Raises TableError, ConfigurationError and StorageError.
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
    """Returns the sink files of completed checkpoints that are not committed, by URL of the table, oldest checkpoint
    first.

    `urls` are the URLs of the tables that the new job writes.
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
    """Raises TableError if a file that is about to be committed does not exist, because its rows would be missing in
    the table.
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
    """Logs for tables that no longer exist, and that the restored checkpoint covers, whether rows may be missing.

    No rows are missing if the tables were moved, which is assumed if the other tables of the job (`fresh`) include a
    copy with all commits for each table in `gone`.
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
    """Commits uncommitted sink files to a table of the restored job that the new job does not write.

    `items` are these files by checkpoint. Raises ConfigurationError if another job has claimed the table since.
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
