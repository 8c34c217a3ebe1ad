"""What timers cost: to register one among many, and a snapshot after one in a hundred has changed.

    python benchmarks/timers.py [--timers 10000 1000000 10000000] [--rocksdb-max 1000000]

Timers of 100,000 keys with moments drawn from a day are registered in batches of 4,096, without a job around them. Then
a snapshot is taken, one timer in a hundred is deleted or registered, and a second snapshot is built on the first one.
Told are, for the backend in columns, for RocksDB, and for a heap and a dictionary of Python objects, whose snapshot is
always whole (a floor: timers were kept so, with an index of deleted ones beside):

    registering   microseconds of the processor a timer, in the last tenth; and against the smallest number of timers
    firing        the same for one that fires, in steps of 1,000
    sync part     of the second snapshot: milliseconds in which processing waits
    rows, bytes   of the second snapshot, and its bytes against those of the first one
"""

from __future__ import annotations

import argparse
import heapq
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import KeyedTimers
from tidegate.state.common.options import BackendPlace
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut

KEYS, DAY_MS = 100_000, 86_400_000
BATCH, STEP = 4_096, 1_000
MAX_PARALLELISM = 128
SCHEMA = pa.schema({"k": pa.int64()})


@dataclass(frozen=True)
class Snapshot:
    """How long processing waited, and what was written (rows: None where files were)."""

    sync_ms: float
    rows: int | None
    size_bytes: int


class Subject(Protocol):
    """Timers of one kind."""

    def change(self, keys: pa.Array, moments: Sequence[int], registered: bool) -> None:
        """Register or delete."""
        ...

    def fire(self, timers: int) -> None:
        """Take so many."""
        ...

    def snapshot(self, number: int) -> Snapshot:
        """Take the next snapshot."""
        ...


class Backend:
    """Timers of a backend that keeps rows."""

    def __init__(self) -> None:
        self.backend = ColumnarBackend(MAX_PARALLELISM, ("k",), incremental=True)
        self.backend.fix_keys(SCHEMA)
        self.timers: KeyedTimers = self.backend.timers

    def change(self, keys: pa.Array, moments: Sequence[int], registered: bool) -> None:
        """A batch."""
        rows = len(moments)
        batch = pa.RecordBatch.from_arrays([keys], schema=SCHEMA)
        self.timers.change(batch, [0] * rows, moments, [registered] * rows)

    def fire(self, timers: int) -> None:
        """In steps."""
        while timers > 0:
            due = self.timers.due(0, DAY_MS, min(STEP, timers))
            rows = len(due.moments)
            self.timers.change(due.keys, [0] * rows, due.moments, [False] * rows)
            timers -= rows

    def snapshot(self, number: int) -> Snapshot:
        """Rows and keys that are gone."""
        cut = Cut(CheckpointId(number), CheckpointId(number - 1) if number > 1 else None)
        start = time.perf_counter()
        frozen = self.backend.freeze(cut)
        sync_ms = (time.perf_counter() - start) * 1e3
        batches = [chunk.rows for state in frozen for chunk in state.chunks()]
        return Snapshot(sync_ms, sum(b.num_rows for b in batches), sum(b.nbytes for b in batches))


class Rocks(Backend):
    """Timers in RocksDB, whose snapshots are files."""

    def __init__(self, folder: str) -> None:
        place = BackendPlace(OperatorUid("timers"), ("k",), MAX_PARALLELISM, range(MAX_PARALLELISM))
        self.rocks = RocksBackend(place, os.path.join(folder, "db"), 64 << 20)
        self.rocks.fix_keys(SCHEMA)
        self.timers = self.rocks.timers
        self._known: set[str] = set()

    def snapshot(self, number: int) -> Snapshot:
        """Only tables that the snapshots before have not had are written."""
        start = time.perf_counter()
        native = self.rocks.freeze_native(Cut(CheckpointId(number)))
        sync_ms = (time.perf_counter() - start) * 1e3
        assert native is not None
        tables = {name for name in os.listdir(native.folder) if name.endswith(".sst")}
        size_bytes = sum(os.path.getsize(os.path.join(native.folder, name)) for name in tables - self._known)
        self._known |= tables
        native.release()
        return Snapshot(sync_ms, None, size_bytes)


class Heap:
    """A heap, and a dictionary that tells which of its timers are there still."""

    def __init__(self) -> None:
        self._there: dict[tuple[int, tuple[int]], None] = {}
        self._heap: list[tuple[int, tuple[int]]] = []

    def change(self, keys: pa.Array, moments: Sequence[int], registered: bool) -> None:
        """One after the other."""
        for moment, key in zip(moments, keys.to_pylist(), strict=True):
            timer = moment, (key,)
            if not registered:
                self._there.pop(timer, None)
            elif timer not in self._there:
                self._there[timer] = None
                heapq.heappush(self._heap, timer)

    def fire(self, timers: int) -> None:
        """One after the other."""
        while timers > 0:
            timer = heapq.heappop(self._heap)
            if timer in self._there:
                del self._there[timer]
                timers -= 1

    def snapshot(self, number: int) -> Snapshot:
        """All of it."""
        start = time.perf_counter()
        frozen = tuple(self._there)
        sync_ms = (time.perf_counter() - start) * 1e3
        rows = len(frozen)
        # What a row has in a state file: key, clock (10 letters and an offset) and moment.
        return Snapshot(sync_ms, rows, rows * (8 + 14 + 8))


def main() -> int:
    """Each kind at each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timers", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--rocksdb-max", type=int, default=1_000_000, help="no more timers than these in RocksDB")
    parser.add_argument("--heap-max", type=int, default=1_000_000, help="no more in the heap: about 300 bytes each")
    given = parser.parse_args()
    table = Table(title="timers")
    heads = (
        "kind",
        "timers",
        "registering, us",
        "ratio",
        "firing, us",
        "sync part, ms",
        "rows",
        "bytes",
        "of the first",
    )
    for head in heads:
        table.add_column(head, justify="right")
    console = Console()
    for kind in ("columns", "rocksdb", "heap"):
        first_us = 0.0
        for timers in given.timers:
            if timers > {"rocksdb": given.rocksdb_max, "heap": given.heap_max}.get(kind, timers):
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = _measured(_subject(kind, folder), timers)
            first_us = first_us or row[0]
            shown = [f"{row[0]:.2f}", f"{row[0] / first_us:.2f}", *row[1]]
            console.print(kind, f"{timers:,}", *shown)
            table.add_row(kind, f"{timers:,}", *shown)
    console.print(table)
    return 0


def _subject(kind: str, folder: str) -> Subject:
    return Backend() if kind == "columns" else Rocks(folder) if kind == "rocksdb" else Heap()


def _measured(subject: Subject, timers: int) -> tuple[float, list[str]]:
    """Microseconds to register a timer, and what else is shown."""
    rng = np.random.default_rng(7)
    tenth = timers // 10
    _change(subject, _drawn(rng, timers - tenth), True)
    register_us = _change(subject, _drawn(rng, tenth), True) / tenth * 1e6
    first = subject.snapshot(1)
    changed = timers // 200
    again = np.random.default_rng(7)  # the first of those that were registered
    _change(subject, _drawn(again, changed), False)
    _change(subject, _drawn(rng, changed), True)
    second = subject.snapshot(2)
    start = time.thread_time()
    subject.fire(tenth)
    fire_us = (time.thread_time() - start) / tenth * 1e6
    rows = "files" if second.rows is None else f"{second.rows:,}"
    share = second.size_bytes / first.size_bytes
    shown = [f"{fire_us:.2f}", f"{second.sync_ms:.2f}", rows, f"{second.size_bytes:,}", f"{share:.1%}"]
    return register_us, shown


def _drawn(rng: np.random.Generator, timers: int) -> Iterator[tuple[pa.Array, list[int]]]:
    for start in range(0, timers, BATCH):
        rows = min(BATCH, timers - start)
        yield pa.array(rng.integers(0, KEYS, rows)), rng.integers(0, DAY_MS, rows).tolist()


def _change(subject: Subject, batches: Iterator[tuple[pa.Array, list[int]]], registered: bool) -> float:
    """Seconds of this thread's processor that the changes take, without drawing them."""
    spent = 0.0
    for keys, moments in batches:
        start = time.thread_time()
        subject.change(keys, moments, registered)
        spent += time.thread_time() - start
    return spent


if __name__ == "__main__":
    raise SystemExit(main())
