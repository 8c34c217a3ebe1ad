"""Rows a second of a core for functions of users, by row, traced and by the batch, and for aggregates, in local jobs.

    python benchmarks/row_functions.py [--rows 400000] [--rounds 3] [--keys 100000] [--only TEXT] [--json PATH]

Each line is a local job of one subtask: rows of an int64 key and an int64 value, the function, and a step that keeps
one row of a batch. CPU time of the process, because other work on the machine would count in wall time; the start of
the job is taken off, measured as the same job without rows. All lines take turns within a round; the median and the
best are shown. The floor is a loop over the rows as dicts that does what the function does, without a job.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from common import describe_machine
from rich.console import Console
from rich.table import Table

import tidegate as tg

INPUT = pa.schema({"k": pa.int64(), "x": pa.int64()})
OUTPUT = pa.schema({"k": pa.int64(), "t": pa.int64()})
COUNTED = pa.schema({"rows": pa.int64()})
LISTS = pa.schema({"k": pa.int64(), "l": pa.list_(pa.int64())})
BY_BATCH = 10
"""Lines that are many times as fast get so many times the rows."""
FOUR = {"n": tg.count(), "t": tg.sum("x"), "least": tg.min("x"), "mean": tg.mean("x")}
Row = Mapping[str, Any]


@dataclass
class Both:
    """State of two numbers."""

    n: int
    t: int


class Totals(tg.ProcessFunction):
    """A running total of each key."""

    def open(self, context: tg.ProcessContext) -> None:
        """One number a key."""
        self.total = context.state(tg.ValueState("total", pa.int64()))

    def process(self, row: Row, context: tg.ProcessContext) -> Iterator[Row]:
        """The total so far."""
        total = (self.total.value() or 0) + row["x"]
        self.total.update(total)
        yield {"k": row["k"], "t": total}


class TotalsByBatch(tg.ProcessFunction):
    """The total of each key after each batch."""

    def open(self, context: tg.ProcessContext) -> None:
        """One number a key."""
        self.total = context.state(tg.ValueState("total", pa.int64()))

    def process_batch(self, batch: pa.RecordBatch, context: tg.ProcessBatchContext) -> pa.RecordBatch:
        """The total of each key in the batch."""
        groups = context.groups()
        totals = self.total.get_many(groups).fill_null(0).to_numpy().copy()
        np.add.at(totals, groups.index, batch["x"].to_numpy())
        self.total.put_many(totals, groups)
        return pa.record_batch([groups.keys["k"], totals], schema=OUTPUT)


class Puts(tg.ProcessFunction):
    """Puts one value into a state for each row, and nothing else."""

    def __init__(self, dtype: Any, value: Callable[[int], Any]) -> None:
        self._dtype, self._value = dtype, value

    def open(self, context: tg.ProcessContext) -> None:
        """The state of this type."""
        self.state = context.state(tg.ValueState("state", self._dtype))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        """Keep the newest."""
        self.state.update(self._value(row["x"]))


class Adds(tg.ProcessFunction):
    """Adds each row to a list, and goes through it now and then."""

    def __init__(self, dtype: Any, value: Callable[[int], Any]) -> None:
        self._dtype, self._value = dtype, value

    def open(self, context: tg.ProcessContext) -> None:
        """The list."""
        self.state = context.state(tg.ListState("state", self._dtype))

    def process(self, row: Row, context: tg.ProcessContext) -> None:
        """Append."""
        self.state.add(self._value(row["x"]))


Made = Callable[[tg.Stream], tg.Stream]


def _lines() -> dict[str, tuple[int, Made]]:
    """What is measured: how many times the rows, and the step."""

    def step(row: Row) -> Row:
        return {"k": row["k"], "t": row["x"] + 1}

    def running(total: int | None, row: Row) -> tuple[int, Row]:
        total = (total or 0) + row["x"]
        return total, {"k": row["k"], "t": total}

    def reduced(before: Row, row: Row) -> Row:
        return {"k": row["k"], "x": before["x"] + row["x"]}

    def group(rows: pa.Table) -> Row:
        return {"k": rows["k"][0].as_py(), "t": pc.sum(rows["x"]).as_py()}

    pair = pa.struct({"n": pa.int64(), "t": pa.int64()})
    lines: dict[str, tuple[int, Made]] = {
        "map, traced": (BY_BATCH, lambda s: s.map(step, schema=OUTPUT)),
        "map": (1, lambda s: s.map(step, schema=OUTPUT, traced=False)),
        "map, schema not given": (1, lambda s: s.map(step, traced=False)),
        "filter, traced": (BY_BATCH, lambda s: s.filter(lambda row: row["x"] > 3)),
        "filter": (1, lambda s: s.filter(lambda row: row["x"] > 3, traced=False)),
        "flat_map": (1, lambda s: s.flat_map(lambda row: [step(row)], schema=OUTPUT)),
        "map to a list": (1, lambda s: s.map(lambda row: {"k": row["k"], "l": [row["x"]]}, schema=LISTS)),
        "map_batches": (BY_BATCH, lambda s: s.map_batches(_added, schema=OUTPUT)),
        "process": (1, lambda s: s.key_by("k").process(Totals(), schema=OUTPUT)),
        "stateful_map": (1, lambda s: s.key_by("k").stateful_map(running, state=int, schema=OUTPUT)),
        "reduce": (1, lambda s: s.key_by("k").reduce(reduced)),
        "map_groups": (1, lambda s: s.key_by("k").map_groups(group, schema=OUTPUT)),
        "aggregate, updates": (BY_BATCH, lambda s: s.key_by("k").aggregate(t=tg.sum("x"))),
        "aggregate, each row": (BY_BATCH, lambda s: s.key_by("k").aggregate(t=tg.sum("x"), emit="each")),
        "four aggregates, updates": (BY_BATCH, lambda s: s.key_by("k").aggregate(**FOUR)),
        "four aggregates, each row": (BY_BATCH, lambda s: s.key_by("k").aggregate(**FOUR, emit="each")),
        "put int": (1, lambda s: s.key_by("k").process(Puts(int, lambda x: x), schema=OUTPUT)),
        "put dataclass": (1, lambda s: s.key_by("k").process(Puts(Both, lambda x: Both(x, x)), schema=OUTPUT)),
        "put struct": (1, lambda s: s.key_by("k").process(Puts(pair, lambda x: {"n": x, "t": x}), schema=OUTPUT)),
        "add int": (1, lambda s: s.key_by("k").process(Adds(int, lambda x: x), schema=OUTPUT)),
        "add struct": (1, lambda s: s.key_by("k").process(Adds(pair, lambda x: {"n": x, "t": x}), schema=OUTPUT)),
    }
    if hasattr(tg, "ProcessBatchContext"):
        lines["process_batch"] = BY_BATCH, lambda s: s.key_by("k").process(TotalsByBatch(), schema=OUTPUT)
    return lines


def _added(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch([batch["k"], pc.add(batch["x"], 1)], schema=OUTPUT)


def _counted(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch([[batch.num_rows]], schema=COUNTED)


def _first(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(0, 1)


def _job_s(made: Made, table: pa.Table) -> float:
    """CPU seconds of a job."""
    env = tg.StreamEnvironment.local(1)
    rows = made(env.from_batches(table))
    if rows.schema is None:
        rows.map_batches(_counted, schema=COUNTED).collect()
    else:  # with the keys of updates, which a step behind them must pass on
        rows.map_batches(_first, schema=rows.schema).collect()
    started_s = time.process_time()
    outcome = env.execute("row functions").wait("10min")
    took_s = time.process_time() - started_s
    env.close()
    assert outcome == "finished", outcome
    return took_s


def _floor_s(table: pa.Table) -> float:
    """CPU seconds of a loop over rows, from Arrow and back to it."""
    started_s = time.process_time()
    for batch in table.to_batches(65_536):
        keys, values = (column.to_numpy().tolist() for column in batch.columns)
        rows = [{"k": key, "x": value} for key, value in zip(keys, values, strict=True)]
        mapped = [{"k": row["k"], "t": row["x"] + 1} for row in rows]
        pa.record_batch([pa.array([row[name] for row in mapped], pa.int64()) for name in OUTPUT.names], schema=OUTPUT)
    return time.process_time() - started_s


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--only", default="", help="lines whose name has this text, or one of several with | between")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    console = Console()
    describe_machine(console)
    rng = np.random.default_rng(7)

    def table_of(rows: int) -> pa.Table:
        return pa.table([rng.integers(0, options.keys, rows), rng.integers(0, 10, rows)], schema=INPUT)

    lines = {name: line for name, line in _lines().items() if any(text in name for text in options.only.split("|"))}
    tables = {times: table_of(times * options.rows) for times, _ in lines.values()}
    floor_table, nothing = table_of(options.rows), table_of(1)
    for _, made in lines.values():  # compiled kernels, imported modules
        _job_s(made, table_of(1_000))
    figures: dict[str, list[float]] = {"floor: a loop over dicts": []}
    for _ in range(options.rounds):
        figures["floor: a loop over dicts"].append(options.rows / _floor_s(floor_table))
        for name, (times, made) in lines.items():
            took_s = _job_s(made, tables[times]) - _job_s(made, nothing)
            figures.setdefault(name, []).append(times * options.rows / took_s)
    shown = Table(title=f"million rows a second of CPU, {options.keys:,} keys")
    for heading in ("", "median", "best"):
        shown.add_column(heading, justify="right" if heading else "left")
    for name, rates in figures.items():
        shown.add_row(name, f"{statistics.median(rates) / 1e6:.2f}", f"{max(rates) / 1e6:.2f}")
    console.print(shown)
    if options.json is not None:
        options.json.write_text(json.dumps({name: statistics.median(rates) for name, rates in figures.items()}))


if __name__ == "__main__":
    main()
