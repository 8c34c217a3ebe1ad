"""Local aggregation: senders pre-aggregate the rows of each batch by key before the exchange, like Flink's two-phase
aggregation.

`LocalAggregation` describes what may be combined on an edge of the job graph. `CombiningRule` decides for each batch
whether combining saves time. `combiner.py` combines the rows. Every process imports this module, so it imports neither
kernels nor accumulators.

Rules of `CombiningRule` in mode `auto`:

- Combining saves time if many rows form few groups, so the rule measures groups per row. Batches with fewer than
  `ROWS_MIN` rows are sent as they are and are not measured: for them the call costs more than it saves.
- The rule turns combining on when `LOOKED_AT` measured batches together have made at most `ON_AT` groups per row, and
  off at `OFF_AT`. Between the two it changes nothing. After a change it measures the same number of new batches, so it
  cannot switch more often.
- While combining is off, the rule measures only now and then: first after `PAUSE_MIN` batches, then after twice as many
  each time, and at most after `PAUSE_MAX`. It first groups the first 1/`LOOKED_INTO` of the rows of a batch. If these
  rows alone form more groups than `OFF_AT` allows for the whole batch, the measurement ends.
- Measurements do not depend on decisions, because rows are grouped before they are combined. The rule therefore cannot
  oscillate.
- The rule is kept only in memory. A restored task starts with a new rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tidegate.operators.aggregates.aggregate_state import CHOICES, EXTREMES, AggregateKind

if TYPE_CHECKING:
    from tidegate.operators.aggregates.aggregate import Aggregate
    from tidegate.operators.windows.window_specs import Cumulating, Sliding, Tumbling

CombiningMode = Literal["auto", "on", "off"]

ROWS_MIN = 16_384
"""Number of rows below which a batch is not combined in mode `auto`."""
ON_AT = 0.1
"""Number of groups per row up to which combining saves time, not counting the cost of messages
(`benchmarks/local_aggregation.py`).
"""
OFF_AT = 0.2
LOOKED_AT = 4
LOOKED_INTO = 4
PAUSE_MIN = 8
PAUSE_MAX = 256

_KINDS = frozenset({AggregateKind.COUNT, AggregateKind.SUM, AggregateKind.MEAN}) | EXTREMES | CHOICES


@dataclass(frozen=True, slots=True)
class LocalAggregation:
    """Describes what senders may combine on one edge of the job graph: `aggregates` by `keys`.

    `window` and `time` (the event-time column) are None if the aggregates have no windows.
    """

    keys: tuple[str, ...]
    aggregates: Mapping[str, Aggregate]
    window: Tumbling | Sliding | Cumulating | None = None
    time: str | None = None
    unless_read: str | None = None
    """Name of the side output that needs the original rows, such as late rows.

    Nothing is combined if a step reads this side output.
    """
    mode: CombiningMode = "auto"

    @property
    def is_exact(self) -> bool:
        """Returns True if combining rows before sending never changes a result of these kinds of aggregates. The types
        of columns may still rule out combining.

        `first` and `last` depend on the order of rows. They are not combined for sliding and cumulating windows, whose
        late rows are added to state that several slices share.
        """
        from tidegate.operators.windows.window_specs import Tumbling

        one_slice = self.window is None or isinstance(self.window, Tumbling)
        kinds = _KINDS if one_slice else _KINDS - CHOICES
        return all(a.kind in kinds and not a.retractable for a in self.aggregates.values())


def may_pay(mode: CombiningMode, rows: int) -> bool:
    """Returns whether combining a batch with this number of rows may save time, so that a `CombiningRule` should
    decide.
    """
    return rows >= ROWS_MIN if mode == "auto" else mode == "on" and rows > 1


class CombiningRule:
    """Decides for each batch of one sender on one edge whether to combine its rows."""

    def __init__(self, mode: CombiningMode) -> None:
        self._mode = mode
        self.combining = mode == "on"
        """True if batches are combined at present."""
        self._rows = self._groups = self._measured = 0
        self._pause = PAUSE_MIN
        self._left = 0
        """Number of batches that are skipped before the next measurement."""

    def looks_at(self, rows: int) -> bool:
        """Returns whether to group the rows of a batch, either to combine them or to measure whether combining saves
        time.
        """
        if not may_pay(self._mode, rows):
            return False
        if self._mode == "auto" and not self.combining and self._left:
            self._left -= 1
            return False
        return True

    def rows_first(self, rows: int) -> int:
        """Returns how many rows of a batch to group as a sample, which decides whether to group all rows. 0 means to
        group all rows at once.
        """
        return rows // LOOKED_INTO if self._mode == "auto" and not self.combining else 0

    def gives_up(self, rows: int, groups: int) -> bool:
        """Returns whether the sample shows that the batch has too many groups to combine, and if so ends the
        measurement.

        `rows` is the number of rows of the batch, `groups` the number of groups in the sample (see `rows_first`).
        """
        if groups <= OFF_AT * rows:
            return False
        self._forget()
        self._rest()
        return True

    def combines(self, rows: int, groups: int) -> bool:
        """Returns whether to combine a batch with `rows` rows that form `groups` groups.

        In mode `auto`, updates the measurement first.
        """
        if self._mode == "auto":
            self._measure(rows, groups)
        return self.combining and groups < rows

    def _measure(self, rows: int, groups: int) -> None:
        self._rows += rows
        self._groups += groups
        self._measured += 1
        if self._measured < LOOKED_AT:
            return
        share = self._groups / self._rows
        self._forget()
        if self.combining:
            self.combining = share < OFF_AT
            self._pause = PAUSE_MIN
        else:
            self.combining = share <= ON_AT
        if not self.combining:
            self._rest()

    def _forget(self) -> None:
        self._rows = self._groups = self._measured = 0

    def _rest(self) -> None:
        """Starts a pause in which batches are not measured. Each pause is twice as long as the previous pause."""
        self._left = self._pause
        self._pause = min(2 * self._pause, PAUSE_MAX)
