"""The taxi examples under faults and rescales: the rows that polars computes for the same rides and fares."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import polars as pl
import pytest
from pipelines import HARSH
from rescaled_runs import WIDTHS, run_and_rescale, short_checkpoints
from taxi_data import rides_and_fares
from taxi_exercises import EXERCISES

import tidegate as tg
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.report import SimulationReport, report_of
from tidegate.testing.runtime.run import Action, Simulation

TABLE = "sim://result"
FAULTS = replace(HARSH, crash=0.05, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
SEEDS = range(4)
STOP_MS = 100, 700
"""The moment, after its start, at which the first job is stopped with a savepoint."""
RIDES, FARES = rides_and_fares(60, drivers=5, seed=5)
"""Two of these rides have no end, and three take more than two hours."""


@cache
def run_seed(name: str, seed: int) -> SimulationReport:
    """Run an exercise, stop it with a savepoint, restore it at another parallelism and compare it with its reference.

    Odd seeds have unaligned checkpoints. The seed draws the faults, both parallelisms and the moment of the savepoint.
    """
    chance = random.Random(f"{name} {seed}")
    widths = chance.sample(WIDTHS, 2)
    stop = Action(chance.randrange(*STOP_MS), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, FAULTS)
    checkpoints = short_checkpoints(unaligned=seed % 2 == 1)

    def build(env: tg.StreamEnvironment) -> None:
        EXERCISES[name].build(env, RIDES, FARES).to_table(TABLE)

    runs = run_and_rescale(simulation, build, widths, checkpoints, stop, rows_max=4)
    violation = runs[-1].violation
    if violation is None and runs[-1].status != "finished":
        violation = f"the job {runs[-1].status}: {runs[-1].reason}"
    if violation is None:
        found = pl.DataFrame(read_table(simulation.open_store(TABLE)))
        try:
            EXERCISES[name].check(found, pl.DataFrame(RIDES), pl.DataFrame(FARES))
        except AssertionError as error:
            violation = f"the result differs from its reference: {error}"
    return report_of(seed, FAULTS, simulation, runs, violation, f"{name} widths={widths} stop={stop.at_ms}")


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_gives_its_reference_under_faults(name: str, seed: int) -> None:
    """Processes and coordinators crash, storage fails, messages are lost, and the job is rescaled by a savepoint."""
    report = run_seed(name, seed)
    assert report.ok, f"{report}\n{report.sequence()}"


@pytest.mark.slow
def test_these_seeds_restore_state_and_rows_in_flight() -> None:
    """Each exercise has tasks that crash, and a run that continues from a savepoint; some restore rows in flight."""
    seen: Counter[str] = Counter()
    for name in EXERCISES:
        reports = [run_seed(name, seed) for seed in SEEDS]
        coverage = sum((report.coverage for report in reports), Counter())
        assert sum(report.crashes for report in reports) > 0
        assert coverage["stop_with_savepoint"] > 0
        seen += coverage
    assert seen["in_flight_restored"] > 0
