"""RocksDB beside the columnar backend: a keyed aggregate of count, sum and max, with checkpoints, in one process.

    .venv/bin/python benchmarks/backends.py [--keys 1000 100000 1000000] [--rounds 3] [--json PATH]

Rows have int64 keys, drawn evenly, in batches of 65,536. An operator takes them in on one thread; the snapshots that it
freezes are written to local files on another one, as in a task. `--every` rows come between two checkpoints, and none
begins before the one before it is written. The backends take turns within a round. Costs are processor time of the
whole process, RocksDB's own threads included, so that other work on the machine changes them least; the synchronous
part is what the processing thread spends in a freeze, by the clock; the 99th percentile of its processor time beside
that is what other work does not change. Results are compared at the end of each run.

The last line of each table is state of four times the memory that the cache may have: what a row costs must not grow
from the second quarter of the run to the last. Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from common import describe_machine
from rich.console import Console
from rich.table import Table

from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import OperatorContext
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import NativeState
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.backend_files import write_native
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot
from tidegate.storage.state.state_file import write_state

BATCH_ROWS = 65_536
MAX_PARALLELISM = 128
BACKENDS = ("columnar", "rocksdb")
VALUES = 1_000
"""Values are whole numbers below this, so that sums of them are exact."""
CACHED_KEY_BYTES = 72
"""What the cache needs for a key: the large state has four times as many keys as fit."""
DISTINCT_BATCHES = 64
STEPS = 16


@dataclass(frozen=True)
class Seen:
    """One run: processor time a row, in ns, by sixteenths of the run. Of snapshots, ms of the synchronous part, by the
    clock and of the thread's processor time, and of all."""

    ns_a_row: list[float]
    synchronous_ms: list[float]
    synchronous_cpu_ms: list[float]
    whole_ms: list[float]
    exact: bool

    @property
    def ns(self) -> float:
        """Of the whole run."""
        return statistics.fmean(self.ns_a_row)

    @property
    def growth(self) -> float:
        """What a row costs in the last quarter, against the second one."""
        quarter = STEPS // 4
        return statistics.median(self.ns_a_row[-quarter:]) / statistics.median(self.ns_a_row[quarter : 2 * quarter])


def _options(backend: str, folder: Path, cache_bytes: int | None) -> StateBackendOptions:
    if backend == "columnar":
        return StateBackendOptions("columnar", incremental=True)
    options = StateBackendOptions("rocksdb", incremental=True, directory=str(folder / "db"))
    return options if cache_bytes is None else replace(options, cache_bytes=cache_bytes)


class SnapshotWriter:
    """Writes snapshots, one after the other, on a thread of its own."""

    def __init__(self, store: FileSystemStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(1)
        self._running: Future[float] | None = None
        self._base: NativeState | None = None
        self.layers = 0
        """The newest checkpoint that is written: what the next one is built on."""
        self.whole_ms: list[float] = []

    @property
    def is_free(self) -> bool:
        """Whether the last one is written."""
        return self._running is None or self._running.done()

    def write(self, number: int, snapshot: OperatorSnapshot, began_s: float) -> None:
        """Begin to write the next one, after the one before."""
        self.wait()
        self._running = self._threads.submit(self._written, number, snapshot, began_s)

    def wait(self) -> None:
        """Until the last one is written."""
        if self._running is not None:
            self.whole_ms.append(self._running.result())
            self._running = None

    def _written(self, number: int, snapshot: OperatorSnapshot, began_s: float) -> float:
        if snapshot.native is not None:
            self._base = write_native(self._store, f"chk-{number}", snapshot.native, self._base)
        else:
            write_state(self._store, f"chk-{number}/state", [(snapshot.uid, state) for state in snapshot.layer])
        self.layers = number
        return (time.perf_counter() - began_s) * 1e3


def run(backend: str, keys: int, rows: int, every: int, cache_bytes: int | None, folder: Path) -> Seen:
    """One run: fill all keys, then the rows that are measured."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    what = {"n": aggregates.count(), "total": aggregates.sum("value"), "most": aggregates.max("value")}
    operator = KeyedAggregate(("key",), what)
    options = _options(backend, folder, cache_bytes)
    operator.open(OperatorContext(OperatorUid("op"), "op", SubtaskIndex(0), 1, MAX_PARALLELISM, backend=options), ())
    writer = SnapshotWriter(open_store(str(folder / "store")))
    synchronous_ms: list[float] = []
    synchronous_cpu_ms: list[float] = []

    def freeze(number: int) -> None:
        writer.wait()
        base = CheckpointId(writer.layers) if writer.layers else None
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        snapshot = operator.snapshot(Cut(CheckpointId(number), base))
        synchronous_ms.append((time.perf_counter() - began_s) * 1e3)
        synchronous_cpu_ms.append((time.thread_time() - began_cpu_s) * 1e3)
        writer.write(number, snapshot, began_s)

    rng = np.random.default_rng(keys)
    order = rng.permutation(keys)
    for start in range(0, keys, BATCH_ROWS):
        operator.process(_batch(order[start : start + BATCH_ROWS]), lambda _: None)
    freeze(1)
    writer.wait()
    synchronous_ms.clear()
    synchronous_cpu_ms.clear()
    writer.whole_ms.clear()
    batches = [_batch(rng.integers(0, keys, BATCH_ROWS)) for _ in range(DISTINCT_BATCHES)]
    ns_a_row, taken, due = [], 0, every
    for step in range(STEPS):
        began_ns, before = time.process_time_ns(), taken
        while taken * STEPS < rows * (step + 1):
            operator.process(batches[taken // BATCH_ROWS % DISTINCT_BATCHES], lambda _: None)
            taken += BATCH_ROWS
            if every and taken >= due and writer.is_free:
                due = taken + every
                freeze(len(synchronous_ms) + 2)
        ns_a_row.append((time.process_time_ns() - began_ns) / (taken - before))
    writer.wait()
    exact = _is_exact(operator, keys, batches, taken // BATCH_ROWS)
    operator.close()
    shutil.rmtree(folder, ignore_errors=True)
    return Seen(ns_a_row, synchronous_ms, synchronous_cpu_ms, writer.whole_ms, exact)


def _batch(keys: npt.NDArray[np.int64]) -> pa.RecordBatch:
    return pa.record_batch({"key": keys, "value": (keys % VALUES).astype(np.float64)})


def _is_exact(operator: KeyedAggregate, keys: int, batches: Sequence[pa.RecordBatch], taken: int) -> bool:
    """Whether the counts, sums and maxima of all keys are those of every row that came, with one more of each key."""
    counts = np.full(keys, 2, dtype=np.int64)
    for position, batch in enumerate(batches):
        times = taken // len(batches) + (position < taken % len(batches))
        counts += times * np.bincount(batch.column("key").to_numpy(), minlength=keys)
    shown: list[pa.RecordBatch] = []
    numbers = np.arange(keys)
    for start in range(0, keys, BATCH_ROWS):
        operator.process(_batch(numbers[start : start + BATCH_ROWS]), shown.append)
    found = pa.Table.from_batches(shown)
    most = (numbers % VALUES).astype(np.float64)
    expected = {"key": numbers, "n": counts, "total": counts * most, "most": most}
    return all(bool((found[name].to_numpy() == values).all()) for name, values in expected.items())


def show(keys: int, rounds: Sequence[Mapping[str, Seen]], console: Console) -> None:
    """A line for each backend: medians of the rounds."""
    table = Table(title=f"{keys:,} keys; x is the ratio to the first line, within a round (least to greatest)")
    for column in (
        "",
        "CPU ns/row",
        "x",
        "synchronous ms: p50",
        "p99",
        "of CPU",
        "chk",
        "whole ms",
        "last/2nd quarter",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    first = next(iter(rounds[0]))
    for name in rounds[0]:
        of = [seen[name] for seen in rounds]
        ratios = [seen[name].ns / seen[first].ns for seen in rounds]
        frozen = [ms for seen in of for ms in seen.synchronous_ms] or [0.0]
        table.add_row(
            name,
            f"{statistics.median(seen.ns for seen in of):.0f}",
            f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            f"{statistics.median(frozen):.1f}",
            f"{np.percentile(frozen, 99):.1f}",
            f"{np.percentile([ms for seen in of for ms in seen.synchronous_cpu_ms] or [0.0], 99):.1f}",
            f"{sum(len(seen.whole_ms) for seen in of)}",
            f"{statistics.median([ms for seen in of for ms in seen.whole_ms] or [0.0]):.0f}",
            f"{statistics.median(seen.growth for seen in of):.2f}",
        )
    console.print(table)


def main() -> int:
    """All rounds of all numbers of keys. Exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3, help="of each number of keys (default 3)")
    parser.add_argument("--rows", type=int, default=40_000_000, help="that are measured in a run")
    parser.add_argument("--every", type=int, default=10_000_000, help="rows from one checkpoint to the next; 0: none")
    parser.add_argument("--backends", choices=BACKENDS, nargs="+", default=list(BACKENDS))
    parser.add_argument("--large", type=int, default=16, help="MiB of the cache of the large state; 0: no such runs")
    parser.add_argument("--json", type=Path, help="write the medians here, too")
    parser.add_argument("--folder", type=Path, default=Path(".bench/backends"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    describe_machine(console)
    folder = arguments.folder.resolve()
    run(arguments.backends[0], 1_000, STEPS * BATCH_ROWS, 0, None, folder)  # Kernels are loaded, which is paid once.
    large_bytes = arguments.large << 20
    sizes = [(keys, arguments.rows, arguments.every, None) for keys in arguments.keys]
    if arguments.large:
        rows = max(arguments.rows // 10, 4 * STEPS * BATCH_ROWS)
        sizes.append((4 * large_bytes // CACHED_KEY_BYTES, rows, rows // 8 if arguments.every else 0, large_bytes))
    figures, exact = {}, True
    for keys, rows, every, cache_bytes in sizes:
        rounds: list[dict[str, Seen]] = []
        for number in range(arguments.rounds):
            seen = {name: run(name, keys, rows, every, cache_bytes, folder) for name in arguments.backends}
            rounds.append(seen)
            exact = exact and all(each.exact for each in seen.values())
            told = ", ".join(f"{name} {each.ns:.0f} ns{'' if each.exact else ' WRONG'}" for name, each in seen.items())
            console.print(f"{number + 1}: {keys:,} keys: {told}", highlight=False, soft_wrap=True)
        show(keys, rounds, console)
        for name in arguments.backends:
            figures[f"{name}, {keys:,} keys"] = statistics.median(seen[name].ns for seen in rounds)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures))
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
