"""`FunctionContext`: what every function of the user may ask about where it runs."""

from __future__ import annotations

from tidegate.operators.operator import OperatorContext
from tidegate.operators.user_metrics import UserMetrics


class FunctionContext:
    """Where a function runs."""

    def __init__(self, operator: OperatorContext) -> None:
        self._operator = operator

    @property
    def subtask(self) -> int:
        """Index of this subtask."""
        return self._operator.subtask

    @property
    def parallelism(self) -> int:
        """Number of subtasks."""
        return self._operator.parallelism

    @property
    def metrics(self) -> UserMetrics:
        """Counters, gauges and histograms of the function's own: `self.late = context.metrics.counter("late")`."""
        return self._operator.metrics

    @property
    def current_processing_time(self) -> int:
        """Processing time in milliseconds: when the task took up what is being processed."""
        return self._operator.time.now_ms
