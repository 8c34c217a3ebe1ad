"""Runs a query of Nexmark in the simulator: a seed draws faults, checkpoints and buffers as for random programs.

Rules: the first job is stopped with a savepoint at a moment that the seed draws, unless it is over before, and a second
one goes on from there at another parallelism. Then the table has the rows that polars computes. All runs exactly once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import polars as pl

import tidegate as tg
from nexmark import run
from nexmark.queries import QUERIES
from nexmark.workload import Workload
from tidegate.simulation.pipelines.draw import draw
from tidegate.simulation.report import SimulationReport, report_of
from tidegate.simulation.runtime.run import Action, JobRun, JobSetting, Simulation
from tidegate.simulation.scenarios import settings_of
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import TidegateError
from tidegate.storage.tables.table_files import read_table

TINY = Workload(200, rate=1.0, out_of_order=50, block=50)
"""Two hundred seconds: some windows, and auctions that end; no two events at one moment."""
TABLE = "sim://result"
SETTLE_MS_MAX = 600_000
WIDTHS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of a query, and whether its second job had another parallelism."""

    report: SimulationReport
    rescaled: bool


def run_seed(name: str, seed: int) -> Outcome:
    """One seed of a query. The seed decides everything."""
    chance = random.Random(f"{name} {seed}")
    scenario = draw(seed)
    scenario = replace(scenario, values={**scenario.values, "mode": "exactly-once", "topology": "rows"})
    faults, checkpoints, options = settings_of(scenario)
    widths = chance.choice(WIDTHS), chance.choice(WIDTHS)
    stop = Action(chance.randrange(100, 6_000), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, faults)

    def setting(width: int, actions: tuple[Action, ...], restore: str | None) -> JobSetting:
        def build(env: tg.StreamEnvironment) -> None:
            run.add(QUERIES[name], env, TINY, TABLE)

        return JobSetting(
            build, width, checkpoints, options, actions=actions, restore=restore, settle_ms_max=SETTLE_MS_MAX
        )

    runs = [simulation.run(setting(widths[0], (stop,), None))]
    violation = runs[0].violation
    if violation is None and runs[0].status == "suspended":
        try:
            runs.append(simulation.run(setting(widths[1], (), _savepoint(runs[0]))))
            violation = runs[1].violation
        except TidegateError as error:
            violation = f"the second job was refused: {error}"
    if violation is None:
        violation = _wrong(name, simulation, runs)
    text = f"{name} widths={widths[0]},{widths[1]} {scenario}"
    report = report_of(seed, faults, simulation, runs, violation, text)
    return Outcome(report, len(runs) > 1 and widths[0] != widths[1])


@cache
def _expected(name: str) -> list[tuple[object, ...]]:
    return run.expected(QUERIES[name], TINY)


def _savepoint(stopped: JobRun) -> str:
    """Where the savepoint is; if its answer went with a coordinator, the newest checkpoint is it."""
    paths = [answer.path for answer in stopped.answers.values() if answer.path is not None]
    return paths[-1] if paths else "latest_or_fresh"


def _wrong(name: str, simulation: Simulation, runs: Sequence[JobRun]) -> str | None:
    if runs[-1].status != "finished":
        return f"the job {runs[-1].status}, though every fault was survivable: {runs[-1].reason}"
    found = run.result_of(pl.DataFrame(read_table(simulation.open_store(TABLE))), QUERIES[name])
    expected = _expected(name)
    if found == expected:
        return None
    missing, extra = [row for row in expected if row not in found], [row for row in found if row not in expected]
    return f"{len(found)} rows instead of {len(expected)}; missing {missing[:2]}, too many {extra[:2]}"
