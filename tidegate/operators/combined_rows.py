"""Combined rows: partial aggregates that each represent several input rows of one key.

Has the column that marks them, and functions to detect and count them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.schemas.column_names import own_name

COMBINED = own_name("combined")
"""Name of the column with the number of rows that a combined row represents."""


def is_combined(schema: pa.Schema) -> bool:
    """Returns whether batches of this schema contain combined rows (partial aggregates)."""
    return len(schema) > 0 and schema.names[-1] == COMBINED


def rows_behind(batch: pa.RecordBatch, chosen: NDArray[np.bool_]) -> int:
    """Returns the number of input rows that the chosen rows of a batch represent. `chosen` is a mask over the rows."""
    if not is_combined(batch.schema):
        return int(np.count_nonzero(chosen))
    return int(batch.column(COMBINED).to_numpy()[chosen].sum())
