"""The broadcast pattern (Flink's): every subtask sees all rows of one stream beside its part of another.

Rules:

- Every row of the broadcast side goes to every subtask, and changes the broadcast states there. So these are the same
  everywhere, as long as `process_broadcast` depends on nothing but the row and these states.
- The other side reads the broadcast states and cannot write them. Each of its rows goes to one subtask, so the states
  would come to differ.
- The order between rows of the two sides is unknown. So is the order between several subtasks that send the broadcast
  side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from tidegate.operators.functions.process_functions import BaseProcessFunction, ProcessContext, Rows
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Emit, OperatorContext
from tidegate.operators.state.keyed_state import S
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.state.snapshot import StateTable

_READ_ONLY = (
    "only process_broadcast is called with the same rows in every subtask; changed elsewhere, the state would differ "
    "from that of the others"
)


class BroadcastContext(ProcessContext):
    """What a function of the broadcast pattern can ask for."""

    broadcasting = False
    """Whether a row of the broadcast side is being processed."""

    def apply_to_keyed_state(self, state: S, function: Callable[[dict[str, Any], S], None]) -> None:
        """Call `function(key, state)` for every key of this subtask that has a value in a keyed state.

        `key` holds the key columns, and is the current key meanwhile: `state`, every other keyed state and
        `timer_service` work on it. The order of keys is not defined. The function may change the state. The cost grows
        with the number of keys. With a time to live there may be keys among them whose value has expired: `state` is
        empty for them. Raises ConfigurationError outside of `process_broadcast`.
        """
        if not self.broadcasting or self._states is None:
            raise ConfigurationError(
                "apply_to_keyed_state goes through all keys: it can be used in process_broadcast of a "
                "tg.KeyedBroadcastProcessFunction only"
            )
        for _ in self._states.each_key(state):
            function(self.current_key, state)


class BroadcastProcessFunction(BaseProcessFunction):
    """Processes a stream without keys beside a broadcast one: `stream.connect(rules.broadcast()).process(...)`."""

    INPUT_METHODS = ("process", "process_broadcast")

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        """Process one row of the first stream, as `ProcessFunction.process`. Broadcast states are read-only."""
        raise NotImplementedError(f"{type(self).__name__} needs a method process(self, row, context)")

    def process_broadcast(self, row: dict[str, Any], context: BroadcastContext) -> Rows:
        """Process one row of the broadcast stream; called in every subtask. Broadcast states can be changed.

        It must change them alike in every subtask: let it depend on the row and on these states alone.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a method process_broadcast(self, row, context)")


class KeyedBroadcastProcessFunction(BroadcastProcessFunction):
    """Processes a keyed stream beside a broadcast one: `stream.key_by("k").connect(rules.broadcast()).process(...)`.

    `process` and `on_timer` have the state and the timers of their key. `process_broadcast` has no key; it can go
    through all keys with `context.apply_to_keyed_state`.
    """


class BroadcastProcessOperator(ProcessOperator):
    """Calls a function of the broadcast pattern; the second input is the broadcast side."""

    context_class = BroadcastContext

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Open the function, which may change broadcast states there: `open` is called in every subtask."""
        super().open(context, restored)
        self._gate.refusal = _READ_ONLY

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process a batch row by row; broadcast states can be changed by those of the second input."""
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
