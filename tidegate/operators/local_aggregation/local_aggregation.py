"""`LocalAggregation`: what an aggregate lets its senders do with their rows. The graph of a job has it on the edge.

Every task reads the graph. So this module imports next to nothing; only a sender that combines imports `combiner.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidegate.operators.aggregates.aggregate_state import CHOICES, EXTREMES, AggregateKind
from tidegate.operators.local_aggregation.combining_rule import CombiningMode

if TYPE_CHECKING:
    from tidegate.operators.aggregates.aggregate import Aggregate
    from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling

_KINDS = frozenset({AggregateKind.COUNT, AggregateKind.SUM, AggregateKind.MEAN}) | EXTREMES | CHOICES


@dataclass(frozen=True, slots=True)
class LocalAggregation:
    """What is combined. `window` and `time`: the windows of event time that it is of, if any."""

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    window: Tumbling | Sliding | Cumulating | None = None
    time: str | None = None
    unless_read: str | None = None
    """The side output for which the aggregate needs rows as they came: if it is read, nothing is combined."""
    mode: CombiningMode = "auto"

    @property
    def is_exact(self) -> bool:
        """Whether aggregates of these kinds can be combined without a difference; types of columns may forbid it.

        A choice depends on the order of rows, across slices too where they share a node: late rows of sliding and
        cumulating windows go straight to nodes of several slices. Combined rows no longer tell that order.
        """
        from tidegate.operators.windows.window_specs import Tumbling

        one_slice = self.window is None or isinstance(self.window, Tumbling)
        kinds = _KINDS if one_slice else _KINDS - CHOICES
        return all(a.kind in kinds and not a.taken_back for a in self.aggregates.values())
