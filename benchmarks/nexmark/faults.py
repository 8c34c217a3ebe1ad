"""Runs a query of Nexmark in the simulator: a seed draws faults, checkpoints and buffers as for random programs.

Rules: task processes die in every run, whatever else its seed draws. The first job is stopped with a savepoint at a
moment that the seed draws, unless it is over before, and a second one goes on from there at another parallelism. Then
the table has the rows that polars computes, and some there must be. All runs exactly once; most barriers overtake rows.
Workloads are as small as they can be: a turn of a task costs what a turn costs, however few rows it takes. And nothing
is restored when the last fault is over, so in most runs what is left of the input is then read at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import polars as pl
from random_jobs.draw import Scenario, draw
from random_jobs.scenarios import faults_of, setting_of
from random_jobs.sources import CutSource, TricklingSource

import tidegate as tg
from nexmark import run
from nexmark.queries import QUERIES
from nexmark.workload import Workload
from tidegate.connectors.source import Source
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import TidegateError
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.report import SimulationReport, report_of
from tidegate.testing.runtime.run import Action, JobRun, JobSetting, Simulation
from tidegate.testing.world.faults import Faults

TABLE = "sim://result"
SETTLE_MS_MAX = 600_000
WIDTHS = (1, 2, 3)
_WIDTHS = {"q15": (1, 2), "q16": (1, 2)}
"""Of queries with ten operators that exchange rows: at a parallelism of 3 they would have thirty subtasks."""
DATA = (0, 3, 5, 7, 8, 9, 11)
"""Seeds of workloads, of which each query has rows: the seed of a run chooses one."""
STOP_MS = 100, 1_500
"""When the first job is stopped: hardly one is over by then."""
CRASH = 0.045
"""The least chance that a turn of a task is its last one."""
CRASHES_MAX = 5
"""Of each job, or more."""
LINGERS = 0.2
"""The part of runs whose slow tasks stay slow when the last fault is over: these have most checkpoints."""
WIDER = 6
"""So many times the buffers of random programs, whose rows are narrow: events are that much wider."""
SOURCE_ROWS_MAX = 8
TRICKLES = 2
"""So often a split has nothing at a place: each time costs a turn."""
PARTS = 2
"""Splits of a source, or more."""

NO_FAULTS = Faults()

_TINY = Workload(50, rate=0.25, out_of_order=50, block=50)
"""Two hundred seconds: some windows, and auctions that end; no two events at one moment."""
_FEW_BLOCKS = replace(_TINY, events=1_000, rate=5.0, block=250)
_WORKLOADS = {
    # The auction that half of the bids are for then is one of those asked for.
    "q2": replace(_TINY, skipped=188_400),
    # Neither reads bids, so there may be more people and auctions.
    "q3": _FEW_BLOCKS,
    "q8": _FEW_BLOCKS,
    # A window ends every two seconds, and each of them costs.
    "q5": replace(_TINY, rate=1.0),
    "q20": replace(_TINY, events=100, rate=0.5),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of a query, and whether its second job had another parallelism."""

    report: SimulationReport
    rescaled: bool


def run_seed(name: str, seed: int) -> Outcome:
    """One seed of a query. The seed decides everything."""
    chance = random.Random(f"{name} {seed}")
    scenario = _drawn(chance, seed)
    faults = _that_crash(faults_of(scenario))
    workload = workload_of(name, DATA[seed % len(DATA)])
    widths = chance.sample(_WIDTHS.get(name, WIDTHS), 2)
    stop = Action(chance.randrange(*STOP_MS), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, faults)

    def build(env: tg.StreamEnvironment) -> None:
        run.add(QUERIES[name], env, workload, TABLE)

    setting = _setting(scenario, setting_of(scenario, build), hurries=chance.random() >= LINGERS)
    runs = [simulation.run(replace(setting, parallelism=widths[0], actions=(stop,)))]
    violation = runs[0].violation
    if violation is None and runs[0].status == "suspended":
        try:
            runs.append(simulation.run(replace(setting, parallelism=widths[1], restore=_savepoint(runs[0]))))
            violation = runs[1].violation
        except TidegateError as error:
            violation = f"the second job was refused: {error}"
    if violation is None:
        violation = _wrong(name, workload, simulation, runs)
    text = f"{name} widths={widths[0]},{widths[1]} stop={stop.at_ms} {scenario}"
    report = report_of(seed, faults, simulation, runs, violation, text)
    return Outcome(report, len(runs) > 1)


def workload_of(name: str, data: int) -> Workload:
    """One of the workloads of a query."""
    return replace(_WORKLOADS.get(name, _TINY), seed=data)


@cache
def expected(name: str, workload: Workload) -> list[tuple[object, ...]]:
    """What must come out."""
    return run.expected(QUERIES[name], workload)


def _drawn(chance: random.Random, seed: int) -> Scenario:
    """The scenario of a seed, with what is asked of every run."""
    scenario = draw(seed)
    values = {**scenario.values, "mode": "exactly-once", "topology": "rows"}
    if values["alignment"] == "aligned" and values["max_concurrent"] == 1 and chance.random() < 0.5:
        values["alignment"] = "unaligned"
    return replace(scenario, values=values)


def _that_crash(faults: Faults) -> Faults:
    return replace(
        faults,
        crash=max(faults.crash, CRASH),
        crashes_max=max(faults.crashes_max, CRASHES_MAX),
        delay="0ms..30ms" if faults.delay == NO_FAULTS.delay else faults.delay,
    )


def _setting(scenario: Scenario, setting: JobSetting, hurries: bool) -> JobSetting:
    limits = setting.options.limits
    wider = replace(
        limits,
        credit_bytes=WIDER * limits.credit_bytes,
        queue_bytes_max=WIDER * limits.queue_bytes_max,
        frame_bytes_min=WIDER * limits.frame_bytes_min,
        frame_bytes_max=WIDER * limits.frame_bytes_max,
        window_bytes_min=WIDER * limits.window_bytes_min,
    )
    return replace(
        setting,
        options=replace(setting.options, limits=wider, source_rows_max=SOURCE_ROWS_MAX),
        settle_ms_max=SETTLE_MS_MAX,
        hurries=hurries,
        sources=_trickling if scenario.values["sources"] == "trickling" else _cut,
    )


def _cut(source: Source) -> Source:
    """A source of a single block has one split, and it takes two to read them in turn and to merge watermarks."""
    return source if len(source.splits()) >= PARTS else CutSource(source, PARTS, static_splits=False, unbounded=True)


def _trickling(source: Source) -> Source:
    """The same, with nothing now and then."""
    return TricklingSource(_cut(source), times_max=TRICKLES)


def _savepoint(stopped: JobRun) -> str:
    """Where the savepoint is; if its answer went with a coordinator, the newest checkpoint is it."""
    paths = [answer.path for answer in stopped.answers.values() if answer.path is not None]
    return paths[-1] if paths else "latest_or_fresh"


def _wrong(name: str, workload: Workload, simulation: Simulation, runs: Sequence[JobRun]) -> str | None:
    if runs[-1].status != "finished":
        return f"the job {runs[-1].status}, though every fault was survivable: {runs[-1].reason}"
    found = run.result_of(pl.DataFrame(read_table(simulation.open_store(TABLE))), QUERIES[name])
    rows = expected(name, workload)
    if found == rows:
        return None
    missing, extra = [row for row in rows if row not in found], [row for row in found if row not in rows]
    return f"{len(found)} rows instead of {len(rows)}; missing {missing[:2]}, too many {extra[:2]}"
