"""`map_async` under faults: every row has one result, whatever crashes while calls are under way, in order or not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.operators.functions.async_map import AsyncMap
from tidegate.testing import SimulatedPipeline
from tidegate.testing.runtime.run import Build

ROWS = pa.table({"k": [n % 5 for n in range(90)], "t": [n * 10 for n in range(90)]})


async def _asked(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "t": row["t"], "asked": row["t"] * 2}


async def _asked_together(rows: pa.RecordBatch) -> pa.Table:
    assert rows.num_rows <= 7
    return pa.table({"k": rows["k"], "t": rows["t"], "asked": pc.multiply(rows["t"], 2)})


_SCHEMA = pa.schema([("k", pa.int64()), ("t", pa.int64()), ("asked", pa.int64())])


def build(env: tg.StreamEnvironment) -> None:
    """In order to a table; in no order, by windows of event time, to another one."""
    rows = env.from_batches(ROWS, splits=3, timestamp="t", max_out_of_orderness=2_000, uid="rows")
    rows.map_async(_asked, schema=_SCHEMA, capacity=4, uid="in order").to_table("sim://ordered", uid="ordered")
    asked = rows.map_async(_asked, schema=_SCHEMA, capacity=3, ordered=False, uid="as they come")
    counts = asked.key_by("k").window(tg.Tumbling(300)).aggregate(n=tg.count(), total=tg.sum("asked"), uid="windows")
    counts.to_table("sim://windows", uid="windows-table")


def build_batches(env: tg.StreamEnvironment) -> None:
    """By batches that wait to be full, before windows of event time."""
    rows = env.from_batches(ROWS, splits=3, timestamp="t", max_out_of_orderness=2_000, uid="rows")
    together = rows.map_async(
        _asked_together, schema=_SCHEMA, capacity=2, batch_size=7, batch_timeout="100ms", uid="together"
    )
    counts = together.key_by("k").window(tg.Tumbling(300)).aggregate(n=tg.count(), total=tg.sum("asked"), uid="windows")
    counts.to_table("sim://windows", uid="windows-table")


PIPELINE = SimulatedPipeline(build)
BATCHES = SimulatedPipeline(build_batches)


@pytest.mark.parametrize(
    ("pipeline", "seed"),
    [
        *(pytest.param(PIPELINE, seed, id=f"rows {seed}") for seed in range(5)),
        *(pytest.param(BATCHES, seed, id=f"batches {seed}") for seed in range(3)),
    ],
)
def test_every_row_has_one_result(pipeline: SimulatedPipeline, seed: int) -> None:
    """Rows are as in a run without faults, also behind a window that must not lose late rows."""
    report = pipeline.run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"


def _undisturbed(build: Build) -> SimulatedPipeline:
    """Returns a pipeline whose run without faults is made.

    Where rows differ, it does not look for other causes by more runs, because the test has broken the operator.
    """
    pipeline = SimulatedPipeline(build)
    pipeline.run(0)
    pipeline._order = (None,)
    return pipeline


def _all_ok(pipeline: SimulatedPipeline) -> bool:
    """Returns whether no seed shows a violation. It does not shrink runs, which takes long."""
    return all(pipeline._run(seed, HARSH, None).ok for seed in (4, 1, 2, 3, 0))


def test_rows_under_way_that_a_checkpoint_forgets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: without its state an operator loses rows that were under way when a task crashed."""
    pipeline = _undisturbed(build)
    monkeypatch.setattr(AsyncMap, "snapshot", lambda self, cut: None)
    assert not _all_ok(pipeline)


def test_rows_that_wait_for_a_batch_and_a_checkpoint_forgets_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: rows that no call has yet are to be in the checkpoint as well."""
    together = AsyncMap.snapshot

    def forgets(self: AsyncMap, cut: Any) -> Any:
        kept, self._filling = self._filling, []
        try:
            return together(self, cut)
        finally:
            self._filling = kept

    pipeline = _undisturbed(build_batches)
    monkeypatch.setattr(AsyncMap, "snapshot", forgets)
    assert not _all_ok(pipeline)


def test_a_watermark_that_overtakes_rows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: windows that end before the results have come lose them."""
    pipeline = _undisturbed(build)
    monkeypatch.setattr(AsyncMap, "let_pass", lambda self, watermark_ms: True)
    assert not _all_ok(pipeline)
