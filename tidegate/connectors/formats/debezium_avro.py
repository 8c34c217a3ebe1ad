"""Events of Debezium in Avro with a schema registry: `AvroEvents` and `AvroKeys` parse them, `AvroEventEncoder` writes
them.

Rules:

- Keys and values are in the wire format of the registry, as Confluent's AvroConverter writes them. Each is read with
  the schema that its id names, and only the columns of the table are read of it.
- Logical types are left aside: values are read and written in their wire forms (`debezium_values.py`), which the
  converter has from Kafka Connect. The name of a form is the attribute `connect.name` of a type in the schema.
- Each schema is compared with the columns, by type, scale and unit, and no column may be missing. A record with a
  schema that does not fit is bad. The newest schema of the topic is compared when the job is submitted.
- A column is found by its name in the schema, where Debezium may have replaced letters that Avro does not allow.
- The schema that is written has the same shape and the same names as Debezium's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.connectors.formats.avro import AvroRecords, AvroWrite, avro_type, check_avro_name
from tidegate.connectors.formats.avro_schema import AvroProgram, AvroSchema, Schema, compiled, kind_of, parsed
from tidegate.connectors.formats.debezium_values import (
    DECIMAL,
    NO_EVENT,
    UNITS,
    Decimals,
    EventParser,
    Parsed,
    add_null_keys,
    event_schema,
    field_difference,
    taken_images,
    to_wire,
    wire_type,
    written_type,
)
from tidegate.connectors.formats.fitting import fitted
from tidegate.connectors.formats.format import DecodedRecords, EncodedRecords, PayloadEncoder, PayloadUse, RowChanges
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.registry import (
    RegisteredSchema,
    RegistryClient,
    SchemaRegistry,
    UnfitSchemaError,
    WrittenSchema,
    newest_schemas,
    schema_of_topics,
)
from tidegate.connectors.formats.wire_format import BlockReader, WireDecoder
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.exact_casts import refusal_of

_WRITER_VERSION = "1"
"""The version of the form of `source` in events that tidegate writes."""
_LOGICAL_TYPE = "logicalType"
_SET_ASIDE = "set-aside.logicalType"
_LOGICAL_NAMES = {
    "decimal": DECIMAL,
    "date": "org.apache.kafka.connect.data.Date",
    "time-millis": "org.apache.kafka.connect.data.Time",
    "time-micros": "io.debezium.time.MicroTime",
    "timestamp-millis": "org.apache.kafka.connect.data.Timestamp",
    "timestamp-micros": "io.debezium.time.MicroTimestamp",
    "timestamp-nanos": "io.debezium.time.NanoTimestamp",
}
"""The forms of logical types without a `connect.name`."""
_ZONED = "io.debezium.time.ZonedTimestamp"
_DATE = "io.debezium.time.Date"


@dataclass(frozen=True, slots=True)
class AvroTable:
    """A table whose changes are in Avro events: its columns, its key columns, and how decimals are written.

    `has_source`: whether the field `source` is read, for metadata.
    """

    columns: pa.Schema
    keys: tuple[str, ...]
    decimals: Decimals
    has_source: bool = False

    @property
    def wires(self) -> list[pa.Field]:
        """Returns the columns of the table with the types that values have in events (wire types)."""
        return [pa.field(each.name, wire_type(each.type, self.decimals, typed=True)) for each in self.columns]

    @property
    def of_keys(self) -> list[pa.Field]:
        """Returns the key columns of the table with the types that values have in events (wire types)."""
        return [each for each in self.wires if each.name in self.keys]

    def difference(self, schema: AvroSchema, record: Mapping[str, Any], names: Sequence[str]) -> str | None:
        """Returns text about the first difference between the fields of a record and the columns `names` of the table,
        or None if they agree.
        """
        fields = {each["name"]: each["type"] for each in record["fields"]}
        for name in names:
            if name not in fields:
                return (
                    f"field {name!r} is missing in the schema of the event, which has {sorted(fields)}; remove the "
                    "column from value=, or rename it"
                )
            wanted = self.columns.field(name).type
            fault = field_difference(_described(schema, fields[name]), wanted, self.decimals)
            if fault is not None:
                return f"field {name!r} {fault}"
        return None


@dataclass(frozen=True, slots=True)
class NewestSchemas:
    """The newest schemas of the values and of the keys of some topics. Topics without a schema are omitted."""

    values: Mapping[str, RegisteredSchema]
    keys: Mapping[str, RegisteredSchema]

    def check(self, table: AvroTable, where: str) -> None:
        """Raises ConfigurationError if a schema does not have the columns of the table."""
        for found, of_part, named in ((self.values, _event_program, "values"), (self.keys, _key_program, "keys")):
            for topic, newest in found.items():
                try:
                    of_part(newest, table)
                except UnfitSchemaError as error:
                    raise ConfigurationError(
                        f"{where}: the newest schema of the {named} of topic {topic!r} does not fit: {error}"
                    ) from error


def event_schemas(registry: SchemaRegistry, use: PayloadUse) -> NewestSchemas:
    """Requests the newest schemas of the topics from the registry. Raises ConfigurationError, RegistryError."""
    client = RegistryClient(registry)
    of_keys = PayloadUse(use.method, use.topics, "key", use.keys)
    return NewestSchemas(newest_schemas(client, "topic", "AVRO", use), newest_schemas(client, "topic", "AVRO", of_keys))


def columns_of(newest: NewestSchemas, decimals: Decimals, where: str) -> pa.Schema:
    """Returns the columns of the rows in events with the newest schema of their topic. Raises ConfigurationError."""
    found = schema_of_topics(newest.values, where, "give the columns of the table, value={'id': int, 'name': str}")
    try:
        schema = _plain_schema(found)
        row = _row_of(schema)
        nodes = compiled(schema, schema, pa.schema([("after", pa.null())])).schema.field("after").type
        return pa.schema(
            [
                (each["name"], _column_type(schema, each["type"], nodes.field(each["name"]).type, each["name"]))
                for each in row["fields"]
            ]
        )
    except UnfitSchemaError as error:
        raise ConfigurationError(
            f"{where}: the newest schema gives no columns: {error}; name them in value="
        ) from error


class AvroEvents(EventParser):
    """Parses Avro events of a table."""

    def __init__(self, table: AvroTable, registry: SchemaRegistry) -> None:
        self._table = table
        self._schema = event_schema(table.wires, table.keys, has_source=table.has_source)
        self._decoder = WireDecoder(self._schema, "AVRO", RegistryClient(registry), self._reader)

    def parse(self, records: pa.Array) -> Parsed:
        """Decodes the values of Kafka records: a row for each event. An event that cannot be decoded is in `bad`."""
        found = self._decoder.decode(records)
        return Parsed(found.batch, found.payload_of_rows(len(records)), found.bad)

    def _reader(self, found: RegisteredSchema) -> BlockReader:
        program = _event_program(found, self._table)
        return _Reader(program, self._schema).read


class AvroKeys(EventParser):
    """Parses the Avro keys of records, which must have exactly the key columns of a table."""

    def __init__(self, table: AvroTable, registry: SchemaRegistry) -> None:
        self._table = table
        self._schema = pa.schema(table.of_keys)
        self._decoder = WireDecoder(self._schema, "AVRO", RegistryClient(registry), self._reader)

    def parse(self, records: pa.Array) -> Parsed:
        """Decodes the keys of Kafka records: a row with the key columns for each. A wrong key is in `bad`."""
        found = self._decoder.decode(records)
        bad = {number: f"the key of the record: {reason}" for number, reason in found.bad.items()}
        return Parsed(found.batch, found.payload_of_rows(len(records)), bad)

    def _reader(self, found: RegisteredSchema) -> BlockReader:
        program = _key_program(found, self._table)
        return _Reader(program, self._schema).read


class _Reader:
    """Reads records of one Avro schema, and casts their values to wire types without loss."""

    def __init__(self, program: AvroProgram, schema: pa.Schema) -> None:
        self._records = AvroRecords(program, program.schema)
        self._schema = schema

    def read(self, block: Block) -> DecodedRecords:
        found = self._records.decode(block)
        unfit: dict[int, str] = {}
        columns = []
        for field in self._schema:
            given = found.batch.column(field.name)
            if not pa.types.is_struct(field.type):
                columns += fitted(pa.RecordBatch.from_arrays([given], [field.name]), pa.schema([field]), unfit)
                continue
            # A column at a time, so that a reason names the column.
            names = [each.name for each in given.type]
            children = fitted(pa.RecordBatch.from_arrays(given.flatten(), names), pa.schema(list(field.type)), unfit)
            columns.append(pa.StructArray.from_arrays(children, fields=list(field.type), mask=given.is_null()))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if not unfit:
            return DecodedRecords(batch, found.bad)
        numbers = found.payload_of_rows(len(block.starts))
        keep = np.ones(batch.num_rows, dtype=np.bool_)
        keep[list(unfit)] = False
        bad = found.bad | {int(numbers[row]): reason for row, reason in unfit.items()}
        return DecodedRecords(batch.filter(pa.array(keep)), bad)


def _event_program(found: RegisteredSchema, table: AvroTable) -> AvroProgram:
    """Compiles the program that decodes events of a registered schema. Raises UnfitSchemaError."""
    schema = _plain_schema(found)
    row = _row_of(schema)
    if (fault := table.difference(schema, row, table.columns.names)) is not None:
        raise UnfitSchemaError(fault)
    wanted = event_schema(table.wires, table.keys, has_source=table.has_source)
    program = compiled(schema, schema, wanted)
    _check_fields(program.schema.field("after").type, table.wires, table.columns)
    if table.has_source and (reason := refusal_of(program.schema.field("source").type, wanted.field("source").type)):
        raise UnfitSchemaError(
            f"field 'source', which metadata= reads, {reason}; remove metadata=, or write events with this field"
        )
    return program


def _key_program(found: RegisteredSchema, table: AvroTable) -> AvroProgram:
    """Compiles the program that decodes record keys of a registered schema. Raises UnfitSchemaError."""
    schema = _plain_schema(found)
    names = schema.fields()
    if set(names) != set(table.keys):
        raise UnfitSchemaError(
            f"the key of the events has the columns {sorted(names)}, and keys= has {sorted(table.keys)}; give keys= "
            "the same columns"
        )
    if (fault := table.difference(schema, schema.of(schema.root), table.keys)) is not None:
        raise UnfitSchemaError(fault)
    program = compiled(schema, schema, pa.schema(table.of_keys))
    _check_fields(pa.struct(list(program.schema)), table.of_keys, table.columns)
    return program


def _check_fields(found: pa.StructType, wires: Sequence[pa.Field], columns: pa.Schema) -> None:
    """Raises UnfitSchemaError unless the fields of a row can be cast to the wire types of the table's columns."""
    for wire in wires:
        stored = found.field(wire.name).type
        if (reason := refusal_of(stored, wire.type)) is not None:
            wanted = columns.field(wire.name).type
            raise UnfitSchemaError(
                f"field {wire.name!r} {reason}"
                if pa.types.is_nested(wanted)
                else f"field {wire.name!r} is {stored} in the event, and {wanted} in value=; correct its type"
            )


def _plain_schema(found: RegisteredSchema) -> AvroSchema:
    """Parses a registered schema without its logical types, so that values have their wire types. Raises
    UnfitSchemaError.
    """
    return parsed(plain_text(found.text), [plain_text(text) for _, text in found.references])


def plain_text(text: str) -> str:
    """Returns the JSON of a schema without its logical types, so that values have their wire types."""
    try:
        return json.dumps(_plain(json.loads(text)))
    except ValueError as error:
        raise UnfitSchemaError(f"the Avro schema is not JSON: {error}; register a schema in JSON") from error


def _plain(schema: Schema) -> Schema:
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # A default is a value, and may be an object with any names.
    return {
        (_SET_ASIDE if name == _LOGICAL_TYPE else name): each if name == "default" else _plain(each)
        for name, each in schema.items()
    }


def _row_of(schema: AvroSchema) -> Mapping[str, Any]:
    """Returns the Avro record of a table row in the schema of events. Raises UnfitSchemaError for any other schema."""
    fields = {} if not schema.fields() else {each["name"]: each["type"] for each in schema.of(schema.root)["fields"]}
    if not {"op", "before", "after"} <= fields.keys():
        raise UnfitSchemaError(NO_EVENT)
    row = _unwrapped(schema, fields["after"])
    if kind_of(row) != "record":
        raise UnfitSchemaError(
            f"field 'after' of the events is {kind_of(row)} and not a record; give a topic of Debezium's events"
        )
    found: Mapping[str, Any] = row
    return found


def _unwrapped(schema: AvroSchema, kind: Schema) -> Schema:
    """Returns the Avro type of a value without the null branch of its union."""
    found = schema.of(kind)
    if isinstance(found, list):
        values = [each for each in found if each != "null"]
        return schema.of(values[0]) if len(values) == 1 else found
    return found


def _described(schema: AvroSchema, kind: Schema) -> dict[str, Any]:
    """Returns a field in the form in which Kafka Connect describes it."""
    found = _unwrapped(schema, kind)
    described: dict[str, Any] = {"type": kind_of(found)}
    if isinstance(found, dict):
        name = found.get("connect.name") or _LOGICAL_NAMES.get(found.get(_SET_ASIDE, ""))
        if name is not None:
            described["name"] = name
        scale = found.get("scale", found.get("connect.parameters", {}).get("scale", 0))
        described["parameters"] = {"scale": scale, "precision": found.get("precision", 0)}
        if "items" in found:
            described["items"] = _described(schema, found["items"])
    return described


def _column_type(schema: AvroSchema, kind: Schema, stored: pa.DataType, path: str) -> pa.DataType:
    """Returns the type of the table column for a field of an event. `stored`: the wire type of the field."""
    found = _unwrapped(schema, kind)
    described = _described(schema, found)
    name = described.get("name", "")
    if name == DECIMAL:
        precision, scale = int(described["parameters"]["precision"]), int(described["parameters"]["scale"])
        if not 0 < precision <= 38 or not 0 <= scale <= precision:
            raise UnfitSchemaError(
                f"field {path!r} has decimals of {precision} digits with scale {scale}, and up to 38 are supported; "
                "let Debezium write decimal.handling.mode=string"
            )
        return pa.decimal128(precision, scale)
    if name in (_DATE, _LOGICAL_NAMES["date"]):
        return pa.date32()
    if name == _ZONED:
        return pa.timestamp("us", "UTC")
    if name in UNITS:
        return _counted_type(name)
    if pa.types.is_struct(stored):
        parts = found["fields"]
        return pa.struct(
            [
                (each["name"], _column_type(schema, each["type"], stored.field(each["name"]).type, each["name"]))
                for each in parts
            ]
        )
    if pa.types.is_list(stored):
        return pa.list_(_column_type(schema, found["items"], stored.value_type, f"{path}[]"))
    return stored


def _counted_type(name: str) -> pa.DataType:
    """Returns the Arrow type for a Debezium type of times or durations that are stored as counts of a unit."""
    unit = UNITS[name]
    if name.endswith("Timestamp"):
        return pa.timestamp(unit)
    if name.endswith("Duration"):
        return pa.duration(unit)
    return pa.time32(unit) if unit == "ms" else pa.time64(unit)


def written_schema(registry: SchemaRegistry, columns: pa.Schema, decimals: Decimals, use: PayloadUse) -> WrittenSchema:
    """Returns the Avro schema that a sink writes: of events of rows with these columns, or of their keys. Raises
    UnfitSchemaError.
    """
    topic = use.topics[0]
    space = _namespace(topic)
    if use.part == "key":
        fields = [{"name": each.name, "type": _field_type(each, decimals, space)} for each in columns]
        record: dict[str, Any] = _record("Key", space, fields)
    else:
        fields = [
            {"name": each.name, "type": ["null", _field_type(each, decimals, space)], "default": None}
            for each in columns
        ]
        row = _record("Value", space, fields)
        source = _record("Source", "tidegate", [{"name": name, "type": kind} for name, kind in _SOURCE_FIELDS.items()])
        record = _record(
            "Envelope",
            space,
            [
                {"name": "before", "type": ["null", row], "default": None},
                {"name": "after", "type": ["null", f"{space}.Value"], "default": None},
                {"name": "source", "type": source},
                {"name": "op", "type": "string"},
                {"name": "ts_ms", "type": ["null", "long"], "default": None},
                {"name": "transaction", "type": ["null", _TRANSACTION], "default": None},
            ],
        )
    name = f"{space}.{record['name']}"
    found = WrittenSchema(registry, "AVRO", json.dumps(record), name, "topic", True, use)
    parsed(found.text)
    return found


_SOURCE_FIELDS = {
    "version": "string",
    "connector": "string",
    "name": "string",
    "ts_ms": "long",
    "snapshot": "string",
    "db": "string",
    "table": "string",
}
_TRANSACTION = {
    "type": "record",
    "name": "block",
    "namespace": "event",
    "fields": [
        {"name": "id", "type": "string"},
        {"name": "total_order", "type": "long"},
        {"name": "data_collection_order", "type": "long"},
    ],
    "connect.name": "event.block",
}


def _record(name: str, space: str, fields: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "record", "name": name, "namespace": space, "fields": fields, "connect.name": f"{space}.{name}"}


def _namespace(topic: str) -> str:
    """Returns the name of a topic as a namespace, with letters replaced that Avro does not allow, as Debezium does."""
    parts = re.sub(r"[^A-Za-z0-9_.]", "_", topic).split(".")
    return ".".join(part if re.match(r"[A-Za-z_]", part) else f"_{part}" for part in parts)


def _field_type(field: pa.Field, decimals: Decimals, space: str) -> Schema:
    check_avro_name(field.name, field.name)
    return _type_of(field.type, field.name, f"{space}.{field.name}", decimals)


def _type_of(kind: pa.DataType, path: str, name: str, decimals: Decimals) -> Schema:
    """Returns the Avro type for a column, with the names that Debezium gives it. `name`: the full name for a nested
    record type.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        fields = []
        for each in kind:
            below = f"{path}.{each.name}"
            check_avro_name(each.name, below)
            inner = _type_of(each.type, below, f"{name}_{each.name}", decimals)
            fields.append({"name": each.name, "type": ["null", inner], "default": None})
        return {"type": "record", "name": name, "fields": fields, "connect.name": name}
    if pa.types.is_list(kind):
        return {"type": "array", "items": ["null", _type_of(kind.value_type, f"{path}[]", f"{name}_item", decimals)]}
    if pa.types.is_decimal(kind) and decimals == "precise":
        found = dict(avro_type(kind, path, name))
        if kind.scale > kind.precision:
            raise UnfitSchemaError(f"column {path!r} is {kind}, with a scale that Avro does not have; cast it before")
        parameters = {"scale": str(kind.scale), "connect.decimal.precision": str(kind.precision)}
        return {**found, "connect.version": 1, "connect.parameters": parameters, "connect.name": DECIMAL}
    wire = avro_type(written_type(kind, decimals, typed=True), path, name)
    form = _form_of(kind)
    return wire if form is None else {"type": wire, "connect.version": 1, "connect.name": form}


def _form_of(kind: pa.DataType) -> str | None:
    """Returns Debezium's name for the representation of a date, time or duration type. None for other types."""
    if pa.types.is_date(kind):
        return _DATE
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return _ZONED
    for test, named in _FORMS:
        if test(kind):
            prefix = {"ms": "", "us": "Micro", "ns": "Nano"}[kind.unit]
            return f"io.debezium.time.{prefix}{named}"
    return None


_FORMS = (
    (pa.types.is_timestamp, "Timestamp"),
    (pa.types.is_time, "Time"),
    (pa.types.is_duration, "Duration"),
)


class AvroEventEncoder(PayloadEncoder):
    """Encodes changes of rows as Avro events, and rows as Avro records for keys."""

    def __init__(self, keys: Sequence[str], decimals: Decimals, written: WrittenSchema, *, is_key: bool) -> None:
        self._keys = tuple(keys)
        self._decimals = decimals
        self._is_key = is_key
        names = self._keys if is_key else ("before", "after", "source", "op", "ts_ms")
        form = AvroWrite(plain_text(written.text), (), names, "key" if is_key else "value", written)
        self._encoder = form.encoder()

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes each row as an Avro record (the key of a Kafka record). A key with a null is bad."""
        bad: dict[int, str] = {}
        add_null_keys(batch, self._keys, bad)
        rows = self._wires(batch.select(list(self._keys)), bad)
        return self._encoded(rows, topic, bad)

    def encode_changes(
        self, batch: pa.RecordBatch, changes: RowChanges, times_ms: pa.Array | None, topic: str
    ) -> EncodedRecords:
        """Encodes each change as one Avro event."""
        unfit: dict[int, str] = {}
        wires = self._wires(batch, unfit)
        rows = pa.StructArray.from_arrays(wires.columns, fields=list(wires.schema))
        operations = np.where(changes.after < 0, "d", np.where(changes.before < 0, "c", "u"))
        count = len(changes)
        now = pa.scalar(now_ms(), pa.int64())
        times = pa.repeat(now, count) if times_ms is None else pc.fill_null(times_ms, now)
        origin, _, table = topic.rpartition(".")
        texts = {
            "version": _WRITER_VERSION,
            "connector": "tidegate",
            "name": origin.partition(".")[0] or table,
            "snapshot": "false",
            "db": "",
            "table": table,
        }
        source = pa.StructArray.from_arrays(
            [times if name == "ts_ms" else pa.repeat(pa.scalar(texts[name]), count) for name in _SOURCE_FIELDS],
            names=list(_SOURCE_FIELDS),
        )
        events = pa.RecordBatch.from_arrays(
            [
                taken_images(rows, changes.before),
                taken_images(rows, changes.after),
                source,
                pa.array(operations, pa.string()),
                pa.repeat(now, count),
            ],
            names=["before", "after", "source", "op", "ts_ms"],
        )
        bad = {number: unfit[row] for number, row in enumerate(changes.after.tolist()) if row in unfit} if unfit else {}
        return self._encoded(events, topic, bad)

    def _encoded(self, rows: pa.RecordBatch, topic: str, bad: dict[int, str]) -> EncodedRecords:
        """Encodes the rows that are not in `bad`. Returns the numbers of all bad rows."""
        if not bad:
            return self._encoder.encode(rows, topic)
        numbers = np.delete(np.arange(rows.num_rows, dtype=np.int64), list(bad))
        found = self._encoder.encode(rows.take(pa.array(numbers)), topic)
        return EncodedRecords(found.payloads, bad | {int(numbers[at]): reason for at, reason in found.bad.items()})

    def close(self) -> None:
        """Closes the encoder."""
        self._encoder.close()

    def _wires(self, batch: pa.RecordBatch, bad: dict[int, str]) -> pa.RecordBatch:
        rows = np.arange(batch.num_rows, dtype=np.int64)
        columns = [
            to_wire(column, self._decimals, name, rows, bad, typed=True)
            for name, column in zip(batch.schema.names, batch.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
