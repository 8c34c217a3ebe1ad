"""`Alarms`: the function of tests of timers."""

from __future__ import annotations

from typing import Any

from tidegate.operators.functions.process_functions import ProcessContext, ProcessFunction, Rows
from tidegate.operators.state.timers import TimeDomain


class Alarms(ProcessFunction):
    """Each row is a moment at which it is emitted, negated."""

    def __init__(self, domain: TimeDomain) -> None:
        self._domain = domain

    def process(self, row: dict[str, Any], context: ProcessContext) -> Rows:
        getattr(context.timer_service, f"register_{self._domain.value}_timer")(row["x"])
        return None

    def on_timer(self, timestamp: int, context: ProcessContext) -> Rows:
        return [{"x": -timestamp}]
