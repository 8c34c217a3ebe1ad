"""Sessions with a gap of each row, under faults: the same sessions as without any."""

from __future__ import annotations

from functools import cache

import polars as pl
import pyarrow as pa
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

ROWS = pa.table(
    {
        "k": [number * 7 % 5 for number in range(300)],
        "t": [number * 3 - number * 5 % 11 for number in range(300)],
        "x": [number * 13 % 29 for number in range(300)],
    }
)


@cache
def pipeline(function: bool, lateness_ms: int) -> SimulatedPipeline:
    """Rows come in one order, so it is known which are late. The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(ROWS, splits=1, uid="rows", parallelism=1).assign_timestamps("t", 2, uid="times")
        windows = rows.key_by("k").window(tg.Session(pl.col("x") + 1))
        if lateness_ms:
            windows = windows.allowed_lateness(lateness_ms)
        if function:
            schema = pa.schema({"n": pa.int64(), "total": pa.int64()})
            sums = windows.apply(
                lambda of: {"n": of.num_rows, "total": sum(of["x"].to_pylist())},
                schema=schema,
                uid="windows",
                parallelism=2,
            )
        else:
            sums = windows.aggregate(n=tg.count(), total=tg.sum("x"), uid="windows", parallelism=2)
        if lateness_ms:
            keys = ("k", "window_start", "window_end")
            sums.to_table("sim://sums", mode="upsert", keys=keys, uid="table", parallelism=2)
        else:
            sums.to_table("sim://sums", uid="table", parallelism=2)

    return SimulatedPipeline(build)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("lateness_ms", [0, 15])
@pytest.mark.parametrize("seed", range(3))
def test_sessions_are_the_same_under_faults(seed: int, lateness_ms: int, function: bool) -> None:
    """Whatever crashes; with a lateness what has come out is taken back first."""
    report = pipeline(function, lateness_ms).run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
