"""Pays ahead for what a fresh process needs before its first row: imports, and kernels loaded from their cache."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pyarrow as pa

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.hosts.freed_memory import keep_freed_memory
from tidegate.actors.operators.aggregates import aggregate as aggregates
from tidegate.actors.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.actors.operators.operator import OperatorContext
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.actors.runtimes.ray.process.late_pandas import import_pandas_late, is_all_ours
from tidegate.actors.task.pipeline.partitioners import make_partitioner
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, StateTable

_KEY_TYPES = (pa.int64(), pa.string())
_VALUE_TYPES = (pa.int64(), pa.float64())


def warm_up() -> None:
    """Hash, partition, index, aggregate and restore one tiny batch of each of the usual types."""
    for key_type in _KEY_TYPES:
        for value_type in _VALUE_TYPES:
            batch = pa.record_batch(
                {"k": pa.array([1, 2, 3, 1]).cast(key_type), "v": pa.array([1, 2, 3, 4], value_type)}
            )
            operator = _opened(())
            operator.process(batch, lambda result: None)
            frozen = operator.snapshot(Cut(CheckpointId(1))).states
            _opened([StateTable(s.state, s.kind, chunk.rows) for s in frozen for chunk in s.chunks()])
            make_partitioner(Partitioning(PartitioningKind.HASH, ("k",)), 0, 2, 128).split(batch)


def prepare(spare: bool, graph: JobGraph) -> None:
    """Prepare a worker's process. One that does not get subtasks at once pays ahead for its first rows."""
    keep_freed_memory()
    if not graph.has_nanoseconds and is_all_ours(graph):
        import_pandas_late()
    if spare:
        warm_up()
    keep_what_is_loaded()


def keep_what_is_loaded() -> None:
    """Tell the garbage collector to look no more at what is there now: it stays.

    With the libraries that are loaded a full collection takes more than 60 ms, in the middle of a restore or a batch.
    None is made here either: what an import leaves behind is a few objects, and each process of a job would pay for it.
    """
    gc.freeze()


def _opened(tables: Sequence[StateTable]) -> KeyedAggregate:
    operator = KeyedAggregate(
        ("k",),
        {
            "count": aggregates.count(),
            "sum": aggregates.sum("v"),
            "min": aggregates.min("v"),
            "max": aggregates.max("v"),
            "mean": aggregates.mean("v"),
        },
    )
    operator.open(OperatorContext(OperatorUid("warm-up"), "warm-up", SubtaskIndex(0), 1, 128), tables)
    return operator
