"""The queries of the Nexmark benchmark give what polars gives for the same events."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_jobs import finish, local
from nexmark import run
from nexmark.queries import QUERIES
from nexmark.workload import Workload

DAYS = Workload(1_000, rate=0.01, out_of_order=50, block=250)
"""Over more than a day, so that hours and days are there; no two events at one moment."""
MINUTE = Workload(3_000, rate=50.0, out_of_order=50, block=500)
"""Some windows, and auctions that end within the stream."""


SLOW = ("q16",)
"""So many kinds of distinct rows of so many keys are counted."""


@pytest.mark.parametrize("name", [pytest.param(q, marks=pytest.mark.slow) if q in SLOW else q for q in QUERIES])
def test_a_query_gives_what_polars_gives(tmp_path: Path, name: str) -> None:
    """In two subtasks, read in small batches, with checkpoints on the way."""
    query = QUERIES[name]
    workload = MINUTE if name in ("q2", "q3", "q4", "q5", "q6", "q7", "q8", "q9", "q11", "q20") else DAYS
    with local(rows_max=400) as env:
        table = run.add(query, env, workload, str(tmp_path / "result"), parts=3)
        finish(env, tmp_path / "checkpoints")
    found = run.result_of(table.to_polars(), query)
    assert found == run.expected(query, workload)
    assert found != []
