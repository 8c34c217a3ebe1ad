"""`ProcessOperator` runs a user function row by row, with the state and the timers of each row's key.

`process_operator` creates the operator for a function. Rules:

- Rows of a batch are processed in order. Their results are emitted in batches of bounded size before the call returns,
  so the operator holds no rows when a barrier comes.
- Timers fire in steps of bounded length (Flink's interruptible timers). Between two steps the fired timers are removed
  and their results are emitted.
- A key must arrive at the subtask that owns its key group. The operator checks each batch.
- The types of the key columns come from the first batch or from the restored state, and never change.
- With `errors_to` a row or timer that fails produces only one row of that side output: the rows that it emitted, its
  changes of state and its timers are undone. The output schema must therefore be given.
- Rows from a stream that is sorted by event time are processed as if a watermark 1 ms before the time of each row came
  with it. Timers up to this watermark fire before the row, also timers of other keys. A timer for the row's own time
  fires after the row.
- At the end of the input the last watermark fires all event-time timers. Processing-time timers are dropped, or fire
  then if `fire_at_end` is set. Processing-time timers that are registered from then on are dropped, so the end
  terminates.

`BatchProcessOperator` runs a function batch by batch, with the state and the timers of all keys in a batch. In addition
to the rules above:

- A function defines `process` or `process_batch`. With the latter it defines `on_timer` or `on_timer_batch`.
- A call reads the state as the previous call left it, with its own changes. Rows of one key share the state.
- With `errors_to` a failing call is repeated with the first half of its rows, then with the second half, down to single
  rows. Its changes of state are undone. Other side effects happen again.
- Batches of a stream that is sorted by event time are not divided: timers fire after the rows of a watermark, not
  between them.
- Timers that are due are passed to `on_timer_batch` one step at a time. They are deleted when the call begins. Timers
  that the call registers fire in a later step, so a step never has the same timer twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.batch_functions import BatchResults
from tidegate.operators.functions.failing_rows import FailingRows, is_of_function
from tidegate.operators.functions.process_functions import (
    BaseProcessFunction,
    BroadcastContext,
    ProcessBatchContext,
    ProcessContext,
    ProcessFunction,
    SideRows,
)
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.operators.operator_errors import (
    Blame,
    blame,
    blame_call,
    blame_row,
    failure,
    first_row,
    is_failure,
    own_copy,
    timer_place,
)
from tidegate.operators.output_schema import PinnedSchema
from tidegate.operators.row_values import python_rows, returned_rows
from tidegate.operators.state.keyed_state import KeyedState, StateNames
from tidegate.operators.state.keyed_state_store import KeyedStates, pending_timers
from tidegate.operators.state.keys import KeyCodec, KeyScope, check_owner, key_columns, key_schema
from tidegate.operators.state.operator_state import OperatorStates, WriteGate
from tidegate.operators.state.state_types import NO_FAST_PATH, fast_conversion, no_fast_path
from tidegate.operators.state.timers import TimeDomain, TimerChains, Timers
from tidegate.operators.state.undo import StateUndo
from tidegate.operators.watermarks.watermark_generator import event_times_ms
from tidegate.protocol.edges import OutputTag, check_tags
from tidegate.protocol.failures import ChangedTypeError, OperatorError
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend, KeyRef
from tidegate.state.kernels.partition import compact, subtask_table
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.schemas.batches import memory_of
from tidegate.storage.state.handover import taken
from tidegate.storage.state.snapshot import Cut, FrozenState, OperatorSnapshot, StateTable

_CHANGE_BYTES = 64
_PART_ROWS_MIN = 64

Handler = Callable[[dict[str, Any], ProcessContext], Iterable[Mapping[str, Any]] | None]


class ProcessOperator(Operator):
    """Runs a process function row by row. `keys` and `timestamps` have an entry for each of its inputs.

    `keys` has the key columns, none for a stream without keys. State uses the names of the first input. `timestamps`
    has the event-time columns, or None. `schema` is the output schema, or None to derive it from the first rows.
    `side_outputs` are the tags to which the function may emit rows. `fire_at_end` makes processing-time timers fire at
    the end of the input. `errors_to` has, for each input, the tag of the side output for rows that fail, or None if
    they fail the job. It is empty if all failures fail the job. Timers that fail use the tag of the first input.
    `in_order` is True if rows are sorted by event time (`EventTimeOrder`). Timers that are due before a row then fire
    before it.

    Raises ConfigurationError for an object that is not a process function, or that cannot be copied.
    """

    context_class: type[ProcessContext] = ProcessContext
    """The class of the context that is passed to the function."""
    by_batch = False
    """True if the function reads and writes state for whole batches."""
    timer_method = "on_timer"
    """Name of the method that timers call, for error messages."""

    def __init__(
        self,
        function: BaseProcessFunction,
        keys: Sequence[tuple[str, ...]] = ((),),
        timestamps: Sequence[str | None] = (None,),
        schema: pa.Schema | None = None,
        side_outputs: Sequence[OutputTag] = (),
        fire_at_end: bool = False,
        errors_to: Sequence[OutputTag | None] = (),
        in_order: bool = False,
    ) -> None:
        inputs = len(function.INPUT_METHODS) if isinstance(function, BaseProcessFunction) else 0
        if not inputs or len(keys) != inputs or len(timestamps) != inputs:
            wanted = "CoProcessFunction" if len(keys) == 2 else "ProcessFunction"
            raise ConfigurationError(f"process needs an object of a class derived from tg.{wanted}, not {function!r}")
        self._function = own_copy(function)
        self._keys, self.has_keyed_state = tuple(keys), bool(keys[0])
        self._timestamps = tuple(timestamps)
        self._fires_at_end = fire_at_end
        self._in_order = in_order
        self._taken = 0
        self._pinned = PinnedSchema(schema, function)
        self._scope = KeyScope()
        self._states: KeyedStates | None = None
        self._timers = Timers(self._scope)
        self._gate = WriteGate()
        self._codec: KeyCodec | None = None
        self._changed_rows = 0
        self._seen: dict[int, pa.Schema] = {}
        self._rows: list[Mapping[str, Any]] = []
        tags = [tag for tag in errors_to if tag is not None]
        check_tags("process", (*side_outputs, *tags))
        if tags and schema is None:
            raise ConfigurationError(
                f"{type(function).__name__}: errors_to= needs schema=, because rows whose results do not fit it fail"
            )
        self._failing = tuple(None if tag is None else FailingRows(tag) for tag in errors_to or (None,) * inputs)
        self._undo = StateUndo() if tags else None
        self._sides = SideRows(side_outputs, holds=bool(tags))
        self._fits = no_fast_path if schema is None else fast_conversion(pa.struct(list(schema)))

    @property
    def function(self) -> BaseProcessFunction:
        """Returns this operator's own copy of the process function."""
        return self._function

    @property
    def bound_states(self) -> dict[str, pa.DataType]:
        """Returns the stored type of each state that the function has bound in `open`, by name."""
        keyed = {} if self._states is None else self._states.stored_fields
        return {name: field.type for name, field in (keyed | self._operator_states.stored_fields).items()}

    def operator_state(self, name: str) -> Any:
        """Returns the operator state that the function has bound as `name`. Raises KeyError if there is none."""
        return self._operator_states.state(name)

    @contextmanager
    def at_key(self, key: Mapping[str, Any]) -> Iterator[Mapping[str, KeyedState]]:
        """Makes a key the current one between two calls of the function, for the duration of the context. Yields the
        states of the key by name.

        Yields no states before the first row, which determines the types of the keys. Raises SchemaMismatchError if
        `key` lacks a column, or has values of other types.
        """
        if self._states is None or self._codec is None:
            yield {}
            return
        columns = PinnedSchema(self._codec.schema).from_rows([key])
        try:
            for number, ref in enumerate(self._states.enter(columns)):
                self._scope.choose(number, ref)
            yield self._states.bound
        finally:
            self._states.leave(0)

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the function, then restores its state from the tables of any number of earlier subtasks.

        Raises OperatorError if the function raises, ConfigurationError for a stored state that the function does not
        bind, and CorruptionError for a table with other types, a key that occurs twice, or a key of another subtask.
        """
        super().open(context, restored)
        self._owners = subtask_table(context.max_parallelism, context.parallelism)
        names = StateNames()
        if self._keys[0]:
            self._states = KeyedStates(context, self._keys[0], self._scope, names, self.by_batch, self._undo)
            self._timers = self._states.timers
            if not self._has_timer_method():
                self._timers.no_method = f"{type(self._function).__name__} has no method {self.timer_method}"
        unkeyed = [table for table in restored if table.kind is not StateKind.KEYED]
        self._operator_states = OperatorStates(context.uid, unkeyed, self._gate, names)
        place = context, self._states, self._operator_states, self._scope, self._timers
        self._ask = self.context_class(*place, self._sides)
        function = self._function
        function.context = self._ask
        self._handlers: tuple[Handler, ...] = tuple(getattr(function, name) for name in function.INPUT_METHODS)
        with blame_call(self.context, "open"):
            function.open(self._ask)
        self._sides.begin(context)
        if self._states is not None:
            self._states.complete()
            self._take_over(self._states)
        self._operator_states.complete()
        self.load(restored)

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads stored tables into the opened state. Raises CorruptionError and ConfigurationError as `open` does."""
        for table in taken(tables):
            if table.kind is StateKind.KEYED:
                self._restore(table)
        if self._states is not None:
            self._states.loaded()

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes a batch of the first input."""
        self.process_input(0, batch, emit)

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes a batch of the input `index`, row by row.

        Raises OperatorError if the function raises, or if the keys do not fit.
        """
        if self._in_order:
            self._process_in_order(index, batch, emit)
            return
        with blame(self.context, batch):
            moments = self._times_of(index, batch)
            rows = enumerate(python_rows(batch))
        times = None if moments is None else moments.to_pylist()
        self._process_part(index, batch, times, rows, emit)

    def _process_in_order(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes a batch that is sorted by event time, in parts: before a row, the timers that are due at its time
        fire.
        """
        start, rows_max = 0, OUTPUT_ROWS_MAX
        while start < batch.num_rows:
            part = batch.slice(start, rows_max)
            with blame(self.context, part):
                moments, rows = self._times_of(index, part), python_rows(part)
            assert moments is not None, "rows in order of no time"
            times = moments.to_pylist()
            if times[0] - 1 > self._ask.current_watermark:
                self._ask.current_watermark = times[0] - 1
                for _ in self._fire(TimeDomain.EVENT_TIME, times[0] - 1, emit):
                    pass
            self._process_part(index, part, times, self._rows_before_timers(rows, times), emit)
            start += self._taken
            # A part is entered as a whole. So parts are short while timers often fire between rows.
            rows_max = min(OUTPUT_ROWS_MAX, max(_PART_ROWS_MIN, 2 * self._taken))

    def _rows_before_timers(
        self, rows: Sequence[dict[str, Any]], times: Sequence[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields rows, each with its index, up to the first row before which a timer has to fire.

        `_taken` counts the yielded rows.
        """
        timers, ask = self._timers, self._ask
        first_ms, changes = timers.first_ms(TimeDomain.EVENT_TIME), 0
        self._taken = 0
        for number, row in enumerate(rows):
            before_ms = times[number] - 1
            if before_ms > ask.current_watermark:
                if timers.changes > changes:
                    changed_ms = timers.first_change_ms(TimeDomain.EVENT_TIME, changes)
                    changes = timers.changes
                    if changed_ms is not None and (first_ms is None or changed_ms < first_ms):
                        first_ms = changed_ms
                if first_ms is not None and first_ms <= before_ms:
                    return
                ask.current_watermark = before_ms
            self._taken += 1
            yield number, row

    def _process_part(
        self,
        index: int,
        batch: pa.RecordBatch,
        times: Sequence[int | None] | None,
        rows: Iterator[tuple[int, dict[str, Any]]],
        emit: Emit,
    ) -> None:
        with blame(self.context, batch):
            refs = self._enter(index, batch)
        failing = self._failing[index]
        if failing is not None:
            self._process_guarded(failing, self._handlers[index], batch, rows, refs, times, emit)
        else:
            while self._process_rows(self._handlers[index], rows, refs, times):
                self._emit_rows(emit, OUTPUT_ROWS_MAX)
        if self._keys[index]:
            self._leave(batch.num_rows)
        self._end_call(emit)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the event-time timers up to the watermark, earliest first. Yields between two bounded steps."""
        self._ask.current_watermark = watermark_ms
        return self._fire(TimeDomain.EVENT_TIME, watermark_ms, emit)

    def next_processing_time_ms(self) -> int | None:
        """Returns the time of the earliest processing-time timer, in ms, or None if there is no timer."""
        return self._timers.first_ms(TimeDomain.PROCESSING_TIME)

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Fires the processing-time timers up to `now_ms`, earliest first. Yields between two bounded steps."""
        return self._fire(TimeDomain.PROCESSING_TIME, now_ms, emit)

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns a snapshot of keyed states, timers and operator states, or None if the stream has no keys and the
        function no operator state.
        """
        if not self._keys[0] and not self._operator_states:
            return None
        frozen: tuple[FrozenState, ...] = self._operator_states.freeze()
        snapshot = OperatorSnapshot(self.context.uid)
        if self._codec is not None and self._states is not None:
            snapshot = self._frozen(cut)
            frozen += snapshot.states
        return replace(snapshot, states=frozen)

    def changes(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns the changes of keyed states and timers since the last snapshot."""
        return None if self._codec is None or self._states is None else self._frozen(cut)

    @property
    def changed_bytes(self) -> int:
        """Returns an estimate of the bytes of changed state, in which every input row counts as one change."""
        return self._changed_rows * _CHANGE_BYTES

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Returns the backend that stores keyed states, or None on a stream without keys."""
        return None if self._states is None else self._states.backend

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.

        Only `close` may be called afterwards.
        """
        if self._states is not None:
            self._states.hand_over()

    def finish(self, emit: Emit) -> Iterator[None]:
        """Fires or drops the processing-time timers, then emits the rows of the function's `finish`.

        Yields between two batches.
        """
        self._timers.end(TimeDomain.PROCESSING_TIME)
        if self._fires_at_end and self._timers.is_due(TimeDomain.PROCESSING_TIME, MAX_WATERMARK_MS):
            yield from self._fire(TimeDomain.PROCESSING_TIME, MAX_WATERMARK_MS, emit)
            yield
            yield from self._fire(TimeDomain.EVENT_TIME, MAX_WATERMARK_MS, emit)  # timers that these have registered
            yield
        self._timers.drop(TimeDomain.PROCESSING_TIME)
        with blame_call(self.context, "finish"):
            returned = self._function.finish(self._ask)
            rows = iter(returned_rows(() if returned is None else returned))
        while True:
            with blame_call(self.context, "finish"):
                self._collect(itertools.islice(rows, OUTPUT_ROWS_MAX))
            self._sides.flush()
            if not self._rows:
                return
            self._emit_rows(emit, 1)
            yield

    def close(self) -> None:
        """Closes the function, and releases the resources of the backend."""
        try:
            self._function.close()
        finally:
            if self._states is not None:
                self._states.close()

    def _has_timer_method(self) -> bool:
        """Returns whether the function, or its object, replaces the `on_timer` that does nothing."""
        return getattr(self._function.on_timer, "__func__", None) is not BaseProcessFunction.on_timer

    def _frozen(self, cut: Cut) -> OperatorSnapshot:
        assert self._states is not None
        if cut.keyed:
            self._changed_rows = 0
        return self._states.freeze(cut)

    def _take_over(self, states: KeyedStates) -> None:
        """Takes over the state that the backend already has, if any."""
        stored = states.stored_keys()
        if stored is not None:
            self._check_keyed("the state", stored.names)
            self._key_codec(stored)

    def _check_keyed(self, what: str, columns: Sequence[str]) -> None:
        names = list(self._keys[0])
        if not names or list(columns[: len(names)]) != names:
            raise ConfigurationError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}) is keyed by {names}, but {what} of the "
                f"checkpoint has columns {list(columns)}; key by the same columns as before, or change the uid"
            )

    def _restore(self, table: StateTable) -> None:
        rows = compact(table.rows)
        self._check_keyed(f"state {table.state!r}", rows.schema.names)
        keys = rows.select(list(self._keys[0]))
        self._key_codec(keys.schema)
        check_owner(self.context, keys, self._owners)
        if self._states is not None:
            self._states.load(replace(table, rows=rows))

    def _key_codec(self, schema: pa.Schema) -> KeyCodec:
        """Returns the codec that encodes keys. The key columns of the first batch determine the codec's schema.

        Raises ChangedTypeError for key columns with other types.
        """
        if self._codec is None:
            self._codec = KeyCodec(schema)
            if self._states is not None:
                self._states.fix_keys(self._codec)
        elif not schema.equals(self._codec.schema):
            raise ChangedTypeError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}) has keys of types "
                f"{_types(self._codec.schema)} and was given keys of {_types(schema)}: cast the key columns to the "
                "same types with with_columns before key_by"
            )
        return self._codec

    def _enter(self, index: int, batch: pa.RecordBatch) -> Sequence[KeyRef]:
        """Looks up the keys of a batch in the backend, and adds new keys. Returns a reference to each row's key."""
        if not self._keys[index] or self._states is None:
            return [None] * batch.num_rows
        return self._states.enter(self._keys_of(index, batch))

    def _leave(self, rows: int) -> None:
        """Ends the use of the current batch's keys in the state backend, and counts `rows` rows as changed."""
        assert self._states is not None, "keys without states"
        self._states.leave(rows)
        self._changed_rows += rows

    def _keys_of(self, index: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the key columns of a batch, with the column names of the first input.

        Raises ChangedTypeError for keys of other types, and an error for keys that belong to another subtask.
        """
        names = self._keys[index]
        if index not in self._seen or not self._seen[index].equals(batch.schema):
            self._key_codec(_renamed(key_schema(batch.schema, names), self._keys[0]))
            self._seen[index] = batch.schema
        columns = key_columns(batch, names).rename_columns(list(self._keys[0]))
        check_owner(self.context, columns, self._owners)
        return columns

    def _times_of(self, index: int, batch: pa.RecordBatch) -> pa.Array | None:
        """Returns the event time of each row, in ms. None if the stream has no event time."""
        column = self._timestamps[index]
        if column is None or batch.schema.get_field_index(column) < 0:
            return None
        return event_times_ms(batch, column)

    def _process_rows(
        self,
        handler: Handler,
        rows: Iterator[tuple[int, dict[str, Any]]],
        refs: Sequence[KeyRef],
        times: Sequence[int | None] | None,
    ) -> bool:
        """Calls `handler` with rows until their output fills a batch. Returns True if there may be rows that were not
        processed yet.

        `refs` has a reference to each row's key, and `times` the event time of each row in ms, or None.
        """
        scope, collect, ask, collected = self._scope, self._collect, self._ask, self._rows
        number, row = 0, dict[str, Any]()
        try:
            for number, row in rows:
                scope.number, scope.ref = number, refs[number]  # as `choose`, without a call for each row
                if times is not None:
                    ask.timestamp = times[number]
                result = handler(row, ask)
                if result is not None:
                    collect(result)
                    if len(collected) >= OUTPUT_ROWS_MAX:
                        return True
        except OperatorError:
            raise
        except BaseException as error:
            if not is_failure(error):
                raise
            raise failure(self.context, error, f"row {number} of the batch", row) from error
        return False

    def _process_guarded(
        self,
        failing: FailingRows,
        handler: Handler,
        batch: pa.RecordBatch,
        rows: Iterator[tuple[int, dict[str, Any]]],
        refs: Sequence[KeyRef],
        times: Sequence[int | None] | None,
        emit: Emit,
    ) -> None:
        """Calls `handler` with all rows, and sends the rows that fail to the side output."""
        for number, row in rows:
            self._scope.number, self._scope.ref = number, refs[number]
            if times is not None:
                self._ask.timestamp = times[number]
            caught: list[BaseException] = []
            with blame_row(self.context, row, number), self._guarded(caught):
                self._collect(handler(row, self._ask))
            if caught:
                failing.add(number, caught[0])
            self._emit_rows(emit, OUTPUT_ROWS_MAX)
            self._sides.leave_full()
        self._set_aside(failing, batch)

    @contextmanager
    def _guarded(self, caught: list[BaseException]) -> Iterator[None]:
        """Returns a context manager for one call of the user's function.

        If the call fails, its changes of state are undone, and the error is appended to `caught`.
        """
        assert self._undo is not None, "errors_to was not given"
        rows, sides = len(self._rows), self._sides.mark()
        timers, lists = self._timers.mark(), self._operator_states.mark()
        self._undo.begin()
        try:
            yield
            for made in self._rows[rows:]:
                if self._fits(made) is NO_FAST_PATH:
                    self._pinned.from_rows([made])
        except BaseException as error:
            if not is_of_function(error, self._undo):
                raise
            del self._rows[rows:]
            self._sides.back_to(sides)
            self._timers.back_to(timers)
            self._operator_states.back_to(lists)
            self._undo.back()
            caught.append(error)

    def _set_aside(self, failing: FailingRows | None, batch: pa.RecordBatch) -> None:
        """Sends the failed rows or timers of `batch` to the side output."""
        if failing is not None:
            failing.leave(batch, self.context)

    def _fire(self, domain: TimeDomain, time_ms: int, emit: Emit) -> Iterator[None]:
        timers = self._timers
        at_end = domain is TimeDomain.EVENT_TIME and time_ms == MAX_WATERMARK_MS
        chains = TimerChains(timers, at_end)
        while timers.is_due(domain, time_ms):
            self._fire_step(domain, time_ms, chains)
            self._ask.time_domain = None
            self._end_call(emit)
            if timers.is_due(domain, time_ms):
                yield

    def _fire_step(self, domain: TimeDomain, time_ms: int, chains: TimerChains) -> None:
        """Fires due timers, up to the number that one step allows, and collects the rows that they emit."""
        timers, pace, failing = self._timers, self.context.pace, self._failing[0]
        if timers.no_method is not None:
            raise IncompatibleStateError(
                f"operator {self.context.name!r} (uid {self.context.uid!r}): {pending_timers(timers.no_method)}"
            )
        self._ask.time_domain = domain
        assert self._states is not None and self._codec is not None, "timers without keys"
        step = timers.begin_step(domain, time_ms, pace.timers_max, self._codec)
        refs = self._states.enter(step.columns, step.keys)
        with blame_call(self.context, "on_timer"):
            chains.begin_step()
        with Blame(self.context, lambda: (f"{timer_place(self._ask.timestamp or 0)} of key", self._ask.current_key)):
            for _ in range(pace.timers_max):
                if len(self._rows) >= OUTPUT_ROWS_MAX or (timer := timers.pop()) is None:
                    break
                self._ask.timestamp, number = timer
                self._scope.choose(number, refs[number])
                chains.fires(timer[0])
                if failing is None:
                    self._collect(self._function.on_timer(timer[0], self._ask))
                else:
                    caught: list[BaseException] = []
                    with self._guarded(caught):
                        self._collect(self._function.on_timer(timer[0], self._ask))
                    if caught:
                        failing.add(number, caught[0], timer_place(timer[0]))
                pace.timers += 1
        self._leave(len(step.keys))
        self._set_aside(failing, step.columns)

    def _collect(self, rows: Iterable[Mapping[str, Any]] | None) -> None:
        if rows is None:
            return
        append, own_row = self._rows.append, self._pinned.own_row
        for row in returned_rows(rows):
            append(own_row(row))

    def _emit_rows(self, emit: Emit, rows_min: int) -> None:
        """Emits the collected rows if there are at least `rows_min` of them."""
        if len(self._rows) < rows_min:
            return
        rows, self._rows = self._rows, []
        with Blame(self.context, lambda: ("first of the rows that the function returned", rows[0])):
            batches = [
                self._pinned.from_rows(rows[start : start + OUTPUT_ROWS_MAX])
                for start in range(0, len(rows), OUTPUT_ROWS_MAX)
            ]
        for batch in batches:
            emit(batch)

    def _end_call(self, emit: Emit) -> None:
        self._ask.timestamp = None
        self._sides.flush()
        self._emit_rows(emit, 1)


def _renamed(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    return pa.schema([pa.field(name, field.type) for name, field in zip(names, schema, strict=True)])


def _types(schema: pa.Schema) -> str:
    return ", ".join(str(field.type) for field in schema)


_READ_ONLY = (
    "only process_broadcast gets the same rows in every subtask. Changed elsewhere, the state would differ between "
    "subtasks. Change it in process_broadcast"
)


class BroadcastProcessOperator(ProcessOperator):
    """Runs a function that processes a stream together with a broadcast stream.

    The second input is the broadcast stream.
    """

    context_class = BroadcastContext

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the function, which may change broadcast states in `open`, because `open` is called in every subtask.

        They are read-only afterwards.
        """
        super().open(context, restored)
        self._gate.refusal = _READ_ONLY

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes a batch row by row. Broadcast states are writable while rows of the second input are processed."""
        if index == 0:
            super().process_input(index, batch, emit)
            return
        with self._writable():
            super().process_input(index, batch, emit)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        ask = self._ask
        assert isinstance(ask, BroadcastContext)
        self._gate.refusal, ask.broadcasting = None, True
        try:
            yield
        finally:
            self._gate.refusal, ask.broadcasting = _READ_ONLY, False


class BatchProcessOperator(ProcessOperator):
    """Runs a process function with one input by its method `process_batch`."""

    context_class = ProcessBatchContext
    by_batch = True
    timer_method = "on_timer_batch or on_timer"

    def __init__(
        self,
        function: ProcessFunction,
        keys: Sequence[tuple[str, ...]] = ((),),
        timestamps: Sequence[str | None] = (None,),
        schema: pa.Schema | None = None,
        side_outputs: Sequence[OutputTag] = (),
        fire_at_end: bool = False,
        errors_to: Sequence[OutputTag | None] = (),
        in_order: bool = False,
    ) -> None:
        super().__init__(function, keys, timestamps, schema, side_outputs, fire_at_end, errors_to, in_order)
        self._results = BatchResults(self._pinned)
        self._timers_by_batch = _defines(function, "on_timer_batch")
        self._parts: list[pa.RecordBatch] = []

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Calls `process_batch` with a batch.

        Raises OperatorError if the function raises, or if the keys do not fit.
        """
        function, ask = self._of_batches()

        def call(part: pa.RecordBatch) -> list[pa.RecordBatch]:
            return self._results.conformed(function.process_batch(part, ask), part.schema, memory_of(part))

        failing, waiting = self._failing[index], [(0, batch)]
        while waiting:
            start, part = waiting.pop()
            with blame(self.context, part):
                if self._keys[0] and self._states is not None:
                    self._states.enter_batch(self._keys_of(index, part))
                ask.begin_batch(partial(self._times_of, index, part))
                failed = self._call(failing, call, part)
            if self._keys[0]:
                self._leave(part.num_rows)
            if failing is not None and failed is not None:
                waiting += failing.halves(start, part, failed)
        self._set_aside(failing, batch)
        self._end_call(emit)

    def _has_timer_method(self) -> bool:
        return self._timers_by_batch or super()._has_timer_method()

    def _fire_step(self, domain: TimeDomain, time_ms: int, chains: TimerChains) -> None:
        if not self._timers_by_batch:
            super()._fire_step(domain, time_ms, chains)
            return
        function, ask = self._of_batches()
        assert self._states is not None, "timers without keys"
        ask.time_domain = domain
        due = self._timers.due(domain, time_ms, self.context.pace.timers_max)
        rows = due.keys.num_rows

        def call(keys: pa.RecordBatch) -> list[pa.RecordBatch]:
            return self._results.conformed(function.on_timer_batch(keys, ask), keys.schema, memory_of(keys))

        failing, waiting = self._failing[0], [(0, due.keys)]
        with Blame(
            self.context, lambda: (f"the first of {rows} timers, {timer_place(due.moments[0])}", first_row(due.keys))
        ):
            chains.begin_step()
            for moment_ms in due.moments:
                chains.fires(moment_ms)
            while waiting:
                start, keys = waiting.pop()
                moments = list(due.moments[start : start + keys.num_rows])
                self._states.enter_batch(keys)
                self._timers.change_many(domain, moments, False, list(range(keys.num_rows)))
                ask.begin_batch(partial(pa.array, moments, pa.int64()))
                failed = self._call(failing, call, keys)
                self._leave(keys.num_rows)
                if failing is not None and failed is not None:
                    waiting += failing.halves(start, keys, failed, timer_place(moments[0]))
        self._set_aside(failing, due.keys)
        self.context.pace.timers += rows

    def _call(
        self, failing: FailingRows | None, call: Callable[[pa.RecordBatch], list[pa.RecordBatch]], rows: pa.RecordBatch
    ) -> BaseException | None:
        """Calls the function for some rows or timers, and collects its results.

        If the call fails and failing rows go to a side output, undoes its changes and returns the error. Otherwise
        returns None.
        """
        if failing is None:
            self._parts += call(rows)
            return None
        caught: list[BaseException] = []
        made: list[pa.RecordBatch] = []
        with self._guarded(caught):
            made = call(rows)
        self._parts += made
        return caught[0] if caught else None

    def _end_call(self, emit: Emit) -> None:
        super()._end_call(emit)
        parts, self._parts = self._parts, []
        for part in parts:
            emit(part)

    def _of_batches(self) -> tuple[ProcessFunction, ProcessBatchContext]:
        function, ask = self._function, self._ask
        assert isinstance(function, ProcessFunction) and isinstance(ask, ProcessBatchContext)
        return function, ask


def process_operator(
    function: BaseProcessFunction,
    keys: Sequence[tuple[str, ...]] = ((),),
    timestamps: Sequence[str | None] = (None,),
    schema: pa.Schema | None = None,
    side_outputs: Sequence[OutputTag] = (),
    fire_at_end: bool = False,
    errors_to: Sequence[OutputTag | None] = (),
    in_order: bool = False,
) -> ProcessOperator:
    """Returns the operator that runs a process function, row by row or batch by batch depending on the methods that it
    defines.

    The parameters are described at `ProcessOperator`. Raises ConfigurationError for a function that defines both
    methods for one purpose, or only methods for timers, and for errors that `ProcessOperator` raises.
    """
    if isinstance(function, ProcessFunction):
        by_batch = _defines(function, "process_batch")
        for one, other in (("process", "process_batch"), ("on_timer", "on_timer_batch")):
            if _defines(function, one) and _defines(function, other):
                raise ConfigurationError(
                    f"{type(function).__name__} defines both {one} and {other}, but only one of them would be called; "
                    "remove the other"
                )
        if by_batch:
            return BatchProcessOperator(
                function, keys, timestamps, schema, side_outputs, fire_at_end, errors_to, in_order
            )
        if _defines(function, "on_timer_batch"):
            raise ConfigurationError(
                f"{type(function).__name__} defines on_timer_batch without process_batch, but a function that gets "
                "rows one by one also gets timers one by one; define on_timer"
            )
    return ProcessOperator(function, keys, timestamps, schema, side_outputs, fire_at_end, errors_to, in_order)


def _defines(function: ProcessFunction, method: str) -> bool:
    return getattr(type(function), method) is not getattr(ProcessFunction, method)
