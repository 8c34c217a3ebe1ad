"""Reads Parquet files: `ParquetRows` reads rows from any row on, `whole_parquet` reads all rows.

Rules:

- Only the requested columns are read. They have the order and types of the schema, by lossless casts
  (`exact_casts.py`). A value that does not fit is an error with its column and row.
- A row group is read in pieces of about `PIECE_BYTES`, decoded, unless one row is larger, however small the file is: a
  dictionary stores a long text once, DELTA_BYTE_ARRAY shares prefixes, and compression shrinks a page of equal bytes to
  almost nothing. If the file stores all bytes of the values, the average size of a row is used. Otherwise the size of
  the largest values is used: the longest text of a dictionary, and the longest text or the heaviest page of a column
  (`parquet_pages.py`). Small pieces are concatenated.
- Arrow decompresses a page as a whole. Large, highly compressed pages have a limit, over all columns.
- For lists, the average number of values in a row is used, because the exact number is unknown before decoding.
- The pieces of a row group depend only on the file and the columns, so a restart gets the same pieces.
- Columns that are small for their number of values are read as dictionaries and decoded piece by piece.
- A string that is not UTF-8 is an error. Arrow reads it, but no reader could open a table that contains it.
- Spark's usual timestamps (INT96) are read in microseconds, as Spark reads them. Nanoseconds, as Arrow would read them,
  cannot hold years before 1678 and after 2261. Digits below a microsecond are kept if the schema has nanoseconds, and
  refused otherwise.
- Row groups in which no row can match the program's filter are skipped (`parquet_statistics.py`).
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

from tidegate.connectors.formats.parquet_pages import DELTA, FEW, PageSizes, measure_pages
from tidegate.connectors.pushed_filters import Rows
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import (
    InexactValueError,
    exact_cast,
    leaves,
    misencoded_row,
    refusal_of,
    text_of,
)

PIECE_BYTES = 64 * 2**20
PIECE_ROWS_MAX = 2**20

LIMIT_BYTES = 4 * PIECE_BYTES
"""Default limit in bytes of highly compressed pages in total, and of a highly compressed row. Readers may raise it."""

_LARGE_PAGE_BYTES = 8 * 2**20
_JOINED_ROWS_MAX = 2**16
_CODED_BYTES_A_VALUE = 8

_CODED_BYTES = 5 * 2**18
"""A column with fewer bytes for each value, or in total, is read as a dictionary, if it has one.

Text that is stored value by value would be put into a dictionary at every read, which takes ten times as long as
reading it. Writers end a dictionary at a megabyte, and store later values one by one.
"""

_LOOK_ROWS = 1_024
_NUMBER_BYTES = 8
_DECIMAL_BYTES = 16
_TEXTS = ("NONE", "STRING", "JSON", "BSON", "ENUM", "UNDEFINED")
_FIRST_ROWS = 64
_NANOS_A_MICRO = 1_000


class TooLargeError(ConfigurationError):
    """Raised for a row or a page of a file that has more bytes than the limit. The file is not damaged."""


class ParquetRows:
    """Reads the rows of an open Parquet file with the columns of `schema`.

    `rows` is the program's filter; row groups without matching rows are skipped.
    """

    def __init__(
        self,
        file: Any,
        path: str,
        schema: pa.Schema,
        rows: Rows = None,
        constants: pa.RecordBatch | None = None,
        may_lack: bool = False,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """`file` is a path or a file object for Arrow. `constants`, `may_lack` and `limit_bytes` are described at
        `open_rows`.

        Raises ConfigurationError for columns that the file lacks or has in a type that does not fit, ArrowInvalid.
        """
        constant_names = () if constants is None else constants.schema.names
        wanted = pa.schema([field for field in schema if field.name not in constant_names])
        self._file = _open(file)
        has = self._file.schema_arrow
        self._groups = RowGroups(self._file, wanted, rows)
        _check_columns(self._file, path, wanted, may_lack)
        self._stored = [name for name in wanted.names if name in has.names]
        used = leaves_of(self._file, self._stored)
        own = {leaf.path for leaf in used if leaf.is_own_dictionary}
        coded = [leaf.path for leaf in used if leaf.path not in own and is_coded(self._file, leaf)]
        if coded:
            self._file = _open(file, coded)
        self._sizes = PieceSizes(self._file, file, used, own | set(coded), limit_bytes)
        self._limit_bytes = limit_bytes
        exact = () if may_lack else [name for name in self._stored if name in int96_columns(self._file)]
        self._fine = _FineTimes(file, exact, wanted) if exact else None
        self._schema = schema
        self._constants = constants
        self._group = -1
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._piece: pa.RecordBatch | None = None
        self._first = 0
        """Number of the first row of the piece."""

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """Returns up to `rows_max` rows from row `row` on, or None after the last row.

        A row before the previous one decodes its row group again.
        """
        if row >= self._groups.rows:
            # The generator refers to this object. Dropping it breaks the cycle, so that both are freed.
            self._pieces = iter(())
            self._piece = None
            self._group = -1
            return None
        group = self._groups.group_of(row)
        if self._group != group or row < self._first:
            self._pieces = self._pieces_of(group)
            self._group, self._first, self._piece = group, self._groups.starts[group], next(self._pieces)
        while self._piece is not None and row >= self._first + self._piece.num_rows:
            self._first += self._piece.num_rows
            self._piece = next(self._pieces, None)
        if self._piece is None:
            raise ConfigurationError(
                f"row group {group} has fewer rows than its footer states; the file is damaged: write it again"
            )
        at = row - self._first
        return self._piece.slice(at, rows_max) if at or rows_max < self._piece.num_rows else self._piece

    def next_row(self, row: int) -> int:
        """Returns the number of the first row, from `row` on, whose row group may have rows that match the program's
        filter.
        """
        return self._groups.next_row(row)

    def _pieces_of(self, group: int) -> Iterator[pa.RecordBatch]:
        rows = self._groups.rows_of(group)
        row = self._groups.starts[group]
        if not self._stored:
            for begin in range(0, rows, PIECE_ROWS_MAX):
                yield self._completed({}, min(PIECE_ROWS_MAX, rows - begin), row + begin)
            return
        size = self._sizes.of(group)
        fine = None if self._fine is None else self._fine.batches(group, size.rows)
        batches = _batches(self._file, group, self._stored, size.rows)
        for batch in joined(batches) if size.joined and fine is None else batches:
            extra = None if fine is None else next(fine)
            if extra is not None and extra.num_rows != batch.num_rows:
                raise ConfigurationError(
                    f"the columns of row group {group} have too many bytes to be read together ({batch.num_rows:,} "
                    f"and {extra.num_rows:,} rows at once); write the file with smaller row groups"
                )
            for piece, begin in self._cut(batch, 0, row):
                columns = {name: piece.column(name) for name in self._stored}
                if extra is not None and self._fine is not None:
                    columns |= self._fine.checked(columns, extra.slice(begin, piece.num_rows), row + begin)
                yield self._completed(columns, piece.num_rows, row + begin)
            row += batch.num_rows

    def _cut(self, batch: pa.RecordBatch, begin: int, row: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Splits a batch so that no part is too large once its dictionaries are decoded. Yields each part with its
        first row.

        `row` is the number of the first row of the row group. Raises TooLargeError for a row over the limit.
        """
        decoded = _decoded_bytes(batch)
        if batch.num_rows < 2 or decoded <= PIECE_BYTES:
            if decoded > self._limit_bytes:
                raise row_too_large(row + begin, decoded, self._limit_bytes)
            yield batch, begin
            return
        half = batch.num_rows // 2
        for part, first in ((batch.slice(0, half), begin), (batch.slice(half), begin + half)):
            # A cast of a slice of lists would decode all their values, also those outside of the slice.
            lists = [pa.concat_arrays([c]) if types.is_nested(c.type) else c for c in part.columns]
            yield from self._cut(pa.record_batch(lists, part.schema), first, row)

    def _completed(self, columns: dict[str, pa.Array], rows: int, first: int) -> pa.RecordBatch:
        return pa.record_batch([self._column(field, columns, rows, first) for field in self._schema], self._schema)

    def _column(self, field: pa.Field, columns: dict[str, pa.Array], rows: int, first: int) -> pa.Array:
        if self._constants is not None and field.name in self._constants.schema.names:
            return pa.repeat(self._constants.column(field.name)[0], rows).cast(field.type)
        if field.name not in columns:
            return pa.nulls(rows, field.type)
        return _cast(columns[field.name], field, first)


def whole_parquet(file: Any, where: str) -> pa.Table:
    """Reads all rows of a Parquet file with its own columns and types, and Spark's timestamps (INT96) in microseconds.

    INT96 columns with digits below a microsecond are returned in nanoseconds. Raises ConfigurationError, which names
    the file, if nanoseconds cannot represent a time of such a column, and for strings that are not UTF-8. Raises
    ArrowInvalid, OSError.
    """
    table = _open(file, pre_buffer=False).read(use_threads=False)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if any(misencoded_row(chunk) is not None for chunk in column.chunks):
            raise ConfigurationError(
                f"{where}: column {name!r} has a string that is not UTF-8; write the column as bytes, or correct the "
                "strings"
            )
    names = int96_columns(pq.ParquetFile(file, pre_buffer=False))
    if not names:
        return table
    fine = pq.ParquetFile(file, pre_buffer=False).read(columns=names, use_threads=False)
    for name in names:
        coarse = table.column(name).combine_chunks()
        exact = fine.column(name).combine_chunks()
        if _misfit(coarse, exact, in_nanos=False) is None:
            continue
        if (row := _misfit(coarse, exact, in_nanos=True)) is not None:
            raise ConfigurationError(
                f"{where}: column {name!r} has nanoseconds, and the time in row {row:,}, {text_of(coarse[row])}, is "
                "out of their range; write the file with timestamps in microseconds"
            )
        table = table.set_column(table.schema.get_field_index(name), name, exact)
    return table


def int96_columns(parquet: pq.ParquetFile) -> list[str]:
    """Returns the names of the columns that are INT96 timestamps, or contain them."""
    leaves_of = [parquet.schema.column(at) for at in range(len(parquet.schema))]
    paths = [leaf.path for leaf in leaves_of if leaf.physical_type == "INT96"]
    return [name for name in parquet.schema_arrow.names if any(is_of(path, name) for path in paths)]


def parquet_schema(file: Any) -> pa.Schema:
    """Returns the columns of a Parquet file with the types in which `ParquetRows` reads them."""
    return _open(file).schema_arrow


class _FineTimes:
    """Reads INT96 columns a second time, in nanoseconds, to detect digits that microseconds lose."""

    def __init__(self, file: Any, names: list[str], wanted: pa.Schema) -> None:
        self._file = pq.ParquetFile(file, pre_buffer=True)
        self._names = names
        self._in_nanos = {name: _has_nanos(wanted.field(name).type) for name in names}
        self._schema = wanted

    def batches(self, group: int, rows: int) -> Iterator[pa.RecordBatch]:
        """Yields the INT96 columns of a row group, in batches with the same rows as the batches in microseconds."""
        return _batches(self._file, group, self._names, rows)

    def checked(self, columns: dict[str, pa.Array], fine: pa.RecordBatch, first: int) -> dict[str, pa.Array]:
        """Returns the INT96 columns to cast to the schema.

        Raises ConfigurationError for a time that the schema cannot represent.
        """
        found = {}
        for name in self._names:
            coarse = columns[name]
            exact = fine.column(name)
            in_nanos = self._in_nanos[name]
            if (row := _misfit(coarse, exact, in_nanos=in_nanos)) is not None:
                value = text_of(coarse[row]) if in_nanos else f"{text_of(coarse[row])} and some nanoseconds"
                raise _does_not_fit(name, first + row, value, self._schema.field(name).type)
            found[name] = exact if in_nanos else coarse
        return found


def _misfit(coarse: pa.Array, exact: pa.Array, *, in_nanos: bool) -> int | None:
    """Returns the first row in which both readings of a time differ, or None.

    With `in_nanos`, digits below 1 us may differ.
    """

    def differs(begin: int, end: int) -> bool:
        pairs = zip(leaves(coarse.slice(begin, end - begin)), leaves(exact.slice(begin, end - begin)), strict=True)
        for micros, nanos in pairs:
            if not types.is_timestamp(micros.type) or micros.type.equals(nanos.type):
                continue
            few, many = (pc.fill_null(each.view(pa.int64()), 0).to_numpy() for each in (micros, nanos))
            # If nanoseconds overflow int64, both sides of the difference have wrapped around equally.
            rest = many - few * _NANOS_A_MICRO
            if np.any(few != many // _NANOS_A_MICRO) if in_nanos else np.any(rest != 0):
                return True
        return False

    begin = 0
    end = len(coarse)
    if not differs(begin, end):
        return None
    while end - begin > 1:
        middle = (begin + end) // 2
        begin, end = (begin, middle) if differs(begin, middle) else (middle, end)
    return begin


def _has_nanos(kind: pa.DataType) -> bool:
    if types.is_timestamp(kind):
        return bool(kind.unit == "ns")
    return any(_has_nanos(kind.field(at).type) for at in range(kind.num_fields))


def _open(file: Any, dictionaries: list[str] | None = None, *, pre_buffer: bool = True) -> pq.ParquetFile:
    return pq.ParquetFile(file, read_dictionary=dictionaries, pre_buffer=pre_buffer, coerce_int96_timestamp_unit="us")


def _batches(parquet: pq.ParquetFile, group: int, names: list[str], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields batches of `rows` rows of a row group.

    A batch is smaller at the end, or if its text exceeds an Arrow array.
    """
    found: Iterator[pa.RecordBatch] = parquet.iter_batches(
        batch_size=rows, row_groups=[group], columns=names, use_threads=False
    )
    return found


def _decoded_bytes(batch: pa.RecordBatch) -> int:
    """Returns the size in bytes of dictionary columns once decoded: exact if it may exceed the limit, else an upper
    bound.
    """
    coded = [leaf for column in batch.columns if _has_dictionary(column.type) for leaf in leaves(column)]
    coded = [leaf for leaf in coded if types.is_dictionary(leaf.type)]
    most = sum(len(leaf) * (pc.max(pc.binary_length(leaf.dictionary)).as_py() or 0) for leaf in coded)
    if most <= PIECE_BYTES:
        return most
    lengths = (pc.binary_length(leaf.dictionary).take(leaf.indices) for leaf in coded)
    return sum(pc.sum(pc.cast(each, pa.int64())).as_py() or 0 for each in lengths)


def _has_dictionary(kind: pa.DataType) -> bool:
    return bool(types.is_dictionary(kind)) or any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))


def _check_columns(parquet: pq.ParquetFile, path: str, wanted: pa.Schema, may_lack: bool) -> None:
    has = parquet.schema_arrow
    for field in wanted:
        count = has.names.count(field.name)
        if count > 1:
            raise ConfigurationError(f"{path} has {count} columns {field.name!r}; rename one of them in the file")
        if not count:
            if may_lack and field.nullable:
                continue
            raise ConfigurationError(
                f"{path} has no column {field.name!r}; it has {has.names}; remove the column from schema=, or this "
                "file from the input"
            )
        reason = refusal_of(has.field(field.name).type, field.type, may_lack=may_lack)
        if reason is not None:
            raise ConfigurationError(
                f"column {field.name!r} of {path} {reason} ({_first_value(parquet, field.name)}); give it the type "
                "that the file has in schema=, and cast it in the program"
            )


def _first_value(parquet: pq.ParquetFile, name: str) -> str:
    """Returns text about the first non-null value of a column, for an error about its type."""
    row = 0
    for batch in parquet.iter_batches(batch_size=_FIRST_ROWS, columns=[name], use_threads=False):
        column = batch.column(name)
        if column.null_count < len(column):
            at = pc.index(column.is_valid(), True).as_py()
            return f"row {row + at:,}, counted from 0, has {text_of(column[at])}"
        row += len(column)
    return "no row has a value"


def _cast(array: pa.Array, field: pa.Field, first: int) -> pa.Array:
    try:
        found = exact_cast(array, field)
    except InexactValueError as error:
        raise _does_not_fit(field.name, first + error.row, error.value, field.type) from error
    if (row := misencoded_row(found)) is not None:
        raise ConfigurationError(
            f"column {field.name!r}, row {first + row:,} (counted from 0): the string is not UTF-8; give the column "
            "bytes in schema=, and decode them in the program"
        )
    return found


def _does_not_fit(name: str, row: int, value: str, kind: pa.DataType) -> ConfigurationError:
    return ConfigurationError(
        f"column {name!r}, row {row:,} (counted from 0): {value} does not fit {kind}; give the column a wider type in "
        "schema="
    )


class RowGroups:
    """The row groups of an open Parquet file. Groups in which no row matches the filter `rows` are skipped."""

    def __init__(self, parquet: pq.ParquetFile, schema: pa.Schema, rows: Rows = None) -> None:
        metadata = parquet.metadata
        starts = [0]
        for index in range(metadata.num_row_groups):
            starts.append(starts[-1] + metadata.row_group(index).num_rows)
        self.starts: Sequence[int] = starts
        """The number of the first row of each row group, and at the end the number of rows in the file."""
        self._counts = [True] * metadata.num_row_groups
        if rows is not None and metadata.num_row_groups:
            # A job without filters need not load polars.
            from tidegate.connectors.formats.parquet_statistics import counting

            self._counts = counting(parquet, schema, rows)

    @property
    def rows(self) -> int:
        """Returns the number of rows in the file."""
        return self.starts[-1]

    def rows_of(self, group: int) -> int:
        """Returns the number of rows in a row group."""
        return self.starts[group + 1] - self.starts[group]

    def group_of(self, row: int) -> int:
        """Returns the index of the row group that contains a row of the file."""
        return bisect.bisect_right(self.starts, row) - 1

    def next_row(self, row: int) -> int:
        """Returns the number of the first row, from `row` on, that may match the program's filter, or the number of
        rows if none may.
        """
        while row < self.rows:
            group = self.group_of(row)
            if self._counts[group]:
                break
            row = self.starts[group + 1]
        return row


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf column of a Parquet file, possibly nested in a column: its number, its path, and the name of the
    top-level column.
    """

    number: int
    path: str
    name: str
    width: int
    """Size in bytes of a decoded value, or of an offset for variable-length values."""
    of_any_length: bool
    is_text: bool
    """True if Arrow reads the column as strings or bytes, the only types that Arrow reads as dictionaries."""
    is_own_dictionary: bool
    """True if the schema that is stored in the file declares a dictionary type for this column."""


def leaves_of(parquet: pq.ParquetFile, names: Sequence[str]) -> list[Leaf]:
    """Returns the leaf columns of the named top-level columns."""
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
    """Returns whether the leaf column with this path belongs to the top-level column `name`, which may contain dots."""
    return path == name or path.startswith(f"{name}.")


def is_coded(parquet: pq.ParquetFile, leaf: Leaf) -> bool:
    """Returns whether a column of strings is read with dictionary encoding."""
    if not leaf.is_text:
        return False
    groups = parquet.metadata.num_row_groups
    chunks = [parquet.metadata.row_group(group).column(leaf.number) for group in range(groups)]
    if any(DELTA in chunk.encodings for chunk in chunks):
        # Arrow cannot make a dictionary of such pages, which writers append after a full dictionary.
        return False
    stored = sum(chunk.total_uncompressed_size for chunk in chunks)
    few = stored < max(_CODED_BYTES_A_VALUE * sum(chunk.num_values for chunk in chunks), _CODED_BYTES * groups)
    return few and any(chunk.has_dictionary_page for chunk in chunks)


@dataclass(frozen=True, slots=True)
class PieceSize:
    """The number of rows of a Parquet file to decode at a time, and whether small batches should be concatenated."""

    rows: int
    joined: bool


class PieceSizes:
    """Chooses how many rows of an open Parquet file to decode at a time, from the sizes of its columns."""

    def __init__(self, parquet: pq.ParquetFile, file: Any, used: Sequence[Leaf], coded: set[str], limit: int) -> None:
        """`file` is the open file or its path; its pages are examined.

        `used`: the leaf columns that are read; `coded`: paths of columns that are read as dictionaries. `limit` is
        described at `LIMIT_BYTES`.
        """
        self._parquet = parquet
        self._file = file
        self._leaves = used
        self._coded = coded
        self._limit = limit

    def of(self, group: int) -> PieceSize:
        """Returns the number of rows to decode at a time in a row group. Raises TooLargeError if a page or an average
        row exceeds the limit.
        """
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
        """Measures the pages of a column in a row group.

        Returns None if the column's stored size is enough to decide.
        """
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
        """Returns an upper bound in bytes for a column in a row group, as if all values were as long as the longest
        one.
        """
        values = chunk.num_values
        stored = chunk.total_uncompressed_size
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
    """Concatenates small batches up to about `PIECE_BYTES` bytes."""
    waiting: list[pa.RecordBatch] = []
    size = rows = 0
    for batch in batches:
        if waiting and (size + batch.nbytes > PIECE_BYTES or rows + batch.num_rows > _JOINED_ROWS_MAX):
            yield _one(waiting)
            waiting = []
            size = 0
            rows = 0
        waiting.append(batch)
        size += batch.nbytes
        rows += batch.num_rows
    if waiting:
        yield _one(waiting)


def _one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def row_too_large(row: int, size: int, limit: int) -> TooLargeError:
    """Returns the error for a row whose decoded size exceeds the limit."""
    return TooLargeError(f"row {row:,} (counted from 0) has {size:,} bytes of text. {_advice(limit)}")


def _pages_too_large(group: int, large: dict[str, int], limit: int) -> str:
    pages = ", ".join(f"{size:,} bytes in column {path!r}" for path, size in large.items())
    return (
        f"row group {group} has pages that compression has made small, and which are decompressed as a whole: {pages}. "
        f"Write the file with smaller pages (pyarrow: write_batch_size=, data_page_size=). {_advice(limit)}"
    )


def _advice(limit: int) -> str:
    return f'The limit is {limit:,} bytes; to raise it, use from_files(max_row_size="1gb")'


def _longest_in_dictionary(file: Any, group: int, leaf: Leaf) -> int:
    """Returns the length in bytes of the longest string in a column's dictionary of a row group."""
    parquet = pq.ParquetFile(file, read_dictionary=[leaf.path], buffer_size=2**20)
    for batch in parquet.iter_batches(_LOOK_ROWS, row_groups=[group], columns=[leaf.path], use_threads=False):
        coded = [each for each in leaves(batch.column(0)) if types.is_dictionary(each.type) and len(each.dictionary)]
        if coded:
            return max(pc.max(pc.binary_length(each.dictionary)).as_py() or 0 for each in coded)
    return 0
