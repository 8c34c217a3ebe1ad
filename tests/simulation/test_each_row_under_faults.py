"""Results of each row under faults and rescales: each row has one, which counts all rows of its key up to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH
from rescaled_runs import check_rescaled

import tidegate as tg
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.runtime.run import Simulation

TOTALS = "sim://totals"
FAULTS = replace(HARSH, crash=0.04, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
KEYS, ROWS = 4, 48
INPUT = pa.table({"k": [n % KEYS for n in range(ROWS)], "x": [(n * 7) % 11 - 5 for n in range(ROWS)], "n": range(ROWS)})
"""Uses one split, so that the rows of a key have one order."""


def _build(env: tg.StreamEnvironment) -> None:
    totals = (
        env.from_batches(INPUT, splits=1, uid="rows")
        .key_by("k")
        .aggregate(
            n=tg.last("n"),
            rows=tg.count(),
            total=tg.sum("x"),
            least=tg.min("x"),
            kinds=tg.count_distinct("x"),
            every=tg.collect_list("x", limit=3),
            emit="each",
            uid="totals",
        )
    )
    totals.to_table(TOTALS, uid="table")


def _expected() -> list[dict[str, Any]]:
    found = []
    for row in INPUT.to_pylist():
        values = [each["x"] for each in INPUT.to_pylist() if each["k"] == row["k"] and each["n"] <= row["n"]]
        found.append(
            {
                "k": row["k"],
                "n": row["n"],
                "rows": len(values),
                "total": sum(values),
                "least": min(values),
                "kinds": len(set(values)),
                "every": values[:3],
            }
        )
    return found


def _violation(simulation: Simulation) -> str | None:
    rows = sorted(read_table(simulation.open_store(TOTALS)).to_pylist(), key=lambda row: row["n"])
    return None if rows == _expected() else f"not one result a row, of all rows up to it: {rows}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_each_row_has_one_result_under_faults(seed: int) -> None:
    """Whatever crashes, and at another parallelism after a savepoint that comes in the midst of it."""
    check_rescaled(seed, FAULTS, _build, _violation, rows_max=3)
