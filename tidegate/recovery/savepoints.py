"""Writes savepoints: self-contained copies of a checkpoint that belong to the user. The coordinator's effects call it.

    <target>/savepoint-<job>-17/_metadata           created last: a savepoint exists once this file does
    <target>/savepoint-<job>-17/<vertex>-<subtask>  the files of chk-17, byte for byte
    <target>/savepoint-<job>-17/shared/chk-<n>/...  files that it shares with other checkpoints

Rules:

- Paths in the metadata are relative to the savepoint's own folder, so it can be moved or copied as a whole.
- Every byte is verified while it is copied. Memory contains only a limited part of a file.
- A coordinator that was replaced may still be copying. Its successor creates a tombstone instead of `_metadata`: the
  first of the two decides, and both find out which one was first. The tombstone is kept. A coordinator that finds it
  deletes its own copy.
- A copy that must stop ends before its next part of a file, before `_metadata`, or immediately after it. It deletes
  what it has written.
- Data files of sinks are not copied from their tables. Staged inputs are not copied either; they stay in the root
  `origin_root`.
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
    """Copies the state of a checkpoint under `root_url` to a savepoint under `target_url`, and returns the savepoint's
    path.

    It can be repeated: an interrupted copy is written again, and a complete one is not changed. `stops` returns whether
    the copy must stop, which raises SavepointStoppedError. `contested`: whether a lost coordinator may be copying it as
    well.

    Raises AlreadyExistsError if another savepoint, or the rest of one, has its name, FencedError if it was voided, and
    CorruptionError, NotFoundError, StorageError.
    """
    permit.check(metadata.checkpoint_id)
    job_id, checkpoint_id = metadata.job_id, metadata.checkpoint_id
    source = open_store(root_url)
    target = open_store(_savepoint_url(open_store, target_url, job_id, checkpoint_id))
    layout = CheckpointLayout(job_id)
    own = rebased(metadata, layout, source.url)
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
        # It was created meanwhile: by another call, or by this create, which was repeated because its answer was lost.
        try:
            there = _is_there(target, own)
        except FencedError:
            clear_folder(target)
            raise
        if not there:
            raise


def complete_savepoint(target: Store, metadata: CheckpointMetadata) -> None:
    """Creates `_metadata`, which completes the savepoint. Succeeds if it already exists with exactly this content.

    The file may exist because the answer of an earlier create was lost. Raises AlreadyExistsError if another savepoint
    exists there, FencedError if a tombstone does, StorageError.
    """
    try:
        target.create(METADATA_NAME, encode_metadata(metadata))
    except StorageError:
        if not _is_there(target, metadata):
            raise


def void_savepoint(
    open_store: OpenStore, target_url: str, job_id: JobId, job_name: str, now_ms: int, permit: DeletePermit
) -> bool:
    """Ensures that the savepoint of a permit does not exist, now or later. Only its tombstone remains.

    Returns whether the savepoint had been complete before. A repeated call returns the same. Raises CorruptionError,
    StorageError.
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
            # The coordinator that created it has finished writing. Replace it instead of deleting it, so that it is
            # never missing. The tombstone stays even if a user has begun to delete the savepoint, because a replaced
            # coordinator may still be copying.
            tombstone = _tombstone(tombstone)
            target.write(METADATA_NAME, [encode_metadata(tombstone)])
    clear_folder(target)
    return tombstone.origin_root is not None


def clear_folder(store: Store, folder: str = "") -> None:
    """Deletes everything in a folder except its `_metadata`. Raises StorageError."""
    prefix = f"{folder}/" if folder else ""
    others = [name for name in store.list(folder) if name != METADATA_NAME]
    store.delete_all(f"{prefix}{name}" for name in others)
    if others:
        for name in store.list(folder):
            if name != METADATA_NAME:
                store.delete_tree(f"{prefix}{name}")


def copy_subtask(source: Store, target: Store, subtask: SubtaskState, path: Callable[[str], str]) -> SubtaskState:
    """Copies the files of a subtask to other paths, and verifies them. Returns the subtask with these paths.

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
    for path, copied_path in zip(old.sink_paths, new.sink_paths, strict=True):
        target.write(copied_path, _parts(iter((source.read(path),)), stops))


def _parts(parts: Iterable[Buffer], stops: Callable[[], bool]) -> Iterator[Buffer]:
    """Yields the parts of a file that is copied. Raises SavepointStoppedError before the next part if the copy must
    stop.
    """
    _go_on(stops)
    for part in parts:
        yield part
        _go_on(stops)


def _go_on(stops: Callable[[], bool]) -> None:
    if stops():
        raise SavepointStoppedError(
            "the copy of the savepoint was stopped before it was complete; take another savepoint"
        )


def _delete_stopped(target: Store, own: CheckpointMetadata, contested: bool) -> None:
    """Deletes a copy that was stopped, even a complete one, because its path is not returned and the job may have
    ended.

    A tombstone is kept, because a coordinator that has taken over created it, and so is another savepoint. If a lost
    coordinator may be copying too, a tombstone replaces `_metadata`: without `_metadata` for a moment, the savepoint
    could become complete again, and the later discard would report that it never was.
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
    """Returns the tombstone that replaces the `_metadata` of a complete savepoint.

    Its `origin_root` shows that the savepoint was complete.
    """
    return replace(of, operators=(), subtasks=(), hooks=(), void=True, deleted=False)


def discard_savepoint(open_store: OpenStore, target_url: str, job_id: JobId, permit: DeletePermit) -> None:
    """Deletes the savepoint of the permit, complete or not. `_metadata` is first, so that no incomplete savepoint is
    found.

    Raises StorageError.
    """
    target = open_store(_savepoint_url(open_store, target_url, job_id, permit.checkpoint_id))
    target.delete(METADATA_NAME)
    target.delete_tree("")


def _savepoint_url(open_store: OpenStore, target_url: str, job_id: JobId, checkpoint_id: CheckpointId) -> str:
    return join_url(open_store(target_url).url, savepoint_name(job_id, checkpoint_id))


def _is_there(target: Store, metadata: CheckpointMetadata) -> bool:
    """Returns whether the savepoint with this metadata is complete at the target.

    Raises AlreadyExistsError if another savepoint exists there, FencedError if a tombstone does.
    """
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
        raise FencedError(
            f"{target.url}: the coordinator that has taken over has aborted this savepoint; take another savepoint"
        )
    if found.deleted:
        raise AlreadyExistsError(
            f"{target.url} has the rest of a savepoint of this name, whose deletion was interrupted; "
            f"`tidegate checkpoints delete {target.url}` deletes it, or choose another folder"
        )
    if found != metadata:
        raise AlreadyExistsError(
            f"{target.url} holds another savepoint of this name already; choose another folder, or delete it"
        )
    return True


def rebased(metadata: CheckpointMetadata, layout: CheckpointLayout, root_url: str) -> CheckpointMetadata:
    """Returns the metadata with paths that are relative to the savepoint's folder."""
    moved = partial(layout.path_in_savepoint, metadata.checkpoint_id)
    return replace(metadata, subtasks=tuple(s.moved(moved) for s in metadata.subtasks), origin_root=root_url)
