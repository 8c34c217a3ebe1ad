"""Checkpoints are damaged after they have completed. The job continues from the one before, and rows are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
from broken import BROKEN, seeds_until_caught
from broken_fallback import FALLBACK_BREAKS
from broken_tables import TABLE_FIXED
from random_jobs.draw import draw
from random_jobs.scenarios import simulate_scenario

from tidegate.testing import SimulationReport

SEEDS = (1, 9, 29, 400, 402, 413, 418, 421)
"""Short ones, in which checkpoints are damaged that would have been restored."""


def run(seed: int) -> SimulationReport:
    """The scenario of a seed, with checkpoints that are damaged."""
    scenario = draw(seed)
    values = {**scenario.values, "faults": "damage", "retained": 3}
    return simulate_scenario(replace(scenario, values=values), shrink=False)


def test_no_seed_violates_an_invariant() -> None:
    """And checkpoints are passed over in some of them."""
    passed_over = 0
    for seed in SEEDS:
        report = run(seed)
        assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])
        passed_over += sum("CheckpointDamaged" in line for line in report.trace)
    assert passed_over


@pytest.mark.parametrize("rule", [*FALLBACK_BREAKS, *TABLE_FIXED])
def test_the_oracle_sees_a_broken_rule(rule: str) -> None:
    """Each rule, broken on purpose, shows as a violation within a few seeds."""
    seeds = seeds_until_caught(rule, (40, 17, 21, 22, 114, 130, 445, *SEEDS))
    assert any(not BROKEN[rule].simulate(seed).ok for seed in seeds)
