"""Where the log of a source is: in the folder of the first job of its line; later jobs have a note in theirs.

Without the note a job could find the log only along the checkpoints that each job before it was restored from, and
these are deleted in time.
"""

from __future__ import annotations

from tidegate.storage.errors import AlreadyExistsError, NotFoundError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.files.store import Store

PLACE_PATH = "_log_at"


def remember_log(folder: str, url: str) -> None:
    """Leave a note in the folder of a job's source, unless that is where the log is."""
    store = open_store(folder)
    if store.url == url:
        return
    try:
        store.create(PLACE_PATH, url.encode())
    except AlreadyExistsError:
        return


def log_at(folder: str) -> Store:
    """The log of the job that has this folder for the source. There may be none."""
    store = open_store(folder)
    try:
        return open_store(store.read(PLACE_PATH).decode())
    except NotFoundError:
        return store
