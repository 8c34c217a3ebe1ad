"""Fast conversions give what Arrow gives back of the same values, or say that they do not know."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.operators.row_values import exact_array
from tidegate.operators.state.state_types import NO_FAST_PATH, fast_conversion

_TYPES = [
    *(pa.int8(), pa.int32(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string(), pa.binary(), pa.bool_()),
    *(pa.date32(), pa.timestamp("us"), pa.timestamp("ns"), pa.duration("us"), pa.decimal128(5, 2)),
]
_NESTED = [
    *(pa.list_(each) for each in _TYPES),
    pa.struct({"a": pa.int64(), "b": pa.list_(pa.float32()), "c": pa.struct({"d": pa.string()})}),
    pa.struct([pa.field("a", pa.int64(), nullable=False), pa.field("a", pa.int8())]),
    pa.list_(pa.field("item", pa.int8(), nullable=False)),
]
_PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(-(2**64), 2**64), st.integers(-300, 300), st.floats(), st.text(max_size=3)),
    *(st.binary(max_size=3), st.dates(), st.datetimes(), st.timedeltas(), st.just("\ud800"), st.decimals(-9, 9)),
)
_VALUES = st.recursive(
    _PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries({"a": inner, "b": inner, "c": inner})
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@pytest.mark.parametrize("data_type", [*_TYPES, *_NESTED], ids=str)
def test_what_is_quick_is_what_arrow_gives(data_type: pa.DataType) -> None:
    """For any value: never another one, and never one that Arrow refuses."""
    fast = fast_conversion(data_type)

    @settings(max_examples=40, deadline=None)
    @given(value=_VALUES)
    def check(value: Any) -> None:
        stored = fast(value)
        if stored is not NO_FAST_PATH:
            given_back = exact_array([value], data_type)[0].as_py()
            assert repr(stored) == repr(given_back)

    check()


def test_common_values_are_quick() -> None:
    """Numbers, texts, moments, and records and lists of them, with None in them."""
    record = pa.struct({"n": pa.int32(), "at": pa.timestamp("us"), "tags": pa.list_(pa.string())})
    for value, data_type in (
        (-1, pa.int8()),
        (0.1, pa.float32()),
        ("ü", pa.string()),
        ({"n": None, "at": dt.datetime(2026, 1, 1), "tags": ["a", None]}, record),
        ([{"n": 1, "at": None, "tags": None}], pa.list_(record)),
    ):
        assert fast_conversion(data_type)(value) is not NO_FAST_PATH
