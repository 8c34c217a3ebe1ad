"""What a task costs before its first row: processor time and memory of its process, and `execute` to the first rows.

    .venv/bin/python benchmarks/task_start.py [--tasks 4 16] [--rounds 3]

Source -> key by -> sum and count, collected, on a Ray that is up: half of the tasks read, half aggregate. *First rows*:
when every task has had a row, as a function in it has written down. Processor time and memory are those that the
operating system counts for the process of each task right then; memory is what it shares with nobody. Beside them
stands an actor of Ray that does nothing: what no program on Ray can do without. The first job of a program is shown by
itself: Ray starts processes for it that later jobs find. It is as large as the largest.
Nothing is read from a cold disk: the first job has also compiled what there is to compile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Installed packages are compiled. Where this variable is set, each process would compile our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import common
import pyarrow as pa
import ray
from common import GeneratedSource, describe_machine, local_ray
from ray import cloudpickle
from rich.console import Console

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime

KEYS = 10_000
ROWS_MAX = 2**40
FIRST_ROWS_S = 300.0
# Processes of the job cannot import these modules.
for module in (common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def used() -> dict[str, float]:
    """Of this process: processor seconds, MB that it shares with nobody, and how many modules it has."""
    memory = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in memory if line.startswith("Private_"))
    return {"cpu_s": time.process_time(), "private_mb": private / 1024, "modules": len(sys.modules)}


class FirstRows(tg.BatchFunction):
    """Passes batches on; at the first one it writes down what its process has used."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.told = False

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows have come."""
        if not self.told:
            self.told = True
            unfinished = Path(self.folder) / f".{uuid.uuid4().hex}"
            unfinished.write_text(json.dumps(used()))
            unfinished.rename(unfinished.with_name(f"{unfinished.name[1:]}.json"))
        return batch


@dataclass(frozen=True)
class Started:
    """One job: seconds to the first rows, and of its tasks the medians."""

    seconds: float
    cpu_s: float
    private_mb: float
    modules: float


def start(tasks: int, folder: Path) -> Started:
    """Run a job of so many tasks until there are rows everywhere."""
    folder.mkdir(parents=True)
    half = tasks // 2
    with tg.StreamEnvironment(RayRuntime(standbys=0), parallelism=half) as env:
        source = env.from_source(GeneratedSource(ROWS_MAX, KEYS, half), name="rows")
        seen = source.map_batches(FirstRows(str(folder)), schema=source.schema)
        counted = seen.key_by("key").aggregate(n=tg.count(), x=tg.sum("value"))
        counted.map_batches(FirstRows(str(folder)), schema=counted.schema).collect()
        config = tg.CheckpointConfig(interval="1h", storage=str(folder / "chk"))
        begun_s = time.monotonic()
        job = env.execute("task-start", checkpoints=config)
        try:
            while len(told := list(folder.glob("*.json"))) < tasks:
                assert time.monotonic() < begun_s + FIRST_ROWS_S, "no rows came"
                time.sleep(0.01)
            seconds = time.monotonic() - begun_s
        finally:
            job.cancel()
    found = [json.loads(path.read_text()) for path in told]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return Started(seconds, **medians)


def empty_actor() -> dict[str, float]:
    """What an actor that does nothing has used when it answers."""

    class Empty:
        def used(self) -> dict[str, float]:
            return used()

    # Ray's types do not know of classes made here.
    remote: Any = ray.remote
    actor = remote(num_cpus=0)(Empty).remote()
    found: dict[str, float] = ray.get(actor.used.remote())
    return found


def report(console: Console, name: str, runs: Sequence[Started]) -> None:
    """One line: medians."""
    fields = ("seconds", "cpu_s", "private_mb", "modules")
    seconds, cpu, memory, modules = (statistics.median(getattr(run, field) for run in runs) for field in fields)
    console.print(f"{name}: {seconds:.1f} s; a task's process: {cpu:.2f} s, {memory:.0f} MB, {modules:.0f} modules")


def main() -> int:
    """Start jobs of each size in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, nargs="+", default=[4, 16], help="of a job, even numbers (default 4 16)")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each size (default 3)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/task-start"), help="where files go")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    describe_machine(console)
    root = arguments.folder.absolute() / uuid.uuid4().hex
    runs: dict[int, list[Started]] = {tasks: [] for tasks in arguments.tasks}
    with local_ray():
        largest = max(arguments.tasks)
        report(console, f"the first job, {largest} tasks", [start(largest, root / "first")])
        empty = [empty_actor() for _ in range(arguments.rounds)]
        for number in range(arguments.rounds):
            for tasks, found in runs.items():
                found.append(start(tasks, root / f"{number}-{tasks}"))
                report(console, f"{tasks} tasks", found[-1:])
    bare = {name: statistics.median(each[name] for each in empty) for name in empty[0]}
    console.print(f"medians; an actor that does nothing: {bare['cpu_s']:.2f} s, {bare['private_mb']:.0f} MB")
    for tasks, found in runs.items():
        report(console, f"execute to the first rows of {tasks} tasks", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
