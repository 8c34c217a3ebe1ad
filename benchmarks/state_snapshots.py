"""Snapshots of a large keyed state on Ray: what they hold up, how long they take beside a plain write, what they write.

    python benchmarks/state_snapshots.py [--keys 10000000] [--checkpoints 20] [--backend columnar]

A keyed job with parallelism 2 keeps a count and eleven sums for each key: 104 bytes, so that 10 million keys are 1 GB.
The driver lets the sources read so much and no more (a gate: a file with a number), so that it is known which keys have
changed between two checkpoints:

    fill         every key comes once; then the first checkpoint writes all of it
    plain write  the same number of bytes, by `dd` with a sync at the end, twice, before and after the first checkpoint
    increments   one percent of the keys change between two checkpoints, drawn evenly over all keys
    load         the sources read as fast as they can, keys drawn evenly; checkpoints are taken with pauses between them

Memory is that of the tasks that hold the state: resident bytes above what they had before the first row.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from common import ENDED, describe_machine, local_ray
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord
from tidegate.actors.ray.ray_runtime import RayRuntime

SOURCE, TOTALS = "rows", "totals"
PARALLELISM = 2
SUMS = 11
KEY_BYTES = 8 * (2 + SUMS)
"""The key, its count, and its sums."""
GATE_POLL_S = 0.02
TIMEOUT_S = 900.0
ENDLESS_ROWS = 10**13


@dataclass(frozen=True)
class GatedSource:
    """Row i of a part is given once the gate has opened for more than i rows of it.

    Of each part the first rows have every key of the part once, in order; those that follow go round the keys in steps
    of a large prime, so that any run of them has distinct keys that lie evenly over all.
    """

    keys: int
    gate: str

    @property
    def schema(self) -> pa.Schema:
        """key, and a column for each sum."""
        return pa.schema([("key", pa.int64()), *((f"v{number}", pa.float64()) for number in range(SUMS))])

    def splits(self) -> Sequence[tg.SourceSplit]:
        """One part for each subtask; the payload is its number."""
        return [tg.SourceSplit(f"part-{part}", str(part).encode(), ENDLESS_ROWS) for part in range(PARALLELISM)]

    def reader(self) -> tg.SourceReader:
        """A reader for one subtask."""
        return _GatedReader(self)

    def batch(self, part: int, start: int, rows: int) -> pa.RecordBatch:
        """Rows `[start, start + rows)` of a part."""
        own = self.keys // PARALLELISM
        numbers = np.arange(start, start + rows, dtype=np.int64)
        keys = np.where(numbers < own, numbers, (numbers * 2_654_435_761) % own) * PARALLELISM + part
        values = (numbers % 1_000).astype(np.float64)
        return pa.RecordBatch.from_arrays([pa.array(keys), *[pa.array(values)] * SUMS], schema=self.schema)


class _GatedReader:
    def __init__(self, source: GatedSource) -> None:
        self._source = source
        self._open_rows = 0

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """What the gate lets through; nothing, after a short wait, while it is shut."""
        if offset >= self._open_rows:
            self._open_rows = int(Path(self._source.gate).read_text())
        rows = min(rows_max, self._open_rows - offset)
        if rows <= 0:
            time.sleep(GATE_POLL_S)
            return tg.ReadResult(None, offset, at_end=False)
        return tg.ReadResult(self._source.batch(int(split.payload), offset, rows), offset + rows, at_end=False)

    def close(self) -> None:
        """Nothing to release."""


def open_gate(gate: Path, rows: int) -> None:
    """Let so many rows of each part through, all told; at once, so that no reader finds half a number."""
    written = gate.with_suffix(".new")
    written.write_text(str(rows))
    written.rename(gate)


@dataclass
class Figures:
    """What was measured. Times in ms, sizes in bytes."""

    plain_ms: list[float] = field(default_factory=list)
    first: CheckpointRecord | None = None
    increments: list[CheckpointRecord] = field(default_factory=list)
    under_load: list[CheckpointRecord] = field(default_factory=list)
    rate_during: list[float] = field(default_factory=list)
    rate_between: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)


class Measurement:
    """One job."""

    def __init__(self, job: tg.Job, gate: Path, arguments: argparse.Namespace, console: Console) -> None:
        self._job = job
        self._gate = gate
        self._arguments = arguments
        self._console = console
        self._open_rows = 0
        self.figures = Figures()

    def run(self) -> Figures:
        """All parts, in order."""
        arguments, figures = self._arguments, self.figures
        self._until(lambda: len(self._keyed_pids()) == PARALLELISM)
        pids = self._keyed_pids()
        before = _memory(pids, "Rss")
        self._let_through(arguments.keys // PARALLELISM)
        figures.memory["filled"] = _memory(pids, "Rss") - before
        size_bytes = arguments.keys * KEY_BYTES
        figures.plain_ms.append(_plain_write_ms(self._arguments.folder, size_bytes))
        _reset_peaks(pids)
        figures.first = self._checkpoint()
        figures.memory["peak at the first checkpoint"] = _memory(pids, "VmHWM") - before
        figures.plain_ms.append(_plain_write_ms(self._arguments.folder, size_bytes))
        self._say("first", figures.first)
        for _ in range(arguments.increments):
            self._let_through(arguments.keys // 100 // PARALLELISM)
            figures.increments.append(self._checkpoint())
            self._say("1 % changed", figures.increments[-1])
        _reset_peaks(pids)
        self._load()
        figures.memory["peak under load"] = _memory(pids, "VmHWM") - before
        return figures

    def _keyed_pids(self) -> list[int]:
        return [info.pid for info in self._job.processes() if info.task.vertex == TOTALS]

    def _let_through(self, rows: int) -> None:
        """Open the gate for so many more rows of each part, and wait until the keyed tasks have them."""
        self._open_rows += rows
        open_gate(self._gate, self._open_rows)
        wanted = self._open_rows * PARALLELISM
        self._until(lambda: self._rows() >= wanted)

    def _load(self) -> None:
        open_gate(self._gate, ENDLESS_ROWS)
        start = self._rows()
        self._until(lambda: self._rows() > start + self._arguments.keys // 4)
        for _ in range(self._arguments.checkpoints):
            self.figures.rate_between.append(self._rate(self._arguments.pause_s))
            self.figures.under_load.append(self._checkpoint_and_rate())
            self._say("under load", self.figures.under_load[-1])

    def _checkpoint_and_rate(self) -> CheckpointRecord:
        answer: list[CheckpointRecord] = []
        taking = threading.Thread(target=lambda: answer.append(self._checkpoint()))
        rows, started = self._rows(), time.monotonic()
        taking.start()
        taking.join(TIMEOUT_S)
        self.figures.rate_during.append((self._rows() - rows) / (time.monotonic() - started))
        return answer[0]

    def _rate(self, seconds: float) -> float:
        rows, started = self._rows(), time.monotonic()
        time.sleep(seconds)
        return (self._rows() - rows) / (time.monotonic() - started)

    def _checkpoint(self) -> CheckpointRecord:
        self._job.trigger_checkpoint("10min")
        newest = self._job.statistics().latest_completed
        assert newest is not None
        return newest

    def _rows(self) -> int:
        return self._job.progress().rows_in.get(TOTALS, 0)

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline or self._job.status() in ENDED:
                raise TimeoutError(f"waited in vain: {self._job.progress()}")
            time.sleep(0.1)

    def _say(self, what: str, record: CheckpointRecord) -> None:
        self._console.print(
            f"{what}: {record.duration_ms} ms, at most {_sync_ms(record)} ms synchronous and {_async_ms(record)} ms "
            f"asynchronous, wrote {record.incremental_bytes / 1e6:.1f} MB of {record.state_bytes / 1e6:.1f} MB",
            highlight=False,
            soft_wrap=True,
        )


def _sync_ms(record: CheckpointRecord) -> int:
    return max(vertex.sync_ms.max for vertex in record.vertices if vertex.vertex == TOTALS)


def _async_ms(record: CheckpointRecord) -> int:
    return max(vertex.async_ms.max for vertex in record.vertices if vertex.vertex == TOTALS)


def _plain_write_ms(folder: Path, size_bytes: int) -> float:
    """Two writers, as there are two tasks, each with half of the bytes."""
    started = time.monotonic()
    blocks = max(1, size_bytes // PARALLELISM // (1 << 20))
    writers = [
        subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={folder}/plain-{number}", "bs=1M", f"count={blocks}", "conv=fsync"],
            stderr=subprocess.DEVNULL,
        )
        for number in range(PARALLELISM)
    ]
    for writer in writers:
        if writer.wait(TIMEOUT_S) != 0:
            raise OSError(f"dd could not write to {folder}")
    seconds = time.monotonic() - started
    for number in range(PARALLELISM):
        (folder / f"plain-{number}").unlink()
    return seconds * 1000


def _memory(pids: Sequence[int], figure: str) -> int:
    """Sum over processes of `Rss` (what they share counted for each) or of `VmHWM`."""
    total = 0
    for pid in pids:
        name = "VmRSS" if figure == "Rss" else figure
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                total += int(line.split()[1]) * 1024
    return total


def _reset_peaks(pids: Sequence[int]) -> None:
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def show(figures: Figures, arguments: argparse.Namespace, console: Console) -> None:
    """The figures and the aims."""
    assert figures.first is not None
    plain_ms = statistics.mean(figures.plain_ms)
    records = [figures.first, *figures.increments, *figures.under_load]
    sync = sorted(_sync_ms(record) for record in records)
    changed_bytes = arguments.keys // 100 * KEY_BYTES
    table = Table(title=f"{arguments.keys:,} keys, {arguments.keys * KEY_BYTES / 1e9:.2f} GB, {arguments.backend}")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("aim", justify="right")
    table.add_row(
        f"synchronous part, slowest task, {len(sync)} checkpoints: p50, p99",
        f"{statistics.median(sync):.0f}, {sync[min(len(sync) - 1, int(0.99 * len(sync)))]} ms",
        "p99 < 10 ms",
    )
    table.add_row("plain write of all bytes", f"{plain_ms:.0f} ms", "")
    table.add_row(
        "first checkpoint, asynchronous, against that",
        f"{_async_ms(figures.first)} ms, {_async_ms(figures.first) / plain_ms:.2f}",
        "<= 1.5",
    )
    if figures.increments:
        wrote = statistics.median(record.incremental_bytes for record in figures.increments)
        table.add_row("1 % changed: bytes written, against those changed", f"{wrote / changed_bytes:.2f}", "<= 3")
    if figures.rate_during:
        during, between = statistics.median(figures.rate_during), statistics.median(figures.rate_between)
        table.add_row("rows/s during checkpoints against between", f"{during / between:.2f}", "")
    for what, size_bytes in figures.memory.items():
        table.add_row(f"memory, {what}: against the data", f"{size_bytes / arguments.keys / KEY_BYTES:.2f}", "<= 2.5")
    console.print(table)


def main() -> int:
    """Measure one backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000, help="distinct keys (default 10,000,000)")
    parser.add_argument("--backend", choices=("columnar", "rocksdb"), default="columnar")
    parser.add_argument("--whole", action="store_true", help="every checkpoint writes the whole state")
    parser.add_argument("--increments", type=int, default=5, help="checkpoints after 1 %% has changed (default 5)")
    parser.add_argument("--checkpoints", type=int, default=20, help="checkpoints under load (default 20)")
    parser.add_argument("--pause-s", type=float, default=2.0, help="seconds between these (default 2)")
    parser.add_argument("--batch-rows", type=int, default=65_536, help="rows of a batch (default 65,536)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/snapshots"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    folder = arguments.folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    gate = folder / "gate"
    open_gate(gate, 0)
    with local_ray():
        runtime = RayRuntime(standbys=0)
        env = tg.StreamEnvironment(
            runtime, PARALLELISM, options=tg.DataPlaneOptions(source_rows_max=arguments.batch_rows)
        )
        rows = env.from_source(GatedSource(arguments.keys, str(gate)), name=SOURCE, uid=SOURCE)
        sums: dict[str, Any] = {f"s{number}": tg.sum(f"v{number}") for number in range(SUMS)}
        keyed = rows.key_by("key")
        totals = keyed.aggregate(emit="final", name=TOTALS, uid=TOTALS, parallelism=PARALLELISM, n=tg.count(), **sums)
        totals.to_table(str(folder / "table"), uid="table")
        config = tg.CheckpointConfig(
            storage=str(folder / "checkpoints"),
            backend=arguments.backend,
            incremental=not arguments.whole,
            timeout="10min",
        )
        job = env.execute("snapshots", checkpoints=config, restart=tg.RestartStrategy.none())
        try:
            figures = Measurement(job, gate, arguments, console).run()
        finally:
            job.cancel()
            job.wait("1min")
            runtime.stop()
            shutil.rmtree(folder, ignore_errors=True)
    show(figures, arguments, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
