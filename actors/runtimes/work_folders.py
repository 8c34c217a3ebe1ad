"""Local folders in which backends work, and what processes that died have left there.

    <folder>/<job>/<vertex>-<subtask>/attempt-3/<operator uid>

Rules: an attempt has a folder of its own, because one that was given up may live on for a while. Who begins an attempt
deletes what earlier ones have left on its node. What a job leaves goes when it ends, on the coordinator's node; nothing
is deleted for its age, because a job may live and be idle. No deletion raises. The folder is this user's alone, or it
is not used: files that lie in it are taken for the state of a task, which may hold pickles.
"""

from __future__ import annotations

import logging
import os

from tidegate.actors.identity import TaskId
from tidegate.storage.errors import ConfigurationError, StorageError
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.layout import escape
from tidegate.storage.private_folders import is_private, list_inside, make_private, remove_inside

log = logging.getLogger(__name__)

_PREFIX = "attempt-"


def work_folder(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> str:
    """That of one task in one attempt; `folder` is the node's, for all jobs, and holds nothing else."""
    return os.path.join(folder, _task_folder(job_id, task), f"{_PREFIX}{attempt}")


def prepare_work(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> None:
    """Make the node's folder, and delete what earlier attempts of a task have left in it.

    ConfigurationError if the folder is not this user's alone, StorageError if it cannot be made.
    """
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make the local folder {folder} of the state backend: {error}") from error
    own = _task_folder(job_id, task)
    for name in list_inside(folder, own):
        number = name.removeprefix(_PREFIX)
        if name != number and number.isdecimal() and int(number) < attempt:
            remove_inside(folder, os.path.join(own, name))


def remove_work(folder: str, job_id: JobId) -> None:
    """Delete everything of a job that is over."""
    try:
        if is_private(folder):
            remove_inside(folder, job_id)
    except (ConfigurationError, OSError) as error:
        log.warning("what the state backend may have left of job %s is not deleted: %s", job_id, error)


def _task_folder(job_id: JobId, task: TaskId) -> str:
    return os.path.join(job_id, f"{escape(task.vertex)}-{task.subtask}")
