"""`AvroFormat`: each payload is one record in Avro's binary encoding, bare or in the wire format of a schema registry.

Rules:

- With `registry`, the id in each payload names the schema with which it was written. It is read as the schema of the
  program (`avro_schema.py`): `schema`, or else the newest one of the topic's subject when the job was submitted.
  Without `registry`, payloads are bare and were written with `schema`.
- Compiled kernels check and decode the records of a block, a column at a time. If a value does not fit its type (a
  string that is not UTF-8, a decimal of too many digits), the block is decoded in halves until the bad record is found.
- A kernel encodes the rows of a batch: it measures all records and then writes them.
- The schema that is written is the user's, or one that is made of the columns. Fields without a column must have a
  default, which is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.connectors.formats.avro_schema import (
    PRIMITIVES,
    AvroProgram,
    AvroSchema,
    Columns,
    ColumnsOfRows,
    Schema,
    UnfitRecordError,
    compiled,
    defaults_of,
    kind_of,
    parsed,
)
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
    good_payloads,
)
from tidegate.connectors.formats.payload_block import Block
from tidegate.connectors.formats.registry import (
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
    schema_text,
)
from tidegate.connectors.formats.wire_format import BlockReader, WireDecoder, empty_rows, header_of
from tidegate.state.kernels import avro as kernels
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import need

_REASONS = {
    kernels.CUT: "the record ends within {field}",
    kernels.LONG_VARINT: "{field} has an integer of more than ten bytes",
    kernels.BAD_BOOL: "{field} is neither true nor false",
    kernels.INT_RANGE: "{field} is beyond 32 bits",
    kernels.ENUM_RANGE: "{field} has a symbol that its enum does not have",
    kernels.BRANCH_RANGE: "{field} has a branch that its union does not have",
    kernels.BAD_LENGTH: "{field} has a negative length",
    kernels.BAD_COUNT: "{field} has more elements than the record has bytes",
    kernels.TRAILING: "bytes follow the record",
    kernels.WIDE_DECIMAL: "{field} has more than 38 digits",
}


@dataclass(frozen=True)
class AvroFormat(Format):
    """Avro, bare (`schema`) or in the wire format of a schema registry (`registry`). Needs `tidegate[avro]`.

    - `schema`: the program's schema, as JSON or as a dict. None: for reading, the newest schema of the topic when the
      job is submitted. For writing, a schema derived from the columns, or the newest schema of the topic without
      `auto_register`.
    - `registry`: a `SchemaRegistry`, or its address.
    - `subject`: how subjects are named, as Confluent's strategies do: "topic" (`orders-value`), "record" or
      "topic_record".
    - `auto_register`: the sink registers its schema if the registry lacks it. With False a missing schema is an error.
    - `name`: full name of the record in a schema that is derived from columns.

    Raises ConfigurationError for wrong arguments.

    Example:

        >>> tg.AvroFormat(registry="http://localhost:8081").kind
        'avro'
    """

    schema: str | Mapping[str, Any] | Sequence[Any] | None = None
    registry: SchemaRegistry | str | None = None
    subject: Subject = "topic"
    auto_register: bool = True
    name: str = "streams.Row"

    kind = "avro"

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", schema_text(self.schema, "AvroFormat", PRIMITIVES))
        object.__setattr__(self, "registry", SchemaRegistry.of(self.registry))
        check_subject(self.subject, self.kind)

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source (None: all fields of the schema).

        Raises ConfigurationError, RegistryError.
        """
        need(f"{use.method}(format='avro')", "avro")
        text, references = self._reader(use)
        where = f"{use.method}(format='avro')"
        try:
            schema = parsed(text, references)
            program = compiled(schema, schema, columns, use.part)
        except UnfitSchemaError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        found = program.schema
        if columns is None and not len(found):
            raise ConfigurationError(
                f"{where}: the schema has no fields, so there are no columns to read; give a schema with fields"
            )
        columns = found if columns is None else columns
        names = schema.fields() if kind_of(schema.of(schema.root)) == "record" else None
        check_read(found, columns, self.kind, use, names)
        return AvroRead(columns, text, references, self._registry, use.part)

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Raises ConfigurationError, RegistryError."""
        need(f"{use.method}(format='avro')", "avro")
        where = f"{use.method}(format='avro')"
        references: tuple[str, ...] = ()
        known: dict[str, int] = {}
        try:
            if self.schema is not None:
                text = str(self.schema)
            elif self._registry is None or self.auto_register:
                text = avro_schema_of(columns, self.name)
            else:
                newest = newest_schemas(RegistryClient(self._registry), self.subject, "AVRO", use)
                newest_one = schema_of_topics(
                    newest, where, "register one, or give AvroFormat(schema=..., registry=...)"
                )
                text, references = newest_one.text, tuple(each for _, each in newest_one.references)
                known = {topic: each.schema_id for topic, each in newest.items()}
            schema = parsed(text, references)
            found = compiled(schema, schema, None, use.part).schema
        except UnfitSchemaError as error:
            raise ConfigurationError(f"{where}: {error}") from error
        if kind_of(schema.of(schema.root)) != "record":
            if len(columns) != 1:
                raise ConfigurationError(
                    f"{where}: the schema is not a record, and {use.part}= has {len(columns)} columns; name one"
                )
            columns = pa.schema([columns[0].with_name(use.part)])
        check_written(columns, found, self.kind, use)
        lacking = _required(schema) - set(columns.names)
        if lacking:
            raise ConfigurationError(
                f"{where}: field {min(lacking)!r} of the schema has no default, and no column; add the column"
            )
        written = None
        if self._registry is not None:
            root = schema.of(schema.root)
            record = str(root["name"]) if kind_of(root) == "record" else use.part
            register = self.auto_register
            written = WrittenSchema(self._registry, "AVRO", text, record, self.subject, register, use, known)
            written.check()
        return AvroWrite(text, references, columns.names, use.part, written)

    @property
    def _registry(self) -> SchemaRegistry | None:
        assert not isinstance(self.registry, str)
        return self.registry

    def _reader(self, use: PayloadUse) -> tuple[str, tuple[str, ...]]:
        """Returns the JSON of the schema with which the program reads, and of its referenced schemas.

        Raises ConfigurationError, RegistryError.
        """
        where = f"{use.method}(format='avro')"
        if self._registry is None:
            if self.schema is None:
                raise ConfigurationError(f"{where}: give registry=, or AvroFormat(schema=...) for records without one")
            return str(self.schema), ()
        newest = newest_schemas(RegistryClient(self._registry), self.subject, "AVRO", use)
        if self.schema is None:
            advice = "give the schema of the program, AvroFormat(schema=..., registry=...)"
            found = schema_of_topics(newest, where, advice)
            return found.text, tuple(text for _, text in found.references)
        for topic, found in newest.items():
            try:
                written = parsed(found.text, [text for _, text in found.references])
                compiled(written, parsed(str(self.schema)), None, use.part)
            except UnfitSchemaError as error:
                raise ConfigurationError(
                    f"{where}: the newest schema of topic {topic!r} cannot be read as the schema of the program: "
                    f"{error}; change the schema of the program"
                ) from error
        return str(self.schema), ()


@dataclass(frozen=True, slots=True)
class AvroRead(ReadFormat):
    """Avro bound to the columns of a source.

    `text` and `references` are the JSON of the schema with which the program reads.
    """

    columns: pa.Schema
    text: str
    references: tuple[str, ...]
    registry: SchemaRegistry | None
    part: str

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return self.columns

    @property
    def single(self) -> bool:
        """Returns True if the schema is not a record, so that a payload is one value."""
        schema = parsed(self.text, self.references)
        return kind_of(schema.of(schema.root)) != "record"

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return self.registry is not None

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        read = parsed(self.text, self.references)

        def records(written: AvroSchema) -> AvroRecords:
            return AvroRecords(compiled(written, read, self.columns, self.part), self.columns)

        def reader_of(found: RegisteredSchema) -> BlockReader:
            return records(parsed(found.text, [text for _, text in found.references])).decode

        if self.registry is None:
            return AvroDecoder(records(read))
        return WireDecoder(self.columns, "AVRO", RegistryClient(self.registry), reader_of)


class AvroDecoder(PayloadDecoder):
    """Decodes payloads that are bare Avro records."""

    def __init__(self, records: AvroRecords) -> None:
        self._records = records

    def decode(self, payloads: pa.Array) -> DecodedRecords:
        """Decodes one record per payload into rows."""
        return self._records.decode(Block.of(payloads))


class AvroRecords:
    """Decodes Avro records that were written with one schema."""

    def __init__(self, program: AvroProgram, columns: pa.Schema) -> None:
        self._program = program
        self._instructions = program.array()
        self._columns = columns
        self._found = program.schema

    def decode_sequence(self, data: NDArray[np.uint8], count: int) -> DecodedRecords:
        """Decodes `count` adjacent records that take all of `data` (a block of an Avro file).

        A record that cannot be decoded is bad, and the records after it are missing from the result.
        """
        if count > len(data):
            return DecodedRecords(
                empty_rows(self._columns), {0: f"the block has {count} records and {len(data)} bytes"}
            )
        block = Block(data, np.zeros(count, dtype=np.int64), np.full(count, len(data), dtype=np.int64))
        scan = kernels.scan_avro(
            *(data, block.starts, block.ends, self._instructions, len(self._program.widths), self._program.depth),
            in_sequence=True,
        )
        if scan.status.any():
            number = int(np.flatnonzero(scan.status)[0])
            return DecodedRecords(empty_rows(self._columns), {number: self._reason(scan, number)})
        end = int(block.ends[-1]) if count else 0
        if end != len(data):
            reason = f"{len(data) - end} bytes follow the last record of its block"
            return DecodedRecords(empty_rows(self._columns), {max(0, count - 1): reason})
        return self._decoded(block, scan)

    def decode(self, block: Block) -> DecodedRecords:
        """Decodes the bare records of a block into rows."""
        scan = kernels.scan_avro(
            block.data, block.starts, block.ends, self._instructions, len(self._program.widths), self._program.depth
        )
        return self._decoded(block, scan)

    def _decoded(self, block: Block, scan: kernels.AvroScan) -> DecodedRecords:
        bad = {number: self._reason(scan, number) for number in np.flatnonzero(scan.status).tolist()}
        good = np.flatnonzero(scan.status == 0)
        block = Block(block.data, block.starts[good], block.ends[good]) if bad else block
        try:
            batch = self._taken(block, scan)
        except UnfitRecordError:
            batch, more = self._halves(block)
            bad |= {int(good[number]): reason for number, reason in more.items()}
            good = np.delete(good, list(more))
        unfit: dict[int, str] = {}
        columns = fitted(batch, self._columns, unfit)
        bad |= {int(good[number]): reason for number, reason in unfit.items()}
        return DecodedRecords(rows_of(columns, self._columns, unfit), bad)

    def _taken(self, block: Block, scan: kernels.AvroScan) -> pa.RecordBatch:
        """Returns the rows of records, all of which the scan found valid. Raises UnfitRecordError for a value that does
        not fit its type.
        """
        columns = Columns(self._program, scan.counts, scan.sizes)
        kernels.take_avro(
            block.data,
            block.starts,
            block.ends,
            self._instructions,
            self._program.depth,
            columns.out,
            columns.entries_at,
            columns.data_at,
        )
        rows = len(block.starts)
        arrays = [node.array(columns, rows) for node in self._program.nodes]
        return pa.RecordBatch.from_arrays(arrays, schema=self._found)

    def _halves(self, block: Block) -> tuple[pa.RecordBatch, dict[int, str]]:
        """Decodes records in halves, so that records with values that do not fit are isolated.

        Returns the rows of the other records, and the reasons for the bad records by their number.
        """
        parts: list[pa.RecordBatch] = []
        bad: dict[int, str] = {}
        waiting = [(0, len(block.starts))]
        while waiting:
            begin, end = waiting.pop()
            part = Block(block.data, block.starts[begin:end], block.ends[begin:end])
            widths, depth = len(self._program.widths), self._program.depth
            scan = kernels.scan_avro(part.data, part.starts, part.ends, self._instructions, widths, depth)
            try:
                parts.append(self._taken(part, scan))
            except UnfitRecordError as error:
                if end - begin == 1:
                    bad[begin] = str(error)
                else:
                    middle = (begin + end) // 2
                    waiting += [(middle, end), (begin, middle)]
        table = pa.Table.from_batches(parts, self._found).combine_chunks()
        batches = table.to_batches()
        return batches[0] if batches else pa.RecordBatch.from_pylist([], self._found), bad

    def _reason(self, scan: kernels.AvroScan, number: int) -> str:
        at = int(scan.faults[number])
        path = self._program.paths[at] if at < len(self._program.paths) else ""
        return _REASONS[int(scan.status[number])].format(field=f"field {path!r}" if path else "the record")


@dataclass(frozen=True, slots=True)
class AvroWrite(WriteFormat):
    """Avro bound to the columns of a sink.

    `text` is the JSON of the schema. `names` are the fields that have columns.
    """

    text: str
    references: tuple[str, ...]
    names: Sequence[str]
    part: str
    written: WrittenSchema | None
    """The schema in the registry, or None without a registry."""

    def encoder(self) -> AvroEncoder:
        """Returns an encoder for one task."""
        return AvroEncoder(self)


class AvroEncoder(PayloadEncoder):
    """Encodes rows as Avro records."""

    def __init__(self, form: AvroWrite) -> None:
        schema = parsed(form.text, form.references)
        self._names = form.names
        self._program = compiled(schema, schema, None, form.part)
        self._instructions = self._program.array()
        required = _null_free(schema)
        found = self._program.schema
        self._columns = pa.schema(
            [pa.field(name, found.field(name).type, nullable=name not in required) for name in form.names]
        )
        self._defaults = defaults_of(schema, [name for name in found.names if name not in form.names])
        self._ids = None if form.written is None else SubjectIds(form.written)

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        """Encodes each row as a record. A row that does not fit the schema is bad."""
        bad: dict[int, str] = {}
        header = b"" if self._ids is None else header_of(self._ids.of(topic))
        given = fitted(batch.rename_columns(list(self._names)), self._columns, bad)
        columns = dict(zip(self._names, given, strict=True))
        into = ColumnsOfRows(self._program, bad)
        rows = np.arange(batch.num_rows, dtype=np.int64)
        live = np.ones(batch.num_rows, dtype=np.bool_)
        for name, node in zip(self._program.names, self._program.nodes, strict=True):
            column = columns[name] if name in columns else pa.repeat(self._defaults[name], batch.num_rows)
            node.put(column, into, rows, live, name)
        values, entries_at, data_at = into.joined()
        found = kernels.put_avro(
            values, entries_at, data_at, batch.num_rows, header, self._instructions, self._program.depth
        )
        for number in np.flatnonzero(found.status).tolist():
            path = self._program.paths[int(found.faults[number])]
            bad.setdefault(number, f"field {path!r} has more digits than the bytes of its type hold")
        return good_payloads(_payloads(found), bad)


def _payloads(found: kernels.AvroRecordBytes) -> pa.Array:
    """Returns the encoded records as a binary array. Raises OverflowError for more than 2 GiB."""
    if found.offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError("the records of one batch have more than 2 GiB; write smaller batches")
    buffers = [None, pa.py_buffer(found.offsets.astype(np.int32)), pa.py_buffer(found.data)]
    return pa.Array.from_buffers(pa.binary(), len(found.offsets) - 1, buffers)


def _required(schema: AvroSchema) -> set[str]:
    """Returns the names of the record fields that have no default."""
    root = schema.of(schema.root)
    return {each["name"] for each in root["fields"] if "default" not in each} if kind_of(root) == "record" else set()


def _null_free(schema: AvroSchema) -> set[str]:
    """Returns the names of the record fields that must not be null."""
    root = schema.of(schema.root)
    if kind_of(root) != "record":
        return set()
    return {each["name"] for each in root["fields"] if not isinstance(schema.of(each["type"]), list)}


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def avro_schema_of(columns: pa.Schema, name: str) -> str:
    """Derives an Avro schema (JSON) from columns. Raises UnfitSchemaError for a type that Avro does not have."""
    namespace, _, bare = name.rpartition(".")
    record = {"type": "record", "name": bare, **({"namespace": namespace} if namespace else {})}
    return json.dumps({**record, "fields": [_field_of(field, field.name, bare) for field in columns]})


def _field_of(field: pa.Field, path: str, name: str) -> dict[str, Any]:
    check_avro_name(field.name, path)
    kind = avro_type(field.type, path, f"{name}_{field.name}")
    return (
        {"name": field.name, "type": ["null", kind], "default": None}
        if field.nullable
        else ({"name": field.name, "type": kind})
    )


def check_avro_name(name: str, path: str) -> None:
    """Raises UnfitSchemaError for a column with a name that Avro does not allow. `path`: the column, for the error."""
    if not _NAME.fullmatch(name):
        raise UnfitSchemaError(
            f"column {path!r} has a name that Avro does not allow; rename it with letters, digits and underscores only"
        )


def avro_type(kind: pa.DataType, path: str, name: str) -> Schema:
    """Returns the type of Avro for a type of Arrow. `name`: name of a record that is made.

    Raises UnfitSchemaError for a type that Avro lacks.
    """
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return {
            "type": "record",
            "name": name,
            "fields": [_field_of(each, f"{path}.{each.name}", name) for each in kind],
        }
    if pa.types.is_map(kind) and pa.types.is_string(kind.key_type):
        return {"type": "map", "values": ["null", avro_type(kind.item_type, path, f"{name}_value")]}
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return {"type": "array", "items": ["null", avro_type(kind.value_type, path, f"{name}_item")]}
    if pa.types.is_decimal(kind) and kind.precision <= 38 and kind.scale >= 0:
        return {"type": "bytes", "logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
    if pa.types.is_timestamp(kind):
        unit = {"s": "millis", "ms": "millis", "us": "micros", "ns": "nanos"}[kind.unit]
        return {"type": "long", "logicalType": f"{'local-' if kind.tz is None else ''}timestamp-{unit}"}
    if pa.types.is_time(kind) and kind.unit != "ns":
        millis = kind.unit in ("s", "ms")
        return {"type": "int" if millis else "long", "logicalType": f"time-{'millis' if millis else 'micros'}"}
    if pa.types.is_date(kind):
        return {"type": "int", "logicalType": "date"}
    if pa.types.is_integer(kind) and kind != pa.uint64():
        return "int" if kind.bit_width < 32 or kind == pa.int32() else "long"
    for test, found in _PLAIN_TYPES:
        if test(kind):
            return found
    raise UnfitSchemaError(f"column {path!r} is {kind}, which Avro does not have; cast it in a step before")


_PLAIN_TYPES = (
    (pa.types.is_boolean, "boolean"),
    (lambda kind: pa.types.is_float16(kind) or pa.types.is_float32(kind), "float"),
    (pa.types.is_float64, "double"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind), "string"),
    (lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind), "bytes"),
    (pa.types.is_fixed_size_binary, "bytes"),
)
