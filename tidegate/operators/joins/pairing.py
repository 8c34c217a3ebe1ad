"""Which rows of two tables belong together: positions of pairs, and of rows without a partner. Vectorised.

The keys of both sides are numbered by one index; the rows of each key then stand behind one another, and each left row
is repeated for those of its key on the right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.key_index.key_index import KeyIndex

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Rows of the right side by key: those of left row i are `order[starts[i]:starts[i] + counts[i]]`.

    `lonely` are rows of the right side that no left row has.
    """

    order: Positions
    starts: Positions
    counts: Positions
    lonely: Positions

    def pairs(self, rows_max: int) -> Iterator[tuple[Positions, Positions]]:
        """Positions of pairs, left and right, in order of the left rows, at most about so many at a time.

        The partners of one left row may be in several pieces.
        """
        ends = np.cumsum(self.counts)
        total = int(ends[-1]) if len(ends) else 0
        if total <= rows_max:
            left = np.repeat(np.arange(len(ends), dtype=np.int64), self.counts)
            if total:
                yield left, self.order[self.starts[left] + _within(self.counts, ends)]
            return
        for start in range(0, total, rows_max):
            numbers = np.arange(start, min(start + rows_max, total), dtype=np.int64)
            left = np.searchsorted(ends, numbers, side="right")
            within = numbers - (ends[left] - self.counts[left])
            yield left, self.order[self.starts[left] + within]


def _within(counts: Positions, ends: Positions) -> Positions:
    """For each pair, which of the partners of its left row it has."""
    within: Positions = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - counts, counts)
    return within


def paired(left: pa.RecordBatch, right: pa.RecordBatch, keys: Sequence[str]) -> Pairing:
    """Pair the rows of two batches of columns (same names and types). A null in one of `keys` has no partner."""
    index = KeyIndex(tuple(left.schema.names))
    of_left = index.upsert(left).slots
    of_right = index.upsert(right).slots
    numbers = index.size
    matching = without_nulls(right.select(list(keys)))
    order = np.argsort(of_right, kind="stable")
    order = order[matching[order]].astype(np.int64)
    per_key = np.bincount(of_right[order], minlength=numbers)
    starts = np.concatenate(([0], np.cumsum(per_key)))[:-1]
    met = np.zeros(numbers, dtype=np.bool_)
    met[of_left] = True
    lonely = np.flatnonzero(~(met[of_right] & matching))
    return Pairing(order, starts[of_left], per_key[of_left].astype(np.int64), lonely)


def without_nulls(keys: pa.RecordBatch) -> NDArray[np.bool_]:
    """Rows without any null."""
    whole = np.ones(keys.num_rows, dtype=np.bool_)
    for column in keys.columns:
        if column.null_count:
            whole &= column.is_valid().to_numpy(zero_copy_only=False)
    return whole
