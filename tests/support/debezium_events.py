"""The events of `tests/support/debezium`, and the table that they are of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

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
