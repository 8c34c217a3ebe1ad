"""`RowIndex`: finds the rows of a key in memory. Made from the rows when it is first needed, and in no checkpoint.

It takes about 20 bytes a row, and as much a key beside the key's bytes. Keys that were asked for and have no rows stay
in it until there are more of them than rows; then it is made anew.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.paged import Pages
from tidegate.state.kernels.row_chains import END, collect, link, prune_and_count
from tidegate.state.key_index.hash_table import extended
from tidegate.state.key_index.key_index import KeyIndex

_KEYS_MIN = 65_536


class RowIndex:
    """The chains of rows of each key. `key_names` are the key columns."""

    __slots__ = ("_heads", "_keys", "_nexts", "_tails")

    def __init__(self, key_names: tuple[str, ...]) -> None:
        self._keys = KeyIndex(key_names)
        self._heads = np.full(1024, END, dtype=np.int32)
        self._tails = np.full(1024, END, dtype=np.int32)
        self._nexts = np.full(1024, END, dtype=np.int32)

    def is_worn(self, rows: int) -> bool:
        """Whether most of its keys have no rows, of so many rows in all."""
        return self._keys.size > _KEYS_MIN + 2 * rows

    def add(self, keys: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Rows have come, in these slots, which ascend."""
        numbers = self._keys.upsert(keys).slots
        self._grow(int(slots[-1]) + 1 if len(slots) else 0)
        link(self._heads, self._tails, self._nexts, numbers, slots)

    def find(self, keys: pa.RecordBatch, live: Pages) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Rows of keys, by the position of the key. `live` are the pages of flags of rows that are there."""
        upserted = self._keys.upsert(keys)
        self._grow(0)
        counts = np.zeros(keys.num_rows, dtype=np.int64)
        first = upserted.first_rows
        total = prune_and_count(self._heads, self._tails, self._nexts, live, upserted.slots, first, counts)
        positions, slots = np.empty(int(total), dtype=np.int64), np.empty(int(total), dtype=np.int32)
        collect(self._heads, self._nexts, upserted.slots, positions, slots)
        return positions, slots

    def _grow(self, slots: int) -> None:
        keys = self._keys.size
        if keys > len(self._heads):
            self._heads = _with_ends(self._heads, keys)
            self._tails = _with_ends(self._tails, keys)
        if slots > len(self._nexts):
            self._nexts = _with_ends(self._nexts, slots)


def _with_ends(values: NDArray[np.int32], needed: int) -> NDArray[np.int32]:
    used = len(values)
    larger = extended(values, used, max(needed, 2 * used))
    larger[used:] = END
    return larger
