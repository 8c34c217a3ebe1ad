"""Creates, checks and clears private local folders: folders that only one user of the machine can change.

State on the local disk may hold pickles, which run code when they are read, and files in the folders are deleted
without confirmation. Another user of the machine must not be able to plant a file or a link there. Rules:

- A private folder is a real folder, belongs to this user, and no other user may write to it. Any other folder is
  refused, never repaired: its files may have been planted already. Read access of others is removed.
- The folders above it are checked the same way where all users may write: in a folder such as `/tmp` only folders of
  this user (and closed to others) or of root are followed.
- New folders have mode 0700 and new files 0600. A file is never opened through a link.
- A deletion descends from the private folder one real folder at a time, so a link is deleted and never followed.
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
    """Creates a private folder, and missing folders above it.

    Raises ConfigurationError if other users can change an existing folder on the path, OSError for faults of the disk.
    """
    _look_at(folder, make=True)


def is_private(folder: str) -> bool:
    """Returns whether the folder exists.

    Raises ConfigurationError if other users can change it, OSError for faults of the disk.
    """
    try:
        _look_at(folder, make=False)
    except FileNotFoundError:
        return False
    return True


def make_inside(folder: str, relative: str) -> str:
    """Creates the folder `relative` below the private folder `folder`, and returns its path.

    Raises OSError for a link on the way.
    """
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
    """Returns the sorted names in the folder `relative` below a private folder.

    Empty if the folder is missing or is reached through a link.
    """
    try:
        with _opened(folder, _parts(relative)) as descriptor:
            return sorted(os.listdir(descriptor))
    except OSError:
        return []


def remove_inside(folder: str, relative: str) -> None:
    """Deletes the file or the folder `relative` below a private folder. Ignores failures. Does not follow links."""
    *above, name = _parts(relative)
    with suppress(OSError), _opened(folder, above) as descriptor:
        if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        else:
            os.unlink(name, dir_fd=descriptor)


def remove_if_empty(folder: str, relative: str) -> None:
    """Deletes the folder `relative` below a private folder if it is empty. Ignores failures."""
    *above, name = _parts(relative)
    with suppress(OSError), _opened(folder, above) as descriptor:
        os.rmdir(name, dir_fd=descriptor)


def open_private(path: str, flags: int) -> int:
    """Opens a file, as the `opener` of the built-in `open`.

    Refuses links, and creates files that only this user can read.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)


class PrivateStore(FileSystemStore):
    """A read-only `Store` over a folder that belongs to one user. It refuses links, and files of other users."""

    @staticmethod
    def _open(url: str, options: dict[str, object]) -> tuple[str, str, LocalFiles]:
        folder = os.path.abspath(url)
        return folder, folder, LocalFiles(_open_own)

    def mapped(self, path: str, offset: int, length: int) -> memoryview:
        """Returns a range of a file, mapped into memory without a copy (see `LocalFiles.view`). Raises StorageError."""
        files = self._files
        assert isinstance(files, LocalFiles)
        with self._reported("map", path):
            return files.view(self._key(path), offset, length)


def _open_own(path: str, flags: int) -> int:
    descriptor = open_private(path, flags)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(
            errno.EACCES, "the file belongs to another user; remove it, or name a folder of your own", path
        )
    return descriptor


def _look_at(folder: str, make: bool) -> None:
    """Checks a private folder and the folders above it, and raises ConfigurationError for a folder that breaks the
    rules.

    With `make`, missing folders are created. Otherwise a missing folder raises FileNotFoundError.
    """
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
    with suppress(FileExistsError):  # another process was faster; the caller checks the owner
        os.mkdir(path, mode)
    return os.lstat(path)


def _refuse_others(path: str, status: os.stat_result, wanted: str) -> None:
    user = os.geteuid()
    if stat.S_ISLNK(status.st_mode):
        what = "is a link"
        advice = "find out who has put it there, and delete it"
    elif not stat.S_ISDIR(status.st_mode):
        what = "is not a folder"
        advice = "delete it"
    elif status.st_uid != user:
        what = f"belongs to user {status.st_uid}, not to user {user} that runs this"
        advice = "have it deleted by its owner or an administrator"
    elif status.st_mode & _OTHERS_WRITE:
        what = f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        advice = "check that its files are your own, then `chmod go-w` it, or delete it"
    else:
        return
    raise ConfigurationError(
        f"the local folder {wanted} is not used, because {path} {what}, so that another user of this machine could "
        f"change or delete its files; {advice}, or name a folder of your own"
    )


@contextmanager
def _opened(folder: str, below: Sequence[str]) -> Iterator[int]:
    """Returns a context with a file descriptor of the folder `below` a private folder, opened through real folders
    only.

    Raises OSError, e.g. for a link.
    """
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
        raise ConfigurationError(f"{path!r} leads out of its folder: give a path without '.' and '..'")
    return parts
