"""What it costs to be able to go back to a checkpoint, and what going back takes, beside reading the state.

    python benchmarks/going_back.py [--state-mb 300] [--rounds 3]

A keyed aggregate (a count and eleven sums for each key, 104 bytes) holds its state in one task without Ray. After a
checkpoint a share of its rows changes, all over the state, in batches of 65,536 rows. Told are, in one process each
round, with the undo log and without:

    changing   the batches that change these rows
    notes      memory of the undo log
    going back until the operators are open again, at the checkpoint
    reading    the same from the local copy of the checkpoint, as a task whose process has died does
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import restore_speed as speed
from common import describe_machine
from rich.console import Console
from rich.table import Table

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task.operator_chain import OperatorChain
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId

SHARES = (0.0, 0.01, 0.1, 1.0)
"""Parts of the rows that change."""
FIRST = CheckpointId(1)


def main() -> int:
    """Build once; then share by share, with the log and without in turns."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mb", type=int, default=300, help="state of the one task (default 300)")
    parser.add_argument("--rounds", type=int, default=3, help="of each share (default 3)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/going-back"), help="where files go")
    given = parser.parse_args()
    arguments = argparse.Namespace(key="integer", s3=False, layers=1, readers=4)
    folder = given.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    console = Console()
    describe_machine(console)
    keys = given.state_mb * 1_000_000 // speed.ROW_BYTES
    context = speed.context_of(str(folder / "checkpoints"), folder, "state", arguments)
    speed.build(context, keys, arguments)
    batches = list(speed.batches(keys, 1, "integer"))
    rng = np.random.default_rng(7)
    table = Table(title=f"{given.state_mb} MB, medians of {given.rounds}")
    for column in ("rows changed", "changing, ms", "without the log", "notes, MB", "going back, ms", "reading, ms"):
        table.add_column(column, justify="right")
    for share in SHARES:
        runs = [_run(context, list(_changed(batches, share, rng)), arguments) for _ in range(given.rounds)]
        for run in runs:
            console.print(share, *(f"{value:.1f}" for value in run))
        table.add_row(f"{share:.0%}", *(f"{statistics.median(values):.1f}" for values in zip(*runs, strict=True)))
    console.print(table)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _changed(batches: list[pa.RecordBatch], share: float, rng: np.random.Generator) -> Iterator[pa.RecordBatch]:
    """Rows of keys that are drawn from all over the state, in full batches."""
    rows = pa.Table.from_batches(batches)
    picked = rng.choice(rows.num_rows, int(share * rows.num_rows), replace=False)
    for start in range(0, len(picked), speed.BATCH_ROWS):
        yield rows.take(pa.array(picked[start : start + speed.BATCH_ROWS])).combine_chunks().to_batches()[0]


def _run(context: JobContext, changes: list[pa.RecordBatch], arguments: Any) -> tuple[float, ...]:
    """Changing with the log (ms) and without, the log's size (MB), going back and reading (ms)."""
    without_ms = _changing(*_restored(context, 0, arguments)[:1], changes)
    chain, reading_ms = _restored(context, 1 << 40, arguments)
    changing_ms = _changing(chain, changes)
    (backend,) = chain.backends.values()
    undo: Any = backend
    notes_mb = undo._space.undo.size_bytes / 1e6
    kept = chain.hand_over()
    gc.collect()
    start_s = time.perf_counter()
    again = _restore(context, arguments, 1 << 40, kept)
    back_ms = (time.perf_counter() - start_s) * 1000
    assert again.backends == kept, "it has read"
    return changing_ms, without_ms, notes_mb, back_ms, reading_ms


def _changing(chain: OperatorChain, changes: list[pa.RecordBatch]) -> float:
    start_s = time.perf_counter()
    for batch in changes:
        chain.process(batch)
    return (time.perf_counter() - start_s) * 1000


def _restored(context: JobContext, undo_bytes: int, arguments: Any) -> tuple[OperatorChain, float]:
    gc.collect()
    start_s = time.perf_counter()
    chain = _restore(context, arguments, undo_bytes, {})
    return chain, (time.perf_counter() - start_s) * 1000


def _restore(context: JobContext, arguments: Any, undo_bytes: int, kept: Any) -> OperatorChain:
    """The operators of the task as they were at the checkpoint."""
    backend = replace(context.options.backend, undo_bytes=undo_bytes)
    context = replace(context, options=replace(context.options, backend=backend))
    descriptor = context.describe(speed.TASK, AttemptNumber(1))
    effects = TaskEffects(context, descriptor, open_store, lambda: 0, arguments.readers, kept)
    event = effects.restore(RestorePoint(context.root, context.job_id, FIRST, False))
    assert isinstance(event, ev.TaskRestored), event
    chain = speed.chain_of(context)
    chain.open(dict(event.tables), event.checkpoint_id, event.kept)
    return chain


if __name__ == "__main__":
    sys.exit(main())
