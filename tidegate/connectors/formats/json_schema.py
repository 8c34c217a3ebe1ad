"""`JsonSchemaFormat`: JSON objects in the wire format of a schema registry, with a JSON Schema.

Rules:

- Values are decoded as in `json_decoder.py`, into the columns of the program. The id in each payload must be the id of
  a JSON Schema, and is not used otherwise, because JSON names its members. Keywords that restrict values are not
  applied to values that are read: a value is bad only if its column cannot store it.
- Columns are compared with the newest schema of the topic when the job is submitted: each must be a property, of a
  compatible type.
- The schema for writing is derived from the columns, or given, or the newest schema of the topic. In the last two cases
  each row is validated with it (`jsonschema-rs`), one at a time.
- References (`$ref`) are followed within a schema, and to the references of the registry by their names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

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
from tidegate.connectors.formats.json import JsonEncoder, check_json_types
from tidegate.connectors.formats.json_decoder import JsonDecoder
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
from tidegate.connectors.formats.wire_format import BlockReader, WireDecoder, header_of, with_header
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import load

_DEPTH_MAX = 50
_DRAFT = "http://json-schema.org/draft-07/schema#"


@dataclass(frozen=True)
class JsonSchemaFormat(Format):
    """JSON in the wire format of a schema registry, with a JSON Schema.

    - `schema`: the schema, as JSON or as a dict. None: for reading, the newest schema of the topic when the job is
      submitted. For writing, a schema derived from the columns, or the newest schema of the topic without
      `auto_register`.
    - `registry`: a `SchemaRegistry`, or its address.
    - `subject`: how subjects are named: "topic" (`orders-value`), "record" (the title of the schema) or "topic_record".
    - `auto_register`: the sink registers its schema if the registry lacks it. With False a missing schema is an error.
    - `name`: title of a schema that is derived from columns.

    Writing with a given schema needs `pip install 'tidegate[json-schema]'`. Raises ConfigurationError for wrong
    arguments.

    Example:

        >>> tg.JsonSchemaFormat(registry="http://localhost:8081").kind
        'json_schema'
    """

    schema: str | Mapping[str, Any] | None = None
    registry: SchemaRegistry | str | None = None
    subject: Subject = "topic"
    auto_register: bool = True
    name: str = "Row"

    kind = "json_schema"

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", schema_text(self.schema, "JsonSchemaFormat"))
        object.__setattr__(self, "registry", SchemaRegistry.of(self.registry))
        check_subject(self.subject, self.kind)
        if self.registry is None:
            raise ConfigurationError("JsonSchemaFormat: give registry=; JSON without a registry is format='json'")

    def for_reading(self, columns: pa.Schema | None, use: PayloadUse) -> ReadFormat:
        """Binds the format to the columns of a source. Raises ConfigurationError, RegistryError."""
        where = f"{use.method}(format='json_schema')"
        newest = newest_schemas(RegistryClient(self._registry), self.subject, "JSON", use)
        given = [] if self.schema is None else [_parsed(str(self.schema), (), where)]
        described = [*given, *(_parsed(found.text, found.references, where) for found in newest.values())]
        if columns is None:
            if not given:
                schema_of_topics(newest, where, f"give the columns, {use.part}={{'name': str, ...}}")
            try:
                columns = described[0].columns()
            except UnfitSchemaError as error:
                raise ConfigurationError(f"{where}: {error}. Give the columns to read with {use.part}=") from error
        for schema in described:
            _check_columns(schema, columns, where, "correct its type, or remove the column")
        found = JsonSchemaRead(columns, self._registry)
        found.decoder().close()
        return found

    def for_writing(self, columns: pa.Schema, use: PayloadUse) -> WriteFormat:
        """Binds the format to the columns of a sink. Raises ConfigurationError, RegistryError."""
        where = f"{use.method}(format='json_schema')"
        check_json_types(columns, use, self.kind)
        references: tuple[tuple[str, str], ...] = ()
        known: dict[str, int] = {}
        validates = True
        if self.schema is not None:
            text = str(self.schema)
        elif self.auto_register:
            text = json.dumps(schema_of_columns(columns, self.name))
            validates = False
        else:
            newest = newest_schemas(RegistryClient(self._registry), self.subject, "JSON", use)
            found = schema_of_topics(newest, where, "register one, or give JsonSchemaFormat(schema=..., registry=...)")
            text, references = found.text, found.references
            known = {topic: each.schema_id for topic, each in newest.items()}
        schema = _parsed(text, references, where)
        _check_columns(schema, columns, where, "cast or drop it in a step before")
        if lacking := [name for name in schema.required() if name not in columns.names]:
            raise ConfigurationError(f"{where}: the schema requires {lacking[0]!r}, which is not a column; add it")
        register = self.auto_register
        written = WrittenSchema(self._registry, "JSON", text, schema.title, self.subject, register, use, known)
        write = JsonSchemaWrite(written, references, validates)
        write.encoder().close()
        written.check()
        return write

    @property
    def _registry(self) -> SchemaRegistry:
        assert isinstance(self.registry, SchemaRegistry)
        return self.registry


def _parsed(text: str, references: tuple[tuple[str, str], ...], where: str) -> JsonSchema:
    """Parses a schema. Raises ConfigurationError, which names the method and the format (`where`)."""
    try:
        return JsonSchema.of(text, references)
    except UnfitSchemaError as error:
        raise ConfigurationError(f"{where}: {error}") from error


@dataclass(frozen=True, slots=True)
class JsonSchemaRead(ReadFormat):
    """JSON in the wire format of a schema registry, bound to the columns of a source."""

    columns: pa.Schema
    registry: SchemaRegistry

    @property
    def schema(self) -> pa.Schema:
        """Returns the columns of every decoded batch."""
        return self.columns

    @property
    def has_registry(self) -> bool:
        """Returns True if each payload begins with the id of its schema in a registry."""
        return True

    def decoder(self) -> PayloadDecoder:
        """Returns a decoder for one task."""
        objects = JsonDecoder(self.columns)

        def read(block: Block) -> DecodedRecords:
            return objects.records(block)

        def reader_of(_: RegisteredSchema) -> BlockReader:
            return read

        return WireDecoder(self.columns, "JSON", RegistryClient(self.registry), reader_of)


@dataclass(frozen=True, slots=True)
class JsonSchemaWrite(WriteFormat):
    """JSON in the wire format of a schema registry, for a sink. `validates`: each row is validated with the schema."""

    written: WrittenSchema
    references: tuple[tuple[str, str], ...]
    validates: bool

    def encoder(self) -> PayloadEncoder:
        """Returns an encoder for one task. Raises ConfigurationError for an invalid schema."""
        return _JsonSchemaEncoder(self)


class _JsonSchemaEncoder(PayloadEncoder):
    def __init__(self, form: JsonSchemaWrite) -> None:
        self._ids = SubjectIds(form.written)
        self._objects = JsonEncoder()
        self._validator: Any = None
        if form.validates:
            library = load("to_kafka(format='json_schema') with a given schema", "json-schema", "jsonschema_rs")
            registry = library.Registry([(name, json.loads(text)) for name, text in form.references])
            try:
                self._validator = library.validator_for(
                    json.loads(form.written.text), registry=registry, retriever=_not_retrieved
                )
            except (ValueError, library.ReferencingError) as error:
                raise ConfigurationError(
                    f"the JSON Schema is invalid: {error}; correct the schema in the registry"
                ) from error

    def encode(self, batch: pa.RecordBatch, topic: str = "") -> EncodedRecords:
        header = header_of(self._ids.of(topic))
        found = self._objects.encode(batch)
        payloads, bad = found.payloads, dict(found.bad)
        if self._validator is not None:
            numbers = np.delete(np.arange(batch.num_rows), sorted(bad)).tolist()
            unfit: dict[int, str] = {}
            for at, payload in enumerate(payloads.to_pylist()):
                value = json.loads(payload)
                if not self._validator.is_valid(value):
                    error = next(iter(self._validator.iter_errors(value)))
                    path = ".".join(map(str, error.instance_path))
                    unfit[at] = f"{f'field {path!r}' if path else 'the row'} does not fit the schema: {error.kind.name}"
            payloads = good_payloads(payloads, unfit).payloads
            bad |= {int(numbers[at]): reason for at, reason in unfit.items()}
        return EncodedRecords(with_header(header, payloads), bad)


def _not_retrieved(address: str) -> Any:
    """Raises ValueError in place of loading a schema from the network. Passed to the JSON Schema library."""
    raise ValueError(
        f"the JSON Schema refers to {address!r}, which is not among the references of the schema; register it as a "
        "reference"
    )


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A parsed JSON Schema, and the schemas that its references name."""

    root: Mapping[str, Any]
    others: Mapping[str, Any]

    @staticmethod
    def of(text: str, references: Sequence[tuple[str, str]] = ()) -> JsonSchema:
        """Parses a schema, given as JSON. Raises UnfitSchemaError if it is not a JSON object."""
        try:
            root = json.loads(text)
            others = {name: json.loads(each) for name, each in references}
        except ValueError as error:
            raise UnfitSchemaError(f"the JSON Schema is not JSON: {error}; register a schema in JSON") from error
        if not isinstance(root, dict):
            raise UnfitSchemaError(
                f"the JSON Schema is not an object but {type(root).__name__}; register an object with properties"
            )
        return JsonSchema(root, others)

    @property
    def title(self) -> str:
        """Returns the title of the schema, which some subject names contain."""
        return str(self.root.get("title", ""))

    def required(self) -> list[str]:
        """Returns the names of the required properties."""
        return [str(name) for name in self.resolved(self.root).get("required", ())]

    def properties(self) -> Mapping[str, Any]:
        """Returns the schemas of the object's properties, by name."""
        return dict(self.resolved(self.root).get("properties") or {})

    def resolved(self, schema: Any, depth: int = 0) -> Mapping[str, Any]:
        """Returns a schema after following `$ref` and dropping null branches.

        An empty schema if it cannot be resolved.
        """
        if depth > _DEPTH_MAX or not isinstance(schema, dict):
            return {}
        if isinstance(reference := schema.get("$ref"), str):
            return self.resolved(self._at(reference), depth + 1)
        for word in ("oneOf", "anyOf"):
            if isinstance(branches := schema.get(word), list) and "type" not in schema:
                values = [each for each in branches if not (isinstance(each, dict) and each.get("type") == "null")]
                return self.resolved(values[0], depth + 1) if len(values) == 1 else {}
        return schema

    def _at(self, reference: str) -> Any:
        name, _, path = reference.partition("#")
        found: Any = self.others.get(name) if name else self.root
        for part in path.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def kinds(self, schema: Mapping[str, Any]) -> set[str]:
        """Returns the JSON types that a resolved schema allows, without null. Empty if they are unknown."""
        given = schema.get("type")
        if given is None and isinstance(values := schema.get("enum"), list):
            return {"string"} if all(isinstance(each, str) or each is None for each in values) else set()
        if given is None and isinstance(schema.get("const"), str):
            return {"string"}
        if given is None:
            return {"object"} if "properties" in schema else set()
        return {str(each) for each in (given if isinstance(given, list) else [given])} - {"null"}

    def columns(self) -> pa.Schema:
        """Returns the Arrow columns of the properties. Raises UnfitSchemaError, which names the field."""
        fields = [pa.field(name, self._type(each, name, 0)) for name, each in self.properties().items()]
        if not fields:
            raise UnfitSchemaError("the JSON Schema has no properties, so it gives no columns; add properties to it")
        return pa.schema(fields)

    def _type(self, schema: Any, path: str, depth: int) -> pa.DataType:
        if depth > _DEPTH_MAX:
            raise UnfitSchemaError(
                f"field {path[:80]!r} is within itself, which has no Arrow type; remove the field from the columns"
            )
        found = self.resolved(schema)
        kinds = self.kinds(found)
        if kinds == {"object"} and found.get("properties"):
            inner = found["properties"].items()
            return pa.struct([pa.field(name, self._type(each, f"{path}.{name}", depth + 1)) for name, each in inner])
        if kinds == {"array"} and isinstance(found.get("items"), dict):
            return pa.list_(self._type(found["items"], f"{path}[]", depth + 1))
        for kind, wanted in _TYPES.items():
            if kinds == {kind}:
                return wanted
        if kinds == {"integer", "number"}:
            return pa.float64()
        shown = " or ".join(sorted(kinds)) or "of no known type"
        raise UnfitSchemaError(f"field {path!r} is {shown}, which has no Arrow type; remove the field from the columns")

    def refusal_of(self, schema: Any, wanted: pa.DataType) -> str | None:
        """Returns why values of a schema do not fit an Arrow type, or None if they may fit."""
        found = self.resolved(schema)
        kinds = self.kinds(found)
        fits = _kinds_of(wanted)
        if kinds and not kinds & fits:
            return f"is {' or '.join(sorted(kinds))} in the schema, and {wanted} in the program"
        if pa.types.is_struct(wanted) and isinstance(properties := found.get("properties"), dict):
            for each in wanted:
                if each.name not in properties:
                    return f"has no field {each.name!r} in the schema"
                if (reason := self.refusal_of(properties[each.name], each.type)) is not None:
                    return f"(its field {each.name!r}) {reason}"
        if _is_list(wanted) and isinstance(found.get("items"), dict):
            reason = self.refusal_of(found["items"], wanted.value_type)
            return None if reason is None else f"(its elements) {reason}"
        return None


_TYPES = {"string": pa.string(), "integer": pa.int64(), "number": pa.float64(), "boolean": pa.bool_()}


def _kinds_of(kind: pa.DataType) -> set[str]:
    """Returns the JSON types that values of an Arrow type may be written as."""
    if pa.types.is_dictionary(kind):
        return _kinds_of(kind.value_type)
    if pa.types.is_integer(kind):
        return {"integer"}
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return {"integer", "number"}
    if pa.types.is_boolean(kind):
        return {"boolean"}
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return {"object"}
    return {"array"} if _is_list(kind) else {"string"}


def _check_columns(schema: JsonSchema, columns: pa.Schema, where: str, advice: str) -> None:
    properties = schema.properties()
    for field in columns:
        if field.name not in properties:
            raise ConfigurationError(
                f"{where}: the schema has no property {field.name!r}; it has {list(properties)}. Remove the column, or "
                "add the property"
            )
        if (reason := schema.refusal_of(properties[field.name], field.type)) is not None:
            raise ConfigurationError(f"{where}: column {field.name!r} {reason}; {advice}")


def schema_of_columns(columns: pa.Schema, name: str) -> dict[str, Any]:
    """Derives the JSON Schema of rows with these columns. `name` is its title."""
    return {"$schema": _DRAFT, "title": name, **_object(list(columns))}


def _object(fields: Sequence[pa.Field]) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {field.name: _property(field) for field in fields},
        "required": [field.name for field in fields if not field.nullable],
    }


def _property(field: pa.Field) -> dict[str, Any]:
    found = _described(field.type)
    return {"oneOf": [{"type": "null"}, found]} if field.nullable and found else found


def _described(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_dictionary(kind):
        return _described(kind.value_type)
    if pa.types.is_struct(kind):
        return _object(list(kind))
    if pa.types.is_map(kind):
        return {"type": "object", "additionalProperties": _property(kind.item_field)}
    if _is_list(kind):
        return {"type": "array", "items": _property(kind.value_field)}
    if pa.types.is_null(kind):
        return {"type": "null"}
    name = "number" if pa.types.is_floating(kind) or pa.types.is_decimal(kind) else min(_kinds_of(kind))
    found: dict[str, Any] = {"type": name}
    if pa.types.is_date(kind):
        found["format"] = "date"
    elif pa.types.is_timestamp(kind) and kind.tz is not None:
        found["format"] = "date-time"
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        found["contentEncoding"] = "base64"
    return found


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
