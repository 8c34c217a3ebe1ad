"""Chooses one row for each slot: the first, the last, the least, the greatest, or the best within a time to live.

A choice has two steps, so that it works for columns of any number and type. A kernel processes the rows of a batch in
order and sets a flag where row i replaces the row of its slot. Then the caller stores the values of these rows
(`store_chosen`, or the last one of each slot by `last_of_each`). Accumulators of aggregates use the `choose_*` kernels.
Operators that rank whole rows use the remaining kernels. Rules:

- Rows where `mask` is 0 are skipped. With an empty `mask`, all rows count.
- `seen` (pages of uint8) stores which slots have a row. NaN is greater than any number.
- `fresh[i]` is 1 for the first row of a key that had no row. Such a row is always chosen, whatever the slot contains.
- Order words are int64 words in which a smaller number means a smaller value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Mask = NDArray[np.uint8]
Flags = NDArray[np.uint8]
Words = NDArray[np.int64]

NO_WORDS: Words = np.zeros(0, dtype=np.int64)
NO_WORDS.flags.writeable = False
_NO_ROWS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


@kernel
def choose_first(seen: Pages, slots: Slots, mask: Mask, chosen: Flags) -> None:
    """Flags the row that is the first of its slot, if the slot has no row yet. `seen` marks the slots with a row."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        if (not masked or mask[i]) and load_value(seen, slots[i], np.uint8(0)) == 0:
            store_value(seen, slots[i], np.uint8(1))
            chosen[i] = 1


@kernel
def choose_last(seen: Pages, slots: Slots, mask: Mask, chosen: Flags) -> None:
    """Flags every row, because each row replaces the previous row of its slot."""
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        if not masked or mask[i]:
            store_value(seen, slots[i], np.uint8(1))
            chosen[i] = 1


@kernel
def choose_extreme(
    seen: Pages, bests: Pages, slots: Slots, values: NDArray[Any], mask: Mask, chosen: Flags, greatest: bool, ties: bool
) -> None:
    """Flags rows whose value is less (or, with `greatest`, greater) than the best value of their slot so far.

    `bests` has the best value of each slot. With `ties`, equal values are flagged, too.
    """
    masked = mask.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(seen, slots, i, np.uint8(0))
        ask_ahead(bests, slots, i, values[i])
        if not masked or mask[i]:
            value, known = values[i], load_value(bests, slots[i], values[i])
            same = value == known or (value != value and known != known)
            less = value < known or (known != known and value == value)
            better = (not same and not less) if greatest else less
            if load_value(seen, slots[i], np.uint8(0)) == 0 or better or (ties and same):
                store_value(seen, slots[i], np.uint8(1))
                store_value(bests, slots[i], value)
                chosen[i] = 1


def store_chosen(pages: Pages, slots: Slots, values: NDArray[Any], chosen: Flags) -> None:
    """Stores the values of the chosen rows. If a slot has several chosen rows, the last value is stored.

    `values` have the type of the pages.
    """
    # Integers of each width suffice, because only bits are copied.
    _store(pages, slots, np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}"), chosen)


@kernel
def _store(pages: Pages, slots: Slots, values: NDArray[Any], chosen: Flags) -> None:
    for i in range(slots.shape[0]):
        ask_ahead(pages, slots, i, values[i])
        if chosen[i]:
            store_value(pages, slots[i], values[i])


def choose_strings(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    rows: NDArray[np.int64],
    groups: NDArray[np.int32],
    best: NDArray[np.int64],
    greatest: bool,
    mask: Mask = NO_MASK,
    after: NDArray[np.int64] = _NO_ROWS,
) -> None:
    """Sets `best[g]` to the index of the row of group g with the least or the greatest bytes. Of equal rows it is the
    first.

    - `rows`: the rows to compare. `groups` has the group of each of them.
    - `best`: the row that each group had before, -1 for none.
    - `after`: if given, `after[i]` is set to the best row of the group of row i among `rows[: i + 1]`.
    """
    _choose_strings(offsets, data, rows, groups, mask, best, after, greatest)


@kernel
def _choose_strings(
    offsets: NDArray[np.int64],
    data: NDArray[np.uint8],
    rows: NDArray[np.int64],
    groups: NDArray[np.int32],
    mask: Mask,
    best: NDArray[np.int64],
    after: NDArray[np.int64],
    greatest: bool,
) -> None:
    masked = mask.shape[0] > 0
    stored = after.shape[0] > 0
    for i in range(rows.shape[0]):
        row, known = rows[i], best[groups[i]]
        if not masked or mask[i]:
            if known < 0:
                known = row
            else:
                at, known_at = offsets[row], offsets[known]
                length, known_length = offsets[row + 1] - at, offsets[known + 1] - known_at
                order = length - known_length
                for j in range(min(length, known_length)):
                    if data[at + j] != data[known_at + j]:
                        order = np.int64(data[at + j]) - np.int64(data[known_at + j])
                        break
                if (order > 0) if greatest else (order < 0):
                    known = row
            best[groups[i]] = known
        if stored:
            after[i] = known


@kernel
def newest_chosen(
    groups: NDArray[np.int32], chosen: NDArray[np.uint8], newest: NDArray[np.int64], after: NDArray[np.int64]
) -> None:
    """Sets `after[i]` to the newest chosen row of the group of row i, up to row i itself.

    `newest` has the newest chosen row of each group before this batch, and is updated.
    """
    for i in range(groups.shape[0]):
        if chosen[i]:
            newest[groups[i]] = i
        after[i] = newest[groups[i]]


@kernel
def first_arrivals(times: Pages, slots: Slots, fresh: Flags, row_times: Words, ttl: int, wins: Flags) -> None:
    """Flags rows that are the first of their key, or at least `ttl` ms after the last flagged row of the key. Stores
    their times.
    """
    for i in range(slots.shape[0]):
        ask_ahead(times, slots, i, row_times[i])
        if fresh[i] or row_times[i] - load_value(times, slots[i], row_times[i]) >= ttl:
            store_value(times, slots[i], row_times[i])
            wins[i] = 1


@kernel
def better_rows(
    words: Pages,
    slots: Slots,
    fresh: Flags,
    row_words: Words,
    flip: int,
    ties: bool,
    times: Pages,
    row_times: Words,
    ttl: int,
    wins: Flags,
) -> None:
    """Flags rows whose order word is better than the stored word of their slot, and stores the better word.

    With `flip` 0 smaller words are better, with -1 greater words. With `ties`, equal words are flagged, too. If
    `row_times` is not empty, the time of the flagged row is stored as well, and a row that is at least `ttl` ms later
    than the stored time is also flagged.
    """
    timed = row_times.shape[0] > 0
    for i in range(slots.shape[0]):
        ask_ahead(words, slots, i, row_words[i])
        if timed:
            ask_ahead(times, slots, i, row_times[i])
        won = fresh[i] != 0
        if not won:
            kept, word = load_value(words, slots[i], row_words[i]) ^ flip, row_words[i] ^ flip
            won = word < kept or (ties and word == kept)
            if timed and not won:
                won = row_times[i] - load_value(times, slots[i], row_times[i]) >= ttl
        if won:
            store_value(words, slots[i], row_words[i])
            if timed:
                store_value(times, slots[i], row_times[i])
            wins[i] = 1


@kernel
def begin_lives(moments: Pages, slots: Slots, times: NDArray[np.int64], ttl: int, never: int, begins: Flags) -> None:
    """Stores the greatest time of each slot in `moments`, in the order of the rows. `never` marks slots without a row.

    Sets `begins[i]` if row i is at least `ttl` ms after the time of its slot, so that the earlier rows have expired.
    """
    for i in range(slots.shape[0]):
        ask_ahead(moments, slots, i, times[i])
        known = load_value(moments, slots[i], times[i])
        if known == never:
            store_value(moments, slots[i], times[i])
        elif times[i] - known >= ttl:
            begins[i] = 1
            store_value(moments, slots[i], times[i])
        elif times[i] > known:
            store_value(moments, slots[i], times[i])


def last_of_each(slots: Slots, wins: Flags) -> NDArray[np.int32]:
    """Returns the indices of the last flagged row of each slot, ascending."""
    rows = np.flatnonzero(wins).astype(np.int32)
    bits = max(4, int(2 * len(rows)).bit_length())
    kept = np.zeros(len(rows), dtype=np.uint8)
    _last_of_each(slots, rows, np.zeros(1 << bits, dtype=np.int32), 32 - bits, kept)
    return rows if kept.all() else rows[kept.view(np.bool_)]


@kernel
def _last_of_each(slots: Slots, rows: NDArray[np.int32], seen: NDArray[np.int32], shift: int, kept: Flags) -> None:
    """Sets `kept` to 1 for the last row of each slot.

    `seen` is a hash table of slots + 1, at most half full, with 2 ** (32 - shift) entries.
    """
    mask = seen.shape[0] - 1
    for i in range(rows.shape[0] - 1, -1, -1):
        slot = slots[rows[i]]
        place = np.int64(((np.int64(slot) * 2654435769) & 0xFFFFFFFF) >> shift)
        while seen[place] != 0 and seen[place] != slot + 1:
            place = (place + 1) & mask
        if seen[place] == 0:
            seen[place] = slot + 1
            kept[i] = 1
