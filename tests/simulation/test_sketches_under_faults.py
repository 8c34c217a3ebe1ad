"""Approximate aggregates in the simulator: no fault changes what the sketches of few values give, which is exact."""

from __future__ import annotations

import pytest
from random_jobs.scenarios import simulate_scenario
from sketch_topology import known, scenario_of


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("faults", ["tasks", "all", "damage"])
def test_sketches_are_the_same_under_faults(seed: int, faults: str) -> None:
    """Whatever dies, a value is counted once, in a sketch that was restored as well."""
    with known():
        report = simulate_scenario(scenario_of(seed, faults), shrink=False)
    assert report.ok, f"{report}\n{report.sequence()}"
