"""Grouped accumulation equals grouping in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import accumulate_reference
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.paged import PAGE_ROWS

_SLOTS = 5
# The last slots of one page and the first of the next.
_FIRST = PAGE_ROWS - 2
_TYPES: dict[Any, pa.DataType] = {np.int64: pa.int64(), np.uint8: pa.uint8(), np.float64: pa.float64()}


def _column(dtype: type, identity: float) -> PagedColumn:
    column = PagedColumn(ValueSpec("x", _TYPES[dtype], identity))
    column.grow(2)
    return column


def _values(column: PagedColumn) -> list[Any]:
    values: list[Any] = column.raw(np.arange(_FIRST, _FIRST + _SLOTS)).tolist()
    return values


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
    data: NDArray[Any] = np.array([beneath_null if value is None else value for value in values], dtype=dtype)
    return np.array(slots, dtype=np.int32) + np.int32(_FIRST), data, mask if masked or not mask.all() else NO_MASK


@settings(max_examples=80, deadline=None)
@given(rows(st.none() | st.integers(-1000, 1000)))
def test_integers(case: tuple[list[int], list[Any], bool]) -> None:
    """count, mark, sum, min and max of integers skip nulls."""
    slots, values, masked = case
    where, data, mask = _arrays(slots, values, np.int64, masked)
    counts = _column(np.int64, 0)
    accumulate.count(counts.pages, where, mask)
    flags = _column(np.uint8, 0)
    accumulate.mark(flags.pages, where, mask)
    sums = _column(np.int64, 0)
    assert not accumulate.sum_int64(sums.pages, where, data, mask)
    least = _column(np.int64, np.iinfo(np.int64).max)
    accumulate.minimum(least.pages, where, data, mask)
    greatest = _column(np.int64, np.iinfo(np.int64).min)
    accumulate.maximum(greatest.pages, where, data, mask)
    for kind, result in (("sum", sums), ("min", least), ("max", greatest)):
        shown = [v if f else None for v, f in zip(_values(result), _values(flags), strict=True)]
        assert shown == accumulate_reference(kind, values, slots, _SLOTS)
    assert _values(counts) == accumulate_reference("count", values, slots, _SLOTS)


@settings(max_examples=80, deadline=None)
@given(rows(st.none() | st.sampled_from([0.5, -3.25, math.nan, math.inf, -math.inf, 1e300])))
def test_floats(case: tuple[list[int], list[Any], bool]) -> None:
    """Float sums are those of adding in row order; NaN is the greatest number for min and max."""
    slots, values, masked = case
    where, data, mask = _arrays(slots, values, np.float64, masked)
    flags = _column(np.uint8, 0)
    accumulate.mark(flags.pages, where, mask)
    sums = _column(np.float64, 0)
    accumulate.sum_float64(sums.pages, where, data, mask)
    least = _column(np.float64, math.nan)
    accumulate.minimum(least.pages, where, data, mask)
    greatest = _column(np.float64, -math.inf)
    accumulate.maximum(greatest.pages, where, data, mask)
    for kind, result in (("sum", sums), ("min", least), ("max", greatest)):
        shown = [v if f else None for v, f in zip(_values(result), _values(flags), strict=True)]
        assert repr(shown) == repr(accumulate_reference(kind, values, slots, _SLOTS))


@pytest.mark.parametrize("values", [[2**62, 2**62], [-(2**63), -1], [2**63 - 1, 1, -1]])
def test_overflow_is_reported(values: list[int]) -> None:
    """A sum that leaves int64, if only for a moment, is reported and not passed on as a wrong number."""
    slots = np.zeros(len(values), dtype=np.int32)
    sums = _column(np.int64, 0)
    assert accumulate.sum_int64(sums.pages, slots, np.array(values, dtype=np.int64), NO_MASK)


def test_extremes_are_no_overflow() -> None:
    """The least and the greatest int64 are sums like others."""
    slots = np.array([0, 1, 1], dtype=np.int32)
    sums = _column(np.int64, 0)
    values = np.array([-(2**63), 2**63 - 1, -(2**63)], dtype=np.int64)
    assert not accumulate.sum_int64(sums.pages, slots, values, NO_MASK)
    assert sums.raw(np.array([0, 1])).tolist() == [-(2**63), -1]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, _SLOTS - 1), st.integers(0, 7) | st.just(1 << 62)), max_size=30))
def test_bits_are_new_once(pairs: list[tuple[int, int]]) -> None:
    """A bit is new in the first row of its slot that has it, and kept."""
    column, new = _column(np.int64, 0), np.empty(len(pairs), dtype=np.int64)
    slots = np.array([slot for slot, _ in pairs], dtype=np.int32) + np.int32(_FIRST)
    accumulate.set_bits(column.pages, slots, np.array([bits for _, bits in pairs], dtype=np.int64), new)
    seen = [0] * _SLOTS
    for (slot, bits), found in zip(pairs, new.tolist(), strict=True):
        assert found == bits & ~seen[slot]
        seen[slot] |= bits
    assert _values(column) == seen
