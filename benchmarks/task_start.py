"""How long a job on Ray takes to its first row, and what its processes cost, by number of steps and parallelism.

    .venv/bin/python benchmarks/task_start.py [--shapes 2x2 12x2 12x8] [--rounds 3]

A job of n steps is a source of a few rows and steps that pass batches on, with a rebalance before each, so each step
is a vertex. *First rows*: when each subtask of the last step has had a row, as its function has written down. Then the
summed memory (PSS) of all processes of the job is read, and a few checkpoints are taken, one after the other: the time
of a call of `trigger_checkpoint` while no row is on its way. Processor time and memory of a worker's process are those
at its first row, memory is what it shares with no other process. Beside them stands an actor of Ray that does nothing:
what no program on Ray can do without. The first job of a program is shown by itself, because it compiles what there is
to compile.
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
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

# Installed packages are compiled. Where this variable is set, each process would compile our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import common
import pyarrow as pa
import ray
import scale
from common import describe_machine, local_ray
from ray import cloudpickle
from rich.console import Console
from scale import Still

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime

KEYS = 10_000
CHECKPOINTS = 11
ROWS_A_PART = 10_000
FIRST_ROWS_S = 300.0
# Processes of the job cannot import these modules.
for module in (common, scale, sys.modules[__name__]):
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


class Passes(tg.BatchFunction):
    """Passes batches on."""

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the batch."""
        return batch


class Nothing(tg.BatchFunction):
    """Drops all rows."""

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns no row."""
        return batch.slice(0, 0)


Shape: TypeAlias = tuple[int, int]
"""Steps and parallelism."""


def pss_of(pid: int) -> float:
    """The memory of a process in MB, where each page counts in part for each process that shares it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@dataclass(frozen=True)
class Started:
    """One job: seconds to the first rows, its processes with their PSS in MB, and medians of its workers."""

    seconds: float
    checkpoint_ms: float
    processes: float
    pss_mb: float
    cpu_s: float
    private_mb: float
    modules: float


def start(shape: Shape, folder: Path) -> Started:
    """Run a job of this shape until each subtask behind the sources has had rows, then take checkpoints."""
    folder.mkdir(parents=True)
    steps, parallelism = shape
    runtime = RayRuntime(standbys=0)
    with tg.StreamEnvironment(runtime, parallelism=parallelism) as env:
        stream = env.from_source(Still(parallelism * ROWS_A_PART, KEYS, parallelism), name="rows")
        for step in range(1, steps):
            function = FirstRows(str(folder)) if step == steps - 1 else Passes()
            stream = stream.rebalance().map_batches(function, schema=stream.schema, name=f"step {step}")
        stream.map_batches(Nothing(), schema=stream.schema).collect()
        config = tg.CheckpointConfig(interval="1h", storage=str(folder / "chk"))
        begun_s = time.monotonic()
        job = env.execute("task-start", checkpoints=config, progress="off")
        try:
            while len(told := list(folder.glob("*.json"))) < parallelism:
                assert time.monotonic() < begun_s + FIRST_ROWS_S, "no rows came"
                time.sleep(0.01)
            seconds = time.monotonic() - begun_s
            _, on_ray = runtime.attach("task-start")
            pids = {task.pid for task in on_ray.tasks()} | {on_ray.coordinator().pid}
            pss_mb = sum(pss_of(pid) for pid in pids)
            checkpoints_ms = []
            for _ in range(CHECKPOINTS):
                checkpoint_s = time.monotonic()
                job.trigger_checkpoint()
                checkpoints_ms.append((time.monotonic() - checkpoint_s) * 1_000)
        finally:
            job.cancel()
    found = [json.loads(path.read_text()) for path in told]
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return Started(seconds, statistics.median(checkpoints_ms), len(pids), pss_mb, **medians)


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
    seconds, checkpoint, processes, pss, cpu, memory, modules = (
        statistics.median(getattr(run, field.name) for run in runs) for field in fields(Started)
    )
    console.print(
        f"{name}: first rows {seconds:.1f} s, checkpoint {checkpoint:.0f} ms, "
        f"{processes:.0f} processes with {pss:.0f} MB; "
        f"a worker: {cpu:.2f} s, {memory:.0f} MB, {modules:.0f} modules"
    )


def shape_of(text: str) -> Shape:
    """Reads `12x2`."""
    steps, _, parallelism = text.partition("x")
    return int(steps), int(parallelism)


def main() -> int:
    """Start jobs of each shape in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes",
        type=shape_of,
        nargs="+",
        default=[(2, 2), (12, 2), (12, 8)],
        help="steps x parallelism (default 2x2 12x2 12x8)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each shape (default 3)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/task-start"), help="where files go")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    describe_machine(console)
    root = arguments.folder.absolute() / uuid.uuid4().hex
    runs: dict[Shape, list[Started]] = {shape: [] for shape in arguments.shapes}
    with local_ray():
        first = max(arguments.shapes)
        report(console, f"the first job, {first[0]} steps x {first[1]}", [start(first, root / "first")])
        empty = [empty_actor() for _ in range(arguments.rounds)]
        for number in range(arguments.rounds):
            for shape, found in runs.items():
                found.append(start(shape, root / f"{number}-{shape[0]}-{shape[1]}"))
                report(console, f"{shape[0]} steps x {shape[1]}", found[-1:])
    bare = {name: statistics.median(each[name] for each in empty) for name in empty[0]}
    console.print(f"medians; an actor that does nothing: {bare['cpu_s']:.2f} s, {bare['private_mb']:.0f} MB")
    for shape, found in runs.items():
        report(console, f"{shape[0]} steps x {shape[1]}", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
