"""`to_kafka` beside a bare transactional produce loop: rows a second, and latency from topic to topic.

    python benchmarks/kafka_sink.py [--records 1000000] [--rounds 3] [--seconds 20]

One broker is started on loopback (needs Java and Maven, as the tests do).

- Throughput: in each round the same records of 204 bytes are written, in turn, by a loop of `Producer.produce` in one
  process, which commits a transaction every 500,000 records, and by jobs of one subtask on the local runtime (from
  memory, a checkpoint a second): raw values, and values that are encoded as JSON. Wall time from the first record to
  the last commit; for jobs from the first row to the end of the job, without submission. The loop is given its records
  as bytes.
- Latency: 10,000 records a second of 1,200 bytes go to a topic; a job copies them to another one. The value has the
  time at which it was sent. A reader of committed records takes the time at which it got the record.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import describe_machine
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import KafkaServer, run_kafka

import tidegate as tg
from tidegate.connectors.formats.json import JsonEncoder

PARTITIONS = 4
TRANSACTION_RECORDS = 500_000
RATE = 10_000
LATENCY_BYTES = 1_200
WARM_UP_S = 5.0


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--records", type=int, default=1_000_000)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=20.0)
    arguments.add_argument("--only", choices=["throughput", "latency"])
    arguments.add_argument("--interval", default="100ms", help="time between checkpoints, for latency (default 100ms)")
    arguments.add_argument("--folder", type=Path, help="for the broker and for checkpoints; a temporary one by default")
    given = arguments.parse_args()
    console = Console()
    describe_machine(console)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, run_kafka(Path(folder)) as server:
        if given.only != "latency":
            throughput(console, server, Path(folder), given.records, given.rounds)
        if given.only != "throughput":
            latencies(console, server, Path(folder), given.seconds, given.interval)


def throughput(console: Console, server: KafkaServer, folder: Path, records: int, rounds: int) -> None:
    """Measure rows a second."""
    rows = table_of(records)
    values = [b'{"id":%d,"user":"u%d","price":1.5,"note":"%s"}' % (n, n % 1000, b"x" * 150) for n in range(records)]
    raw = pa.table({"key": rows["user"], "value": pa.array(values, pa.binary())})
    keys = [key.encode() for key in rows["user"].to_pylist()]
    console.print(f"{records:,} records of {sum(map(len, values)) / records:.0f} bytes, {PARTITIONS} partitions")
    floors = {
        "bare loop": "bare loop",
        "bare loop, JSON": "bare loop, JSON",
        "to_kafka, raw": "bare loop",
        "to_kafka, JSON": "bare loop, JSON",
    }
    seconds: dict[str, list[float]] = {name: [] for name in floors}
    for number in range(rounds + 1):
        found = {
            "bare loop": bare_loop(server, f"bare-{number}", zip(values, keys, strict=True)),
            "bare loop, JSON": bare_loop(server, f"bare-json-{number}", encoded(rows, "user")),
            "to_kafka, raw": job_seconds(server, folder, f"raw-{number}", raw, "key", value="value", format="raw"),
            "to_kafka, JSON": job_seconds(server, folder, f"json-{number}", rows, "user"),
        }
        for name, took in found.items():
            # Round 0 compiles kernels and fills caches.
            if number:
                seconds[name].append(took)
                console.print(f"round {number}, {name}: {took:.2f} s")
    table = Table("", "records a second", "of the loop", "of the loop with bytes")
    medians = {name: statistics.median(rounds_s) for name, rounds_s in seconds.items()}
    for name, median in medians.items():
        ratio = medians[floors[name]] / median
        table.add_row(name, f"{records / median:,.0f}", f"{ratio:.2f}", f"{medians['bare loop'] / median:.2f}")
    console.print(table)


def table_of(records: int) -> pa.Table:
    """Return rows whose JSON has about 200 bytes."""
    return pa.table(
        {
            "id": np.arange(records),
            "user": [f"u{n % 1000}" for n in range(records)],
            "price": np.full(records, 1.5),
            "note": ["x" * 150] * records,
        }
    )


def encoded(rows: pa.Table, key: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield each row as JSON, with its key."""
    encoder = JsonEncoder()
    for batch in rows.to_batches(max_chunksize=20_000):
        keys = batch.column(key).cast(pa.binary()).to_pylist()
        yield from zip(encoder.encode(batch).payloads.to_pylist(), keys, strict=True)


def bare_loop(server: KafkaServer, topic: str, records: Iterable[tuple[bytes, bytes]]) -> float:
    """Write records (value, key) by a plain transactional loop; the seconds that it took."""
    server.create(topic, PARTITIONS)
    settings = {"queue.buffering.max.messages": 2 * TRANSACTION_RECORDS, "queue.buffering.max.kbytes": 2_097_151}
    producer = Producer(
        {
            **settings,
            "bootstrap.servers": server.servers,
            "transactional.id": topic,
            "partitioner": "murmur2_random",
            "transaction.timeout.ms": 120_000,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions(60)
    began = time.perf_counter()
    waiting = iter(records)
    for first in waiting:
        producer.begin_transaction()
        for value, key in chain([first], islice(waiting, TRANSACTION_RECORDS - 1)):
            producer.produce(topic, value, key)
        producer.commit_transaction(60)
    return time.perf_counter() - began


def job_seconds(server: KafkaServer, folder: Path, topic: str, rows: pa.Table, key: str, **options: object) -> float:
    """Write rows by a job of one subtask; the seconds from its first row to its end."""
    server.create(topic, PARTITIONS)
    first: list[float] = []

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not first:
            first.append(time.perf_counter())
        return batch

    with tg.StreamEnvironment.local(1) as env:
        stream = env.from_batches(rows, splits=1).map_batches(seen, schema=rows.schema)
        stream.to_kafka(server.servers, topic=topic, key=key, uid="kafka", **options)  # type: ignore[arg-type]
        storage = str(folder / f"checkpoints-{topic}")
        job = env.execute(topic, checkpoints=tg.CheckpointConfig(interval="1s", storage=storage), progress="off")
        assert job.wait("10min") == "finished"
    return time.perf_counter() - first[0]


def latencies(console: Console, server: KafkaServer, folder: Path, seconds: float, interval: str) -> None:
    """Measure the time from topic to topic."""
    table = Table("topic to topic", "records", "p50 ms", "p99 ms", "max ms")
    for delivery in ("exactly_once", "at_least_once"):
        found = latency(server, folder, delivery, interval, seconds)
        p50, p99 = np.percentile(found, [50, 99])
        table.add_row(f"{delivery}, {interval}", f"{len(found):,}", f"{p50:.0f}", f"{p99:.0f}", f"{max(found):.0f}")
    console.print(table)


def latency(server: KafkaServer, folder: Path, delivery: str, interval: str, seconds: float) -> list[float]:
    """Return the milliseconds that each record took, without those of the first seconds.

    The sender and the reader are processes of their own, so that they do not compete with the job for its interpreter.
    Their clock is the monotonic clock of the machine.
    """
    source, target = f"in-{delivery}", f"out-{delivery}"
    server.create(source, PARTITIONS)
    server.create(target, PARTITIONS)
    with tg.StreamEnvironment.local(1) as env:
        rows = env.from_kafka(
            server.servers, topics=[source], value="bytes", properties={"fetch.wait.max.ms": 5}, uid="in"
        )
        rows.select("value").to_kafka(
            server.servers, topic=target, value="value", format="raw", delivery=delivery, uid="out"  # type: ignore[arg-type]
        )  # fmt: skip
        storage = str(folder / f"checkpoints-{delivery}")
        job = env.execute(target, checkpoints=tg.CheckpointConfig(interval=interval, storage=storage))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, mp_context=spawn) as pool:
            read = pool.submit(read_latencies, server.servers, target, seconds + WARM_UP_S + 5.0)
            pool.submit(send_steadily, server.servers, source, seconds + WARM_UP_S).result()
            found = read.result()
        job.cancel()
    return found


def send_steadily(servers: str, topic: str, seconds: float, rate: int = RATE) -> None:
    """Send records at the rate, each with its time."""
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})
    began = time.perf_counter()
    filler = "x" * (LATENCY_BYTES - 40)
    sent = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        due = int(elapsed * rate)
        for _ in range(due - sent):
            producer.produce(topic, f"{time.perf_counter()!r} {int(elapsed > WARM_UP_S)} {filler}")
        sent = due
        producer.poll(0)
        time.sleep(0.001)
    assert producer.flush(30) == 0


def read_latencies(servers: str, topic: str, seconds: float) -> list[float]:
    """Read committed records for a while; how long each took."""
    found: list[float] = []
    settings = {"bootstrap.servers": servers, "group.id": "latency", "fetch.wait.max.ms": 5}
    until = time.perf_counter() + seconds
    with closing(Consumer({**settings, "isolation.level": "read_committed"})) as reader:
        reader.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in range(PARTITIONS)])
        while time.perf_counter() < until:
            messages = reader.consume(1_000, timeout=0.002)
            now = time.perf_counter()
            for message in messages:
                sent, measured, _ = (message.value() or b"").split(b" ", 2)
                if measured == b"1":
                    found.append(1_000 * (now - float(sent)))
    return found


if __name__ == "__main__":
    main()
