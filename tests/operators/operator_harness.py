"""Helpers: open operators as subtasks, route batches to them, and move their state to another parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from frozen_tables import tables_of

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.operator import Operator, OperatorContext
from tidegate.state.common.options import StateBackendOptions
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, StateTable

CUT = Cut(CheckpointId(1))
"""All of the state."""


def kept_in(backend: str, directory: str) -> StateBackendOptions:
    """Options by name: "columnar", "rocksdb", or "crowded": RocksDB where no row stays in memory after a batch."""
    if backend == "crowded":
        return StateBackendOptions("rocksdb", directory=directory, cache_bytes=1)
    return StateBackendOptions(backend, directory=directory)  # type: ignore[arg-type]


def context(subtask: int = 0, parallelism: int = 1, max_parallelism: int = 16) -> OperatorContext:
    """Where an operator called `op` runs."""
    return OperatorContext(OperatorUid("op-uid"), "op", SubtaskIndex(subtask), parallelism, max_parallelism)


def opened(operator: Operator, restored: Sequence[StateTable] = ()) -> Operator:
    """The operator, opened as the only subtask."""
    operator.open(context(), restored)
    return operator


def run(operator: Operator, batches: Iterable[pa.RecordBatch], finish: bool = True) -> list[pa.RecordBatch]:
    """What an opened operator emits for some batches, and at the end of its input."""
    emitted: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            operator.process(batch, emitted.append)
    if finish:
        list(operator.finish(emitted.append))
    for batch in emitted:
        batch.validate(full=True)
        assert batch.num_rows > 0
    return emitted


class Subtasks:
    """The parallel instances of one keyed operator, with a hash edge before them."""

    def __init__(
        self,
        make: Callable[[], Operator],
        keys: tuple[str, ...],
        parallelism: int,
        max_parallelism: int = 16,
        restored: Sequence[StateTable] = (),
    ) -> None:
        self.emitted: list[pa.RecordBatch] = []
        self._max_parallelism = max_parallelism
        self._partitioner = HashPartitioner(keys, max_parallelism, parallelism)
        self._operators = [make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self._operators):
            owned = key_group_range(subtask, max_parallelism, parallelism)
            tables = [cut(table, keys, max_parallelism, owned) for table in restored]
            operator.open(context(subtask, parallelism, max_parallelism), tables)

    def process(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Route batches to the instances."""
        for batch in batches:
            for target, part in self._partitioner.split(batch):
                self._operators[target].process(part, self.emitted.append)

    def finish(self) -> None:
        """End of input for all."""
        for operator in self._operators:
            list(operator.finish(self.emitted.append))

    def snapshot(self) -> list[StateTable]:
        """The stored tables of all instances."""
        snapshots = [operator.snapshot(CUT) for operator in self._operators]
        states = [state for snapshot in snapshots if snapshot is not None for state in snapshot.states]
        return [table for state in states for table in tables_of(state)]


def cut(table: StateTable, keys: Sequence[str], max_parallelism: int, groups: range) -> StateTable:
    """The rows of some key groups, as recovery cuts them; all where the keys are others, which an operator refuses."""
    assert table.kind is StateKind.KEYED
    if not set(keys) <= set(table.rows.schema.names):
        return table
    found = hash_columns(table.rows, list(keys)) % np.uint64(max_parallelism)
    assert np.all(np.diff(found.astype(np.int64)) >= 0), "rows are not sorted by key group"
    start, stop = np.searchsorted(found, [groups.start, groups.stop])
    return replace(table, rows=table.rows.slice(start, stop - start))
