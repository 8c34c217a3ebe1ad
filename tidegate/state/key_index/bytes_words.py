"""Strings of bytes as words: how `BytesIndex` holds short ones, and the hash that it finds all by.

A key of less than `SHORT_BYTES` is two words: its first eight bytes, and those that follow with the length in the
highest byte, zeros between. So other bytes or another length are other words. The words are read whole, and what
does not belong to the key is cut off; only where a column's bytes end are they read one by one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.columns import Strings
from tidegate.state.kernels.hashing import hash_string
from tidegate.state.kernels.jit import kernel, load64
from tidegate.state.key_index.mixing import mix_pair

SHORT_BYTES = 16
_ZERO, _ONE, _THREE, _WORD = (np.uint64(number) for number in (0, 1, 3, 8))
_LENGTH = np.uint64(56)


def hash_keys(keys: Strings) -> NDArray[np.uint64]:
    """A hash of each key for an index: no part of any format. Cheaper than that of the key group, for short keys."""
    hashes = np.empty(len(keys.offsets) - 1, dtype=np.uint64)
    _hash_keys(keys.offsets, keys.data, keys.valid, hashes)
    return hashes


@kernel
def _hash_keys(
    offsets: NDArray[np.int64], data: NDArray[np.uint8], valid: NDArray[np.uint8], hashes: NDArray[np.uint64]
) -> None:
    masked = valid.shape[0] > 0
    for i in range(hashes.shape[0]):
        start = offsets[i]
        length = offsets[i + 1] - start
        if masked and not valid[i]:
            hashes[i] = _ZERO
        elif length < SHORT_BYTES:
            first, second = first_word(data, start, length), second_word(data, start, length)
            hashes[i] = mix_pair(np.uint64(first), np.uint64(second))
        else:
            hashes[i] = hash_string(data, start, start + length, _ZERO)


@kernel
def first_word(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.int64:
    """The first word of a key of less than `SHORT_BYTES`."""
    if start + 16 > data.shape[0]:
        return np.int64(_read(data, start, min(length, np.int64(8))))
    return np.int64(load64(data, start) & (_below(length) | _if_eight(length)))


@kernel
def second_word(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.int64:
    """The second word of a key of less than `SHORT_BYTES`."""
    if start + 16 > data.shape[0]:
        word = _read(data, start + 8, length - 8)
    else:
        word = load64(data, start + 8) & _below(length) & _if_eight(length)
    return np.int64(word | (np.uint64(length) << _LENGTH))


@kernel
def _below(length: np.int64) -> np.uint64:
    """The bits of so many bytes, modulo eight."""
    return (_ONE << (_WORD * np.uint64(length & 7))) - _ONE


@kernel
def _if_eight(length: np.int64) -> np.uint64:
    """All bits if there are eight bytes or more, below 16, else none. No jump: nobody can guess lengths of words."""
    return _ZERO - (np.uint64(length) >> _THREE)


@kernel
def _read(data: NDArray[np.uint8], start: np.int64, length: np.int64) -> np.uint64:
    """So many bytes, none if it is negative, as a word."""
    word = _ZERO
    for i in range(length):
        word |= np.uint64(data[start + i]) << np.uint64(8 * i)
    return word
