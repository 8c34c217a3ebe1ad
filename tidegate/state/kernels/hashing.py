"""The hash of a key: XXH64, column by column. It is part of the checkpoint format.

Rules, tested with golden values:

- The hash of a value uses its canonical bytes (`columns.py`): 8 little-endian bytes for numbers, booleans, dates and
  times (so 5 as int32 and as int64 are one key, and so are 0.0 and -0.0), otherwise the bytes of the string.
- The seed of the first column is 0, the seed of each further column is the hash so far. So the order of columns
  matters.
- The hash of null is XXH64 of no bytes with the seed changed by `NULL_SEED`, so it differs from the empty string.

Algorithm: XXH64 as specified in the xxHash project's `doc/xxhash_spec.md`. Do not change any of this: stored key groups
would no longer match.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Strings, Words, key_forms
from tidegate.state.kernels.jit import kernel, load32, load64

NULL_SEED = np.uint64(0x6E756C6C6E756C6C)

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_ZERO = np.uint64(0)
_ONE, _TWO, _THREE, _FIVE, _EIGHT = (np.uint64(number) for number in (1, 2, 3, 5, 8))
_BYTE, _LOW = np.uint64(0xFF), np.uint64(0xFFFFFFFF)


def hash_columns(batch: pa.RecordBatch, columns: Sequence[str]) -> NDArray[np.uint64]:
    """Returns the hash of the named columns for each row, shape (rows,).

    Raises ConfigurationError for a column that is missing or of a type that cannot be a key.
    """
    return hash_forms(key_forms(batch, columns), batch.num_rows)


def hash_forms(forms: Sequence[Words | Strings], rows: int) -> NDArray[np.uint64]:
    """Returns, for each row, the hash of key columns in canonical form (see `key_form`)."""
    hashes = np.zeros(rows, dtype=np.uint64)
    for form in forms:
        if isinstance(form, Words):
            _hash_words(form.words, form.valid, hashes)
        else:
            _hash_strings(form.offsets, form.data, form.valid, hashes)
    return hashes


@kernel
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@kernel
def _avalanche(h: np.uint64) -> np.uint64:
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))


@kernel
def _round(accumulator: np.uint64, word: np.uint64) -> np.uint64:
    return _rotate(accumulator + word * _P2, 31) * _P1


@kernel
def _hash_word(word: np.uint64, seed: np.uint64) -> np.uint64:
    h = seed + _P5 + _EIGHT
    h = _rotate(h ^ _round(_ZERO, word), 27) * _P1 + _P4
    return _avalanche(h)


@kernel
def _hash_null(seed: np.uint64) -> np.uint64:
    return _avalanche((seed ^ NULL_SEED) + _P5)


@kernel
def _hash_stripes(data: NDArray[np.uint8], start: int, stop: int, seed: np.uint64) -> np.uint64:
    a = seed + _P1 + _P2
    b = seed + _P2
    c = seed
    d = seed - _P1
    position = start
    while position + 32 <= stop:
        a = _round(a, load64(data, position))
        b = _round(b, load64(data, position + 8))
        c = _round(c, load64(data, position + 16))
        d = _round(d, load64(data, position + 24))
        position += 32
    h = _rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18)
    h = (h ^ _round(_ZERO, a)) * _P1 + _P4
    h = (h ^ _round(_ZERO, b)) * _P1 + _P4
    h = (h ^ _round(_ZERO, c)) * _P1 + _P4
    return (h ^ _round(_ZERO, d)) * _P1 + _P4


@kernel
def hash_string(data: NDArray[np.uint8], start: int, stop: int, seed: np.uint64) -> np.uint64:
    """Returns the XXH64 hash of the bytes `data[start:stop]`."""
    position = start
    if stop - start >= 32:
        h = _hash_stripes(data, start, stop, seed)
        position += (stop - start) & ~31
    else:
        h = seed + _P5
    h += np.uint64(stop - start)
    while position + 8 <= stop:
        h = _rotate(h ^ _round(_ZERO, load64(data, position)), 27) * _P1 + _P4
        position += 8
    if position + 4 <= stop:
        h = _rotate(h ^ (load32(data, position) * _P1), 23) * _P2 + _P3
        position += 4
    while position < stop:
        h = _rotate(h ^ (np.uint64(data[position]) * _P5), 11) * _P1
        position += 1
    return _avalanche(h)


@kernel
def _hash_words(words: NDArray[np.int64], valid: NDArray[np.uint8], hashes: NDArray[np.uint64]) -> None:
    if valid.shape[0] == 0:
        for i in range(words.shape[0]):
            hashes[i] = _hash_word(np.uint64(words[i]), hashes[i])
    else:
        for i in range(words.shape[0]):
            hashes[i] = _hash_word(np.uint64(words[i]), hashes[i]) if valid[i] else _hash_null(hashes[i])


@kernel
def _chosen(condition: np.uint64, one: np.uint64, other: np.uint64) -> np.uint64:
    """Returns `one` if the condition is 1, `other` if it is 0, without a branch."""
    return other ^ ((one ^ other) & (_ZERO - condition))


@kernel
def _hash_short(data: NDArray[np.uint8], start: np.int64, length: np.int64, seed: np.uint64) -> np.uint64:
    """Returns the same as `hash_string`, for less than 16 bytes, if `data` has at least 16 bytes from `start` on.

    The code has no branches that depend on the length, because processors would often mispredict them.
    """
    size = np.uint64(length)
    has_8, has_4 = (size >> _THREE) & _ONE, (size >> _TWO) & _ONE
    h = seed + _P5 + size
    h = _chosen(has_8, _rotate(h ^ _round(_ZERO, load64(data, start)), 27) * _P1 + _P4, h)
    rest = load64(data, start + np.int64(size & _EIGHT))
    h = _chosen(has_4, _rotate(h ^ ((rest & _LOW) * _P1), 23) * _P2 + _P3, h)
    rest >>= has_4 << _FIVE
    for i in range(3):
        byte = (rest >> np.uint64(8 * i)) & _BYTE
        h = _chosen(np.uint64((size & _THREE) > np.uint64(i)), _rotate(h ^ (byte * _P5), 11) * _P1, h)
    return _avalanche(h)


@kernel
def _hash_strings(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], valid: NDArray[np.uint8], hashes: NDArray[np.uint64]
) -> None:
    masked = valid.shape[0] > 0
    for i in range(hashes.shape[0]):
        start = offsets[i]
        if masked and not valid[i]:
            hashes[i] = _hash_null(hashes[i])
        elif offsets[i + 1] - start < 16 and start + 16 <= data.shape[0]:
            hashes[i] = _hash_short(data, start, offsets[i + 1] - start, hashes[i])
        else:
            hashes[i] = hash_string(data, start, offsets[i + 1], hashes[i])
