"""Pairs have the slots that a dict gives, whichever the arrays in front of the table know; memory is bounded."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import upsert_reference

from tidegate.state.kernels.columns import NO_MASK, Words
from tidegate.state.key_index.int_pair_index import (
    SKIPS_MAX,
    WORDS_PER_PAIR,
    WORDS_PER_ROW,
    DensePairCache,
    IntPairIndex,
)

LEAST, GREATEST = -(2**63), 2**63 - 1
Batch = list[tuple[int | None, int | None]]


def _words(values: list[int | None]) -> Words:
    valid = np.array([value is not None for value in values], dtype=np.uint8)
    words = np.array([0 if value is None else value for value in values], dtype=np.int64)
    return Words(words, NO_MASK if valid.all() else valid)


def _upsert(index: IntPairIndex, batch: Batch) -> tuple[list[int], list[int], list[int]]:
    found = index.upsert(_words([first for first, _ in batch]), _words([second for _, second in batch]))
    return found.slots.tolist(), found.first_rows.tolist(), found.new_rows.tolist()


@st.composite
def _batches(draw: st.DrawFn) -> list[Batch]:
    """First words that go on and come back, a rare one among them; second words that move, up to both ends of int64."""
    found = []
    for _ in range(draw(st.integers(1, 8))):
        chance = np.random.default_rng(draw(st.integers(0, 9)))
        rows = draw(st.sampled_from([1, 2, 40, 700]))
        low = draw(st.integers(0, 4)) * 6_400
        firsts = chance.choice([low, low + draw(st.sampled_from([0, 6_400]))], rows).tolist()
        start = draw(st.sampled_from([0, 0, 100, 2_000, LEAST, GREATEST - 800]))
        seconds = (start + chance.integers(0, draw(st.sampled_from([1, 30, 800])), rows)).tolist()
        batch: Batch = list(zip(firsts, seconds, strict=True))
        if rows > 2 and draw(st.booleans()):
            batch[chance.integers(rows)] = draw(
                st.sampled_from([(LEAST, 3), (low + 3, 3), (low, 10**12), (None, 3), (low, None), (0, 0)])
            )
        found.append(batch)
    return found


@settings(max_examples=300, deadline=None)
@given(_batches())
def test_slots_equal_those_of_a_dict(batches: list[Batch]) -> None:
    """Also when a batch comes again, and the arrays have been made for others meanwhile."""
    index, model = IntPairIndex(), dict[Hashable, int]()
    for batch in [*batches, *batches]:
        assert _upsert(index, batch) == upsert_reference(model, batch)


def test_rows_of_two_slices_are_near() -> None:
    """The next slice takes the place of the one that is over; of a third one nothing is known."""
    index, dense = IntPairIndex(), DensePairCache()
    seconds = _words(list(range(64)) * 4)
    for slices in ([1], [1, 2], [2], [2, 3]):
        firsts = _words([slices[row * len(slices) // 256] for row in range(256)])
        assert dense.prepare(firsts, seconds, 0)
        assert set(slices) <= set(dense.firsts.tolist())
        index.upsert(firsts, seconds)
    assert index.size == 3 * 64
    assert not dense.prepare(_words([row % 3 for row in range(256)]), seconds, 0)
    assert set(dense.firsts.tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("spread", "rows", "pairs", "is_near"), [(3, 256, 0, True), (5, 256, 0, False), (5, 256, 640, True)]
)
def test_arrays_are_no_longer_than_rows_or_pairs_pay_for(spread: int, rows: int, pairs: int, is_near: bool) -> None:
    """However far the second words have moved."""
    dense = DensePairCache()
    for start in (0, spread * 100, 10**15, -(10**15)):
        seconds = _words([start + row * spread for row in range(rows)])
        assert dense.prepare(_words([7] * rows), seconds, pairs) == is_near
        assert len(dense.slots) <= 2 * max(WORDS_PER_ROW * rows, WORDS_PER_PAIR * pairs)
        dense.found += rows


def test_nulls_are_for_the_table() -> None:
    """They have no words."""
    words, with_null = _words([1, 1, 1, 1]), _words([1, None, 1, 1])
    assert not DensePairCache().prepare(with_null, words, 0)
    assert not DensePairCache().prepare(words, with_null, 0)


ROWS = 12


def _known(dense: DensePairCache) -> set[tuple[int, int]]:
    span = len(dense.slots) // 2
    places = np.flatnonzero(dense.slots).tolist()
    return {(int(dense.firsts[place // span]), dense.origin + place % span) for place in places}


class Finding:
    """What a kernel does with the arrays, and what is to be held: how often something is forgotten, and what for."""

    def __init__(self) -> None:
        self.dense = DensePairCache()
        self.in_vain = self.paid = self.left = 0
        self._found = self._rows = 0

    def see(self, first: int, start: int) -> int:
        """How many rows of a batch without repetition are found."""
        dense, before = self.dense, _known(self.dense)
        ready = dense.prepare(_words([first] * ROWS), _words(list(range(start, start + ROWS))), 0)
        self._rows += ROWS
        self.left += not ready
        if before - _known(dense):
            paid = 2 * self._found >= self._rows
            self.paid, self.in_vain = self.paid + paid, self.in_vain + (not paid)
            self._found = self._rows = 0
        if not ready:
            return 0
        array = (0 if dense.firsts[0] == first else 1) * (len(dense.slots) // 2)
        places = array + start - dense.origin + np.arange(ROWS)
        found = int(np.count_nonzero(dense.slots[places]))
        dense.slots[places] = 1
        dense.found += found
        self._found += found
        return found


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=5), st.integers(1, 90))))
def test_what_is_forgotten_in_vain_is_bounded(history: list[tuple[list[tuple[int, int]], int]]) -> None:
    """However slices and ranges take turns; and when one remains, it is found again."""
    finding = Finding()
    for turn, times in history:
        for first, place in turn * times:
            finding.see(first, place * 10**9)
    assert finding.in_vain <= SKIPS_MAX.bit_length() * (finding.paid + 1) + finding.left // SKIPS_MAX + 1
    for _ in range(SKIPS_MAX + 1):
        finding.see(7, 77)
    assert finding.see(7, 77) == ROWS


def test_of_ranges_that_take_turns_one_is_found() -> None:
    """The other one is left to the table, nearly always."""
    finding = Finding()
    found = sum(finding.see(7, turn % 2 * 10**9) for turn in range(1_000))
    assert finding.in_vain < 20
    assert found > 450 * ROWS


def test_slices_that_come_for_a_few_batches_are_found_from_the_second_on() -> None:
    """To clear_seen pays: nothing is left to the table."""
    finding = Finding()
    for turn in range(1_000):
        assert finding.see(turn // 4, 0) == (ROWS if turn % 4 else 0)
    assert not finding.left


@pytest.mark.parametrize("step", [1, -1])
def test_arrays_are_seldom_made_for_words_that_move_on(step: int) -> None:
    """In either direction they grow by half of what they must have."""
    dense, made, slots = DensePairCache(), 0, DensePairCache().slots
    for turn in range(1_000):
        seconds = _words(list(range(turn * step, turn * step + 1_000)))
        assert dense.prepare(_words([7] * 1_000), seconds, 0)
        dense.found += 1_000
        made += dense.slots is not slots
        slots = dense.slots
    assert made < 6
