"""`AppliedCounts`: a function gets every so many rows of a key, in the order in which they come.

Rules are those of `windows/count_windows.py`: what is not full when the input ends does not come out, and time has no
part. The rows of windows that are not full are kept.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tidegate.actors.operators.operator import Emit
from tidegate.actors.operators.operator_errors import blame
from tidegate.actors.operators.window_functions.window_buffer import WindowBuffer
from tidegate.actors.operators.window_functions.window_calls import WindowCalls
from tidegate.actors.operators.windows.count_windows import dealt_out
from tidegate.actors.operators.windows.merged_groups import codes_of
from tidegate.actors.operators.windows.window_specs import Count
from tidegate.storage.schemas.one_batch import one_batch


class AppliedCounts(WindowBuffer):
    """Calls a function with windows of so many rows."""

    def __init__(self, keys: tuple[str, ...], spec: Count, schema: pa.Schema, calls: WindowCalls) -> None:
        super().__init__(keys, schema, calls)
        self._size = spec.rows

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Give the function the windows that are full, and keep the other rows."""
        with blame(self.context, batch):
            rows, keys = self.rows_of(batch)
        self.check_owner(keys)
        table = self.tables[0]
        codes, distinct, count = codes_of(keys, batch.num_rows)
        found = table.find(distinct)
        held = np.bincount(found.keys, minlength=count)
        windows, firsts, _, of_keys, full = dealt_out(codes, held, self._size)
        of_stored = firsts[found.keys]
        stays = ~full[windows]
        came = np.flatnonzero(~stays)
        taken = found.refs[full[of_stored]]
        stored = self.taken(taken)
        table.remove(taken)
        left = pa.array(np.flatnonzero(stays))
        self.keep(rows.take(left), keys.take(left), np.zeros(len(left), dtype=np.int64))
        table.done()
        if not len(came):
            return
        both = one_batch(pa.Table.from_batches([stored, rows.take(pa.array(came))]), "rows of windows")
        numbers = np.full(len(of_keys), -1, dtype=np.int64)
        numbers[full] = np.arange(int(full.sum()))
        groups = np.concatenate([numbers[of_stored[full[of_stored]]], numbers[windows[came]]])
        self.call(both, groups, None, emit, self.context)
