"""Taking over the tables of a job: nothing that a restored checkpoint covers may be lost, whoever owns the table now.

A job that died between completing a checkpoint and committing it has left its sink files to whoever restores it. Where
it still owns the table they are committed in its name; where another job has claimed the table since, the new job
commits them in its own, as its checkpoint 0, after its claim has taken the table back to what the checkpoint covers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from tidegate.actors.runtimes.context import OpenStore
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.metadata import CheckpointMetadata, DataFile
from tidegate.storage.table_log import TableEntryKind, TableLog
from tidegate.tables import OutputTable

log = logging.getLogger(__name__)

EPOCH_BITS = 40
"""An upsert table's versions begin with the number of claims: those of a later job are greater."""

LeftOver = dict[str, list[tuple[CheckpointId, tuple[DataFile, ...]]]]


def check_tables(tables: Sequence[OutputTable], job_id: JobId, covering: Sequence[CheckpointMetadata]) -> None:
    """Raise TableError for what `claim_tables` would refuse, before anything expensive is done."""
    for table in tables:
        table.log.check_claim(table.info, job_id, _origin(covering), table.if_exists)


def claim_tables(
    tables: Sequence[OutputTable], job_id: JobId, covering: Sequence[CheckpointMetadata], open_store: OpenStore
) -> Mapping[str, int]:
    """Make a job the owner of its tables. `covering`: the restored checkpoint and those before it that are left.

    Returns the first version of the job in each table. Raises TableError, ConfigurationError, StorageError.
    """
    left = _left_over(covering, open_store)
    urls = {table.url for table in tables}
    for url in [url for url in left if url not in urls]:
        _commit_elsewhere(url, covering[-1].job_id, left.pop(url), open_store)
    first_versions = {}
    for table in tables:
        table_log = table.log
        table_log.create(table.info)
        rest = left.get(table.url, [])
        if rest and _owner(table_log) == covering[-1].job_id:
            for checkpoint_id, files in rest:
                table_log.commit(covering[-1].job_id, checkpoint_id, files)
            rest = []
        table_log.claim(job_id, _origin(covering), table.if_exists)
        if rest:
            table_log.commit(job_id, CheckpointId(0), tuple(file for _, files in rest for file in files))
        claims = sum(entry.kind is TableEntryKind.CLAIMED for entry in table_log.entries())
        first_versions[table.url] = claims << EPOCH_BITS
    return first_versions


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
        entries = TableLog(open_store(url)).entries()
        committed = {e.checkpoint_id for e in entries if e.job_id == covering[-1].job_id}
        left[url] = [item for item in items if item[0] not in committed]
        if not entries:
            log.warning("the table at %s is gone; what the restored checkpoint covers of it is not written again", url)
            left[url] = []
    return {url: items for url, items in left.items() if items}


def _commit_elsewhere(
    url: str, job_id: JobId, items: Sequence[tuple[CheckpointId, tuple[DataFile, ...]]], open_store: OpenStore
) -> None:
    """The old job wrote to a table that the new one does not have."""
    table_log = TableLog(open_store(url))
    if _owner(table_log) != job_id:
        rows = sum(file.rows for _, files in items for file in files)
        raise ConfigurationError(
            f"the checkpoint covers {rows} rows of the table at {url} that were never committed, because another job "
            "has claimed that table; let this job write to it too, or restore another checkpoint"
        )
    for checkpoint_id, files in items:
        table_log.commit(job_id, checkpoint_id, files)


def _owner(table_log: TableLog) -> JobId | None:
    claims = [entry.job_id for entry in table_log.entries() if entry.kind is TableEntryKind.CLAIMED]
    return claims[-1] if claims else None
