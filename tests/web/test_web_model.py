"""The model: states in Flink's words, percentiles, and numbers that nobody knows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fixture_jobs import failed_job, running_job
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.coordinator.phases import JobStatus
from tidegate.web.model import job_details, job_state
from tidegate.web.model.checkpoints import summary


@pytest.mark.parametrize(
    ("status", "attempt", "ending", "state"),
    [
        (JobStatus.CREATED, 0, None, "INITIALIZING"),
        (JobStatus.DEPLOYING, 0, None, "CREATED"),
        (JobStatus.DEPLOYING, 2, None, "RESTARTING"),
        (JobStatus.RUNNING, 2, None, "RUNNING"),
        (JobStatus.RESTARTING, 1, None, "RESTARTING"),
        (JobStatus.ENDING, 0, JobStatus.FAILED, "FAILING"),
        (JobStatus.ENDING, 0, JobStatus.CANCELLED, "CANCELLING"),
        (JobStatus.ENDING, 0, JobStatus.FINISHED, "RUNNING"),
        (JobStatus.FINISHED, 0, None, "FINISHED"),
        (JobStatus.SUSPENDED, 0, None, "FINISHED"),
        (JobStatus.CANCELLED, 0, None, "CANCELED"),
        (JobStatus.FAILED, 0, None, "FAILED"),
    ],
)
def test_job_states_have_flinks_names(status: JobStatus, attempt: int, ending: JobStatus | None, state: str) -> None:
    """Each status of a job is one of Flink's states."""
    job = running_job()
    progress = replace(job.snapshot.progress, attempt=attempt)
    snapshot = replace(job.snapshot, status=status, ending=ending, progress=progress)
    assert job_state(replace(job, snapshot=snapshot)) == state


def test_a_silent_job_has_an_age() -> None:
    """A job that does not answer says how old its numbers are; one that is over never does."""
    job = replace(running_job(), reachable=False)
    job = replace(job, now_ms=job.now_ms + 7_000)
    assert job_details(job)["state"] == "RECONCILING"
    assert job_details(job)["tidegate"]["stale-ms"] == 7_000
    assert job_details(replace(failed_job(), now_ms=job.now_ms))["tidegate"]["stale-ms"] == 0


@given(st.lists(st.integers(0, 10**12), max_size=40))
def test_percentiles_are_ordered(values: list[int]) -> None:
    """They lie between the least and the most, each at least the one before; without numbers they are NaN in JSON."""
    told = summary(values)
    json.dumps(told, allow_nan=False)
    percentiles = [told[name] for name in ("p50", "p90", "p95", "p99", "p999")]
    if not values:
        assert percentiles == ["NaN"] * 5
        return
    assert sorted(percentiles) == percentiles
    assert told["min"] <= percentiles[0]
    assert percentiles[-1] <= told["max"]
    assert told["min"] <= told["avg"] <= told["max"]


def test_the_median_is_interpolated() -> None:
    """As Flink computes it."""
    assert summary([4, 1, 2, 3])["p50"] == 2.5
    assert summary([7])["p999"] == 7.0
