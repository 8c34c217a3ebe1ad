"""CPU time of `from_kafka` with JSON beside a plain consume loop with Arrow's JSON, from Apache Kafka itself.

    python benchmarks/kafka_json.py [--records 600000] [--rounds 5]

One broker is started on loopback (needs Java and Maven, as the tests do), with one topic of four partitions. In each
round the same records are read several times, one after the other: by a loop that consumes them, by a loop that also
parses them (`pyarrow.json`, all records of a call at once, no checks), by the reader of `from_kafka` with all its
checks, and by a whole job at parallelism 1, which drops the rows. They use the same settings of the client, with
`fetch.queue.backoff.ms=10`; "defaults of the client" is the loop without it. The processor time is that of all threads
of this process, the client's among them, because other work on the machine would count in wall time. The ratios are
those of the medians of the loop that parses, and of the reader and the job: over 1 these take less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.json as pa_json
from common import describe_machine
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import KafkaServer, run_kafka

import tidegate as tg
from tidegate.connectors.formats.json import JsonRead
from tidegate.connectors.kafka.options import Topics, client_settings
from tidegate.connectors.kafka.records import RecordFormat
from tidegate.connectors.kafka.source import KafkaSource

TOPIC, PARTITIONS = "records", 4
CONSUMED = 10_000
SCHEMA = pa.schema(
    {
        "id": pa.int64(),
        "user": pa.string(),
        "price": pa.float64(),
        "at": pa.int64(),
        "active": pa.bool_(),
        "city": pa.string(),
        "note": pa.string(),
        "tags": pa.string(),
    }
)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--records", type=int, default=600_000)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--defaults", action="store_true", help="also consume with the client's own defaults")
    given = arguments.parse_args()
    console = Console()
    describe_machine(console)
    with tempfile.TemporaryDirectory() as folder, run_kafka(Path(folder)) as server:
        record_bytes = fill(server, given.records)
        console.print(f"{given.records:,} records of {record_bytes:.0f} bytes in {PARTITIONS} partitions")
        readings: dict[str, Callable[[], None]] = {
            "consume": lambda: plain(server.servers, given.records, parsed=False),
            "consume, parse": lambda: plain(server.servers, given.records, parsed=True),
            "reader": lambda: ours(server.servers, given.records),
            "job": lambda: job(server.servers, given.records, Path(folder)),
        }
        if given.defaults:
            readings["consume, defaults of the client"] = lambda: plain(
                server.servers, given.records, parsed=False, backoff_ms=1_000
            )
        seconds: dict[str, list[float]] = {name: [] for name in readings}
        walls: dict[str, list[float]] = {name: [] for name in readings}
        for number in range(given.rounds + 1):
            for name, read in readings.items():
                started_ns = time.process_time_ns()
                begun_ns = time.perf_counter_ns()
                read()
                # Round 0 compiles kernels and fills caches.
                if number:
                    seconds[name].append((time.process_time_ns() - started_ns) / 1e9)
                    walls[name].append((time.perf_counter_ns() - begun_ns) / 1e9)
                    console.print(f"round {number}, {name}: {seconds[name][-1]:.2f} s of CPU, {walls[name][-1]:.2f} s")
    table = Table("reading", "CPU s, median", "ns a record", "records/s, wall")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        rate = given.records / statistics.median(walls[name])
        table.add_row(name, f"{median:.2f}", f"{median * 1e9 / given.records:,.0f}", f"{rate:,.0f}")
    console.print(table)
    for name in ("reader", "job"):
        console.print(f"CPU of consume, parse / {name}: {medians['consume, parse'] / medians[name]:.2f}")


def fill(server: KafkaServer, records: int) -> float:
    """Write the topic. Returns the bytes of a record at the mean."""
    server.create(TOPIC, PARTITIONS)
    producer = Producer({"bootstrap.servers": server.servers, "linger.ms": 50, "log_level": 0})
    total_bytes = 0
    for number in range(records):
        value = json.dumps(
            {
                "id": number,
                "user": f"user-{number % 1_000:05d}",
                "price": number * 0.25,
                "at": 1_700_000_000_000 + number,
                "active": number % 2 == 0,
                "city": ("Berlin", "Paris", "Rome")[number % 3],
                "note": f"a note of some length about order {number}",
                "tags": "alpha,beta,gamma,delta",
            }
        ).encode()
        total_bytes += len(value)
        producer.produce(TOPIC, value=value, partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.flush()
    assert producer.flush() == 0
    return total_bytes / records


def plain(servers: str, records: int, parsed: bool, backoff_ms: int = 10) -> None:
    """Consume all records, and parse them or not."""
    consumer = Consumer(client_settings(servers, {"group.id": "plain", "fetch.queue.backoff.ms": backoff_ms}))
    consumer.assign([TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
    rows = 0
    while rows < records:
        messages = consumer.consume(CONSUMED, timeout=0.1)
        values = [message.value() or b"" for message in messages if message.error() is None]
        if parsed and values:
            data = b"\n".join(values)
            rows += pa_json.read_json(
                pa.BufferReader(data),
                pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                pa_json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
            ).num_rows
        else:
            rows += len(values)
    assert rows == records
    consumer.close()


def ours(servers: str, records: int) -> None:
    """Read all records as a task does."""
    source = KafkaSource(servers, Topics((TOPIC,)), RecordFormat(JsonRead(SCHEMA)), end="latest")
    splits, reader, rows = list(source.splits()), source.reader(), 0
    while splits:
        before, left = rows, []
        for split in splits:
            result = reader.read(split, 0, CONSUMED)
            rows += 0 if result.batch is None else result.batch.num_rows
            if not result.at_end:
                left.append(split if result.payload is None else replace(split, payload=result.payload))
        splits = left
        if rows == before:
            time.sleep(0.005)
    assert rows == records
    reader.close()


def job(servers: str, records: int, folder: Path) -> None:
    """Read all records in a job, with a checkpoint a second."""
    checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / "checkpoints"))
    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_kafka(servers, topics=[TOPIC], value=SCHEMA, end="latest", uid="records")
        rows = stream.filter(pl.col("id") == records - 1).collect()
        running = env.execute("kafka", checkpoints=checkpoints, progress="off")
        assert running.wait("10min") == "finished"
    assert len(rows.to_arrow()) == 1


if __name__ == "__main__":
    main()
