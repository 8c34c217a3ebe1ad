"""Running aggregates of every kind in one operator: nanoseconds of processor for each row, beside a sum of integers.

    python benchmarks/aggregates.py --rows 4000000 --keys 100000

Each aggregate runs alone, over the same batches of 65,536 rows: an int64 key, an int64 value, and a text of 12 bytes.
Its keys come once before anything is measured. No job, no checkpoints: what is measured is the operator and its state.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import pyarrow as pa
from common import describe_machine
from rich.console import Console
from rich.table import Table

import tidegate as tg
from tidegate.operators.aggregates.aggregate import Aggregate
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState
from tidegate.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.operators.operator import OperatorContext
from tidegate.storage.ids import OperatorUid, SubtaskIndex

BATCH_ROWS = 65_536


class Mean(BatchAggregateFunction):
    """A mean, as a program may write one."""

    state = pa.schema({"total": pa.float64(), "n": pa.int64()})
    output = pa.float64()
    initial = {"total": 0.0, "n": 0}  # noqa: RUF012 - as in the pages

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Add."""
        total, n = (column.to_numpy() for column in state.columns)
        return {
            "total": total + np.bincount(groups, columns[0].to_numpy(), len(n)),
            "n": n + np.bincount(groups, minlength=len(n)),
        }

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Add."""
        return {
            name: state[name].to_numpy() + np.bincount(groups, other[name].to_numpy(), len(state))
            for name in ("total", "n")
        }

    def result(self, state: pa.RecordBatch) -> object:
        """The means."""
        return state["total"].to_numpy() / state["n"].to_numpy()


AGGREGATES: dict[str, Aggregate] = {
    'sum("x")': tg.sum("x"),
    'max("x")': tg.max("x"),
    'last("x", by="t")': tg.last("x", by="t"),
    'max("text")': tg.max("text"),
    'first("text")': tg.first("text"),
    'last("text", by="t")': tg.last("text", by="t"),
    'collect_list("x", limit=8)': tg.collect_list("x", limit=8),
    'udaf(Mean(), "x")': tg.udaf(Mean(), "x"),
    'approx_count_distinct("x")': tg.approx_count_distinct("x"),
    'approx_quantile("x", 0.5)': tg.approx_quantile("x", 0.5),
}


def batches(rows: int, keys: int) -> list[pa.RecordBatch]:
    """Rows of random keys."""
    rng = np.random.default_rng(1)
    texts = pa.array([f"text {number:07}" for number in range(100_000)])
    found = []
    for start in range(0, rows, BATCH_ROWS):
        count = min(BATCH_ROWS, rows - start)
        columns = {
            "k": rng.integers(0, keys, count),
            "x": rng.integers(0, 1_000_000, count),
            "t": np.arange(start, start + count),
            "text": texts.take(pa.array(rng.integers(0, len(texts), count))),
        }
        found.append(pa.record_batch(columns))
    return found


def measured(aggregate: Aggregate, found: list[pa.RecordBatch], every_key: pa.RecordBatch) -> float:
    """Nanoseconds of processor for each row."""
    operator = KeyedAggregate(("k",), {"a": aggregate}, "final")
    operator.open(OperatorContext(OperatorUid("agg"), "agg", SubtaskIndex(0), 1, 128), [])
    operator.process(every_key, lambda batch: None)
    begun = time.process_time()
    for batch in found:
        operator.process(batch, lambda batch: None)
    seconds = time.process_time() - begun
    operator.close()
    rows: int = sum(batch.num_rows for batch in found)
    return seconds / rows * 1e9


def main() -> None:
    """Measure each aggregate in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    found = batches(arguments.rows, arguments.keys)
    first = {"k": np.arange(arguments.keys), "x": np.zeros(arguments.keys, dtype=np.int64)}
    every_key = pa.record_batch({**first, "t": first["x"] - 1, "text": pa.array([""] * arguments.keys)})
    taken: dict[str, list[float]] = {name: [] for name in AGGREGATES}
    for number in range(arguments.rounds):
        for name, aggregate in AGGREGATES.items():
            taken[name].append(measured(aggregate, found, every_key))
            console.print(f"round {number + 1}: {name} {taken[name][-1]:.0f} ns a row")
    floor = statistics.median(taken['sum("x")'])
    table = Table("aggregate", "ns a row", "rows a second", "of a sum", title="medians, of processor time")
    for name, values in taken.items():
        median = statistics.median(values)
        table.add_row(name, f"{median:.0f}", f"{1e3 / median:.2f} M", f"{median / floor:.1f}")
    console.print(table)


if __name__ == "__main__":
    main()
