"""Record batches: converts tables to one batch, slices batches, and copies batches into memory that only tidegate uses.

A column of `string` or `binary` holds at most 2 GiB, so a large table has several batches. `one_batch` and
`concat_rows` return all rows in one batch, or raise an error that names the column.

Rules of copies (`owned_batch`, `owned_table`, `owned_array`):

- A column of a batch that a user function returned is copied, unless its memory belongs to the batch that the function
  was given. The function may reuse any other buffer later.
- Only the rows of a slice are copied, not the rest of its buffers.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import pyarrow as pa

from tidegate.storage.errors import ConfigurationError


def one_batch(table: pa.Table, what: str) -> pa.RecordBatch:
    """Returns all rows of a table as one batch. `what` begins the error text.

    Raises ConfigurationError if a column has more bytes than its type can hold in one batch.
    """
    whole = table.combine_chunks()
    batches = whole.to_batches()
    if len(batches) > 1:
        field = next(field for field, column in zip(whole.schema, whole.columns, strict=True) if column.num_chunks > 1)
        raise ConfigurationError(
            f"{what}: {table.num_rows:,} rows are needed at once, and have more than 2 GiB in column {field.name!r} of "
            f"type {field.type}; cast the column to {_larger(field.type)}, or pass fewer rows at once"
        )
    return batches[0] if batches else pa.RecordBatch.from_pylist([], whole.schema)


def together(batches: Sequence[pa.RecordBatch], what: str) -> pa.RecordBatch:
    """Concatenates batches of one schema (at least one) into one batch. `what` begins the error text.

    Raises ConfigurationError if a column has more bytes than its type can hold in one batch.
    """
    try:
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        rows = sum(batch.num_rows for batch in batches)
        raise ConfigurationError(
            f"{what}: {rows:,} rows are needed at once, and a column of them is larger than its type can hold: "
            f"{error}. Cast it to a large type, such as pa.large_string()"
        ) from error


def slice_from(batches: Sequence[pa.RecordBatch], row: int, rows_max: int) -> pa.RecordBatch:
    """Returns up to `rows_max` rows from row `row` of consecutive batches, up to the end of the batch with that row.

    Copies nothing.
    """
    for batch in batches:
        if row < batch.num_rows:
            return batch.slice(row, rows_max) if row or rows_max < batch.num_rows else batch
        row -= batch.num_rows
    raise IndexError(
        f"the batches end {row + 1} rows before the requested row; this is a bug in tidegate, please report it"
    )


def _larger(data_type: pa.DataType) -> str:
    return f"large_{data_type}"


_SMALL_BYTES = 4_096


def owned_batch(batch: pa.RecordBatch, known: Set[int] = frozenset()) -> pa.RecordBatch:
    """Returns the batch with columns copied into memory that only tidegate uses.

    Columns in the buffers `known` are not copied.
    """
    columns = [column if places_of(column) <= known else owned_array(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema) if columns else batch


def memory_of(batch: pa.RecordBatch) -> Set[int]:
    """Returns the buffer addresses of a batch that is passed to a user function, for `known` of `owned_batch`."""
    return set().union(*map(places_of, batch.columns))


def owned_table(table: pa.Table) -> pa.Table:
    """Returns the table with a copy of each column whose memory the program could change."""
    columns = [
        pa.chunked_array([owned_array(chunk) if _is_mutable(chunk) else chunk for chunk in column.chunks], column.type)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def owned_array(array: pa.Array) -> pa.Array:
    """Returns a copy of an array that has only the array's own rows, without the unused parts of its buffers."""
    if array.offset or array.get_total_buffer_size() > 2 * array.nbytes + _SMALL_BYTES:
        array = pa.concat_arrays([array, array.slice(0, 0)])
        if not _holds_more(array.type):
            return array
    return array.copy_to(pa.default_cpu_memory_manager())


def places_of(column: pa.Array) -> set[int]:
    """Returns the addresses of the buffers of a column."""
    found = {buffer.address for buffer in column.buffers() if buffer is not None and buffer.size}
    return found | places_of(column.dictionary) if pa.types.is_dictionary(column.type) else found


def _is_mutable(array: pa.Array) -> bool:
    return any(buffer is not None and buffer.is_mutable for buffer in array.buffers())


def _holds_more(data_type: pa.DataType) -> bool:
    """Returns whether arrays of a type may keep values in memory that none of their rows uses, as views and
    dictionaries do.
    """
    kinds = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return _holds_more(data_type.storage_type)
    shared = kinds.is_dictionary(data_type) or kinds.is_string_view(data_type) or kinds.is_binary_view(data_type)
    return shared or any(_holds_more(data_type.field(number).type) for number in range(data_type.num_fields))
