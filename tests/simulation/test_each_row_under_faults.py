"""Results of each row under faults and rescales: each row has one, which counts all rows of its key up to it."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH
from random_jobs.sources import TricklingSource

import tidegate as tg
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.report import report_of
from tidegate.testing.runtime.run import STORAGE, Action, JobRun, JobSetting, Simulation
from tidegate.testing.simulated import INLINE_BYTES, SMALL_BUFFERS

TOTALS = "sim://totals"
FAULTS = replace(HARSH, crash=0.04, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
KEYS, ROWS = 4, 48
WIDTHS = (1, 2, 3)
INPUT = pa.table({"k": [n % KEYS for n in range(ROWS)], "x": [(n * 7) % 11 - 5 for n in range(ROWS)], "n": range(ROWS)})
"""Uses one split, so that the rows of a key have one order."""


def _build(env: tg.StreamEnvironment) -> None:
    totals = (
        env.from_batches(INPUT, splits=1, uid="rows")
        .key_by("k")
        .aggregate(
            n=tg.last("n"),
            rows=tg.count(),
            total=tg.sum("x"),
            least=tg.min("x"),
            kinds=tg.count_distinct("x"),
            every=tg.collect_list("x", limit=3),
            emit="each",
            uid="totals",
        )
    )
    totals.to_table(TOTALS, uid="table")


def _expected() -> list[dict[str, Any]]:
    found = []
    for row in INPUT.to_pylist():
        values = [each["x"] for each in INPUT.to_pylist() if each["k"] == row["k"] and each["n"] <= row["n"]]
        found.append(
            {
                "k": row["k"],
                "n": row["n"],
                "rows": len(values),
                "total": sum(values),
                "least": min(values),
                "kinds": len(set(values)),
                "every": values[:3],
            }
        )
    return found


def _violation(simulation: Simulation) -> str | None:
    rows = sorted(read_table(simulation.open_store(TOTALS)).to_pylist(), key=lambda row: row["n"])
    return None if rows == _expected() else f"not one result a row, of all rows up to it: {rows}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_each_row_has_one_result_under_faults(seed: int) -> None:
    """Whatever crashes, and at another parallelism after a savepoint that comes in the midst of it."""
    chance = random.Random(seed)
    widths = chance.sample(WIDTHS, 2)
    checkpoints = tg.CheckpointConfig(
        interval="80ms",
        timeout="10s",
        tolerable_failed_checkpoints=2,
        storage=STORAGE,
        inline_threshold=INLINE_BYTES,
        unaligned=chance.random() < 0.5,
        backend=chance.choice(["columnar", "rocksdb"]),
    )
    stop = Action(chance.randrange(50, 500), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, FAULTS)

    def job(parallelism: int, actions: tuple[Action, ...], restore: str | None) -> JobRun:
        options = tg.DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=3)
        return simulation.run(
            JobSetting(
                _build,
                parallelism,
                checkpoints,
                options,
                actions=actions,
                restore=restore,
                sources=partial(TricklingSource, times_max=6),
                hurries=True,
            )
        )

    runs = [job(widths[0], (stop,), None)]
    if runs[0].violation is None and runs[0].status == "suspended":
        paths = [answer.path for answer in runs[0].answers.values() if answer.path is not None]
        runs.append(job(widths[1], (), paths[-1] if paths else "latest_or_fresh"))
    violation = runs[-1].violation or _violation(simulation)
    report = report_of(seed, FAULTS, simulation, runs, violation)
    assert report.ok, f"{report}\n{report.sequence()}"
    assert runs[-1].status == "finished"
