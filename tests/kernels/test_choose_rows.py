"""Winners of a batch equal those of a loop in plain Python."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn
from tidegate.state.kernels import ranking
from tidegate.state.kernels.paged import NO_PAGES, PAGE_ROWS

_FIRST = PAGE_ROWS - 2
"""The last slots of one page and the first of the next."""
_EDGES = st.sampled_from([-(2**63), 2**63 - 1]) | st.integers(-3, 3)
_ROWS = st.lists(st.tuples(st.integers(0, 4), _EDGES, st.integers(0, 30)), max_size=30)


def _column() -> PagedColumn:
    column = PagedColumn(ValueSpec("x", pa.int64(), 0))
    column.grow(2)
    return column


def _read_only(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array


@settings(max_examples=80, deadline=None)
@given(_ROWS, st.booleans(), st.booleans(), st.sampled_from([None, 10]))
def test_better_rows(rows: list[tuple[int, int, int]], greatest: bool, ties: bool, ttl: int | None) -> None:
    """The first row of a slot wins, then each that is better, or equal with ties, or late enough."""
    slots = np.array([slot for slot, _, _ in rows], dtype=np.int32) + np.int32(_FIRST)
    kept: dict[int, tuple[int, int]] = {}
    expected, fresh = [], np.zeros(len(rows), dtype=np.uint8)
    for number, (slot, word, time) in enumerate(rows):
        before = kept.get(slot)
        fresh[number] = before is None
        better = before is not None and (word > before[0] if greatest else word < before[0])
        late = before is not None and ttl is not None and time - before[1] >= ttl
        if before is None or better or (ties and word == before[0]) or late:
            kept[slot] = (word, time)
            expected.append(number)
    words, times, wins = _column(), _column(), np.zeros(len(rows), dtype=np.uint8)
    row_times = ranking.NO_WORDS if ttl is None else _read_only([time for _, _, time in rows])
    pages = NO_PAGES if ttl is None else times.pages
    row_words = _read_only([word for _, word, _ in rows])
    ranking.better_rows(
        words.pages, slots, fresh, row_words, -1 if greatest else 0, ties, pages, row_times, ttl or 0, wins
    )
    assert expected == np.flatnonzero(wins).tolist()
    last = {rows[number][0]: number for number in expected}
    assert sorted(last.values()) == ranking.last_of_each(slots, wins).tolist()
    known = np.array(sorted(kept), dtype=np.int32)
    assert [kept[slot][0] for slot in known.tolist()] == words.raw(known + np.int32(_FIRST)).tolist()


@settings(max_examples=50, deadline=None)
@given(_ROWS)
def test_first_arrivals(rows: list[tuple[int, int, int]]) -> None:
    """The first row of a slot wins, then each that is at least the time to live behind the last that won."""
    slots = np.array([slot for slot, _, _ in rows], dtype=np.int32) + np.int32(_FIRST)
    kept: dict[int, int] = {}
    expected, fresh = [], np.zeros(len(rows), dtype=np.uint8)
    for number, (slot, _, time) in enumerate(rows):
        fresh[number] = slot not in kept
        if slot not in kept or time - kept[slot] >= 10:
            kept[slot] = time
            expected.append(number)
    times, wins = _column(), np.zeros(len(rows), dtype=np.uint8)
    ranking.first_arrivals(times.pages, slots, fresh, _read_only([time for _, _, time in rows]), 10, wins)
    assert expected == np.flatnonzero(wins).tolist()


def test_the_last_rows_of_many_slots() -> None:
    """Slots that share a place in the hash table are told apart."""
    chance = np.random.default_rng(5)
    slots = chance.integers(0, 3_000, 20_000).astype(np.int32)
    wins = (chance.random(20_000) < 0.7).astype(np.uint8)
    last = {slot: row for row, slot in enumerate(slots.tolist()) if wins[row]}
    assert sorted(last.values()) == ranking.last_of_each(slots, wins).tolist()
