"""CPU time of `from_kafka` with JSON beside a plain consume loop with Arrow's JSON, from Apache Kafka itself.

    python benchmarks/kafka_json.py [--records 600000] [--rounds 5]

One broker is started on loopback (needs Java and Maven, as the tests do), with one topic of four partitions. In each
round the same records are read three times, one after the other: by a loop that consumes them, by a loop that also
parses them (`pyarrow.json`, all records of a call at once, no checks), and by the reader of `from_kafka` with all its
checks. They use the same settings of the client. The processor time is that of all threads of this process, the
client's among them, because other work on the machine would count in wall time. The ratio is that of the medians of
the loop that parses and the reader: over 1 the reader takes less.
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

import pyarrow as pa
import pyarrow.json as pa_json
from common import describe_machine
from confluent_kafka import Consumer, Producer, TopicPartition
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import KafkaServer, run_kafka

from tidegate.connectors.kafka.client import client_settings
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
    given = arguments.parse_args()
    console = Console()
    describe_machine(console)
    with tempfile.TemporaryDirectory() as folder, run_kafka(Path(folder)) as server:
        record_bytes = fill(server, given.records)
        console.print(f"{given.records:,} records of {record_bytes:.0f} bytes in {PARTITIONS} partitions")
        readings: dict[str, Callable[[], None]] = {
            "consume": lambda: plain(server.servers, given.records, parsed=False),
            "consume, parse": lambda: plain(server.servers, given.records, parsed=True),
            "from_kafka": lambda: ours(server.servers, given.records),
        }
        seconds: dict[str, list[float]] = {name: [] for name in readings}
        for number in range(given.rounds + 1):
            for name, read in readings.items():
                started_ns = time.process_time_ns()
                read()
                # Round 0 compiles kernels and fills caches.
                if number:
                    seconds[name].append((time.process_time_ns() - started_ns) / 1e9)
                    console.print(f"round {number}, {name}: {seconds[name][-1]:.2f} s of CPU")
    table = Table("reading", "CPU s, median", "ns a record")
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, median in medians.items():
        table.add_row(name, f"{median:.2f}", f"{median * 1e9 / given.records:,.0f}")
    console.print(table)
    console.print(f"consume, parse / from_kafka: {medians['consume, parse'] / medians['from_kafka']:.2f}")


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


def plain(servers: str, records: int, parsed: bool) -> None:
    """Consume all records, and parse them or not."""
    consumer = Consumer(client_settings(servers, {"group.id": "plain"}))
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
    source = KafkaSource(servers, (TOPIC,), RecordFormat(SCHEMA), bounded=True)
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


if __name__ == "__main__":
    main()
