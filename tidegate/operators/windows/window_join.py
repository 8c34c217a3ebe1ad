"""`WindowJoin` joins rows of two inputs that have the same key and belong to the same event-time window.

Rules:

- A window is joined once, when the watermark of both inputs has passed its end. Its rows are then removed.
- A null key has no partner, as in SQL. Such a row is only emitted by an outer or an anti join.
- Due windows are joined in order, with about `FIRED_ROWS` rows per step. A snapshot may be taken between two steps:
  windows that were joined before have been emitted and removed from the state.
- A row in several windows (`Sliding`) is stored once for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.joins.join_operator import LEFT, MOMENT, RIGHT, JoinHow, JoinOperator, JoinSides, paired
from tidegate.operators.operator import Emit
from tidegate.operators.operator_errors import blame
from tidegate.operators.source_splits import Due
from tidegate.operators.windows.window_columns import WINDOW_END, WINDOW_START, bound_type, bounds_of, check_ends
from tidegate.operators.windows.window_operator import TIME_MS_END, DueRows
from tidegate.operators.windows.window_specs import DueByWindows, Sliding, Tumbling, ends_of, starts_of
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.schemas.arrow_types import decoded_type


class WindowJoin(JoinOperator):
    """Joins rows of two inputs with equal keys in the same window.

    Raises ConfigurationError for windows that joins do not support, and for columns that do not match.
    """

    def __init__(
        self,
        sides: JoinSides,
        schemas: tuple[pa.Schema, pa.Schema],
        window: Tumbling | Sliding,
        how: JoinHow = "inner",
    ) -> None:
        super().__init__(sides, schemas, how)
        if not isinstance(window, Tumbling | Sliding):
            raise ConfigurationError(f"join: window={window!r} is not supported; give tg.Tumbling or tg.Sliding")
        taken = sorted(set(self.schema.names) & {WINDOW_START, WINDOW_END})
        if taken:
            raise ConfigurationError(
                f"join: the inputs have columns {taken}, names that the result needs for the bounds of the window; "
                "rename them with select"
            )
        self._window = window
        self._due = DueRows(MOMENT)
        self._bound = bound_type(decoded_type(schemas[LEFT].field(sides.times[LEFT]).type), window)
        self.output = pa.schema([*self.schema, (WINDOW_START, self._bound), (WINDOW_END, self._bound)])
        """The columns of the result, with the bounds of the window."""

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rule by which rows are late: the treatment of a row changes when a watermark ends one of its
        windows.
        """
        return (DueByWindows(self._window),)

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Stores the rows of a batch of the input `index` in their windows, and drops and counts late rows.

        Raises OperatorError for rows without a time.
        """
        keys, times, values = self.rows_of(index, batch)
        with blame(self.context, batch):
            check_ends(self._window, times, self._bound)
        reached = self.reached(keys)
        self.late.inc(int(np.count_nonzero(self._window.last_end_ms(times) - 1 <= reached)))
        for rows, ends in ends_of(self._window, times):
            open_rows = ends - 1 > (reached if isinstance(reached, int) else reached[rows])
            if not open_rows.all():
                rows, ends = rows[open_rows], ends[open_rows]
            if not len(rows):
                continue
            if len(rows) < batch.num_rows:
                picked = pa.array(rows)
                self.keep(index, keys.take(picked), ends, [value.take(picked) for value in values])
            else:
                self.keep(index, keys, ends, values)
            self._due.note(ends)

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Joins the windows that have ended at the watermark. Yields between two steps."""
        self.reach(watermark_ms)
        for limit in self._due.limits(self.tables, min(watermark_ms, TIME_MS_END) + 1):
            self._fire(limit, emit)
            yield

    def _fire(self, limit: int, emit: Emit) -> None:
        """Joins the windows that end at `limit` (in ms) or before, and removes their rows."""
        left, right = (self._due.take(self.tables[side], limit) for side in (LEFT, RIGHT))
        by = [*self.keys.names, MOMENT]
        pairing = paired(left.select(by), right.select(by), self.keys.names)
        if self.how in ("semi", "anti"):
            met = pairing.counts > 0
            self._emit(left, None, np.flatnonzero(met if self.how == "semi" else ~met), None, emit)
        else:
            for of_left, of_right in pairing.pairs(OUTPUT_ROWS_MAX):
                self._emit(left, right, of_left, of_right, emit)
            if self.how in ("left", "full"):
                self._emit(left, None, np.flatnonzero(pairing.counts == 0), None, emit)
            if self.how in ("right", "full"):
                self._emit(None, right, None, pairing.lonely, emit)
        for table in self.tables:
            table.done()

    def _emit(
        self,
        left: pa.RecordBatch | None,
        right: pa.RecordBatch | None,
        of_left: NDArray[np.int64] | None,
        of_right: NDArray[np.int64] | None,
        emit: Emit,
    ) -> None:
        """Emits joined rows in batches of bounded size.

        `of_left` and `of_right` have the row indices of each pair, or are None if the rows have no partner on that
        side.
        """
        positions = of_left if of_left is not None else of_right
        assert positions is not None
        for start in range(0, len(positions), OUTPUT_ROWS_MAX):
            piece = slice(start, start + OUTPUT_ROWS_MAX)
            sides = [
                None if rows is None or of is None else rows.take(pa.array(of[piece]))
                for rows, of in ((left, of_left), (right, of_right))
            ]
            (some, *_) = [side for side in sides if side is not None]
            ends = some.column(MOMENT).to_numpy()
            result = self.result(sides[LEFT], sides[RIGHT], len(ends))
            bounds = [bounds_of(starts_of(self._window, ends), self._bound), bounds_of(ends, self._bound)]
            emit(pa.RecordBatch.from_arrays([*result.columns, *bounds], schema=self.output))
