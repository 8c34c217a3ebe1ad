"""`ProtobufFormat`: each payload is one Protobuf message, bare or in the wire format of a schema registry.

Rules:

- `ptars` converts messages to columns and back, a batch at a time. If a batch cannot be decoded, it is halved until the
  broken message is found.
- Messages are read by the numbers of their fields. With a registry, the schema that a payload names must have the same
  message, with fields of compatible types. The header is followed by the message indexes, which identify the message in
  its file; a payload with another message is bad.
- Descriptors come from a generated class, a FileDescriptorSet, or the registry (`?format=serialized`). The text of a
  schema (`.proto`) is not parsed.
- `ptars` silently drops values that a type cannot represent, so values are checked before and after. A time out of the
  range of its unit makes a record or a row bad. An enum symbol that does not exist, two members of a oneof, and a map
  with a key twice make a row bad. It writes -0.0 as 0.0 in fields without presence, which is not checked.

| Protobuf | Arrow |
| --- | --- |
| int32, sint32, sfixed32; uint32, fixed32 | int32; uint32 |
| int64, sint64, sfixed64; uint64, fixed64 | int64; uint64 |
| float, double, bool, string, bytes | float32, float64, bool, string, binary |
| enum | string, the name of the symbol, or its number if it has no name |
| message, repeated, map | struct, list, map |
| google.protobuf.Timestamp, Duration | timestamp in UTC, duration, of `timestamp_unit` |
| wrappers (Int64Value) | the value, which may be null |
| a message within itself | refused by name, if the column is read |
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tidegate.connectors.formats.fitting import check_read, check_written, fitted, rows_of
from tidegate.connectors.formats.format import (
    DecodedRecords,
    EncodedRecords,
    Format,
    PayloadDecoder,
    PayloadEncoder,
    PayloadUse,
    ReadFormat,
    WriteFormat,
    repeated_keys,
)
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.registry import (
    ImportedSchema,
    RegisteredSchema,
    RegistryClient,
    SchemaRegistry,
    Subject,
    SubjectIds,
    UnfitSchemaError,
    WrittenSchema,
    check_subject,
    newest_schemas,
    schema_of_topics,
)
from tidegate.connectors.formats.wire_format import BlockReader, WireDecoder, empty_rows, header_of, with_header
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load
from tidegate.storage.schemas.exact_casts import leaves

TimestampUnit = Literal["ns", "us", "ms", "s"]
_LIMITS = (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
"""`ptars` returns one of these values for a time that its unit cannot represent."""
_INDEXES_MAX = 64
"""Maximum number of message indexes in a payload, i.e. the nesting depth of message declarations."""


@dataclass(frozen=True)
class ProtobufFormat(Format):
    """Protobuf, bare or in the wire format of a schema registry. Needs `pip install 'tidegate[protobuf]'`.

    - `message`: a class that protoc generated, or the full name of a message in `descriptors` or in the registry.
    - `descriptors`: a FileDescriptorSet with all imports, as bytes (`protoc --include_imports --descriptor_set_out`).
    - `registry`: a `SchemaRegistry`, or its address. Without `message`, the newest schema of the topic is used, and its
      first message.
    - `subject`: how subjects are named, as Confluent's strategies do: "topic" (`orders-value`), "record" or
      "topic_record".
    - `auto_register`: the sink registers its schema if the registry lacks it. With False a missing schema is an error.
    - `timestamp_unit`: unit of timestamps and durations. A time out of the range of "ns" makes its record bad; coarser
      units drop finer digits.

    Raises ConfigurationError for wrong arguments.

    Example:

        >>> tg.ProtobufFormat(registry="http://localhost:8081").kind
        'protobuf'
    """

    message: Any = None
    descriptors: bytes | None = None
    registry: SchemaRegistry | str | None = None
    subject: Subject = "topic"
    auto_register: bool = True
    timestamp_unit: TimestampUnit = "ns"

    kind = "protobuf"

    def __post_init__(self) -> None:
        object.__setattr__(self, "registry", SchemaRegistry.of(self.registry))
        check_subject(self.subject, self.kind)
        if self.timestamp_unit not in ("ns", "us", "ms", "s"):
            raise ConfigurationError(f"ProtobufFormat(timestamp_unit={self.timestamp_unit!r}): give ns, us, ms or s")
        if self.message is not None and not isinstance(self.message, str):
            descriptor = getattr(self.message, "DESCRIPTOR", None)
            if descriptor is None or self.descriptors is not None:
                raise ConfigurationError(
                    "ProtobufFormat(message=): give a class that protoc generated, or a name and descriptors="
                )
            # A class cannot be sent to the tasks, its descriptors can.
            object.__setattr__(self, "descriptors", _set_of(descriptor.file))
            object.__setattr__(self, "message", descriptor.full_name)
        if self.descriptors is not None and self.message is None:
            raise ConfigurationError("ProtobufFormat(descriptors=): name the message, message='shop.Order'")
        if self.descriptors is None and self.registry is None:
            raise ConfigurationError(
                "ProtobufFormat: give message= (a class that protoc generated), descriptors= or registry="
            )

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source (None: all fields of the message).

        Raises ConfigurationError, RegistryError.
        """
        where = f"{use.method}(format='protobuf')"
        newest = self._newest(use)
        try:
            message = self._message(newest, where)
            found = message.columns(self.timestamp_unit)
            for registered in newest.values():
                message.check_written_as(MessageSchema.registered(registered, message.name))
        except UnfitSchemaError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        columns = found if columns is None else columns
        check_read(found, columns, self.kind, use)
        try:
            message.check_fields(columns.names)
        except UnfitSchemaError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        return ProtobufRead(columns, message, self.timestamp_unit, self._registry)

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Raises ConfigurationError, RegistryError."""
        where = f"{use.method}(format='protobuf')"
        newest = self._newest(use)
        try:
            message = self._message(newest, where)
            check_written(columns, message.columns(self.timestamp_unit), self.kind, use)
            message.check_fields(columns.names)
        except UnfitSchemaError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if lacking := [name for name in message.required() if name not in columns.names]:
            raise ConfigurationError(f"{where}: the message requires {lacking[0]!r}, which is not a column; add it")
        written = None
        if self._registry is not None:
            known = {topic: found.schema_id for topic, found in newest.items() if message.is_same_as(found)}
            if (set(known) != set(use.topics) or not known) and not self.auto_register and self.subject == "topic":
                raise ConfigurationError(
                    f"{where}: the newest schema of the topic is not the file of {message.name!r}. Register it, or "
                    "give ProtobufFormat(auto_register=True)"
                )
            *imported, file = message.files()
            written = WrittenSchema(
                self._registry,
                "PROTOBUF",
                file.text,
                message.name,
                self.subject,
                self.auto_register,
                use,
                known,
                file.imports,
                tuple(imported),
            )
            written.check()
        return ProtobufWrite(tuple(columns.names), message, self.timestamp_unit, written)

    @property
    def _registry(self) -> SchemaRegistry | None:
        assert not isinstance(self.registry, str)
        return self.registry

    def _newest(self, use: PayloadUse) -> dict[str, RegisteredSchema]:
        if self._registry is None:
            return {}
        client = RegistryClient(self._registry, serialized=True)
        return newest_schemas(client, self.subject, "PROTOBUF", use)

    def _message(self, newest: dict[str, RegisteredSchema], where: str) -> MessageSchema:
        """Returns the message that the program reads or writes. Raises UnfitSchemaError, ConfigurationError."""
        if self.descriptors is not None:
            return MessageSchema.of(self.descriptors, self.message)
        advice = "give the message of the program, ProtobufFormat(message=..., registry=...)"
        return MessageSchema.registered(schema_of_topics(newest, where, advice), self.message)


@dataclass(frozen=True, slots=True)
class MessageSchema:
    """A Protobuf message type, with the files that declare it.

    `descriptors`: a FileDescriptorSet in the order of imports.
    """

    descriptors: bytes
    name: str

    @staticmethod
    def of(descriptors: bytes, name: str) -> MessageSchema:
        """Returns the message type `name` of a FileDescriptorSet. Raises UnfitSchemaError if it is missing."""
        found = MessageSchema(descriptors, name)
        found.descriptor()
        return found

    @staticmethod
    def registered(schema: RegisteredSchema, name: str | None) -> MessageSchema:
        """Returns a message type of a registered schema: by its name, or the first one (None).

        Raises UnfitSchemaError.
        """
        descriptors = _set_of_registered(schema)
        if name is None:
            files = _files(descriptors)
            if not files or not files[-1].message_type:
                raise UnfitSchemaError(
                    "the registered schema has no message; register a schema with a message, or give message="
                )
            package = f"{files[-1].package}." if files[-1].package else ""
            name = package + files[-1].message_type[0].name
        return MessageSchema.of(descriptors, name)

    def descriptor(self) -> Any:
        """Returns the descriptor of the message, in a new descriptor pool. Raises UnfitSchemaError."""
        pool = _library("google.protobuf.descriptor_pool").DescriptorPool()
        try:
            for file in _files(self.descriptors):
                pool.Add(file)
            return pool.FindMessageTypeByName(self.name)
        except (TypeError, KeyError) as error:
            raise UnfitSchemaError(
                f"the descriptors have no message {self.name!r}: {error}; correct message= or descriptors="
            ) from error

    def handler(self, unit: TimestampUnit) -> Any:
        """Returns ptars's converter for the message. `unit` is the unit of timestamps and durations."""
        library = _library("ptars")
        descriptor = self.descriptor()
        config = library.PtarsConfig(timestamp_unit=unit, duration_unit=unit, enum_repr="string")
        return library.HandlerPool([descriptor.file], config).get_for_message(descriptor)

    def columns(self, unit: TimestampUnit) -> pa.Schema:
        """Returns the columns of the message. All are nullable."""
        fields = self.handler(unit).schema()
        if not len(fields):
            raise UnfitSchemaError(
                f"the message {self.name!r} has no fields, so there are no columns to read; name another message"
            )
        return pa.schema([pa.field(field.name, _nullable(field.type)) for field in fields])

    def required(self) -> list[str]:
        """Returns the names of the fields that are `required` (proto2)."""
        return [field.name for field in self.descriptor().fields if field.is_required]

    def check_fields(self, names: Sequence[str]) -> None:
        """Raises UnfitSchemaError, which names the field, for fields in `names` that have no Arrow type."""
        descriptor = self.descriptor()
        for name in names:
            _check_field(descriptor.fields_by_name[name], name, (self.name,))

    def check_written_as(self, written: MessageSchema) -> None:
        """Raises UnfitSchemaError, which names the field, if messages of another schema cannot be read as this one."""
        _check_same(written.descriptor(), self.descriptor(), "", ())

    def path(self) -> tuple[int, ...]:
        """Returns the message indexes, which identify the message in its file."""
        found: list[int] = []
        descriptor = self.descriptor()
        while descriptor.containing_type is not None:
            found.insert(0, descriptor.containing_type.nested_types.index(descriptor))
            descriptor = descriptor.containing_type
        names = [each.name for each in _file_of(self.descriptors, descriptor.file.name).message_type]
        return (names.index(descriptor.name), *found)

    def is_same_as(self, registered: RegisteredSchema) -> bool:
        """Returns whether a registered schema has an equal message at the same position in its file.

        The types of its fields are compared, too: they can be in imported files.
        """
        try:
            other = MessageSchema.registered(registered, self.name)
        except UnfitSchemaError:
            return False
        return other.path() == self.path() and _types_of(other.descriptor()) == _types_of(self.descriptor())

    def files(self) -> list[ImportedSchema]:
        """Returns the files to register, dependencies first. The last one declares the message.

        Without standard files, which every registry has. Texts have the encoding that a registry accepts.
        """
        files = {file.name: file for file in _files(self.descriptors)}
        found: dict[str, ImportedSchema] = {}

        def add(file: Any) -> None:
            imports = tuple(name for name in file.dependency if not name.startswith(_IN_EVERY_REGISTRY))
            for name in imports:
                if name not in found:
                    add(files[name])
            text = base64.b64encode(file.SerializeToString()).decode()
            found[file.name] = ImportedSchema(file.name, text, imports)

        add(files[self.descriptor().file.name])
        return list(found.values())


_IN_EVERY_REGISTRY = ("google/protobuf/", "google/type/", "confluent/")
"""Folders of the files that Confluent's registry provides itself."""


def _library(name: str) -> Any:
    return load("format='protobuf'", "protobuf", name)


def _files(descriptors: bytes) -> list[Any]:
    """Parses a FileDescriptorSet, and returns its files. Raises UnfitSchemaError."""
    found = _library("google.protobuf.descriptor_pb2").FileDescriptorSet()
    try:
        found.ParseFromString(descriptors)
    except _library("google.protobuf.message").DecodeError as error:
        raise UnfitSchemaError(
            f"the descriptors ({len(descriptors)} bytes) are not a FileDescriptorSet; write them with protoc "
            "--descriptor_set_out"
        ) from error
    return list(found.file)


def _file_of(descriptors: bytes, name: str) -> Any:
    return next(file for file in _files(descriptors) if file.name == name)


def _types_of(descriptor: Any) -> dict[str, bytes]:
    """Returns the declarations of a message and of all types that it contains, by their full names."""
    library = _library("google.protobuf.descriptor_pb2")
    found: dict[str, bytes] = {}
    open_types = [descriptor]
    while open_types:
        each = open_types.pop()
        if each.full_name in found:
            continue
        proto = library.DescriptorProto() if hasattr(each, "fields") else library.EnumDescriptorProto()
        each.CopyToProto(proto)
        found[each.full_name] = bytes(proto.SerializeToString(deterministic=True))
        for field in getattr(each, "fields", ()):
            open_types += [below for below in (field.message_type, field.enum_type) if below is not None]
    return found


def _set_of(file: Any) -> bytes:
    """Returns a Protobuf file and its imports as a FileDescriptorSet."""
    found = _library("google.protobuf.descriptor_pb2").FileDescriptorSet()
    seen: set[str] = set()

    def add(each: Any) -> None:
        if each.name not in seen:
            seen.add(each.name)
            for below in each.dependencies:
                add(below)
            each.CopyToProto(found.file.add())

    add(file)
    return bytes(found.SerializeToString(deterministic=True))


def _set_of_registered(schema: RegisteredSchema) -> bytes:
    """Returns a registered schema and its references as a FileDescriptorSet. Raises UnfitSchemaError."""
    library = _library("google.protobuf.descriptor_pb2")
    found = library.FileDescriptorSet()
    names: set[str] = set()
    for name, text in (*schema.references, ("", schema.text)):
        file = library.FileDescriptorProto()
        try:
            file.ParseFromString(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError, _library("google.protobuf.message").DecodeError) as error:
            raise UnfitSchemaError(
                f"the registry returned the schema with the id {schema.schema_id} as text, and not as descriptors; "
                "use a registry that supports ?format=serialized"
            ) from error
        file.name = name or f"registered-{schema.schema_id}.proto"
        for dependency in file.dependency:
            if dependency not in names and dependency not in [each for each, _ in schema.references]:
                for known in _files(_set_of(_known_file(dependency))):
                    if known.name not in names:
                        names.add(known.name)
                        found.file.append(known)
        names.add(file.name)
        found.file.append(file)
    return bytes(found.SerializeToString(deterministic=True))


def _known_file(name: str) -> Any:
    """Returns the descriptor of a standard file that an installed library provides. Raises UnfitSchemaError."""
    try:
        return import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2").DESCRIPTOR
    except ImportError as error:
        raise UnfitSchemaError(
            f"the schema imports {name!r}, which is not among its references and not an installed module; register it "
            "as a reference"
        ) from error


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Returns the type with nullable fields at any depth."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _nullable(each.type)) for each in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _nullable(kind.item_type))
    return pa.list_(_nullable(kind.value_type)) if pa.types.is_list(kind) else kind


def _check_field(field: Any, path: str, outer: tuple[str, ...]) -> None:
    if field.type == field.TYPE_GROUP:
        raise UnfitSchemaError(f"field {path!r} is a group, which is not supported; remove it from the columns")
    message = field.message_type
    if message is None:
        return
    if message.full_name in outer:
        raise UnfitSchemaError(
            f"field {path!r} is a {message.full_name!r} within itself, which has no Arrow type; remove it from the "
            "columns"
        )
    for each in message.fields:
        _check_field(each, f"{path}.{each.name}", (*outer, message.full_name))


def _wider_types() -> Mapping[int, Sequence[int]]:
    """Returns the types that hold every value of another Protobuf type with the same encoding.

    Protobuf itself also allows reading int64 as int32, which truncates the numbers.
    """
    kinds = _library("google.protobuf.descriptor_pb2").FieldDescriptorProto
    return {
        kinds.TYPE_INT32: (kinds.TYPE_INT64, kinds.TYPE_ENUM),
        kinds.TYPE_UINT32: (kinds.TYPE_UINT64, kinds.TYPE_INT64),
        kinds.TYPE_BOOL: (kinds.TYPE_INT32, kinds.TYPE_UINT32, kinds.TYPE_INT64, kinds.TYPE_UINT64),
        kinds.TYPE_ENUM: (kinds.TYPE_INT32, kinds.TYPE_INT64),
        kinds.TYPE_SINT32: (kinds.TYPE_SINT64,),
        kinds.TYPE_STRING: (kinds.TYPE_BYTES,),
        kinds.TYPE_BYTES: (kinds.TYPE_STRING,),
    }


def _check_same(written: Any, read: Any, path: str, outer: tuple[str, ...]) -> None:
    """Raises UnfitSchemaError if fields with the same number in two messages are not compatible."""
    if read.full_name in outer:
        return
    for number, field in read.fields_by_number.items():
        other = written.fields_by_number.get(number)
        if other is None:
            continue
        below = f"{path}.{field.name}" if path else field.name
        if field.type != other.type and field.type not in _wider_types().get(other.type, ()):
            raise UnfitSchemaError(
                f"field {below!r} (number {number}) was written with another type than the program's schema has, so "
                "values may not fit; give the field the same type there"
            )
        if field.is_repeated != other.is_repeated:
            raise UnfitSchemaError(
                f"field {below!r} (number {number}) is repeated in one of the schemas only; make it repeated in both"
            )
        if field.message_type is not None and other.message_type is not None:
            _check_same(other.message_type, field.message_type, below, (*outer, read.full_name))


@dataclass(frozen=True, slots=True)
class ProtobufRead(ReadFormat):
    """Protobuf bound to the columns of a source."""

    columns: pa.Schema
    message: MessageSchema
    unit: TimestampUnit
    registry: SchemaRegistry | None

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return self.columns

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return self.registry is not None

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        messages = _Messages(self.columns, self.message, self.unit)
        if self.registry is None:
            return messages

        def reader_of(found: RegisteredSchema) -> BlockReader:
            self.message.check_written_as(MessageSchema.registered(found, self.message.name))
            return _IndexedMessages(messages, self.message.name, _set_of_registered(found)).decode

        return WireDecoder(self.columns, "PROTOBUF", RegistryClient(self.registry, serialized=True), reader_of)


class _Messages(PayloadDecoder):
    """Decodes bare Protobuf messages.

    A merged message (several messages, one after the other) may have two members of a oneof, or two entries of a map
    with one key. The last one counts in Protobuf, and `ptars` returns all of them. It panics if an entry of a map has
    no value. Such messages are parsed and written again by Google's library first.
    """

    def __init__(self, columns: pa.Schema, message: MessageSchema, unit: TimestampUnit) -> None:
        self._columns = columns
        self._handler = message.handler(unit)
        self._descriptor = message.descriptor()
        self._may_be_merged = _has_choices(self._descriptor, set())
        self._class = _library("google.protobuf.message_factory").GetMessageClass(self._descriptor)
        self._found = pa.schema([self._handler.schema().field(name) for name in columns.names])

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        parts: list[pa.RecordBatch] = []
        bad: dict[int, str] = {}
        waiting = [(0, len(payloads))] if len(payloads) else []
        while waiting:
            begin, end = waiting.pop()
            try:
                parts.append(self._batch(payloads.slice(begin, end - begin)))
            except ValueError as error:
                if end - begin == 1:
                    bad[begin] = f"it is not a message of the schema: {error}"
                else:
                    middle = (begin + end) // 2
                    waiting += [(middle, end), (begin, middle)]
        table = pa.Table.from_batches(parts, self._found).combine_chunks()
        batch = table.to_batches()[0] if table.num_rows else empty_rows(self._found)
        good = np.delete(np.arange(len(payloads)), sorted(bad))
        unfit: dict[int, str] = {}
        columns = fitted(batch, self._columns, unfit)
        bad |= {int(good[number]): reason for number, reason in unfit.items()}
        return DecodedRecords(rows_of(columns, self._columns, unfit), bad)

    def _batch(self, payloads: pa.Array) -> pa.RecordBatch:
        """Decodes messages to a batch. Raises ValueError if one of them cannot be decoded."""
        found = self._decoded(payloads)
        if self._may_be_merged:
            several: dict[int, str] = {}
            fields = dict(zip(found.schema.names, found.columns, strict=True))
            rows = np.arange(found.num_rows, dtype=np.int64)
            _check_message(self._descriptor, fields, rows, "", several, symbols=False)
            if several:
                again = [
                    self._normal(each) if row in several else each for row, each in enumerate(payloads.to_pylist())
                ]
                found = self._decoded(pa.array(again, pa.binary()))
        found = found.select(self._found.names)
        for name, column in zip(found.schema.names, found.columns, strict=True):
            for leaf in leaves(column):
                if pa.types.is_timestamp(leaf.type) or pa.types.is_duration(leaf.type):
                    ends = pc.min_max(leaf.cast(pa.int64())).as_py()
                    if ends["min"] == _LIMITS[0] or ends["max"] == _LIMITS[1]:
                        raise ValueError(
                            f"field {name!r} has a time that {leaf.type} cannot hold; correct the records, or read "
                            "the field with another timestamp_unit="
                        )
        return found

    def _decoded(self, payloads: pa.Array) -> pa.RecordBatch:
        try:
            return self._handler.array_to_record_batch(payloads)
        except BaseException as error:  # a panic of Rust is no Exception
            if not _is_panic(error):
                raise
        try:
            again = pa.array([self._normal(each) for each in payloads.to_pylist()], pa.binary())
            return self._handler.array_to_record_batch(again)
        except BaseException as error:
            if not _is_panic(error):
                raise
            raise ValueError(f"an entry of a map has no value ({error})") from error

    def _normal(self, payload: bytes) -> bytes:
        """Returns a message in the form in which Google's library writes it. Raises ValueError if it is not valid."""
        try:
            return bytes(self._class.FromString(payload).SerializeToString())
        except _library("google.protobuf.message").DecodeError as error:
            raise ValueError(str(error)) from error


def _is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


def _has_choices(descriptor: Any, seen: set[str]) -> bool:
    """Returns whether a message, or a message in it, is a map or has a oneof of several members."""
    if descriptor.GetOptions().map_entry:
        return True
    if descriptor.full_name in seen:
        return False
    seen.add(descriptor.full_name)
    below = [each.message_type for each in descriptor.fields if each.message_type is not None]
    return any(len(each.fields) > 1 for each in descriptor.oneofs) or any(_has_choices(each, seen) for each in below)


class _IndexedMessages:
    """Decodes messages that follow their message indexes, for one registered schema."""

    def __init__(self, messages: _Messages, name: str, descriptors: bytes) -> None:
        self._messages = messages
        self._name = name
        self._declared = _files(descriptors)[-1]
        self._reasons: dict[tuple[int, ...], str | None] = {}

    def decode(self, block: Block) -> DecodedRecords:
        """Decodes the payloads of a block to rows."""
        starts = block.starts.copy()
        bad: dict[int, str] = {}
        present = block.ends > starts
        first = present.copy()
        first[present] = block.data[starts[present]] == 0
        if (reason := self._reason((0,))) is not None:
            bad |= dict.fromkeys(np.flatnonzero(first).tolist(), reason)
        starts[first] += 1
        for number in np.flatnonzero(~first).tolist():
            found = _indexes(block.data, int(starts[number]), int(block.ends[number]))
            if found is None:
                bad[number] = "its message indexes are cut, or too many"
                continue
            path, starts[number] = found
            if (reason := self._reason(path)) is not None:
                bad[number] = reason
        good = np.delete(np.arange(len(starts)), sorted(bad))
        rows = self._messages.decode(Block(block.data, starts[good], block.ends[good]).array())
        bad |= {int(good[number]): reason for number, reason in rows.bad.items()}
        return DecodedRecords(rows.batch, bad)

    def _reason(self, path: tuple[int, ...]) -> str | None:
        """Returns why messages with these indexes are bad, or None if they are messages of the program's type."""
        if path not in self._reasons:
            name = self._declared.package
            within = self._declared.message_type
            try:
                for number in path:
                    name = f"{name}.{within[number].name}" if name else within[number].name
                    within = within[number].nested_type
            except IndexError:
                name = f"number {list(path)}, which its schema does not have"
            self._reasons[path] = None if name == self._name else f"it is message {name}, and not {self._name}"
            while len(self._reasons) > 1_000:
                del self._reasons[next(iter(self._reasons))]
        return self._reasons[path]


def _indexes(data: NDArray[np.uint8], at: int, end: int) -> tuple[tuple[int, ...], int] | None:
    """Parses message indexes (zigzag integers after a count).

    Returns them and the position after them, or None if truncated.
    """
    found: list[int] = []
    count = 0
    while True:
        value = shift = 0
        while True:
            if at >= end or shift > 28:
                return None
            byte = int(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        found.append((value >> 1) ^ -(value & 1))
        count = found[0]
        if not 0 <= count <= _INDEXES_MAX or min(found) < 0:
            return None
        if len(found) == count + 1:
            return tuple(found[1:]) or (0,), at


def _index_bytes(path: Sequence[int]) -> bytes:
    """Encodes message indexes. The first message of a file is encoded as a single 0."""
    if tuple(path) == (0,):
        return b"\0"
    out = bytearray()
    for value in (len(path), *path):
        rest = value << 1
        while rest >= 128:
            out.append((rest & 127) | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out)


@dataclass(frozen=True, slots=True)
class ProtobufWrite(WriteFormat):
    """Protobuf bound to the columns of a sink."""

    names: tuple[str, ...]
    message: MessageSchema
    unit: TimestampUnit
    written: WrittenSchema | None
    """The schema in the registry, or None without a registry."""

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task."""
        return _ProtobufEncoder(self)


class _ProtobufEncoder(PayloadEncoder):
    def __init__(self, form: ProtobufWrite) -> None:
        self._handler = form.message.handler(form.unit)
        self._descriptor = form.message.descriptor()
        self._columns = pa.schema([self._handler.schema().field(name) for name in form.names])
        self._ids = None if form.written is None else SubjectIds(form.written)
        self._indexes = _index_bytes(form.message.path())

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        header = b"" if self._ids is None else header_of(self._ids.of(topic)) + self._indexes
        bad: dict[int, str] = {}
        columns = fitted(batch, self._columns, bad)
        made = pa.RecordBatch.from_arrays(columns, schema=self._columns.empty_table().schema)
        rows = np.arange(batch.num_rows, dtype=np.int64)
        fields = dict(zip(self._columns.names, columns, strict=True))
        _check_message(self._descriptor, fields, rows, "", bad)
        if bad:
            keep = np.ones(batch.num_rows, dtype=np.bool_)
            keep[list(bad)] = False
            made = made.filter(pa.array(keep))
        payloads = self._handler.record_batch_to_array(made)
        return EncodedRecords(with_header(header, payloads) if header else payloads, bad)


def _check_message(
    descriptor: Any,
    fields: dict[str, pa.Array],
    rows: NDArray[np.int64],
    path: str,
    bad: dict[int, str],
    *,
    symbols: bool = True,
) -> None:
    """Adds rows to `bad` that have several values in a oneof, or a map with a key twice.

    `symbols`: also rows that have an unknown enum symbol.
    """
    for oneof in descriptor.oneofs:
        members = [fields[each.name] for each in oneof.fields if each.name in fields]
        if len(members) > 1:
            counts = np.sum([each.is_valid().to_numpy(zero_copy_only=False) for each in members], axis=0)
            for entry in np.flatnonzero(counts > 1).tolist():
                bad.setdefault(
                    int(rows[entry]), f"oneof {path}{oneof.name} has {counts[entry]} values, and may have one"
                )
    for field in descriptor.fields:
        if field.name in fields:
            _check_value(field, fields[field.name], rows, f"{path}{field.name}", bad, symbols)


def _check_value(
    field: Any, column: pa.Array, rows: NDArray[np.int64], path: str, bad: dict[int, str], symbols: bool
) -> None:
    if pa.types.is_map(column.type):
        lists = column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
        of_entry = np.repeat(rows, lengths)
        for entry in repeated_keys(pc.list_flatten(lists).field(0), lengths).tolist():
            reason = f"field {path!r} is a map with a key twice, of which Protobuf keeps one; make keys unique"
            bad.setdefault(int(of_entry[entry]), reason)
    if field.enum_type is None and field.message_type is None:
        return
    for part, of_part, below in _elements(column, rows):
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            value = message.fields_by_name["value"]
            _check_value(value, below, of_part, f"{path}{{}}", bad, symbols)
        elif message is not None and pa.types.is_struct(part.type):
            valid = part.is_valid().to_numpy(zero_copy_only=False)
            children = dict(zip([each.name for each in part.type], part.filter(pa.array(valid)).flatten(), strict=True))
            _check_message(message, children, of_part[valid], f"{path}.", bad, symbols=symbols)
        elif field.enum_type is not None and symbols:
            known = pa.array([each.name for each in field.enum_type.values], pa.string())
            unknown = pc.and_(part.is_valid(), pc.invert(pc.is_in(part, value_set=known)))
            for entry in np.flatnonzero(unknown.to_numpy(zero_copy_only=False)).tolist():
                bad.setdefault(int(of_part[entry]), f"field {path!r} is not a symbol of {field.enum_type.full_name}")


def _elements(column: pa.Array, rows: NDArray[np.int64]) -> Iterator[tuple[pa.Array, NDArray[np.int64], pa.Array]]:
    """Yields the values of a column, or of the lists or maps in it, with the row number of each value."""
    if pa.types.is_map(column.type):
        lists = column.cast(pa.list_(pa.struct([column.type.key_field, column.type.item_field])))
        of_value = np.repeat(rows, pc.fill_null(pc.list_value_length(lists), 0).to_numpy())
        entries = pc.list_flatten(lists)
        yield entries, of_value, entries.flatten()[1]
    elif pa.types.is_list(column.type):
        of_value = np.repeat(rows, pc.fill_null(pc.list_value_length(column), 0).to_numpy())
        values = pc.list_flatten(column)
        yield values, of_value, values
    else:
        yield column, rows, column
