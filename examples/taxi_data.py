"""Taxi rides and fares of a week, made up: what the taxi examples read.

A ride is two events, its start and its end; some never end. Events arrive up to a minute out of order. A fare is known
when the ride starts, and comes by another way: a little before it, or after.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

RIDES = pa.schema(
    [
        ("ride_id", pa.int64()),
        ("is_start", pa.bool_()),
        ("event_time", pa.timestamp("ms")),
        ("start_lon", pa.float64()),
        ("start_lat", pa.float64()),
        ("end_lon", pa.float64()),
        ("end_lat", pa.float64()),
        ("passengers", pa.int64()),
        ("driver_id", pa.int64()),
    ]
)
FARES = pa.schema(
    [
        ("ride_id", pa.int64()),
        ("driver_id", pa.int64()),
        ("start_time", pa.timestamp("ms")),
        ("payment", pa.string()),
        ("tip", pa.float64()),
        ("tolls", pa.float64()),
        ("total", pa.float64()),
    ]
)
WEST, EAST, SOUTH, NORTH = -74.05, -73.7, 40.5, 41.0
"""New York City, as a rectangle."""
MAX_OUT_OF_ORDERNESS = "1min"
_MINUTE_MS = 60_000
_WEEK_MS = 7 * 24 * 60 * _MINUTE_MS
_MONDAY_MS = 1_357_516_800_000
"""2013-01-07, midnight in UTC."""
_LOST = 0.02
_LONG = 0.03
_AWAY = 0.1


def rides_and_fares(rides: int, drivers: int = 50, seed: int = 7) -> tuple[pa.Table, pa.Table]:
    """Rides and fares in the order in which they arrive."""
    rng = np.random.Generator(np.random.PCG64(seed))
    ids = np.arange(1, rides + 1)
    start = np.sort(rng.integers(0, _WEEK_MS, rides)) + _MONDAY_MS
    minutes = np.where(rng.random(rides) < _LONG, rng.integers(121, 240, rides), rng.integers(3, 119, rides))
    end = start + minutes * _MINUTE_MS + rng.integers(0, _MINUTE_MS, rides)
    drivers_of = rng.integers(1, drivers + 1, rides)
    places = {
        name: np.where(rng.random(rides) < _AWAY / 4, low - 0.1, rng.uniform(low, high, rides)).round(5)
        for name, low, high in (
            ("start_lon", WEST, EAST),
            ("start_lat", SOUTH, NORTH),
            ("end_lon", WEST, EAST),
            ("end_lat", SOUTH, NORTH),
        )
    }
    passengers = rng.integers(1, 5, rides)
    ended = rng.random(rides) >= _LOST
    ride = np.concatenate([np.arange(rides), np.flatnonzero(ended)])
    times = np.concatenate([start, end[ended]])
    columns = {
        "ride_id": ids[ride],
        "is_start": np.arange(len(ride)) < rides,
        "event_time": times,
        **{name: place[ride] for name, place in places.items()},
        "passengers": passengers[ride],
        "driver_id": drivers_of[ride],
    }
    arrival = np.argsort(times + rng.integers(0, _MINUTE_MS, len(times)), kind="stable")
    tip = (rng.integers(0, 40, rides) / 4).astype(np.float64)
    tolls = np.where(rng.random(rides) < 0.1, 4.75, 0.0)
    fares = {
        "ride_id": ids,
        "driver_id": drivers_of,
        "start_time": start,
        "payment": np.where(rng.random(rides) < 0.5, "card", "cash"),
        "tip": tip,
        "tolls": tolls,
        "total": tip + tolls + minutes * 0.5,
    }
    paid = np.argsort(start + rng.integers(0, _MINUTE_MS, rides), kind="stable")
    return _table(columns, arrival, RIDES), _table(fares, paid, FARES)


def _table(columns: dict[str, np.ndarray], order: np.ndarray, schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(columns[field.name][order]).cast(field.type) for field in schema], schema=schema)
