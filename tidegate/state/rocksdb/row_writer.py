"""`RowWriter`: many rows of one state on their way into the database, as an SST file or by write batches. Rules:

- Rows of a snapshot are gathered until they would fill three write buffers, which are half of the database's memory,
  and others until they would fill one. Files of a snapshot lie over those of the one before, each has keys of all key
  groups, and some of them start a compaction, however large they are: so there are few.
- Few rows go into RocksDB's memory, where those of several calls come together. So do more of them if they make room,
  until they are half a write buffer. Rows of a snapshot become a file in any case: it is made here, if nothing else
  waits in memory.
- Of all rows that one writer is given a key comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from tidegate.state.kernels.columns import Strings
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.gathered_rows import GatheredRows
from tidegate.state.rocksdb.keys import string_pieces
from tidegate.state.rocksdb.sst_file import sst_file

_SNAPSHOT_BUFFERS = 3
"""So many write buffers are one file of a snapshot at most."""
_BATCH_ROWS = 8_192
"""Rows that are written with one batch. They become Python values, so many at a time."""


class RowWriter:
    """Puts rows, or removes them. Who uses it sees to it that the database may be written to (`Unwritten`)."""

    def __init__(self, session: RocksSession, for_snapshot: bool) -> None:
        self._session = session
        self._for_snapshot = for_snapshot
        self._size_bytes_max = session.write_buffer_bytes * (_SNAPSHOT_BUFFERS if for_snapshot else 1)
        self._gathered = GatheredRows()

    def add(self, keys: Strings, values: Strings | None, first_group: int = 0, group_rows: Sequence[int] = ()) -> None:
        """Write rows under these database keys, soon: with `finish` at the latest. StorageError.

        One writer is given values each time, or never: then keys are removed. Rows that are sorted by key group say so,
        as a `StateChunk` does.
        """
        self._gathered.add(keys, values, first_group, group_rows)
        if self._gathered.size_bytes >= self._size_bytes_max:
            self.finish()

    def finish(self) -> None:
        """Write what was added. StorageError."""
        if not self._gathered.rows:
            return
        if self._makes_file:
            self._session.ingest(sst_file(self._gathered.slices(), self._session.block_bytes))
            return
        for some in self._gathered.slices():
            of_keys = string_pieces(some.keys, some.order, _BATCH_ROWS)
            of_values = repeat(None) if some.values is None else string_pieces(some.values, some.order, _BATCH_ROWS)
            for some_keys, some_values in zip(of_keys, of_values, strict=False):
                self._session.apply(some_keys, some_values)

    @property
    def _makes_file(self) -> bool:
        if self._gathered.rows < self._session.file_rows_min:
            return False
        fills = 2 * self._gathered.size_bytes >= self._session.write_buffer_bytes
        return fills or (self._for_snapshot and self._session.memory_is_empty)
