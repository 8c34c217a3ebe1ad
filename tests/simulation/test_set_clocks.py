"""A wall clock that is set back and forth: nothing that is waited for comes later, or never, or is lost by it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from pipelines import HARSH, PIPELINES, pipeline

import tidegate as tg
from tidegate.testing import Faults

MOMENT = re.compile(r" *(?P<ms>\d+) coordinator -> \S+ Checkpoint(?P<event>Triggered|Completed)\((?P<checkpoint>\d+)\)")
"""Matches a line of a trace, which begins with the milliseconds since the start, whatever the clocks show."""


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("clock", ["300ms", "1h"])
@pytest.mark.parametrize("seed", range(2))
def test_no_seed_violates_an_invariant_where_the_clock_is_set(name: str, clock: str, seed: int) -> None:
    """Among all other faults; a job is over as long after the last of them as any."""
    report = pipeline(name).run(seed, replace(HARSH, clock=clock))
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])


@pytest.mark.parametrize("seed", [1, 2, 3, 6])
def test_checkpoints_go_on_while_the_clock_is_set(seed: int) -> None:
    """Timers do not follow the wall clock, though it moves back by an hour again and again.

    A checkpoint takes longer here than the interval, so the next one begins when one is complete.
    """
    report = pipeline("keyed").run(seed, Faults(clock="1h", delay="0ms..50ms"))
    moments: dict[tuple[str, int], int] = {}
    for line in report.trace:
        if (found := MOMENT.match(line)) is not None:
            moments.setdefault((found["event"], int(found["checkpoint"])), int(found["ms"]))
    followed = [n for event, n in moments if event == "Completed" and ("Triggered", n + 1) in moments]
    assert len(followed) >= 3
    assert [n for n in followed if moments["Triggered", n + 1] > moments["Completed", n]] == []


def test_a_clock_is_set_by_a_duration() -> None:
    """Anything else is refused."""
    with pytest.raises(tg.ConfigurationError, match="clock"):
        Faults(clock="yesterday")
