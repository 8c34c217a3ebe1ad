"""A sink that commits in its tasks under faults: every row becomes visible once, and nothing before its checkpoint."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH

from tidegate.testing import SimulatedPipeline
from tidegate.testing.world.ledger import LedgerSink

ROWS = pa.table({"x": list(range(120))})
SEEDS = 12


def build(env: Any) -> None:
    """Rows to a ledger, and to a table."""
    rows = env.from_batches(ROWS, splits=4, uid="rows")
    rows.to_sink(LedgerSink(env.ledger("ledger")), flush_bytes=100, uid="sink")
    rows.to_table("sim://table", uid="table")


@pytest.fixture(scope="module")
def pipeline() -> SimulatedPipeline:
    """The pipeline, whose reference run is made once."""
    return SimulatedPipeline(build)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_row_is_visible_once(pipeline: SimulatedPipeline, seed: int) -> None:
    """Whatever crashes, between any two steps, and however often a commit is repeated."""
    report = pipeline.run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
