"""Protobuf as a format of payloads: compared with Google's library, with message indexes, evolved, and broken."""

from __future__ import annotations

import base64
import pickle
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from payload_arrays import binary
from registry_server import registry_server

from tidegate.connectors.formats.format import PayloadUse
from tidegate.connectors.formats.protobuf import ProtobufFormat
from tidegate.storage.errors import ConfigurationError

pytest.importorskip("ptars", reason="needs pip install 'tidegate[protobuf]'")

from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
    timestamp_pb2,
    wrappers_pb2,
)
from google.protobuf import message as message_module

READING = PayloadUse("from_kafka", ("orders",))
WRITING = PayloadUse("to_kafka", ("orders",))
KIND = descriptor_pb2.FieldDescriptorProto
PLAIN: dict[int, tuple[str, st.SearchStrategy[Any]]] = {
    KIND.TYPE_INT32: ("int32", st.integers(-(2**31), 2**31 - 1)),
    KIND.TYPE_SINT64: ("int64", st.integers(-(2**63), 2**63 - 1)),
    KIND.TYPE_FIXED32: ("uint32", st.integers(0, 2**32 - 1)),
    KIND.TYPE_UINT64: ("uint64", st.integers(0, 2**64 - 1)),
    KIND.TYPE_DOUBLE: ("double", st.floats(allow_nan=False).map(lambda each: each + 0.0)),
    KIND.TYPE_FLOAT: ("float", st.floats(width=32, allow_nan=False).map(lambda each: each + 0.0)),
    KIND.TYPE_BOOL: ("bool", st.booleans()),
    KIND.TYPE_STRING: ("string", st.text(max_size=4)),
    KIND.TYPE_BYTES: ("bytes", st.binary(max_size=4)),
}


def field(name: str, number: int, kind: int = KIND.TYPE_INT32, repeated: bool = False, **more: Any) -> Any:
    """A field of a message. `more`: other settings of its descriptor, such as type_name."""
    return KIND(
        name=name, number=number, type=kind, label=KIND.LABEL_REPEATED if repeated else KIND.LABEL_OPTIONAL, **more
    )


def message(name: str, *fields: Any, **more: Any) -> Any:
    """The descriptor of a message."""
    return descriptor_pb2.DescriptorProto(name=name, field=fields, **more)


def file_of(*messages: Any, name: str = "shop.proto", imports: tuple[str, ...] = ()) -> Any:
    """A file that declares some messages."""
    return descriptor_pb2.FileDescriptorProto(
        name=name, package="shop", syntax="proto3", message_type=messages, dependency=imports
    )


def classes_of(*files: Any) -> dict[str, Any]:
    """The classes of all messages in files, by their names."""
    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    for each in files:
        pool.Add(each)
    names = [f"shop.{each.name}" for file in files for each in file.message_type]
    names += [f"shop.{each.name}.{n.name}" for file in files for each in file.message_type for n in each.nested_type]
    return {name.removeprefix("shop."): _class(pool, name) for name in names}


def _class(pool: Any, name: str) -> Any:
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


ORDER_FILE = file_of(
    message("Head", field("x", 1)),
    message(
        "Order",
        field("id", 1, KIND.TYPE_INT64),
        field("state", 2, KIND.TYPE_ENUM, type_name=".shop.Order.State"),
        field("line", 3, KIND.TYPE_MESSAGE, type_name=".shop.Order.Line"),
        field("lines", 4, KIND.TYPE_MESSAGE, True, type_name=".shop.Order.Line"),
        field("at", 5, KIND.TYPE_MESSAGE, type_name=".google.protobuf.Timestamp"),
        field("left", 6, KIND.TYPE_INT64, oneof_index=0),
        field("right", 7, KIND.TYPE_STRING, oneof_index=0),
        field("note", 8, KIND.TYPE_MESSAGE, type_name=".google.protobuf.StringValue"),
        field("counts", 9, KIND.TYPE_MESSAGE, True, type_name=".shop.Order.CountsEntry"),
        nested_type=[
            message("Line", field("item", 1, KIND.TYPE_STRING)),
            message(
                "CountsEntry",
                field("key", 1, KIND.TYPE_STRING),
                field("value", 2, KIND.TYPE_INT32),
                options=descriptor_pb2.MessageOptions(map_entry=True),
            ),
        ],
        enum_type=[
            descriptor_pb2.EnumDescriptorProto(
                name="State",
                value=[
                    descriptor_pb2.EnumValueDescriptorProto(name=name, number=n)
                    for name, n in [("NEW", 0), ("SENT", 4)]
                ],
            )
        ],
        oneof_decl=[descriptor_pb2.OneofDescriptorProto(name="side")],
    ),
    imports=("google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"),
)
CLASSES = classes_of(ORDER_FILE)
Order = CLASSES["Order"]


def order(number: int) -> Any:
    """An order with a value in every field."""
    made = Order(id=number, state=4, left=0)
    made.line.item = "a"
    made.lines.add(item="b")
    made.at.FromMicroseconds(1_700_000_000_000_000 + number)
    made.note.value = ""
    made.counts["k"] = 2
    return made


def with_id(schema_id: int, indexes: bytes, payload: bytes) -> bytes:
    """A payload in the wire format."""
    return b"\0" + schema_id.to_bytes(4, "big") + indexes + payload


def registered(file: Any) -> str:
    """A file as a registry returns it."""
    return base64.b64encode(file.SerializeToString()).decode()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rows_are_what_googles_library_reads(data: st.DataObject) -> None:
    """Any fields, with and without presence, and repeated; and what the format writes, it reads as the same."""
    fields: list[Any] = []
    values: dict[str, Any] = {}
    oneofs: list[Any] = []
    for number in range(1, data.draw(st.integers(1, 5)) + 1):
        kind = data.draw(st.sampled_from(list(PLAIN)))
        form = data.draw(st.sampled_from(["implicit", "optional", "repeated"]))
        name, strategy = f"f{number}", PLAIN[kind][1]
        if form == "optional":
            fields.append(field(name, number, kind, oneof_index=len(oneofs), proto3_optional=True))
            oneofs.append(descriptor_pb2.OneofDescriptorProto(name=f"_{name}"))
            values[name] = st.none() | strategy
        else:
            fields.append(field(name, number, kind, form == "repeated"))
            values[name] = st.lists(strategy, max_size=3) if form == "repeated" else strategy
    made = classes_of(file_of(message("M", *fields, oneof_decl=oneofs)))["M"]
    rows = data.draw(st.lists(st.fixed_dictionaries(values), max_size=4))
    messages = [made(**row) for row in rows]
    read = ProtobufFormat(made).for_reading(None, READING)
    found = read.decoder().decode(binary([each.SerializeToString() for each in messages]))
    assert found.bad == {}
    assert found.batch.schema == read.schema
    assert found.batch.to_pylist() == rows
    back = ProtobufFormat(made).for_writing(found.batch.schema, WRITING).encoder().encode(found.batch)
    assert back.bad == {}
    assert [made.FromString(payload) for payload in back.payloads.to_pylist()] == messages


def test_nested_messages_enums_maps_and_times() -> None:
    """In both directions. A message without a field is not a message with an empty one."""
    messages = [order(1), Order(), Order(right="")]
    read = ProtobufFormat(Order).for_reading(None, READING)
    found = pickle.loads(pickle.dumps(read)).decoder().decode(binary([each.SerializeToString() for each in messages]))
    assert found.bad == {}
    first, second, third = found.batch.drop_columns(["at"]).to_pylist()
    assert first == {
        "id": 1,
        "state": "SENT",
        "line": {"item": "a"},
        "lines": [{"item": "b"}],
        "left": 0,
        "right": None,
        "note": "",
        "counts": [("k", 2)],
    }
    empty = {
        "id": 0,
        "state": "NEW",
        "line": None,
        "lines": [],
        "left": None,
        "right": None,
        "note": None,
        "counts": [],
    }
    assert (second, third) == (empty, empty | {"right": ""})
    assert found.batch.column("at").cast(pa.int64()).to_pylist() == [1_700_000_000_000_001_000, None, None]
    write = ProtobufFormat(Order).for_writing(found.batch.schema, WRITING)
    back = pickle.loads(pickle.dumps(write)).encoder().encode(found.batch)
    assert back.bad == {}
    assert [Order.FromString(payload) for payload in back.payloads.to_pylist()] == messages


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_broken_bytes_are_bad_and_their_neighbours_are_not(data: st.DataObject) -> None:
    """A broken message is bad, or has the value that Google's library reads."""
    payloads = [order(number).SerializeToString() for number in range(3)]
    at = data.draw(st.integers(0, 2))
    cut = data.draw(st.integers(0, len(payloads[at])))
    broken = payloads[at][:cut] + data.draw(st.binary(max_size=3)) + payloads[at][cut + data.draw(st.integers(0, 2)) :]
    found = (
        ProtobufFormat(Order)
        .for_reading(pa.schema([("id", pa.int64())]), READING)
        .decoder()
        .decode(binary([*payloads[:at], broken, *payloads[at + 1 :]]))
    )
    rest = [number for number in range(3) if number != at]
    if found.bad:
        assert list(found.bad) == [at]
        assert found.batch.to_pydict() == {"id": rest}
    else:
        ids = found.batch.column("id").to_pylist()
        assert [each for number, each in enumerate(ids) if number != at] == rest
        # ptars passes over groups without a look at their end, which Google's library has.
        with suppress(message_module.DecodeError):
            assert ids[at] == Order.FromString(broken).id


def test_messages_that_were_merged_have_their_last_values() -> None:
    """The last member of a oneof counts, and the last entry of each key of a map, also in nested messages."""
    first = Order(id=1, left=5, counts={"a": 1, "b": 2}).SerializeToString()
    second = Order(right="x", counts={"a": 3}).SerializeToString()
    plain = Order(id=2, left=7).SerializeToString()
    reading = ProtobufFormat(Order).for_reading(None, READING)
    found = reading.decoder().decode(binary([plain, first + second, second + first]))
    assert found.bad == {}
    rows = found.batch.to_pylist()
    assert [(row["id"], row["left"], row["right"]) for row in rows] == [(2, 7, None), (1, None, "x"), (1, 5, None)]
    assert [dict(row["counts"]) for row in rows] == [{}, {"a": 3, "b": 2}, {"a": 1, "b": 2}]
    assert [len(row["counts"]) for row in rows] == [0, 2, 2]


MAPPED_FILE = file_of(
    message(
        "Mapped",
        field("lines", 1, KIND.TYPE_MESSAGE, True, type_name=".shop.Mapped.LinesEntry"),
        nested_type=[
            message("Line", field("item", 1, KIND.TYPE_STRING)),
            message(
                "LinesEntry",
                field("key", 1, KIND.TYPE_STRING),
                field("value", 2, KIND.TYPE_MESSAGE, type_name=".shop.Mapped.Line"),
                options=descriptor_pb2.MessageOptions(map_entry=True),
            ),
        ],
    ),
    name="mapped.proto",
)


def test_an_entry_of_a_map_may_have_no_value() -> None:
    """Then it is an empty message. With an unknown field in it, the record is bad and the records around it are not."""
    mapped = classes_of(MAPPED_FILE)["Mapped"]
    good = mapped(lines={"b": mapped.Line(item="x")}).SerializeToString()
    without = bytes([1 << 3 | 2, 3, 1 << 3 | 2, 1]) + b"a"
    unknown = bytes([1 << 3 | 2, 2, 9 << 3, 1])
    found = ProtobufFormat(mapped).for_reading(None, READING).decoder().decode(binary([good, without, unknown, good]))
    assert [dict(row["lines"]) for row in found.batch.to_pylist()] == [
        {"b": {"item": "x"}},
        {"a": {"item": ""}},
        {"b": {"item": "x"}},
    ]
    assert list(found.bad) == [2]
    assert "an entry of a map has no value" in found.bad[2]


def test_a_map_with_a_key_twice_is_not_written() -> None:
    """Protobuf would keep one of both entries."""
    columns = pa.schema([("counts", pa.map_(pa.string(), pa.int32()))])
    maps = [[("a", 1), ("b", 1)], [("a", 1), ("a", 2)], []]
    encoder = ProtobufFormat(Order).for_writing(columns, WRITING).encoder()
    found = encoder.encode(pa.RecordBatch.from_arrays([pa.array(maps, columns.field(0).type)], schema=columns))
    assert [dict(Order.FromString(each).counts) for each in found.payloads.to_pylist()] == [{"a": 1, "b": 1}, {}]
    assert found.bad == {1: "field 'counts' is a map with a key twice, of which Protobuf keeps one; make keys unique"}


def test_times_that_the_unit_cannot_hold_are_bad() -> None:
    """In nanoseconds after the year 2262. Other units drop digits."""
    far, fine = order(1), order(2)
    far.at.seconds = 253_402_300_799
    fine.at.nanos = 1_001
    payloads = [each.SerializeToString() for each in (far, fine)]
    found = ProtobufFormat(Order).for_reading(
        pa.schema([("id", pa.int64()), ("at", pa.timestamp("ns", "UTC"))]), READING
    )
    decoded = found.decoder().decode(binary(payloads))
    assert decoded.batch.column("id").to_pylist() == [2]
    assert "field 'at' has a time that timestamp[ns, tz=UTC] cannot hold" in decoded.bad[0]
    micros = ProtobufFormat(Order, timestamp_unit="us").for_reading(None, READING).decoder().decode(binary(payloads))
    assert micros.batch.column("at").cast(pa.int64()).to_pylist() == [253_402_300_799_000_001, 1_700_000_000_000_001]


def test_payloads_of_a_registry_name_their_message() -> None:
    """By indexes behind the header, for each schema; another message and broken indexes are bad."""
    with registry_server() as registry:
        number = registry.add("orders-value", registered(ORDER_FILE), "PROTOBUF")
        other = registry.add(
            "other", registered(file_of(message("Order", field("id", 1, KIND.TYPE_INT64)))), "PROTOBUF"
        )
        body = order(7).SerializeToString()
        payloads = [
            with_id(number, b"\2\2", body),
            with_id(number, b"\0", CLASSES["Head"](x=1).SerializeToString()),
            with_id(other, b"\0", body),
            with_id(number, b"\4\2\0", b""),
            with_id(number, b"\2", b""),
            with_id(number, b"\2\x10", b""),
            with_id(99, b"\0", b""),
            with_id(number, b"\2\2", b"\x08"),
        ]
        read = ProtobufFormat("shop.Order", registry=registry.url).for_reading(None, READING)
        found = pickle.loads(pickle.dumps(read)).decoder().decode(binary(payloads))
        assert found.batch.column("id").to_pylist() == [7, 7]
        assert {number: reason.partition(": failed")[0] for number, reason in found.bad.items()} == {
            1: "it is message shop.Head, and not shop.Order",
            3: "it is message shop.Order.Line, and not shop.Order",
            4: "its message indexes are cut, or too many",
            5: "it is message number [8], which its schema does not have, and not shop.Order",
            6: "the schema registry has no schema with the id 99",
            7: "it is not a message of the schema",
        }
        assert ProtobufFormat(registry=registry.url).for_reading(None, READING).schema.names == ["x"], (
            "the first message"
        )


def test_schemas_evolve_by_the_numbers_of_fields() -> None:
    """New and dropped fields are fine. Another type makes the records of a schema bad, and refuses the newest one."""
    old = file_of(message("Order", field("nr", 1), field("gone", 9)))
    new = file_of(message("Order", field("id", 1, KIND.TYPE_INT64), field("name", 2, KIND.TYPE_STRING)))
    bad = file_of(message("Order", field("id", 1, KIND.TYPE_STRING)))
    with registry_server() as registry:
        ids = [registry.add("orders-value", registered(each), "PROTOBUF") for each in (bad, old, new)]
        read = ProtobufFormat(registry=registry.url).for_reading(None, READING)
        record = classes_of(old)["Order"](nr=5, gone=6).SerializeToString()
        found = read.decoder().decode(binary([with_id(schema_id, b"\0", record) for schema_id in ids]))
        assert found.batch.to_pylist() == [{"id": 5, "name": ""}, {"id": 5, "name": ""}]
        assert "field 'id' (number 1) was written with another type" in found.bad[0]
        registry.subjects["orders-value"].append(ids[0])
        with pytest.raises(ConfigurationError, match="was written with another type"):
            ProtobufFormat(classes_of(new)["Order"], registry=registry.url).for_reading(None, READING)


@pytest.mark.parametrize(
    ("written", "read", "value", "found"),
    [
        ("INT32", "INT64", -7, -7),
        ("UINT32", "INT64", 2**31 + 1, 2**31 + 1),
        ("BOOL", "UINT64", True, 1),
        ("SINT32", "SINT64", -(2**31), -(2**31)),
        ("STRING", "BYTES", "é", "é".encode()),
        ("INT64", "INT32", 2**40 + 5, None),
        ("INT64", "UINT64", -1, None),
        ("INT32", "UINT32", -1, None),
        ("UINT64", "INT64", 2**63, None),
        ("INT64", "BOOL", 6, None),
        ("SINT64", "SINT32", 2**40, None),
        ("FIXED32", "SFIXED32", 2**31, None),
        ("BYTES", "STRING", b"\xff", None),
    ],
)
def test_a_field_of_another_type_keeps_its_value_or_is_bad(
    written: str, read: str, value: object, found: object
) -> None:
    """Protobuf's own rules would cut the number to the bits of the type."""
    was, now = (file_of(message("Order", field("x", 1, getattr(KIND, f"TYPE_{name}")))) for name in (written, read))
    with registry_server() as registry:
        ids = [registry.add("orders-value", registered(each), "PROTOBUF") for each in (was, now)]
        decoder = ProtobufFormat(registry=registry.url).for_reading(None, READING).decoder()
        record = classes_of(was)["Order"](x=value).SerializeToString()
        rows = decoder.decode(binary([with_id(ids[0], b"\0", record)]))
    assert [row["x"] for row in rows.batch.to_pylist()] == ([] if found is None else [found])
    assert len(rows.bad) == (1 if found is None else 0)


def test_the_file_of_a_message_is_registered_or_found() -> None:
    """Under the subject of the strategy. Payloads are what Google's library writes, behind the header."""
    batch = pa.record_batch({"id": pa.array([3], pa.int64())})
    expected = Order(id=3).SerializeToString()
    with registry_server() as registry:
        form = ProtobufFormat(Order, registry=registry.url)
        write = pickle.loads(pickle.dumps(form)).for_writing(batch.schema, WRITING)
        number = registry.subjects["orders-value"][0]
        assert write.encoder().encode(batch, "orders").payloads.to_pylist() == [with_id(number, b"\2\2", expected)]
        for found in (
            ProtobufFormat("shop.Order", registry=registry.url, auto_register=False),
            ProtobufFormat(Order, registry=registry.url, auto_register=False),
        ):
            encoded = found.for_writing(batch.schema, WRITING).encoder().encode(batch, "orders")
            assert encoded.payloads.to_pylist() == [with_id(number, b"\2\2", expected)]
        ProtobufFormat(Order, registry=registry.url, subject="record").for_writing(batch.schema, WRITING)
        assert list(registry.subjects) == ["orders-value", "shop.Order"]
        changed = classes_of(file_of(message("Order", field("id", 1, KIND.TYPE_INT64))))["Order"]
        with pytest.raises(
            ConfigurationError, match=r"the newest schema of the topic is not the file of 'shop\.Order'"
        ):
            ProtobufFormat(changed, registry=registry.url, auto_register=False).for_writing(batch.schema, WRITING)


def test_a_row_that_a_message_cannot_hold_is_bad() -> None:
    """A null without presence, a symbol that is missing, and two members of a oneof, at any depth."""
    columns = ProtobufFormat(Order).for_reading(None, READING).schema
    good = {"id": 1, "state": "NEW", "lines": [], "counts": []}
    rows = [
        good,
        good | {"id": None},
        good | {"state": "LOST"},
        good | {"left": 1, "right": "x"},
        good | {"lines": [{"item": None}]},
        good | {"line": {"item": "x"}},
    ]
    batch = pa.RecordBatch.from_pylist(rows, columns)
    found = ProtobufFormat(Order).for_writing(columns, WRITING).encoder().encode(batch)
    assert found.payloads.to_pylist() == [
        Order(id=1).SerializeToString(),
        Order(id=1, line={"item": "x"}).SerializeToString(),
    ]
    assert sorted(found.bad) == [1, 2, 3, 4]
    assert found.bad[1] == "column 'id' is not nullable, and has no value"
    assert found.bad[2] == "field 'state' is not a symbol of shop.Order.State"
    assert found.bad[3] == "oneof side has 2 values, and may have one"
    assert found.bad[4].startswith("column 'lines'")


def test_what_has_no_columns_is_refused_by_name() -> None:
    """When the job is submitted, with the field; fields that are not read do no harm."""
    tree = message("Tree", field("x", 1), field("below", 2, KIND.TYPE_MESSAGE, type_name=".shop.Tree"))
    made = classes_of(file_of(tree))["Tree"]
    with pytest.raises(
        ConfigurationError, match=r"from_kafka\(format='protobuf'\): field 'below' is a 'shop.Tree' within"
    ):
        ProtobufFormat(made).for_reading(None, READING)
    found = ProtobufFormat(made).for_reading(pa.schema([("x", pa.int32())]), READING).decoder()
    assert found.decode(binary([made(x=3, below={"x": 4}).SerializeToString()])).batch.to_pylist() == [{"x": 3}]
    for columns, reason in [
        ({"nr": pa.int64()}, "the schema has no field 'nr'"),
        ({"x": pa.string()}, "column 'x' is int32"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            ProtobufFormat(made).for_reading(pa.schema(list(columns.items())), READING)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "give message="),
        ({"message": "shop.Order"}, "give message="),
        ({"message": int}, "give a class that protoc generated"),
        ({"descriptors": b""}, "name the message"),
        ({"message": Order, "timestamp_unit": "h"}, "give ns, us, ms or s"),
    ]
    for arguments, reason in wrong:
        with pytest.raises(ConfigurationError, match=reason):
            ProtobufFormat(**arguments)
    for descriptors, reason in [(b"\xff", "are not a FileDescriptorSet"), (b"", "have no message 'shop.Order'")]:
        with pytest.raises(ConfigurationError, match=reason):
            ProtobufFormat("shop.Order", descriptors).for_reading(None, READING)
    with registry_server() as registry:
        registry.add("orders-value", 'syntax = "proto3"; message Order {}', "PROTOBUF")
        with pytest.raises(ConfigurationError, match="as text, and not as descriptors"):
            ProtobufFormat(registry=registry.url).for_reading(None, READING)


def shop_with_imports(**of_item: Any) -> list[Any]:
    """Three files, of which each imports the one before, and the first a file of Google."""
    item = message(
        "Item", field("name", 1, KIND.TYPE_STRING, **of_item), field("at", 2, KIND.TYPE_MESSAGE, type_name=TIMESTAMP)
    )
    line = message("Line", field("item", 1, KIND.TYPE_MESSAGE, type_name=".shop.Item"))
    order = message("Order", field("line", 1, KIND.TYPE_MESSAGE, type_name=".shop.Line"))
    return [
        file_of(item, name="shop/item.proto", imports=("google/protobuf/timestamp.proto",)),
        file_of(line, name="shop/line.proto", imports=("shop/item.proto",)),
        file_of(order, name="order.proto", imports=("shop/line.proto",)),
    ]


TIMESTAMP = ".google.protobuf.Timestamp"


def test_files_that_are_imported_come_from_references() -> None:
    """And a sink writes with the registered schema, if it is the same."""
    files = shop_with_imports()
    made = classes_of(*files)["Order"]
    with registry_server() as registry:
        registry.add("items", registered(files[0]), "PROTOBUF")
        of_item = [{"name": "shop/item.proto", "subject": "items", "version": 1}]
        registry.add("lines", registered(files[1]), "PROTOBUF", of_item)
        of_line = [{"name": "shop/line.proto", "subject": "lines", "version": 1}]
        number = registry.add("orders-value", registered(files[2]), "PROTOBUF", of_line)
        values = {"line": {"item": {"name": "a", "at": "2026-01-01T00:00:00Z"}}}
        payload = with_id(number, b"\0", json_format.ParseDict(values, made()).SerializeToString())
        read = ProtobufFormat(registry=registry.url).for_reading(None, READING)
        found = read.decoder().decode(binary([payload]))
        assert found.batch["line"].to_pylist()[0]["item"]["name"] == "a"
        write = ProtobufFormat(made, registry=registry.url).for_writing(read.schema, WRITING)
        assert write.encoder().encode(found.batch, "orders").payloads.to_pylist() == [payload]
        assert list(registry.subjects) == ["items", "lines", "orders-value"]


def test_files_that_are_imported_are_registered_before() -> None:
    """Each once, under the path of its import, with its version as a reference; then they are found again."""
    files = shop_with_imports()
    made = classes_of(*files)["Order"]
    columns = ProtobufFormat(made).for_reading(None, READING).schema
    with registry_server() as registry:
        with pytest.raises(ConfigurationError, match=r"does not have /subjects/shop%2Fitem\.proto"):
            ProtobufFormat(made, registry=registry.url, subject="record", auto_register=False).for_writing(
                columns, WRITING
            )
        registry.add("shop/item.proto", registered(file_of(message("Other"))), "PROTOBUF")
        write = ProtobufFormat(made, registry=registry.url).for_writing(columns, WRITING)
        assert list(registry.subjects) == ["shop/item.proto", "shop/line.proto", "orders-value"]
        number = registry.subjects["orders-value"][0]
        assert registry.schemas[number]["references"] == [
            {"name": "shop/line.proto", "subject": "shop/line.proto", "version": 1}
        ]
        assert registry.schemas[registry.subjects["shop/line.proto"][0]]["references"] == [
            {"name": "shop/item.proto", "subject": "shop/item.proto", "version": 2}
        ]
        row = pa.RecordBatch.from_pylist([{"line": {"item": {"name": "a"}}}], columns)
        payload = write.encoder().encode(row, "orders").payloads[0].as_py()
        assert payload.startswith(with_id(number, b"\0", b""))
        read = ProtobufFormat(registry=registry.url).for_reading(None, READING)
        assert read.decoder().decode(binary([payload])).batch.to_pylist() == row.to_pylist()
        known = len(registry.schemas)
        for subject in ("topic", "record"):
            ProtobufFormat(made, registry=registry.url, subject=subject).for_writing(columns, WRITING)
        assert len(registry.schemas) == known
        assert registry.subjects["shop.Order"] == [number]


def test_a_changed_import_is_another_schema() -> None:
    """Its field would be lost for readers that have the registered one."""
    files, changed = shop_with_imports(), shop_with_imports(json_name="title")
    with registry_server() as registry:
        for each in (files, changed):
            made = classes_of(*each)["Order"]
            columns = ProtobufFormat(made).for_reading(None, READING).schema
            ProtobufFormat(made, registry=registry.url).for_writing(columns, WRITING)
        assert [len(versions) for versions in registry.subjects.values()] == [2, 2, 2]
