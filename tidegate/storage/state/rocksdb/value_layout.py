"""`RocksDescription` describes the RocksDB files of an operator to a reader: key columns, states, and the encoding of
values.

Every key begins with a head of four bytes: key group and number of the state, both big-endian. After the head come the
key columns (`keys.py`). The key of a map entry ends with its map key, and the key of a part of a list with the position
of the part (`ValueCodec`).

    TABLE   validity bits, then the values of the columns, each in its fixed width; like ROWS if a column has no width
    VALUE   msgpack of the value
    LIST    msgpack of some values of the list; the list is all its parts in the order of their positions
    MAP     msgpack of the value of one entry
    TIMERS  nothing: the key has everything, in another form (`TimerKeys`)
    ROWS    the value columns, encoded as keys are (`unpacked`); the key ends with the number of the row

- `TableLayout` packs and unpacks rows of vectorised states, a batch at a time; `VaryingLayout` reads rows with a column
  of varying width.
- Values of row tables use the encoding of keys: numbers, dates and times as the integers of their bits, strings and
  bytes as they are, and other types as a value state of that type. Dates and times within lists, structs and maps are
  integers there too, converted by Arrow, because Python objects have neither nanoseconds nor the whole range.
- `ValueCodec` converts Python values of one Arrow type to bytes and back without loss. Most types are types of msgpack.
  Dates and times become the integers that Arrow stores, decimals their digits, structs lists of their fields. A value
  of another type becomes an Arrow stream, never a pickle. Keys of a map are ordered by their bytes: numbers and strings
  ascend, and equal keys have equal bytes (one NaN, one zero).
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.codec import decode, encode, wire
from tidegate.storage.errors import CodecError, CorruptionError
from tidegate.storage.state.rocksdb.keys import decode_rows
from tidegate.storage.state.stored_rows import row_identity

ROCKSDB = "rocksdb"
"""Value of `NativeState.backend` for files of RocksDB."""

FORMAT_VERSION = 4

STATES_MAX = 1 << 16
HEAD = struct.Struct(">HH")
"""Binary format of the head with which every key begins: key group and state number."""
_INTEGERS = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}
POSITION = struct.Struct(">Q")
"""Binary format of the position of a list part, with which the part's key ends."""
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


@wire
class RocksForm(enum.Enum):
    """The form in which the rows of a state are stored in the database. The module's docstring describes each form."""

    TABLE = "table"
    VALUE = "value"
    LIST = "list"
    MAP = "map"
    TIMERS = "timers"
    ROWS = "rows"


@wire
@dataclass(frozen=True, slots=True)
class RocksState:
    """Describes one state.

    `number` is part of its keys in the database. `values` are the value columns: exactly one, except for TABLE and
    ROWS.
    """

    name: str
    number: int
    form: RocksForm
    values: pa.Schema


@wire
@dataclass(frozen=True, slots=True)
class RocksDescription:
    """Describes the states of one operator in one RocksDB database.

    `lineage` is an id that is shared by all databases restored from one another: within a lineage, equal file names
    mean equal bytes. `next_position` is greater than the position of every stored part of a list.
    """

    version: int
    lineage: str
    max_parallelism: int
    keys: pa.Schema
    states: tuple[RocksState, ...]
    next_position: int

    def stored_keys(self, state: RocksState) -> pa.Schema:
        """Returns the key columns of a state's entries. Does not apply to timers."""
        return row_identity(self.keys) if state.form is RocksForm.ROWS else self.keys

    def to_bytes(self) -> bytes:
        """Returns the description encoded for `NativeState.description`."""
        return encode(self)


def describe(native: NativeState) -> RocksDescription:
    """Decodes the description of stored RocksDB files.

    Raises CodecError for files of another backend or in another format, CorruptionError for damage.
    """
    if native.backend != ROCKSDB:
        raise CodecError(
            f"state of operator {native.uid!r} is of backend {native.backend!r}, which this tidegate lacks"
            "; restore with the tidegate that wrote it, or a newer one"
        )
    description = decode(native.description)
    if not isinstance(description, RocksDescription):
        raise CorruptionError(
            f"state of operator {native.uid!r} has no description of its RocksDB files; choose another checkpoint"
        )
    if description.version != FORMAT_VERSION:
        raise CodecError(
            f"RocksDB state of operator {native.uid!r} has format version {description.version}, and this tidegate "
            f"reads version {FORMAT_VERSION}; restore with the tidegate that wrote it"
        )
    return description


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The encoding of a TABLE row whose columns all have a fixed width: validity bits, then the value of each
    column.
    """

    schema: pa.Schema
    dtype: np.dtype[Any]

    def columns(self, packed: Sequence[bytes]) -> list[pa.Array]:
        """Decodes rows into their value columns. Raises CorruptionError for rows of another size."""
        data = b"".join(packed)
        if len(data) != len(packed) * self.dtype.itemsize:
            raise CorruptionError(
                f"{len(packed)} stored rows of the columns {self.schema.names} have {len(data)} bytes instead of "
                f"{self.dtype.itemsize} each; the file is damaged: choose another checkpoint"
            )
        rows = np.frombuffer(data, dtype=self.dtype)
        bits = np.unpackbits(rows["valid"], axis=1, count=len(self.schema), bitorder="little")
        return [self._column(rows, bits[:, position], position) for position in range(len(self.schema))]

    def packed(self, columns: Sequence[pa.Array]) -> list[bytes]:
        """Encodes value columns as one bytes object for each row."""
        data, width = self.encoded(columns).tobytes(), self.dtype.itemsize
        return [data[start : start + width] for start in range(0, len(data), width)]

    def encoded(self, columns: Sequence[pa.Array]) -> NDArray[np.uint8]:
        """Encodes value columns as an array of shape (rows, bytes in each row)."""
        rows = np.empty(len(columns[0]), dtype=self.dtype)
        for position, column in enumerate(columns):
            name = f"c{position}"
            if len(column):
                width = self.dtype[name].itemsize
                values = np.frombuffer(column.buffers()[1], dtype=self.dtype[name], offset=column.offset * width)
                rows[name] = values[: len(column)]
        # Most columns have no nulls. Without any, all rows have the same bits.
        nulls = any(column.null_count for column in columns)
        valid = np.ones((len(rows) if nulls else 1, len(columns)), dtype=np.uint8)
        for position, column in enumerate(columns):
            if column.null_count:
                valid[:, position] = column.is_valid().to_numpy(zero_copy_only=False)
        rows["valid"] = np.packbits(valid, axis=1, bitorder="little")
        return rows.view(np.uint8).reshape(len(rows), self.dtype.itemsize)

    def _column(self, rows: NDArray[Any], valid: NDArray[np.uint8], position: int) -> pa.Array:
        values = np.ascontiguousarray(rows[f"c{position}"])
        bitmap = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        return pa.Array.from_buffers(self.schema.field(position).type, len(rows), [bitmap, pa.py_buffer(values)])


@dataclass(frozen=True, slots=True)
class VaryingLayout:
    """The encoding of a TABLE row with a variable-width column, in which all columns are encoded as in keys."""

    schema: pa.Schema

    def columns(self, packed: Sequence[bytes]) -> list[pa.Array]:
        """Decodes rows into their value columns. Raises CorruptionError for malformed bytes."""
        return unpacked(packed, self.schema)


def is_varying(schema: pa.Schema) -> bool:
    """Returns whether any value column is not a number or a time of a fixed width of 1 to 8 bytes."""
    return not all(_is_fixed(field.type) for field in schema)


def _is_fixed(data_type: pa.DataType) -> bool:
    kinds = pa.types
    temporal = kinds.is_temporal(data_type) and not kinds.is_interval(data_type)
    return bool(temporal or kinds.is_integer(data_type) or kinds.is_floating(data_type))


def table_layout(schema: pa.Schema) -> TableLayout | VaryingLayout:
    """Returns the encoding of rows with these value columns: fixed-width if all columns have a fixed width."""
    if is_varying(schema):
        return VaryingLayout(schema)
    columns = [(f"c{i}", f"<i{field.type.bit_width // 8}") for i, field in enumerate(schema)]
    return TableLayout(schema, np.dtype([("valid", "u1", ((len(schema) + 7) // 8,)), *columns]))


def physical(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch with each column cast to a type that keys may have, without losing a bit of any value."""
    arrays = [_to_physical(column) for column in rows.columns]
    return pa.RecordBatch.from_arrays(arrays, names=rows.schema.names)


def unpacked(packed: Sequence[bytes], schema: pa.Schema) -> list[pa.Array]:
    """Decodes rows that were encoded from the batch that `physical` returns.

    Raises CorruptionError for malformed bytes.
    """
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
            raise CorruptionError(
                f"values in RocksDB are not of the type {data_type}: {error}"
                "; the file is damaged: choose another checkpoint"
            ) from error
    return column.view(data_type)


def _with_integers(data_type: pa.DataType) -> pa.DataType:
    """Returns the type with dates and times replaced by integers of the same width.

    `value_codec` encodes both alike.
    """
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


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """Converts Python values of one Arrow type to bytes and back.

    `decode` raises CorruptionError for malformed bytes.
    """

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


def value_codec(data_type: pa.DataType) -> ValueCodec:
    """Returns the codec for values of an Arrow type. It does not encode None."""
    return _packed(*_conversion(data_type))


def list_codec(data_type: pa.DataType) -> ValueCodec:
    """Returns the codec for a part of a list, which contains several values of an Arrow type."""
    to, back = _conversion(data_type)
    if to is None or back is None:
        return _packed(None, None)
    return _packed(lambda values: [to(value) for value in values], lambda values: [back(value) for value in values])


def map_key_codec(data_type: pa.DataType) -> ValueCodec:
    """Returns the codec for map keys of an Arrow type.

    The encoded bytes sort as the keys do for numbers and strings.
    """
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
            raise CorruptionError(
                f"a value of {len(data)} bytes in RocksDB cannot be decoded: {error}"
                "; the file is damaged: choose another checkpoint"
            ) from error

    return checked


def _conversion(data_type: pa.DataType) -> tuple[Convert | None, Convert | None]:
    """Returns two functions that convert values of an Arrow type to values that msgpack supports, and back.

    Both are None if msgpack supports the type itself.
    """
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
    """Returns two functions that convert one value to an Arrow stream with one row, and back."""
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
