"""Waits of tests end where the jobs that they have started have failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from waiting import until

import tidegate as tg


def failing(env: tg.StreamEnvironment, folder: Path, restart: tg.RestartStrategy = NO_RESTART) -> tg.Job:
    """Start a job whose function fails."""
    source = GatedSource(20, gates=[10])

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("a wrong argument")

    env.from_source(source, uid="rows").map_batches(function, schema=source.schema, uid="map").collect(uid="out")
    return env.execute("failing", checkpoints=config(folder), restart=restart)


def after_looks(count: int) -> Callable[[], bool]:
    """A condition that is true when it was evaluated so often."""
    looks = iter([False] * (count - 1))
    return lambda: next(looks, True)


def test_a_wait_for_a_failed_job_ends_with_its_failure(tmp_path: Path) -> None:
    """Its reason is in the error."""
    with local(1) as env:
        job = failing(env, tmp_path)
        with pytest.raises(AssertionError, match=r"in vain for a checkpoint: a job has failed: (.|\n)*argument"):
            until("a checkpoint", lambda: job.progress().completed_checkpoints > 0)


def test_a_wait_for_a_gate_ends_with_the_failure(tmp_path: Path) -> None:
    """The gate of another source, which nobody reads any more."""
    with local(1) as env:
        failing(env, tmp_path)
        with pytest.raises(AssertionError, match=r"in vain for gate 10: a job has failed: (.|\n)*argument"):
            GatedSource(20, gates=[10]).await_gate(10)


def test_a_failure_that_the_test_expects_ends_no_wait(tmp_path: Path) -> None:
    """The test says with the wait that it expects one."""
    with local(1) as env:
        failing(env, tmp_path)
        until("what follows from it", after_looks(50), after_failure=True)


def test_a_failure_that_the_test_knows_ends_no_wait(tmp_path: Path) -> None:
    """`Job.wait` has raised it."""
    with local(1) as env:
        job = failing(env, tmp_path)
        with pytest.raises(tg.JobFailedError):
            job.wait("4min")
        until("what follows from it", after_looks(50))


def test_a_failed_job_beside_one_that_runs_ends_no_wait(tmp_path: Path) -> None:
    """The wait goes on while one job can still bring what it waits for, and while a job restarts."""
    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        env.from_source(source, uid="rows").collect(uid="out")
        env.execute("running", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        with local(1) as other:
            failed = failing(other, tmp_path / "failed")
            until("the failure", lambda: failed.status() == "failed")
            until("something of the other one", after_looks(50))
    with local(1) as env:
        failing(env, tmp_path / "restarts", tg.RestartStrategy.fixed_delay(1_000_000, "1min"))
        until("the next attempt", after_looks(50))
