"""Jobs that write keys and values in a format to Kafka, and read them back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka_server import KafkaServer
from local_jobs import NO_RESTART, config, local
from registry_server import registry_server

import tidegate as tg

SCHEMA = pa.schema([("k", pa.string()), ("x", pa.int64())])
ROWS: list[dict[str, Any]] = [{"k": "a", "x": 1}, {"k": "b,\"'", "x": None}, {"k": None, "x": -3}]


def written_and_read(
    kafka: KafkaServer, folder: Path, topic: str, writing: dict[str, Any], reading: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows that a job reads of a topic to which another job wrote ROWS."""
    with local() as env:
        rows = env.from_rows(ROWS, schema=SCHEMA)
        rows.to_kafka(kafka.servers, topic=topic, create=1, delivery="at_least_once", uid="out", **writing)
        job = env.execute("out", checkpoints=config(folder / "c"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    with local() as env:
        found = env.from_kafka(kafka.servers, topics=[topic], end="latest", **reading).collect()
        job = env.execute("in", checkpoints=config(folder / "d"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    return sorted(found.to_arrow().to_pylist(), key=lambda row: ROWS.index({"k": row["k"], "x": row["x"]}))


def test_rows_go_through_a_topic_in_avro(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """With keys and values of a registry, which gives the reader its columns."""
    with registry_server("me", "secret") as registry:
        access = tg.SchemaRegistry(registry.url, user="me", password="secret")
        form = {"format": "avro", "key_format": "avro", "registry": access}
        rows = written_and_read(kafka_server, tmp_path, "formats-avro", {**form, "key": ["k"]}, form)
        assert sorted(registry.subjects) == ["formats-avro-key", "formats-avro-value"]
    assert rows == [row | {"kafka_key": {"k": row["k"]}} for row in ROWS]


@pytest.mark.parametrize("name", ["csv", "json"])
def test_rows_go_through_a_topic(kafka_server: KafkaServer, tmp_path: Path, name: str) -> None:
    """In formats without a registry. The key is the bytes of its column."""
    reading = {"format": name, "value": SCHEMA, "key": "string"}
    rows = written_and_read(kafka_server, tmp_path, f"formats-{name}", {"format": name, "key": "k"}, reading)
    assert rows == [row | {"kafka_key": row["k"]} for row in ROWS]


def test_rows_go_through_a_topic_in_json_schema(kafka_server: KafkaServer, tmp_path: Path) -> None:
    """The reader gets its columns from the schema that the writer registered."""
    with registry_server() as registry:
        form = {"format": "json_schema", "registry": registry.url}
        rows = written_and_read(kafka_server, tmp_path, "formats-json-schema", form, form)
    assert rows == ROWS
