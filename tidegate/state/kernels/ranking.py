"""Which rows of a batch win, compared with what is kept in the slots of their keys, in pages (`paged.py`).

Rules: rows are taken in order. What is compared are 64-bit words in which a smaller number is a smaller value (`order
words`). `fresh` has 1 for the first row of a key that had nothing kept: it wins, whatever the slot holds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, ask_ahead, load_value, store_value

Slots = NDArray[np.int32]
Flags = NDArray[np.uint8]
Words = NDArray[np.int64]

NO_WORDS: Words = np.zeros(0, dtype=np.int64)
NO_WORDS.flags.writeable = False


@kernel
def first_arrivals(times: Pages, slots: Slots, fresh: Flags, row_times: Words, ttl: int, wins: Flags) -> None:
    """Rows that are the first of their key, or at least `ttl` behind the last row that was; their times are kept."""
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
    """Rows whose word beats the one that is kept; the word is kept instead.

    With `flip` 0 smaller words win, with -1 greater ones; with `ties` also equal ones. Where `row_times` is not empty
    the time of the winner is kept as well, and a row at least `ttl` behind it wins too.
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
    """Note in `moments` the greatest time of each slot, in the order of the rows. `never`: a slot had no row yet.

    Set `begins[i]` if row i comes `ttl` or more after the moment of its slot: that forgets what came before it.
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
    """Of the rows that win, the last one of each slot, ascending."""
    rows = np.flatnonzero(wins).astype(np.int32)
    bits = max(4, int(2 * len(rows)).bit_length())
    kept = np.zeros(len(rows), dtype=np.uint8)
    _last_of_each(slots, rows, np.zeros(1 << bits, dtype=np.int32), 32 - bits, kept)
    return rows if kept.all() else rows[kept.view(np.bool_)]


@kernel
def _last_of_each(slots: Slots, rows: NDArray[np.int32], seen: NDArray[np.int32], shift: int, kept: Flags) -> None:
    """`seen` is a hash table of slots + 1, at most half full, with 2 ** (32 - shift) places."""
    mask = seen.shape[0] - 1
    for i in range(rows.shape[0] - 1, -1, -1):
        slot = slots[rows[i]]
        place = np.int64(((np.int64(slot) * 2654435769) & 0xFFFFFFFF) >> shift)
        while seen[place] != 0 and seen[place] != slot + 1:
            place = (place + 1) & mask
        if seen[place] == 0:
            seen[place] = slot + 1
            kept[i] = 1
