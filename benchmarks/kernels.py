"""CPU nanoseconds per row of the kernels and of the keyed path, beside polars on the same batches in the same run.

    python benchmarks/kernels.py [--keys 1000000] [--seconds 40] [--json PATH]

One thread, int64 keys drawn evenly from `--keys` distinct ones (all known before), float64 values. CPU time, because
other work on the machine would count in wall time; caches are shared all the same. All lines take turns within a round,
so that a busy neighbour hits them alike; the median and the best round are shown. The floor counts and adds in two
arrays, whose positions are the keys: what is left if no key has to be looked up and nothing is handed on.

Then the same state is frozen and written to a file, as a checkpoint does, beside a plain write of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

os.environ.setdefault("POLARS_MAX_THREADS", "1")

import numpy as np
import polars as pl
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import OperatorContext
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn, pages_for
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK, fixed_values
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.partition import partition, subtask_table
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut
from tidegate.storage.state.state_file import write_state

BATCH_ROWS = (65_536, 262_144)
ROUNDS_MAX = 60
MAX_PARALLELISM = 128
SNAPSHOTS = 15
FROZEN, SORTED = "frozen, which holds the task up", "frozen, sorted by key group"
WRITTEN, PLAIN = "sorted, encoded and written", "floor: a plain write of as many bytes"

T = TypeVar("T")


@dataclass
class Line:
    """One row of the table."""

    name: str
    run: Callable[[pa.RecordBatch], object]
    ns_per_row: dict[int, list[float]] = field(default_factory=dict)

    def round(self, batch: pa.RecordBatch) -> None:
        started_ns = time.process_time_ns()
        self.run(batch)
        elapsed_ns = time.process_time_ns() - started_ns
        self.ns_per_row.setdefault(batch.num_rows, []).append(elapsed_ns / batch.num_rows)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--keys", type=int, default=1_000_000)
    arguments.add_argument("--seconds", type=float, default=40.0, help="time to measure for, at most")
    arguments.add_argument("--json", type=Path, help="write the medians of the smaller batches here, too")
    options = arguments.parse_args()
    console = Console()
    rng = np.random.default_rng(1)
    lines = _lines(options.keys)
    for line in lines:
        for rows in BATCH_ROWS:
            line.run(_batch(rng, options.keys, rows))
    deadline = time.monotonic() + options.seconds
    for _ in range(ROUNDS_MAX):
        for rows in BATCH_ROWS:
            batch = _batch(rng, options.keys, rows)
            for line in lines:
                line.round(batch)
        if time.monotonic() > deadline:
            break
    console.print(_table(lines, options.keys))
    snapshots = _snapshots(options.keys)
    console.print(_table_of_snapshots(snapshots, options.keys))
    if options.json is not None:
        figures = {line.name: statistics.median(line.ns_per_row[BATCH_ROWS[0]]) for line in lines}
        options.json.write_text(
            json.dumps(figures | {f"snapshot: {name}": statistics.median(of) for name, of in snapshots.items()})
        )


def _batch(rng: np.random.Generator, keys: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"key": rng.integers(0, keys, rows), "value": rng.random(rows)})


def _all_keys(keys: int) -> Iterator[pa.RecordBatch]:
    order = np.random.default_rng(0).permutation(keys)
    for start in range(0, keys, BATCH_ROWS[0]):
        part = order[start : start + BATCH_ROWS[0]]
        yield pa.record_batch({"key": part, "value": np.zeros(len(part))})


def _aggregate(keys: int, **what: aggregates.Aggregate) -> KeyedAggregate:
    operator = KeyedAggregate(("key",), what)
    operator.open(OperatorContext(OperatorUid("bench"), "bench", SubtaskIndex(0), 1, MAX_PARALLELISM), ())
    for batch in _all_keys(keys):
        operator.process(batch, lambda _: None)
    return operator


def _column(keys: int, data_type: pa.DataType) -> PagedColumn:
    column = PagedColumn(ValueSpec("x", data_type, 0))
    column.grow(pages_for(keys))
    return column


@kernel
def _floor(keys: np.ndarray, values: np.ndarray, counts: np.ndarray, sums: np.ndarray) -> None:
    for row in range(keys.shape[0]):
        counts[keys[row]] += 1
        sums[keys[row]] += values[row]


def _lines(keys: int) -> list[Line]:
    index = KeyIndex(("key",))
    for batch in _all_keys(keys):
        index.upsert(batch)
    table = subtask_table(MAX_PARALLELISM, 2)
    split = HashPartitioner(("key",), MAX_PARALLELISM, 2).split
    operator = _aggregate(keys, n=aggregates.count(), total=aggregates.sum("value"))
    counts, sums = _column(keys, pa.int64()), _column(keys, pa.float64())
    plain = np.zeros(keys, dtype=np.int64), np.zeros(keys, dtype=np.float64)
    slots: dict[int, np.ndarray] = {}
    hashes: dict[int, np.ndarray] = {}

    def hashing(batch: pa.RecordBatch) -> None:
        hashes[batch.num_rows] = hash_columns(batch, ("key",))

    def upserting(batch: pa.RecordBatch) -> None:
        slots[batch.num_rows] = index.upsert(batch).slots

    def both(batch: pa.RecordBatch) -> None:
        split(batch)
        operator.process(batch, lambda _: None)

    def yardstick(batch: pa.RecordBatch) -> None:
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        frame.group_by("key").agg(pl.len(), pl.col("value").sum())

    return [
        Line("hash", hashing),
        Line("partition (row numbers)", lambda b: partition(hashes[b.num_rows], table, 2)),
        Line("HashPartitioner.split, 2 subtasks", split),
        Line("upsert", upserting),
        Line("accumulate count", lambda b: accumulate.count(counts.pages, slots[b.num_rows], NO_MASK)),
        Line(
            "accumulate sum",
            lambda b: accumulate.sum_float64(sums.pages, slots[b.num_rows], fixed_values(b.column(1)), NO_MASK),
        ),
        Line("KeyedAggregate.process (count, sum; update)", lambda b: operator.process(b, lambda _: None)),
        Line("split + process", both),
        Line(
            "floor: arrays instead of an index",
            lambda b: _floor(fixed_values(b.column(0)), fixed_values(b.column(1)), *plain),
        ),
        Line("polars group_by of the batch, no state", yardstick),
    ]


def _table(lines: list[Line], keys: int) -> Table:
    table = Table(title=f"ns per row, {keys:,} keys, median (best)")
    table.add_column("")
    for rows in BATCH_ROWS:
        table.add_column(f"{rows:,} rows", justify="right")
    for line in lines:
        figures = [line.ns_per_row[rows] for rows in BATCH_ROWS]
        table.add_row(line.name, *(f"{statistics.median(f):.1f} ({min(f):.1f})" for f in figures))
    return table


def _snapshots(keys: int) -> dict[str, list[float]]:
    """CPU of snapshots of all keys, in ns a row; the floor writes the same bytes, which lie there, to a file."""
    operator = _aggregate(keys, n=aggregates.count(), total=aggregates.sum("value"))
    found: dict[str, list[float]] = {FROZEN: [], SORTED: [], WRITTEN: [], PLAIN: []}

    def timed(name: str, run: Callable[..., T], *arguments: object) -> T:
        started_ns = time.thread_time_ns()
        result = run(*arguments)
        found[name].append((time.thread_time_ns() - started_ns) / keys)
        return result

    def frozen_and_sorted(cut: Cut) -> None:
        for state in operator.snapshot(cut).states:
            deque(state.chunks(), maxlen=0)

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        for number in range(1, SNAPSHOTS + 1):
            cut = Cut(CheckpointId(number))
            timed(SORTED, frozen_and_sorted, cut)
            states = [(OperatorUid("bench"), state) for state in timed(FROZEN, operator.snapshot, cut).states]
            handle = timed(WRITTEN, write_state, store, "state", states)
            assert handle is not None, "there are rows"
            timed(PLAIN, store.write, "plain", [bytearray(handle.size_bytes)])
    return found


def _table_of_snapshots(found: dict[str, list[float]], keys: int) -> Table:
    table = Table(title=f"snapshot of {keys:,} keys, a count and a sum each: ns of CPU a row, median (best)")
    for name in found:
        table.add_column(name, justify="right")
    table.add_row(*(f"{statistics.median(f):.1f} ({min(f):.1f})" for f in found.values()))
    return table


if __name__ == "__main__":
    main()
