"""A model as a step with resources, under faults: it is opened before its rows, and each row counts once."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH, ROWS

import tidegate as tg
from tidegate.testing import simulate


class Weigh(tg.BatchFunction):
    """A model that must have been opened, once in each object, before it is given rows."""

    opened = 0

    def open(self, context: tg.BatchContext) -> None:
        self.opened += 1

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.opened == 1
        return batch


def keep(row: Any) -> bool:
    """Every row."""
    return True


def weighed(env: tg.StreamEnvironment) -> None:
    """A task for each kind of slot, joined subtask by subtask, and state behind them."""
    rows = env.from_batches(ROWS.slice(0, 100), splits=4)
    kept = rows.map_batches(Weigh(), schema=ROWS.schema, num_gpus=1).filter(keep, num_cpus=2)
    kept.key_by("k").aggregate(n=tg.count(), total=tg.sum("v")).to_table("sim://model", mode="upsert", keys=["k"])


@pytest.mark.parametrize("seed", [0, 2])
def test_rows_count_once_though_the_model_is_made_again(seed: int) -> None:
    """Tasks crash, and each attempt has a new object."""
    report = simulate(weighed, seed=seed, faults=HARSH)
    assert report.ok, f"{report}\n" + "\n".join(report.trace[-60:])
    assert report.restarts > 0
