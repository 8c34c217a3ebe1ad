"""Runs the simulator over a range of seeds, in this process or in several, for `tidegate simulate`."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tidegate.cli.run_command import load_function
from tidegate.testing import Faults, SimulatedPipeline, SimulationReport, simulate_random

SEEDS_A_TASK = 8
"""Seeds that a worker process is given at once."""
GARBAGE = 50_000
"""So many objects more, and circles among them are looked for. A seed makes many objects and few circles: looking after
every 700, as is usual, takes up to a tenth of the time."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a worker runs. `pipeline` is MODULE:FUNC or FILE.py:FUNC; None means random scenarios."""

    pipeline: str | None
    faults: Faults
    parallelism: int


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log: a simulation causes on purpose what tidegate warns of."""
    logger = logging.getLogger("tidegate")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def reports_of(work: Work, seeds: range, workers: int) -> Iterator[Iterator[SimulationReport]]:
    """The reports of all seeds, in order, from `workers` processes; 0 means one for each core."""
    processes = workers if workers > 0 else os.cpu_count() or 1
    if processes == 1:
        run = _runner(work)
        usual = gc.get_threshold()
        gc.set_threshold(GARBAGE)
        try:
            yield map(run, seeds)
        finally:
            gc.set_threshold(*usual)
        return
    # Spawned, not forked: a fork would copy locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start_worker, (work,)) as pool:
        yield pool.imap(_run_seed, seeds, SEEDS_A_TASK)


def _runner(work: Work) -> Callable[[int], SimulationReport]:
    if work.pipeline is None:
        return simulate_random
    pipeline = SimulatedPipeline(load_function(work.pipeline), parallelism=work.parallelism)
    return lambda seed: pipeline.run(seed, work.faults)


_run: Callable[[int], SimulationReport]


def _start_worker(work: Work) -> None:
    global _run
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    gc.set_threshold(GARBAGE)
    _run = _runner(work)


def _run_seed(seed: int) -> SimulationReport:
    report = _run(seed)
    # The history is large, and only read to explain a violation.
    return report.without_history() if report.ok else report.portable()
