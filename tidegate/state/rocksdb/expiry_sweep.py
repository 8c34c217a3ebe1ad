"""Removes expired state from RocksDB: each sweep looks at a few keys of every state with a time to live.

Rules: a sweep looks at a bounded number of entries and writes once. It goes on where the last one ended, and starts
over after the last key.
"""

from __future__ import annotations

from collections.abc import Iterable

import rocksdict

from tidegate.state.rocksdb.cells import RocksCells
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.storage.rocksdb.database import reported
from tidegate.storage.rocksdb.keys import row_end
from tidegate.storage.rocksdb.value_layout import HEAD

ENTRIES_MAX = 16_384
"""At most so many entries of one state in one sweep, even if they belong to few keys."""


class RocksSweeper:
    """Where the next sweep of each state begins."""

    def __init__(self, session: RocksSession) -> None:
        self._session = session
        self._starts: dict[int, bytes] = {}

    def sweep(self, states: Iterable[RocksCells], keys_max: int, batch: rocksdict.WriteBatch) -> None:
        """Add the writes that remove expired state of up to `keys_max` keys of each state. StorageError."""
        with reported("read RocksDB", self._session.folder):
            cursor = self._session.database.iter()
            for cells in states:
                number = cells.state.number
                start = self._starts.pop(number, HEAD.pack(self._session.key_groups.start, number))
                stop = self._swept(cursor, cells, start, keys_max, batch)
                if stop is not None:
                    self._starts[number] = stop
            cursor.status()

    def _swept(
        self, cursor: rocksdict.RdictIter, cells: RocksCells, start: bytes, keys_max: int, batch: rocksdict.WriteBatch
    ) -> bytes | None:
        """Sweep from a key on. Returns the key at which to go on, None after the last one."""
        wanted = cells.state.number
        end = row_end(self._session.key_schema)
        row, keys, entries = b"", 0, 0
        cursor.seek(start)
        while cursor.valid():
            key: bytes = cursor.key()
            group, number = HEAD.unpack_from(key)
            group += number > wanted
            if group >= self._session.key_groups.stop:
                return None  # what is stored behind the key groups is no row
            if number != wanted:
                cursor.seek(HEAD.pack(group, wanted))
                continue
            found = key[: end(key, HEAD.size)]
            if found != row:
                row, keys = found, keys + 1
            if keys > keys_max or entries == ENTRIES_MAX:
                return key
            if cells.swept(batch, key, cursor.value()) and cells.changes is not None:
                cells.changes.removed((row,))
            entries += 1
            cursor.next()
        return None
