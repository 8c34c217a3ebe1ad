"""Functions with operator state for random simulations: one that a broadcast stream reaches, and one without keys.

Rules: as of `pipeline_functions.py`. What the broadcast side keeps does not depend on the order of its rows, which
differs from subtask to subtask where several send it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from tidegate.operators.functions.process_functions import (
    BroadcastContext,
    KeyedBroadcastProcessFunction,
    ProcessContext,
    ProcessFunction,
)
from tidegate.operators.state.keyed_state import ListState, MapState, ValueState
from tidegate.testing.pipelines.pipeline_functions import LAST_MS

RULED = pa.schema([(name, pa.int64()) for name in ("k", "n", "t", "rules", "updates", "sum")])
_PAIR = pa.struct([("n", pa.int64()), ("sum", pa.int64())])

Row = dict[str, Any]


class RuledTotals(KeyedBroadcastProcessFunction):
    """Tells of each key how many rows it has, and their sum; and, the same for all keys, that of the rules."""

    def open(self, context: ProcessContext) -> None:
        """Totals of the keys, and of the rules."""
        self._totals = context.state(ValueState("totals", _PAIR))
        self._rules = context.broadcast_state(MapState("rules", pa.int64(), _PAIR))

    def process(self, row: Row, context: ProcessContext) -> None:
        """A row of the key."""
        self._totals.update(_plus(self._totals.value(), row["v"]))
        context.timer_service.register_event_time_timer(LAST_MS)

    def process_broadcast(self, row: Row, context: BroadcastContext) -> None:
        """A rule; all keys are written again, as they are, with every third."""
        self._rules.put(row["k"], _plus(self._rules.get(row["k"]), row["v"]))
        if row["v"] % 3 == 0:
            context.apply_to_keyed_state(self._totals, _written_again)

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        """Both streams have ended."""
        totals, rules = self._totals.value(), list(self._rules.values())
        yield {
            **context.current_key,
            "n": totals["n"],
            "t": totals["sum"],
            "rules": len(rules),
            "updates": sum(rule["n"] for rule in rules),
            "sum": sum(rule["sum"] for rule in rules),
        }


class KeptRows(ProcessFunction):
    """Keeps all rows until the end; then tells them, and a row of key -1 for each that was counted."""

    def open(self, context: ProcessContext) -> None:
        """The rows of this subtask, and how many it has counted; the first subtask takes over what all had counted."""
        self._rows = context.list_state(ListState("rows", pa.struct([("k", pa.int64()), ("v", pa.int64())])))
        self._counts = context.union_list_state(ListState("counts", pa.int64()))
        self._counts.update(self._counts.get() if context.subtask == 0 else ())

    def process(self, row: Row, context: ProcessContext) -> None:
        """Keep the row."""
        self._rows.add({"k": row["k"], "v": 2 * row["v"]})
        self._counts.add(1)

    def finish(self, context: ProcessContext) -> Iterator[Row]:
        """All that is kept."""
        yield from self._rows.get()
        yield from ({"k": -1, "v": count} for count in self._counts.get())


def _plus(total: Row | None, value: int) -> Row:
    had = total or {"n": 0, "sum": 0}
    return {"n": had["n"] + 1, "sum": had["sum"] + value}


def _written_again(key: Row, totals: ValueState) -> None:
    totals.update(totals.value())
