"""The column that says what a row of a stream of changes is: read from its memory, or as Arrow reads it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tidegate.operators.changes import CHANGE, kinds_of, rows_that_come

KINDS = ["+I", "-U", "+U", "-D", "+I"]
COMES = [True, False, True, False, True]


@pytest.mark.parametrize("data_type", [pa.string(), pa.large_string(), pa.string_view()])
def test_rows_that_come_in_any_type_of_text(data_type: pa.DataType) -> None:
    """Also in a slice, and in dictionaries."""
    column = pa.array(KINDS).cast(data_type)
    assert rows_that_come(pa.record_batch({CHANGE: column})).tolist() == COMES
    assert rows_that_come(pa.record_batch({CHANGE: column}).slice(1, 3)).tolist() == COMES[1:4]
    assert rows_that_come(pa.record_batch({CHANGE: pa.array(KINDS).dictionary_encode()})).tolist() == COMES
    assert rows_that_come(pa.record_batch({CHANGE: column}).slice(5)).tolist() == []


@pytest.mark.parametrize("wrong", ["+", "+D", "-I", "+U ", "", "++", None, "é"])
def test_what_is_no_kind_is_refused(wrong: str | None) -> None:
    """Whether or not it has two bytes, and also where the bytes of all rows together would be kinds."""
    with pytest.raises(ValueError, match="give one of"):
        rows_that_come(pa.record_batch({CHANGE: pa.array([*KINDS, wrong])}))
    with pytest.raises(ValueError, match="give one of"):
        rows_that_come(pa.record_batch({CHANGE: ["+", "I+U"]}))


def test_kinds_of_parts() -> None:
    """A column of strings, valid and in order."""
    column = kinds_of([("-U", 2), ("+U", 1), ("-D", 0), ("+I", 1)])
    column.validate(full=True)
    assert column.type == pa.string()
    assert column.to_pylist() == ["-U", "-U", "+U", "+I"]
    assert kinds_of([]).to_pylist() == []
