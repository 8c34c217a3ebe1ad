"""The events of `tests/support/debezium`, and the table that they are of."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from registry_server import RegistryServer

FOLDER = Path(__file__).parent / "debezium"
FILES = ("events.jsonl", "events-with-schemas.jsonl")
TABLE = pa.schema(
    [
        ("id", pa.int32()),
        ("name", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("data", pa.string()),
        ("ok", pa.bool_()),
        ("big", pa.int64()),
        ("f", pa.float64()),
        ("raw", pa.binary()),
    ]
)


@dataclass(frozen=True)
class Event:
    """A record: key and value as they are in the topic, and the event of Debezium in it."""

    key: bytes | None
    value: bytes | None
    event: dict[str, Any] | None


def events(name: str) -> list[Event]:
    """The events of a file."""
    found = []
    for line in (FOLDER / name).read_text().splitlines():
        record = json.loads(line)
        event = None if record["value"] is None else json.loads(record["value"])
        key, value = (None if record[part] is None else record[part].encode() for part in ("key", "value"))
        found.append(Event(key, value, event if event is None else event.get("payload", event)))
    return found


def apply(rows: dict[int, dict[str, Any]], event: dict[str, Any] | None) -> None:
    """Change a table as the database did, with the values as they are written in the event."""
    if event is None:
        return
    if event["op"] == "t":
        rows.clear()
    elif event["op"] == "d":
        del rows[event["before"]["id"]]
    else:
        rows[event["after"]["id"]] = event["after"]


def avro_events(registry: RegistryServer, topic: str) -> list[Event]:
    """Returns the events of the file with schemas, in Avro with a registry, as Kafka Connect's AvroConverter writes
    them.
    """
    found = []
    for line in (FOLDER / FILES[1]).read_text().splitlines():
        record = json.loads(line)
        parts = [
            None if record[part] is None else _written(registry, f"{topic}-{part}", json.loads(record[part]))
            for part in ("key", "value")
        ]
        value = None if record["value"] is None else json.loads(record["value"])["payload"]
        found.append(Event(parts[0], parts[1], value))
    return found


def _written(registry: RegistryServer, subject: str, record: dict[str, Any]) -> bytes:
    schema = avro_schema(record["schema"])
    out = io.BytesIO()
    out.write(b"\0" + registry.add(subject, schema).to_bytes(4, "big"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), avro_value(record["schema"], record["payload"]))
    return out.getvalue()


_AVRO_TYPES = {
    "int8": "int",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float32": "float",
    "float64": "double",
    "float": "float",
    "double": "double",
    "boolean": "boolean",
    "string": "string",
    "bytes": "bytes",
}


def avro_schema(described: dict[str, Any], known: set[str] | None = None) -> Any:
    """Returns the schema that `AvroData.fromConnectSchema` makes of a schema of Kafka Connect."""
    known = set() if known is None else known
    kind, name = described["type"], described.get("name")
    found: dict[str, Any] = {}
    if kind == "struct":
        if name in known:
            return ["null", name] if described.get("optional") else name
        known.add(name)
        space, _, bare = name.rpartition(".")
        found = {"type": "record", "name": bare, "namespace": space, "fields": []}
        for each in described["fields"]:
            field = {"name": each["field"], "type": avro_schema(each, known)}
            if each.get("optional"):
                field["default"] = each.get("default")
            found["fields"].append(field)
    elif kind == "array":
        found = {"type": "array", "items": avro_schema(described["items"], known)}
    else:
        found = {"type": _AVRO_TYPES[kind]}
        if kind in ("int8", "int16"):
            found["connect.type"] = kind
    parameters = described.get("parameters")
    if name == "org.apache.kafka.connect.data.Decimal":
        precision = int(parameters.get("connect.decimal.precision", 64))
        found |= {"scale": int(parameters["scale"]), "precision": precision, "logicalType": "decimal"}
    for key, value in (("version", described.get("version")), ("parameters", parameters), ("name", name)):
        if value is not None:
            found[f"connect.{key}"] = value
    if "default" in described:
        found["connect.default"] = described["default"]
    plain = found["type"] if len(found) == 1 else found
    if not described.get("optional"):
        return plain
    return [plain, "null"] if described.get("default") is not None else ["null", plain]


def avro_value(described: dict[str, Any], value: Any) -> Any:
    """Returns a value of Connect's JSON as fastavro takes it."""
    if value is None:
        return None
    if described["type"] == "struct":
        return {each["field"]: avro_value(each, value[each["field"]]) for each in described["fields"]}
    if described["type"] == "array":
        return [avro_value(described["items"], each) for each in value]
    return base64.b64decode(value) if described["type"] == "bytes" else value


def every_type() -> tuple[pa.Schema, dict[str, Any]]:
    """Returns columns of every type of an event, whose key is `id`, and a row with a value in each."""
    inner = pa.struct([("n", pa.decimal128(5, 2)), ("d", pa.list_(pa.date32()))])
    columns = pa.schema(
        [
            ("id", pa.string()),
            ("ms", pa.timestamp("ms")),
            ("ns", pa.timestamp("ns")),
            ("zoned", pa.timestamp("us", "UTC")),
            ("day", pa.date64()),
            ("t", pa.time64("ns")),
            ("t3", pa.time32("ms")),
            ("long", pa.duration("us")),
            ("raw", pa.binary()),
            ("wide", pa.decimal128(38, 10)),
            ("more", inner),
            ("many", pa.list_(inner)),
            ("f", pa.float32()),
            ("flag", pa.bool_()),
        ]
    )
    nested = {"n": Decimal("-1.28"), "d": [date(2026, 1, 2), None]}
    row = {
        "id": 'a "quoted" \n key',
        "ms": datetime(2026, 1, 2, 3, 4, 5, 6_000),
        "ns": 1_234_567_890_123_456_789,
        "zoned": datetime(1969, 1, 2, 3, 4, 5, 6, UTC),
        "day": date(2026, 1, 2),
        "t": 86_399_999_999_999,
        "t3": time(1, 2, 3, 4_000),
        "long": timedelta(days=-3, microseconds=5),
        "raw": b"\x00\xff",
        "wide": Decimal("-1234567890123456789012345678.0123456789"),
        "more": nested,
        "many": [nested, None, {"n": None, "d": None}],
        "f": 1.5,
        "flag": False,
    }
    return columns, row
