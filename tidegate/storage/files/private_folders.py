"""Makes, checks and clears local folders that are one user's alone, although others may write beside them.

State on the local disk may hold pickles, which run code when they are read, and what lies there is deleted without
asking. Another user of the machine who puts a link or a file of theirs in our way must gain nothing by it. Rules:

- A private folder is a real folder, belongs to this user, and nobody else may write to it. One that is anything else
  is refused, never mended: what lies in it may have been planted already. One that others may only read is closed.
- So is what leads to it, where everybody may put something there: in a folder such as `/tmp` only what is this user's
  (and closed to others) or root's is followed.
- What we make is for this user alone: folders 0700, files 0600. A file is never opened through a link.
- A deletion goes down from the private folder one real folder at a time, so a link is deleted and never followed.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.local_files import LocalFiles

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private(folder: str) -> None:
    """Make a private folder, and what leads to it, as far as they are missing.

    ConfigurationError if what is there is not this user's alone; OSError for faults of the disk.
    """
    _look_at(folder, make=True)


def is_private(folder: str) -> bool:
    """Whether a folder is there. Raises as `make_private` if it is not private."""
    try:
        _look_at(folder, make=False)
    except FileNotFoundError:
        return False
    return True


def make_inside(folder: str, relative: str) -> str:
    """Make a folder, and those between, in a private one; returns its path. OSError where a link is in the way."""
    with _opened(folder, ()) as descriptor:
        at = os.dup(descriptor)
        try:
            for part in _parts(relative):
                with suppress(FileExistsError):
                    os.mkdir(part, FOLDER_MODE, dir_fd=at)
                below = os.open(part, _OPEN_FOLDER, dir_fd=at)
                os.close(at)
                at = below
        finally:
            os.close(at)
    return os.path.join(folder, relative)


def list_inside(folder: str, relative: str = "") -> list[str]:
    """Sorted names in a folder in a private one. Empty if there is none, or if a link leads there."""
    try:
        with _opened(folder, _parts(relative)) as descriptor:
            return sorted(os.listdir(descriptor))
    except OSError:
        return []


def remove_inside(folder: str, relative: str) -> None:
    """Delete a file or a whole folder in a private one, as far as that can be done; links are not followed."""
    *above, name = _parts(relative)
    with suppress(OSError), _opened(folder, above) as descriptor:
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


def remove_if_empty(folder: str, relative: str) -> None:
    """Delete a folder in a private one if nothing is in it."""
    *above, name = _parts(relative)
    with suppress(OSError), _opened(folder, above) as descriptor:
        os.rmdir(name, dir_fd=descriptor)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: never through a link, and what is made is for this user alone."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


class PrivateStore(FileSystemStore):
    """A store for reading in a private folder: what is a link, or not this user's, cannot be read there."""

    @staticmethod
    def _open(url: str, options: dict[str, object]) -> tuple[str, str, LocalFiles]:
        folder = os.path.abspath(url)
        return folder, folder, LocalFiles(_open_own)

    def mapped(self, path: str, offset: int, length: int) -> memoryview:
        """A range of a file, mapped into memory, as of `LocalFiles.view`. StorageError."""
        files = self._files
        assert isinstance(files, LocalFiles)
        with self._reported("map", path):
            return files.view(self._key(path), offset, length)


def _open_own(path: str, flags: int) -> int:
    descriptor = open_private(path, flags)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EACCES, "the file belongs to another user", path)
    return descriptor


def _look_at(folder: str, make: bool) -> None:
    """Go down to a private folder and refuse what is not as it must be. FileNotFoundError unless it is to be made."""
    parts = _parts(os.path.abspath(folder))
    at = "/"
    for number, part in enumerate(parts, start=1):
        open_to_all = bool(os.stat(at).st_mode & stat.S_IWOTH)
        at = os.path.join(at, part)
        is_last = number == len(parts)
        status = _status_of(at, FOLDER_MODE if is_last or open_to_all else 0o777, make)
        is_roots = status.st_uid == 0 != os.geteuid()
        if is_last or (open_to_all and not is_roots):
            _refuse_others(at, status, folder)
        if is_last and stat.S_IMODE(status.st_mode) != FOLDER_MODE:
            os.chmod(at, FOLDER_MODE)


def _status_of(path: str, mode: int, make: bool) -> os.stat_result:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):  # somebody was faster: is it one of ours?
        os.mkdir(path, mode)
    return os.lstat(path)


def _refuse_others(path: str, status: os.stat_result, wanted: str) -> None:
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        what = "is a link"
        advice = "see who has put it there, and delete it"
    elif not stat.S_ISDIR(status.st_mode):
        what, advice = "is no folder", "delete it"
    elif status.st_uid != user:
        what = f"belongs to user {status.st_uid}, not to user {user} that runs this"
        advice = "have it deleted by its owner or an administrator"
    elif status.st_mode & _OTHERS_WRITE:
        what = f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        advice = "see that nobody else has put something in it, then `chmod go-w` it, or delete it"
    else:
        return
    raise ConfigurationError(
        f"the local folder {wanted} is not used, because {path} {what}, so that another user of this machine could "
        f"change or delete what rests there; {advice}, or name a folder of your own"
    )


@contextmanager
def _opened(folder: str, below: Sequence[str]) -> Iterator[int]:
    """A descriptor of a folder in a private one, reached through real folders only. OSError if it cannot be."""
    descriptor = os.open(folder, _OPEN_FOLDER)
    try:
        for part in below:
            following = os.open(part, _OPEN_FOLDER, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = following
        yield descriptor
    finally:
        os.close(descriptor)


def _parts(path: str) -> list[str]:
    parts = [part for part in path.split("/") if part]
    if {".", ".."} & set(parts):
        raise ConfigurationError(f"{path!r} leads out of its folder: name a path without '.' and '..'")
    return parts
