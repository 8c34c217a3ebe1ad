"""A partitioned table under faults: the rows of a run without faults, each once, and no file without a reference."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pipelines import HARSH

import tidegate as tg
from tidegate.testing import SimulatedPipeline

ROWS = pa.table({"k": [n % 7 for n in range(80)], "p": [str(n % 3) if n % 4 else None for n in range(80)]})


def build(env: tg.StreamEnvironment) -> None:
    """Writes all rows by partition, and the newest count of each key by partition."""
    rows = env.from_batches(ROWS, splits=4, uid="rows")
    rows.to_table("sim://all", partition_by=["p"], uid="all")
    counts = rows.key_by("p", "k").aggregate(n=tg.count(), uid="counts")
    counts.to_table("sim://counts", mode="upsert", keys=["p", "k"], partition_by=["p"], uid="counts-table")


PIPELINE = SimulatedPipeline(build)


@pytest.mark.parametrize("seed", range(2))
def test_every_row_is_in_its_partition_once(seed: int) -> None:
    """Whatever crashes, and whatever storage does."""
    report = PIPELINE.run(seed, HARSH)
    assert report.ok, f"{report}\n{report.sequence()}"
