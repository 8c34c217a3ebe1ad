"""The command `tidegate simulate`: a range of seeds over one pipeline, or over random ones."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from tidegate.simulation.oracle.coverage import coverage_table
from tidegate.storage.errors import ConfigurationError
from tidegate.testing import Faults, SimulatedPipeline, SimulationReport, simulate_random

SEEDS_A_TASK = 8
"""Seeds that a worker process is given at once."""


@dataclass(frozen=True, slots=True)
class _Work:
    """What a worker runs; `pipeline` None: random scenarios."""

    pipeline: str | None
    faults: Faults
    parallelism: int


def simulate_command(
    pipeline: Annotated[
        str | None, typer.Argument(help="MODULE:FUNC or FILE.py:FUNC; the function gets an environment")
    ] = None,
    seeds: Annotated[str, typer.Option(help="a seed, or a range FIRST..LAST")] = "0..99",
    random: Annotated[bool, typer.Option("--random", help="draw pipeline, settings and faults from the seed")] = False,
    workers: Annotated[int, typer.Option(help="processes; 0: one a core")] = 1,
    crash: Annotated[float, typer.Option(help="a task's process dies, per element")] = 0.01,
    coordinator_crash: Annotated[float, typer.Option(help="the coordinator dies, per message")] = 0.01,
    storage: Annotated[float, typer.Option(help="a storage operation fails")] = 0.05,
    slow: Annotated[float, typer.Option(help="a storage operation is slow")] = 0.05,
    duplicate: Annotated[float, typer.Option(help="a message comes twice")] = 0.03,
    drop: Annotated[float, typer.Option(help="a message is lost")] = 0.003,
    damage: Annotated[float, typer.Option(help="a completed checkpoint is damaged")] = 0.0,
    delay: Annotated[str, typer.Option(help="how long messages take")] = "0ms..100ms",
    parallelism: Annotated[int, typer.Option(help="of the environment")] = 2,
    trace: Annotated[int, typer.Option(help="lines of history to show of a seed that fails")] = 60,
) -> None:
    """Run a pipeline, or random ones, under seeded faults; exit code 1 if an invariant is violated.

    Ends with a table of what the seeds exercised. The first violation is shown with its messages.
    """
    if random == (pipeline is not None):
        raise ConfigurationError("give a pipeline, or --random for pipelines that the seeds draw: one of the two")
    console = Console()
    first, last = _range(seeds)
    faults = Faults(
        crash=crash,
        coordinator_crash=coordinator_crash,
        storage=storage,
        slow=slow,
        duplicate=duplicate,
        drop=drop,
        damage=damage,
        delay=delay,
    )
    work = _Work(pipeline, faults, parallelism)
    totals: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    times: Counter[str] = Counter()
    violated: list[int] = []
    numbers = range(first, last + 1)
    with quiet(), _reports(work, numbers, workers) as reports:
        for report in track(reports, f"seeds {first}..{last}", total=len(numbers), console=console):
            totals["checkpoints"] += report.checkpoints
            totals["restarts"] += report.restarts
            totals["task crashes"] += report.crashes
            totals["coordinator crashes"] += report.coordinator_crashes
            runs.update(report.coverage.keys())
            times.update(report.coverage)
            if not report.ok:
                violated.append(report.seed)
                console.print(f"[bold red]{report}", highlight=False)
                if len(violated) == 1:
                    console.print(report.sequence(trace), highlight=False, markup=False, soft_wrap=True)
    console.print(coverage_table(runs, times), highlight=False, markup=False, soft_wrap=True)
    summary = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    console.print(f"{len(numbers)} seeds, {len(violated)} violations; {summary}")
    if violated:
        what = "--random" if pipeline is None else pipeline
        console.print(f"replay with: tidegate simulate {what} --seeds {min(violated)}")
        raise typer.Exit(1)


@contextmanager
def quiet() -> Iterator[None]:
    """What a simulated coordinator warns of is what the simulation does to it on purpose."""
    logger = logging.getLogger("tidegate")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _reports(work: _Work, seeds: range, workers: int) -> Iterator[Iterator[SimulationReport]]:
    """The reports of all seeds, in order, made by this process or by several."""
    processes = workers if workers > 0 else os.cpu_count() or 1
    if processes == 1:
        run = _runner(work)
        yield map(run, seeds)
        return
    # Fresh processes: this one may have threads, which a fork would leave behind in the middle of something.
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start_worker, (work,)) as pool:
        yield pool.imap(_run_seed, seeds, SEEDS_A_TASK)


def _runner(work: _Work) -> Callable[[int], SimulationReport]:
    if work.pipeline is None:
        return simulate_random
    pipeline = SimulatedPipeline(_load(work.pipeline), parallelism=work.parallelism)
    return lambda seed: pipeline.run(seed, work.faults)


_run: Callable[[int], SimulationReport]


def _start_worker(work: _Work) -> None:
    global _run
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    _run = _runner(work)


def _run_seed(seed: int) -> SimulationReport:
    report = _run(seed)
    # The history is large, and only that of a violation is looked at.
    return report.without_history() if report.ok else report


def _range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("..")
    try:
        bounds = int(first), int(last) if separator else int(first)
    except ValueError:
        raise ConfigurationError(f"--seeds {text!r}: write a seed such as 7, or a range such as 0..999") from None
    if bounds[0] > bounds[1]:
        raise ConfigurationError(f"--seeds {text!r}: the range is empty")
    return bounds


def _load(reference: str) -> Callable[..., Any]:
    place, separator, name = reference.rpartition(":")
    if not separator:
        raise ConfigurationError(f"{reference!r}: write MODULE:FUNC or FILE.py:FUNC")
    if place.endswith(".py"):
        path = Path(place).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ConfigurationError(f"{place} is not there, or no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"there is no module {place!r} (from {reference!r}): {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found
