"""What rows are called that come too late: windows, joins and rankings of event time count them, most give them aside.

A row is late by the watermark that has come to the operator, that of its slowest channel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.user_metrics import Counter

LATE = "late"
"""The side output of late rows."""
LATE_RECORDS = "numLateRecordsDropped"
"""Flink's name for how many there were."""
LEFT_RECORDS = "numRecordsLeft"
"""How many rows were in windows that were not full when the input ended."""


def set_aside(
    batch: pa.RecordBatch, late: NDArray[np.bool_], count: Counter, emit_aside: Callable[[str, pa.RecordBatch], None]
) -> NDArray[np.int64]:
    """Count the rows that are late, and give them aside. Returns the numbers of the others."""
    if late.any():
        count.inc(int(np.count_nonzero(late)))
        emit_aside(LATE, batch.filter(pa.array(late)))
    return np.flatnonzero(~late)
