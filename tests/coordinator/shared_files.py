"""A model of shared files for the tests of the coordinator: who wrote which, who refers to them, and who may not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordinators import SPEC

from tidegate.actors.coordinator import instructions as do
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, StateHandle
from tidegate.storage.ids import CheckpointId

LAYOUT = CheckpointLayout(SPEC.job_id)


def layer(checkpoint_id: int, task: TaskId, path: str | None = "own") -> StateHandle:
    """The layer that one task wrote for a checkpoint; inlined if `path` is None."""
    own = LAYOUT.layer_file(CheckpointId(checkpoint_id), task.vertex, task.subtask)
    return StateHandle(own if path == "own" else path, None, 10, "sum", ())


class SharedFiles:
    """The shared files of one job. `completed` are the checkpoints whose metadata is there."""

    def __init__(self, completed: Callable[[], Iterable[CheckpointMetadata]]) -> None:
        self.present: set[str] = set()
        self._completed = completed
        self._gone: set[CheckpointId] = set()
        """Checkpoints that are to be deleted, or are."""

    def written(self, handle: StateHandle) -> StateHandle:
        """A task has written a layer."""
        assert handle.path is not None
        self.present.add(handle.path)
        return handle

    def check_there(self, metadata: CheckpointMetadata) -> None:
        """What a checkpoint refers to is there."""
        paths = {path for subtask in metadata.subtasks for path in subtask.shared_paths}
        assert paths <= self.present, f"{metadata.checkpoint_id} refers to files that are gone: {paths - self.present}"

    @property
    def referenced(self) -> set[str]:
        """What checkpoints refer to that stay."""
        stay = (metadata for metadata in self._completed() if metadata.checkpoint_id not in self._gone)
        return {path for metadata in stay for subtask in metadata.subtasks for path in subtask.shared_paths}

    def asked(self, instruction: do.DiscardCheckpoint, bases: Iterable[CheckpointId | None]) -> None:
        """A checkpoint is to be deleted; `bases` are those on which pending ones are built."""
        assert instruction.checkpoint_id not in set(bases), "what a pending checkpoint is built on stays"
        self._gone.add(instruction.checkpoint_id)
        self.deleted(instruction, only_asked=True)

    def deleted(self, instruction: do.DiscardCheckpoint | do.DiscardFiles, only_asked: bool = False) -> None:
        """Files are deleted: none that a checkpoint refers to."""
        if isinstance(instruction, do.DiscardFiles):
            paths = set(instruction.paths)
        elif instruction.shared is None:
            own = f"{LAYOUT.shared_checkpoint_dir(instruction.checkpoint_id)}/"
            paths = {path for path in self.present if path.startswith(own)}
        else:
            paths = set(instruction.shared)
        assert not paths & self.referenced, f"{paths & self.referenced} is deleted, and a checkpoint refers to it"
        if not only_asked:
            self.present -= paths
