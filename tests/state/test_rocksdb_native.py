"""Checkpoints of RocksDB as files: each holds the moment of its freeze, goes on in a database of the same key groups,
and gives its rows to backends of any key groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backend_model import BACKENDS, KEYS, MAX_PARALLELISM, ObjectState, Subject, Table, composed, key_batch, tables
from hypothesis import given, settings
from hypothesis import strategies as st
from native_checkpoints import CountingReads, frozen, opened
from rocksdb_backends import CACHE_BYTES, SMALL_CACHE_BYTES, rocks_backend
from row_model import ROW_BATCHES, RowsOfKeys
from small_tables import rewrite_in_small_tables
from timer_model import TimersSubject
from value_model import VALUE_BATCHES, ValuesByBatch
from varying_model import VaryingTable

from tidegate.state.common.backend import StateDescriptor
from tidegate.state.kernels.hashing import hash_columns
from tidegate.state.rocksdb.frozen_database import needed_for
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import NativeFile, NativeState
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, read_native, write_native
from tidegate.storage.state.rocksdb.value_layout import HEAD
from tidegate.storage.state.snapshot import Cut, StateTable

_KEYS = st.integers(0, 30)
_CELLS = st.lists(
    st.tuples(
        _KEYS,
        st.sampled_from(("put", "remove", "extend", "replace", "clear", "set", "discard", "empty")),
        st.integers(0, 5),
    ),
    max_size=12,
)
_ROWS = st.lists(st.tuples(_KEYS, st.none() | st.integers(-9, 9).map(float)), min_size=1, max_size=12)


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


def file_of(native: NativeState, name: str) -> NativeFile | None:
    """A file by name."""
    return next((file for file in native.files if file.name == name), None)


_TIMERS = st.lists(st.tuples(_KEYS, st.integers(0, 1), st.integers(-3, 9), st.booleans()), min_size=1, max_size=12)
_CACHES = {None: 0, "rocksdb with cache": CACHE_BYTES, "rocksdb with a small cache": SMALL_CACHE_BYTES}
_CACHES["rocksdb with files"] = SMALL_CACHE_BYTES
_BATCHES: dict[Any, st.SearchStrategy[Any]] = {
    ObjectState: _CELLS,
    Table: _ROWS,
    VaryingTable: _ROWS,
    RowsOfKeys: ROW_BATCHES,
    TimersSubject: _TIMERS,
    ValuesByBatch: VALUE_BATCHES,
}


def test_a_part_is_read_without_the_files_of_the_rest(tmp_path: Path) -> None:
    """Also where its last rows were deleted, and a cursor would go on to the rows that follow."""
    store = open_store(str(tmp_path / "store"))
    subject = RowsOfKeys(BACKENDS["rocksdb with files"], True)
    base: NativeState | None = None
    for number, (before, after) in enumerate([([(0, "append", 0)], [(0, "append", 0)]), ([(0, "remove", 0)], [])], 1):
        subject.batch(before)
        expected, backend = subject.expected(), subject.backend
        assert isinstance(backend, RocksBackend)
        native = backend.freeze_native(Cut(CheckpointId(number)))
        assert native is not None
        subject.batch(after)
        base = write_native(store, f"chk-{number}", native, base)
    subject.backend.close()
    assert base is not None
    for split in range(1, MAX_PARALLELISM):
        halves = [list(read_native(store, base, groups)) for groups in (range(split), range(split, MAX_PARALLELISM))]
        assert composed([*halves[0], *halves[1]]) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        *((kind, None) for kind in _BATCHES),
        (Table, "rocksdb with cache"),
        (RowsOfKeys, "rocksdb with cache"),
        (RowsOfKeys, "rocksdb with a small cache"),
        (Table, "rocksdb with files"),
        (RowsOfKeys, "rocksdb with files"),
    ],
)
def test_checkpoints_of_files_hold_their_moment(
    kind: type[Subject], cache: str | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random programs: whatever is built on what, every checkpoint has the state of its freeze; a restore goes on from
    there, and its key groups can be split between backends of either kind."""

    @settings(max_examples=8, deadline=None)
    @given(
        rounds=st.lists(
            st.tuples(_BATCHES[kind], _BATCHES[kind], st.booleans()),
            min_size=1,
            max_size=5,
        ),
        split=st.integers(1, MAX_PARALLELISM - 1),
        other=st.sampled_from(sorted(BACKENDS)),
    )
    def program(rounds: list[tuple[Any, Any, bool]], split: int, other: str) -> None:
        folder = tmp_path_factory.mktemp("program")
        store = open_store(str(folder / "store"))
        subject: Subject = kind(BACKENDS[cache or "rocksdb"], True)
        base: NativeState | None = None
        for number, (before, after, restart) in enumerate(rounds, 1):
            subject.batch(before)
            expected = subject.expected()
            backend = subject.backend
            assert isinstance(backend, RocksBackend)
            native = backend.freeze_native(Cut(CheckpointId(number)))
            assert native is not None
            subject.batch(after)
            base = write_native(store, f"chk-{number}", native, base)
            assert composed(list(read_native(store, base))) == expected
            if restart:
                subject.backend.close()
                subject = opened(kind, store, base, folder / f"db-{number}", expected, _CACHES[cache])
                subject.check()
        subject.backend.close()
        assert base is not None
        halves = [list(read_native(store, base, groups)) for groups in (range(split), range(split, MAX_PARALLELISM))]
        assert composed([*halves[0], *halves[1]]) == expected
        for part in halves:
            restored = kind(BACKENDS[other], True, part)
            restored.check()
            restored.backend.close()

    program()


def test_only_new_files_are_uploaded(store: FileSystemStore, tmp_path: Path) -> None:
    """The second checkpoint refers to the tables of the first one; a database that does not descend from it does not,
    and one that was opened on it does."""
    table = Table(BACKENDS["rocksdb"], True)
    table.batch([(key, 1.0) for key in range(5000)])
    first = frozen(table, store, 1)
    table.batch([(1, 1.0)])
    expected = table.expected()
    second = frozen(table, store, 2, first)
    tables_of = {file.name for file in first.files if file.name.endswith(".sst")}
    assert tables_of
    assert all(file_of(second, name) == file_of(first, name) for name in tables_of)
    assert sum(f.size_bytes for f in second.files if f.path.startswith("chk-2/")) < first.size_bytes // 2
    again = opened(Table, store, second, tmp_path / "db", expected)
    again.batch([(2, 1.0)])
    third = frozen(again, store, 3, second)
    assert all(file_of(third, name) == file_of(first, name) for name in tables_of)
    stranger = Table(BACKENDS["rocksdb"], True)
    stranger.batch([(key, 1.0) for key in range(5000)])
    assert all(file.path.startswith("chk-4/") for file in frozen(stranger, store, 4, first).files)
    for subject in (table, again, stranger):
        subject.backend.close()


def test_a_checkpoint_that_was_given_up_leaves_nothing(store: FileSystemStore, tmp_path: Path) -> None:
    """The folder of a snapshot goes with it, and the next snapshot is whole."""
    folder = tmp_path / "work" / "db"
    cells = ObjectState(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(folder)), True)
    cells.batch([(1, "put", 1), (2, "extend", 2)])
    backend = cells.backend
    assert isinstance(backend, RocksBackend)
    given_up = backend.freeze_native(Cut(CheckpointId(1)))
    assert given_up is not None
    given_up.ensure_files()
    assert len(os.listdir(tmp_path / "work")) == 2
    given_up.release()
    given_up.release()
    assert os.listdir(tmp_path / "work") == ["db"]
    dropped = backend.freeze_native(Cut(CheckpointId(2)))
    del dropped
    assert os.listdir(tmp_path / "work") == ["db"]
    expected = cells.expected()
    native = frozen(cells, store, 3)
    backend.close()
    assert os.listdir(tmp_path / "work") == []
    assert composed(list(read_native(store, native))) == expected


def test_without_a_key_there_are_no_files() -> None:
    """Before the key columns are known there is nothing that a file could hold."""
    backend = rocks_backend(("k",), MAX_PARALLELISM)
    backend.values(StateDescriptor("v", pa.int64()))
    assert backend.freeze_native(Cut(CheckpointId(1))) is None
    assert list(backend.freeze(Cut(CheckpointId(1)))) == []
    backend.close()


def test_rows_are_read_though_the_backend_is_closed() -> None:
    """A savepoint is written to the end after its task has stopped."""
    cells = ObjectState(BACKENDS["rocksdb"], True)
    cells.batch([(key, "put", key % 5) for key in range(300)])
    states = cells.backend.freeze(Cut(CheckpointId(1), canonical=True))
    expected = cells.expected()
    cells.batch([(key, "put", 5) for key in range(300)])
    cells.backend.close()
    assert composed(tables(states)) == expected


# --- a part of the key groups -----------------------------------------------------------------------------------------


GROUPS = frozenset({1, 2, 6, 9, 13})


@pytest.fixture
def many_tables(tmp_path: Path, store: FileSystemStore) -> tuple[NativeState, list[StateTable]]:
    """A checkpoint whose levels have many small tables, with rows in some key groups only; and its rows."""
    subject = Table(BACKENDS["rocksdb"], True)
    groups = hash_columns(key_batch(range(8000)), KEYS.names) % np.uint64(MAX_PARALLELISM)
    subject.batch([(key, float(key)) for key, group in enumerate(groups.tolist()) if group in GROUPS])
    native = frozen(subject, store, 1)
    subject.backend.close()
    fetch_native(store, native, str(tmp_path / "whole"))
    rewritten = tmp_path / "rewritten"
    rewrite_in_small_tables(tmp_path / "whole", rewritten, 8_000)
    (rewritten / "TIDEGATE").write_bytes(native.description)
    subject = Table(lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(rewritten)), True)
    native = frozen(subject, store, 2)
    rows = tables(subject.backend.freeze(Cut(CheckpointId(3))))
    subject.backend.close()
    return native, rows


def test_each_key_group_is_read_from_its_files_alone(
    many_tables: tuple[NativeState, list[StateTable]], store: FileSystemStore
) -> None:
    """One key group costs a fraction of the bytes, and every one has exactly its rows."""
    native, rows = many_tables
    expected = composed(rows)["t"]
    assert sum(file.name.endswith(".sst") for file in native.files) > 8
    found = {}
    for group in range(MAX_PARALLELISM):
        counting = CountingReads(store.url)
        part = composed(list(read_native(counting, native, range(group, group + 1)))).get("t", {})
        batch = key_batch([key for key, _ in part])
        assert {int(h) % MAX_PARALLELISM for h in hash_columns(batch, KEYS.names)} == {group} & GROUPS
        assert counting.bytes_read < native.size_bytes / 3
        found.update(part)
    assert found == expected


def live(name: str, level: int, first: tuple[int, int], last: tuple[int, int]) -> dict[str, Any]:
    """A table as RocksDB tells of it; keys are a key group and something in it."""
    start_key, end_key = (HEAD.pack(group, 1) + bytes([key]) for group, key in (first, last))
    return {"name": f"/{name}", "level": level, "start_key": start_key, "end_key": end_key}


def test_a_table_is_needed_for_all_key_groups_that_lead_to_it() -> None:
    """For those before it, as RocksDB looks for them there, with the last one of the table before: at its end the next
    one is opened. Tables with a common key are opened in an order that their keys do not tell."""
    tables = [
        live("9", 6, (2, 0), (4, 9)),
        live("3", 6, (7, 1), (7, 1)),
        live("5", 6, (7, 1), (8, 2)),
        live("4", 6, (8, 2), (8, 2)),
        live("6", 6, (11, 0), (12, 0)),
        live("7", 0, (5, 0), (5, 0)),
    ]
    expected = {"9": (0, 5), "3": (4, 9), "5": (4, 9), "4": (4, 9), "6": (8, 13), "7": None}
    assert expected == needed_for(tables)


def test_every_key_group_is_read_from_tables_that_compaction_has_moved(store: FileSystemStore) -> None:
    """A table a batch, some of which end with a key group and some of which have the same key."""
    subject = Table(BACKENDS["rocksdb"], True)
    groups = (hash_columns(key_batch(range(200)), KEYS.names) % np.uint64(MAX_PARALLELISM)).tolist()
    snapshots = []
    for number, own in enumerate([*sorted(GROUPS), 9, 9, 9]):
        subject.batch([(key, float(key)) for key, group in enumerate(groups) if group == own])
        snapshots.append(frozen(subject, store, number + 1))
    rows = tables(subject.backend.freeze(Cut(CheckpointId(100))))
    subject.backend.close()
    found: dict[Any, Any] = {}
    for group in range(MAX_PARALLELISM):
        found |= composed(list(read_native(store, snapshots[-1], range(group, group + 1)))).get("t", {})
    assert composed(rows)["t"] == found


def test_key_groups_that_the_job_did_not_have(
    many_tables: tuple[NativeState, list[StateTable]], store: FileSystemStore
) -> None:
    """Groups beyond the max parallelism are refused by name; an empty range reads nothing."""
    native, _ = many_tables
    with pytest.raises(ConfigurationError, match=r"max parallelism 16; key groups 8\.\.31 "):
        list(read_native(store, native, range(8, 32)))
    counting = CountingReads(store.url)
    assert list(read_native(counting, native, range(3, 3))) == []
    assert counting.bytes_read == 0


def test_scratch_folders_are_cleared(
    many_tables: tuple[NativeState, list[StateTable]], store: FileSystemStore, tmp_path: Path
) -> None:
    """Nothing stays in the scratch folder, whether all is read or the reader stops half-way."""
    native, _ = many_tables
    scratch = tmp_path / "scratch"
    reader: Iterator[StateTable] = read_native(store, native, None, str(scratch))
    next(reader)
    assert os.listdir(scratch)
    del reader
    assert os.listdir(scratch) == []
    list(read_native(store, native, None, str(scratch)))
    assert os.listdir(scratch) == []
