"""The order of keys in canonical snapshots: by key group, then by the bytes of the key, as RocksDB sorts them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import key_forms
from tidegate.state.kernels.row_encoding import encode_rows


def sortable_keys(keys: pa.RecordBatch, groups: NDArray[np.uint16]) -> pa.Array:
    """A byte string for each row of stored key columns, which sorts as the key does. `groups` are their key groups."""
    rows = keys.num_rows
    heads = groups.astype(">u2").view(np.uint8).reshape(rows, 2)
    encoded = encode_rows(key_forms(keys, keys.schema.names), rows, heads)
    buffers = [None, pa.py_buffer(encoded.offsets), pa.py_buffer(encoded.data)]
    return pa.Array.from_buffers(pa.large_binary(), rows, buffers)
