"""JSON Schema as a format of payloads: in the wire format of a registry, compared at submission, and validated."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import binary
from registry_server import registry_server

from tidegate.connectors.formats.format import PayloadUse
from tidegate.connectors.formats.json_schema import JsonSchemaFormat
from tidegate.storage.errors import ConfigurationError

pytest.importorskip("jsonschema_rs", reason="needs pip install 'tidegate[json-schema]'")

READING = PayloadUse("from_kafka", ("orders",))
WRITING = PayloadUse("to_kafka", ("orders",))
ORDER: dict[str, Any] = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "title": "Order",
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "item": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
        "tags": {"type": "array", "items": {"$ref": "#/definitions/Tag"}},
        "price": {"type": ["number", "null"]},
    },
    "required": ["id"],
    "definitions": {"Tag": {"type": "object", "properties": {"name": {"type": "string"}}}},
}
COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("item", pa.string()),
        ("tags", pa.list_(pa.struct([("name", pa.string())]))),
        ("price", pa.float64()),
    ]
)


def with_id(schema_id: int, value: object) -> bytes:
    """A payload in the wire format."""
    return b"\0" + schema_id.to_bytes(4, "big") + json.dumps(value).encode()


def test_columns_come_from_the_newest_schema() -> None:
    """With references in it and to other subjects; payloads of older schemas are read, too."""
    with registry_server() as registry:
        old = registry.add("orders-value", {"type": "object", "properties": {"id": {"type": "integer"}}}, "JSON")
        registry.add("money", {"type": "number"}, "JSON")
        newest = {**ORDER, "properties": {**ORDER["properties"], "price": {"$ref": "money.json"}}}
        references = [{"name": "money.json", "subject": "money", "version": 1}]
        new = registry.add("orders-value", newest, "JSON", references)
        avro = registry.add("other", '"int"')
        read = JsonSchemaFormat(registry=registry.url).for_reading(None, READING)
        assert read.schema == COLUMNS
        decoder = pickle.loads(pickle.dumps(read)).decoder()
        rows: list[dict[str, Any]] = [{"id": 1, "tags": [{"name": "a"}], "price": 2}, {"id": 2}]
        payloads = [with_id(new, rows[0]), with_id(old, {"id": "x"}), with_id(old, rows[1]), b"{}", with_id(avro, {})]
        found = decoder.decode(binary(payloads))
        empty = dict.fromkeys(COLUMNS.names)
        assert found.batch.to_pylist() == [empty | row for row in rows]
        assert sorted(found.bad) == [1, 3, 4]
        assert found.bad[4].endswith(
            "cannot be read as the schema of the program: it is of type AVRO, not JSON; give the format of this type"
        )


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"nr": pa.int64()}, r"the schema has no property 'nr'; it has \['id', 'item', 'tags', 'price'\]"),
        ({"id": pa.string()}, "column 'id' is integer in the schema, and string in the program"),
        ({"price": pa.int64()}, "column 'price' is number in the schema, and int64 in the program"),
        ({"tags": pa.list_(pa.string())}, r"column 'tags' \(its elements\) is object in the schema"),
        (
            {"tags": pa.list_(pa.struct([("nr", pa.int64())]))},
            r"column 'tags' \(its elements\) has no field 'nr' in the schema",
        ),
    ],
)
def test_columns_that_the_schema_does_not_have_are_refused(columns: dict[str, pa.DataType], reason: str) -> None:
    """When the job is submitted, for reading and for writing."""
    with registry_server() as registry:
        registry.add("orders-value", ORDER, "JSON")
        wanted = pa.schema(list(columns.items()))
        with pytest.raises(ConfigurationError, match=rf"from_kafka\(format='json_schema'\): {reason}"):
            JsonSchemaFormat(registry=registry.url).for_reading(wanted, READING)
        with pytest.raises(ConfigurationError, match=rf"to_kafka\(format='json_schema'\): {reason}"):
            JsonSchemaFormat(ORDER, registry=registry.url).for_writing(wanted, WRITING)


def test_schemas_without_columns_are_refused_by_name() -> None:
    """With the field, if the columns are not given."""
    for properties, reason in [
        ({"x": {"type": ["string", "integer"]}}, "field 'x' is integer or string, which has no Arrow type"),
        ({"x": {}}, "field 'x' is of no known type"),
        ({"x": {"$ref": "#"}}, "is within itself"),
        ({"x": {"$ref": "gone.json"}}, "field 'x' is of no known type"),
        ({}, "has no properties"),
    ]:
        schema = {"type": "object", "properties": properties}
        with registry_server() as registry, pytest.raises(ConfigurationError, match=f"{reason}.*Give the columns"):
            JsonSchemaFormat(schema, registry=registry.url).for_reading(None, READING)
    for text, reason in [("string", "is not JSON"), ("true", "is not an object but bool")]:
        with registry_server() as registry:
            registry.add("orders-value", text, "JSON")
            with pytest.raises(
                ConfigurationError, match=rf"from_kafka\(format='json_schema'\): the JSON Schema {reason}"
            ):
                JsonSchemaFormat(registry=registry.url).for_reading(None, READING)
    with registry_server() as registry, pytest.raises(ConfigurationError, match="no schema in the registry; give the"):
        JsonSchemaFormat(registry=registry.url).for_reading(None, READING)
    with pytest.raises(ConfigurationError, match="give registry="):
        JsonSchemaFormat(ORDER)


def test_rows_are_validated_with_a_given_schema() -> None:
    """With its keywords. A row that it does not allow is bad, and the schema is registered under the topic."""
    rows = [{"id": 1, "item": "abc"}, {"id": 0}, {"id": None}, {"id": 4, "item": "abcd"}, {"id": 5, "price": 1.5}]
    batch = pa.RecordBatch.from_pylist(rows, COLUMNS.remove(2))
    with registry_server() as registry:
        write = JsonSchemaFormat(ORDER, registry=registry.url).for_writing(batch.schema, WRITING)
        assert registry.schemas[registry.subjects["orders-value"][0]]["schemaType"] == "JSON"
        found = pickle.loads(pickle.dumps(write)).encoder().encode(batch, "orders")
        assert [json.loads(payload[5:])["id"] for payload in found.payloads.to_pylist()] == [1, 5]
        assert found.bad == {
            1: "field 'id' does not fit the schema: minimum",
            2: "field 'id' does not fit the schema: type",
            3: "field 'item' does not fit the schema: oneOf",
        }
        newest = JsonSchemaFormat(registry=registry.url, auto_register=False).for_writing(batch.schema, WRITING)
        again = newest.encoder().encode(batch, "orders")
        assert (again.payloads.to_pylist(), again.bad) == (found.payloads.to_pylist(), found.bad)


def test_a_schema_that_cannot_be_written_is_refused() -> None:
    """An invalid one, one with a required property without a column, and one that is on the network."""
    columns = pa.schema([("item", pa.string())])
    for schema, reason in [
        ({**ORDER}, "the schema requires 'id', which is not a column"),
        (
            {"type": "object", "properties": {"item": {"type": "string", "maxLength": "x"}}},
            "the JSON Schema is invalid",
        ),
        (
            {"type": "object", "properties": {"item": {"$ref": "http://host.invalid/x.json"}}},
            "the JSON Schema is invalid.*",
        ),
    ]:
        with registry_server() as registry:
            with pytest.raises(ConfigurationError, match=reason):
                JsonSchemaFormat(schema, registry=registry.url).for_writing(columns, WRITING)
            assert registry.subjects == {}, "nothing is registered"


_KINDS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.string(), st.text(max_size=4)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    (pa.binary(), st.binary(max_size=4)),
    (pa.date32(), st.dates()),
    (pa.decimal128(9, 2), st.integers(-(10**9) + 1, 10**9 - 1).map(lambda each: decimal.Decimal(each).scaleb(-2))),
    (pa.timestamp("us", "UTC"), st.datetimes(dt.datetime(1700, 1, 1), timezones=st.just(dt.UTC))),
    (pa.list_(pa.int32()), st.lists(st.integers(-9, 9) | st.none(), max_size=3)),
    (pa.struct([("a", pa.string())]), st.fixed_dictionaries({"a": st.none() | st.text(max_size=2)})),
]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_are_read_back_with_a_schema_of_their_columns(data: st.DataObject) -> None:
    """And each object is valid by the schema that was registered."""
    import jsonschema_rs

    kinds = data.draw(st.lists(st.sampled_from(_KINDS), min_size=1, max_size=4))
    rows = data.draw(st.integers(0, 4))
    arrays = [
        pa.array(data.draw(st.lists(st.none() | each, min_size=rows, max_size=rows)), kind) for kind, each in kinds
    ]
    batch = pa.record_batch(arrays, names=[f"c{number}" for number in range(len(kinds))])
    with registry_server() as registry:
        form = JsonSchemaFormat(registry=registry.url)
        encoded = form.for_writing(batch.schema, WRITING).encoder().encode(batch, "orders")
        assert encoded.bad == {}
        found = form.for_reading(batch.schema, READING).decoder().decode(binary(encoded.payloads.to_pylist()))
        schema = json.loads(registry.schemas[1]["schema"])
    assert found.bad == {}
    assert found.batch.equals(batch)
    for payload in encoded.payloads.to_pylist():
        jsonschema_rs.validate(schema, json.loads(payload[5:]))
