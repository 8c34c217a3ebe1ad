"""Rows of a Parquet file: `ParquetRows` from any row on, and `whole_parquet`.

Rules:

- Only the wanted columns are read. They come in the order and with the types of the schema, by casts that lose nothing
  (`exact_casts.py`). A value that does not fit is an error that names column and row.
- A row group is read in pieces of about `PIECE_BYTES`, decoded, unless one row has more, however small the file is
  (`parquet_pieces.py`). Columns that are small for their number of values are read as dictionaries and decoded piece
  by piece.
- A string that is not UTF-8 is an error. Arrow reads it, and no reader could open a table that has it.
- Spark's usual timestamps (INT96) are read in microseconds, as Spark reads them. In nanoseconds, as Arrow would read
  them, there is no room for years before 1678 and after 2261. Digits below a microsecond are kept where the schema has
  nanoseconds, and refused where it has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as types

from tidegate.connectors.files.parquet_pieces import (
    LIMIT_BYTES,
    PIECE_BYTES,
    PIECE_ROWS_MAX,
    PieceSizes,
    is_coded,
    is_of,
    joined,
    leaves_of,
    row_too_large,
)
from tidegate.connectors.files.row_groups import RowGroups
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

_FIRST_ROWS = 64
_NANOS_A_MICRO = 1_000


class ParquetRows:
    """The rows of an open file with the columns of `schema`, of which only `rows` count."""

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
        """`file`: what Arrow opens. `constants`, `may_lack` and `limit_bytes` as of `open_rows`.

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
        self._schema, self._constants = schema, constants
        self._group = -1
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._piece: pa.RecordBatch | None = None
        self._first = 0
        """Number of the first row of the piece."""

    def read(self, row: int, rows_max: int) -> pa.RecordBatch | None:
        """A slice of a piece. An earlier row than the last one begins its row group anew."""
        if row >= self._groups.rows:
            # The generator refers to this object, so neither is freed before it is let go.
            self._pieces, self._piece, self._group = iter(()), None, -1
            return None
        group = self._groups.group_of(row)
        if self._group != group or row < self._first:
            self._pieces = self._pieces_of(group)
            self._group, self._first, self._piece = group, self._groups.starts[group], next(self._pieces)
        while self._piece is not None and row >= self._first + self._piece.num_rows:
            self._first += self._piece.num_rows
            self._piece = next(self._pieces, None)
        if self._piece is None:
            raise ConfigurationError(f"row group {group} has fewer rows than its footer says")
        at = row - self._first
        return self._piece.slice(at, rows_max) if at or rows_max < self._piece.num_rows else self._piece

    def next_row(self, row: int) -> int:
        """The first row from `row` on that may count: row groups without such rows are passed over."""
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
                raise ConfigurationError(f"row group {group} has too many bytes for its rows to be read together")
            for piece, begin in self._cut(batch, 0, row):
                columns = {name: piece.column(name) for name in self._stored}
                if extra is not None and self._fine is not None:
                    columns |= self._fine.checked(columns, extra.slice(begin, piece.num_rows), row + begin)
                yield self._completed(columns, piece.num_rows, row + begin)
            row += batch.num_rows

    def _cut(self, batch: pa.RecordBatch, begin: int, row: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """A batch in pieces that are not too large when dictionaries are decoded, each with its first row.

        `row`: the number of the row 0. Raises TooLargeError for a row over the limit.
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
    """All rows of a file with its own columns and types; timestamps of Spark's (INT96) in microseconds.

    INT96 columns with digits below a microsecond come in nanoseconds. Raises ConfigurationError, which names the file,
    if such a column has times for which nanoseconds have no room, and for strings that are not UTF-8. Raises
    ArrowInvalid, OSError.
    """
    table = _open(file, pre_buffer=False).read(use_threads=False)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if any(misencoded_row(chunk) is not None for chunk in column.chunks):
            raise ConfigurationError(f"{where}: column {name!r} has a string that is not UTF-8")
    names = int96_columns(pq.ParquetFile(file, pre_buffer=False))
    if not names:
        return table
    fine = pq.ParquetFile(file, pre_buffer=False).read(columns=names, use_threads=False)
    for name in names:
        coarse, exact = table.column(name).combine_chunks(), fine.column(name).combine_chunks()
        if _misfit(coarse, exact, in_nanos=False) is None:
            continue
        if (row := _misfit(coarse, exact, in_nanos=True)) is not None:
            raise ConfigurationError(
                f"{where}: column {name!r} has nanoseconds, and in row {row:,} the time {text_of(coarse[row])}, for "
                "which nanoseconds have no room; write the file with timestamps in microseconds"
            )
        table = table.set_column(table.schema.get_field_index(name), name, exact)
    return table


def parquet_schema(file: Any) -> pa.Schema:
    """The columns of a file as `ParquetRows` reads them."""
    return _open(file).schema_arrow


def int96_columns(parquet: pq.ParquetFile) -> list[str]:
    """Columns that are INT96 timestamps, or have some in them."""
    leaves_of = [parquet.schema.column(at) for at in range(len(parquet.schema))]
    paths = [leaf.path for leaf in leaves_of if leaf.physical_type == "INT96"]
    return [name for name in parquet.schema_arrow.names if any(is_of(path, name) for path in paths)]


class _FineTimes:
    """INT96 columns once more, in nanoseconds: they show what microseconds leave out."""

    def __init__(self, file: Any, names: list[str], wanted: pa.Schema) -> None:
        self._file = pq.ParquetFile(file, pre_buffer=True)
        self._names = names
        self._in_nanos = {name: _has_nanos(wanted.field(name).type) for name in names}
        self._schema = wanted

    def batches(self, group: int, rows: int) -> Iterator[pa.RecordBatch]:
        """The columns of a row group, in batches of the same rows as those in microseconds."""
        return _batches(self._file, group, self._names, rows)

    def checked(self, columns: dict[str, pa.Array], fine: pa.RecordBatch, first: int) -> dict[str, pa.Array]:
        """The columns to cast. Raises ConfigurationError for a time that the schema cannot hold."""
        found = {}
        for name in self._names:
            coarse, exact, in_nanos = columns[name], fine.column(name), self._in_nanos[name]
            if (row := _misfit(coarse, exact, in_nanos=in_nanos)) is not None:
                value = text_of(coarse[row]) if in_nanos else f"{text_of(coarse[row])} and some nanoseconds"
                raise _does_not_fit(name, first + row, value, self._schema.field(name).type)
            found[name] = exact if in_nanos else coarse
        return found


def _misfit(coarse: pa.Array, exact: pa.Array, *, in_nanos: bool) -> int | None:
    """The first row whose time is not the same in both; with `in_nanos`, digits below a microsecond may be left out."""

    def differs(begin: int, end: int) -> bool:
        pairs = zip(leaves(coarse.slice(begin, end - begin)), leaves(exact.slice(begin, end - begin)), strict=True)
        for micros, nanos in pairs:
            if not types.is_timestamp(micros.type) or micros.type.equals(nanos.type):
                continue
            few, many = (pc.fill_null(each.view(pa.int64()), 0).to_numpy() for each in (micros, nanos))
            # Where nanoseconds have no room, both sides of the difference have wrapped around alike.
            rest = many - few * _NANOS_A_MICRO
            if np.any(few != many // _NANOS_A_MICRO) if in_nanos else np.any(rest != 0):
                return True
        return False

    begin, end = 0, len(coarse)
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
    """Batches of this many rows. The last one has fewer, and so has one whose text is too long for an array."""
    found: Iterator[pa.RecordBatch] = parquet.iter_batches(
        batch_size=rows, row_groups=[group], columns=names, use_threads=False
    )
    return found


def _decoded_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of the text that dictionaries stand for; exact if that could be too much."""
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
            raise ConfigurationError(f"{path} has {count} columns {field.name!r}")
        if not count:
            if may_lack and field.nullable:
                continue
            raise ConfigurationError(f"{path} has no column {field.name!r}; it has {has.names}")
        reason = refusal_of(has.field(field.name).type, field.type, may_lack=may_lack)
        if reason is not None:
            raise ConfigurationError(
                f"column {field.name!r} of {path} {reason} ({_first_value(parquet, field.name)}); give it the type "
                "that the file has in schema=, and cast it in the program"
            )


def _first_value(parquet: pq.ParquetFile, name: str) -> str:
    """The first value of a column that is not null, for an error about its type."""
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
