"""Keys in RocksDB: decodes the bytes of keys into key columns, and encodes and decodes the keys of timers.

An encoded row is its columns in order: a byte 0 for null, or a byte 1 and then 8 bytes (the canonical word of a type of
fixed width, little-endian), or 8 bytes of length and the bytes themselves. A row is never a prefix of another row, and
rows are equal exactly when the keys are. `tidegate/state/kernels/row_encoding.py` writes them; this module reads them.
Canonical words: integers, booleans, dates and times as int64, floats as the bits of float64.

Timers (`TimerKeys`) are keys without values, whose bytes ascend in the order in which timers fire. After the head of
every key (key group and state number) come the clock (one byte), the timer's time (8 bytes, with the sign bit flipped)
and the key columns. The first byte of each column is 0 for a value, 1 for NaN, 2 for null, so that they sort in this
order. A value is either

- a word of 8 bytes that sorts as the values do. Integers, dates and times have the sign flipped. A float64 has all bits
  flipped if it is negative, else the sign. A decimal is 33 bytes: the unscaled value with the sign flipped.
- or the bytes of a string, each 0 as 0 and 255, followed by 0 and 0.

Therefore no key is a prefix of another key, and keys are equal exactly when the timers are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.state.stored_rows import DOMAINS, timers_schema

_WORD_BYTES = 8
_COPIED_BYTES = 1 << 20
COLUMN_BYTES_MAX = (1 << 31) - 1
"""Largest size in bytes of a column of type `string` or `binary`, because its offsets are int32."""

RowLength = Callable[[bytes, int], int]
"""A function that returns the position at which an encoded row ends, given the bytes and the position of its start."""
MOMENT = struct.Struct(">BQ")
"""Binary format of the clock and the time of a timer, which follow the head of its key."""
_WORD = struct.Struct(">Q")
_DOUBLE = struct.Struct(">d")
_SIGN, _WORD_MAX = 1 << 63, (1 << 64) - 1
_DECIMAL_BYTES = 33
_DECIMAL_SIGN = 1 << 256
_EXACT = Context(prec=100)
_VALUE, _NAN, _NULL = b"\x00", b"\x01", b"\x02"
Encode = Callable[[Any], bytes]
Decode = Callable[[bytes, int], tuple[Any, int]]
"""A function that returns the decoded value at a position of the bytes, and the position after it."""


def decode_rows(rows: Sequence[bytes], schema: pa.Schema) -> pa.RecordBatch:
    """Decodes rows that consist of key columns only, into a batch with these columns.

    Raises CorruptionError for malformed bytes, ConfigurationError if a column would exceed 2 GiB.
    """
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    ends = np.cumsum(sizes)
    cursor = ends - sizes
    # Padding after the end, so that reading a word of a torn last row stays inside the buffer.
    data = np.frombuffer(b"".join((*rows, bytes(_WORD_BYTES + 1))), dtype=np.uint8)
    arrays = []
    for field in schema:
        if np.any(cursor >= ends):
            raise _damaged(schema)
        valid = data[cursor] == 1
        cursor = cursor + 1
        if has_words(field.type):
            arrays.append(_words(data, cursor, valid, field.type))
            cursor = cursor + np.where(valid, _WORD_BYTES, 0)
        else:
            lengths = np.where(valid, _words_at(data, cursor), 0)
            starts = cursor + np.where(valid, _WORD_BYTES, 0)
            if np.any((lengths < 0) | (lengths > ends - starts)):
                raise _damaged(schema)
            arrays.append(_strings(data, starts, lengths, valid, field.type))
            cursor = starts + lengths
        if np.any(cursor > ends):
            raise _damaged(schema)
    if np.any(cursor != ends):
        raise _damaged(schema)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def row_end(schema: pa.Schema) -> RowLength:
    """Returns a function that finds the end of an encoded row of these key columns, within bytes that may continue
    after it.
    """
    words = [has_words(field.type) for field in schema]

    def end(data: bytes, position: int) -> int:
        for is_word in words:
            if data[position] == 0:
                position += 1
            elif is_word:
                position += 1 + _WORD_BYTES
            else:
                length = int.from_bytes(data[position + 1 : position + 1 + _WORD_BYTES], "little")
                position += 1 + _WORD_BYTES + length
        return position

    return end


def has_words(data_type: pa.DataType) -> bool:
    """Returns whether key columns of a type are encoded as 8-byte words, and not as strings of bytes."""
    kinds = pa.types
    temporal = kinds.is_temporal(data_type) and not kinds.is_interval(data_type)
    number = kinds.is_integer(data_type) or kinds.is_floating(data_type)
    return number or temporal or kinds.is_boolean(data_type) or kinds.is_null(data_type)


def _words_at(data: NDArray[np.uint8], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    within = np.minimum(positions, len(data) - _WORD_BYTES)
    return np.ascontiguousarray(data[within[:, None] + np.arange(_WORD_BYTES)]).view("<i8").reshape(-1)


def _words(data: NDArray[np.uint8], cursor: NDArray[np.int64], valid: NDArray[Any], data_type: pa.DataType) -> pa.Array:
    kinds = pa.types
    if kinds.is_null(data_type):
        return pa.nulls(len(cursor))
    words = np.where(valid, _words_at(data, cursor), 0)
    if kinds.is_boolean(data_type):
        bits = pa.py_buffer(np.packbits(words & 1, bitorder="little"))
        return pa.Array.from_buffers(data_type, len(words), [_bitmap(valid), bits])
    if kinds.is_floating(data_type):
        values: NDArray[Any] = words.view("<f8").astype(f"<f{data_type.bit_width // 8}")
    else:
        values = words.astype(f"<i{data_type.bit_width // 8}")
    return pa.Array.from_buffers(data_type, len(words), [_bitmap(valid), pa.py_buffer(values)])


def _strings(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    valid: NDArray[Any],
    data_type: pa.DataType,
) -> pa.Array:
    rows = len(starts)
    offsets = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    content = _content(data, starts, offsets)
    if pa.types.is_fixed_size_binary(data_type) or pa.types.is_decimal(data_type):
        # A null has no bytes in the row, but its width in the column.
        width = data_type.byte_width
        if np.any(lengths[valid] != width):
            raise CorruptionError(
                f"a stored key of type {data_type} does not have {width} bytes in each row; the file is damaged: "
                "choose another checkpoint"
            )
        values = np.zeros((rows, width), dtype=np.uint8)
        values[valid] = content.reshape(-1, width)
        return pa.Array.from_buffers(data_type, rows, [_bitmap(valid), pa.py_buffer(values)])
    large = pa.types.is_large_string(data_type) or pa.types.is_large_binary(data_type)
    if len(content) > COLUMN_BYTES_MAX and not large:
        raise ConfigurationError(
            f"{rows:,} rows of keyed state are needed at once, and have {len(content):,} bytes in a column of type "
            f"{data_type}, which can have {COLUMN_BYTES_MAX:,}; cast it to large_{data_type}, or make batches smaller"
        )
    shaped = offsets if large else offsets.astype(np.int32)
    return pa.Array.from_buffers(data_type, rows, [_bitmap(valid), pa.py_buffer(shaped), pa.py_buffer(content)])


def _content(data: NDArray[np.uint8], starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Concatenates strings from `data`: string i begins at `starts[i]` and has the length `offsets[i + 1] -
    offsets[i]`.

    About a megabyte is copied at a time, because the positions of bytes need many times the memory of the bytes.
    """
    content = np.empty(int(offsets[-1]), dtype=np.uint8)
    lengths = np.diff(offsets)
    row, rows = 0, len(starts)
    while row < rows:
        begin = int(offsets[row])
        stop = max(row + 1, int(np.searchsorted(offsets, begin + _COPIED_BYTES, side="right")) - 1)
        end = int(offsets[stop])
        if stop == row + 1:
            content[begin:end] = data[starts[row] : starts[row] + end - begin]
        else:
            places = np.repeat(starts[row:stop] - offsets[row:stop], lengths[row:stop])
            places += np.arange(begin, end)
            content[begin:end] = data[places]
        row = stop
    return content


def _bitmap(valid: NDArray[Any]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _damaged(schema: pa.Schema) -> CorruptionError:
    return CorruptionError(
        f"stored keys are not rows of the key columns {schema.names}; the file is damaged: choose another checkpoint"
    )


def moment_bytes(domain: int, moment: int) -> bytes:
    """Returns the part of a timer's key that follows the head: its time domain (`domain`) and its time in ms
    (`moment`).
    """
    return MOMENT.pack(domain, moment + _SIGN)


def end_of_moment(domain: int, moment: int) -> bytes:
    """Returns the smallest bytes that sort after all timer keys of a time domain with times up to and including
    `moment` (ms).
    """
    last = moment + _SIGN == _WORD_MAX
    return bytes((domain + 1,)) if last else moment_bytes(domain, moment + 1)


def moment_of(data: bytes, position: int) -> tuple[int, int]:
    """Returns the time domain and the time (ms) in the key of a timer. `position` is the end of the key's head."""
    domain, moment = MOMENT.unpack_from(data, position)
    return domain, moment - _SIGN


class TimerKeys:
    """Encodes and decodes the key columns of timers with one key schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._plain = [_plain_type(field.type) for field in schema]
        self._codecs = [_codec(plain) for plain in self._plain]

    def encode(self, keys: pa.RecordBatch) -> list[bytes]:
        """Returns the encoded key columns of each row."""
        encoded = [
            [encode(value) for value in (column if plain == column.type else column.view(plain)).to_pylist()]
            for column, plain, (encode, _) in zip(keys.columns, self._plain, self._codecs, strict=True)
        ]
        return list(map(b"".join, zip(*encoded, strict=True)))

    def decode(self, rows: Iterable[bytes], position: int) -> pa.RecordBatch:
        """Decodes the key columns of timers, which begin at `position` of each encoded row.

        Raises CorruptionError if malformed.
        """
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
                raise CorruptionError(
                    f"stored timers do not have the key columns {self.schema.names}"
                    "; the file is damaged: choose another checkpoint"
                )
        arrays = [
            pa.array(column, plain) if plain == field.type else pa.array(column, plain).view(field.type)
            for column, plain, field in zip(values, self._plain, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def timer_rows(rows: Sequence[bytes], keys: pa.Schema) -> pa.RecordBatch:
    """Decodes timers into a batch: key columns, time domain and time. `rows` are RocksDB keys without their heads.

    Raises CorruptionError for malformed bytes.
    """
    columns = TimerKeys(keys).decode(rows, MOMENT.size)
    moments = [moment_of(row, 0) for row in rows]
    if any(domain >= len(DOMAINS) for domain, _ in moments):
        raise CorruptionError(
            f"stored timers have an unknown clock; the clocks are {list(DOMAINS)}"
            "; the file is damaged: choose another checkpoint"
        )
    domains = pa.array([DOMAINS[domain] for domain, _ in moments], pa.string())
    times = pa.array([moment for _, moment in moments], pa.int64())
    return pa.RecordBatch.from_arrays([*columns.columns, domains, times], schema=timers_schema(keys))


def _plain_type(data_type: pa.DataType) -> pa.DataType:
    """Returns the type whose Python values are exact: the stored integer type for dates and times, else the same
    type.
    """
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
            raise ValueError(
                f"a decimal in a stored key has {len(data) - at} of {_DECIMAL_BYTES} bytes; the file is damaged: "
                "choose another checkpoint"
            )
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
