"""Pays for the kernels ahead of time.

The first call of a kernel loads its machine code from the cache beside the module, or compiles it when there is none
(seconds, once per installation). A standby actor calls `warm_kernels` so that a restarted task does not pay.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.actors.kernels import accumulate
from tidegate.actors.kernels.columns import NO_MASK, fixed_values
from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.kernels.key_index import KeyIndex
from tidegate.actors.kernels.paged import PAGE_ROWS, gathered, mark_slots, revive, scatter, touched_pages
from tidegate.actors.kernels.partition import gather, partition, subtask_table


def warm_kernels() -> None:
    """Run every kernel once on two rows, for 64-bit values."""
    batch = pa.record_batch({"i": [1, 2], "f": [1.0, None], "s": ["a", None]})
    for keys in (("i",), ("s",), ("i", "f", "s")):
        hashes = hash_columns(batch, keys)
        KeyIndex(keys).upsert(batch)
        gather(batch, partition(hashes, subtask_table(128, 2), 2).rows)
    slots = np.zeros(2, dtype=np.int32)
    ints, floats = fixed_values(batch.column("i")), fixed_values(batch.column("f"))
    for dtype, values in ((np.dtype(np.int64), ints), (np.dtype(np.float64), floats)):
        page = np.zeros(PAGE_ROWS, dtype=dtype)
        pages = np.array([page.ctypes.data], dtype=np.uintp)
        for extreme in (accumulate.minimum, accumulate.maximum):
            extreme(pages, slots, values, NO_MASK)
        scatter(pages, slots, gathered(pages, slots, dtype))
        accumulate.mark(pages, slots, NO_MASK)
        revive(pages, slots, np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int32))
        if dtype == np.int64:
            accumulate.count(pages, slots, NO_MASK)
            accumulate.sum_int64(pages, slots, values, NO_MASK)
        else:
            accumulate.sum_float64(pages, slots, values, NO_MASK)
    touched_pages(slots, np.zeros(1, dtype=np.int32))
    mark_slots(np.zeros(1, dtype=np.uint64), slots)
