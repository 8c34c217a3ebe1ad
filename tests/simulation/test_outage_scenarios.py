"""Storage is unreachable for minutes: what a job survives, and what it reports when it does not."""

from __future__ import annotations

import pytest
from pipelines import PIPELINES, pipeline

from tidegate.testing import Faults


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("begin", ["100ms", "300ms", "1s"])
def test_an_outage_of_nine_minutes_is_survived_without_a_restart(name: str, begin: str) -> None:
    """Rows are the same as without an outage, in the same attempt."""
    report = pipeline(name).run(1, Faults(outage=f"{begin}..540s"))
    assert report.ok, report
    assert (report.status, report.restarts) == ("finished", 0)
    assert report.virtual_ms > 540_000


@pytest.mark.parametrize("seed", range(4))
def test_an_outage_is_survived_among_other_faults(seed: int) -> None:
    """Tasks and coordinators that die meanwhile start again from what is there."""
    faults = Faults(crash=0.02, coordinator_crash=0.02, delay="0ms..50ms", outage="400ms..540s")
    report = pipeline("keyed").run(seed, faults)
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])


def test_an_outage_of_eleven_minutes_fails_the_job_with_the_reason() -> None:
    """The job is given up after the allowed time, and does not hang."""
    report = pipeline("keyed").run(1, Faults(outage="300ms..661s"))
    assert (report.status, report.restarts) == ("failed", 0)
    assert "the event log could not be written for 600" in str(report.violation)
    assert "simulated outage" in str(report.violation)
    assert report.virtual_ms < 620_000
