"""Rides and fares, the second of Flink's training exercises: each start of a ride with its fare, whichever comes first.

    .venv/bin/python examples/taxi_fares.py

Rows of one ride meet in one subtask, and what came first waits in state. Both clear what they have used, so state holds
only what still waits. A fare whose ride never comes would wait for ever: a day later it is forgotten.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import polars as pl
import pyarrow as pa
from taxi_data import FARES, RIDES, rides_and_fares

import tidegate as tg

RIDE = [RIDES.field(name) for name in ("ride_id", "driver_id", "event_time", "passengers")]
FARE = [FARES.field(name) for name in ("payment", "tip", "tolls", "total")]
PAID = pa.schema([*RIDE, *FARE])


class Enrich(tg.CoProcessFunction):
    """Joins a ride and its fare."""

    def open(self, context: tg.ProcessContext) -> None:
        """What waits for the other one, a day at most."""
        waits = tg.StateTtl("1d")
        self.ride = context.state(tg.ValueState("ride", pa.struct(RIDE), ttl=waits))
        self.fare = context.state(tg.ValueState("fare", pa.struct(FARE), ttl=waits))

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """A ride starts."""
        ride = {field.name: row[field.name] for field in RIDE}
        fare = self.fare.value()
        if fare is None:
            self.ride.update(ride)
        else:
            self.fare.clear()
            yield {**ride, **fare}

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """A fare comes."""
        fare = {field.name: row[field.name] for field in FARE}
        ride = self.ride.value()
        if ride is None:
            self.fare.update(fare)
        else:
            self.ride.clear()
            yield {**ride, **fare}


def paid(env: tg.StreamEnvironment, rides: pa.Table, fares: pa.Table) -> tg.Stream:
    """Rides with what was paid."""
    starts = env.from_batches(rides, name="rides").filter(pl.col("is_start"), name="starts")
    both = starts.connect(env.from_batches(fares, name="fares")).key_by("ride_id", "ride_id")
    return both.process(Enrich(), schema=PAID, name="with fare", uid="with-fare")


def main() -> None:
    """Run a week on this machine."""
    rides, fares = rides_and_fares(5_000)
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(2) as env:
        found = paid(env, rides, fares).collect()
        env.execute("rides and fares", checkpoints=tg.CheckpointConfig(storage=folder)).wait("5min")
        total = pl.DataFrame(found.to_arrow()).group_by("payment").agg(pl.len(), pl.col("total").sum().round(2))
    print(total.sort("payment"))


if __name__ == "__main__":
    main()
