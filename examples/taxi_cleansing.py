"""Ride cleansing, the first of Flink's training exercises: rides that begin and end in New York City.

    .venv/bin/python examples/taxi_cleansing.py

A filter by polars expressions looks at whole batches. Event time is given behind it, from what is left.
"""

from __future__ import annotations

import tempfile

import polars as pl
import pyarrow as pa
from taxi_data import EAST, NORTH, SOUTH, WEST, rides_and_fares

import tidegate as tg


def in_new_york(end: str) -> pl.Expr:
    """Whether a ride starts, or ends, in the city."""
    return pl.col(f"{end}_lon").is_between(WEST, EAST) & pl.col(f"{end}_lat").is_between(SOUTH, NORTH)


def cleansed(env: tg.StreamEnvironment, rides: pa.Table) -> tg.Stream:
    """The rides that stay in the city."""
    return env.from_batches(rides, name="rides").filter(in_new_york("start") & in_new_york("end"), name="in the city")


def main() -> None:
    """Run a week on this machine."""
    rides, _ = rides_and_fares(5_000)
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(2) as env:
        found = cleansed(env, rides).collect()
        env.execute("ride cleansing", checkpoints=tg.CheckpointConfig(storage=folder)).wait("5min")
        print(f"{len(found.to_arrow()):,} of {len(rides):,} events are of rides in the city")


if __name__ == "__main__":
    main()
