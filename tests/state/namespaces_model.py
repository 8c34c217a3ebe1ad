"""Helpers: a table with namespaces on any backend, beside a model of it."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import strategies as st
from rocksdb_backends import MEMORY_BYTES, with_files

from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import KeyedBackend, NamespacedTable, ValueSpec
from tidegate.state.common.options import BackendPlace
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.ids import OperatorUid
from tidegate.storage.state.key_groups import key_groups_of

GROUPS = 8
NAMES = ("namespace", "k")
SCHEMA = pa.schema({"namespace": pa.int64(), "k": pa.int64()})
COLUMNS = (ValueSpec("n", pa.int64(), 0),)
KEYS = st.tuples(st.integers(-3, 3), st.integers(0, 40))


ROOM = {"rocksdb": 0, "rocksdb with cache": 33_200, "rocksdb with files": 33_200, "rocksdb in cache": 1 << 24}
"""Bytes of the cache: none, for an empty index and some ten rows, for all."""


class Namespaces:
    """A backend, and the rows that it should have."""

    def __init__(self, kind: str, folder: str, keeps_changes: bool = False) -> None:
        self.backend: KeyedBackend
        if kind == "columnar":
            self.backend = ColumnarBackend(GROUPS, NAMES, incremental=True, namespace=True)
        else:
            place = BackendPlace(OperatorUid("op"), NAMES, GROUPS, range(GROUPS), namespace=True)
            self.backend = RocksBackend(place, folder, MEMORY_BYTES, keeps_changes, ROOM[kind])
            if kind == "rocksdb with files":
                with_files(self.backend)
        self.table: NamespacedTable = self.backend.table("t", COLUMNS)  # type: ignore[assignment]
        self.backend.fix_keys(SCHEMA)
        self.model: dict[tuple[int, int], int] = {}
        self.numbers = 1

    def put(self, keys: list[tuple[int, int]], removed: bool = False) -> None:
        """Give keys a row with a number of its own, or remove them."""
        upserted = self.table.upsert(stored(keys))
        known = self.table.column("n").take(upserted.slots).to_pylist()
        assert known == [self.model.get(key, 0) for key in keys]
        assert {keys[row] for row in upserted.new_rows.tolist()} == {key for key in keys if key not in self.model}
        numbers = list(range(self.numbers, self.numbers + len(keys)))
        self.numbers += len(keys)
        self.table.column("n").put(upserted.slots, pa.array(numbers))
        if removed:
            self.table.remove(upserted.slots)
        self.table.done()
        self.model |= dict(zip(keys, numbers, strict=True))
        if removed:
            for key in keys:
                del self.model[key]

    def of(self, namespace: int, groups: range | None = None, drained: bool = False) -> list[tuple[int, int]]:
        """The keys that are found, three at a time, and their numbers."""
        read = self.table.drain_namespace if drained else self.table.scan_namespace
        found: list[tuple[int, int]] = []
        for keys, slots in read(namespace, 3, groups):
            assert 0 < keys.num_rows == len(slots) <= 3
            assert set(keys.column("namespace").to_pylist()) == {namespace}
            numbers = self.table.column("n").take(slots).to_pylist()
            found += zip(keys.column("k").to_pylist(), numbers, strict=True)
        return sorted(found)

    def of_several(
        self, namespaces: list[int], groups: range | None = None, drained: bool = False
    ) -> list[tuple[int, int, int]]:
        """The namespaces and keys that are found, three at a time, and their numbers."""
        read = self.table.drain_namespaces if drained else self.table.scan_namespaces
        found: list[tuple[int, int, int]] = []
        for keys, slots in read(namespaces, 3, groups):
            assert 0 < keys.num_rows == len(slots) <= 3
            numbers = self.table.column("n").take(slots).to_pylist()
            found += zip(keys.column("namespace").to_pylist(), keys.column("k").to_pylist(), numbers, strict=True)
        order = [namespaces.index(namespace) for namespace, _, _ in found]
        assert order == sorted(order), "one namespace after the other"
        return sorted(found)

    def expected(self, namespace: int, groups: range | None = None) -> list[tuple[int, int]]:
        """The keys that there are, and their numbers."""
        of = ((k, number) for (n, k), number in self.model.items() if n == namespace)
        return sorted((k, number) for k, number in of if groups is None or group_of(k) in groups)


def stored(keys: list[tuple[int, int]]) -> pa.RecordBatch:
    """Stored key columns."""
    namespaces, of = zip(*keys, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(namespaces), pa.array(of)], schema=SCHEMA)


def group_of(key: int) -> int:
    """The key group of a key alone."""
    return int(key_groups_of(hash_columns(pa.record_batch({"k": [key]}), ["k"]), GROUPS)[0])


def check(subject: Namespaces) -> None:
    """All namespaces, and those of some key groups."""
    assert subject.table.namespaces().tolist() == sorted({namespace for namespace, _ in subject.model})
    for namespace in range(-3, 4):
        assert subject.of(namespace) == subject.expected(namespace)
        assert subject.of(namespace, range(2, 5)) == subject.expected(namespace, range(2, 5))
    several = [2, -1, 7, 0]
    for groups in (None, range(2, 5)):
        expected = [(namespace, *row) for namespace in several for row in subject.expected(namespace, groups)]
        assert subject.of_several(several, groups) == sorted(expected)
