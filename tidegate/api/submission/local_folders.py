"""Chooses local folders: the defaults if the user names none, and tidegate's own folder inside one that is named."""

from __future__ import annotations

import os
import pwd
import tempfile

from tidegate.storage.errors import StorageError
from tidegate.storage.files.private_folders import make_private

CHECKPOINTS = "checkpoints"
"""What the folder for jobs without storage is called."""


def temporary_folder(purpose: str) -> str:
    """A folder of this user among the temporary files of a machine."""
    return os.path.join(tempfile.gettempdir(), f"tidegate-{_user_name()}", purpose)


def default_storage() -> str:
    """Where checkpoints are stored by default: a folder of this user among the temporary files of this machine.

    ConfigurationError if what is there is not this user's alone, StorageError if it cannot be made.
    """
    folder = temporary_folder(CHECKPOINTS)
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"cannot make {folder} for checkpoints: {error}; name a folder by `storage`") from error
    return folder


def own_folder(named: str | None, purpose: str) -> str:
    """The folder for a purpose: inside the one that the user has named, or among the temporary files.

    Old files in it are deleted. It is a folder of tidegate's own, so that nothing else is deleted that the user keeps
    in the named one: that may be checkpoints, in folders of the same names.
    """
    return temporary_folder(purpose) if named is None else os.path.join(named, f"tidegate-{purpose}")


def _user_name() -> str:
    """The user whose rights this process has, whatever environment variables say: that user must own the folder."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
