"""`ValueCodec`: Python values of one Arrow type as bytes and back. What goes in comes out equal, as from Arrow itself.

Most types are what msgpack knows. Dates and times go as the integers that Arrow stores, decimals as their digits,
structs as lists of their fields; a value of a type beyond that goes as an Arrow stream. Never pickle.

Keys of a map are ordered by their bytes: numbers and strings ascend; equal keys have equal bytes (one NaN, one zero).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgpack
import pyarrow as pa

from tidegate.storage.errors import CorruptionError

POSITION = struct.Struct(">Q")
"""Position of a piece of a list, the end of its key."""

Convert = Callable[[Any], Any]

_INT64_BIAS = 1 << 63
_WORD = struct.Struct(">Q")
_FLOAT = struct.Struct(">d")
_MALFORMED = (
    ValueError,
    TypeError,
    KeyError,
    OSError,
    ArithmeticError,
    struct.error,
    pa.ArrowException,
    msgpack.UnpackException,
)


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """Bytes of values of one type. `decode` raises CorruptionError for bytes that are none."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def value_codec(data_type: pa.DataType) -> ValueCodec:
    """How values of a type are stored. They are not None."""
    return _packed(*_conversion(data_type))


def list_codec(data_type: pa.DataType) -> ValueCodec:
    """How some values of a type, a piece of a list, are stored."""
    to, back = _conversion(data_type)
    if to is None or back is None:
        return _packed(None, None)
    return _packed(lambda values: [to(value) for value in values], lambda values: [back(value) for value in values])


def map_key_codec(data_type: pa.DataType) -> ValueCodec:
    """How keys of a map are stored; they are of a plain type."""
    if pa.types.is_integer(data_type):
        bias = 0 if pa.types.is_unsigned_integer(data_type) else _INT64_BIAS
        return ValueCodec(lambda key: _WORD.pack(key + bias), _checked(lambda data: _WORD.unpack(data)[0] - bias))
    if pa.types.is_floating(data_type):
        return ValueCodec(_ordered_float, _checked(_from_ordered_float))
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return ValueCodec(str.encode, _checked(bytes.decode))
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
        return ValueCodec(bytes, bytes)
    return value_codec(data_type)


def _packed(to: Convert | None, back: Convert | None) -> ValueCodec:
    pack = msgpack.Packer(use_bin_type=True).pack
    unpack = msgpack.unpackb

    def plain(data: bytes) -> Any:
        return unpack(data, strict_map_key=False, raw=False)

    if to is None or back is None:
        return ValueCodec(pack, _checked(plain))
    return ValueCodec(lambda value: pack(to(value)), _checked(lambda data: back(plain(data))))


def _checked(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def checked(data: bytes) -> Any:
        try:
            return decode(data)
        except _MALFORMED as error:
            raise CorruptionError(f"a value of {len(data)} bytes in RocksDB cannot be decoded: {error}") from error

    return checked


def _conversion(data_type: pa.DataType) -> tuple[Convert | None, Convert | None]:
    """To what msgpack knows, and back; None where it knows the values themselves."""
    kinds = pa.types
    if kinds.is_dictionary(data_type):
        return _conversion(data_type.value_type)
    if _is_plain(data_type):
        return None, None
    if kinds.is_decimal(data_type):
        return str, Decimal
    if kinds.is_temporal(data_type) and not kinds.is_interval(data_type):
        return _temporal(data_type)
    if kinds.is_struct(data_type):
        return _struct(data_type)
    if kinds.is_map(data_type):
        return _map(data_type)
    if kinds.is_list(data_type) or kinds.is_large_list(data_type) or kinds.is_fixed_size_list(data_type):
        to, back = _conversion(data_type.value_type)
        if to is None or back is None:
            return None, None
        return _each(_nullable(to)), _each(_nullable(back))
    return _arrow(data_type)


def _is_plain(data_type: pa.DataType) -> bool:
    kinds = pa.types
    text = kinds.is_string(data_type) or kinds.is_large_string(data_type) or data_type == pa.string_view()
    binary = kinds.is_binary(data_type) or kinds.is_large_binary(data_type) or data_type == pa.binary_view()
    number = kinds.is_integer(data_type) or kinds.is_float32(data_type) or kinds.is_float64(data_type)
    fixed = kinds.is_fixed_size_binary(data_type) and not isinstance(data_type, pa.BaseExtensionType)
    return text or binary or number or fixed or kinds.is_boolean(data_type) or kinds.is_null(data_type)


def _nullable(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _temporal(data_type: pa.DataType) -> tuple[Convert, Convert]:
    stored = pa.int32() if data_type.bit_width == 32 else pa.int64()
    return (
        lambda value: pa.scalar(value, data_type).value,
        lambda number: pa.scalar(number, stored).cast(data_type).as_py(),
    )


def _struct(data_type: pa.DataType) -> tuple[Convert, Convert]:
    names = [field.name for field in data_type]
    fields = [_conversion(field.type) for field in data_type]
    tos = [None if to is None else _nullable(to) for to, _ in fields]
    backs = [None if back is None else _nullable(back) for _, back in fields]

    def to_list(value: Any) -> list[Any]:
        found = [value.get(name) for name in names]
        return [field if to is None else to(field) for field, to in zip(found, tos, strict=True)]

    def from_list(stored: Any) -> dict[str, Any]:
        found = [field if back is None else back(field) for field, back in zip(stored, backs, strict=True)]
        return dict(zip(names, found, strict=True))

    return to_list, from_list


def _map(data_type: pa.DataType) -> tuple[Convert, Convert]:
    to_key, back_key = (c or _same for c in _conversion(data_type.key_type))
    to_item, back_item = (_nullable(c or _same) for c in _conversion(data_type.item_type))
    return (
        lambda entries: [(to_key(key), to_item(item)) for key, item in _pairs(entries)],
        lambda entries: [(back_key(key), back_item(item)) for key, item in entries],
    )


def _pairs(entries: Any) -> Any:
    return entries.items() if isinstance(entries, dict) else entries


def _same(value: Any) -> Any:
    return value


def _arrow(data_type: pa.DataType) -> tuple[Convert, Convert]:
    """One value as an Arrow stream with one row."""
    schema = pa.schema([pa.field("value", data_type)])

    def to_stream(value: Any) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array([value], type=data_type)], schema=schema))
        stream: bytes = sink.getvalue().to_pybytes()
        return stream

    def from_stream(stream: bytes) -> Any:
        with pa.ipc.open_stream(stream) as reader:
            return reader.read_next_batch().column(0)[0].as_py()

    return to_stream, from_stream


def _ordered_float(value: float) -> bytes:
    value = math.nan if value != value else value + 0.0  # -0.0 + 0.0 is 0.0
    (bits,) = _WORD.unpack(_FLOAT.pack(value))
    return _WORD.pack(bits ^ (2**64 - 1) if bits >> 63 else bits | _INT64_BIAS)


def _from_ordered_float(data: bytes) -> float:
    (bits,) = _WORD.unpack(data)
    number: float = _FLOAT.unpack(_WORD.pack(bits ^ _INT64_BIAS if bits >> 63 else bits ^ (2**64 - 1)))[0]
    return math.nan if number != number else number
