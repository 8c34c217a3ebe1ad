"""Plain loops on one core that count and sum by key, for `keyed_rows.py`: what the machine and the work allow.

- **floor**: the same result from the same batches in turn, without a stream around it. Numbers: a hash table in numba,
  a key, its count and its sum in 24 bytes side by side, linear probing, doubled when it is half full. Words: polars.
- **polars**: one `group_by` over all rows at once; the time of all its threads counts.
- **arrays**: numbers that are the places of an array, so that there is no key to look for. Few programs have such.

All begin with nothing and see their keys for the first time, as the job does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numba
import numpy as np
import polars as pl
import pyarrow as pa
from rates import slope

Words = np.ndarray[tuple[int], np.dtype[np.int64]]
Table = np.ndarray[tuple[int, int], np.dtype[np.int64]]


def floors(
    batches: Callable[[int], Iterable[pa.RecordBatch]], rows: int, keys: int | None, words: bool
) -> dict[str, float]:
    """Rows a second of processor time. `batches(rows)` makes the batches anew; `keys`: 0 to `keys`, None: any."""
    grouped = _grouped(batches(rows), words)
    if words:
        return {"floor": grouped, "polars": grouped}
    found = {"floor": _rate(batches, rows, _HashTable()), "polars": grouped}
    return found if keys is None else {**found, "arrays": _rate(batches, rows, _Arrays(keys))}


def _rate(batches: Callable[[int], Iterable[pa.RecordBatch]], rows: int, add: Callable[[Words, Words], None]) -> float:
    add(np.zeros(0, np.int64), np.zeros(0, np.int64))  # compiled
    read, seen = 0, list[tuple[float, int]]()
    for batch in batches(rows):
        add(batch["key"].to_numpy(), batch["value"].to_numpy())
        read += batch.num_rows
        seen.append((time.process_time(), read))
    return slope(seen, rows)


def _grouped(batches: Iterable[pa.RecordBatch], words: bool) -> float:
    """All rows at once."""
    making = iter(batches)
    first = next(making)  # what they are made of is there
    started = time.process_time()
    rows = pl.DataFrame(pl.from_arrow(pa.Table.from_batches([first, *making])))
    sums = () if words else (pl.col("value").sum(),)
    rows.group_by("key").agg(pl.len(), *sums)
    return len(rows) / (time.process_time() - started)


class _Arrays:
    """Adds up at the place that the key is."""

    def __init__(self, keys: int) -> None:
        self._counts, self._totals = (np.zeros(keys, np.int64) for _ in range(2))

    def __call__(self, keys: Words, values: Words) -> None:
        _in_arrays(keys, values, self._counts, self._totals)


class _HashTable:
    """Adds up behind the key."""

    def __init__(self) -> None:
        self._table, self._used = np.zeros((1024, 3), np.int64), 0

    def __call__(self, keys: Words, values: Words) -> None:
        while 2 * (self._used + len(keys)) > len(self._table):
            larger = np.zeros((2 * len(self._table), 3), np.int64)
            _move(self._table, larger)
            self._table = larger
        self._used += _in_table(keys, values, self._table)


@numba.njit(cache=False)
def _in_arrays(keys: Words, values: Words, counts: Words, totals: Words) -> None:
    for row in range(len(keys)):
        counts[keys[row]] += 1
        totals[keys[row]] += values[row]


@numba.njit(cache=False)
def _home(key: np.int64, mask: int) -> np.int64:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(mask))


@numba.njit(cache=False)
def _in_table(keys: Words, values: Words, table: Table) -> int:
    mask, new = len(table) - 1, 0
    for row in range(len(keys)):
        place = _home(keys[row], mask)
        while table[place, 1] != 0 and table[place, 0] != keys[row]:
            place = (place + 1) & mask
        if table[place, 1] == 0:
            table[place, 0] = keys[row]
            new += 1
        table[place, 1] += 1
        table[place, 2] += values[row]
    return new


@numba.njit(cache=False)
def _move(old: Table, new: Table) -> None:
    mask = len(new) - 1
    for i in range(len(old)):
        if old[i, 1] != 0:
            place = _home(old[i, 0], mask)
            while new[place, 1] != 0:
                place = (place + 1) & mask
            new[place] = old[i]
