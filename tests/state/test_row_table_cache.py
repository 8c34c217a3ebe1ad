"""Rows of hot keys in front of RocksDB: with little memory a row table is what it is with much, whatever is in memory
of a key, in whole, in part or not at all; and what is in memory alone gets into every snapshot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from backend_model import KEYS, MAX_PARALLELISM, Rows, composed, key_batch
from rocksdb_backends import SMALL_CACHE_BYTES, rocks_backend
from row_model import RowsOfKeys

from tidegate.state.rocksdb import evicted_keys_filter, row_table
from tidegate.state.rocksdb.database_session import RocksSession
from tidegate.state.rocksdb.evicted_keys_filter import EvictedKeysFilter
from tidegate.state.rocksdb.frozen_database import FrozenRocks
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.state.rocksdb.row_table import RocksRows, ScannedRows, TieredRows
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, read_native, write_native
from tidegate.storage.state.snapshot import Cut

_MUCH = 1 << 20
_CHANGES = ("append", "append", "append", "remove", "expire", "find")


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """Where checkpoints go."""
    return open_store(str(tmp_path / "store"))


def rows_with(cache_bytes: int, folder: str | None = None, files: Rows | None = None) -> RowsOfKeys:
    """A row table with so much memory for rows, empty or on the files in a folder."""
    return RowsOfKeys(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, None, folder, cache_bytes=cache_bytes),
        True,
        files=files,
    )


def hot_of(rows: RowsOfKeys) -> TieredRows:
    """Its rows in memory."""
    assert isinstance(rows.table, RocksRows)
    return rows.table.hot


def freeze(rows: RowsOfKeys, number: int) -> FrozenRocks:
    """A snapshot as files, not written yet."""
    assert isinstance(rows.backend, RocksBackend)
    snapshot = rows.backend.freeze_native(Cut(CheckpointId(number)))
    assert snapshot is not None
    return snapshot


def empty_memory(rows: RowsOfKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all rows go to the database."""
    with monkeypatch.context() as patched:
        patched.setattr(hot_of(rows), "cache_bytes", 1)
        rows.batch([])
    assert hot_of(rows).used_slots == 0


def read_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys the database is asked for, each time, from now on."""
    seen: list[int] = []
    bring_in = RocksRows._bring_in

    def noted(self: RocksRows, keys: pa.RecordBatch, numbers: object) -> None:
        seen.append(keys.num_rows)
        bring_in(self, keys, numbers)  # type: ignore[arg-type]

    monkeypatch.setattr(RocksRows, "_bring_in", noted)
    return seen


def written_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """How many rows the database is told of, and whether they are removed, from now on."""
    seen: list[tuple[int, bool]] = []
    apply = RocksSession.apply

    def noted(self: RocksSession, keys: Sequence[bytes], values: Sequence[bytes] | None) -> None:
        seen.append((len(keys), values is None))
        apply(self, keys, values)

    monkeypatch.setattr(RocksSession, "apply", noted)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_little_memory_changes_nothing(
    seed: int, store: FileSystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long random programs with snapshots that are written sooner or later, given up, and restored from."""
    seen: dict[str, int] = {"read": 0, "in part": 0, "room": 0, "removed unread": 0, "forgotten": 0}
    bring_in, evict, remove, end = (
        TieredRows.bring_in,
        TieredRows.evict,
        ScannedRows.remove,
        EvictedKeysFilter.end,
    )

    def brought(self: TieredRows, rows: pa.RecordBatch, *of: object) -> object:
        before = self.ascends
        slots = bring_in(self, rows, *of)  # type: ignore[arg-type]
        seen["read"] += rows.num_rows
        seen["in part"] += before and not self.ascends
        return slots

    def made(self: TieredRows, *arguments: object) -> None:
        rows = self.used_slots
        evict(self, *arguments)  # type: ignore[arg-type]
        seen["room"] += self.used_slots < rows

    def removed(self: ScannedRows, refs: object) -> None:
        seen["removed unread"] += len(refs)  # type: ignore[arg-type]
        remove(self, refs)  # type: ignore[arg-type]

    def read(self: EvictedKeysFilter) -> None:
        seen["forgotten"] += not self.all
        end(self)

    monkeypatch.setattr(row_table, "_READ_KEYS", 7)
    # Room for eight keys: it is often full, and the keys that are there are fewer at times.
    monkeypatch.setattr(row_table, "_FILTER_SHARE", SMALL_CACHE_BYTES)
    monkeypatch.setattr(evicted_keys_filter, "_BITS_MIN", 8)
    monkeypatch.setattr(EvictedKeysFilter, "end", read)
    monkeypatch.setattr(TieredRows, "bring_in", brought)
    monkeypatch.setattr(TieredRows, "evict", made)
    monkeypatch.setattr(ScannedRows, "remove", removed)
    draw = random.Random(seed)
    rows, base, waiting = rows_with(SMALL_CACHE_BYTES), None, list[tuple[int, FrozenRocks, Rows]]()
    for number in range(1, 61):
        of = draw.choice((range(8), range(number % 8, number % 8 + 3)))
        rows.batch([(draw.choice(of), draw.choice(_CHANGES), draw.randrange(6)) for _ in range(draw.randrange(12))])
        if draw.random() < 0.4:
            waiting.append((number, freeze(rows, number), rows.expected()))
        while waiting and draw.random() < 0.3:
            taken, snapshot, expected = waiting.pop(0)
            if draw.random() < 0.3:
                snapshot.release()
                continue
            base = write_native(store, f"chk-{taken}", snapshot, base)
            assert composed(list(read_native(store, base))) == expected
            if draw.random() < 0.2:
                rows.backend.close()
                waiting.clear()
                folder = str(tmp_path / f"db-{number}")
                fetch_native(store, base, folder)
                rows = rows_with(SMALL_CACHE_BYTES, folder, expected)
        if draw.random() < 0.2:
            rows.check()
    rows.check()
    assert all(seen.values()), seen
    rows.backend.close()


def test_rows_in_memory_are_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as they fit. A snapshot writes each row that came once, and none that has gone meanwhile; the next one
    removes a row that the database has."""
    rows = rows_with(_MUCH)
    read, written = read_of(monkeypatch), written_of(monkeypatch)
    rows.batch([(key, "append", 1) for key in range(100)])
    rows.batch([(key, "append", 2) for key in range(50)])
    rows.batch([(7, "remove", 0), (8, "remove", 1), (120, "find", 0)])
    assert not written
    freeze(rows, 1).files()
    assert sum(n for n, gone in written if not gone) == 150 - 3
    assert not any(gone for _, gone in written)
    written.clear()
    rows.batch([(1, "remove", 1)])
    freeze(rows, 2).files()
    assert written == [(1, True)]
    assert not read
    rows.check()
    rows.backend.close()


@pytest.mark.slow
def test_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond the bound go to the database. Keys that come again and again are not read once they are known."""
    full = rows_with(_MUCH)
    full.batch([(key, "append", 1) for key in range(40)])
    cache_bytes = hot_of(full).size_bytes * 16 // 15  # with its share for keys that have left
    rows = rows_with(cache_bytes)
    for start in range(10, 70, 6):
        rows.batch([(key, "append", 1) for key in (0, 1, *range(start, start + 6))])
    read = read_of(monkeypatch)
    for start in range(70, 600, 6):
        rows.batch([(key, "find", 1) for key in (0, 1)])
        rows.batch([(key, "append", 1) for key in range(start, start + 6)])
        assert hot_of(rows).size_bytes <= cache_bytes
    assert not read
    assert 6 <= hot_of(rows).used_slots <= 60
    rows.check()
    for each in (full, rows):
        each.backend.close()


def test_keys_that_were_asked_for_in_vain_take_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are known, so that nobody reads the database for them again, and let go of like others."""
    rows = rows_with(_MUCH)
    rows.batch([(1, "append", 1)])
    hot_of(rows).evicted.all = True
    monkeypatch.setattr(row_table, "_READ_KEYS", 0)
    read = read_of(monkeypatch)
    for _ in range(3):
        rows.batch([(key, "find", 0) for key in range(5, 15)])
    assert read == [10]
    before = hot_of(rows).size_bytes
    rows.batch([(key, "find", 0) for key in range(1000, 3000)])
    assert hot_of(rows).size_bytes > before + 2000 * 10
    with monkeypatch.context() as patched:
        patched.setattr(hot_of(rows), "cache_bytes", before)
        rows.batch([])
    assert hot_of(rows).size_bytes - hot_of(rows).evicted.size_bytes <= before
    rows.check()
    rows.backend.close()


def test_new_keys_are_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others have left memory: these alone are read. On files that were taken over, each is."""
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", 1) for key in range(100)])
    empty_memory(rows, monkeypatch)
    read = read_of(monkeypatch)
    rows.batch([(key, "find", 0) for key in range(1000, 1200)])
    rows.batch([(key, "append", 2) for key in range(2000, 2200)])
    rows.batch([(key, "find", 0) for key in range(2000, 2200)])
    assert sum(read) < 40
    read.clear()
    rows.batch([(key, "find", 0) for key in range(90, 110)])
    assert 10 <= sum(read) < 14
    rows.check()
    rows.backend.close()


def test_after_a_restore_keys_are_read_little_by_little(
    store: FileSystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some after each batch, until it is known which there are; then new ones are not looked for, and none is missed.
    If they are too many for the filter, each key is looked for as before."""
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", 1) for key in range(300)])
    rows.batch([(key, "remove", 0) for key in range(250, 300)])
    expected = rows.expected()
    native = write_native(store, "chk-1", freeze(rows, 1), None)
    rows.backend.close()
    monkeypatch.setattr(row_table, "_READ_KEYS", 50)
    for cache_bytes in (_MUCH, 16):
        folder = str(tmp_path / f"db-{cache_bytes}")
        fetch_native(store, native, folder)
        rows = rows_with(cache_bytes, folder, expected)
        read = read_of(monkeypatch)
        rows.batch([(1000, "find", 0)])
        assert sum(read) == 1
        for start in range(0, 24, 6):
            rows.batch([(key, "append", 2) for key in range(start, start + 6)])
            assert hot_of(rows).evicted.all
        rows.batch([])
        assert hot_of(rows).evicted.all == (cache_bytes == 16)
        read.clear()
        rows.batch([(key, "find", 0) for key in range(2000, 2100)])
        assert (sum(read) == 100) == (cache_bytes == 16)
        assert sum(read) < 10 or cache_bytes == 16
        rows.check()
        rows.backend.close()


def test_keys_that_leave_while_others_are_read_are_known(
    store: FileSystemStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose key group was read before they came to the database."""
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", 1) for key in range(200)])
    expected = rows.expected()
    native = write_native(store, "chk-1", freeze(rows, 1), None)
    rows.backend.close()
    monkeypatch.setattr(row_table, "_READ_KEYS", 40)
    folder = str(tmp_path / "db")
    fetch_native(store, native, folder)
    rows = rows_with(_MUCH, folder, expected)
    for _ in range(3):
        rows.batch([])
    rows.batch([(key, "append", 2) for key in range(500, 550)])
    assert hot_of(rows).evicted.all
    empty_memory(rows, monkeypatch)
    for _ in range(5):
        rows.batch([])
    assert not hot_of(rows).evicted.all
    rows.check()
    rows.backend.close()


def test_keys_whose_rows_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the filter is full of them: then new keys are not looked for again, and those that are there are found."""
    monkeypatch.setattr(row_table, "_FILTER_SHARE", _MUCH // 64)
    monkeypatch.setattr(row_table, "_READ_KEYS", 20)
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", 1) for key in range(30)])
    for start in range(1_000, 1_600, 60):
        rows.batch([(key, "append", 1) for key in range(start, start + 60)])
        empty_memory(rows, monkeypatch)
        rows.batch([(key, "remove", 0) for key in range(start, start + 60)])
        empty_memory(rows, monkeypatch)
    for _ in range(10):
        rows.batch([])
    left = hot_of(rows).evicted
    assert not left.is_crowded
    assert not left.is_read
    read = read_of(monkeypatch)
    rows.batch([(key, "find", 0) for key in range(5_000, 5_200)])
    assert sum(read) < 60
    rows.check()
    rows.backend.close()


def test_rows_come_to_a_key_that_is_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are appended without a look at the database. Who asks for the key finds the older ones before them, and a
    scan too, whichever of both comes first."""
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", value) for value in range(3) for key in range(4)])
    empty_memory(rows, monkeypatch)
    read = read_of(monkeypatch)
    rows.batch([(key, "append", 4) for key in range(3)])
    rows.check()
    assert len(read) == 1
    for table in (rows.table, rows.table):
        scanned = pa.Table.from_batches(part for part, _ in table.scan(["k", "x"], 2)).to_pylist()
        for key in range(3):
            assert [row["x"] for row in scanned if row["k"] == key] == [0.0, 1.0, 2.0, 4.0]
        table.done()
    rows.backend.close()


def test_a_row_that_a_scan_has_found_is_that_which_a_find_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removed by either ref, it is gone at once; and after the batch, from the database too."""
    rows = rows_with(_MUCH)
    rows.batch([(key, "append", value) for value in range(3) for key in range(4)])
    empty_memory(rows, monkeypatch)
    table = rows.table
    refs = {
        row["k"]: ref
        for part, found in table.scan(["k"], 100)
        for row, ref in zip(part.to_pylist(), found, strict=True)
    }
    assert max(refs.values()) < 0, "rows that the database alone has were brought into memory"
    found = table.find(key_batch([1]))
    assert table.take(found.refs, ["x"]).column(0).to_pylist() == [0.0, 1.0, 2.0]
    both = np.concatenate((np.array([refs[1], refs[2]]), found.refs[:1]))
    assert table.take(both, ["k", "x"]).to_pylist() == [{"k": 1, "x": 2.0}, {"k": 2, "x": 2.0}, {"k": 1, "x": 0.0}]
    table.remove(both)
    for _ in range(2):
        left = table.take(table.find(key_batch([1, 2])).refs, ["k", "x"]).to_pylist()
        assert left == [{"k": 1, "x": 1.0}, {"k": 2, "x": 0.0}, {"k": 2, "x": 1.0}]
        assert sum(part.num_rows for part, _ in table.scan(["k"], 100)) == 9
        table.done()
        empty_memory(rows, monkeypatch)
    rows.backend.close()
