"""Events of Debezium in Avro become the same newest versions of rows as in JSON, and changes become such events."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest
from debezium_events import FILES, TABLE, avro_events, avro_schema, events, every_type
from payload_arrays import binary
from registry_server import RegistryServer, registry_server

from tidegate.connectors.formats.debezium import DebeziumDecoder, DebeziumFormat
from tidegate.connectors.formats.format import DecodedRecords, PayloadUse, RowChanges
from tidegate.connectors.formats.row_versions import UNCHANGED
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import unmarked

TOPIC = "shop.public.items"
READING = PayloadUse("from_kafka", (TOPIC,), keys=("id",))


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    """A registry of its own."""
    with registry_server() as found:
        yield found


def _decoder(registry: RegistryServer, columns: pa.Schema = TABLE, **options: Any) -> DebeziumDecoder:
    return DebeziumDecoder(columns, ("id",), DebeziumFormat(registry=registry.url, **options))


def _event_schema(**row: Any) -> dict[str, Any]:
    """The schema of events of rows with some columns, by type."""
    fields = [{"name": name, "type": kind} for name, kind in row.items()]
    source = [{"name": "snapshot", "type": ["null", "string"]}, {"name": "ts_ms", "type": "long"}]
    return {
        "type": "record",
        "name": "Envelope",
        "namespace": TOPIC,
        "fields": [
            {"name": "before", "type": ["null", {"type": "record", "name": "Value", "fields": fields}]},
            {"name": "after", "type": ["null", "Value"]},
            {"name": "source", "type": {"type": "record", "name": "Source", "fields": source}},
            {"name": "op", "type": "string"},
        ],
    }


def _payload(registry: RegistryServer, subject: str, schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    out.write(b"\0" + registry.add(subject, schema).to_bytes(4, "big"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(copy.deepcopy(schema)), value)
    return out.getvalue()


def _event(registry: RegistryServer, schema: Any, op: str, after: Any = None, before: Any = None) -> bytes:
    source = {"snapshot": "false", "ts_ms": 5}
    return _payload(registry, f"{TOPIC}-value", schema, {"before": before, "after": after, "source": source, "op": op})


def _key(registry: RegistryServer, **key: Any) -> bytes:
    kinds = {int: "int", str: "string"}
    fields = [{"name": name, "type": kinds[type(value)]} for name, value in key.items()]
    schema = {"type": "record", "name": "Key", "namespace": TOPIC, "fields": fields}
    return _payload(registry, f"{TOPIC}-key", schema, key)


def test_real_events_are_the_same_rows_in_avro_and_in_json(registry: RegistryServer) -> None:
    """Snapshot rows, creates, updates, deletes and their tombstones, a change of key, a truncate."""
    options: dict[str, Any] = {"truncates": "apply", "metadata": ("op", "snapshot", "timestamp")}
    expected = DebeziumDecoder(TABLE, ("id",), DebeziumFormat(**options))
    in_json = events(FILES[1])
    rows = expected.decode_records(binary([each.value for each in in_json]), binary([each.key for each in in_json]))
    in_avro = avro_events(registry, TOPIC)
    decoder = _decoder(registry, **options)
    found = decoder.decode_records(binary([each.value for each in in_avro]), binary([each.key for each in in_avro]))
    assert not found.bad
    assert found.sources is not None
    assert rows.sources is not None
    assert found.sources.tolist() == rows.sources.tolist()
    assert found.batch.equals(rows.batch)
    assert found.batch.num_rows == 19
    # How records are cut into batches does not matter.
    apart = [decoder.decode_records(binary([each.value]), binary([each.key])).batch for each in in_avro]
    assert [row for batch in apart for row in batch.to_pylist()] == found.batch.to_pylist()


def test_columns_come_from_the_schema_of_the_topic(registry: RegistryServer) -> None:
    """With the types of their forms. Without a schema in the registry they must be given."""
    form = DebeziumFormat(registry=registry.url)
    with pytest.raises(ConfigurationError, match="no schema in the registry; give the columns"):
        form.for_reading(None, READING)
    avro_events(registry, TOPIC)
    found = form.for_reading(None, READING)
    assert pa.schema(list(found.schema)[:-2]) == TABLE
    schema = avro_schema(
        {
            "type": "struct",
            "name": f"{TOPIC}.Envelope",
            "fields": [
                {
                    "field": part,
                    "type": "struct",
                    "optional": True,
                    "name": f"{TOPIC}.Value",
                    "fields": [
                        {"field": "id", "type": "int32"},
                        {"field": "t", "type": "int64", "name": "io.debezium.time.NanoTime", "optional": True},
                        {"field": "t3", "type": "int32", "name": "org.apache.kafka.connect.data.Time"},
                        {"field": "ts", "type": "int64", "name": "io.debezium.time.Timestamp"},
                        {"field": "d", "type": "int64", "name": "io.debezium.time.MicroDuration"},
                        {
                            "field": "days",
                            "type": "array",
                            "items": {"type": "int32", "name": "io.debezium.time.Date", "optional": True},
                        },
                    ],
                }
                for part in ("before", "after")
            ]
            + [{"field": "op", "type": "string"}],
        }
    )
    registry.add("more-value", schema)
    found = form.for_reading(None, PayloadUse("from_kafka", ("more",), keys=("id",)))
    assert dict(zip(found.schema.names, found.schema.types, strict=True)) | {"id": None} == {
        "id": None,
        "t": pa.time64("ns"),
        "t3": pa.time32("ms"),
        "ts": pa.timestamp("ms"),
        "d": pa.duration("us"),
        "days": pa.list_(pa.date32()),
        "row_kind": pa.string(),
        UNCHANGED: pa.list_(pa.string()),
    }
    columns = pa.schema([("id", pa.int32()), ("days", pa.list_(pa.timestamp("us")))])
    with pytest.raises(ConfigurationError, match=r"'days' has elements of which each is int \(io.debezium.time.Date\)"):
        form.for_reading(columns, PayloadUse("from_kafka", ("more",), keys=("id",)))


def _changed(name: str, kind: pa.DataType) -> pa.Schema:
    return pa.schema([(each.name, kind if each.name == name else each.type) for each in TABLE])


@pytest.mark.parametrize(
    ("columns", "keys", "reason"),
    [
        (_changed("price", pa.decimal128(10, 3)), "id", "'price' has 2 decimal places in the event, and 3"),
        (_changed("price", pa.binary()), "id", "use pa.decimal128"),
        (_changed("name", pa.decimal128(10, 2)), "id", "'name' is string in the event"),
        (_changed("at", pa.timestamp("us")), "id", "'at' is a string in the event"),
        (_changed("day", pa.timestamp("ms")), "id", r"'day' is int \(io.debezium.time.Date\) in the event"),
        (_changed("big", pa.date32()), "id", "'big' is long in the event, and date32"),
        (_changed("big", pa.timestamp("us")), "id", "'big' is long in the event, and timestamp"),
        (_changed("big", pa.string()), "id", "'big' is int64 in the event, and string in value="),
        (TABLE.append(pa.field("new", pa.string())), "id", "'new' is missing in the schema"),
        (TABLE, "name", r"keys of topic .* has the columns \['id'\], and keys= has \['name'\]"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_when_the_job_is_submitted(
    columns: pa.Schema, keys: str, reason: str, registry: RegistryServer
) -> None:
    """And a record with such a schema that comes later is bad, with the same reason."""
    record = avro_events(registry, TOPIC)[1]  # Its values are null, so that only the schema shows the difference.
    form = DebeziumFormat(registry=registry.url)
    with pytest.raises(ConfigurationError, match=rf"newest schema of the .*{reason}"):
        form.for_reading(columns, PayloadUse("from_kafka", (TOPIC,), keys=(keys,)))
    found = DebeziumDecoder(columns, (keys,), form).decode_records(binary([record.value]), binary([record.key]))
    assert not found.batch.num_rows
    assert list(found.bad) == [0]


def test_a_topic_of_plain_rows_is_refused(registry: RegistryServer) -> None:
    """Events without an envelope are read, in the form that ExtractNewRecordState writes."""
    registry.add(f"{TOPIC}-value", {"type": "record", "name": "Value", "fields": [{"name": "id", "type": "int"}]})
    with pytest.raises(ConfigurationError, match="not an event of Debezium with its envelope"):
        DebeziumFormat(registry=registry.url).for_reading(TABLE, READING)


def test_schemas_of_a_topic_may_change(registry: RegistryServer) -> None:
    """A column that is added, widened or dropped, within one batch. Columns that are not read may be anything."""
    first = _event_schema(id="int", v="int", odd=["null", "int", "string"])
    second = _event_schema(more={"type": "fixed", "name": "f", "size": 2}, v="long", id="int")
    third = _event_schema(id="int")
    values = [
        _event(registry, second, "c", {"id": 1, "v": 2**40, "more": b"ab"}),
        _event(registry, first, "c", {"id": 2, "v": 7, "odd": "x"}),
        _event(registry, third, "c", {"id": 3}),
        _event(registry, second, "d", None, {"id": 4, "v": 0, "more": b"ab"}),
    ]
    columns = pa.schema([("id", pa.int32()), ("v", pa.int64())])
    found = _decoder(registry, columns).decode_records(
        binary(values), binary([_key(registry, id=at) for at in (1, 2, 3, 4)])
    )
    assert list(found.bad) == [2]
    assert "field 'v' is missing in the schema of the event, which has ['id']" in unmarked(found.bad[2])
    assert found.sources is not None
    assert found.sources.tolist() == [0, 1, 3]
    assert found.batch.column("id").to_pylist() == [1, 2, 4]
    assert found.batch.column("v").to_pylist() == [2**40, 7, None]
    assert found.batch.column("row_kind").to_pylist() == ["+U", "+U", "-D"]


def test_each_bad_event_is_named_alone(registry: RegistryServer) -> None:
    """Good events around it are read."""
    schema = _event_schema(id="int", v=["null", "string"], n=["null", "int"])
    columns = pa.schema([("id", pa.int32()), ("v", pa.string()), ("n", pa.int16())])
    row = {"id": 1, "v": "x", "n": 1}
    good, key = _event(registry, schema, "c", row), _key(registry, id=1)

    def fault(value: bytes, of: bytes | None = key) -> str:
        found = _decoder(registry, columns).decode_records(binary([good, value, good]), binary([key, of, key]))
        assert found.batch.column("n").to_pylist() == [1, 1]
        assert list(found.bad) == [1]
        return unmarked(found.bad[1])

    assert "begins with the byte 0x7b" in fault(b'{"op": "c"}')
    assert "no schema with the id 99" in fault(b"\0\0\0\0\x63" + good[5:])
    assert "the record ends within" in fault(good[:-3])
    assert "field 'op' is 'm'" in fault(_event(registry, schema, "m", row))
    assert "field 'after' is missing in an event with op 'u'" in fault(_event(registry, schema, "u"))
    assert "the table was truncated" in fault(_event(registry, schema, "t"), None)
    assert "the record has no key" in fault(good, None)
    assert "the key of the record: it begins with the byte 0x7b" in fault(good, b'{"id":1}')
    assert "field 'id' is 1 in the row, and 2 in the key" in fault(good, _key(registry, id=2))
    assert "has the columns ['id', 'x'], and keys= has ['id']" in fault(good, _key(registry, id=1, x="y"))
    assert "column 'n': 70000 does not fit int16" in fault(_event(registry, schema, "c", row | {"n": 70_000}))


def test_values_that_the_database_did_not_write_are_listed(registry: RegistryServer) -> None:
    """Text, bytes and arrays have a placeholder."""
    mark = "__debezium_unavailable_value"
    arrays = {"n": {"type": "array", "items": "int"}, "h": {"type": "map", "values": ["null", "string"]}}
    schema = _event_schema(id="int", t="string", b="bytes", a={"type": "array", "items": "string"}, **arrays)
    listed = [("a", pa.list_(pa.string())), ("n", pa.list_(pa.int32())), ("h", pa.map_(pa.string(), pa.string()))]
    columns = pa.schema([("id", pa.int32()), ("t", pa.string()), ("b", pa.binary()), *listed])
    whole = {"t": mark, "b": mark.encode(), "a": [mark], "n": list(mark.encode()), "h": {mark: mark}}
    values = [
        _event(registry, schema, "u", {"id": 1, **whole}),
        _event(registry, schema, "u", {"id": 2, "t": f"about {mark}", "b": b"", "a": [], "n": [1], "h": {mark: "x"}}),
    ]
    found = _decoder(registry, columns).decode_records(
        binary(values), binary([_key(registry, id=1), _key(registry, id=2)])
    )
    assert not found.bad
    assert found.batch.column(UNCHANGED).to_pylist() == [["t", "b", "a", "n", "h"], None]
    assert [found.batch.to_pylist()[0][name] for name in "tbanh"] == [None] * 5
    assert found.batch.to_pylist()[1]["n"] == [1]


@pytest.mark.parametrize(("mode", "kind", "value"), [("string", "string", "1234.50"), ("double", "double", 1234.5)])
def test_decimals_may_be_text_or_numbers(mode: str, kind: str, value: object, registry: RegistryServer) -> None:
    """Decimals are read in each form of `decimal.handling.mode`. A number with more digits is bad."""
    schema = _event_schema(id="int", v=kind)
    columns = pa.schema([("id", pa.int32()), ("v", pa.decimal128(10, 2))])
    more = "0.125" if mode == "string" else 0.125
    values = [_event(registry, schema, "c", {"id": 1, "v": each}) for each in (value, more)]
    found = _decoder(registry, columns, decimals=mode).decode_records(
        binary(values), binary([_key(registry, id=1)] * 2)
    )
    assert found.batch.column("v").to_pylist() == [Decimal("1234.50")]
    assert "field 'v': '0.125' is not a value of type decimal128(10, 2)" in unmarked(found.bad[1])


def test_times_are_read_exactly(registry: RegistryServer) -> None:
    """Zoned timestamps are text. One that is none is bad, and so is a time after midnight."""
    zoned = {"type": "string", "connect.name": "io.debezium.time.ZonedTimestamp"}
    of_day = {"type": "int", "logicalType": "time-millis"}
    schema = _event_schema(id="int", z=["null", zoned], t=of_day)
    columns = pa.schema([("id", pa.int32()), ("z", pa.timestamp("us", "UTC")), ("t", pa.time32("ms"))])
    rows: list[tuple[Any, int]] = [("2026-01-02T03:04:05.000006+01:00", 0), ("soon", 0), (None, 86_400_000)]
    written = json.loads(json.dumps(schema).replace('"logicalType": "time-millis"', '"other": ""'))
    payloads = [
        _event(registry, schema, "c", {"id": 1, "z": z, "t": time(0)})[:5]
        + _event(registry, written, "c", {"id": 1, "z": z, "t": t})[5:]
        for z, t in rows
    ]
    found = _decoder(registry, columns).decode_records(binary(payloads), binary([_key(registry, id=1)] * 3))
    assert found.batch.column("z").to_pylist() == [datetime(2026, 1, 2, 2, 4, 5, 6, UTC)]
    assert "field 'z': 'soon' is not a value" in unmarked(found.bad[1])
    assert "not a time of a day" in found.bad[2]


def _written(
    registry: RegistryServer, rows: pa.RecordBatch, before: list[int], after: list[int], **options: Any
) -> tuple[list[bytes], list[bytes]]:
    """The values and the keys of changes of rows."""
    form = DebeziumFormat(registry=registry.url, **options)
    values = form.for_writing(rows.schema, PayloadUse("to_kafka", (TOPIC,), keys=("id",))).encoder()
    changes = RowChanges(np.array(before), np.array(after))
    found = values.encode_changes(rows, changes, None, TOPIC)
    assert not found.bad
    of_key = rows.take(pa.array(changes.rows)).select(["id"])
    keys = form.for_writing(of_key.schema, PayloadUse("to_kafka", (TOPIC,), "key", ("id",))).encoder()
    made = keys.encode(of_key, TOPIC)
    assert not made.bad
    return found.payloads.to_pylist(), made.payloads.to_pylist()


def _all_types() -> tuple[pa.Schema, dict[str, Any]]:
    columns, row = every_type()
    for name, kind in (("by_name", pa.map_(pa.string(), pa.int64())), ("small", pa.int16())):
        columns = columns.append(pa.field(name, kind))
    return columns, row | {"by_name": [("a", 1), ("b", None)], "small": -32_768, "f": float("-inf")}


def _read(registry: RegistryServer, columns: pa.Schema, values: list[bytes], keys: list[bytes]) -> DecodedRecords:
    return _decoder(registry, columns).decode_records(binary(values), binary(keys))


def test_events_that_are_written_are_read_as_the_same_rows(registry: RegistryServer) -> None:
    """Values of every type of an event come back, in structs and lists, with nulls, and in slices, also by fastavro."""
    columns, row = _all_types()
    empty = dict.fromkeys(row) | {"id": ""}
    rows = pa.RecordBatch.from_pylist([row, empty, row | {"id": "c"}, empty | {"id": "d"}], schema=columns).slice(1)
    values, keys = _written(registry, rows, [-1, -1, -1], [0, 1, 2])
    found = _read(registry, columns, values, keys)
    assert not found.bad
    assert found.batch.select(columns.names).equals(rows)
    # The schema alone gives columns that hold the same values.
    derived = DebeziumFormat(registry=registry.url).for_reading(None, PayloadUse("from_kafka", (TOPIC,), keys=("id",)))
    again = derived.decoder().decode_records(binary(values), binary(keys))
    assert not again.bad
    assert again.batch.schema.field("wide").type == pa.decimal128(38, 10)
    assert again.batch.column("many").to_pylist() == rows.column("many").to_pylist()
    assert again.batch.column("ns").equals(rows.column("ns"))
    schema = json.loads(registry.schemas[int.from_bytes(values[0][1:5], "big")]["schema"])
    event: Any = fastavro.schemaless_reader(io.BytesIO(values[1][5:]), fastavro.parse_schema(schema), None)
    assert event["op"] == "c"
    assert event["before"] is None
    assert event["after"]["zoned"] == "1969-01-02T03:04:05.000006Z"
    assert event["after"]["wide"] == row["wide"]
    assert event["after"]["day"] == 20_455
    assert (event["source"]["name"], event["source"]["table"]) == ("shop", "items")


def test_events_have_the_shape_that_debezium_gives_them(registry: RegistryServer) -> None:
    """Written events have the rows before and after, and the names and types of the columns in the schema."""
    records = [each for each in avro_events(registry, TOPIC) if each.event is not None and each.event["op"] != "t"]
    found = _decoder(registry).decode_records(
        binary([each.value for each in records]), binary([each.key for each in records])
    )
    rows = found.batch.select(TABLE.names)
    newest: dict[int, int] = {}
    before, after = [], []
    for number, each in enumerate(records):
        assert each.event is not None
        key = (each.event["after"] or each.event["before"])["id"]
        before.append(newest.get(key, -1))
        after.append(-1 if each.event["op"] == "d" else number)
        newest |= {key: number}
        if each.event["op"] == "d":
            del newest[key]
    values, keys = _written(registry, rows, before, after)

    def schema_of(payload: bytes | None) -> Any:
        return json.loads(registry.schemas[int.from_bytes((payload or b"")[1:5], "big")]["schema"])

    def event_of(payload: bytes | None) -> Any:
        parsed = fastavro.parse_schema(schema_of(payload))
        return fastavro.schemaless_reader(io.BytesIO((payload or b"")[5:]), parsed, None)

    for value, each in zip(values, records, strict=True):
        theirs, ours = event_of(each.value), event_of(value)
        assert (ours["before"], ours["after"]) == (theirs["before"], theirs["after"])
        assert ours["op"] == theirs["op"].replace("r", "c")
        assert set(ours["source"]) <= set(theirs["source"])
    theirs, ours = schema_of(records[0].value), schema_of(values[0])
    assert ours["connect.name"] == f"{TOPIC}.Envelope"
    assert schema_of(keys[0])["connect.name"] == f"{TOPIC}.Key"

    def types(schema: Any) -> dict[str, Any]:
        row = schema["fields"][0]["type"][1]
        found = {}
        for each in row["fields"]:
            kind = each["type"][1] if isinstance(each["type"], list) else each["type"]
            # Debezium has a name for JSON, which is a string for tidegate.
            named = isinstance(kind, dict) and kind.get("connect.name") != "io.debezium.data.Json"
            found[each["name"]] = kind if not isinstance(kind, dict) or named else kind["type"]
        return found

    assert types(ours) == types(theirs)


def test_what_events_in_avro_cannot_hold_is_refused(registry: RegistryServer) -> None:
    """Before a schema is registered. A null in the key is bad."""
    form = DebeziumFormat(registry=registry.url)
    use = PayloadUse("to_kafka", (TOPIC,), keys=("id",))
    for name, kind, reason in (
        ("v", pa.uint64(), "column 'v' is uint64, which Avro does not have"),
        ("v", pa.timestamp("s"), "counts times in ms, us or ns"),
        ("v", pa.map_(pa.string(), pa.timestamp("us", "UTC")), "only structs and lists"),
        ("v", pa.decimal128(2, 5), "a scale that Avro does not have"),
        ("two words", pa.int32(), "'two words' has a name that Avro does not allow"),
        ("v", pa.struct([("1st", pa.int32())]), "'v.1st' has a name that Avro does not allow"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            form.for_writing(pa.schema([("id", pa.int64()), (name, kind)]), use)
    assert not registry.subjects
    registry.incompatible.add(f"{TOPIC}-value")
    with pytest.raises(ConfigurationError, match="incompatible"):
        form.for_writing(pa.schema([("id", pa.int64())]), use)
    columns = pa.schema([("id", pa.int64())])
    keys = form.for_writing(columns, PayloadUse("to_kafka", (TOPIC,), "key", ("id",))).encoder()
    found = keys.encode(pa.RecordBatch.from_pylist([{"id": 1}, {"id": None}], schema=columns), TOPIC)
    assert len(found.payloads) == 1
    assert "'id' is null" in unmarked(found.bad[1])


def test_names_of_topics_become_names_of_avro(registry: RegistryServer) -> None:
    """Names get the letters with which Debezium replaces those that Avro does not allow."""
    form = DebeziumFormat(registry=registry.url)
    form.for_writing(pa.schema([("id", pa.int64())]), PayloadUse("to_kafka", ("my-shop.1st.items",), keys=("id",)))
    (schema,) = registry.schemas.values()
    assert json.loads(schema["schema"])["connect.name"] == "my_shop._1st.items.Envelope"


def _counts(kind: pa.DataType, *counts: int) -> pa.Array:
    """Dates and times by their counts, which Arrow does not check."""
    stored = pa.array(counts, pa.int32() if kind.bit_width == 32 else pa.int64())
    return pa.Array.from_buffers(kind, len(stored), stored.buffers())


@pytest.mark.parametrize(
    ("kind", "good", "wrong", "reason"),
    [
        (pa.date64(), 86_400_000, 2**62, "has a year outside 0 to 9999"),
        (pa.date64(), 86_400_000, 86_400_001, "is a date with a time of day"),
        (pa.timestamp("us", "UTC"), 1, 253_402_300_800_000_000, "has a year outside 0 to 9999"),
        (pa.timestamp("s", "UTC"), 1, -(2**63), "has a year outside 0 to 9999"),
        (pa.time64("us"), 1, 86_400_000_000, "is not a time between 00:00 and 24:00"),
        (pa.time32("ms"), 1, -1, "is not a time between 00:00 and 24:00"),
    ],
)
@pytest.mark.parametrize("encoding", ["json", "avro"])
def test_a_row_with_a_time_that_no_event_has_is_bad(
    kind: pa.DataType, good: int, wrong: int, reason: str, encoding: str, registry: RegistryServer
) -> None:
    """With the name of the column. The other rows are written, also when the time is in a list."""
    form = DebeziumFormat(registry=registry.url if encoding == "avro" else None)
    for column, name in ((_counts(kind, good, wrong, good), "v"), (None, "v.at")):
        values = column if column is not None else _counts(kind, good, wrong, good)
        if column is None:
            values = pa.StructArray.from_arrays([values], fields=[pa.field("at", kind)])
            values = pa.ListArray.from_arrays(pa.array([0, 1, 3], pa.int32()), values)
        rows = pa.record_batch([pa.array(range(len(values)), pa.int64()), values], names=["id", "v"])
        encoder = form.for_writing(rows.schema, PayloadUse("to_kafka", (TOPIC,), keys=("id",))).encoder()
        count = len(values)
        found = encoder.encode_changes(rows, RowChanges(np.full(count, -1), np.arange(count)), None, TOPIC)
        assert list(found.bad) == [1]
        assert found.bad[1].startswith(f"column {name!r} {reason}")
        assert len(found.payloads) == count - 1


def test_a_key_with_a_time_that_no_event_has_is_bad(registry: RegistryServer) -> None:
    """The other keys are written."""
    rows = pa.record_batch([_counts(pa.date64(), 0, 2**62, 86_400_000)], names=["id"])
    for form in (DebeziumFormat(), DebeziumFormat(registry=registry.url)):
        keys = form.for_writing(rows.schema, PayloadUse("to_kafka", (TOPIC,), "key", ("id",))).encoder()
        found = keys.encode(rows, TOPIC)
        assert list(found.bad) == [1]
        assert "column 'id' has a year outside 0 to 9999" in unmarked(found.bad[1])
        assert len(found.payloads) == 2


_INFINITE = 9_223_372_036_825_200_000


@pytest.mark.parametrize(
    ("kind", "form", "column", "good", "infinities"),
    [
        ("long", "io.debezium.time.MicroTimestamp", pa.timestamp("us"), 1, [_INFINITE, -9_223_372_036_832_400_000]),
        ("long", "io.debezium.time.Timestamp", pa.timestamp("ms"), 1, [_INFINITE // 1_000, -9_223_372_036_832_400]),
        ("int", "io.debezium.time.Date", pa.date32(), 1, [2_147_472_000, -2_147_472_000]),
        (
            "string",
            "io.debezium.time.ZonedTimestamp",
            pa.timestamp("us", "UTC"),
            "2020-01-01T00:00:00Z",
            ["+292278994-08-16T23:00:00Z", "-292275055-05-16T16:47:04Z", "+10000-01-01T00:00:00Z"],
        ),
    ],
)
def test_an_infinity_of_the_database_is_bad(
    kind: str, form: str, column: pa.DataType, good: Any, infinities: list[Any], registry: RegistryServer
) -> None:
    """Debezium writes it as a time that no database has, in JSON and in Avro. It can be read without its meaning."""
    schema = _event_schema(id="int", v={"type": kind, "connect.name": form})
    values = [good, *infinities, good]
    avro = [_event(registry, schema, "c", {"id": number, "v": value}) for number, value in enumerate(values)]
    keys = [_key(registry, id=number) for number in range(len(values))]
    texts = [
        json.dumps({"before": None, "after": {"id": number, "v": value}, "source": {}, "op": "c"}).encode()
        for number, value in enumerate(values)
    ]
    ids = [json.dumps({"id": number}).encode() for number in range(len(values))]
    columns = pa.schema([("id", pa.int32()), ("v", column)])
    for is_typed, decoder, events_, keys_ in (
        (True, _decoder(registry, columns), avro, keys),
        (False, DebeziumDecoder(columns, ("id",), DebeziumFormat()), texts, ids),
    ):
        found = decoder.decode_records(binary(events_), binary(keys_))
        assert sorted(found.bad) == list(range(1, len(values) - 1))
        assert found.batch["id"].to_pylist() == [0, len(values) - 1]
        assert all("v'" in reason for reason in found.bad.values())
        if is_typed:
            wire = {"long": "int64", "int": "int32", "string": "string"}[kind]
            assert f"read the column as pa.{wire}()" in unmarked(found.bad[1])
    plain = {"long": pa.int64(), "int": pa.int32(), "string": pa.string()}[kind]
    found = _decoder(registry, pa.schema([("id", pa.int32()), ("v", plain)])).decode_records(binary(avro), binary(keys))
    assert found.batch["v"].to_pylist() == values
    assert not found.bad
