"""The taxi examples, Flink's training exercises, give what polars gives for the same rides and fares."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import tidegate as tg

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ("taxi_data", "taxi_cleansing", "taxi_fares", "taxi_hourly_tips", "taxi_long_rides")
CITY = pl.col("start_lon", "end_lon").is_between(-74.05, -73.7), pl.col("start_lat", "end_lat").is_between(40.5, 41.0)


@pytest.fixture(scope="module")
def taxi() -> Iterator[dict[str, Any]]:
    """The modules by name."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def week(taxi: dict[str, Any]) -> tuple[pa.Table, pa.Table]:
    """Few rides, and their fares."""
    rides, fares = taxi["taxi_data"].rides_and_fares(400, drivers=5)
    return rides, fares


def finished(folder: Path, program: Callable[[tg.StreamEnvironment], tg.Stream]) -> pl.DataFrame:
    """What a program gives."""
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=100)) as env:
        found = program(env).collect()
        checkpoints = tg.CheckpointConfig(storage=str(folder), interval="20ms")
        assert env.execute("taxi", checkpoints=checkpoints, progress="off").wait("4min") == "finished"
        return pl.DataFrame(found.to_arrow())


def same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    """The same rows, in any order; some of them."""
    assert len(expected) > 0
    assert sorted(found.rows(), key=repr) == sorted(expected.select(found.columns).rows(), key=repr)


def test_rides_in_the_city_are_left(taxi: dict[str, Any], week: tuple[pa.Table, pa.Table], tmp_path: Path) -> None:
    """Those that begin and end there, of all that are not."""
    rides = pl.DataFrame(week[0])
    expected = rides.filter(*CITY)
    assert len(expected) < len(rides)
    same(finished(tmp_path, lambda env: taxi["taxi_cleansing"].cleansed(env, week[0])), expected)


def test_each_ride_has_its_fare(taxi: dict[str, Any], week: tuple[pa.Table, pa.Table], tmp_path: Path) -> None:
    """Once, whichever comes first."""
    rides, fares = (pl.DataFrame(table) for table in week)
    expected = rides.filter("is_start").join(fares, on="ride_id")
    same(finished(tmp_path, lambda env: taxi["taxi_fares"].paid(env, *week)), expected)


def test_the_best_driver_of_each_hour_is_told(
    taxi: dict[str, Any], week: tuple[pa.Table, pa.Table], tmp_path: Path
) -> None:
    """With the sum of their tips; where several have as much, one of them."""
    hour = pl.col("start_time").dt.truncate("1h").alias("window_start")
    tips = pl.DataFrame(week[1]).group_by("driver_id", hour).agg(pl.col("tip").sum().alias("tips"))
    best = tips.filter(pl.col("tips") == pl.col("tips").max().over("window_start"))
    found = finished(tmp_path, lambda env: taxi["taxi_hourly_tips"].best_tips(env, week[1]))
    told = found.select(pl.col("window_start").cast(best["window_start"].dtype), "driver_id", "tips")
    assert sorted(told["window_start"]) == sorted(best["window_start"].unique())
    assert len(told.join(best, on=["driver_id", "window_start", "tips"], how="anti")) == 0


def test_long_rides_are_told_once(taxi: dict[str, Any], week: tuple[pa.Table, pa.Table], tmp_path: Path) -> None:
    """Those that end after two hours, and those that have no end."""
    rides = pl.DataFrame(week[0])
    start, end = (rides.filter(pl.col("is_start") == is_start) for is_start in (True, False))
    both = start.join(end, on="ride_id", how="left")
    lasts = (pl.col("event_time_right") - pl.col("event_time")).fill_null(pl.duration(days=1))
    expected = both.filter(lasts > pl.duration(hours=2))
    assert both["event_time_right"].null_count() > 0
    same(finished(tmp_path, lambda env: taxi["taxi_long_rides"].long_rides(env, week[0])), expected)
