"""Timers in RocksDB: keys without values, whose bytes ascend as timers fire.

After the head, with which every key begins, come the clock (a byte), the moment (8 bytes, the sign flipped) and the key
columns. Of each the first byte tells what it is: 0 a value, 1 NaN, 2 null, so that they come in this order. A value is

- a word of 8 bytes that sorts as the values do: integers, dates and times with the sign flipped; of floats the bits of
  float64, of a negative one all flipped, else the sign; of decimals 33 bytes, the unscaled value with the sign flipped;
- or the bytes of a string, each 0 as 0 and 255, and 0 and 0 at the end.

So no key is the beginning of another one, and keys are equal exactly when the timers are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

from tidegate.storage.errors import CorruptionError
from tidegate.storage.state.timer_rows import DOMAINS, timers_schema

MOMENT = struct.Struct(">BQ")
"""Clock and moment."""

_WORD = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_SIGN, _WORD_MAX = 1 << 63, (1 << 64) - 1
_DECIMAL_BYTES = 33
_DECIMAL_SIGN = 1 << 256
_EXACT = Context(prec=100)
_VALUE, _NAN, _NULL = b"\x00", b"\x01", b"\x02"

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]
"""From a position: the value, and the position behind it."""


def moment_bytes(domain: int, moment: int) -> bytes:
    """How the keys of timers of a clock and a moment go on after their head."""
    return MOMENT.pack(domain, moment + _SIGN)


def behind_moment(domain: int, moment: int) -> bytes:
    """What no key of a timer of a clock up to a moment comes after, and any later one does."""
    last = moment + _SIGN == _WORD_MAX
    return bytes((domain + 1,)) if last else moment_bytes(domain, moment + 1)


def moment_of(data: bytes, position: int) -> tuple[int, int]:
    """Clock and moment, from where a head ends."""
    domain, moment = MOMENT.unpack_from(data, position)
    return domain, moment - _SIGN


class TimerKeys:
    """Key columns of one schema in this form, and back."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._plain = [_plain_type(field.type) for field in schema]
        self._codecs = [_codec(plain) for plain in self._plain]

    def encode(self, keys: pa.RecordBatch) -> list[bytes]:
        """Each row of stored key columns."""
        encoded = [
            [encode(value) for value in (column if plain == column.type else column.view(plain)).to_pylist()]
            for column, plain, (encode, _) in zip(keys.columns, self._plain, self._codecs, strict=True)
        ]
        return list(map(b"".join, zip(*encoded, strict=True)))

    def decode(self, rows: Iterable[bytes], position: int) -> pa.RecordBatch:
        """Stored key columns of rows that begin at a position. CorruptionError for bytes that are no such rows."""
        values: list[list[Any]] = [[] for _ in self._codecs]
        for row in rows:
            at = position
            try:
                for column, (_, decode) in zip(values, self._codecs, strict=True):
                    value, at = decode(row, at)
                    column.append(value)
            except (IndexError, ValueError, struct.error):
                at = -1
            if at != len(row):
                raise CorruptionError(f"stored timers are none of the key columns {self.schema.names}")
        arrays = [
            pa.array(column, plain) if plain == field.type else pa.array(column, plain).view(field.type)
            for column, plain, field in zip(values, self._plain, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def timer_rows(rows: Sequence[bytes], keys: pa.Schema) -> pa.RecordBatch:
    """The table of timers whose keys, without their heads, these are. CorruptionError as of `TimerKeys.decode`."""
    columns = TimerKeys(keys).decode(rows, MOMENT.size)
    told = [moment_of(row, 0) for row in rows]
    if any(domain >= len(DOMAINS) for domain, _ in told):
        raise CorruptionError(f"stored timers wait for a clock that there is not; there are {list(DOMAINS)}")
    domains = pa.array([DOMAINS[domain] for domain, _ in told], pa.string())
    moments = pa.array([moment for _, moment in told], pa.int64())
    return pa.RecordBatch.from_arrays([*columns.columns, domains, moments], schema=timers_schema(keys))


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    """The type whose Python values are exact: of dates and times the integers beneath."""
    if pa.types.is_temporal(data_type):
        return pa.int32() if data_type.bit_width == 32 else pa.int64()
    return data_type


def _codec(data_type: pa.DataType) -> tuple[Encode, Decode]:
    kinds = pa.types
    if kinds.is_boolean(data_type):
        return _with_null(lambda v: _WORD.pack(v)), _or_null(lambda data, at: (data[at + 7] == 1, at + 8))
    if kinds.is_floating(data_type):
        return _encode_float, _or_null(_decode_float)
    if kinds.is_unsigned_integer(data_type):
        return _with_null(_WORD.pack), _or_null(lambda data, at: (_WORD.unpack_from(data, at)[0], at + 8))
    if kinds.is_integer(data_type):
        return _with_null(lambda v: _WORD.pack(v + _SIGN)), _or_null(_decode_integer)
    if kinds.is_decimal(data_type):
        return _decimal_codec(data_type.scale)
    if kinds.is_string(data_type) or kinds.is_large_string(data_type):
        return _with_null(lambda v: _encode_bytes(v.encode())), _or_null(_decode_text)
    return _with_null(_encode_bytes), _or_null(_decode_bytes)


def _with_null(encode: Encode) -> Encode:
    return lambda value: _NULL if value is None else _VALUE + encode(value)


def _or_null(decode: Decode) -> Decode:
    def decoded(data: bytes, at: int) -> tuple[Any, int]:
        kind = data[at]
        if kind:
            return (None if kind == _NULL[0] else math.nan), at + 1
        return decode(data, at + 1)

    return decoded


def _encode_float(value: float | None) -> bytes:
    if value is None:
        return _NULL
    if math.isnan(value):
        return _NAN
    (bits,) = _WORD.unpack(_DOUBLE.pack(value))
    return _VALUE + _WORD.pack(bits ^ (_WORD_MAX if bits & _SIGN else _SIGN))


def _decode_float(data: bytes, at: int) -> tuple[float, int]:
    (bits,) = _WORD.unpack_from(data, at)
    (value,) = _DOUBLE.unpack(_WORD.pack(bits ^ (_SIGN if bits & _SIGN else _WORD_MAX)))
    return value, at + 8


def _decode_integer(data: bytes, at: int) -> tuple[int, int]:
    return _WORD.unpack_from(data, at)[0] - _SIGN, at + 8


def _decimal_codec(scale: int) -> tuple[Encode, Decode]:
    def encode(value: Decimal) -> bytes:
        unscaled = int(value.scaleb(scale, _EXACT))
        return (unscaled + _DECIMAL_SIGN).to_bytes(_DECIMAL_BYTES, "big")

    def decode(data: bytes, at: int) -> tuple[Decimal, int]:
        end = at + _DECIMAL_BYTES
        if end > len(data):
            raise ValueError("a decimal that ends early")
        unscaled = int.from_bytes(data[at:end], "big") - _DECIMAL_SIGN
        return Decimal(unscaled).scaleb(-scale, _EXACT), end

    return _with_null(encode), _or_null(decode)


def _encode_bytes(value: bytes) -> bytes:
    return value.replace(b"\x00", b"\x00\xff") + b"\x00\x00"


def _decode_bytes(data: bytes, at: int) -> tuple[bytes, int]:
    start = at
    while True:
        at = data.index(b"\x00", at)
        if data[at + 1] == 0:
            return data[start:at].replace(b"\x00\xff", b"\x00"), at + 2
        at += 2


def _decode_text(data: bytes, at: int) -> tuple[str, int]:
    value, end = _decode_bytes(data, at)
    return value.decode(), end
