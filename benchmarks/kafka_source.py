"""CPU time of `from_kafka` with JSON and Avro beside a plain consume loop, from Apache Kafka itself.

    python benchmarks/kafka_source.py [--records 600000] [--rounds 5]

One broker is started on loopback (needs Java and Maven, as the tests do), with one topic of four partitions for each
format. In each round the same records are read several times, one after the other: by a loop that consumes them, by a
loop that also decodes them, by the reader of `from_kafka` with all its checks, and by a whole job at parallelism 1,
which drops the rows. The loop decodes JSON by `pyarrow.json`, all records of a call at once and without checks, and
Avro by tidegate's decoder, which is faster than a loop of fastavro. All use the same settings of the client, with
`fetch.queue.backoff.ms=10`; "defaults of the client" is the loop without it. The processor time is that of all threads
of this process, the client's among them, because other work on the machine would count in wall time. The ratios are
those of the medians of the loop that decodes, and of the reader and the job: over 1 these take less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from registry_server import registry_server

import tidegate as tg
from tidegate.connectors.formats.avro import AvroFormat
from tidegate.connectors.formats.format import Format, PayloadDecoder, PayloadEncoder, PayloadUse, ReadFormat
from tidegate.connectors.formats.json import JsonFormat, JsonRead
from tidegate.connectors.kafka.options import Topics, client_settings
from tidegate.connectors.kafka.records import RecordFormat
from tidegate.connectors.kafka.source import KafkaSource

USE = PayloadUse("benchmark", ("avro",))
PARTITIONS = 4
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
    with (
        tempfile.TemporaryDirectory() as folder,
        run_kafka(Path(folder)) as server,
        registry_server() as registry,
    ):
        avro = AvroFormat(registry=registry.url)
        encoders = {"json": JsonFormat().for_writing(SCHEMA, USE), "avro": avro.for_writing(SCHEMA, USE)}
        readings: dict[str, Callable[[], None]] = {}
        for topic, form in encoders.items():
            record_bytes = fill(server, topic, form.encoder(), given.records)
            console.print(f"{topic}: {given.records:,} records of {record_bytes:.0f} bytes in {PARTITIONS} partitions")
            reads = avro.for_reading(SCHEMA, USE) if topic == "avro" else JsonRead(SCHEMA)
            decode = partial(decode_avro, reads.decoder()) if topic == "avro" else parse_json
            readings |= {
                f"{topic}: consume": partial(plain, server.servers, topic, given.records, None),
                f"{topic}: consume, decode": partial(plain, server.servers, topic, given.records, decode),
                f"{topic}: reader": partial(ours, server.servers, topic, given.records, reads),
                f"{topic}: job": partial(
                    job, server.servers, topic, given.records, Path(folder), avro if topic == "avro" else JsonFormat()
                ),
            }
        if given.defaults:
            readings["consume, defaults of the client"] = partial(
                plain, server.servers, "json", given.records, None, backoff_ms=1_000
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
    for topic in encoders:
        for name in ("reader", "job"):
            ratio = medians[f"{topic}: consume, decode"] / medians[f"{topic}: {name}"]
            console.print(f"{topic}: CPU of consume, decode / {name}: {ratio:.2f}")


def fill(server: KafkaServer, topic: str, encoder: PayloadEncoder, records: int) -> float:
    """Write a topic. Returns the bytes of a record at the mean."""
    server.create(topic, PARTITIONS)
    producer = Producer({"bootstrap.servers": server.servers, "linger.ms": 50, "log_level": 0})
    total_bytes = 0
    for begin in range(0, records, CONSUMED):
        numbers = range(begin, min(begin + CONSUMED, records))
        rows = [
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
            for number in numbers
        ]
        values = encoder.encode(pa.RecordBatch.from_pylist(rows, SCHEMA), topic).payloads.to_pylist()
        for number, value in zip(numbers, values, strict=True):
            total_bytes += len(value)
            producer.produce(topic, value=value, partition=number % PARTITIONS)
        assert producer.flush() == 0
    return total_bytes / records


def parse_json(values: list[bytes]) -> int:
    """Parse JSON by Arrow. Returns the number of rows."""
    data = b"\n".join(values)
    rows: int = pa_json.read_json(
        pa.BufferReader(data),
        pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        pa_json.ParseOptions(explicit_schema=SCHEMA, unexpected_field_behavior="ignore"),
    ).num_rows
    return rows


def decode_avro(decoder: PayloadDecoder, values: list[bytes]) -> int:
    """Decode Avro. Returns the number of rows."""
    rows: int = decoder.decode(pa.array(values, pa.binary())).batch.num_rows
    return rows


def plain(
    servers: str, topic: str, records: int, decode: Callable[[list[bytes]], int] | None, backoff_ms: int = 10
) -> None:
    """Consume all records, and decode them or not."""
    consumer = Consumer(client_settings(servers, {"group.id": "plain", "fetch.queue.backoff.ms": backoff_ms}))
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    rows = 0
    while rows < records:
        messages = consumer.consume(CONSUMED, timeout=0.1)
        values = [message.value() or b"" for message in messages if message.error() is None]
        rows += len(values) if decode is None or not values else decode(values)
    assert rows == records
    consumer.close()


def ours(servers: str, topic: str, records: int, form: ReadFormat) -> None:
    """Read all records as a task does."""
    source = KafkaSource(servers, Topics((topic,)), RecordFormat(form), end="latest")
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


def job(servers: str, topic: str, records: int, folder: Path, form: Format) -> None:
    """Read all records in a job, with a checkpoint a second."""
    checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / "checkpoints"))
    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_kafka(servers, topics=[topic], value=SCHEMA, format=form, end="latest", uid="records")
        rows = stream.filter(pl.col("id") == records - 1).collect()
        running = env.execute("kafka", checkpoints=checkpoints, progress="off")
        assert running.wait("10min") == "finished"
    assert len(rows.to_arrow()) == 1


if __name__ == "__main__":
    main()
