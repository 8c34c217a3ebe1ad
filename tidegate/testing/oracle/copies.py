"""Checks copies of state: savepoints in their own folders, and local copies on the disks of nodes."""

from __future__ import annotations

from collections.abc import Collection, Container

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import METADATA_NAME, escape, parse_savepoint_name
from tidegate.storage.checkpoints.metadata import decode_metadata
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.state.local_copies import NodeFolder, copies_below, job_folder
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.coverage import Coverage
from tidegate.testing.oracle.files_at_rest import FilesOracle
from tidegate.testing.world.disk import SimulatedDisk


class CopiesOracle:
    """Checks how one coordinator copies savepoints into their own folders.

    A copy is in progress from its order until its answer, also if the savepoint is aborted meanwhile.
    Rules:

    - Only one copy of a savepoint is in progress at a time. Otherwise the answer to the first copy could be mistaken
      for the answer to the second (4).
    - A folder is not deleted while a copy writes to it, because half of it would reappear afterwards (5).
    - No more copies are in progress than the limit allows, plus one for a stop-with-savepoint. Each may block a thread
      while its folder is unreachable (10).
    - Except for a stop, a copy is made only of a completed checkpoint (4). That checkpoint stays until its copy has
      ended or was ordered to stop (5).

    A coordinator only tracks its own copies, so each has its own oracle. `completed` contains the numbers of the
    completed checkpoints, and grows during the run.
    """

    def __init__(self, completed: Container[int]) -> None:
        self._completed = completed
        self._under_way: set[int] = set()
        self._stopped: set[int] = set()
        """Savepoints whose copy is in progress and was ordered to stop."""

    @property
    def under_way(self) -> Collection[int]:
        """Returns the savepoint numbers whose copy was ordered and not answered yet."""
        return self._under_way

    def ordered(self, instruction: do.CoordinatorInstruction) -> None:
        """Checks an instruction of the coordinator that copies or deletes a savepoint or deletes a checkpoint."""
        if isinstance(instruction, do.WriteSavepoint):
            number = int(instruction.metadata.checkpoint_id)
            if number in self._under_way:
                raise InvariantViolated(4, f"a second copy of savepoint {number} starts while the first one runs")
            self._under_way.add(number)
            self._stopped.discard(number)
            if len(self._under_way) > COPIES_MAX + 1:
                raise InvariantViolated(
                    10, f"{len(self._under_way)} savepoints are copied at the same time; the limit is {COPIES_MAX + 1}"
                )
            if number not in self._completed and not instruction.metadata.kind.stops:
                raise InvariantViolated(4, f"savepoint {number} is copied before its checkpoint is complete")
        elif isinstance(instruction, do.StopCopy):
            self._stopped.add(int(instruction.checkpoint_id))
        elif isinstance(instruction, do.DiscardCheckpoint):
            if instruction.checkpoint_id in self._under_way - self._stopped:
                raise InvariantViolated(
                    5, f"checkpoint {instruction.checkpoint_id} is deleted while its savepoint is being copied"
                )
        elif isinstance(instruction, do.DiscardSavepoint) and instruction.checkpoint_id in self._under_way:
            raise InvariantViolated(5, f"savepoint {instruction.checkpoint_id} is deleted while it is being copied")

    def heard(self, event: co.CoordinatorEvent) -> None:
        """Records an event that arrives at the coordinator."""
        if isinstance(event, co.SavepointWritten | co.SavepointWriteFailed):
            self._under_way.discard(int(event.checkpoint_id))


class SavepointFoldersOracle:
    """Checks, by observing created and deleted files, which savepoints of one job are complete, and that they stay
    complete.

    The oracle observes the events of all coordinators, because a replaced coordinator may still be copying. Rules:

    - Once a coordinator was notified that a savepoint is aborted, the savepoint is not complete, and never becomes
      complete (4).
    - A tombstone is never deleted, because a late copy has to find it (4).
    - Both coordinators agree whether the copy or the tombstone was written first. A copy that was too late is not
      reported as complete. If a coordinator aborts a savepoint that is complete, it is notified of that (4).
    - When the job has ended, a complete savepoint belongs to a completed checkpoint (5), or its copy completed while
      the job ended.
    """

    def __init__(self, disk: SimulatedDisk, job_id: JobId, coverage: Coverage) -> None:
        self._job_id = job_id
        self._coverage = coverage
        self._whole: set[int] = set()
        self._were_whole: set[int] = set()
        self._voided: set[int] = set()
        self._given_up: set[int] = set()
        self._told: set[int] = set()
        disk.created.append(self._file_created)
        disk.deleted.append(self._file_deleted)

    def _file_created(self, name: str, data: bytes) -> None:
        number = self._number(name)
        if number is None:
            return
        if decode_metadata(data).void:
            self._voided.add(number)
            self._whole.discard(number)
            return
        if number in self._voided or number in self._given_up:
            raise InvariantViolated(4, f"savepoint {number} becomes complete after it was aborted")
        self._whole.add(number)
        self._were_whole.add(number)

    def _file_deleted(self, name: str) -> None:
        number = self._number(name)
        if number in self._voided:
            raise InvariantViolated(
                4, f"the tombstone of savepoint {number} is deleted, although its copy may still be completed"
            )
        self._whole.discard(-1 if number is None else number)

    def heard(self, event: co.CoordinatorEvent) -> None:
        """Checks an event about a savepoint that arrives at a coordinator, which may have been replaced."""
        if isinstance(event, co.SavepointDiscarded):
            self._discarded(int(event.checkpoint_id), event.exported)
        elif isinstance(event, co.SavepointWritten):
            if event.checkpoint_id not in self._were_whole:
                raise InvariantViolated(4, f"savepoint {event.checkpoint_id} is reported as complete, but never was")
            self._told.add(int(event.checkpoint_id))
        elif isinstance(event, co.SavepointWriteFailed) and event.checkpoint_id in self._voided:
            self._coverage.saw("savepoint_fenced")

    def _discarded(self, number: int, exported: bool) -> None:
        if number in self._whole:
            raise InvariantViolated(4, f"savepoint {number} was aborted, but is complete")
        if number in self._voided and exported is not (number in self._were_whole):
            was = "was" if number in self._were_whole else "was not"
            raise InvariantViolated(4, f"savepoint {number} {was} complete at its abort, but the opposite is reported")
        self._given_up.add(number)

    def ended(self, completed: Container[int]) -> None:
        """Checks the savepoints at the end of the job. `completed` are the numbers of the completed checkpoints."""
        for number in sorted(self._whole):
            if number not in completed and number not in self._told:
                raise InvariantViolated(5, f"savepoint {number} is complete, but its checkpoint never completed")

    def _number(self, name: str) -> int | None:
        """Returns the number of the savepoint whose `_metadata` file has this name, or None for another file."""
        folder, _, last = name.rpartition("/")
        found = parse_savepoint_name(folder.rpartition("/")[2]) if last == METADATA_NAME else None
        return int(found[1]) if found is not None and found[0] == self._job_id else None


FIRST = CheckpointId(1)
"""Number of the first checkpoint.

Copies of the changelog that were written before it are stored with it, and are kept longer.
"""


class NodeCopiesOracle:
    """Checks the local copies of one job's tasks after a checkpoint has completed or was aborted. Rules:

    - No copy of an aborted checkpoint is left (5). A later reader with a file of that name would restore it, as in
      KAFKA-20685.
    - After a completed checkpoint, copies of older checkpoints remain only if that checkpoint builds on them or refers
      to them (5). Otherwise the disk would fill up.

    The contents of copies are not checked. They may be damaged, and using a damaged copy would show as wrong rows (6).
    """

    def __init__(self, files: FilesOracle, job_id: JobId) -> None:
        self._files = files
        self._job_id = job_id

    def aborted(self, folder: NodeFolder, task: TaskId, checkpoint_id: CheckpointId) -> None:
        """Checks that a task has deleted its copies for an aborted checkpoint."""
        left = [path for number, path in self._copies(folder, task) if number == checkpoint_id != FIRST]
        if left:
            raise InvariantViolated(
                5, f"checkpoint {checkpoint_id} was aborted, but {task} keeps local copies of its files {left}"
            )

    def completed(self, folder: NodeFolder, task: TaskId, checkpoint_id: CheckpointId, base: Collection[str]) -> None:
        """Checks that a task has deleted the copies that its completed checkpoint does not need.

        `base` are the paths of files on which the checkpoint builds.
        """
        metadata = self._files.present.get(checkpoint_id)
        if metadata is None:
            return
        parts = [part for part in metadata.subtasks if (part.vertex, part.subtask) == (task.vertex, task.subtask)]
        needed = {handle.path for part in parts for handle in part.handles} | set(base)
        left = [path for number, path in self._copies(folder, task) if number < checkpoint_id and path not in needed]
        if left:
            raise InvariantViolated(
                5, f"{task} keeps local copies of {left}, which the completed checkpoint {checkpoint_id} does not need"
            )

    def _copies(self, folder: NodeFolder, task: TaskId) -> list[tuple[CheckpointId, str]]:
        below = f"{job_folder(self._job_id)}/{escape(task.vertex)}-{task.subtask}"
        return [(number, path) for number, path, _ in copies_below(folder, below)]
