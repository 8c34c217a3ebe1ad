"""`TemporaryJob`: the folder of a job that has no storage, which is deleted when it is no longer needed.

These folders are in one root of this user among the temporary files of a machine (`default_storage`). Rules:

- A folder is needed while its job may live, according to its lease, and while this process has an object that reads
  from it: the environment of the job (which drops the oldest ended ones), the `Job`, or its `CollectedRows`.
- A job that was restored from another one uses files of that one. So a mark in the older folder names the newer job,
  and the older folder is needed while the newer one exists.
- A finished job has nothing to restore, so its folder is deleted. A folder without a completed checkpoint is deleted,
  too.
- Other completed checkpoints, of a job that failed, was cancelled or was killed, stay for `KEPT_MS`, so that
  `restore="latest"` finds them.
- They stay for good if the user set `retention`, or called `Job.trigger_checkpoint`, which returns a path. Files that a
  savepoint needs also stay for good: staged inputs and collected rows are in the folder of the job. A log line names
  each folder that stays.
- Folders of a killed process are deleted by the next process. It deletes only folders of the root whose job is
  certainly dead, and a bounded number of them.
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
"""How long, in ms, the checkpoints of a job without storage stay if the user did not ask to keep them."""
SWEPT_MAX = 200
"""Limit of folders of dead processes that one process deletes when it first submits a job without storage."""
_RESTORED_BY = "restored-by-"


class _Fate(enum.Enum):
    DELETED = "deleted"
    KEPT = "kept"
    NEEDED = "needed"
    """The folder is still needed. A later call checks it again."""


class TemporaryJob:
    """The folder of one job. Objects that read from the folder hold a reference to this object.

    `keeps` is True if the user asked to keep the checkpoints of the job.
    """

    def __init__(self, root: str, job_id: JobId, *, keeps: bool = False) -> None:
        self.root = root
        self.job_id = job_id
        if keeps:
            _mark(root, CheckpointLayout(job_id).keep_mark())
        release = weakref.finalize(self, _unneeded.append, (root, job_id))
        release.atexit = True

    def restored_from(self, job_id: JobId) -> None:
        """Keeps the folder of another job of the root while the folder of this one exists. Raises StorageError."""
        if job_id in list_inside(self.root):
            _mark(self.root, f"{CheckpointLayout(job_id).job_dir()}/{_RESTORED_BY}{self.job_id}")


_unneeded: deque[tuple[str, JobId]] = deque()
"""Folders that no object of this process refers to any more. Garbage collection only adds to it, `delete_unneeded`
deletes them.
"""
_swept: set[str] = set()
"""Roots in which this process has looked for folders of dead processes."""


def keep(root: str, job_id: JobId) -> None:
    """Keeps the checkpoints of a job for good, if `root` is the root for jobs without storage. Raises StorageError."""
    if root == temporary_folder(CHECKPOINTS) and job_id in list_inside(root):
        _mark(root, CheckpointLayout(job_id).keep_mark())


def temporary_root(open_store: OpenStore) -> str:
    """Returns the root for jobs without storage, after deleting folders that are no longer needed.

    Raises the errors of `default_storage`.
    """
    root = default_storage()
    delete_unneeded(open_store)
    if root not in _swept:
        _swept.add(root)
        _sweep(open_store(root), root)
    return root


def delete_unneeded(open_store: OpenStore) -> None:
    """Deletes the folders that no object of this process needs any more.

    Folders of jobs that are not over yet, or that another folder needs, are left for a later call.
    """
    waiting = []
    for _ in range(len(_unneeded)):
        root, job_id = _unneeded.popleft()
        if job_id in list_inside(root) and _delete(open_store(root), root, job_id) is _Fate.NEEDED:
            waiting.append((root, job_id))
    _unneeded.extend(waiting)


def _sweep(store: Store, root: str) -> None:
    """Deletes folders of dead processes in the root, at most `SWEPT_MAX` of them."""
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
    """Deletes the folder of a job that this process does not need, unless the folder has to stay. Returns what happened
    to it.
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
    """Returns whether a checkpoint was completed. A damaged one counts as completed."""
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
    """Returns how long ago the job was last active, in ms, according to the files in its folder. 0 if the folder is
    gone.
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
        raise StorageError(f"cannot write to {os.path.join(root, folder)}: {error}") from error


@atexit.register
def _at_exit() -> None:
    from tidegate.storage.files.file_system_store import open_store

    with suppress(StorageError):
        delete_unneeded(open_store)


CHECKPOINTS = "checkpoints"
"""Name of the folder that contains the folders of jobs without storage."""


def temporary_folder(purpose: str) -> str:
    """Returns a folder of this user among the temporary files of a machine."""
    return os.path.join(tempfile.gettempdir(), f"tidegate-{_user_name()}", purpose)


def default_storage() -> str:
    """Returns the default folder of checkpoints, a folder of this user among the temporary files of this machine.

    Raises ConfigurationError if another user owns it or can write to it, StorageError if it cannot be made.
    """
    folder = temporary_folder(CHECKPOINTS)
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make {folder} for checkpoints: {error}; name a folder by `storage`") from error
    return folder


def own_folder(named: str | None, purpose: str) -> str:
    """Returns an empty folder for one purpose: inside the folder `named` by the user, or among the temporary files.

    Deletes old files in it. It is therefore a subfolder of the user's folder, which may also hold other files, such as
    checkpoints.
    """
    return temporary_folder(purpose) if named is None else os.path.join(named, f"tidegate-{purpose}")


def _user_name() -> str:
    """Returns the name of the effective user of this process, whatever the environment variables are.

    That user must own the folder.
    """
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
