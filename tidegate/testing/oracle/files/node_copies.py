"""The oracle of local copies: what a task keeps on its node when it has been told what became of a checkpoint.

Rules:

- Nothing is left of a checkpoint that was given up (5). What survives would be restored by the next who has a file of
  that name: the fault of KAFKA-20685.
- Of checkpoints before a complete one only that is left on which this one builds, or to which it refers (5). The disk
  would get full otherwise.

That copies are right is no rule: they may be damaged, and rows would be wrong (6) if anybody used one that is.
"""

from __future__ import annotations

from collections.abc import Collection

from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import escape
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.local_copies import NodeFolder, copies_below, job_folder
from tidegate.testing.oracle.files.files_at_rest import FilesOracle
from tidegate.testing.oracle.violation import InvariantViolated

FIRST = CheckpointId(1)
"""Before any checkpoint is complete, copies of the changelog lie with those of the first one, and outlast it."""


class NodeCopiesOracle:
    """Looks at the copies of the tasks of one job."""

    def __init__(self, files: FilesOracle, job_id: JobId) -> None:
        self._files = files
        self._job_id = job_id

    def aborted(self, folder: NodeFolder, task: TaskId, checkpoint_id: CheckpointId) -> None:
        """A task has deleted what it had copied for a checkpoint that was given up."""
        left = [path for number, path in self._copies(folder, task) if number == checkpoint_id != FIRST]
        if left:
            raise InvariantViolated(5, f"checkpoint {checkpoint_id} was given up, and {task} keeps copies of {left}")

    def completed(self, folder: NodeFolder, task: TaskId, checkpoint_id: CheckpointId, base: Collection[str]) -> None:
        """A task has deleted what a complete checkpoint of its own makes needless. `base`: files on which it builds."""
        metadata = self._files.present.get(checkpoint_id)
        if metadata is None:
            return
        parts = [part for part in metadata.subtasks if (part.vertex, part.subtask) == (task.vertex, task.subtask)]
        needed = {handle.path for part in parts for handle in part.handles} | set(base)
        left = [path for number, path in self._copies(folder, task) if number < checkpoint_id and path not in needed]
        if left:
            raise InvariantViolated(5, f"checkpoint {checkpoint_id} does not need what {task} keeps copies of: {left}")

    def _copies(self, folder: NodeFolder, task: TaskId) -> list[tuple[CheckpointId, str]]:
        below = f"{job_folder(self._job_id)}/{escape(task.vertex)}-{task.subtask}"
        return [(number, path) for number, path, _ in copies_below(folder, below)]
