"""Reads integers that Parquet stores as differences (DELTA_BINARY_PACKED): their count, and the greatest.

The data begins with a header: values per block, parts per block, the count of all values, and the first value. A block
has its least difference, the bit width of each part, and the parts. A part stores by how much each difference exceeds
the least one. Other integers are varints (seven bits per byte, lowest first); signed ones are zigzag-encoded.
Source: https://parquet.apache.org/docs/file-format/data-pages/encodings/
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import kernel

_BLOCK_VALUES_MAX = 2**31
_VALUE_MAX = 2**31 - 1
_WIDTH_MAX = 32
_VARINT_BYTES_MAX = 10


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """The result of reading packed numbers: the position after them, their count, and the greatest of them."""

    end: int
    count: int
    greatest: int


def read_packed_numbers(data: NDArray[np.uint8], start: int, count_max: int) -> PackedNumbers | None:
    """Reads the packed numbers (deltas of variable width, as in Parquet) that begin at `start`.

    Returns None if the bytes are not such numbers, if there are more than `count_max`, or if one is not an int32 >= 0.
    """
    state = np.array([start, count_max, 0], dtype=np.int64)
    if not 0 <= start <= len(data) or not _scan(data, state):
        return None
    return PackedNumbers(*(int(number) for number in state))


def longest_plain_text(data: NDArray[np.uint8]) -> int | None:
    """Returns the length in bytes of the longest of consecutive texts, each preceded by its length in four bytes.

    Returns 0 if there are none, and None if the last one is cut off.
    """
    found = int(_longest_plain(data))
    return None if found < 0 else found


@kernel
def _longest_plain(data: NDArray[np.uint8]) -> np.int64:
    at, longest = np.int64(0), np.int64(0)
    while at < data.shape[0]:
        if at + 4 > data.shape[0]:
            return np.int64(-1)
        size = np.int64(0)
        for i in range(4):
            size |= np.int64(data[at + i]) << (8 * i)
        at += 4 + size
        longest = max(longest, size)
    return longest if at == data.shape[0] else np.int64(-1)


@kernel
def _scan(data: NDArray[np.uint8], state: NDArray[np.int64]) -> bool:
    """Reads up to `state[1]` packed numbers from position `state[0]` on.

    Replaces the entries of `state` by the position after them, their count and the greatest.
    """
    block, parts = _varint(data, state), _varint(data, state)
    count, value = _varint(data, state), _zigzag(_varint(data, state))
    if block < 1 or block > _BLOCK_VALUES_MAX or parts < 1 or block % parts:
        return False
    if count < 0 or count > state[1] or value < 0 or value > _VALUE_MAX:
        return False
    # After an invalid varint the position is beyond the data.
    if state[0] > data.shape[0]:
        return False
    state[1], state[2] = count, value
    values, left = block // parts, count - 1
    while left > 0:
        least = _zigzag(_varint(data, state))
        widths = state[0]
        at = widths + parts
        if at > data.shape[0]:
            return False
        for part in range(parts):
            if left <= 0:
                break
            width = np.int64(data[widths + part])
            if width > _WIDTH_MAX or at + (values * width + 7) // 8 > data.shape[0]:
                return False
            for i in range(min(values, left)):
                value += least + _bits(data, at, i * width, width)
                if value < 0 or value > _VALUE_MAX:
                    return False
                state[2] = max(state[2], value)
            at += (values * width + 7) // 8
            left -= values
        state[0] = at
    return True


@kernel
def _bits(data: NDArray[np.uint8], at: int, first: int | np.int64, width: int | np.int64) -> np.int64:
    """Returns the number of `width` bits at bit position `first`, counted from the byte at `at`."""
    number, done = np.int64(0), np.int64(0)
    while done < width:
        bit = first + done
        taken = min(width - done, 8 - bit % 8)
        number |= ((np.int64(data[at + bit // 8]) >> (bit % 8)) & ((1 << taken) - 1)) << done
        done += taken
    return number


@kernel
def _varint(data: NDArray[np.uint8], state: NDArray[np.int64]) -> np.int64:
    """Reads the number of variable length at the position `state[0]` and moves `state[0]` to its end, or beyond the
    data if the number is invalid.
    """
    number = np.int64(0)
    for i in range(_VARINT_BYTES_MAX):
        if state[0] >= data.shape[0]:
            break
        byte = np.int64(data[state[0]])
        state[0] += 1
        if i < _VARINT_BYTES_MAX - 1:
            number |= (byte & 127) << (7 * i)
        if byte < 128:
            return number
    state[0] = data.shape[0] + 1
    return np.int64(-1)


@kernel
def _zigzag(number: np.int64) -> np.int64:
    return (number >> 1) ^ -(number & 1)
