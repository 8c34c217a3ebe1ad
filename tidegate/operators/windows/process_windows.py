"""`ProcessWindowFunction` is a user's function over the rows of a window that may also use timers, and state of the key
or of the window.

`FunctionCalls` opens it, and calls it as `WindowCalls` calls other functions. Rules:

- Each subtask of each attempt has its own copy of the object. Data that must survive a failure must be stored in state.
- State belongs to the key and outlives its windows, or it belongs to a key and window (`PerWindowState`) and is removed
  with the window. Both are in the backend of the stored rows, so a snapshot contains state, results and processed rows
  consistently.
- Timers belong to a key and window, and are of event time (`WindowTimers`). Only windows that depend only on the time
  of a row (tumbling, sliding, cumulating in event time) have timers and state of the window (`WindowLife`). Sessions
  merge, and count windows and windows of processing time are passed to the function only once.
- Windows over all rows of a stream (without keys) have a single key, and so a single state.
- With a tag for errors, a failed call for a window or a timer produces only one row of that side output. A timer whose
  call failed does not fire again.
- A timer of a window is stored as a timer of its key at the same time, and as an entry in a map of the key, which has
  the windows that wait for each time. Timers are therefore stored, restored and fired as for other functions.
- A window exists until the watermark passes its last millisecond plus the allowed lateness. A timer for a later time is
  dropped, as in Flink, because its window would be gone. A removed window therefore has no timers.
- Timers of a key with equal times fire in the order in which their windows end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.operator import FunctionContext, OperatorContext
from tidegate.operators.operator_errors import Blame, blame_call, own_copy, timer_place
from tidegate.operators.state.keyed_state import KeyedState, MapState, S, StateNames
from tidegate.operators.state.keyed_state_store import KeyedStates
from tidegate.operators.state.keys import KeyCodec, KeyScope
from tidegate.operators.state.timers import TimeDomain, TimerChains, moment_of
from tidegate.operators.state.ttl import Clock
from tidegate.operators.state.undo import StateUndo
from tidegate.operators.windows.slices import Window
from tidegate.operators.windows.window_calls import Grouped, WindowCalls, WindowResult
from tidegate.operators.windows.window_specs import Cumulating, Sliding, Times, Tumbling, starts_of
from tidegate.protocol.edges import OutputTag
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.common.backend import InternalMapState, KeyedBackend, KeyRef, StateDescriptor
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.column_names import own_name
from tidegate.storage.user_values import value_text


class ProcessWindowContext(FunctionContext):
    """The context of a `ProcessWindowFunction`: key, window, state, timers and metrics.

    Key, window and state belong to the current call.
    """

    def __init__(
        self, context: OperatorContext, states: KeyedStates, scope: KeyScope, keyed: bool, life: WindowLife | None
    ) -> None:
        super().__init__(context)
        self._states, self._scope, self._keyed, self._life = states, scope, keyed, life
        self._timers: WindowTimerService | None = None
        self._of_windows: list[PerWindowState] = []
        self.window: Window | None = None
        """Bounds of the window, `start_ms` and `end_ms`, in ms since 1970. None for count windows."""
        self.current_watermark = MIN_WATERMARK_MS
        """The newest watermark, in milliseconds; `MIN_WATERMARK_MS` before the first one, also after a restore."""

    @property
    def current_key(self) -> dict[str, Any]:
        """Returns the values of the key columns of the current key, by name. Empty for windows without keys.

        Raises ConfigurationError outside of a call for a window or a timer.
        """
        row = self._scope.current_row("the current key")
        return row if self._keyed else {}

    def state(self, declared: S) -> S:
        """Binds a state of the key, in `open`: `self.best = context.state(tg.ValueState("best", pa.float64()))`.

        Raises ConfigurationError outside of `open`, and for a name that is already used.
        """
        return self._states.bind(declared)

    def window_state(self, declared: S) -> S:
        """Binds a state of the key and window, in `open`. The state is removed when the window is removed, so later
        calls for late rows and timers of the window can use it.

        Raises ConfigurationError outside of `open`, for a name that is already used, for a state with a time to live,
        and for windows that cannot have state: sessions, count windows and windows of processing time.
        """
        of_windows = PerWindowState(declared, self._window_end)
        check_life(self._life, f"state {declared.name!r} of a window")
        bound = self._states.bind(of_windows)
        self._of_windows.append(bound)
        return cast(S, bound.view)

    @property
    def timer_service(self) -> WindowTimerService:
        """The service that registers and deletes timers of the key and window.

        Raises ConfigurationError if the function has no `on_timer`.
        """
        if self._timers is None:
            raise ConfigurationError(
                "a timer calls on_timer(self, timestamp, context), but the function has no such method; add it"
            )
        return self._timers

    def _window_end(self) -> int:
        if self.window is None:
            raise ConfigurationError(
                "state and timers of a window can only be used in process and on_timer, for the window that is "
                "processed there; move this call to one of these methods"
            )
        return self.window.end_ms


def check_life(life: WindowLife | None, what: str) -> None:
    """Raises ConfigurationError, which begins with `what`, if `life` is None: the windows can have neither state nor
    timers.
    """
    if life is None:
        raise ConfigurationError(
            f"{what} needs tg.Tumbling, tg.Sliding or tg.Cumulating of event time: sessions merge, and count windows "
            "and windows of processing time are processed once; use context.state, or a process function on the stream"
        )


class ProcessWindowFunction:
    """Base class of functions over windows that use state or timers. `process` gets all rows of a key and window.

    Pass an object of a subclass to `WindowedStream.process`. The result has the key and the bounds of the window as
    well as the columns that `process` returns.

    Example:

        >>> class Growth(tg.ProcessWindowFunction):
        ...     def open(self, context):
        ...         self.best = context.state(tg.ValueState("best", int))
        ...
        ...     def process(self, rows, context):
        ...         amount = max(rows["amount"].to_pylist())
        ...         best = self.best.value() or 0
        ...         self.best.update(max(amount, best))
        ...         return {"growth": amount - best}
        >>> windows = orders.key_by("user").window(tg.Tumbling("2s"))
        >>> windows.process(Growth(), schema={"growth": int}).show()
        +------+--------------+------------+--------+
        | user | window_start | window_end | growth |
        +------+--------------+------------+--------+
        | ann  |            0 |       2000 |     30 |
        | bob  |            0 |       2000 |      5 |
        | ann  |         2000 |       4000 |    -18 |
        +------+--------------+------------+--------+
    """

    context: ProcessWindowContext
    """The context that is passed to all methods."""

    def open(self, context: ProcessWindowContext) -> None:
        """Prepares the function: bind states here. Called once, before all other methods."""

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> WindowResult:
        """Processes one window, with its rows in the order of arrival.

        Returns result rows, in any form that a function of `apply` may return.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, rows, context); define it")

    def on_timer(self, timestamp: int, context: ProcessWindowContext) -> WindowResult:
        """Called when a timer of this key and window fires, at its time `timestamp` in ms.

        `context.window` is the window. Returns result rows, as `process` does.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method on_timer(self, timestamp, context); define it")

    def close(self) -> None:
        """Releases resources. Called once, also after a failure, and even if `open` was not reached."""


class FunctionCalls(WindowCalls):
    """Calls a user's `ProcessWindowFunction` for windows, and the timers that it sets.

    Raises ConfigurationError for an object of another class, or an object that cannot be copied.
    """

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
        """True if the function defines `on_timer`."""
        self._scope = KeyScope()
        self._refs: Sequence[KeyRef] = ()
        self._life: WindowLife | None = None
        self._timers: WindowTimers | None = None

    def open(
        self, context: OperatorContext, keys: pa.Schema, own_states: Sequence[str], life: WindowLife | None
    ) -> KeyedStates:
        """Opens the function, and returns the states that it has bound. Raises OperatorError if the function raises.

        `own_states` are the names of states that the operator itself uses. `life` determines how long windows exist. It
        is None for windows without timers and state.
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
        """Returns True if the function has timers or state of windows, which exist until the window is removed."""
        return self._timers is not None or bool(self._ask._of_windows)

    def chains(self, at_end: bool) -> TimerChains:
        """Returns a detector of timers that register further timers without end.

        `at_end` is True at the end of event time.
        """
        return TimerChains(self.states.timers, at_end)

    def first_timer_ms(self) -> int | None:
        """Returns the time of the timer that fires next, in ms, or None if there is no timer."""
        return None if self._timers is None else self.states.timers.first_ms(TimeDomain.EVENT_TIME)

    def fire(self, until_ms: int, chains: TimerChains, rows_schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Fires timers up to the time `until_ms`, sorted by time, key and window, up to the number that one step
        allows.

        Yields the results.
        """
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
                with Blame(self._context, partial(self._describe_timer, moment_ms)):
                    call = partial(self._found_of_timer, moment_ms, rows_schema)
                    found = self._attempt(len(called), call, timer_place(moment_ms))
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
            yield from (rows for _, rows in self._joined(parts, range(len(parts)), of))
        if called:
            of = self._windows_of(step.columns, [number for number, _ in called], [end_ms for _, end_ms in called])
            self._set_aside(self._context, of)

    def _windows_of(self, columns: pa.RecordBatch, numbers: Sequence[int], ends: Sequence[int]) -> Grouped:
        """Returns windows without rows.

        `numbers` has the index of each window's key in `columns`, and `ends` its end in ms.
        """
        assert self._life is not None, "windows without a life"
        starts = np.array([self._life.window(end_ms).start_ms for end_ms in ends], dtype=np.int64)
        keys = columns.take(pa.array(numbers, pa.int64()))
        return Grouped(keys, np.zeros(0, dtype=np.int64), keys, starts, np.array(ends, dtype=np.int64))

    def _found_of_timer(self, moment_ms: int, rows_schema: pa.Schema) -> list[pa.RecordBatch]:
        """Calls the function for the timer that fires at `moment_ms`. Returns the results of the call as batches."""
        return self._conformed(self._function.on_timer(moment_ms, self._ask), rows_schema)

    def forget(self, keys: pa.RecordBatch, ends: Times) -> None:
        """Removes the state of windows that are over. Window i has the key in row i of `keys`, and ends at `ends[i]`
        ms.
        """
        if not self._ask._of_windows:
            return
        refs = self.states.enter(keys)
        for number, end_ms in enumerate(ends.tolist()):
            self._scope.choose(number, refs[number])
            for state in self._ask._of_windows:
                state.forget(end_ms)
            if self._undo is not None:
                self._undo.begin()  # otherwise records of removed state would accumulate
        self.states.leave(keys.num_rows)

    def fix_keys(self) -> None:
        """Sets the key columns of the backend.

        Called after all states are bound, including the stored rows of the operator.
        """
        self.states.fix_keys(self._codec)

    def note_watermark(self, watermark_ms: int) -> None:
        """Stores the watermark, in ms, so that the function can read it from its context."""
        self._ask.current_watermark = watermark_ms

    def close(self) -> None:
        """Closes the user's function."""
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

    def _describe_timer(self, moment_ms: int) -> tuple[str, None]:
        """Returns the description of a timer, at `moment_ms`, for the error of its failed call."""
        name, window = self.name.removesuffix(".process"), self._ask.window
        bounds = "" if window is None else f"[{window.start_ms}, {window.end_ms})"
        return (
            f"{name}.on_{timer_place(moment_ms)} in the window {bounds} ms of key {value_text(self._ask.current_key)}",
            None,
        )

    def _process(self, rows: pa.Table) -> WindowResult:
        return self._function.process(rows, self._ask)


TIMERS_OF_WINDOWS = own_name("window_timers")
_LATENESS_MS_MAX = 1 << 58
"""Largest lateness in ms that is added to the end of a window.

The sum fits into 64 bits, and such a window is never over.
"""


def last_moments(ends: Times, lateness_ms: int) -> Times:
    """Returns the watermark at which each window with these ends is over, in ms: its last millisecond plus the allowed
    lateness.
    """
    return ends - 1 + min(lateness_ms, _LATENESS_MS_MAX)


@dataclass(frozen=True, slots=True)
class WindowLife:
    """Determines how long windows exist, from their specification and the allowed lateness.

    Only for windows whose bounds depend on nothing but the time of a row.
    """

    spec: Tumbling | Sliding | Cumulating
    lateness_ms: int = 0

    def window(self, end_ms: int) -> Window:
        """Returns the bounds of the window that ends at `end_ms`."""
        return Window(int(starts_of(self.spec, np.array([end_ms], dtype=np.int64))[0]), end_ms)

    def last_ms(self, ends: Times) -> Times:
        """Returns the watermark at which each window with these ends is over, in ms."""
        return last_moments(ends, self.lateness_ms)


class WindowTimers:
    """The timers of the windows of one operator, and the state that stores them.

    Must be created before the function binds its states.
    """

    def __init__(self, states: KeyedStates, life: WindowLife) -> None:
        self._timers, self._life = states.timers, life
        self._moments = states.bind_own(MapState(TIMERS_OF_WINDOWS, pa.int64(), pa.list_(pa.int64())))

    def register(self, end_ms: int, moment_ms: int) -> None:
        """Registers a timer at `moment_ms`, for the window of the current key that ends at `end_ms`.

        Does nothing if the window is over at that time.
        """
        if moment_ms > int(self._life.last_ms(np.array([end_ms], dtype=np.int64))[0]):
            return
        known = self._moments.get(end_ms) or []
        if moment_ms not in known:
            self._moments.put(end_ms, [*known, moment_ms])
            self._timers.change(TimeDomain.EVENT_TIME, moment_ms, registered=True)

    def delete(self, end_ms: int, moment_ms: int) -> None:
        """Deletes the timer at `moment_ms` of the window of the current key that ends at `end_ms`, if it is
        registered.
        """
        if self._taken(end_ms, moment_ms) and not self.windows_at(moment_ms):
            self._timers.change(TimeDomain.EVENT_TIME, moment_ms, registered=False)

    def windows_at(self, moment_ms: int) -> list[int]:
        """Returns the ends, ascending, of the windows of the current key that have a timer at `moment_ms`."""
        return sorted(end_ms for end_ms, moments in self._moments.items() if moment_ms in moments)

    def fires(self, end_ms: int, moment_ms: int) -> bool:
        """Removes the timer of a window because it fires. Returns False if it was deleted before."""
        return self._taken(end_ms, moment_ms)

    def _taken(self, end_ms: int, moment_ms: int) -> bool:
        known = self._moments.get(end_ms) or []
        if moment_ms not in known:
            return False
        left = [each for each in known if each != moment_ms]
        self._moments.put(end_ms, left or None)
        return True


class WindowTimerService:
    """Registers and deletes timers of the key and window of the current call. Times are in ms since 1970."""

    def __init__(
        self,
        timers: WindowTimers,
        end_ms: Callable[[], int],
        now_ms: Callable[[], int],
        watermark_ms: Callable[[], int],
    ) -> None:
        self._timers, self._end_ms = timers, end_ms
        self._now_ms, self._watermark_ms = now_ms, watermark_ms

    def current_processing_time(self) -> int:
        """Returns the processing time of the current call, in milliseconds since 1970."""
        return self._now_ms()

    def current_watermark(self) -> int:
        """Returns the newest watermark in ms. `MIN_WATERMARK_MS` before the first watermark, also after a restore."""
        return self._watermark_ms()

    def register_event_time_timer(self, timestamp_ms: int) -> None:
        """Registers a timer of this key and window: `on_timer` is called when the watermark reaches `timestamp_ms`.

        If the watermark has already passed this time, the timer fires soon. A timer is dropped if its window is over at
        that time.
        """
        self._timers.register(self._end_ms(), moment_of(timestamp_ms))

    def delete_event_time_timer(self, timestamp_ms: int) -> None:
        """Deletes the timer of this key and window at `timestamp_ms`, if it is registered."""
        self._timers.delete(self._end_ms(), moment_of(timestamp_ms))


Place = Callable[[], int]
"""A function that returns the end of the current window, in ms.

It raises ConfigurationError outside of a call for a window.
"""


class PerWindowState(KeyedState):
    """A state with a value for each key and window.

    `view` is the state object that the user's function gets, once the state is bound.
    """

    _internal: InternalMapState
    view: KeyedState

    def __init__(self, declared: KeyedState, place: Place) -> None:
        if not isinstance(declared, KeyedState):
            raise ConfigurationError(f"window_state takes a state such as tg.ValueState, not {declared!r}")
        if declared.ttl is not None:
            raise ConfigurationError(
                f"state {declared.name!r} of a window is removed when the window is over; remove ttl=, or bind it with "
                "context.state for the key"
            )
        super().__init__(declared.name, None)
        self._declared, self._place = declared, place

    @property
    def stored_field(self) -> pa.Field:
        """The field of the checkpoint column: a map from the end of the window, in ms, to the stored value of the
        declared state.
        """
        key = pa.field("key", pa.int64(), nullable=False)
        return pa.field(self.name, pa.map_(key, self._declared.stored_field.with_name("value")))

    def expires(self, column_type: pa.DataType) -> bool:
        """Returns False, because the state has no time to live: it is removed with its window."""
        return False

    def forget(self, end_ms: int) -> None:
        """Removes the state of the current key for the window that ends at `end_ms`."""
        self._internal.discard(self._ref(), end_ms)

    def _bind(self, backend: KeyedBackend, spec: StateDescriptor, clock: Clock | None) -> None:
        assert spec.migrate is not None, "a state without a conversion"
        self._internal = backend.maps(spec)
        views = cast(KeyedBackend, _Views(self._internal, self._place))
        self.view = self._declared.bound(self._scope, views, None, spec.migrate)


class _Views:
    """Replaces the backend when the declared state of a window is bound.

    Creates values, lists and maps that are stored under the end of the current window.
    """

    def __init__(self, internal: InternalMapState, place: Place) -> None:
        self._internal, self._place = internal, place

    def values(self, spec: StateDescriptor) -> _Values:
        return _Values(self._internal, self._place)

    def lists(self, spec: StateDescriptor) -> _Lists:
        return _Lists(self._internal, self._place)

    def maps(self, spec: StateDescriptor) -> _Maps:
        return _Maps(self._internal, self._place)


class _Values:
    """Value state of the current window. Has no methods for many keys, because the function is called for one key at a
    time.
    """

    def __init__(self, internal: InternalMapState, place: Place) -> None:
        self._internal, self._place = internal, place

    def get(self, ref: KeyRef) -> Any:
        return self._internal.get(ref, self._place())

    def put(self, ref: KeyRef, value: Any) -> None:
        self._internal.put(ref, self._place(), value)

    def remove(self, ref: KeyRef) -> None:
        self._internal.discard(ref, self._place())


class _Lists(_Values):
    """List state of a window function, for the current window."""

    def get(self, ref: KeyRef) -> Collection[Any]:
        return super().get(ref) or ()

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        self.put(ref, [*self.get(ref), *values])


class _Maps:
    """Map state of the current window. Entries are stored as a list of pairs, as Arrow represents a map."""

    def __init__(self, internal: InternalMapState, place: Place) -> None:
        self._whole = _Values(internal, place)

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        return self._held(ref).get(_one_nan(map_key))

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        self._whole.put(ref, [*(self._held(ref) | {_one_nan(map_key): value}).items()])

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        held = self._held(ref)
        if held.pop(_one_nan(map_key), None) is None:
            return
        if held:
            self._whole.put(ref, [*held.items()])
        else:
            self._whole.remove(ref)

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        return self._held(ref)

    def remove(self, ref: KeyRef) -> None:
        self._whole.remove(ref)

    def _held(self, ref: KeyRef) -> dict[Any, Any]:
        return {_one_nan(key): value for key, value in self._whole.get(ref) or ()}


def _one_nan(map_key: Any) -> Any:
    """Returns the same object for every NaN, because a dict finds a NaN only by identity.

    Returns other values unchanged.
    """
    return math.nan if map_key != map_key else map_key
