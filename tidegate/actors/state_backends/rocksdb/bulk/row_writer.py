"""`RowWriter`: many rows of one state on their way into the database, as an SST file or by write batches. Rules:

- Rows are gathered until they would fill a write buffer. So a file is as large as one that RocksDB makes of its memory.
- Few rows go into RocksDB's memory, where those of several calls come together. So do more of them if they make room,
  until they are half a write buffer. Rows of a snapshot become a file in any case: it is made here, if nothing else
  waits in memory.
- Of all rows that one writer is given a key comes once.
"""

from __future__ import annotations

from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import NO_MASK, Strings
from tidegate.actors.kernels.sst_blocks import SLACK_BYTES
from tidegate.actors.state_backends.rocksdb.bulk.sst_file import sst_file
from tidegate.actors.state_backends.rocksdb.database_session import RocksSession
from tidegate.actors.state_backends.rocksdb.keys import order_of, string_pieces

_BATCH_ROWS = 8_192
"""Rows that are written with one batch. They become Python values, so many at a time."""


class RowWriter:
    """Puts rows, or removes them. Who uses it sees to it that the database may be written to (`Unwritten`)."""

    def __init__(self, session: RocksSession, removes: bool, for_snapshot: bool) -> None:
        self._session = session
        self._removes = removes
        self._for_snapshot = for_snapshot
        self._keys: list[Strings] = []
        self._values: list[Strings] = []
        self._rows = 0
        self._size_bytes = 0

    def add(self, keys: Strings, values: Strings | None) -> None:
        """Write rows under these database keys, soon: with `finish` at the latest. StorageError."""
        self._keys.append(keys)
        self._rows += len(keys.offsets) - 1
        self._size_bytes += len(keys.data)
        if values is not None:
            self._values.append(values)
            self._size_bytes += len(values.data)
        if self._size_bytes >= self._session.write_buffer_bytes:
            self.finish()

    def finish(self) -> None:
        """Write what was added. StorageError."""
        if not self._rows:
            return
        keys, values = _together(self._keys), None if self._removes else _together(self._values)
        order = order_of(keys)
        if self._makes_file:
            self._session.ingest(sst_file(keys, values, order, self._session.block_bytes))
        else:
            of_keys = string_pieces(keys, order, _BATCH_ROWS)
            of_values = repeat(None) if values is None else string_pieces(values, order, _BATCH_ROWS)
            for some_keys, some_values in zip(of_keys, of_values, strict=False):
                self._session.apply(some_keys, some_values)
        self._keys, self._values, self._rows, self._size_bytes = [], [], 0, 0

    @property
    def _makes_file(self) -> bool:
        if self._rows < self._session.file_rows_min:
            return False
        fills = 2 * self._size_bytes >= self._session.write_buffer_bytes
        return fills or (self._for_snapshot and self._session.memory_is_empty)


def _together(parts: list[Strings]) -> Strings:
    """All strings of some columns without nulls, with the slack that an SST file needs."""
    sizes = [int(part.offsets[-1]) for part in parts]
    data = np.empty(sum(sizes) + SLACK_BYTES, dtype=np.uint8)
    offsets: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        data[at : at + size] = part.data[:size]
        offsets.append(part.offsets[1:] + at)
        at += size
    return Strings(np.concatenate(offsets), data, NO_MASK)
