"""Helpers: the subtasks of a ranking operator, which go on at another parallelism and with another backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from frozen_tables import tables_of
from operator_harness import context, cut, kept_in

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.operator import Operator
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut, StateTable

_GROUPS = 16


def backends(directory: str) -> dict[str, StateBackendOptions]:
    """Each way to keep state. RocksDB gets a folder of its own below this one at each start."""
    return {
        "columnar": StateBackendOptions(),
        "incremental": StateBackendOptions(incremental=True),
        "rocksdb": StateBackendOptions("rocksdb", directory=directory, memory_bytes=4 * 1024 * 1024),
        "crowded": kept_in("crowded", directory),
    }


class Running:
    """The subtasks of an operator with the key `k`, and a hash edge before them."""

    def __init__(self, make: Callable[[], Operator], directory: str) -> None:
        self._make = make
        self._directory = directory
        self._starts = 0
        self.operators: list[Operator] = []
        self.start(1, "columnar", [])

    def start(self, parallelism: int, backend: str, restored: Sequence[StateTable]) -> None:
        """Start anew with stored tables."""
        for operator in self.operators:
            operator.close()
        self._starts += 1
        options = backends(f"{self._directory}/{self._starts}")[backend]
        self._partitioner = HashPartitioner(("k",), _GROUPS, parallelism)
        self.operators = [self._make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self.operators):
            owned = key_group_range(subtask, _GROUPS, parallelism)
            keyed = StateKind.KEYED
            tables = [cut(each, ("k",), _GROUPS, owned) if each.kind is keyed else each for each in restored]
            where = context(subtask, parallelism, _GROUPS)
            directory = f"{options.directory}/{subtask}" if options.directory else None
            operator.open(replace(where, backend=replace(options, directory=directory)), tables)

    def restart(self, parallelism: int, backend: str) -> None:
        """Take a snapshot, and go on from it."""
        self.start(parallelism, backend, self.stored())

    def stored(self) -> list[StateTable]:
        """What a snapshot of all subtasks holds."""
        return stored_by(self.operators)

    def process(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """What all subtasks emit for a batch."""
        emitted: list[pa.RecordBatch] = []
        for target, part in self._partitioner.split(batch):
            self.operators[target].process(part, emitted.append)
        for out in emitted:
            out.validate(full=True)
            assert out.num_rows > 0
        return [row for out in emitted for row in out.to_pylist()]

    def advance(self, watermark_ms: int) -> list[dict[str, Any]]:
        """What all subtasks emit for a watermark."""
        emitted: list[pa.RecordBatch] = []
        for operator in self.operators:
            list(operator.advance_watermark(watermark_ms, emitted.append))
        return [row for out in emitted for row in out.to_pylist()]

    def close(self) -> None:
        """Close all subtasks."""
        for operator in self.operators:
            operator.close()


def stored_by(operators: Sequence[Operator]) -> list[StateTable]:
    """What a snapshot of these operators holds."""
    whole = Cut(CheckpointId(1), canonical=True)
    found = [snapshot for operator in operators if (snapshot := operator.snapshot(whole)) is not None]
    return [table for each in found for state in (*each.states, *each.layer) for table in tables_of(state)]
