"""Logs of tables that lose entries which storage had acknowledged: the job reports it, or its rows are right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

from pipelines import keyed
from random_jobs.draw import draw
from random_jobs.scenarios import simulate_scenario

from tidegate.storage.tables.table_log import TableLog
from tidegate.testing import Faults, SimulationReport, simulate

SEEDS = range(9, 16)
LOSES_ROWS = 15


def run(seed: int) -> SimulationReport:
    """The scenario of a seed, with many checkpoints and lost entries."""
    scenario = draw(seed)
    values = {**scenario.values, "faults": "lost entries", "interval_ms": 60, "min_pause_ms": 0}
    return simulate_scenario(replace(scenario, values=values), shrink=False)


def test_lost_entries_are_reported_or_committed_again() -> None:
    """Both happen in these seeds, together with crashes and faults of storage."""
    ends: Counter[str | None] = Counter()
    for seed in SEEDS:
        report = run(seed)
        assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])
        if any("are lost" in line for line in report.trace):
            ends[report.status] += 1
    assert {"failed", "finished"} <= ends.keys()


def test_the_oracle_sees_a_job_that_expects_nothing_of_a_log() -> None:
    """Rows are missing then, and the loss is not reported."""
    with patch.object(TableLog, "expect", lambda *_: None):
        report = run(LOSES_ROWS)
    assert str(report.violation).startswith("invariant 6")


def test_a_pipeline_of_a_user_may_end_with_the_report() -> None:
    """`simulate` takes a job that reports the loss for right."""
    reports = [simulate(keyed, seed=seed, faults=Faults(table_loss=0.3, duration="5s")) for seed in range(4)]
    assert all(report.ok for report in reports), reports
    assert "failed" in {report.status for report in reports}
