"""Encodes several key columns as one string of bytes for each row. Two rows are equal exactly if their keys are.

A row has its columns in order: a byte 0 for null, or a byte 1 followed by 8 bytes (a word), or by 8 bytes with the
length and the bytes themselves. A row is never a prefix of another row. RocksDB and checkpoints of its files store keys
in this form. `tidegate/storage/state/rocksdb/keys.py` reads it, and tests compare it with golden values.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import NO_MASK, Strings, Words
from tidegate.state.kernels.jit import kernel, store64


def encode_rows(forms: Sequence[Words | Strings], rows: int, heads: NDArray[np.uint8] | None = None) -> Strings:
    """Encodes each row of the key columns as one byte string. Returns `rows` strings, none of which is null.

    `forms`: the key columns in canonical form. `heads`: bytes with which each string begins, of shape (rows, bytes).
    """
    head_bytes = 0 if heads is None else heads.shape[1]
    if all(isinstance(form, Words) and len(form.valid) == 0 for form in forms):
        return _rows_of_words([form.words for form in forms if isinstance(form, Words)], rows, heads, head_bytes)
    sizes = np.full(rows, head_bytes, dtype=np.int64)
    for form in forms:
        widths = np.int64(9) if isinstance(form, Words) else np.diff(form.offsets) + 9
        sizes += widths if len(form.valid) == 0 else np.where(form.valid, widths, 1)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    cursor = offsets[:-1].copy()
    if heads is not None:
        data[cursor[:, None] + np.arange(head_bytes)] = heads
        cursor += head_bytes
    for form in forms:
        if isinstance(form, Words):
            _encode_words(form.words, form.valid, cursor, data)
        else:
            _encode_strings(form.offsets, form.data, form.valid, cursor, data)
    return Strings(offsets, data, NO_MASK)


def _rows_of_words(
    columns: Sequence[NDArray[np.int64]], rows: int, heads: NDArray[np.uint8] | None, head_bytes: int
) -> Strings:
    """Encodes key columns without nulls that are one word wide, so that all encoded rows have the same width."""
    width = head_bytes + 9 * len(columns)
    data = np.empty(rows * width, dtype=np.uint8)
    if heads is not None:
        data.reshape(rows, width)[:, :head_bytes] = heads
    for position, words in enumerate(columns):
        _encode_column(words, head_bytes + 9 * position, width, data)
    return Strings(np.arange(rows + 1, dtype=np.int64) * width, data, NO_MASK)


@kernel
def _encode_column(words: NDArray[np.int64], first: int, width: int, data: NDArray[np.uint8]) -> None:
    """Encodes one key column: writes a byte 1 and a word for each row, every `width` bytes from `first` on."""
    for i in range(words.shape[0]):
        at = first + i * width
        data[at] = 1
        store64(data, at + 1, np.uint64(words[i]))


@kernel
def _store_word(word: np.uint64, at: int, data: NDArray[np.uint8]) -> None:
    for j in range(8):
        data[at + j] = np.uint8((word >> np.uint64(8 * j)) & np.uint64(255))


@kernel
def _encode_words(
    words: NDArray[np.int64], valid: NDArray[np.uint8], cursor: NDArray[np.int64], data: NDArray[np.uint8]
) -> None:
    masked = valid.shape[0] > 0
    for i in range(words.shape[0]):
        at = cursor[i]
        if masked and not valid[i]:
            data[at] = 0
            cursor[i] = at + 1
        else:
            data[at] = 1
            _store_word(np.uint64(words[i]), at + 1, data)
            cursor[i] = at + 9


@kernel
def _encode_strings(
    offsets: NDArray[np.int64],
    source: NDArray[np.uint8],
    valid: NDArray[np.uint8],
    cursor: NDArray[np.int64],
    data: NDArray[np.uint8],
) -> None:
    masked = valid.shape[0] > 0
    for i in range(cursor.shape[0]):
        at = cursor[i]
        if masked and not valid[i]:
            data[at] = 0
            cursor[i] = at + 1
        else:
            start = offsets[i]
            length = offsets[i + 1] - start
            data[at] = 1
            _store_word(np.uint64(length), at + 1, data)
            for j in range(length):
                data[at + 9 + j] = source[start + j]
            cursor[i] = at + 9 + length
