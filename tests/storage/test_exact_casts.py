"""Casts that lose nothing: every value comes back, or the first that does not fit is reported with its row."""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.storage.schemas.exact_casts import InexactValueError, exact_cast, leaves, refusal_of

NUMBERS = [
    pa.int8(),
    pa.int64(),
    pa.uint8(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(10, 2),
    pa.decimal128(38, 0),
    pa.decimal256(50, 5),
]


def cast(values: list[object], stored: pa.DataType, wanted: pa.DataType | pa.Field) -> list[object]:
    """The values after an exact cast."""
    field = wanted if isinstance(wanted, pa.Field) else pa.field("x", wanted)
    found = exact_cast(pa.array(values, stored), field)
    assert found.type.equals(field.type)
    return found.to_pylist()


@pytest.mark.parametrize(
    ("stored", "wanted", "reason"),
    [
        (pa.int64(), pa.bool_(), "is int64 and not bool"),
        (pa.bool_(), pa.int64(), "is bool and not int64"),
        (pa.int64(), pa.timestamp("us"), "is int64 and not timestamp[us]"),
        (pa.timestamp("us"), pa.int64(), "is timestamp[us] and not int64"),
        (pa.int32(), pa.date32(), "is int32 and not date32[day]"),
        (pa.string(), pa.int64(), "is string and not int64"),
        (pa.int64(), pa.string(), "is int64 and not string"),
        (pa.time64("us"), pa.timestamp("us"), "is time64[us] and not timestamp[us]"),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Berlin"), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.timestamp("us"), pa.timestamp("us", "Europe/Berlin"), "is timestamp[us] and not"),
        (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us"), "is timestamp[us, tz=Europe/Berlin] and not"),
        (pa.dictionary(pa.int8(), pa.string()), pa.large_string(), None),
        (pa.null(), pa.struct([("a", pa.int64())]), None),
        (pa.list_(pa.int64()), pa.list_(pa.bool_()), "(its elements) is int64 and not bool"),
        (pa.list_(pa.int64()), pa.int64(), "is list<"),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.bool_()), "(its values) is int64 and not bool"),
        (pa.struct([("A", pa.int64())]), pa.struct([("a", pa.int64())]), "has no field 'a'; it has ['A']"),
        (
            pa.struct([("a", pa.struct([("b", pa.int64())]))]),
            pa.struct([("a", pa.struct([("c", pa.int64())]))]),
            "(its field 'a') has no field 'c'",
        ),
        (pa.struct([("a", pa.int64()), ("b", pa.int64())]), pa.struct([("b", pa.int64())]), None),
    ],
)
def test_what_no_value_can_become(stored: pa.DataType, wanted: pa.DataType, reason: str | None) -> None:
    """Types of different families are refused before a value is read; nested ones by the place."""
    found = refusal_of(stored, wanted)
    assert (found is None) == (reason is None)
    assert reason is None or (found is not None and reason in found)


def test_a_field_may_be_lacking_where_the_caller_allows_it() -> None:
    """Then it is null, and a field that may not be null is refused all the same."""
    stored, wanted = pa.struct([("a", pa.int64())]), pa.struct([("a", pa.int64()), ("b", pa.int64())])
    assert refusal_of(stored, wanted, may_lack=True) is None
    assert cast([{"a": 1}], stored, wanted) == [{"a": 1, "b": None}]
    strict = pa.struct([pa.field("b", pa.int64(), nullable=False)])
    assert refusal_of(stored, strict, may_lack=True) is not None


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (dt.datetime(2024, 1, 1, 23, 59), pa.timestamp("us"), pa.date32()),
        (dt.datetime(2024, 1, 1, 0, 0, 0, 1), pa.timestamp("us"), pa.timestamp("ms")),
        (dt.datetime(9999, 12, 31), pa.timestamp("us"), pa.timestamp("ns")),
        (0.125, pa.float64(), pa.decimal128(10, 2)),
        (Decimal("0.125"), pa.decimal128(10, 3), pa.decimal128(10, 2)),
        (Decimal("12345678.5"), pa.decimal128(38, 1), pa.decimal128(5, 1)),
        (1e300, pa.float64(), pa.float32()),
        (0.1, pa.float64(), pa.float32()),
        (1.5, pa.float64(), pa.int64()),
        (-0.0, pa.float64(), pa.int64()),
        (math.nan, pa.float64(), pa.int64()),
        (2**53 + 1, pa.int64(), pa.float64()),
        (300, pa.int64(), pa.int8()),
        (-1, pa.int64(), pa.uint64()),
        (b"\xff", pa.binary(), pa.string()),
        ([1, 300], pa.list_(pa.int64()), pa.list_(pa.int8())),
        ({"a": [{"b": 0.1}]}, pa.struct([("a", pa.list_(pa.struct([("b", pa.float64())])))]),
         pa.struct([("a", pa.list_(pa.struct([("b", pa.float32())])))])),
        ([("k", 300)], pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int8())),
        (None, pa.int64(), pa.field("x", pa.int64(), nullable=False)),
        ({"a": None}, pa.struct([("a", pa.int64())]), pa.struct([pa.field("a", pa.int64(), nullable=False)])),
    ],
)  # fmt: skip
def test_a_value_that_does_not_fit_is_reported_with_its_row(
    value: object, stored: pa.DataType, wanted: pa.DataType
) -> None:
    """The first of two, behind rows that fit and in the middle of a slice."""
    fine = {"a": 1} if value == {"a": None} else 1 if value is None else None
    array = pa.array([value, fine, fine, fine, value, fine, value], stored).slice(1)
    field = wanted if isinstance(wanted, pa.Field) else pa.field("x", wanted)
    with pytest.raises(InexactValueError) as caught:
        exact_cast(array, field)
    assert caught.value.row == 3
    assert exact_cast(array.slice(0, 3), field).to_pylist() == [fine] * 3


@pytest.mark.parametrize(
    ("value", "stored", "wanted"),
    [
        (1.0, pa.float64(), pa.int64()),
        (0.5, pa.float64(), pa.decimal128(10, 2)),
        (math.inf, pa.float64(), pa.float32()),
        (dt.date(1, 1, 1), pa.date32(), pa.timestamp("us")),
        ("é", pa.string(), pa.large_string()),
        ({"a": 1, "b": "x"}, pa.struct([("b", pa.string()), ("a", pa.int8())]),
         pa.struct([("a", pa.int64()), ("b", pa.string())])),
        ([1, None], pa.list_(pa.int8()), pa.large_list(pa.int64())),
        ([("k", 3)], pa.map_(pa.string(), pa.int8()), pa.map_(pa.string(), pa.int64())),
        ("a", pa.dictionary(pa.int8(), pa.string()), pa.string()),
    ],
)  # fmt: skip
def test_a_value_that_fits_comes_in_the_other_type(value: object, stored: pa.DataType, wanted: pa.DataType) -> None:
    """Nulls stay nulls."""
    found = cast([value, None], stored, wanted)
    assert found[1] is None
    assert found[0] == (dt.datetime(1, 1, 1) if value == dt.date(1, 1, 1) else value)


def test_a_null_struct_does_not_break_a_field_that_may_not_be_null() -> None:
    """The field is null with its struct; that is no value."""
    wanted = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    assert cast([{"a": 1}, None], pa.struct([("a", pa.int64())]), wanted) == [{"a": 1}, None]


def test_leaves_of_a_slice_are_those_of_its_rows() -> None:
    """Lists, maps and structs are walked to their plain arrays."""
    kind = pa.struct([("l", pa.list_(pa.int64())), ("m", pa.map_(pa.string(), pa.int64()))])
    array = pa.array([{"l": [0], "m": [("z", 9)]}, {"l": [1, 2], "m": [("a", 3)]}, None], kind)
    assert [leaf.to_pylist() for leaf in leaves(array.slice(1))] == [[1, 2], ["a"], [3]]


@given(st.data())
def test_what_is_cast_comes_back(data: st.DataObject) -> None:
    """Among all numbers: the value after the cast is exactly the value before, or there is an error."""
    stored, wanted = data.draw(st.sampled_from(NUMBERS)), data.draw(st.sampled_from(NUMBERS))
    numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(), st.decimals(allow_nan=False, places=2))
    number = data.draw(numbers)
    try:
        array = pa.array([number], stored)
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        return
    try:
        found = exact_cast(array, pa.field("x", wanted))
    except InexactValueError:
        return
    before, after = array[0].as_py(), found[0].as_py()
    if isinstance(before, float) and isinstance(after, float):
        assert struct.pack("d", before) == struct.pack("d", after) or (math.isnan(before) and math.isnan(after))
    elif isinstance(before, float):
        # A decimal that was given as a float is the one that is written so.
        assert float(after) == before
        assert not (before == 0 and math.copysign(1, before) < 0)
    elif isinstance(after, float):
        assert type(before)(after) == before
    else:
        assert before == after
