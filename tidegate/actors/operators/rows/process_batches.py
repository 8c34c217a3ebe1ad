"""`BatchProcessOperator`: runs a process function batch by batch, with the state and the timers of all keys in it.

Rules, beside those of `ProcessOperator`:

- A function defines `process` or `process_batch`, and beside the latter `on_timer` or `on_timer_batch`.
- State that is read in a call is what the call before left, and what this call has put so far. Rows of one key share
  it.
- Timers that are due come to `on_timer_batch` a step at a time. They are deleted when the call begins. Those that it
  registers come in a later step, so a step never has the same timer twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pyarrow as pa

from tidegate.actors.operators.batches.batch_results import BatchResults
from tidegate.actors.operators.operator import Emit
from tidegate.actors.operators.operator_errors import Blame, blame, first_row
from tidegate.actors.operators.rows.process_functions import BaseProcessFunction, ProcessBatchContext, ProcessFunction
from tidegate.actors.operators.rows.process_operator import ProcessOperator
from tidegate.actors.operators.state.timer_chains import TimerChains
from tidegate.actors.operators.state.timers import TimeDomain
from tidegate.actors.protocol.side_outputs import OutputTag
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.owned_arrays import memory_of


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
    ) -> None:
        super().__init__(function, keys, timestamps, schema, side_outputs, fire_at_end)
        self._results = BatchResults(self._pinned)
        self._timers_by_batch = _defines(function, "on_timer_batch")
        self._parts: list[pa.RecordBatch] = []

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process a batch. OperatorError if the function raises or the keys do not fit."""
        function, ask = self._of_batches()
        with blame(self.context, batch):
            if self._keys[0] and self._states is not None:
                self._states.enter_batch(self._keys_of(index, batch))
            ask.begin_batch(partial(self._times_of, index, batch))
            self._parts += self._results.conformed(function.process_batch(batch, ask), batch.schema, memory_of(batch))
        if self._keys[0]:
            self._leave(batch.num_rows)
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
        self._states.enter_batch(due.keys)
        self._timers.change_many(domain, list(due.moments), False, list(range(rows)))
        ask.begin_batch(lambda: pa.array(due.moments, pa.int64()))
        with Blame(self.context, lambda: (f"the first of {rows} timers, at {due.moments[0]}", first_row(due.keys))):
            chains.begin_step()
            for moment_ms in due.moments:
                chains.fires(moment_ms)
            self._parts += self._results.conformed(
                function.on_timer_batch(due.keys, ask), due.keys.schema, memory_of(due.keys)
            )
        self.context.pace.timers += rows
        self._leave(rows)

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
) -> ProcessOperator:
    """The operator of a function: by row or by batch, as its methods say. Raises as `ProcessOperator`.

    ConfigurationError for a function that defines both methods for the same, or those for timers alone.
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
            return BatchProcessOperator(function, keys, timestamps, schema, side_outputs, fire_at_end)
        if _defines(function, "on_timer_batch"):
            raise ConfigurationError(
                f"{type(function).__name__} defines on_timer_batch without process_batch: where rows come one by one, "
                "timers do too; define on_timer"
            )
    return ProcessOperator(function, keys, timestamps, schema, side_outputs, fire_at_end)


def _defines(function: ProcessFunction, method: str) -> bool:
    return getattr(type(function), method) is not getattr(ProcessFunction, method)
