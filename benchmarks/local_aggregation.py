"""CPU nanoseconds per row from a sender to the aggregates of two subtasks: rows combined by the sender, or not.

    python benchmarks/local_aggregation.py [--keys 10 1000 100000 1000000 10000000] [--batch-rows 262144] [--seconds 8]
                                           [--only keyed] [--json PATH]

What is timed: combining, splitting by key, a copy of the message in Arrow's format and back, and the two aggregates.
Ray's own cost of a message comes on top, so where rows are combined a job gains at least this. The workloads: `keyed`
(count and sum of an int64 for each int64 key: evenly drawn from so many keys, and by Zipf 1.1), `words` (count for each
string: 1,000, 100,000 and Zipf 1.1 of a million) and `windows` (count and sum in tumbling windows of 10 s, event time
mostly in order, 1,000 and 100,000 keys). The modes `off`, `on` and `auto` take turns on the same operators, batch by
batch, so that a busy neighbour hits them alike. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from tidegate.actors.task.emitter import CombiningPartitioner, HashPartitioner, Partitioner
from tidegate.operators.aggregates import aggregate as tg
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.local_aggregation import CombiningMode, LocalAggregation
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Tumbling
from tidegate.storage.ids import OperatorUid, SubtaskIndex

SUBTASKS, MAX_PARALLELISM = 2, 128
MODES: tuple[CombiningMode, ...] = ("off", "on", "auto")
BATCHES = 12
ZIPF = 1.1
WINDOW_MS = 10_000
ROWS_A_SECOND = 1_000_000
"""Of event time: a batch of 262,144 rows is a quarter of a second, so nearly all batches lie in one window."""


@dataclass
class Workload:
    """Batches, and what aggregates them."""

    name: str
    batches: list[pa.RecordBatch]
    local: LocalAggregation

    def operator(self) -> Operator:
        """A fresh one."""
        if self.local.window is not None and self.local.time is not None:
            return SlicedWindows(self.local.keys, self.local.window, self.local.aggregates, self.local.time)
        return KeyedAggregate(self.local.keys, self.local.aggregates, "final")


def keys_of(rng: np.random.Generator, keys: int | None, rows: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Drawn evenly from so many; None: by Zipf."""
    if keys is not None:
        return rng.integers(0, keys, rows)
    return (rng.zipf(ZIPF, rows) % (1 << 40)).astype(np.int64)


def keyed(keys: int | None, rows: int) -> Workload:
    """Count and sum by an integer."""
    rng = np.random.default_rng(7)
    batches = [
        pa.record_batch({"key": keys_of(rng, keys, rows), "value": rng.integers(0, 1_000, rows)})
        for _ in range(BATCHES)
    ]
    name = "keyed, " + (f"{keys:,} keys" if keys is not None else f"Zipf {ZIPF}")
    return Workload(name, batches, LocalAggregation(("key",), {"n": tg.count(), "total": tg.sum("value")}))


def words(keys: int | None, rows: int) -> Workload:
    """Count by a string."""
    rng = np.random.default_rng(7)
    batches = []
    for _ in range(BATCHES):
        numbers = keys_of(rng, keys, rows)
        numbers = numbers if keys is not None else numbers % 1_000_000
        batches.append(pa.record_batch({"word": pa.array(np.char.add("word", numbers.astype(str)))}))
    name = "words, " + (f"{keys:,}" if keys is not None else f"Zipf {ZIPF} of a million")
    return Workload(name, batches, LocalAggregation(("word",), {"n": tg.count()}))


def windows(keys: int, rows: int) -> Workload:
    """Count and sum by an integer and window."""
    rng = np.random.default_rng(7)
    batches = []
    for number in range(BATCHES):
        times = (np.arange(number * rows, (number + 1) * rows) * 1_000 // ROWS_A_SECOND) + rng.integers(0, 50, rows)
        batches.append(
            pa.record_batch(
                {
                    "key": keys_of(rng, keys, rows),
                    "at": pa.array(times, pa.timestamp("ms")),
                    "value": rng.integers(0, 1_000, rows),
                }
            )
        )
    of = {"n": tg.count(), "total": tg.sum("value")}
    return Workload(
        f"windows of 10 s, {keys:,} keys", batches, LocalAggregation(("key",), of, Tumbling(WINDOW_MS), "at")
    )


def measured(workload: Workload, seconds: float) -> tuple[dict[str, float], float]:
    """Nanoseconds a row in each mode, and how many groups a row makes in a batch."""
    operators = [workload.operator() for _ in range(SUBTASKS)]
    for subtask, operator in enumerate(operators):
        place = OperatorContext(OperatorUid("u"), "u", SubtaskIndex(subtask), SUBTASKS, MAX_PARALLELISM)
        operator.open(place, [])
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    senders = {mode: sender(workload.local, mode) for mode in MODES}
    for batch in workload.batches:  # also so that all keys are known, and kernels compiled
        for mode in MODES:
            one_batch(senders[mode], operators, batch)
    until, turn = time.monotonic() + seconds, 0
    while time.monotonic() < until or turn < 2 * BATCHES:
        batch = workload.batches[turn % BATCHES]
        for mode in (*MODES[turn % 3 :], *MODES[: turn % 3]):
            started_ns = time.process_time_ns()
            one_batch(senders[mode], operators, batch)
            found[mode].append((time.process_time_ns() - started_ns) / batch.num_rows)
        turn += 1
    keys = workload.batches[0].column(0)
    return {mode: statistics.median(each) for mode, each in found.items()}, len(keys.unique()) / len(keys)


def sender(local: LocalAggregation, mode: CombiningMode) -> Partitioner:
    """What splits batches."""
    split = HashPartitioner(local.keys, MAX_PARALLELISM, SUBTASKS)
    if mode == "off":
        return split
    return CombiningPartitioner(
        LocalAggregation(local.keys, local.aggregates, local.window, local.time, mode=mode), split
    )


def one_batch(partitioner: Partitioner, operators: Sequence[Operator], batch: pa.RecordBatch) -> None:
    """From the sender to the aggregates."""
    for target, part in partitioner.split(batch):
        stream = pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, part.schema) as writer:
            writer.write_batch(part)
        with pa.ipc.open_stream(stream.getvalue()) as reader:
            for received in reader:
                operators[target].process(received, lambda _: None)


def workloads(keys: Sequence[int], rows: int, only: str) -> Iterator[Workload]:
    """One at a time, since each takes memory."""
    for count in (*keys, None):
        if only in "keyed":
            yield keyed(count, rows)
    for count in (1_000, 100_000, None):
        if only in "words":
            yield words(count, rows)
    for count in (1_000, 100_000):
        if only in "windows":
            yield windows(count, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="*", default=[10, 1_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--batch-rows", type=int, default=262_144)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    console = Console()
    table = Table("workload", "groups a row", *(f"{mode} ns" for mode in MODES), "off / on", "off / auto")
    figures = []
    for workload in workloads(arguments.keys, arguments.batch_rows, arguments.only):
        found, share = measured(workload, arguments.seconds)
        gains = {mode: found["off"] / found[mode] for mode in ("on", "auto")}
        table.add_row(
            workload.name,
            f"{share:.3f}",
            *(f"{found[mode]:.1f}" for mode in MODES),
            *(f"{gain:.2f}" for gain in gains.values()),
        )
        figures.append({"workload": workload.name, "groups_a_row": share, "ns_a_row": found})
    console.print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
