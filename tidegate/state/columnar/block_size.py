"""`BlockSize`: how many rows are put together into one batch, out of the columns of a key space.

Rules:

- A block has `BLOCK_ROWS` rows at most, and about `BLOCK_BYTES`. It is memory that comes to the state, and a column of
  strings takes 2 GiB at most: rows of some kilobytes are no rarity.
- What keys take is known of each of their chunks: large ones among many small ones make small blocks where they lie,
  and nowhere else. What values take is what the state says of them, or the block before, whichever is more.
- Where a state cannot say it (Python objects), the first block has few rows: each reader of a part of the key groups
  reads all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_columns import FrozenKeys
from tidegate.state.kernels.paged import PAGE_ROWS

BLOCK_ROWS = 16 * PAGE_ROWS
BLOCK_BYTES = 1 << 26
ROWS_AT_FIRST = 512


class BlockSize:
    """The blocks of one walk through a state. `value_bytes`: about what its values take in a row; None: unknown."""

    __slots__ = ("_key_bytes", "_keys", "_rows_max", "_value_bytes", "_value_bytes_min")

    def __init__(self, keys: FrozenKeys, value_bytes: int | None = 0) -> None:
        self._keys = keys
        self._key_bytes = keys.row_bytes()
        self._value_bytes = self._value_bytes_min = value_bytes or 0
        self._rows_max = ROWS_AT_FIRST if value_bytes is None else BLOCK_ROWS

    def rows(self, slots: NDArray[np.int32]) -> int:
        """How many of these slots, from the first one on, make a block: at least one, maybe more than there are."""
        if self._rows_max * (int(self._key_bytes.max(initial=0)) + self._value_bytes) <= BLOCK_BYTES:
            return self._rows_max
        ends = np.cumsum(self.bytes_of(slots[: self._rows_max]))
        rows = int(np.searchsorted(ends, BLOCK_BYTES, side="right"))
        if rows == len(ends):
            return self._rows_max
        return max(1, rows if rows < PAGE_ROWS else rows // PAGE_ROWS * PAGE_ROWS)

    def bytes_of(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """About how many bytes the row of each of these slots takes."""
        of_slots: NDArray[np.int64] = self._key_bytes[self._keys.chunks_of(slots)] + self._value_bytes
        return of_slots

    def learn(self, values: Sequence[pa.Array]) -> None:
        """A block, of at least one row, has these value columns."""
        if values:
            measured = sum(column.nbytes for column in values) // len(values[0])
            self._value_bytes = max(self._value_bytes_min, measured)
        self._rows_max = BLOCK_ROWS
