"""Copies Arrow data that a function of the user hands over, because the function may use its arrays again.

Rules:

- A column of a batch is copied unless it lies in memory of the batch that the function was given. That memory is
  tidegate's already. Everything else may be a view of a buffer that the function uses again, which Arrow cannot tell
  from memory of its own.
- A slice is copied alone, without the rest of its buffers.
"""

from __future__ import annotations

from collections.abc import Set

import pyarrow as pa

_SMALL_BYTES = 4_096


def owned_batch(batch: pa.RecordBatch, known: Set[int] = frozenset()) -> pa.RecordBatch:
    """Returns the batch in memory that only tidegate has. Columns stay where they are if that is memory of `known`."""
    columns = [column if _places_of(column) <= known else owned_array(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema) if columns else batch


def memory_of(batch: pa.RecordBatch) -> Set[int]:
    """Returns the addresses of the buffers of a batch that a function is given, for `owned_batch`."""
    return set().union(*map(_places_of, batch.columns))


def owned_table(table: pa.Table) -> pa.Table:
    """Returns a table whose columns share no memory that a program can write to."""
    columns = [
        pa.chunked_array([owned_array(chunk) if _is_mutable(chunk) else chunk for chunk in column.chunks], column.type)
        for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def owned_array(array: pa.Array) -> pa.Array:
    """Returns a copy of an array, without the values around it that its buffers may have."""
    if array.offset or array.get_total_buffer_size() > 2 * array.nbytes + _SMALL_BYTES:
        array = pa.concat_arrays([array, array.slice(0, 0)])
        if not _holds_more(array.type):
            return array
    return array.copy_to(pa.default_cpu_memory_manager())


def _places_of(column: pa.Array) -> set[int]:
    found = {buffer.address for buffer in column.buffers() if buffer is not None and buffer.size}
    return found | _places_of(column.dictionary) if pa.types.is_dictionary(column.type) else found


def _is_mutable(array: pa.Array) -> bool:
    return any(buffer is not None and buffer.is_mutable for buffer in array.buffers())


def _holds_more(data_type: pa.DataType) -> bool:
    """Whether concatenating arrays of a type copies only a part of them: not the texts of views, nor dictionaries."""
    kinds = pa.types
    if isinstance(data_type, pa.BaseExtensionType):
        return _holds_more(data_type.storage_type)
    shared = kinds.is_dictionary(data_type) or kinds.is_string_view(data_type) or kinds.is_binary_view(data_type)
    return shared or any(_holds_more(data_type.field(number).type) for number in range(data_type.num_fields))
