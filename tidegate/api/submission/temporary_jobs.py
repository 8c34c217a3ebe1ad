"""`TemporaryJob`: the temporary folder of a job for which the user named no storage. It is deleted when it is no longer
needed.

All of these folders are in one folder of the user, the root, among the temporary files of the machine
(`default_storage`). Rules:

- A folder is needed while its job may live, according to the lease of the job. It is also needed while this process has
  an object that reads from it: the `Job`, its `CollectedRows`, or the environment, which forgets the oldest ended jobs.
- A restored job uses files of the job from which it was restored. So a mark in the folder of the older job names the
  newer job, and the older folder is needed while the folder of the newer job exists.
- The folder of a finished job is deleted, because there is nothing to restore. A folder without a completed checkpoint
  is deleted, too.
- If a job with completed checkpoints failed, was cancelled or was killed, its folder stays for `KEPT_MS`, so that
  `restore="latest"` finds the checkpoints.
- The folder stays for good if the user set `retention`, or called `Job.trigger_checkpoint`, which returns a path in it.
  It also stays for good if a savepoint needs its files: staged inputs and collected rows. A log line names each folder
  that stays.
- Folders that a killed process left behind are deleted by the next process that needs the root: only those whose job is
  certainly dead, and at most `SWEPT_MAX` of them.
"""

from __future__ import annotations

import atexit
import enum
import logging
import os
import pwd
import tempfile
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta

from tidegate.storage.checkpoints.layout import CheckpointLayout, parse_checkpoint_name
from tidegate.storage.checkpoints.lease import Lease, Life, life_of, read_lease
from tidegate.storage.checkpoints.metadata import read_metadata
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import CodecError, CorruptionError, NotFoundError, StorageError
from tidegate.storage.files.file_system import TEMPORARY_PREFIX
from tidegate.storage.files.private_folders import list_inside, make_inside, make_private, open_private, remove_inside
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.process_id import is_there

log = logging.getLogger(__name__)

KEPT_MS = int(timedelta(days=7).total_seconds() * 1000)
"""How long, in ms, the completed checkpoints of a job without storage stay, unless the user requested that they are
never deleted.
"""
SWEPT_MAX = 200
"""The largest number of folders of dead processes that a process deletes when it first submits a job without
storage.
"""
_RESTORED_BY = "restored-by-"


class _Fate(enum.Enum):
    DELETED = "deleted"
    KEPT = "kept"
    NEEDED = "needed"
    """The folder is still needed now, and a later call decides again."""


class TemporaryJob:
    """Keeps the temporary folder of one job from being deleted, as long as this object is referenced.

    Each object that reads from the folder refers to it. `keeps` is True if the user requested that the checkpoints of
    the job are never deleted.
    """

    def __init__(self, root: str, job_id: JobId, *, keeps: bool = False) -> None:
        self.root = root
        self.job_id = job_id
        if keeps:
            _mark(root, CheckpointLayout(job_id).keep_mark())
        release = weakref.finalize(self, _unneeded.append, (root, job_id))
        release.atexit = True

    def restored_from(self, job_id: JobId) -> None:
        """Also keeps the folder of an earlier job, from which this job was restored, as long as the folder of this job
        exists.

        Does nothing if the earlier job is not in the root. Raises StorageError.
        """
        if job_id in list_inside(self.root):
            _mark(self.root, f"{CheckpointLayout(job_id).job_dir()}/{_RESTORED_BY}{self.job_id}")


_unneeded: deque[tuple[str, JobId]] = deque()
"""Folders to which no object of this process refers any more, each as (root, job id).

Garbage collection only adds entries, and `delete_unneeded` deletes the folders.
"""
swept_roots: set[str] = set()
"""Roots in which this process has already deleted the folders of dead processes."""


def keep(root: str, job_id: JobId) -> None:
    """Keeps the folder of a job and its checkpoints for good. Does nothing if `root` is not the root for jobs without
    storage.

    Raises StorageError.
    """
    if root == temporary_folder(CHECKPOINTS) and job_id in list_inside(root):
        _mark(root, CheckpointLayout(job_id).keep_mark())


def temporary_root(open_store: OpenStore) -> str:
    """Deletes folders that are no longer needed, and returns the root for jobs without storage.

    Raises ConfigurationError and StorageError like `default_storage`.
    """
    root = default_storage()
    delete_unneeded(open_store)
    if root not in swept_roots:
        swept_roots.add(root)
        _sweep(open_store(root), root)
    return root


def delete_unneeded(open_store: OpenStore) -> None:
    """Deletes the folders of jobs without storage to which no object of this process refers any more.

    A folder whose job is not over yet, or that a restored job needs, is left for a later call.
    """
    waiting = []
    for _ in range(len(_unneeded)):
        root, job_id = _unneeded.popleft()
        if job_id in list_inside(root) and _delete(open_store(root), root, job_id) is _Fate.NEEDED:
            waiting.append((root, job_id))
    _unneeded.extend(waiting)


def _sweep(store: Store, root: str) -> None:
    """Deletes the folders that dead processes left in the root, at most `SWEPT_MAX` of them."""
    deleted = 0
    for job_id in map(JobId, list_inside(root)):
        if job_id.startswith(TEMPORARY_PREFIX):
            # A process is writing it, or was killed while writing it.
            if _age_ms(root, job_id, None) > KEPT_MS:
                remove_inside(root, job_id)
            continue
        lease = _lease(store, job_id)
        processes = [] if lease is None else [each for each in (lease.holder, lease.driver) if each is not None]
        # If the process cannot be checked or identified, only the age of the folder decides.
        dead = bool(processes) and all(is_there(process) is False for process in processes)
        if (dead or _age_ms(root, job_id, lease) > KEPT_MS) and _delete(store, root, job_id) is _Fate.DELETED:
            deleted += 1
            if deleted >= SWEPT_MAX:
                break
    if deleted:
        log.info("deleted %d folders in %s, which processes that have ended had left there", deleted, root)


def _delete(store: Store, root: str, job_id: JobId) -> _Fate:
    """Deletes the folder of a job that this process does not need, if that is allowed.

    Returns whether the folder was deleted, is kept for good or for a time, or is still needed.
    """
    try:
        fate = _fate(store, root, job_id)
    except StorageError as error:
        log.warning("the folder of job %s in %s is left as it is: %s", job_id, root, error)
        return _Fate.KEPT
    if fate is _Fate.DELETED:
        remove_inside(root, job_id)
    elif fate is _Fate.KEPT:
        log.info("the checkpoints of job %s stay in %s", job_id, os.path.join(root, job_id))
    return fate


def _fate(store: Store, root: str, job_id: JobId) -> _Fate:
    lease = _lease(store, job_id)
    if lease is not None and life_of(lease, now_ms()) is not Life.DEAD:
        return _Fate.NEEDED
    names, jobs = list_inside(root, job_id), set(list_inside(root))
    if any(name.removeprefix(_RESTORED_BY) in jobs for name in names if name.startswith(_RESTORED_BY)):
        return _Fate.NEEDED
    checkpoints = [found for found in map(parse_checkpoint_name, names) if found is not None]
    completed = any(_is_completed(store, job_id, found) for found in checkpoints)
    layout = CheckpointLayout(job_id)
    marked = {mark.rpartition("/")[2] in names for mark in (layout.savepoint_mark(), layout.taskowned_dir())}
    if marked == {True}:
        return _Fate.KEPT
    if not completed:
        return _Fate.DELETED
    if layout.keep_mark().rpartition("/")[2] in names:
        return _Fate.KEPT
    has_finished = lease is not None and lease.finished
    return _Fate.DELETED if has_finished or _age_ms(root, job_id, lease) > KEPT_MS else _Fate.KEPT


def _is_completed(store: Store, job_id: JobId, checkpoint_id: CheckpointId) -> bool:
    """Returns whether a checkpoint was completed and is not void. Also returns True if its metadata is damaged."""
    try:
        return not read_metadata(store, job_id, checkpoint_id).void
    except NotFoundError:
        return False
    except (CorruptionError, CodecError):
        return True


def _lease(store: Store, job_id: JobId) -> Lease | None:
    try:
        return read_lease(store, job_id)
    except CorruptionError:
        return None


def _age_ms(root: str, job_id: JobId, lease: Lease | None) -> int:
    """Returns how long ago the job was last active, in ms, according to its lease.

    Without a lease, uses the modification time of the folder. Returns 0 if the folder is gone.
    """
    if lease is not None:
        return now_ms() - lease.renewed_at_ms
    try:
        return now_ms() - int(os.lstat(os.path.join(root, job_id)).st_mtime * 1000)
    except OSError:
        return 0


def _mark(root: str, relative: str) -> None:
    folder, _, name = relative.rpartition("/")
    try:
        with open(os.path.join(make_inside(root, folder), name), "wb", opener=open_private):
            pass
    except OSError as error:
        raise StorageError(
            f"cannot write to {os.path.join(root, folder)}: {error}; make the folder writable, or give the job a "
            "folder for checkpoints"
        ) from error


@atexit.register
def _at_exit() -> None:
    from tidegate.storage.files.file_system_store import open_store

    with suppress(StorageError):
        delete_unneeded(open_store)


CHECKPOINTS = "checkpoints"
"""Name of the folder that contains the folders of all jobs without storage."""


def temporary_folder(purpose: str) -> str:
    """Returns the path of this user's folder for `purpose` among the temporary files of the machine.

    Does not create it.
    """
    return os.path.join(tempfile.gettempdir(), f"tidegate-{_user_name()}", purpose)


def default_storage() -> str:
    """Creates the default folder of checkpoints, which only this user can write to, among the temporary files of this
    machine. Returns its path.

    Raises ConfigurationError if another user owns the folder or can write to it, and StorageError if it cannot be
    created.
    """
    folder = temporary_folder(CHECKPOINTS)
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make {folder} for checkpoints: {error}; name a folder by `storage`") from error
    return folder


def own_folder(named: str | None, purpose: str) -> str:
    """Returns the path of the folder for `purpose`, whose old files may be deleted: in the folder `named` by the user,
    or among the temporary files if `named` is None.

    It is a separate subfolder, because the folder of the user may also contain other files, such as checkpoints.
    """
    return temporary_folder(purpose) if named is None else os.path.join(named, f"tidegate-{purpose}")


def _user_name() -> str:
    """Returns the name of the effective user of this process, who must own the temporary folders, or the user id as
    text if the user has no name.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
