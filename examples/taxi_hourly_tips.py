"""Hourly tips, the third of Flink's training exercises: of each hour the driver who has got the most tips.

    .venv/bin/python examples/taxi_hourly_tips.py

The first window adds up the tips of each driver, the second looks at all drivers of an hour. What comes out of a window
has no event time; a moment within its hour puts it into the second window of that hour.
"""

from __future__ import annotations

import tempfile

import polars as pl
import pyarrow as pa
from taxi_data import MAX_OUT_OF_ORDERNESS, rides_and_fares

import tidegate as tg


def best_tips(env: tg.StreamEnvironment, fares: pa.Table) -> tg.Stream:
    """window_start, window_end, the driver, and what they have got."""
    rows = env.from_batches(
        fares, timestamp="start_time", max_out_of_orderness=MAX_OUT_OF_ORDERNESS, name="fares", uid="fares"
    )
    hour = tg.Tumbling("1h")
    tips = rows.key_by("driver_id").window(hour).aggregate(tips=tg.sum("tip"), name="of a driver", uid="of-a-driver")
    return tips.window(hour).aggregate(
        driver_id=tg.arg_max("driver_id", by="tips"), tips=tg.max("tips"), name="best", uid="best"
    )


def main() -> None:
    """Run a week on this machine."""
    _, fares = rides_and_fares(5_000)
    with tempfile.TemporaryDirectory() as folder, tg.StreamEnvironment.local(2) as env:
        found = best_tips(env, fares).collect()
        env.execute("hourly tips", checkpoints=tg.CheckpointConfig(storage=folder)).wait("5min")
        best = pl.DataFrame(found.to_arrow()).sort("tips", descending=True)
    print(best.head())


if __name__ == "__main__":
    main()
