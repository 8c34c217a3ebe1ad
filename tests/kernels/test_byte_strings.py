"""Byte strings that are joined by a kernel, and payloads as a block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from payload_arrays import binary, block

from tidegate.connectors.formats.payload_block import Block
from tidegate.state.kernels.byte_strings import join

STRINGS = st.lists(st.binary(max_size=40), max_size=20)


@given(STRINGS, st.sampled_from([b"", b"\n"]))
def test_strings_are_joined(strings: list[bytes], separator: bytes) -> None:
    """In the given order, whatever their length and alignment."""
    data = np.frombuffer(b"?" + b"".join(strings), dtype=np.uint8)
    ends = 1 + np.cumsum([len(each) for each in strings], dtype=np.int64)
    starts = ends - np.array([len(each) for each in strings], dtype=np.int64)
    for order in (slice(None), slice(None, None, -1)):
        joined, is_ascii = join(data, starts[order].copy(), ends[order].copy(), separator)
        assert joined.tobytes() == separator.join(strings[order])
        assert is_ascii == all(each.isascii() for each in strings)


@given(STRINGS)
def test_a_block_is_made_of_a_part_of_an_array(strings: list[bytes]) -> None:
    """A copy has the same payloads, and so have some of them."""
    found = block(strings)
    assert len(found) == len(strings)
    assert found.array().to_pylist() == strings
    assert found.only(np.arange(len(strings))[::2]).array().to_pylist() == strings[::2]
    assert Block.of(binary([None, *strings]).drop_null()).array().to_pylist() == strings
    assert found.lines().data.tobytes() == b"\n".join(strings)


@given(st.lists(st.one_of(st.text(max_size=9).map(str.encode), st.binary(max_size=5)), max_size=5))
def test_lines_are_utf8_if_each_payload_is(payloads: list[bytes]) -> None:
    """A character that begins in one payload and ends in the next is none."""

    def is_utf8(payload: bytes) -> bool:
        try:
            payload.decode()
        except UnicodeDecodeError:
            return False
        return True

    assert block(payloads).lines().is_utf8() == all(map(is_utf8, payloads))
