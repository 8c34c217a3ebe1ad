"""Chunks of state: what is encoded comes back, by either way of writing, and large columns are not copied."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidegate.storage.state import state_file
from tidegate.storage.state.state_file import Compression, decode_chunk, encode_chunk

_ROWS = 5_000


def _rows() -> pa.RecordBatch:
    numbers = np.arange(_ROWS)
    return pa.record_batch(
        {
            "number": numbers,
            "null": pa.array([None if n % 3 else n for n in range(_ROWS)]),
            "flag": pa.array(numbers % 2 == 0),
            "text": pa.array([f"text {n}" for n in range(_ROWS)]),
            "word": pa.array([f"word {n % 7}" for n in range(_ROWS)]).dictionary_encode(),
            "list": pa.array([[n] * (n % 4) for n in range(_ROWS)]),
        }
    )


@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("columns", [["number"], ["number", "null", "flag", "text", "list"], ["number", "word"]])
@pytest.mark.parametrize("bounds", [(0, _ROWS), (0, 1), (1_003, 2_001)])
def test_a_chunk_comes_back_by_either_way(
    monkeypatch: pytest.MonkeyPatch, bounds: tuple[int, int], columns: list[str], compression: Compression | None
) -> None:
    """Of all kinds of columns, whole and a slice of them, and no byte of other rows is in it."""
    rows = _rows().select(columns).slice(bounds[0], bounds[1] - bounds[0])
    for bytes_min in (0, 1 << 40):
        monkeypatch.setattr(state_file, "_WRITTEN_BYTES_MIN", bytes_min)
        encoded = b"".join(encode_chunk(rows, compression))
        assert decode_chunk(encoded, "here").equals(rows)
        assert len(encoded) < 3_000 + 2 * rows.nbytes


def test_large_columns_are_written_from_where_they_are() -> None:
    """The part of the file is the memory of the column."""
    values = np.arange(100_000)
    rows = pa.record_batch({"number": values}).slice(10_000, 80_000)
    (part,) = [part for part in encode_chunk(rows) if len(part) == 640_000]
    assert np.shares_memory(np.frombuffer(part, dtype=np.int64), values)
