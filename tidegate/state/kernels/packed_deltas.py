"""Reads whole numbers that Parquet stores as differences (DELTA_BINARY_PACKED): how many there are, and the greatest.

The numbers begin with a head: the size of a block, the number of its parts, the count of all numbers, and the first
number. A block has its least difference, the width in bits of each part, and the parts. A part holds by how much each
difference exceeds the least one. Other numbers are varints, seven bits in a byte, the lowest first. With a sign they
are zigzag.
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
    """What was read of the numbers. `end`: where they end."""

    end: int
    count: int
    greatest: int


def read_packed_numbers(data: NDArray[np.uint8], start: int, count_max: int) -> PackedNumbers | None:
    """The numbers that begin at `start`.

    None if these bytes are no such numbers, if there are more than `count_max`, or one is not a positive int32 or 0.
    """
    state = np.array([start, count_max, 0], dtype=np.int64)
    if not 0 <= start <= len(data) or not _scan(data, state):
        return None
    return PackedNumbers(*(int(number) for number in state))


def longest_plain_text(data: NDArray[np.uint8]) -> int | None:
    """Bytes of the longest of texts that follow each other, each behind its length in four bytes; 0 if there is none.

    None if the last one is cut.
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
    """Read up to `state[1]` numbers from `state[0]` on. `state` gets their end, their count and the greatest."""
    block, parts = _varint(data, state), _varint(data, state)
    count, value = _varint(data, state), _zigzag(_varint(data, state))
    if block < 1 or block > _BLOCK_VALUES_MAX or parts < 1 or block % parts:
        return False
    if count < 0 or count > state[1] or value < 0 or value > _VALUE_MAX:
        return False
    # Behind an error of a varint the place is beyond the data.
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
    """The number of `width` bits that begins at the bit `first`, counted from the byte `at` on."""
    number, done = np.int64(0), np.int64(0)
    while done < width:
        bit = first + done
        taken = min(width - done, 8 - bit % 8)
        number |= ((np.int64(data[at + bit // 8]) >> (bit % 8)) & ((1 << taken) - 1)) << done
        done += taken
    return number


@kernel
def _varint(data: NDArray[np.uint8], state: NDArray[np.int64]) -> np.int64:
    """The number at `state[0]`, which becomes its end. The end is behind the data if the number is cut or too long."""
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
