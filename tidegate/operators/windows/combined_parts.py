"""`CombinedParts`: reads windows that are made of several nodes: the parts of each key are merged in memory.

At most the keys of a window in some key groups are in memory at a time, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from tidegate.operators.aggregates.accumulators import Accumulator
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.windows.merged_groups import MergedGroups, codes_of
from tidegate.operators.windows.window_state import WindowState
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import VectorTable
from tidegate.storage.schemas.reserved_names import own_name

_ALL = own_name("all_rows")
"""The key of windows of all rows."""

Results = tuple[pa.RecordBatch, list[pa.Array]]
"""Key columns, and the result of each aggregate."""


class CombinedParts:
    """Reads nodes of a state together. A node is a namespace of the state."""

    def __init__(self, state: WindowState) -> None:
        self._state = state

    def of_groups(self, parts: Sequence[int], groups: range | None) -> Iterator[Results]:
        """The results of all keys of some key groups (None: of all)."""
        table = self._state.table
        if len(parts) == 1:
            for keys, slots in table.scan_namespace(parts[0], OUTPUT_ROWS_MAX, groups):
                yield self._state.user_keys(keys), self._state.results(slots)
            return
        merged, accumulators = self._empty()
        for part in parts:
            for keys, slots in table.scan_namespace(part, OUTPUT_ROWS_MAX, groups):
                columns = self._state.parts(slots)
                into = merged.upsert(self._merged_keys(self._state.user_keys(keys), len(slots))).slots
                for accumulator, values in zip(accumulators, columns, strict=True):
                    accumulator.merge(into, values)
                merged.done()
        for keys, slots in merged.scan(OUTPUT_ROWS_MAX):
            yield self._plain_keys(keys), self._state.results_of(accumulators, slots)

    def of_keys(self, parts: Sequence[int], keys: pa.RecordBatch, rows: int) -> Results:
        """The results of the keys that some rows have. `rows`: their number, for there may be no key column."""
        table = self._state.table
        if len(parts) == 1:
            found = table.upsert(self._state.stored_keys(np.full(rows, parts[0], dtype=np.int64), keys))
            assert not len(found.new_rows), "a window of one part has the rows that were just added"
            slots = found.slots[found.first_rows]
            results = self._state.results(slots)
            table.done()
            return (keys.take(pa.array(found.first_rows)) if keys.num_columns else keys), results
        _, distinct, count = codes_of(keys, rows)
        merged = MergedGroups(self._state, count)
        for part in parts:
            found = table.upsert(self._state.stored_keys(np.full(count, part, dtype=np.int64), distinct))
            known = np.setdiff1d(np.arange(count, dtype=np.int32), found.new_rows).astype(np.int32)
            columns = self._state.parts(found.slots[known])
            # To look a key up is to make a row for it. Those that were not there go again.
            table.remove(found.slots[found.new_rows])
            table.done()
            if len(known):
                merged.merge(known, columns)
        merged.done()
        return distinct, merged.results(np.arange(count))

    def merge_into(self, node: int, part: int, taken: bool, groups: range | None) -> int:
        """Merge the rows of one node into another one; with `taken` the former is empty then. How many rows."""
        table = self._state.table
        rows = 0
        read = table.drain_namespace if taken else table.scan_namespace
        for keys, slots in read(part, OUTPUT_ROWS_MAX, groups):
            columns = self._state.parts(slots)
            nodes = np.full(len(slots), node, dtype=np.int64)
            into = table.upsert(self._state.stored_keys(nodes, self._state.user_keys(keys))).slots
            self._state.merge(into, columns)
            table.done()
            rows += len(slots)
        if rows:
            self._state.appeared([node])
        return rows

    def _empty(self) -> tuple[VectorTable, list[Accumulator]]:
        """A table in memory, and its accumulators."""
        names = tuple(self._state.key_schema.names) or (_ALL,)
        backend = ColumnarBackend(1, names, incremental=False)
        table = backend.table("merged", self._state.specs())
        backend.fix_keys(self._state.key_schema if len(self._state.key_schema) else pa.schema({_ALL: pa.int8()}))
        return table, self._state.accumulators_of(table)

    def _merged_keys(self, keys: pa.RecordBatch, rows: int) -> pa.RecordBatch:
        if keys.num_columns:
            return keys
        return pa.RecordBatch.from_arrays([pa.array(np.zeros(rows, dtype=np.int8))], names=[_ALL])

    def _plain_keys(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        return keys.select(self._state.key_schema.names)
