"""A wall clock that is set back and forth: nothing that is waited for comes later, or never, or is lost by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipelines import HARSH, PIPELINES, keyed

import tidegate as tg
from tidegate.testing import Faults, simulate


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("clock", ["300ms", "1h"])
@pytest.mark.parametrize("seed", range(2))
def test_no_seed_violates_an_invariant_where_the_clock_is_set(name: str, clock: str, seed: int) -> None:
    """Among all other faults; a job is over as long after the last of them as any."""
    report = simulate(PIPELINES[name], seed=seed, faults=replace(HARSH, clock=clock))
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])


@pytest.mark.parametrize("seed", [1, 2, 3, 5])
def test_checkpoints_go_on_while_the_clock_is_set(seed: int) -> None:
    """By an hour there are as many as by a millisecond: they do not wait for what that clock says."""
    a_little, much = (
        simulate(keyed, seed=seed, faults=Faults(clock=clock, delay="0ms..50ms")) for clock in ("1ms", "1h")
    )
    assert a_little.checkpoints > 1
    assert (a_little.checkpoints, a_little.restarts) == (much.checkpoints, much.restarts)


def test_a_clock_is_set_by_a_duration() -> None:
    """Anything else is refused."""
    with pytest.raises(tg.ConfigurationError, match="clock"):
        Faults(clock="yesterday")
