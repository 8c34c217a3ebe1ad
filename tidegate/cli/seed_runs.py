"""Runs the simulator with a range of seeds, in this process or in several, and prints a summary.

`tidegate simulate` runs a pipeline of the user. `make simulate` runs random jobs (`tests/support/random_jobs`).
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import track

from tidegate.storage.errors import ConfigurationError
from tidegate.testing import SimulationReport
from tidegate.testing.oracle.coverage import coverage_table

SEEDS_A_TASK = 8
"""How many seeds a worker process receives at once."""
GARBAGE = 50_000
"""Threshold of the garbage collector: it runs after this many new objects.

A seed creates many objects and few cycles. With the default threshold of 700 the collector uses up to a tenth of the
time.
"""

Run: TypeAlias = Callable[[int], SimulationReport]
"""A function that runs one seed and returns its report."""


def run_seeds(
    make_run: Callable[[], Run], seeds: range, workers: int, trace: int, replay: Callable[[int], str]
) -> bool:
    """Runs all seeds, and prints violations, a table of the effects that occurred, and totals. Returns whether a seed
    failed.

    `make_run` is called once in each process, so it must be picklable. `trace` is how many lines of history are printed
    for the first violation. `replay` returns the command that runs a seed again.
    """
    console = Console()
    totals: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    times: Counter[str] = Counter()
    violated: list[int] = []
    ordered: list[int] = []
    with quiet(), reports_of(make_run, seeds, workers) as reports:
        shown = f"seeds {seeds[0]}..{seeds[-1]}"
        for report in track(reports, shown, total=len(seeds), console=console):
            totals["checkpoints"] += report.checkpoints
            totals["restarts"] += report.restarts
            totals["task crashes"] += report.crashes
            totals["coordinator crashes"] += report.coordinator_crashes
            runs.update(report.coverage.keys())
            times.update(report.coverage)
            if report.order_dependence is not None:
                ordered.append(report.seed)
                if len(ordered) == 1:
                    console.print(f"[bold yellow]{report}", highlight=False)
            elif not report.ok:
                violated.append(report.seed)
                console.print(f"[bold red]{report}", highlight=False)
                if len(violated) == 1:
                    console.print(report.sequence(trace), highlight=False, markup=False, soft_wrap=True)
    console.print(coverage_table(runs, times), highlight=False, markup=False, soft_wrap=True)
    summary = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    console.print(f"{len(seeds)} seeds, {len(violated)} violations; {summary}")
    if ordered:
        console.print(
            f"{len(ordered)} of these seeds have other rows because the output of the pipeline depends on the order of "
            "rows: it differs without any fault"
        )
    if violated:
        console.print(f"replay with: {replay(min(violated))}", highlight=False, markup=False, soft_wrap=True)
    return bool(violated or ordered)


def parse_range(text: str) -> range:
    """Returns the seeds of `FIRST..LAST`, or of a single number. Raises ConfigurationError if there are none."""
    first, separator, last = text.partition("..")
    try:
        found = range(int(first), (int(last) if separator else int(first)) + 1)
    except ValueError:
        raise ConfigurationError(f"--seeds {text!r}: write a seed such as 7, or a range such as 0..999") from None
    if not found:
        raise ConfigurationError(f"--seeds {text!r}: the range is empty; write the smaller seed first")
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Returns a context that suppresses the log, because a simulation causes failures intentionally."""
    logger = logging.getLogger("tidegate")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def reports_of(make_run: Callable[[], Run], seeds: range, workers: int) -> Iterator[Iterator[SimulationReport]]:
    """Yields the reports of all seeds, in order, from `workers` processes. 0 starts one process for each core."""
    processes = workers if workers > 0 else os.cpu_count() or 1
    if processes == 1:
        run = make_run()
        usual = gc.get_threshold()
        gc.set_threshold(GARBAGE)
        try:
            yield map(run, seeds)
        finally:
            gc.set_threshold(*usual)
        return
    # Spawned, not forked: a fork would copy locks that other threads of this process hold.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start_worker, (make_run,)) as pool:
        yield pool.imap(_run_seed, seeds, SEEDS_A_TASK)


_run: Run


def _start_worker(make_run: Callable[[], Run]) -> None:
    global _run
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    gc.set_threshold(GARBAGE)
    _run = make_run()


def _run_seed(seed: int) -> SimulationReport:
    report = _run(seed)
    # The history is large and only needed to explain a violation.
    return report.without_history() if report.ok else report.portable()
