"""Pipelines for random simulations, each with the rows that it must write, computed in plain Python.

Rules: what a pipeline writes does not depend on how rows are batched, on parallelism, or on the order of rows of
different splits. Where it does, because rows are late, what it has written must fit together (`Topology.given`). Every
operator has a uid, and is chained to the same ones at any parallelism, so that a job of another one can be restored
from its checkpoints.
`width[i]` is the parallelism of the i-th operator, taken in turn.
"""

from __future__ import annotations

import builtins
import random
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.api.environment import StreamEnvironment
from tidegate.operators.aggregates.aggregate import count, sum
from tidegate.testing.pipelines.aggregate_topologies import expect_texts, texts
from tidegate.testing.pipelines.change_topologies import (
    changes,
    expect_changes,
    expect_matches,
    expect_ranks,
    matches,
    ranks,
)
from tidegate.testing.pipelines.late_topologies import expect_idle, expect_late, given_late, idle, late
from tidegate.testing.pipelines.operator_states import RULED, KeptRows, RuledTotals
from tidegate.testing.pipelines.paced_topology import expect_paced, paced
from tidegate.testing.pipelines.pieces import (
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
from tidegate.testing.pipelines.pipeline_functions import (
    DelayedRows,
    FlushedRows,
    InOrder,
    Matched,
    Outside,
    OutsideSource,
    numbered_rows,
    timed_rows,
)
from tidegate.testing.pipelines.relation_topologies import expect_relations, relations
from tidegate.testing.pipelines.side_topologies import aside, expect_aside
from tidegate.testing.pipelines.window_topologies import expect_windowed, given_windowed, windowed
from tidegate.testing.runtime.run import Rows, counted

SIDES = pa.schema([("k", pa.int64()), ("l", pa.int64()), ("r", pa.int64())])
PAIRS = pa.schema([("key", pa.int64()), ("w", pa.int64())])
MATCHED = pa.schema([("k", pa.int64()), ("n", pa.int64()), ("l", pa.int64()), ("r", pa.int64())])
ORDERED_SOURCES = 2
"""Subtasks that read ordered rows, whatever is drawn: rows of a split that was moved twice while they were in flight
lie on several channels, and between channels there is no order."""


def draw_inputs(chance: random.Random, rows: int) -> list[Data]:
    """Three inputs of different length, so that their sources finish at different times."""
    keys = chance.choice((1, 5, 17))
    return [
        [(chance.randrange(keys), chance.randrange(10)) for _ in range(length)]
        for length in (rows, max(1, rows // 3), chance.randrange(rows + 1))
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
    """Three pipelines without a channel between them: three regions."""
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
    """Everything is chained: each subtask is a region. One of two vertices has union list state, which ties them."""
    table_of(mapped(source_of(env, inputs[0], 0, width[0]), "double", doubled, width[0]), "rows", width[0])
    kept = source_of(env, inputs[1], 1, width[1]).process(KeptRows(), schema=SCHEMA, uid="kept", parallelism=width[1])
    table_of(kept, "kept", width[1])


def _expect_subtasks(inputs: Sequence[Data], _: Sequence[int]) -> Rows:
    kept = [(k, 2 * v) for k, v in inputs[1]] + [(-1, 1)] * len(inputs[1])
    return {"sim://rows": counted([(k, 2 * v) for k, v in inputs[0]]), "sim://kept": counted(kept)}


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
