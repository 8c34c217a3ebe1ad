"""Queries of Nexmark in SQL give what the programs of the same queries give: what polars gives for the same events."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from local_jobs import finish, local
from nexmark import run, sql
from nexmark.queries import QUERIES
from nexmark.queries.stateless import _side_input
from nexmark.workload import Workload

DAYS = Workload(1_000, rate=0.01, out_of_order=50, block=250)
MINUTE = Workload(2_000, rate=50.0, out_of_order=50, block=500)
BY_DAY = ("q15", "q16", "q17")
SLOW = ("q3", "q4", "q5", "q7", "q8", "q9", "q15", "q16", "q18")
"""Joins, windows and rankings of several steps, and kinds of distinct rows of many keys."""


@pytest.mark.parametrize("name", [pytest.param(q, marks=pytest.mark.slow) if q in SLOW else q for q in sql.TEXTS])
def test_a_query_in_sql_gives_what_polars_gives(tmp_path: Path, name: str) -> None:
    """In two subtasks, read in small batches."""
    side_input = _side_input if name == "q13" else None
    query = replace(QUERIES[name], program=partial(sql.stream, QUERIES[name], side_input=side_input))
    workload = DAYS if name in BY_DAY else MINUTE
    with local(rows_max=400) as env:
        table = run.add(query, env, workload, str(tmp_path / "result"), parts=2)
        finish(env, tmp_path / "checkpoints")
    found = run.result_of(table.to_polars(), query)
    assert found == run.expected(query, workload)
    assert found != []
