"""A sink that commits in its tasks under faults: every row becomes visible once, and nothing before its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from broken import BROKEN, seeds_until_caught
from broken_commits import COMMIT_PATCHES
from pipelines import HARSH
from random_jobs.ledger_topologies import COMMITS_IN_TASKS, known, scenario_of, slot_scenario_of
from random_jobs.scenarios import simulate_scenario

from tidegate.cli.seed_runs import quiet
from tidegate.testing import SimulatedPipeline, SimulationReport
from tidegate.testing.world.ledger import LedgerSink

ROWS = pa.table({"x": list(range(120))})
SEEDS = 12


def build(env: Any) -> None:
    """Rows to a ledger, and to a table."""
    rows = env.from_batches(ROWS, splits=4, uid="rows")
    rows.to_sink(LedgerSink(env.ledger("ledger")), flush_bytes=100, uid="sink")
    rows.to_table("sim://table", uid="table")


@pytest.fixture(scope="module")
def reports() -> Sequence[SimulationReport]:
    """One report for each seed."""
    pipeline = SimulatedPipeline(build)
    with quiet():
        return [pipeline.run(seed, HARSH) for seed in range(SEEDS)]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_is_visible_once(reports: Sequence[SimulationReport], seed: int) -> None:
    """Whatever crashes, between any two steps, and however often a commit is repeated."""
    report = reports[seed]
    assert report.ok, f"{report}\n{report.sequence()}"


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 2, 5, 8, 12),
        pytest.param(209, id="the notification that the final checkpoint is complete is lost"),
        pytest.param(642, id="the same of a job whose tasks were adopted"),
        pytest.param(2637, id="the end of a channel is lost, so that a task that has committed cannot leave"),
        pytest.param(810, id="the same of unaligned checkpoints"),
        pytest.param(4630, id="a coordinator dies before it repeats the notification, and a task leaves"),
    ],
)
def test_two_jobs_write_every_row_once(seed: int) -> None:
    """Random jobs that end by a cancel, a failure, a stop or themselves, and go on at another parallelism."""
    with known():
        report = simulate_scenario(scenario_of(seed), shrink=False)
    assert report.ok, f"{report}\n{report.sequence()}"


@pytest.mark.parametrize("seed", [0, 1, 6, 7, 9])
def test_rows_that_a_source_has_confirmed_are_never_needed_again(seed: int) -> None:
    """The source deletes them. Both jobs, at any parallelism, write each row once nevertheless."""
    with known():
        report = simulate_scenario(slot_scenario_of(seed), shrink=False)
    assert report.ok, f"{report}\n{report.sequence()}"


def test_the_seeds_exercise_every_effect_of_commits(reports: Sequence[SimulationReport]) -> None:
    """Tasks commit, and commit again after a restore."""
    seen = {effect for report in reports for effect in report.coverage}
    assert seen >= COMMITS_IN_TASKS


@pytest.mark.parametrize("rule", COMMIT_PATCHES)
def test_each_broken_rule_is_noticed(rule: str) -> None:
    """Within a few seeds, by the oracle of commits or by the rows of the ledger."""
    assert any(not BROKEN[rule].simulate(seed).ok for seed in seeds_until_caught(rule, range(12)))
