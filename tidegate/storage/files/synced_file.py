"""Writes one new file to the local disk, and returns when it is there: few large calls, and room asked for ahead.

What is written comes in parts, some of them of a few bytes. Rules:

- Parts are gathered and given to the system together, `GATHERED_BYTES` or more at a time, from where they lie. A file
  system keeps large writes in large pieces, and each call costs something for itself.
- A file that grows beyond that gets its room ahead, in steps that double. Then no call has to find a place for what it
  brings. What is left over is given back at the end. Room is a favour: where the system refuses, the file grows as it
  is written.
- The disk begins with each `STEP_BYTES` as soon as they are there, so that it works while the rest is still made, and
  the sync at the end has little to wait for. This is a favour too: the sync alone says that the file is on the disk. A
  disk that fails at once says so once, and perhaps not to the sync any more: that is an error then and there.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable

from tidegate.storage.files.store import Buffer

GATHERED_BYTES = 1 << 19
ROOM_BYTES_MIN = 1 << 22
ROOM_BYTES_MAX = 1 << 26
STEP_BYTES = 1 << 22
"""Steps are whole and aligned, so that no page is given to the disk before it is full."""
PARTS_MAX = 512
"""The system takes up to twice as many in one call."""
_KEEP_SIZE = 1
"""A flag of `fallocate`: the file does not become longer."""
_LOST = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""What is wrong if data is not on the disk. All else means that the system has no such call for this file."""
_BEGIN_ONLY = 2
"""A flag of `sync_file_range`: begin to write what has changed, and wait for nothing."""


def write_synced(path: str, parts: Iterable[Buffer]) -> int:
    """Write a file that must not be there yet, and sync it. Returns its bytes. OSError; what was written then stays."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        size_bytes = _write(descriptor, parts)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size_bytes


def _write(descriptor: int, parts: Iterable[Buffer]) -> int:
    written_bytes = room_bytes = gathered_bytes = begun_bytes = 0
    gathered: list[memoryview] = []
    for part in parts:
        view = memoryview(part)
        gathered.append(view)
        gathered_bytes += view.nbytes
        if gathered_bytes < GATHERED_BYTES and len(gathered) < PARTS_MAX:
            continue
        if written_bytes + gathered_bytes > room_bytes:
            more = min(max(ROOM_BYTES_MIN, written_bytes), ROOM_BYTES_MAX)
            room_bytes = written_bytes + max(more, gathered_bytes)
            _make_room(descriptor, room_bytes)
        _write_all(descriptor, gathered)
        written_bytes += gathered_bytes
        gathered, gathered_bytes = [], 0
        if (whole_bytes := written_bytes - written_bytes % STEP_BYTES) > begun_bytes:
            _begin_sync(descriptor, begun_bytes, whole_bytes)
            begun_bytes = whole_bytes
    _write_all(descriptor, gathered)
    written_bytes += gathered_bytes
    if room_bytes > written_bytes:
        os.ftruncate(descriptor, written_bytes)
    return written_bytes


def _write_all(descriptor: int, parts: list[memoryview]) -> None:
    """Write all bytes of some parts. The system may take fewer at a time."""
    left = [part.cast("B") for part in parts if part.nbytes]
    while left:
        taken = os.writev(descriptor, left)
        done = 0
        while done < len(left) and taken >= len(left[done]):
            taken -= len(left[done])
            done += 1
        left = left[done:]
        if taken:
            left[0] = left[0][taken:]


def _find(name: str, *arguments: type) -> Callable[..., int] | None:
    """A call of the system; None where it has no such thing. Files are as long as 64 bits can say."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = arguments
    return found


_fallocate = _find("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
"""The system's own. `os.posix_fallocate` writes zeros where a file system has no such thing."""
_sync_file_range = _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _make_room(descriptor: int, size_bytes: int) -> None:
    """Ask for room for so many bytes from the beginning on."""
    if _fallocate is not None:
        _fallocate(descriptor, _KEEP_SIZE, 0, size_bytes)


def _begin_sync(descriptor: int, start: int, stop: int) -> None:
    """Let the disk begin with a range of what was written. OSError if it cannot take that."""
    if _sync_file_range is not None and _sync_file_range(descriptor, start, stop - start, _BEGIN_ONLY):
        code = ctypes.get_errno()
        if code in _LOST:
            raise OSError(code, os.strerror(code))
