"""States that lie in RocksDB in pieces: what one batch left another one changes, restores go on, chunks are bounded."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from backend_model import BACKENDS, KEYS, MAX_PARALLELISM, ObjectState, composed, key_batch, state_tables, tables
from rocksdb_backends import rocks_backend

from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.backend_files import fetch_native, write_native
from tidegate.storage.state.rocksdb.scan import CHUNK_ROWS
from tidegate.storage.state.snapshot import Cut, StateTable

FIRST = [(1, "extend", 1), (1, "set", 1), (1, "set", 2), (1, "put", 1), (2, "extend", 7), (2, "set", 0)]


@pytest.mark.parametrize("what", ["extend", "replace", "clear", "set", "discard", "empty", "put", "remove", "read"])
def test_what_an_earlier_batch_left_is_changed(what: str) -> None:
    """Each change, alone and twice in a batch, on top of pieces that several batches have written."""
    cells = ObjectState(BACKENDS["rocksdb"], True)
    for batch in (FIRST, [(1, "extend", 3)], [(1, what, 1)], [(1, what, 2), (1, "extend", 5), (1, what, 1)]):
        cells.batch(batch)
        cells.check()
        assert composed(tables(cells.backend.freeze(Cut(CheckpointId(1))))) == cells.expected()
    cells.backend.close()


def test_lists_go_on_behind_what_was_restored(tmp_path: Path) -> None:
    """Pieces that are appended after a restore, from files or from rows, take the place of none that was there."""
    store = open_store(str(tmp_path / "store"))
    cells = ObjectState(BACKENDS["rocksdb"], True)
    for number in range(3):
        cells.batch([(1, "extend", 10 * number)])
    expected, rows = cells.expected(), tables(cells.backend.freeze(Cut(CheckpointId(1))))
    backend = cells.backend
    assert isinstance(backend, RocksBackend)
    frozen = backend.freeze_native(Cut(CheckpointId(1)))
    assert frozen is not None
    fetch_native(store, write_native(store, "chk-1", frozen, None), str(tmp_path / "db"))
    backend.close()
    on_files = ObjectState(
        lambda _: rocks_backend(tuple(KEYS.names), MAX_PARALLELISM, folder=str(tmp_path / "db")), True, files=expected
    )
    on_rows = ObjectState(BACKENDS["rocksdb"], True, rows)
    for again in (on_files, on_rows):
        for number in range(3):
            again.batch([(1, "extend", 100 + number)])
            again.check()
        again.backend.close()


@pytest.mark.slow
def test_chunks_are_bounded() -> None:
    """Rows of many more keys than a chunk may have come in several, cut within key groups; none is lost or doubled."""
    keys = key_batch(range(CHUNK_ROWS + 10_000))
    rows = pa.RecordBatch.from_arrays([*keys.columns, pa.array(["x"] * keys.num_rows)], names=[*KEYS.names, "v"])
    cells = ObjectState(BACKENDS["rocksdb"], True, files={})
    cells.backend.load(StateTable("v", StateKind.KEYED, rows))
    (state,) = (state for state in cells.backend.freeze(Cut(CheckpointId(1))) if state.state == "v")
    found = state_tables(state)
    assert [table.rows.num_rows for table in found] == [CHUNK_ROWS, 10_000]
    assert len(composed(found)["v"]) == keys.num_rows
    cells.backend.close()


@pytest.mark.slow
def test_large_values_make_small_chunks() -> None:
    """A chunk has about 8 MiB at most, however few rows these are; for lists and maps too."""
    big = "x" * 3_000_000
    keys = key_batch(range(6))
    cells = ObjectState(BACKENDS["rocksdb"], True, files={})
    values = pa.RecordBatch.from_arrays([*keys.columns, pa.array([big] * 6)], names=[*KEYS.names, "v"])
    entries = pa.array([[(big + str(n), 1) for n in range(3)]] * 6, pa.map_(pa.string(), pa.int64()))
    maps = pa.RecordBatch.from_arrays([*keys.columns, entries], names=[*KEYS.names, "m"])
    for name, rows in (("v", values), ("m", maps)):
        cells.backend.load(StateTable(name, StateKind.KEYED, rows))
    found = {state.state: state_tables(state) for state in cells.backend.freeze(Cut(CheckpointId(1)))}
    assert [table.rows.num_rows for table in found["v"]] == [3, 3]
    assert [table.rows.num_rows for table in found["m"]] == [1] * 6
    assert found["l"] == []
    cells.backend.close()
