"""Reading the messages of a C library by their addresses: numbers, contents, and results of C functions.

A message is a struct in the memory of the library. A kernel reads a field of all messages of a batch in one call,
without the GIL and without an object per message.

Rules: the caller keeps the messages alive during the call, and passes addresses and positions of fields that exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tidegate.state.kernels.jit import Instruction, kernel, store64
from tidegate.state.kernels.paged import load_at

Addresses = NDArray[np.uint64]

_call = cast(Callable[[Any, Any, Any], np.int64], Instruction("call"))
"""`_call(function, first, second)`: the result of a C function that takes two pointers."""


def integers(messages: Addresses, position: int) -> NDArray[np.int32]:
    """Returns a field of 4 bytes of each message. `position` counts such fields from the start of a message."""
    found = np.empty(len(messages), np.int32)
    _read_32(messages, position, found)
    return found


def words(messages: Addresses, position: int) -> NDArray[np.int64]:
    """Returns a field of 8 bytes of each message. `position` counts such fields from the start of a message."""
    found = np.empty(len(messages), np.int64)
    _read_64(messages, position, found)
    return found


def contents(places: Addresses, ends: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Copies byte strings to one array. `places`: the address of each. Its bytes go from `ends[i]` to `ends[i + 1]`."""
    data = np.empty(int(ends[-1]), np.uint8)
    _copy(places, ends, data)
    return data


def results(function: int, first: Addresses, second: Addresses) -> NDArray[np.int64]:
    """Calls a C function with each pair of pointers, without the GIL. Returns its results.

    `function`: the address of a function that takes up to two pointers. The result of a function that returns nothing,
    and the upper half of a narrower one, are undefined.
    """
    found = np.empty(len(first), np.int64)
    _call_each(function, first, second, found)
    return found


@kernel
def _read_32(messages: Addresses, position: int, found: NDArray[np.int32]) -> None:
    for number in range(len(messages)):
        found[number] = load_at(messages[number], position, np.int32(0))


@kernel
def _read_64(messages: Addresses, position: int, found: NDArray[np.int64]) -> None:
    for number in range(len(messages)):
        found[number] = load_at(messages[number], position, np.int64(0))


@kernel
def _copy(places: Addresses, ends: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
    for number in range(len(places)):
        begin = np.int64(ends[number])
        size = np.int64(ends[number + 1]) - begin
        for word in range(size >> 3):
            store64(data, begin + 8 * word, load_at(places[number], word, np.uint64(0)))
        for byte in range(size & ~7, size):
            data[begin + byte] = load_at(places[number], byte, np.uint8(0))


@kernel
def _call_each(function: int, first: Addresses, second: Addresses, found: NDArray[np.int64]) -> None:
    for number in range(len(first)):
        found[number] = _call(function, first[number], second[number])
