"""A coordinator that is lost while the first attempt is deployed, while tasks run, or when a stop is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pipelines import keyed

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.testing import Faults
from tidegate.testing.runtime.run import SAVEPOINTS, STORAGE, JobRun, JobSetting, Simulation
from tidegate.testing.runtime.simulated_job import SimulatedJob
from tidegate.testing.simulated import SMALL_BUFFERS

SETTLE_MS_MAX = 300_000
SEEDS = range(2)
HOW = pytest.mark.parametrize("cut_off", [pytest.param(False, id="it dies"), pytest.param(True, id="it is cut off")])


def run(seed: int, strike: Callable[[SimulatedJob], None]) -> JobRun:
    """Run a job without other faults, after something was prepared. A task that fails would end it."""
    simulation = Simulation(seed, Faults(heartbeats="700ms"))
    checkpoints = CheckpointConfig(interval="100ms", storage=STORAGE, inline_threshold=1_000)
    options = DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=8)
    job = simulation.prepare(
        JobSetting(keyed, 2, checkpoints, options, RestartStrategy.none(), adoption_timeout_ms=3_000)
    )
    strike(job)
    return simulation.finish(job, SETTLE_MS_MAX)


def when(job: SimulatedJob, due: Callable[[JobStatus, int], bool], strike: Callable[[], None]) -> None:
    """Strike when status and number of completed checkpoints are as wanted; look every ms."""

    def look() -> None:
        coordinator = job.coordinator
        if coordinator is None or not due(
            coordinator.machine.state.status, coordinator.machine.state.completed_checkpoints
        ):
            job.world.after(1, look)
        else:
            strike()

    job.world.after(0, look)


@HOW
@pytest.mark.parametrize("seed", SEEDS)
def test_a_job_whose_first_deployment_is_interrupted_is_deployed_anew(seed: int, cut_off: bool) -> None:
    """The progress of a task is unknown. That is not a failure, and all rows come once."""

    def strike(job: SimulatedJob) -> None:
        when(job, lambda status, _: status is JobStatus.DEPLOYING, lambda: job.lose_coordinator(cut_off=cut_off))

    struck, reference = run(seed, strike), run(seed, lambda job: None)
    assert (struck.violation, struck.status, struck.rows) == (None, "finished", reference.rows)
    assert struck.job.coordinator_crashes == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_coordinator_that_is_cut_off_costs_no_restart(seed: int) -> None:
    """A coordinator that is cut off takes all tasks for hung.

    When it killed them, two or three attempts followed, because its kills arrive one by one and also hit the next
    attempt.
    """

    def strike(job: SimulatedJob) -> None:
        runs = lambda status, completed: status is JobStatus.RUNNING and completed > 0  # noqa: E731
        when(job, runs, lambda: job.lose_coordinator(cut_off=True))

    cut = run(seed, strike)
    assert (cut.violation, cut.status, cut.restarts) == (None, "finished", 0)
    assert cut.job.ended is not None
    assert cut.job.ended.adoptions == 1


@HOW
@pytest.mark.parametrize("after_ms", [0, 150, 310])
def test_a_stop_that_nobody_hears_at_first_ends_the_job_with_a_savepoint(after_ms: int, cut_off: bool) -> None:
    """The successor receives the request before or while it adopts the tasks. It loses no attempt and answers the
    request.
    """

    def strike(job: SimulatedJob) -> None:
        def lose() -> None:
            job.lose_coordinator(cut_off=cut_off)
            stop = co.CheckpointRequested(job.world.wall_ms, "stop", SnapshotKind.SUSPEND, SAVEPOINTS)
            job.world.after(after_ms, lambda: job.ask(stop))

        when(job, lambda status, completed: status is JobStatus.RUNNING and completed > 0, lose)

    stopped = run(1, strike)
    assert (stopped.violation, stopped.status, stopped.restarts) == (None, "suspended", 0)
    answer = stopped.answers["stop"]
    assert (answer.error, answer.path is None) == (None, False)
    assert stopped.job.ended is not None
    assert stopped.job.ended.adoptions == 1
