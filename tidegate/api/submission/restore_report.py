"""`RestoreReport`: what a restore would do, found without one. `StreamEnvironment.check_restore` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.meaning_checks import Comparison, comparisons
from tidegate.actors.restore.restore_checks import non_restored
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.ids import OperatorUid
from tidegate.storage.subtasks.subtask_state import operators_with_state


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What becomes of the state of a checkpoint in a program.

    `path`: the checkpoint or savepoint; None if the job would start afresh. `restored`, `started_empty` and `dropped`
    name operators by uid, and parts of their state as `uid: aggregate n`. `migrated` names state whose types widen.
    `refused`: the text of the error that `execute` would raise; None if the program can go on.
    """

    path: str | None
    restored: tuple[str, ...] = ()
    started_empty: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    migrated: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def ok(self) -> bool:
        """Whether `execute` would accept the restore."""
        return self.refused is None

    def __str__(self) -> str:
        lines = [f"restore from {self.path}" if self.path is not None else "no checkpoint: the job starts afresh"]
        listed = {
            "restored": self.restored,
            "gets wider types": self.migrated,
            "starts empty": self.started_empty,
            "dropped": self.dropped,
        }
        lines += [f"{what}: {', '.join(names)}" for what, names in listed.items() if names]
        if self.refused is not None:
            lines.append(f"refused: {self.refused}")
        return "\n".join(lines)


def restore_report(
    path: str,
    metadata: CheckpointMetadata,
    graph: JobGraph,
    allow_non_restored_state: bool,
    refused: str | None,
    rehearsal: Sequence[Comparison] = (),
) -> RestoreReport:
    """The report on a program and a checkpoint.

    `refused`: the error of the check, if there is one. `rehearsal`: what operators report of their own states.
    """
    with_state = {uid for subtask in metadata.subtasks for uid in operators_with_state(subtask)}
    known = {info.uid for info in metadata.operators}
    described = {info.uid for info in graph.operator_infos() if info.meaning is not None}
    compared = [*comparisons(metadata, graph, allow_non_restored_state), *rehearsal]
    wrong = {each.uid for each in compared if each.problems}
    gone: set[OperatorUid] = set(non_restored(metadata, graph)) if allow_non_restored_state else set()
    return RestoreReport(
        path,
        tuple(uid for vertex in graph.vertices for uid in vertex.uids if uid in with_state and uid not in wrong),
        (
            *(uid for vertex in graph.vertices for uid in vertex.uids if uid in described and uid not in known),
            *(f"{each.uid}: {part}" for each in compared for part in each.started_empty),
        ),
        (*sorted(gone), *(f"{each.uid}: {part}" for each in compared for part in each.dropped)),
        tuple(f"{each.uid}: {part}" for each in compared for part in each.migrated),
        refused,
    )
