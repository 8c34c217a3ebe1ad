"""Chooses local folders: which are used when none is named, and which part of one that is named is tidegate's."""

from __future__ import annotations

import os
import pwd
import tempfile

from tidegate.storage.errors import StorageError
from tidegate.storage.files.private_folders import make_private


def temporary_folder(purpose: str) -> str:
    """A folder of this user among the temporary files of a machine."""
    return os.path.join(tempfile.gettempdir(), f"tidegate-{_user_name()}", purpose)


def default_storage() -> str:
    """Where checkpoints rest when nobody says: a folder of this user among the temporary files of this machine.

    ConfigurationError if what is there is not this user's alone.
    """
    folder = temporary_folder("checkpoints")
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make {folder} for checkpoints: {error}; name a folder by `storage`") from error
    return folder


def own_folder(named: str | None, purpose: str) -> str:
    """The folder for a purpose: below the one that the user has named, or among the temporary files.

    What lies in it is deleted when it is old. What else the user keeps in the named folder (checkpoints, maybe, in
    folders that are called as these are) is none of that.
    """
    return temporary_folder(purpose) if named is None else os.path.join(named, f"tidegate-{purpose}")


def _user_name() -> str:
    """Of the user whose rights this process has, whatever the environment says: the folder must be that user's."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
