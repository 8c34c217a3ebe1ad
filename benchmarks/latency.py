"""Latency on Ray: from a row's arrival to a function behind an exchange, and to the table; what a job costs that waits.

    .venv/bin/python benchmarks/latency.py [--rate 1000 --seconds 20 --interval 100ms]

A row arrives when it is due (`from_rate`, which looks every 20 ms). It goes to another task, whose function notes when
it sees it (at least once: before any checkpoint), and into a table, whose log is looked at every 2 ms. Then a job whose
source has nothing to give is watched: processor time of all processes, by kind, in per cent of one core.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from common import ENDED, describe_machine, local_ray
from rich.console import Console
from slices import cpu_by_kind

import tidegate as tg
from tidegate.storage.clock import now_ms

POLL_S = 0.002
WARM_S = 3.0
"""Rows that arrive before this do not count: processes start, and code is loaded."""
QUANTILES = (50, 99)


class NotesLatency(tg.BatchFunction):
    """Passes rows on, and writes down how old each is when it comes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, context: tg.BatchContext) -> None:
        """A file of this process."""
        self.file = (self.folder / f"latency-{context.subtask}").open("ab", buffering=0)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Note the time."""
        due_ms = batch.column("timestamp").cast(pa.int64()).to_numpy()
        self.file.write(np.column_stack([due_ms, now_ms() - due_ms]).astype(np.float64).tobytes())
        return batch


class SeenCommits(threading.Thread):
    """Looks at the log of a table, and notes when each commit is there."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        self.seen_ms: dict[int, float] = {}
        self.over = threading.Event()
        self._log = log

    def run(self) -> None:
        """Until `over`."""
        while not self.over.wait(POLL_S):
            if self._log.is_dir():
                for entry in self._log.iterdir():
                    if entry.name.isdigit():
                        self.seen_ms.setdefault(int(entry.name), now_ms())


def latencies(env: tg.StreamEnvironment, folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds, at the quantiles, to the function and to the table."""
    rows = env.from_rate(arguments.rate, rows=int(arguments.rate * arguments.seconds), splits=8, uid="rows")
    noted = rows.rebalance().map_batches(NotesLatency(folder), schema=rows.schema, uid="noted")
    table = noted.to_table(str(folder / "table"), uid="table")
    commits = SeenCommits(folder / "table" / "_tidegate" / "log")
    commits.start()
    checkpoints = tg.CheckpointConfig(interval=arguments.interval, storage=str(folder / "checkpoints"))
    job = env.execute("latency", checkpoints=checkpoints, restart=tg.RestartStrategy.none())
    assert job.wait("10min") == "finished", job.progress().reason
    commits.over.set()
    commits.join()
    pairs = np.concatenate([np.fromfile(file).reshape(-1, 2) for file in folder.glob("latency-*")])
    first_ms = pairs[:, 0].min() + WARM_S * 1_000
    to_table = []
    before: set[str] = set()
    unseen = np.ones(int(arguments.rate * arguments.seconds), dtype=np.bool_)
    for commit in table.history():
        files = set(table.files(as_of=commit.number))
        for file in files - before:
            read = pq.read_table(file)
            due_ms, numbers = (read.column(name).cast(pa.int64()).to_numpy() for name in ("timestamp", "value"))
            # A compaction writes rows again that were there before.
            due_ms, unseen[numbers] = due_ms[unseen[numbers]], False
            # An entry that was folded before anybody looked was there when the next one was.
            seen_ms = min(ms for number, ms in commits.seen_ms.items() if number >= commit.number)
            to_table.append(seen_ms - due_ms[due_ms >= first_ms])
        before = files
    return {
        "to the function": np.percentile(pairs[pairs[:, 0] >= first_ms, 1], QUANTILES).tolist(),
        "to the table": np.percentile(np.concatenate(to_table), QUANTILES).tolist(),
    }


def idle(env: tg.StreamEnvironment, folder: Path, interval: str | None, seconds: float) -> dict[str, float]:
    """Per cent of a core that each kind of process takes while a job has no rows."""
    rows = env.from_rate(1e-4, uid="rows")
    noted = rows.rebalance().map_batches(NotesLatency(folder), schema=rows.schema, uid="noted")
    noted.to_table(str(folder / "table"), uid="table")
    checkpoints = tg.CheckpointConfig(interval=interval, storage=str(folder / "checkpoints"))
    job = env.execute("idle", checkpoints=checkpoints, restart=tg.RestartStrategy.none())
    while not job.progress().rows_in:
        assert job.status() not in ENDED, job.progress().reason
        time.sleep(0.1)
    time.sleep(WARM_S)
    before, begun_s = cpu_by_kind(), time.monotonic()
    time.sleep(seconds)
    after = cpu_by_kind()
    passed_s = time.monotonic() - begun_s
    job.cancel()
    job.wait()
    used: Counter[str] = Counter()
    for (kind, thread), ns in after.items():
        used[kind] += ns - before.get((kind, thread), 0)
    return {kind: ns / 1e7 / passed_s for kind, ns in used.items() if ns}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1_000.0, help="rows a second (default 1,000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="for so long (default 20)")
    parser.add_argument("--interval", default="100ms", help="time between checkpoints (default 100ms)")
    parser.add_argument("--idle-seconds", type=float, default=20.0, help="how long idle jobs are watched (default 20)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    found: dict[str, object] = {}
    with (
        tempfile.TemporaryDirectory(prefix="latency-") as made,
        local_ray(),
        tg.StreamEnvironment.ray(slots=1, standbys=0) as env,
    ):
        for name in ("rows", "idle", "idle-often"):
            (Path(made) / name).mkdir()
        for what, (half, most) in latencies(env, Path(made) / "rows", arguments).items():
            found[what] = half, most
            console.print(f"{what}: p50 {half:.0f} ms, p99 {most:.0f} ms", highlight=False)
        for folder, interval in (("idle", None), ("idle-often", arguments.interval)):
            shares = idle(env, Path(made) / folder, interval, arguments.idle_seconds)
            when = "without checkpoints" if interval is None else f"a checkpoint each {interval}"
            found[f"idle, {when}"] = shares
            parts = ", ".join(f"{kind} {share:.2f}" for kind, share in sorted(shares.items(), key=lambda s: -s[1]))
            console.print(f"idle, {when}: % of a core: {parts}", highlight=False, soft_wrap=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
