"""`AsyncMap` maps rows by asynchronous calls (Flink's async I/O): many calls run at a time, while the task continues.

The task fetches the calls to make with `take_calls`, and passes their results to `answered`. A driver
(`tidegate/actors/drivers/async_calls.py`) runs the `AsyncFunction`. Rules:

- At most `capacity` calls run at a time. While rows wait for a call the operator is `full`, and the task reads no
  further input. Its buffer is therefore bounded by the capacity and one batch (`rows_of_a_turn_max`).
- With a `batch_timeout` rows wait until there are enough for a call, or until this time has passed. Such a call may
  have rows from both sides of a watermark. The watermark then waits for its results, so it overtakes no row.
- The snapshot stores the rows whose results were not emitted yet. Their calls are made again after a restore. A
  function may be called more than once for a row, but each row has one result.
- A watermark is passed on when the results of all rows before it were emitted. `ordered` keeps the order of the rows.
  Otherwise results may overtake each other, but not a watermark.
- The watermarks between these rows are in the snapshot as well, after the last watermark that was passed on. After a
  restore the next operators therefore see each result between the same watermarks as before. Older watermarks of a
  restarted sender are ignored. The final watermark (end of event time) is not stored, because no row follows it and the
  senders send it again.
- If the steps before have another parallelism, the restore drops these watermarks (`event_time_goes_on` in
  `restore_task.py`).
- A row that fails permanently fails the task, or goes to a side output with its error.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import blame, failure, first_row
from tidegate.operators.output_schema import FromPolars, PinnedSchema
from tidegate.protocol.edges import RECORDS_IN_ERRORS, OutputTag
from tidegate.protocol.failures import error_text
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.schemas.batches import one_batch
from tidegate.storage.schemas.polars_frames import is_polars_frame
from tidegate.storage.state.snapshot import Cut, FrozenTable, OperatorSnapshot, StateTable
from tidegate.storage.state.stored_rows import Mark, marks_as_rows, marks_of, with_watermarks

IN_FLIGHT = "in flight"
"""Name of the state with the rows whose results were not emitted yet."""

WATERMARKS = "watermarks in flight"
"""Name of the state with the watermarks between the rows of `IN_FLIGHT`. Stored only if there are any."""

HELD_ROWS_MAX = 1_000
"""Greatest number of rows that a task passes to the operator at once if the capacity is smaller than this number.

A limit as low as the capacity would make the batches of all chained steps as small as a few calls.
"""


def rows_of_a_turn_max(function: AsyncFunction) -> int:
    """Returns the maximum number of rows that a task should pass to the async operator in one turn."""
    return max(HELD_ROWS_MAX, function.capacity * (function.batch_size or 1))


@dataclass(slots=True, eq=False)
class _Segment:
    """The calls for rows that arrived between two watermarks, and the watermark after these rows."""

    left: int = 0
    """Number of calls whose results have not been emitted."""
    done: list[_PendingCall] = field(default_factory=list)
    """Finished calls, in the order in which they finished."""
    watermark_ms: int | None = None
    """Watermark that follows the calls, in ms, or None if more rows may follow before the next watermark."""


@dataclass(slots=True, eq=False)
class _PendingCall:
    call: Call
    segment: _Segment
    answer: Answer | None = None


class AsyncMap(Operator):
    """Maps rows by an `AsyncFunction`.

    Failed rows go to the side output `errors_to`, or fail the task if it is None.
    """

    def __init__(
        self,
        function: AsyncFunction,
        schema: pa.Schema | None = None,
        ordered: bool = True,
        errors_to: OutputTag | None = None,
    ) -> None:
        self._capacity = function.capacity
        self._rows_a_call = function.batch_size or 1
        self._by_row = function.batch_size is None
        self._pinned = PinnedSchema(schema)
        self._input = PinnedSchema()
        self._from_polars = FromPolars()
        self._ordered = ordered
        self._errors_to = errors_to
        self._pending: dict[int, _PendingCall] = {}
        """Calls whose results have not been emitted, by call number, in the order of their rows."""
        self._waiting: deque[Call] = deque()
        self._segments: deque[_Segment] = deque([_Segment()])
        self._newest_ms = self._passed_ms = MIN_WATERMARK_MS
        """The newest watermark that has arrived, in ms. `_passed_ms` is the newest watermark that was passed on."""
        self._under_way = 0
        self._next = 0
        self._batch_timeout_ms = function.batch_timeout_ms
        self._filling: list[pa.RecordBatch] = []
        """Rows that wait until there are enough of them for a call. They arrived after the rows of all calls."""
        self._filling_rows = self._filling_since_ms = 0
        self._filling_watermark_ms: int | None = None
        """The newest watermark that arrived after the rows in `_filling`, in ms. None if there is none."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Restores the rows whose results were not emitted before the snapshot, and schedules their calls again."""
        super().open(context, restored)
        marks, held = list[Mark](), list[pa.RecordBatch]()
        for table in restored:
            if table.state == WATERMARKS:
                marks += marks_of(table.rows)
            else:
                held.append(table.rows)
        for element in with_watermarks(held, marks if held else ()):
            if isinstance(element, int):
                self._hold_behind(element)
            else:
                self._add(element)

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Adds the rows of a batch to the calls to make.

        Raises OperatorError if their columns differ from earlier rows.
        """
        with blame(self.context, batch):
            rows = self._input.conform(widened(batch))
        self._add(rows)

    @property
    def full(self) -> bool:
        """True while rows wait for a free call. The task then reads no further input."""
        return bool(self._waiting)

    @property
    def busy(self) -> bool:
        """True while results of calls are missing or have not been emitted."""
        return bool(self._pending)

    def take_calls(self) -> list[Call]:
        """Returns the calls that the driver has to start now, at most up to `capacity` running calls."""
        calls = []
        while self._waiting and self._under_way < self._capacity:
            calls.append(self._waiting.popleft())
            self._under_way += 1
        return calls

    def let_pass(self, watermark_ms: int) -> bool:
        """Receives a watermark, in ms. Returns True if the task may forward the watermark at once.

        Otherwise rows before the watermark are still being processed, and `answered` returns the watermark later. A
        watermark older than the newest one is dropped.
        """
        if watermark_ms < self._newest_ms:
            return False
        if watermark_ms == MAX_WATERMARK_MS:
            self._complete()  # nothing comes that could fill the batch
        if self._pending or self._filling:
            self._hold_behind(watermark_ms)
            return False
        self._newest_ms = self._passed_ms = watermark_ms
        return True

    def answered(self, answers: Sequence[Answer]) -> Iterator[pa.RecordBatch | int]:
        """Receives the results of calls. Yields the batches and the watermarks (in ms) that can now be emitted.

        Raises OperatorError for a failed call if there is no side output for errors.
        """
        for answer in answers:
            pending = self._pending[answer.number]
            self._under_way -= 1
            if answer.error is not None and self._errors_to is None:
                rows = pending.call.rows
                row = first_row(rows)
                place = "the row" if self._by_row else "first row of the batch"
                raise failure(self.context, answer.error, place, row, rows) from answer.error
            pending.answer = answer
            pending.segment.done.append(pending)
        while True:
            yield from self._emitted(self._take_done())
            segment = self._segments[0]
            if segment.left or segment.watermark_ms is None:
                return
            self._segments.popleft()
            self._passed_ms = segment.watermark_ms
            yield segment.watermark_ms

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns a snapshot of the rows whose results were not emitted yet, and of the watermarks between them.

        None if there are no such rows.
        """
        held = [pending.call.rows for pending in self._pending.values()] + self._filling
        if not held:
            return None
        states = [FrozenTable(IN_FLIGHT, StateKind.LIST, lambda: _together(held))]
        if marks := self._marks():
            states.append(FrozenTable(WATERMARKS, StateKind.LIST, lambda: marks_as_rows(marks)))
        return OperatorSnapshot(self.context.uid, tuple(states))

    def finish(self, emit: Emit) -> Iterator[None]:
        """Yields at the end of the input until all results have been emitted."""
        self._complete()
        while self._pending:
            yield

    def next_processing_time_ms(self) -> int | None:
        """Returns the processing time, in ms, at which rows that wait for a full batch are called anyway.

        None if no rows wait.
        """
        if not self._filling:
            return None
        assert self._batch_timeout_ms is not None, "only then do rows wait"
        return self._filling_since_ms + self._batch_timeout_ms

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Makes a call with fewer rows than a full batch, if they have waited for the batch timeout."""
        due_ms = self.next_processing_time_ms()
        if due_ms is not None and due_ms <= now_ms:
            self._complete()
        return iter(())

    def _add(self, rows: pa.RecordBatch) -> None:
        if self._batch_timeout_ms is not None:
            self._fill(rows)
            return
        for start in range(0, rows.num_rows, self._rows_a_call):
            self._add_call(rows.slice(start, self._rows_a_call))

    def _add_call(self, rows: pa.RecordBatch) -> None:
        segment, call = self._segments[-1], Call(self._next, rows)
        self._next += 1
        self._pending[call.number] = _PendingCall(call, segment)
        self._waiting.append(call)
        segment.left += 1

    def _fill(self, rows: pa.RecordBatch) -> None:
        """Adds rows to the batch that is being filled. Each full batch becomes a call."""
        start = 0
        while start < rows.num_rows:
            if not self._filling:
                self._filling_since_ms = self.context.time.now_ms
            part = rows.slice(start, self._rows_a_call - self._filling_rows)
            self._filling.append(part)
            self._filling_rows += part.num_rows
            start += part.num_rows
            if self._filling_rows == self._rows_a_call:
                self._complete()

    def _complete(self) -> None:
        """Makes a call of the rows that wait for a full batch. The watermark that arrived after these rows follows the
        call.
        """
        if not self._filling:
            return
        rows, watermark_ms = _together(self._filling), self._filling_watermark_ms
        self._filling, self._filling_rows, self._filling_watermark_ms = [], 0, None
        self._add_call(rows)
        if watermark_ms is not None:
            self._hold(watermark_ms)

    def _hold_behind(self, watermark_ms: int) -> None:
        """Holds back a watermark until the results of all rows before it are emitted.

        Includes rows that wait for a full batch and are not part of a call yet.
        """
        if self._filling:
            self._newest_ms = self._filling_watermark_ms = watermark_ms
        else:
            self._hold(watermark_ms)

    def _hold(self, watermark_ms: int) -> None:
        """Holds back a watermark until the results of all rows that are part of a call are emitted."""
        self._newest_ms = watermark_ms
        last = self._segments[-1]
        if not last.left and len(self._segments) > 1:
            self._segments[-2].watermark_ms = watermark_ms
        else:
            last.watermark_ms = watermark_ms
            self._segments.append(_Segment())

    def _marks(self) -> list[Mark]:
        """Returns the watermarks to store in a snapshot, each with the number of stored rows before it."""
        left: Counter[_Segment] = Counter()
        for pending in self._pending.values():
            left[pending.segment] += pending.call.rows.num_rows
        found, before = [(0, self._passed_ms)], 0
        for segment in self._segments:
            before += left[segment]
            if segment.watermark_ms is not None:
                found.append((before, segment.watermark_ms))
        if self._filling_watermark_ms is not None:
            found.append((before + self._filling_rows, self._filling_watermark_ms))
        return [mark for mark in found if MIN_WATERMARK_MS < mark[1] < MAX_WATERMARK_MS]

    def _take_done(self) -> list[_PendingCall]:
        """Removes and returns the finished calls of the oldest segment whose results may be emitted now."""
        segment = self._segments[0]
        if self._ordered:
            found = []
            for pending in self._pending.values():
                if pending.segment is not segment or pending.answer is None:
                    break
                found.append(pending)
        else:
            found = segment.done
        segment.done = [] if not self._ordered else segment.done
        for pending in found:
            del self._pending[pending.call.number]
        segment.left -= len(found)
        return found

    def _emitted(self, done: Sequence[_PendingCall]) -> Iterator[pa.RecordBatch]:
        ready: list[Mapping[str, Any]] = []
        for pending in done:
            answer = pending.answer
            assert answer is not None
            if answer.error is not None:
                self._aside(pending.call.rows, answer.error)
                continue
            with blame(self.context, pending.call.rows):
                if not self._by_row:
                    yield from self._batch(answer.result, pending.call.rows.schema)
                    continue
                if answer.result is None:
                    continue
                if not isinstance(answer.result, Mapping):
                    raise TypeError(
                        "the function must return a row, a dict, or None for no row, not "
                        f"{type(answer.result).__name__}: {answer.result!r}; return one of these"
                    )
            ready.append(answer.result)
            if len(ready) == OUTPUT_ROWS_MAX:
                yield self._rows(ready, pending)
                ready = []
        if ready:
            yield self._rows(ready, done[0])

    def _rows(self, rows: list[Mapping[str, Any]], pending: _PendingCall) -> pa.RecordBatch:
        with blame(self.context, pending.call.rows):
            return self._pinned.from_rows(rows)

    def _batch(self, result: Any, source: pa.Schema) -> list[pa.RecordBatch]:
        if result is None:
            return []
        if isinstance(result, pa.RecordBatch):
            batches = [result]
        elif isinstance(result, pa.Table):
            batches = result.combine_chunks().to_batches()
        elif is_polars_frame(result):
            batches = [self._from_polars.convert(result, source)]
        else:
            raise TypeError(
                f"the function returned {type(result).__name__}; it must return a pyarrow RecordBatch or Table, "
                "a polars DataFrame, or None"
            )
        return [self._pinned.conform(batch) for batch in batches if batch.num_rows]

    def _aside(self, rows: pa.RecordBatch, error: BaseException) -> None:
        assert self._errors_to is not None
        texts = pa.array([error_text(error)] * rows.num_rows, pa.string())
        columns = [column.cast(f.type) for column, f in zip(rows.columns, self._errors_to.schema, strict=False)]
        batch = pa.RecordBatch.from_arrays([*columns, texts], schema=self._errors_to.schema)
        self.context.metrics.counter(RECORDS_IN_ERRORS).inc(batch.num_rows)
        self.context.emit_aside(self._errors_to.name, batch)


def _together(held: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Returns the rows of several batches as one batch.

    A column that has only nulls in some batches gets its type from the other batches.
    """
    if all(rows.schema.equals(held[0].schema) for rows in held):
        return pa.concat_batches(held)
    tables = [pa.Table.from_batches([rows]) for rows in held]
    return one_batch(pa.concat_tables(tables, promote_options="default"), "map_async")


CAPACITY_MAX = 100_000
RETRIES_MAX = 1_000


@dataclass(frozen=True, slots=True)
class AsyncFunction:
    """A function of the program, and how to call it.

    `fn` is called with a row as a dict or, with `batch_size`, with batches of up to this many rows. With
    `batch_timeout_ms` rows wait up to this time for a full batch. Without it, a batch has the rows that have arrived.

    `fn` returns an awaitable, or a future of `concurrent.futures`. A call that raises, or takes longer than
    `timeout_ms`, is repeated up to `retries` times. At most `capacity` calls run at a time.
    """

    fn: Callable[[Any], Any]
    capacity: int
    timeout_ms: int
    retries: int = 0
    batch_size: int | None = None
    batch_timeout_ms: int | None = None

    def check(self, step: str) -> None:
        """Raises ConfigurationError if `fn` is not a function that returns one result, or if a number or a time is out
        of range.

        `step` names the step in the error.
        """
        if inspect.isasyncgenfunction(self.fn) or inspect.isgeneratorfunction(self.fn):
            raise ConfigurationError(f"{step}: fn is a generator; it must return one result for each call, not yield")
        wrong = [
            f"{name} must be between {least} and {most}, not {value!r}"
            for name, value, least, most in (
                ("capacity", self.capacity, 1, CAPACITY_MAX),
                ("retries", self.retries, 0, RETRIES_MAX),
                ("batch_size", 1 if self.batch_size is None else self.batch_size, 1, CAPACITY_MAX),
            )
            if type(value) is not int or not least <= value <= most
        ]
        if self.timeout_ms <= 0:
            wrong.append("timeout must be greater than 0")
        if self.batch_timeout_ms is not None and self.batch_timeout_ms <= 0:
            wrong.append("batch_timeout must be greater than 0")
        if self.batch_timeout_ms is not None and self.batch_size is None:
            wrong.append(
                "batch_timeout= is how long rows wait until a batch is full, and fn gets single rows; give batch_size= "
                "as well"
            )
        if wrong:
            raise ConfigurationError(f"{step}: {wrong[0]}")


@dataclass(frozen=True, slots=True)
class Call:
    """A call to make with the rows of one batch. `number` is unique within an operator and attempt."""

    number: int
    rows: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of the call `number`, or the error of its last attempt."""

    number: int
    result: Any = None
    error: BaseException | None = None
