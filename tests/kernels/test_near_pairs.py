"""Pairs have the slots that a dict gives, whichever the arrays in front of the table know; memory is bounded."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import upsert_reference

from tidegate.actors.kernels.columns import NO_MASK, Words
from tidegate.actors.kernels.key_index.near_pairs import WORDS_A_PAIR, WORDS_A_ROW, NearPairs
from tidegate.actors.kernels.key_index.pair_index import PairIndex

LEAST, GREATEST = -(2**63), 2**63 - 1
Batch = list[tuple[int | None, int | None]]


def _words(values: list[int | None]) -> Words:
    valid = np.array([value is not None for value in values], dtype=np.uint8)
    words = np.array([0 if value is None else value for value in values], dtype=np.int64)
    return Words(words, NO_MASK if valid.all() else valid)


def _upsert(index: PairIndex, batch: Batch) -> tuple[list[int], list[int], list[int]]:
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
    index, model = PairIndex(), dict[Hashable, int]()
    for batch in [*batches, *batches]:
        assert _upsert(index, batch) == upsert_reference(model, batch)


def test_rows_of_two_slices_are_near() -> None:
    """The next slice takes the place of the one that is over; of a third one nothing is known."""
    index, near = PairIndex(), NearPairs()
    seconds = _words(list(range(64)) * 4)
    for slices in ([1], [1, 2], [2], [2, 3]):
        firsts = _words([slices[row * len(slices) // 256] for row in range(256)])
        assert near.look_at(firsts, seconds, 0)
        assert set(slices) <= set(near.firsts.tolist())
        index.upsert(firsts, seconds)
    assert index.size == 3 * 64
    assert not near.look_at(_words([row % 3 for row in range(256)]), seconds, 0)
    assert set(near.firsts.tolist()) == {2, 3}


@pytest.mark.parametrize(
    ("spread", "rows", "pairs", "is_near"), [(3, 256, 0, True), (5, 256, 0, False), (5, 256, 640, True)]
)
def test_arrays_are_no_longer_than_rows_or_pairs_pay_for(spread: int, rows: int, pairs: int, is_near: bool) -> None:
    """However far the second words have moved."""
    near = NearPairs()
    for start in (0, spread * 100, 10**15, -(10**15)):
        seconds = _words([start + row * spread for row in range(rows)])
        assert near.look_at(_words([7] * rows), seconds, pairs) == is_near
        assert len(near.slots) <= 2 * max(WORDS_A_ROW * rows, WORDS_A_PAIR * pairs)


def test_nulls_are_for_the_table() -> None:
    """They have no words."""
    words, with_null = _words([1, 1, 1, 1]), _words([1, None, 1, 1])
    assert not NearPairs().look_at(with_null, words, 0)
    assert not NearPairs().look_at(words, with_null, 0)
