"""Numbers as Parquet packs them by differences: what is found equals what was written, and damage is found."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.kernels.packed_deltas import PackedNumbers, longest_plain_text, read_packed_numbers

NUMBERS = st.lists(st.integers(0, 9) | st.integers(0, 2**31 - 1), min_size=1, max_size=400)


def varint(number: int) -> bytes:
    """Seven bits in a byte, the lowest first."""
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


def zigzag(number: int) -> bytes:
    """With the sign as the lowest bit."""
    return varint((number << 1) ^ (number >> 63))


def packed(numbers: list[int], block: int = 128, parts: int = 4) -> bytes:
    """The numbers as the format's page describes them."""
    found = varint(block) + varint(parts) + varint(len(numbers)) + zigzag(numbers[0])
    differences = [after - before for before, after in itertools.pairwise(numbers)]
    size = block // parts
    for begin in range(0, len(differences), block):
        least = min(differences[begin : begin + block])
        over = [difference - least for difference in differences[begin : begin + block]]
        pieces = [over[at : at + size] for at in range(0, block, size)]
        widths = [max(piece, default=0).bit_length() for piece in pieces]
        found += zigzag(least) + bytes(widths)
        for piece, width in zip(pieces, widths, strict=True):
            if piece:
                bits = sum(number << (width * at) for at, number in enumerate(piece))
                found += bits.to_bytes(size * width // 8, "little")
    return found


def read(data: bytes, start: int = 0, count_max: int = 400) -> PackedNumbers | None:
    """What is found of the numbers."""
    return read_packed_numbers(np.frombuffer(data, dtype=np.uint8), start, count_max)


@given(NUMBERS, st.sampled_from([(128, 4), (256, 1), (128, 16)]))
def test_count_and_greatest_are_found(numbers: list[int], blocks: tuple[int, int]) -> None:
    """Of any block size, and with other bytes before and behind."""
    data = packed(numbers, *blocks)
    expected = PackedNumbers(len(data) + 3, len(numbers), max(numbers))
    assert read(b"abc" + data + b"defg", 3) == expected
    assert read(data, 0, len(numbers) - 1) is None


@given(NUMBERS, st.data())
def test_damaged_bytes_are_none_or_other_numbers(numbers: list[int], data: st.DataObject) -> None:
    """A cut is always found, and no byte makes it read behind its end."""
    whole = packed(numbers)
    assert read(whole[: data.draw(st.integers(0, len(whole) - 1))]) is None
    at, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
    found = read(whole[:at] + bytes([byte]) + whole[at + 1 :])
    assert found is None or (found.count <= 400 and found.end <= len(whole) and 0 <= found.greatest < 2**31)


def test_a_start_outside_of_the_bytes_is_none() -> None:
    """Also without any bytes."""
    assert read(packed([1]), 99) is None
    assert read(b"") is None


@given(st.lists(st.binary(max_size=9) | st.integers(0, 70_000).map(bytes), max_size=9))
def test_the_longest_plain_text(texts: list[bytes]) -> None:
    """A cut is found."""
    data = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    assert longest_plain_text(np.frombuffer(data, dtype=np.uint8)) == max(map(len, texts), default=0)
    assert longest_plain_text(np.frombuffer(data + b"\1\0\0", dtype=np.uint8)) is None
    assert longest_plain_text(np.frombuffer(data + b"\2\0\0\x80a", dtype=np.uint8)) is None
