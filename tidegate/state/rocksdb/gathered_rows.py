"""`GatheredRows`: encoded rows on their way into the database, which come out in its order, some key groups at a time.

The head of each key is its key group, so rows of some groups come before those of the next ones. What is sorted and
laid out at a time stays in the cache, and no array is as large as all rows: memory that is new to a process is cleared
first, which took two fifths of a snapshot's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.kernels.sst_blocks import SLACK_BYTES
from tidegate.state.rocksdb.keys import order_of

_SLICE_BYTES = 2 * 1024 * 1024
"""About so much of keys and values comes out at a time, but always whole key groups."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some rows, at least one, and the order of their keys; without values, keys to be removed.

    Behind all keys, and behind all values, are `SLACK_BYTES` more.
    """

    keys: Strings
    values: Strings | None
    order: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows as they came. If they are sorted by key group, those of group `first + i` begin at `starts[i]`."""

    keys: Strings
    values: Strings | None
    first: int
    starts: Sequence[int]

    def range_of(self, first: int, stop: int) -> tuple[int, int]:
        """Where the rows of the groups from `first` to before `stop` begin and end."""
        last = len(self.starts) - 1
        return self.starts[min(max(first - self.first, 0), last)], self.starts[min(max(stop - self.first, 0), last)]


class GatheredRows:
    """Takes parts in, and gives slices out. Of all rows a key comes once."""

    def __init__(self) -> None:
        self.rows = 0
        self.size_bytes = 0
        """Of keys and values."""
        self._parts: list[_Part] = []
        self._by_group = True

    def add(self, keys: Strings, values: Strings | None, first_group: int, group_rows: Sequence[int]) -> None:
        """Add rows that are sorted by key group, as those of a `StateChunk`; with no `group_rows` in any order."""
        self._parts.append(_Part(keys, values, first_group, group_rows))
        self._by_group = self._by_group and len(group_rows) > 0
        self.rows += len(keys.offsets) - 1
        self.size_bytes += len(keys.data) + (0 if values is None else len(values.data))

    def slices(self) -> Iterator[Slice]:
        """All rows, in the order of the database. From the first one on, none is here."""
        parts, by_group, rows = self._parts, self._by_group, self.rows
        rows_min = max(1, rows * _SLICE_BYTES // max(1, self.size_bytes))
        self._parts, self._by_group, self.rows, self.size_bytes = [], True, 0, 0
        if not rows:
            return
        if not by_group:
            yield _slice([(part, 0, len(part.keys.offsets) - 1) for part in parts])
            return
        first = min(part.first for part in parts)
        counts = np.zeros(max(part.first + len(part.starts) - 1 for part in parts) - first, dtype=np.int64)
        for part in parts:
            counts[part.first - first : part.first - first + len(part.starts) - 1] += np.diff(part.starts)
        ends = np.cumsum(counts)
        group = done = 0
        while done < rows:
            stop = min(int(np.searchsorted(ends, done + rows_min)) + 1, len(ends))
            ranges = ((part, *part.range_of(first + group, first + stop)) for part in parts)
            yield _slice([(part, start, end) for part, start, end in ranges if start < end])
            group, done = stop, int(ends[stop - 1])


def _slice(ranges: Sequence[tuple[_Part, int, int]]) -> Slice:
    keys = _together([(part.keys, start, end) for part, start, end in ranges])
    values = [(part.values, start, end) for part, start, end in ranges if part.values is not None]
    return Slice(keys, _together(values) if values else None, order_of(keys))


def _together(ranges: Sequence[tuple[Strings, int, int]]) -> Strings:
    """Some rows each of columns without nulls."""
    bounds = [(int(strings.offsets[start]), int(strings.offsets[end])) for strings, start, end in ranges]
    data = np.empty(sum(stop - begin for begin, stop in bounds) + SLACK_BYTES, dtype=np.uint8)
    offsets = np.empty(sum(end - start for _, start, end in ranges) + 1, dtype=np.int64)
    offsets[0] = at = row = 0
    for (strings, start, end), (begin, stop) in zip(ranges, bounds, strict=True):
        data[at : at + stop - begin] = strings.data[begin:stop]
        np.add(strings.offsets[start + 1 : end + 1], at - begin, out=offsets[row + 1 : row + 1 + end - start])
        at, row = at + stop - begin, row + end - start
    return Strings(offsets, data, NO_MASK)
