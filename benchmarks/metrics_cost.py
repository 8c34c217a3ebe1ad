"""What the metrics of tasks cost: a keyed job on Ray with them and without, in turns within one run.

Source -> key by -> count, at parallelism 1: two processes. A function that is chained into each task takes out, in the
task's own process and at its turn, what counts the time of work, what makes and publishes the figures of a second, and
what the function counts itself; rows are still told to the coordinator, as progress needs them. `slices.py` says how
processor time for each row is compared; it is that of all processes, Ray's own and the coordinator's included.

The parts are measured alone as well, by the processor time of one thread: the figures of a task are published many
times, and the time of work is counted for many events. Their share of a second, with `EVENTS` events in it, is shown.

    .venv/bin/python benchmarks/metrics_cost.py --pairs 60
"""

from __future__ import annotations

import argparse
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import pyarrow as pa
import slices
from common import GeneratedSource, describe_machine, local_ray
from ray import cloudpickle
from rich.console import Console
from slices import ROWS_MAX, Board, SeenRows, Turn, processor_time, report, running, take_turns

import tidegate as tg
from tidegate.actors.drivers.task_driver import TaskDriver, WorkTimes
from tidegate.actors.ray.metrics import TaskMetrics
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.ray.worker_actor import ProgressReports
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics
from tidegate.operators.user_metrics import UserMetric
from tidegate.storage.ids import OperatorUid

KEYS = 100_000
TASKS = ("WorkerProcess",)
USER_METRICS = 10
EVENTS = 2_000
"""In a second of a task: frames, credit, turns and reads; a job at full speed has some hundreds."""
PUBLISHED, COUNTED = 500, 200_000
COST_MAX = 0.01
WITHOUT, WITH = 0, 1
MEASURED = ((TaskDriver, "look"), (WorkTimes, "worked"), (ProgressReports, "_measured"))
# Processes of the job cannot import these modules.
for module in (common, slices, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


class Probe(SeenRows):
    """Passes batches on, and switches the metrics of its process on and off. One of two counts the rows."""

    def __init__(self, board: Path, counts: bool) -> None:
        super().__init__(board)
        self.counts = counts

    def open(self, context: tg.BatchContext) -> None:
        """The job begins; with metrics the function has some of its own."""
        super().open(context)
        self.counters = [context.metrics.counter(f"n{number}") for number in range(USER_METRICS)]
        self.originals = [getattr(kind, method) for kind, method in MEASURED]
        self.measures = True

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A call a batch for each metric."""
        if self.measures != (self.board.turn == WITH):
            self.measures = not self.measures
            self.switch(self.originals if self.measures else [_nothing] * len(MEASURED))
        if self.measures:
            for counter in self.counters:
                counter.inc()
        return super().process(batch) if self.counts else batch

    @staticmethod
    def switch(methods: list[Callable[..., Any]]) -> None:
        """This process measures so from now on."""
        for (kind, method), put in zip(MEASURED, methods, strict=True):
            setattr(kind, method, put)


def _nothing(*arguments: Any) -> None:
    return None


def measure(folder: Path, pairs: int, turn_s: float) -> list[tuple[Turn, Turn]]:
    """Run the job once, and look at pairs of turns: without, with."""
    folder.mkdir(parents=True)
    path = folder / "board"
    board = Board(path)
    with tg.StreamEnvironment(RayRuntime(standbys=0), parallelism=1) as env:
        source = env.from_source(GeneratedSource(ROWS_MAX, KEYS, 1), name="rows")
        probed = source.map_batches(Probe(path, True), schema=source.schema)
        counted = probed.key_by("key").aggregate(n=tg.count(), emit="final")
        counted.map_batches(Probe(path, False), schema=counted.schema).collect()
        checkpoints = tg.CheckpointConfig(storage=str(folder / "checkpoints"))
        with running(env.execute("metrics-cost", checkpoints=checkpoints, progress="off"), board):
            return take_turns(board, pairs, turn_s)


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
    """All turns, and the parts. Exit code 1 if metrics cost a hundredth of the processor time for a row or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="turns with and without, so many each (default 40)")
    parser.add_argument("--turn", type=float, default=2.0, metavar="SECONDS", help="of each turn (default 2)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/metrics-cost"), help="where files go")
    arguments = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    describe_machine(console)
    with local_ray():
        publishing, counting = publishing_s(), counting_s()
        pairs = measure(arguments.folder.absolute() / uuid.uuid4().hex, arguments.pairs, arguments.turn)
    for line in report(pairs, ("without", "with")):
        console.print(line)
    cost = processor_time(pairs, TASKS)
    console.print(f"processor time of tasks for a row, with to without: {cost}")
    console.print(f"that of all processes: {processor_time(pairs)}")
    share = publishing + EVENTS * counting
    console.print(f"a second of metrics: {publishing * 1e6:.0f} us, an event: {counting * 1e9:.0f} ns")
    console.print(f"share of a second with {EVENTS:,} events: {share:.3%}")
    return 0 if cost.median - 1 < COST_MAX and share < COST_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
