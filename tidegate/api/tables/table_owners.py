"""Checks that the job which owns a table is dead: nobody takes a table away from a living job.

The claim of the owner names its checkpoint root, and its lease there says whether it lives. That is decided by a clock,
and is only a courtesy. Exactly-once rests on another rule: only the owner commits.
"""

from __future__ import annotations

import logging

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.lease import is_alive
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import JobId
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)


def check_owner_is_gone(url: str, job_id: JobId, open_store: OpenStore, now_ms: int) -> None:
    """Raise ConfigurationError if another job owns the table at a url and lives, StorageError where nobody can tell."""
    if f"/{CheckpointLayout(job_id).taskowned_dir()}/" in url:
        return  # A copy of collected rows in the job's own folder. The owner of the original has nothing to do with it.
    owner = TableLog(open_store(url)).owner()
    if owner is None or owner.job_id == job_id or owner.home is None:
        return
    try:
        alive = is_alive(open_store(owner.home), owner.job_id, now_ms)
    except (StorageError, ConfigurationError) as error:
        if isinstance(error, StorageError) and "memory" not in owner.home.partition(":")[0]:
            raise StorageError(
                f"nobody can tell whether job {owner.job_id}, which owns the table at {url}, lives, because its "
                f"checkpoints cannot be read: {error}. See that {owner.home} can be read, or write to another url"
            ) from error
        # Checkpoints in memory end with their process, and so has the job.
        log.warning(
            "the table at %s belongs to job %s, and %s cannot tell whether it lives: %s",
            url, owner.job_id, owner.home, error,
        )  # fmt: skip
        return
    if alive:
        raise ConfigurationError(
            f"the table at {url} is being written by job {owner.job_id}, which lives (its checkpoints are under "
            f"{owner.home}): wait for its end, or stop or cancel it first, or write to another url. A job that was "
            "killed on another machine counts as living until its lease has expired"
        )
