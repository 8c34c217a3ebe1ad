"""`BatchProcessOperator` runs a process function batch by batch, with the state and the timers of all keys in a batch.

The rules of `ProcessOperator` apply. In addition:

- A function defines `process` or `process_batch`. With the latter it defines `on_timer` or `on_timer_batch`.
- A call reads the state that the previous call left and the changes of this call. Rows of one key share the state.
- With `errors_to` a failing call is repeated with the first half of its rows, then with the second half, down to single
  rows. Its changes of state are undone. Other side effects happen again.
- Rows that come in order of event time stay together: timers fire after the rows of their watermark, not between them.
- Timers that are due are passed to `on_timer_batch` one step at a time. They are deleted when the call begins. Timers
  that the call registers come in a later step, so a step never has the same timer twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

from tidegate.operators.functions.batch_functions import BatchResults
from tidegate.operators.functions.failing_rows import FailingRows
from tidegate.operators.functions.process_functions import BaseProcessFunction, ProcessBatchContext, ProcessFunction
from tidegate.operators.functions.process_operator import ProcessOperator
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import Blame, blame, first_row
from tidegate.operators.state.timers import TimeDomain, TimerChains
from tidegate.protocol.edges import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.batches import memory_of


class BatchProcessOperator(ProcessOperator):
    """Calls `process_batch` of a function with one input."""

    context_class = ProcessBatchContext
    by_batch = True

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
        """Process a batch. OperatorError if the function raises or the keys do not fit."""
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
        with Blame(self.context, lambda: (f"the first of {rows} timers, at {due.moments[0]}", first_row(due.keys))):
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
                    waiting += failing.halves(start, keys, failed, f"timer at {moments[0]}")
        self._set_aside(failing, due.keys)
        self.context.pace.timers += rows

    def _call(
        self, failing: FailingRows | None, call: Callable[[pa.RecordBatch], list[pa.RecordBatch]], rows: pa.RecordBatch
    ) -> BaseException | None:
        """Call the function for some rows or timers. Returns the error if it has failed and that is taken back."""
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
    """Returns the operator of a function, by row or by batch depending on its methods. Raises as `ProcessOperator`
    does.

    Raises ConfigurationError for a function that defines both methods for one purpose, or only methods for timers.
    """
    if isinstance(function, ProcessFunction):
        by_batch = _defines(function, "process_batch")
        for one, other in (("process", "process_batch"), ("on_timer", "on_timer_batch")):
            if _defines(function, one) and _defines(function, other):
                raise ConfigurationError(
                    f"{type(function).__name__} defines both {one} and {other}: rows would come to one of them alone; "
                    "keep the one that is meant"
                )
        if by_batch:
            return BatchProcessOperator(
                function, keys, timestamps, schema, side_outputs, fire_at_end, errors_to, in_order
            )
        if _defines(function, "on_timer_batch"):
            raise ConfigurationError(
                f"{type(function).__name__} defines on_timer_batch without process_batch: where rows come one by one, "
                "timers do too; define on_timer"
            )
    return ProcessOperator(function, keys, timestamps, schema, side_outputs, fire_at_end, errors_to, in_order)


def _defines(function: ProcessFunction, method: str) -> bool:
    return getattr(type(function), method) is not getattr(ProcessFunction, method)
