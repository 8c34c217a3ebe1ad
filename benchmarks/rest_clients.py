"""What REST clients cost a job: keyed throughput while a hundred clients ask in a loop, beside none, in one run.

    .venv/bin/python benchmarks/rest_clients.py [--rows 60000000] [--rounds 3] [--clients 100]

The job is that of `keyed_throughput.py`, with checkpoints. First there is no server; then a server that nobody asks and
one that the clients ask take turns. The clients are connections of one process on loopback, as nice as can be, because
what they themselves do is no work of a job; each asks the next path as soon as it has an answer. Prints how many
requests a second were answered, and how many were refused as a flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from common import describe_machine
from keyed_throughput import WITH, Benchmark, expected_totals, prepare
from rich.console import Console

import tidegate as tg

NONE, SERVED, CLIENTS = "no server", "server, nobody asks", "clients in a loop"
STOP_S = 30.0
NICENESS = 19


async def ask(url: str, clients: int, stop: asyncio.Event) -> Counter[int]:
    """So many connections, each asking in a loop; how often each status was the answer, 0 for none."""
    counts: Counter[int] = Counter()
    place = urlsplit(url)
    assert place.hostname is not None

    async def client(number: int) -> None:
        paths = ["/overview", "/jobs", "/jobs/overview", "/config"]
        while not stop.is_set():
            try:
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
                try:
                    while not stop.is_set():
                        path = paths[number % len(paths)]
                        number += 1
                        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                        head = await reader.readuntil(b"\r\n\r\n")
                        lines = head.decode("latin-1").lower().split("\r\n")
                        length = next(int(x.partition(":")[2]) for x in lines if x.startswith("content-length"))
                        body = await reader.readexactly(length)
                        counts[int(lines[0].split()[1])] += 1
                        if path == "/jobs" and lines[0].split()[1] == "200":
                            found = [f"/jobs/{job['id']}" for job in json.loads(body)["jobs"]]
                            paths = [*paths[:4], *found, *(f"{job}/checkpoints" for job in found)]
                finally:
                    writer.close()
            except (OSError, asyncio.IncompleteReadError):
                counts[0] += 1
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(client(number)) for number in range(clients)]
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return counts


def run_clients(url: str, clients: int) -> None:
    """The process of the clients: until its stdin is closed; then it prints what it has counted."""
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)

    async def run() -> Counter[int]:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stop.set())
        return await ask(url, clients, stop)

    started = time.monotonic()
    counts = asyncio.run(run())
    print(json.dumps({"seconds": time.monotonic() - started, "statuses": counts}))


@contextmanager
def asking(url: str, clients: int, told: list[str]) -> Iterator[None]:
    """Clients in a process of their own as long as the block runs."""
    command = [sys.executable, __file__, "--ask", url, "--clients", str(clients)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        counted = json.loads(process.communicate(timeout=STOP_S)[0])
        rates = {status: f"{n / counted['seconds']:.0f}/s" for status, n in sorted(counted["statuses"].items())}
        told.append(f"{clients} clients for {counted['seconds']:.0f} s, answers by status: {rates}")


def main() -> int:
    """Measure. Exit code 1 if a result is wrong, or the clients were not answered."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000_000, help="rows of the stream (default 60,000,000)")
    parser.add_argument("--keys", type=int, default=1_000_000, help="distinct keys (default 1,000,000)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each variant (default 3)")
    parser.add_argument("--clients", type=int, default=100, help="clients (default 100)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/throughput"), help="where files go")
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        run_clients(arguments.ask, arguments.clients)
        return 0
    folder = arguments.folder.resolve()
    console, answered = Console(), True
    told: list[str] = []
    describe_machine(console)
    with tg.StreamEnvironment.raydp(
        executors=2,
        executor_cores=1,
        executor_memory="2g",
        slots_per_executor=2,
        include_dashboard=False,
        spark_configs={"spark.sql.shuffle.partitions": "4", "spark.sql.files.minPartitionNum": "8"},
        ray_options={"log_to_driver": False},
    ) as env:
        rows, keys = arguments.rows, arguments.keys
        data = prepare(env.spark, folder / f"data-{rows}-{keys}-8", rows, keys, 8, None)
        expected = expected_totals(env.spark, data)
        benchmarks = {variant: Benchmark(env, folder, "1s", console) for variant in (NONE, SERVED, CLIENTS)}
        benchmarks[NONE].run_job(WITH, data, expected)
        benchmarks[NONE].figures.clear()  # the first run warms up
        for _ in range(arguments.rounds):
            benchmarks[NONE].run_job(WITH, data, expected)
        url = env.serve_web(port=0)
        for _ in range(arguments.rounds):
            benchmarks[SERVED].run_job(WITH, data, expected)
            with asking(url, arguments.clients, told):
                benchmarks[CLIENTS].run_job(WITH, data, expected)
                with urlopen(f"{url}/jobs/overview", timeout=60) as reply:
                    answered &= bool(json.load(reply)["jobs"])
    medians = {}
    for variant, benchmark in benchmarks.items():
        rates = [figures.steady or figures.end_to_end for figures in benchmark.figures[WITH]]
        medians[variant] = statistics.median(rates)
        console.print(f"{variant}: median {medians[variant] / 1e6:.2f} M rows/s of {len(rates)} runs", highlight=False)
    for line in told:
        console.print(line, highlight=False, soft_wrap=True)
    for variant in (NONE, SERVED):
        cost = 100 * (1 - medians[CLIENTS] / medians[variant])
        console.print(f"the clients cost {cost:.1f} % of throughput, beside: {variant}", highlight=False)
    wrong = [text for benchmark in benchmarks.values() for text in benchmark.wrong]
    console.print("[red]not all results equal Spark's" if wrong else "all results equal Spark's")
    return 1 if wrong or not answered else 0


if __name__ == "__main__":
    sys.exit(main())
