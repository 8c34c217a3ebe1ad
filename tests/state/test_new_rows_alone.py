"""A batch that changes the rows of new keys alone (`new_only`): what it finds has not changed, in any backend."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from backend_model import (
    BACKENDS,
    KEYS,
    MAX_PARALLELISM,
    REMOVE,
    WITH_INCREMENTS,
    MakeBackend,
    Table,
    composed,
    key_batch,
    key_of,
    tables,
)
from rocksdb_backends import rocks_backend

from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut


def first_of(table: Table, keys: Sequence[int]) -> list[int]:
    """Which of these keys are new; they have a row then."""
    upserted = table.table.upsert(key_batch(keys), new_only=True)
    new = [keys[row] for row in upserted.new_rows.tolist()]
    most = None if len(table.table.column("most").valid_pages) else float("-inf")
    table.table.done()
    for key in new:
        table._model[key_of(key)] = {"n": 0, "most": most}
    return new


@pytest.mark.parametrize("make", [BACKENDS[name] for name in sorted(BACKENDS)], ids=sorted(BACKENDS))
def test_new_keys_are_told_and_kept(make: MakeBackend) -> None:
    """Each once, also one whose row was taken away before; others stay as they are."""
    table = Table(make, False)
    table.batch([(1, 5.0), (2, 6.0), (3, 7.0)])
    assert first_of(table, [2, 4, 4, 1, 5]) == [4, 5]
    table.batch([(2, REMOVE)])
    assert first_of(table, [5, 2, 1]) == [2]
    assert first_of(table, [1, 2, 3, 4, 5]) == []
    table.check()
    assert composed(tables(table.backend.freeze(Cut(CheckpointId(1))))) == table.expected()
    table.backend.close()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_an_increment_has_them_alone(name: str) -> None:
    """Keys that came again are not in it; one that had lost its row is."""
    table = Table(BACKENDS[name], True)
    table.batch([(key, 1.0) for key in range(50)])
    table.batch([(7, REMOVE)])
    table.backend.freeze(Cut(CheckpointId(1)))
    first_of(table, list(range(52)))
    stored = tables(table.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))))
    assert sorted(k for each in stored for k in each.rows.column("k").to_pylist()) == [7, 50, 51]
    assert not any(each.removed for each in stored)
    table.backend.close()


def test_a_snapshot_of_files_writes_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB gets no row again that it has."""
    table = Table(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, cache_bytes=1 << 20), True)
    written: list[int] = []
    apply = RocksSession.apply

    def noted(self: RocksSession, keys: Sequence[bytes], values: Sequence[bytes] | None) -> None:
        written.append(len(keys))
        apply(self, keys, values)

    monkeypatch.setattr(RocksSession, "apply", noted)
    for number, keys in enumerate((range(40), range(43)), start=1):
        first_of(table, list(keys))
        snapshot = table.backend.freeze_native(Cut(CheckpointId(number)))
        assert snapshot is not None
        snapshot.files()
    assert written == [40, 3]
    table.check()
    table.backend.close()


def test_going_back_forgets_them() -> None:
    """And has the others as they were."""
    backend = ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), True, 1 << 20)
    table = Table(lambda _: backend, True)
    table.batch([(key, 1.0) for key in range(5)])
    backend.freeze(Cut(CheckpointId(1)))
    expected = table.expected()
    assert first_of(table, [3, 8, 9]) == [8, 9]
    table.batch([(3, 4.0)])
    backend.go_back(CheckpointId(1))
    again = Table(lambda _: backend, True, files=expected)
    again.check()
    assert first_of(again, [3, 8]) == [8]
    again.check()
