"""Processes that die while they restore, or wait for others that do: the job begins again, each row counts once."""

from __future__ import annotations

import pytest
from broken import Break
from pipelines import PIPELINES

from tidegate.testing import Faults, simulate

OFTEN = Faults(crash=0.03, restore_crash=0.3, delay="0ms..30ms", duration="5s", crashes_max=12)


@pytest.mark.parametrize("name", ["keyed", "two_stages"])
def test_rows_count_once_though_restores_are_interrupted(name: str) -> None:
    """Again and again, in one attempt after the other."""
    report = simulate(PIPELINES[name], seed=1, faults=OFTEN)
    assert report.ok, report
    assert report.coverage["restore_interrupted"] > 3


@pytest.mark.parametrize("seed", [3, 6])
def test_interrupted_restores_go_with_other_faults(seed: int) -> None:
    """No invariant breaks when the coordinator and storage fail too, with any drawn settings."""
    report = Break(7, fixed={"faults": "restores"}).simulate(seed)
    assert report.ok, report
    assert report.coverage["restore_interrupted"]
