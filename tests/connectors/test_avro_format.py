"""Avro as a format of payloads: compared with `fastavro`, with bytes of Confluent's own serializer, and broken."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
from collections.abc import Callable
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import binary
from registry_server import RegistryServer, registry_server

from tidegate.connectors.formats.avro import AvroFormat, avro_schema_of
from tidegate.connectors.formats.format import DecodedRecords, PayloadUse
from tidegate.connectors.formats.json_schema import JsonSchemaFormat
from tidegate.connectors.formats.named import check_registry, format_named
from tidegate.connectors.formats.registry import SchemaRegistry
from tidegate.connectors.kafka.records import RecordFormat, RecordReader, Records, headers_array
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

READING = PayloadUse("from_kafka", ("orders",))
WRITING = PayloadUse("to_kafka", ("orders",))
ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "item", "type": ["null", "string"], "default": None},
        {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}
ORDERS = [
    {
        "id": 1,
        "item": "a",
        "price": decimal.Decimal("12.34"),
        "at": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        "tags": ["x", "y"],
    },
    {
        "id": -70000,
        "item": None,
        "price": decimal.Decimal("-0.01"),
        "at": dt.datetime(1960, 1, 1, tzinfo=dt.UTC),
        "tags": [],
    },
]
CONFLUENT = [
    bytes.fromhex("0000000001020202610404d290b2cccaef66040278027900"),
    bytes.fromhex("0000000001dfc5080002ffffaff6c5af1200"),
]
"""`ORDERS`, by the AvroSerializer of confluent-kafka 2.16.1."""


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    """A schema of pairs of name and type."""
    return {"type": "record", "name": name, "fields": [{"name": field[0], "type": field[1]} for field in fields]}


def written(schema: Any, *rows: Any) -> list[bytes]:
    """Payloads by fastavro."""
    parsed = fastavro.parse_schema(schema)
    payloads = []
    for row in rows:
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, row)
        payloads.append(out.getvalue())
    return payloads


def read(schema: Any, payloads: list[bytes], columns: pa.Schema | None = None) -> DecodedRecords:
    """The rows of bare payloads."""
    return AvroFormat(schema).for_reading(columns, READING).decoder().decode(binary(payloads))


def with_id(schema_id: int, payload: bytes) -> bytes:
    """A payload in the wire format."""
    return b"\0" + schema_id.to_bytes(4, "big") + payload


_TIMES = st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1))
_ZONED = _TIMES.map(lambda each: each.replace(tzinfo=dt.UTC))
_CENTS = st.integers(-(10**12), 10**12).map(lambda each: decimal.Decimal(each).scaleb(-3))
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("boolean", st.booleans()),
    ("int", st.integers(-(2**31), 2**31 - 1)),
    ("long", st.integers(-(2**63), 2**63 - 1)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("string", st.text(max_size=5)),
    ("bytes", st.binary(max_size=5)),
    ({"type": "int", "logicalType": "date"}, st.dates()),
    ({"type": "int", "logicalType": "time-millis"}, st.times().map(lambda t: t.replace(microsecond=0))),
    ({"type": "long", "logicalType": "time-micros"}, st.times()),
    ({"type": "long", "logicalType": "timestamp-micros"}, _ZONED),
    ({"type": "long", "logicalType": "timestamp-millis"}, _ZONED.map(lambda t: t.replace(microsecond=7000))),
    ({"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 3}, _CENTS),
    ({"type": "string", "logicalType": "unheard-of"}, st.text(max_size=3)),
]
NAMED: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "enum", "symbols": ["A", "B", "C"]}, st.sampled_from("ABC")),
    ({"type": "fixed", "size": 3}, st.binary(min_size=3, max_size=3)),
    ({"type": "fixed", "size": 9, "logicalType": "decimal", "precision": 18, "scale": 3}, _CENTS),
]


@st.composite
def schemas(draw: st.DrawFn) -> tuple[Any, st.SearchStrategy[Any]]:
    """A schema of a record, and its values."""
    names = iter(range(1000))

    def one(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        kind = draw(st.integers(0, 9 if depth < 3 else 5))
        if kind < 4:
            return draw(st.sampled_from(LEAVES))
        if kind == 4:
            found, values = draw(st.sampled_from(NAMED))
            return {**found, "name": f"N{next(names)}"}, values
        if kind in (5, 6):
            inner, values = one(3)
            return (["null", inner] if kind == 5 else [inner, "null"]), st.none() | values
        if kind == 7:
            inner, values = one(depth + 1)
            return {"type": "array", "items": inner}, st.lists(values, max_size=3)
        if kind == 8:
            inner, values = one(depth + 1)
            return {"type": "map", "values": inner}, st.dictionaries(st.text(max_size=3), values, max_size=3)
        fields = {f"f{number}": one(depth + 1) for number in range(draw(st.integers(1, 3)))}
        inner = record(*((name, kind) for name, (kind, _) in fields.items()), name=f"N{next(names)}")
        values = st.fixed_dictionaries({name: values for name, (_, values) in fields.items()})
        return (["null", inner], st.none() | values) if draw(st.booleans()) else (inner, values)

    fields = {f"c{number}": one(0) for number in range(draw(st.integers(1, 5)))}
    schema = record(*((name, kind) for name, (kind, _) in fields.items()))
    return schema, st.fixed_dictionaries({name: values for name, (_, values) in fields.items()})


def plain(value: Any) -> Any:
    """A value with maps as dicts, as fastavro has them."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        if value and all(isinstance(each, tuple) for each in value):
            return {name: plain(each) for name, each in value}
        return [plain(each) for each in value]
    return value


def same(found: Any, expected: Any) -> bool:
    """Equal, where an empty map is an empty list."""
    if isinstance(expected, dict) and isinstance(found, dict):
        return list(found) == list(expected) and all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected) or (found == [] and expected == {})


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_rows_are_those_that_fastavro_reads(data: st.DataObject) -> None:
    """Any schema, with nesting and nulls anywhere; and what the format writes, fastavro reads as the same rows."""
    schema, values = data.draw(schemas())
    rows = data.draw(st.lists(values, max_size=5))
    payloads = written(schema, *rows)
    expected = [fastavro.schemaless_reader(io.BytesIO(each), fastavro.parse_schema(schema), None) for each in payloads]
    found = read(schema, payloads)
    assert found.bad == {}
    assert all(map(same, plain(found.batch.to_pylist()), expected))
    back = AvroFormat(schema).for_writing(found.batch.schema, WRITING).encoder().encode(found.batch)
    assert back.bad == {}
    again = [
        fastavro.schemaless_reader(io.BytesIO(each), fastavro.parse_schema(schema), None)
        for each in back.payloads.to_pylist()
    ]
    assert again == expected


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_broken_bytes_are_bad_and_their_neighbours_are_not(data: st.DataObject) -> None:
    """A record that is cut or has more bytes is always bad. One with other bytes is bad or what fastavro reads."""
    schema, values = data.draw(schemas())
    rows = data.draw(st.lists(values, min_size=1, max_size=4))
    payloads = written(schema, *rows)
    at = data.draw(st.integers(0, len(rows) - 1))
    good = payloads[at]
    kind = data.draw(st.sampled_from(["cut", "longer", "other"]))
    if kind == "cut":
        broken = good[: data.draw(st.integers(0, max(0, len(good) - 1)))]
    elif kind == "longer":
        broken = good + data.draw(st.binary(min_size=1, max_size=3))
    else:
        place = data.draw(st.integers(0, max(0, len(good) - 1)))
        broken = good[:place] + data.draw(st.binary(max_size=3)) + good[place + 1 :]
    found = read(schema, [*payloads[:at], broken, *payloads[at + 1 :]])
    assert set(found.bad) <= {at}
    if kind != "other" and broken != good:
        assert set(found.bad) == {at}
    rest = read(schema, [*payloads[:at], *payloads[at + 1 :]]).batch.to_pylist()
    mine = found.batch.to_pylist()
    if not found.bad:
        del mine[at]
    assert mine == rest


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("string", b"\x06ab", "the record ends within field 'x'"),
        ("string", b"\x01", "field 'x' has a negative length"),
        ("string", b"\x04\xc3\xc3", "a string is not UTF-8"),
        ("boolean", b"\x02", "field 'x' is neither true nor false"),
        ("int", b"\xfe\xff\xff\xff\x1f", "field 'x' is beyond 32 bits"),
        ("long", b"\xff" * 10 + b"\x01", "field 'x' has an integer of more than ten bytes"),
        (["null", "int"], b"\x04", "field 'x' has a branch that its union does not have"),
        (
            {"type": "enum", "name": "E", "symbols": ["A"]},
            b"\x02",
            "field 'x' has a symbol that its enum does not have",
        ),
        ({"type": "array", "items": "int"}, b"\x80\x80\x80\x80\x40", "more elements than the record has bytes"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 0},
            b"\x04\x03\xe8",
            "a value does not fit decimal128",
        ),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 0},
            b"\x22" + b"\x7f" * 17,
            "more than 38",
        ),
        ("int", b"\x02\x02", "bytes follow the record"),
    ],
)
def test_each_fault_has_its_reason(kind: Any, payload: bytes, reason: str) -> None:
    """Between two good records, in a block that is read by halves where the value is at fault."""
    schema = record(("y", "int"), ("x", kind))
    found = read(schema, [b"\x02" + payload, b"\x04" + payload])
    assert sorted(found.bad) == [0, 1]
    assert reason in found.bad[0]
    assert found.batch.num_rows == 0


def test_two_halves_of_a_character_are_not_a_character() -> None:
    """A string is judged alone, not with the string after it."""
    schema = record(("x", "string"))
    found = read(schema, [b"\x02a", b"\x02\xc3", b"\x02\xa9", b"\x02b"])
    assert (found.batch.column(0).to_pylist(), sorted(found.bad)) == (["a", "b"], [1, 2])


MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
CLOCK = {"type": "int", "logicalType": "time-millis"}
DATE = {"type": "int", "logicalType": "date"}
EVOLUTION: list[tuple[str, Any, Any, Any, Any]] = [
    ("a new field with a default", ("int", {}), ("int", {}), 1, 1),
    ("int to long", ("int", {}), ("long", {}), 5, 5),
    ("int to double", ("int", {}), ("double", {}), 5, 5.0),
    ("long to float", ("long", {}), ("float", {}), 5, 5.0),
    ("float to double", ("float", {}), ("double", {}), 0.5, 0.5),
    ("string to bytes", ("string", {}), ("bytes", {}), "é", "é".encode()),
    ("bytes to string", ("bytes", {}), ("string", {}), b"ab", "ab"),
    ("to a union", ("int", {}), (["null", "long"], {}), 3, 3),
    ("from a union", (["null", "int"], {}), ("int", {}), 3, 3),
    ("within lists", ({"type": "array", "items": "int"}, {}), ({"type": "array", "items": "long"}, {}), [1], [1]),
    (
        "a timestamp of another unit",
        ({"type": "long", "logicalType": "timestamp-millis"}, {}),
        ({"type": "long", "logicalType": "timestamp-micros"}, {}),
        5,
        dt.datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=dt.UTC),
    ),
    (
        "a number that became a time",
        ("int", {}),
        (MILLIS, {}),
        5,
        dt.datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=dt.UTC),
    ),
    ("a time that became a number", (MILLIS, {}), ("double", {}), 5, 5.0),
    (
        "a time of day in another unit",
        (CLOCK, {}),
        ({"type": "long", "logicalType": "time-micros"}, {}),
        5,
        dt.time(0, 0, 0, 5000),
    ),
    ("a time of day as a number", (CLOCK, {}), ("long", {}), 5, 5),
    ("a date that became a time", (DATE, {}), (MILLIS, {}), 1, dt.datetime(1970, 1, 2, tzinfo=dt.UTC)),
    ("a date that became a number", (DATE, {}), ("long", {}), 1, 1),
    (
        "an enum with a default",
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, {}),
        ({"type": "enum", "name": "E", "symbols": ["A", "X"], "default": "X"}, {}),
        "B",
        "X",
    ),
]


@pytest.mark.parametrize(("writer", "reader", "value", "expected"), [each[1:] for each in EVOLUTION])
def test_records_of_an_older_schema_are_read_as_the_newer_one(
    writer: Any, reader: Any, value: Any, expected: Any
) -> None:
    """By the rules of Avro, with a field that was dropped before and one that came after."""
    old = record(("gone", {"type": "map", "values": ["int", "string"]}), ("x", writer[0]), name="a.R")
    new = record(("x", reader[0]), name="b.R")
    new["fields"].append({"name": "more", "type": ["null", "string"], "default": None})
    new["fields"].append({"name": "list", "type": {"type": "array", "items": "int"}, "default": [1, 2]})
    with registry_server() as registry:
        first = registry.add("orders-value", old)
        registry.add("orders-value", new)
        payload = with_id(first, written(old, {"gone": {"k": 1, "l": "m"}, "x": value})[0])
        found = AvroFormat(registry=registry.url).for_reading(None, READING).decoder().decode(binary([payload]))
    assert found.bad == {}
    assert found.batch.to_pylist() == [{"x": expected, "more": None, "list": [1, 2]}]


@pytest.mark.parametrize(
    ("writer", "reader", "reason"),
    [
        ("string", "int", "field 'x' was written as string, and the program's schema has int"),
        ("long", "int", "field 'x' was written as long, and the program's schema has int"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
            {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 3},
            r"field 'x' was written as decimal128\(9, 2\), and the program's schema has decimal128\(9, 3\)",
        ),
        (
            {"type": "fixed", "name": "F", "size": 2},
            {"type": "fixed", "name": "F", "size": 3},
            "field 'x' was written with 2 bytes",
        ),
        (
            MILLIS,
            {"type": "long", "logicalType": "time-micros"},
            r"field 'x' was written as timestamp\[ms, tz=UTC\], and the program's schema has time64\[us\]",
        ),
        (CLOCK, DATE, r"field 'x' was written as time32\[ms\]"),
        (record(("a", "int"), name="A"), record(("a", "int"), name="B"), "field 'x' was written as 'A'"),
        (
            record(("a", "int"), name="A"),
            record(("b", "int"), name="A"),
            "field 'x.b' is in the program's schema without",
        ),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(writer: Any, reader: Any, reason: str) -> None:
    """At submission if it is the newest one; else each of its records is bad."""
    old, new = record(("x", writer)), record(("x", reader))
    with registry_server() as registry:
        first = registry.add("orders-value", old)
        with pytest.raises(ConfigurationError, match=rf"newest schema of topic 'orders' cannot be read .*: {reason}"):
            AvroFormat(new, registry=registry.url).for_reading(None, READING)
        registry.add("orders-value", new)
        decoder = AvroFormat(new, registry=registry.url).for_reading(None, READING).decoder()
        assert f"the schema with the id {first} cannot be read" in decoder.decode(binary([with_id(first, b"")])).bad[0]


def test_a_time_of_day_is_less_than_a_day() -> None:
    """Also a number that becomes one. Neither is shown as another time."""
    day = 86_400_000
    payloads = written(record(("x", "int")), {"x": day - 1}, {"x": day}, {"x": -1})
    found = read(record(("x", CLOCK)), payloads)
    assert found.batch.column(0).to_pylist() == [dt.time(23, 59, 59, 999_000)]
    assert sorted(found.bad) == [1, 2]
    with registry_server() as registry:
        first = registry.add("orders-value", record(("x", "int")))
        registry.add("orders-value", record(("x", {"type": "long", "logicalType": "time-micros"})))
        decoder = AvroFormat(registry=registry.url).for_reading(None, READING).decoder()
        found = decoder.decode(binary([with_id(first, each) for each in payloads]))
    assert found.batch.column(0).to_pylist() == [dt.time(0, 1, 26, 399_999), dt.time(0, 1, 26, 400_000)]
    assert sorted(found.bad) == [2]


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_a_field_is_found_by_its_name_before_its_aliases(order: tuple[str, str]) -> None:
    """In any order of the written fields, and aliases in their order."""
    old = record(*((name, "int") for name in order), ("d", "int"), ("c", "int"))
    new = record(("b", "int"), ("x", "int"))
    new["fields"][0]["aliases"] = ["a"]
    new["fields"][1]["aliases"] = ["b", "c", "d"]
    with registry_server() as registry:
        first = registry.add("orders-value", old)
        registry.add("orders-value", new)
        payload = with_id(first, written(old, {"a": 1, "b": 2, "c": 3, "d": 4})[0])
        found = AvroFormat(registry=registry.url).for_reading(None, READING).decoder().decode(binary([payload]))
        for name, value in (("b", 2), ("x", 3)):
            column = pa.schema([(name, pa.int32())])
            alone = AvroFormat(registry=registry.url).for_reading(column, READING).decoder().decode(binary([payload]))
            assert alone.batch.to_pylist() == [{name: value}]
    assert found.batch.to_pylist() == [{"b": 2, "x": 3}]


def test_a_field_is_not_read_under_the_name_of_an_unwanted_field() -> None:
    """The value of a column does not depend on which other columns are read, also in a struct within a list."""
    old, new = (record(("b", "int"), name="Inner"), record(("a", "int"), ("b", "int"), name="Inner"))
    new["fields"][0] |= {"default": -1, "aliases": ["b"]}
    old, new = (record(("b", "int"), ("l", {"type": "array", "items": each})) for each in (old, new))
    new["fields"].insert(0, {"name": "a", "type": "int", "default": -1, "aliases": ["b"]})
    kinds = {name: pa.list_(pa.struct([(each, pa.int32()) for each in name])) for name in ("a", "ab")}
    with registry_server() as registry:
        first = registry.add("orders-value", old)
        registry.add("orders-value", new)
        payload = with_id(first, written(old, {"b": 7, "l": [{"b": 7}]})[0])
        for columns in (
            pa.schema([("a", pa.int32()), ("l", kinds["a"])]),
            pa.schema([("a", pa.int32()), ("b", pa.int32()), ("l", kinds["ab"])]),
        ):
            found = AvroFormat(registry=registry.url).for_reading(columns, READING).decoder().decode(binary([payload]))
            row = found.batch.to_pylist()[0]
            assert (row["a"], row["l"][0]["a"]) == (-1, -1)
            assert row.get("b", 7) == row["l"][0].get("b", 7) == 7


def test_a_default_of_a_list_that_has_no_elements() -> None:
    """A new field of the elements of a list needs no value if all lists are empty."""
    inner = record(("a", "int"), name="Inner")
    newer = record(
        ("a", "int"), ("b", record(("c", "int"), name="C")), ("l", {"type": "array", "items": "int"}), name="Inner"
    )
    newer["fields"][1]["default"] = {"c": 5}
    newer["fields"][2]["default"] = [7]
    old, new = (record(("x", {"type": "array", "items": each})) for each in (inner, newer))
    with registry_server() as registry:
        first = registry.add("orders-value", old)
        registry.add("orders-value", new)
        decoder = AvroFormat(registry=registry.url).for_reading(None, READING).decoder()
        empty, full = (with_id(first, each) for each in written(old, {"x": []}, {"x": [{"a": 1}]}))
        assert decoder.decode(binary([empty])).batch.to_pylist() == [{"x": []}]
        assert decoder.decode(binary([empty, full])).batch.to_pylist() == [
            {"x": []},
            {"x": [{"a": 1, "b": {"c": 5}, "l": [7]}]},
        ]


def test_bytes_of_confluents_serializer() -> None:
    """They are read, and the same bytes are written."""
    with registry_server() as registry:
        registry.add("orders-value", ORDER)
        form = AvroFormat(registry=SchemaRegistry(registry.url))
        found = form.for_reading(None, READING).decoder().decode(binary(CONFLUENT))
        assert (found.bad, found.batch.to_pylist()) == ({}, ORDERS)
        write = AvroFormat(ORDER, registry=registry.url, auto_register=False).for_writing(found.batch.schema, WRITING)
        assert write.encoder().encode(found.batch, "orders").payloads.to_pylist() == CONFLUENT


def test_records_out_of_the_wire_format_are_named() -> None:
    """Wrong first byte, too short, an unknown id, another type; the good ones around them come in their order."""
    with registry_server() as registry:
        old = registry.add("orders-value", record(("x", "int")))
        new = registry.add("orders-value", record(("x", "long")))
        other = registry.add("other", "{}", "JSON")
        decoder = AvroFormat(registry=registry.url).for_reading(None, READING).decoder()
        good = [with_id(new, b"\x02"), with_id(old, b"\x04"), with_id(new, b"\x06")]
        wrong = [b'{"x": 1}', b"\0\0", with_id(99, b"\x02"), with_id(other, b"{}")]
        payloads = [good[0], wrong[0], good[1], wrong[1], wrong[2], good[2], wrong[3]]
        found = decoder.decode(binary(payloads))
        assert found.batch.to_pylist() == [{"x": 1}, {"x": 2}, {"x": 3}]
        assert {number: reason.split(":")[0] for number, reason in found.bad.items()} == {
            1: "it begins with the byte 0x7b and not with 0, so it is not in the wire format of a schema registry",
            3: "it has 2 bytes, too few for the wire format of a schema registry",
            4: "the schema registry has no schema with the id 99",
            6: f"the schema with the id {other} cannot be read as the schema of the program",
        }
        before = len(registry.requests)
        assert decoder.decode(binary(payloads)).batch.num_rows == 3
        assert len(registry.requests) == before, "known and unknown ids are remembered"
        nulls = decoder.decode_with_nulls(binary([None, *payloads]))
        assert nulls.batch.to_pylist() == [{"x": None}, {"x": 1}, {"x": 2}, {"x": 3}]
        assert sorted(nulls.bad) == [2, 4, 5, 7]


def test_only_needed_columns_are_read() -> None:
    """Types that have no column do no harm where they are not needed, also inside of records."""
    union = ["int", "string"]
    schema = record(("a", union), ("b", record(("c", union), ("d", "int"), name="B")), ("e", "int"))
    payloads = written(schema, {"a": 1, "b": {"c": "x", "d": 5}, "e": 7})
    columns = pa.schema([("e", pa.int64()), ("b", pa.struct([("d", pa.int64())]))])
    assert read(schema, payloads, columns).batch.to_pylist() == [{"e": 7, "b": {"d": 5}}]
    for wanted, reason in [
        (None, "field 'a' is a union of int, string, which has no Arrow type"),
        (
            pa.schema([("z", pa.int64())]),
            r"the schema has no field 'z', which value= names; name only fields of it: \['a', 'b', 'e'\]",
        ),
        (pa.schema([("e", pa.string())]), "column 'e' is int32 and not string in the schema"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            read(schema, payloads, wanted)


def test_values_that_a_column_cannot_hold_are_bad() -> None:
    """A column may be narrower than the schema; a value that does not fit makes its record bad."""
    schema = record(("x", ["null", "long"]))
    payloads = written(schema, {"x": 1}, {"x": 2**40}, {"x": None}, {"x": 3})
    found = read(schema, payloads, pa.schema([pa.field("x", pa.int32(), nullable=False)]))
    assert found.batch.to_pylist() == [{"x": 1}, {"x": 3}]
    assert found.bad[1].startswith("column 'x'")
    assert found.bad[1].endswith("does not fit int32")
    assert found.bad[2] == "column 'x' is not nullable, and has no value"


def test_schemas_that_have_no_columns_are_refused_by_name() -> None:
    """With the field."""
    inner = record(("next", ["null", "Tree"]), name="Tree")
    for kind, reason in [
        ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, "field 'x' is a duration"),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 50, "scale": 2},
            "field 'x' is a decimal of 50 digits",
        ),
        ({"type": "array", "items": "null"}, "field 'x' is an array of elements without any bytes"),
        ("null", "field 'x' is of type null"),
        (inner, "field 'x.next' is a 'Tree' within itself"),
        ("Nothing", "the Avro schema is invalid"),
    ]:
        with pytest.raises(ConfigurationError, match=rf"from_kafka\(format='avro'\): {reason}"):
            AvroFormat(record(("x", kind))).for_reading(None, READING)
    with pytest.raises(ConfigurationError, match="give registry=, or AvroFormat"):
        AvroFormat().for_reading(None, READING)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: AvroFormat("{"), r"^AvroFormat\(schema='\{'\): this is not JSON: .*; give the schema as JSON"),
        (lambda: AvroFormat("lang"), "this is not JSON"),
        (lambda: AvroFormat("5"), "this is no schema"),
        (lambda: AvroFormat({"type": {1}}), "this is not JSON"),
        (lambda: JsonSchemaFormat("{", registry="http://localhost:1"), r"^JsonSchemaFormat\(schema='\{'\): this is"),
        (lambda: JsonSchemaFormat("[]", registry="http://localhost:1"), "this is no schema"),
        (lambda: AvroFormat(registry=5), "^registry=5: give the address"),  # type: ignore[arg-type]
    ],
)
def test_a_schema_that_is_not_json_is_refused_at_once(made: Callable[[], object], said: str) -> None:
    """A format is often made far from the source or sink that uses it."""
    with pytest.raises(ConfigurationError, match=said):
        made()


def test_a_schema_that_is_no_record_is_one_column() -> None:
    """Keys of Kafka are often such values."""
    use = PayloadUse("from_kafka", ("orders",), "key")
    found = AvroFormat("long").for_reading(None, use).decoder().decode(binary(written("long", 5, -6)))
    assert found.batch.to_pylist() == [{"key": 5}, {"key": -6}]
    write = AvroFormat("long").for_writing(found.batch.schema, use).encoder()
    assert write.encode(found.batch).payloads.to_pylist() == written("long", 5, -6)


def test_a_schema_is_made_of_columns_and_registered() -> None:
    """When the job is submitted, under the subject of the strategy; a registry that refuses it fails the submission."""
    columns = pa.schema(
        [
            pa.field("i", pa.int8(), nullable=False),
            ("s", pa.dictionary(pa.int32(), pa.string())),
            ("t", pa.timestamp("s")),
            ("d", pa.decimal128(9, 2)),
            ("l", pa.list_(pa.struct([("m", pa.map_(pa.string(), pa.float32()))]))),
        ]
    )
    row = {"i": 1, "s": "a", "t": dt.datetime(2026, 1, 1), "d": decimal.Decimal("1.50"), "l": [{"m": [("k", 0.5)]}]}
    empty = dict.fromkeys(columns.names) | {"i": 2}
    with registry_server() as registry:
        batch = pa.RecordBatch.from_pylist([row, empty], columns)
        write = AvroFormat(registry=registry.url, subject="topic_record", name="shop.Row").for_writing(columns, WRITING)
        assert list(registry.subjects) == ["orders-shop.Row"]
        payloads = write.encoder().encode(batch, "orders").payloads.to_pylist()
        schema = json.loads(registry.schemas[1]["schema"])
        back = (
            AvroFormat(schema, registry=registry.url).for_reading(columns, READING).decoder().decode(binary(payloads))
        )
        assert (back.bad, back.batch.to_pylist()) == ({}, [row, empty])
        registry.incompatible.add("orders-value")
        with pytest.raises(ConfigurationError, match="refuses the schema for /subjects/orders-value/versions: Schema"):
            AvroFormat(registry=registry.url).for_writing(columns, WRITING)
        with pytest.raises(ConfigurationError, match="Register the schema, or set auto_register=True"):
            AvroFormat(schema, registry=registry.url, auto_register=False).for_writing(columns, WRITING)
        with pytest.raises(ConfigurationError, match="the topics have no schema in the registry; register one"):
            AvroFormat(registry=registry.url, auto_register=False).for_writing(columns, WRITING)
        registry.add("orders-value", schema)
        newest = AvroFormat(registry=registry.url, auto_register=False).for_writing(columns, WRITING)
        assert newest.encoder().encode(batch, "orders").payloads.to_pylist() == payloads


def test_columns_that_do_not_fit_the_schema_are_refused_and_rows_are_bad() -> None:
    """Types when the job is submitted, values row by row."""
    schema = record(("x", "int"))
    for columns, reason in [
        (pa.schema([("x", pa.string())]), "column 'x' is string and not int32"),
        (pa.schema([("x", pa.int32()), ("y", pa.int32())]), "the schema has no field for column 'y'"),
        (pa.schema([("y", pa.int32())]), "the schema has no field for column 'y'"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            AvroFormat(schema).for_writing(columns, WRITING)
    with pytest.raises(ConfigurationError, match="field 'x' of the schema has no default, and no column"):
        AvroFormat(record(("x", "int"), ("y", "int"))).for_writing(pa.schema([("y", pa.int32())]), WRITING)
    batch = pa.record_batch({"x": pa.array([1, None, 2**40, 4], pa.int64())})
    found = AvroFormat(schema).for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert (found.payloads.to_pylist(), sorted(found.bad)) == (written(schema, {"x": 1}, {"x": 4}), [1, 2])


def test_references_are_followed() -> None:
    """A schema may use a schema of another subject, which uses a third one."""
    with registry_server() as registry:
        registry.add("c", record(("z", "int"), name="C"))
        registry.add("b", record(("c", "C"), name="B"), references=[{"name": "C", "subject": "c", "version": 1}])
        number = registry.add(
            "orders-value", record(("b", "B")), references=[{"name": "B", "subject": "b", "version": 1}]
        )
        found = (
            AvroFormat(registry=registry.url)
            .for_reading(None, READING)
            .decoder()
            .decode(binary([with_id(number, b"\x0a")]))
        )
        assert found.batch.to_pylist() == [{"b": {"c": {"z": 5}}}]


def test_topics_with_different_schemas_need_one_of_the_program(registry: RegistryServer) -> None:
    """And a topic without a schema needs one, too."""
    registry.add("a-value", record(("x", "int")))
    registry.add("b-value", record(("y", "int")))
    for topics, text in [(("a", "b"), "different schemas"), (("none",), "no schema in the registry")]:
        with pytest.raises(ConfigurationError, match=f"the topics have {text}; give"):
            AvroFormat(registry=registry.url).for_reading(None, PayloadUse("from_kafka", topics))


@pytest.fixture
def registry() -> Any:
    """A registry for one test."""
    with registry_server() as server:
        yield server


def test_records_of_kafka_are_read_and_bad_ones_are_named() -> None:
    """By the reader of a Kafka source, with tombstones, metadata and dead letters."""
    values = pa.array([CONFLUENT[0], None, b'{"id":1}', CONFLUENT[1]], pa.binary())
    records = Records("orders", 2, np.array([5, 6, 9, 12]), {"value": values, "headers": headers_array([()] * 4)})
    with registry_server() as registry:
        registry.add("orders-value", ORDER)
        reads = AvroFormat(registry=registry.url).for_reading(pa.schema([("id", pa.int64())]), READING)
        form = RecordFormat(reads, metadata=("offset", "tombstone"))
        batch, letters = RecordReader(form, "side").rows(records)
        assert batch is not None
        assert batch.to_pylist() == [
            {"id": 1, "kafka_offset": 5, "kafka_tombstone": False},
            {"id": None, "kafka_offset": 6, "kafka_tombstone": True},
            {"id": -70000, "kafka_offset": 12, "kafka_tombstone": False},
        ]
        assert letters is not None
        assert letters.column("offset").to_pylist() == [9]
        with pytest.raises(
            ConfigurationError, match="offset 9 of partition 2 of 'orders' cannot be read: it begins with"
        ):
            RecordReader(form, "fail").rows(records)


def test_formats_are_found_by_name() -> None:
    """A registry goes to the format that uses one, and is refused elsewhere."""
    found = format_named("avro", "http://host:8081", "from_kafka")
    assert found == AvroFormat(registry=SchemaRegistry("http://host:8081"))
    assert [format_named(name, None, "from_kafka").kind for name in ("json", "csv", "raw", "text")] == [
        "json",
        "csv",
        "raw",
        "text",
    ]
    with pytest.raises(ConfigurationError, match=r"from_kafka\(key_format='xml'\): give one of 'json', "):
        format_named("xml", None, "from_kafka", "key_format")
    check_registry("http://host", "to_kafka", "avro", "raw")
    check_registry(None, "to_kafka", "json")
    for given_format, reason in [
        ("json", r"registry=\) does not apply to format='json'"),
        (AvroFormat("int"), "give the registry to the format, as in AvroFormat"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            check_registry("http://host", "to_kafka", given_format)


def test_a_null_that_the_schema_of_the_program_does_not_allow_is_bad() -> None:
    """By the rules of Avro, also within a list. Nulls of records around it are no reason."""
    item = record(("v", ["null", "int"]), name="Item")
    written_as = record(("x", ["null", "int"]), ("items", {"type": "array", "items": ["null", item]}))
    item = record(("v", "int"), name="Item")
    read_as = record(("x", "int"), ("items", {"type": "array", "items": ["null", item]}))
    rows = [
        {"x": 1, "items": [None, {"v": 2}]},
        {"x": None, "items": []},
        {"x": 3, "items": [{"v": None}]},
        {"x": 4, "items": []},
    ]
    with registry_server() as registry:
        number = registry.add("orders-value", written_as)
        decoder = AvroFormat(read_as, registry=registry.url).for_reading(None, READING).decoder()
        found = decoder.decode(binary([with_id(number, each) for each in written(written_as, *rows)]))
    assert found.batch.to_pylist() == [rows[0], rows[3]]
    assert found.bad == {
        1: "field 'x' is null, which the program's schema does not allow; make the field nullable there",
        2: "field 'items[].v' is null, which the program's schema does not allow; make the field nullable there",
    }


def test_nulls_and_symbols_that_the_schema_does_not_have_make_a_row_bad() -> None:
    """At any depth, with the field."""
    schema = record(
        ("e", {"type": "enum", "name": "E", "symbols": ["A"]}),
        ("l", {"type": "array", "items": ["null", record(("i", "int"), name="I")]}),
        (
            "d",
            ["null", {"type": "fixed", "name": "D", "size": 1, "logicalType": "decimal", "precision": 2, "scale": 0}],
        ),
    )
    columns = AvroFormat(schema).for_reading(None, READING).schema
    good = {"e": "A", "l": [None, {"i": 1}], "d": decimal.Decimal(99)}
    rows = [good, good | {"e": "B"}, good | {"l": [{"i": None}]}, good | {"e": None}, good, good | {"l": None}]
    batch = pa.RecordBatch.from_pylist(rows, columns)
    found = AvroFormat(schema).for_writing(columns, WRITING).encoder().encode(batch)
    assert found.payloads.to_pylist() == written(schema, good, good)
    assert found.bad == {
        1: "field 'e' is not a symbol of its enum",
        2: "field 'l[].i' is null, which the schema does not allow",
        3: "column 'e' is not nullable, and has no value",
        5: "column 'l' is not nullable, and has no value",
    }


def test_fields_without_a_column_are_written_with_their_default() -> None:
    """Also in a slice of a batch, of which only the own values count."""
    schema = record(("x", "string"), ("y", {"type": "array", "items": "string"}))
    schema["fields"].append({"name": "z", "type": ["null", "int"], "default": None})
    schema["fields"].append({"name": "w", "type": {"type": "map", "values": "long"}, "default": {"k": 7}})
    batch = pa.record_batch({"x": ["a", "b", "c"], "y": [["1"], [], ["2", "3"]]}).slice(1)
    found = AvroFormat(schema).for_writing(batch.schema, WRITING).encoder().encode(batch)
    whole = {"z": None, "w": {"k": 7}}
    assert found.payloads.to_pylist() == written(
        schema, {"x": "b", "y": []} | whole, {"x": "c", "y": ["2", "3"]} | whole
    )


def test_a_map_with_a_key_twice_is_not_written() -> None:
    """Readers would keep one of both entries."""
    maps = [[("a", 1), ("b", 1)], None, [("a", 1), ("b", 2), ("a", 2)], []]
    batch = pa.RecordBatch.from_arrays([pa.array(maps, pa.map_(pa.string(), pa.int64()))], names=["m"])
    found = AvroFormat(avro_schema_of(batch.schema, "R")).for_writing(batch.schema, WRITING).encoder().encode(batch)
    assert len(found.payloads) == 3
    assert found.bad == {2: "field 'm' is a map with a key twice, of which readers keep one; make keys unique"}


@pytest.mark.parametrize(
    ("kind", "good", "wrong", "reason"),
    [
        (pa.timestamp("s"), 1, 2**62, "column 'x': 4611686018427387904 as timestamp[s] does not fit timestamp[ms]"),
        (pa.date64(), 0, 2**62, "column 'x': 4611686018427387904 as date64[ms] does not fit date32[day]"),
        (pa.date64(), 0, 86_400_001, "column 'x': 86400001 as date64[ms] does not fit date32[day]"),
        (pa.time64("us"), 1, 86_400_000_000, "field 'x' is not a time between 00:00 and 24:00"),
        (pa.time32("ms"), 1, -1, "field 'x' is not a time between 00:00 and 24:00"),
        (pa.time32("s"), 1, 90_000, "field 'x' is not a time between 00:00 and 24:00"),
    ],
)
def test_a_row_with_a_time_that_avro_has_not_is_bad(kind: pa.DataType, good: int, wrong: int, reason: str) -> None:
    """The reason has the column and the count, because Python has no such time."""
    stored = pa.array([good, wrong, None, good], pa.int32() if kind.bit_width == 32 else pa.int64())
    rows = pa.record_batch([pa.Array.from_buffers(kind, len(stored), stored.buffers())], names=["x"])
    found = AvroFormat().for_writing(rows.schema, WRITING).encoder().encode(rows)
    assert list(found.bad) == [1]
    assert unmarked(found.bad[1]).startswith(reason)
    assert len(found.payloads) == 3


@pytest.mark.parametrize("name", ["__value_schema_id", "__key_schema_id"])
def test_a_schema_id_in_a_header_is_refused(name: str) -> None:
    """The payload has none then. Its first bytes may be the id of another schema, here of the topic's own."""
    columns = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.int64()), ("d", pa.int64()), ("e", pa.int64())])
    schema = record(*((each, "long") for each in columns.names))
    with registry_server() as registry:
        assert registry.add("orders-value", schema) == 1
        registry.add("orders-key", "string")
        form = AvroFormat(registry=registry.url)
        keys = form.for_reading(None, PayloadUse("from_kafka", ("orders",), "key"))
        reads = RecordFormat(form.for_reading(columns, READING), key=keys)
        assert set(reads.parts) == {"value", "key", "headers"}
        row = written(schema, dict.fromkeys(columns.names, 5))[0]
        misleading = with_id(1, row)
        key = b"\0" + (2).to_bytes(4, "big") + b"\x02k"
        parts = {
            "value": pa.array([misleading] * 3, pa.binary()),
            "key": pa.array([key] * 3, pa.binary()),
            "headers": headers_array([(), [("other", b"x"), (name, b"\1" + bytes(16))], [("other", None)]]),
        }
        records = Records("orders", 0, np.arange(3), parts)
        batch, letters = RecordReader(reads, "side").rows(records)
    assert batch is not None
    assert batch["a"].to_pylist() == [5, 5]
    assert letters is not None
    assert letters["offset"].to_pylist() == [1]
    assert letters["error"][0].as_py().startswith(f"the id of its schema is in the header {name!r}, which is not")
    assert letters.column(0).to_pylist() == [misleading]
