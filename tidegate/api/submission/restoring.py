"""Finds the checkpoint that a job starts from, given the argument `restore=`.

Rules:

- `"latest"` means the newest undamaged checkpoint of the jobs with this name. Damaged checkpoints are skipped, with a
  warning.
- `"latest"` starts a job without a checkpoint only if no earlier run of this name has completed a checkpoint, or was
  restored from one. Then no table contains rows of an earlier run.
- If there were checkpoints and all of them are damaged or deleted, a job without a checkpoint would write rows twice.
  This raises an error, unless the user accepts it by `"latest_or_fresh"`.
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
    """Returns the checkpoint to which `restore` refers for a job of this name, and the metadata of that checkpoint.

    Returns (None, None) if the job starts without a checkpoint.

    - `ignore_in_flight_of`: number of the checkpoint whose in-flight data is not restored, or None.

    Raises ConfigurationError if the checkpoint does not exist or is void, or if all checkpoints are damaged. Raises
    CorruptionError and StorageError.
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
            "lists the existing ones"
        ) from error
    check_not_given_up(metadata, f"restore={pointer!r}", open_store)
    ignore = ignore_in_flight_of == at.checkpoint_id
    return RestorePoint(at.root, at.job_id, at.checkpoint_id, metadata.final, at.savepoint, ignore), metadata


def check_not_given_up(metadata: CheckpointMetadata, named: str, open_store: OpenStore) -> None:
    """Raises ConfigurationError if the checkpoint is void: its job has given it up and continued from an older one.

    A void savepoint is deleted, but exists for a while if the coordinator is lost. The old job has processed the rows
    after it again, so a job that restores or copies it would repeat these rows. `named` is the beginning of the error's
    text.
    """
    if metadata.void or (metadata.origin_root is not None and _voided(metadata, open_store(metadata.origin_root))):
        raise ConfigurationError(
            f"{named}: this checkpoint was given up, because its job continued from an older one; choose another "
            "checkpoint"
        )


def checkpoints_up_to(
    restore: RestorePoint, metadata: CheckpointMetadata, open_store: OpenStore
) -> list[CheckpointMetadata]:
    """Returns the metadata of the existing completed checkpoints of a job, oldest first, up to the restored
    checkpoint.

    A job keeps a checkpoint at least until its sink files are committed. If a savepoint is restored, the older
    checkpoints are in the folder of the job that took it. A damaged checkpoint is skipped if its sink files are
    committed according to the event log. Otherwise the function raises CorruptionError.
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
                    f"{error}. That checkpoint comes before {restore.pointer}, and rows that it covers may be missing "
                    "in the output tables. Restore the file from a copy, or name an older checkpoint"
                ) from error
            continue  # It was never completed, or the tables contain all of its rows.
        if not older.void:
            found.append(older)
    return [*found, metadata]


def _is_missed(store: Store, job_id: JobId, checkpoint_id: CheckpointId, error: TidegateError) -> bool:
    """Returns whether the sink files of an unreadable checkpoint may be uncommitted, according to the event log of its
    job.

    Returns True if the log is damaged. If the log is empty, returns whether the metadata file of the checkpoint exists,
    because without this file the checkpoint was never completed. `error` is the error of reading the metadata.
    """
    try:
        state = replay(EventLog(store, job_id))[0].state
    except DAMAGE as damage:
        log.warning("cannot determine whether checkpoint %d of %s is committed: %s", checkpoint_id, job_id, damage)
        return True
    if state.spec is None:
        return not isinstance(error, NotFoundError)
    return any(commit.checkpoint_id == checkpoint_id for commit in state.commits)


def _newest(restore: str, name: str, root: str, open_store: OpenStore) -> str | None:
    """Returns the path of the newest undamaged checkpoint of the jobs with this name, or None if the job starts without
    one.
    """
    newest, damaged = latest_and_damaged(root, name, open_store=open_store)
    if newest is not None:
        return newest.path
    reasons = [f"{summary.path}: {summary.reason}" for summary in damaged]
    reasons = reasons or list(_lost(open_store(root), name))
    if not reasons:
        log.info("job %r has no checkpoint under %s yet: it starts afresh", name, root)
        return None
    shown = [reason[:REASON_CHARACTERS_MAX] for reason in reasons[:REASONS_SHOWN_MAX]]
    found = f"every checkpoint of job {name!r} under {root} is damaged or gone ({'; '.join(shown)})"
    if restore == LATEST_OR_FRESH:
        log.warning("%s: it starts afresh, because restore=%r allows it", found, restore)
        return None
    raise ConfigurationError(
        f"restore={restore!r}: {found}. Restore these files from a copy, or name a savepoint. To start afresh use "
        f"restore={LATEST_OR_FRESH!r}: the rows that earlier runs have written to tables are then written again, so "
        "empty the tables or write to other tables"
    )


def _lost(store: Store, name: str) -> Iterator[str]:
    """Yields a text for each earlier run of this job whose state is lost.

    Such a run completed checkpoints or was restored from one. Now its checkpoints no longer exist, or its event log
    cannot be read. After a lost run the job must not start without a checkpoint.
    """
    for job_id in map(JobId, store.list("")):
        if not is_of_job(store, job_id, name):
            continue
        event_log = EventLog(store, job_id)
        if not event_log.indices():
            continue
        try:
            state = replay(event_log)[0].state
        except (CorruptionError, CodecError) as error:
            yield f"{job_id} may have had one, and its event log cannot be read: {error}"
            continue
        layout = CheckpointLayout(job_id)
        gone = [CheckpointPointer(store.url, job_id, checkpoint_id) for checkpoint_id in sorted(state.kept)]
        yield from (f"{at}: {layout.metadata(at.checkpoint_id)} is gone" for at in gone)
        if not gone and state.completed_checkpoints:
            yield f"{job_id} has completed {state.completed_checkpoints}, which are deleted"
        elif not gone and state.spec is not None and state.spec.restore is not None:
            yield f"{job_id} was restored from {state.spec.restore.pointer}, which is gone"


def _voided(savepoint: CheckpointMetadata, origin: Store) -> bool:
    try:
        return read_metadata(origin, savepoint.job_id, savepoint.checkpoint_id).void
    except DAMAGE:
        return False


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """How a program would use the state in a checkpoint.

    - `path`: the checkpoint or savepoint, or None if the job would start without one.
    - `restored`, `started_empty`, `dropped`: uids of operators whose state would be restored, is not in the checkpoint,
      or would be dropped. A part of an operator's state is given as `uid: aggregate n`.
    - `migrated`: state that would be converted to wider types.
    - `refused`: the text of the error that `execute` would raise, or None if it would accept the restore.
    """

    path: str | None
    restored: tuple[str, ...] = ()
    started_empty: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    migrated: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def ok(self) -> bool:
        """Returns True if `execute` would accept the restore."""
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
    """Returns a report of how a program would use the state in a checkpoint.

    - `refused`: the text of the error that the checks raised, or None.
    - `rehearsal`: how the operators fit their state in the checkpoint, found by opening them.
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
