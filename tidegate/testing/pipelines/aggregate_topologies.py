"""A pipeline of aggregates with values of any width, for random simulations. Rules: as of `topologies.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa

from tidegate.api.environment import StreamEnvironment
from tidegate.operators.aggregates.aggregate import collect_list, max, min, udaf
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState
from tidegate.testing.pipelines.pieces import Data, source_of, table_of
from tidegate.testing.runtime.run import Rows, counted

_ENOUGH = 10_000
"""More values than a key has: which ones a list has would depend on the order of splits."""


class Histogram(BatchAggregateFunction):
    """How often each of the values 0 to 9 comes, as a text; its state is a list."""

    state = pa.schema({"counts": pa.list_(pa.int64())})
    output = pa.string()
    initial: ClassVar = {"counts": [0] * 10}

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Count values."""
        return self._plus(state, groups, np.eye(10, dtype=np.int64)[columns[0].to_numpy()])

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Add counts."""
        return self._plus(state, groups, self._counts(other))

    def result(self, state: pa.RecordBatch) -> Any:
        """The counts, one after the other."""
        return [_text(row) for row in self._counts(state).tolist()]

    def _plus(self, state: pa.RecordBatch, groups: Groups, counts: Any) -> NewState:
        totals = self._counts(state)
        np.add.at(totals, groups, counts)
        return {"counts": totals.tolist()}

    def _counts(self, state: pa.RecordBatch) -> Any:
        return state.column(0).flatten().to_numpy().reshape(-1, 10).copy()


def _text(counts: Iterable[int]) -> str:
    return " ".join(map(str, counts))


def texts(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Running for each key, with updates, and over everything."""
    source = source_of(env, inputs[0], 0, width[0]).rebalance()
    name = pl.format("value {}", pl.col("v"))
    rows = source.with_columns(name.alias("s"), uid="named", parallelism=width[1])
    running = rows.key_by("k").aggregate(
        least=min("s"),
        greatest=max("s"),
        every=collect_list("v", limit=_ENOUGH),
        histogram=udaf(Histogram(), "v"),
        uid="running",
        parallelism=width[2],
    )
    shown = running.select(
        "k",
        "least",
        "greatest",
        pl.col("every").list.len().cast(pl.Int64).alias("n"),
        pl.col("every").list.sum().alias("t"),
        "histogram",
        uid="shown",
        parallelism=width[2],
    )
    table_of(shown, "running", width[2], keys=("k",))
    table_of(rows.aggregate(histogram=udaf(Histogram(), "v"), emit="final", uid="all"), "final", 1)


def expect_texts(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """In plain Python."""
    groups: dict[int, list[int]] = {}
    for key, value in inputs[0]:
        groups.setdefault(key, []).append(value)
    running = [
        (key, f"value {sorted(of)[0]}", f"value {sorted(of)[-1]}", len(of), sum(of), _histogram(of))
        for key, of in groups.items()
    ]
    every = [value for _, value in inputs[0]]
    return {"sim://running": counted(running), "sim://final": counted([(_histogram(every),)])}


def _histogram(values: Sequence[int]) -> str:
    return _text(values.count(value) for value in range(10))
