"""What may be deleted of what rests, where no coordinator decides: what people delete, and what crashes have left.

The rule is one: nothing of a job that lives. It relies on the checkpoints that it retains, deletes the others itself,
and may be about to refer to their files. Its lease says whether it lives; `force` is the word of a caller who knows
better. Who deletes asks here, and gets the permit (`storage/checkpoints/permits.py`) without which nothing is deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from tidegate.storage.checkpoints.layout import CheckpointLayout, CheckpointPointer
from tidegate.storage.checkpoints.lease import may_live, why_alive
from tidegate.storage.checkpoints.permits import _DECIDED, DeletePermit, OrphanPermit
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId

GRACE_MS_DEFAULT = 3_600_000


class WalkableStore(Store, Protocol):
    """A store that knows all files below a folder."""

    def walk(self, prefix: str) -> Sequence[FileInfo]:
        """Every file at any depth, by its path from the folder on."""
        ...


def may_run(store: WalkableStore, job_id: JobId, now_ms: int, grace_ms: int = GRACE_MS_DEFAULT) -> bool:
    """Whether a job lives as far as its lease says, and its process, where that can be known.

    Of a job that never had one, whether it has written to its event log within the grace period, or nobody can tell.
    """
    if store.exists(CheckpointLayout(job_id).lease()):
        return may_live(store, job_id, now_ms)
    times = [file.modified_at_ms for file in store.walk(CheckpointLayout(job_id).events_dir())]
    return any(time is None or time > now_ms - grace_ms for time in times)


def why_may_run(store: Store, job_id: JobId) -> str:
    """What lets a job that may run seem so, in words."""
    return why_alive(store, job_id) or "it wrote to its event log not long ago"


def permit_deletion(store: Store, at: CheckpointPointer, *, force: bool) -> DeletePermit:
    """To delete a checkpoint of a dead job, or a savepoint: that is the user's, and no job needs one that it has taken.

    `force`: the caller knows that the job is dead. ConfigurationError for a checkpoint of a job that may be running.
    """
    if not (at.savepoint or force) and may_live(store, at.job_id, int(time.time() * 1000)):
        raise ConfigurationError(
            f"{at} stays: job {at.job_id} may be running, {why_alive(store, at.job_id)}. A running job deletes its "
            "checkpoints itself, all but those that it retains. Wait for its end, or stop or cancel it (job.stop(), "
            "job.cancel()), then delete this one; or use force if you know that the job is dead"
        )
    return DeletePermit(_DECIDED, at.checkpoint_id)


def permit_orphans(store: WalkableStore, job_id: JobId, now_ms: int, grace_ms: int, *, force: bool) -> OrphanPermit:
    """To delete what nothing refers to of a job that is dead. ConfigurationError for one that may run."""
    if not force and may_run(store, job_id, now_ms, grace_ms):
        raise ConfigurationError(
            f"job {job_id} may be running, {why_may_run(store, job_id)}. Wait, or use force if you know that it is dead"
        )
    return OrphanPermit(_DECIDED, job_id)
