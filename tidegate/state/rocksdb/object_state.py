"""Values, lists and maps of row-wise functions in RocksDB, and the removal of expired ones.

Rules:
- Within a batch each state has a working set. Reads use it, and `flush` writes its changes with one call and empties
  it.
- The first read of a value fetches the values of all keys of the batch.
- Each entry of a map is read and written individually.
- Values appended to a list become a separate entry. The rest of the list is neither read nor written.
- A sweep checks a bounded number of entries and writes once. It continues where the previous sweep ended, and starts
  over after the last key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.common.backend import StateDescriptor
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.frozen_rows import RocksChanges
from tidegate.state.rocksdb.keys import key_of_state, number_bytes
from tidegate.storage.state.rocksdb.database import fetch, reported
from tidegate.storage.state.rocksdb.keys import row_end
from tidegate.storage.state.rocksdb.value_layout import (
    HEAD,
    POSITION,
    RocksState,
    list_codec,
    map_key_codec,
    value_codec,
)

_ABSENT = object()
ENTRIES_MAX = 16_384
"""A sweep checks at most this many entries of one state, even if they belong to few keys."""


class RocksObjectState:
    """Base class of value, list and map states in RocksDB. The reference to a key (`ref`) is its database key with
    state number 0.
    """

    def __init__(self, session: RocksSession, spec: StateDescriptor, state: RocksState) -> None:
        self.spec = spec
        self.state = state
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The changed keys, if a changelog needs them."""
        self._session = session
        self._number = number_bytes(state.number)

    def flush(self, batch: rocksdict.WriteBatch) -> None:
        """Adds the changes of the current batch of keys to a write batch, and forgets them."""
        raise NotImplementedError

    def replace(self, batch: rocksdict.WriteBatch, ref: bytes, value: Any) -> None:
        """Adds the writes to `batch` that replace the state of a key by the stored value `value`. None removes the
        state.
        """
        raise NotImplementedError

    def swept(self, batch: rocksdict.WriteBatch, key: bytes, data: bytes) -> bool:
        """Adds the writes to `batch` that remove the expired part of one database entry. Returns whether there
        are any.
        """
        raise NotImplementedError

    def has(self, ref: bytes) -> bool:
        """Returns whether a key has this state. Raises StorageError."""
        prefix = self._key(ref)
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            cursor.seek(prefix)
            found = cursor.valid() and cursor.key().startswith(prefix)
            cursor.status()
        return found

    def _key(self, ref: bytes) -> bytes:
        return key_of_state(ref, self._number)

    def _entries(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        """Returns the database entries whose keys have this prefix, in order, as pairs of the remaining key and the
        value.
        """
        found = []
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            cursor.seek(prefix)
            while cursor.valid() and (key := cursor.key()).startswith(prefix):
                found.append((key[len(prefix) :], cursor.value()))
                cursor.next()
            cursor.status()
        return found

    def _delete_all(self, batch: rocksdict.WriteBatch, prefix: bytes) -> None:
        for rest, _ in self._entries(prefix):
            batch.delete(prefix + rest)


class RocksValues(RocksObjectState):
    """The `InternalValueState` of the RocksDB backend."""

    def __init__(self, session: RocksSession, spec: StateDescriptor, state: RocksState) -> None:
        super().__init__(session, spec, state)
        self._codec = value_codec(spec.column_type)
        self._fetched: dict[bytes, bytes | None] = {}
        self._values: dict[bytes, Any] = {}
        self._changed: dict[bytes, None] = {}

    def get(self, ref: bytes) -> Any:
        """Returns the value of a key, or None if it has none."""
        value = self._values.get(ref, _ABSENT)
        if value is _ABSENT:
            if ref not in self._fetched:
                self._fetch(ref)
            data = self._fetched[ref]
            value = self._values[ref] = None if data is None else self._codec.decode(data)
        return value

    def put(self, ref: bytes, value: Any) -> None:
        """Stores the value of a key."""
        self._values[ref] = value
        self._changed[ref] = None

    def remove(self, ref: bytes) -> None:
        """Removes the value of a key."""
        self.put(ref, None)

    def get_many(self, refs: NDArray[Any]) -> pa.Array:
        """Returns the values of these keys as an Arrow array. Values that are not in memory are read with one call."""
        wanted = refs.tolist()
        unknown = [ref for ref in dict.fromkeys(wanted) if ref not in self._values and ref not in self._fetched]
        if unknown:
            unknown.sort()  # adjacent keys share blocks, so sorted reads take half the time
            found = fetch(self._session.database, [self._key(ref) for ref in unknown], self._session.folder)
            self._fetched.update(zip(unknown, found, strict=True))
        return pa.array([self.get(ref) for ref in wanted], type=self.spec.column_type)

    def put_many(self, refs: NDArray[Any], values: pa.Array) -> None:
        """Stores a value for each key. Null removes the value."""
        changed = refs.tolist()
        self._values.update(zip(changed, values.to_pylist(), strict=True))
        self._changed.update(dict.fromkeys(changed))

    def remove_many(self, refs: NDArray[Any]) -> None:
        """Removes the values of these keys, if they have any."""
        removed = dict.fromkeys(refs.tolist())
        self._values.update(removed)
        self._changed.update(removed)

    def flush(self, batch: rocksdict.WriteBatch) -> None:
        for ref in self._changed:
            self.replace(batch, ref, self._values[ref])
        if self.changes is not None:
            self.changes.put(self._key(ref) for ref in self._changed if self._values[ref] is not None)
            self.changes.removed(self._key(ref) for ref in self._changed if self._values[ref] is None)
        self._fetched, self._values, self._changed = {}, {}, {}

    def replace(self, batch: rocksdict.WriteBatch, ref: bytes, value: Any) -> None:
        if value is None:
            batch.delete(self._key(ref))
        else:
            batch.put(self._key(ref), self._codec.encode(value))

    def swept(self, batch: rocksdict.WriteBatch, key: bytes, data: bytes) -> bool:
        assert self.spec.has_expired is not None
        expired = self.spec.has_expired(self._codec.decode(data))
        if expired:
            batch.delete(key)
        return expired

    def _fetch(self, ref: bytes) -> None:
        """Reads values from the database: at the first call for all keys of the batch, later for the key `ref`
        alone.
        """
        refs = self._session.batch_refs if not self._fetched else (ref,)
        if ref not in refs:
            refs = (*refs, ref)
        found = fetch(self._session.database, [self._key(known) for known in refs], self._session.folder)
        self._fetched.update(zip(refs, found, strict=True))


class RocksLists(RocksObjectState):
    """The `InternalListState` of the RocksDB backend."""

    def __init__(self, session: RocksSession, spec: StateDescriptor, state: RocksState) -> None:
        super().__init__(session, spec, state)
        self._codec = list_codec(spec.column_type.value_type)
        self._lists: dict[bytes, list[Any]] = {}
        """Complete lists of keys that were read or replaced."""
        self._added: dict[bytes, list[Any]] = {}
        self._replaced: dict[bytes, None] = {}

    def get(self, ref: bytes) -> Sequence[Any]:
        """Returns the elements of a key's list."""
        values = self._lists.get(ref)
        if values is None:
            values = self._lists[ref] = self._stored(ref)
            values.extend(self._added.get(ref, ()))
        return values

    def extend(self, ref: bytes, values: Sequence[Any]) -> None:
        """Appends elements to the list of a key."""
        self._added.setdefault(ref, []).extend(values)
        if ref in self._lists:
            self._lists[ref].extend(values)

    def put(self, ref: bytes, values: Sequence[Any]) -> None:
        """Replaces the list of a key."""
        self._replaced[ref] = None
        self._lists[ref] = list(values)
        self._added[ref] = list(values)

    def remove(self, ref: bytes) -> None:
        """Removes the list of a key."""
        self.put(ref, ())

    def flush(self, batch: rocksdict.WriteBatch) -> None:
        for ref in self._replaced:
            self._delete_all(batch, self._key(ref))
        for ref, values in self._added.items():
            self._append(batch, ref, values)
        if self.changes is not None:
            self.changes.put(self._key(ref) for ref in self._added)
            self.changes.removed(self._key(ref) for ref in self._replaced if not self._added[ref])
        self._lists, self._added, self._replaced = {}, {}, {}

    def replace(self, batch: rocksdict.WriteBatch, ref: bytes, value: Any) -> None:
        self._delete_all(batch, self._key(ref))
        self._append(batch, ref, value or ())

    def swept(self, batch: rocksdict.WriteBatch, key: bytes, data: bytes) -> bool:
        has_expired = self.spec.has_expired
        assert has_expired is not None
        values = self._codec.decode(data)
        kept = [value for value in values if not has_expired(value)]
        if not kept:
            batch.delete(key)
        elif len(kept) < len(values):
            batch.put(key, self._codec.encode(kept))
        return len(kept) < len(values)

    def _append(self, batch: rocksdict.WriteBatch, ref: bytes, values: Sequence[Any]) -> None:
        if values:
            batch.put(self._key(ref) + POSITION.pack(self._session.position), self._codec.encode(values))

    def _stored(self, ref: bytes) -> list[Any]:
        return [value for _, data in self._entries(self._key(ref)) for value in self._codec.decode(data)]


class RocksMaps(RocksObjectState):
    """The `InternalMapState` of the RocksDB backend.

    Entries are in the order of the bytes of their map keys, in which numbers and strings ascend.
    """

    def __init__(self, session: RocksSession, spec: StateDescriptor, state: RocksState) -> None:
        super().__init__(session, spec, state)
        self._keys = map_key_codec(spec.column_type.key_type)
        self._items = value_codec(spec.column_type.item_type)
        self._entries_of: dict[bytes, dict[bytes, tuple[Any, Any]]] = {}
        """Read or changed entries by key and encoded map key: the map key, and the value or None."""
        self._whole: set[bytes] = set()
        """Keys whose entries are all known."""
        self._cleared: dict[bytes, None] = {}
        self._changed: dict[bytes, dict[bytes, None]] = {}

    def get(self, ref: bytes, map_key: Any) -> Any:
        """Returns the value at a map key in the map of a key, or None if there is none."""
        encoded = self._keys.encode(map_key)
        entries = self._entries_of.setdefault(ref, {})
        entry = entries.get(encoded)
        if entry is None:
            data = None
            if ref not in self._whole:
                with reported("read RocksDB", self._session.folder):
                    data = self._session.database.get(self._key(ref) + encoded)
            entry = entries[encoded] = (map_key, None if data is None else self._items.decode(data))
        return entry[1]

    def put(self, ref: bytes, map_key: Any, value: Any) -> None:
        """Stores one entry in the map of a key."""
        encoded = self._keys.encode(map_key)
        self._entries_of.setdefault(ref, {})[encoded] = (map_key, value)
        self._changed.setdefault(ref, {})[encoded] = None

    def discard(self, ref: bytes, map_key: Any) -> None:
        """Removes one entry from the map of a key."""
        self.put(ref, map_key, None)

    def items(self, ref: bytes) -> Iterable[tuple[Any, Any]]:
        """Returns the entries of the map of a key."""
        entries = self._entries_of.setdefault(ref, {})
        if ref not in self._whole:
            for encoded, data in self._entries(self._key(ref)):
                if encoded not in entries:
                    entries[encoded] = (self._keys.decode(encoded), self._items.decode(data))
            self._whole.add(ref)
        return [entries[encoded] for encoded in sorted(entries) if entries[encoded][1] is not None]

    def remove(self, ref: bytes) -> None:
        """Removes the map of a key."""
        self._cleared[ref] = None
        self._changed.pop(ref, None)
        self._entries_of[ref] = {}
        self._whole.add(ref)

    def flush(self, batch: rocksdict.WriteBatch) -> None:
        for ref in self._cleared:
            self._delete_all(batch, self._key(ref))
        for ref, changed in self._changed.items():
            prefix, entries = self._key(ref), self._entries_of[ref]
            for encoded in changed:
                self._write(batch, prefix + encoded, entries[encoded][1])
        if self.changes is not None:
            self.changes.put(self._key(ref) for ref in self._changed)
            self.changes.removed(self._key(ref) for ref in (*self._cleared, *filter(self._lost, self._changed)))
        self._entries_of, self._whole, self._cleared, self._changed = {}, set(), {}, {}

    def replace(self, batch: rocksdict.WriteBatch, ref: bytes, value: Any) -> None:
        prefix = self._key(ref)
        self._delete_all(batch, prefix)
        for map_key, item in value or ():
            self._write(batch, prefix + self._keys.encode(map_key), item)

    def swept(self, batch: rocksdict.WriteBatch, key: bytes, data: bytes) -> bool:
        assert self.spec.has_expired is not None
        expired = self.spec.has_expired(self._items.decode(data))
        if expired:
            batch.delete(key)
        return expired

    def _lost(self, ref: bytes) -> bool:
        """Returns whether the current batch has removed an entry from the map of a key."""
        return any(self._entries_of[ref][encoded][1] is None for encoded in self._changed[ref])

    def _write(self, batch: rocksdict.WriteBatch, key: bytes, value: Any) -> None:
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, self._items.encode(value))


class RocksSweeper:
    """Removes expired state step by step. Stores, for each state, the key at which the next step begins."""

    def __init__(self, session: RocksSession) -> None:
        self._session = session
        self._starts: dict[int, bytes] = {}

    def sweep(self, states: Iterable[RocksObjectState], keys_max: int, batch: rocksdict.WriteBatch) -> None:
        """Adds the writes to `batch` that remove expired state of up to `keys_max` keys of each state. Raises
        StorageError.
        """
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for objects in states:
                number = objects.state.number
                start = self._starts.pop(number, HEAD.pack(self._session.key_groups.start, number))
                stop = self._swept(cursor, objects, start, keys_max, batch)
                if stop is not None:
                    self._starts[number] = stop
            cursor.status()

    def _swept(
        self,
        cursor: rocksdict.RdictIter,
        objects: RocksObjectState,
        start: bytes,
        keys_max: int,
        batch: rocksdict.WriteBatch,
    ) -> bytes | None:
        """Removes expired state of up to `keys_max` keys from the key `start` on.

        Returns the key at which the next sweep continues, or None after the last key.
        """
        wanted = objects.state.number
        end = row_end(self._session.key_schema)
        row, keys, entries = b"", 0, 0
        cursor.seek(start)
        while cursor.valid():
            key: bytes = cursor.key()
            group, number = HEAD.unpack_from(key)
            group += number > wanted
            if group >= self._session.key_groups.stop:
                return None  # entries after the key groups are not rows
            if number != wanted:
                cursor.seek(HEAD.pack(group, wanted))
                continue
            found = key[: end(key, HEAD.size)]
            if found != row:
                row, keys = found, keys + 1
            if keys > keys_max or entries == ENTRIES_MAX:
                return key
            if objects.swept(batch, key, cursor.value()) and objects.changes is not None:
                objects.changes.removed((row,))
            entries += 1
            cursor.next()
        return None
