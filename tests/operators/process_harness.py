"""Helpers: run a process function as one or several subtasks, with time, and move its state to another parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from frozen_tables import tables_of
from operator_harness import CUT, cut

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.functions.process_functions import CoProcessFunction, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator, process_operator
from tidegate.operators.operator import OperatorContext, ProcessingTime
from tidegate.protocol.edges import OutputTag
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.key_groups import key_group_range
from tidegate.storage.state.snapshot import StateTable

MAX_PARALLELISM = 16
Row = dict[str, Any]


class Driven:
    """The subtasks of one process operator. `out` collects the rows that they emit."""

    def __init__(
        self,
        function: ProcessFunction | CoProcessFunction,
        keys: Sequence[tuple[str, ...]] = (("k",),),
        timestamps: Sequence[str | None] | None = None,
        parallelism: int = 1,
        restored: Sequence[StateTable] = (),
        schema: pa.Schema | None = None,
        backend: StateBackendOptions | None = None,
        now_ms: int = 0,
        fire_at_end: bool = False,
        side_outputs: Sequence[OutputTag] = (),
        errors_to: Sequence[OutputTag | None] = (),
    ) -> None:
        self.out: list[Row] = []
        self.aside: list[tuple[str, Row]] = []
        self.batches: list[pa.RecordBatch] = []
        self._time = ProcessingTime(now_ms)
        self._partitioners = [HashPartitioner(k, MAX_PARALLELISM, parallelism) if k else None for k in keys]
        self.operators: list[ProcessOperator] = []
        for subtask in range(parallelism):
            operator = process_operator(
                function, keys, timestamps or [None] * len(keys), schema, side_outputs, fire_at_end, errors_to
            )
            uid, index = OperatorUid("op-uid"), SubtaskIndex(subtask)
            owned = key_group_range(subtask, MAX_PARALLELISM, parallelism)
            tables = [part for table in restored if (part := cut(table, keys[0], MAX_PARALLELISM, owned)).rows.num_rows]
            options = StateBackendOptions() if backend is None else backend
            if options.directory is not None:
                options = replace(options, directory=f"{options.directory}/{subtask}")
            place = uid, "op", index, parallelism, MAX_PARALLELISM, self._time
            operator.open(OperatorContext(*place, backend=options, emit_aside=self._emit_aside), tables)
            self.operators.append(operator)

    def rows(self, *rows: Row, schema: pa.Schema | None = None, input_index: int = 0) -> list[Row]:
        """Process rows that came as one batch; what came of it."""
        return self.batch(pa.RecordBatch.from_pylist(list(rows), schema), input_index)

    def batch(self, batch: pa.RecordBatch, input_index: int = 0) -> list[Row]:
        """Process a batch; what came of it."""
        before = len(self.out)
        partitioner = self._partitioners[input_index]
        for target, part in [(0, batch)] if partitioner is None else partitioner.split(batch):
            self.operators[target].process_input(input_index, part, self._emit)
        return self.out[before:]

    def watermark(self, watermark_ms: int) -> list[Row]:
        """Event time advances."""
        before = len(self.out)
        for operator in self.operators:
            list(operator.advance_watermark(watermark_ms, self._emit))
        return self.out[before:]

    def clock(self, now_ms: int) -> list[Row]:
        """Processing time advances; each operator is called exactly when it asked for that."""
        before = len(self.out)
        self._time.now_ms = now_ms
        for operator in self.operators:
            due_ms = operator.next_processing_time_ms()
            if due_ms is not None and due_ms <= now_ms:
                list(operator.on_processing_time(now_ms, self._emit))
        return self.out[before:]

    def end(self) -> list[Row]:
        """The input ends."""
        before = len(self.out)
        self.watermark(MAX_WATERMARK_MS)
        for operator in self.operators:
            list(operator.finish(self._emit))
        return self.out[before:]

    def snapshot(self) -> list[StateTable]:
        """The stored tables of all subtasks."""
        snapshots = [operator.snapshot(CUT) for operator in self.operators]
        states = [state for snapshot in snapshots if snapshot is not None for state in snapshot.states]
        tables = [table for state in states for table in tables_of(state)]
        for table in tables:
            assert table.kind is StateKind.KEYED
            assert table.rows.num_rows > 0
            table.rows.validate(full=True)
        return tables

    def _emit_aside(self, tag: str, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.aside += [(tag, row) for row in batch.to_pylist()]

    def _emit(self, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        assert batch.num_rows > 0
        self.batches.append(batch)
        self.out.extend(batch.to_pylist())
