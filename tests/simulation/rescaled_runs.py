"""Runs a program under faults, stops it with a savepoint, restores it at another parallelism, and checks the result."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

from random_jobs.sources import TricklingSource

import tidegate as tg
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.testing import Faults
from tidegate.testing.report import report_of
from tidegate.testing.runtime.run import STORAGE, Action, JobRun, JobSetting, Simulation
from tidegate.testing.simulated import INLINE_BYTES, SMALL_BUFFERS

Build = Callable[[tg.StreamEnvironment], None]
WIDTHS = (1, 2, 3)
"""The parallelisms of the runs."""


def check_rescaled(
    seed: int, faults: Faults, build: Build, violation_of: Callable[[Simulation], str | None], rows_max: int
) -> None:
    """Checks that both runs together have the right result. `violation_of` returns None if so, or what is wrong.

    The seed draws the faults, both parallelisms, the backend, the kind of checkpoints and the moment of the savepoint.
    `rows_max` is the number of rows that a source reads at a time.
    """
    chance = random.Random(seed)
    widths = chance.sample(WIDTHS, 2)
    unaligned = chance.random() < 0.5
    backend = chance.choice(["columnar", "rocksdb"])
    stop = Action(chance.randrange(50, 500), SnapshotKind.SUSPEND)
    simulation = Simulation(seed, faults)
    checkpoints = short_checkpoints(unaligned=unaligned, backend=backend)
    runs = run_and_rescale(simulation, build, widths, checkpoints, stop, rows_max)
    violation = runs[-1].violation or violation_of(simulation)
    report = report_of(seed, faults, simulation, runs, violation)
    assert report.ok, f"{report}\n{report.sequence()}"
    assert runs[-1].status == "finished"


def short_checkpoints(**options: object) -> tg.CheckpointConfig:
    """Returns settings for many checkpoints in the virtual storage."""
    return tg.CheckpointConfig(
        interval="80ms",
        timeout="10s",
        tolerable_failed_checkpoints=2,
        storage=STORAGE,
        inline_threshold=INLINE_BYTES,
        **options,  # type: ignore[arg-type]
    )


def run_and_rescale(
    simulation: Simulation,
    build: Build,
    widths: Sequence[int],
    checkpoints: tg.CheckpointConfig,
    stop: Action,
    rows_max: int,
) -> list[JobRun]:
    """Runs the program at the first parallelism until `stop`, and then at the second one if it has not ended."""

    def job(parallelism: int, actions: tuple[Action, ...], restore: str | None) -> JobRun:
        return simulation.run(
            JobSetting(
                build,
                parallelism,
                checkpoints,
                tg.DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=rows_max),
                actions=actions,
                restore=restore,
                sources=partial(TricklingSource, times_max=6),
                hurries=True,
            )
        )

    runs = [job(widths[0], (stop,), None)]
    if runs[0].violation is None and runs[0].status == "suspended":
        paths = [answer.path for answer in runs[0].answers.values() if answer.path is not None]
        runs.append(job(widths[1], (), paths[-1] if paths else "latest_or_fresh"))
    return runs
