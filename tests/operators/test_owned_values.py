"""What functions hand over is copied at that moment: they may change their own objects afterwards."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.operators.output_schema import PinnedSchema
from tidegate.operators.row_values import owned_row, owned_value
from tidegate.storage.schemas.batches import memory_of, owned_array, owned_batch

_VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(), st.binary().map(bytearray), st.integers(0, 9).map(np.int64)),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(), inner), st.just(np.arange(3))
    ),
    max_leaves=8,
)


def _spoil(value: Any) -> None:
    """Change everything in a value that can be changed."""
    if isinstance(value, bytearray):
        value.append(7)
    elif isinstance(value, np.ndarray):
        value += 1
    elif isinstance(value, list | tuple | dict):
        for part in list(value.values() if isinstance(value, dict) else value):
            _spoil(part)
        if isinstance(value, list):
            value.append("spoiled")
        elif isinstance(value, dict):
            value["spoiled"] = True


@given(st.dictionaries(st.text(), _VALUES))
def test_a_copy_of_a_row_stays_as_it_was(row: dict[str, Any]) -> None:
    """It equals the row, and shares nothing with it that can be changed."""
    before = repr(row)
    owned = owned_row(row)
    assert repr(owned) == before
    _spoil(row)
    assert repr(owned) == before


def test_rows_may_be_any_mapping() -> None:
    """A dict comes out; views of memory become bytes."""
    assert owned_row(OrderedDict(a=[1])) == {"a": [1]}
    assert owned_row(UserDict(a=memoryview(b"x"))) == {"a": b"x"}
    with pytest.raises(TypeError, match=r"a row must be a dict, not list: .\[1\]."):
        owned_row([1])


def test_a_value_that_cannot_be_copied_is_named() -> None:
    """A generator is no value of a column."""
    with pytest.raises(TypeError, match="a row has a generator, which is not a value of a column"):
        owned_row({"a": (n for n in range(2))})


@pytest.mark.parametrize("value", [pa.scalar(5), np.float32(1), "text", None])
def test_values_that_cannot_be_changed_are_not_copied(value: object) -> None:
    """They are shared."""
    assert owned_value(value) is value


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (pa.list_(pa.int64()), [1]),
        (pa.struct({"a": pa.int64()}), {"a": 1}),
        (pa.binary(), bytearray(b"x")),
        (pa.map_(pa.string(), pa.int64()), [["a", 1]]),
        (pa.list_(pa.int64()), np.arange(2)),
    ],
)
@pytest.mark.parametrize("given_schema", [True, False])
def test_rows_are_copied_as_deeply_as_the_schema_asks_for(dtype: pa.DataType, value: Any, given_schema: bool) -> None:
    """A value that can be changed is copied where its type is known, and where it is not known yet."""
    pinned = PinnedSchema(pa.schema({"v": dtype}) if given_schema else None)
    owned = pinned.own_row({"v": value})
    before = repr(owned)
    _spoil(value)
    assert repr(owned) == before


_TYPES = st.sampled_from(
    [
        *(pa.int64(), pa.bool_(), pa.string(), pa.string_view(), pa.list_(pa.int64()), pa.null()),
        *(pa.dictionary(pa.int32(), pa.string()), pa.struct({"a": pa.string_view()}), pa.list_view(pa.int8())),
        *(pa.map_(pa.string(), pa.int64()), pa.binary(2), pa.timestamp("us"), pa.large_string()),
    ]
)


@given(_TYPES, st.integers(0, 40), st.integers(0, 40))
def test_arrays_are_copied_whatever_their_type(dtype: pa.DataType, start: int, rows: int) -> None:
    """The same values, none of them in the same memory, also of slices and of texts and dictionaries."""
    whole = _example(dtype, 60)
    part = whole.slice(start, rows)
    owned = owned_array(part)
    assert owned.type == part.type
    assert owned.equals(part)
    owned.validate(full=True)
    if rows:
        assert not _addresses(owned) & _addresses(whole)


def test_only_columns_in_other_memory_are_copied() -> None:
    """What a function passes on stays where it is, also as a slice; its own buffer is copied."""
    batch = pa.record_batch({"a": np.arange(10), "b": np.arange(10)})
    own = np.arange(10)
    result = pa.record_batch({"a": batch["a"].slice(2, 5), "own": own[:5]})
    owned = owned_batch(result, memory_of(batch))
    own[:] = -1
    assert owned.to_pydict() == {"a": [2, 3, 4, 5, 6], "own": [0, 1, 2, 3, 4]}
    assert _addresses(owned["a"]) == _addresses(batch["a"])


def test_a_small_view_does_not_keep_a_large_buffer() -> None:
    """A slice is copied alone."""
    large = pa.array(np.arange(100_000))
    assert owned_array(large.slice(7, 3)).get_total_buffer_size() < 1_000


def _example(dtype: pa.DataType, rows: int) -> pa.Array:
    if pa.types.is_dictionary(dtype):
        return _example(pa.string(), rows).dictionary_encode()
    made: dict[bool, Any] = {}
    values: list[Any] = []
    for number in range(rows):
        made[True] = f"text {number} that is longer than twelve bytes"
        if number % 7 == 3 or pa.types.is_null(dtype):
            values.append(None)
        elif pa.types.is_struct(dtype):
            values.append({"a": made[True]})
        elif pa.types.is_map(dtype):
            values.append([(made[True], number)])
        elif pa.types.is_list(dtype) or pa.types.is_list_view(dtype):
            values.append([number, None])
        elif pa.types.is_boolean(dtype):
            values.append(number % 2 == 0)
        elif pa.types.is_integer(dtype) or pa.types.is_timestamp(dtype):
            values.append(number)
        elif pa.types.is_fixed_size_binary(dtype):
            values.append(b"%02d" % number)
        else:
            values.append(made[True])
    return pa.array(values, type=dtype)


def _addresses(array: pa.Array) -> set[int]:
    found = {buffer.address for buffer in array.buffers() if buffer is not None and buffer.size}
    return found | _addresses(array.dictionary) if pa.types.is_dictionary(array.type) else found
