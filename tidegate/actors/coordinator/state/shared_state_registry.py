"""Knows which completed checkpoints refer to which shared files (Flink's `SharedStateRegistry`).

Rules:

- It is part of the fold over the event log, so no crash loses or miscounts a reference (invariant 5).
- A checkpoint is built on the newest retained one that has shared files. A canonical savepoint has none: it is whole.
- It refers to files of that base and to files of its own. It may also refer to files of changelogs, which tasks write
  beside their checkpoints. No later checkpoint comes back to one that has been left out.
- A checkpoint that is no longer retained keeps its references while a pending one is built on it, and until its
  metadata is gone. Then the files go that nobody else refers to. Nobody can begin to: new checkpoints are built on
  retained ones.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, JobId


@wire
@dataclass(slots=True)
class SharedStateRegistry:
    """The shared files of completed checkpoints. Only a checkpoint that has some can be a base."""

    references: dict[CheckpointId, tuple[str, ...]] = field(default_factory=dict)
    left: frozenset[CheckpointId] = frozenset()
    """Checkpoints that could not be deleted: the files that they refer to stay until the sweep."""

    def register(self, metadata: CheckpointMetadata) -> None:
        """A checkpoint is complete: note what it refers to."""
        if not any(subtask.layers or subtask.native for subtask in metadata.subtasks):
            return
        paths = dict.fromkeys(path for subtask in metadata.subtasks for path in subtask.shared_paths)
        self.references[metadata.checkpoint_id] = tuple(paths)

    def strange_file(self, metadata: CheckpointMetadata, base: CheckpointId | None) -> str | None:
        """A shared file that is neither the checkpoint's own, nor its base's, nor a changelog's, if there is one."""
        known = frozenset(() if base is None else self.references.get(base, ()))
        changelogs = f"{CheckpointLayout(metadata.job_id).changelog_dir()}/"
        own = own_folder(metadata.job_id, metadata.checkpoint_id), changelogs
        paths = (path for subtask in metadata.subtasks for path in subtask.shared_paths)
        return next((path for path in paths if path not in known and not path.startswith(own)), None)

    def can_be_base(self, checkpoint_id: CheckpointId) -> bool:
        """Whether another checkpoint can be built on this one."""
        return checkpoint_id in self.references

    def release(self, checkpoint_id: CheckpointId) -> tuple[str, ...]:
        """A checkpoint refers to nothing any more. Returns the files that now nobody refers to."""
        paths = self.references.pop(checkpoint_id, ())
        needed = {path for others in self.references.values() for path in others}
        return tuple(path for path in paths if path not in needed)

    def leave(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint could not be deleted, and nobody tries any more: its files stay as long as the job runs."""
        if checkpoint_id in self.references:
            self.left |= {checkpoint_id}

    def not_needed(self, own: CheckpointId, job_id: JobId, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of the files that were written for checkpoint `own` and that no completed checkpoint refers to."""
        needed = {path for others in self.references.values() for path in others}
        return tuple(p for p in paths if p.startswith(own_folder(job_id, own)) and p not in needed)

    def not_retained(self, retained: Container[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Checkpoints that are not retained, and keep their references for pending ones alone."""
        return tuple(n for n in self.references if n not in retained and n not in self.left)


def own_folder(job_id: JobId, checkpoint_id: CheckpointId) -> str:
    """What the paths of the shared files begin with that were written for one checkpoint."""
    return f"{CheckpointLayout(job_id).shared_checkpoint_dir(checkpoint_id)}/"
