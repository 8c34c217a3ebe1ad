"""Creates and deletes the local folders of state backends, and deletes folders that dead processes have left.

    <folder>/<job>/<vertex>-<subtask>/attempt-3/<operator uid>
    <folder>/<job>/<vertex>-<subtask>/process-3

Rules:

- Each attempt has its own folder, because the process of an earlier attempt may still be alive.
- Next to the folder, the file `process-N` names the process that uses it, and is written first. A process that is
  killed deletes nothing, and its task may continue on another node, or its job may be over.
- A new attempt deletes the folders of the task's earlier attempts on its node, and the folders of dead processes of any
  job there. Nothing is deleted for its age, because an idle job may be alive, nor if it is unknown whether the process
  is gone.
- The end of a job deletes its folders on the coordinator's node.
- No deletion raises. The folder must belong to this user alone, or it is not used: its files are trusted as state,
  which may contain pickles.
"""

from __future__ import annotations

import logging
import os

from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import CodecError, ConfigurationError, StorageError
from tidegate.storage.files.private_folders import (
    is_private,
    list_inside,
    make_inside,
    make_private,
    open_private,
    remove_if_empty,
    remove_inside,
)
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.process_id import ProcessId, is_there, this_process

log = logging.getLogger(__name__)

_WORK = "attempt-"
_PROCESS = "process-"
_TRIES_MAX = 10
"""Number of tries to create a folder. A concurrent cleanup may delete an empty folder before its first file is
written.
"""


def work_folder(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> str:
    """Returns the path of the state backend's folder for one task in one attempt.

    `folder` is the node's folder for all jobs, and contains nothing else.
    """
    return os.path.join(folder, _task_folder(job_id, task), f"{_WORK}{attempt}")


def prepare_work(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> None:
    """Creates the folder of a task's attempt, writes which process uses it, and deletes abandoned folders.

    Raises ConfigurationError if the folder does not belong to this user alone, StorageError if it cannot be created.
    """
    own = _task_folder(job_id, task)
    try:
        make_private(folder)
        _sign(folder, own, attempt)
    except OSError as error:
        raise StorageError(
            f"cannot make the local folder {folder} of the state backend: {error}"
            "; free space there, or name another folder with CheckpointConfig(backend_directory=...)"
        ) from error
    for name in list_inside(folder, own):
        number = name.removeprefix(_WORK).removeprefix(_PROCESS)
        if name != number and number.isdecimal() and int(number) < attempt:
            remove_inside(folder, os.path.join(own, name))
    _remove_abandoned(folder)


def remove_work(folder: str, job_id: JobId) -> None:
    """Deletes the folders of a job that has ended. Errors are only logged."""
    try:
        if is_private(folder):
            remove_inside(folder, job_id)
    except (ConfigurationError, OSError) as error:
        log.warning("what the state backend may have left of job %s is not deleted: %s", job_id, error)


def _sign(folder: str, own: str, attempt: AttemptNumber) -> None:
    """Writes the file `process-N`, which records that this process uses the attempt's folder."""
    for tries_left in reversed(range(_TRIES_MAX)):
        try:
            path = os.path.join(make_inside(folder, own), f"{_PROCESS}{attempt}")
            with open(path, "wb", opener=open_private) as file:
                file.write(encode(this_process()))
            return
        except FileNotFoundError:
            if not tries_left:
                raise


def _remove_abandoned(folder: str) -> None:
    """Deletes folders of attempts, of any job, whose process is gone."""
    for job in list_inside(folder):
        for task in list_inside(folder, job):
            below = os.path.join(job, task)
            for name in list_inside(folder, below):
                if name.startswith(_PROCESS) and _is_gone(os.path.join(folder, below, name)):
                    remove_inside(folder, os.path.join(below, f"{_WORK}{name.removeprefix(_PROCESS)}"))
                    # Last: an interrupted cleanup leaves it to the next one.
                    remove_inside(folder, os.path.join(below, name))
            remove_if_empty(folder, below)
        remove_if_empty(folder, job)


def _is_gone(path: str) -> bool:
    """Returns whether the process that a `process-N` file names has certainly ended."""
    try:
        with open(path, "rb", opener=open_private) as file:
            process = decode(file.read())
    except (CodecError, OSError) as error:
        log.debug("%s does not say whose folder it is: %s", path, error)
        return False
    return isinstance(process, ProcessId) and is_there(process) is False


def _task_folder(job_id: JobId, task: TaskId) -> str:
    return os.path.join(job_id, f"{escape(task.vertex)}-{task.subtask}")
