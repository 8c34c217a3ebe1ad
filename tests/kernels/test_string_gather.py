"""Gathered strings are those that Arrow takes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_end import ending_with_memory

from tidegate.state.kernels.partition import gather_strings, has_strings

_TYPES = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
_TEXT = "wörter, länger als sechzehn Bytes, und kürzere"


@st.composite
def gathers(draw: st.DrawFn) -> tuple[pa.Array, list[int]]:
    """A slice of a column of strings of any length, and some of its rows in any order, also twice."""
    texts = st.integers(0, 45).map(lambda length: _TEXT[:length]) | st.text(max_size=40)
    values = draw(st.lists(texts, min_size=1, max_size=20))
    start = draw(st.integers(0, len(values) - 1))
    column = pa.array(values, draw(st.sampled_from(_TYPES[:2])))
    column = column.slice(start, draw(st.integers(1, len(values) - start)))
    return column, draw(st.lists(st.integers(0, len(column) - 1), max_size=30))


@settings(max_examples=300, deadline=None)
@given(gathers())
def test_gathered_strings_equal_those_of_arrow(case: tuple[pa.Array, list[int]]) -> None:
    """Of any length, at any place of the column, and no byte more."""
    column, rows = case
    assert has_strings(column)
    result = gather_strings(column, np.array(rows, dtype=np.int32))
    assert result is not None
    result.validate(full=True)
    assert result.equals(column.take(pa.array(rows, pa.int32())))
    assert result.buffers()[2].size == sum(len(text.encode()) for text in result.to_pylist())


@pytest.mark.parametrize("data_type", _TYPES)
def test_lengths_at_the_ends_of_buffers(data_type: pa.DataType) -> None:
    """The first and the last string of what is read, and of what is written, of each length."""
    for length in range(36):
        values = [bytes(range(65, 65 + length)), bytes(range(65 + length, 65, -1)), b""]
        for column in (pa.array(values, data_type), pa.array(values[:1], data_type)):
            for rows in ([0], [0, 0], [len(column) - 1, 0], list(range(len(column)))):
                result = gather_strings(column, np.array(rows, dtype=np.int32))
                assert result is not None
                assert result.equals(column.take(pa.array(rows)))


def test_bytes_that_end_where_memory_does() -> None:
    """Nothing behind a column's bytes is read."""
    for length in (1, 7, 8, 9, 16, 17, 33):
        with ending_with_memory(b"a" * 20 + b"b" * length) as data:
            buffers = [None, pa.array([0, 20, 20 + length], pa.int32()).buffers()[1], pa.py_buffer(data)]
            column = pa.Array.from_buffers(pa.string(), 2, buffers)
            result = gather_strings(column, np.array([1, 0, 1, 0, 0], dtype=np.int32))
            assert result is not None
            assert result.to_pylist() == ["b" * length, "a" * 20, "b" * length, "a" * 20, "a" * 20]


def test_what_is_gathered_otherwise() -> None:
    """Columns with nulls, without rows, and of other types; and more bytes than offsets of 32 bits can say."""
    for column in (pa.array(["a", None]), pa.array([], pa.string()), pa.array([1]), pa.array(["a"], pa.string_view())):
        assert not has_strings(column)
    long = ["x" * (1 << 20)]
    rows = np.zeros(1 << 11, dtype=np.int32)
    assert gather_strings(pa.array(long), rows) is None
    fits = gather_strings(pa.array(long), rows[1:17])
    assert fits is not None
    assert fits.to_pylist() == long * 16
