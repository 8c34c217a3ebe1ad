"""`CachedNamespaces`: a state with namespaces in RocksDB whose hot rows are in memory, in columns.

The rows of a namespace are read in memory, a few key groups at a time: what the database alone has of these is brought
in first, a range of it for each key group. So a window that fits into memory fires as in the columnar backend, whatever
the database has of it. While somebody reads, no room is made, because slots would get other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.common.backend import ValueSpec
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.cached.cached_table import CachedTable
from tidegate.state.rocksdb.cached.hot_namespaces import HotNamespaces
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.namespaces import NamespacesInTurn, StoredNamespaces
from tidegate.storage.rocksdb.value_layout import RocksState

_BROUGHT_ROWS = 16_384
"""Rows on their way into memory become Python values, so many at a time."""
_RUN_ROWS = 65_536
"""Room is made when so many have been brought in."""


class CachedNamespaces(NamespacesInTurn, CachedTable):
    """A `NamespacedTable`. Of its rows, about `cache_bytes` are in memory between batches."""

    _hot: HotNamespaces

    def __init__(
        self,
        session: RocksSession,
        state: RocksState,
        specs: Sequence[ValueSpec],
        key_names: tuple[str, ...],
        cache_bytes: int,
    ) -> None:
        super().__init__(session, state, specs, key_names, cache_bytes)
        self._stored = StoredNamespaces(session, state)
        self._readers = 0
        self._known = session.is_empty
        """Whether it is known what the database has."""

    @property
    def hot(self) -> HotNamespaces:
        """The rows in memory."""
        return self._hot

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: fetch those of its rows that are not in memory."""
        self._look()
        return super().upsert(keys, new_only)

    def put(self, keys: Sequence[bytes], columns: Sequence[pa.Array]) -> None:
        """Write rows over what is there, before the first batch. StorageError."""
        self._known = False
        super().put(keys, columns)

    def namespaces(self) -> NDArray[np.int64]:
        """The namespaces that have a row, ascending. StorageError."""
        self._look()
        self.write_all()
        return np.array(sorted(self._stored.found()), dtype=np.int64)

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys, sorted by key group, in batches, with their slots."""
        self._look()
        return super().scan(rows_max)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, in batches, with their slots. StorageError."""
        for part in self._runs(namespace, groups):
            with self._reading():
                yield from self.hot.scan_namespace(namespace, rows_max, part)

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. StorageError."""
        for part in self._runs(namespace, groups):
            drawn = [np.zeros(0, dtype=np.int32)]
            with self._reading():
                for keys, slots in self.hot.scan_namespace(namespace, rows_max, part):
                    self.hot.set_live(slots, np.zeros(len(slots), dtype=np.bool_))
                    drawn.append(slots)
                    yield keys, slots
            self.hot.drained(namespace, part, np.concatenate(drawn))
        self.hot.forget_empty(namespace)
        self._space.settle()

    def changed(self) -> Iterator[object]:
        """Freeze what is not in the database. The result writes it, a part with each item drawn. StorageError."""
        return chain(self._removing(self.hot.take_gone()), super().changed())

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within this context no slot gets another number."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1

    def _make_room(self) -> None:
        if not self._readers:
            super()._make_room()

    def _hot_rows(self, specs: Sequence[ValueSpec]) -> HotNamespaces:
        return HotNamespaces(self._space, self.state.name, specs, self._fetched, self._session.max_parallelism)

    def _settle(self) -> None:
        super()._settle()
        for _ in self._removing(self.hot.take_gone()):
            pass

    def _look(self) -> None:
        """Find what the database has, if rows were put there, or it began with files."""
        if not self._known:
            self._space.fix(self._session.key_schema)
            self.hot.stored(self._stored.found())
            self._known = True

    def _runs(self, namespace: int, groups: range | None) -> Iterator[range]:
        """Some key groups, a few at a time, whose rows of a namespace are all in memory then."""
        self._look()
        asked = self._session.key_groups if groups is None else groups
        start = asked.start
        while start < asked.stop:
            rows, stop = 0, asked.stop
            # Asked anew for each run: who makes room between two of them sends rows of later groups to the database.
            for group in self.hot.cold_groups(namespace, range(start, stop)):
                if rows >= _RUN_ROWS:
                    stop = group
                    break
                rows += self._bring_in(namespace, group)
            yield range(start, stop)
            self._make_room()
            start = stop

    def _bring_in(self, namespace: int, group: int) -> int:
        """Bring in the rows of a namespace in a key group that are not in memory. How many there are. StorageError."""
        rows = 0
        for keys, values in self._stored.rows(namespace, _BROUGHT_ROWS, range(group, group + 1)):
            self.hot.show(self._stored.key_columns(keys), self.layout.columns(values))
            rows += len(keys)
        self.hot.warm(namespace, group)
        return rows

    def _removing(self, gone: Sequence[tuple[int, Sequence[int]]]) -> Iterator[object]:
        for namespace, groups in gone:
            self._session.apply_ranges(self._stored.range_of(namespace, group) for group in groups)
            yield None
