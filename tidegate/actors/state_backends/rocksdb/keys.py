"""Turns the keys of a batch into database keys, and rows of any columns into values.

`storage/rocksdb/value_layout.py`, `keys.py` and `row_values.py` have their layouts. Neighbours in the database share
blocks, so what is read or written in its order takes half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.actors.kernels.columns import Strings, key_forms
from tidegate.actors.kernels.hashing import hash_forms
from tidegate.actors.kernels.row_encoding import encode_rows
from tidegate.storage.rocksdb.row_values import physical
from tidegate.storage.rocksdb.value_layout import HEAD
from tidegate.storage.state.key_groups import key_groups_of

_GROUP_BYTES = 2
_WORD_BYTES = 8
_WORDS_MAX = 4
"""Keys of one width are sorted as so many words; longer ones as strings of bytes."""


def database_keys(
    keys: pa.RecordBatch, max_parallelism: int, number: int, grouped_by: int | None = None, namespace: bool = False
) -> list[bytes]:
    """The database key of each row of stored key columns, for the state with this number.

    The first `grouped_by` columns choose the key group; None: all do. With `namespace` all but the first do.

    Raises ConfigurationError for a column of a type that cannot be a key.
    """
    encoded = _encoded(keys, max_parallelism, number, grouped_by, namespace)
    data = encoded.data.tobytes()
    return [data[start:stop] for start, stop in pairwise(encoded.offsets.tolist())]


def ordered_keys(
    keys: pa.RecordBatch, max_parallelism: int, number: int, grouped_by: int | None = None, namespace: bool = False
) -> tuple[list[bytes], NDArray[np.int64]]:
    """The same in the order of the database, and of each the row that it belongs to. At least one row."""
    encoded = _encoded(keys, max_parallelism, number, grouped_by, namespace)
    rows = len(encoded.offsets) - 1
    width = int(encoded.offsets[1])
    words = -(-width // _WORD_BYTES)
    if words <= _WORDS_MAX and rows * width == len(encoded.data) and bool((np.diff(encoded.offsets) == width).all()):
        padded = np.zeros((rows, words * _WORD_BYTES), dtype=np.uint8)
        padded[:, :width] = encoded.data.reshape(rows, width)
        columns = padded.view(">u8").astype(np.uint64)
        order = np.lexsort(columns.T[::-1])
        return np.ascontiguousarray(padded[order, :width]).view(f"V{width}").reshape(rows).tolist(), order
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), rows, [None, pa.py_buffer(encoded.offsets), pa.py_buffer(encoded.data)]
    )
    ranked = pc.sort_indices(strings)
    return strings.take(ranked).to_pylist(), ranked.to_numpy().astype(np.int64)


def packed_rows(columns: Sequence[pa.Array], schema: pa.Schema) -> list[bytes]:
    """Rows of value columns of any types, in the encoding of keys."""
    rows = physical(pa.RecordBatch.from_arrays(list(columns), schema=schema))
    encoded = encode_rows(key_forms(rows, rows.schema.names), rows.num_rows)
    data = encoded.data.tobytes()
    return [data[start:stop] for start, stop in pairwise(encoded.offsets.tolist())]


def number_bytes(number: int) -> bytes:
    """The bytes of a state's number in a key."""
    return HEAD.pack(0, number)[_GROUP_BYTES:]


def key_of_state(key: bytes, number: bytes) -> bytes:
    """The same key for another state, given as `number_bytes`."""
    return key[:_GROUP_BYTES] + number + key[HEAD.size :]


def key_group_of(key: bytes) -> int:
    """The key group in a key."""
    return int.from_bytes(key[:_GROUP_BYTES], "big")


def _encoded(
    keys: pa.RecordBatch, max_parallelism: int, number: int, grouped_by: int | None, namespace: bool
) -> Strings:
    rows = keys.num_rows
    forms = key_forms(keys, keys.schema.names)
    heads = np.empty((rows, HEAD.size), dtype=np.uint8)
    grouping = forms[1:] if namespace else forms[:grouped_by]
    groups = key_groups_of(hash_forms(grouping, rows), max_parallelism).astype(">u2")
    heads[:, :_GROUP_BYTES] = groups.view(np.uint8).reshape(rows, _GROUP_BYTES)
    heads[:, _GROUP_BYTES:] = np.frombuffer(number_bytes(number), dtype=np.uint8)
    return encode_rows(forms, rows, heads)
