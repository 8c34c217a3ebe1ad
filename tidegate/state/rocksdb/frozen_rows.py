"""`FrozenRows`: the rows of a state in RocksDB as they were when a snapshot was taken, for savepoints.

An iterator of RocksDB does not see anything that is written after its creation, so rows are read while processing goes
on. The iterators are made once the rows that were in memory are in the database (`unwritten.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import rocksdict

from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.folders import OwnedFolder
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.scan import scan_state
from tidegate.storage.rocksdb.value_layout import RocksDescription
from tidegate.storage.state.snapshot import StateChunk


class Cursors:
    """Iterators over the database as it is at one moment."""

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._number = number
        self._made: list[rocksdict.RdictIter | None] = []

    def make(self) -> None:
        """This is the moment. StorageError."""
        with reported("read RocksDB", self._session.folder):
            self._made = [self._session.database.iter() for _ in range(self._number)]

    def take(self, position: int) -> rocksdict.RdictIter:
        """One of them, once."""
        cursor, self._made[position] = self._made[position], None
        assert cursor is not None, "the rows of a snapshot are read once"
        return cursor


class FrozenRows:
    """A `FrozenState`: the rows of a state, the `position`th of the description. `ready` sees to the cursors."""

    removed = False
    kind = StateKind.KEYED

    def __init__(
        self,
        ready: Callable[[], None],
        cursors: Cursors,
        position: int,
        description: RocksDescription,
        session: RocksSession,
    ) -> None:
        assert session.owned_folder is not None, "a snapshot of a closed backend"
        self._source = description.states[position]
        self.state = self._source.name
        self._ready = ready
        self._cursors = cursors
        self._position = position
        self._held: OwnedFolder | None = session.owned_folder
        self._description = description
        self._key_groups = session.key_groups

    def chunks(self) -> Iterator[StateChunk]:
        """The rows, sorted by key group. Raises StorageError, CorruptionError."""
        folder, self._held = self._held, None
        assert folder is not None, "the rows of a snapshot are read once"
        self._ready()
        cursor = self._cursors.take(self._position)
        yield from scan_state(cursor, self._description, self._source, self._key_groups, folder.path)
