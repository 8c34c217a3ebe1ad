"""`ProcessFunction` and its context: what users write to process a stream by row or batch, with state and timers.

`ProcessOperator` calls them, or `BatchProcessOperator`. Rules:

- A function object is copied for each subtask and attempt, so it may keep what `open` makes. What must survive a
  failure belongs in state.
- Rows come and go as dicts, batches as Arrow has them. All calls come from one thread, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa

from tidegate.operators.function_context import FunctionContext
from tidegate.operators.functions.batch_results import BatchResult
from tidegate.operators.operator import OperatorContext
from tidegate.operators.side_rows import SideRows
from tidegate.operators.state.key_scope import KeyGroups, KeyScope
from tidegate.operators.state.keyed_state import ListState, MapState, S
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.operator_state import BroadcastState, OperatorListState, OperatorStates
from tidegate.operators.state.timers import TimeDomain, Timers, TimerService
from tidegate.protocol.side_outputs import OutputTag
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError

Rows: TypeAlias = Iterable[Mapping[str, Any]] | None


class ProcessContext(FunctionContext):
    """What a function can ask for. Times and keyed state are those of the row or timer that is being processed."""

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
        """Event time in milliseconds: that of the row (None if the stream has none), or the moment of the timer."""
        self.time_domain: TimeDomain | None = None
        """What the timer waited for; None outside of `on_timer`."""
        self.current_watermark = MIN_WATERMARK_MS
        """The newest watermark, in milliseconds; `MIN_WATERMARK_MS` before the first one, also after a restore."""
        self.timer_service = TimerService(
            timers, scope, lambda: self.current_processing_time, lambda: self.current_watermark
        )
        """Registers and deletes timers of the current key."""

    @property
    def current_processing_time(self) -> int:
        """Processing time in milliseconds: when the task took up what is being processed.

        In `on_timer` it is never before the moment of the timer, also where that fires because the input has ended.
        """
        now_ms = super().current_processing_time
        return now_ms if self.time_domain is not TimeDomain.PROCESSING_TIME else max(now_ms, self._fires_ms())

    @property
    def current_key(self) -> dict[str, Any]:
        """The key columns of the current key. ConfigurationError where there is no key."""
        return self._scope.current_row("the current key")

    def emit(self, tag: OutputTag | str, row: Mapping[str, Any]) -> None:
        """Emit a row under a tag: `context.emit("bad", row)`. It goes to the stream that `side_output("bad")` gives.

        The tag must be one of `side_outputs=` of the step; the row has the columns of its schema. ConfigurationError
        for another tag, and in `open`.
        """
        self._sides.add(tag, row)

    def state(self, declared: S) -> S:
        """Bind a state, in `open`: `self.count = self.context.state(tg.ValueState("count", pa.int64()))`.

        Raises ConfigurationError outside of `open`, on a stream without keys, and for a name that is taken.
        """
        if self._states is None:
            raise ConfigurationError(f"state {declared.name!r} needs a keyed stream: call key_by(...) before process")
        return self._states.bind(declared)

    def list_state(self, declared: ListState) -> OperatorListState:
        """Bind a list of this subtask, in `open`, with or without keys: `context.list_state(tg.ListState("x", ...))`.

        At another parallelism its elements are dealt out anew, round-robin. What was restored is in it at once.
        Raises ConfigurationError outside of `open`, and for a name that is taken.
        """
        return self._operator_states.list_state(declared, StateKind.LIST)

    def union_list_state(self, declared: ListState) -> OperatorListState:
        """Bind a list as `list_state` does. After a restore every subtask gets the elements of all subtasks.

        Keep only this subtask's part of them, with `update` in `open`; otherwise every subtask keeps everything. While
        some subtasks of the operator have finished and others have not, no checkpoint can be taken.
        """
        return self._operator_states.list_state(declared, StateKind.UNION)

    def broadcast_state(self, declared: MapState) -> BroadcastState:
        """Bind a map that is the same in every subtask, because each changes it alike: by rows that all of them get.

        After a restore, at any parallelism, all begin with the map of one subtask. Raises as `list_state`.
        """
        return self._operator_states.broadcast_state(declared)

    def _fires_ms(self) -> int:
        """The moment of the timer that fires."""
        return MIN_WATERMARK_MS if self.timestamp is None else self.timestamp


class ProcessBatchContext(ProcessContext):
    """What `process_batch` and `on_timer_batch` can ask for, beside what every function can.

    There is no current key, unless the function chooses one. `timestamp` is None.
    """

    _groups: KeyGroups | None = None
    _times: Callable[[], pa.Array | None] = staticmethod(lambda: None)

    @property
    def timestamps(self) -> pa.Array | None:
        """Event time of each row in milliseconds (int64), or the moment of each timer. None if the stream has none."""
        return self._times()

    def groups(self) -> KeyGroups:
        """The rows by key: `keys` has each key once, `index` the group of each row.

        `state.get_many(groups)` gives a value for each key. ConfigurationError on a stream without keys.
        """
        if self._groups is None:
            self._groups = KeyGroups(self._scope.batch_columns)
        return self._groups

    def choose_key(self, row: int) -> None:
        """Make the key of a row the current one: `value()`, `add(...)` and timers then work on it, as in `process`."""
        self._scope.choose_row(row)

    def begin_batch(self, times: Callable[[], pa.Array | None]) -> None:
        """Called before the function gets a batch. `times` gives the timestamps of its rows."""
        self._groups, self._times = None, times

    def _fires_ms(self) -> int:
        times = self._times() if self.timestamp is None else None
        return super()._fires_ms() if times is None else int(times.to_numpy().max())


class BaseProcessFunction:
    """What functions with one and with two inputs share. Every method here is optional."""

    INPUT_METHODS: ClassVar[tuple[str, ...]] = ()
    """Names of the methods that get the rows of each input."""

    context: ProcessContext
    """The same context that the methods get."""

    def open(self, context: ProcessContext) -> None:
        """Called once, before anything else: bind states here."""

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        """A timer of the current key fires. It was registered for `timestamp` (ms) of `context.time_domain`.

        Returns (or yields) rows, as `process` does.
        """
        return None

    def finish(self, context: ProcessContext) -> Rows:
        """The input has ended and all event-time timers have fired: returns the last rows. There is no current key."""
        return None

    def close(self) -> None:
        """Release resources. Called once, also after a failure, and even if `open` was not reached."""


class ProcessFunction(BaseProcessFunction):
    """Processes a stream, with state and timers of the row's key where the stream is keyed.

    Define `process`, which gets one row after the other, or `process_batch`, which gets Arrow batches.
    """

    INPUT_METHODS = ("process",)

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Process one row; returns an iterable of new rows (or yields them), or None for nothing."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, row, context)")

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> BatchResult:
        """Process a batch, which is not empty: in place of `process`, many times as fast.

        Returns new rows (a batch, a table, a polars DataFrame), or None for nothing. State is read and written by
        `get_many`, `put_many` and `clear_many`. A batch may have a key several times: see `context.groups()`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method process_batch(self, batch, context)")

    def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> BatchResult:
        """Timers fire: in place of `on_timer`, beside `process_batch`.

        Row i of `keys` has the key columns of timer i, and `context.timestamps` its moment. They come in order of
        moment, then of key, and are not registered any more. Those that are registered here fire in a later call.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method on_timer_batch(self, keys, context)")


class CoProcessFunction(BaseProcessFunction):
    """Processes two connected streams row by row; where they are keyed, rows of one key share its state."""

    INPUT_METHODS = ("process1", "process2")

    def process1(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Process one row of the first stream, as `ProcessFunction.process`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process1(self, row, context)")

    def process2(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Process one row of the second stream."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process2(self, row, context)")
