"""Folders of a database: its own, and those of its snapshots. Each is deleted when nobody wants it any more."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress

import rocksdict

from tidegate.storage.errors import StorageError
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.frozen import LiveFiles


class OwnedFolder:
    """A folder that is deleted when nobody holds this object any more: neither the database nor a snapshot in use.

    The database is closed first. An open one would try for a second to write to the deleted folder.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._databases: list[rocksdict.Rdict] = []
        weakref.finalize(self, _delete, path, self._databases)

    def has(self, database: rocksdict.Rdict) -> None:
        """This database is in the folder."""
        self._databases.append(database)


def _delete(path: str, databases: list[rocksdict.Rdict]) -> None:
    for database in databases:
        close_database(database, path)
    shutil.rmtree(path, ignore_errors=True)


def close_database(database: rocksdict.Rdict, folder: str) -> None:
    """Close it, whatever happens to what it has in memory."""
    with suppress(StorageError), reported("close RocksDB", folder):
        database.close()  # it writes its memory to disk first; if that fails, nobody needs it


class SnapshotLinks:
    """The folder of a snapshot, as long as somebody wants it."""

    def __init__(self, link: Callable[[], LiveFiles | None], target: str) -> None:
        self._link = link
        self._target = target
        self._wanted = True
        self.live_files: LiveFiles | None = None
        """Of what was linked, if `link` could tell."""

    def make(self) -> None:
        """Link the files. StorageError."""
        if self._wanted:
            self.live_files = self._link()
            if not self._wanted:  # it was given up meanwhile
                self.give_up()

    def give_up(self) -> None:
        """Delete the folder. Any thread may call it, at any time."""
        self._wanted = False
        shutil.rmtree(self._target, ignore_errors=True)
