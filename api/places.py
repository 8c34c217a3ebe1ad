"""Local folders: which are used when none is named, and which part of one that is named is tidegate's."""

from __future__ import annotations

import getpass
import os
import tempfile


def temporary_folder(purpose: str) -> str:
    """A folder of this user among the temporary files of a machine."""
    return os.path.join(tempfile.gettempdir(), f"tidegate-{getpass.getuser()}", purpose)


def own_folder(named: str | None, purpose: str) -> str:
    """The folder for a purpose: below the one that the user has named, or among the temporary files.

    What lies in it is deleted when it is old. What else the user keeps in the named folder (checkpoints, maybe, in
    folders that are called as these are) is none of that.
    """
    return temporary_folder(purpose) if named is None else os.path.join(named, f"tidegate-{purpose}")
