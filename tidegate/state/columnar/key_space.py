"""`KeySpace`: maps the keys of one operator in one subtask to slots, which all its states share.

Rules:
- A key gets its slot when it first appears, and keeps it until a rebuild. Key columns and key group of a slot never
  change, so freezing them takes references.
- Every state has pages for all slots, also for keys that do not have the state.
- A slot is dead if no state uses it, and no later snapshot must record its removal. When more than half of the slots
  are dead, everything is rebuilt without them, and slots are renumbered. Older snapshots keep their contents.
- A restore appends the keys of one state without a lookup, because each key occurs once (`append`). The index is built
  at the first lookup, and then finds any key that occurred twice. If many keys are expected and there are threads for
  it, the index is filled meanwhile (`RestoreThreads`).

`KeyColumns` stores the keys in slot order, append-only, in Arrow chunks; `FrozenKeys` is its state at a freeze.
- A chunk never changes. Eight or more consecutive chunks are merged if none is more than twice as long as a later one,
  up to a certain size. With batches of equal size, a key is therefore copied once per eightfold growth.

`RestoreThreads` loads a large state on several threads: some copy columns, one fills the key index.
- During the restore no other thread touches the index. Each thread copies different columns, whose pages no other
  thread uses. The result therefore does not depend on the order in which they run.

`BlockSize` limits how many rows are put together into one batch, out of the columns of a key space.
- A block has at most `BLOCK_ROWS` rows and about `BLOCK_BYTES`. It takes memory in addition to the state, and a column
  of strings takes 2 GiB at most.
- The size of keys is measured per chunk, so large keys make only their own blocks small. The size of values comes from
  the state or the previous block, whichever is larger. If a state cannot measure it (Python objects), the first block
  has few rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.undo_log import UndoLog
from tidegate.state.common.backend import ValueSpec, duplicate_key
from tidegate.state.common.page_memory import PAGE_MEMORY
from tidegate.state.common.pages import FrozenColumn, PagedColumn
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.state.kernels.partition import Places, gather, placed
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.schemas.batches import together
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT, key_groups_of

COMPACTED_SLOTS_MIN = 4096

_THREADED_KEYS_MIN = 1 << 17
"""Number of keys below which a restore uses no threads, because it would be over before they have started."""
_GROUP = ValueSpec("group", pa.uint16(), 0)
LiveSlots = Callable[[NDArray[np.int32]], NDArray[np.bool_]]
CHUNKS_MERGED = 8
"""How many chunks of similar size are merged into one."""
_CHUNK_ROWS_MAX = 1 << 20
_CHUNK_BYTES_MAX = 1 << 28
BLOCK_ROWS = 16 * PAGE_ROWS
BLOCK_BYTES = 1 << 26
ROWS_AT_FIRST = 512
PIECE_BYTES = 1 << 23
"""Keys are indexed in pieces of about this size. Indexing a piece takes several times its memory."""
_PIECES_AHEAD_MAX = 4
"""Number of pieces that may wait to be indexed. With more, the caller waits for the oldest piece."""


class SlotState(Protocol):
    """The methods of a state that its key space calls."""

    @property
    def name(self) -> str:
        """Returns the name of the state."""
        ...

    @property
    def used_slots(self) -> int:
        """Returns the number of slots that have the state."""
        ...

    def grow(self, slots: int) -> None:
        """Makes room for `slots` slots of the state."""
        ...

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Returns a mask of slots: True if the slot has the state, or if a later snapshot may record its removal.
        O(slots).
        """
        ...

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        ...


class KeySpace:
    """The keys of an operator, each with its slot and key group, and the undo log of their states.

    `key_names` are the stored key columns. `grouped_by` are the columns that choose the key group, and `identity` the
    columns that identify a key. Both are all columns by default.
    """

    def __init__(
        self,
        max_parallelism: int,
        key_names: tuple[str, ...],
        undo: UndoLog | None = None,
        restore_threads: int = 1,
        grouped_by: tuple[str, ...] | None = None,
        identity: tuple[str, ...] | None = None,
    ) -> None:
        assert 0 < max_parallelism <= MAX_PARALLELISM_LIMIT, f"max_parallelism {max_parallelism} is out of range"
        self._max_parallelism = max_parallelism
        self.names = key_names
        self._grouped_by = key_names if grouped_by is None else grouped_by
        self._identity = key_names if identity is None else identity
        self._index = KeyIndex(self._identity)
        self._keys: KeyColumns | None = None
        """The keys of all slots; None until the key columns are known."""
        self._groups = PagedColumn(_GROUP)
        self.undo = UndoLog(0) if undo is None else undo
        self._states: list[SlotState] = [self.undo]
        self._appended_by: SlotState | None = None
        """The state that has appended all keys so far, without a lookup: during a restore, or after `drop_index`."""
        self._dropped = False
        """True after `drop_index`."""
        self._restore_threads = restore_threads
        self._threads: RestoreThreads | None = None
        """The threads that index appended keys, if there are many."""
        self._readers = 0
        self._looked_at = (0, 0)
        """Number of slots, and rows of the largest state, when dead slots were last counted."""

    @property
    def slots(self) -> int:
        """Returns the number of slots in use, which is also the number of the next free slot."""
        return 0 if self._keys is None else self._keys.rows

    @property
    def schema(self) -> pa.Schema | None:
        """Returns the key columns, or None until they are known."""
        return None if self._keys is None else self._keys.schema

    def fix(self, schema: pa.Schema) -> None:
        """Sets the key columns. Called once."""
        assert tuple(schema.names) == self.names, f"key columns {schema.names} are not {self.names}"
        assert self._keys is None or self._keys.schema.equals(schema), "key columns have changed"
        if self._keys is None:
            self._keys = KeyColumns(schema)

    def add(self, state: SlotState) -> None:
        """Adds a state that uses the slots of this key space."""
        self._states.append(state)
        state.grow(self.slots)

    def drop(self, state: SlotState) -> None:
        """Removes a state that uses the slots of this key space."""
        self._states.remove(state)

    def can_append(self, state: SlotState) -> bool:
        """Returns whether `append` may be called for a state: there are no keys, or this state has appended all of
        them.

        False once a key was looked up.
        """
        return self.slots == 0 or self._appended_by is state

    def expect(self, keys: int) -> None:
        """Announces that up to `keys` keys will be appended. If there are many, starts threads for the restore."""
        if self._restore_threads > 1 and keys >= _THREADED_KEYS_MIN and self.slots == 0:
            self._threads = RestoreThreads(self._index, keys, self._restore_threads)

    def side_by_side(self, steps: Sequence[Callable[[], None]]) -> None:
        """Runs functions that share no memory, on several threads if a large state is being restored."""
        if self._threads is not None:
            self._threads.side_by_side(steps)
        else:
            for step in steps:
                step()

    def append(self, state: SlotState, keys: pa.RecordBatch) -> None:
        """Assigns the next slots to keys of a state for which `can_append` is true, without looking them up.

        Each key must occur once in all batches. `build_index` finds keys that occurred twice.
        """
        assert self._keys is not None and self.can_append(state)
        self._appended_by = state
        own = gather(keys, np.arange(keys.num_rows, dtype=np.int32))
        if self._threads is not None:
            self._threads.index(own)
        self._add(own)
        for each in self._states:
            each.grow(self.slots)

    def build_index(self) -> None:
        """Adds the appended keys to the index, unless that was done. Raises CorruptionError if a key occurred twice."""
        state, self._appended_by = self._appended_by, None
        threads, self._threads = self._threads, None
        if state is None:
            if threads is not None:
                threads.end()
            return
        if not (self._fill_index() if threads is None else threads.finish()):
            raise duplicate_key(state.name)

    def drop_index(self, state: SlotState) -> None:
        """Stops using a key index from now on: only `state` appends keys, and keys are never looked up."""
        self._index = KeyIndex(self._identity)
        self._appended_by, self._dropped = state, True

    def close(self) -> None:
        """Ends the threads of a restore that has failed."""
        if self._threads is not None:
            self._threads.end()

    def upsert(self, keys: pa.RecordBatch) -> Upserted:
        """Returns the slots of a batch of keys. `keys` has only the key columns. New keys get new slots."""
        assert self._keys is not None, "keys before their columns are known"
        assert not self._dropped, "a key space without an index"
        self.build_index()
        upserted = self._index.upsert(keys)
        if len(upserted.new_rows):
            self._add(gather(keys, upserted.new_rows))
            for state in self._states:
                state.grow(self.slots)
        return upserted

    def keys_of(self, slots: NDArray[np.int32], names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the keys of these slots, in the given order: all key columns, or the columns `names`."""
        assert self._keys is not None, "slots before their columns are known"
        return self._keys.freeze().take(slots, names)

    def groups_of(self, slots: NDArray[np.int32]) -> NDArray[np.uint16]:
        """Returns the key group of each of these slots."""
        groups: NDArray[np.uint16] = self._groups.raw(slots)
        return groups

    def freeze(self) -> tuple[FrozenKeys, FrozenColumn]:
        """Returns snapshots of the keys and key groups of all slots. Only references to pages are copied."""
        assert self._keys is not None, "a state without keys"
        return self._keys.freeze(), self._groups.freeze()

    @property
    def is_read(self) -> bool:
        """Returns whether a `reading` context is active."""
        return self._readers > 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Returns a context in which slots are not renumbered."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def settle(self) -> None:
        """Shrinks the undo log, and drops dead slots if more than half of at least 4,096 slots are dead. Called between
        batches.

        Counts dead slots only if enough rows were added or removed since the last count.
        """
        self.undo.settle()
        slots, rows = self.slots, max((state.used_slots for state in self._states), default=0)
        if slots < COMPACTED_SLOTS_MIN or 2 * rows >= slots or self._readers:
            return
        looked_slots, looked_rows = self._looked_at
        if (slots - looked_slots) + max(0, looked_rows - rows) < slots // 8:
            return
        needed = np.zeros(slots, dtype=np.bool_)
        for state in self._states:
            needed |= state.needed(slots)
        kept = np.flatnonzero(needed).astype(np.int32)
        if 2 * len(kept) < slots:
            # The next rebuild needs more than twice these keys, so the index grows to this size anyway.
            self._rebuild(kept, slots, keys_to_come=len(kept))
            slots = self.slots
        self._looked_at = (slots, rows)

    def keep(self, kept: NDArray[np.int32]) -> None:
        """Removes all keys except the keys of the slots `kept`, and renumbers the slots. Called between batches.

        `kept` must ascend. Only after a restore, before any change was recorded, may it have another order.
        """
        assert not self._readers, "slots are renumbered while a reader uses them"
        self._rebuild(kept, self.slots)
        self._looked_at = (0, 0)

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the keys, their index and their key groups."""
        keys_bytes = 0 if self._keys is None else self._keys.size_bytes
        return keys_bytes + self._index.size_bytes + 2 * self.slots

    def look_again(self) -> None:
        """Makes the next `settle` count dead slots again. Called after a snapshot, because slots that were kept only to
        record a removal may be dead now.
        """
        self._looked_at = (0, 0)

    def _fill_index(self) -> bool:
        """Builds the index of all keys. Returns False if a key occurs twice."""
        assert self._keys is not None
        to_come = self._keys.rows
        for keys in self._keys.pieces():
            to_come -= keys.num_rows
            if not self._index.fill(keys, to_come):
                return False
        return True

    def _add(self, keys: pa.RecordBatch) -> None:
        """Assigns the next slots to these keys."""
        assert self._keys is not None
        groups = key_groups_of(hash_columns(keys, self._grouped_by), self._max_parallelism)
        self._groups.extend(self.slots, pa.array(groups))
        self._keys.append(keys)

    def _rebuild(self, kept: NDArray[np.int32], slots: int, keys_to_come: int = 0) -> None:
        assert self._keys is not None
        if not self._dropped:
            self.build_index()
        frozen, schema = self._keys.freeze(), self._keys.schema
        self._index, self._keys, self._groups = (
            KeyIndex(self._identity),
            KeyColumns(schema),
            PagedColumn(_GROUP),
        )
        left, size = kept, BlockSize(frozen)
        while len(left):
            rows = size.rows(left)
            keys, left = frozen.take(left[:rows]), left[rows:]
            if not self._dropped:
                filled = self._index.fill(keys, len(left) + keys_to_come)
                assert filled, "two slots with one key"
            self._add(keys)
        for state in self._states:
            state.rebuild(kept, slots)


def key_pieces(space: KeySpace, live: LiveSlots, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int32]]]:
    """Yields batches of keys and their slots, in slot order.

    A batch has only slots that are live when the batch is requested.
    """
    if space.schema is None:
        return
    with space.reading():
        keys, _ = space.freeze()
        for start in range(0, int(keys.bounds[-1]), rows_max):
            slots = np.arange(start, min(start + rows_max, int(keys.bounds[-1])), dtype=np.int32)
            slots = slots[live(slots)]
            if len(slots):
                yield keys.take(slots), slots


class KeyColumns:
    """The keys of a key space in slot order. Keys are only appended."""

    __slots__ = ("_bytes", "_chunks", "_frozen", "rows", "schema")

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self._chunks: list[pa.RecordBatch] = []
        self._bytes: list[int] = []
        """The size of each chunk."""
        self._frozen: FrozenKeys | None = None
        """The result of the last freeze, or None if keys were added since."""

    def append(self, keys: pa.RecordBatch) -> None:
        """Adds keys, for the next slots.

        `keys` must own its buffers: a slice would keep its whole parent alive.
        """
        assert keys.schema.equals(self.schema), f"keys of {keys.schema} in a state of {self.schema}"
        self._frozen = None
        self._chunks.append(keys)
        self._bytes.append(keys.nbytes)
        self.rows += keys.num_rows
        while (count := self._mergeable()) > 1:
            self._chunks[-count:] = [pa.concat_batches(self._chunks[-count:])]
            self._bytes[-count:] = [self._chunks[-1].nbytes]

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of all key columns."""
        return sum(self._bytes)

    def pieces(self) -> Iterator[pa.RecordBatch]:
        """Yields all keys in slot order, in batches of at most `PIECE_BYTES`, or of one larger chunk."""
        piece: list[pa.RecordBatch] = []
        for chunk in self._chunks:
            if piece and sum(each.nbytes for each in piece) + chunk.nbytes > PIECE_BYTES:
                yield pa.concat_batches(piece)
                piece = []
            piece.append(chunk)
        if piece:
            yield pa.concat_batches(piece)

    def freeze(self) -> FrozenKeys:
        """Returns a snapshot of all keys, in slot order. Only references to chunks are copied."""
        if self._frozen is None:
            bounds = np.cumsum([0, *(chunk.num_rows for chunk in self._chunks)])
            self._frozen = FrozenKeys(self.schema, tuple(self._chunks), bounds)
        return self._frozen

    def _mergeable(self) -> int:
        """Returns how many of the last chunks should be merged, or 1 if none."""
        count = rows = size_bytes = longest = 0
        for chunk, chunk_bytes in zip(reversed(self._chunks), reversed(self._bytes), strict=True):
            if count and chunk.num_rows > 2 * longest:
                break
            if rows + chunk.num_rows > _CHUNK_ROWS_MAX or size_bytes + chunk_bytes > _CHUNK_BYTES_MAX:
                if 2 * rows > _CHUNK_ROWS_MAX or 2 * size_bytes > _CHUNK_BYTES_MAX:
                    return count  # merged, they nearly reach the largest allowed chunk
                break
            count += 1
            rows, size_bytes, longest = rows + chunk.num_rows, size_bytes + chunk_bytes, max(longest, chunk.num_rows)
        return count if count >= CHUNKS_MERGED else 1


@dataclass(frozen=True, slots=True)
class FrozenKeys:
    """The keys of all slots when a snapshot was taken, as chunks. Has the first slot of each chunk."""

    schema: pa.Schema
    chunks: tuple[pa.RecordBatch, ...]
    bounds: NDArray[np.int64]

    def take(self, slots: NDArray[np.int32], names: Sequence[str] | None = None) -> pa.RecordBatch:
        """Returns the keys of these slots, in the order of `slots`: all columns, or the columns `names`."""
        if bool(np.all(slots[1:] > slots[:-1])):
            return self._put_together(self._ascending(slots, names), names)
        of_chunk = self.chunks_of(slots).astype(np.uint16)
        order = np.argsort(of_chunk, kind="stable")
        edges = np.searchsorted(of_chunk[order], np.arange(len(self.bounds)))
        grouped = self._put_together(self._parts(slots[order], edges, names), names)
        if edges[of_chunk[0]] == 0 and edges[of_chunk[0] + 1] == len(slots):
            return grouped  # all slots are in one chunk
        back = np.empty(len(order), dtype=np.int32)
        back[order] = np.arange(len(order), dtype=np.int32)
        return grouped.take(pa.array(back))

    def row_bytes(self) -> NDArray[np.int64]:
        """Returns, for each chunk, the estimated size in bytes of the key columns of one slot."""
        return np.array([chunk.nbytes // max(1, chunk.num_rows) for chunk in self.chunks], dtype=np.int64)

    def chunks_of(self, slots: NDArray[np.int32]) -> NDArray[np.intp]:
        """Returns the index of the chunk that contains each slot."""
        return np.searchsorted(self.bounds[1:], slots, side="right")

    def placed(self, slots: NDArray[np.int32], places: Places) -> pa.RecordBatch:
        """Returns the keys of slots, with the key of `slots[i]` in row `places[i]`. `slots` must ascend, and not be
        empty.
        """
        return placed(self._ascending(slots, None), places, PAGE_MEMORY.buffer)

    def _ascending(self, slots: NDArray[np.int32], names: Sequence[str] | None) -> list[pa.RecordBatch]:
        """Returns the keys of ascending slots, one batch per chunk. Consecutive slots are not copied."""
        # Both arrays have one type, so `slots` is not copied.
        edges = np.searchsorted(slots, self.bounds.astype(np.int32)).tolist()
        found = []
        for chunk, first, start, stop in zip(self.chunks, self.bounds.tolist(), edges, edges[1:], strict=False):
            if stop == start:
                continue
            named = chunk if names is None else chunk.select(list(names))
            begin = int(slots[start]) - first
            is_run = int(slots[stop - 1]) - first - begin == stop - start - 1
            rows = None if is_run else pa.array(slots[start:stop] - np.int32(first))
            found.append(named.slice(begin, stop - start) if rows is None else named.take(rows))
        return found

    def _parts(
        self, slots: NDArray[np.int32], edges: NDArray[np.intp], names: Sequence[str] | None
    ) -> list[pa.RecordBatch]:
        """Returns the keys of slots that are grouped by chunk, one batch for each chunk.

        The slots `slots[edges[i]:edges[i + 1]]` are in chunk i.
        """
        return [
            _picked(chunk if names is None else chunk.select(list(names)), slots[start:stop] - first)
            for chunk, first, start, stop in zip(self.chunks, self.bounds[:-1], edges[:-1], edges[1:], strict=True)
            if stop > start
        ]

    def _put_together(self, parts: Sequence[pa.RecordBatch], names: Sequence[str] | None) -> pa.RecordBatch:
        if parts:
            return together(parts, f"keyed state with the columns {', '.join(self.schema.names)}")
        schema = self.schema if names is None else pa.schema([self.schema.field(name) for name in names])
        return pa.RecordBatch.from_pylist([], schema)


def _picked(chunk: pa.RecordBatch, rows: NDArray[np.int64]) -> pa.RecordBatch:
    """Returns the rows of a chunk, as a slice if they are consecutive."""
    if int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool(np.all(rows[1:] > rows[:-1])):
        return chunk.slice(int(rows[0]), len(rows))
    return chunk.take(pa.array(rows))


class BlockSize:
    """Chooses the number of rows of each block while a state is read block by block.

    `value_bytes` is the estimated size of a row's values, or None if unknown.
    """

    __slots__ = ("_key_bytes", "_keys", "_rows_max", "_value_bytes", "_value_bytes_min")

    def __init__(self, keys: FrozenKeys, value_bytes: int | None = 0) -> None:
        self._keys = keys
        self._key_bytes = keys.row_bytes()
        self._value_bytes = self._value_bytes_min = value_bytes or 0
        self._rows_max = ROWS_AT_FIRST if value_bytes is None else BLOCK_ROWS

    def rows(self, slots: NDArray[np.int32]) -> int:
        """Returns how many of `slots` form the next block, at least one.

        The number may be greater than the number of slots.
        """
        if self._rows_max * (int(self._key_bytes.max(initial=0)) + self._value_bytes) <= BLOCK_BYTES:
            return self._rows_max
        ends = np.cumsum(self.bytes_of(slots[: self._rows_max]))
        rows = int(np.searchsorted(ends, BLOCK_BYTES, side="right"))
        if rows == len(ends):
            return self._rows_max
        return max(1, rows if rows < PAGE_ROWS else rows // PAGE_ROWS * PAGE_ROWS)

    def bytes_of(self, slots: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the estimated size in bytes of the row of each slot."""
        of_slots: NDArray[np.int64] = self._key_bytes[self._keys.chunks_of(slots)] + self._value_bytes
        return of_slots

    def learn(self, values: Sequence[pa.Array]) -> None:
        """Updates the estimated size of values from the value columns of a block, which has at least one row."""
        if values:
            measured = sum(column.nbytes for column in values) // len(values[0])
            self._value_bytes = max(self._value_bytes_min, measured)
        self._rows_max = BLOCK_ROWS


class RestoreThreads:
    """The threads of a large restore: up to `threads` that copy columns, and one that adds up to `keys` keys to the
    empty `index`.
    """

    def __init__(self, index: KeyIndex, keys: int, threads: int) -> None:
        self._index = index
        self._to_come = keys
        self._threads = threads
        self._copiers = ThreadPoolExecutor(threads, "tidegate-restore")
        self._filler = ThreadPoolExecutor(1, "tidegate-restore-index")
        self._piece: list[pa.RecordBatch] = []
        self._filled: deque[Future[bool]] = deque()
        self._distinct = True

    def side_by_side(self, steps: Sequence[Callable[[], None]]) -> None:
        """Runs functions that share no memory on several threads, and waits for all of them. Raises the error of a
        function that fails.
        """
        shares = [steps[first :: self._threads] for first in range(min(self._threads, len(steps)))]
        pending = [self._copiers.submit(_take, share) for share in shares]
        for taken in pending:
            taken.result()

    def index(self, keys: pa.RecordBatch) -> None:
        """Adds these keys to the index on a background thread, under the next slots. No key may occur twice."""
        self._piece.append(keys)
        if sum(part.nbytes for part in self._piece) >= PIECE_BYTES:
            self._fill()

    def finish(self) -> bool:
        """Waits until all keys are indexed, and ends the threads. Returns False if a key occurred twice. Then the index
        must not be used.

        Also returns the memory that Arrow's allocator has cached to the system: the large tables of a restore were
        freed, and will not be needed again.
        """
        try:
            if self._piece:
                self._fill()
            while self._filled:
                self._distinct = self._filled.popleft().result() and self._distinct
        finally:
            self.end()
            pa.default_memory_pool().release_unused()
        return self._distinct

    def end(self) -> None:
        """Cancels functions that have not started, and waits for running ones."""
        self._copiers.shutdown(cancel_futures=True)
        self._filler.shutdown(cancel_futures=True)

    def _fill(self) -> None:
        piece, self._piece = self._piece, []
        self._to_come = max(0, self._to_come - sum(part.num_rows for part in piece))
        self._filled.append(self._filler.submit(self._fill_in, piece, self._to_come))
        if len(self._filled) > _PIECES_AHEAD_MAX:
            self._distinct = self._filled.popleft().result() and self._distinct

    def _fill_in(self, piece: list[pa.RecordBatch], to_come: int) -> bool:
        return self._index.fill(pa.concat_batches(piece), to_come)


def _take(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
