"""`PieceSizes`: how many rows of a row group of a Parquet file are decoded at a time.

A file of a few kilobytes may hold gigabytes: a dictionary stores a long text once, DELTA_BYTE_ARRAY what a text shares
with the one before not at all, and compression makes next to nothing of a page of equal bytes. Rules:

- Rows are as many as have `PIECE_BYTES`, decoded. Where all bytes stand in the file, their average counts.
- Where few bytes stand for many, rows count as where they have most: the longest text of a dictionary, the longest text
  or the heaviest page of a column (`parquet_pages.py`). Rows that are lighter than that are joined again.
- Arrow decompresses a page of each column as a whole. Large pages of few bytes have a limit, for all columns together.
- Rows of lists count by the average number of their values: how many a row has is not known before it is decoded.
- All of this depends on the file and the columns alone, so a row group has the same pieces whoever reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

from tidegate.connectors.files.parquet_pages import DELTA, FEW, PageSizes, measure_pages
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import leaves

PIECE_BYTES = 64 * 2**20
PIECE_ROWS_MAX = 2**20
LIMIT_BYTES = 4 * PIECE_BYTES
"""What large pages of few bytes may have together, and a row of few bytes, if the reader sets no higher limit."""
_LARGE_PAGE_BYTES = 8 * 2**20
_JOINED_ROWS_MAX = 2**16
_CODED_BYTES_A_VALUE = 8
_CODED_BYTES = 5 * 2**18
"""A column with fewer bytes for each value, or in all, is read as a dictionary, if it has one.

Text that is stored value by value would be put into a dictionary at every read, which takes ten times as long as to
read it. Writers end a dictionary when it has a megabyte, and store the values behind that one by one.
"""
_LOOK_ROWS = 1_024
_NUMBER_BYTES = 8
_DECIMAL_BYTES = 16
_TEXTS = ("NONE", "STRING", "JSON", "BSON", "ENUM", "UNDEFINED")


class TooLargeError(ConfigurationError):
    """A row or a page of a file has more bytes than the limit. The file is whole."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A plain column of a file, which may be within a nested one: its number, its path, and the name of the whole."""

    number: int
    path: str
    name: str
    width: int
    """Bytes of a value, decoded; of bytes of any length what a place in them takes."""
    of_any_length: bool
    is_text: bool
    """Whether it is text or bytes for Arrow, which has dictionaries of nothing else."""
    is_own_dictionary: bool
    """Whether its type is a dictionary by the schema of the file."""


def leaves_of(parquet: pq.ParquetFile, names: Sequence[str]) -> list[Leaf]:
    """The plain columns of these columns."""
    found: list[Leaf] = []
    kinds = {name: _leaf_types(parquet.schema_arrow.field(name).type) for name in names}
    for number in range(len(parquet.schema)):
        column = parquet.schema.column(number)
        name = next((name for name in names if is_of(column.path, name)), None)
        if name is not None:
            of_any_length = column.physical_type == "BYTE_ARRAY"
            is_text = of_any_length and str(column.logical_type.type) in _TEXTS
            fixed = column.physical_type == "FIXED_LEN_BYTE_ARRAY"
            width = max(_DECIMAL_BYTES, column.length) if fixed else _NUMBER_BYTES
            # Leaves of a column come in the same order in both schemas.
            kind = next(kinds[name], None)
            is_own = kind is not None and types.is_dictionary(kind)
            found.append(Leaf(number, column.path, name, width, of_any_length, is_text, is_own))
    return found


def _leaf_types(kind: pa.DataType) -> Iterator[pa.DataType]:
    if types.is_dictionary(kind) or not kind.num_fields:
        yield kind
        return
    for at in range(kind.num_fields):
        yield from _leaf_types(kind.field(at).type)


def is_of(path: str, name: str) -> bool:
    """Whether the path of a leaf is of a column, whose name may have dots."""
    return path == name or path.startswith(f"{name}.")


def is_coded(parquet: pq.ParquetFile, leaf: Leaf) -> bool:
    """Whether a column of text is to be read as a dictionary."""
    if not leaf.is_text:
        return False
    groups = parquet.metadata.num_row_groups
    chunks = [parquet.metadata.row_group(group).column(leaf.number) for group in range(groups)]
    if any(DELTA in chunk.encodings for chunk in chunks):
        # Arrow cannot make a dictionary of such pages, which writers put behind a dictionary that is full.
        return False
    stored = sum(chunk.total_uncompressed_size for chunk in chunks)
    few = stored < max(_CODED_BYTES_A_VALUE * sum(chunk.num_values for chunk in chunks), _CODED_BYTES * groups)
    return few and any(chunk.has_dictionary_page for chunk in chunks)


@dataclass(frozen=True, slots=True)
class PieceSize:
    """How many rows to decode at a time, and whether these may be so few that they are worth joining."""

    rows: int
    joined: bool


class PieceSizes:
    """The sizes for an open file, of which these columns are read, some of them `coded`, that is as dictionaries."""

    def __init__(self, parquet: pq.ParquetFile, file: Any, used: Sequence[Leaf], coded: set[str], limit: int) -> None:
        """`file`: what Arrow opens, for a look at pages. `limit`: see `LIMIT_BYTES`."""
        self._parquet = parquet
        self._file = file
        self._leaves = used
        self._coded = coded
        self._limit = limit

    def of(self, group: int) -> PieceSize:
        """The size for a row group. Raises TooLargeError where a page or an average row exceeds the limit."""
        metadata = self._parquet.metadata.row_group(group)
        average = heaviest = 0.0
        large = {}
        for leaf in self._leaves:
            chunk = metadata.column(leaf.number)
            fixed = leaf.width * chunk.num_values
            if fixed > self._limit * metadata.num_rows and fixed > FEW * chunk.total_compressed_size:
                size = f"{fixed // metadata.num_rows:,} bytes in column {leaf.path!r} on average"
                raise TooLargeError(f"rows of row group {group} have {size}. {_advice(self._limit)}")
            average += (stored := max(chunk.total_uncompressed_size, fixed))
            pages = self._pages(chunk, leaf)
            if pages is not None and pages.largest_bytes > _LARGE_PAGE_BYTES:
                large[leaf.path] = pages.largest_bytes
            heaviest += max(stored, self._most(group, chunk, leaf, pages))
        if sum(large.values()) > self._limit:
            raise TooLargeError(_pages_too_large(group, large, self._limit))
        rows = max(1, min(int(PIECE_BYTES * metadata.num_rows / max(1.0, heaviest)), PIECE_ROWS_MAX))
        return PieceSize(rows, joined=heaviest > average)

    def _pages(self, chunk: Any, leaf: Leaf) -> PageSizes | None:
        """The pages of a column of a row group; None where its bytes, as they stand in the file, say enough."""
        stored = chunk.total_uncompressed_size
        few = stored > _LARGE_PAGE_BYTES and stored > FEW * chunk.total_compressed_size
        if not few and not (DELTA in chunk.encodings and chunk.num_values * stored > PIECE_BYTES):
            return None
        is_open = isinstance(self._file, pa.NativeFile)
        file = self._file if is_open else pa.OSFile(os.fspath(self._file))
        try:
            return measure_pages(file, chunk, self._parquet.schema.column(leaf.number), self._limit)
        finally:
            if not is_open:
                file.close()

    def _most(self, group: int, chunk: Any, leaf: Leaf, pages: PageSizes | None) -> float:
        """Bytes of a column if all values were as long as the longest ones."""
        values, stored = chunk.num_values, chunk.total_uncompressed_size
        if not leaf.of_any_length or leaf.path in self._coded:
            return 0.0
        if pages is not None:
            most: float = values * (leaf.width + pages.value_bytes)
        else:
            most = values * stored if DELTA in chunk.encodings else stored
        if leaf.is_text and chunk.has_dictionary_page and values * stored > PIECE_BYTES:
            longest = _longest_in_dictionary(self._file, group, leaf) if DELTA not in chunk.encodings else 0
            most += values * (longest if pages is None else max(longest, pages.dictionary_text_bytes))
        return most


def joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches, of about `PIECE_BYTES` bytes at most unless one has more."""
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        if waiting and (size + batch.nbytes > PIECE_BYTES or rows + batch.num_rows > _JOINED_ROWS_MAX):
            yield _one(waiting)
            waiting, size, rows = [], 0, 0
        waiting.append(batch)
        size += batch.nbytes
        rows += batch.num_rows
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def row_too_large(row: int, size: int, limit: int) -> TooLargeError:
    """The error for a row that is known to exceed the limit before it is decoded."""
    return TooLargeError(f"row {row:,} (counted from 0) has {size:,} bytes of text. {_advice(limit)}")


def _pages_too_large(group: int, large: dict[str, int], limit: int) -> str:
    pages = ", ".join(f"{size:,} bytes in column {path!r}" for path, size in large.items())
    return (
        f"row group {group} has pages that compression has made small, and which are decompressed as a whole: {pages}. "
        f"Write the file with smaller pages (pyarrow: write_batch_size=, data_page_size=). {_advice(limit)}"
    )


def _advice(limit: int) -> str:
    return f'The limit is {limit:,} bytes; only from_files can raise it, as by max_row_size="1gb"'


def _longest_in_dictionary(file: Any, group: int, leaf: Leaf) -> int:
    """Bytes of the longest text in the dictionary of a column of a row group; the first rows bring it along."""
    parquet = pq.ParquetFile(file, read_dictionary=[leaf.path], buffer_size=2**20)
    for batch in parquet.iter_batches(_LOOK_ROWS, row_groups=[group], columns=[leaf.path], use_threads=False):
        coded = [each for each in leaves(batch.column(0)) if types.is_dictionary(each.type) and len(each.dictionary)]
        if coded:
            return max(pc.max(pc.binary_length(each.dictionary)).as_py() or 0 for each in coded)
    return 0
