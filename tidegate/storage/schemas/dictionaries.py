"""Brings dictionary columns into the one form in which they rest, so that any number of distinct values can meet.

Rules: a producer picks the indexes of a dictionary by what it sees in one batch (pandas: int8 up to 128 categories),
but a table or a state holds the values of all batches. So dictionaries of strings and binary rest with int32 indexes,
at any depth; dictionaries of anything else rest decoded, because Parquet has none. No dictionary holds a null (Arrow
neither joins nor writes such): rows do.
Types without dictionaries, and data of them, pass untouched.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.errors import TableError


def widened_type(data_type: pa.DataType) -> pa.DataType:
    """The type in which values of a type rest."""
    return _mapped(data_type, _widened)


def widened_schema(schema: pa.Schema) -> pa.Schema:
    """The schema in which rows of a schema rest; names, nullability and metadata stay."""
    return pa.schema([field.with_type(widened_type(field.type)) for field in schema], metadata=schema.metadata)


def widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows as they rest. NotImplementedError (also Arrow's) for a type that `check_dictionaries` refuses."""
    if not any(_holds_dictionary(field.type) for field in batch.schema):
        return batch
    return pa.RecordBatch.from_arrays(
        [_widened_column(column) for column in batch.columns], schema=widened_schema(batch.schema)
    )


def decoded_type(data_type: pa.DataType) -> pa.DataType:
    """The type without dictionaries."""
    return _mapped(data_type, lambda dictionary: decoded_type(dictionary.value_type))


def check_dictionaries(schema: pa.Schema) -> None:
    """Raise TableError, naming the column, for a dictionary that cannot rest: of views, or inside of exotic types."""
    for field in filter(lambda field: _holds_dictionary(field.type), schema):
        try:
            # What is impossible is so by type alone: no rows are as good as any.
            _widened_column(pa.nulls(0, field.type))
        except NotImplementedError as error:
            raise TableError(
                f"column {field.name!r} is of type {field.type}, whose dictionary cannot be kept; "
                "cast it to a type without dictionaries, such as string, before the table"
            ) from error


def _mapped(data_type: pa.DataType, change: Callable[[pa.DictionaryType], pa.DataType]) -> pa.DataType:
    """The type with each outermost dictionary in it changed."""

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(_mapped(field.type, change))

    types = pa.types
    if not _holds_dictionary(data_type):
        return data_type
    if types.is_dictionary(data_type):
        return change(data_type)
    if types.is_list(data_type):
        return pa.list_(inner(data_type.value_field))
    if types.is_large_list(data_type):
        return pa.large_list(inner(data_type.value_field))
    if types.is_fixed_size_list(data_type):
        return pa.list_(inner(data_type.value_field), data_type.list_size)
    if types.is_struct(data_type):
        return pa.struct([inner(field) for field in data_type])
    if types.is_map(data_type):
        return pa.map_(inner(data_type.key_field), inner(data_type.item_field), data_type.keys_sorted)
    return data_type


def _widened(dictionary: pa.DictionaryType) -> pa.DataType:
    values = dictionary.value_type
    if values in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
        return pa.dictionary(pa.int32(), values, dictionary.ordered)
    return widened_type(values)


def _widened_column(column: pa.Array) -> pa.Array:
    types, found, wanted = pa.types, column.type, widened_type(column.type)
    if not _holds_dictionary(found):
        return column
    if types.is_dictionary(found):
        return _widened_values(_without_hidden(column), wanted)
    if types.is_struct(found):
        parts = [_widened_column(part) for part in column.flatten()]
        return pa.StructArray.from_arrays(parts, fields=list(wanted), mask=column.is_null())
    if types.is_fixed_size_list(found):
        values = column.values.slice(column.offset * found.list_size, len(column) * found.list_size)
        return pa.FixedSizeListArray.from_arrays(_widened_column(values), type=wanted, mask=column.is_null())
    if types.is_map(found):
        keys, items = _widened_column(column.keys), _widened_column(column.items)
        return pa.MapArray.from_arrays(_own_offsets(column), keys, items, type=wanted, mask=column.is_null())
    if types.is_list(found) or types.is_large_list(found):
        values = _widened_column(column.values)
        return type(column).from_arrays(_own_offsets(column), values, type=wanted, mask=column.is_null())
    raise NotImplementedError(f"a dictionary inside of {found}")


def _widened_values(column: pa.DictionaryArray, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(wanted) and column.dictionary.null_count == 0:
        return column.cast(wanted)
    values = _widened_column(column.dictionary_decode())
    if not pa.types.is_dictionary(wanted) or pa.types.is_dictionary(values.type):
        return values
    return values.dictionary_encode().cast(wanted)  # encoded anew, nulls are those of rows


def _without_hidden(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """The column with nulls for indexes beyond its end: Arrow leaves such inside of lists and structs that are null."""
    greatest = pc.max(column.indices).as_py()
    if greatest is None or greatest < len(column.dictionary):
        return column
    inside = pc.less(column.indices, pa.scalar(len(column.dictionary)))
    indices = pc.if_else(inside, column.indices, pa.scalar(None, column.indices.type))
    return pa.DictionaryArray.from_arrays(indices, column.dictionary, ordered=column.type.ordered)


def _own_offsets(column: pa.Array) -> pa.Array:
    """The offsets of lists, copied: Arrow takes no slice of them together with a mask."""
    return pa.array(column.offsets.to_numpy(), column.offsets.type)


def _holds_dictionary(data_type: pa.DataType) -> bool:
    if isinstance(data_type, pa.BaseExtensionType):
        return _holds_dictionary(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return True
    return any(_holds_dictionary(data_type.field(position).type) for position in range(data_type.num_fields))
