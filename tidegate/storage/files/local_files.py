"""`LocalFiles`: local files that are written atomically, and that survive a power cut once a call has returned.

A file is written under a temporary name in its own folder, synced, and then renamed (`write`) or hard-linked (`create`,
which the kernel refuses when the name is taken). Then the folder is synced, because the name of the file may otherwise
be missing after a power cut. The parents of new folders are synced for the same reason.

`write_synced` writes the bytes. They come in parts, some of only a few bytes. Rules:

- Parts are gathered and passed to the system together, `GATHERED_BYTES` or more at a time, without a copy. A file
  system stores large writes in large extents, and each system call has a cost.
- For a larger file, disk space is reserved ahead (`fallocate`), in steps that double. Unused space is returned at the
  end. Reservation is optional: where the system refuses it, the file grows as it is written.
- The disk starts with each `STEP_BYTES` as soon as they are written. It works while the rest is produced, and the final
  sync has little left to wait for. This is optional too: only the sync proves that the file is on the disk. A disk that
  fails early may report it only once, and not to the sync, so that early report is raised as an error.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from tidegate.storage.files.file_system import TEMPORARY_PREFIX, FileInfo
from tidegate.storage.files.store import Buffer

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType]


class LocalFiles:
    """Files of this machine, by absolute path. Implements `Files`."""

    repeats_requests = False

    def __init__(self, opener: Callable[[str, int], int] | None = None) -> None:
        """`opener` opens files for reading, as for the built-in `open`."""
        self._opener = opener

    def place(self, key: str) -> str:
        try:
            return f"device {os.stat(key).st_dev}"
        except OSError:
            return key

    def write(self, key: str, chunks: Iterable[Buffer]) -> int:
        temporary = _temporary_name(key)
        try:
            size_bytes = write_synced(temporary, chunks)
            os.replace(temporary, key)
        except BaseException:
            _unlink_if_there(temporary)
            raise
        _sync_folder(os.path.dirname(key))
        return size_bytes

    def create(self, key: str, data: Buffer) -> bool:
        temporary = _temporary_name(key)
        try:
            write_synced(temporary, (data,))
            try:
                os.link(temporary, key)
            except FileExistsError:
                return False
        finally:
            _unlink_if_there(temporary)
        _sync_folder(os.path.dirname(key))
        return True

    def read(self, key: str, offset: int, length: int | None) -> bytes:
        try:
            with open(key, "rb", buffering=0, opener=self._opener) as file:
                if offset:
                    file.seek(offset)
                return _read_all(file.fileno(), length)
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, "there is no such file", key) from error

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        try:
            with open(key, "rb", buffering=0, opener=self._opener) as file:
                file.seek(offset)
                data = _read_all(file.fileno(), length)
                # A writer into the file changes its time first, so data with an older time is whole.
                return data, _info(key, os.fstat(file.fileno()))
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, "there is no such file", key) from error

    def view(self, key: str, offset: int, length: int) -> memoryview:
        """Returns a range of a file, mapped into memory without a copy. The mapping ends with the last view of it.

        Truncating the file meanwhile kills this process. Use `view` only for files that are created, replaced and
        deleted, but never changed. Raises OSError.
        """
        with open(key, "rb", buffering=0, opener=self._opener) as file:
            end = min(offset + length, os.fstat(file.fileno()).st_size)
            if end <= offset:
                return memoryview(b"")
            begin = offset - offset % mmap.ALLOCATIONGRANULARITY
            mapped = mmap.mmap(file.fileno(), end - begin, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=begin)
        return memoryview(mapped)[offset - begin :]

    def exists(self, key: str) -> bool:
        return os.path.isfile(key)

    def list(self, key: str) -> list[str]:
        try:
            return [name for name in os.listdir(key) if not name.startswith(TEMPORARY_PREFIX)]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def delete(self, key: str) -> None:
        try:
            os.unlink(key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return

    def delete_all(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_tree(self, key: str) -> None:
        shutil.rmtree(key, onerror=_unless_gone)

    def delete_temporary(self, key: str) -> int:
        count = 0
        for folder, _, names in os.walk(key):
            for name in names:
                if name.startswith(TEMPORARY_PREFIX):
                    _unlink_if_there(os.path.join(folder, name))
                    count += 1
        return count

    def walk(self, key: str, *, follow_links: bool = False) -> Iterator[FileInfo]:
        yield from _walk(key, "", follow_links, ())

    def info(self, key: str) -> FileInfo:
        if not os.path.isfile(key):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key)
        return _info(key, os.stat(key))


def _info(path: str, status: os.stat_result) -> FileInfo:
    return FileInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)


def _walk(folder: str, below: str, follow_links: bool, above: tuple[tuple[int, int], ...]) -> Iterator[FileInfo]:
    """Yields the files at any depth of `folder`, with paths that begin with `below`.

    `above` has device and inode of the enclosing folders, to detect links that lead back to them.
    """
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        here = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    if (identity := (here.st_dev, here.st_ino)) in above:
        return
    for entry in entries:
        if entry.name.startswith(TEMPORARY_PREFIX):
            continue
        path = f"{below}{entry.name}"
        try:
            if entry.is_dir(follow_symlinks=follow_links):
                yield from _walk(entry.path, f"{path}/", follow_links, (*above, identity))
            # Opening a pipe or a socket would block forever.
            elif stat.S_ISREG((status := entry.stat()).st_mode):
                yield _info(path, status)
        except FileNotFoundError:
            continue


def _temporary_name(key: str) -> str:
    folder = os.path.dirname(key)
    _make_folder(folder)
    return os.path.join(folder, f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")


def _read_all(descriptor: int, length: int | None) -> bytes:
    """Returns `length` bytes from the current position, or all bytes up to the end of the file if `length` is None.

    Repeats `read` calls that return fewer bytes.
    """
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    wanted = max(0, os.fstat(descriptor).st_size - position)
    if length is not None:
        wanted = min(wanted, length)
    data = os.read(descriptor, wanted)
    if len(data) == wanted:
        return data
    parts = [data]
    wanted -= len(data)
    while wanted > 0 and (part := os.read(descriptor, wanted)):
        parts.append(part)
        wanted -= len(part)
    return b"".join(parts)


_unsynced: set[str] = set()
"""New folders whose names may be missing after a power cut, because a writer of this process has made them and their
parents are not synced yet. The sync may still run, or may have failed.
"""


def _make_folder(folder: str) -> None:
    """Makes a folder and its missing parents, and syncs their names. Syncs a name again if another writer has not."""
    if os.path.isdir(folder) and folder not in _unsynced:
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    # Added before the folder exists, so that a writer who finds the folder also finds it here.
    _unsynced.add(folder)
    try:
        os.mkdir(folder)
    except OSError:
        if not os.path.isdir(folder):
            _unsynced.discard(folder)
            raise
    _sync_folder(parent)
    _unsynced.discard(folder)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unless_gone(function: Callable[..., object], path: str, failure: _ExcInfo) -> None:
    """Handles an error of `shutil.rmtree`.

    Ignores it if another process has deleted the path already, else raises it.
    """
    if not isinstance(failure[1], FileNotFoundError | NotADirectoryError):
        raise failure[1]


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return


GATHERED_BYTES = 1 << 19
ROOM_BYTES_MIN = 1 << 22
ROOM_BYTES_MAX = 1 << 26
STEP_BYTES = 1 << 22
"""Number of bytes after which writing to the disk starts.

Steps are aligned, so that no page is written before it is full.
"""
PARTS_MAX = 512
"""Limit of buffers that are passed to the system in one `writev` call. The system accepts up to twice this number."""
_KEEP_SIZE = 1
"""A flag of `fallocate`: the size of the file does not change."""
_LOST = frozenset({errno.EIO, errno.ENOSPC, errno.EDQUOT})
"""Error numbers that mean lost data. Other errors mean that the system does not support the call for this file."""
_BEGIN_ONLY = 2
"""A flag of `sync_file_range`: start writing changed pages, without waiting."""


def write_synced(path: str, parts: Iterable[Buffer]) -> int:
    """Writes a new file and syncs it to the disk. Returns its size in bytes.

    Raises OSError if the file exists or the disk fails. After an error, a partial file may remain.
    """
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
    """Writes all bytes of `parts` to a file. Repeats the system call if it writes fewer bytes."""
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
    """Returns a function of the C library, or None if the library lacks it. File offsets have 64 bits."""
    found = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if found is not None:
        found.argtypes = arguments
    return found


_fallocate = _find("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
"""The `fallocate` of the C library. `os.posix_fallocate` would write zeros where a file system does not support it."""
_sync_file_range = _find("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def _make_room(descriptor: int, size_bytes: int) -> None:
    """Reserves disk space for the first `size_bytes` bytes of a file, if the system supports that."""
    if _fallocate is not None:
        _fallocate(descriptor, _KEEP_SIZE, 0, size_bytes)


def _begin_sync(descriptor: int, start: int, stop: int) -> None:
    """Starts writing the bytes from `start` to `stop` of a file to the disk.

    Raises OSError if the disk reports lost data.
    """
    if _sync_file_range is not None and _sync_file_range(descriptor, start, stop - start, _BEGIN_ONLY):
        code = ctypes.get_errno()
        if code in _LOST:
            raise OSError(code, os.strerror(code))
