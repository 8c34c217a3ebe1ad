"""`MemorySource`: a source over Arrow data in the driver's memory, for `from_batches` and for simulated programs.

It can be replayed, because the data is pickled with the job. The payload of a split contains a digest of its rows, so a
program that was changed to have other rows, or another order, is refused at its restore.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.source import ReadResult, SourceReader, SourceSplit
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import plain_schema, settled_type
from tidegate.storage.schemas.batches import owned_table
from tidegate.storage.schemas.polars_frames import arrow_of, is_polars_frame

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Frame: TypeAlias = "pa.Table | pa.RecordBatch | pl.DataFrame | pd.DataFrame"
InMemory: TypeAlias = "Frame | Sequence[Frame]"
"""Types of data that `from_batches` accepts. pandas frames are converted to Arrow tables first."""


class MemorySource:
    """A source over an Arrow table, divided into `splits` ranges of consecutive rows."""

    def __init__(self, data: pa.Table, splits: int) -> None:
        if not isinstance(splits, int) or splits < 1:
            raise ConfigurationError(f"from_batches(splits={splits!r}): give a whole number of at least 1")
        try:
            self._batch = data.combine_chunks().to_batches()
        except pa.ArrowInvalid as error:
            raise ConfigurationError(
                f"from_batches: the batches cannot be joined: {error}; where a dictionary column has more values in "
                "all batches than its index type can count, cast it to pa.dictionary(pa.int32(), ...) first"
            ) from error
        self._schema = data.schema
        self._rows = data.num_rows
        self._splits = splits

    @staticmethod
    def of(data: InMemory, splits: int) -> MemorySource:
        """Creates a source from a table, a polars DataFrame, a record batch, or a list of these with one schema."""
        table = _as_table(data)
        data = _joined(data) if table is None else table
        plain = plain_schema(data.schema)
        try:
            # Strings that are not UTF-8 would make tables that other readers cannot open.
            data.validate(full=True)
            plain_data = data if plain is data.schema else data.cast(plain)
        except ValueError as error:
            raise ConfigurationError(
                f"from_batches: the data does not match its own schema: {error}. Build the Arrow data again from "
                "its values"
            ) from error
        return MemorySource(owned_table(plain_data), splits)

    @property
    def schema(self) -> pa.Schema:
        """Returns the schema of the data."""
        return self._schema

    def column(self, name: str) -> pa.ChunkedArray | None:
        """Returns all values of a column, or None if the column does not exist."""
        if name not in self._schema.names:
            return None
        return pa.Table.from_batches(self._batch, self._schema).column(name)

    def splits(self) -> Sequence[SourceSplit]:
        """Returns the splits.

        A payload is the index of the first row, and a digest of all rows of the split. The number in the id makes ids
        of empty splits unique.
        """
        bounds = [self._rows * i // self._splits for i in range(self._splits + 1)]
        table = pa.Table.from_batches(self._batch, self._schema)
        return [
            SourceSplit(
                f"{number}: rows {start} to {stop}",
                f"{start} {digest_of(table.slice(start, stop - start))}".encode(),
                stop - start,
            )
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]

    def reader(self) -> SourceReader:
        """Returns a reader for one subtask, over the same memory."""
        return _MemoryReader(pa.Table.from_batches(self._batch, self._schema))


class _MemoryReader:
    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def read(self, split: SourceSplit, offset: int, rows_max: int) -> ReadResult:
        """Returns the next rows of a split's range, from row `offset` of the range."""
        rows = min(rows_max, split.rows - offset)
        if rows <= 0:
            return ReadResult(None, offset, True)
        start = int(split.payload.split()[0]) + offset
        # More than 2 GiB of strings make several batches. The next read returns the next one.
        batch = self._table.slice(start, rows).combine_chunks().to_batches()[0]
        next_offset = offset + batch.num_rows
        return ReadResult(batch, next_offset, next_offset >= split.rows)

    def close(self) -> None:
        """Does nothing: the reader holds no resources."""


def digest_of(table: pa.Table) -> str:
    """Returns a digest of the values of a table, of 32 hexadecimal digits.

    It depends neither on offsets of slices nor on the bytes under nulls. Values that were converted to another type
    have another digest.
    """
    found = hashlib.blake2b(digest_size=16)
    for batch in table.to_batches():
        for column in batch.columns:
            _add_values(column, found.update)
    return found.hexdigest()


def _add_values(array: pa.Array, add: Callable[[bytes | memoryview], None]) -> None:
    """Passes the type, the validity, the lengths and the values of an array and of its children to `add`."""
    add(f"{array.type} {len(array)} {array.null_count} ".encode())
    if array.null_count:
        add(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
        array = array.drop_null()
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        _add_values(array.storage, add)
    elif pa.types.is_dictionary(kind):
        # Numbers by first use, because equal values may have dictionaries in another order. Values that many rows share
        # may be too large to be decoded.
        used = array.indices.dictionary_encode()
        _add_values(used.indices, add)
        _add_values(array.dictionary.take(used.dictionary), add)
    elif pa.types.is_boolean(kind):
        add(np.packbits(array.to_numpy(zero_copy_only=False)).tobytes())
    elif pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            _add_values(array.field(number), add)
    elif pa.types.is_map(kind):
        entries = pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)])
        _add_values(array.cast(pa.list_(entries)), add)
    elif _is_list(kind):
        add(pc.list_value_length(array).to_numpy(zero_copy_only=False).tobytes())
        _add_values(array.flatten(), add)
    elif _is_bytes(kind):
        add(pc.binary_length(array).to_numpy(zero_copy_only=False).tobytes())
        width = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
        _, ends, data = array.buffers()
        if len(array) and data is not None:
            bounds = np.frombuffer(ends, width, len(array) + 1, array.offset * np.dtype(width).itemsize)
            add(memoryview(data)[bounds[0] : bounds[-1]])
    elif not pa.types.is_null(kind) and len(array):
        width_bytes = kind.bit_width // 8
        add(memoryview(array.buffers()[1])[array.offset * width_bytes :][: len(array) * width_bytes])


def _is_list(kind: pa.DataType) -> bool:
    types = pa.types
    views = types.is_list_view(kind) or types.is_large_list_view(kind)
    return bool(views or types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def _table_of(frame: pl.DataFrame) -> pa.Table:
    table = arrow_of(frame)
    return table.cast(pa.schema([pa.field(field.name, settled_type(field.type)) for field in table.schema]))


def _joined(given: object) -> pa.Table:
    """Concatenates batches to one table. Raises ConfigurationError for an empty list or for batches with different
    schemas.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise ConfigurationError(
            "from_batches takes an Arrow table, a polars or pandas DataFrame, or a list of some, not "
            f"{type(given).__name__}"
        )
    tables = []
    for number, part in enumerate(given):
        if (table := _as_table(part)) is None:
            hint = "; for rows use from_rows" if isinstance(part, dict | tuple | str) else ""
            raise ConfigurationError(
                f"from_batches: item {number} is {type(part).__name__}, not an Arrow record batch{hint}"
                "; convert it to one"
            )
        tables.append(table)
    if not tables:
        raise ConfigurationError("from_batches needs at least one batch, for its schema; give an empty one")
    first = tables[0].schema
    for number, table in enumerate(tables):
        if not table.schema.equals(first):
            ours = set(_fields(first))
            theirs = set(_fields(table.schema))
            raise ConfigurationError(
                f"from_batches: batch {number} has other columns than the first one: it lacks "
                f"{sorted(ours - theirs) or 'none'} and has {sorted(theirs - ours) or 'none'} instead, or another order"
                "; give all batches the same columns"
            )
    return pa.concat_tables(tables)


def _as_table(given: object) -> pa.Table | None:
    """Converts Arrow data or a polars frame to a table. Returns None for any other value."""
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    return _table_of(given) if is_polars_frame(given) else None


def _fields(schema: pa.Schema) -> list[str]:
    return [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema]
