"""A program that has changed goes on with the RocksDB files of the old one: types that were widened are rewritten, what
cannot be kept is refused by name. Keys of all types lie in the database and come back."""

from __future__ import annotations

import datetime as dt
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from rocksdb_backends import rocks_backend

from tidegate.state.common.backend import StateDescriptor, ValueSpec
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.rocksdb.keys import database_keys, key_group_of, key_of_state, number_bytes
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, read_native, write_native
from tidegate.storage.state.rocksdb.keys import decode_rows
from tidegate.storage.state.snapshot import Cut, StateTable

MAX_PARALLELISM = 8
KEYS = pa.schema({"k": pa.int64()})
BATCH = pa.record_batch({"k": [1, 2, 3]})


def old_program(folder: str) -> RocksBackend:
    """A table, a value, a list and a map with narrow types, and something in each."""
    backend = rocks_backend(("k",), MAX_PARALLELISM, folder=folder)
    table = backend.table("t", [ValueSpec("n", pa.int32(), 0)])
    values, lists, maps = (
        backend.values(StateDescriptor("v", pa.struct({"a": pa.int32()}))),
        backend.lists(StateDescriptor("l", pa.list_(pa.int32()))),
        backend.maps(StateDescriptor("m", pa.map_(pa.int32(), pa.string()))),
    )
    backend.fix_keys(KEYS)
    upserted = table.upsert(BATCH)
    accumulate.maximum(table.column("n").pages, upserted.slots, np.ones(3, dtype=np.int32), NO_MASK)
    table.done()
    for number, ref in enumerate(backend.enter(BATCH)):
        values.put(ref, {"a": number})
        lists.extend(ref, [number])
        maps.put(ref, number, "x")
    backend.leave()
    return backend


class Reopen:
    """Opens backends on the files that the old program left."""

    def __init__(self, folder: Path) -> None:
        backend = old_program(str(folder / "old"))
        frozen = backend.freeze_native(Cut(CheckpointId(1)))
        assert frozen is not None
        self._store = open_store(str(folder / "store"))
        self._native = write_native(self._store, "chk-1", frozen, None)
        self.folder = folder / "db"
        backend.close()

    def __call__(self, max_parallelism: int = MAX_PARALLELISM) -> RocksBackend:
        fetch_native(self._store, self._native, str(self.folder))
        return rocks_backend(("k",), max_parallelism, folder=str(self.folder))


@pytest.fixture
def reopen(tmp_path: Path) -> Reopen:
    """The old program has run."""
    return Reopen(tmp_path)


def rows_of(backend: RocksBackend) -> dict[str, list[dict[str, Any]]]:
    """Rows of all states, by key."""
    found: dict[str, list[dict[str, Any]]] = {}
    for state in backend.freeze(Cut(CheckpointId(9))):
        rows = [row for chunk in state.chunks() for row in chunk.rows.to_pylist()]
        found.setdefault(state.state, []).extend(sorted(rows, key=lambda row: row["k"]))
    return found


def test_widened_types_are_taken_over(reopen: Reopen, tmp_path: Path) -> None:
    """All kinds of state get wider types and a new field; what the files then hold has the new types, once."""
    backend = reopen()
    assert backend.stored_schema("t") == pa.schema({"k": pa.int64(), "n": pa.int32()})
    assert backend.stored_schema("other") is None
    table = backend.table("t", [ValueSpec("n", pa.int64(), 0)])
    values = backend.values(StateDescriptor("v", pa.struct({"a": pa.int64(), "b": pa.string()})))
    lists = backend.lists(StateDescriptor("l", pa.list_(pa.int64())))
    maps = backend.maps(StateDescriptor("m", pa.map_(pa.int64(), pa.large_string())))
    backend.fix_keys(KEYS)
    upserted = table.upsert(BATCH)
    assert len(upserted.new_rows) == 0
    assert table.column("n").take(upserted.slots).to_pylist() == [1, 1, 1]
    table.done()
    refs = backend.enter(BATCH)
    assert [values.get(ref) for ref in refs] == [{"a": number, "b": None} for number in range(3)]
    assert [list(lists.get(ref)) for ref in refs] == [[0], [1], [2]]
    assert [list(maps.items(ref)) for ref in refs] == [[(0, "x")], [(1, "x")], [(2, "x")]]
    lists.extend(refs[0], [2**40])
    backend.leave()
    rows = rows_of(backend)
    assert [row["n"] for row in rows["t"]] == [1, 1, 1]
    assert [row["l"] for row in rows["l"]] == [[0, 2**40], [1], [2]]
    native = backend.freeze_native(Cut(CheckpointId(2)))
    assert native is not None
    store = open_store(str(tmp_path / "store"))
    stored = list(read_native(store, write_native(store, "chk-2", native, None)))
    assert sum(table.rows.num_rows for table in stored) == 4 * 3
    assert {t.state: t.rows.schema.field(1).type for t in stored if t.state in "tl"} == {
        "t": pa.int64(),
        "l": pa.list_(pa.int64()),
    }
    backend.close()


def test_the_same_types_are_not_rewritten(reopen: Reopen) -> None:
    """Opening under the types that were stored writes nothing: the next checkpoint has no table of its own."""
    backend = reopen()
    tables_before = {name for name in os.listdir(reopen.folder) if name.endswith(".sst")}
    backend.table("t", [ValueSpec("n", pa.int32(), 0)])
    backend.values(StateDescriptor("v", pa.struct({"a": pa.int32()})))
    backend.lists(StateDescriptor("l", pa.list_(pa.int32())))
    backend.maps(StateDescriptor("m", pa.map_(pa.int32(), pa.string())))
    backend.fix_keys(KEYS)
    native = backend.freeze_native(Cut(CheckpointId(2)))
    assert native is not None
    assert {name for name in native.files() if name.endswith(".sst")} == tables_before
    backend.close()


def test_other_types_are_refused(reopen: Reopen) -> None:
    """The state, the operator and both types are named; so is a state that has become another kind."""
    backend = reopen()
    with pytest.raises(ConfigurationError, match=r"state 'l' of operator 'op' .*list<.*int32.*list<.*string"):
        backend.lists(StateDescriptor("l", pa.list_(pa.string())))
    with pytest.raises(ConfigurationError, match="state 'v' of operator 'op' is a value in the checkpoint, and a list"):
        backend.lists(StateDescriptor("v", pa.list_(pa.int32())))
    backend.close()


def test_a_state_that_is_not_bound_is_refused(reopen: Reopen) -> None:
    """State that nobody asks for is not dropped in silence."""
    backend = reopen()
    backend.table("t", [ValueSpec("n", pa.int32(), 0)])
    with pytest.raises(
        ConfigurationError, match=r"a state 'l' of operator 'op' that the program does not bind .*\['t'\]"
    ):
        backend.fix_keys(KEYS)
    backend.close()


def test_other_keys_are_refused(reopen: Reopen) -> None:
    """Keys of another type may belong to other key groups; both are named. So with another max parallelism."""
    backend = reopen()
    with pytest.raises(ConfigurationError, match=r"key columns \(k: int64\), and the program has \(k: string\)"):
        backend.fix_keys(pa.schema({"k": pa.string()}))
    backend.close()
    with pytest.raises(CorruptionError, match="max parallelism 8, not 16"):
        reopen(max_parallelism=16)


def test_a_state_may_be_added(reopen: Reopen) -> None:
    """A state that the files do not have begins empty, beside those that they have."""
    backend = reopen()
    backend.table("t", [ValueSpec("n", pa.int32(), 0)])
    backend.values(StateDescriptor("v", pa.struct({"a": pa.int32()})))
    backend.lists(StateDescriptor("l", pa.list_(pa.int32())))
    backend.maps(StateDescriptor("m", pa.map_(pa.int32(), pa.string())))
    added = backend.values(StateDescriptor("new", pa.int64()))
    backend.fix_keys(KEYS)
    refs = backend.enter(BATCH)
    assert [added.get(ref) for ref in refs] == [None] * 3
    added.put(refs[1], 7)
    backend.leave()
    assert rows_of(backend)["new"] == [{"k": 2, "new": 7}]
    backend.close()


def test_layers_of_another_backend_are_applied() -> None:
    """Rows that were put override, keys that were removed go, for every kind of state."""
    backend = rocks_backend(("k",), MAX_PARALLELISM)
    backend.table("t", [ValueSpec("n", pa.int32(), 0)])
    backend.lists(StateDescriptor("l", pa.list_(pa.int32())))
    backend.maps(StateDescriptor("m", pa.map_(pa.string(), pa.int32())))
    backend.fix_keys(KEYS)
    base = {"t": [1, 2, 3], "l": [[1, 2], [3], [4]], "m": [[("a", 1)], [("b", 2), ("c", 3)], [("d", 4)]]}
    over = {"t": [9], "l": [[]], "m": [[("c", 9)]]}
    types = {"t": pa.int32(), "l": pa.list_(pa.int32()), "m": pa.map_(pa.string(), pa.int32())}
    for state, data_type in types.items():
        name = "n" if state == "t" else state
        put = pa.record_batch({"k": pa.array([1, 2, 3]), name: pa.array(base[state], data_type)})
        backend.load(StateTable(state, StateKind.KEYED, put))
        change = pa.record_batch({"k": pa.array([2]), name: pa.array(over[state], data_type)})
        backend.load(StateTable(state, StateKind.KEYED, change, layer=1))
        gone = pa.record_batch({"k": pa.array([3, 77])})
        backend.load(StateTable(state, StateKind.KEYED, gone, removed=True, layer=1))
    assert rows_of(backend) == {
        "t": [{"k": 1, "n": 1}, {"k": 2, "n": 9}],
        "l": [{"k": 1, "l": [1, 2]}],
        "m": [{"k": 1, "m": [("a", 1)]}, {"k": 2, "m": [("c", 9)]}],
    }
    backend.close()


ALL_KEYS: dict[str, pa.Array] = {
    "int8": pa.array([-1, None, 127], pa.int8()),
    "uint64": pa.array([2**64 - 1, 0, None], pa.uint64()),
    "float32": pa.array([1.5, None, float("-inf")], pa.float32()),
    "float64": pa.array([1e300, 0.1, None]),
    "bool": pa.array([True, False, None]),
    "date": pa.array([dt.date(2020, 1, 1), None, dt.date(1960, 1, 1)]),
    "time": pa.array([1, 2, None], pa.time32("s")),
    "timestamp": pa.array([-1, None, 2**60], pa.timestamp("ns", "UTC")),
    "string": pa.array(["", None, "långt"]),
    "large": pa.array(["a" * 300, "b", None], pa.large_string()),
    "binary": pa.array([b"\0", b"", None]),
    "fixed": pa.array([b"abc", None, b"\0\0\0"], pa.binary(3)),
    "decimal": pa.array([Decimal("1.25"), None, Decimal("-3.50")], pa.decimal128(9, 2)),
    "null": pa.nulls(3),
}


@pytest.mark.parametrize("names", [*([name] for name in ALL_KEYS), list(ALL_KEYS), list(ALL_KEYS)[::-1]])
def test_keys_of_all_types_come_back(names: list[str]) -> None:
    """What is encoded is decoded to the very same columns, alone and together, also from a slice."""
    keys = pa.record_batch([ALL_KEYS[name] for name in names], names=names)
    for batch in (keys, keys.slice(1)):
        encoded = database_keys(batch, 128, 5)
        assert all(key[2:4] == b"\x00\x05" and key_group_of(key) < 128 for key in encoded)
        assert decode_rows([key[4:] for key in encoded], batch.schema).equals(batch)


def test_the_form_of_a_key_is_pinned() -> None:
    """Files of checkpoints hold these bytes: a change of them is a new format version."""
    batch = pa.record_batch({"a": pa.array([5, None], pa.int32()), "b": ["hi", None]})
    first, second = database_keys(batch, 128, 258)
    assert first.hex() == "003c" + "0102" + "010500000000000000" + "0102000000000000006869"
    assert second.hex() == "0005" + "0102" + "00" + "00"
    assert key_of_state(second, number_bytes(1)).hex() == "0005" + "0001" + "00" + "00"
