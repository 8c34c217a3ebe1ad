"""Pipelines that the simulator's tests run, and the faults that they must survive."""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa

import tidegate as tg
from tidegate.testing import Faults, SimulatedPipeline, SimulationReport

HARSH = Faults(
    crash=0.01,
    coordinator_crash=0.01,
    storage=0.05,
    slow=0.05,
    duplicate=0.03,
    drop=0.003,
    delay="0ms..100ms",
)

ROWS = pa.table({"k": [i % 13 for i in range(400)], "v": [float(i % 7) for i in range(400)]})
_ADDED = pa.schema([("k", pa.int64()), ("w", pa.float64())])


def keyed(env: tg.StreamEnvironment) -> None:
    """A fan-out: running aggregates to an upsert table, final ones to another, and a rebalanced row-wise branch."""
    rows = env.from_batches(ROWS, splits=4)
    running = rows.key_by("k").aggregate(n=tg.count(), total=tg.sum("v"))
    running.to_table("sim://running", mode="upsert", keys=["k"])
    rows.key_by("k").aggregate(n=tg.count(), worst=tg.max("v"), emit="final").to_table("sim://final")
    rows.filter(_above_three).rebalance().map(_add_one, schema=_ADDED).collect()


def two_stages(env: tg.StreamEnvironment) -> None:
    """Two sources of different length, united; an aggregate of an aggregate; subtasks that differ in number."""
    short = env.from_batches(ROWS.slice(0, 50), splits=1, parallelism=1, name="short")
    long = env.from_batches(ROWS, splits=3, parallelism=3, name="long")
    counts = long.key_by("k").aggregate(n=tg.count(), total=tg.sum("v"), emit="final", parallelism=2)
    renamed = counts.map(_total_as_value, schema=ROWS.schema, parallelism=2)
    merged = renamed.union(short, long).key_by("k").aggregate(total=tg.sum("v"), n=tg.count(), emit="final")
    merged.to_table("sim://merged")


def stateless(env: tg.StreamEnvironment) -> None:
    """No state but positions: every row, broadcast to two subtasks, once each."""
    env.from_batches(ROWS, splits=2).broadcast().map(_add_one, schema=_ADDED).to_table("sim://rows")


PIPELINES = {"keyed": keyed, "two_stages": two_stages, "stateless": stateless}


@cache
def pipeline(name: str) -> SimulatedPipeline:
    """Returns one of `PIPELINES`. All tests of a process share it, because its run without faults is made once."""
    return SimulatedPipeline(PIPELINES[name])


@cache
def harsh_run(name: str, seed: int) -> SimulationReport:
    """Returns the report of a seed of one of `PIPELINES` under `HARSH`. Several tests look at the same report."""
    return pipeline(name).run(seed, HARSH)


def _above_three(row: Any) -> bool:
    return bool(row["v"] > 3)


def _add_one(row: Any) -> dict[str, Any]:
    return {"k": row["k"], "w": row["v"] + 1}


def _total_as_value(row: Any) -> dict[str, Any]:
    return {"k": row["k"], "v": row["total"]}
