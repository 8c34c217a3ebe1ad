"""Chooses the checkpoint that a job starts from.

Rules:

- `"latest"` is the newest checkpoint of a job of this name that is whole. Damaged ones are passed over, and said.
- A job starts afresh only when no run of its name has completed a checkpoint, or gone on from one: then nothing of it
  is in a table yet. Where there was one and none is left that is whole, its rows would come twice: that is an error,
  and `"latest_or_fresh"` is how a user says that this is wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.hosts.coordinator.coordinator_host import replay
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
    """What `restore=` of a job of this name means; None to start afresh. ConfigurationError for what cannot be."""
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
    if metadata.void or (metadata.origin_root is not None and _given_up(metadata, open_store(metadata.origin_root))):
        raise ConfigurationError(f"restore={pointer!r}: this checkpoint was given up; choose another one")
    ignore = ignore_in_flight_of == at.checkpoint_id
    return RestorePoint(at.root, at.job_id, at.checkpoint_id, metadata.final, at.savepoint, ignore), metadata


def checkpoints_up_to(
    restore: RestorePoint, metadata: CheckpointMetadata, open_store: OpenStore
) -> list[CheckpointMetadata]:
    """The restored checkpoint, after the completed ones before it that are still there.

    They are there as long as their sink files may not be visible yet, also those before a savepoint, which lie where
    its job had them. One that is damaged is not needed when its sink files are committed, as the event log tells; else
    CorruptionError.
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
    """Whether a checkpoint that cannot be read covers rows that no table shows, as far as its job's event log tells.

    Of one without metadata it is only missed when the log knows that it was complete.
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
    """Path of the newest checkpoint of the name that is whole, None to start afresh."""
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
    """Runs of a name that had a checkpoint, of which none is there, and why nobody must forget them."""
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


def _given_up(savepoint: CheckpointMetadata, origin: Store) -> bool:
    """Whether the job of a savepoint has voided its checkpoint, and so gone on without the rows that it covers.

    The savepoint is deleted then, but a coordinator that was lost may have left it behind for a while.
    """
    try:
        return read_metadata(origin, savepoint.job_id, savepoint.checkpoint_id).void
    except (NotFoundError, CorruptionError):
        return False
