"""Texts that nobody draws one by one: pools of random ones, of which a block of rows takes some that follow another.

Making random letters for each row would take longer than the queries. A pool is made once in a process, and rows of a
block refer to it without a copy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nexmark.workload import Bits, Numbers, Workload

_POOL = Workload(50, out_of_order=1, block=50)
"""Bits of pools are the same for all workloads."""
_LETTERS_AT_ONCE = 1 << 14


class TextPool:
    """Random texts with lengths from `shortest` to `longest`, of the letters a to z; every 13th may be `between`."""

    def __init__(self, texts: int, shortest: int, longest: int, draw: int, between: str | None = None) -> None:
        numbers = np.arange(texts, dtype=np.int64)
        lengths = shortest + (_POOL.bits(numbers, draw) % np.uint64(longest - shortest + 1)).astype(np.int64)
        self._ends = np.zeros(texts + 1, dtype=np.int32)
        np.cumsum(lengths, out=self._ends[1:])
        letters = _letters(int(self._ends[-1]), draw + 1, between)
        self._letters = pa.py_buffer(letters)

    def some(self, rows: int, start: int) -> pa.StringArray:
        """So many texts that follow another; where they begin is drawn from `start`."""
        first = start % (len(self._ends) - rows)
        ends = self._ends[first : first + rows + 1]
        begin, end = int(ends[0]), int(ends[-1])
        offsets = pa.py_buffer(ends - ends[0])
        return pa.StringArray.from_buffers(rows, offsets, self._letters.slice(begin, end - begin))


def _letters(count: int, draw: int, between: str | None) -> npt.NDArray[np.uint8]:
    """Some at a time: bits are eight times as large as letters, and stay in the caches of a processor."""
    letters = np.empty(count, dtype=np.uint8)
    for start in range(0, count, _LETTERS_AT_ONCE):
        part = letters[start : start + _LETTERS_AT_ONCE]
        bits = _POOL.bits(np.arange(start, start + len(part), dtype=np.int64), draw)
        part[:] = 97 + bits % np.uint64(26)
        if between is not None:
            part[(bits >> np.uint64(32)) % np.uint64(13) == 0] = ord(between)
    return letters


def picked(texts: pa.StringArray, places: Numbers | Bits) -> pa.StringArray:
    """A text for each row: that at its place."""
    return texts.take(pa.array(places.view(np.int64)))
