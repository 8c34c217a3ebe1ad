"""Verifies stored state: reads every byte and compares checksums, a bounded number of bytes at a time.

What is copied (to a savepoint, say) is copied from here: a file that is written from verified bytes never appears
unless it is whole, because `Store.write` fails with what is raised at their end.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from tidegate.storage.checkpoints.metadata import NativeFile, StateHandle
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.envelope import format_checksum
from tidegate.storage.files.file_system_store import join_url
from tidegate.storage.files.store import Buffer, Store
from tidegate.storage.state.directory import (
    DIGEST_BYTES,
    check_whole,
    encode_digest,
    read_directory,
    read_footer,
    read_range,
    where_of,
)

_PART_BYTES = 8 * 1024 * 1024


def verify_state(store: Store, handle: StateHandle) -> None:
    """Read all bytes of a handle and compare size, checksum and directory.

    Raises CorruptionError for any difference, NotFoundError if the file is gone.
    """
    for _ in verified_state(store, handle):
        pass
    if handle.path is None:
        check_whole(memoryview(handle.inline or b""), where_of(store, handle))
    else:
        read_footer(store, handle.path, handle.size_bytes)
    read_directory(store, handle)


def verify_native(store: Store, file: NativeFile) -> None:
    """Read all bytes of a file of a backend and compare size and checksum. Errors as of `verify_state`."""
    for _ in verified_native(store, file):
        pass


def verified_state(store: Store, handle: StateHandle, part_bytes: int = _PART_BYTES) -> Iterator[Buffer]:
    """All bytes of a handle, so many at a time, verified at the end. Raises CorruptionError, NotFoundError."""
    where = where_of(store, handle)
    covered_bytes = handle.size_bytes - DIGEST_BYTES
    digest = xxhash.xxh3_64()
    position = 0
    tail = b""
    for data in _parts(store, handle, where, part_bytes):
        digest.update(data[: max(0, covered_bytes - position)])
        position += len(data)
        tail = (tail + bytes(data[-DIGEST_BYTES:]))[-DIGEST_BYTES:]
        yield data
    _check_digest(digest.intdigest(), handle.checksum, where)
    if tail != encode_digest(digest.intdigest()):
        raise CorruptionError(f"{where} is damaged: its last bytes are not its checksum")


def verified_native(store: Store, file: NativeFile, part_bytes: int = _PART_BYTES) -> Iterator[Buffer]:
    """All bytes of a file of a backend, so many at a time, verified at the end.

    Its checksum is that of all its bytes.
    """
    where = join_url(store.url, file.path)
    digest = xxhash.xxh3_64()
    handle = StateHandle(file.path, None, file.size_bytes, file.checksum, ())
    for data in _parts(store, handle, where, part_bytes):
        digest.update(data)
        yield data
    _check_digest(digest.intdigest(), file.checksum, where)


def _parts(store: Store, handle: StateHandle, where: str, part_bytes: int) -> Iterator[memoryview]:
    """All bytes; CorruptionError if they are not as many as they should be."""
    position = 0
    # One byte more than there should be, to notice a file that has grown.
    while position <= handle.size_bytes:
        wanted = min(part_bytes, handle.size_bytes + 1 - position)
        data = memoryview(read_range(store, handle, position, wanted))
        position += len(data)
        yield data
        if len(data) < wanted:
            break
    if position != handle.size_bytes:
        raise CorruptionError(f"{where} is damaged: it should have {handle.size_bytes} bytes")


def _check_digest(digest: int, expected: str, where: str) -> None:
    found = format_checksum(digest)
    if found != expected:
        raise CorruptionError(f"{where} is damaged: its checksum is {found}, not {expected}")
