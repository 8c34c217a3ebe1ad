"""`Overlap`: what is written to a database after a freeze, while the files of the snapshot are still being made.

A freeze hands RocksDB's memory over, to be written to files, and processing goes on with new memory. When all that was
handed over is in files, these are linked. Rules:
- The new memory must not become a file before that, because the links must show the moment of the freeze. RocksDB makes
  one of memory that is full, so only some is written (`takes`); who has more waits until the files are linked.
- Entries are counted. If the new memory has fewer than were written since the freeze, RocksDB has made a file of some
  all the same. Then the snapshot fails (`is_whole`): it would not be wrong without a word.
"""

from __future__ import annotations

import threading

import rocksdict

from tidegate.storage.rocksdb.database import unlogged

_ACTIVE_BYTES = "rocksdb.cur-size-active-mem-table"
_ACTIVE_ENTRIES = "rocksdb.num-entries-active-mem-table"
_ENTRY_BYTES = 128
"""What an entry takes in memory beside its key and value, at most."""


class Overlap:
    """Writes to a database, and counts. Of the new memory `room_bytes` may be used before files are linked."""

    def __init__(self, database: rocksdict.Rdict, room_bytes: int) -> None:
        self._database = database
        self._room_bytes = room_bytes
        self._lock = threading.Lock()
        self._entries = 0

    def begin(self) -> None:
        """This is the moment: hand memory over, and begin with new memory."""
        with self._lock:
            self._database.flush(wait=False)
            self._entries = 0

    def takes(self, batch: rocksdict.WriteBatch) -> bool:
        """Whether these writes have room before the files are linked."""
        added_bytes = batch.size_in_bytes() + batch.len() * _ENTRY_BYTES
        return (self._database.property_int_value(_ACTIVE_BYTES) or 0) + added_bytes <= self._room_bytes

    def write(self, batch: rocksdict.WriteBatch) -> None:
        """Apply writes, all of them or none."""
        entries = batch.len()
        with self._lock:
            self._database.write(batch, unlogged())
            self._entries += entries

    @property
    def is_whole(self) -> bool:
        """Whether all that was written since the freeze is in memory alone. Any thread may ask."""
        with self._lock:
            return self._database.property_int_value(_ACTIVE_ENTRIES) == self._entries
