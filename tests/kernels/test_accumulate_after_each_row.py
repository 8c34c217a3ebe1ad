"""Accumulation with `after` leaves the same accumulators as without, and stores the accumulator after each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn
from tidegate.state.kernels import accumulate, choose
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.paged import PAGE_ROWS

_SLOTS = 5
# The last slots of one page and the first of the next.
_FIRST = PAGE_ROWS - 2
_WHERE = np.arange(_FIRST, _FIRST + _SLOTS)


def _column(data_type: pa.DataType, identity: float) -> PagedColumn:
    column = PagedColumn(ValueSpec("x", data_type, identity))
    column.grow(2)
    return column


@st.composite
def cases(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[NDArray[np.int32], list[Any], NDArray[np.uint8]]:
    """Slots, values, and a mask, which may be that of no nulls."""
    found = draw(st.lists(st.tuples(st.integers(0, _SLOTS - 1), values, st.booleans()), max_size=25))
    slots = np.array([slot for slot, _, _ in found], dtype=np.int32) + np.int32(_FIRST)
    mask = np.array([counts for _, _, counts in found], dtype=np.uint8)
    return slots, [value for _, value, _ in found], NO_MASK if draw(st.booleans()) else mask


def _counted(slots: NDArray[np.int32], values: list[Any], mask: NDArray[np.uint8], row: int) -> list[Any]:
    """The values of the slot of a row up to the row, of rows that count, in plain Python."""
    return [values[n] for n in range(row + 1) if slots[n] == slots[row] and (not len(mask) or mask[n])]


def _same(found: Any, expected: Any) -> bool:
    return bool(found == expected or (found != found and expected != expected))


@settings(max_examples=80, deadline=None)
@given(cases(st.integers(-1000, 1000)))
def test_integers(case: tuple[NDArray[np.int32], list[int], NDArray[np.uint8]]) -> None:
    """Counts, flags, sums, least and greatest values."""
    slots, values, mask = case
    data = np.array(values, dtype=np.int64)
    least, greatest = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for identity, data_type, kernel, result in (
        (0, pa.int64(), accumulate.count, len),
        (0, pa.uint8(), accumulate.mark, lambda found: int(len(found) > 0)),
        (0, pa.int64(), accumulate.sum_int64, sum),
        (least, pa.int64(), accumulate.minimum, lambda found: min(found, default=least)),
        (greatest, pa.int64(), accumulate.maximum, lambda found: max(found, default=greatest)),
    ):
        found, other = _column(data_type, identity), _column(data_type, identity)
        given_values = () if kernel in (accumulate.count, accumulate.mark) else (data,)
        after = np.empty(len(slots), dtype=found.dtype)
        assert not kernel(found.pages, slots, *given_values, mask, after)  # type: ignore[operator]
        assert after.tolist() == [result(_counted(slots, values, mask, row)) for row in range(len(slots))]
        kernel(other.pages, slots, *given_values, mask)  # type: ignore[operator]
        assert found.raw(_WHERE).tolist() == other.raw(_WHERE).tolist()


@settings(max_examples=80, deadline=None)
@given(cases(st.sampled_from([0.1, -3.25, math.nan, math.inf, -math.inf, 1e300, 1 / 3])))
def test_floats(case: tuple[NDArray[np.int32], list[float], NDArray[np.uint8]]) -> None:
    """Sums are those of adding in the order of the rows, to the bit; NaN is the greatest number."""
    slots, values, mask = case
    data = np.array(values, dtype=np.float64)

    def greatest(found: list[float]) -> float:
        return max(found, key=lambda x: (x != x, x), default=-math.inf)

    def least(found: list[float]) -> float:
        return min(found, key=lambda x: (x != x, x), default=math.nan)

    def total(found: list[float]) -> float:
        so_far = 0.0
        for value in found:
            so_far += value
        return so_far

    kernels: tuple[tuple[float, Any, Callable[[list[float]], float]], ...] = (
        (0.0, accumulate.sum_float64, total),
        (math.nan, accumulate.minimum, least),
        (-math.inf, accumulate.maximum, greatest),
    )
    for identity, kernel, result in kernels:
        found, other = _column(pa.float64(), identity), _column(pa.float64(), identity)
        after = np.empty(len(slots), dtype=np.float64)
        kernel(found.pages, slots, data, mask, after)
        expected = [result(_counted(slots, values, mask, row)) for row in range(len(slots))]
        assert all(map(_same, after.tolist(), expected))
        kernel(other.pages, slots, data, mask)
        assert found.raw(_WHERE).tobytes() == other.raw(_WHERE).tobytes()


@settings(max_examples=60, deadline=None)
@given(cases(st.integers(-50, 50).map(float)))
def test_moments(case: tuple[NDArray[np.int32], list[float], NDArray[np.uint8]]) -> None:
    """Counts and squared differences after each row; the slots hold what `add_moments` leaves."""
    slots, values, mask = case
    data = np.array(values, dtype=np.float64)
    found, other = ([_column(pa.int64(), 0), *(_column(pa.float64(), 0.0) for _ in range(2))] for _ in range(2))
    counts, squares = np.empty(len(slots), dtype=np.int64), np.empty(len(slots), dtype=np.float64)
    accumulate.add_moments(*(column.pages for column in found), slots, data, mask, counts, squares)
    accumulate.add_moments(*(column.pages for column in other), slots, data, mask)
    for row in range(len(slots)):
        counted = _counted(slots, values, mask, row)
        mean = sum(counted) / max(1, len(counted))
        assert counts[row] == len(counted)
        assert squares[row] == pytest.approx(sum((value - mean) ** 2 for value in counted), abs=1e-6)
    for one, two in zip(found, other, strict=True):
        assert one.raw(_WHERE).tobytes() == two.raw(_WHERE).tobytes()


@pytest.mark.slow
def test_sums_out_of_range_are_reported() -> None:
    """Of int64 also if a later row brings the sum back; of decimals by their digits."""
    slots = np.full(3, _FIRST, dtype=np.int32)
    after = np.empty(3, dtype=np.int64)
    data = np.array([2**63 - 1, 1, -1], dtype=np.int64)
    assert accumulate.sum_int64(_column(pa.int64(), 0).pages, slots, data, NO_MASK, after)
    masked = np.array([1, 0, 1], dtype=np.uint8)
    assert not accumulate.sum_int64(_column(pa.int64(), 0).pages, slots, data, masked, after)
    for numbers, digits, overflows in (([9, 1, -1], 1, True), ([9, -1, 1], 1, False), ([-9, -1, 0], 1, True)):
        highs, lows = accumulate.decimal_words(pa.array([Decimal(n) for n in numbers], pa.decimal128(38, 0)))
        words = _column(pa.int64(), 0), _column(pa.uint64(), 0)
        made = np.empty(3, dtype=np.int64), np.empty(3, dtype=np.uint64)
        pages = [column.pages for column in words]
        assert accumulate.sum_decimals(*pages, slots, highs, lows, NO_MASK, digits, *made) is overflows


_MOST = 10**37


@settings(max_examples=80, deadline=None)
@given(cases(st.sampled_from([1, 2**63, 2**64, _MOST]).flatmap(lambda size: st.integers(-size, size))))
def test_decimals(case: tuple[NDArray[np.int32], list[int], NDArray[np.uint8]]) -> None:
    """Sums and extremes of 128 bits are those of Python's integers."""
    slots, values, mask = case
    words = accumulate.decimal_words(pa.array([Decimal(value) for value in values], pa.decimal128(38, 0)))

    def pages(high: int, low: int) -> list[Any]:
        return [_column(pa.int64(), high), _column(pa.uint64(), low)]

    def numbers(pair: tuple[NDArray[np.int64], NDArray[np.uint64]]) -> list[int]:
        return [int(high) * 2**64 + int(low) for high, low in zip(*pair, strict=True)]

    def after() -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        return np.empty(len(slots), dtype=np.int64), np.empty(len(slots), dtype=np.uint64)

    counted = [_counted(slots, values, mask, row) for row in range(len(slots))]
    sums, made = pages(0, 0), after()
    assert not accumulate.sum_decimals(*(c.pages for c in sums), slots, *words, mask, 38, *made) or any(
        abs(sum(found)) >= 10**38 for found in counted
    )
    assert numbers(made) == [sum(found) for found in counted]
    greatest_number, least_number = 2**127 - 1, -(2**127)
    least, greatest = pages(2**63 - 1, 2**64 - 1), pages(-(2**63), 0)
    made = after()
    accumulate.least_decimals(*(c.pages for c in least), slots, *words, mask, *made)
    assert numbers(made) == [min(found, default=greatest_number) for found in counted]
    made = after()
    accumulate.greatest_decimals(*(c.pages for c in greatest), slots, *words, mask, *made)
    assert numbers(made) == [max(found, default=least_number) for found in counted]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=20), st.lists(st.booleans(), min_size=4, max_size=4)
)
def test_newest_chosen(found: list[tuple[int, bool]], known: list[bool]) -> None:
    """The newest chosen row of the group, or what the group had before."""
    groups = np.array([group for group, _ in found], dtype=np.int32)
    chosen = np.array([is_chosen for _, is_chosen in found], dtype=np.uint8)
    newest = np.array([1_000 + group if known[group] else -1 for group in range(4)], dtype=np.int64)
    before, after = newest.tolist(), np.empty(len(found), dtype=np.int64)
    choose.newest_chosen(groups, chosen, newest, after)
    for row, (group, _) in enumerate(found):
        rows = [n for n in range(row + 1) if found[n] == (group, True)]
        assert after[row] == (rows[-1] if rows else before[group])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.binary(max_size=3), st.booleans()), min_size=1, max_size=15),
    st.booleans(),
    st.booleans(),
)
def test_strings(found: list[tuple[int, bytes, bool]], greatest: bool, masked: bool) -> None:
    """The first of the least or the greatest values up to each row, in the order of bytes."""
    texts = [text for _, text, _ in found]
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts]))).astype(np.int64)
    data = np.frombuffer(b"".join(texts) + b"\0", dtype=np.uint8)
    groups = np.array([group for group, _, _ in found], dtype=np.int32)
    mask = np.array([counts for _, _, counts in found], dtype=np.uint8) if masked else NO_MASK
    best, after = np.full(3, -1, dtype=np.int64), np.empty(len(found), dtype=np.int64)
    choose.choose_strings(offsets, data, np.arange(len(found)), groups, best, greatest, mask, after)
    for row, (group, _, _) in enumerate(found):
        rows = [n for n in range(row + 1) if groups[n] == group and (not masked or mask[n])]
        pick = max if greatest else min
        assert after[row] == (pick(rows, key=lambda n: texts[n]) if rows else -1)
