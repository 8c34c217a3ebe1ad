"""`RocksTable`: a vectorised state in RocksDB. A batch's rows are fetched into pages, and written when it ends.

Rules: slots belong to one batch. It has one for each distinct key, in the order of the database. All rows of a batch
are read with one call, and written with one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import rocksdict
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.batch_column import BatchColumn
from tidegate.state.common.pages import pages_for
from tidegate.state.kernels.columns import NO_MASK, Strings
from tidegate.state.kernels.partition import gather
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.state.rocksdb.changes import RocksChanges
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.keys import encoded_rows, ordered_keys, strings_of
from tidegate.storage.rocksdb.tables import TableLayout, table_layout
from tidegate.storage.rocksdb.value_layout import RocksState

_NO_SLOTS: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
_ESTIMATE = "rocksdb.estimate-num-keys"


class RocksTable:
    """A `VectorTable` whose rows are in RocksDB."""

    def __init__(self, session: RocksSession, state: RocksState, specs: Sequence[ValueSpec]) -> None:
        self.state = state
        self.specs = tuple(specs)
        self.layout = table_layout(state.values)
        self.new_slots: NDArray[np.int32] = _NO_SLOTS
        """Slots whose key has no row yet."""
        self.changes = RocksChanges(session, state) if session.keeps_changes else None
        """The changed keys, if a changelog wants them."""
        self._session = session
        self._columns = {spec.name: BatchColumn(self, spec) for spec in specs}
        self._batch_keys: list[bytes] = []
        self._removed: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch whose rows are taken away."""
        self._unchanged: NDArray[np.int32] = _NO_SLOTS
        """Slots of the batch that do not change."""

    @property
    def rows(self) -> int:
        """An estimate of how many keys the whole database has, all states together."""
        return self._session.database.property_int_value(_ESTIMATE) or 0

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: fetch the rows of its keys."""
        upserted = KeyIndex(tuple(keys.schema.names)).upsert(keys)
        first_rows = upserted.first_rows
        distinct = keys if len(first_rows) == keys.num_rows else gather(keys, first_rows)
        session = self._session
        self._batch_keys, order = ordered_keys(
            distinct, session.max_parallelism, self.state.number, namespace=session.namespace
        )
        found = self._session.fetch(self._batch_keys)
        ranks = np.empty(len(order), dtype=np.int32)
        ranks[order] = np.arange(len(order), dtype=np.int32)
        missing = np.array([row is None for row in found], dtype=np.bool_)
        known, self.new_slots = (np.flatnonzero(slots).astype(np.int32) for slots in (~missing, missing))
        self._unchanged = known if new_only else _NO_SLOTS
        stored = self.layout.columns([row for row in found if row is not None]) if len(known) else None
        self._fill(len(found), known, stored, self.new_slots)
        return Upserted(ranks[upserted.slots], first_rows, first_rows[missing[ranks]])

    def column(self, name: str) -> BatchColumn:
        """A value column."""
        return self._columns[name]

    def remove(self, slots: NDArray[Any]) -> None:
        """Take away the rows of these slots of the batch."""
        self._removed = np.union1d(self._removed, slots).astype(np.int32)

    def done(self) -> None:
        """End the batch: write its rows, and remove those that were taken away."""
        batch_keys, self._batch_keys = self._batch_keys, []
        gone, new = self._removed, self.new_slots
        same, self._unchanged = self._unchanged, _NO_SLOTS
        self._removed = self.new_slots = _NO_SLOTS
        stays = np.ones(len(batch_keys), dtype=np.bool_)
        stays[gone] = stays[same] = False
        slots = np.flatnonzero(stays).astype(np.int32)
        keys = [batch_keys[slot] for slot in slots.tolist()]
        removed = [batch_keys[slot] for slot in np.setdiff1d(gone, new, assume_unique=True).tolist()]
        if keys:
            self.put(keys, [column.take(slots) for column in self._columns.values()])
        if removed:
            self.delete(removed)
        if self.changes is not None:
            self.changes.put(keys)
            self.changes.removed(removed)

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows over what is there. `columns` are the value columns. StorageError."""
        batch = rocksdict.WriteBatch(raw_mode=True)
        for key, row in zip(keys, strings_of(self.packed(columns)), strict=True):
            batch.put(key, row)
        self._session.write(batch)

    def packed(self, columns: Sequence[pa.Array]) -> Strings:
        """Rows of value columns, as they lie in the database."""
        layout = self.layout
        if not isinstance(layout, TableLayout):
            return encoded_rows(columns, layout.schema)
        rows = layout.encoded(columns)
        return Strings(np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1], rows.reshape(-1), NO_MASK)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Remove the rows of these keys, if there are any. StorageError."""
        self._session.remove(keys)

    def has(self, key: bytes) -> bool:
        """Whether a key has a row. StorageError."""
        return self._session.has(key)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, sorted by key group, in batches, with their slots."""
        keys = len(self._session.key_schema)
        for rows in self._session.scan(self.state, rows_max):
            slots = np.arange(rows.num_rows, dtype=np.int32)
            self._fill(rows.num_rows, slots, rows.columns[keys:], _NO_SLOTS)
            yield rows.select(range(keys)), slots

    def _fill(
        self, slots: int, known: NDArray[np.int32], stored: Sequence[pa.Array] | None, new: NDArray[np.int32]
    ) -> None:
        """Set up this many slots: `known` ones with stored values, `new` ones with the identity or null."""
        for position, column in enumerate(self._columns.values()):
            column.paged.begin_batch()
            column.paged.grow(pages_for(slots))
            if stored is not None:
                column.paged.put(known, stored[position])
            if len(new):
                column.paged.reset(new)
