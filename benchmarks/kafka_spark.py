"""Measures one job from Kafka to Kafka by tidegate and by Spark Structured Streaming, in turns in one run.

    python benchmarks/kafka_spark.py [--records 1000000] [--rounds 2] [--seconds 15]

Needs Java and Maven, as the tests do; Spark's Kafka connector is fetched with Maven. Each engine is a process of its
own beside the broker:

    tidegate, exactly once     a checkpoint each second (throughput) or each 100 ms (latency)
    tidegate, at least once    the same checkpoints, and records are sent as they come
    Spark, at least once       the only guarantee of its Kafka sink; local[2], with the shortest trigger
    loop                       a floor: consume, parse by pyarrow, filter and encode by Polars, and produce in
                               transactions of a second, without any state to recover from

- Throughput: records are parsed as JSON, filtered, and written as JSON with a key. The job is warm when one transaction
  makes all records visible at once. Seconds from then until the last of them is visible in the output.
- Latency: 10,000 records a second of 1,200 bytes are copied, as in `kafka_sink.py`.

Exit code 1 if the output has not as many records as it must.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.json as pa_json
from common import describe_machine
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from kafka_server import KafkaServer, maven_jars, run_kafka
from kafka_sink import PARTITIONS, RATE, WARM_UP_S, read_latencies, send_steadily

import tidegate as tg

SPARK_JARS = "org.apache.spark:spark-sql-kafka-0-10_2.12:3.5.7"
WARM_RECORDS = 20_000
SETTLED_S = 3.0
STUCK_S = 300.0
VALUE = b'{"id":%d,"user":"u%d","price":%d.5,"note":"%s"}'
SCHEMA = {"id": int, "user": str, "price": float, "note": str}
Job = Callable[[str, str, str, str, Path, Event], None]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rate", type=int, default=RATE, help=f"records a second for latency (default {RATE})")
    parser.add_argument("--only", choices=["throughput", "latency"])
    parser.add_argument("--folder", type=Path, help="for the broker and for checkpoints; a temporary one by default")
    given = parser.parse_args()
    console = Console()
    describe_machine(console)
    engines: dict[str, Job] = {
        "tidegate, exactly once": partial(tidegate_job, "exactly_once"),
        "tidegate, at least once": partial(tidegate_job, "at_least_once"),
        "Spark, at least once": spark_job,
        "loop": loop_job,
    }
    rates: dict[str, list[float]] = {name: [] for name in engines}
    late: dict[str, list[float]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, run_kafka(Path(folder)) as server:
        for number in range(0 if given.only == "latency" else given.rounds):
            for which, (name, job) in enumerate(engines.items()):
                took_s = throughput(server, job, f"{which}-{number}", Path(folder), given.records)
                rates[name].append(given.records / took_s)
                console.print(f"round {number}, {name}: {given.records / took_s:,.0f} records a second")
        for which, (name, job) in enumerate(engines.items()):
            if given.only != "throughput" and name != "loop":
                late[name] = latency(server, job, f"late-{which}", Path(folder), given.seconds, given.rate)
    table = Table("", "records a second", "p50 ms", "p99 ms")
    for name in engines:
        rate = f"{statistics.median(rates[name]):,.0f}" if rates[name] else "-"
        p50, p99 = (f"{ms:.0f}" for ms in np.percentile(late[name], [50, 99])) if late[name] else ("-", "-")
        table.add_row(name, rate, p50, p99)
    console.print(table)
    return 0


def throughput(server: KafkaServer, job: Job, name: str, folder: Path, records: int) -> float:
    """Return the seconds that a job took for records that were there at once."""
    source, target = f"in-{name}", f"out-{name}"
    with running(server, job, "transform", source, target, folder / name):
        write(server, source, WARM_RECORDS)
        until_visible(server, target, WARM_RECORDS // 2)
        write(server, source, records)
        began = time.perf_counter()
        ended = until_visible(server, target, (WARM_RECORDS + records) // 2)
    found = count(server, target)
    if found != (WARM_RECORDS + records) // 2:
        raise RuntimeError(f"{name}: {found} records, and not {(WARM_RECORDS + records) // 2}")
    return ended - began


def latency(server: KafkaServer, job: Job, name: str, folder: Path, seconds: float, rate: int) -> list[float]:
    """Return the milliseconds of each record."""
    source, target = f"in-{name}", f"out-{name}"
    spawn = multiprocessing.get_context("spawn")
    with running(server, job, "copy", source, target, folder / name), ProcessPoolExecutor(2, mp_context=spawn) as pool:
        write(server, source, 1, b"0 0 %d %d %d %s")
        until_visible(server, target, 1)
        read = pool.submit(read_latencies, server.servers, target, seconds + WARM_UP_S + 5.0)
        pool.submit(send_steadily, server.servers, source, seconds + WARM_UP_S, rate).result()
        return read.result()


class running:
    """A job in a process of its own, from the first record of its topics to the end of the block."""

    def __init__(self, server: KafkaServer, job: Job, kind: str, source: str, target: str, folder: Path) -> None:
        server.create(source, PARTITIONS)
        server.create(target, PARTITIONS)
        folder.mkdir()
        spawn = multiprocessing.get_context("spawn")
        self._stop = spawn.Event()
        given = (server.servers, source, target, kind, folder, self._stop)
        self._process = spawn.Process(target=job, args=given)

    def __enter__(self) -> None:
        self._process.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def tidegate_job(delivery: str, servers: str, source: str, target: str, kind: str, folder: Path, stop: Event) -> None:
    """Run the job until it is told to stop."""
    copies = kind == "copy"
    properties = {"fetch.wait.max.ms": 5} if copies else {}
    to: dict[str, Any] = {"topic": target, "delivery": delivery, "uid": "out"}
    with tg.StreamEnvironment.local(1) as env:
        value = "bytes" if copies else SCHEMA
        rows = env.from_kafka(servers, topics=[source], value=value, properties=properties, uid="in")
        if copies:
            rows.select("value").to_kafka(servers, value="value", format="raw", **to)
        else:
            chosen = rows.filter(pl.col("price") > 1)
            chosen.to_kafka(servers, key="user", value=["id", "user", "price"], **to)
        checkpoints = tg.CheckpointConfig(interval="100ms" if copies else "1s", storage=str(folder / "checkpoints"))
        job = env.execute(target, checkpoints=checkpoints, progress="off")
        stop.wait()
        job.cancel()


def spark_job(servers: str, source: str, target: str, kind: str, folder: Path, stop: Event) -> None:
    """Run the same job of Spark until it is told to stop."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    jars = ",".join(str(jar) for jar in maven_jars("spark-kafka-3.5.7", SPARK_JARS).glob("*.jar"))
    builder = SparkSession.builder.master("local[2]").config("spark.jars", jars).config("spark.ui.enabled", "false")
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", source)
    rows = read.option("startingOffsets", "earliest").option("kafka.isolation.level", "read_committed").load()
    if kind == "copy":
        records = rows.select("value")
    else:
        schema = "id long, user string, price double, note string"
        parsed = rows.select(F.from_json(F.col("value").cast("string"), schema).alias("row")).select("row.*")
        value = F.to_json(F.struct("id", "user", "price")).alias("value")
        records = parsed.where("price > 1").select(F.col("user").alias("key"), value)
    written = records.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", target)
    query = written.option("checkpointLocation", str(folder / "checkpoints")).start()
    stop.wait()
    query.stop()
    spark.stop()


def loop_job(servers: str, source: str, target: str, kind: str, folder: Path, stop: Event) -> None:
    """Do the same with the clients and libraries alone until it is told to stop. Only for `kind` "transform"."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": target,
            "isolation.level": "read_committed",
            "fetch.queue.backoff.ms": 10,
        }
    )
    consumer.assign([TopicPartition(source, part, OFFSET_BEGINNING) for part in range(PARTITIONS)])
    # Reports of deliveries would cost a call of Python for each record. The commit fails if a record was not delivered.
    producer = Producer(
        {"bootstrap.servers": servers, "transactional.id": target, "queue.buffering.max.messages": 2_000_000}
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    sent, committed_s = 0, time.perf_counter()
    schema = pa.schema([("id", pa.int64()), ("user", pa.string()), ("price", pa.float64()), ("note", pa.string())])
    options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    while not stop.is_set():
        values = [value for message in consumer.consume(10_000, 0.05) if (value := message.value()) is not None]
        if values:
            lines = b"\n".join(values)
            reading = pa_json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
            rows = cast(pl.DataFrame, pl.from_arrow(pa_json.read_json(pa.BufferReader(lines), reading, options)))
            chosen = rows.filter(pl.col("price") > 1)
            out = chosen.select(pl.struct("id", "user", "price").struct.json_encode()).to_series().to_list()
            for value, key in zip(out, chosen["user"].to_list(), strict=True):
                producer.produce(target, value, key)
            sent += len(out)
        if sent and time.perf_counter() - committed_s > 1.0:
            producer.commit_transaction(60)
            producer.begin_transaction()
            sent, committed_s = 0, time.perf_counter()
    producer.abort_transaction(60)
    consumer.close()


def write(server: KafkaServer, topic: str, records: int, value: bytes = VALUE) -> None:
    """Write records, which readers of committed records see all at once."""
    producer = Producer(
        {
            "bootstrap.servers": server.servers,
            "transactional.id": f"{topic}-{records}",
            "queue.buffering.max.messages": 5_000_000,
            "queue.buffering.max.kbytes": 2_097_151,
            "transaction.timeout.ms": 300_000,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions(60)
    producer.begin_transaction()
    for number in range(records):
        producer.produce(topic, value % (number, number % 1_000, 1 - number % 2, b"x" * 150))
    producer.commit_transaction(120)


def until_visible(server: KafkaServer, topic: str, records: int) -> float:
    """Wait until a topic has records. Returns when the last one became visible, by the monotonic clock."""
    deadline = time.perf_counter() + STUCK_S
    with closing(reader(server)) as asked:
        seen, at = 0, time.perf_counter()
        # Marks of transactions count as well. So the end is when nothing comes any more.
        while seen < records or time.perf_counter() - at < SETTLED_S:
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{seen} of {records} records in {topic} after {STUCK_S:g} s")
            ends = [
                asked.get_watermark_offsets(TopicPartition(topic, part), timeout=30)[1] for part in range(PARTITIONS)
            ]
            if sum(ends) != seen:
                seen, at = sum(ends), time.perf_counter()
            time.sleep(0.01)
    return at


def count(server: KafkaServer, topic: str) -> int:
    """Return the number of committed records of a topic."""
    found = left = 0
    with closing(reader(server)) as asked:
        asked.assign([TopicPartition(topic, part, OFFSET_BEGINNING) for part in range(PARTITIONS)])
        while left < PARTITIONS:
            for message in asked.consume(10_000, timeout=1.0):
                if message.error() is None:
                    found += 1
                else:
                    left += 1
    return found


def reader(server: KafkaServer) -> Consumer:
    """Return a reader of committed records."""
    settings = {"bootstrap.servers": server.servers, "group.id": "count", "enable.partition.eof": True}
    return Consumer({**settings, "isolation.level": "read_committed", "auto.offset.reset": "earliest"})


if __name__ == "__main__":
    sys.exit(main())
