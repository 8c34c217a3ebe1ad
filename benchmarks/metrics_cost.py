"""What the metrics of tasks cost: a keyed job on Ray with them and without, in turns, in one run.

Source -> key by -> count, at parallelism 1: two processes. Without metrics a function that is chained into each task
takes out, in the task's own process, what counts the time of work and what makes and publishes the figures of a second;
rows are still told to the coordinator, as progress needs them. Processor time of both processes for the same rows, and
rows a second, are compared; on a machine that does something else both jump by more than metrics cost.

So the parts are measured alone as well, by the processor time of one thread: the figures of a task are published many
times, and the time of work is counted for many events. Their share of a second, with `EVENTS` events in it, decides.

    .venv/bin/python benchmarks/metrics_cost.py --rows 60000000 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from common import ENDED, GeneratedSource, describe_machine, local_ray
from ray import cloudpickle
from rich.console import Console

import tidegate as tg
from tidegate.actors.hosts.task.task_host import TaskHost
from tidegate.actors.hosts.task.work_times import WorkTimes
from tidegate.actors.operators.user_metrics import UserMetric
from tidegate.actors.runtimes.ray.metrics import TaskMetrics
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime
from tidegate.actors.runtimes.ray.task.row_counts import RowCounts
from tidegate.actors.runtimes.vertex_metrics import SubtaskMetrics
from tidegate.storage.ids import OperatorUid

KEYS = 100_000
USER_METRICS = 10
EVENTS = 2_000
"""In a second of a task: frames, credit, turns and reads; a job at full speed has some hundreds."""
PUBLISHED, COUNTED = 500, 200_000
COST_MAX = 0.01
LOOK_S = 0.05
# Processes of the job cannot import this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Probe(tg.BatchFunction):
    """Passes batches on. Switches the metrics of its process off, and writes down the processor time of the process."""

    def __init__(self, folder: str, metrics: bool) -> None:
        self.folder = folder
        self.metrics = metrics

    def open(self, context: tg.BatchContext) -> None:
        """The job begins; with metrics the function has some of its own."""
        if not self.metrics:
            switch_off()
        self.counters = [context.metrics.counter(f"n{number}") for number in range(USER_METRICS)]
        self.begun_s = time.process_time()

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A call a batch for each metric."""
        if self.metrics:
            for counter in self.counters:
                counter.inc()
        return batch

    def close(self) -> None:
        """The job is over."""
        used_s = time.process_time() - self.begun_s
        (Path(self.folder) / f"{uuid.uuid4().hex}.json").write_text(json.dumps(used_s))


def switch_off() -> None:
    """This process measures nothing any more."""

    def nothing(*arguments: Any) -> None:
        return None

    for kind, method in ((TaskHost, "look"), (WorkTimes, "worked"), (RowCounts, "_measured")):
        setattr(kind, method, nothing)


@dataclass(frozen=True)
class Measured:
    """One run: processor seconds of both tasks, and millions of rows a second from the first rows to the end."""

    cpu_s: float
    rate: float


def measure(rows: int, metrics: bool, folder: Path) -> Measured:
    """Run the job once."""
    folder.mkdir(parents=True)
    with tg.StreamEnvironment(RayRuntime(standbys=0), parallelism=1) as env:
        source = env.from_source(GeneratedSource(rows, KEYS, 4), name="rows")
        probed = source.map_batches(Probe(str(folder), metrics), schema=source.schema)
        counted = probed.key_by("key").aggregate(n=tg.count())
        counted.map_batches(Probe(str(folder), metrics), schema=counted.schema).collect()
        job = env.execute("metrics-cost", checkpoints=tg.CheckpointConfig(storage=str(folder / "checkpoints")))
        begun = ended = time.monotonic()
        while (progress := job.progress()).status not in ENDED:
            ended = time.monotonic()
            if not any(progress.rows_in.values()):
                begun = ended
            time.sleep(LOOK_S)
        assert progress.status == "finished", progress.reason
    used = [float(json.loads(path.read_text())) for path in folder.glob("*.json")]
    assert len(used) == 2, "both tasks have told"
    return Measured(sum(used), rows / (ended - begun) / 1e6)


def publishing_s() -> float:
    """Processor time that it takes to publish the figures of a task once, user metrics included."""
    metrics = TaskMetrics({"job": "cost", "vertex": "cost", "subtask": "0"})
    uid = OperatorUid("cost")
    user = tuple(UserMetric("cost", uid, f"n{number}", "counter", number) for number in range(USER_METRICS))
    told = SubtaskMetrics(0, 0, 0, input_watermark_ms=1, output_watermark_ms=1, user=user)
    metrics.update(told)
    begun_s = time.thread_time()
    for number in range(PUBLISHED):
        metrics.update(replace(told, records_in=number, records_out=number, bytes_in=number, bytes_out=number))
    return (time.thread_time() - begun_s) / PUBLISHED


def counting_s() -> float:
    """Processor time that it takes to count the time of work of one event, each after a while without."""
    times = WorkTimes(0)
    begun_s = time.thread_time()
    for now_ms in range(1, COUNTED + 1):
        if now_ms != times.until_ms:
            times.waited(now_ms, False)
        times.worked(now_ms)
    return (time.thread_time() - begun_s) / COUNTED


def main() -> int:
    """All runs, in turns, and the parts. Exit code 1 if the parts cost a hundredth of a second or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=60_000_000, help="of each run (default 60,000,000)")
    parser.add_argument("--rounds", type=int, default=5, help="with and without, so often each (default 5)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/metrics-cost"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    found: dict[bool, list[Measured]] = {True: [], False: []}
    root = arguments.folder.absolute() / uuid.uuid4().hex
    with local_ray():
        publishing, counting = publishing_s(), counting_s()
        measure(arguments.rows // 10, True, root / "warm")
        for number in range(arguments.rounds):
            for metrics in (True, False) if number % 2 else (False, True):
                run = measure(arguments.rows, metrics, root / f"{number}-{metrics}")
                found[metrics].append(run)
                named = "with   " if metrics else "without"
                console.print(f"{named}: {run.cpu_s:.2f} s, {run.rate:.2f} M rows/s", highlight=False)
    cpu = {metrics: statistics.median(run.cpu_s for run in runs) for metrics, runs in found.items()}
    rate = {metrics: statistics.median(run.rate for run in runs) for metrics, runs in found.items()}
    ratio = cpu[True] / cpu[False]
    console.print(f"medians: {cpu[True]:.2f} s with, {cpu[False]:.2f} s without: {ratio:.3f}", highlight=False)
    console.print(f"rows a second, with to without: {rate[True] / rate[False]:.4f}", highlight=False)
    cost = publishing + EVENTS * counting
    console.print(f"a second of metrics: {publishing * 1e6:.0f} us, an event: {counting * 1e9:.0f} ns", highlight=False)
    console.print(f"share of a second with {EVENTS:,} events: {cost:.3%}", highlight=False)
    return 0 if cost < COST_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
