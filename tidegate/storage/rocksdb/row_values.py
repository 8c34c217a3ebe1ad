"""Values of rows in RocksDB, of any Arrow columns: in the encoding of keys, which keeps all of them.

Numbers, dates and times go as the integers of their bits, strings and bytes as they are, and values of any other type
in the form that a value state of that type has (`values.py`). Dates and times within lists, structs and maps are
integers there too. Arrow makes them so: Python's objects have no nanoseconds, and not the whole range.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.storage.errors import CorruptionError
from tidegate.storage.rocksdb.keys import decode_rows
from tidegate.storage.rocksdb.values import value_codec

_INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}


def physical(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in columns of types that keys may have, and whose values keep every bit as keys."""
    arrays = [_to_physical(column) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, names=rows.schema.names)


def unpacked(packed: Sequence[bytes], schema: pa.Schema) -> list[pa.Array]:
    """The columns of rows that were encoded in their physical form. CorruptionError for bytes that are no such rows."""
    stored = pa.schema([pa.field(field.name, _physical_type(field.type)) for field in schema])
    rows = decode_rows(packed, stored)
    return [_from_physical(column, field.type) for column, field in zip(rows.columns, schema, strict=True)]


def _physical_type(data_type: pa.DataType) -> pa.DataType:
    kinds = pa.types
    if kinds.is_boolean(data_type):
        return pa.uint8()
    temporal = kinds.is_temporal(data_type) and not kinds.is_interval(data_type)
    if temporal or kinds.is_integer(data_type) or kinds.is_floating(data_type):
        return _INTEGERS[data_type.bit_width]
    text = kinds.is_string(data_type) or kinds.is_large_string(data_type)
    octets = kinds.is_binary(data_type) or kinds.is_large_binary(data_type)
    fixed = kinds.is_fixed_size_binary(data_type) and not isinstance(data_type, pa.BaseExtensionType)
    if text or octets or fixed or kinds.is_decimal(data_type) or kinds.is_null(data_type):
        return data_type
    return pa.large_binary()


def _to_physical(column: pa.Array) -> pa.Array:
    target = _physical_type(column.type)
    if target == column.type:
        return column
    if pa.types.is_boolean(column.type):
        return pc.cast(column, target)
    if target == pa.large_binary():
        integers = _with_integers(column.type)
        encode = value_codec(integers).encode
        values = _cast(column, integers).to_pylist()
        return pa.array([None if value is None else encode(value) for value in values], target)
    return column.view(target)


def _from_physical(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    if column.type == data_type:
        return column
    if pa.types.is_boolean(data_type):
        return pc.cast(column, data_type)
    if column.type == pa.large_binary():
        integers = _with_integers(data_type)
        decode = value_codec(integers).decode
        values = [None if value is None else decode(value) for value in column.to_pylist()]
        try:
            return _cast(pa.array(values, integers), data_type)
        except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as error:
            raise CorruptionError(f"values in RocksDB are not of the type {data_type}: {error}") from error
    return column.view(data_type)


def _with_integers(data_type: pa.DataType) -> pa.DataType:
    """The type with integers for the dates and times in it. `value_codec` gives both the same bytes."""
    kinds = pa.types
    if kinds.is_temporal(data_type) and not kinds.is_interval(data_type):
        return _INTEGERS[data_type.bit_width]
    if kinds.is_struct(data_type):
        return pa.struct([_field_with_integers(field) for field in data_type])
    if kinds.is_map(data_type):
        key, item = _field_with_integers(data_type.key_field), _field_with_integers(data_type.item_field)
        return pa.map_(key, item, keys_sorted=data_type.keys_sorted)
    if kinds.is_fixed_size_list(data_type):
        return pa.list_(_field_with_integers(data_type.value_field), data_type.list_size)
    if kinds.is_large_list(data_type):
        return pa.large_list(_field_with_integers(data_type.value_field))
    if kinds.is_list(data_type):
        return pa.list_(_field_with_integers(data_type.value_field))
    return data_type


def _field_with_integers(field: pa.Field) -> pa.Field:
    return field.with_type(_with_integers(field.type))


def _cast(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    return column if column.type == data_type else pc.cast(column, data_type)
