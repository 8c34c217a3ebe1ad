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
from collections.abc import Iterator

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.drivers.coordinator_host import replay
from tidegate.recovery.checkpoints import is_of_job, latest_and_damaged
from tidegate.storage.checkpoints.event_log import EventLog
from tidegate.storage.checkpoints.layout import (
    CheckpointLayout,
    CheckpointPointer,
    parse_checkpoint_name,
    parse_pointer,
)
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.checkpoints.metadata_file import read_metadata, read_pointed
from tidegate.storage.errors import (
    DAMAGE,
    CodecError,
    ConfigurationError,
    CorruptionError,
    NotFoundError,
    TidegateError,
)
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId, JobId

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
