"""A pipeline of sketches, which needs an optional library and is therefore not among the drawn pipelines.

Up to a few dozen values sketches are exact, so plain Python computes their results. The rules are in
`random_jobs/topologies.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import polars as pl
from random_jobs.draw import Scenario, draw
from random_jobs.pieces import Data, Topology, source_of, table_of
from random_jobs.topologies import TOPOLOGIES

import tidegate as tg
from tidegate.testing.runtime.run import Rows, counted

NAME = "sketches"


def sketches(env: tg.StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """How many values each key has, and the least and the greatest one: other quantiles depend on the order of rows."""
    source = source_of(env, inputs[0], 0, width[0])
    about = source.key_by("k").aggregate(
        values=tg.approx_count_distinct("v"),
        found=tg.approx_quantile("v", [0.0, 1.0]),
        uid="about",
        parallelism=width[1],
    )
    of = [pl.col("found").list.get(place).alias(name) for place, name in enumerate(("least", "greatest"))]
    table_of(about.select("k", "values", *of, uid="shown", parallelism=width[1]), "running", width[1], keys=("k",))


def expect_sketches(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """In plain Python."""
    groups: dict[int, list[int]] = {}
    for key, value in inputs[0]:
        groups.setdefault(key, []).append(value)
    rows = [(key, len(set(of)), float(min(of)), float(max(of))) for key, of in groups.items()]
    return {"sim://running": counted(rows)}


@contextmanager
def known() -> Iterator[None]:
    """Adds the pipeline to the ones that a scenario may name, in a `with` block."""
    with patch.dict(TOPOLOGIES, {NAME: Topology(sketches, expect_sketches)}):  # type: ignore[arg-type]
        yield


def scenario_of(seed: int, faults: str) -> Scenario:
    """Returns the scenario of a seed with the pipeline of sketches, exactly once."""
    values = {"topology": NAME, "mode": "exactly-once", "sources": "at once", "interval_ms": 60, "faults": faults}
    drawn = draw(seed)
    return replace(drawn, values={**drawn.values, **values}, rows=40 + seed)
