"""Rows of two tables are compared by key, whatever their values are."""

from __future__ import annotations

import copy
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidegate as tg
from tidegate.recovery.differences import KeyChanges, compare_rows

NUMBERS = st.none() | st.integers(0, 3)
TYPES: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): NUMBERS,
    pa.float64(): st.none() | st.sampled_from([0.5, float("nan")]),
    pa.string(): st.none() | st.sampled_from(["", "a"]),
    pa.list_(pa.int64()): st.none() | st.lists(NUMBERS, max_size=2),
    pa.map_(pa.string(), pa.int64()): st.none() | st.dictionaries(st.sampled_from("abc"), NUMBERS, max_size=2),
    pa.struct({"x": pa.int64(), "l": pa.list_(pa.string())}): st.none()
    | st.fixed_dictionaries({"x": NUMBERS, "l": st.none() | st.lists(st.sampled_from("ab"), max_size=1)}),
}


def table(rows: dict[Any, Any], data_type: pa.DataType) -> pa.Table:
    """Keys and values; the entries of maps in the order in which they are given."""
    values = [list(v.items()) if isinstance(v, dict) and pa.types.is_map(data_type) else v for v in rows.values()]
    return pa.table({"k": pa.array(list(rows), pa.int64()), "v": pa.array(values, data_type)})


def same(one: Any, other: Any) -> bool:
    """Equal, NaN being one value."""
    return repr(sorted(one.items()) if isinstance(one, dict) else one) == repr(
        sorted(other.items()) if isinstance(other, dict) else other
    )


@given(data=st.data(), data_type=st.sampled_from(list(TYPES)))
def test_counts_are_those_of_dictionaries(data: st.DataObject, data_type: pa.DataType) -> None:
    """Added, removed, changed and same keys, for null, nested and unordered values."""
    rows = st.dictionaries(st.none() | st.integers(0, 8), TYPES[data_type], max_size=8)
    old = data.draw(rows)
    new = copy.deepcopy(old) | data.draw(rows)
    for key in data.draw(st.lists(st.sampled_from(list(new) or [0]), max_size=3)):
        new.pop(key, None)
    common = old.keys() & new.keys()
    equal = sum(same(old[key], new[key]) for key in common)

    found = compare_rows(table(old, data_type), table(dict(reversed(new.items())), data_type), ["k"], "it")

    assert found == KeyChanges(len(new.keys() - old), len(old.keys() - new), len(common) - equal, equal)


def test_the_order_of_entries_of_a_map_is_nothing() -> None:
    """Backends keep entries in an order of their own."""
    data_type = pa.map_(pa.string(), pa.int64())
    old, new = (table({1: entries}, data_type) for entries in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    assert compare_rows(old, new, ["k"], "it") == KeyChanges(0, 0, 0, 1)


def test_columns_of_one_table_are_not_compared() -> None:
    """A new aggregate adds a column to the rows of every key. Another key cannot be compared."""
    old, new = pa.table({"k": [1, 2], "v": [3, 4]}), pa.table({"new": [7, 7], "v": [3, 5], "k": [1, 2]})
    assert compare_rows(old, new, ["k"], "it") == KeyChanges(0, 0, 1, 1)
    with pytest.raises(tg.ConfigurationError, match=r"not the key \['new'\] in both"):
        compare_rows(old, new, ["new"], "it")


def test_wider_types_are_compared_and_others_refused() -> None:
    """A state that became wider has the same values; one that became something else cannot be compared."""
    old, new = pa.table({"k": [1], "v": pa.array([1], pa.int32())}), pa.table({"k": [1], "v": [1]})
    assert compare_rows(old, new, ["k"], "it") == KeyChanges(0, 0, 0, 1)
    with pytest.raises(tg.ConfigurationError, match="it has other types in one checkpoint"):
        compare_rows(pa.table({"k": [1], "v": ["x"]}), new, ["k"], "it")
