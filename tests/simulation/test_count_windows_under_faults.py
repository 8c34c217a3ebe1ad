"""Count windows with a time limit, under faults: each row is in one window, or in the windows of a slide."""

from __future__ import annotations

from functools import cache

import pyarrow as pa
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

TIMEOUT_MS = 20
ROWS = pa.table({"k": [number * 7 % 5 for number in range(200)], "x": range(200)})


@cache
def pipeline(function: bool) -> SimulatedPipeline:
    """The sums of all windows of a key are known, whichever rows are together. The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(ROWS, splits=4, uid="rows", parallelism=2)
        windows = rows.key_by("k").window(tg.Count(7, timeout=TIMEOUT_MS, fire_at_end=True))
        if function:
            sums = windows.apply(
                lambda of: {"n": of.num_rows, "total": sum(of["x"].to_pylist())},
                schema=pa.schema({"n": pa.int64(), "total": pa.int64()}),
                uid="windows",
                parallelism=2,
            )
        else:
            sums = windows.aggregate(n=tg.count(), total=tg.sum("x"), uid="windows", parallelism=2)
        totals = sums.key_by("k").aggregate(
            n=tg.sum("n"), total=tg.sum("total"), emit="final", uid="totals", parallelism=2
        )
        totals.to_table("sim://totals", uid="table", parallelism=2)

    return SimulatedPipeline(build)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_each_row_is_in_one_window_under_faults(seed: int, function: bool) -> None:
    """Whatever crashes, and whenever the clock ends a window."""
    report = pipeline(function).run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"


@cache
def sliding_pipeline(function: bool) -> SimulatedPipeline:
    """Rows of a key come in one order, so each window is known. The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(ROWS, splits=1, uid="rows", parallelism=1)
        windows = rows.key_by("k").window(tg.Count(9, slide=6, fire_at_end=True))
        if function:
            sums = windows.apply(
                lambda of: {"n": of.num_rows, "total": sum(of["x"].to_pylist())},
                schema=pa.schema({"n": pa.int64(), "total": pa.int64()}),
                uid="windows",
                parallelism=2,
            )
        else:
            sums = windows.aggregate(n=tg.count(), total=tg.sum("x"), uid="windows", parallelism=2)
        sums.to_table("sim://sums", uid="table", parallelism=2)

    return SimulatedPipeline(build)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_last_rows_of_a_key_are_the_same_under_faults(seed: int, function: bool) -> None:
    """Whatever crashes, and wherever a restore comes between two results."""
    report = sliding_pipeline(function).run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
