"""The pipelines of random jobs, each with the rows that it must write, computed in plain Python.

`TOPOLOGIES` lists all of them. Rules for a pipeline:

- Its output does not depend on batches, on parallelism, or on the order of rows of different splits. Where it does,
  because rows are late, the tables must be consistent with each other (`Topology.given`).
- Each operator has a uid and is chained to the same operators at any parallelism. A job of another parallelism can
  therefore be restored from its checkpoints.
- `width[i]` is the parallelism of operator i. Operators take these numbers in turn.
- Pipelines with streams of changes (`changes`, `ranks`, `matches`) run exactly once. If rows were processed twice, they
  would retract rows that do not exist.
"""

from __future__ import annotations

import builtins
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from random_jobs.functions import (
    RULED,
    DelayedRows,
    FlushedRows,
    InOrder,
    KeptRows,
    Matched,
    Outside,
    OutsideSource,
    RuledTotals,
    numbered_rows,
    timed_rows,
)
from random_jobs.late_topologies import expect_idle, expect_late, given_late, idle, late
from random_jobs.pieces import (
    SCHEMA,
    SPLITS,
    Data,
    Topology,
    doubled,
    grouped,
    mapped,
    rows_of,
    source_of,
    table_of,
)
from random_jobs.relation_topologies import expect_relations, relations
from random_jobs.window_topologies import expect_windowed, given_windowed, windowed
from tidegate.api.environment import StreamEnvironment
from tidegate.api.streams.stream import Stream
from tidegate.operators.aggregates.aggregate import collect_list, count, max, min, sum, udaf
from tidegate.operators.aggregates.aggregate_function import BatchAggregateFunction, Groups, NewState
from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment
from tidegate.protocol.edges import OutputTag
from tidegate.testing.runtime.run import Rows, counted

SIDES = pa.schema([("k", pa.int64()), ("l", pa.int64()), ("r", pa.int64())])
PAIRS = pa.schema([("key", pa.int64()), ("w", pa.int64())])
MATCHED = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("l", pa.int64()), ("r", pa.int64())])
ORDERED_SOURCES = 2
"""Parallelism of the source of ordered rows, whatever is drawn.

Rows of a split that was moved twice while they were in flight are on several channels, and rows of different channels
have no order.
"""
ODD = OutputTag("odd", SCHEMA)
_STEPS_MS = (7, 2)
"""Steps of event time for each row of either source, in ms."""
_DRIFT_MS = 20
_INTERVAL_MS = 150
_ENOUGH = 10_000
"""Limit of the list, which no key reaches. Otherwise the order of splits would decide which values it has."""
TOP = 2
PARTNERS = 3
"""Number of rows of the right input. With all of them a key would have too many pairs for a run to end in time."""


def draw_inputs(chance: random.Random, rows: int) -> list[Data]:
    """Draws three inputs of different length, so that their sources finish at different times."""
    keys = chance.choice((1, 5, 17))
    return [
        [(chance.randrange(keys), chance.randrange(10)) for _ in range(length)]
        for length in (rows, builtins.max(1, rows // 3), chance.randrange(rows + 1))
    ]


def _even(batch: pa.RecordBatch) -> pa.RecordBatch:
    kept: pa.RecordBatch = batch.filter(pc.equal(pc.bit_wise_and(batch.column("v"), 1), 0))
    return kept


def _left(batch: pa.RecordBatch) -> pa.RecordBatch:
    zeros = pa.array([0] * batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays([batch.column("k"), batch.column("v"), zeros], schema=SIDES)


def _right(batch: pa.RecordBatch) -> pa.RecordBatch:
    zeros = pa.array([0] * batch.num_rows, pa.int64())
    return pa.RecordBatch.from_arrays([batch.column("k"), zeros, batch.column("v")], schema=SIDES)


def _renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([batch.column("k"), batch.column("v")], schema=PAIRS)


def _chain(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    stream = mapped(source_of(env, inputs[0], 0, width[0]).rebalance(), "double", doubled, width[1])
    totals = stream.key_by("k").aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2])
    table_of(totals, "final", width[2])


def _expect_chain(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://final": grouped((k, 2 * v) for k, v in inputs[0])}


def _diamond(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    source = source_of(env, inputs[0], 0, width[0])
    even = mapped(source.rebalance(), "even", _even, width[1])
    all_of_them = mapped(source, "double", doubled, width[2])
    joined = even.union(all_of_them).key_by("k")
    table_of(joined.aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[3]), "final", width[3])


def _expect_diamond(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    rows = [(k, v) for k, v in inputs[0] if v % 2 == 0] + [(k, 2 * v) for k, v in inputs[0]]
    return {"sim://final": grouped(rows)}


def _join(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    left = mapped(source_of(env, inputs[0], 0, width[0]), "left", _left, width[0], SIDES)
    right = mapped(source_of(env, inputs[1], 1, width[1]).rebalance(), "right", _right, width[2], SIDES)
    joined = left.union(right).key_by("k")
    totals = joined.aggregate(n=count(), l=sum("l"), r=sum("r"), emit="final", uid="agg", parallelism=width[3])
    table_of(totals.rebalance(), "final", width[0])


def _expect_join(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://final": grouped([(k, v, 0) for k, v in inputs[0]] + [(k, 0, v) for k, v in inputs[1]])}


def _fan_out(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    source = source_of(env, inputs[0], 0, width[0])
    running = source.key_by("k").aggregate(n=count(), t=sum("v"), uid="running", parallelism=width[1])
    table_of(running, "running", width[1], keys=("k",))
    table_of(mapped(source.rebalance(), "double", doubled, width[2]), "rows", width[2])


def _expect_fan_out(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://running": grouped(inputs[0]), "sim://rows": counted([(k, 2 * v) for k, v in inputs[0]])}


def _union(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    first, second, third = (source_of(env, data, i, width[i]) for i, data in enumerate(inputs))
    both = first.union(second, third)
    table_of(mapped(both.rebalance(), "even", _even, width[3]), "rows", width[3])


def _expect_union(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://rows": counted([row for data in inputs for row in data if row[1] % 2 == 0])}


def _broadcast(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    source = source_of(env, inputs[0], 0, width[0])
    everywhere = mapped(source.broadcast(), "double", doubled, width[1])
    totals = everywhere.key_by("k").aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2])
    table_of(totals, "final", width[2])


def _expect_broadcast(inputs: Sequence[Data], width: Sequence[int]) -> Rows:
    return {"sim://final": grouped((k, 2 * v) for k, v in inputs[0] for _ in range(width[1]))}


def _connect(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    left = source_of(env, inputs[0], 0, width[0])
    right = mapped(source_of(env, inputs[1], 1, width[1]), "rename", _renamed, width[1], PAIRS)
    matched = (
        left.connect(right).key_by("k", "key").process(Matched(), schema=MATCHED, uid="match", parallelism=width[2])
    )
    table_of(matched.rebalance(), "final", width[3])


def _timers(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    source = env.from_batches(
        timed_rows(inputs[0]),
        splits=SPLITS,
        timestamp="t",
        max_out_of_orderness=20,
        uid="source0",
        name="source0",
        parallelism=width[0],
    )
    delayed = source.key_by("k").process(DelayedRows(), schema=SCHEMA, uid="delay", parallelism=width[1])
    table_of(delayed.rebalance(), "rows", width[2])


def _flushes(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    first, second = (source_of(env, inputs[i], i, width[i]) for i in (0, 2))
    keyed = first.union(second).key_by("k")
    flushed = keyed.process(FlushedRows(), schema=SCHEMA, uid="flush", parallelism=width[1], fire_at_end=True)
    table_of(flushed, "rows", width[1])


def _expect_flushes(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://rows": counted([(k, 2 * v) for data in (inputs[0], inputs[2]) for k, v in data])}


def _expect_doubled(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://rows": counted([(k, 2 * v) for k, v in inputs[0]])}


def _induced(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    outside = Outside()
    env.add_master_hook(outside)
    source = OutsideSource(outside, rows_of(inputs[0]), SPLITS)
    stream = env.from_source(source, uid="source0", name="source0", parallelism=width[0])
    other = source_of(env, inputs[1], 1, width[1])
    totals = (
        stream.union(other).key_by("k").aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2])
    )
    table_of(totals, "final", width[2])


def _rules(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    rows = mapped(source_of(env, inputs[0], 0, width[0]).rebalance(), "double", doubled, width[1])
    rules = source_of(env, inputs[1], 1, width[3]).broadcast()
    totals = rows.key_by("k").connect(rules).process(RuledTotals(), schema=RULED, uid="ruled", parallelism=width[2])
    table_of(totals, "final", width[2])


def _expect_rules(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    groups: dict[int, list[int]] = {}
    for key, value in inputs[0]:
        groups.setdefault(key, []).append(2 * value)
    rules = [v for _, v in inputs[1]]
    of_all = (len({k for k, _ in inputs[1]}), len(rules), builtins.sum(rules))
    return {"sim://final": counted([(k, len(of_key), builtins.sum(of_key), *of_all) for k, of_key in groups.items()])}


def _kept(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    rows = source_of(env, inputs[0], 0, width[0]).rebalance()
    kept = rows.process(KeptRows(), schema=SCHEMA, uid="kept", parallelism=width[1])
    table_of(kept, "rows", width[1])


def _expect_kept(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://rows": counted([(k, 2 * v) for k, v in inputs[0]] + [(-1, 1)] * len(inputs[0]))}


def _expect_induced(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://final": grouped([*inputs[0], *inputs[1]])}


def _ordered(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    source = source_of(env, numbered_rows(len(inputs[0]), SPLITS), 0, ORDERED_SOURCES)
    checked = source.key_by("k").process(InOrder(), schema=SCHEMA, uid="order", parallelism=width[1])
    table_of(checked.rebalance(), "rows", width[2])


def _expect_ordered(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {"sim://rows": counted(numbered_rows(len(inputs[0]), SPLITS))}


def _pipelines(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds three pipelines without a channel between them, which are three regions."""
    _chain(env, inputs, width)
    keyed = source_of(env, inputs[1], 1, width[1]).key_by("k")
    table_of(keyed.aggregate(n=count(), t=sum("v"), uid="running", parallelism=width[3]), "running", width[3], ("k",))
    table_of(mapped(source_of(env, inputs[2], 2, width[2]).rebalance(), "even", _even, width[0]), "rows", width[0])


def _expect_pipelines(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    return {
        "sim://final": grouped((k, 2 * v) for k, v in inputs[0]),
        "sim://running": grouped(inputs[1]),
        "sim://rows": counted([row for row in inputs[2] if row[1] % 2 == 0]),
    }


def _subtasks(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds two chained vertices, so that each subtask is a region. Union list state in one of them connects its
    subtasks.
    """
    table_of(mapped(source_of(env, inputs[0], 0, width[0]), "double", doubled, width[0]), "rows", width[0])
    kept = source_of(env, inputs[1], 1, width[1]).process(KeptRows(), schema=SCHEMA, uid="kept", parallelism=width[1])
    table_of(kept, "kept", width[1])


def _expect_subtasks(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    kept = [(k, 2 * v) for k, v in inputs[1]] + [(-1, 1)] * len(inputs[1])
    return {"sim://rows": counted([(k, 2 * v) for k, v in inputs[0]]), "sim://kept": counted(kept)}


class Parted(ProcessFunction):
    """Doubles even values, and emits odd values under a tag."""

    def process(self, row: dict[str, Any], context: ProcessContext) -> Iterator[dict[str, Any]]:
        """Emits the row on one of the two outputs."""
        if row["v"] % 2:
            context.emit(ODD, row)
        else:
            yield {**row, "v": 2 * row["v"]}


def aside(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds a union of both outputs of one operator, so that two edges connect the same operators."""
    rows = source_of(env, inputs[0], 0, width[0]).rebalance()
    parted = rows.process(Parted(), schema=SCHEMA, uid="part", parallelism=width[1], side_outputs=[ODD])
    odd = parted.side_output("odd")
    both = parted.union(odd).key_by("k")
    table_of(both.aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2]), "final", width[2])
    table_of(mapped(odd.rebalance(), "double", doubled, width[3]), "rows", width[3])


def expect_aside(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes totals of all rows, with even values doubled, and the odd rows, doubled."""
    parted = [(k, v if v % 2 else 2 * v) for k, v in inputs[0]]
    return {"sim://final": grouped(parted), "sim://rows": counted([(k, 2 * v) for k, v in inputs[0] if v % 2])}


def paced(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds totals by key of two sources in one watermark group, and the rows of the source that is held.

    Event time advances quickly in the first source and slowly in the second, so the first one is held most of the time.
    The output does not depend on event time, because every row counts whenever it is read.
    """
    quick, slow = (_source(env, inputs[number], number, width[number]) for number in range(2))
    totals = (
        quick.union(slow).key_by("k").aggregate(n=count(), t=sum("v"), emit="final", uid="agg", parallelism=width[2])
    )
    table_of(totals, "final", width[2])
    table_of(quick.rebalance(), "rows", width[3])


def expect_paced(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes output in which every row counts once."""
    rows = [(*pair, at_ms) for pair, at_ms in zip(inputs[0], _times(inputs[0], 0), strict=True)]
    return {"sim://final": grouped([*inputs[0], *inputs[1]]), "sim://rows": counted(rows)}


def _times(data: Data, number: int) -> list[int]:
    return [_STEPS_MS[number] * row for row in range(len(data))]


def _source(env: StreamEnvironment, data: Data, number: int, width: int) -> Stream:
    columns = {"k": [k for k, _ in data], "v": [v for _, v in data], "t": _times(data, number)}
    table = pa.table({name: pa.array(column, pa.int64()) for name, column in columns.items()})
    source = env.from_batches(table, splits=SPLITS, uid=f"source{number}", name=f"source{number}", parallelism=width)
    alignment = WatermarkAlignment("pace", _DRIFT_MS, _INTERVAL_MS)
    return source.assign_timestamps("t", alignment=alignment, uid=f"source{number}-timestamps")


class Histogram(BatchAggregateFunction):
    """Counts how often each of the values 0 to 9 occurs, as a text. Its state is a list."""

    state = pa.schema({"counts": pa.list_(pa.int64())})
    output = pa.string()
    initial: ClassVar = {"counts": [0] * 10}

    def accumulate(self, state: pa.RecordBatch, groups: Groups, *columns: pa.Array) -> NewState:
        """Counts values."""
        return self._plus(state, groups, np.eye(10, dtype=np.int64)[columns[0].to_numpy()])

    def merge(self, state: pa.RecordBatch, groups: Groups, other: pa.RecordBatch) -> NewState:
        """Adds counts."""
        return self._plus(state, groups, self._counts(other))

    def result(self, state: pa.RecordBatch) -> Any:
        """Returns the counts in order, as a text."""
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
    """Builds running aggregates for each key, and a histogram of all rows."""
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
    """Computes the output in plain Python."""
    groups: dict[int, list[int]] = {}
    for key, value in inputs[0]:
        groups.setdefault(key, []).append(value)
    running = [
        (key, f"value {sorted(of)[0]}", f"value {sorted(of)[-1]}", len(of), builtins.sum(of), _histogram(of))
        for key, of in groups.items()
    ]
    every = [value for _, value in inputs[0]]
    return {"sim://running": counted(running), "sim://final": counted([(_histogram(every),)])}


def _histogram(values: Sequence[int]) -> str:
    return _text(values.count(value) for value in range(10))


def changes(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds an aggregate of a running aggregate, whose rows change: the number of keys with each greatest value."""
    source = source_of(env, inputs[0], 0, width[0])
    best = source.key_by("k").aggregate(best=max("v"), emit="changes", uid="best", parallelism=width[1])
    counts = best.key_by("best").aggregate(n=count(), emit="changes", uid="counts", parallelism=width[2])
    table_of(counts, "running", width[2], keys=("best",))


def expect_changes(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes the counts. A value that is no longer the greatest of any key has no row."""
    best: dict[int, int] = {}
    for key, value in inputs[0]:
        best[key] = value if key not in best or value > best[key] else best[key]
    return {"sim://running": counted(list(Counter(best.values()).items()))}


def ranks(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds the greatest values of each key, and their sum."""
    source = source_of(env, inputs[0], 0, width[0])
    top = source.key_by("k").top_n(TOP, "v", rank="rank", uid="top", parallelism=width[1])
    table_of(top, "running", width[1], keys=("k", "rank"))
    group = top.with_columns((pl.col("k") % 3).alias("g"), uid="group", parallelism=width[1]).key_by("g")
    totals = group.aggregate(n=count(), t=sum("v"), emit="final", uid="totals", parallelism=width[2])
    table_of(totals, "final", width[2])


def expect_ranks(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes the ranking, in which equal values have consecutive ranks."""
    rows: list[tuple[int, ...]] = []
    totals: dict[int, tuple[int, int]] = {}
    for key in {key for key, _ in inputs[0]}:
        for rank, value in enumerate(sorted((v for k, v in inputs[0] if k == key), reverse=True)[:TOP], start=1):
            rows.append((key, value, rank))
            number, total = totals.get(key % 3, (0, 0))
            totals[key % 3] = number + 1, total + value
    return {"sim://running": counted(rows), "sim://final": counted([(g, *of) for g, of in totals.items()])}


def matches(env: StreamEnvironment, inputs: Sequence[Data], width: Sequence[int]) -> None:
    """Builds a join without a window, which retracts rows without a partner, and totals of each key."""
    left = source_of(env, inputs[0], 0, width[0])
    right = source_of(env, inputs[1][:PARTNERS], 1, width[1])
    joined = left.join(right, on="k", how="left", uid="join", parallelism=width[2])
    totals = joined.key_by("k").aggregate(
        n=count(), l=sum("v"), r=sum("v_right"), emit="changes", uid="totals", parallelism=width[3]
    )
    table_of(totals, "running", width[3], keys=("k",))


def expect_matches(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    """Computes totals of the keys of the left input, with pairs or with nulls."""
    found: list[tuple[int | None, ...]] = []
    for key in {key for key, _ in inputs[0]}:
        mine, theirs = ([v for k, v in data if k == key] for data in (inputs[0], inputs[1][:PARTNERS]))
        times = builtins.max(1, len(theirs))
        total = len(mine) * builtins.sum(theirs) if theirs else None
        found.append((key, len(mine) * times, builtins.sum(mine) * times, total))
    return {"sim://running": counted(found)}


TOPOLOGIES: Mapping[str, Topology] = {
    "chain": Topology(_chain, _expect_chain),
    "diamond": Topology(_diamond, _expect_diamond),
    "join": Topology(_join, _expect_join),
    "fan-out": Topology(_fan_out, _expect_fan_out),
    "union": Topology(_union, _expect_union),
    "connect": Topology(_connect, _expect_join),
    "timers": Topology(_timers, _expect_doubled),
    "flushes": Topology(_flushes, _expect_flushes),
    "induced": Topology(_induced, _expect_induced),
    "broadcast": Topology(_broadcast, _expect_broadcast, rescalable=False),
    "rules": Topology(_rules, _expect_rules),
    "kept": Topology(_kept, _expect_kept),
    "ordered": Topology(_ordered, _expect_ordered),
    "pipelines": Topology(_pipelines, _expect_pipelines),
    "subtasks": Topology(_subtasks, _expect_subtasks),
    "aside": Topology(aside, expect_aside),
    "late": Topology(late, expect_late, given=given_late),
    "changes": Topology(changes, expect_changes),
    "ranks": Topology(ranks, expect_ranks),
    "matches": Topology(matches, expect_matches),
    "windows": Topology(windowed, expect_windowed, given=given_windowed),
    "texts": Topology(texts, expect_texts),
    "paced": Topology(paced, expect_paced),
    "relations": Topology(relations, expect_relations),
    "idle": Topology(idle, expect_idle),
}
