"""The backend in memory goes back to a checkpoint: what it holds then is what a restore from storage gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from backend_model import (
    COLUMNS,
    KEYS,
    MAP,
    MAX_PARALLELISM,
    REMOVE,
    ObjectState,
    Snapshots,
    Subject,
    Table,
    composed,
    key_batch,
    key_of,
    space_of,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from row_model import ROW_BATCHES, RowsOfKeys
from value_model import VALUE_BATCHES, ValuesByBatch
from varying_model import VaryingTable

from tidegate.state.columnar import key_space, paged_state, undo_log
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common import table_columns
from tidegate.state.common.backend import KeyedBackend, StateDescriptor, ValueSpec
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable
from tidegate.storage.state.stored_rows import ROW_SEQUENCE

_ENOUGH = 1 << 30
_KEYS = st.integers(0, 30)
_NOTED = st.sampled_from([0, 2, 5, PAGE_ROWS])
_WHAT = ("put", "remove", "extend", "replace", "clear", "set", "discard", "empty")
_CELL_BATCHES = st.lists(st.tuples(_KEYS, st.sampled_from(_WHAT), st.integers(0, 5)), max_size=12)
_TABLE_VALUES = st.none() | st.just(REMOVE) | st.integers(-9, 9).map(float)
_TABLE_BATCHES = st.lists(st.tuples(_KEYS, _TABLE_VALUES), min_size=1, max_size=12)
_STEPS = (
    st.tuples(st.just("freeze"), st.booleans())
    | st.tuples(st.sampled_from(["write", "complete", "abort"]), st.integers(0, 3))
    | st.tuples(st.sampled_from(["back", "back", "restore"]), st.none())
)


@pytest.fixture(autouse=True)
def acts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dead slots are given up where there are a few, and a snapshot pins its pages however few rows it has."""
    monkeypatch.setattr(key_space, "COMPACTED_SLOTS_MIN", 4)
    monkeypatch.setattr(paged_state, "GATHERED_ROWS_MAX", 0)


def _made(undo_bytes_max: int) -> Callable[[bool], ColumnarBackend]:
    return lambda incremental: ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), incremental, undo_bytes_max)


def _again(subject: Subject, checkpoint_id: CheckpointId, stored: Sequence[StateTable]) -> Subject:
    """The same backend, gone back to a checkpoint and bound again."""
    backend = subject.backend
    kept = backend.kept(checkpoint_id)
    assert kept is not None
    backend.go_back(checkpoint_id)
    gone = type(subject)(lambda _: backend, True, files=composed(stored))
    for table in kept:
        backend.load(table)  # tells the columns, and changes nothing
    gone.check()
    return gone


def _whole(subject: Subject, checkpoint_id: int) -> dict[str, pa.Table]:
    """All that a snapshot of a subject holds, in the order of the keys."""
    rows: dict[str, list[pa.RecordBatch]] = {}
    for table in tables(subject.backend.freeze(Cut(CheckpointId(checkpoint_id)))):
        rows.setdefault(table.state, []).append(table.rows)
    return {
        state: pa.Table.from_batches(batches).sort_by(
            [(n, "ascending") for n in batches[0].schema.names if n in (*KEYS.names, ROW_SEQUENCE)]
        )
        for state, batches in rows.items()
    }


def _run(kind: type[Subject], undo_bytes_max: int, steps: list[tuple[str, Any]]) -> int:
    """Run a program; how often it went back."""
    make, backs = _made(undo_bytes_max), 0
    snapshots = Snapshots(kind(make, True))
    for what, argument in steps:
        completed = snapshots.completed
        if what == "batch":
            snapshots.subject.batch(argument)
        elif what == "back" and completed is not None and snapshots.subject.backend.kept(completed[0]) is not None:
            backs += 1
            snapshots = Snapshots(_again(snapshots.subject, *completed), completed)
        elif what in ("back", "restore"):
            snapshots = Snapshots(kind(make, True, () if completed is None else completed[1]), completed)
            if completed is not None:
                snapshots.subject.backend.keep(completed[0])
            snapshots.subject.check()
        else:
            getattr(snapshots, what)(argument)
    snapshots.freeze(True)
    snapshots.complete_all()
    subject = snapshots.subject
    subject.check()
    assert snapshots.completed is not None
    number, stored = snapshots.completed
    last: dict[type[Subject], Any] = {Table: (None,), ObjectState: ("put", 9), RowsOfKeys: ("append", 4)}
    last |= {ValuesByBatch: ("put", 2), VaryingTable: (None,)}
    subject.batch([(key, *last[kind]) for key in range(9)])
    if subject.backend.kept(number) is not None:
        gone, read = _again(subject, number, stored), kind(make, True, stored)
        assert _whole(gone, number + 1) == _whole(read, number + 1)
    return backs


def _run_noting(noted: int, kind: type[Subject], undo_bytes_max: int, steps: list[tuple[str, Any]]) -> None:
    """The same, where a page is kept once more than so many of its slots are noted, and slots are marked for long or
    hardly at all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(undo_log, "NOTED_SLOTS_MAX", noted)
        patch.setattr(undo_log, "MARKED_PARTS", 8 if noted else 1)
        _run(kind, undo_bytes_max, steps)


def _steps(batches: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    return st.lists(st.tuples(st.just("batch"), batches) | _STEPS, max_size=30)


@settings(max_examples=200, deadline=None)
@given(_NOTED, _steps(_TABLE_BATCHES), st.sampled_from([0, 700, 3_000, _ENOUGH]))
def test_tables_go_back(noted: int, steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
    """A vectorised table, through snapshots that are given up, complete in any order, are gone back to several times,
    and nulls from any moment on, with as much memory as there is, and pages kept early or never."""
    _run_noting(noted, Table, undo_bytes_max, steps)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(_NOTED, _steps(_TABLE_BATCHES), st.sampled_from([0, 700, 3_000, _ENOUGH]))
def test_tables_with_values_of_any_width_go_back(noted: int, steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
    """A table with texts and lists likewise, where what nobody needs is let go of at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_columns, "GARBAGE_BYTES_MIN", 0)
        _run_noting(noted, VaryingTable, undo_bytes_max, steps)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(_NOTED, _steps(VALUE_BATCHES), st.sampled_from([0, 700, 3_000, _ENOUGH]))
def test_values_by_the_batch_go_back(noted: int, steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
    """Values that are read and written by the batch likewise."""
    _run_noting(noted, ValuesByBatch, undo_bytes_max, steps)


@settings(max_examples=200, deadline=None)
@given(steps=_steps(_CELL_BATCHES), undo_bytes_max=st.sampled_from([0, 700, 3_000, _ENOUGH]))
def test_cells_go_back(steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
    """Values, lists and maps likewise."""
    _run(ObjectState, undo_bytes_max, steps)


@settings(max_examples=80, deadline=None)
@given(steps=_steps(ROW_BATCHES), undo_bytes_max=st.sampled_from([0, 700, 3_000, _ENOUGH]))
def test_row_tables_go_back(steps: list[tuple[str, Any]], undo_bytes_max: int) -> None:
    """Row tables likewise."""
    _run(RowsOfKeys, undo_bytes_max, steps)


@pytest.mark.parametrize("kind", [Table, ObjectState])
def test_with_enough_memory_the_newest_complete_checkpoint_is_there(kind: type[ObjectState] | type[Table]) -> None:
    """Also after more checkpoints were given up than are remembered; those, and older ones, are not."""
    changes: list[Any] = [(1, "put", 3), (2, "set", 1)] if kind is ObjectState else [(1, 3.0), (2, None)]
    snapshots = Snapshots(kind(_made(_ENOUGH), True))
    for complete in (True, True, *[False] * 40):
        snapshots.subject.batch(changes)
        snapshots.freeze(True)
        (snapshots.complete if complete else snapshots.abort)(0)
    backend = snapshots.subject.backend

    assert [backend.kept(CheckpointId(n)) is not None for n in (1, 2, 3)] == [False, True, False]
    assert snapshots.completed is not None
    _again(snapshots.subject, *snapshots.completed)
    assert backend.kept(CheckpointId(42)) is None, "it was given up, and what came after it is undone"


def test_what_was_restored_is_there_again() -> None:
    """Lists and maps that came from storage are not changed in place once they may be gone back to."""
    cells = ObjectState(_made(_ENOUGH), True)
    cells.batch([(1, "extend", 1), (1, "set", 2)])
    snapshots = Snapshots(cells)
    snapshots.freeze(False)
    snapshots.complete(0)
    assert snapshots.completed is not None
    restored = ObjectState(_made(_ENOUGH), True, snapshots.completed[1])
    restored.backend.keep(snapshots.completed[0])

    restored.batch([(1, "extend", 4), (1, "set", 4)])

    _again(restored, *snapshots.completed)


@pytest.mark.parametrize("written_first", [True, False])
@pytest.mark.parametrize("kind", [Table, ObjectState])
def test_slots_that_mean_other_keys(
    kind: type[ObjectState] | type[Table], written_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead slots are given up in between: those that were dead at the checkpoint, but none that was live then.
    Before the snapshot is written, what it reads is kept by the page."""
    monkeypatch.setattr(key_space, "COMPACTED_SLOTS_MIN", 1_000)
    subject = kind(_made(_ENOUGH), False)
    backend = subject.backend
    assert isinstance(backend, ColumnarBackend)

    def put(keys: range) -> None:
        subject.batch(
            [(key, "put", key) for key in keys] if kind is ObjectState else [(key, float(key)) for key in keys]
        )  # type: ignore[misc]

    def remove(keys: range) -> None:
        if isinstance(subject, ObjectState):
            subject.batch([(key, "remove", 0) for key in keys])
        else:
            backend.load(StateTable("t", StateKind.KEYED, key_batch(keys), removed=True))
            for key in keys:
                del subject._model[key_of(key)]

    put(range(60))
    remove(range(40))
    snapshots = Snapshots(subject)
    snapshots.freeze(False)
    if written_first:
        snapshots.complete(0)
    remove(range(40, 50))
    monkeypatch.setattr(key_space, "COMPACTED_SLOTS_MIN", 4)
    put(range(50, 53))
    put(range(38, 41))

    assert space_of(backend).slots < 30
    snapshots.complete_all()
    assert snapshots.completed is not None
    _again(subject, *snapshots.completed)


def test_memory_follows_what_has_changed() -> None:
    """Of 20,000 keys three change and 5,000 come: three are noted, once. Over the limit nothing is, until a freeze."""
    table = Table(_made(20_000), True)
    table.batch([(key, 1.0) for key in range(20_000)])
    undo = space_of(table.backend).undo
    assert undo.size_bytes == 0
    tables(table.backend.freeze(Cut(CheckpointId(1))))
    nothing_bytes = undo.size_bytes

    for _ in range(5):
        table.batch([(17, 2.0), (18, 3.0), (19, 4.0)])
    table.batch([(key, 1.0) for key in range(20_000, 25_000)])

    assert 0 < undo.size_bytes - nothing_bytes < 1_000
    table.batch([(key, 2.0) for key in range(2_000)])
    assert (undo.size_bytes, table.backend.kept(CheckpointId(1))) == (0, None)
    tables(table.backend.freeze(Cut(CheckpointId(2))))
    table.batch([(17, 9.0)])
    assert table.backend.kept(CheckpointId(2)) is not None


@pytest.mark.parametrize("share", [1, 100])
def test_older_checkpoints_give_way_to_copies(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All copies of pages together take no more than the state, which is larger than the limit, also while more
    snapshots wait to be written; where few rows of each page have changed, the older checkpoint is kept all the same,
    row by row."""
    monkeypatch.setattr(undo_log, "COPIES_BYTES_MIN", 0)
    table = Table(_made(60_000), True)
    undo = space_of(table.backend).undo
    table.batch([(key, 1.0) for key in range(20_000)])
    written, sizes = [], []
    for number in (1, 2, 3):
        written.append(table.backend.freeze(Cut(CheckpointId(number))))
        table.batch([(key, float(number)) for key in range(0, 20_000, share)])
        sizes.append(undo.size_bytes)
        if number > 1:
            assert table.backend.kept(CheckpointId(number)) is not None
            assert (table.backend.kept(CheckpointId(number - 1)) is None) == (share == 1)
            assert max(sizes) < 1.2 * sizes[0]
    before = {row["n"] for stored in tables(written[2]) for row in stored.rows.to_pylist()}
    table.backend.go_back(CheckpointId(3))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(np.arange(20_000)).to_pylist()) == before == ({3} if share == 1 else {1, 3})


@pytest.mark.parametrize(("states", "kept"), [(3.1, 1), (2.1, 2), (0.1, 3)])
def test_older_checkpoints_stay_beside_copies_as_far_as_the_limit_goes(
    states: float, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three snapshots wait to be written, and all rows have changed after each. A limit of three times the state lets
    all three be gone back to, of two the newest two; with less than the state the newest alone is left."""
    monkeypatch.setattr(undo_log, "COPIES_BYTES_MIN", 0)
    table = Table(_made(_ENOUGH), True)
    undo = space_of(table.backend).undo
    table.batch([(key, 1.0) for key in range(20_000)])
    assert table.backend.freeze(Cut(CheckpointId(1)))
    table.batch([(key, 1.0) for key in range(20_000)])
    copies_bytes = undo.size_bytes
    table = Table(_made(int(states * copies_bytes)), True)
    undo = space_of(table.backend).undo
    written = []
    for number in (1, 2, 3, 4):
        table.batch([(key, 1.0) for key in range(20_000)])
        assert undo.size_bytes <= max(states, 1.2) * copies_bytes
        written.append(table.backend.freeze(Cut(CheckpointId(number))) if number < 4 else None)
    assert [n for n in (1, 2, 3) if table.backend.kept(CheckpointId(n)) is not None] == list(range(kept, 4))
    table.backend.go_back(CheckpointId(kept))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(np.arange(20_000)).to_pylist()) == {kept}


def test_what_is_noted_in_vain_is_noted_less_often() -> None:
    """A part that outgrows the limit alone is begun again at once, then after one checkpoint, two, four; once a part
    fits, each freeze begins one again. What a standby has read is kept in any case."""
    table = Table(_made(20_000), True)
    table.batch([(key, 1.0) for key in range(20_000)])

    def kept(numbers: range, changed: int) -> list[int]:
        begun = []
        for number in numbers:
            tables(table.backend.freeze(Cut(CheckpointId(number))))
            if table.backend.kept(CheckpointId(number)) is not None:
                begun.append(number)
            table.batch([(key, 2.0) for key in range(changed)])
        return begun

    assert kept(range(1, 10), 2_000) == [1, 2, 4, 7]
    table.backend.keep(CheckpointId(10))
    assert table.backend.kept(CheckpointId(10)) is not None
    assert kept(range(11, 15), 10) == [11, 12, 13, 14]


def test_other_bindings_are_refused() -> None:
    """What was a value cannot become a list, or another type, from one attempt to the next."""
    bindings: list[Callable[[KeyedBackend], object]] = [
        lambda backend: backend.lists(StateDescriptor("v", pa.list_(pa.int64()))),
        lambda backend: backend.values(StateDescriptor("v", pa.int64())),
        lambda backend: backend.values(MAP),
        lambda backend: backend.table("v", (ValueSpec("n", pa.int64(), 0),)),
    ]
    for bind in bindings:
        cells = ObjectState(_made(_ENOUGH), True)
        cells.batch([(1, "put", 1)])
        tables(cells.backend.freeze(Cut(CheckpointId(1))))
        cells.backend.go_back(CheckpointId(1))
        with pytest.raises(ConfigurationError, match="bound with another type"):
            bind(cells.backend)
