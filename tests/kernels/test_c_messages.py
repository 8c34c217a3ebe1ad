"""Messages of a C library, read by their addresses."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.kernels import c_messages


class Struct(ctypes.Structure):
    """A message with fields of 4 and 8 bytes."""

    _fields_ = (("small", ctypes.c_int32), ("other", ctypes.c_int32), ("large", ctypes.c_int64))


@given(st.lists(st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**63), 2**63 - 1)), max_size=20))
def test_fields_of_all_messages_are_read(values: list[tuple[int, int]]) -> None:
    """A field is found by its position, counted in its own size."""
    structs = [Struct(small, -small if small > -(2**31) else 0, large) for small, large in values]
    places = np.array([ctypes.addressof(each) for each in structs], np.uint64)
    assert c_messages.integers(places, 0).tolist() == [small for small, _ in values]
    assert c_messages.integers(places, 1).tolist() == [each.other for each in structs]
    assert c_messages.words(places, 1).tolist() == [large for _, large in values]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_contents_are_joined(values: list[bytes]) -> None:
    """Every length and alignment is copied, and nothing beyond it."""
    whole = ctypes.create_string_buffer(b"".join(values), sum(map(len, values)) + 1)
    ends = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value) for value in values], out=ends[1:])
    places = np.uint64(ctypes.addressof(whole)) + ends[:-1].astype(np.uint64)
    order = np.arange(len(values))[::-1]
    turned = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(values[number]) for number in order], out=turned[1:])
    assert c_messages.contents(places[order], turned).tobytes() == b"".join(values[::-1])


def test_a_c_function_is_called_for_each_message() -> None:
    """With both pointers, and in order."""
    calls: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
    def function(first: int | None, second: int | None) -> int:
        calls.append((first or 0, second or 0))
        return -len(calls)

    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    found = c_messages.results(address, np.array([1, 2], np.uint64), np.array([0, 2**63], np.uint64))
    assert found.tolist() == [-1, -2]
    assert calls == [(1, 0), (2, 2**63)]
