"""Keys close to each other have the slots that a dict gives, whether in an array or a hash table; memory is bounded."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import upsert_reference
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.key_index import int_index
from tidegate.state.key_index.hash_table import SLOTS_MAX
from tidegate.state.key_index.int_index import WORDS_PER_KEY, DenseIntIndex, IntIndex
from tidegate.storage.errors import ConfigurationError

LEAST, GREATEST = -(2**63), 2**63 - 1


@st.composite
def batches(draw: st.DrawFn) -> list[NDArray[np.int64]]:
    """Batches of several runs of words: any step, up to both ends of int64, and enough of them for tables to grow."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        first = draw(st.sampled_from([0, 0, 300, 6_000, -2_000, 10**12, GREATEST - 3_000, LEAST]))
        step, words = draw(st.sampled_from([1, 1, 3, 5, 1_000])), draw(st.integers(1, 600))
        run = [word for word in range(first, first + step * words, step) if word <= GREATEST]
        order = np.random.default_rng(draw(st.integers(0, 3))).permutation(len(run))
        found.append(np.array(run, dtype=np.int64)[order])
    return found


@settings(max_examples=200, deadline=None)
@given(batches())
def test_slots_equal_those_of_a_dict(words: list[NDArray[np.int64]]) -> None:
    """However the array grows, at both of its ends, and whichever words stay in the table."""
    index = IntIndex()
    model: dict[Hashable, int] = {}
    for batch in [*words, *words]:
        result = index.upsert(batch, NO_MASK)
        expected = upsert_reference(model, batch.tolist())
        assert (result.slots.tolist(), result.first_rows.tolist(), result.new_rows.tolist()) == expected
        assert index.size == len(model)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0.0, 0.001, 0.01, 0.5]), st.sampled_from([0.0, 0.001, 0.3]), st.integers(0, 1_000))
def test_near_words_are_found_among_far_ones_and_nulls(far: float, null: float, seed: int) -> None:
    """Few of them or many, new ones or known ones: a batch goes on with close words wherever others have been."""
    chance = np.random.default_rng(seed)
    index, model = IntIndex(), dict[Hashable, int]()
    for rows in (500, 3_000, 3_000, 40):
        words = chance.integers(0, 2_000, rows)
        words[chance.random(rows) < far] *= 10**12
        valid = (chance.random(rows) >= null).astype(np.uint8)
        result = index.upsert(words, valid if null else NO_MASK)
        keys = [word if known else None for word, known in zip(words.tolist(), valid.tolist(), strict=True)]
        expected = upsert_reference(model, keys)
        assert (result.slots.tolist(), result.first_rows.tolist(), result.new_rows.tolist()) == expected


@settings(max_examples=200, deadline=None)
@given(batches(), st.integers(0, 2), st.sampled_from([0, 2_000]))
def test_filling_gives_the_slots_of_upserts(words: list[NDArray[np.int64]], before: int, to_come: int) -> None:
    """Whatever the index has already; a key that it knows is told of."""
    index, model = IntIndex(), dict[Hashable, int]()
    for batch in words[:before]:
        index.upsert(batch, NO_MASK)
        upsert_reference(model, batch.tolist())
    for batch in words[before:]:
        new = len(upsert_reference(model, batch.tolist())[2])

        assert index.fill(batch, NO_MASK, to_come) == (new == len(batch))

        if new < len(batch):
            return
    for batch in words:
        assert index.upsert(batch, NO_MASK).slots.tolist() == [model[word] for word in batch.tolist()]


@pytest.mark.parametrize("step", [1, 3, 5, 6, 1_000])
@pytest.mark.parametrize("shuffled", [False, True])
def test_memory_is_that_of_a_hash_table_at_most(step: int, shuffled: bool) -> None:
    """Of keys as close to each other as those that five subtasks share it is less; far ones cost no array."""
    keys = step * np.arange(200_000)
    if shuffled:
        keys = np.random.default_rng(3).permutation(keys)
    grown, filled = IntIndex(), IntIndex()
    for start in range(0, len(keys), 1_000):
        grown.upsert(keys[start : start + 1_000], NO_MASK)
    assert filled.fill(keys, NO_MASK)
    bits_bytes = len(keys) * (1 + WORDS_PER_KEY) // 8
    for index in (grown, filled):
        assert index.size_bytes < (13 * step if step <= 3 else 3 * 16) * len(keys) + bits_bytes


def test_the_array_grows_by_half_at_least() -> None:
    """So that what is copied for many keys that come one after the other is in proportion to them; up to both ends."""
    dense, copied = DenseIntIndex(), 0
    for key in range(100_000):
        for word in (key, -key):
            if not dense.has(word, word):
                copied += len(dense.slots)
                reached = dense.extended_to(word, word, 2 * key + 1)
                assert reached is not None
                assert len(reached.slots) >= len(dense.slots) * 3 // 2
                dense = reached
    assert copied < 3 * len(dense.slots)
    for end in (LEAST, GREATEST):
        at_the_end = DenseIntIndex().extended_to(end, end, 8)
        assert at_the_end is not None
        assert at_the_end.has(end, end)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many as words were looked up that may lie anywhere; each costs the way of some hundred rows behind it."""
    found, any_word = list[None](), int_index._upsert

    def counted(*arguments: object) -> object:
        found.append(None)
        return any_word(*arguments)

    monkeypatch.setattr(int_index, "_upsert", counted)
    return found


@pytest.mark.parametrize(
    ("least", "keys", "first_rows"), [(0, 1_000, 20), (10**6, 1_000, 20), (-50, 100, 5), (1, 10**5, 50_000)]
)
def test_the_array_has_room_beside_the_first_batch(least: int, keys: int, first_rows: int, ways: list[None]) -> None:
    """Which has neither the least key nor the greatest one."""
    chance, index = np.random.default_rng(1), IntIndex()
    index.upsert(least + 2 + chance.permutation(keys - 4)[:first_rows], NO_MASK)
    for _ in range(2):
        assert len(index.upsert(least + chance.permutation(keys), NO_MASK).slots) == keys
    assert (len(ways), index.size) == (0, keys)


@pytest.mark.parametrize("far", [[], [10**15, -(10**15)]], ids=["alone", "beside far ones"])
@pytest.mark.parametrize("steps", [1, 40])
def test_words_just_beside_the_array_come_to_it(steps: int, far: list[int], ways: list[None]) -> None:
    """New keys are counted up beyond its end, a hundred, or a few in each batch: the table is not full by far, and yet
    they come to the array, so that the next batch has no other words."""
    chance, index = np.random.default_rng(1), IntIndex()
    index.upsert(chance.permutation(4_096), NO_MASK)
    if far:
        index.upsert(np.array(far, dtype=np.int64), NO_MASK)
    for step in range(steps):
        index.upsert(chance.permutation(5_120 + 100 * (step + 1) // steps), NO_MASK)
    before = len(ways)
    index.upsert(chance.permutation(5_220), NO_MASK)
    assert (len(ways), index.size) == (before, 5_220 + len(far))


@pytest.mark.parametrize("begins", ["upsert", "far ones first", "fill"])
@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("keys", [300, 5_000])
def test_a_few_words_far_away_do_not_keep_the_others_from_an_array(
    begins: str, null: bool, keys: int, ways: list[None]
) -> None:
    """Of the first batch, before all others, or of what is restored: as -1 for a key that is not known."""
    chance, index = np.random.default_rng(1), IntIndex()
    dense = 10**6 + chance.permutation(keys)
    words = np.array([*dense, -1, GREATEST, 17], dtype=np.int64)
    valid = np.array([*[1] * (len(words) - 1), not null], dtype=np.uint8) if null else NO_MASK
    if begins == "upsert":
        index.upsert(words[::-1].copy(), valid[::-1].copy())
    elif begins == "fill":
        assert index.fill(words, valid)
    else:
        index.upsert(words[-3:], valid[-3:])
        for start in range(0, len(dense), 100):
            index.upsert(dense[start : start + 100], NO_MASK)
    index.upsert(dense, NO_MASK)
    before = len(ways)
    index.upsert(dense, NO_MASK)
    assert (len(ways), index.size) == (before, len(words))


def test_words_that_stay_far_are_seldom_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more in each batch, too far away to come to the array: the table is looked through when they have doubled, or
    all keys have."""
    looks, look = list[None](), int_index._bounds_of_table

    def counted(*arguments: object) -> object:
        looks.append(None)
        return look(*arguments)

    monkeypatch.setattr(int_index, "_bounds_of_table", counted)
    index = IntIndex()
    index.upsert(np.arange(100), NO_MASK)
    for number in range(200):
        index.upsert(np.array([*range(100), 10**15 + number * 10**6], dtype=np.int64), NO_MASK)
    assert (len(looks), index.size) == (8, 300)


def test_keys_far_apart_have_no_array() -> None:
    """Less than an eighth of it would be used."""
    assert DenseIntIndex().extended_to(0, 1_000_000, 100_000) is None
    assert DenseIntIndex().extended_to(LEAST, GREATEST, 2**31) is None


@pytest.mark.parametrize("new", [8, 10**15, None])
def test_a_key_too_many_is_refused(new: int | None) -> None:
    """Wherever its slot would stand: in the array, in the table, or as that of null. Known keys are found."""
    index = IntIndex()
    index.upsert(np.array([7], dtype=np.int64), NO_MASK)
    index.size = SLOTS_MAX
    word = np.array([new or 0], dtype=np.int64)
    with pytest.raises(ConfigurationError, match="has 2,147,483,647 keys, but an index holds at most 2,147,483,646"):
        index.upsert(word, NO_MASK if new else np.zeros(1, dtype=np.uint8))
    assert index.upsert(np.array([7], dtype=np.int64), NO_MASK).slots.tolist() == [0]
