"""Values of rows in RocksDB, of any Arrow columns: in the encoding of keys, which keeps all of them.

Numbers, dates and times go as the integers of their bits, strings and bytes as they are, and values of any other type
in the form that a value state of that type has (`values.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

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
        encode = value_codec(column.type).encode
        return pa.array([None if value is None else encode(value) for value in column.to_pylist()], target)
    return column.view(target)


def _from_physical(column: pa.Array, data_type: pa.DataType) -> pa.Array:
    if column.type == data_type:
        return column
    if pa.types.is_boolean(data_type):
        return pc.cast(column, data_type)
    if column.type == pa.large_binary():
        decode = value_codec(data_type).decode
        return pa.array([None if value is None else decode(value) for value in column.to_pylist()], data_type)
    return column.view(data_type)
