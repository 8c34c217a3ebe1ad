"""Rows a second, and rows a second of processor time, of a job whose rows nobody keeps: local, and on Ray.

Rows a second are the slope of the rows read between 15 and 90 % of them, so start and end do not count; processor time
is that of the job's processes meanwhile. The local runtime takes one core. On Ray two subtasks read and two work; a run
has to take seconds there: take some 200,000,000 rows.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import ENDED, Run, local_ray
from nexmark import measure
from nexmark.measure import cpu_seconds, dropped
from ray import cloudpickle
from rich.console import Console

import tidegate as tg
from tidegate.operators.local_aggregation import CombiningMode

TIMEOUT_S = 900.0
LOOKS_MIN = 5
RUNTIMES = ("local", "ray")
POLL_S = {"local": 0.02, "ray": 0.1}
Program = Callable[[tg.StreamEnvironment, int], tg.Stream]
"""Of an environment and a number of rows in all: the stream that is measured."""
# Processes of a job cannot import these modules.
for module in (measure, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


@dataclass(frozen=True)
class Settings:
    """How a program runs. `rows`: in all."""

    rows: int
    interval: str
    folder: Path
    combining: CombiningMode | None = None

    def start(self, name: str, program: Program, env: tg.StreamEnvironment) -> tg.Job:
        """The program's job."""
        program(env, self.rows).map_batches(dropped, name="dropped")
        checkpoints = tg.CheckpointConfig(interval=self.interval, storage=str(self.folder))
        once = tg.RestartStrategy.none()
        return env.execute(
            name, checkpoints=checkpoints, restart=once, progress="off", local_aggregation=self.combining
        )


def parser_of(
    description: str | None, programs: Iterable[str], folder: str, rows: int | None
) -> argparse.ArgumentParser:
    """The arguments that all benchmarks of such programs take. `rows` of a run; None if each has its own number."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(programs), help="names with commas between (default: all)")
    parser.add_argument("--rows", type=int, default=rows, help=f"rows of a run (default {rows or 'by program'})")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--runtimes", default="local", help="local (default), ray, or both")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--folder", type=Path, default=Path(folder), help=f"where files go (default {folder})")
    return parser


@contextmanager
def environment(runtime: str) -> Iterator[tg.StreamEnvironment]:
    """This process, or the Ray that is up."""
    made = tg.StreamEnvironment.local(2) if runtime == "local" else tg.StreamEnvironment.ray(parallelism=2)
    with made as env:
        yield env


def rate(name: str, program: Program, runtime: str, settings: Settings) -> tuple[float, float]:
    """Rows a second, and rows a second of processor time, of one run."""
    run, spent, rows = Run(), list[tuple[float, int]](), settings.rows
    with environment(runtime) as env:
        job = settings.start(name, program, env)
        source, deadline = "", time.monotonic() + TIMEOUT_S
        while run.end is None:
            progress = job.progress()
            source = source or next(iter(progress.rows_in), "")
            run.see(progress, source)
            if progress.status not in ENDED:
                spent.append((_processor_s(job, runtime), progress.rows_in.get(source, 0)))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} is not over after {TIMEOUT_S:g} s: {progress}")
            time.sleep(POLL_S[runtime])
        job.wait("1min")
    try:
        return slope(run.samples, rows), slope(spent, rows)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _processor_s(job: tg.Job, runtime: str) -> float:
    """What the job's processes have used."""
    if runtime == "local":
        return time.process_time()
    return sum(cpu_seconds(process.pid) for process in job.processes())


def slope(points: Iterable[tuple[float, int]], rows: int) -> float:
    """Rows a second between 15 and 90 % of `rows`, by least squares, of (seconds, rows read until then)."""
    steady = [(at, read) for at, read in points if 0.15 * rows <= read <= 0.9 * rows]
    if len(steady) < LOOKS_MIN:
        raise ValueError(f"was over after {len(steady)} looks; take more --rows")
    return float(np.polyfit([at for at, _ in steady], [read for _, read in steady], 1)[0])


def measure_all(
    programs: Mapping[str, tuple[Program, Settings]], runtime: str, rounds: int, console: Console
) -> dict[str, float]:
    """All programs on one runtime, in turns. Returns the medians, in rows a second of a core and of time."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    with local_ray() if runtime == "ray" else nullcontext():
        for _ in range(rounds):
            for name, (program, settings) in programs.items():
                shutil.rmtree(settings.folder, ignore_errors=True)
                found[name].append(rate(name, program, runtime, settings))
                shutil.rmtree(settings.folder, ignore_errors=True)
                told = " and ".join(f"{each / 1e6:.1f}" for each in found[name][-1])
                console.print(f"{name} on {runtime}: {told} M rows/s, by time and by core", highlight=False)
    medians: dict[str, float] = {}
    for name, runs in found.items():
        by_time, by_core = (statistics.median(run[i] for run in runs) for i in (0, 1))
        told = f"median of {name} on {runtime}: {by_time / 1e6:.1f} M rows/s, {by_core / 1e6:.1f} M a core"
        console.print(told, highlight=False)
        medians |= {f"{name}, {runtime}, a core": by_core, f"{name}, {runtime}, a second": by_time}
    return medians
