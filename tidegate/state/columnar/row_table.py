"""`ColumnarRows`: a row table in memory, as Arrow chunks in arrival order.

A row has a slot in a separate key space (`RowSlots`), whose columns are key, sequence number and values. They never
change, so freezing them takes references. Only the flags of live rows change. Snapshots, the undo log, and the reuse of
slots of removed rows work as for a table without value columns. Rules:
- Slots of a key's rows ascend in arrival order. Stored rows may be in another order, because canonical savepoints and
  RocksDB sort by the bytes of the number. Slots are therefore ordered when all rows are loaded.
- Rows are appended without a lookup. The key space has no index except while layers of a checkpoint are loaded.
- Rows of a key are found by a `RowIndex`, which is built at the first `find`, and again after slots were renumbered. It
  takes about 20 bytes per row, and 20 bytes per key in addition to the key itself. Keys without rows stay in it until
  there are more of them than rows; then it is rebuilt. It is not in checkpoints.
- Rows of a key form a chain: each key has a first row, each row the next row of its key. Walks unlink removed rows, so
  that each is skipped only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.change_tracking import Bitmaps
from tidegate.state.columnar.key_space import FrozenKeys, KeySpace
from tidegate.state.columnar.paged_state import FrozenSlots, SortedSlots, by_bytes
from tidegate.state.columnar.undo_log import Notes, UndoLog
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.backend import FoundRows
from tidegate.state.kernels.distinct_integers import distinct_integers
from tidegate.state.kernels.jit import kernel
from tidegate.state.kernels.paged import Pages, load_value
from tidegate.state.key_index.hash_table import extended
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.stored_rows import ROW_SEQUENCE, SEQUENCE_FIELD

_INDEXED_ROWS = 1 << 18
_KEYS_MIN = 65_536
END = -1
"""The value for a missing row."""


class RowSlots(ColumnarTable):
    """The rows of a row table by slot, without value columns.

    `identity` are the columns that identify a row: its key and its sequence number.
    """

    def __init__(self, space: KeySpace, name: str, identity: tuple[str, ...], incremental: bool) -> None:
        self._identity = identity
        super().__init__(space, name, (), incremental)

    def put_behind(self, rows: pa.RecordBatch) -> NDArray[np.int32]:
        """Adds new rows in the next slots, and returns these slots. The rows are not marked as changed."""
        first = self._space.slots
        self._append(rows, rows)
        return np.arange(first, self._space.slots, dtype=np.int32)

    def _frozen(self, dirty: Bitmaps | None, removed: bool) -> FrozenSlots:
        frozen = super()._frozen(dirty, removed)
        return replace(frozen, keys=_selected(frozen.keys, self._identity)) if removed else frozen

    def _sorted(self) -> SortedSlots:
        return replace(
            super()._sorted(), order=lambda rows, groups: by_bytes(rows.select(list(self._identity)), groups)
        )


@dataclass(slots=True)
class RowSequence:
    """Assigns sequence numbers to rows, for all row tables of a backend."""

    next: int = 0


class ColumnarRows:
    """A `RowTable` in memory. `other_logs` are the undo logs of the operator's other states."""

    def __init__(
        self,
        name: str,
        values: pa.Schema,
        max_parallelism: int,
        key_names: tuple[str, ...],
        incremental: bool,
        other_logs: Sequence[UndoLog],
        sequence: RowSequence,
    ) -> None:
        self.name = name
        self.values = values
        identity = (*key_names, ROW_SEQUENCE)
        self._key_names = key_names
        self._stored = (*key_names, *values.names)
        self._sequence = sequence
        self.undo = UndoLog(other_logs[0].bytes_max, *other_logs)
        """The undo log of this table."""
        self._space = KeySpace(
            max_parallelism, (*identity, *values.names), self.undo, grouped_by=key_names, identity=identity
        )
        self._table = _IndexedSlots(self._space, name, identity, incremental)

    @property
    def schema(self) -> pa.Schema | None:
        """Returns the stored columns, or None until the key columns are known."""
        return self._space.schema

    @property
    def rows(self) -> int:
        """Returns the exact number of rows in the table."""
        return self._table.rows

    def fix_keys(self, schema: pa.Schema) -> None:
        """Sets the stored key columns. Called once, before the first key."""
        self._space.fix(pa.schema([*schema, SEQUENCE_FIELD, *self.values]))

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch) -> None:
        """Appends a row to the table for each key. Row i of `values` has its value columns."""
        schema = self._space.schema
        assert schema is not None, "rows before their key columns are known"
        count = keys.num_rows
        if count == 0:
            return
        first = self._sequence.next
        self._sequence.next = first + count
        numbers = pa.array(np.arange(first, first + count, dtype=np.int64))
        arrays = [*keys.columns, numbers, *values.columns]
        self._table.append(pa.RecordBatch.from_arrays(arrays, schema=schema))

    def find(self, keys: pa.RecordBatch) -> FoundRows:
        """Returns references to all rows of these keys, in arrival order for each key."""
        return FoundRows(*self._table.find(keys, self._key_names))

    def take(self, refs: NDArray[np.int32], columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the rows with these references, in the order of `refs`."""
        return self._space.keys_of(refs, self._stored if columns is None else columns)

    def scan(self, columns: Sequence[str], rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int32]]]:
        """Yields batches of all rows, in arrival order, each with the references to its rows."""
        frozen = self._space.freeze()[0]
        with self._space.reading():
            for start in range(0, int(frozen.bounds[-1]), rows_max):
                slots = np.arange(start, min(start + rows_max, int(frozen.bounds[-1])), dtype=np.int32)
                slots = slots[self._table.live(slots)]
                if len(slots):
                    yield frozen.take(slots, columns), slots

    def remove(self, refs: NDArray[np.int32]) -> None:
        """Removes the rows with these references."""
        slots = distinct_integers(refs).astype(np.int32, copy=False)
        if len(slots):
            self._table.set_live(slots, np.zeros(len(slots), dtype=np.bool_))

    def done(self) -> None:
        """Ends the batch. Frees the slots of removed rows if there are many."""
        self._space.settle()

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns two numbers of rows: the rows that have changed since the checkpoint `base`, and all rows."""
        return self._table.changed_rows(base)

    def freeze(self, cut: Cut) -> list[FrozenState]:
        """Returns snapshots of all rows or, with a base, of the changes since the base. Only references to pages are
        copied.
        """
        return [part.now() if isinstance(part, FrozenSlots) else part for part in self._table.freeze(cut)]

    def load(self, table: StateTable) -> None:
        """Adds stored rows, or removes the rows of stored keys, depending on the table. The caller has checked the
        columns.
        """
        rows, numbers = table.rows, table.rows.column(ROW_SEQUENCE)
        if rows.num_rows:
            self._sequence.next = max(self._sequence.next, int(numbers.to_numpy().max()) + 1)
        if table.removed:
            schema = self._space.schema
            assert schema is not None
            nulls = [pa.nulls(rows.num_rows, field.type) for field in self.values]
            self._table.forget(pa.RecordBatch.from_arrays([*rows.columns, *nulls], schema=schema))
        else:
            self._table.load(rows, table.layer)

    def loaded(self) -> None:
        """Finishes a restore, after all stored tables are loaded: orders the rows of each key.

        Raises CorruptionError if a row occurred twice in layer 0 (the base).
        """
        self._space.build_index()
        self._space.drop_index(self._table)
        if self._space.slots:
            numbers = np.concatenate([chunk.column(ROW_SEQUENCE) for chunk in self._space.freeze()[0].chunks])
            if bool(np.any(numbers[1:] < numbers[:-1])):
                self._space.keep(np.argsort(numbers, kind="stable").astype(np.int32))

    def keep(self, checkpoint_id: CheckpointId, after_freeze: bool) -> None:
        """Records that the current rows equal this checkpoint, and starts to record changes in the undo log."""
        if self._space.schema is not None:
            self.undo.begin(checkpoint_id, (self._table,), after_freeze)

    def kept(self) -> list[StateTable]:
        """Returns a table without rows that represents this state in a list of states."""
        schema = self._space.schema
        assert schema is not None
        return [StateTable(self.name, StateKind.KEYED, pa.RecordBatch.from_pylist([], schema))]

    def pieces(self, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Yields the key columns of all rows, in batches. A key occurs once for each of its rows."""
        return (keys for keys, _ in self.scan(self._key_names, rows_max))


class _IndexedSlots(RowSlots):
    """The rows of a row table, with an index that finds the rows of a key."""

    def __init__(self, space: KeySpace, name: str, identity: tuple[str, ...], incremental: bool) -> None:
        self._index: RowIndex | None = None
        super().__init__(space, name, identity, incremental)

    def append(self, rows: pa.RecordBatch) -> None:
        """Adds new rows at the end, and adds them to the index."""
        slots = self.put_behind(rows)
        if self.dirty is not None:
            self.dirty.mark(slots)
        if self._index is not None:
            self._index.add(rows, slots)

    def find(self, keys: pa.RecordBatch, names: tuple[str, ...]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Finds the rows of keys. Returns, for each found row, the index of its key in `keys`, and its slot."""
        if self._index is not None and self._index.is_worn(self._rows):
            self._index = None
        if self._index is None:
            self._index = self._built(names)
        return self._index.find(keys, self._live.pages)

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Stores rows of a checkpoint layer, and adds them to the index."""
        self._index = None
        super().load(rows, layer)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        self._index = None
        super().rebuild(kept, slots)

    def undo(self, notes: Notes) -> None:
        """Restores the rows that existed when `notes` (undo data) began."""
        self._index = None
        super().undo(notes)

    def _built(self, names: tuple[str, ...]) -> RowIndex:
        index = RowIndex(names)
        if self._rows == 0:
            return index
        keys = self._space.freeze()[0]
        for start in range(0, self._space.slots, _INDEXED_ROWS):
            slots = np.arange(start, min(start + _INDEXED_ROWS, self._space.slots), dtype=np.int32)
            slots = slots[self.live(slots)]
            if len(slots):
                index.add(keys.take(slots, names), slots)
        return index


def _selected(keys: FrozenKeys, names: Sequence[str]) -> FrozenKeys:
    """Returns a snapshot of keys reduced to the columns `names`."""
    schema = pa.schema([keys.schema.field(name) for name in names])
    return FrozenKeys(schema, tuple(chunk.select(list(names)) for chunk in keys.chunks), keys.bounds)


class RowIndex:
    """Finds the rows of a key in a row table. `key_names` are the key columns."""

    __slots__ = ("_chains", "_keys")

    def __init__(self, key_names: tuple[str, ...]) -> None:
        self._keys = KeyIndex(key_names)
        self._chains = RowChains()

    def is_worn(self, rows: int) -> bool:
        """Returns whether the index should be rebuilt, because most of its keys have no rows any more.

        `rows` is the number of rows.
        """
        return self._keys.size > _KEYS_MIN + 2 * rows

    def add(self, keys: pa.RecordBatch, slots: NDArray[np.int32]) -> None:
        """Adds new rows to the index. Their slots must ascend."""
        numbers = self._keys.upsert(keys).slots
        self._chains.grow(self._keys.size, int(slots[-1]) + 1 if len(slots) else 0)
        self._chains.add(numbers, slots)

    def find(self, keys: pa.RecordBatch, live: Pages) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Finds the rows of keys. Returns, for each found row, the index of its key in `keys`, and its slot.

        `live` are the pages with the flags of rows that were not removed.
        """
        upserted = self._keys.upsert(keys)
        self._chains.grow(self._keys.size, 0)
        return self._chains.find(upserted.slots, upserted.first_rows, live)


class RowChains:
    """The rows of each key, as a linked list (chain) of slots. Keys are identified by their number."""

    __slots__ = ("_heads", "_nexts", "_tails")

    def __init__(self) -> None:
        self._heads = np.full(1024, END, dtype=np.int32)
        self._tails = np.full(1024, END, dtype=np.int32)
        self._nexts = np.full(1024, END, dtype=np.int32)

    def grow(self, keys: int, slots: int) -> None:
        """Makes room for `keys` keys and `slots` slots."""
        if keys > len(self._heads):
            self._heads = _with_ends(self._heads, keys)
            self._tails = _with_ends(self._tails, keys)
        if slots > len(self._nexts):
            self._nexts = _with_ends(self._nexts, slots)

    def add(self, numbers: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        """Appends row `slots[i]` to the chain of key `numbers[i]`."""
        link(self._heads, self._tails, self._nexts, numbers, slots)

    def find(
        self, numbers: NDArray[np.int32], first_rows: NDArray[np.int32], live: Pages
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Finds the rows of keys. Returns, for each found row, the index of its key in `numbers`, and its slot.

        `first_rows` has the first index of each key in `numbers`, and `live` the pages with the flags of rows that were
        not removed. Removed rows are unlinked from their chains.
        """
        counts = np.zeros(len(numbers), dtype=np.int64)
        lengths = np.empty(len(self._heads), dtype=np.int64)
        total = prune_and_count(self._heads, self._tails, self._nexts, live, numbers, first_rows, lengths, counts)
        positions, slots = np.empty(int(total), dtype=np.int64), np.empty(int(total), dtype=np.int32)
        collect(self._heads, self._nexts, numbers, positions, slots)
        return positions, slots

    def clear(self, numbers: NDArray[np.int32] | None = None) -> None:
        """Empties the chains of the keys `numbers`, or of all keys."""
        self._heads[slice(None) if numbers is None else numbers] = END


def _with_ends(values: NDArray[np.int32], needed: int) -> NDArray[np.int32]:
    used = len(values)
    larger = extended(values, used, max(needed, 2 * used))
    larger[used:] = END
    return larger


@kernel
def link(
    heads: NDArray[np.int32],
    tails: NDArray[np.int32],
    nexts: NDArray[np.int32],
    keys: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> None:
    """Appends row `slots[i]` to the chain of key `keys[i]`."""
    for i in range(slots.shape[0]):
        key, slot = keys[i], slots[i]
        nexts[slot] = END
        if heads[key] == END:
            heads[key] = slot
        else:
            nexts[tails[key]] = slot
        tails[key] = slot


@kernel
def prune_and_count(
    heads: NDArray[np.int32],
    tails: NDArray[np.int32],
    nexts: NDArray[np.int32],
    flags: Pages,
    keys: NDArray[np.int32],
    first: NDArray[np.int32],
    lengths: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> int:
    """Unlinks removed rows from the chains of some keys. `first` has the first index of each key in `keys`.

    `counts[i]` becomes the number of rows of key `keys[i]`, and `lengths[key]` the number of rows of a key. Returns the
    sum of all counts.
    """
    total = 0
    for i in range(first.shape[0]):
        key = keys[first[i]]
        last, slot, length = np.int64(END), np.int64(heads[key]), 0
        while slot != END:
            after = np.int64(nexts[slot])
            if load_value(flags, slot, np.uint8(0)) != np.uint8(0):
                if last == END:
                    heads[key] = np.int32(slot)
                else:
                    nexts[last] = np.int32(slot)
                last = slot
                length += 1
            slot = after
        if last == END:
            heads[key] = END
        else:
            nexts[last] = END
        tails[key] = np.int32(last)
        lengths[key] = length
    for i in range(keys.shape[0]):
        counts[i] = lengths[keys[i]]
        total += counts[i]
    return total


@kernel
def collect(
    heads: NDArray[np.int32],
    nexts: NDArray[np.int32],
    keys: NDArray[np.int32],
    positions: NDArray[np.int64],
    slots: NDArray[np.int32],
) -> None:
    """Writes the rows of some keys to `positions` and `slots`, one key after the other.

    `prune_and_count` must have counted the rows before.
    """
    found = 0
    for i in range(keys.shape[0]):
        slot = np.int64(heads[keys[i]])
        while slot != END:
            positions[found] = i
            slots[found] = np.int32(slot)
            found += 1
            slot = np.int64(nexts[slot])
