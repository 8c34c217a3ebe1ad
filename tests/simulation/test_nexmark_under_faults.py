"""Queries of the Nexmark benchmark under faults and rescales: the rows that polars computes."""

from __future__ import annotations

import pytest
from nexmark.faults import run_seed

from tidegate.testing import SimulationReport


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["q3", "q5", "q7", "q9", "q11", "q17"])
def test_a_query_gives_the_same_under_faults(name: str, seed: int) -> None:
    """Whatever crashes, whatever storage does, and at another parallelism after a savepoint."""
    report: SimulationReport = run_seed(name, seed).report
    assert report.ok, f"{report}\n{report.sequence()}"
