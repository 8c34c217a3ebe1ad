"""Queries of the Nexmark benchmark under faults: the rows of a run without them."""

from __future__ import annotations

from functools import cache

import pytest
from nexmark import run
from nexmark.queries import QUERIES
from nexmark.workload import Workload
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

TINY = Workload(200, rate=1.0, out_of_order=50, block=50)


@cache
def pipeline(name: str) -> SimulatedPipeline:
    """The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        run.add(QUERIES[name], env, TINY, "sim://result")

    return SimulatedPipeline(build)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["q3", "q5", "q9", "q11", "q17"])
def test_a_query_gives_the_same_under_faults(name: str, seed: int) -> None:
    """Whatever crashes, and whatever storage does."""
    report = pipeline(name).run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
