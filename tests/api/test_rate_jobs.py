"""Jobs over a rate: stopped, restored, and under faults, they have every row once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, config, local

import tidegate as tg
from tidegate.connectors.rate_source import RateSource
from tidegate.testing import Faults, simulate


@dataclass
class Clock:
    """A clock that a test moves."""

    now_ms: int = 10**12

    def __call__(self) -> int:
        """The time."""
        return self.now_ms


def test_a_rate_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """At another parallelism: each number once, dated by the first submission and not by the second one."""
    path, rows, clock = None, 600, Clock()
    for parallelism, end in (2, "suspended"), (3, "finished"):
        with local(parallelism) as env:
            stream = env.from_source(RateSource(2_000, rows, 8, clock), uid="rate")
            table = stream.to_table(str(tmp_path / "out"), uid="out", if_exists="append" if path else "error")
            job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART, restore=path)
            clock.now_ms += 100
            if path is None:
                path = job.stop(savepoint=str(tmp_path / "savepoint"))
            clock.now_ms += 10_000
            assert job.wait("4min") == end
    found = table.to_arrow().sort_by("value")
    assert found["value"].to_pylist() == list(range(rows))
    times = found["timestamp"].cast(pa.int64()).to_pylist()
    assert times == [10**12 + value // 2 for value in range(rows)]


def test_the_method_makes_a_stream_with_event_time(tmp_path: Path) -> None:
    """With Spark's columns; the job ends after the last row."""
    with local(2) as env:
        rows = env.from_rate(None, rows=100, timestamp="timestamp", uid="rate").select("value").collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART)
        assert job.wait("4min") == "finished"
    assert sorted(rows.to_arrow()["value"].to_pylist()) == list(range(100))


class OutOfOrder(tg.ProcessFunction):
    """Emits each row whose number is lower than that of the row before it, by key."""

    def open(self, context: tg.ProcessContext) -> None:
        """The number of the row before."""
        self.last = context.state(tg.ValueState("last", int))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Compare a row with the one before it."""
        if row["value"] < (self.last.value() or 0):
            yield {"value": row["value"]}
        self.last.update(row["value"])


def test_rows_come_in_order_unless_splits_are_asked_for(tmp_path: Path) -> None:
    """At parallelism 2 each key has its rows by number; with splits= the rows of a key mix."""
    for splits, ordered in (None, True), (8, False):
        with local(2) as env:
            rows = env.from_rate(None, rows=2_000, splits=splits, uid="rate").with_columns(key=pl.col("value") % 3)
            swapped = rows.key_by("key").process(OutOfOrder(), schema=pa.schema({"value": pa.int64()})).collect()
            job = env.execute("job", checkpoints=config(tmp_path / f"{splits}"), restart=NO_RESTART)
            assert job.wait("4min") == "finished"
            assert (len(swapped.to_arrow()) == 0) == ordered


def test_another_rate_is_refused_when_a_job_is_restored(tmp_path: Path) -> None:
    """With the setting, when the job is submitted."""
    with local(1) as env:
        env.from_rate(1_000, uid="rate").collect()
        job = env.execute("job", checkpoints=config(tmp_path / "c"), restart=NO_RESTART)
        path = job.stop(savepoint=str(tmp_path / "savepoint"))
        assert job.wait("4min") == "suspended"
        env.from_rate(2_000, uid="rate").collect()
        with pytest.raises(tg.ConfigurationError, match=r"source 'rate' cannot go on .*'rows_per_second' has changed"):
            env.execute("job", checkpoints=config(tmp_path / "c"), restore=path)


@dataclass(frozen=True)
class Ticking:
    """A clock that goes on whenever somebody looks, so that a seed stands for one run."""

    times: itertools.count[int] = field(default_factory=lambda: itertools.count(10**12, 7))

    def __call__(self) -> int:
        """A little later than before."""
        return next(self.times)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_no_fault_loses_or_repeats_a_row_of_a_rate(seed: int) -> None:
    """Tasks and coordinators crash, storage fails; the simulator compares with an undisturbed run."""

    def build(env: tg.StreamEnvironment) -> None:
        env.from_source(RateSource(300, 600, 3, Ticking())).select("value").to_table("sim://out")

    report = simulate(build, seed=seed, faults=Faults(crash=0.03, coordinator_crash=0.01, storage=0.03, delay="0..1s"))
    assert report.ok, report
    assert report.crashes + report.coordinator_crashes > 0
