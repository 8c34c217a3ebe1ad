"""`LocalFiles`: local files that are never torn and that survive a power cut once a call has returned.

A file is written under a temporary name in its own folder, synced, and then renamed (`write`) or hard-linked
(`create`, which the kernel refuses when the name is taken); then the folder is synced, because a name that is
not on disk is a file that is not there. Folders that had to be made are synced into their parents for the
same reason.
"""

from __future__ import annotations

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
from tidegate.storage.files.synced_file import write_synced

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType]


class LocalFiles:
    """Files of this machine, by absolute path."""

    repeats_requests = False

    def __init__(self, opener: Callable[[str, int], int] | None = None) -> None:
        """`opener` opens what is read, as of the built-in `open`."""
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
            raise FileNotFoundError(error.errno, "no such file", key) from error

    def read_with_info(self, key: str, offset: int, length: int) -> tuple[bytes, FileInfo]:
        try:
            with open(key, "rb", buffering=0, opener=self._opener) as file:
                file.seek(offset)
                data = _read_all(file.fileno(), length)
                # Whoever writes into the file changes its time first: what was read before that is whole.
                return data, _info(key, os.fstat(file.fileno()))
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(error.errno, "no such file", key) from error

    def view(self, key: str, offset: int, length: int) -> memoryview:
        """A range of a file, mapped into memory: no byte is copied, and it is let go of with the last view of it.

        Whoever cuts the file meanwhile kills this process: for files that are only ever made, replaced and deleted.
        Raises OSError.
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
            raise FileNotFoundError(errno.ENOENT, "no such file", key)
        return _info(key, os.stat(key))


def _info(path: str, status: os.stat_result) -> FileInfo:
    return FileInfo(path, status.st_size, status.st_mtime_ns // 1_000_000)


def _walk(folder: str, below: str, follow_links: bool, above: tuple[tuple[int, int], ...]) -> Iterator[FileInfo]:
    """Files at any depth. `above`: device and inode of the folders around this one; no link leads back to them."""
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
            # Pipes and sockets are no files: whoever opened one would wait for ever.
            elif stat.S_ISREG((status := entry.stat()).st_mode):
                yield _info(path, status)
        except FileNotFoundError:
            continue


def _temporary_name(key: str) -> str:
    folder = os.path.dirname(key)
    _make_folder(folder)
    return os.path.join(folder, f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")


def _read_all(descriptor: int, length: int | None) -> bytes:
    """Read to the end or `length` bytes; one `read` may return less than it was asked for."""
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


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):
            raise
    _sync_folder(parent)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unless_gone(function: Callable[..., object], path: str, failure: _ExcInfo) -> None:
    """Go on with the rest of a tree where somebody else, who deletes it as well, was faster."""
    if not isinstance(failure[1], FileNotFoundError | NotADirectoryError):
        raise failure[1]


def _unlink_if_there(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
