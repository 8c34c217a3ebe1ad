"""Pipelines of one job that nothing joins fail and restart on their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import config, local, rows

import tidegate as tg

FAILURES = 50
ROWS = pa.table({"k": list(range(300)), "v": [k % 7 for k in range(300)]})

_left: list[int] = []
"""A failure for each element."""
_opened: list[str] = []


class Noted(tg.ProcessFunction):
    """Hands rows on, and notes each time that it is opened."""

    def open(self, context: tg.ProcessContext) -> None:
        """An attempt begins."""
        _opened.append("steady")

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        """The row as it is."""
        yield row


def _fails_often(batch: pa.RecordBatch) -> pa.RecordBatch:
    if _left:
        _left.pop()
        raise RuntimeError("once more")
    return batch


@pytest.mark.slow
@pytest.mark.parametrize(("failover", "opened"), [("region", 1), ("full", FAILURES + 1)])
def test_a_pipeline_that_fails_fifty_times_leaves_the_other_one_alone(
    tmp_path: Path, failover: str, opened: int
) -> None:
    """Its tasks are opened once; where the whole job restarts, each time. No row is lost or doubled."""
    _left[:], _opened[:] = [1] * FAILURES, []
    with local(parallelism=1) as env:
        steady = env.from_batches(ROWS).rebalance().process(Noted(), schema=ROWS.schema, parallelism=1).collect()
        flaky = env.from_batches(ROWS).map_batches(_fails_often, schema=ROWS.schema).collect()
        job = env.execute(
            "two pipelines",
            checkpoints=config(tmp_path, interval="20ms", failover=failover),
            restart=tg.RestartStrategy.fixed_delay(FAILURES, "0ms"),
        )
        assert job.wait("4min") == "finished"

    assert len(_opened) == opened
    assert job.progress().restarts == FAILURES
    assert rows(steady.to_arrow()) == rows(flaky.to_arrow()) == rows(ROWS)
