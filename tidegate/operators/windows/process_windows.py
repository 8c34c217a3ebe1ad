"""`ProcessWindowFunction`: a function over the rows of a window that also remembers something of its key.

`FunctionCalls` opens it, and calls it as other functions of windows are called. Rules:

- Each subtask of each attempt has a copy of the object to itself. What must survive a failure belongs in state.
- State is that of the key, and outlives its windows; or that of a key and window, and goes with the window. All lies in
  the backend of the rows that wait, so what the function has changed, what it has returned and the rows that it has got
  go forward together.
- Timers belong to a key and window, and are of event time. Only windows that are known from the time alone have them,
  and state of their own (`WindowLife`): sessions merge, and those of so many rows and of the clock are given once.
- Windows of all rows have one key, so their state is one.
- With a tag for errors, a call for a window or a timer that fails leaves nothing behind but a row of that side output.
  A timer that fails has fired.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import FunctionContext, OperatorContext
from tidegate.operators.operator_errors import Blame, blame_call, own_copy
from tidegate.operators.state.keyed_state import S, StateNames
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.keys import KeyCodec, KeyScope
from tidegate.operators.state.timers import TimeDomain, TimerChains
from tidegate.operators.state.undo import StateUndo
from tidegate.operators.windows.slices import Window
from tidegate.operators.windows.window_calls import Grouped, WindowCalls, WindowResult
from tidegate.operators.windows.window_specs import Times
from tidegate.operators.windows.window_states import StateOfWindows
from tidegate.operators.windows.window_timers import (
    TIMERS_OF_WINDOWS,
    WindowLife,
    WindowTimers,
    WindowTimerService,
)
from tidegate.protocol.side_outputs import OutputTag
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.common.cells import KeyRef
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.user_values import value_text


class ProcessWindowContext(FunctionContext):
    """What a function can ask for. Key, window and state are those of the call."""

    def __init__(
        self, context: OperatorContext, states: KeyedStates, scope: KeyScope, keyed: bool, life: WindowLife | None
    ) -> None:
        super().__init__(context)
        self._states, self._scope, self._keyed, self._life = states, scope, keyed, life
        self._timers: WindowTimerService | None = None
        self._of_windows: list[StateOfWindows] = []
        self.window: Window | None = None
        """`start_ms` and `end_ms` of the window, in milliseconds since 1970; None for count windows."""
        self.current_watermark = MIN_WATERMARK_MS
        """The newest watermark, in milliseconds; `MIN_WATERMARK_MS` before the first one, also after a restore."""

    @property
    def current_key(self) -> dict[str, Any]:
        """The key columns of the key; none for windows of all rows. ConfigurationError outside of `process`."""
        row = self._scope.current_row("the current key")
        return row if self._keyed else {}

    def state(self, declared: S) -> S:
        """Bind a state of the key, in `open`: `self.best = context.state(tg.ValueState("best", pa.float64()))`.

        ConfigurationError outside of `open`, and for a name that is taken.
        """
        return self._states.bind(declared)

    def window_state(self, declared: S) -> S:
        """Bind a state of the key and window, in `open`. It goes with the window.

        So it is there when late rows come, or timers. ConfigurationError as `state`, with a time to live, and for
        windows that have none.
        """
        of_windows = StateOfWindows(declared, self._window_end)
        check_life(self._life, f"state {declared.name!r} of a window")
        bound = self._states.bind(of_windows)
        self._of_windows.append(bound)
        return cast(S, bound.view)

    @property
    def timer_service(self) -> WindowTimerService:
        """Registers and deletes timers of the key and window. ConfigurationError for a function without `on_timer`."""
        if self._timers is None:
            raise ConfigurationError(
                "a timer calls on_timer(self, timestamp, context), which the function does not have"
            )
        return self._timers

    def _window_end(self) -> int:
        if self.window is None:
            raise ConfigurationError(
                "state and timers of a window can be used in process and on_timer, where there is one"
            )
        return self.window.end_ms


def check_life(life: WindowLife | None, what: str) -> None:
    """ConfigurationError for windows that have neither state nor timers of their own."""
    if life is None:
        raise ConfigurationError(
            f"{what} needs tg.Tumbling, tg.Sliding or tg.Cumulating of event time: sessions merge, and windows of so "
            "many rows or of processing time are given once; use context.state, or a process function on the stream"
        )


class ProcessWindowFunction:
    """Processes windows: gets all rows of each key and window, with state of the key."""

    context: ProcessWindowContext
    """The same context that the methods get."""

    def open(self, context: ProcessWindowContext) -> None:
        """Called once, before anything else: bind states here."""

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> WindowResult:
        """Process one window, whose rows lie in the order in which they came. Returns rows as for `apply`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, rows, context)")

    def on_timer(self, timestamp: int, context: ProcessWindowContext) -> WindowResult:
        """A timer of this key and window has come; `context.window` is the window. Returns rows as `process` does."""
        raise NotImplementedError(f"{type(self).__name__} needs a method on_timer(self, timestamp, context)")

    def close(self) -> None:
        """Release resources. Called once, also after a failure, and even if `open` was not reached."""


class FunctionCalls(WindowCalls):
    """Calls a `ProcessWindowFunction`. ConfigurationError for what is none, or cannot be copied."""

    def __init__(
        self,
        function: ProcessWindowFunction,
        keys: tuple[str, ...],
        schema: pa.Schema | None,
        bounds: pa.DataType | None,
        replaces: bool = False,
        errors_to: OutputTag | None = None,
    ) -> None:
        if not isinstance(function, ProcessWindowFunction):
            raise ConfigurationError(
                "process takes an object of a class derived from tg.ProcessWindowFunction where a stream has windows, "
                f"not {function!r}; a plain function belongs to apply"
            )
        self._function = own_copy(function)
        super().__init__(self._process, keys, schema, bounds, replaces, errors_to)
        self.name = f"{type(function).__name__}.process"
        self._undo = None if errors_to is None else StateUndo()
        self.has_timers = type(function).on_timer is not ProcessWindowFunction.on_timer
        """Whether the function has a method for them."""
        self._scope = KeyScope()
        self._refs: Sequence[KeyRef] = ()
        self._life: WindowLife | None = None
        self._timers: WindowTimers | None = None

    def open(
        self, context: OperatorContext, keys: pa.Schema, own_states: Sequence[str], life: WindowLife | None
    ) -> KeyedStates:
        """Open the function. Returns the states that it has bound. OperatorError if it raises.

        `own_states` are names that the operator needs itself. `life`: how long windows are there, if they have timers
        and state of their own.
        """
        names = StateNames()
        for name in own_states:
            names.take_own(name)
        self._context, self._life = context, life
        self.states = states = KeyedStates(context, keys.names, self._scope, names, undo=self._undo)
        ask = self._ask = ProcessWindowContext(context, states, self._scope, bool(self._keys), life)
        self._function.context = ask
        if self.has_timers and life is not None:
            timers = self._timers = WindowTimers(states, life)
            ask._timers = WindowTimerService(
                timers, ask._window_end, lambda: ask.current_processing_time, lambda: ask.current_watermark
            )
        else:
            names.take_own(TIMERS_OF_WINDOWS)  # its timers are tidegate's own, so they are not dropped as a state is
        with blame_call(context, "open"):
            self._function.open(ask)
        states.complete()
        self._codec = KeyCodec(keys)
        return states

    @property
    def keeps_windows(self) -> bool:
        """Whether the function has state or timers of windows, which go when the window does."""
        return self._timers is not None or bool(self._ask._of_windows)

    def chains(self, at_end: bool) -> TimerChains:
        """Notices timers that register one another without end."""
        return TimerChains(self.states.timers, at_end)

    def first_timer_ms(self) -> int | None:
        """The moment of the timer that fires next."""
        return None if self._timers is None else self.states.timers.first_ms(TimeDomain.EVENT_TIME)

    def fire(self, until_ms: int, chains: TimerChains, rows_schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Fire timers up to a moment, in the order of moments, keys and windows: as many as a step may."""
        assert self._timers is not None and self._life is not None, "windows without timers"
        pace, scope, ask = self._context.pace, self._scope, self._ask
        with Blame(self._context, lambda: (f"{self.name.removesuffix('.process')}.on_timer", None)):
            chains.begin_step()
        step = self.states.timers.begin_step(TimeDomain.EVENT_TIME, until_ms, pace.timers_max, self._codec)
        refs = self.states.enter(step.columns, step.keys)
        parts: list[pa.RecordBatch] = []
        numbers: list[int] = []
        ends: list[int] = []
        called = list[tuple[int, int]]()
        rows = 0
        for _ in range(pace.timers_max):
            if rows >= OUTPUT_ROWS_MAX or (timer := self.states.timers.pop()) is None:
                break
            moment_ms, number = timer
            scope.choose(number, refs[number])
            chains.fires(moment_ms)
            for end_ms in self._timers.windows_at(moment_ms):
                self._timers.fires(end_ms, moment_ms)
                ask.window = self._life.window(end_ms)
                with Blame(self._context, partial(self._told_of_timer, moment_ms)):
                    call = partial(self._found_of_timer, moment_ms, rows_schema)
                    found = self._attempt(len(called), call, f"timer at {moment_ms}")
                called.append((number, end_ms))
                parts += found
                numbers += [number] * len(found)
                ends += [end_ms] * len(found)
                rows += sum(part.num_rows for part in found)
            pace.timers += 1
        self.states.leave(len(step.keys))
        ask.window = None
        if parts:
            of = self._windows_of(step.columns, numbers, ends)
            yield from (told for _, told in self._joined(parts, range(len(parts)), of))
        if called:
            of = self._windows_of(step.columns, [number for number, _ in called], [end_ms for _, end_ms in called])
            self._set_aside(self._context, of)

    def _windows_of(self, columns: pa.RecordBatch, numbers: Sequence[int], ends: Sequence[int]) -> Grouped:
        """Windows by the numbers of their keys and their ends, without rows."""
        assert self._life is not None, "windows without a life"
        starts = np.array([self._life.window(end_ms).start_ms for end_ms in ends], dtype=np.int64)
        keys = columns.take(pa.array(numbers, pa.int64()))
        return Grouped(keys, np.zeros(0, dtype=np.int64), keys, starts, np.array(ends, dtype=np.int64))

    def _found_of_timer(self, moment_ms: int, rows_schema: pa.Schema) -> list[pa.RecordBatch]:
        """Call the function for a timer. Returns the results."""
        return self._conformed(self._function.on_timer(moment_ms, self._ask), rows_schema)

    def forget(self, keys: pa.RecordBatch, ends: Times) -> None:
        """These windows of keys are over: their state goes."""
        if not self._ask._of_windows:
            return
        refs = self.states.enter(keys)
        for number, end_ms in enumerate(ends.tolist()):
            self._scope.choose(number, refs[number])
            for state in self._ask._of_windows:
                state.forget(end_ms)
            if self._undo is not None:
                self._undo.begin()  # so that no notes of what stays gone pile up
        self.states.leave(keys.num_rows)

    def fix_keys(self) -> None:
        """All states are bound, also that of the rows."""
        self.states.fix_keys(self._codec)

    def tell_watermark(self, watermark_ms: int) -> None:
        """The function may ask for it."""
        self._ask.current_watermark = watermark_ms

    def close(self) -> None:
        """Close the function."""
        self._function.close()

    def _begin(self, grouped: Grouped) -> None:
        keys = grouped.keys
        if not self._keys:
            groups = len(grouped.cuts) - 1
            keys = pa.RecordBatch.from_arrays([pa.array(np.zeros(groups, dtype=np.int8))], schema=self._codec.schema)
        self._refs = self.states.enter(keys)

    def _choose(self, group: int, grouped: Grouped) -> None:
        self._scope.choose(group, self._refs[group])
        if grouped.starts is not None and grouped.ends is not None:
            self._ask.window = Window(int(grouped.starts[group]), int(grouped.ends[group]))

    def _mark(self) -> int:
        assert self._undo is not None, "errors_to was not given"
        self._undo.begin()
        return self.states.timers.mark()

    def _take_back(self, timers: int) -> None:
        assert self._undo is not None, "errors_to was not given"
        self.states.timers.back_to(timers)
        self._undo.back()

    def _end(self, groups: int) -> None:
        self.states.leave(groups)
        self._ask.window = None

    def _told_of_timer(self, moment_ms: int) -> tuple[str, None]:
        """Where a call for a timer has failed."""
        name, window = self.name.removesuffix(".process"), self._ask.window
        bounds = "" if window is None else f"[{window.start_ms}, {window.end_ms})"
        return (
            f"{name}.on_timer at {moment_ms} in the window {bounds} ms of key {value_text(self._ask.current_key)}",
            None,
        )

    def _process(self, rows: pa.Table) -> WindowResult:
        return self._function.process(rows, self._ask)
