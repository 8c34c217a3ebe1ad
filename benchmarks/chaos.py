"""Chaos on Ray: keyed jobs under faults of all kinds. Are their tables exact, and how long did rows stand still?

    python benchmarks/chaos.py --faults 30 --seed 1

A Ray of `--nodes` nodes beside its head runs on this machine, and an S3 server (SeaweedFS) that holds checkpoints and
tables. Run after run a keyed job of four or six tasks and a spare process is started, in one configuration after the
other, and `--faults-a-run` faults strike it:

    task killed                  SIGKILL of the process of a task
    task stopped                 SIGSTOP of one: it lives and does not answer
    coordinator killed           SIGKILL of its process
    driver killed                SIGKILL of the driver of a detached job; this process attaches to the job
    node lost                    SIGKILL of a raylet: everything on its node goes; another node is started
    node lost, no room           the same while no CPU is free; there is room once the job has said what it waits for
    node of the coordinator lost the same where the coordinator is, if that is not the head of Ray
    S3 restarted                 SIGKILL of the S3 server, which is started again at once
    S3 refuses, S3 silent        no server takes connections for 15 s; it takes them and does not answer for 30 s
    link cut                     that of a host with tasks, without the coordinator, for 5, 30 or 120 s
    link of the coordinator cut  that of the host where the coordinator is

With `--spark` Spark is struck, beside which two jobs run, one whose rows are staged and one that follows a query:

    Spark executor killed        SIGKILL of its process; or SIGSTOP (stopped); or of all; or while rows are staged
    Spark's driver killed        SIGKILL of the Java process of PySpark
    Spark session stopped        spark.stop()

Links need hosts, which are nodes in network namespaces of their own (`--hosts`, or `--only` with such a kind); only
root can make these, on Linux. Then the whole benchmark runs in namespaces of its own, and nothing of it can be left
behind.

One of five comes on top of another one, while the job recovers (not with `--spark`). The seed decides configurations,
faults, victims and moments; what the machine does meanwhile differs from run to run. In the end the tables of a run
must hold the rows of a reference that polars computes. Each run is written down in `--results`; `--summary FILE ...`
makes one table of several such files, and runs nothing. Exit code 1 if a row is lost or doubled, a job hangs or fails,
or leaves a process.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Processes of jobs and drivers import the modules of this folder.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
# Deaths that are brought about on purpose are no news. Ray reads this when it is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died|has been marked dead|Raylet is terminated")

from chaos_cluster import LocalNodes, running
from chaos_job import CONFIGURATIONS, Plan
from chaos_links import BRIDGE_ADDRESS, Hosts, move_in
from chaos_results import RunResult, append, read, show
from chaos_run import KINDS, LINK_KINDS, Fault, Outcome, Run
from chaos_spark import SPARK_KINDS, SparkRun
from common import describe_machine
from rich.console import Console

from tidegate.storage.units import parse_duration_ms

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
_SEAWEED: Any = importlib.import_module("seaweed")
"""The S3 server is that of the tests."""

ON_TOP_SHARE = 0.2
ON_TOP = ("task killed", "coordinator killed", "S3 restarted")
"""Faults that may strike while the job recovers from another one."""
MORE_OFTEN = ("task killed", "coordinator killed") * 3 + ("S3 restarted",) * 2
"""These take seconds, most others half a minute."""
ROWS, SPARK_ROWS = 150_000, 100_000


Say = Callable[[str], None]


def draw(count: int, a_run: int, kinds: list[str], rng: random.Random) -> list[list[Fault]]:
    """The faults of each run: every kind comes before one comes again; a driver dies once a run at most."""
    deck: list[str] = []
    runs: list[list[Fault]] = []
    while count > 0:
        faults: list[Fault] = []
        for number in range(min(a_run, count)):
            if len(deck) < a_run:
                more = [*kinds, *(kind for kind in MORE_OFTEN if kind in kinds)]
                rng.shuffle(more)
                deck += more
            on_top = number > 0 and rng.random() < ON_TOP_SHARE and any(kind in ON_TOP for kind in kinds)
            had = {fault.kind for fault in faults} & {"driver killed"}
            fitting = [kind for kind in deck if kind not in had and (not on_top or kind in ON_TOP)]
            kind = fitting[0] if fitting else "task killed"
            if fitting:
                deck.remove(kind)
            faults.append(Fault(kind, rng.random(), on_top))
        count -= len(faults)
        runs.append(faults)
    return runs


def plan_of(number: int, storage: str, arguments: argparse.Namespace) -> Plan:
    """The job of a run, and its folder. Everything of it is under `storage`."""
    configuration = list(CONFIGURATIONS)[(arguments.seed + number) % len(CONFIGURATIONS)]
    if arguments.configuration is not None:
        configuration = arguments.configuration
    name = f"chaos-{arguments.seed}-{number}"
    local = (arguments.folder / name).resolve()
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir(parents=True)
    rows = arguments.rows or (SPARK_ROWS if arguments.spark else ROWS)
    url = f"{storage}/{name}-{uuid.uuid4().hex[:6]}"
    return Plan(name, configuration, url, local, rows, arguments.interval, arguments.standbys)


def play_all(
    runs: list[list[Fault]],
    storage: str,
    arguments: argparse.Namespace,
    say: Say,
    make: Callable[[Plan, random.Random, float], Run | SparkRun],
) -> list[RunResult]:
    """All runs, one after the other."""
    results = []
    for number, faults in enumerate(runs, 1):
        say(f"run {number}/{len(runs)}, {time.strftime('%H:%M:%S')}: {', '.join(_words(f) for f in faults)}")
        plan = plan_of(number, storage, arguments)
        rng = random.Random(f"{arguments.seed}/{number}")
        outcome = make(plan, rng, parse_duration_ms(arguments.interval) / 1_000).play(faults)
        if not outcome.bad:
            shutil.rmtree(plan.local)
        _tell(outcome, say)
        results.append(RunResult.of(arguments.seed, number, outcome, os.getloadavg()[0]))
        append(arguments.results, results[-1])
    return results


def play_on_nodes(
    runs: list[list[Fault]], hosts: bool, arguments: argparse.Namespace, folder: Path, say: Say
) -> list[RunResult]:
    """All runs, on one Ray of several nodes and one S3 server."""
    with _SEAWEED.run_seaweed(folder, BRIDGE_ADDRESS if hosts else _SEAWEED.LOOPBACK) as server:
        os.environ |= {
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": str(server.options["key"]),
            "AWS_SECRET_ACCESS_KEY": str(server.options["secret"]),
            "AWS_ENDPOINT_URL": str(server.endpoint_url),
        }
        with running(Hosts if hosts else LocalNodes, arguments.nodes) as nodes:
            say(f"logs: {nodes.logs}")

            def make(plan: Plan, rng: random.Random, interval_s: float) -> Run:
                return Run(plan, nodes, server.process, rng, interval_s, arguments.limit_s, say)

            return play_all(runs, f"s3://{_SEAWEED.BUCKET}", arguments, say, make)


def play_with_spark(runs: list[list[Fault]], arguments: argparse.Namespace, folder: Path, say: Say) -> list[RunResult]:
    """All runs, each with sessions of its own."""

    def make(plan: Plan, rng: random.Random, interval_s: float) -> SparkRun:
        return SparkRun(plan, rng, interval_s, arguments.limit_s, say)

    return play_all(runs, str(folder), arguments, say, make)


def main() -> int:
    """All runs; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=30, help="of all runs together (default 30)")
    parser.add_argument("--faults-a-run", type=int, default=12, help="default 12")
    parser.add_argument("--seed", type=int, default=1, help="decides faults, victims and moments (default 1)")
    parser.add_argument("--only", nargs="+", choices=(*KINDS, *SPARK_KINDS), metavar="KIND", help="of these kinds")
    parser.add_argument("--spark", action="store_true", help="two jobs beside Spark on Ray, and Spark is struck")
    parser.add_argument("--hosts", action="store_true", help="nodes have a network each, and links are cut as well")
    parser.add_argument("--configuration", choices=CONFIGURATIONS, help="this one alone")
    parser.add_argument("--nodes", type=int, default=3, help="of Ray, beside its head, 2 CPUs each (default 3)")
    parser.add_argument("--standbys", type=int, default=1, help="spare processes of each job (default 1)")
    parser.add_argument("--rows", type=int, help=f"of each run (default {ROWS:,}; with --spark {SPARK_ROWS:,})")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--limit-s", type=float, default=180.0, help="what takes longer is a hang (default 180)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/chaos"), help="where files go")
    parser.add_argument("--results", type=Path, help="a line of JSON for each run (default: <folder>/results-<seed>)")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="show what these results say, and end")
    arguments = parser.parse_args()
    console = Console()
    if arguments.summary:
        show(read(arguments.summary), (*KINDS, *SPARK_KINDS), console)
        return 0
    arguments.results = arguments.results or arguments.folder / f"results-{arguments.seed}"
    kinds = arguments.only or [kind for kind in KINDS if arguments.hosts or kind not in LINK_KINDS]
    if arguments.spark:
        kinds = arguments.only or list(SPARK_KINDS)
    if any((kind in SPARK_KINDS) != arguments.spark for kind in kinds):
        parser.error("faults of Spark are those of --spark, and of nothing else")
    hosts = arguments.hosts or any(kind in LINK_KINDS for kind in kinds)
    if hosts:
        try:
            move_in()
        except RuntimeError as error:
            parser.error(f"there can be no hosts here, whose links could be cut: {error}")
    describe_machine(console)

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    runs = draw(arguments.faults, arguments.faults_a_run, kinds, random.Random(arguments.seed))
    folder = arguments.folder.resolve() / ("spark" if arguments.spark else "s3")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if arguments.spark:
        results = play_with_spark(runs, arguments, folder, say)
    else:
        results = play_on_nodes(runs, hosts, arguments, folder, say)
    show(results, kinds, console)
    return 1 if any(result.bad for result in results) else 0


def _words(fault: Fault) -> str:
    return f"(on top) {fault.kind}" if fault.on_top else fault.kind


def _tell(outcome: Outcome, say: Say) -> None:
    end = outcome.end
    ended = "" if end is None else f", {end.restarts} restarts, {end.completed_checkpoints} checkpoints"
    say(f"  {outcome.plan.configuration}: {'BAD' if outcome.bad else 'equal'}{ended}, {outcome.seconds:.0f} s")
    for line in (*outcome.hangs, *outcome.problems):
        say(f"  {line}")


if __name__ == "__main__":
    sys.exit(main())
