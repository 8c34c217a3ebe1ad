"""Helpers: window operators as subtasks on any backend: rows and watermarks go in, and their state moves on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
from frozen_tables import tables_of
from hypothesis import strategies as st
from operator_harness import context, kept_in

from tidegate.actors.task.emitter import HashPartitioner
from tidegate.operators.operator import Operator
from tidegate.operators.windows.count_windows import FunctionCounts
from tidegate.operators.windows.function_windows import FunctionSessions, FunctionWindows
from tidegate.operators.windows.row_windows import WindowBuffer
from tidegate.operators.windows.sliding_counts import FunctionSlidingCounts
from tidegate.operators.windows.window_calls import WindowCalls
from tidegate.operators.windows.window_specs import (
    Clock,
    Count,
    Cumulating,
    EventTimeWindow,
    Session,
    Sliding,
    Tumbling,
)
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.key_groups import key_group_range, key_groups_of
from tidegate.storage.state.snapshot import Cut, StateTable

GROUPS = 8
Backend = Literal["columnar", "rocksdb", "crowded"]
"""As `kept_in` has them."""


def told_of(values: Sequence[int | None]) -> tuple[Any, ...]:
    """How many rows there are, and sum, minimum and mean of their values."""
    known = [value for value in values if value is not None]
    return (len(values), *((sum(known), min(known), sum(known) / len(known)) if known else (None, None, None)))


class Windows:
    """The subtasks of a window operator, keyed by `k`, or alone without a key. Output: `rows` and `aside`."""

    def __init__(
        self,
        make: Callable[[], Operator],
        keys: tuple[str, ...] = ("k",),
        parallelism: int = 1,
        backend: Backend = "columnar",
        restored: Sequence[StateTable] = (),
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.aside: list[dict[str, Any]] = []
        self._make, self._keys = make, keys
        self._parallelism = parallelism
        self._partitioner = HashPartitioner(keys, GROUPS, parallelism)
        self._folders = [tempfile.TemporaryDirectory(prefix="tidegate-test-") for _ in range(parallelism)]
        self.operators = [make() for _ in range(parallelism)]
        for subtask, operator in enumerate(self.operators):
            options = kept_in(backend, self._folders[subtask].name)
            place = replace(context(subtask, parallelism, GROUPS), backend=options, emit_aside=self._emit_aside)
            groups = key_group_range(subtask, GROUPS, parallelism)
            operator.open(place, [table for each in restored if (table := _of(each, groups, keys)) is not None])

    def process(self, batch: pa.RecordBatch) -> None:
        """Rows, each for the subtask of its key."""
        parts = self._partitioner.split(batch) if self._keys else [(0, batch)]
        for target, part in parts:
            self.operators[target].process(part, self.emit)

    def watermark(self, moment_ms: int, steps: int | None = None) -> None:
        """A watermark for all, or only the first steps for it."""
        for operator in self.operators:
            for taken, _ in enumerate(operator.advance_watermark(moment_ms, self.emit), start=1):
                if taken == steps:
                    break

    def tick(self, now_ms: int, steps: int | None = None) -> None:
        """Processing time has come for all that wait for it, or only the first steps are taken."""
        for operator in self.operators:
            operator.context.time.now_ms = now_ms
            due_ms = operator.next_processing_time_ms()
            if due_ms is None or due_ms > now_ms:
                continue
            for taken, _ in enumerate(operator.on_processing_time(now_ms, self.emit), start=1):
                if taken == steps:
                    break

    def at(self, now_ms: int) -> None:
        """The clocks of all say this now; nothing is called."""
        for operator in self.operators:
            operator.context.time.now_ms = now_ms

    def finish(self) -> None:
        """The input has ended."""
        for operator in self.operators:
            for _ in operator.finish(self.emit):
                pass

    def moved(self, parallelism: int, backend: Backend) -> Windows:
        """The same, restored at another parallelism, or with another backend. What was emitted stays."""
        tables = self.stored()
        self.close()
        moved = Windows(self._make, self._keys, parallelism if self._keys else 1, backend, tables)
        moved.rows, moved.aside = self.rows, self.aside
        return moved

    def stored(self) -> list[StateTable]:
        """All state, as a savepoint has it."""
        found = []
        for operator in self.operators:
            snapshot = operator.snapshot(Cut(CheckpointId(1), canonical=True))
            assert snapshot is not None
            found += [table for state in snapshot.states for table in tables_of(state)]
        return found

    def stored_rows(self) -> int:
        """How many rows the keyed state has."""
        return sum(table.rows.num_rows for table in self.stored() if table.kind is StateKind.KEYED)

    def close(self) -> None:
        """End all."""
        for operator in self.operators:
            operator.close()
        for folder in self._folders:
            if Path(folder.name).exists():
                folder.cleanup()

    def emit(self, batch: pa.RecordBatch) -> None:
        """An operator emits."""
        batch.validate(full=True)
        assert batch.num_rows
        self.rows += batch.to_pylist()

    def _emit_aside(self, tag: str, batch: pa.RecordBatch) -> None:
        batch.validate(full=True)
        self.aside += batch.to_pylist()


def _of(table: StateTable, groups: range, keys: tuple[str, ...]) -> StateTable | None:
    """What a subtask is given of a stored table."""
    if table.kind is StateKind.UNION or not keys:
        return table
    found = key_groups_of(hash_columns(table.rows, list(keys)), GROUPS)
    return replace(table, rows=table.rows.filter(pa.array((found >= groups.start) & (found < groups.stop))))


class Model(Protocol):
    """A plain program that says what windows must come to."""

    def process(self, rows: Any) -> object:
        """Rows, as of `rows_batch`."""
        ...

    def watermark(self, moment_ms: int) -> object:
        """No more rows before this."""
        ...


def _nothing(_: Windows) -> None:
    pass


def follow(
    windows: Windows,
    model: Model,
    steps: Sequence[tuple[str, Any]],
    before: Callable[[Windows], object] = _nothing,
    after: Callable[[Windows], object] = _nothing,
    batch_rows: int | None = None,
) -> tuple[Windows, int]:
    """Take the same steps with windows and a model, and then come to the end of time.

    A step is `rows`; a `watermark`, of which a number of steps may be taken before a checkpoint, so that the rest comes
    after the restore; or a `move` to another parallelism or backend. `before` and `after` are called with each step,
    and `after` at the end. Returns the windows as they were restored last, and how many rows were late.
    """
    late, reached = 0, -(10**9)
    for kind, what in steps:
        before(windows)
        if kind == "rows":
            for start in range(0, len(what), batch_rows or len(what)):
                windows.process(rows_batch(what[start : start + (batch_rows or len(what))]))
            model.process(what)
        elif kind == "watermark" and what[0] > reached:
            reached, first_steps = what
            model.watermark(reached)
            if first_steps is not None:
                windows.watermark(reached, first_steps)
                late += dropped(windows)
                windows = windows.moved(2, "columnar")
            windows.watermark(reached)
        elif kind == "move":
            late += dropped(windows)
            windows = windows.moved(*what)
        after(windows)
    windows.watermark(MAX_WATERMARK_MS)
    model.watermark(10**9)
    after(windows)
    return windows, late + dropped(windows)


def dropped(windows: Windows) -> int:
    """Rows that were late since the windows were restored."""
    counts = (m.value for o in windows.operators for m in o.context.metrics.read(o.context.uid))
    return int(sum(counts))


def applied_operator(
    spec: EventTimeWindow | Count,
    calls: WindowCalls,
    keys: tuple[str, ...] = ("k",),
    time: str | Clock = "t",
    lateness_ms: int = 0,
) -> WindowBuffer:
    """The operator of windows with functions, for rows as of `rows_batch`."""
    schema = rows_batch([(1, 1, 1)]).schema
    if isinstance(spec, Count):
        return (FunctionCounts if spec.slide is None else FunctionSlidingCounts)(keys, spec, schema, calls)
    if isinstance(spec, Session):
        return FunctionSessions(keys, spec, time, schema, calls, lateness_ms)
    assert isinstance(spec, Tumbling | Sliding | Cumulating)
    return FunctionWindows(keys, spec, time, schema, calls, lateness_ms)


VALUES = st.integers(-9, 9) | st.integers(-9, 9) | st.none()
"""Values of rows. The first null may come at any time."""


def rows_batch(rows: Sequence[tuple[int, int, int | None]], time_type: pa.DataType | None = None) -> pa.RecordBatch:
    """Rows of key, time in milliseconds and value."""
    keys, times, values = zip(*rows, strict=True)
    keys, times = (np.array(column, dtype=np.int64) for column in (keys, times))
    time = pa.array(times) if time_type is None else pa.array(times).cast(pa.timestamp("ms")).cast(time_type)
    return pa.RecordBatch.from_arrays([pa.array(keys), time, pa.array(values, pa.int64())], names=["k", "t", "x"])
