"""A state that a restored program drops, under faults: no attempt gets it back, and no other state loses a row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pipelines import HARSH
from random_jobs.sources import TricklingSource
from rescaled_runs import short_checkpoints

import tidegate as tg
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.report import report_of
from tidegate.testing.runtime.run import Action, JobRun, JobSetting, Simulation
from tidegate.testing.simulated import SMALL_BUFFERS

TABLE = "sim://result"
FAULTS = replace(HARSH, crash=0.04, restore_crash=0.3, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
SEEDS = (*range(1, 6), 7)
ROWS, KEYS = 300, 5
INPUT = pa.table({"k": [x % KEYS for x in range(ROWS)]})
INT = pa.int64()
OUT = pa.schema([("k", INT), ("run", INT), ("n", INT), ("m", INT)])


class _Counts(tg.ProcessFunction):
    """Counts rows in the value `n`, and in the list `m` except in the second run."""

    def __init__(self, run: int) -> None:
        self.run = run

    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(tg.ValueState("n", INT))
        self.m = None if self.run == 2 else context.state(tg.ListState("m", INT))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        n = (self.n.value() or 0) + 1
        self.n.update(n)
        if self.m is not None:
            self.m.add(n)
        yield {"k": row["k"], "run": self.run, "n": n, "m": 0 if self.m is None else len(self.m.get())}


def _build(run: int, env: tg.StreamEnvironment) -> None:
    stream = env.from_batches(INPUT, splits=3, uid="in").key_by("k")
    stream.process(_Counts(run), schema=OUT, uid="counts").to_table(TABLE, uid="out")


def _wrong(rows: pl.DataFrame) -> str | None:
    """Returns how the rows of all runs are wrong, or None."""
    for (key,), of in rows.sort("k", "n").group_by("k", maintain_order=True):
        if of["n"].to_list() != list(range(1, ROWS // KEYS + 1)):
            return f"key {key} counts {of['n'].to_list()}"
        for (run,), part in of.group_by("run"):
            held = {1: part["n"].to_list(), 2: [0] * len(part), 3: list(range(1, len(part) + 1))}[int(str(run))]
            if part["m"].to_list() != held:
                return f"key {key} in run {run} has {part['m'].to_list()} in the state that was dropped, not {held}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_a_dropped_state_stays_away_and_the_others_stay(seed: int) -> None:
    """With crashes before and after the first checkpoint, at another parallelism, and until it is declared again."""
    chance = random.Random(seed)
    widths = chance.choices((1, 2, 3), k=3)
    checkpoints = short_checkpoints(incremental=chance.random() < 0.5, unaligned=chance.random() < 0.5)
    simulation = Simulation(seed, FAULTS)
    runs: list[JobRun] = []
    restore = None
    for run in (1, 2, 3):
        wanted = chance.choice(list(SavepointFormat))
        # When the faults are over: a request that comes among them may fail.
        stop = Action(chance.randrange(5_100, 6_000), SnapshotKind.SUSPEND, wanted)
        runs.append(
            simulation.run(
                JobSetting(
                    partial(_build, run),
                    widths[run - 1],
                    checkpoints,
                    tg.DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=1),
                    actions=() if run == 3 else (stop,),
                    restore=restore,
                    allow_non_restored_state=run == 2,
                    sources=partial(TricklingSource, times_max=6),
                    hurries=True,
                )
            )
        )
        if runs[-1].violation is not None or runs[-1].status != "suspended":
            break
        paths = [answer.path for answer in runs[-1].answers.values() if answer.path is not None]
        restore = paths[-1] if paths else "latest"
    violation = runs[-1].violation
    rows = pl.DataFrame(read_table(simulation.open_store(TABLE)))
    if violation is None:
        violation = _wrong(rows)
    report = report_of(seed, FAULTS, simulation, runs, violation)
    assert report.ok, f"{report}\n{report.sequence()}"
    assert (len(runs), runs[-1].status) == (3, "finished")
    assert runs[1].restarts > 0
    assert set(rows["run"]) == {1, 2, 3}, "a run has processed no rows"
