"""`map_async`: results of calls that wait, many at a time, each row once, in order or as they come."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening
from waiting import until

import tidegate as tg

Row = dict[str, Any]
ROWS = pa.table({"x": list(range(200))})


async def _doubled(row: Row) -> Row:
    return {"x": row["x"] * 2}


@pytest.mark.slow
def test_results_keep_their_order_and_many_calls_are_under_way(tmp_path: Path) -> None:
    """The first call of four waits for the others: they are under way at once, and never more than the capacity."""
    now, most, begun = [0], [0], defaultdict[int, asyncio.Event](asyncio.Event)

    async def waits_for_others(row: Row) -> Row:
        now[0] += 1
        most[0] = max(most[0], now[0])
        if row["x"] % 4 == 3:
            begun[row["x"] // 4].set()
        if row["x"] % 4 == 0:
            await begun[row["x"] // 4].wait()
        now[0] -= 1
        return {"x": row["x"] * 2}

    with local(1) as env:
        rows = env.from_batches(ROWS, splits=1).map_async(waits_for_others, schema=ROWS.schema, capacity=4).collect()
        finish(env, tmp_path)
    assert rows.to_arrow()["x"].to_pylist() == [x * 2 for x in range(200)]
    assert 1 < most[0] <= 4


@pytest.mark.slow
def test_results_in_no_order_are_all_there(tmp_path: Path) -> None:
    """Behind them a window of event time has every row: no watermark overtakes a row whose result is missing."""

    answered_rows = defaultdict[int, asyncio.Event](asyncio.Event)

    async def later_ones_first(row: Row) -> Row:
        if row["x"] % 20 < 19:
            await answered_rows[row["x"] + 1].wait()
        answered_rows[row["x"]].set()
        return dict(row)

    with local(1) as env:
        timed = env.from_batches(pa.table({"x": list(range(200)), "t": [x * 10 for x in range(200)]}), timestamp="t")
        schema = pa.schema([("x", pa.int64()), ("t", pa.int64())])
        answered = timed.map_async(later_ones_first, schema=schema, ordered=False)
        late = answered.window(tg.Tumbling(100)).aggregate(n=tg.count())
        counts, lost = late.collect(), late.late_rows().collect()
        finish(env, tmp_path)
    assert counts.to_arrow()["n"].to_pylist() == [10] * 20
    assert lost.to_arrow().num_rows == 0


@pytest.mark.parametrize("parallelism", [2, 3])
def test_rows_under_way_are_asked_again_after_a_restore(tmp_path: Path, parallelism: int) -> None:
    """A savepoint while no call returns: its rows are in it, and have one result each after it, at any parallelism."""
    answers, began = threading.Event(), threading.Semaphore(0)

    async def held(row: Row) -> Row:
        began.release()
        await asyncio.to_thread(answers.wait)
        return {"x": row["x"] * 2}

    source = GatedSource(80, 70, gates=(20,))
    with opening(source), local() as env:
        read = env.from_source(source, uid="source")
        read.map_async(held, schema=ROWS.schema, uid="held", timeout="4min").collect(uid="rows")
        job = env.execute("asks", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(20)
        for _ in range(40):
            until("each call", lambda: began.acquire(blocking=False))
        savepoint = job.savepoint(str(tmp_path / "savepoints"))
        job.cancel()
        source.open_all()
    answers.set()
    with local(parallelism) as env:
        read = env.from_source(source, uid="source", parallelism=2)
        rows = read.map_async(held, schema=ROWS.schema, uid="held").collect(uid="rows")
        finish(env, tmp_path / "checkpoints", restore=savepoint)
    assert sorted(rows.to_arrow()["x"].to_pylist()) == sorted(x * 2 for x in source.table()["x"].to_pylist())


def test_failures_are_tried_again_and_go_aside(tmp_path: Path) -> None:
    """A call that fails once has a result; one that goes on failing, or is too slow, is a row of the side output."""
    tried: dict[int, int] = {}

    async def shaky(row: Row) -> Row:
        tried[row["x"]] = tried.get(row["x"], 0) + 1
        if row["x"] == 3 and tried[3] < 2:
            raise ConnectionError("once")
        if row["x"] == 5:
            raise ConnectionError("always")
        if row["x"] == 7:
            await asyncio.Event().wait()
        return dict(row)

    with local(1) as env:
        read = env.from_batches(ROWS.slice(0, 10))
        answered = read.map_async(shaky, schema=ROWS.schema, retries=1, timeout="50ms", errors_to="bad")
        good, bad = answered.collect(), answered.side_output("bad").collect()
        finish(env, tmp_path)
    assert good.to_arrow()["x"].to_pylist() == [0, 1, 2, 3, 4, 6, 8, 9]
    (first, second) = sorted(bad.to_arrow().to_pylist(), key=lambda row: row["x"])
    assert first == {"x": 5, "error": "ConnectionError: always"}
    assert second["x"] == 7
    assert "no result within 0.05 s" in second["error"]
    assert tried[3] == tried[5] == tried[7] == 2


def test_batches_and_futures(tmp_path: Path) -> None:
    """With batch_size the function gets Arrow batches; it may return a future, a polars frame, or None for no rows."""
    pool = ThreadPoolExecutor(2)

    def by_batch(batch: pa.RecordBatch) -> Future[pl.DataFrame | None]:
        assert batch.num_rows <= 7
        frame = pl.from_arrow(batch)
        assert isinstance(frame, pl.DataFrame)
        return pool.submit(lambda: None if frame["x"][0] == 0 else frame.with_columns(pl.col("x") * 2))

    with pool, local(1) as env:
        rows = env.from_batches(ROWS, splits=1).map_async(by_batch, schema=ROWS.schema, batch_size=7).collect()
        finish(env, tmp_path)
    assert rows.to_arrow()["x"].to_pylist() == [x * 2 for x in range(7, 200)]


def test_rows_wait_until_a_batch_is_full(tmp_path: Path) -> None:
    """Calls get full batches, however rows came in; the end of the input makes a call of the rest."""
    sizes = []

    async def doubled(rows: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(rows.num_rows)
        return pa.record_batch({"x": pc.multiply(rows["x"], 2)})

    with local(1, rows_max=7) as env:
        read = env.from_batches(ROWS, splits=1).map_async(
            doubled, schema=ROWS.schema, batch_size=60, batch_timeout="4min"
        )
        rows = read.collect()
        finish(env, tmp_path)
    assert sizes == [60, 60, 60, 20]
    assert rows.to_arrow()["x"].to_pylist() == [x * 2 for x in range(200)]


def test_rows_wait_for_a_batch_no_longer_than_its_timeout(tmp_path: Path) -> None:
    """Calls are made of the rows that have come, while the source waits."""
    source, answered = GatedSource(80, gates=(20,)), threading.Semaphore(0)

    async def counted(rows: pa.RecordBatch) -> pa.RecordBatch:
        for _ in range(rows.num_rows):
            answered.release()
        return rows.select(["x"])

    with opening(source), local(1) as env:
        read = env.from_source(source, uid="source")
        rows = read.map_async(counted, schema=ROWS.schema, batch_size=1_000, batch_timeout="10ms").collect()
        job = env.execute("waits", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(20)
        for _ in range(20):
            assert answered.acquire(timeout=240)
        source.open_all()
        assert job.wait("4min") == "finished"
    assert rows.to_arrow().num_rows == source.table().num_rows


def test_few_calls_do_not_make_the_batches_before_them_small(tmp_path: Path) -> None:
    """Steps in one task share a turn; rows wait in front of the calls and not at the source."""
    sizes = []

    def seen(batch: pa.RecordBatch) -> pa.RecordBatch:
        sizes.append(batch.num_rows)
        return batch

    with local(1, rows_max=200) as env:
        read = env.from_batches(ROWS, splits=1).map_batches(seen, schema=ROWS.schema)
        rows = read.map_async(_doubled, schema=ROWS.schema, capacity=1).collect()
        finish(env, tmp_path)
    assert sizes == [200]
    assert rows.to_arrow()["x"].to_pylist() == [x * 2 for x in range(200)]


def test_mistakes_are_told(tmp_path: Path) -> None:
    """At submission what can be known; a function that waits for nothing names its operator and the row."""
    with local(1) as env:
        rows = env.from_batches(ROWS)
        for options, said in (
            ({"capacity": 0}, "capacity must be between 1"),
            ({"retries": -1}, "retries must be between 0"),
            ({"batch_size": 0}, "batch_size must be between 1"),
            ({"timeout": 0}, "timeout must be greater than 0"),
            ({"batch_size": 9, "batch_timeout": 0}, "batch_timeout must be greater than 0"),
            ({"batch_timeout": "1s"}, "give batch_size="),
        ):
            with pytest.raises(tg.ConfigurationError, match=said):
                rows.map_async(_doubled, **options)  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match="takes a function of a row"):
            rows.map_async("x")  # type: ignore[arg-type]
        updates = rows.key_by("x").aggregate(n=tg.count())
        with pytest.raises(tg.ConfigurationError, match="map_async"):
            updates.map_async(_doubled)
        rows.map_async(lambda row: row, schema=ROWS.schema, name="plain").collect()
        job = env.execute("plain", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match=r"'plain'.*make it an async def.*'x': 0"):
            job.wait("4min")
