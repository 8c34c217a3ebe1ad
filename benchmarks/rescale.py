"""A running job on Ray is stopped with a savepoint and goes on with more or fewer subtasks: 2, 4, 1, 3.

    python benchmarks/rescale.py [--rows 12000000] [--parallelism 2 4 1 3] [--formats native] [--backends rocksdb]

Each case is one job of `exactly_once.py`, with its three tables: canonical savepoints and native ones, on the columnar
backend and on RocksDB. At a random moment of each stage but the last one the job is stopped with a savepoint, and the
next stage begins with that, at its own parallelism. In the end each table must hold the rows of the reference, exactly.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import polars as pl
from common import ENDED, GeneratedSource, describe_machine, local_ray
from exactly_once import SOURCE, build, differences, reference
from rich.console import Console

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime

Format = Literal["canonical", "native"]
FORMATS: tuple[Format, ...] = get_args(Format)
BACKENDS = ("columnar", "rocksdb")
POLL_S = 0.02
STALLED_S = 300.0
"""A job that gets nowhere for so long hangs. How long a stage takes is a matter of the machine."""


def stage(
    parallelism: int, source: GeneratedSource, folder: Path, settings: dict[str, Any], restore: str | None
) -> tuple[tg.Job, list[tg.OutputTable]]:
    """The job at one parallelism, running."""
    env = tg.StreamEnvironment(RayRuntime(), parallelism)
    tables = build(env, source, folder)
    checkpoints = tg.CheckpointConfig(
        interval="500ms", storage=str(folder / "checkpoints"), savepoints=str(folder / "savepoints"), **settings
    )
    job = env.execute("rescaled", checkpoints=checkpoints, restore=restore)
    return job, [tables.rows, tables.running, tables.final]


def await_job(job: tg.Job, what: str, condition: Callable[[tg.JobProgress], bool]) -> None:
    """Wait for a condition. RuntimeError if the job ends before, or reads and completes nothing for `STALLED_S`."""
    seen, deadline = (-1, -1), 0.0
    while not condition(progress := job.progress()):
        now = (sum(progress.rows_in.values()), progress.completed_checkpoints)
        if now != seen:
            seen, deadline = now, time.monotonic() + STALLED_S
        if progress.status in ENDED or time.monotonic() > deadline:
            raise RuntimeError(f"{what}, and nothing happens any more: {progress}")
        time.sleep(POLL_S)


def await_rows(job: tg.Job, rows: int) -> None:
    """Wait until a job has read so many rows since it was begun."""
    await_job(job, f"{rows} rows were to be read", lambda progress: progress.rows_in.get(SOURCE, 0) >= rows)


def run(
    case: tuple[Format, str], source: GeneratedSource, arguments: argparse.Namespace, console: Console
) -> tuple[list[str], list[float]]:
    """One case: what is wrong with its tables, and how long each stage took from the stop before to its first rows."""
    form, backend = case
    rng = random.Random(f"{arguments.seed}/{form}/{backend}")
    folder = (arguments.folder / f"{form}-{backend}").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    share = source.rows // len(arguments.parallelism)
    restore: str | None = None
    tables: list[tg.OutputTable] = []
    seconds: list[float] = []
    for number, parallelism in enumerate(arguments.parallelism):
        started = time.monotonic()
        job, tables = stage(parallelism, source, folder, {"backend": backend}, restore)
        await_rows(job, 1)
        seconds.append(time.monotonic() - started)
        if number == len(arguments.parallelism) - 1:
            await_job(job, "the last stage was to finish", lambda progress: progress.status == "finished")
            break
        await_rows(job, rng.randrange(1, share // 2))
        restore = job.stop(format=form)
        console.print(f"{form}, {backend}: {parallelism} subtasks stopped with {Path(restore).name}", highlight=False)
    stateless, totals = reference(source)
    expected = (stateless, totals, totals)
    wrong = [
        line
        for name, table, rows in zip(("rows", "running", "final"), tables, expected, strict=True)
        for line in differences(name, table.to_arrow(), pl.DataFrame(rows))
    ]
    shutil.rmtree(folder)
    return wrong, seconds


def main() -> int:
    """All cases. Exit code 1 if a table is not that of the reference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=12_000_000, help="rows of the stream (default 12,000,000)")
    parser.add_argument("--keys", type=int, default=100_000, help="distinct keys (default 100,000)")
    parser.add_argument("--parallelism", type=int, nargs="+", default=[2, 4, 1, 3], help="of each stage in turn")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the savepoints")
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), help="of the state")
    parser.add_argument("--seed", type=int, default=1, help="decides the moments (default 1)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/rescale"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    source = GeneratedSource(arguments.rows, arguments.keys, max(arguments.parallelism))
    failed = False
    with local_ray(cpus=max(2, max(arguments.parallelism))):
        for case in itertools.product(arguments.formats, arguments.backends):
            wrong, seconds = run(case, source, arguments, console)
            failed = failed or bool(wrong)
            told = ", ".join(f"{p}: {s:.1f} s" for p, s in zip(arguments.parallelism, seconds, strict=True))
            console.print(f"{', '.join(case)}: {'equal' if not wrong else 'WRONG'}; to the first row {told}")
            for line in wrong:
                console.print(f"[red]{line}", soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
