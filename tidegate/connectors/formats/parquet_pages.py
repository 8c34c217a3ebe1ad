"""`measure_pages` computes the memory that the pages of a column in a row group need when they are decoded.

Arrow decompresses a page as a whole, and decodes only the requested rows of it. Rules:

- The header before each page contains its sizes, in Thrift's compact protocol, so the page itself is not read.
- The encoding DELTA_BYTE_ARRAY stores how many bytes a text shares with the previous one, and the remaining bytes. The
  header does not contain the lengths of the texts, so such pages are decompressed one by one to read these lengths.
- Arrow cannot read such pages as a dictionary. If they follow dictionary-encoded pages, the strings of the dictionary
  are measured here as well.
- If the lengths cannot be read (Arrow's codec of that name may be another one), the size of the page is used as the
  upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from tidegate.storage.errors import ConfigurationError

_Fields: TypeAlias = dict[int, Any]
"""Fields of a Thrift struct by their number: integers, booleans and structs. Other values are None."""
FEW = 16
"""A column is highly compressed if its decompressed size is more than this many times its stored size."""
_BLOCK_BYTES = 8 * 2**20
_HEADER_BYTES = 2**16
_NESTED_MAX = 16
_DATA_PAGE = 0
_DICTIONARY_PAGE = 2
_DATA_PAGE_V2 = 3
_RLE = 3
_DELTA_BYTE_ARRAY = 7
_LENGTH_BYTES = 8
"""Memory in bytes for each string of a DELTA_BYTE_ARRAY page: Arrow decodes two lengths of four bytes for all
strings at once.
"""
DELTA = "DELTA_BYTE_ARRAY"
_CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4": "lz4_raw"}


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Sizes of the pages of a column chunk: memory of the largest page, and bytes of the largest values.

    `largest_bytes` is the largest highly compressed page (`FEW`). `value_bytes` is the highest average size of a value
    in a page; for DELTA_BYTE_ARRAY it is an upper bound. `dictionary_text_bytes`: upper bound of a string in the
    dictionary; 0 for a column without DELTA_BYTE_ARRAY pages.
    """

    largest_bytes: int
    value_bytes: float
    dictionary_text_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of a column chunk. `begin` is the position of its content in the file, after its header."""

    header: _Fields
    begin: int

    @property
    def size_bytes(self) -> int:
        """Returns the decompressed size of the page in bytes."""
        return int(self.header[2])

    @property
    def stored_bytes(self) -> int:
        return int(self.header[3])

    @property
    def data(self) -> _Fields | None:
        """Returns the header of a data page, or None for a dictionary or an index page."""
        found: _Fields | None = self.header.get(5) if self.header[1] == _DATA_PAGE else None
        return self.header.get(8) if self.header[1] == _DATA_PAGE_V2 else found


def measure_pages(file: pa.NativeFile, chunk: Any, column: Any, decoded_bytes_max: int) -> PageSizes:
    """Measures the pages of `chunk`, the metadata of a column in a row group. `column` is its entry in the schema.

    A highly compressed page with more than `decoded_bytes_max` bytes is not decompressed. Raises ConfigurationError for
    damage, and the errors of `file`.
    """
    ranges = _Ranges(file, chunk)
    largest = 0
    value_bytes = 0.0
    dictionary_text_bytes = 0
    for page in _pages(ranges, chunk):
        size = page.size_bytes
        data = page.data
        has_deltas = data is not None and data[4 if page.header[1] == _DATA_PAGE_V2 else 2] == _DELTA_BYTE_ARRAY
        if data is not None and has_deltas:
            size += _LENGTH_BYTES * data[1]
        is_few = size > FEW * page.stored_bytes
        is_read = size <= decoded_bytes_max or not is_few
        if data is not None:
            heaviest = size / max(1, data[1])
            if has_deltas:
                longest = _longest_text(ranges, page, data, chunk, column) if is_read else None
                heaviest = float(page.size_bytes if longest is None else longest)
            value_bytes = max(value_bytes, heaviest)
        elif page.header[1] == _DICTIONARY_PAGE and DELTA in chunk.encodings:
            longest = _longest_in_dictionary(ranges, page, chunk) if is_read else None
            dictionary_text_bytes = page.size_bytes if longest is None else longest
        if is_few:
            largest = max(largest, size)
    return PageSizes(largest, value_bytes, dictionary_text_bytes)


class _Ranges:
    """Reads byte ranges of a file, and reads ahead to the end of a column chunk."""

    def __init__(self, file: pa.NativeFile, chunk: Any) -> None:
        self._file = file
        self.size_bytes = file.size()
        first = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            first = min(first, chunk.dictionary_page_offset)
        self.begin = first
        self._end = first + chunk.total_compressed_size
        self._block = b""
        self._block_begin = 0

    def read(self, at: int, size: int) -> memoryview:
        """Returns `size` bytes of the file from position `at`; fewer at the end of the file."""
        if at < self._block_begin or at + size > self._block_begin + len(self._block):
            # Arrow may read the same file in another thread: a position belongs to a read.
            ahead = max(size, min(_BLOCK_BYTES, self._end - at))
            self._block = self._file.read_at(min(ahead, max(0, self.size_bytes - at)), at)
            self._block_begin = at
        begin = at - self._block_begin
        return memoryview(self._block)[begin : begin + size]


def _pages(ranges: _Ranges, chunk: Any) -> Iterator[_Page]:
    at = ranges.begin
    left = chunk.num_values
    while left > 0:
        page = _page_at(ranges, at)
        yield page
        left -= 0 if page.data is None else page.data[1]
        at = page.begin + page.stored_bytes


def _page_at(ranges: _Ranges, at: int) -> _Page:
    size = _HEADER_BYTES
    while True:
        data = ranges.read(at, size)
        try:
            header, end = _Compact(data).struct(0)
        except IndexError as error:
            if len(data) < size or at < 0:
                raise ConfigurationError(
                    f"a page header at byte {at:,} is cut; the file is damaged: write it again"
                ) from error
            size *= 8
            continue
        numbers = [header.get(field) for field in (1, 2, 3)]
        of_values = _Page(header, at + end).data if isinstance(numbers[0], int) else None
        if of_values is not None:
            numbers += [of_values.get(1), of_values.get(4 if numbers[0] == _DATA_PAGE_V2 else 2)]
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ConfigurationError(
                f"a page header at byte {at:,} is damaged: its sizes are {numbers[:3]}; the file is damaged: write it "
                "again"
            )
        return _Page(header, at + end)


def _longest_text(ranges: _Ranges, page: _Page, data: _Fields, chunk: Any, column: Any) -> int | None:
    """Returns an upper bound in bytes for the strings of a DELTA_BYTE_ARRAY page, or None if their lengths cannot be
    read.
    """
    stored = ranges.read(page.begin, page.stored_bytes)
    if page.header[1] == _DATA_PAGE_V2:
        before = _levels_bytes(data)
        if before is None:
            return None
        plain = _decompressed(stored[before:], chunk, page.size_bytes - before, packed=data.get(7, True))
        at = 0
    else:
        plain = _decompressed(stored, chunk, page.size_bytes)
        at = 0 if plain is None else _behind_levels(plain, data, column)
    if plain is None:
        return None
    # Imported late: few files have this encoding, and loading kernels takes 85 MB of memory.
    from tidegate.state.kernels.packed_deltas import read_packed_numbers

    numbers = np.frombuffer(plain, dtype=np.uint8)
    shared = read_packed_numbers(numbers, at, data[1])
    rest = None if shared is None else read_packed_numbers(numbers, shared.end, data[1])
    return None if shared is None or rest is None else shared.greatest + rest.greatest


def _longest_in_dictionary(ranges: _Ranges, page: _Page, chunk: Any) -> int | None:
    """Returns the length in bytes of the longest string in a dictionary page, or None if the page cannot be read."""
    plain = _decompressed(ranges.read(page.begin, page.stored_bytes), chunk, page.size_bytes)
    if plain is None:
        return None
    from tidegate.state.kernels.packed_deltas import longest_plain_text

    return longest_plain_text(np.frombuffer(plain, dtype=np.uint8))


def _levels_bytes(data: _Fields) -> int | None:
    """Returns the size of the levels before the values in a data page of version 2, which are never compressed.

    None if unknown.
    """
    sizes: list[Any] = [data.get(5), data.get(6)]
    return sum(sizes) if all(isinstance(size, int) and size >= 0 for size in sizes) else None


def _behind_levels(plain: memoryview, data: _Fields, column: Any) -> int:
    """Returns the position of the values in a decompressed data page of version 1. It is beyond the page if unknown."""
    at = 0
    for depth, encoding in ((column.max_repetition_level, data.get(4)), (column.max_definition_level, data.get(3))):
        if not depth:
            continue
        if encoding != _RLE:
            return len(plain) + 1
        at += 4 + int.from_bytes(plain[at : at + 4], "little")
    return at


def _decompressed(stored: memoryview, chunk: Any, size: int, *, packed: bool = True) -> memoryview | None:
    if not packed or chunk.compression == "UNCOMPRESSED":
        return stored
    codec = _CODECS.get(chunk.compression)
    if codec is None or size < 0 or not pa.Codec.is_available(codec):
        return None
    try:
        plain = pa.decompress(pa.py_buffer(stored), size, codec)
    except (pa.ArrowException, OSError):
        # Arrow calls two kinds of LZ4 by one name. A page that is damaged is reported when it is decoded.
        return None
    return memoryview(plain) if plain.size == size else None


class _Compact:
    """Parser of Thrift's compact protocol. Source: thrift-compact-protocol.md of Apache Thrift.

    All methods take a position and return a value with the position after it. They raise IndexError at the end of the
    bytes.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._readers: dict[int, Callable[[int, int], tuple[Any, int]]] = {
            3: lambda at, _: (self._data[at], at + 1),
            4: lambda at, _: self._zigzag(at),
            5: lambda at, _: self._zigzag(at),
            6: lambda at, _: self._zigzag(at),
            7: lambda at, _: (None, at + 8),
            8: lambda at, _: self._binary(at),
            9: self._list,
            10: self._list,
            11: self._map,
            12: self.struct,
        }

    def struct(self, at: int, depth: int = 0) -> tuple[_Fields, int]:
        """Parses a struct at the position `at`. Returns its fields by number, and the position after it."""
        fields: _Fields = {}
        number = 0
        while kind := (head := self._data[at]) & 15:
            at += 1
            if head >> 4:
                number += head >> 4
            else:
                number, at = self._zigzag(at)
            if kind in (1, 2):
                fields[number] = kind == 1
            else:
                fields[number], at = self._value(kind, at, depth)
        return fields, at + 1

    def _value(self, kind: int, at: int, depth: int) -> tuple[Any, int]:
        reader = self._readers.get(kind)
        if reader is None or depth > _NESTED_MAX:
            raise ConfigurationError(
                f"a page header has a field of kind {kind} at its byte {at}, which cannot be read; the file is "
                "damaged: write it again"
            )
        return reader(at, depth + 1)

    def _list(self, at: int, depth: int) -> tuple[None, int]:
        count = self._data[at] >> 4
        kind = self._data[at] & 15
        at += 1
        if count == 15:
            count, at = self._varint(at)
        for _ in range(count):
            at = self._item(kind, at, depth)
        return None, at

    def _map(self, at: int, depth: int) -> tuple[None, int]:
        count, at = self._varint(at)
        if count:
            kinds = self._data[at]
            at += 1
            for _ in range(count):
                at = self._item(kinds & 15, self._item(kinds >> 4, at, depth), depth)
        return None, at

    def _item(self, kind: int, at: int, depth: int) -> int:
        # Fails at the end of the bytes, so that a damaged list of 2^60 booleans does not take 2^60 steps.
        self._data[at]
        return at + 1 if kind in (1, 2) else self._value(kind, at, depth)[1]

    def _binary(self, at: int) -> tuple[None, int]:
        size, at = self._varint(at)
        return None, at + size

    def _zigzag(self, at: int) -> tuple[int, int]:
        number, at = self._varint(at)
        return (number >> 1) ^ -(number & 1), at

    def _varint(self, at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte = self._data[at]
            at += 1
            number |= (byte & 127) << shift
            if byte < 128 or shift > 63:
                return number, at
            shift += 7
