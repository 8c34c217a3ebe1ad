"""Readers of windows whose state consists of several nodes: slices, or several slices that were merged (`slices.py`).

`NodeReader` reads one window: it merges the nodes of each key in memory. With any backend, only the keys of one window
and of some key groups are in memory at a time. `BundleReader` reads several windows that end one after another, and
reads their common nodes only once. It is faster for windows of few rows.

Rules of `BundleReader`:

- `Slices.bundle` describes how the windows are made of nodes. New nodes, which end together with these windows, are
  merged in memory, all nodes of one level in one call. The windows are then merged in one call. A call costs about the
  same for one row as for thousands.
- `read` changes no state. `store` writes the new nodes that must be kept, and the caller removes the nodes that they
  replace. Both must be in one step. Otherwise a node would be merged twice after a restore.
- At most `_ROWS_MAX` rows are read, and reading stops once they take `_BYTES_MAX` bytes. At most `_PAIRS_MAX` rows are
  merged. Above these limits `read` returns None, and the caller tries again with fewer windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.operators.aggregates.accumulators import Accumulator
from tidegate.operators.aggregates.aggregate_state import Fields
from tidegate.operators.batch_rows import OUTPUT_ROWS_MAX
from tidegate.operators.windows.slices import Bundle
from tidegate.operators.windows.window_specs import Numbers
from tidegate.operators.windows.window_state import MergedGroups, Parts, WindowState, codes_of
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import VectorTable
from tidegate.state.common.table_columns import BatchColumns
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.storage.schemas.batches import together
from tidegate.storage.schemas.column_names import own_name

_ALL = own_name("all_rows")
"""Name of the key column, with a constant value, of windows over all rows."""

Results = tuple[pa.RecordBatch, list[pa.Array]]
"""Key columns, and the result array of each aggregate."""
_ROWS_MAX = 65_536
_PAIRS_MAX = 131_072
_BYTES_MAX = 32 * 2**20
"""Greatest size, in bytes, of the values that a bundle has in memory (an estimate)."""

_NO_NUMBERS: Numbers = np.zeros(0, dtype=np.int64)


class NodeReader:
    """Reads windows from the state of one operator, and merges the nodes of which each window consists.

    A node is a part of a window: one slice, or several merged slices. Its accumulators have their own namespace in the
    state.
    """

    def __init__(self, state: WindowState) -> None:
        self._state = state

    def of_groups(self, parts: Sequence[int], groups: range | None) -> Iterator[Results]:
        """Yields the keys and results of a window in batches. `parts` are the nodes of the window.

        `groups` are the key groups to read, or None for all.
        """
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
        """Returns the results of a window for the keys of some rows, each key once. `parts` are the nodes of the
        window.

        `rows` is the number of rows, because `keys` has no columns if the windows have no keys.
        """
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
            known = np.delete(np.arange(count, dtype=np.int32), found.new_rows)
            columns = self._state.parts(found.slots[known])
            # Looking up a key makes a row for it. Rows that were not there before are removed again.
            table.remove(found.slots[found.new_rows])
            table.done()
            if len(known):
                merged.merge(known, columns)
        merged.done()
        return distinct, merged.results(np.arange(count))

    def merge_into(self, node: int, part: int, taken: bool, groups: range | None) -> int:
        """Merges the accumulators of the node `part` into the node `node`, for some key groups or all (None).

        With `taken`, removes the rows of `part`. Returns the number of changed rows.
        """
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
        """Returns a new table in memory with the columns of the state, and its accumulators."""
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


@dataclass(frozen=True, slots=True)
class BundleRows:
    """The results of several windows that are read together (a bundle), sorted by window, and the new nodes to
    store.
    """

    windows: Numbers
    """For each row, the index of its window."""
    keys: pa.RecordBatch
    results: list[pa.Array]
    nodes: Numbers
    """For each row of the new nodes, the node of the state into which it is merged.

    `node_keys` and `node_parts` have its key and the values to merge.
    """
    node_keys: pa.RecordBatch
    node_parts: Parts


class _Layout:
    """Assigns row numbers to the rows of a bundle in memory: first the rows that were read, then the rows to compute.

    The rows of a node are consecutive. `nodes` and `codes` have the node and the key number of each row that was read,
    and `keys` is the number of keys.
    """

    def __init__(self, nodes: Numbers, codes: Numbers, keys: int) -> None:
        bounds = np.flatnonzero(np.diff(nodes, prepend=nodes[:1] - 1, append=nodes[-1:] - 1))
        self._keys = keys
        self.codes = codes
        self.merges: list[tuple[Numbers, Numbers]] = []
        """For each level, the indices of the rows to merge, and the index of the later row into which each is merged.
        """
        self.pairs = 0
        self._nodes, self._places = nodes[:0], np.zeros((0, 2), dtype=np.int64)
        self.know(nodes[bounds[:-1]], np.stack([bounds[:-1], bounds[1:]], axis=1))

    @property
    def rows(self) -> int:
        """Returns the number of rows in memory: rows that were read and rows to compute."""
        return len(self.codes)

    def know(self, nodes: Numbers, places: Numbers) -> None:
        """Records the row range of each node: the index of its first row, and the index after its last row."""
        nodes, places = np.concatenate([self._nodes, nodes]), np.concatenate([self._places, places])
        order = np.argsort(nodes)
        self._nodes, self._places = nodes[order], places[order]

    def places_of(self, nodes: Sequence[int]) -> Numbers:
        """Returns the row range (first index, end index) of each node. A node without rows has an empty range."""
        asked = np.asarray(nodes, dtype=np.int64)
        at = np.minimum(np.searchsorted(self._nodes, asked), len(self._nodes) - 1)
        return np.where((self._nodes[at] == asked)[:, None], self._places[at], 0)

    def add(self, made: Sequence[tuple[int, ...]]) -> Numbers:
        """Adds rows for new nodes, each of which is merged from other nodes.

        Each entry of `made` lists the nodes from which one new node is merged. Returns the row ranges of the new nodes.
        """
        places = self.places_of([*chain.from_iterable(made)])
        rows = _ranges_of(places)
        owners = _repeated(np.repeat(np.arange(len(made)), [len(parts) for parts in made]), places)
        into, inverse = np.unique(owners * self._keys + self.codes[rows], return_inverse=True)
        bounds = self.rows + np.searchsorted(into, np.arange(len(made) + 1) * self._keys)
        if len(rows):
            self.merges.append((rows, self.rows + inverse))
        self.pairs += len(rows)
        self.codes = np.concatenate([self.codes, into % self._keys])
        return np.stack([bounds[:-1], bounds[1:]], axis=1)


class BundleReader:
    """Reads bundles of windows from the state of one operator."""

    def __init__(self, state: WindowState) -> None:
        self._state = state
        self._fields: Fields | None = None
        self._columns: BatchColumns
        self._accumulators: list[Accumulator] = []

    def read(self, bundle: Bundle, groups: range | None) -> BundleRows | None:
        """Returns the results of all keys in the windows of a bundle, or None if there are too many rows.

        `groups` are the key groups to read, or None for all.
        """
        made = {merge.node for level in bundle.levels for merge in level}
        parts = {part for level in bundle.levels for merge in level for part in merge.parts}
        wanted = sorted(parts.union(*bundle.parts) - made)
        stored: list[pa.RecordBatch] = []
        values: list[Parts] = []
        rows = read_bytes = 0
        for keys, slots in self._state.table.scan_namespaces(wanted, OUTPUT_ROWS_MAX, groups):
            rows += len(slots)
            if rows > _ROWS_MAX or read_bytes > _BYTES_MAX:
                return None
            stored.append(keys)
            values.append(self._state.parts(slots))
            read_bytes += sum(column.nbytes for group in values[-1] for column in group)
        if not rows:
            return self._nothing()
        nodes, keys = fixed_values(stored[0].column(0)), self._state.user_keys(stored[0])
        if len(stored) > 1:
            nodes = np.concatenate([fixed_values(each.column(0)) for each in stored])
            keys = together([self._state.user_keys(each) for each in stored], "keys of windows")
        codes, distinct, count = codes_of(keys, rows)
        layout = _Layout(nodes, codes, count)
        for level in bundle.levels:
            places = layout.add([merge.parts for merge in level])
            layout.know(np.array([merge.node for merge in level], dtype=np.int64), places)
        window_places = self._window_places(bundle, layout)
        out_rows = _ranges_of(window_places)
        if max(layout.pairs, len(out_rows)) > _PAIRS_MAX or read_bytes // rows * layout.rows > _BYTES_MAX:
            return None
        self._fill(layout, values)
        node_places = layout.places_of([made for made, _ in bundle.stored])
        node_rows = _ranges_of(node_places)
        return BundleRows(
            _repeated(np.arange(len(window_places)), window_places),
            _taken(distinct, layout.codes[out_rows]),
            self._results(out_rows),
            _repeated(np.array([node for _, node in bundle.stored], dtype=np.int64), node_places),
            _taken(distinct, layout.codes[node_rows]),
            self._parts(node_rows),
        )

    def store(self, found: BundleRows) -> int:
        """Merges the new nodes that later windows need into the state. Returns the number of changed rows."""
        rows = len(found.nodes)
        if rows:
            table = self._state.table
            into = table.upsert(self._state.stored_keys(found.nodes, found.node_keys)).slots
            self._state.merge(into, found.node_parts)
            table.done()
            self._state.appeared(distinct_integers(found.nodes))
        return rows

    def _window_places(self, bundle: Bundle, layout: _Layout) -> Numbers:
        """Returns the row range of each window.

        Windows with the same nodes share a range, and a window of a single node uses the range of the node.
        """
        numbers = {parts: number for number, parts in enumerate(dict.fromkeys(bundle.parts))}
        single = [parts for parts in numbers if len(parts) == 1]
        made = [parts for parts in numbers if len(parts) > 1]
        places = np.zeros((len(numbers), 2), dtype=np.int64)
        places[[numbers[parts] for parts in single]] = layout.places_of([parts[0] for parts in single])
        if made:
            places[[numbers[parts] for parts in made]] = layout.add(made)
        return places[[numbers[parts] for parts in bundle.parts]]

    def _fill(self, layout: _Layout, values: Sequence[Parts]) -> None:
        """Writes the rows that were read (`values`) to the columns in memory, and computes the other rows by
        merging.
        """
        state = self._state
        if self._fields is not state.fields:
            self._fields, self._columns = state.fields, BatchColumns(state.specs())
            self._accumulators = state.accumulators_of(self._columns)
        columns = self._columns
        columns.begin(layout.rows)
        start = 0
        for each in values:
            stop = start + len(each[0][0])
            slots = np.arange(start, stop, dtype=np.int32)
            for fields, group in zip(state.fields.values(), each, strict=True):
                for of, column in zip(fields, group, strict=True):
                    columns.column(of.name).put(slots, column)
            columns.filled(stop)
            start = stop
        for rows, into in layout.merges:
            slots = into.astype(np.int32)
            for accumulator, part in zip(self._accumulators, self._parts(rows), strict=True):
                accumulator.merge(slots, part)
            columns.filled(int(into.max()) + 1)

    def _parts(self, rows: Numbers) -> Parts:
        slots = rows.astype(np.int32)
        return [[self._columns.column(of.name).take(slots) for of in fields] for fields in self._state.fields.values()]

    def _results(self, rows: Numbers) -> list[pa.Array]:
        """Returns the results of the rows with these indices. A row that is listed several times is computed once."""
        distinct, inverse = np.unique(rows, return_inverse=True)
        if len(distinct) == len(rows):
            return self._state.results_of(self._accumulators, rows.astype(np.int32))
        results = self._state.results_of(self._accumulators, distinct.astype(np.int32))
        return [each.take(pa.array(inverse)) for each in results]

    def _nothing(self) -> BundleRows:
        keys = self._state.key_schema.empty_table().to_batches()
        none = pa.RecordBatch.from_pylist([], self._state.key_schema) if not keys else keys[0]
        return BundleRows(_NO_NUMBERS, none, [], _NO_NUMBERS, none, [])


def _ranges_of(places: Numbers) -> Numbers:
    """Returns all numbers in several ranges, one range after the other. `places` has the start and the end of each
    range, of shape (n, 2).
    """
    lengths = places[:, 1] - places[:, 0]
    ends = np.cumsum(lengths)
    firsts: Numbers = np.repeat(places[:, 0] - ends + lengths, lengths)
    return firsts + np.arange(len(firsts), dtype=np.int64)


def _repeated(values: Numbers, places: Numbers) -> Numbers:
    """Repeats `values[i]` as often as range i has numbers. `places` has the start and the end of each range, of shape
    (n, 2).
    """
    found: Numbers = np.repeat(values, places[:, 1] - places[:, 0])
    return found


def _taken(keys: pa.RecordBatch, rows: NDArray[Any]) -> pa.RecordBatch:
    """Returns the keys of the rows with these indices.

    Returns `keys` itself if it has no columns, because Arrow cannot take rows of such a batch.
    """
    return keys.take(pa.array(rows)) if keys.num_columns else keys
