"""The filter of keys that have left memory never denies one, and seldom takes another for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.state.rocksdb.evicted_keys_filter import EvictedKeysFilter

_HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40)


@given(st.integers(1, 100), st.lists(_HASHES, max_size=4), _HASHES)
def test_no_key_that_has_left_is_denied(size_bytes: int, parts: list[list[int]], others: list[int]) -> None:
    """However small the filter is; and as long as none has left, no key is said to have."""
    left = EvictedKeysFilter(size_bytes)
    for part in parts:
        left.add(np.array(part, dtype=np.uint64))
    every = [each for part in parts for each in part]
    assert left.has(np.array(every, dtype=np.uint64)).all()
    assert bool(left) == bool(every)
    assert left.size_bytes <= max(8, size_bytes)
    if not every:
        assert not left.has(np.array(others, dtype=np.uint64)).any()
    left.all = True
    assert left
    assert left.has(np.array(others, dtype=np.uint64)).all()
    left.add(np.array(others, dtype=np.uint64))
    left.all = False
    assert left.has(np.array([*every, *others], dtype=np.uint64)).all()


@pytest.mark.parametrize("groups", [1, 128])
def test_few_others_are_taken_for_one(groups: int) -> None:
    """With ten bits a key some 2 %, also if all keys are of one key group, as in a subtask of many."""
    draws = np.random.default_rng(1)
    hashes = draws.integers(0, 2**57, 26_000, dtype=np.uint64) * np.uint64(128)
    hashes += draws.integers(0, groups, len(hashes), dtype=np.uint64)
    left = EvictedKeysFilter(8_192)
    left.add(hashes[:6_500])
    assert 0.001 < left.has(hashes[6_500:]).mean() < 0.03
    assert not left.is_crowded
    left.add(hashes[6_500:])
    assert left.is_crowded


def of(numbers: range) -> NDArray[np.uint64]:
    """Hashes of some keys."""
    return np.random.default_rng(7).integers(0, 2**64, numbers.stop, dtype=np.uint64)[numbers.start :]


def test_the_same_keys_again_and_again_do_not_crowd_it() -> None:
    """A key counts once, however often it leaves, and with however many rows."""
    left = EvictedKeysFilter(1_024)
    for _ in range(50):
        left.add(np.repeat(of(range(500)), 3))
    assert not left.is_crowded
    left.add(of(range(500, 3_000)))
    assert left.is_crowded


def test_keys_that_are_gone_are_forgotten() -> None:
    """Once it is full, what is read of the database takes its place, with what has left meanwhile."""
    left = EvictedKeysFilter(1_024)
    left.add(of(range(3_000)))
    assert left.needs_keys
    assert left.has(of(range(3_000, 4_000))).mean() > 0.2
    left.begin()
    assert left.is_read
    assert not left.needs_keys
    left.found(of(range(100)))
    left.add(of(range(3_000, 3_200)))
    assert left.has(of(range(3_200))).all()
    left.end()
    assert not left.is_crowded
    assert left.has(of(range(100))).all()
    assert left.has(of(range(3_000, 3_200))).all()
    assert left.has(of(range(100, 3_000))).mean() < 0.05


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.lists(st.integers(1, 400), min_size=1, max_size=60))
def test_no_more_rows_are_read_than_have_left(rows_of_a_key: int, there: int, leaving: list[int]) -> None:
    """Whatever the database has, and whether or not that has room: but for one reading, bounded by the room."""
    left, rows_left, rows_read, keys = EvictedKeysFilter(64), 0, 0, 0
    most = 512 // 5 + 40
    for number in leaving:
        left.add(of(range(keys, keys + number)))
        keys += number
        rows_left += number
        if left.needs_keys:
            left.begin()
            before = rows_read
            for start in range(0, there * 10, 10):
                left.found(np.repeat(of(range(start, start + 10)), rows_of_a_key))
                rows_read += 10 * rows_of_a_key
                if not left.is_read:
                    break
            else:
                left.end()
            assert rows_read - before <= most * rows_of_a_key
        assert rows_read <= rows_left + most * rows_of_a_key


@pytest.mark.slow
def test_readings_in_vain_become_rare() -> None:
    """Where the database has more keys than it has room for, it is asked half as often each time."""
    left, begun = EvictedKeysFilter(64), list[int]()
    for number in range(4_000):
        left.add(of(range(10 * number, 10 * number + 10)))
        if left.needs_keys:
            begun.append(number)
            left.begin()
            left.found(of(range(1_000_000, 1_000_400)))
            assert not left.is_read
    pauses = np.diff(begun)
    assert 4 < len(begun) < 12
    assert (pauses[1:] >= 2 * pauses[:-1] - 1).all()
