"""Rows of a state in RocksDB as of a snapshot: all rows, or the changes since a base.

A RocksDB iterator does not see later writes, so rows are read while processing continues. The iterators are made once
the cached rows are in the database (`PendingWrites`). `FrozenRows` serves savepoints. `RocksChanges` tracks the changed
keys of a state, for changelog segments (`FrozenChanges`). Rules:
- One collection has the keys that have changed since the last freeze. Keys with removals are stored separately. A
  freeze files the collection (`ChangeHistory`) and starts an empty one.
- Memory is bounded. Beyond `KEYS_MAX` keys of one state, the largest collection is moved into the database, after all
  key groups.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import rocksdict

from tidegate.state.columnar.change_tracking import ChangeHistory
from tidegate.state.rocksdb.database_session import OwnedFolder, RocksSession
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.rocksdb.database import reported
from tidegate.storage.state.rocksdb.scan import scan_keys, scan_state
from tidegate.storage.state.rocksdb.value_layout import HEAD, RocksDescription, RocksState
from tidegate.storage.state.snapshot import StateChunk

KEYS_MAX = 65_536
"""Number of keys of one state that stay in memory, in all its collections together."""
_NO_GROUP = 0xFFFF
"""The number that stands in place of a key group. No key group has this number, because there are 32,768 at most."""
_MARK = struct.Struct(">QB")
"""Follows the head of a mark: the number of the collection, and whether something was removed. Then the key."""
_Marks = list[tuple[rocksdict.RdictIter, bytes]]


class Cursors:
    """RocksDB iterators (cursors) that show the database as of one moment."""

    def __init__(self, session: RocksSession, number: int) -> None:
        self._session = session
        self._number = number
        self._made: list[rocksdict.RdictIter | None] = []

    def make(self) -> None:
        """Creates the cursors now, so that they show the present contents. Raises StorageError."""
        with reported("read RocksDB", self._session.folder):
            self._made = [self._session.database.iter() for _ in range(self._number)]

    def take(self, position: int) -> rocksdict.RdictIter:
        """Returns the cursor with the index `position`. Each can be requested once."""
        cursor, self._made[position] = self._made[position], None
        assert cursor is not None, "the rows of a snapshot are read once"
        return cursor


class FrozenRows:
    """A `FrozenState` that reads the rows of a state from the database.

    `position` is the index of the state in the description. `ready` creates the cursors.
    """

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
        """Yields the rows of the state, sorted by key group. Raises StorageError, CorruptionError."""
        folder, self._held = self._held, None
        assert folder is not None, "the rows of a snapshot are read once"
        self._ready()
        cursor = self._cursors.take(self._position)
        yield from scan_state(cursor, self._description, self._source, self._key_groups, folder.path)


@dataclass(slots=True, eq=False)
class _Collection:
    """The keys that have changed between two freezes."""

    number: int
    changed: set[bytes] = field(default_factory=set)
    """Keys with a put. They have a row, unless they are in `removed` too."""
    removed: set[bytes] = field(default_factory=set)
    """Keys with a removal. They may or may not have a row."""
    stored: tuple[int, ...] = ()
    """Numbers under which more of its keys are in the database."""

    @property
    def keys(self) -> int:
        return len(self.changed) + len(self.removed)

    def __bool__(self) -> bool:
        return bool(self.keys or self.stored)


class RocksChanges:
    """Records which keys of one state have changed. Keys are database keys, with the number of the state."""

    def __init__(self, session: RocksSession, state: RocksState) -> None:
        self._session = session
        self._state = state
        self._numbers = 0
        self._current = self._new()
        self._history: ChangeHistory[_Collection] = ChangeHistory(_union)

    def put(self, keys: Iterable[bytes]) -> None:
        """Records that the values of these keys were written. Raises StorageError."""
        self._current.changed.update(keys)
        self._keep_bound()

    def removed(self, keys: Iterable[bytes]) -> None:
        """Records that these keys were removed. They need not have had a row. Raises StorageError."""
        self._current.removed.update(keys)
        self._keep_bound()

    def freeze(
        self, checkpoint_id: CheckpointId, base: CheckpointId | None, description: RocksDescription
    ) -> list[FrozenChanges]:
        """Begins a new collection of changed keys. With a base, returns snapshots of the changed rows and of the
        removed keys since that checkpoint.

        Raises StorageError.
        """
        if base is not None:
            self._drop(base)
        self._history.file(checkpoint_id, self._current)
        self._current = self._new()
        return [] if base is None else self._frozen(description)

    def _frozen(self, description: RocksDescription) -> list[FrozenChanges]:
        collections = [collection for collection in self._history if collection]
        frozen = []
        if collections:
            frozen.append(FrozenChanges(self._session, description, self._state, collections, removed=False))
        if any(collection.removed or collection.stored for collection in collections):
            frozen.append(FrozenChanges(self._session, description, self._state, collections, removed=True))
        return frozen

    def _new(self) -> _Collection:
        self._numbers += 1
        return _Collection(self._numbers)

    def _keep_bound(self) -> None:
        """Moves the largest collection of changed keys to the database if there are too many keys in memory."""
        collections = (*self._history, self._current)
        if sum(collection.keys for collection in collections) > KEYS_MAX:
            self._store(max(collections, key=lambda collection: collection.keys))

    def _store(self, collection: _Collection) -> None:
        batch = rocksdict.WriteBatch(raw_mode=True)
        for keys, removed in ((collection.changed, False), (collection.removed, True)):
            prefix = _prefix(self._state, collection.number, removed)
            for key in keys:
                batch.put(prefix + key, b"")
        self._session.write(batch)
        # New sets, because a snapshot may still read the old ones.
        collection.changed, collection.removed = set(), set()
        collection.stored = tuple(dict.fromkeys((*collection.stored, collection.number)))

    def _drop(self, base: CheckpointId) -> None:
        dropped = self._history.drop(base)
        stored = (number for collection in dropped for number in collection.stored)
        self._session.remove_ranges(
            (_prefix(self._state, number, False), _prefix(self._state, number + 1, False)) for number in stored
        )


def _union(first: _Collection, second: _Collection) -> _Collection:
    """Returns a new collection with the keys of both. The two are not changed, because a snapshot may still read
    them.
    """
    changed, removed = first.changed | second.changed, first.removed | second.removed
    return _Collection(second.number, changed, removed, (*first.stored, *second.stored))


class FrozenChanges:
    """A `FrozenState` with the rows of changed keys, or with the keys that were removed."""

    kind = StateKind.KEYED

    def __init__(
        self,
        session: RocksSession,
        description: RocksDescription,
        source: RocksState,
        collections: Iterable[_Collection],
        removed: bool,
    ) -> None:
        assert session.owned_folder is not None, "a snapshot of a closed backend"
        self.state = source.name
        self.removed = removed
        self._description = description
        self._source = source
        kinds = (True,) if removed else (False, True)
        with reported("read RocksDB", session.folder):
            rows = session.database.iter()
            # One iterator for each part in the database, because the parts are merged.
            marks = [
                (session.database.iter(), _prefix(source, number, kind))
                for collection in collections
                for number in collection.stored
                for kind in kinds
            ]
        sets = [keys for c in collections for keys in ((c.removed,) if removed else (c.changed, c.removed))]
        self._held: tuple[OwnedFolder, rocksdict.RdictIter, _Marks, list[set[bytes]]] | None = (
            session.owned_folder,
            rows,
            marks,
            sets,
        )

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows of the state, sorted by key group. Raises StorageError, CorruptionError."""
        assert self._held is not None, "the rows of a snapshot are read once"
        (folder, rows, marks, sets), self._held = self._held, None
        parts: list[Iterable[bytes]] = [_marked(cursor, prefix, folder.path) for cursor, prefix in marks]
        keys = _distinct(heapq.merge(sorted(set().union(*sets)), *parts))
        yield from scan_keys(rows, self._description, self._source, keys, folder.path, missing=self.removed)


def _prefix(state: RocksState, number: int, removed: bool) -> bytes:
    """Returns the prefix of the database entries that store a collection of changed keys."""
    return HEAD.pack(_NO_GROUP, state.number) + _MARK.pack(number, removed)


def _marked(cursor: rocksdict.RdictIter, prefix: bytes, folder: str) -> Iterator[bytes]:
    head = len(prefix)
    with reported("read RocksDB", folder):
        cursor.seek(prefix)
        while cursor.valid() and (key := cursor.key()).startswith(prefix):
            yield key[head:]
            cursor.next()
        cursor.status()


def _distinct(keys: Iterable[bytes]) -> Iterator[bytes]:
    last = None
    for key in keys:
        if key != last:
            yield key
            last = key
