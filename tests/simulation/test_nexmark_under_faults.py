"""Queries of the Nexmark benchmark under faults and rescales: the rows that polars computes."""

from __future__ import annotations

import pytest
from nexmark.faults import DATA, expected, run_seed, workload_of
from nexmark.queries import QUERIES

from tidegate.testing import SimulationReport


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["q3", "q5", "q7", "q9", "q11", "q17"])
def test_a_query_gives_the_same_under_faults(name: str, seed: int) -> None:
    """Whatever crashes, whatever storage does, and at another parallelism after a savepoint."""
    report: SimulationReport = run_seed(name, seed).report
    assert report.ok, f"{report}\n{report.sequence()}"


@pytest.mark.parametrize(("name", "seed"), [("q12", 21_743), ("q15", 21_818)])
def test_a_seed_that_was_violated(name: str, seed: int) -> None:
    """A process that was taken for dead left a copy on the node; and a coordinator that had slept through a truncation
    wrote its entry once more, for which it is fenced."""
    report: SimulationReport = run_seed(name, seed).report
    assert report.ok, f"{report}\n{report.sequence()}"


@pytest.mark.parametrize("name", list(QUERIES))
def test_each_workload_has_rows_for_its_query(name: str) -> None:
    """A table that must be empty would show only what is too much."""
    assert all(expected(name, workload_of(name, data)) for data in DATA)
