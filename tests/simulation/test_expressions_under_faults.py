"""Expressions wherever a column may stand, and state of any width, in the simulator: no fault changes the rows."""

from __future__ import annotations

from functools import cache

import pytest
from expression_program import totals
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline


@cache
def pipeline() -> SimulatedPipeline:
    """The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        totals(env, "sim://totals")

    return SimulatedPipeline(build)


@pytest.mark.parametrize("seed", range(6))
def test_totals_are_the_same_under_faults(seed: int) -> None:
    """Whatever crashes, and whatever storage does."""
    report = pipeline().run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
