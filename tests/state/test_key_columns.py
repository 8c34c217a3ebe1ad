"""`KeyColumns`: keys in chunks that are merged now and then, and read wherever they lie."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.columnar import key_space
from tidegate.state.columnar.key_space import CHUNKS_MERGED, KeyColumns
from tidegate.storage.errors import ConfigurationError

SCHEMA = pa.schema({"k": pa.int64(), "text": pa.string()})


def _batch(first: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"k": np.arange(first, first + rows), "text": [str(first + i) for i in range(rows)]})


def _filled(sizes: list[int]) -> KeyColumns:
    keys = KeyColumns(SCHEMA)
    for size in sizes:
        keys.append(_batch(keys.rows, size))
    return keys


def test_number_of_chunks_is_bounded() -> None:
    """A thousand batches with a new key each do not leave a thousand chunks."""
    assert len(_filled([1] * 1000).freeze().chunks) <= (CHUNKS_MERGED - 1) * math.ceil(math.log(1000, CHUNKS_MERGED))


def test_a_key_is_copied_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of batches of one size each is copied once in eight times as many; a long chunk not for a few short ones."""
    copied = 0
    concat = pa.concat_batches

    def counted(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
        nonlocal copied
        merged = concat(batches)
        copied += merged.num_rows
        return merged

    monkeypatch.setattr(key_space.pa, "concat_batches", counted)
    _filled([10] * 512)
    assert copied == 3 * 5120
    copied = 0
    _filled([1000, *[1] * 64])
    assert copied == 2 * 64


def test_chunks_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are merged up to it, no further, and no chunk that may grow no more keeps others apart."""
    monkeypatch.setattr(key_space, "_CHUNK_ROWS_MAX", 100)
    lengths = [chunk.num_rows for chunk in _filled([7] * 1000).freeze().chunks]
    assert max(lengths) <= 100
    assert len(lengths) <= 7000 / 50 + CHUNKS_MERGED


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.data())
def test_keys_are_found_wherever_they_lie(sizes: list[int], data: st.DataObject) -> None:
    """In any order, also several times, all columns or some."""
    keys = _filled(sizes)
    slots = np.array(data.draw(st.lists(st.integers(0, keys.rows - 1), max_size=50)), dtype=np.int32)
    frozen = keys.freeze()
    assert len(frozen.chunks) <= CHUNKS_MERGED * (1 + math.log2(keys.rows + 1))
    assert frozen.take(slots).to_pylist() == [{"k": slot, "text": str(slot)} for slot in slots.tolist()]
    assert frozen.take(slots, ["text"]).to_pylist() == [{"text": str(slot)} for slot in slots.tolist()]
    assert pa.Table.from_batches(keys.pieces(), SCHEMA).column("k").to_pylist() == list(range(keys.rows))
    assert keys.size_bytes == sum(chunk.nbytes for chunk in frozen.chunks)


def test_more_strings_than_a_column_holds_are_refused() -> None:
    """With what is wrong, and what to do: a job that restarts would meet them again. Nobody reads these rows."""
    size_bytes = (1 << 30) + 1
    offsets = pa.py_buffer(np.array([0, size_bytes], dtype=np.int32))
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(mmap.mmap(-1, size_bytes))])
    keys = KeyColumns(pa.schema({"k": pa.int64(), "text": pa.string()}))
    for number in range(2):
        keys.append(pa.record_batch({"k": [number], "text": text}))
    frozen = keys.freeze()
    assert frozen.take(np.array([1, 0], dtype=np.int32), ["k"]).to_pylist() == [{"k": 1}, {"k": 0}]
    for slots in ([0, 1], [1, 0]):
        with pytest.raises(
            ConfigurationError, match=r"keyed state with the columns k, text: 2 rows .* to `large_string`"
        ):
            frozen.take(np.array(slots, dtype=np.int32))
