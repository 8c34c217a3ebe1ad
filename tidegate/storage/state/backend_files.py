"""Writes a state backend's own files (RocksDB's) into checkpoints, and fetches them back onto the local disk.

Rules:

- A file that an earlier checkpoint (the base) has stored is referred to, and not written again.
- Every file has a checksum of all its bytes, which is compared when the file is fetched.
- Local folders are deleted on success and on failure.
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
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.extras import need
from tidegate.storage.files.envelope import format_checksum
from tidegate.storage.files.private_folders import FOLDER_MODE, open_private
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.state.key_groups import key_groups_meet
from tidegate.storage.state.local_copies import LocalFirstStore
from tidegate.storage.state.snapshot import FrozenNative, StateTable
from tidegate.storage.state.state_file import verified_native

DESCRIPTION_NAME = "TIDEGATE"
"""Name of a file that `fetch_native` writes last into a folder, when all files are there.

It has the backend's description of the files.
"""

_UNCHANGING_SUFFIX = ".sst"
"""Suffix of RocksDB files that are never changed after they were written, so that they can be linked instead of
copied.
"""

_PART_BYTES = 1024 * 1024
"""Number of bytes that are copied at a time.

It is below the size from which glibc's malloc maps new memory, which the kernel would have to clear each time.
"""


def write_native(store: Store, dir_path: str, frozen: FrozenNative, base: NativeState | None) -> NativeState:
    """Uploads the files of a backend snapshot to the folder `dir_path`, except files that `base` has, and deletes the
    local folder.

    Returns the description of the state. Raises StorageError. Some files may be stored then.
    """
    try:
        return _written(store, dir_path, frozen, base)
    finally:
        frozen.release()


def fetch_native(store: Store, native: NativeState, folder: str) -> None:
    """Downloads all files of a backend's state into a local folder that the backend can open. Old files in the folder
    are deleted.

    An immutable file with a copy on this node is hard-linked. Raises CorruptionError, NotFoundError, or StorageError if
    the local folder cannot be used.
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
    """Returns an empty table with the right columns for each state in a backend's files.

    Raises CodecError, CorruptionError.
    """
    need("a checkpoint with files of RocksDB", "rocksdb")
    from tidegate.storage.state.rocksdb.scan import empty_tables

    return empty_tables(native)


def read_native(
    store: Store,
    native: NativeState,
    key_groups: range | None = None,
    scratch_dir: str | None = None,
    only: str | None = None,
) -> Iterator[StateTable]:
    """Yields the stored rows of some key groups (None: all) in batches of bounded size, in a form for any backend.

    `only` selects the state of that name. Only files that these key groups need are fetched, into a new folder in
    `scratch_dir` (None: the system's temporary folder). Raises as `fetch_native` does, CodecError for files of a newer
    tidegate, and ConfigurationError for key groups that the job did not have.
    """
    need("a checkpoint with files of RocksDB", "rocksdb")
    # Imported late: few checkpoints have such files, and the library is large.
    from tidegate.storage.state.rocksdb.scan import clipped, stored_tables

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
            raise CorruptionError(
                f"{store.url}: {file.name!r} cannot name a file of a state backend; the checkpoint's metadata is "
                "damaged. Restore another checkpoint"
            )
        target = os.path.join(folder, file.name)
        if not (file.name.endswith(_UNCHANGING_SUFFIX) and _linked(store, file, target)):
            _write_local(target, verified_native(store, file))


def _linked(store: Store, file: NativeFile, target: str) -> bool:
    """Hard-links the verified local copy of a file to the path `target`. Returns False if there is no copy, or if
    linking fails.
    """
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
    """Returns a context that converts errors of the local file system to StorageError."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot use the local folder {folder}: {error}. Free some space there, or set the folder of the state "
            "backend to a writable one"
        ) from error
