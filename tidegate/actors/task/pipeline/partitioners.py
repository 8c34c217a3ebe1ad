"""Partitioners: split a batch over the subtasks at the other end of an edge.

The task's `Emitter` has one for each outgoing edge. Rules:

- Rows on their way to one subtask keep their order.
- Every row goes to exactly one subtask; if broadcast, to every one.
- No batch that is handed out is empty. Each owns its memory: a slice would drag its larger parent into a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from tidegate.operators.local_aggregation.combining_rule import may_pay
from tidegate.operators.local_aggregation.local_aggregation import LocalAggregation
from tidegate.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.state.kernels.columns import key_forms
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.partition import compact, gather, partition, subtask_table

if TYPE_CHECKING:
    from tidegate.operators.local_aggregation.combiner import Combiner

Split = list[tuple[int, pa.RecordBatch]]


class Partitioner(Protocol):
    """Decides which rows of a batch go to which subtask. One per task and outgoing edge."""

    def split(self, batch: pa.RecordBatch) -> Split:
        """Pairs of a downstream subtask and a non-empty, compact batch for it; each subtask at most once."""
        ...


class HashPartitioner:
    """Sends a row to the subtask that owns the key group of its key."""

    def __init__(self, columns: Sequence[str], max_parallelism: int, parallelism: int) -> None:
        self._columns = tuple(columns)
        self._parallelism = parallelism
        self._table = subtask_table(max_parallelism, parallelism)
        self._checked: pa.Schema | None = None
        """The schema of the last batch whose columns were checked."""

    def split(self, batch: pa.RecordBatch) -> Split:
        """ConfigurationError when a key column is missing or of a type that cannot be a key."""
        if self._parallelism == 1 or batch.num_rows == 0:
            self._check(batch)
            return [(0, compact(batch))] if batch.num_rows else []
        parts = partition(hash_columns(batch, self._columns), self._table, self._parallelism)
        bounds = parts.bounds
        filled = [t for t in range(self._parallelism) if bounds[t] < bounds[t + 1]]
        if len(filled) == 1:
            return [(filled[0], compact(batch))]
        return [(t, gather(batch, parts.rows[bounds[t] : bounds[t + 1]])) for t in filled]

    def _check(self, batch: pa.RecordBatch) -> None:
        """Refuse what cannot be a key, where no hash does so."""
        if self._checked is None or not self._checked.equals(batch.schema):
            key_forms(batch.slice(0, 0), self._columns)
            self._checked = batch.schema


class RebalancePartitioner:
    """Sends whole batches to one subtask after the other."""

    def __init__(self, parallelism: int, start: int) -> None:
        assert 0 <= start < parallelism
        self._parallelism = parallelism
        self._next = start

    def split(self, batch: pa.RecordBatch) -> Split:
        """The batch, for the subtask whose turn it is."""
        if batch.num_rows == 0:
            return []
        target = self._next
        self._next = (target + 1) % self._parallelism
        return [(target, compact(batch))]


class BroadcastPartitioner:
    """Sends every batch to every subtask."""

    def __init__(self, parallelism: int) -> None:
        self._parallelism = parallelism

    def split(self, batch: pa.RecordBatch) -> Split:
        """The same batch for each subtask."""
        if batch.num_rows == 0:
            return []
        whole = compact(batch)
        return [(target, whole) for target in range(self._parallelism)]


class ForwardPartitioner:
    """Sends every batch to the subtask of the same index."""

    def __init__(self, subtask: int) -> None:
        self._subtask = subtask

    def split(self, batch: pa.RecordBatch) -> Split:
        """The batch, for the same subtask."""
        return [(self._subtask, compact(batch))] if batch.num_rows else []


class CombiningPartitioner:
    """Combines the rows of each batch, where that pays, before another partitioner splits it."""

    def __init__(self, combines: LocalAggregation, partitioner: Partitioner) -> None:
        self._combines = combines
        self._combiner: Combiner | None = None
        self._partitioner = partitioner

    def split(self, batch: pa.RecordBatch) -> Split:
        """As of the other partitioner."""
        if may_pay(self._combines.mode, batch.num_rows):
            if self._combiner is None:
                # It brings along all aggregates and windows, which the task of a source has no use for.
                from tidegate.operators.local_aggregation.combiner import Combiner

                self._combiner = Combiner(self._combines)
            batch = self._combiner.combine(batch)
        return self._partitioner.split(batch)


def make_partitioner(spec: Partitioning, subtask: int, parallelism_down: int, max_parallelism: int) -> Partitioner:
    """The partitioner of one upstream subtask. Rebalancing starts at another subtask for each of them."""
    match spec.kind:
        case PartitioningKind.HASH:
            return HashPartitioner(spec.keys, max_parallelism, parallelism_down)
        case PartitioningKind.REBALANCE:
            return RebalancePartitioner(parallelism_down, subtask % parallelism_down)
        case PartitioningKind.BROADCAST:
            return BroadcastPartitioner(parallelism_down)
        case PartitioningKind.FORWARD:
            assert subtask < parallelism_down, "a forward edge joins equal parallelisms"
            return ForwardPartitioner(subtask)
