"""Long rides, the fourth of Flink's training exercises: rides of more than two hours, told as soon as that is known.

    .venv/bin/python examples/taxi_long_rides.py

A start sets an event-time timer two hours ahead, an end takes it back. Events come out of order: an end may come before
its start, and then says how long the ride has taken. A ride whose end is lost is told by the timer.
"""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from taxi_data import MAX_OUT_OF_ORDERNESS, rides_and_fares

import tidegate as tg

LONG = pa.schema({"ride_id": pa.int64()})
TWO_HOURS_MS = 2 * 3_600_000


class LongRides(tg.ProcessFunction):
    """Tells of each long ride once."""

    def open(self, context: tg.ProcessContext) -> None:
        """The event that came first, and whether its ride was told. An end that is lost leaves it for a day."""
        first = pa.struct({"is_start": pa.bool_(), "at": pa.int64(), "told": pa.bool_()})
        self.first = context.state(tg.ValueState("first", first, ttl=tg.StateTtl("1d")))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """A ride starts or ends."""
        assert context.timestamp is not None
        first = self.first.value()
        if first is None:
            self.first.update({"is_start": row["is_start"], "at": context.timestamp, "told": False})
            if row["is_start"]:
                context.timer_service.register_event_time_timer(context.timestamp + TWO_HOURS_MS)
            return
        if first["is_start"]:
            context.timer_service.delete_event_time_timer(first["at"] + TWO_HOURS_MS)
        self.first.clear()
        if not first["told"] and abs(context.timestamp - first["at"]) > TWO_HOURS_MS:
            yield {"ride_id": row["ride_id"]}

    def on_timer(self, timestamp: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Two hours have passed, and the ride goes on."""
        first = self.first.value()
        if first is not None:
            self.first.update({**first, "told": True})
        yield context.current_key


def long_rides(env: tg.StreamEnvironment, rides: pa.Table) -> tg.Stream:
    """Ids of long rides."""
    events = env.from_batches(rides, timestamp="event_time", max_out_of_orderness=MAX_OUT_OF_ORDERNESS, name="rides")
    return events.key_by("ride_id").process(LongRides(), schema=LONG, name="long rides", uid="long-rides")


def main() -> None:
    """Run a week on this machine."""
    rides, _ = rides_and_fares(5_000)
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(2) as env:
        found = long_rides(env, rides).collect()
        env.execute("long rides", checkpoints=tg.CheckpointConfig(storage=folder)).wait("5min")
        last = max(rides["event_time"].to_pylist())
        assert isinstance(last, dt.datetime)
        print(f"{len(found.to_arrow()):,} rides were longer than two hours until {last:%Y-%m-%d %H:%M}")


if __name__ == "__main__":
    main()
