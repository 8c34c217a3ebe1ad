"""What REST clients cost a job: processor time for a row while a hundred of them ask in a loop, and without them.

    .venv/bin/python benchmarks/rest_clients.py [--pairs 30] [--clients 100]

A keyed count of generated rows at full speed, with a checkpoint a second, on Ray. Two comparisons, each in turns within
the run (`slices.py`): the server is stopped by a signal, or runs and nobody asks; it runs and nobody asks, or the
clients ask. What decides is the processor time of the job's own processes, tasks and coordinator, for each row: the
server and the clients are as nice as can be, and take what others leave. The clients are connections of one process on
loopback; each asks the next path as soon as it has an answer. Prints how many requests a second were answered, and how
many were refused as a flood.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import common
import slices
from common import GeneratedSource, describe_machine, local_ray
from ray import cloudpickle
from rich.console import Console
from slices import ROWS_MAX, Board, SeenRows, Turn, processes_of, processor_time, report, running, take_turns

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime

Pairs = list[tuple[Turn, Turn]]

KEYS = 1_000_000
COST_MAX = 0.02
OF_THE_JOB, SERVER = ("WorkerProcess", "CoordinatorProcess"), "WebActor"
STOP_S = 30.0
NICENESS = 19
# Processes of the job cannot import these modules.
for module in (common, slices):
    cloudpickle.register_pickle_by_value(module)


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
def asking(url: str, clients: int, told: list[str]) -> Iterator[int]:
    """Clients in a process of their own as long as the block runs; gives its pid."""
    command = [sys.executable, __file__, "--ask", url, "--clients", str(clients)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        counted = json.loads(process.communicate(timeout=STOP_S)[0])
        told.append(f"{clients} clients, answers by status: {dict(sorted(counted['statuses'].items()))}")


def let_run(pids: Sequence[int], which: int) -> None:
    """Let these processes run, or none of them."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT if which else signal.SIGSTOP)


def measure(folder: Path, pairs: int, turn_s: float, clients: int, told: list[str]) -> dict[str, Pairs]:
    """Run the job once: pairs of turns without the server and with it, then without clients and with them."""
    folder.mkdir(parents=True)
    path = folder / "board"
    board = Board(path)
    with tg.StreamEnvironment(RayRuntime(standbys=0), parallelism=1) as env:
        source = env.from_source(GeneratedSource(ROWS_MAX, KEYS, 1), name="rows")
        seen = source.map_batches(SeenRows(path), schema=source.schema)
        seen.key_by("key").aggregate(n=tg.count(), x=tg.sum("value"), emit="final").collect()
        checkpoints = tg.CheckpointConfig(storage=str(folder / "checkpoints"), interval="1s")
        with running(env.execute("rest-clients", checkpoints=checkpoints, progress="off"), board) as job:
            url = env.serve_web(port=0)
            servers = processes_of(SERVER)
            assert len(servers) == 1, f"processes of the server: {servers}"
            idle = take_turns(board, pairs, turn_s, lambda which: let_run(servers, which))
            let_run(servers, 1)
            with asking(url, clients, told) as pid:
                asked = take_turns(board, pairs, turn_s, lambda which: let_run([pid], which))
            with urlopen(f"{url}/jobs/overview", timeout=60) as reply:
                assert [each["jid"] for each in json.load(reply)["jobs"]] == [job.job_id]
    return {"an idle server": idle, "clients": asked}


def main() -> int:
    """Measure. Exit code 1 if the clients cost two hundredths of the processor time for a row, or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=30, help="turns of each kind in each comparison (default 30)")
    parser.add_argument("--turn", type=float, default=2.0, metavar="SECONDS", help="of each turn (default 2)")
    parser.add_argument("--clients", type=int, default=100, help="clients (default 100)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/rest-clients"), help="where files go")
    parser.add_argument("--ask", metavar="URL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        run_clients(arguments.ask, arguments.clients)
        return 0
    console = Console(highlight=False, soft_wrap=True)
    told: list[str] = []
    describe_machine(console)
    folder = arguments.folder.absolute() / uuid.uuid4().hex
    with local_ray():
        found = measure(folder, arguments.pairs, arguments.turn, arguments.clients, told)
    for line in told:
        console.print(line)
    costs = {}
    for name, pairs in found.items():
        for line in report(pairs, (f"without {name}", f"with {name}")):
            console.print(line)
        costs[name] = processor_time(pairs, OF_THE_JOB)
        console.print(f"processor time of the job for a row, with {name} to without: {costs[name]}")
    return 0 if all(cost.median - 1 < COST_MAX for cost in costs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
