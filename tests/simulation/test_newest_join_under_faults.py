"""A join of newest rows under faults and rescales: each row takes part once, in the order of its key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pipelines import HARSH
from rescaled_runs import check_rescaled

import tidegate as tg
from tidegate.storage.tables.table_files import read_table
from tidegate.testing.runtime.run import Simulation

TABLES = {"complete": "sim://complete", "always": "sim://always"}
FAULTS = replace(HARSH, crash=0.04, slow=0.0, storage=0.03, delay="0ms..20ms", duration="5s")
KEYS, ROWS = 4, 32
SIDES = [pa.table({"k": [n % KEYS for n in range(ROWS)], name: [n // KEYS + 1 for n in range(ROWS)]}) for name in "vw"]
"""Numbers the rows of each key on a side from 1."""
Pair = tuple[int, int]


def _build(env: tg.StreamEnvironment) -> None:
    left, right = (env.from_batches(side, splits=1, uid=side.schema.names[1]) for side in SIDES)
    left.join_latest(right, on="k", uid="complete").to_table(TABLES["complete"])
    left.join_latest(right, on="k", emit="always", uid="always").to_table(TABLES["always"])


def _wrong(emit: str, pairs: Sequence[Pair]) -> str | None:
    """Returns how the results of a key are wrong. A result has the number of the row on either side, 0 for none."""
    steps = sorted(pairs, key=sum)
    grows = all(a[0] <= b[0] and a[1] <= b[1] for a, b in pairwise(steps))
    each = ROWS // KEYS
    if emit == "always":
        one_each = [sum(pair) for pair in steps] == [*range(1, 2 * each + 1)]
        return None if grows and one_each else f"not one result a row, each with the newest of the other side: {steps}"
    once = all(len({pair[side] for pair in steps}) == len(steps) for side in (0, 1))
    whole = bool(steps) and all(0 < number <= each for pair in steps for number in pair)
    return None if grows and once and whole else f"not each row once, in order: {steps}"


def _violation(simulation: Simulation) -> str | None:
    for emit, url in TABLES.items():
        rows: list[dict[str, Any]] = read_table(simulation.open_store(url)).to_pylist()
        for key in range(KEYS):
            wrong = _wrong(emit, [(row["v"] or 0, row["w"] or 0) for row in rows if row["k"] == key])
            if wrong is not None:
                return f"{emit}, key {key}: {wrong}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_newest_rows_are_joined_once_under_faults(seed: int) -> None:
    """Whatever crashes, and at another parallelism after a savepoint that comes in the midst of it."""
    check_rescaled(seed, FAULTS, _build, _violation, rows_max=2)
