"""Where the log of a source is: in the folder of the first job of the line. Later jobs have a note in theirs.

Without the note a job could find the log only through the checkpoints that earlier jobs were restored from, and these
are deleted in time.
"""

from __future__ import annotations

from tidegate.storage.errors import AlreadyExistsError, NotFoundError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store

PLACE_PATH = "_log_at"


def remember_log(folder: str, url: str) -> None:
    """Leave a note in the folder of a job's source, unless the log itself is there."""
    store = open_store(folder)
    if store.url == url:
        return
    try:
        store.create(PLACE_PATH, url.encode())
    except AlreadyExistsError:
        return


def log_at(folder: str) -> Store:
    """The store of the log, for a job whose source has this folder. It may have no log."""
    store = open_store(folder)
    try:
        return open_store(store.read(PLACE_PATH).decode())
    except NotFoundError:
        return store
