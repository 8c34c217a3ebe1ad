"""A process function over batches under faults: the rows of a run without them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pyarrow as pa
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

ROWS = pa.table({"k": [number * 7 % 5 for number in range(200)], "x": range(200)})
RESULT = pa.schema({"k": pa.int64(), "n": pa.int64(), "t": pa.int64()})
LAST_MS = 2**62


class Totals(tg.ProcessFunction):
    """Counts and sums the rows of each key, and emits both at the end."""

    def open(self, context: tg.ProcessContext) -> None:
        self.totals = context.state(tg.ValueState("totals", pa.struct({"n": pa.int64(), "t": pa.int64()})))

    def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> None:
        groups = context.groups()
        before = self.totals.get_many(groups)
        counts, sums = (before.field(name).fill_null(0).to_numpy().copy() for name in ("n", "t"))
        np.add.at(counts, groups.index, 1)
        np.add.at(sums, groups.index, batch["x"].to_numpy())
        self.totals.put_many(pa.StructArray.from_arrays([counts, sums], names=["n", "t"]), groups)
        context.timer_service.register_many(LAST_MS, groups)

    def on_timer_batch(self, keys: pa.RecordBatch, context: tg.ProcessBatchContext) -> pa.RecordBatch:
        totals = self.totals.get_many()
        self.totals.clear_many()
        return pa.record_batch([keys["k"], totals.field("n"), totals.field("t")], schema=RESULT)


@cache
def pipeline() -> SimulatedPipeline:
    """The undisturbed run is made once."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(ROWS, splits=4, uid="rows", parallelism=2)
        totals = rows.key_by("k").process(Totals(), schema=RESULT, uid="totals", parallelism=2)
        totals.to_table("sim://totals", uid="table", parallelism=2)

    return SimulatedPipeline(build)


@pytest.mark.parametrize("seed", range(6))
def test_totals_are_the_same_under_faults(seed: int) -> None:
    """Whatever crashes, and whatever storage does."""
    report = pipeline().run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
