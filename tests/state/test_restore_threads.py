"""Threads that take a large state in make of it what one thread does, and end."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pytest

from tidegate.state.columnar import key_space
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

_KEYS = 3 * PAGE_ROWS + 500
_SPECS = (ValueSpec("n", pa.int64(), 0), ValueSpec("x", pa.float64(), 0.0), ValueSpec("few", pa.int8(), 7))


def _tables(keys: list[int], rows: int) -> list[StateTable]:
    """A stored state in chunks of so many rows, with a null now and then in its last column."""
    batch = pa.record_batch(
        {
            "k": pa.array(keys, pa.int64()),
            "n": pa.array([3 * key for key in keys], pa.int64()),
            "x": pa.array([key / 2 for key in keys], pa.float64()),
            "few": pa.array([None if key % 1_000 == 999 else key % 100 for key in keys], pa.int8()),
        }
    )
    chunks = [batch.slice(start, rows) for start in range(0, len(keys), rows)]
    return [StateTable("totals", StateKind.KEYED, chunk) for chunk in chunks]


def _restored(tables: list[StateTable], threads: int) -> ColumnarBackend:
    backend = ColumnarBackend(16, ("k",), False, restore_threads=threads)
    backend.table("totals", _SPECS)
    backend.fix_keys(pa.schema({"k": pa.int64()}))
    backend.expect(sum(table.rows.num_rows for table in tables))
    for table in tables:
        backend.load(table)
    backend.loaded()
    return backend


def _rows(backend: ColumnarBackend) -> pa.Table:
    frozen = backend.freeze(Cut(CheckpointId(1)))
    return pa.Table.from_batches([chunk.rows for state in frozen for chunk in state.chunks()]).sort_by("k")


def _restoring() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tidegate-restore")]


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few keys are many, in many pieces."""
    monkeypatch.setattr(key_space, "_THREADED_KEYS_MIN", 1)
    monkeypatch.setattr(key_space, "PIECE_BYTES", 10_000)


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("rows", [700, PAGE_ROWS, _KEYS])
def test_several_threads_make_what_one_makes(rows: int) -> None:
    """Whatever the chunks are: the same rows, and each key has the slot that it has had; then no thread is left."""
    keys = np.random.default_rng(5).permutation(_KEYS).tolist()

    several, one = _restored(_tables(keys, rows), 3), _restored(_tables(keys, rows), 1)

    assert _rows(several).equals(_rows(one))
    asked = pa.record_batch({"k": pa.array([keys[-1], keys[0], _KEYS, keys[PAGE_ROWS]], pa.int64())})
    assert several.enter(asked) == one.enter(asked) == [_KEYS - 1, 0, _KEYS, PAGE_ROWS]
    assert _restoring() == []


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("again", [0, _KEYS - 1])
def test_a_key_that_comes_twice_is_found(again: int) -> None:
    """In the first piece of keys or in the last one."""
    tables = [*_tables(list(range(_KEYS)), 900), *_tables([again], 1)]

    with pytest.raises(CorruptionError, match="holds a key twice"):
        _restored(tables, 3)

    assert _restoring() == []


@pytest.mark.usefixtures("threaded")
def test_a_restore_that_is_given_up_leaves_no_thread() -> None:
    """Other columns are found between two tables; whoever closes the backend ends the threads."""
    backend = ColumnarBackend(16, ("k",), False, restore_threads=3)
    backend.table("totals", _SPECS)
    backend.fix_keys(pa.schema({"k": pa.int64()}))
    first, *_ = _tables(list(range(_KEYS)), 900)
    backend.expect(_KEYS)
    backend.load(first)
    with pytest.raises(CorruptionError, match="columns"):
        backend.load(StateTable("totals", StateKind.KEYED, first.rows.select(["k", "n"])))

    backend.close()

    assert _restoring() == []


def test_what_a_step_raises_comes_out() -> None:
    """And the threads can be ended."""
    backend = ColumnarBackend(16, ("k",), False)
    threads = key_space.RestoreThreads(backend._space._index, 10, 2)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        threads.side_by_side([lambda: None, fail, lambda: None])

    threads.end()
    assert _restoring() == []
