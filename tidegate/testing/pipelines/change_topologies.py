"""Pipelines with streams of changes for random simulations. Rules: as of `topologies.py`.

Nothing may be processed twice, or rows would be taken back that are not there: they run exactly once.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Sequence

import polars as pl

from tidegate.api.environment import StreamEnvironment
from tidegate.operators.aggregates.aggregate import count, max, sum
from tidegate.testing.pipelines.pieces import Data, source_of, table_of
from tidegate.testing.runtime.run import Rows, counted

TOP = 2
PARTNERS = 3
"""Rows of the right input: with all of them a key would have so many pairs that a run never ended in time."""


def changes(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """How many keys have each greatest value: an aggregate of a running aggregate, whose rows come and go."""
    source = source_of(env, inputs[0], 0, width[0])
    best = source.key_by("k").aggregate(best=max("v"), emit="changes", uid="best", parallelism=width[1])
    counts = best.key_by("best").aggregate(n=count(), emit="changes", uid="counts", parallelism=width[2])
    table_of(counts, "running", width[2], keys=("best",))


def expect_changes(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Values that are nobody's greatest any more are not there."""
    best: dict[int, int] = {}
    for key, value in inputs[0]:
        best[key] = value if key not in best or value > best[key] else best[key]
    return {"sim://running": counted(list(Counter(best.values()).items()))}


def ranks(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """The greatest values of each key, and the sum of them."""
    source = source_of(env, inputs[0], 0, width[0])
    top = source.key_by("k").top_n(TOP, "v", rank="rank", uid="top", parallelism=width[1])
    table_of(top, "running", width[1], keys=("k", "rank"))
    group = top.with_columns((pl.col("k") % 3).alias("g"), uid="group", parallelism=width[1]).key_by("g")
    totals = group.aggregate(n=count(), t=sum("v"), emit="final", uid="totals", parallelism=width[2])
    table_of(totals, "final", width[2])


def expect_ranks(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Equal values have ranks one after the other."""
    rows: list[tuple[int, ...]] = []
    totals: dict[int, tuple[int, int]] = {}
    for key in {key for key, _ in inputs[0]}:
        for rank, value in enumerate(sorted((v for k, v in inputs[0] if k == key), reverse=True)[:TOP], start=1):
            rows.append((key, value, rank))
            number, total = totals.get(key % 3, (0, 0))
            totals[key % 3] = number + 1, total + value
    return {"sim://running": counted(rows), "sim://final": counted([(g, *of) for g, of in totals.items()])}


def matches(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """A join without a window, in which rows without a partner are taken back, and what each key comes to."""
    left = source_of(env, inputs[0], 0, width[0])
    right = source_of(env, inputs[1][:PARTNERS], 1, width[1])
    joined = left.join(right, on="k", how="left", uid="join", parallelism=width[2])
    totals = joined.key_by("k").aggregate(
        n=count(), l=sum("v"), r=sum("v_right"), emit="changes", uid="totals", parallelism=width[3]
    )
    table_of(totals, "running", width[3], keys=("k",))


def expect_matches(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Keys of the left input, with pairs or with nulls."""
    found: list[tuple[int | None, ...]] = []
    for key in {key for key, _ in inputs[0]}:
        mine, theirs = ([v for k, v in data if k == key] for data in (inputs[0], inputs[1][:PARTNERS]))
        times = builtins.max(1, len(theirs))
        total = len(mine) * builtins.sum(theirs) if theirs else None
        found.append((key, len(mine) * times, builtins.sum(mine) * times, total))
    return {"sim://running": counted(found)}
