"""Local folders in which backends work, and what processes that died have left there.

    <folder>/<job>/<vertex>-<subtask>/attempt-3/<operator uid>

Rules: an attempt has a folder of its own, because one that was given up may live on for a while. Who begins an attempt
deletes what earlier ones have left on its node. What a job leaves goes when it ends, on the coordinator's node; nothing
is deleted for its age, because a job may live and be idle. Nothing here raises.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress

from tidegate.actors.identity import TaskId
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.layout import escape

_PREFIX = "attempt-"


def work_folder(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> str:
    """That of one task in one attempt; `folder` is the node's, for all jobs, and holds nothing else."""
    return os.path.join(folder, job_id, f"{escape(task.vertex)}-{task.subtask}", f"{_PREFIX}{attempt}")


def remove_earlier(folder: str, job_id: JobId, task: TaskId, attempt: AttemptNumber) -> None:
    """Delete what earlier attempts of a task have left on this node."""
    own = os.path.dirname(work_folder(folder, job_id, task, attempt))
    with suppress(OSError):
        for name in os.listdir(own):
            number = name.removeprefix(_PREFIX)
            if name != number and number.isdecimal() and int(number) < attempt:
                shutil.rmtree(os.path.join(own, name), ignore_errors=True)


def remove_work(folder: str, job_id: JobId) -> None:
    """Delete everything of a job that is over."""
    shutil.rmtree(os.path.join(folder, job_id), ignore_errors=True)
