"""The taxi examples (Flink's training exercises), each with the rows that polars computes for the same input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
import pyarrow as pa
from taxi_cleansing import cleansed
from taxi_fares import paid
from taxi_hourly_tips import best_tips
from taxi_long_rides import long_rides

import tidegate as tg

_CITY = pl.col("start_lon", "end_lon").is_between(-74.05, -73.7), pl.col("start_lat", "end_lat").is_between(40.5, 41.0)


@dataclass(frozen=True, slots=True)
class Exercise:
    """A program over rides and fares, and a check of the rows that it gives."""

    build: Callable[[tg.StreamEnvironment, pa.Table, pa.Table], tg.Stream]
    check: Callable[[pl.DataFrame, pl.DataFrame, pl.DataFrame], None]
    """Compares the result with the reference for rides and fares. Raises AssertionError."""


def _check_cleansing(found: pl.DataFrame, rides: pl.DataFrame, fares: pl.DataFrame) -> None:
    expected = rides.filter(*_CITY)
    assert len(expected) < len(rides)
    _same(found, expected)


def _check_fares(found: pl.DataFrame, rides: pl.DataFrame, fares: pl.DataFrame) -> None:
    _same(found, rides.filter("is_start").join(fares, on="ride_id"))


def _check_hourly_tips(found: pl.DataFrame, rides: pl.DataFrame, fares: pl.DataFrame) -> None:
    """Each hour has one row: a driver with the highest sum of tips."""
    hour = pl.col("start_time").dt.truncate("1h").alias("window_start")
    tips = fares.group_by("driver_id", hour).agg(pl.col("tip").sum().alias("tips"))
    best = tips.filter(pl.col("tips") == pl.col("tips").max().over("window_start"))
    told = found.select(pl.col("window_start").cast(best["window_start"].dtype), "driver_id", "tips")
    assert sorted(told["window_start"]) == sorted(best["window_start"].unique())
    assert len(told.join(best, on=["driver_id", "window_start", "tips"], how="anti")) == 0


def _check_long_rides(found: pl.DataFrame, rides: pl.DataFrame, fares: pl.DataFrame) -> None:
    """Rides that end after two hours, and those that have no end."""
    start, end = (rides.filter(pl.col("is_start") == is_start) for is_start in (True, False))
    both = start.join(end, on="ride_id", how="left")
    lasts = (pl.col("event_time_right") - pl.col("event_time")).fill_null(pl.duration(days=1))
    assert both["event_time_right"].null_count() > 0
    _same(found, both.filter(lasts > pl.duration(hours=2)))


def _same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    """The same rows in any order, and at least one."""
    rows, wanted = Counter(found.rows()), Counter(expected.select(found.columns).rows())
    assert wanted
    assert rows == wanted, f"missing {wanted - rows}, too many {rows - wanted}"


EXERCISES = {
    "cleansing": Exercise(lambda env, rides, fares: cleansed(env, rides), _check_cleansing),
    "fares": Exercise(paid, _check_fares),
    "hourly tips": Exercise(lambda env, rides, fares: best_tips(env, fares), _check_hourly_tips),
    "long rides": Exercise(lambda env, rides, fares: long_rides(env, rides), _check_long_rides),
}
