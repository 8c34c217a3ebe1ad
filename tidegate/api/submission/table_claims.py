"""Takes over the tables of a job: nothing that a restored checkpoint covers may be lost, nor anybody be evicted.

- A table is refused while the job that owns it lives: its lease says so, under the checkpoint root that its claim
  names. This is a courtesy, decided by a clock; what keeps rows exactly-once is that only the owner commits.
- A job that died between completing a checkpoint and committing it has left its sink files to whoever restores it:
  the claim of the new job takes them along, and its first commit shows them.
- A job that is restored from a final checkpoint has nothing to process and completes none: it commits at once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tidegate.api.output_tables import OutputTable
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.lease import is_alive
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, DataFile
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

EPOCH_BITS = 40
"""An upsert table's versions begin with the number of claims: those of a later job are greater."""

LeftOver = dict[str, list[tuple[CheckpointId, tuple[DataFile, ...]]]]


def check_tables(
    tables: Sequence[OutputTable],
    job_id: JobId,
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
    now_ms: int,
) -> None:
    """Raise what `claim_tables` would refuse, before anything expensive is done; and refuse tables of living jobs."""
    for table in tables:
        _check_owner_is_gone(table, job_id, open_store, now_ms)
        table.log.check_claim(table.info, job_id, _origin(covering), table.if_exists)


def claim_tables(
    tables: Sequence[OutputTable],
    job_id: JobId,
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
    home: str,
) -> Mapping[str, int]:
    """Make a job, which has its checkpoints under `home`, the owner of its tables.

    `covering`: the restored checkpoint and those before it that are left. Returns the first version of the job in each
    table. Raises TableError, ConfigurationError, StorageError.
    """
    left = _left_over(covering, open_store)
    urls = {table.url for table in tables}
    for url in [url for url in left if url not in urls]:
        _commit_elsewhere(url, covering[-1].job_id, left.pop(url), open_store)
    first_versions = {}
    for table in tables:
        table_log = table.log
        table_log.create(table.info)
        files = tuple(file for _, files in left.get(table.url, ()) for file in files)
        table_log.claim(job_id, _origin(covering), table.if_exists, home=home, uncommitted=files)
        if covering and covering[-1].final:
            table_log.commit(job_id, CheckpointId(0), ())
        first_versions[table.url] = table_log.claims() << EPOCH_BITS
    return first_versions


def _check_owner_is_gone(table: OutputTable, job_id: JobId, open_store: OpenStore, now_ms: int) -> None:
    if f"/{CheckpointLayout(job_id).taskowned_dir()}/" in table.url:
        return  # A copy of collected rows in the job's own folder: whoever owned the original does not know of it.
    owner = table.log.owner()
    if owner is None or owner.job_id == job_id or owner.home is None:
        return
    try:
        alive = is_alive(open_store(owner.home), owner.job_id, now_ms)
    except (StorageError, ConfigurationError) as error:
        if isinstance(error, StorageError) and "memory" not in owner.home.partition(":")[0]:
            raise StorageError(
                f"nobody can tell whether job {owner.job_id}, which owns the table at {table.url}, lives, because its "
                f"checkpoints cannot be read: {error}. See that {owner.home} can be read, or write to another url"
            ) from error
        # Memory goes with its processes, and the job with its memory.
        log.warning(
            "the table at %s belongs to job %s, and %s cannot tell whether it lives: %s",
            table.url, owner.job_id, owner.home, error,
        )  # fmt: skip
        return
    if alive:
        raise ConfigurationError(
            f"the table at {table.url} is being written by job {owner.job_id}, which lives (its checkpoints are under "
            f"{owner.home}): wait for its end, or stop or cancel it first, or write to another url. A job that was "
            "killed on another machine counts as living until its lease has expired"
        )


def _origin(covering: Sequence[CheckpointMetadata]) -> tuple[JobId, CheckpointId] | None:
    return (covering[-1].job_id, covering[-1].checkpoint_id) if covering else None


def _left_over(covering: Sequence[CheckpointMetadata], open_store: OpenStore) -> LeftOver:
    """Files that completed checkpoints cover and no commit shows, by table, oldest checkpoint first."""
    left: LeftOver = {}
    for metadata in covering:
        files: dict[str, list[DataFile]] = {}
        for subtask in metadata.subtasks:
            for committable in subtask.committables:
                files.setdefault(committable.table, []).extend(committable.files)
        for url, found in files.items():
            left.setdefault(url, []).append((metadata.checkpoint_id, tuple(found)))
    for url, items in list(left.items()):
        origin = covering[-1]
        numbers = TableLog(open_store(url)).uncommitted(
            origin.job_id, origin.checkpoint_id, [checkpoint_id for checkpoint_id, _ in items]
        )
        if numbers is None:
            log.warning("the table at %s is gone; what the restored checkpoint covers of it is not written again", url)
        left[url] = [item for item in items if item[0] in (numbers or ())]
    return {url: items for url, items in left.items() if items}


def _commit_elsewhere(
    url: str, job_id: JobId, items: Sequence[tuple[CheckpointId, tuple[DataFile, ...]]], open_store: OpenStore
) -> None:
    """The old job wrote to a table that the new one does not have."""
    table_log = TableLog(open_store(url))
    owner = table_log.owner()
    if owner is None or owner.job_id != job_id:
        rows = sum(file.rows for _, files in items for file in files)
        raise ConfigurationError(
            f"the checkpoint covers {rows} rows of the table at {url} that were never committed, because another job "
            "has claimed that table; let this job write to it too, or restore another checkpoint"
        )
    for checkpoint_id, files in items:
        table_log.commit(job_id, checkpoint_id, files)
