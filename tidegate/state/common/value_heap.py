"""`ValueHeap`: values of any Arrow type, appended and never changed, each under a number that is never used again.

The columns of vectorised states that are of no fixed width keep numbers in their pages, and their values here
(`varying_column.py`). Rules:

- A value never changes and its number never moves. So a page of numbers means the same for ever: snapshots, the undo
  log and new numbers of slots need nothing but the pages. To set a value is to append another one.
- Number 0 is null, and takes no room.
- Values lie in chunks, ascending by number. A snapshot holds the chunks that there were, and reads them on any thread.
- `collect` lets go of values that nobody refers to. It is due when the heap has grown to more than twice what was left
  of it the last time: so garbage is at most as large as what is alive and `GARBAGE_BYTES_MIN`, and a value is copied
  about as often as a key (`KeyColumns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import plain

GARBAGE_BYTES_MIN = 1 << 20
"""A heap that has grown by less than this is left alone."""
_CHUNK_BYTES_MAX = 1 << 26

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HeapChunk:
    """Neighbouring values that own their memory, and their numbers, ascending."""

    numbers: Numbers
    values: pa.Array
    size_bytes: int

    @staticmethod
    def of(numbers: Numbers, values: pa.Array) -> HeapChunk:
        """A chunk of values that are no slice."""
        return HeapChunk(numbers, values, values.nbytes + numbers.nbytes)

    def take(self, numbers: Numbers) -> pa.Array:
        """The values with these numbers, all of which it has."""
        first = self.numbers[0]
        if int(self.numbers[-1]) - int(first) == len(self.numbers) - 1:
            return self.values.take(pa.array(numbers - first))
        return self.values.take(pa.array(np.searchsorted(self.numbers, numbers)))

    def only(self, numbers: Numbers) -> HeapChunk | None:
        """What is left of it with these numbers alone, ascending; it need not have all of them. None: nothing."""
        first, last = np.searchsorted(numbers, [self.numbers[0], self.numbers[-1] + 1])
        places = np.flatnonzero(np.isin(self.numbers, numbers[first:last], assume_unique=True))
        if len(places) == len(self.numbers):
            return self
        return HeapChunk.of(self.numbers[places], self.values.take(pa.array(places))) if len(places) else None


HeapChunks = Sequence[HeapChunk]
"""Chunks, ascending."""


def values_of(chunks: HeapChunks, numbers: Numbers, data_type: pa.DataType) -> pa.Array:
    """The values with these numbers, in their order. Each number but 0 is one of the chunks'."""
    if not len(numbers):
        return pa.array([], data_type)
    firsts = np.array([0, *(chunk.numbers[0] for chunk in chunks)], dtype=np.int64)
    of_chunk = (np.searchsorted(firsts, numbers, side="right") - 1).astype(np.int16)
    if int(of_chunk[0]) > 0 and bool((of_chunk == of_chunk[0]).all()):
        return chunks[int(of_chunk[0]) - 1].take(numbers)
    order = np.argsort(of_chunk, kind="stable")  # a radix sort of 16-bit integers
    bounds = np.searchsorted(of_chunk[order], np.arange(len(firsts) + 1))
    parts = [pa.nulls(int(bounds[1]), data_type)]
    for chunk, start, stop in zip(chunks, bounds[1:-1], bounds[2:], strict=True):
        if stop > start:
            parts.append(chunk.take(numbers[order[start:stop]]))
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return pa.concat_arrays(parts).take(pa.array(ranks))


class ValueHeap:
    """The values of one column. One thread uses it; who has its `chunks` reads them on any."""

    __slots__ = ("_chunks", "_kept_bytes", "_next", "data_type", "size_bytes")

    def __init__(self, data_type: pa.DataType) -> None:
        self.data_type = data_type
        self.size_bytes = 0
        self._chunks: list[HeapChunk] = []
        self._next = 1
        self._kept_bytes = 0
        """How large it was when it was last collected."""

    @property
    def chunks(self) -> HeapChunks:
        """All values as they are now."""
        return tuple(self._chunks)

    @property
    def value_bytes(self) -> int:
        """About how many bytes a value takes."""
        values = sum(len(chunk.numbers) for chunk in self._chunks)
        return self.size_bytes // values if values else 0

    def append(self, values: pa.Array) -> Numbers:
        """Add values, and return the number of each; 0 for nulls."""
        values = plain(values)
        if values.type != self.data_type:
            values = values.cast(self.data_type)
        numbers = np.zeros(len(values), dtype=np.int64)
        # `take` also makes sure that they own their memory: a slice would keep its whole parent alive.
        valid = np.flatnonzero(values.is_valid().to_numpy(zero_copy_only=False))
        if not len(valid):
            return numbers
        found = np.arange(self._next, self._next + len(valid), dtype=np.int64)
        self._next += len(valid)
        numbers[valid] = found
        self._add(HeapChunk.of(found, values.take(pa.array(valid))))
        return numbers

    def take(self, numbers: Numbers) -> pa.Array:
        """The values with these numbers, null for 0."""
        return values_of(self._chunks, numbers, self.data_type)

    @property
    def is_due(self) -> bool:
        """Whether so much has come since the last time that `collect` pays."""
        return self.size_bytes > 2 * self._kept_bytes + GARBAGE_BYTES_MIN

    def collect(self, referred: Iterable[Numbers]) -> None:
        """Let go of all values but those with these numbers, which may come in any order, and several times."""
        alive = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *referred]))
        chunks, self._chunks, self.size_bytes = self._chunks, [], 0
        for chunk in chunks:
            left = chunk.only(alive)
            if left is not None:
                self._add(left)
        self._kept_bytes = self.size_bytes

    def clear(self) -> None:
        """Let go of all values."""
        self._chunks, self.size_bytes, self._kept_bytes = [], 0, 0

    def _add(self, chunk: HeapChunk) -> None:
        """Neighbours are put together unless the former is at least twice as long, or they would become too large."""
        self._chunks.append(chunk)
        self.size_bytes += chunk.size_bytes
        while len(self._chunks) > 1 and _is_joinable(*self._chunks[-2:]):
            latter, former = self._chunks.pop(), self._chunks.pop()
            joined = HeapChunk.of(
                np.concatenate((former.numbers, latter.numbers)), pa.concat_arrays([former.values, latter.values])
            )
            self._chunks.append(joined)
            self.size_bytes += joined.size_bytes - former.size_bytes - latter.size_bytes


def _is_joinable(former: HeapChunk, latter: HeapChunk) -> bool:
    if former.size_bytes + latter.size_bytes > _CHUNK_BYTES_MAX:
        return False
    return len(former.numbers) < 2 * len(latter.numbers)
