"""`ProcessWindowFunction`: a function over the rows of a window that also remembers something of its key.

`FunctionCalls` opens it, and calls it as other functions of windows are called. Rules:

- Each subtask of each attempt has a copy of the object to itself. What must survive a failure belongs in state.
- State is that of the key, and outlives its windows. It lies in the backend of the rows that wait, so what the function
  has changed, what it has returned and the rows that it has got go forward together.
- Windows of all rows have one key, so their state is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.actors.operators.function_context import FunctionContext
from tidegate.actors.operators.operator import OperatorContext
from tidegate.actors.operators.operator_errors import blame_call
from tidegate.actors.operators.own_copies import own_copy
from tidegate.actors.operators.state.key_scope import KeyScope
from tidegate.actors.operators.state.keyed_state import S
from tidegate.actors.operators.state.keyed_state_store import KeyedStates
from tidegate.actors.operators.state.keys import KeyCodec
from tidegate.actors.operators.state.state_names import StateNames
from tidegate.actors.operators.window_functions.window_calls import Grouped, WindowCalls, WindowResult
from tidegate.actors.operators.windows.slices import Window
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.actors.state_backends.common.backend import KeyRef
from tidegate.storage.errors import ConfigurationError


class ProcessWindowContext(FunctionContext):
    """What a function can ask for. Key, window and state are those of the call."""

    def __init__(self, context: OperatorContext, states: KeyedStates, scope: KeyScope, keyed: bool) -> None:
        super().__init__(context)
        self._states, self._scope, self._keyed = states, scope, keyed
        self.window: Window | None = None
        """`start_ms` and `end_ms` of the window, in milliseconds since 1970; None for windows of so many rows."""
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


class ProcessWindowFunction:
    """Processes windows: gets all rows of each key and window, with state of the key."""

    context: ProcessWindowContext
    """The same context that the methods get."""

    def open(self, context: ProcessWindowContext) -> None:
        """Called once, before anything else: bind states here."""

    def process(self, rows: pa.Table, context: ProcessWindowContext) -> WindowResult:
        """Process one window, whose rows lie in the order in which they came. Returns rows as for `apply`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, rows, context)")

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
    ) -> None:
        if not isinstance(function, ProcessWindowFunction):
            raise ConfigurationError(
                "process takes an object of a class derived from tg.ProcessWindowFunction where a stream has windows, "
                f"not {function!r}; a plain function belongs to apply"
            )
        self._function = own_copy(function)
        super().__init__(self._process, keys, schema, bounds)
        self.name = f"{type(function).__name__}.process"
        self._scope = KeyScope()
        self._refs: Sequence[KeyRef] = ()

    def open(self, context: OperatorContext, keys: pa.Schema, rows_state: str) -> KeyedStates:
        """Open the function. Returns the states that it has bound. OperatorError if it raises."""
        names = StateNames()
        names.take(rows_state)
        self.states = states = KeyedStates(context, keys.names, self._scope, names)
        self._ask = self._function.context = ProcessWindowContext(context, states, self._scope, bool(self._keys))
        with blame_call(context, "open"):
            self._function.open(self._ask)
        states.complete()
        self._codec = KeyCodec(keys)
        return states

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

    def _end(self, groups: int) -> None:
        self.states.leave(groups)
        self._ask.window = None

    def _process(self, rows: pa.Table) -> WindowResult:
        return self._function.process(rows, self._ask)
