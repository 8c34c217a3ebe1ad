"""The same queries as Structured Streaming of Spark: SQL over streams of Parquet files, into nowhere.

Files have the rows of the generator, and are written before. Spark reads some of them in each micro-batch, as it would
from a topic; a micro-batch is what a checkpoint is here. Queries that Spark cannot run on streams are not there: those
that rank rows, count distinct ones, or aggregate behind a join. Of equal best ones q5 and q7 give one, not all.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from nexmark.measure import Measured, cpu_seconds
from nexmark.query import WATERMARK_DELAY_MS, Query
from nexmark.source import MODULES
from nexmark.workload import KINDS, Workload
from tidegate.spark_bridge.java import ensure_java

SPARK = "Spark"


@dataclass(frozen=True)
class SparkQuery:
    """SQL over the views person, auction and bid; `mode` is Spark's output mode."""

    sql: str
    mode: str = "append"


_RANKS = """count(*) AS total_bids,
    count_if(price < 10000) AS rank1_bids,
    count_if(price >= 10000 AND price < 1000000) AS rank2_bids,
    count_if(price >= 1000000) AS rank3_bids"""

SPARK_QUERIES = {
    "q0": SparkQuery("SELECT auction, bidder, price, date_time, extra FROM bid"),
    "q1": SparkQuery("SELECT auction, bidder, 0.908 * price AS price, date_time, extra FROM bid"),
    "q2": SparkQuery("SELECT auction, price FROM bid WHERE auction % 123 = 0"),
    "q3": SparkQuery(
        """SELECT name, city, state, a.id FROM auction a JOIN person p ON a.seller = p.id
        WHERE category = 10 AND state IN ('OR', 'ID', 'CA')"""
    ),
    "q5": SparkQuery(
        """SELECT max(struct(num, auction)) AS best FROM
        (SELECT auction, count(*) AS num, window(date_time, '10 seconds', '2 seconds') AS w FROM bid
         GROUP BY auction, window(date_time, '10 seconds', '2 seconds'))
        GROUP BY window(w, '2 seconds')"""
    ),
    "q7": SparkQuery(
        """SELECT max(struct(price, auction, bidder, date_time, extra)) AS best FROM bid
        GROUP BY window(date_time, '10 seconds')"""
    ),
    "q8": SparkQuery(
        """SELECT p.id, p.name, p.w.start FROM
        (SELECT id, name, window(date_time, '10 seconds') AS w FROM person
         GROUP BY id, name, window(date_time, '10 seconds')) p
        JOIN (SELECT seller, window(date_time, '10 seconds') AS w FROM auction
              GROUP BY seller, window(date_time, '10 seconds')) a
        ON p.id = a.seller AND p.w = a.w"""
    ),
    "q10": SparkQuery(
        """SELECT auction, bidder, price, date_time, extra, date_format(date_time, 'yyyy-MM-dd') AS dt,
        date_format(date_time, 'HH:mm') AS hm FROM bid"""
    ),
    "q11": SparkQuery(
        """SELECT bidder, count(*) AS bid_count, session_window.start, session_window.end FROM bid
        GROUP BY bidder, session_window(date_time, '10 seconds')"""
    ),
    "q12": SparkQuery(
        """SELECT bidder, count(*) AS bid_count, w.start, w.end FROM
        (SELECT bidder, window(current_timestamp(), '10 seconds') AS w FROM bid) GROUP BY bidder, w""",
        mode="update",
    ),
    "q13": SparkQuery(
        """SELECT auction, bidder, price, date_time, value FROM bid
        JOIN (SELECT id AS key, CAST(id AS STRING) AS value FROM range(10000)) ON auction % 10000 = key"""
    ),
    "q14": SparkQuery(
        """SELECT auction, bidder, 0.908 * price AS price,
        CASE WHEN hour(date_time) BETWEEN 8 AND 18 THEN 'dayTime'
             WHEN hour(date_time) <= 6 OR hour(date_time) >= 20 THEN 'nightTime' ELSE 'otherTime' END AS bid_time_type,
        date_time, extra, length(extra) - length(replace(extra, 'c', '')) AS c_counts
        FROM bid WHERE 0.908 * price > 1000000 AND 0.908 * price < 50000000"""
    ),
    "q17": SparkQuery(
        f"""SELECT auction, date_format(date_time, 'yyyy-MM-dd') AS day, {_RANKS},
        min(price) AS min_price, max(price) AS max_price, avg(price) AS avg_price, sum(price) AS sum_price
        FROM bid GROUP BY auction, date_format(date_time, 'yyyy-MM-dd')""",
        mode="update",
    ),
    "q18": SparkQuery(
        """SELECT bidder, auction, max(struct(date_time, price, channel, url, extra)) AS newest FROM bid
        GROUP BY bidder, auction""",
        mode="update",
    ),
    "q20": SparkQuery(
        """SELECT b.auction, bidder, price, channel, url, b.date_time AS bid_time, b.extra AS bid_extra, item_name,
        description, initial_bid, reserve, a.date_time AS auction_time, expires, seller, category, a.extra
        FROM bid b JOIN auction a ON b.auction = a.id WHERE category = 10"""
    ),
    "q21": SparkQuery(
        """SELECT * FROM (SELECT auction, bidder, price, channel, CASE lower(channel)
            WHEN 'apple' THEN '0' WHEN 'google' THEN '1' WHEN 'facebook' THEN '2' WHEN 'baidu' THEN '3'
            ELSE nullif(regexp_extract(url, '(&|^)channel_id=([^&]*)', 2), '') END AS channel_id FROM bid)
        WHERE channel_id IS NOT NULL"""
    ),
    "q22": SparkQuery(
        """SELECT auction, bidder, price, channel, split(url, '/')[3] AS dir1, split(url, '/')[4] AS dir2,
        split(url, '/')[5] AS dir3 FROM bid"""
    ),
}


def write_files(workload: Workload, folder: Path) -> Path:
    """The rows as Parquet, a file a block and kind; those of an earlier run are taken if they are of this workload."""
    target = folder / f"{workload.events}-{workload.rate:g}-{workload.out_of_order}-{workload.block}-{workload.seed}"
    if not (target / "_written").exists():
        shutil.rmtree(target, ignore_errors=True)
        for kind in KINDS:
            (target / kind).mkdir(parents=True)
            for block in range(workload.events // workload.block):
                made = MODULES[kind].make(workload, block)
                with pq.ParquetWriter(target / kind / f"{block:06d}.parquet", made.schema) as writer:
                    writer.write_batch(made)
        (target / "_written").touch()
    return target


@contextmanager
def local_spark(cores: int) -> Iterator[SparkSession]:
    """A Spark with this many threads, and as many partitions of a shuffle."""
    ensure_java()
    builder = SparkSession.builder.master(f"local[{cores}]").appName("nexmark").config("spark.driver.memory", "4g")
    builder = builder.config("spark.sql.shuffle.partitions", str(cores)).config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.session.timeZone", "UTC").config("spark.log.level", "ERROR")
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark = builder.config("spark.sql.streaming.stateStore.providerClass", provider).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


def measured_spark(
    spark: SparkSession, query: Query, workload: Workload, files: Path, folder: Path, events_a_batch: int = 1_000_000
) -> Measured:
    """Run a query to its end: so many events a micro-batch, about what Spark takes in a second."""
    shutil.rmtree(folder, ignore_errors=True)
    asked, process = SPARK_QUERIES[query.name], _jvm_process(spark)
    own, started = cpu_seconds(process), time.monotonic()
    for kind in query.reads:
        reader = spark.readStream.schema(spark.read.parquet(str(files / kind)).schema)
        rows = reader.option("maxFilesPerTrigger", max(1, events_a_batch // workload.block)).parquet(str(files / kind))
        # Spark reads times without a zone as TIMESTAMP_NTZ, and takes no such event time; the session's zone is UTC.
        times = [name for name, kind_of in rows.dtypes if kind_of == "timestamp_ntz"]
        rows = rows.withColumns({name: rows[name].cast("timestamp") for name in times})
        rows.withWatermark("date_time", f"{WATERMARK_DELAY_MS} milliseconds").createOrReplaceTempView(kind)
    writer = spark.sql(asked.sql).writeStream.format("noop").outputMode(asked.mode).trigger(availableNow=True)
    stream = writer.option("checkpointLocation", str(folder)).start()
    stream.awaitTermination()
    if (error := stream.exception()) is not None:
        raise RuntimeError(f"{query.name} has failed in Spark") from error
    seconds, cpu = time.monotonic() - started, cpu_seconds(process) - own
    shutil.rmtree(folder, ignore_errors=True)
    read = sum(workload.rows(kind) for kind in query.reads)
    return Measured(query.name, SPARK, workload.events, read, seconds, cpu, len(stream.recentProgress), 0)


def _jvm_process(spark: SparkSession) -> int:
    """The process of a Spark in local mode, whose executors are threads of it."""
    java: Any = spark.sparkContext._jvm
    return int(str(java.java.lang.management.ManagementFactory.getRuntimeMXBean().getName()).partition("@")[0])
