"""Chooses the checkpoint that a job starts from: what `restore=` means. `submission.py` and `relocate` ask.

Rules:

- `"latest"` is the newest whole checkpoint of a job of this name. Damaged ones are passed over, with a warning.
- A job starts afresh only if no run of its name has completed a checkpoint, or gone on from one. Then none of its rows
  is in a table yet.
- If there were checkpoints and none is whole, starting afresh would write rows twice. That is an error, unless the user
  asks for it with `"latest_or_fresh"`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.coordinator_driver import replay
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.restore.meaning_checks import Comparison, comparisons
from tidegate.actors.restore.restore_checks import non_restored
from tidegate.recovery.checkpoints import is_of_job, latest_and_damaged
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    parse_checkpoint_name,
    parse_pointer,
)
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, read_metadata, read_pointed
from tidegate.storage.errors import (
    DAMAGE,
    CodecError,
    ConfigurationError,
    CorruptionError,
    NotFoundError,
    TidegateError,
)
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid
from tidegate.storage.state.subtask_state import operators_with_state

log = logging.getLogger(__name__)

LATEST, LATEST_OR_FRESH = "latest", "latest_or_fresh"
REASONS_SHOWN_MAX = 20
REASON_CHARACTERS_MAX = 500


def restore_point(
    restore: str | None, name: str, root: str, ignore_in_flight_of: int | None, open_store: OpenStore
) -> tuple[RestorePoint | None, CheckpointMetadata | None]:
    """The checkpoint that `restore` means for a job of this name, with its metadata; twice None to start afresh.

    ConfigurationError if there is no such checkpoint, it was given up, or no checkpoint is whole; CorruptionError,
    StorageError.
    """
    if restore is None:
        return None, None
    pointer = _newest(restore, name, root, open_store) if restore in (LATEST, LATEST_OR_FRESH) else restore
    if pointer is None:
        return None, None
    at = parse_pointer(pointer)
    try:
        metadata = read_pointed(open_store(at.root), at)
    except NotFoundError as error:
        folder = at.root.rpartition("/")[0] if at.savepoint else at.root
        raise ConfigurationError(
            f"restore={pointer!r}: there is no completed checkpoint or savepoint; `tidegate checkpoints list {folder}` "
            "shows those that there are"
        ) from error
    check_not_given_up(metadata, f"restore={pointer!r}", open_store)
    ignore = ignore_in_flight_of == at.checkpoint_id
    return RestorePoint(at.root, at.job_id, at.checkpoint_id, metadata.final, at.savepoint, ignore), metadata


def check_not_given_up(metadata: CheckpointMetadata, named: str, open_store: OpenStore) -> None:
    """Raise ConfigurationError if the job has voided the checkpoint, and so gone on as if it had never been.

    A savepoint of such a checkpoint is deleted, but a coordinator that was lost may have left it behind for a while.
    Whoever restores or copies it would have rows that the job has processed again. `named`: what the error begins with.
    """
    if metadata.void or (metadata.origin_root is not None and _voided(metadata, open_store(metadata.origin_root))):
        raise ConfigurationError(f"{named}: this checkpoint was given up; choose another one")


def checkpoints_up_to(
    restore: RestorePoint, metadata: CheckpointMetadata, open_store: OpenStore
) -> list[CheckpointMetadata]:
    """The completed checkpoints before the restored one that are still there, and at the end the restored one.

    A job keeps them as long as their sink files may not be committed. Those before a savepoint are in the folder of its
    job. One that is damaged is left out if the event log says that its sink files are committed; else CorruptionError.
    """
    store = open_store(metadata.origin_root or restore.root)
    found = []
    names = store.list(CheckpointLayout(restore.job_id).job_dir())
    numbers = sorted(number for number in map(parse_checkpoint_name, names) if number is not None)
    for number in (number for number in numbers if number < restore.checkpoint_id):
        try:
            older = read_metadata(store, restore.job_id, number)
        except DAMAGE as error:
            if _is_missed(store, restore.job_id, number, error):
                raise CorruptionError(
                    f"{error}. That checkpoint comes before {restore.pointer}, and rows that it covers are not in the "
                    "output tables yet, or nobody can tell. Restore the file from a copy, or name an older checkpoint"
                ) from error
            continue  # It was never completed, or nothing of it is missing in a table.
        if not older.void:
            found.append(older)
    return [*found, metadata]


def _is_missed(store: Store, job_id: JobId, checkpoint_id: CheckpointId, error: TidegateError) -> bool:
    """Whether an unreadable checkpoint covers rows that no table shows yet, by the event log of its job.

    A damaged log counts as yes. So does an empty one, unless there is no metadata: then it was never completed.
    """
    try:
        state = replay(EventLog(store, job_id))[0].state
    except DAMAGE as damage:
        log.warning("nobody can tell whether checkpoint %d of %s is committed: %s", checkpoint_id, job_id, damage)
        return True
    if state.spec is None:
        return not isinstance(error, NotFoundError)
    return any(commit.checkpoint_id == checkpoint_id for commit in state.commits)


def _newest(restore: str, name: str, root: str, open_store: OpenStore) -> str | None:
    """Path of the newest whole checkpoint of the name; None to start afresh."""
    newest, damaged = latest_and_damaged(root, name, open_store=open_store)
    if newest is not None:
        return newest.path
    reasons = [f"{summary.path}: {summary.reason}" for summary in damaged]
    reasons = reasons or list(_lost(open_store(root), name))
    if not reasons:
        log.info("job %r has no checkpoint under %s yet: it starts afresh", name, root)
        return None
    shown = [reason[:REASON_CHARACTERS_MAX] for reason in reasons[:REASONS_SHOWN_MAX]]
    found = f"no checkpoint of job {name!r} under {root} is whole ({'; '.join(shown)})"
    if restore == LATEST_OR_FRESH:
        log.warning("%s: it starts afresh, as was asked for", found)
        return None
    raise ConfigurationError(
        f"restore={restore!r}: {found}. Restore these files from a copy, or name a savepoint. To start afresh say "
        f"restore={LATEST_OR_FRESH!r}: whatever earlier runs have written to tables is then written again, so empty "
        "the tables or write to others"
    )


def _lost(store: Store, name: str) -> Iterator[str]:
    """Why a job of this name must not start afresh: what runs of the name had completed, and is gone."""
    for job_id in map(JobId, store.list("")):
        if not is_of_job(store, job_id, name):
            continue
        event_log = EventLog(store, job_id)
        if not event_log.indices():
            continue
        try:
            state = replay(event_log)[0].state
        except (CorruptionError, CodecError) as error:
            yield f"{job_id} may have had one, nobody can tell: {error}"
            continue
        layout = CheckpointLayout(job_id)
        gone = [CheckpointPointer(store.url, job_id, checkpoint_id) for checkpoint_id in sorted(state.kept)]
        yield from (f"{at}: {layout.metadata(at.checkpoint_id)} is gone" for at in gone)
        if not gone and state.completed_checkpoints:
            yield f"{job_id} has completed {state.completed_checkpoints}, which are deleted"
        elif not gone and state.spec is not None and state.spec.restore is not None:
            yield f"{job_id} went on from {state.spec.restore.pointer}, which is gone"


def _voided(savepoint: CheckpointMetadata, origin: Store) -> bool:
    try:
        return read_metadata(origin, savepoint.job_id, savepoint.checkpoint_id).void
    except DAMAGE:
        return False


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
