"""Helpers: the subtasks of a join, whose rows come in by key, and which may be restored from a savepoint."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
from frozen_tables import tables_of
from operator_harness import context, cut, kept_in

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.joins.join_operator import JoinOperator
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import Cut

_GROUPS = 16


class JoinSubtasks:
    """Subtasks of a join with these keys, left and right. It begins in memory, with one."""

    def __init__(self, make: Callable[[], JoinOperator], keys: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        self._make = make
        self._keys = keys
        self._operators: list[JoinOperator] = []
        self.restore(1, "columnar")

    def restore(self, parallelism: int, backend: str) -> None:
        """Go on from a savepoint; no watermark comes before the next one, as it may be in a job."""
        whole = Cut(CheckpointId(1), canonical=True)
        tables: list[Any] = [t for o in self._operators for state in o.snapshot(whole).states for t in tables_of(state)]
        self.close()
        self._operators = [self._make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self._operators):
            options = kept_in(backend, tempfile.mkdtemp())
            owned = key_group_range(subtask, _GROUPS, parallelism)
            keyed = [cut(table, self._keys[0], _GROUPS, owned) for table in tables if table.kind is StateKind.KEYED]
            restored = keyed + [table for table in tables if table.kind is not StateKind.KEYED]
            operator.open(replace(context(subtask, parallelism, _GROUPS), backend=options), restored)

    def process(self, side: int, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        """What is emitted for a batch of one input."""
        emitted: list[pa.RecordBatch] = []
        for target, part in HashPartitioner(self._keys[side], _GROUPS, len(self._operators)).split(batch):
            self._operators[target].process_input(side, part, emitted.append)
        return _checked(emitted)

    def advance(self, watermark_ms: int) -> list[pa.RecordBatch]:
        """What is emitted for a watermark of both inputs."""
        emitted: list[pa.RecordBatch] = []
        for operator in self._operators:
            list(operator.advance_watermark(watermark_ms, emitted.append))
        return _checked(emitted)

    @property
    def stored_rows(self) -> dict[str, int]:
        """How many rows a savepoint has, by state."""
        found: dict[str, int] = {}
        for operator in self._operators:
            for state in operator.snapshot(Cut(CheckpointId(1), canonical=True)).states:
                for table in tables_of(state):
                    found[table.state] = found.get(table.state, 0) + table.rows.num_rows
        return found

    def close(self) -> None:
        """End of the job."""
        for operator in self._operators:
            operator.close()


def _checked(emitted: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    for batch in emitted:
        batch.validate(full=True)
        assert batch.num_rows > 0
    return emitted
