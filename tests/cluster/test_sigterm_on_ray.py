"""SIGTERM to the processes of a job on Ray: each ends at once, and the job recovers as from SIGKILL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_jobs import keyed_job, until

from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.recovery.restart_strategy import RestartStrategy

WAIT_S = 240.0


@pytest.fixture
def plain_runtime(plain_ray: None) -> Iterator[RayRuntime]:
    """A runtime without spare processes."""
    runtime = RayRuntime(standbys=0)
    yield runtime
    runtime.stop()


def test_a_coordinator_that_gets_sigterm_is_followed(plain_runtime: RayRuntime, tmp_path: Path) -> None:
    """The process ends and Ray starts a successor, which completes further checkpoints. No task restarts."""
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="told", parallelism=1, restart=RestartStrategy.none())
    job = plain_runtime.submit(keyed.submission)
    seen = until("a checkpoint", job.progress, lambda p: p.completed_checkpoints > 0)
    os.kill(job.coordinator().pid, signal.SIGTERM)
    until(
        "a checkpoint of the successor",
        job.progress,
        lambda p: p.adoptions == 1 and p.completed_checkpoints > seen.completed_checkpoints,
    )
    gate.touch()
    end = job.wait(WAIT_S)
    assert end is not None
    assert (end.status, end.coordinator_losses, end.restarts) == ("finished", 1, 0)
    assert keyed.table().equals(keyed.expected)


def test_a_task_that_gets_sigterm_before_any_checkpoint_restarts(plain_runtime: RayRuntime, tmp_path: Path) -> None:
    """A bounded job without a checkpoint interval names the signal as its failure, and finishes."""
    gate = tmp_path / "gate"
    restart = RestartStrategy.fixed_delay(attempts=1, delay=0)
    keyed = keyed_job(tmp_path, gate, name="told", parallelism=1, interval_ms=None, restart=restart)
    job = plain_runtime.submit(keyed.submission)
    until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0)
    victim = job.tasks()[0]
    os.kill(victim.pid, signal.SIGTERM)
    until("a restart", job.progress, lambda p: p.restarts == 1)
    gate.touch()
    end = job.wait(WAIT_S)
    assert end is not None
    assert (end.status, end.restarts) == ("finished", 1)
    assert f"pid {victim.pid}, has ended" in str(end.last_failure)
    assert "SIGTERM" in str(end.last_failure)
    assert keyed.table().equals(keyed.expected)
