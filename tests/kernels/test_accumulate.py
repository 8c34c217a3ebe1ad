"""Grouped accumulation equals grouping in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.actors.kernels import accumulate
from tidegate.actors.kernels.columns import NO_MASK
from tidegate.actors.kernels.reference import accumulate_reference

_SLOTS = 5


@st.composite
def rows(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[list[int], list[Any], bool]:
    """Slots and values (some None), and whether the kernel gets a mask although nothing is null."""
    pairs = draw(st.lists(st.tuples(st.integers(0, _SLOTS - 1), values), max_size=30))
    return [slot for slot, _ in pairs], [value for _, value in pairs], draw(st.booleans())


def _arrays(
    slots: list[int], values: list[Any], dtype: type, masked: bool
) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.uint8]]:
    mask = np.array([value is not None for value in values], dtype=np.uint8)
    beneath_null = 77
    data = np.array([beneath_null if value is None else value for value in values], dtype=dtype)
    return np.array(slots, dtype=np.int32), data, mask if masked or not mask.all() else NO_MASK


@settings(max_examples=80, deadline=None)
@given(rows(st.none() | st.integers(-1000, 1000)))
def test_integers(case: tuple[list[int], list[Any], bool]) -> None:
    """count, mark, sum, min and max of integers skip nulls."""
    slots, values, masked = case
    where, data, mask = _arrays(slots, values, np.int64, masked)
    counts = np.zeros(_SLOTS, dtype=np.int64)
    accumulate.count(counts, where, mask)
    flags = np.zeros(_SLOTS, dtype=np.uint8)
    accumulate.mark(flags, where, mask)
    sums = np.zeros(_SLOTS, dtype=np.int64)
    assert not accumulate.sum_int64(sums, where, data, mask)
    least = np.full(_SLOTS, np.iinfo(np.int64).max)
    accumulate.minimum(least, where, data, mask)
    greatest = np.full(_SLOTS, np.iinfo(np.int64).min)
    accumulate.maximum(greatest, where, data, mask)
    for kind, result in (("sum", sums), ("min", least), ("max", greatest)):
        shown = [v if f else None for v, f in zip(result.tolist(), flags.tolist(), strict=True)]
        assert shown == accumulate_reference(kind, values, slots, _SLOTS)
    assert counts.tolist() == accumulate_reference("count", values, slots, _SLOTS)


@settings(max_examples=80, deadline=None)
@given(rows(st.none() | st.sampled_from([0.5, -3.25, math.nan, math.inf, -math.inf, 1e300])))
def test_floats(case: tuple[list[int], list[Any], bool]) -> None:
    """Float sums are those of adding in row order; NaN is the greatest number for min and max."""
    slots, values, masked = case
    where, data, mask = _arrays(slots, values, np.float64, masked)
    flags = np.zeros(_SLOTS, dtype=np.uint8)
    accumulate.mark(flags, where, mask)
    sums = np.zeros(_SLOTS)
    accumulate.sum_float64(sums, where, data, mask)
    least = np.full(_SLOTS, np.nan)
    accumulate.minimum(least, where, data, mask)
    greatest = np.full(_SLOTS, -np.inf)
    accumulate.maximum(greatest, where, data, mask)
    for kind, result in (("sum", sums), ("min", least), ("max", greatest)):
        shown = [v if f else None for v, f in zip(result.tolist(), flags.tolist(), strict=True)]
        assert repr(shown) == repr(accumulate_reference(kind, values, slots, _SLOTS))


@pytest.mark.parametrize("values", [[2**62, 2**62], [-(2**63), -1], [2**63 - 1, 1, -1]])
def test_overflow_is_reported(values: list[int]) -> None:
    """A sum that leaves int64, if only for a moment, is reported and not passed on as a wrong number."""
    slots = np.zeros(len(values), dtype=np.int32)
    sums = np.zeros(1, dtype=np.int64)
    assert accumulate.sum_int64(sums, slots, np.array(values, dtype=np.int64), NO_MASK)


def test_extremes_are_no_overflow() -> None:
    """The least and the greatest int64 are sums like others."""
    slots = np.array([0, 1, 1], dtype=np.int32)
    sums = np.zeros(2, dtype=np.int64)
    values = np.array([-(2**63), 2**63 - 1, -(2**63)], dtype=np.int64)
    assert not accumulate.sum_int64(sums, slots, values, NO_MASK)
    assert sums.tolist() == [-(2**63), -1]
