"""The jobs that `chaos.py` breaks: a paced source, keyed state, tables, and the moments at which rows came.

Rules:

- The source gives rows slowly, and never the last one, until a gate (a file) is there: a job cannot end before its last
  fault. Then it gives them as fast as it can.
- What the tables must hold is computed from the same rows, by polars, without tidegate.
- Each keyed subtask writes down when it takes in rows of which part of the input, in files of its own, whatever process
  it is in. So how long rows stood still is seen from outside, also while nobody answers.

A job may run detached: `drive` is all that the driver does which submits it.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import ray
from common import GeneratedSource

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayJob, RayRuntime, SlotPlacement

PARALLELISM = 2
PARTS = PARALLELISM
"""Of the input, one for each source task: it reads one after the other."""
KEYS = 211
ROWS_A_READ = 4
READ_S = 0.02
"""While the gate is closed."""
BATCH_ROWS = 500
STAMP_EVERY_MS = 20
SOURCE, KEYED = "rows", "keyed"
SUBMITTED = "submitted"
SLOTS_TIMEOUT_S = 60

CONFIGURATIONS: Mapping[str, Mapping[str, Any]] = {
    "aligned": {},
    "unaligned": {"unaligned": True},
    "columnar": {"incremental": True},
    "changelog": {"changelog": True},
    "RocksDB": {"backend": "rocksdb"},
    "local copies": {"incremental": True, "local_copies": True},
}
WITH_TOTALS = ("columnar", "changelog", "RocksDB")
"""In these configurations there is an aggregate beside the process function."""


@dataclass(frozen=True)
class Plan:
    """One job."""

    name: str
    configuration: str
    storage: str
    """URL of its checkpoints and tables."""
    local: Path
    """Folder of this machine for its gate, its stamps and its local copies."""
    rows: int
    interval: str
    standbys: int
    parts: int = PARTS
    """Of the input: how long rows stand still is seen for each."""

    @property
    def source(self) -> GeneratedSource:
        """All rows."""
        return GeneratedSource(self.rows, KEYS, self.parts)

    def stamps(self, subtask: int, part: int) -> Path:
        """Where a keyed subtask writes down when it took in rows of a part of the input."""
        return self.local / f"stamps-{subtask}-{part}"

    @property
    def copies(self) -> Path:
        """Where local copies of state are, of all nodes."""
        return self.local / "copies"

    @property
    def gate(self) -> Path:
        """Once it is there the job may end."""
        return self.local / "gate"


@dataclass(frozen=True)
class PacedSource:
    """Rows of a `GeneratedSource`, slowly until the gate is there."""

    rows: GeneratedSource
    gate: Path

    @property
    def schema(self) -> pa.Schema:
        """id, key, value."""
        return self.rows.schema

    def splits(self) -> Sequence[tg.SourceSplit]:
        """Those of the source."""
        return self.rows.splits()

    def reader(self) -> tg.SourceReader:
        """A reader that looks at the gate before each read."""
        return _PacedReader(self.rows.reader(), self.gate)


class _PacedReader:
    def __init__(self, reader: tg.SourceReader, gate: Path) -> None:
        self._reader = reader
        self._gate = gate

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        """Rows of one part."""
        if not self._gate.exists():
            time.sleep(READ_S)
            rows_max = min(rows_max, ROWS_A_READ, split.rows - offset - 1)
            if rows_max <= 0:
                return tg.ReadResult(None, offset, at_end=False)
        return self._reader.read(split, offset, rows_max)

    def close(self) -> None:
        """Of the source."""
        self._reader.close()


class _Stamps:
    """When a subtask took in rows of each part, as 8 bytes each: nanoseconds since the epoch."""

    def __init__(self, plan: Plan, subtask: int) -> None:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        self._descriptors = [os.open(plan.stamps(subtask, part), flags) for part in range(plan.parts)]
        self._last_ns = [0] * plan.parts
        self._parts, self._rows = plan.parts, plan.rows

    def row_came(self, row: int) -> None:
        """Now, one of this number."""
        part, now_ns = row * self._parts // self._rows, time.time_ns()
        if now_ns - self._last_ns[part] >= STAMP_EVERY_MS * 1_000_000:
            self._last_ns[part] = now_ns
            os.write(self._descriptors[part], now_ns.to_bytes(8, "little"))

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


class Numbered(tg.ProcessFunction):
    """Numbers the rows of each key, by keyed state."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def open(self, context: tg.ProcessContext) -> None:
        """Bind the state."""
        self._n = context.state(tg.ValueState("n", pa.int64()))
        self._stamps = _Stamps(self._plan, context.subtask)

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Any:
        """One row gives one row."""
        self._stamps.row_came(row["id"])
        n = (self._n.value() or 0) + 1
        self._n.update(n)
        yield {"key": row["key"], "n": n}

    def close(self) -> None:
        """Of the stamps."""
        if hasattr(self, "_stamps"):
            self._stamps.close()


def build(env: tg.StreamEnvironment, plan: Plan) -> dict[str, tg.OutputTable]:
    """The pipeline; its tables by name."""
    return outputs(env.from_source(PacedSource(plan.source, plan.gate), name=SOURCE, uid=SOURCE), plan)


def outputs(rows: tg.Stream, plan: Plan) -> dict[str, tg.OutputTable]:
    """What becomes of the rows of a source; the tables by name."""
    by_key = rows.key_by("key")
    schema = pa.schema([("key", pa.int64()), ("n", pa.int64())])
    numbered = by_key.process(Numbered(plan), schema=schema, name=KEYED, uid=KEYED)
    tables = {
        "rows": rows.to_table(f"{plan.storage}/rows", uid="rows-table"),
        "numbered": numbered.to_table(f"{plan.storage}/numbered", uid="numbered-table"),
    }
    if plan.configuration in WITH_TOTALS:
        totals = by_key.aggregate(emit="update", name="totals", uid="totals", n=tg.count(), total=tg.sum("value"))
        tables["totals"] = totals.to_table(f"{plan.storage}/totals", mode="upsert", keys=("key",), uid="totals-table")
    return tables


def reference(plan: Plan, rows: int | None = None) -> dict[str, pl.DataFrame]:
    """What the tables must hold after the first so many rows, all by default: computed by polars from the same rows."""
    frame = pl.DataFrame(plan.source.batch(0, plan.rows if rows is None else rows))
    expected = {
        "rows": frame,
        "numbered": frame.select("key", pl.int_range(1, pl.len() + 1, dtype=pl.Int64).over("key").alias("n")),
    }
    if plan.configuration in WITH_TOTALS:
        n, total = pl.len().cast(pl.Int64).alias("n"), pl.col("value").sum().alias("total")
        expected["totals"] = frame.group_by("key").agg(n, total)
    return expected


def checkpoints(plan: Plan) -> tg.CheckpointConfig:
    """How its checkpoints are taken."""
    settings = dict(CONFIGURATIONS[plan.configuration])
    if settings.get("local_copies"):
        settings["local_directory"] = str(plan.copies)
    return tg.CheckpointConfig(
        interval=plan.interval,
        storage=f"{plan.storage}/checkpoints",
        num_retained=2,
        tolerable_failed_checkpoints=100_000,
        heartbeat_interval="1s",
        heartbeat_timeout="15s",
        keep_events=True,
        **settings,
    )


def restarts() -> tg.RestartStrategy:
    """For ever, soon."""
    return tg.RestartStrategy.exponential_delay(initial="100ms", maximum="2s", reset_after="10s")


def submit(plan: Plan, runtime: RayRuntime, *, detached: bool) -> RayJob:
    """Start the job."""
    options = tg.DataPlaneOptions(source_rows_max=BATCH_ROWS)
    env = tg.StreamEnvironment(runtime, PARALLELISM, options=options)
    build(env, plan)
    submission = env.plan(plan.name, checkpoints=checkpoints(plan), restart=restarts())
    return runtime.submit(replace(submission, detached=detached))


def slots() -> SlotPlacement:
    """A CPU for each subtask, on nodes of their own where there are so many. RuntimeError where there is no room."""
    group = ray.util.placement_group([{"CPU": 1}] * PARALLELISM, strategy="SPREAD")
    if not group.wait(timeout_seconds=SLOTS_TIMEOUT_S):
        raise RuntimeError(f"{PARALLELISM} CPUs were not free within {SLOTS_TIMEOUT_S} s")
    return SlotPlacement(group, tuple(range(PARALLELISM)))


def stood_still_ms(plan: Plan, since_ns: int, until_ns: int) -> int:
    """The longest time after a moment in which some keyed subtask took in no row of some part."""
    longest_ns = 0
    for file in _files(plan):
        stamps = np.fromfile(file, dtype=np.int64)
        inside = np.sort(stamps[(stamps > since_ns) & (stamps < until_ns)])
        longest_ns = max(longest_ns, int(np.diff([since_ns, *inside, until_ns]).max()))
    return longest_ns // 1_000_000


def rows_came_since(plan: Plan, since_ns: int) -> bool:
    """Whether every keyed subtask has taken in rows of every part after a moment."""
    return all(file.exists() and _last(file) > since_ns for file in _files(plan))


def _files(plan: Plan) -> list[Path]:
    return [plan.stamps(subtask, part) for subtask in range(PARALLELISM) for part in range(plan.parts)]


def _last(file: Path) -> int:
    stamps = np.fromfile(file, dtype=np.int64)
    return int(stamps.max()) if len(stamps) else 0


def drive(address: str, path: str) -> None:
    """A driver: submit a detached job, say so, and wait to be killed."""
    plan: Plan = pickle.loads(Path(path).read_bytes())
    ray.init(address=address, namespace="tidegate", log_to_driver=False, logging_level=logging.ERROR)
    submit(plan, RayRuntime(slots(), standbys=plan.standbys), detached=True)
    print(SUBMITTED, flush=True)
    sys.stdin.read()
