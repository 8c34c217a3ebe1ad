"""Distinct integers, against NumPy's `unique`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.state.kernels.distinct_integers import distinct_integers

TYPES = (np.int32, np.int64, np.uint16, np.uint64)


def _check(values: NDArray[Any]) -> None:
    before = values.copy()
    found = distinct_integers(values)
    expected = np.unique(before)
    assert found.dtype == expected.dtype
    assert found.tolist() == expected.tolist()
    assert values.tolist() == before.tolist()
    assert not np.shares_memory(found, values)


@st.composite
def _vectors(draw: st.DrawFn) -> NDArray[Any]:
    data_type = np.dtype(draw(st.sampled_from(TYPES)))
    bounds = np.iinfo(data_type)
    everywhere = st.integers(int(bounds.min), int(bounds.max))
    values = draw(st.lists(everywhere | st.integers(0, 9), max_size=60))
    return np.array(values, dtype=data_type)


@settings(max_examples=200, deadline=None)
@given(_vectors())
def test_distinct_integers_equal_unique(values: NDArray[Any]) -> None:
    """The values, their order and their type are the same, for every slice too, and the input stays as it was."""
    _check(values)
    _check(np.sort(values))
    _check(values[::-2])


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 999, 1_000, 1_001, 20_000])
def test_many_integers_equal_unique(rows: int, data_type: type[np.integer]) -> None:
    """Vectors of any length: ascending, almost ascending, descending, all equal, and with few or many duplicates."""
    generator = np.random.default_rng(rows)
    ascending = np.arange(rows, dtype=data_type)
    with_one_twice = ascending.copy()
    with_one_twice[rows // 2 :] -= data_type(rows > 1)
    for values in (
        ascending,
        with_one_twice,
        ascending[::-1],
        np.full(rows, 7, dtype=data_type),
        generator.integers(0, 10, rows).astype(data_type),
        generator.integers(0, 4 * rows + 1, rows).astype(data_type),
    ):
        _check(values)
