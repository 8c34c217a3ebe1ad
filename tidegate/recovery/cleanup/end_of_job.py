"""Sweeps a job's checkpoints when the job is over: what no retained one refers to is deleted.

Rules:

- Of a checkpoint that is deleted, `_metadata` goes first, so that nobody finds it half deleted.
- A tombstone stays: a coordinator that was cut off may still try to complete that checkpoint, also after the end.
- A checkpoint that may still complete stays, and with it all shared files if its metadata is not there yet.
- Shared files go last, when it is known what the retained checkpoints refer to. If the metadata of one of these is
  damaged or gone, no shared file is deleted.
"""

from __future__ import annotations

import logging

from tidegate.storage.checkpoints.layout import NATIVE_MARK, CheckpointLayout, parse_checkpoint_name
from tidegate.storage.checkpoints.metadata_file import read_metadata
from tidegate.storage.checkpoints.permits import EndPermit
from tidegate.storage.errors import DAMAGE
from tidegate.storage.files.store import Store
from tidegate.storage.ids import CheckpointId

_logger = logging.getLogger(__name__)


def sweep_checkpoints(store: Store, layout: CheckpointLayout, permit: EndPermit) -> None:
    """Delete all checkpoints of a job but the retained ones, and shared files that these do not need. StorageError."""
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
