"""Tables with namespaces: rows of one are found and removed alone, and it has no part in the key group."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given
from hypothesis import strategies as st
from rocksdb_backends import MEMORY_BYTES

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.actors.state_backends.columnar.columnar_backend import ColumnarBackend
from tidegate.actors.state_backends.common.backend import KeyedBackend, NamespacedTable, ValueSpec
from tidegate.actors.state_backends.common.options import BackendPlace
from tidegate.actors.state_backends.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.key_groups import key_groups_of
from tidegate.storage.state.snapshot import Cut, StateTable

GROUPS = 8
NAMES = ("namespace", "k")
SCHEMA = pa.schema({"namespace": pa.int64(), "k": pa.int64()})
COLUMNS = (ValueSpec("n", pa.int64(), 0),)
KEYS = st.tuples(st.integers(-3, 3), st.integers(0, 40))


class Namespaces:
    """A backend, and the rows that it should have."""

    def __init__(self, kind: str, folder: str) -> None:
        self.backend: KeyedBackend
        if kind == "columnar":
            self.backend = ColumnarBackend(GROUPS, NAMES, incremental=True, namespace=True)
        else:
            place = BackendPlace(OperatorUid("op"), NAMES, GROUPS, range(GROUPS), namespace=True)
            self.backend = RocksBackend(place, folder, MEMORY_BYTES)
        self.table: NamespacedTable = self.backend.table("t", COLUMNS)  # type: ignore[assignment]
        self.backend.fix_keys(SCHEMA)
        self.model: dict[tuple[int, int], int] = {}

    def put(self, keys: list[tuple[int, int]], removed: bool = False) -> None:
        """Give keys a row with a number, or remove them."""
        upserted = self.table.upsert(stored(keys))
        if removed:
            self.table.remove(upserted.slots)
        self.table.done()
        for key in keys:
            self.model[key] = 0
            if removed:
                del self.model[key]

    def of(self, namespace: int, groups: range | None = None, drained: bool = False) -> list[int]:
        """The keys that are found, three at a time."""
        read = self.table.drain_namespace if drained else self.table.scan_namespace
        found: list[int] = []
        for keys, slots in read(namespace, 3, groups):
            assert 0 < keys.num_rows == len(slots) <= 3
            assert self.table.column("n").take(slots).to_pylist() == [0] * len(slots)
            assert set(keys.column("namespace").to_pylist()) == {namespace}
            found += keys.column("k").to_pylist()
        return sorted(found)

    def expected(self, namespace: int, groups: range | None = None) -> list[int]:
        """The keys that there are."""
        return sorted(k for n, k in self.model if n == namespace and (groups is None or group_of(k) in groups))


def stored(keys: list[tuple[int, int]]) -> pa.RecordBatch:
    """Stored key columns."""
    namespaces, of = zip(*keys, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(namespaces), pa.array(of)], schema=SCHEMA)


def group_of(key: int) -> int:
    """The key group of a key alone."""
    return int(key_groups_of(hash_columns(pa.record_batch({"k": [key]}), ["k"]), GROUPS)[0])


@pytest.mark.parametrize("kind", ["columnar", "rocksdb"])
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "remove"]), st.lists(KEYS, min_size=1, max_size=12, unique=True))
        | st.tuples(st.just("drain"), st.tuples(st.integers(-3, 3), st.none() | st.integers(0, 7))),
        max_size=8,
    )
)
def test_each_namespace_has_its_rows(
    kind: str, steps: list[tuple[str, list[tuple[int, int]]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever comes and goes; and also when the rows were loaded."""
    subject = Namespaces(kind, str(tmp_path_factory.mktemp("db")))
    for what, value in steps:
        if what == "drain":
            namespace, first = value  # type: ignore[misc]
            groups = None if first is None else range(first, GROUPS)  # type: ignore[arg-type]
            expected = subject.expected(namespace, groups)  # type: ignore[arg-type]
            assert subject.of(namespace, groups, drained=True) == expected  # type: ignore[arg-type]
            for key in expected:
                del subject.model[namespace, key]  # type: ignore[arg-type]
        else:
            subject.put(value, removed=what == "remove")
        check(subject)
    tables = [table for state in subject.backend.freeze(Cut(CheckpointId(1))) for table in tables_of(state)]
    other = Namespaces("rocksdb" if kind == "columnar" else "columnar", str(tmp_path_factory.mktemp("db")))
    load(other, tables)
    other.model = dict(subject.model)
    check(other)
    for each in (subject, other):
        each.backend.close()


def check(subject: Namespaces) -> None:
    """All namespaces, and those of some key groups."""
    assert subject.table.namespaces().tolist() == sorted({namespace for namespace, _ in subject.model})
    for namespace in range(-3, 4):
        assert subject.of(namespace) == subject.expected(namespace)
        assert subject.of(namespace, range(2, 5)) == subject.expected(namespace, range(2, 5))


def load(subject: Namespaces, tables: list[StateTable]) -> None:
    """Load stored tables, whose rows are in the key groups of their keys alone."""
    for table in tables:
        groups = key_groups_of(hash_columns(table.rows, ["k"]), GROUPS)
        assert np.all(np.diff(groups.astype(np.int64)) >= 0)
        subject.backend.load(table)
    subject.backend.loaded()


def test_slots_that_move_are_found() -> None:
    """When dead slots are dropped, those of the living get other numbers."""
    subject = Namespaces("columnar", "")
    subject.put([(n, k) for n in range(4) for k in range(3_000)])
    for namespace in range(3):
        assert len(subject.of(namespace, drained=True)) == 3_000
        subject.model = {key: 0 for key in subject.model if key[0] != namespace}
    assert subject.of(3) == subject.expected(3)
    assert subject.table.namespaces().tolist() == [3]
