"""Canonical state: equal rows are equal bytes, however arrays lie in memory and wherever a backend has cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.errors import CorruptionError
from tidegate.storage.state import canonical
from tidegate.storage.state.canonical import canonical_array, canonical_chunks, row_bytes
from tidegate.storage.state.snapshot import StateChunk
from tidegate.storage.state.state_file import encode_chunk

_TEXT = st.none() | st.text("abz", max_size=3)
_POINT = pa.struct({"x": pa.int64(), "tag": pa.string()})
_POINTS = st.none() | st.fixed_dictionaries({"x": st.none() | st.integers(-9, 9), "tag": _TEXT})

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "null": (pa.null(), st.none()),
    "bool": (pa.bool_(), st.none() | st.booleans()),
    "int64": (pa.int64(), st.none() | st.integers(-9, 9)),
    "float32": (pa.float32(), st.none() | st.floats(width=32, allow_nan=False)),
    "decimal": (pa.decimal128(9, 2), st.none() | st.decimals(-99, 99, places=2)),
    "fixed binary": (pa.binary(3), st.none() | st.binary(min_size=3, max_size=3)),
    "string": (pa.string(), _TEXT),
    "large binary": (pa.large_binary(), st.none() | st.binary(max_size=3)),
    "string view": (pa.string_view(), _TEXT),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), _TEXT),
    "struct": (_POINT, _POINTS),
    "list": (pa.list_(pa.string()), st.none() | st.lists(_TEXT, max_size=3)),
    "large list": (pa.large_list(_POINT), st.none() | st.lists(_POINTS, max_size=2)),
    "fixed list": (
        pa.list_(pa.int64(), 2),
        st.none() | st.lists(st.none() | st.integers(0, 9), min_size=2, max_size=2),
    ),
    "map": (
        pa.map_(pa.string(), pa.list_(pa.int64())),
        st.none() | st.lists(st.tuples(st.text("ab"), st.lists(st.integers(0, 9), max_size=2)), max_size=3),
    ),
    "timestamp": (pa.timestamp("us"), st.none() | st.integers(-(2**40), 2**40)),
}


def _encoded(array: pa.Array) -> bytes:
    return b"".join(encode_chunk(pa.record_batch({"v": array})))


def _elsewhere(array: pa.Array) -> pa.Array:
    """The same values in the middle of others, with other things beneath the nulls."""
    filler = pa.array(array.to_pylist()[::-1], array.type)
    joined = pa.concat_arrays([filler, array, filler]) if len(array) else array
    middle = joined.slice(len(array), len(array))
    if pa.types.is_integer(array.type) and array.null_count:
        garbage = np.frombuffer(middle.buffers()[1], dtype=np.int64).copy()
        garbage[~joined.is_valid().to_numpy(zero_copy_only=False)] = 77
        joined = pa.Array.from_buffers(array.type, len(joined), [joined.buffers()[0], pa.py_buffer(garbage)])
        middle = joined.slice(len(array), len(array))
    return middle


@pytest.mark.parametrize("name", TYPES)
@given(data=st.data())
@settings(max_examples=30)
def test_equal_arrays_become_equal_bytes(name: str, data: st.DataObject) -> None:
    """Slices, what is beneath nulls and the order of a dictionary do not show; the values and the type stay."""
    data_type, values = TYPES[name]
    array = pa.array(data.draw(st.lists(values, max_size=12)), data_type)

    found = canonical_array(_elsewhere(array))

    found.validate(full=True)
    assert found.type == array.type
    assert found.equals(array)
    assert _encoded(found) == _encoded(canonical_array(array))
    sizes = row_bytes(found)
    assert sizes.shape == (len(array),)
    assert (sizes >= 0).all()


_ROWS = st.lists(st.tuples(st.integers(0, 4), st.none() | st.text("ab", max_size=40)), max_size=60)


def _chunk(rows: list[tuple[int, str | None]]) -> StateChunk:
    first = rows[0][0] if rows else 0
    ends = [sum(group < wanted for group, _ in rows) for wanted in range(first, rows[-1][0] + 2)] if rows else [0]
    columns = {
        "k": pa.array([group for group, _ in rows], pa.int64()),
        "v": pa.array([v for _, v in rows], pa.string()),
    }
    return StateChunk(pa.record_batch(columns), first, tuple(ends))


@settings(max_examples=50)
@given(rows=_ROWS.map(lambda rows: sorted(rows, key=lambda row: row[0])), data=st.data())
def test_chunks_depend_on_the_rows_alone(rows: list[tuple[int, str | None]], data: st.DataObject) -> None:
    """However a backend has cut them: the bytes are the same, and every chunk but the last is full."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=6)))
    pieces = [_chunk(rows[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(canonical, "CHUNK_ROWS", 7)
        patch.setattr(canonical, "CHUNK_BYTES", 150)
        found = list(canonical_chunks(pieces))
        whole = list(canonical_chunks([_chunk(rows)]))

    assert [b"".join(encode_chunk(c.rows)) for c in found] == [b"".join(encode_chunk(c.rows)) for c in whole]
    assert [(c.first_group, c.group_rows) for c in found] == [(c.first_group, c.group_rows) for c in whole]
    assert [(row["k"], row["v"]) for c in found for row in c.rows.to_pylist()] == rows
    for chunk in found:
        groups = np.repeat(chunk.first_group + np.arange(len(chunk.group_rows) - 1), np.diff(chunk.group_rows))
        assert groups.tolist() == chunk.rows.column("k").to_pylist()
    for chunk in found[:-1]:
        size = sum(int(row_bytes(column).sum()) for column in chunk.rows.columns)
        assert chunk.rows.num_rows == 7 or size >= 150


def test_rows_that_do_not_come_by_key_group_are_refused() -> None:
    """A reader finds rows by the key groups that a chunk names: rows of a backend that does not sort would be lost."""
    with pytest.raises(CorruptionError, match="order of their key groups"):
        list(canonical_chunks([_chunk([(3, "a")]), _chunk([(1, "b")])]))
