"""Decides what users and sweeps may delete without a coordinator: nothing of a job that runs.

A running job needs the checkpoints that it retains, deletes other checkpoints itself, and may soon refer to their
files. Its lease shows whether it runs. With `force` the caller guarantees that the job is dead. `deletion.py` and
`sweeper.py` request a permit here (`tidegate/storage/checkpoints/permits.py`). Without a permit nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidegate.storage.checkpoints.layout import CheckpointLayout, CheckpointPointer
from tidegate.storage.checkpoints.lease import may_live, why_alive
from tidegate.storage.checkpoints.permits import _DECIDED, DeletePermit, OrphanPermit
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.store import Store
from tidegate.storage.ids import JobId

GRACE_MS_DEFAULT = 3_600_000


class WalkableStore(Store, Protocol):
    """A store that can list all files in a folder and its subfolders."""

    def walk(self, prefix: str) -> Sequence[FileInfo]:
        """Returns every file in a folder and its subfolders, by its path relative to the folder."""
        ...


def may_run(store: WalkableStore, job_id: JobId, now_ms: int, grace_ms: int = GRACE_MS_DEFAULT) -> bool:
    """Returns whether a job may be running, according to its lease, and to its process if this machine can check it.

    A job that never had a lease may be running if it wrote to its event log within the grace period, or at an unknown
    time.
    """
    if store.exists(CheckpointLayout(job_id).lease()):
        return may_live(store, job_id, now_ms)
    times = [file.modified_at_ms for file in store.walk(CheckpointLayout(job_id).events_dir())]
    return any(time is None or time > now_ms - grace_ms for time in times)


def why_may_run(store: Store, job_id: JobId) -> str:
    """Returns as text why a job may be running."""
    return why_alive(store, job_id) or "because it wrote to its event log recently"


def permit_deletion(store: Store, at: CheckpointPointer, *, force: bool) -> DeletePermit:
    """Returns the permit to delete a checkpoint of a dead job, or any savepoint, because savepoints belong to the user.

    With `force` the caller guarantees that the job is dead. Raises ConfigurationError for a checkpoint of a job that
    may be running.
    """
    if not (at.savepoint or force) and may_live(store, at.job_id, now_ms()):
        raise ConfigurationError(
            f"{at} stays: job {at.job_id} may be running, {why_alive(store, at.job_id)}. A running job deletes its "
            "checkpoints itself, except the retained ones. Wait for its end, or stop or cancel it (job.stop(), "
            "job.cancel()), then delete this one; or use force if the job is certainly dead"
        )
    return DeletePermit(_DECIDED, at.checkpoint_id)


def permit_orphans(store: WalkableStore, job_id: JobId, now_ms: int, grace_ms: int, *, force: bool) -> OrphanPermit:
    """Returns the permit to delete the files of a dead job to which nothing refers.

    Raises ConfigurationError if the job may be running.
    """
    if not force and may_run(store, job_id, now_ms, grace_ms):
        raise ConfigurationError(
            f"job {job_id} may be running, {why_may_run(store, job_id)}. Wait, or use force if it is certainly dead"
        )
    return OrphanPermit(_DECIDED, job_id)
