"""Names of the side output and the counters of late rows, and the common way to drop late rows (`set_aside`).

A row is late if the operator's watermark, which is the watermark of its slowest channel, has passed its time. Windows,
joins and rankings of event time count late rows, and most emit them to a side output. Windows of aggregates decide for
themselves which rows are late (`tidegate/operators/windows/`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.combined_rows import is_combined, rows_behind
from tidegate.operators.user_metrics import Counter

LATE = "late"
"""The side output of late rows."""
LATE_RECORDS = "numLateRecordsDropped"
"""Flink's name for how many there were."""
LEFT_RECORDS = "numRecordsLeft"
"""Number of rows in windows that were not full when the input ended."""


def set_aside(
    batch: pa.RecordBatch,
    late: NDArray[np.bool_],
    count: Counter,
    emit_aside: Callable[[str, pa.RecordBatch], None],
    without: Sequence[str] = (),
) -> NDArray[np.int64]:
    """Counts the rows that are late, and sends them to the side output. Returns the numbers of the other rows.

    `without` are columns that the side output does not get. Combined rows are only counted: rows are combined only if
    the side output is not read.
    """
    if late.any():
        count.inc(rows_behind(batch, late))
        if not is_combined(batch.schema):
            emit_aside(LATE, batch.filter(pa.array(late)).drop_columns(list(without)))
    return np.flatnonzero(~late)
