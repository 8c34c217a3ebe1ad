"""Writes a state backend's own files (RocksDB's) into checkpoints, and fetches them back onto the local disk.

Rules: a file that the base of a checkpoint has already is referred to, not written again; every file has a checksum of
all its bytes, which is compared when it is fetched; local folders are cleared on every way out, whatever fails.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import xxhash

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState
from tidegate.storage.copies.local_first import LocalFirstStore
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.extras import need
from tidegate.storage.files.envelope import format_checksum
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.state.key_groups import key_groups_meet
from tidegate.storage.state.snapshot import FrozenNative, StateTable
from tidegate.storage.state.verification import verified_native

DESCRIPTION_NAME = "TIDEGATE"
"""File that `fetch_native` adds to a folder once it is complete: the description of what is in it."""

_UNCHANGING_SUFFIX = ".sst"
"""Tables of RocksDB are only ever made and deleted, so a link to one is as good as a copy."""

_PART_BYTES = 1024 * 1024
"""Less than what glibc maps by itself: memory of larger parts would be new each time, and cleared first."""


def write_native(store: Store, dir_path: str, frozen: FrozenNative, base: NativeState | None) -> NativeState:
    """Store what was frozen in the folder `dir_path`, but for files that `base` has. The local folder is deleted.

    Raises StorageError; then some files may be there.
    """
    try:
        return _written(store, dir_path, frozen, base)
    finally:
        frozen.release()


def fetch_native(store: Store, native: NativeState, folder: str) -> None:
    """Bring all files into a local folder, in which the backend can go on; what is in the folder before is deleted.

    A file of which `store` has a copy on this node is linked, if it never changes. Raises CorruptionError,
    NotFoundError, or StorageError if the local folder cannot be used.
    """
    try:
        with _used(folder):
            shutil.rmtree(folder, ignore_errors=True)
            os.makedirs(folder, FOLDER_MODE)
        _fetch(store, native.files, folder)
        with _used(folder), open(os.path.join(folder, DESCRIPTION_NAME), "xb", opener=open_private) as file:
            file.write(native.description)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def tables_of_fetched(native: NativeState) -> list[StateTable]:
    """What an operator is restored from whose backend goes on with the files: of each state a table without rows, which
    tells its columns. CodecError, CorruptionError."""
    need("a checkpoint with files of RocksDB", "rocksdb")
    from tidegate.storage.rocksdb.restore import empty_tables

    return empty_tables(native)


def read_native(
    store: Store,
    native: NativeState,
    key_groups: range | None = None,
    scratch_dir: str | None = None,
    only: str | None = None,
) -> Iterator[StateTable]:
    """The rows of some key groups, as any backend can be restored from them, a bounded number at a time.

    With `only` those of the state of that name.

    Only files that are needed for these key groups are fetched, into a folder of its own in `scratch_dir` (None: where
    temporary files go). Raises as `fetch_native`, CodecError for files of a newer tidegate, ConfigurationError for key
    groups that the job did not have.
    """
    need("a checkpoint with files of RocksDB", "rocksdb")
    # Imported late: few checkpoints have such files, and the library is large.
    from tidegate.storage.rocksdb.restore import clipped, stored_tables

    groups = clipped(native, key_groups)
    if not groups:
        return
    needed = [
        file for file in native.files if file.key_groups is None or key_groups_meet(range(*file.key_groups), groups)
    ]
    if scratch_dir is not None:
        with _used(scratch_dir):
            os.makedirs(scratch_dir, exist_ok=True)
    with _used(scratch_dir or tempfile.gettempdir()):
        folder = tempfile.mkdtemp(prefix="tidegate-", dir=scratch_dir)
    try:
        _fetch(store, needed, folder)
        yield from stored_tables(native, groups, folder, only)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _written(store: Store, dir_path: str, frozen: FrozenNative, base: NativeState | None) -> NativeState:
    known = {} if base is None else frozen.stored(base)
    files = []
    for name, key_groups in sorted(frozen.files().items()):
        with _used(frozen.folder):
            size_bytes = os.path.getsize(os.path.join(frozen.folder, name))
        before = known.get(name)
        if before is not None and before.size_bytes == size_bytes:
            files.append(replace(before, key_groups=key_groups))
            continue
        digest = xxhash.xxh3_64()
        path = f"{dir_path}/{name}"
        written_bytes = store.write(path, _digested(os.path.join(frozen.folder, name), digest))
        files.append(NativeFile(name, path, written_bytes, format_checksum(digest.intdigest()), key_groups))
    return NativeState(frozen.uid, frozen.backend, frozen.key_groups, frozen.description(), tuple(files))


def _digested(path: str, digest: xxhash.xxh3_64) -> Iterator[Buffer]:
    with _used(os.path.dirname(path)), open(path, "rb") as file:
        while part := file.read(_PART_BYTES):
            digest.update(part)
            yield part


def _fetch(store: Store, files: Iterable[NativeFile], folder: str) -> None:
    for file in files:
        if os.path.basename(file.name) != file.name or file.name in ("", ".", ".."):
            raise CorruptionError(f"{file.name!r} cannot be the name of a file of a state backend")
        target = os.path.join(folder, file.name)
        if not (file.name.endswith(_UNCHANGING_SUFFIX) and _linked(store, file, target)):
            _write_local(target, verified_native(store, file))


def _linked(store: Store, file: NativeFile, target: str) -> bool:
    """Whether there is a verified copy on this node that could be linked."""
    copy = store.local_file(file.path) if isinstance(store, LocalFirstStore) else None
    if copy is None:
        return False
    try:
        os.link(copy, target)
    except OSError:
        return False  # it is on another file system, or has just gone
    return True


def _write_local(target: str, parts: Iterator[Buffer]) -> None:
    with _used(os.path.dirname(target)), open(target, "xb", opener=open_private) as file:
        for part in parts:
            file.write(part)


@contextmanager
def _used(folder: str) -> Iterator[None]:
    """Faults of the local file system as StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot use the local folder {folder}: {error}. Free some space there, or set the folder of the state "
            "backend to one that can be written to"
        ) from error
