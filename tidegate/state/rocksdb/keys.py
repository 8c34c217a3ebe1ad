"""Encodes the keys of a batch as database keys, and rows of any columns as values.

The layouts are described in `tidegate/storage/state/rocksdb/value_layout.py` and `keys.py`. Adjacent keys of the
database share blocks, so reading or writing in key order takes half the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Strings, key_forms
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.hashing import hash_forms
from tidegate.state.kernels.row_encoding import encode_rows
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.rocksdb.value_layout import HEAD, physical

_GROUP_BYTES = 2
_WORD_BYTES = 8
_WORDS_MAX = 4
"""Keys of one width are sorted as up to this many words, and longer keys as strings of bytes."""


def database_keys(keys: pa.RecordBatch, max_parallelism: int, number: int, *, namespace: bool = False) -> list[bytes]:
    """Returns the database key of each row of stored key columns, for the state with this number.

    All columns determine the key group or, with `namespace`, all except the first.

    Raises ConfigurationError for a column of a type that cannot be a key.
    """
    return strings_of(encoded_keys(keys, max_parallelism, number, namespace=namespace))


def ordered_keys(keys: pa.RecordBatch, max_parallelism: int, number: int) -> tuple[list[bytes], NDArray[np.int64]]:
    """Returns database keys like `database_keys`, sorted as in the database, and the row index of each. Needs at least
    one row.
    """
    encoded = encoded_keys(keys, max_parallelism, number)
    order = order_of(encoded)
    return strings_of(encoded, order), order


def order_of(strings: Strings) -> NDArray[np.int64]:
    """Returns the indices that sort byte strings (at least one, without nulls) as the database sorts keys."""
    rows, width = len(strings.offsets) - 1, int(strings.offsets[1])
    words = -(-width // _WORD_BYTES)
    if words <= _WORDS_MAX and bool((np.diff(strings.offsets) == width).all()):
        padded = np.zeros((rows, words * _WORD_BYTES), dtype=np.uint8)
        padded[:, :width] = strings.data[: rows * width].reshape(rows, width)
        return _order_of_words(padded.view(">u8").astype(np.uint64).T)
    buffers = [None, pa.py_buffer(strings.offsets), pa.py_buffer(strings.data)]
    ranked = pc.sort_indices(pa.LargeBinaryArray.from_buffers(pa.large_binary(), rows, buffers))
    places: NDArray[np.int64] = ranked.to_numpy().astype(np.int64)
    return places


def strings_of(strings: Strings, order: NDArray[np.int64] | None = None) -> list[bytes]:
    """Returns strings without nulls as Python bytes: all of them, or the rows with the indices `order`."""
    if order is None:
        data = strings.data.tobytes()
        return [data[start:stop] for start, stop in pairwise(strings.offsets.tolist())]
    return [string for piece in string_pieces(strings, order, max(1, len(order))) for string in piece]


def string_pieces(strings: Strings, order: NDArray[np.int64], rows_max: int) -> Iterator[list[bytes]]:
    """Yields the strings of the rows with the indices `order` as lists of Python bytes, up to `rows_max` strings at a
    time. Copies all data once.
    """
    data, starts, stops = strings.data.tobytes(), strings.offsets[:-1], strings.offsets[1:]
    for first in range(0, len(order), rows_max):
        rows = order[first : first + rows_max]
        yield [data[start:stop] for start, stop in zip(starts[rows].tolist(), stops[rows].tolist(), strict=True)]


def packed_rows(columns: Sequence[pa.Array], schema: pa.Schema) -> list[bytes]:
    """Encodes the rows of value columns of any types as bytes, in the encoding of keys."""
    return strings_of(encoded_rows(columns, schema))


def encoded_rows(columns: Sequence[pa.Array], schema: pa.Schema) -> Strings:
    """Encodes the rows of value columns of any types in the encoding of keys, as byte strings in arrays."""
    rows = physical(pa.RecordBatch.from_arrays(list(columns), schema=schema))
    return encode_rows(key_forms(rows, rows.schema.names), rows.num_rows)


def number_bytes(number: int) -> bytes:
    """Returns the bytes that represent the number of a state in a database key."""
    return HEAD.pack(0, number)[_GROUP_BYTES:]


def key_of_state(key: bytes, number: bytes) -> bytes:
    """Returns the database key of the same user key in another state. `number` is the result of `number_bytes` for that
    state.
    """
    return key[:_GROUP_BYTES] + number + key[HEAD.size :]


def key_group_of(key: bytes) -> int:
    """Returns the key group that a database key contains."""
    return int.from_bytes(key[:_GROUP_BYTES], "big")


def encoded_keys(
    keys: pa.RecordBatch, max_parallelism: int, number: int, grouped_by: int | None = None, namespace: bool = False
) -> Strings:
    """Returns database keys like `database_keys`, as byte strings in arrays."""
    rows = keys.num_rows
    forms = key_forms(keys, keys.schema.names)
    heads = np.empty((rows, HEAD.size), dtype=np.uint8)
    grouping = forms[1:] if namespace else forms[:grouped_by]
    groups = key_groups_of(hash_forms(grouping, rows), max_parallelism).astype(">u2")
    heads[:, :_GROUP_BYTES] = groups.view(np.uint8).reshape(rows, _GROUP_BYTES)
    heads[:, _GROUP_BYTES:] = np.frombuffer(number_bytes(number), dtype=np.uint8)
    return encode_rows(forms, rows, heads)


def _order_of_words(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the sort order of rows of several words, of shape (words, rows).

    Compares all words only for rows with equal first words, which are few.
    """
    order = np.argsort(words[0])
    first = words[0][order]
    same = np.flatnonzero(first[1:] == first[:-1])
    if len(same) == 0:
        return order
    if 4 * len(same) > len(order):
        return np.lexsort(words[::-1])
    tied = distinct_integers(np.concatenate([same, same + 1]))
    rows = order[tied]
    order[tied] = rows[np.lexsort(words[::-1, rows])]
    return order
