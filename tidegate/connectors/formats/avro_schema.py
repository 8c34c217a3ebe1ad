"""Avro schemas: converts them to Arrow types, and compiles decoders (`AvroProgram`) that read records of one schema as
another.

`compiled` resolves the schema with which records were written against the schema of the program, as the specification
of Avro requires, and returns the instructions for the kernels (`state/kernels/avro.py`) and the tree of arrays that
their columns make.

| Avro | Arrow |
| --- | --- |
| boolean, int, long, float, double, string, bytes | bool, int32, int64, float32, float64, string, binary |
| enum, fixed | string, fixed_size_binary |
| record, array, map | struct, list, map of string |
| a union with null | the other type; more branches are refused by name |
| date, time-millis, time-micros | date32, time32[ms], time64[us] |
| timestamp-millis, -micros, -nanos | timestamp in UTC |
| local-timestamp-millis, -micros, -nanos | timestamp without a zone |
| decimal (of bytes or fixed) | decimal128, of at most 38 digits |
| uuid | string, or fixed_size_binary(16) |
| duration | refused by name |

Rules:

- A field of the program's schema that the records lack gets its default. Names match exactly, or by an alias.
- Numbers are promoted as Avro allows. A timestamp of another unit becomes the same time, which must be exact.
- Fields that the program does not read are skipped, and may have types that are refused otherwise.
- Every column may be null, because records without a value (tombstones) are rows of nulls.
- `fastavro` checks schemas. A recursive schema is refused.
"""

from __future__ import annotations

import decimal
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.format import repeated_keys
from tidegate.connectors.formats.registry import UnfitSchemaError
from tidegate.connectors.formats.text import times_beyond_a_day
from tidegate.state.kernels import avro as kernels
from tidegate.state.kernels.avro import SKIPPED
from tidegate.storage.extras import load

Schema: TypeAlias = Any
"""A schema as `fastavro` parses it: a string, a list (a union) or a dict."""
PRIMITIVES: Mapping[str, tuple[int, int, pa.DataType]] = {
    "boolean": (kernels.BOOL, 1, pa.bool_()),
    "int": (kernels.INT, 4, pa.int32()),
    "long": (kernels.LONG, 8, pa.int64()),
    "float": (kernels.FLOAT, 4, pa.float32()),
    "double": (kernels.DOUBLE, 8, pa.float64()),
    "string": (kernels.BYTES, 4, pa.string()),
    "bytes": (kernels.BYTES, 4, pa.binary()),
}
"""For each primitive type: the operation of the kernel, the bytes of an entry, and the Arrow type."""
_LOGICAL: Mapping[tuple[str, str], pa.DataType] = {
    ("int", "date"): pa.date32(),
    ("int", "time-millis"): pa.time32("ms"),
    ("long", "time-micros"): pa.time64("us"),
    ("string", "uuid"): pa.string(),
    **{("long", f"timestamp-{name}"): pa.timestamp(unit, "UTC") for name, unit in [("millis", "ms"), ("micros", "us")]},
    **{("long", f"local-timestamp-{name}"): pa.timestamp(unit) for name, unit in [("millis", "ms"), ("micros", "us")]},
    ("long", "timestamp-nanos"): pa.timestamp("ns", "UTC"),
    ("long", "local-timestamp-nanos"): pa.timestamp("ns"),
}
_PROMOTIONS = {
    *(("int", "long"), ("int", "float"), ("int", "double"), ("long", "float"), ("long", "double"), ("float", "double")),
    *(("string", "bytes"), ("bytes", "string")),
}
_DIGITS_MAX = 38


class UnfitRecordError(ValueError):
    """Raised for a value that its type cannot represent."""


def parsed(schema: str | Mapping[str, Any] | Sequence[Any], references: Sequence[str] = ()) -> AvroSchema:
    """Parses an Avro schema, given as JSON or as Python values. `references`: JSON of the schemas whose names it uses.

    Raises UnfitSchemaError for an invalid schema, ConfigurationError if fastavro is not installed.
    """
    library = load('format="avro"', "avro", "fastavro")
    names: dict[str, Any] = {}
    try:
        for text in references:
            library.parse_schema(json.loads(text), named_schemas=names)
        given = _json_or_name(schema) if isinstance(schema, str) else schema
        found = library.parse_schema(given, named_schemas=names)
    except (library.schema.SchemaParseException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnfitSchemaError(
            f"the Avro schema is invalid: {type(error).__name__}: {error}; correct the schema"
        ) from error
    return AvroSchema(found, names)


def _json_or_name(text: str) -> Any:
    return text if text in PRIMITIVES else json.loads(text)


@dataclass(frozen=True, slots=True)
class AvroSchema:
    """A parsed Avro schema, and the definitions of its named types."""

    root: Schema
    names: Mapping[str, Any]

    def fields(self) -> list[str]:
        """Returns the names of the record's fields. Empty for a schema that is not a record."""
        root = self.of(self.root)
        return [each["name"] for each in root["fields"]] if kind_of(root) == "record" else []

    def only(self, columns: Sequence[str] | None) -> AvroSchema:
        """Returns the schema of a record with some of its fields, or the schema itself if it has none of them."""
        fields = [each for each in self.of(self.root)["fields"] if columns is None or each["name"] in columns]
        return AvroSchema({**self.of(self.root), "fields": fields}, self.names) if fields else self

    def of(self, schema: Schema) -> Schema:
        """Returns the definition of a named type, and any other schema unchanged."""
        if isinstance(schema, dict) and isinstance(schema.get("type"), dict | list):
            return self.of(schema["type"])
        return self.names[schema] if isinstance(schema, str) and schema in self.names else schema


@dataclass(slots=True)
class AvroProgram:
    """The instructions with which kernels decode or encode records of one schema, and the Arrow arrays of its
    columns.
    """

    instructions: list[int] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    """The path of the field that each instruction belongs to, for errors."""
    widths: list[int] = field(default_factory=list)
    """The size in bytes of an entry of each kernel column."""
    has_data: list[bool] = field(default_factory=list)
    """True for a kernel column of strings or bytes, which has value bytes in addition to its entries."""
    has_offsets: list[bool] = field(default_factory=list)
    depth: int = 0
    """Maximum nesting depth of lists."""
    names: list[str] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    @property
    def schema(self) -> pa.Schema:
        """Returns the Arrow columns that records are decoded to."""
        return pa.schema([pa.field(name, node.type) for name, node in zip(self.names, self.nodes, strict=True)])

    def array(self) -> NDArray[np.int64]:
        """Returns the instructions as an array for the kernels."""
        return np.array(self.instructions, dtype=np.int64)

    def emit(self, operation: int, path: str, column: int = SKIPPED, argument: int = 0, target: int = 0) -> int:
        """Appends an instruction to the program, and returns its index."""
        self.instructions += [operation, column, argument, target]
        self.paths.append(path)
        return len(self.paths) - 1

    def patch(self, position: int) -> None:
        """Sets the jump target of the instruction at `position` to the next instruction."""
        self.instructions[kernels.WIDTH * position + 3] = len(self.paths)

    def column(self, width: int, *, data: bool = False, offsets: bool = False) -> int:
        """Adds a kernel column with entries of `width` bytes, and returns its number."""
        self.widths.append(width)
        self.has_data.append(data)
        self.has_offsets.append(offsets)
        return len(self.widths) - 1


class Columns:
    """The decoded values of a program's kernel columns, in one buffer."""

    def __init__(self, program: AvroProgram, counts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """`counts` and `sizes` are the numbers of entries and of value bytes that `scan_avro` counted for each
        column.
        """
        self._program = program
        self._counts = counts.tolist()
        self._sizes = sizes.tolist()
        places = []
        end = 0
        for number, width in enumerate(program.widths):
            entries = width * (self._counts[number] + program.has_offsets[number])
            data_at = _aligned(end + entries)
            places.append((end, data_at))
            end = _aligned(data_at + (self._sizes[number] if program.has_data[number] else 0))
        self.entries_at = np.array([entries for entries, _ in places], dtype=np.int64)
        self.data_at = np.array([data for _, data in places], dtype=np.int64)
        self.out = np.empty(end + 64, dtype=np.uint8)
        for number, offsets in enumerate(program.has_offsets):
            if offsets:
                self.out[places[number][0] : places[number][0] + 4] = 0
        self._buffer = pa.py_buffer(self.out)

    def entries(self, column: int) -> pa.Buffer:
        """Returns the buffer with the entries of a column of the kernels."""
        count = self._counts[column] + self._program.has_offsets[column]
        return self._buffer.slice(int(self.entries_at[column]), self._program.widths[column] * count)

    def data(self, column: int) -> pa.Buffer:
        """Returns the buffer with the value bytes of a column of the kernels."""
        return self._buffer.slice(int(self.data_at[column]), self._sizes[column])

    def elements(self, column: int) -> int:
        """Returns the total number of elements in all lists of a kernel column."""
        return int(self._sizes[column])

    def flags(self, column: int) -> pa.Array:
        """Returns a kernel column of one-byte flags as a boolean array."""
        return pa.array(np.frombuffer(self.entries(column), dtype=np.bool_))


class ColumnsOfRows:
    """The kernel columns of a program, built from Arrow arrays for encoding: the inverse of `Columns`.

    `bad` collects the numbers of rows that cannot be encoded, with the reasons.
    """

    def __init__(self, program: AvroProgram, bad: dict[int, str]) -> None:
        self.bad = bad
        self._parts: list[NDArray[Any]] = [np.zeros(0, dtype=np.uint8)] * (2 * len(program.widths))

    def set(self, column: int, entries: NDArray[Any], data: NDArray[np.uint8] | None = None) -> None:
        """Sets the entries of a kernel column, and the bytes of its values."""
        self._parts[2 * column] = entries
        if data is not None:
            self._parts[2 * column + 1] = data

    def refuse(self, wrong: NDArray[np.bool_], live: NDArray[np.bool_], rows: NDArray[np.int64], reason: str) -> None:
        """Marks the rows of the entries `wrong` as bad, with a reason, except entries below a null (`live` False)."""
        for entry in np.flatnonzero(wrong & live).tolist():
            self.bad.setdefault(int(rows[entry]), reason)

    def joined(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Returns all columns for the kernels in one buffer, with the positions at which each column's entries and
        value bytes begin.
        """
        places = []
        end = 0
        for part in self._parts:
            places.append(end)
            end = _aligned(end + part.nbytes)
        out = np.zeros(end + 64, dtype=np.uint8)
        for at, part in zip(places, self._parts, strict=True):
            out[at : at + part.nbytes] = part.view(np.uint8)
        return out, np.array(places[::2], dtype=np.int64), np.array(places[1::2], dtype=np.int64)


def _aligned(at: int) -> int:
    return -(-at // 64) * 64


class Node(ABC):
    """Converts one field between kernel columns and an Arrow array. Nested fields have child nodes."""

    type: pa.DataType

    @abstractmethod
    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        """Returns the decoded values as an Arrow array.

        `valid` is the null bitmap. Raises UnfitRecordError for a value that does not fit.
        """

    @abstractmethod
    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        """Writes an Arrow array into columns for the kernels, to encode it.

        `rows`: the row number of each value. `live`: False for values below a null, which must be null themselves.
        `path`: the field, for error reasons.
        """


def _refuse_nulls(
    array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
) -> None:
    """Marks rows with a null in a field that is not nullable as bad."""
    if array.null_count:
        null = array.is_null().to_numpy(zero_copy_only=False)
        into.refuse(null, live, rows, f"field {path!r} is null, which the schema does not allow")


@dataclass(slots=True)
class _Leaf(Node):
    """Converts values of a primitive type. `stored` is the type of the entries, which are cast to `type`."""

    number: int
    stored: pa.DataType
    type: pa.DataType

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        if pa.types.is_boolean(self.stored):
            found = columns.flags(self.number)
            if valid is not None:
                found = pa.Array.from_buffers(pa.bool_(), length, [valid, found.buffers()[1]])
        else:
            text = pa.types.is_string(self.stored) or pa.types.is_binary(self.stored)
            buffers = [valid, columns.entries(self.number), *([columns.data(self.number)] if text else [])]
            found = pa.Array.from_buffers(pa.binary() if text else self.stored, length, buffers)
        return _converted(found, self.stored, self.type)

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        _refuse_nulls(array, into, rows, live, path)
        if pa.types.is_time(self.stored):
            for number, reason in times_beyond_a_day(array).items():
                into.bad.setdefault(int(rows[number]), f"field {path!r} {reason}")
        if pa.types.is_boolean(self.stored):
            into.set(self.number, pc.fill_null(array, False).cast(pa.uint8()).to_numpy())
            return
        buffers = array.buffers()
        if pa.types.is_string(self.stored) or pa.types.is_binary(self.stored):
            if not len(array):
                into.set(self.number, np.zeros(1, dtype=np.int32))
                return
            offsets = np.frombuffer(buffers[1], dtype=np.int32, count=len(array) + 1, offset=4 * array.offset)
            data = np.frombuffer(buffers[2] if buffers[2] is not None else b"", dtype=np.uint8)
            into.set(self.number, offsets - offsets[0], data[offsets[0] : offsets[-1]])
            return
        width = self.stored.bit_width // 8
        held = buffers[1] if buffers[1] is not None else b""
        into.set(
            self.number, np.frombuffer(held, dtype=np.uint8, count=width * len(array), offset=width * array.offset)
        )


@dataclass(slots=True)
class _Enum(Node):
    """Converts values of an enum. `symbols` has None for a symbol that the program's schema lacks."""

    number: int
    symbols: Sequence[str | None]
    given: Sequence[str]
    type: pa.DataType = field(default_factory=pa.string)

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        indexes = pa.Array.from_buffers(pa.int32(), length, [valid, columns.entries(self.number)])
        found = pa.array(self.symbols, pa.string()).take(indexes)
        if found.null_count > indexes.null_count:
            unknown = [
                name for name, symbol in zip(self.given, self.symbols, strict=True) if symbol is None and length == 1
            ]
            raise UnfitRecordError(
                f"the symbol {unknown[0]!r} is not in the enum of the program's schema"
                if len(unknown) == 1
                else "the symbol is not in the enum of the program's schema"
            )
        return found

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        _refuse_nulls(array, into, rows, live, path)
        indexes = pc.index_in(array, value_set=pa.array(self.given, pa.string()))
        if indexes.null_count > array.null_count:
            unknown = pc.and_(array.is_valid(), indexes.is_null()).to_numpy(zero_copy_only=False)
            into.refuse(unknown, live, rows, f"field {path!r} is not a symbol of its enum")
        into.set(self.number, pc.fill_null(indexes, 0).to_numpy())


@dataclass(slots=True)
class _Option(Node):
    """Converts nullable values.

    `number`: the column of flags, which are 1 for a value. `required`: None, or the path of a field that may be null in
    the written schema but not in the program's schema.
    """

    number: int
    inner: Node
    required: str | None = None

    @property
    def type(self) -> pa.DataType:
        return self.inner.type

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        flags = columns.flags(self.number)
        live = length
        if valid is not None:
            above = pa.Array.from_buffers(pa.bool_(), length, [None, valid])
            live = above.true_count
            flags = pc.and_(flags, above)
        if self.required is not None and flags.true_count < live:
            raise UnfitRecordError(
                f"{self.required} is null, which the program's schema does not allow; make the field nullable there"
            )
        return self.inner.array(columns, length, valid if flags.true_count == length else flags.buffers()[1])

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        flags = array.is_valid().to_numpy(zero_copy_only=False)
        into.set(self.number, flags.view(np.uint8))
        self.inner.put(array, into, rows, flags, path)


@dataclass(slots=True)
class _Struct(Node):
    names: Sequence[str]
    nodes: Sequence[Node]

    @property
    def type(self) -> pa.DataType:
        return pa.struct([pa.field(name, node.type) for name, node in zip(self.names, self.nodes, strict=True)])

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        children = [node.array(columns, length, valid) for node in self.nodes]
        return pa.Array.from_buffers(self.type, length, [valid], children=children)

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        _refuse_nulls(array, into, rows, live, path)
        valid = array.is_valid().to_numpy(zero_copy_only=False)
        # `flatten` makes the fields of a null struct null.
        for name, node, child in zip(self.names, self.nodes, array.flatten(), strict=True):
            node.put(child, into, rows, valid, f"{path}.{name}")


@dataclass(slots=True)
class _List(Node):
    """Converts lists or maps. `inner` converts the elements or entries. `number`: the column of offsets."""

    number: int
    inner: Node
    is_map: bool = False

    @property
    def type(self) -> pa.DataType:
        if self.is_map:
            assert isinstance(self.inner, _Struct)
            return pa.map_(pa.string(), self.inner.nodes[1].type)
        return pa.list_(self.inner.type)

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        inner = self.inner.array(columns, columns.elements(self.number))
        if self.is_map:
            key, value = self.type.key_field, self.type.item_field
            inner = pa.Array.from_buffers(
                pa.struct([key, value]), len(inner), [None], children=[inner.field(0), inner.field(1)]
            )
        return pa.Array.from_buffers(self.type, length, [valid, columns.entries(self.number)], children=[inner])

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        _refuse_nulls(array, into, rows, live, path)
        if self.is_map:
            array = array.cast(pa.list_(pa.struct([self.type.key_field, self.type.item_field])))
        # A null list may have elements, which do not count.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        offsets = np.zeros(len(array) + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        into.set(self.number, offsets)
        elements = pc.list_flatten(array)
        if self.is_map and len(twice := repeated_keys(elements.field(0), lengths)):
            repeated = np.isin(np.arange(len(elements)), twice)
            reason = f"field {path!r} is a map with a key twice, of which readers keep one; make keys unique"
            into.refuse(repeated, np.ones(len(elements), dtype=np.bool_), np.repeat(rows, lengths), reason)
        self.inner.put(elements, into, np.repeat(rows, lengths), np.ones(len(elements), dtype=np.bool_), f"{path}[]")


@dataclass(slots=True)
class _Constant(Node):
    """Returns the default value for a field that the records lack."""

    value: Any
    type: pa.DataType

    def array(self, columns: Columns, length: int, valid: pa.Buffer | None = None) -> pa.Array:
        # Arrow cannot repeat a nested value zero times.
        return pa.repeat(pa.scalar(self.value, self.type), max(1, length)).slice(0, length)

    def put(
        self, array: pa.Array, into: ColumnsOfRows, rows: NDArray[np.int64], live: NDArray[np.bool_], path: str
    ) -> None:
        """Does nothing: when records are encoded, no field is missing."""


def _converted(found: pa.Array, stored: pa.DataType, wanted: pa.DataType) -> pa.Array:
    """Casts decoded entries to the type of the program's schema. Raises UnfitRecordError."""
    try:
        if pa.types.is_decimal(stored) or pa.types.is_time(stored):
            found.validate(full=True)
        if found.type == wanted:
            return found
        if _is_temporal(stored) and not _is_temporal(wanted):
            # A number without its logical type.
            found = found.cast(_number_type(stored))
        if pa.types.is_floating(wanted):
            return found.cast(wanted, safe=False)
        if _is_temporal(wanted) and not _is_temporal(stored):
            found = found.cast(_number_type(wanted)).cast(wanted)
            if pa.types.is_time(wanted):
                found.validate(full=True)
            return found
        return found.cast(wanted)
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        if pa.types.is_string(wanted):
            raise UnfitRecordError(
                "a string is not UTF-8; correct the records, or read them as format='raw'"
            ) from error
        raise UnfitRecordError(
            f"a value does not fit {wanted}, the type in the program's schema: {error}; give the field a wider type "
            "there"
        ) from error


def _is_temporal(kind: pa.DataType) -> bool:
    return bool(pa.types.is_date(kind) or pa.types.is_time(kind) or pa.types.is_timestamp(kind))


def _number_type(kind: pa.DataType) -> pa.DataType:
    """Returns the type of the number that represents a date or time in Avro."""
    return pa.int32() if pa.types.is_date(kind) or pa.types.is_time32(kind) else pa.int64()


def _are_convertible(stored: pa.DataType, wanted: pa.DataType) -> bool:
    """Returns whether a date or time can be another one: a time of day is neither a date nor a timestamp."""
    if not _is_temporal(stored) or not _is_temporal(wanted) or stored == wanted:
        return True
    if pa.types.is_date(wanted):
        return False
    return bool(pa.types.is_time(stored) == pa.types.is_time(wanted))


def compiled(
    written: AvroSchema, read: AvroSchema, wanted: pa.Schema | None = None, part: str = "value"
) -> AvroProgram:
    """Compiles the program that reads records of the schema `written` as the schema `read`.

    `wanted`: the columns that are needed, with the fields of structs that are needed; None for all. `part`: name of the
    column if the schema is not a record. Raises UnfitSchemaError, which names the field.
    """
    program = AvroProgram()
    writer, reader = written.of(written.root), read.of(read.root)
    whole = None if wanted is None else pa.struct(list(wanted))
    resolver = _Resolver(program, written, read)
    if kind_of(reader) == "record":
        node = resolver.node(writer, reader, "", whole)
        assert isinstance(node, _Struct)
        program.names = list(node.names)
        program.nodes = list(node.nodes)
    else:
        program.names = [part]
        inner = None if whole is None or whole.get_field_index(part) < 0 else whole.field(part).type
        program.nodes = [resolver.node(writer, reader, part, inner)]
    return program


def defaults_of(schema: AvroSchema, names: Sequence[str]) -> dict[str, pa.Scalar]:
    """Returns the defaults of the named fields of a record, as Arrow scalars."""
    root = schema.of(schema.root)
    fields = root["fields"] if kind_of(root) == "record" else ()
    resolver = _Resolver(AvroProgram(), schema, schema)
    found = {each["name"]: resolver._default(each, each["name"]) for each in fields if each["name"] in names}
    return {name: pa.scalar(each.value, each.type) for name, each in found.items()}


class _Resolver:
    def __init__(self, program: AvroProgram, written: AvroSchema, read: AvroSchema) -> None:
        self._program = program
        self._written = written
        self._read = read
        self._open: list[str] = []
        """The names of the records that are being compiled, to detect recursion."""
        self._lists = 0

    def node(self, writer: Schema, reader: Schema, path: str, wanted: pa.DataType | None) -> Node:
        """Emits the instructions for a value, and returns its node.

        `writer` and `reader` are its schemas. Raises UnfitSchemaError.
        """
        writer, reader = self._written.of(writer), self._read.of(reader)
        if isinstance(writer, list):
            return self._union(writer, reader, path, wanted)
        if isinstance(reader, list):
            return self.node(writer, self._branch(writer, reader, path), path, wanted)
        kind = kind_of(writer)
        if kind == "record" and kind_of(reader) == "record":
            return self._record(writer, reader, path, wanted)
        if kind in ("array", "map") and kind_of(reader) == kind:
            return self._list(writer, reader, path, wanted)
        if kind == "enum" and kind_of(reader) == "enum":
            self._check_names(writer, reader, path)
            known = set(reader["symbols"])
            symbols = [name if name in known else reader.get("default") for name in writer["symbols"]]
            number = self._program.column(4)
            self._program.emit(kernels.ENUM, path, number, len(symbols))
            return _Enum(number, symbols, writer["symbols"])
        return self._leaf(writer, reader, path)

    def _leaf(self, writer: Schema, reader: Schema, path: str) -> Node:
        kind, wanted = kind_of(writer), kind_of(reader)
        if kind != wanted and (kind, wanted) not in _PROMOTIONS:
            decimals = _is_decimal(writer) and _is_decimal(reader)
            if not (decimals and {kind, wanted} == {"bytes", "fixed"}):
                raise UnfitSchemaError(
                    f"{_field(path)} was written as {kind}, and the program's schema has {wanted}; give the field a "
                    f"type there that can read {kind}"
                )
        if kind == "fixed" and wanted == "fixed":
            self._check_names(writer, reader, path)
            if writer["size"] != reader["size"]:
                raise UnfitSchemaError(
                    f"{_field(path)} was written with {writer['size']} bytes, and the program's schema has "
                    f"{reader['size']}; give the field the same size there"
                )
        stored, result = leaf_type(writer, path), leaf_type(reader, path)
        if pa.types.is_decimal(stored) != pa.types.is_decimal(result) or (
            pa.types.is_decimal(stored) and stored.scale != result.scale
        ):
            raise UnfitSchemaError(
                f"{_field(path)} was written as {stored}, and the program's schema has {result}; give the field the "
                "same type and scale there"
            )
        if not _are_convertible(stored, result):
            raise UnfitSchemaError(
                f"{_field(path)} was written as {stored}, and the program's schema has {result}; give the field the "
                "same logical type there"
            )
        if pa.types.is_decimal(stored):
            number = self._program.column(16)
            if kind == "fixed":
                self._program.emit(kernels.DECIMAL_FIXED, path, number, writer["size"])
            else:
                self._program.emit(kernels.DECIMAL, path, number)
        elif kind == "fixed":
            number = self._program.column(writer["size"])
            self._program.emit(kernels.FIXED, path, number, writer["size"])
        else:
            operation, width, _ = PRIMITIVES[kind]
            text = operation == kernels.BYTES
            number = self._program.column(width, data=text, offsets=text)
            self._program.emit(operation, path, number)
        return _Leaf(number, stored, result)

    def _record(self, writer: Schema, reader: Schema, path: str, wanted: pa.DataType | None) -> Node:
        self._check_names(writer, reader, path)
        self._enter(writer["name"], path)
        # A written field may be read under an alias only if no other field has its name, wanted or not.
        fields = reader["fields"]
        by_name = _written_fields(fields, {each["name"] for each in writer["fields"]})
        if wanted is not None and pa.types.is_struct(wanted):
            fields = [each for each in fields if wanted.get_field_index(each["name"]) >= 0]
            kept = {each["name"] for each in fields}
            by_name = {written: each for written, each in by_name.items() if each["name"] in kept}
        nodes: dict[str, Node] = {}
        for each in writer["fields"]:
            below = f"{path}.{each['name']}" if path else each["name"]
            found = by_name.get(each["name"])
            if found is None:
                self.skip(each["type"], below)
            else:
                inner = None if wanted is None or not pa.types.is_struct(wanted) else wanted.field(found["name"]).type
                nodes[found["name"]] = self.node(each["type"], found["type"], below, inner)
        for each in fields:
            if each["name"] not in nodes:
                below = f"{path}.{each['name']}" if path else each["name"]
                nodes[each["name"]] = self._default(each, below)
        self._open.pop()
        names = [each["name"] for each in fields]
        return _Struct(names, [nodes[name] for name in names])

    def _default(self, each: Mapping[str, Any], path: str) -> _Constant:
        if "default" not in each:
            raise UnfitSchemaError(
                f"{_field(path)} is in the program's schema without a default, and the records do not have it; give "
                "the field a default there, or remove it"
            )
        # The type is known once the field is compiled as if it were there.
        alone = AvroProgram()
        kind = _Resolver(alone, self._read, self._read).node(each["type"], each["type"], path, None).type
        return _Constant(_default_value(self._read, each["type"], each["default"], path), kind)

    def _list(self, writer: Schema, reader: Schema, path: str, wanted: pa.DataType | None) -> Node:
        is_map = kind_of(writer) == "map"
        program = self._program
        self._check_size(writer, path)
        number = program.column(4, offsets=True)
        begin, first = self._begin_list(path, number)
        inner: Node
        if is_map:
            key_number = program.column(4, data=True, offsets=True)
            program.emit(kernels.BYTES, f"{path} (key)", key_number)
            item = wanted.item_type if wanted is not None and pa.types.is_map(wanted) else None
            key = _Leaf(key_number, pa.string(), pa.string())
            inner = _Struct(["key", "value"], [key, self.node(writer["values"], reader["values"], f"{path}{{}}", item)])
        else:
            item = wanted.value_type if wanted is not None and _is_list(wanted) else None
            inner = self.node(writer["items"], reader["items"], f"{path}[]", item)
        self._end_list(path, number, begin, first)
        return _List(number, inner, is_map)

    def _begin_list(self, path: str, number: int) -> tuple[int, int]:
        self._lists += 1
        self._program.depth = max(self._program.depth, self._lists)
        begin = self._program.emit(kernels.LIST, path, number)
        first = begin + 1
        self._program.instructions[kernels.WIDTH * begin + 2] = first
        return begin, first

    def _end_list(self, path: str, number: int, begin: int, first: int) -> None:
        self._lists -= 1
        self._program.emit(kernels.NEXT, path, target=first)
        again = self._program.emit(kernels.LIST, path, number, first)
        self._program.patch(again)
        self._program.patch(begin)

    def _union(self, writer: Sequence[Schema], reader: Schema, path: str, wanted: pa.DataType | None) -> Node:
        values = [each for each in writer if each != "null"]
        if len(values) != 1:
            kinds = ", ".join(kind_of(self._written.of(each)) for each in writer)
            raise UnfitSchemaError(
                f"{_field(path)} is a union of {kinds}, which has no Arrow type; remove the field from the columns, "
                "or read the records as format='raw'"
            )
        target = reader
        if isinstance(reader, list):
            target = self._branch(self._written.of(values[0]), reader, path)
        program = self._program
        if len(writer) == 1:
            program.emit(kernels.BRANCH, path, argument=1)
            jump = program.emit(kernels.JUMP, path)
            program.patch(jump)
            return self.node(values[0], target, path, wanted)
        number = program.column(1)
        option = program.emit(kernels.OPTION, path, number, list(writer).index("null"))
        inner = self.node(values[0], target, path, wanted)
        program.patch(option)
        is_null_allowed = isinstance(reader, list) and "null" in reader
        return _Option(number, inner, None if is_null_allowed else _field(path))

    def _branch(self, writer: Schema, reader: Sequence[Schema], path: str) -> Schema:
        """Returns the non-null branch of the program's union. Raises UnfitSchemaError if there is not exactly one."""
        values = [self._read.of(each) for each in reader if each != "null"]
        if len(values) != 1:
            kinds = ", ".join(kind_of(self._read.of(each)) for each in reader)
            raise UnfitSchemaError(
                f"{_field(path)} is a union of {kinds} in the program's schema, which has no Arrow type; remove the "
                "field from the columns, or read the records as format='raw'"
            )
        return values[0]

    def _check_names(self, writer: Schema, reader: Schema, path: str) -> None:
        names = {_bare(reader["name"]), *(_bare(each) for each in reader.get("aliases", ()))}
        if _bare(writer["name"]) not in names:
            raise UnfitSchemaError(
                f"{_field(path)} was written as {writer['name']!r}, and the program's schema has {reader['name']!r}; "
                "use the same name, or add an alias there"
            )

    def _enter(self, name: str, path: str) -> None:
        if name in self._open:
            raise UnfitSchemaError(
                f"{_field(path)} is a {name!r} within itself, which has no Arrow type and cannot be skipped; read the "
                "records as format='raw', and decode them in a step"
            )
        self._open.append(name)

    def _check_size(self, schema: Schema, path: str) -> None:
        """Raises UnfitSchemaError for arrays whose elements take no bytes, because a short record could have any number
        of them.
        """
        if kind_of(schema) == "array" and _takes_nothing(self._written, schema["items"]):
            raise UnfitSchemaError(
                f"{_field(path)} is an array of elements without any bytes, which is not supported; remove the field "
                "from the schema"
            )

    def skip(self, schema: Schema, path: str) -> None:
        """Emits the instructions that skip a value of a schema."""
        program = self._program
        schema = self._written.of(schema)
        if isinstance(schema, list):
            program.emit(kernels.BRANCH, path, argument=len(schema))
            jumps = [program.emit(kernels.JUMP, path) for _ in schema]
            ends = []
            for jump, branch in zip(jumps, schema, strict=True):
                program.patch(jump)
                self.skip(branch, path)
                ends.append(program.emit(kernels.JUMP, path))
            for end in ends:
                program.patch(end)
            return
        kind = kind_of(schema)
        if kind == "record":
            self._enter(schema["name"], path)
            for each in schema["fields"]:
                self.skip(each["type"], f"{path}.{each['name']}")
            self._open.pop()
        elif kind in ("array", "map"):
            self._check_size(schema, path)
            begin, first = self._begin_list(path, SKIPPED)
            if kind == "map":
                program.emit(kernels.BYTES, f"{path} (key)")
            self.skip(schema["values" if kind == "map" else "items"], path)
            self._end_list(path, SKIPPED, begin, first)
        elif kind == "fixed":
            program.emit(kernels.FIXED, path, argument=schema["size"])
        elif kind == "enum":
            program.emit(kernels.ENUM, path, argument=len(schema["symbols"]))
        elif kind != "null":
            program.emit(PRIMITIVES[kind][0], path)


def _written_fields(fields: Sequence[Mapping[str, Any]], written: set[str]) -> dict[str, Mapping[str, Any]]:
    """Returns the fields of the program's schema that records have, by the names under which they were written.

    A field is found by its own name, or else by the first alias that was written and is not the name of another field.
    """
    found = {each["name"]: each for each in fields if each["name"] in written}
    for each in fields:
        if each["name"] not in found:
            alias = next((name for name in each.get("aliases", ()) if name in written and name not in found), None)
            if alias is not None:
                found[alias] = each
    return found


def leaf_type(schema: Schema, path: str) -> pa.DataType:
    """Returns the Arrow type of a schema that is not nested. Raises UnfitSchemaError for a type that is not
    supported.
    """
    kind = kind_of(schema)
    logical = schema.get("logicalType") if isinstance(schema, dict) else None
    if kind == "fixed":
        if logical == "duration":
            raise UnfitSchemaError(
                f"{_field(path)} is a duration of months, days and milliseconds, which is not supported; remove the "
                "field from the columns"
            )
        return _decimal_type(schema, path) if logical == "decimal" else pa.binary(schema["size"])
    if kind == "bytes" and logical == "decimal":
        return _decimal_type(schema, path)
    if kind not in PRIMITIVES:
        raise UnfitSchemaError(f"{_field(path)} is of type {kind}, which has no column; remove it from the columns")
    if logical is not None and (kind, logical) in _LOGICAL:
        return _LOGICAL[kind, logical]
    # The specification requires that an unknown logical type is ignored.
    return PRIMITIVES[kind][2]


def _decimal_type(schema: Mapping[str, Any], path: str) -> pa.DataType:
    precision, scale = schema.get("precision", 0), schema.get("scale", 0)
    if not 0 < precision <= _DIGITS_MAX or not 0 <= scale <= precision:
        raise UnfitSchemaError(
            f"{_field(path)} is a decimal of {precision} digits with scale {scale}; up to {_DIGITS_MAX} digits are "
            "supported; make it a string, or remove it from the columns"
        )
    return pa.decimal128(precision, scale)


def _default_value(schema: AvroSchema, kind: Schema, given: Any, path: str) -> Any:
    """Converts the JSON of a field's default to the Python value of its type."""
    kind = schema.of(kind)
    if isinstance(kind, list):
        # A default is of the first branch.
        return None if given is None else _default_value(schema, kind[0], given, path)
    name = kind_of(kind)
    if name == "record":
        return {
            each["name"]: _default_value(
                schema, each["type"], given[each["name"]] if each["name"] in given else each.get("default"), path
            )
            for each in kind["fields"]
        }
    if name == "array":
        return [_default_value(schema, kind["items"], each, path) for each in given]
    if name == "map":
        return [(key, _default_value(schema, kind["values"], each, path)) for key, each in given.items()]
    if name in ("bytes", "fixed") and isinstance(given, str):
        data = given.encode("latin-1")
        found = leaf_type(kind, path)
        if pa.types.is_decimal(found):
            return decimal.Decimal(int.from_bytes(data, "big", signed=True)).scaleb(-found.scale)
        return data
    if name in ("int", "long"):
        stored, wanted = PRIMITIVES[name][2], leaf_type(kind, path)
        return given if stored == wanted else pa.array([given], stored).cast(wanted)[0].as_py()
    return given


def _takes_nothing(schema: AvroSchema, kind: Schema) -> bool:
    kind = schema.of(kind)
    if isinstance(kind, list):
        return False
    name = kind_of(kind)
    if name == "record":
        return all(_takes_nothing(schema, each["type"]) for each in kind["fields"])
    return name == "null" or (name == "fixed" and kind["size"] == 0)


def kind_of(schema: Schema) -> str:
    """Returns the kind of a schema, such as "record" or "union"."""
    if isinstance(schema, list):
        return "union"
    return str(schema["type"] if isinstance(schema, dict) else schema)


def _is_decimal(schema: Schema) -> bool:
    return isinstance(schema, dict) and schema.get("logicalType") == "decimal"


def _bare(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _field(path: str) -> str:
    return f"field {path!r}" if path else "the record"


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
