"""`ProcessFunction` and related classes: functions that users write to process rows or batches with state and timers.

`ProcessOperator` or `BatchProcessOperator` calls them. Rules:

- A function object is copied for each subtask and attempt, so it may keep objects that `open` creates. Data that must
  survive a failure must be stored in state.
- Rows are dicts, batches are Arrow batches. All calls come from one thread, one after the other.
- Broadcast functions process a stream together with a broadcast stream (Flink's broadcast pattern). Every row of the
  broadcast side goes to every subtask and changes the broadcast states there. The states are therefore equal
  everywhere, as long as `process_broadcast` depends only on the row and these states. The other side can read but not
  write them, because each of its rows goes to a single subtask. The order between rows of the two sides, and between
  several senders of the broadcast side, is undefined.
- `SideRows` collects the rows that a function emits to side outputs. They are emitted when the call of the operator
  ends, or earlier if there are many, so no collected rows remain when a barrier comes.
- `stateful_map`, `reduce`, `map_groups` and `limit` are process functions with a single state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.functions.batch_functions import BatchResult
from tidegate.operators.operator import EmitAside, FunctionContext, OperatorContext
from tidegate.operators.operator_errors import Blame
from tidegate.operators.output_schema import FromPolars, PinnedSchema
from tidegate.operators.row_values import owned_flat_row, python_rows
from tidegate.operators.state.keyed_state import ListState, MapState, S, ValueState
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.keys import KeyGroups, KeyScope
from tidegate.operators.state.operator_state import BroadcastState, OperatorListState, OperatorStates
from tidegate.operators.state.timers import TimeDomain, Timers, TimerService
from tidegate.operators.state.ttl import StateTtl
from tidegate.protocol.edges import OutputTag, check_tags
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.polars_frames import is_polars_frame

Rows: TypeAlias = Iterable[Mapping[str, Any]] | None


class ProcessContext(FunctionContext):
    """Context of a process function. Times and keyed state belong to the row or timer that is being processed."""

    def __init__(
        self,
        context: OperatorContext,
        states: KeyedStates | None,
        operator_states: OperatorStates,
        scope: KeyScope,
        timers: Timers,
        sides: SideRows,
    ) -> None:
        super().__init__(context)
        self._sides = sides
        self._states = states
        self._operator_states = operator_states
        self._scope = scope
        self.timestamp: int | None = None
        """Event time in milliseconds: the time of the row, or of the timer. None if the stream has no event time."""
        self.time_domain: TimeDomain | None = None
        """Time domain of the timer, or None outside of `on_timer`."""
        self.current_watermark = MIN_WATERMARK_MS
        """The newest watermark, in milliseconds; `MIN_WATERMARK_MS` before the first one, also after a restore."""
        self.timer_service = TimerService(
            timers, scope, lambda: self.current_processing_time, lambda: self.current_watermark
        )
        """Registers and deletes timers of the current key."""

    @property
    def current_processing_time(self) -> int:
        """Processing time in milliseconds since 1970: the time at which the task started to process the current rows or
        timer.

        In `on_timer` the time is never before the time of the timer, also if the timer fires because the input has
        ended.
        """
        now_ms = super().current_processing_time
        return now_ms if self.time_domain is not TimeDomain.PROCESSING_TIME else max(now_ms, self._fires_ms())

    @property
    def current_key(self) -> dict[str, Any]:
        """Returns the values of the key columns of the current key, by name.

        Raises ConfigurationError if there is no current key.
        """
        return self._scope.current_row("the current key")

    def emit(self, tag: OutputTag | str, row: Mapping[str, Any]) -> None:
        """Emits a row to a side output: `context.emit("bad", row)`. `side_output("bad")` of the step returns the stream
        of these rows.

        The tag must be one of `side_outputs=` of the step, and the row must have the columns of its schema. Raises
        ConfigurationError for another tag, and if called in `open`.
        """
        self._sides.add(tag, row)

    def state(self, declared: S) -> S:
        """Binds a state, in `open`: `self.count = self.context.state(tg.ValueState("count", pa.int64()))`.

        Raises ConfigurationError outside of `open`, on a stream without keys, and for a name that is already used.
        """
        if self._states is None:
            raise ConfigurationError(f"state {declared.name!r} needs a keyed stream: call key_by(...) before process")
        return self._states.bind(declared)

    def list_state(self, declared: ListState) -> OperatorListState:
        """Binds a list that belongs to this subtask, in `open`, with or without keys:
        `context.list_state(tg.ListState("x", ...))`.

        The list contains its restored elements at once. If the parallelism changes, elements are redistributed
        round-robin. Raises ConfigurationError outside of `open`, and for a name that is already used.
        """
        return self._operator_states.list_state(declared, StateKind.LIST)

    def union_list_state(self, declared: ListState) -> OperatorListState:
        """Binds a list as `list_state` does. After a restore every subtask gets the elements of all subtasks.

        Call `update` in `open` to replace them by the elements of this subtask. Otherwise every subtask keeps all
        elements. While some subtasks of the operator have finished and others have not, no checkpoint can be taken.
        """
        return self._operator_states.list_state(declared, StateKind.UNION)

    def broadcast_state(self, declared: MapState) -> BroadcastState:
        """Binds a map that is equal in every subtask, because every subtask receives the same rows and changes the map
        in the same way.

        After a restore, at any parallelism, every subtask begins with the stored map of one subtask. Raises
        ConfigurationError outside of `open`, and for a name that is already used.
        """
        return self._operator_states.broadcast_state(declared)

    def _fires_ms(self) -> int:
        """Returns the time of the timer that is firing, in ms.

        `MIN_WATERMARK_MS` if it has no event time.
        """
        return MIN_WATERMARK_MS if self.timestamp is None else self.timestamp


class ProcessBatchContext(ProcessContext):
    """Context of `process_batch` and `on_timer_batch`. Adds methods for whole batches to `ProcessContext`.

    There is no current key until the function calls `choose_key`. `timestamp` is None.
    """

    _groups: KeyGroups | None = None
    _times: Callable[[], pa.Array | None] = staticmethod(lambda: None)

    @property
    def timestamps(self) -> pa.Array | None:
        """Event time of each row, or time of each timer, in milliseconds (int64).

        None if the stream has no event time.
        """
        return self._times()

    def groups(self) -> KeyGroups:
        """Returns the rows of the batch grouped by key: `keys` has each key once, and `index` the group of each row.

        `state.get_many(groups)` returns a value for each key. Raises ConfigurationError on a stream without keys.
        """
        if self._groups is None:
            self._groups = KeyGroups(self._scope.batch_columns)
        return self._groups

    def choose_key(self, row: int) -> None:
        """Makes the key of the row with the index `row` the current key.

        `value()`, `add(...)` and timers then use this key, as in `process`.
        """
        self._scope.choose_row(row)

    def begin_batch(self, times: Callable[[], pa.Array | None]) -> None:
        """Prepares the context for a new batch. `times` returns the timestamps of its rows, in ms."""
        self._groups, self._times = None, times

    def _fires_ms(self) -> int:
        times = self._times() if self.timestamp is None else None
        return super()._fires_ms() if times is None else int(times.to_numpy().max())


class BaseProcessFunction:
    """Base class of process functions with one and with two inputs. All of its methods are optional."""

    INPUT_METHODS: ClassVar[tuple[str, ...]] = ()
    """For each input, the name of the method that processes its rows."""

    context: ProcessContext
    """The context that is passed to all methods."""

    def open(self, context: ProcessContext) -> None:
        """Prepares the function: bind states here. Called once, before all other methods."""

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        """Called when a timer of the current key fires. `timestamp` is the time of the timer, in ms, and
        `context.time_domain` its time domain.

        Returns (or yields) rows, as `process` does.
        """
        return None

    def finish(self, context: ProcessContext) -> Rows:
        """Returns the last rows.

        Called after the input has ended and all event-time timers have fired. There is no current key.
        """
        return None

    def close(self) -> None:
        """Releases resources. Called once, also after a failure, and even if `open` was not reached."""


class ProcessFunction(BaseProcessFunction):
    """Processes a stream of rows. On a keyed stream, state and timers belong to the key of the row.

    Define `process`, which gets single rows, or `process_batch`, which gets Arrow batches. Pass an object of the class
    to `Stream.process` or `KeyedStream.process`.

    Example:

        >>> class Gaps(tg.ProcessFunction):
        ...     def open(self, context):
        ...         self.last = context.state(tg.ValueState("last", int))
        ...
        ...     def process(self, row, context):
        ...         last = self.last.value()
        ...         self.last.update(row["at"])
        ...         if last is not None:
        ...             yield {"user": row["user"], "gap_ms": row["at"] - last}
        >>> orders.key_by("user").process(Gaps(), schema={"user": str, "gap_ms": int}).show()
        +------+--------+
        | user | gap_ms |
        +------+--------+
        | ann  |   2000 |
        +------+--------+
    """

    INPUT_METHODS = ("process",)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Processes one row. Returns an iterable of new rows as dicts, yields them, or returns None for no rows."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, row, context); define it")

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> BatchResult:
        """Processes a batch, which is not empty. Define this method in place of `process`: it is many times faster.

        Returns new rows (a batch, a table, a polars DataFrame), or None for no rows. Read and write state by
        `get_many`, `put_many` and `clear_many`. A batch may contain a key several times: see `context.groups()`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method process_batch(self, batch, context); define it"
        )

    def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> BatchResult:
        """Called with timers that fire, instead of `on_timer`, for functions with `process_batch`.

        Row i of `keys` has the key columns of timer i, and `context.timestamps` has its time. Timers are sorted by
        time, then by key, and are no longer registered. Timers that this call registers fire in a later call. Returns
        new rows, as `process_batch` does.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method on_timer_batch(self, keys, context); define it"
        )


class CoProcessFunction(BaseProcessFunction):
    """Processes two connected streams row by row.

    If they are keyed, rows of both streams with the same key share its state. Rows of the two streams are processed in
    any order, so wait with a timer for rows of the other stream.

    Example:

        >>> class Debts(tg.CoProcessFunction):
        ...     def open(self, context):
        ...         self.debt = context.state(tg.ValueState("debt", int))
        ...
        ...     def process1(self, order, context):
        ...         self.debt.update((self.debt.value() or 0) + order["amount"])
        ...         context.timer_service.register_event_time_timer(60_000)
        ...
        ...     def process2(self, payment, context):
        ...         self.debt.update((self.debt.value() or 0) - payment["paid"])
        ...
        ...     def on_timer(self, timestamp, context):
        ...         yield {**context.current_key, "debt": self.debt.value()}
        >>> connected = orders.key_by("user").connect(payments.key_by("user"))
        >>> connected.process(Debts(), schema={"user": str, "debt": int}).show()
        +------+------+
        | user | debt |
        +------+------+
        | ann  |    0 |
        | bob  |    0 |
        +------+------+
    """

    INPUT_METHODS = ("process1", "process2")

    def process1(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Processes one row of the first stream. Returns or yields new rows as dicts, or returns None for no rows."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process1(self, row, context); define it")

    def process2(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Processes one row of the second stream. Returns or yields new rows as dicts, or returns None for no rows."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process2(self, row, context); define it")


class BroadcastContext(ProcessContext):
    """Context of functions that process a stream together with a broadcast stream."""

    broadcasting = False
    """True if a row of the broadcast side is being processed."""

    def apply_to_keyed_state(self, state: S, function: Callable[[dict[str, Any], S], None]) -> None:
        """Calls `function(key, state)` for every key of this subtask that has a value in a keyed state.

        `key` has the values of the key columns by name. It is the current key during the call, which `state`, every
        other keyed state and `timer_service` use. The order of keys is undefined. The function may change the state.
        The cost grows with the number of keys. With a time to live the value of a key may have expired, and `state` is
        empty then. Raises ConfigurationError outside of `process_broadcast`.
        """
        if not self.broadcasting or self._states is None:
            raise ConfigurationError(
                "apply_to_keyed_state goes through all keys: call it only in process_broadcast of a "
                "tg.KeyedBroadcastProcessFunction"
            )
        for _ in self._states.each_key(state):
            function(self.current_key, state)


class BroadcastProcessFunction(BaseProcessFunction):
    """Processes a stream without keys together with a broadcast stream:
    `stream.connect(rules.broadcast()).process(...)`.

    Every subtask gets all rows of the broadcast stream. Rows of the two streams are processed in any order.

    Example:

        >>> class Above(tg.BroadcastProcessFunction):
        ...     def open(self, context):
        ...         self.limits = context.broadcast_state(tg.MapState("limits", str, int))
        ...
        ...     def process(self, row, context):
        ...         limit = self.limits.get("amount")
        ...         if limit is not None and row["amount"] > limit:
        ...             yield row
        ...
        ...     def process_broadcast(self, rule, context):
        ...         self.limits.put(rule["column"], rule["limit"])
        >>> rules = env.from_rows([{"column": "amount", "limit": 10}])
        >>> orders.connect(rules.broadcast()).process(Above(), schema=orders.schema).columns
        ['user', 'amount', 'at']
    """

    INPUT_METHODS = ("process", "process_broadcast")

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Processes one row of the first stream.

        Returns or yields new rows, or returns None. Broadcast states are read-only.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, row, context); define it")

    def process_broadcast(self, row: dict[str, Any], context: BroadcastContext) -> Rows:
        """Processes one row of the broadcast stream, in every subtask. Broadcast states can be changed.

        The changes must be the same in every subtask, so they may depend only on the row and on broadcast states.
        Returns or yields new rows, or returns None.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method process_broadcast(self, row, context); define it"
        )


class KeyedBroadcastProcessFunction(BroadcastProcessFunction):
    """Processes a keyed stream together with a broadcast stream:
    `stream.key_by("k").connect(rules.broadcast()).process(...)`.

    `process` and `on_timer` have the state and the timers of their key. `process_broadcast` has no current key. It can
    visit all keys of the subtask with `context.apply_to_keyed_state`.

    Example:

        >>> class Spent(tg.KeyedBroadcastProcessFunction):
        ...     def open(self, context):
        ...         self.spent = context.state(tg.ValueState("spent", int))
        ...
        ...     def process(self, row, context):
        ...         self.spent.update((self.spent.value() or 0) + row["amount"])
        ...
        ...     def process_broadcast(self, request, context):
        ...         found = []
        ...         add = lambda key, spent: found.append({**key, "n": spent.value()})
        ...         context.apply_to_keyed_state(self.spent, add)
        ...         return found
        >>> requests = env.from_rows([{"report": 1}])
        >>> connected = orders.key_by("user").connect(requests.broadcast())
        >>> connected.process(Spent(), schema={"user": str, "n": int}).columns
        ['user', 'n']
    """


Row = Mapping[str, Any]


class StatefulMap(ProcessFunction):
    """Process function of `stateful_map`: calls `fn(state, row)` with each row, and `fn` returns the new state of the
    key and a row.
    """

    def __init__(self, fn: Callable[[Any, Row], tuple[Any, Any]], dtype: Any, ttl: StateTtl | None) -> None:
        self.fn = fn
        self._declared = ValueState("state", dtype, ttl=ttl)

    def open(self, context: ProcessContext) -> None:
        """Binds the state in which the value of a key is stored."""
        self._state = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Calls the function with the state of the key and the row, stores the state that it returns, and returns its
        row.
        """
        result = self.fn(self._state.value(), row)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"stateful_map: the function returned {type(result).__name__}; "
                "return a tuple of two values, the new state and the new row"
            )
        state, made = result
        self._state.update(state)  # None clears it
        return [made]


class Reduce(ProcessFunction):
    """Process function of `reduce`: calls `fn(before, row)` with the stored result of the key and each further row, and
    emits the result.

    The first row of a key is emitted as it is.
    """

    def __init__(self, fn: Callable[[Row, Row], Row], schema: pa.Schema) -> None:
        self.fn = fn
        self._names = frozenset(schema.names)
        self._declared = ValueState("reduced", pa.struct(list(schema)))

    def open(self, context: ProcessContext) -> None:
        """Binds the state that stores the latest result of a key."""
        self._reduced = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Returns the row that combines all rows of the key so far, and stores it."""
        before = self._reduced.value()
        made = row if before is None else self.fn(before, row)
        kept = owned_flat_row(made)
        # A row that lacks a column is refused where it is emitted. The error there names the function, not this state.
        if self._names <= kept.keys():
            self._reduced.update(kept)
        return [made]


class MapGroups(ProcessFunction):
    """Process function of `map_groups`: stores the rows of each key, and calls `fn` with all of them at the end of the
    input.
    """

    def __init__(self, fn: Callable[[pa.Table], Any], schema: pa.Schema) -> None:
        self.fn = fn
        self._schema = schema
        self._declared = ListState("rows", pa.struct(list(schema)))
        self._from_polars = FromPolars()

    def open(self, context: ProcessContext) -> None:
        """Binds the list state that stores the rows of a key."""
        self._rows = context.state(self._declared)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Stores the row, and registers a timer that fires when the input has ended."""
        self._rows.add(row)
        context.timer_service.register_event_time_timer(MAX_WATERMARK_MS)
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        """Returns the rows that the function returns for all rows of the key, and clears the stored rows."""
        rows = pa.Table.from_pylist(list(self._rows.get()), schema=self._schema)
        self._rows.clear()
        result = self.fn(rows)
        if result is None:
            return None
        if isinstance(result, pa.RecordBatch):
            return python_rows(result)
        if isinstance(result, pa.Table):
            return [row for batch in result.to_batches() for row in python_rows(batch)]
        if is_polars_frame(result):
            return python_rows(self._from_polars.convert(result, self._schema))
        if hasattr(result, "__dataframe__"):
            raise TypeError(
                f"the function returned a {type(result).__module__.partition('.')[0]} {type(result).__name__}; return "
                "a pyarrow Table, a polars DataFrame, a row as a dict, an iterable of rows, or None"
            )
        return [result] if isinstance(result, Mapping) or not isinstance(result, Iterable) else result


class Limit(ProcessFunction):
    """Process function of `limit`: emits the first `n` rows.

    The number of rows emitted so far is operator state. Runs in one subtask.
    """

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or isinstance(n, bool) or n < 0:
            raise ConfigurationError(f"limit({n!r}): give a whole number of rows, 0 or more")
        self._n = n

    def open(self, context: ProcessContext) -> None:
        """Binds the list state with the number of rows emitted so far."""
        self._passed = context.list_state(ListState("passed", pa.int64()))

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch | None:
        """Returns the rows of the batch that are within the limit, or None if there are none."""
        passed = sum(self._passed.get())
        part = batch.slice(0, self._n - passed)
        if not part.num_rows:
            return None
        self._passed.update([passed + part.num_rows])
        return part


class SideRows:
    """Collects the rows that a function emits to the side outputs `tags` of one operator.

    With `holds`, `back_to` can drop rows again. Rows are then emitted only by `leave_full` and `flush`, and are checked
    when they are added. Raises ConfigurationError for invalid tags, and for two tags with the same name.
    """

    def __init__(self, tags: Sequence[OutputTag], holds: bool = False) -> None:
        check_tags("process", tags)
        self._holds = holds
        self._schemas = {tag.name: PinnedSchema(tag.schema) for tag in tags}
        self._rows: dict[str, list[Mapping[str, Any]]] = {}
        self._context: OperatorContext | None = None

    def begin(self, context: OperatorContext) -> None:
        """Accepts rows from now on. Called when the operator is open."""
        self._context = context

    def add(self, tag: OutputTag | str, row: Mapping[str, Any]) -> None:
        """Adds a row to the side output `tag`.

        Raises ConfigurationError for a tag that was not declared, and before the operator is open.
        """
        name = tag.name if isinstance(tag, OutputTag) else tag
        if name not in self._schemas:
            known = ", ".join(map(repr, self._schemas)) or "none"
            raise ConfigurationError(
                f"emit({name!r}): the step has no such side output; it has {known}: name it in side_outputs="
            )
        if self._context is None:
            raise ConfigurationError(
                f"emit({name!r}): rows can be emitted for a row, a timer or in finish, not in open; move this call"
            )
        try:
            owned = self._schemas[name].own_row(row)
        except TypeError as error:
            raise TypeError(f"emit({name!r}): {error}") from error
        rows = self._rows.setdefault(name, [])
        if self._holds:
            self._schemas[name].from_rows([owned])
        rows.append(owned)
        if len(rows) >= OUTPUT_ROWS_MAX and not self._holds:
            self._leave(name, self._context.emit_aside)

    def mark(self) -> dict[str, int]:
        """Returns the number of collected rows of each side output, to be passed to `back_to`."""
        return {name: len(rows) for name, rows in self._rows.items()}

    def back_to(self, mark: Mapping[str, int]) -> None:
        """Drops the rows that were added after `mark` was called. `mark` is the result of that call."""
        for name, rows in tuple(self._rows.items()):
            del rows[mark.get(name, 0) :]
            if not rows:
                del self._rows[name]

    def leave_full(self) -> None:
        """Emits the collected rows of each side output that has enough for a full batch.

        Results of earlier calls of `mark` become invalid.
        """
        for name, rows in tuple(self._rows.items()):
            if len(rows) >= OUTPUT_ROWS_MAX:
                assert self._context is not None
                self._leave(name, self._context.emit_aside)

    def flush(self) -> None:
        """Emits all collected rows. Raises OperatorError for rows that do not have the columns of their tag."""
        if self._rows:
            assert self._context is not None, "rows came before the operator was open"
            for name in tuple(self._rows):
                self._leave(name, self._context.emit_aside)

    def _leave(self, name: str, emit_aside: EmitAside) -> None:
        rows = self._rows.pop(name)
        assert self._context is not None
        with Blame(self._context, lambda: (f"first of the rows for the side output {name!r}", rows[0])):
            batch = self._schemas[name].from_rows(rows)
        emit_aside(name, batch)
