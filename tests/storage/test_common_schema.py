"""Rows of one state that were stored with several schemas are shown in one of these, or not at all."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.evolution import adapted, common_schema


def schema(value: pa.DataType) -> pa.Schema:
    """A key and a value of this type."""
    return pa.schema([("k", pa.string()), ("v", value)])


@pytest.mark.parametrize(
    ("stored", "shown"),
    [
        ([pa.int64()], pa.int64()),
        ([pa.int32(), pa.int64()], pa.int64()),
        ([pa.int64(), pa.int32()], pa.int64()),
        ([pa.int32(), pa.int64(), pa.int32()], pa.int64()),
        ([pa.int64(), pa.float64()], pa.float64()),
        ([pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int16(), pa.string())], None),
    ],
)
def test_the_widest_schema_takes_the_rows_of_all(stored: list[pa.DataType], shown: pa.DataType | None) -> None:
    """Whichever was stored last; dictionaries have the indexes with which they rest."""
    expected = pa.dictionary(pa.int32(), pa.string()) if shown is None else shown
    assert common_schema(map(schema, stored), "s", "op") == schema(expected)


def test_where_none_takes_all_nothing_is_guessed() -> None:
    """The error names state, operator and both types."""
    with pytest.raises(ConfigurationError, match=r"(?s)state 's'.*operator 'op'.*int64.*string"):
        common_schema([schema(pa.int64()), schema(pa.string())], "s", "op")


def test_a_sum_that_has_become_one_of_floats_is_shown_where_that_is_exact() -> None:
    """Else a number would be another one, and nobody would know."""
    exact = pa.record_batch({"k": ["a"], "v": [2**53]}, schema(pa.int64()))
    assert adapted(exact, schema(pa.float64()), "s", "op").to_pylist() == [{"k": "a", "v": float(2**53)}]
    with pytest.raises(ConfigurationError, match=r"state 's' of operator 'op' has numbers in 'v' that float64 cannot"):
        adapted(exact.set_column(1, "v", pa.array([2**53 + 1])), schema(pa.float64()), "s", "op")
