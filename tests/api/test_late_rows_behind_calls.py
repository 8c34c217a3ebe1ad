"""`map_async` over a restore: behind it the same rows are late that are late without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening
from waiting import until

import tidegate as tg

Row = dict[str, Any]
GATE, ROWS, BOUND_MS = 24, 40, 15
TIME = pl.col("x") * 10 - pl.when(pl.col("x") % 3 == 2).then(60).otherwise(0)
"""Every third row is behind, by more than is waited for."""
CALLED = pa.schema([("x", pa.int64()), ("t", pa.int64())])
TOLD = pa.schema([("x", pa.int64()), ("late", pa.bool_())])
LATE = [x for x in range(ROWS) if x % 3 == 2]


class Tells(tg.ProcessFunction):
    """Tells of each row whether it is late."""

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        yield {"x": row["x"], "late": row["t"] <= context.current_watermark}


@pytest.mark.parametrize("by_batch", [False, True], ids=["rows", "batches"])
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "as they come"])
@pytest.mark.parametrize("chained", [True, False], ids=["chained", "apart"])
@pytest.mark.parametrize("parallelism", [1, 2])
def test_the_same_rows_are_late_after_a_restore(
    tmp_path: Path, parallelism: int, chained: bool, ordered: bool, by_batch: bool
) -> None:
    """A savepoint while no call but the first ones has returned. With more subtasks late rows may count, no others."""
    answers, began = threading.Event(), threading.Semaphore(0)

    async def held(asked: Any) -> Any:
        began.release(asked.num_rows if by_batch else 1)
        if (asked["x"][-1].as_py() if by_batch else asked["x"]) > 3:
            await asyncio.to_thread(answers.wait)
        return asked

    def program(env: tg.StreamEnvironment) -> tg.CollectedRows:
        read = env.from_source(source, uid="source").assign_timestamps(TIME.alias("t"), BOUND_MS, uid="times")
        read = read.select("x", "t", uid="columns")
        size = 4 if by_batch else None
        called = (read if chained else read.rebalance()).map_async(
            held, schema=CALLED, ordered=ordered, batch_size=size, timeout="4min", uid="calls"
        )
        told = (called if chained else called.rebalance()).process(Tells(), schema=TOLD, uid="told")
        return told.collect(uid="rows")

    source = GatedSource(ROWS, gates=(GATE,))
    with opening(source), local(1) as env:
        program(env)
        job = env.execute("asks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        for _ in range(GATE):
            until("each call", lambda: began.acquire(blocking=False))
        savepoint = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        source.open_all()
    answers.set()
    with local(parallelism) as env:
        rows = program(env)
        finish(env, tmp_path / "checkpoints", restore=savepoint)
    told = rows.to_arrow().to_pylist()
    assert sorted(row["x"] for row in told) == [*range(ROWS)]
    late = sorted(row["x"] for row in told if row["late"])
    assert late == LATE if parallelism == 1 else set(late) <= set(LATE)
