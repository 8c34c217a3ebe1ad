"""Folders that are used when none is named."""

from __future__ import annotations

import getpass
import os
import tempfile


def temporary_folder(purpose: str) -> str:
    """A folder of this user among the temporary files of a machine."""
    return os.path.join(tempfile.gettempdir(), f"tidegate-{getpass.getuser()}", purpose)
