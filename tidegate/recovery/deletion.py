"""Deletes checkpoints: one that a user names, or at the end of a job all except the retained ones.

Rules of `delete`:

- It deletes nothing of a running job: `deletion_permits.py` refuses it and names the reason, or returns the permit. The
  coordinator of a running job deletes by its own rules (`tidegate/actors/coordinator/invariants.py`).
- `_metadata` is first marked as deleted, so that an incompletely deleted checkpoint is never found, and is deleted
  last. So the next deletion can complete an interrupted one: `_metadata` shows which files may remain.
- A shared file is kept while another checkpoint of the job refers to it. If the metadata of another checkpoint cannot
  be read, all shared files are kept.
- Rows that the job has written to tables do not belong to the checkpoint, and are kept.

Rules of `sweep_checkpoints`, which runs at the end of a job:

- `_metadata` of a checkpoint is deleted first, so that an incompletely deleted checkpoint is never found.
- A tombstone is kept: a coordinator that was cut off may still try to complete that checkpoint, even after the end.
- A checkpoint that may still complete is kept. If its metadata does not exist yet, all shared files are kept, too.
- Shared files are deleted last, when the files that the retained checkpoints need are known. If the metadata of a
  retained checkpoint is damaged or missing, no shared file is deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from tidegate.recovery.deletion_permits import permit_deletion
from tidegate.recovery.savepoints import clear_folder
from tidegate.storage.checkpoints.layout import (
    METADATA_NAME,
    NATIVE_MARK,
    CheckpointLayout,
    CheckpointPointer,
    parse_checkpoint_name,
    parse_pointer,
)
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, encode_metadata, read_metadata
from tidegate.storage.checkpoints.permits import DeletePermit, EndPermit
from tidegate.storage.errors import DAMAGE, CodecError, CorruptionError, NotFoundError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import OpenStore, Store
from tidegate.storage.ids import CheckpointId

_logger = logging.getLogger(__name__)


def delete(path: str, *, force: bool = False, open_store: OpenStore = open_store) -> int:
    """Deletes a checkpoint or savepoint, and returns how many of its files were deleted. `path` is as for `inspect`.

    `force` deletes a checkpoint of a job whose lease has not expired. Use it only if the job is certainly dead.

    Raises ConfigurationError if `path` is not the path of a checkpoint or its job may be running; NotFoundError if it
    was never completed; CorruptionError or CodecError if its metadata cannot be read, because then its files are
    unknown; StorageError.
    """
    at = parse_pointer(path)
    store = open_store(at.root)
    permit = permit_deletion(store, at, force=force)
    try:
        metadata = read_metadata(store, at.job_id, at.checkpoint_id, savepoint=at.savepoint, deleted=True)
    except NotFoundError as error:
        raise NotFoundError(_without_metadata(store, at)) from error
    return _delete_savepoint(store, at, metadata, permit) if at.savepoint else _delete(store, at, metadata, permit)


def _without_metadata(store: Store, at: CheckpointPointer) -> str:
    """Returns the error text for a checkpoint that has no metadata, and is therefore not deleted.

    It explains what to do with remaining files.
    """
    folder = "" if at.savepoint else CheckpointLayout(at.job_id).checkpoint_dir(at.checkpoint_id)
    if not store.list(folder):
        return f"there is no {'savepoint' if at.savepoint else 'checkpoint'} {at}"
    text = f"{at} has files and no {METADATA_NAME}: it was never completed. "
    if at.savepoint:
        return f"{text}If no job is writing it, delete the folder"
    return f"{text}`tidegate checkpoints sweep {at.root} --job {at.job_id} --delete` deletes what nothing refers to"


def _delete_savepoint(store: Store, at: CheckpointPointer, metadata: CheckpointMetadata, permit: DeletePermit) -> int:
    permit.check(metadata.checkpoint_id)
    _mark(store, at, metadata)
    clear_folder(store)
    store.delete(at.metadata)
    store.delete_tree("")
    return 1 + len(set(_paths(metadata))) + len(metadata.carried or ())


def _delete(store: Store, at: CheckpointPointer, metadata: CheckpointMetadata, permit: DeletePermit) -> int:
    permit.check(metadata.checkpoint_id)
    unneeded = _unneeded(store, at, metadata)
    folder = CheckpointLayout(at.job_id).checkpoint_dir(at.checkpoint_id)
    _mark(store, at, metadata)
    clear_folder(store, folder)
    for shared in sorted(unneeded):
        store.delete(shared)
    store.delete(at.metadata)
    store.delete_tree(folder)
    own = set(_paths(metadata)) - set(_shared_paths(metadata))
    return 1 + len(own) + len(unneeded)


def _mark(store: Store, at: CheckpointPointer, metadata: CheckpointMetadata) -> None:
    """Marks a checkpoint as deleted, so that it is no longer found."""
    if not metadata.deleted:
        store.write(at.metadata, [encode_metadata(replace(metadata, deleted=True))])


def _unneeded(store: Store, at: CheckpointPointer, metadata: CheckpointMetadata) -> set[str]:
    """Returns the shared files of a checkpoint to which no other checkpoint of its job refers."""
    unneeded = set(_shared_paths(metadata))
    if unneeded:
        for other in _others(store, at):
            try:
                unneeded -= set(_shared_paths(read_metadata(store, at.job_id, other.checkpoint_id)))
            except NotFoundError:
                continue
            except (CorruptionError, CodecError) as error:
                _logger.warning("Files that %s shares with other checkpoints stay, because of %s: %s", at, other, error)
                return set()
    return unneeded


def _others(store: Store, at: CheckpointPointer) -> Iterator[CheckpointPointer]:
    for name in store.list(CheckpointLayout(at.job_id).job_dir()):
        checkpoint_id = parse_checkpoint_name(name)
        if checkpoint_id is not None and checkpoint_id != at.checkpoint_id:
            yield CheckpointPointer(at.root, at.job_id, checkpoint_id)


def _paths(metadata: CheckpointMetadata) -> Iterator[str]:
    return (path for subtask in metadata.subtasks for path in subtask.paths)


def _shared_paths(metadata: CheckpointMetadata) -> Iterator[str]:
    return (path for subtask in metadata.subtasks for path in (*subtask.shared_paths, *subtask.sink_paths))


def sweep_checkpoints(store: Store, layout: CheckpointLayout, permit: EndPermit) -> None:
    """Deletes all checkpoints of a job except the retained ones, and shared files that these do not need.

    Raises StorageError.
    """
    kept = sorted(permit.retained | permit.undecided)
    for name in store.list(layout.job_dir()):
        number = parse_checkpoint_name(name)
        if number is None or number in kept:
            continue
        if _is_tombstone(store, layout, number):
            _sweep_folder(store, layout.checkpoint_dir(number), {layout.metadata(number)})
        else:
            store.delete(layout.metadata(number))
            store.delete_tree(layout.checkpoint_dir(number))
    referenced: set[str] = set()
    readable = True
    for number in kept:
        try:
            metadata = read_metadata(store, layout.job_id, number)
        except DAMAGE as error:
            _logger.warning("Shared files of %s stay, because of its checkpoint %d: %s", layout.job_id, number, error)
            readable = False
            continue
        referenced |= {layout.metadata(number), *(path for subtask in metadata.subtasks for path in subtask.paths)}
        _sweep_folder(store, layout.checkpoint_dir(number), referenced)
    if readable:
        _sweep_shared(store, layout, referenced)


def _is_tombstone(store: Store, layout: CheckpointLayout, number: CheckpointId) -> bool:
    try:
        return read_metadata(store, layout.job_id, number).void
    except DAMAGE:
        return False


def _sweep_shared(store: Store, layout: CheckpointLayout, referenced: set[str]) -> None:
    _sweep_folder(store, layout.changelog_dir(), referenced)
    _sweep_folder(store, layout.sinks_dir(), referenced)
    folders = {path.rpartition("/")[0] for path in referenced}
    for name in store.list(layout.shared_dir()):
        number = parse_checkpoint_name(name)
        if number is None:
            continue
        folder = layout.shared_checkpoint_dir(number)
        if not any(f == folder or f.startswith(f"{folder}/") for f in folders):
            store.delete_tree(folder)
            continue
        for child in store.list(folder):
            path = f"{folder}/{child}"
            if NATIVE_MARK not in child:
                _delete_unless(store, path, referenced)
            elif path in folders:
                _sweep_folder(store, path, referenced)
            else:
                store.delete_tree(path)


def _sweep_folder(store: Store, folder: str, referenced: set[str]) -> None:
    for name in store.list(folder):
        _delete_unless(store, f"{folder}/{name}", referenced)


def _delete_unless(store: Store, path: str, referenced: set[str]) -> None:
    if path not in referenced:
        store.delete(path)
