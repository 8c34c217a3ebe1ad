"""Queries of Nexmark on Ray whose task processes are killed: do their tables hold what polars computes?

    .venv/bin/python benchmarks/nexmark_kills.py [--queries q5,q7,q9] [--kills 3] [--events 400000]

Each job is hit `--kills` times by SIGKILL of one task's process, drawn by `--seed`: when its sources have read one more
part of their rows, and the kill before has led to a new attempt. Exit code 1 if a table is wrong, a job fails, or was
hit fewer times.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from common import ENDED, describe_machine, kill, local_ray
from nexmark import run
from nexmark.queries import QUERIES
from nexmark.query import Query
from nexmark.workload import Workload
from rich.console import Console

import tidegate as tg

POLL_S = 0.05


def hit(job: tg.Job, query: Query, rows: int, kills: int, chance: random.Random, deadline: float) -> int:
    """Kill processes of a job while it runs. Returns how many kills have led to a new attempt."""
    hits, struck_at = 0, -1
    while (progress := job.progress()).status not in ENDED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job is not over: {progress}")
        if progress.status == "running" and progress.attempt > struck_at >= 0:
            hits, struck_at = hits + 1, -1
        read = sum(progress.rows_before.get(kind, 0) + progress.rows_in.get(kind, 0) for kind in query.reads)
        due = rows * (hits + 1) // (kills + 2)
        victims = job.processes()
        if hits < kills and struck_at < 0 and progress.status == "running" and victims and read >= due:
            with suppress(ProcessLookupError):  # it may have ended just now
                kill(chance.choice(victims).pid)
                struck_at = progress.attempt
        time.sleep(POLL_S)
    return hits


def one(query: Query, env: tg.StreamEnvironment, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """One job, its kills, and what is wrong with it."""
    shutil.rmtree(folder, ignore_errors=True)
    workload = Workload(arguments.events, rate=500.0, out_of_order=50, block=5_000)
    table = run.add(query, env, workload, str(folder / "result"), parts=4)
    job = env.execute(
        f"nexmark-{query.name}",
        checkpoints=tg.CheckpointConfig(interval="500ms", storage=str(folder / "checkpoints")),
        restart=tg.RestartStrategy.fixed_delay(attempts=1_000, delay="100ms"),
        progress="off",
    )
    rows = sum(workload.rows(kind) for kind in query.reads)
    chance = random.Random(f"{arguments.seed} {query.name}")
    hits = hit(job, query, rows, arguments.kills, chance, time.monotonic() + arguments.timeout_s)
    end = job.progress()
    wrong = [] if end.status == "finished" else [f"the job {end.status}: {end.reason}"]
    if hits < arguments.kills:
        wrong.append(f"it was over after {hits} kills; take more events")
    if not wrong and run.result_of(table.to_polars(), query) != run.expected(query, workload):
        wrong.append("the table is not what polars gives")
    return wrong


def main() -> int:
    """Run all queries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default="q5,q7,q9,q11,q20", help="names with commas between")
    parser.add_argument("--kills", type=int, default=3, help="kills of each job (default 3)")
    parser.add_argument("--events", type=int, default=400_000, help="events of each job (default 400,000)")
    parser.add_argument("--seed", type=int, default=1, help="draws whom the kills hit (default 1)")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="the longest that a job may take")
    parser.add_argument("--folder", type=Path, default=Path(".bench/nexmark-kills"), help="where files go")
    arguments = parser.parse_args()
    names = arguments.queries.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        parser.error(f"there is no query {', '.join(unknown)}; there are {', '.join(QUERIES)}")
    console, failed = Console(), 0
    describe_machine(console)
    with local_ray(), tg.StreamEnvironment.ray(parallelism=2) as env:
        for name in names:
            started = time.monotonic()
            wrong = one(QUERIES[name], env, arguments, arguments.folder.resolve() / name)
            failed += bool(wrong)
            verdict = "; ".join(wrong) or f"{arguments.kills} kills, the table is what polars gives"
            console.print(f"{name}: {verdict} ({time.monotonic() - started:.0f} s)", highlight=False, soft_wrap=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
