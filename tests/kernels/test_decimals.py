"""Sums and extremes of decimals in two words equal those of Python's integers."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK, valid_mask

_MOST = 10**38 - 1
_SIZES = (1, 2**63, 2**64, _MOST)
_NUMBERS = st.sampled_from(_SIZES).flatmap(lambda size: st.integers(-size, size))
_TYPE = pa.decimal128(38, 0)


def _columns(high: int, low: int) -> tuple[PagedColumn, PagedColumn]:
    made = PagedColumn(ValueSpec("high", pa.int64(), high)), PagedColumn(ValueSpec("low", pa.uint64(), low))
    for column in made:
        column.grow(1)
    return made


def _result(columns: tuple[PagedColumn, PagedColumn]) -> int:
    high, low = (column.raw(np.zeros(1, dtype=np.int32)) for column in columns)
    return int(high[0]) * 2**64 + int(low[0])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.none() | _NUMBERS, min_size=1, max_size=6), st.integers(1, 38))
@example([_MOST, _MOST, None], 38)
@example([-_MOST, -1], 38)
def test_decimals_equal_integers(numbers: list[int | None], digits: int) -> None:
    """A sum that has had too many digits at any time is reported; other sums, and extremes, are exact."""
    column = pa.array([None if n is None else Decimal(n) for n in [0, *numbers]], _TYPE).slice(1)
    known = [n for n in numbers if n is not None]
    slots, mask, (highs, lows) = np.zeros(len(column), np.int32), valid_mask(column), accumulate.decimal_words(column)

    sums, overflow, total = _columns(0, 0), False, 0
    for number in known:
        total += number
        overflow |= abs(total) >= 10**digits
    words = (column.pages for column in sums)
    assert accumulate.sum_decimals(*words, slots, highs, lows, mask, digits) is overflow
    if not overflow:
        assert _result(sums) == total

    least, greatest = _columns(2**63 - 1, 2**64 - 1), _columns(-(2**63), 0)
    accumulate.least_decimals(least[0].pages, least[1].pages, slots, highs, lows, mask)
    accumulate.greatest_decimals(greatest[0].pages, greatest[1].pages, slots, highs, lows, mask)
    if known:
        assert (_result(least), _result(greatest)) == (min(known), max(known))


@pytest.mark.parametrize("numbers", [[], [None], [1, None, -1, _MOST, -_MOST]])
def test_words_come_back(numbers: list[int | None]) -> None:
    """A column is the same after it was taken into words."""
    column = pa.array([None if n is None else Decimal(n) for n in numbers], _TYPE)
    valid = valid_mask(column)
    back = accumulate.decimals_of(*accumulate.decimal_words(column), valid if valid is not NO_MASK else None, _TYPE)
    assert back.equals(column)
