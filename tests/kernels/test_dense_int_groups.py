"""Rows whose keys lie close together have the groups that a dict gives, batch after batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.kernels.columns import NO_MASK, Words
from tidegate.state.key_index.dense_int_groups import ROWS_PER_PLACE, DenseIntGroups, Groups

LEAST, GREATEST = -(2**63), 2**63 - 1
Column = list[int | None]


def _words_of(column: Column) -> Words:
    valid = np.array([value is not None for value in column], dtype=np.uint8)
    under_null = next((value for value in column if value is not None), 0)  # undefined, and so no other key's word
    words = np.array([under_null if value is None else value for value in column], dtype=np.int64)
    return Words(words, NO_MASK if valid.all() else valid)


def _check(found: Groups, columns: list[Column]) -> None:
    """Against a dict."""
    rows = list(zip(*columns, strict=True))
    first = {key: rows.index(key) for key in rows}
    assert found.first_rows.tolist() == list(first.values())
    assert found.counts.tolist() == [rows.count(key) for key in first]
    slots = dict(zip(first, found.group_slots.tolist(), strict=True))
    assert len(set(slots.values())) == len(slots)
    assert found.slots.tolist() == [slots[key] for key in rows]
    assert all(0 <= slot < found.slots_end for slot in slots.values())


@st.composite
def batches(draw: st.DrawFn) -> list[list[Column]]:
    """Of one to three columns each; of keys that stay, move or spread from batch to batch, up to both ends of int64."""
    columns = draw(st.integers(1, 3))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(1, 60))
        batch: list[Column] = []
        for _ in range(columns):
            first = draw(st.sampled_from([0, 0, 1, 7, -3, LEAST, GREATEST - 4, GREATEST - 5]))
            values = st.integers(first, first + draw(st.integers(0, 4)))
            nulls = st.none() if draw(st.integers(0, 3)) == 0 else values
            batch.append(draw(st.lists(values | nulls, min_size=rows, max_size=rows)))
        found.append(batch)
    return found


@settings(max_examples=160, deadline=None)
@given(batches())
def test_groups_are_those_of_a_dict(parts: list[list[Column]]) -> None:
    """Whatever the batch before was like, and only keys that are too far apart have none."""
    dense = DenseIntGroups()
    for columns in parts:
        found = dense.of([_words_of(column) for column in columns])
        places = 1
        for column in columns:
            known = [value for value in column if value is not None]
            if not known:
                continue
            places *= max(known) - min(known) + 1 + (None in column)
        if found is not None:
            _check(found, columns)
        elif places <= len(columns[0]) // ROWS_PER_PLACE:
            assert any(None in column and GREATEST in column for column in columns), "no word is left for null"


@pytest.mark.parametrize("first", [0, LEAST, GREATEST - 9])
def test_a_batch_may_lie_elsewhere_than_the_one_before(first: int) -> None:
    """Below or above it; and one that is short is not given as many places as a long one had."""
    dense = DenseIntGroups()
    for start in (first + 3, first, first + 6):
        column: Column = [start + row % 4 for row in range(16)]
        found = dense.of([_words_of(column)])
        assert found is not None
        _check(found, [column])
        assert found.slots_end == 4
    few: Column = [first + 6, first + 6, first + 6, first + 6]
    found = dense.of([_words_of(few)])
    assert found is not None
    assert found.slots_end == 1


def test_null_is_no_other_key() -> None:
    """It lies behind the greatest of them; where no word is left there, others have to find the groups."""
    dense = DenseIntGroups()
    for null in (None, 5):
        column: Column = [5, 4, null, 5, null, 4, 5, 5, 4, 4, 4, 4]
        found = dense.of([_words_of(column)])
        assert found is not None
        _check(found, [column])
    assert dense.of([_words_of([GREATEST, None, *[GREATEST] * 10])]) is None


@pytest.mark.parametrize("columns", [[[0, 2**62, 0, 0]], [[LEAST, GREATEST, 0, 0]], [[0, 1, 2, 3]], [[0, 1, 1, 1]] * 2])
def test_keys_that_are_far_apart_have_no_groups(columns: list[Column]) -> None:
    """There are more places than the rows pay for."""
    assert DenseIntGroups().of([_words_of(column) for column in columns]) is None
