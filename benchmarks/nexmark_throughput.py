"""Nexmark: events a second and core of each query, with a checkpoint each second.

    .venv/bin/python benchmarks/nexmark_throughput.py [--queries q0,q5] [--events 20000000] [--runtimes local,ray]

Events are made by the sources of the job, also those that a query does not read, as Flink's generator does; rows end in
a function that drops them. A figure by core is events by second of processor time of all of the job's processes. What
the generator costs alone stands in the first line. `--check` compares each result with polars first, over fewer events.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from common import describe_machine, local_ray
from nexmark import run
from nexmark.measure import Measured, generator_rate, measured
from nexmark.published import AIM, FELDERA, FLINK
from nexmark.queries import QUERIES
from nexmark.query import Query
from nexmark.spark import SPARK, SPARK_QUERIES, local_spark, measured_spark, write_files
from nexmark.workload import Workload
from rich.console import Console
from rich.table import Table

import tidegate as tg


@contextmanager
def environment(runtime: str, parallelism: int) -> Iterator[tg.StreamEnvironment]:
    """This process, or Ray on this machine."""
    if runtime == "local":
        with tg.StreamEnvironment.local(parallelism) as env:
            yield env
    else:
        with local_ray(), tg.StreamEnvironment.ray(parallelism=parallelism) as env:
            yield env


def check(query: Query, env: tg.StreamEnvironment, events: int, folder: Path) -> bool:
    """Whether the query gives what polars gives, of some events of which no two are at one moment."""
    workload = Workload(events, rate=500.0, out_of_order=50, block=5_000)
    shutil.rmtree(folder / query.name, ignore_errors=True)
    table = run.add(query, env, workload, str(folder / query.name / "result"), parts=4)
    checkpoints = tg.CheckpointConfig(interval="1s", storage=str(folder / query.name / "checkpoints"))
    env.execute(f"check-{query.name}", checkpoints=checkpoints, progress="off").wait("15min")
    return run.result_of(table.to_polars(), query) == run.expected(query, workload)


def told(run: Measured) -> str:
    """A run in a line."""
    return (
        f"{run.query} on {run.runtime}: {run.events / run.seconds / 1e6:.2f} M events/s, "
        f"{run.per_core / 1e6:.2f} M a core, {run.seconds:.1f} s, {run.checkpoints} checkpoints"
    )


def show(runs: list[Measured], console: Console) -> None:
    """A line for each query and runtime: medians, and ratios to what others have published."""
    table = Table(title="Medians; thousand events")
    for column in ("query", "runtime", "a second", "and core", "rows read", "x Spark", "x Flink", "x Feldera", "x aim"):
        table.add_column(column, justify="right" if column not in ("query", "runtime") else "left")
    spark = {each.query: each.per_core / 1_000 for each in runs if each.runtime == SPARK}
    for name, runtime in dict.fromkeys((each.query, each.runtime) for each in runs):
        of = [each for each in runs if (each.query, each.runtime) == (name, runtime)]
        core = statistics.median(each.per_core for each in of) / 1_000
        table.add_row(
            name,
            runtime,
            f"{statistics.median(each.events / each.seconds for each in of) / 1_000:,.0f}",
            f"{core:,.0f}",
            f"{100 * of[0].rows / of[0].events:.0f} %",
            *(f"{core / known[name]:.2f}" if name in known else "" for known in (spark, FLINK, FELDERA, AIM)),
        )
    console.print(table)


def main() -> int:
    """Measure. Exit code 1 if a result is not that of polars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", default=",".join(QUERIES), help="names with commas between (default: all)")
    parser.add_argument("--events", type=int, default=20_000_000, help="events of a run (default 20,000,000)")
    parser.add_argument("--rate", type=float, default=100_000.0, help="events a second of event time (default 100,000)")
    parser.add_argument("--runtimes", default="local,ray", help="local, ray, or both (default)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each query and runtime (default 1)")
    parser.add_argument("--parallelism", type=int, default=2, help="subtasks (default 2)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--check", type=int, default=0, metavar="EVENTS", help="compare this many events with polars")
    parser.add_argument("--spark", action="store_true", help="Spark's Structured Streaming of the same queries, too")
    parser.add_argument("--json", type=Path, help="write every run there")
    parser.add_argument("--folder", type=Path, default=Path(".bench/nexmark"), help="where files go")
    arguments = parser.parse_args()
    console, folder, wrong = Console(), arguments.folder.resolve(), []
    names = arguments.queries.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        parser.error(f"there is no query {', '.join(unknown)}; there are {', '.join(QUERIES)}")
    workload = Workload(arguments.events, arguments.rate)
    describe_machine(console)
    console.print(f"the generator alone makes {generator_rate(workload) / 1e6:.1f} M events a second and core")
    runs: list[Measured] = []
    for runtime in arguments.runtimes.split(","):
        with environment(runtime, arguments.parallelism) as env:
            for name in names:
                if arguments.check and not check(QUERIES[name], env, arguments.check, folder / "check"):
                    wrong.append(f"{name} on {runtime} is not what polars gives")
                    console.print(f"[red]{wrong[-1]}")
            for _ in range(arguments.rounds):
                for name in names:
                    one = measured(
                        QUERIES[name],
                        env,
                        runtime,
                        workload,
                        folder / "checkpoints",
                        arguments.parallelism,
                        arguments.interval,
                    )
                    runs.append(one)
                    console.print(told(one), highlight=False)
    if arguments.spark:
        files = write_files(workload, folder / "files")
        with local_spark(arguments.parallelism) as spark:
            for name in [name for name in names if name in SPARK_QUERIES] * arguments.rounds:
                runs.append(measured_spark(spark, QUERIES[name], workload, files, folder / "checkpoints"))
                console.print(told(runs[-1]), highlight=False)
    show(runs, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([{**asdict(each), "per_core": each.per_core} for each in runs], indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
