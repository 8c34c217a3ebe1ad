"""Converts Arrow types and columns to types that tidegate can store, join and compare.

Dictionaries: a producer picks the index type of a dictionary by the values in one batch (pandas: int8 up to 128
categories), but a table or a state stores the values of all batches. Rules:

- Dictionaries of strings and binary are stored with int32 indexes, at any depth. Dictionaries of other values are
  stored decoded, because Parquet has none.
- A stored dictionary contains no null, because Arrow can neither join nor write such a dictionary. Rows can be null.
- Types without dictionaries, and their data, pass unchanged.

Views: files, kernels and Spark do not support `string_view` and `binary_view`. They are replaced by plain types in data
in memory, and in the results of user functions. A schema that declares views is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.errors import TableError
from tidegate.storage.user_values import value_text


def widened_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the Arrow type in which values of a type are stored.

    A dictionary of strings or bytes gets int32 indexes. Another dictionary becomes the type of its values.
    """
    return _mapped(data_type, _widened)


def widened_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema in which rows of a schema are stored (see `widened_type`).

    Names, nullability and metadata do not change.
    """
    return pa.schema([field.with_type(widened_type(field.type)) for field in schema], metadata=schema.metadata)


def widened(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch with the column types in which rows are stored (see `widened_type`).

    Raises NotImplementedError (also Arrow's) for a type that `check_dictionaries` refuses.
    """
    if not any(_holds_dictionary(field.type) for field in batch.schema):
        return batch
    return pa.RecordBatch.from_arrays(
        [_widened_column(column) for column in batch.columns], schema=widened_schema(batch.schema)
    )


def decoded_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the type with each dictionary, at any depth, replaced by the type of its values."""
    return _mapped(data_type, lambda dictionary: decoded_type(dictionary.value_type))


def check_dictionaries(schema: pa.Schema) -> None:
    """Raises TableError, naming the column, for a dictionary type that tables cannot store, such as a dictionary of
    views.
    """
    for field in filter(lambda field: _holds_dictionary(field.type), schema):
        try:
            # Only the type decides whether it is possible, so an array without rows shows it.
            _widened_column(pa.nulls(0, field.type))
        except NotImplementedError as error:
            raise TableError(
                f"column {field.name!r} has type {field.type}, with a dictionary that tables cannot store; "
                "cast it to a type without dictionaries, such as string, before the table"
            ) from error


def _mapped(data_type: pa.DataType, change: Callable[[pa.DictionaryType], pa.DataType]) -> pa.DataType:
    """Returns the type with `change` applied to each outermost dictionary in it."""

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
    raise NotImplementedError(
        f"a dictionary inside of type {found} cannot be decoded; cast the column to a type without dictionaries before"
    )


def _widened_values(column: pa.DictionaryArray, wanted: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(wanted) and column.dictionary.null_count == 0:
        return column.cast(wanted)
    values = _widened_column(column.dictionary_decode())
    if not pa.types.is_dictionary(wanted) or pa.types.is_dictionary(values.type):
        return values
    return values.dictionary_encode().cast(wanted)  # encoded again, so that nulls are rows and not dictionary values


def _without_hidden(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Returns the column with null in place of dictionary indexes that are out of range.

    Arrow leaves such indexes below null lists and structs.
    """
    greatest = pc.max(column.indices).as_py()
    if greatest is None or greatest < len(column.dictionary):
        return column
    inside = pc.less(column.indices, pa.scalar(len(column.dictionary)))
    indices = pc.if_else(inside, column.indices, pa.scalar(None, column.indices.type))
    return pa.DictionaryArray.from_arrays(indices, column.dictionary, ordered=column.type.ordered)


def _own_offsets(column: pa.Array) -> pa.Array:
    """Returns a copy of the offsets of lists, because Arrow does not accept sliced offsets together with a mask."""
    return pa.array(column.offsets.to_numpy(), column.offsets.type)


def _holds_dictionary(data_type: pa.DataType) -> bool:
    if isinstance(data_type, pa.BaseExtensionType):
        return _holds_dictionary(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return True
    return any(_holds_dictionary(data_type.field(position).type) for position in range(data_type.num_fields))


LEVELS_MAX = 60
"""How many levels deep a column may be nested. Arrow's streams end at 64 levels of structs."""


def levels_of(data_type: pa.DataType) -> int:
    """Returns how many levels deep a type is nested: 1 for a number, 2 for a list of numbers."""
    levels = 0
    level = [data_type]
    while level:
        levels += 1
        level = [found.field(place).type for found in level for place in range(found.num_fields)]
    return levels


def holds_views(data_type: pa.DataType) -> bool:
    """Returns whether a type is a view type (`string_view`, `binary_view`), or contains one."""
    return not without_views(data_type).equals(data_type)


def without_views(data_type: pa.DataType) -> pa.DataType:
    """Returns the type with large strings and large binary instead of views, at any depth."""
    kinds = pa.types
    if kinds.is_string_view(data_type):
        return pa.large_string()
    if kinds.is_binary_view(data_type):
        return pa.large_binary()
    if kinds.is_dictionary(data_type):
        return pa.dictionary(data_type.index_type, without_views(data_type.value_type), data_type.ordered)
    if kinds.is_struct(data_type):
        return pa.struct([field.with_type(without_views(field.type)) for field in data_type])
    if kinds.is_map(data_type):
        key, item = data_type.key_field, data_type.item_field
        fields = (key.with_type(without_views(key.type)), item.with_type(without_views(item.type)))
        return pa.map_(*fields, keys_sorted=data_type.keys_sorted)
    if kinds.is_fixed_size_list(data_type):
        return pa.list_(_field_without_views(data_type), data_type.list_size)
    if kinds.is_large_list(data_type):
        return pa.large_list(_field_without_views(data_type))
    if kinds.is_list(data_type):
        return pa.list_(_field_without_views(data_type))
    return data_type


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema with plain types instead of views. Returns the same object if it has no views."""
    if not any(holds_views(field.type) for field in schema):
        return schema
    return pa.schema([field.with_type(without_views(field.type)) for field in schema])


def form_with_rows(data_type: pa.DataType) -> str | None:
    """Returns an advice text for a type that Arrow's `take` does not support, so that steps cannot process it. Returns
    None for supported types.
    """
    if pa.types.is_run_end_encoded(data_type):
        return "decode it first, with pyarrow.compute.run_end_decode"
    if pa.types.is_union(data_type):
        return "use a struct with a field for each type"
    if pa.types.is_dictionary(data_type):
        return form_with_rows(data_type.value_type)
    fields = (data_type.field(position) for position in range(data_type.num_fields))
    return next((found for field in fields if (found := form_with_rows(field.type)) is not None), None)


def settled_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the type with plain Arrow types instead of the variants that polars produces.

    Large strings and lists, views and categories become strings, lists and plain values.
    """
    if data_type in (pa.large_string(), pa.string_view()):
        return pa.string()
    if data_type in (pa.large_binary(), pa.binary_view()):
        return pa.binary()
    if pa.types.is_dictionary(data_type):
        return settled_type(data_type.value_type)
    if pa.types.is_large_list(data_type) or pa.types.is_list(data_type):
        return pa.list_(settled_type(data_type.value_type))
    if pa.types.is_fixed_size_list(data_type):
        return pa.list_(settled_type(data_type.value_type), data_type.list_size)
    if pa.types.is_struct(data_type):
        return pa.struct([pa.field(field.name, settled_type(field.type)) for field in data_type])
    if pa.types.is_map(data_type):
        return pa.map_(settled_type(data_type.key_type), settled_type(data_type.item_type))
    return data_type


def comparable(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Returns the column in a type that Arrow can compare, sort and group: float16 becomes float32."""
    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column


def _field_without_views(data_type: pa.DataType) -> pa.Field:
    return data_type.value_field.with_type(without_views(data_type.value_type))


def seconds_beyond_parquet(batch: pa.RecordBatch) -> str | None:
    """Returns text that names a column and a value of it, a timestamp in seconds that a Parquet file cannot hold, or
    None.

    Parquet has no such unit. Arrow writes milliseconds instead, which overflow after the year 292,278,994.
    """
    for field, column in zip(batch.schema, batch.columns, strict=True):
        for seconds in _seconds_in(column):
            bounds = pc.min_max(seconds.cast(pa.int64())).as_py()
            for value in (bounds["min"], bounds["max"]):
                if value is not None and abs(value) > _PARQUET_SECONDS_MAX:
                    return (
                        f"column {field.name!r} ({field.type}): the time {value_text(value)}, in seconds since 1970, "
                        "is out of range in a Parquet file, which has milliseconds"
                    )
    return None


_PARQUET_SECONDS_MAX = (2**63 - 1) // 1_000


def _seconds_in(column: pa.Array) -> Iterator[pa.Array]:
    """Returns the values in seconds of a column, at any depth, that a writer of Parquet converts."""
    kind = column.type
    if not _has_seconds(kind):
        return
    if pa.types.is_timestamp(kind):
        yield column
    elif pa.types.is_dictionary(kind):
        yield from _seconds_in(column.dictionary_decode())
    elif pa.types.is_struct(kind):
        for position, part in enumerate(column.flatten()):
            # Arrow converts a value within a null struct, too, but not the elements of a list within one.
            plain = pa.types.is_timestamp(part.type) or pa.types.is_dictionary(part.type)
            yield from _seconds_in(column.field(position) if plain else part)
    elif pa.types.is_map(kind):
        yield from _seconds_in(column.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))))
    elif isinstance(column, pa.ExtensionArray):
        yield from _seconds_in(column.storage)
    else:
        yield from _seconds_in(pc.list_flatten(column))


def _has_seconds(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_seconds(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _has_seconds(kind.value_type)
    if pa.types.is_timestamp(kind):
        return bool(kind.unit == "s")
    return any(_has_seconds(kind.field(position).type) for position in range(kind.num_fields))
