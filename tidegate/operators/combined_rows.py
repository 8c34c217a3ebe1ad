"""Combined rows, each of which represents several rows of one key: the column that marks them, and functions to count
them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.schemas.column_names import own_name

COMBINED = own_name("combined")
"""Name of the column with the number of rows that a combined row represents."""


def is_combined(schema: pa.Schema) -> bool:
    """Returns whether batches of this schema have combined rows."""
    return len(schema) > 0 and schema.names[-1] == COMBINED


def rows_behind(batch: pa.RecordBatch, chosen: NDArray[np.bool_]) -> int:
    """Returns how many rows the chosen rows of a batch represent."""
    if not is_combined(batch.schema):
        return int(np.count_nonzero(chosen))
    return int(batch.column(COMBINED).to_numpy()[chosen].sum())
