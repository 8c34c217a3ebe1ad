"""`ProcessHarness`: runs one process function step by step in a test, without a job, a thread or a clock.

    harness = ProcessHarness(Silence(), key="user", event_time="at")
    harness.push({"user": "ada", "at": 0})
    assert harness.timers() == [HarnessTimer({"user": "ada"}, 60_000, TimeDomain.EVENT_TIME)]
    assert harness.advance_watermark(60_000) == [{"user": "ada", "silent_since": 0}]

The same operator as in a job runs the function, with the same state, timers, checks and errors, as its only subtask. So
a test gets the same result as a job with the same rows in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from tidegate.api.streams.step_checks import check_methods
from tidegate.operators.aggregates.column_expressions import column_names
from tidegate.operators.functions.event_time_order import EventTimeOrder
from tidegate.operators.functions.failing_rows import error_tag
from tidegate.operators.functions.process_functions import (
    BroadcastProcessFunction,
    CoProcessFunction,
    KeyedBroadcastProcessFunction,
    ProcessFunction,
)
from tidegate.operators.functions.process_operator import BroadcastProcessOperator, ProcessOperator, process_operator
from tidegate.operators.operator import OperatorContext, ProcessingTime
from tidegate.operators.output_schema import PinnedSchema, SchemaMismatchError
from tidegate.operators.row_values import is_record, owned_row
from tidegate.operators.state.keyed_state import (
    AggregatingState,
    KeyedState,
    ListState,
    MapState,
    ReducingState,
    ValueState,
)
from tidegate.operators.state.operator_state import OperatorListState
from tidegate.operators.state.timers import TimeDomain
from tidegate.operators.watermarks.late_rows import LATE
from tidegate.protocol.edges import OutputTag
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.schemas.row_schemas import SchemaLike, as_schema, returned_schema
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.stored_rows import TIMER_DOMAIN, TIMER_MOMENT, TIMERS_STATE

Row = dict[str, Any]
Moment = int | datetime

_MAX_PARALLELISM = 128
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class HarnessTimer:
    """A timer that has not fired yet.

    `key` has the key columns. `timestamp` is its time in ms since 1970, `domain` its clock: event time or processing
    time.
    """

    key: Row
    timestamp: int
    domain: TimeDomain


@dataclass(frozen=True, slots=True)
class HarnessSnapshot:
    """State and timers of a harness at one moment, as a checkpoint stores them.

    Pass it to another harness as `restore=`.
    """

    tables: tuple[StateTable, ...]
    waiting: tuple[StateTable, ...] = ()
    """The rows that wait for the watermark, if the harness has `in_order`."""
    columns: pa.Schema | None = None
    """The columns of these rows, or None if no row was pushed."""


class ProcessHarness:
    """Runs a `tg.ProcessFunction`, a `tg.CoProcessFunction` or a function of the broadcast pattern in a test.

    Parameters:

    - `function`: the object that `process` takes. It is copied, as for each subtask of a job.
    - `key`: the key column, or a list of key columns; `()` for a stream without keys.
    - `event_time`: the column of event time, or None. Without it the `timestamp` of each row is None.
    - `key2`, `event_time2`: the columns of the second input. They default to the columns of the first input. A
      broadcast input has no keys.
    - `schema`, `side_outputs`, `fire_at_end`, `errors_to`, `in_order`: the arguments of `process`. With `in_order`,
      rows wait for `advance_watermark`, and late rows are in `side_output("late")`.
    - `schemas`: the columns of the pushed rows, one entry for each input, in any form that `schema=` takes. By default
      they follow from the first row of an input.
    - `now`: the start of processing time, in ms since 1970 or as a datetime.
    - `restore`: the result of `snapshot()` of another harness. The function may have changed since then.

    Raises ConfigurationError and OperatorError in the same cases as `process` and its task. As a context manager it
    calls the function's `close` at the end.
    """

    def __init__(
        self,
        function: ProcessFunction | CoProcessFunction | BroadcastProcessFunction,
        *,
        key: str | Sequence[str] = (),
        event_time: str | None = None,
        key2: str | Sequence[str] | None = None,
        event_time2: str | None = None,
        schema: SchemaLike | None = None,
        schemas: Sequence[SchemaLike | None] = (),
        side_outputs: Sequence[OutputTag] = (),
        fire_at_end: bool = False,
        errors_to: str | None = None,
        in_order: bool = False,
        now: Moment = 0,
        restore: HarnessSnapshot | None = None,
    ) -> None:
        self.output: list[Row] = []
        """The rows that the function has emitted so far, in order."""
        self._aside: dict[str, list[Row]] = {}
        self._time = ProcessingTime(_ms(now))
        self._watermark_ms = MIN_WATERMARK_MS
        self._ended = False
        check_methods(function)
        inputs = len(getattr(function, "INPUT_METHODS", ())) or 1
        given = [as_schema(each, f"ProcessHarness(schemas[{n}])") for n, each in enumerate(schemas)]
        self._inputs = [PinnedSchema(each) for each in (given + [None] * inputs)[:inputs]]
        times = event_time, event_time if event_time2 is None else event_time2
        self._operator = self._made(function, key, key2, times, schema, side_outputs, fire_at_end, errors_to, in_order)
        self._keys = column_names(key, "ProcessHarness(key=)") if key else ()
        self._event_time = event_time
        self._in_order = in_order
        self._order: EventTimeOrder | None = None
        """Sorts the rows; None before their columns are known."""
        self._context = OperatorContext(
            OperatorUid(type(function).__name__),
            type(function).__name__,
            SubtaskIndex(0),
            1,
            _MAX_PARALLELISM,
            self._time,
            emit_aside=self._emit_aside,
        )
        self._operator.open(self._context, () if restore is None else restore.tables)
        if restore is not None and restore.columns is not None:
            if not in_order:
                raise ConfigurationError(
                    "ProcessHarness: the snapshot has rows that wait for event time; give in_order=True"
                )
            self._order = self._opened_order(restore.columns, restore.waiting)

    def push(self, *rows: Any, input: int = 0) -> list[Row]:
        """Processes rows of an input (0 or 1) one after the other: dicts, dataclass objects or named tuples.

        Returns the rows that the function emitted for them. Raises ConfigurationError for a row with other columns or
        types than the first row of that input, and OperatorError if the function raises an error.
        """
        self._check_open(input)
        made = []
        for row in rows:
            if not (isinstance(row, Mapping) or is_record(row)):
                raise ConfigurationError(
                    f"push takes rows, such as {{'user': 'ada'}}, not a {type(row).__name__}; push(*rows) for a list"
                )
            made.append(self._checked(owned_row(row), input))
        if not made:
            return []
        try:
            batch = self._inputs[input].from_rows(made)
        except SchemaMismatchError as error:
            raise ConfigurationError(f"push: {error}") from error
        # A schema that is given, unlike one that the first rows fix, refuses a row that lacks a column.
        self._inputs[input] = PinnedSchema(batch.schema)
        return self.push_batch(batch, input=input)

    def push_batch(self, batch: pa.RecordBatch, *, input: int = 0) -> list[Row]:
        """Processes a batch of an input in one call, as a job may do.

        Returns the rows that the function emitted for it.
        """
        self._check_open(input)
        before = len(self.output)
        if batch.num_rows and self._in_order:
            if self._order is None:
                self._order = self._opened_order(batch.schema, ())
            self._order.process(batch, self._emit)
        elif batch.num_rows:
            self._operator.process_input(input, batch, self._emit)
        return self.output[before:]

    def advance_watermark(self, to: Moment) -> list[Row]:
        """Advances event time to a moment (ms since 1970 or datetime), so that event-time timers up to it fire.

        Returns the rows that the function emitted. Raises ConfigurationError for a moment before the current watermark,
        which never moves back.
        """
        self._check_open()
        watermark_ms = _ms(to)
        if watermark_ms < self._watermark_ms:
            raise ConfigurationError(
                f"the watermark is at {self._watermark_ms} ms and cannot move back to {watermark_ms} ms; give a "
                "later moment"
            )
        before = len(self.output)
        self._reach(watermark_ms)
        return self.output[before:]

    def advance_clock(self, to: Moment | timedelta) -> list[Row]:
        """Advances processing time to a moment or by a timedelta, so that processing-time timers up to it fire in
        order.

        Returns the rows that the function emitted. Raises ConfigurationError for a moment before `now`.
        """
        self._check_open()
        target_ms = self.now + round(to / timedelta(milliseconds=1)) if isinstance(to, timedelta) else _ms(to)
        if target_ms < self.now:
            raise ConfigurationError(
                f"the clock is at {self.now} ms and cannot move back to {target_ms} ms; give a later moment"
            )
        before = len(self.output)
        # The clock of a job passes each moment: a timer that sets the next one fires at each of them.
        while (due_ms := self._operator.next_processing_time_ms()) is not None and due_ms <= target_ms:
            self._time.now_ms = max(self.now, due_ms)
            for _ in self._operator.on_processing_time(self.now, self._emit):
                pass
        self._time.now_ms = target_ms
        return self.output[before:]

    def end(self) -> list[Row]:
        """Ends the input: all event-time timers fire, then `finish` is called.

        Returns the rows that the function emitted.
        """
        self._check_open()
        before = len(self.output)
        self._reach(MAX_WATERMARK_MS)
        for _ in self._operator.finish(self._emit):
            pass
        self._ended = True
        return self.output[before:]

    def side_output(self, tag: OutputTag | str) -> list[Row]:
        """Returns all rows that were emitted under a tag, in order.

        The tag may also be the name given as `errors_to`.
        """
        return list(self._aside.get(tag if isinstance(tag, str) else tag.name, ()))

    def state(self, name: str, /, **key: Any) -> Any:
        """Returns the content of state `name` of a key or, without a key, of an operator state.

            harness.state("total", user="ada")

        For a ValueState this is its value or None, for a ListState a list, for a MapState a dict, and otherwise the
        result of its `get`. Raises ConfigurationError for a name that the function has not bound, and for a key with
        other columns.
        """
        names = self._operator.bound_states
        if name not in names:
            raise ConfigurationError(f"the function binds no state {name!r}; name one of {sorted(names)}")
        if not key:
            try:
                state = self._operator.operator_state(name)
            except KeyError:
                raise ConfigurationError(
                    f"state {name!r} is kept for each key: give the key, as in state({name!r}, user='ada')"
                ) from None
            return state.get() if isinstance(state, OperatorListState) else dict(state.items())
        try:
            with self._operator.at_key(key) as states:
                return _value_of(states[name]) if name in states else None
        except SchemaMismatchError as error:
            raise ConfigurationError(f"state({name!r}): {error}") from error

    def timers(self) -> list[HarnessTimer]:
        """Returns the timers that have not fired yet, earliest first."""
        tables = [table for table in self.snapshot().tables if table.state == TIMERS_STATE]
        found = [
            HarnessTimer(row, row.pop(TIMER_MOMENT), TimeDomain(row.pop(TIMER_DOMAIN)))
            for table in tables
            for row in table.rows.to_pylist()
        ]
        return sorted(found, key=lambda timer: (timer.timestamp, timer.domain.value, repr(timer.key)))

    def snapshot(self) -> HarnessSnapshot:
        """Returns a snapshot of the current state and timers. Later calls do not change it."""
        if self._order is None:
            return HarnessSnapshot(_tables_of(self._operator))
        return HarnessSnapshot(_tables_of(self._operator), _tables_of(self._order), self._order.output)

    @property
    def now(self) -> int:
        """Returns the processing time, in ms since 1970."""
        return self._time.now_ms

    @property
    def watermark(self) -> int:
        """Returns the current watermark, in ms since 1970."""
        return self._watermark_ms

    def close(self) -> None:
        """Closes the user's function."""
        self._ended = True
        if self._order is not None:
            self._order.close()
        self._operator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _made(
        self,
        function: ProcessFunction | CoProcessFunction | BroadcastProcessFunction,
        key: str | Sequence[str],
        key2: str | Sequence[str] | None,
        event_times: tuple[str | None, str | None],
        schema: SchemaLike | None,
        side_outputs: Sequence[OutputTag],
        fire_at_end: bool,
        errors_to: str | None,
        in_order: bool,
    ) -> ProcessOperator:
        """Returns the same operator that would run the function in a job."""
        keys = column_names(key, "ProcessHarness(key=)") if key else ()
        is_broadcast = isinstance(function, BroadcastProcessFunction)
        if is_broadcast and bool(keys) != isinstance(function, KeyedBroadcastProcessFunction):
            wanted = (
                "needs key=" if not keys else "has no keys: remove key=, or derive the class from tg.KeyedBroadcast..."
            )
            raise ConfigurationError(f"ProcessHarness: {type(function).__name__} {wanted}")
        second = () if is_broadcast else keys if key2 is None else column_names(key2, "ProcessHarness(key2=)")
        method = getattr(function, "INPUT_METHODS", ("process",))[0]
        result = as_schema(schema, "ProcessHarness(schema=)") or returned_schema(function, many=True, method=method)
        count = len(self._inputs)
        all_keys = (keys, second)[:count]
        all_times = event_times[:count]
        errors: tuple[OutputTag | None, ...] = ()
        if errors_to is not None:
            errors = (error_tag(errors_to, self._inputs[0].schema, "ProcessHarness", keys), None)[:count]
        if in_order and (count > 1 or not keys or event_times[0] is None):
            raise ConfigurationError("ProcessHarness: in_order=True needs a tg.ProcessFunction, key= and event_time=")
        if in_order and LATE in (tag.name for tag in (*side_outputs, *errors) if tag is not None):
            raise ConfigurationError(
                f"ProcessHarness: with in_order=True late rows go to the side output {LATE!r}; give the function's own "
                "another name"
            )
        if is_broadcast:
            return BroadcastProcessOperator(function, all_keys, all_times, result, side_outputs, fire_at_end, errors)
        return process_operator(function, all_keys, all_times, result, side_outputs, fire_at_end, errors, in_order)

    def _opened_order(self, columns: pa.Schema, waiting: Sequence[StateTable]) -> EventTimeOrder:
        """Returns the operator that sorts rows with these columns by event time.

        It starts with the rows that wait and at the current watermark.
        """
        assert self._event_time is not None, "checked"
        order = EventTimeOrder(self._keys, self._event_time, columns)
        order.open(replace(self._context, uid=OperatorUid(f"{self._context.uid}-order")), waiting)
        for _ in order.advance_watermark(self._watermark_ms, self._emit_in_order):
            pass
        return order

    def _reach(self, watermark_ms: int) -> None:
        """Advances event time: first in the operator that sorts rows, if there is one, and then in the operator that
        runs the function.
        """
        self._watermark_ms = watermark_ms
        if self._order is not None:
            for _ in self._order.advance_watermark(watermark_ms, self._emit_in_order):
                pass
        for _ in self._operator.advance_watermark(watermark_ms, self._emit):
            pass

    def _emit_in_order(self, batch: pa.RecordBatch) -> None:
        self._operator.process_input(0, batch, self._emit)

    def _checked(self, row: Row, input: int) -> Row:
        known = self._inputs[input].schema
        if known is not None and row.keys() != set(known.names):
            raise ConfigurationError(
                f"push: the row has columns {list(row)}, and input {input} has {known.names}; give None for a null"
            )
        return row

    def _check_open(self, input: int = 0) -> None:
        if self._ended:
            raise ConfigurationError("the input of this harness has ended; make another one, with restore= if need be")
        if not 0 <= input < len(self._inputs):
            raise ConfigurationError(f"input={input}: the function has {len(self._inputs)} inputs, counted from 0")

    def _emit(self, batch: pa.RecordBatch) -> None:
        self.output.extend(batch.to_pylist())

    def _emit_aside(self, tag: str, batch: pa.RecordBatch) -> None:
        self._aside.setdefault(tag, []).extend(batch.to_pylist())


def _tables_of(operator: ProcessOperator | EventTimeOrder) -> tuple[StateTable, ...]:
    """Returns the tables that an operator would store in a checkpoint."""
    taken = operator.snapshot(Cut(CheckpointId(1)))
    states = () if taken is None else taken.states
    return tuple(
        StateTable(state.state, state.kind, chunk.rows, state.removed)
        for state in states
        for chunk in state.chunks()
        if chunk.rows.num_rows
    )


def _ms(moment: Moment) -> int:
    """Returns a moment as milliseconds since 1970. Raises ConfigurationError for a datetime without a time zone."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ConfigurationError(f"{moment!r} has no time zone: give tzinfo=timezone.utc, or milliseconds")
        return (moment - _EPOCH) // timedelta(milliseconds=1)
    return moment


def _value_of(state: KeyedState) -> Any:
    """Returns the content of a state of the current key as a plain Python value."""
    if isinstance(state, ReducingState | AggregatingState):
        return state.get()
    if isinstance(state, ValueState):
        return state.value()
    if isinstance(state, ListState):
        return list(state.get())
    assert isinstance(state, MapState), f"a state of class {type(state).__name__}"
    return dict(state.items())
