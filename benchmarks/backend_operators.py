"""RocksDB beside the columnar backend, by operator: windows, strings, functions, rankings and joins, with checkpoints.

    .venv/bin/python benchmarks/backend_operators.py [--keys 100000] [--rounds 3] [--only TEXT ...] [--cache-kb N]

Each line is one operator in one process that takes rows in on one thread; the snapshots that it freezes are written to
local files on another one, eight in a run, and none begins before the one before it is written. Backends take turns
within a round. Costs are processor time of the whole process, RocksDB's own threads included; the synchronous part is
what the processing thread spends in a freeze, by the clock, and by its own processor time beside that. The number of
rows that come out, and the sum of their numbers, must be the same on both; exit code 1 if not. `--cache-kb` gives hot
rows so much memory only: "last/second" says what a row of the last quarter costs, against one of the
second quarter, for both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from backends import BACKENDS, MAX_PARALLELISM, SnapshotWriter
from common import describe_machine
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.operators.aggregates import aggregate as aggregates
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.joins.join_operator import JoinSides
from tidegate.operators.joins.regular_join import RegularJoin
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.operators.ranking.deduplicate import Deduplicate
from tidegate.operators.ranking.top_n import Ranking, TopN
from tidegate.operators.windows.session_windows import SessionWindows
from tidegate.operators.windows.sliced_windows import SlicedWindows
from tidegate.operators.windows.window_specs import Session, Sliding, Tumbling
from tidegate.state.common.options import CACHE_BYTES, StateBackendOptions
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut

SCHEMA = pa.schema({"key": pa.int64(), "value": pa.float64(), "text": pa.string(), "time": pa.timestamp("ms")})
BATCH_ROWS = 65_536
SMALL_BATCH_ROWS = 8_192
"""Of functions that are called by row."""
SNAPSHOTS = 8
DISTINCT_BATCHES = 32
ROWS_A_MS = 100
"""Rows of a millisecond of event time: a window of 10 s has a million."""
NUMBERS: Mapping[str, aggregates.Aggregate] = {
    "n": aggregates.count(),
    "total": aggregates.sum("value"),
    "most": aggregates.max("value"),
}
Row = Mapping[str, Any]


class Values(tg.ProcessFunction):
    """A number a key, by row."""

    def open(self, context: tg.ProcessContext) -> None:
        """Its state."""
        self.total = context.state(tg.ValueState("total", pa.float64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """Nothing comes out."""
        self.total.update((self.total.value() or 0.0) + row["value"])
        yield from ()


class Lists(tg.ProcessFunction):
    """A list a key that is cleared when it has ten values."""

    def open(self, context: tg.ProcessContext) -> None:
        """Its state."""
        self.values = context.state(tg.ListState("values", pa.float64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """Nothing comes out."""
        self.values.add(row["value"])
        if len(self.values.get()) >= 10:
            self.values.clear()
        yield from ()


class Maps(tg.ProcessFunction):
    """A map a key with ten entries."""

    def open(self, context: tg.ProcessContext) -> None:
        """Its state."""
        self.totals = context.state(tg.MapState("totals", pa.int64(), pa.float64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """Nothing comes out."""
        which = int(row["value"]) % 10
        self.totals.put(which, (self.totals.get(which) or 0.0) + row["value"])
        yield from ()


@dataclass(frozen=True)
class Case:
    """An operator, and how much of `--rows` it gets: functions by row are many times as slow."""

    make: Callable[[], Operator]
    share: int = 1
    batch_rows: int = BATCH_ROWS
    inputs: int = 1
    keys: int = 1
    """Of how many times `--keys` keys its rows are."""


def _process(function: tg.ProcessFunction) -> Case:
    return Case(lambda: ProcessOperator(function, (("key",),), (None,), SCHEMA), 40, SMALL_BATCH_ROWS)


_SIDES = JoinSides((("key",), ("key",)), (None, None))

CASES: Mapping[str, Case] = {
    "aggregate of numbers": Case(lambda: KeyedAggregate(("key",), dict(NUMBERS))),
    "tumbling windows": Case(lambda: SlicedWindows(("key",), Tumbling("10s"), NUMBERS, "time")),
    "sliding windows": Case(lambda: SlicedWindows(("key",), Sliding("10s", "2s"), NUMBERS, "time"), 2),
    "sessions": Case(lambda: SessionWindows(("key",), Session("1s"), NUMBERS, "time"), 10),
    "aggregate of strings": Case(lambda: KeyedAggregate(("key",), {"most": aggregates.max("text")}), 2),
    "deduplicate": Case(lambda: Deduplicate(("key",))),
    "deduplicate, last by time": Case(lambda: Deduplicate(("key",), "time", "last"), 10),
    "top 3": Case(lambda: TopN(Ranking(("key",), 3, ("value",), (True,)), SCHEMA), 10),
    "join": Case(lambda: RegularJoin(_SIDES, (SCHEMA, SCHEMA)), 40, SMALL_BATCH_ROWS, 2, 10),
    "process, value": _process(Values()),
    "process, list": _process(Lists()),
    "process, map": _process(Maps()),
}


@dataclass(frozen=True)
class Seen:
    """One run: processor time a row; ms of the synchronous parts, by the clock and of the thread; what came out."""

    ns: float
    synchronous_ms: list[float]
    synchronous_cpu_ms: list[float]
    whole_ms: list[float]
    came_out: tuple[int, float]
    later: float
    """What the last quarter of all batches costs, against the second one."""
    state_bytes: int
    """How large the state is in the end, as its backend says."""


class _Emitted:
    """How many rows came out, and the sum of their numbers."""

    def __init__(self) -> None:
        self.rows = 0
        self.total = 0.0

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Take a batch."""
        self.rows += batch.num_rows
        for name in ("n", "total", "most", "value"):
            if name in batch.schema.names and pa.types.is_primitive(batch.schema.field(name).type):
                self.total += pc.sum(batch.column(name)).as_py() or 0.0


def run(
    case: Case, backend: str, keys: int, rows: int, folder: Path, checkpoints: bool, cache_bytes: int = CACHE_BYTES
) -> Seen:
    """One run. The first quarter of the rows fills the state, and is not measured."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = StateBackendOptions("columnar", incremental=True)
    if backend == "rocksdb":
        options = StateBackendOptions(
            "rocksdb", incremental=True, directory=str(folder / "db"), cache_bytes=cache_bytes
        )
    operator, emitted = case.make(), _Emitted()
    operator.open(OperatorContext(OperatorUid("op"), "op", SubtaskIndex(0), 1, MAX_PARALLELISM, backend=options), ())
    writer = SnapshotWriter(open_store(str(folder / "store")))
    synchronous_ms: list[float] = []
    synchronous_cpu_ms: list[float] = []
    batches = _batches(keys * case.keys, case.batch_rows)
    count = max(16, rows // case.share // case.batch_rows)
    fill, number, marks_ns = count // 4, 0, []
    for taken in range(count):
        if taken % fill == 0:
            marks_ns.append(time.process_time_ns())
        rows_before = taken * case.batch_rows
        batch = _at(batches[taken % len(batches)], rows_before)
        operator.process_input(taken % case.inputs, batch, emitted)
        for _ in operator.advance_watermark(rows_before // ROWS_A_MS, emitted):
            pass
        if checkpoints and taken >= fill and (taken - fill) % max(1, (count - fill) // SNAPSHOTS) == 0:
            writer.wait()
            number += 1
            base = CheckpointId(writer.layers) if writer.layers else None
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            snapshot = operator.snapshot(Cut(CheckpointId(number), base))
            assert snapshot is not None, "an operator without state"
            synchronous_ms.append((time.perf_counter() - began_s) * 1e3)
            synchronous_cpu_ms.append((time.thread_time() - began_cpu_s) * 1e3)
            writer.write(number, snapshot, began_s)
    writer.wait()
    marks_ns.append(time.process_time_ns())
    ns = (time.process_time_ns() - marks_ns[1]) / ((count - fill) * case.batch_rows)
    later = (marks_ns[4] - marks_ns[3]) / (marks_ns[2] - marks_ns[1])
    assert operator.keyed_backend is not None
    state_bytes = operator.keyed_backend.size.size_bytes or 0
    operator.close()
    shutil.rmtree(folder, ignore_errors=True)
    came_out = (emitted.rows, emitted.total)
    return Seen(ns, synchronous_ms, synchronous_cpu_ms, writer.whole_ms, came_out, later, state_bytes)


def _batches(keys: int, rows: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(keys)
    found = []
    for _ in range(DISTINCT_BATCHES):
        of = rng.integers(0, keys, rows)
        values = (of % 1_000).astype(np.float64)
        texts = pa.array(np.char.add("a text of some length ", rng.integers(0, 1_000_000, rows).astype(str)))
        found.append(pa.record_batch([of, values, texts.cast(pa.string())], names=["key", "value", "text"]))
    return found


def _at(batch: pa.RecordBatch, rows_before: int) -> pa.RecordBatch:
    """The batch with its event times."""
    times = (rows_before + np.arange(batch.num_rows)) // ROWS_A_MS
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array(times).cast(pa.timestamp("ms"))], schema=SCHEMA)


def show(seen: Mapping[str, Sequence[Mapping[str, Seen]]], title: str, console: Console) -> None:
    """A line for each case."""
    table = Table(title=title)
    for column in ("", *BACKENDS, "x", "freeze ms: p50", "p99", "of CPU: p50", "p99", "whole ms", "last/second", "MB"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, rounds in seen.items():
        of = [each["rocksdb"] for each in rounds]
        ratios = [each["rocksdb"].ns / each["columnar"].ns for each in rounds]
        frozen = [ms for each in of for ms in each.synchronous_ms] or [0.0]
        cpu = [ms for each in of for ms in each.synchronous_cpu_ms] or [0.0]
        table.add_row(
            name,
            *(f"{statistics.median(each[backend].ns for each in rounds):.0f}" for backend in BACKENDS),
            f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})",
            f"{statistics.median(frozen):.1f}",
            f"{np.percentile(frozen, 99):.1f}",
            f"{statistics.median(cpu):.1f}",
            f"{np.percentile(cpu, 99):.1f}",
            f"{statistics.median([ms for each in of for ms in each.whole_ms] or [0.0]):.0f}",
            " / ".join(f"{statistics.median(each[backend].later for each in rounds):.2f}" for backend in BACKENDS),
            f"{of[-1].state_bytes / 1e6:.0f}",
        )
    console.print(table)


def main() -> int:
    """All rounds. Exit code 1 if what comes out differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8_000_000, help="of the quickest operators; others get a share")
    parser.add_argument("--only", nargs="+", default=[""], help="operators whose names have one of these in them")
    parser.add_argument("--without-checkpoints", action="store_true")
    parser.add_argument("--cache-kb", type=int, default=CACHE_BYTES // 1024, help="memory of a state's hot rows")
    parser.add_argument("--json", type=Path, help="write the medians of RocksDB here, too")
    parser.add_argument("--folder", type=Path, default=Path(".bench/backend-operators"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    describe_machine(console)
    folder, same = arguments.folder.resolve(), True
    checkpoints, cache_bytes = not arguments.without_checkpoints, arguments.cache_kb * 1024
    cases = {name: case for name, case in CASES.items() if any(text in name for text in arguments.only)}
    for case in cases.values():  # Kernels are loaded, which is paid once.
        run(case, "columnar", 1_000, 0, folder, False)
    seen: dict[str, list[dict[str, Seen]]] = {name: [] for name in cases}
    for number in range(arguments.rounds):
        for name, case in cases.items():
            of = {
                backend: run(case, backend, arguments.keys, arguments.rows, folder, checkpoints, cache_bytes)
                for backend in BACKENDS
            }
            seen[name].append(of)
            if len({each.came_out for each in of.values()}) > 1:
                same = False
                console.print(f"[red]{name}: { ({backend: each.came_out for backend, each in of.items()}) }[/red]")
            told = ", ".join(f"{backend} {each.ns:.0f} ns" for backend, each in of.items())
            console.print(f"{number + 1}: {name}: {told}", highlight=False, soft_wrap=True)
    unit = "CPU ns a row, with checkpoints" if not arguments.without_checkpoints else "CPU ns a row"
    show(seen, f"{arguments.keys:,} keys, {unit}; x is RocksDB against columnar; the rest is RocksDB's", console)
    if arguments.json is not None:
        figures = {name: statistics.median(each["rocksdb"].ns for each in rounds) for name, rounds in seen.items()}
        arguments.json.write_text(json.dumps(figures))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
