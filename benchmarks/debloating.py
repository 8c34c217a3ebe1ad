"""What the bound on the time of data in flight does: checkpoints behind row-wise functions, and throughput.

    .venv/bin/python benchmarks/debloating.py [--runtimes local ray] [--rounds 3]

`slow`: generated rows go over a keyed edge to a process function that counts the rows of each key, one row after the
other, with a checkpoint every `--interval`. Aligned barriers wait behind the rows that are in flight. `fast`: a keyed
aggregation of the same kind of rows, whose tasks keep up: nothing may be lost there. Each job runs with buffer
debloating and without, one after the other, `--rounds` times; ratios are those of a pair. Exit code 1 if a result is
wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from common import GeneratedSource, Run, describe_machine, local_ray
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointRecord
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.ray.ray_runtime import RayRuntime

ROWS, COUNTS = "rows", "counts"
PARALLELISM = 2
KEYS = 100_000
POLL_S = 0.05
TABLE_CHARACTERS = 110
COUNTED = pa.schema([("key", pa.int64()), ("n", pa.int64())])
MODES = (("without", False), ("with", True))


class Counting(tg.ProcessFunction):
    """The number of each row among those of its key."""

    def open(self, context: tg.ProcessContext) -> None:
        """Bind the count."""
        self.count = context.state(tg.ValueState("count", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """Count, and tell how far."""
        n = (self.count.value() or 0) + 1
        self.count.update(n)
        yield {"key": row["key"], "n": n}


@dataclass
class Seen:
    """What came of one job."""

    rows_a_s: float = 0.0
    cpu_ns_a_row: float = 0.0
    records: list[CheckpointRecord] = field(default_factory=list)
    exact: bool = False

    @property
    def durations_ms(self) -> list[int]:
        """Of its checkpoints."""
        return [record.duration_ms for record in self.records]


def measure(job_kind: str, runtime: str, debloat: bool, arguments: argparse.Namespace, folder: Path) -> Seen:
    """One job, from its first row to its end."""
    shutil.rmtree(folder, ignore_errors=True)
    rows = arguments.slow_rows if job_kind == "slow" else arguments.fast_rows
    driver = LocalRuntime() if runtime == "local" else RayRuntime()
    with tg.StreamEnvironment(driver, PARALLELISM) as env:
        stream = env.from_source(GeneratedSource(rows, KEYS, PARALLELISM), name=ROWS, uid=ROWS).key_by("key")
        if job_kind == "slow":
            counted = stream.process(Counting(), schema=COUNTED, name=COUNTS, uid=COUNTS)
        else:
            counted = stream.aggregate(emit="final", name=COUNTS, uid=COUNTS, n=tg.count())
        table = counted.to_table(str(folder / "table"), uid="table")
        config = tg.CheckpointConfig(
            interval=arguments.interval,
            storage=str(folder / "checkpoints"),
            history=1_000,
            debloat=debloat,
            **({"debloat_target": arguments.target} if debloat else {}),
        )
        job = env.execute(f"{job_kind}-{runtime}", checkpoints=config)
        run = Run()
        cpu_s: dict[int, tuple[float, float]] = {}
        while run.end is None:
            run.see(job.progress(), COUNTS)
            if run.end is None:
                _see_cpu(job, cpu_s)
            time.sleep(POLL_S)
        found = Seen(records=[r for r in job.statistics().history if r.reason is None])
        if run.end.status != "finished":
            raise RuntimeError(f"the job {run.end.status}: {run.end.reason}")
        begun_at, begun_rows = run.samples[0]
        found.cpu_ns_a_row = sum(last - first for first, last in cpu_s.values()) / rows * 1e9
        found.rows_a_s = (rows - begun_rows) / (run.ended_at - begun_at)
        found.exact = _exact(job_kind, table.to_arrow(), rows)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _see_cpu(job: tg.Job, cpu_s: dict[int, tuple[float, float]]) -> None:
    """Note how much time of processors each process of the tasks has used: when seen first, and now."""
    for pid in {process.pid for process in job.processes()} or {os.getpid()}:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            continue  # It has ended; what was seen last counts.
        used_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
        cpu_s[pid] = cpu_s.get(pid, (used_s, used_s))[0], used_s


def _exact(job_kind: str, found: pa.Table, rows: int) -> bool:
    """Whether every row was counted once."""
    if job_kind == "fast":
        return bool(pc.sum(found["n"]).as_py() == rows)
    greatest = found.group_by("key").aggregate([("n", "max"), ("n", "count")])
    return found.num_rows == rows and bool(greatest["n_max"].equals(greatest["n_count"].cast(pa.int64())))


def show(results: dict[tuple[str, str], list[tuple[Seen, Seen]]], console: Console) -> None:
    """A line for each kind of job, runtime and mode."""
    table = Table(title="times in ms; medians over all checkpoints, and of the runs of a pair")
    for column in (
        "runtime",
        "job",
        "debloating",
        "chk",
        "p50",
        "max",
        "delay p50",
        "M rows/s",
        "x",
        "CPU ns/row",
        "x",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for (runtime, kind), pairs in results.items():
        for index, (mode, _) in enumerate(MODES):
            runs = [pair[index] for pair in pairs]
            durations = [ms for run in runs for ms in run.durations_ms]
            ratio = statistics.median(pair[index].rows_a_s / pair[0].rows_a_s for pair in pairs)
            cpu_ratio = statistics.median(pair[index].cpu_ns_a_row / pair[0].cpu_ns_a_row for pair in pairs)
            table.add_row(
                runtime,
                kind,
                mode,
                str(len(durations)),
                f"{statistics.median(durations):.0f}" if durations else "-",
                str(max(durations, default="-")),
                f"{statistics.median(_delays_ms(runs) or [0]):.0f}",
                f"{statistics.median(run.rows_a_s for run in runs) / 1e6:.3f}",
                f"{ratio:.2f}",
                f"{statistics.median(run.cpu_ns_a_row for run in runs):.0f}",
                f"{cpu_ratio:.2f}",
            )
    console.print(table)


def _delays_ms(runs: Sequence[Seen]) -> list[int]:
    """From the trigger to the first barrier, of the slowest of the tasks that count."""
    vertices = (v for run in runs for record in run.records for v in record.vertices if v.vertex == COUNTS)
    return [vertex.start_delay_ms.max for vertex in vertices]


def main() -> int:
    """All pairs. Exit code 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", choices=("local", "ray"), nargs="+", default=["local"], help="(default: local)")
    parser.add_argument("--jobs", choices=("slow", "fast"), nargs="+", default=["slow", "fast"], help="(default: both)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of each (default 3)")
    parser.add_argument("--slow-rows", type=int, default=2_000_000, help="(default 2 million)")
    parser.add_argument("--fast-rows", type=int, default=60_000_000, help="(default 60 million)")
    parser.add_argument("--interval", default="1s", help="time between checkpoints (default 1s)")
    parser.add_argument("--target", default="1s", help="time of the data in flight (default 1s)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/debloating"), help="where files go")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else TABLE_CHARACTERS)
    describe_machine(console)
    folder = arguments.folder.resolve()
    results: dict[tuple[str, str], list[tuple[Seen, Seen]]] = {}
    with local_ray() if "ray" in arguments.runtimes else nullcontext():
        for number in range(arguments.rounds):
            for runtime in arguments.runtimes:
                for kind in arguments.jobs:
                    pair = []
                    for mode, debloat in MODES:
                        seen = measure(kind, runtime, debloat, arguments, folder)
                        pair.append(seen)
                        console.print(
                            f"{number + 1}: {runtime}, {kind}, {mode}: {seen.rows_a_s / 1e6:.3f} M rows/s, "
                            f"{seen.cpu_ns_a_row:.0f} ns of CPU a row, checkpoints {seen.durations_ms} ms, "
                            f"{'exact' if seen.exact else 'WRONG'}",
                            highlight=False,
                            soft_wrap=True,
                        )
                    results.setdefault((runtime, kind), []).append((pair[0], pair[1]))
    show(results, console)
    return 0 if all(run.exact for pairs in results.values() for pair in pairs for run in pair) else 1


if __name__ == "__main__":
    sys.exit(main())
