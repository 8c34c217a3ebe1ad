"""Writes savepoints: self-contained copies of a checkpoint, owned by the user. The coordinator's effects call it.

    <target>/savepoint-<job>-17/_metadata           created last: a savepoint is there when this file is
    <target>/savepoint-<job>-17/<vertex>-<subtask>  the files of chk-17, byte for byte
    <target>/savepoint-<job>-17/shared/chk-<n>/...  those that it shares with other checkpoints

Rules:

- Paths in the metadata are relative to the savepoint's own folder, so it can be moved or copied as a whole.
- Every byte is verified while it is copied. Memory holds a bounded part of a file.
- A coordinator that was replaced may still be copying. Its successor creates a tombstone in the place of `_metadata`:
  whichever of the two was first decides, and both learn which. The tombstone stays; who finds it deletes his copy.
- A copy that is to stop ends before its next part of a file, before `_metadata`, or right after it. It deletes what it
  has written.
- Data files of sinks stay in their tables. Staged inputs stay with the job that staged them; `origin_root` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from tidegate.storage.checkpoints.layout import METADATA_NAME, CheckpointLayout, savepoint_name
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    SubtaskState,
    encode_metadata,
    read_metadata,
)
from tidegate.storage.checkpoints.permits import DeletePermit, ExportPermit
from tidegate.storage.errors import (
    AlreadyExistsError,
    CodecError,
    CorruptionError,
    FencedError,
    NotFoundError,
    SavepointStoppedError,
    StorageError,
    TidegateError,
)
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, OpenStore, Store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.state.state_file import verified_native, verified_state


def _never() -> bool:
    return False


def write_savepoint(
    open_store: OpenStore,
    root_url: str,
    target_url: str,
    metadata: CheckpointMetadata,
    permit: ExportPermit,
    stops: Callable[[], bool] = _never,
    contested: bool = False,
) -> str:
    """Copy the state of a checkpoint under `root_url` to a savepoint under `target_url`; returns the savepoint's path.

    It can be repeated: an interrupted copy is written again, and a complete one stays as it is. Raises
    AlreadyExistsError if another savepoint has its name, or what is left of one, FencedError if it was voided,
    CorruptionError, NotFoundError, StorageError. `stops`: whether the copy is to stop; it raises SavepointStoppedError.
    `contested`: whether a coordinator that was lost may be copying it as well.
    """
    permit.check(metadata.checkpoint_id)
    job_id, checkpoint_id = metadata.job_id, metadata.checkpoint_id
    source = open_store(root_url)
    target = open_store(_savepoint_url(open_store, target_url, job_id, checkpoint_id))
    layout = CheckpointLayout(job_id)
    own = _rebased(metadata, layout, source.url)
    try:
        if not _is_there(target, own):
            for old, new in zip(metadata.subtasks, own.subtasks, strict=True):
                _copy(source, target, old, new, stops)
            _go_on(stops)
            _create_metadata(target, own)
        _go_on(stops)
    except TidegateError:
        if stops():
            _delete_stopped(target, own, contested)
        raise
    return target.url


def _create_metadata(target: Store, own: CheckpointMetadata) -> None:
    try:
        target.create(METADATA_NAME, encode_metadata(own))
    except AlreadyExistsError:
        # Created meanwhile: by another call, or by this one, whose answer was lost so that it was sent again.
        try:
            there = _is_there(target, own)
        except FencedError:
            clear_folder(target)
            raise
        if not there:
            raise


def complete_savepoint(target: Store, metadata: CheckpointMetadata) -> None:
    """Create `_metadata`: the savepoint is there from now on. No error if it is there already, with this very content.

    A create whose answer was lost has done its work all the same. AlreadyExistsError if another savepoint is there,
    FencedError if a tombstone is, StorageError.
    """
    try:
        target.create(METADATA_NAME, encode_metadata(metadata))
    except StorageError:
        if not _is_there(target, metadata):
            raise


def void_savepoint(
    open_store: OpenStore, target_url: str, job_id: JobId, job_name: str, now_ms: int, permit: DeletePermit
) -> bool:
    """Make sure that the savepoint which the permit names is none, now and later; its tombstone is all that stays.

    Returns whether it had become whole before. It can be repeated, and gives the same answer then. Raises
    CorruptionError, StorageError.
    """
    checkpoint_id = permit.checkpoint_id
    target = open_store(_savepoint_url(open_store, target_url, job_id, checkpoint_id))
    attempt = AttemptNumber(0)
    tombstone = CheckpointMetadata(
        METADATA_VERSION, job_id, job_name, checkpoint_id, attempt, now_ms, operators=(), subtasks=(), void=True
    )
    try:
        target.create(METADATA_NAME, encode_metadata(tombstone))
    except AlreadyExistsError:
        tombstone = read_metadata(target, job_id, checkpoint_id, savepoint=True, deleted=True)
        if not tombstone.void:
            # Whoever has created it writes nothing more. Replaced and not deleted: it is never missing. A user may have
            # begun to delete it, and did not get to the end; a tombstone stays all the same, for who is still copying.
            tombstone = _tombstone(tombstone)
            target.write(METADATA_NAME, [encode_metadata(tombstone)])
    clear_folder(target)
    return tombstone.origin_root is not None


def clear_folder(store: Store, folder: str = "") -> None:
    """Delete all of a folder but its `_metadata`. StorageError."""
    prefix = f"{folder}/" if folder else ""
    others = [name for name in store.list(folder) if name != METADATA_NAME]
    store.delete_all(f"{prefix}{name}" for name in others)
    if others:
        for name in store.list(folder):
            if name != METADATA_NAME:
                store.delete_tree(f"{prefix}{name}")


def copy_subtask(source: Store, target: Store, subtask: SubtaskState, path: Callable[[str], str]) -> SubtaskState:
    """Copy a subtask's files to other paths, and verify them. Returns the subtask with these paths.

    Raises CorruptionError, NotFoundError, StorageError.
    """
    moved = subtask.moved(path)
    _copy(source, target, subtask, moved)
    return moved


def _copy(
    source: Store, target: Store, old: SubtaskState, new: SubtaskState, stops: Callable[[], bool] = _never
) -> None:
    for handle, copied in zip(old.handles, new.handles, strict=True):
        if copied.path is not None:
            target.write(copied.path, _parts(verified_state(source, handle), stops))
    for file, copied_file in zip(old.native_files, new.native_files, strict=True):
        target.write(copied_file.path, _parts(verified_native(source, file), stops))


def _parts(parts: Iterable[Buffer], stops: Callable[[], bool]) -> Iterator[Buffer]:
    """Parts of a file, as long as the copy is not to stop."""
    _go_on(stops)
    for part in parts:
        yield part
        _go_on(stops)


def _go_on(stops: Callable[[], bool]) -> None:
    if stops():
        raise SavepointStoppedError("the savepoint was given up while it was being copied")


def _delete_stopped(target: Store, own: CheckpointMetadata, contested: bool) -> None:
    """Delete a copy that was given up, even if it has become whole: nobody gets its path, and the job may be over.

    A tombstone stays, because a coordinator that has taken over has created it; and so does another savepoint. Where a
    lost coordinator may be copying as well, one is put in the place of `_metadata`: were it missing for a moment, the
    savepoint could become whole again, and the discard after it would report that it never was.
    """
    try:
        if _is_there(target, own):
            if contested:
                target.write(METADATA_NAME, [encode_metadata(_tombstone(own))])
                clear_folder(target)
                return
            target.delete(METADATA_NAME)
        target.delete_tree("")
    except FencedError:
        clear_folder(target)
    except AlreadyExistsError:
        return


def _tombstone(of: CheckpointMetadata) -> CheckpointMetadata:
    """What takes the place of a whole `_metadata`. It keeps `origin_root`, which tells that the savepoint was whole."""
    return replace(of, operators=(), subtasks=(), hooks=(), void=True, deleted=False)


def discard_savepoint(open_store: OpenStore, target_url: str, job_id: JobId, permit: DeletePermit) -> None:
    """Delete the savepoint that the permit names, complete or not; `_metadata` first. Nobody finds it half deleted.

    Raises StorageError.
    """
    target = open_store(_savepoint_url(open_store, target_url, job_id, permit.checkpoint_id))
    target.delete(METADATA_NAME)
    target.delete_tree("")


def _savepoint_url(open_store: OpenStore, target_url: str, job_id: JobId, checkpoint_id: CheckpointId) -> str:
    return join_url(open_store(target_url).url, savepoint_name(job_id, checkpoint_id))


def _is_there(target: Store, metadata: CheckpointMetadata) -> bool:
    """Whether the savepoint is complete. AlreadyExistsError if another one is there, FencedError if a tombstone is."""
    try:
        found = read_metadata(target, metadata.job_id, metadata.checkpoint_id, savepoint=True, deleted=True)
    except NotFoundError:
        return False
    except (CorruptionError, CodecError) as error:
        raise AlreadyExistsError(
            f"{target.url} has a {METADATA_NAME} already that cannot be read: {error}; "
            "choose another folder, or delete this one"
        ) from error
    if found.void:
        raise FencedError(f"{target.url}: the coordinator that has taken over has given this savepoint up")
    if found.deleted:
        raise AlreadyExistsError(
            f"{target.url} is what a deletion that was interrupted has left of a savepoint of this name; "
            f"`tidegate checkpoints delete {target.url}` deletes the rest, or choose another folder"
        )
    if found != metadata:
        raise AlreadyExistsError(
            f"{target.url} holds another savepoint of this name already; choose another folder, or delete it"
        )
    return True


def _rebased(metadata: CheckpointMetadata, layout: CheckpointLayout, root_url: str) -> CheckpointMetadata:
    """The metadata with paths that are relative to the savepoint's folder."""
    moved = partial(layout.path_in_savepoint, metadata.checkpoint_id)
    return replace(metadata, subtasks=tuple(s.moved(moved) for s in metadata.subtasks), origin_root=root_url)
