"""The filter of keys that have left memory never denies one, and seldom takes another for one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.state_backends.rocksdb.cached.left_keys import LeftKeys

_HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40)


@given(st.integers(1, 100), st.lists(_HASHES, max_size=4), _HASHES)
def test_no_key_that_has_left_is_denied(size_bytes: int, parts: list[list[int]], others: list[int]) -> None:
    """However small the filter is; and as long as none has left, no key is said to have."""
    left = LeftKeys(size_bytes)
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
    left = LeftKeys(8_192)
    left.add(hashes[:6_500])
    assert 0.001 < left.has(hashes[6_500:]).mean() < 0.03
    assert not left.is_crowded
    left.add(hashes[6_500:])
    assert left.is_crowded
