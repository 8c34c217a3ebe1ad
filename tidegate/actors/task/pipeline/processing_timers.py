"""Fires the processing-time timers of a task's operators.

The task machine sets one timer of the runtime at a time, for the earliest moment. When it is due, the operators' timers
fire in steps, each in a turn of its own. Steps that are left for a watermark go first.
"""

from __future__ import annotations

from collections.abc import Callable

from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import TaskTimer
from tidegate.actors.task.pipeline.operator_chain import OperatorChain


class ProcessingTimeTimer:
    """Sets the runtime's timer for the earliest time that an operator waits for, and fires what is due."""

    def __init__(self, chain: OperatorChain, instruct: Callable[[do.TaskInstruction], None]) -> None:
        self._chain = chain
        self._instruct = instruct
        self._set_for_ms: int | None = None
        self._due_ms: int | None = None
        """The time that has come, until operators were told."""

    @property
    def due(self) -> bool:
        """Whether timers are due or steps are left, to be done as soon as there is room for their output."""
        return self._due_ms is not None or self._chain.advancing

    def fired(self, at_ms: int) -> None:
        """The runtime's timer has fired: what waited for `at_ms` is due, even if the clock was set back since."""
        self._set_for_ms = None
        self._due_ms = at_ms

    def run(self, now_ms: int) -> None:
        """Do one step of what is due."""
        if self._chain.advancing:
            self._chain.step()
        else:
            at_ms = now_ms if self._due_ms is None else max(now_ms, self._due_ms)
            self._due_ms = None
            self._chain.fire_processing_time(at_ms)

    def set(self) -> None:
        """Set a timer for the earliest time, unless one is set for it or for an earlier one, or is due already."""
        if self.due:
            return
        due_at_ms = self._chain.next_processing_time_ms
        if due_at_ms is not None and (self._set_for_ms is None or due_at_ms < self._set_for_ms):
            self._set_for_ms = due_at_ms
            self._instruct(do.SetTaskTimer(TaskTimer.PROCESSING_TIME, due_at_ms))
