"""What every keyed state backend must do: random programs on it are those of plain dictionaries, through snapshots that
are written later, built on each other, given up, and restored."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from backend_model import (
    BACKENDS,
    EXAMPLES,
    KEYS,
    LIST,
    MAP,
    REMOVE,
    VALUE,
    WITH_INCREMENTS,
    MakeBackend,
    ObjectState,
    Snapshots,
    Subject,
    Table,
    key_batch,
    key_of,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from row_model import ROW_BATCHES, RowsOfKeys
from value_model import VALUE_BATCHES, ValuesByBatch
from varying_model import VaryingTable

from tidegate.state.common import table_columns
from tidegate.state.common.backend import StateDescriptor
from tidegate.state.rocksdb.rocksdb_backend import RocksBackend
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

_KEYS = st.integers(0, 30)
_WHAT = ("put", "remove", "extend", "replace", "clear", "set", "discard", "empty", "read")
_CELL_BATCHES = st.lists(st.tuples(_KEYS, st.sampled_from(_WHAT), st.integers(0, 5)), max_size=12)
_TABLE_VALUES = st.none() | st.just(REMOVE) | st.integers(-9, 9).map(float)
_TABLE_BATCHES = st.lists(st.tuples(_KEYS, _TABLE_VALUES), min_size=1, max_size=12)
_SNAPSHOT_STEPS = (
    st.tuples(st.just("freeze"), st.booleans())
    | st.tuples(st.sampled_from(["write", "complete", "abort"]), st.integers(0, 3))
    | st.tuples(st.just("restore"), st.none())
)


def _steps(batches: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, Any]]]:
    return st.lists(st.tuples(st.just("batch"), batches) | _SNAPSHOT_STEPS, max_size=25)


@pytest.fixture(params=sorted(BACKENDS))
def make(request: pytest.FixtureRequest) -> MakeBackend:
    """Makes an empty backend."""
    return BACKENDS[request.param]


def _run(make: MakeBackend, kind: type[Subject], steps: list[tuple[str, Any]]) -> None:
    snapshots = Snapshots(kind(make, True))
    for what, argument in steps:
        if what == "batch":
            snapshots.subject.batch(argument)
        elif what == "restore":
            stored = snapshots.completed
            snapshots.subject.backend.close()
            snapshots = Snapshots(kind(make, True, () if stored is None else stored[1]), stored)
            snapshots.subject.check()
        else:
            getattr(snapshots, what)(argument)
    snapshots.freeze(True)
    snapshots.complete_all()
    snapshots.subject.check()
    snapshots.subject.backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_cells_are_those_of_dictionaries(name: str) -> None:
    """Values, lists and maps read as the model's; every snapshot, alone or on its base, holds the moment of its freeze;
    a restore gives that moment back, and what is built on it after the restore is right too."""

    @settings(max_examples=EXAMPLES[name], deadline=None)
    @given(steps=_steps(_CELL_BATCHES))
    def program(steps: list[tuple[str, Any]]) -> None:
        _run(BACKENDS[name], ObjectState, steps)

    program()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_tables_are_those_of_dictionaries(name: str) -> None:
    """The same for a vectorised table, with nulls from any moment on."""

    @settings(max_examples=EXAMPLES[name], deadline=None)
    @given(steps=_steps(_TABLE_BATCHES))
    def program(steps: list[tuple[str, Any]]) -> None:
        _run(BACKENDS[name], Table, steps)

    program()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_tables_with_values_of_any_width_are_those_of_dictionaries(name: str) -> None:
    """The same for a table that has texts and lists as well, where what nobody needs is let go of at once."""

    @settings(max_examples=EXAMPLES[name], deadline=None)
    @given(steps=_steps(_TABLE_BATCHES))
    def program(steps: list[tuple[str, Any]]) -> None:
        _run(BACKENDS[name], VaryingTable, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_columns, "GARBAGE_BYTES_MIN", 0)
        program()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_row_tables_are_those_of_lists(name: str) -> None:
    """The same for a row table: rows of a key are found in the order in which they came."""

    @settings(max_examples=EXAMPLES[name], deadline=None)
    @given(steps=_steps(ROW_BATCHES))
    def program(steps: list[tuple[str, Any]]) -> None:
        _run(BACKENDS[name], RowsOfKeys, steps)

    program()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_values_by_the_batch_are_those_of_dictionaries(name: str) -> None:
    """The same for values that are read and written by the batch: numbers, records with nulls in them, and texts."""

    @settings(max_examples=EXAMPLES[name], deadline=None)
    @given(steps=_steps(VALUE_BATCHES))
    def program(steps: list[tuple[str, Any]]) -> None:
        _run(BACKENDS[name], ValuesByBatch, steps)

    program()


def test_a_snapshot_keeps_values_that_a_batch_replaces(make: MakeBackend) -> None:
    """Whatever is put by the batch after the freeze, and before the rows are written."""
    subject = ValuesByBatch(make, False)
    snapshots = Snapshots(subject)
    subject.batch([(key, "put", 1) for key in range(9)])
    snapshots.freeze(False)
    subject.batch([(key, "put", 2) for key in range(9)])
    snapshots.complete_all()
    subject.backend.close()


def test_without_a_key_there_is_nothing(make: MakeBackend) -> None:
    """An empty backend freezes to nothing, full or incremental, and has no keys."""
    cells = ObjectState(make, True)
    assert tables(cells.backend.freeze(Cut(CheckpointId(1)))) == []
    assert tables(cells.backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))) == []
    assert list(cells.backend.keys("v", 10)) == []
    cells.backend.sweep(10)
    cells.backend.close()


def test_what_a_backend_holds_is_told_as_far_as_it_knows(make: MakeBackend) -> None:
    """Rows of all states; timers where that needs no look at each, and bytes where there are files."""
    cells = ObjectState(make, True)
    assert cells.backend.size.rows == 0
    cells.batch([(1, "put", 1), (2, "put", 1), (3, "extend", 1)])
    size = cells.backend.size
    assert size.rows >= 3
    on_disk = isinstance(cells.backend, RocksBackend)
    assert ((size.size_bytes or 0) > 0, size.timers) == ((True, None) if on_disk else (False, 0))
    if not on_disk:
        cells.backend.timers.change(key_batch([4]), [0], [5], [True])
        cells.backend.leave()
        assert cells.backend.size.timers == 1
    cells.backend.close()


def test_a_removed_row_is_gone_and_its_key_comes_new(make: MakeBackend) -> None:
    """What is removed in a batch is not there after it, a slot given twice or new in the batch included; a key that
    comes again begins with the identities."""
    table = Table(make, True)
    table.batch([(key, float(key)) for key in range(5)])
    table.batch([(1, REMOVE), (1, 7.0), (3, REMOVE), (9, REMOVE), (4, 1.0)])
    table.check()
    table.batch([(1, None), (2, 9.0), (9, 1.0)])
    table.check()
    assert table.expected()["t"][key_of(1)] == {"n": 1, "most": None}
    table.backend.close()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_an_increment_tells_what_was_removed(name: str) -> None:
    """It tells which rows of the base are gone, and nothing of a row that came and went since."""
    table = Table(BACKENDS[name], True)
    table.batch([(key, 1.0) for key in range(20)])
    tables(table.backend.freeze(Cut(CheckpointId(1))))
    table.batch([(17, REMOVE), (50, REMOVE)])
    table.batch([(51, 1.0), (3, REMOVE)])
    table.batch([(51, REMOVE), (3, 2.0)])
    stored = tables(table.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    gone = {k for t in stored if t.removed for k in t.rows.column("k").to_pylist()}
    assert gone - {51} == {17}
    assert {k for t in stored if not t.removed for k in t.rows.column("k").to_pylist()} == {3}
    if name == "columnar":
        assert gone == {17}
    table.backend.close()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_an_increment_holds_what_has_changed(name: str) -> None:
    """Of 3,000 keys, the second snapshot tells of one that changed, one that came and one that went; nothing else."""
    make = BACKENDS[name]
    table = Table(make, True)
    table.batch([(key, 1.0) for key in range(3000)])
    tables(table.backend.freeze(Cut(CheckpointId(1))))
    table.batch([(17, 5.0), (3000, 2.0)])
    (rows,) = tables(table.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    assert dict(zip(*(rows.rows.column(n).to_pylist() for n in ("k", "n")), strict=True)) == {17: 2, 3000: 1}
    table.backend.close()
    cells = ObjectState(make, True)
    cells.batch([(key, "put", 1) for key in range(3000)])
    tables(cells.backend.freeze(Cut(CheckpointId(1))))
    cells.batch([(17, "put", 5), (4000, "put", 0), (99, "remove", 0), (5000, "put", 1), (5000, "remove", 0)])
    second = tables(cells.backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), layer=1)
    put = {k for t in second if t.state == "v" and not t.removed for k in t.rows.column("k").to_pylist()}
    gone = {k for t in second if t.state == "v" and t.removed for k in t.rows.column("k").to_pylist()}
    assert put == {17, 4000}
    assert gone - {5000} == {99}  # that 5000, which the base never had, is gone may be told or not
    cells.backend.close()


def test_a_given_up_snapshot_is_made_up_for(make: MakeBackend) -> None:
    """What only an aborted snapshot held is in the next one on the same base."""
    cells = ObjectState(make, True)
    snapshots = Snapshots(cells)
    cells.batch([(1, "put", 1), (2, "put", 1), (3, "extend", 1)])
    snapshots.freeze(False)
    snapshots.complete(0)
    cells.batch([(1, "put", 2), (2, "remove", 0), (3, "extend", 2)])
    snapshots.freeze(True)
    snapshots.abort(0)
    snapshots.freeze(True)
    snapshots.complete(0)
    cells.backend.close()


def test_many_snapshots_on_one_base(make: MakeBackend) -> None:
    """However many snapshots in a row are given up, the next one on the old base has every change since."""
    table = Table(make, True)
    snapshots = Snapshots(table)
    table.batch([(0, 1.0)])
    snapshots.freeze(False)
    snapshots.complete(0)
    for key in range(1, 40):
        table.batch([(key, 1.0)])
        snapshots.freeze(True)
        snapshots.abort(0)
    snapshots.freeze(True)
    snapshots.complete(0)
    table.backend.close()


def test_a_key_that_is_stored_twice_is_refused(make: MakeBackend) -> None:
    """Two tables of layer 0 with one key would count it twice."""
    cells, table = ObjectState(make, False), Table(make, False)
    cells.batch([(1, "put", 1), (1, "extend", 1), (1, "set", 1)])
    table.batch([(1, 1.0)])
    for subject in (cells, table):
        for stored in tables(subject.backend.freeze(Cut(CheckpointId(1)))):
            with pytest.raises(CorruptionError, match=f"state '{stored.state}' holds a key twice"):
                type(subject)(make, False, (stored, stored))
        subject.backend.close()


def test_other_columns_are_refused(make: MakeBackend) -> None:
    """A stored table with other columns names those found and those expected; an unknown state names those bound."""
    keys = key_batch([1])
    rows = pa.RecordBatch.from_arrays([*keys.columns, pa.array([1], pa.int32())], names=["k", "s", "v"])
    cells = ObjectState(make, False)
    with pytest.raises(CorruptionError, match=r"\(k: int64, s: string, v: int32\).*expects.*v: string\)"):
        cells.backend.load(StateTable("v", StateKind.KEYED, rows))
    with pytest.raises(ConfigurationError, match=r"no state 'other'.*\['l', 'm', 'v'\]"):
        cells.backend.load(StateTable("other", StateKind.KEYED, rows))
    cells.backend.close()


def test_sweeping_forgets_what_has_expired(make: MakeBackend) -> None:
    """A sweep looks at so many keys, goes on where it ended, and takes expired values, elements and entries away."""
    backend = make(True)
    old = {"limit": 0}

    def spec(of: StateDescriptor) -> StateDescriptor:
        return StateDescriptor(of.name, of.column_type, lambda value: int(str(value).split("-")[-1]) < old["limit"])

    values, lists, maps = backend.values(spec(VALUE)), backend.lists(spec(LIST)), backend.maps(spec(MAP))
    backend.fix_keys(KEYS)
    refs = backend.enter(key_batch(range(10)))
    for number, ref in enumerate(refs):
        values.put(ref, f"value-{number}")
        lists.extend(ref, [number, number + 5])
        maps.put(ref, "a", number)
        maps.put(ref, "b", number + 5)
    backend.leave()
    tables(backend.freeze(Cut(CheckpointId(1))))
    old["limit"] = 7
    for _ in range(4):
        backend.sweep(3)
    refs = backend.enter(key_batch(range(10)))
    assert [values.get(ref) for ref in refs] == [None] * 7 + ["value-7", "value-8", "value-9"]
    assert [list(lists.get(ref)) for ref in refs] == [[n for n in (k, k + 5) if n >= 7] for k in range(10)]
    assert [[n for _, n in maps.items(ref)] for ref in refs] == [[n for n in (k, k + 5) if n >= 7] for k in range(10)]
    backend.leave()
    if type(backend) is not RocksBackend:
        gone = [t for t in tables(backend.freeze(Cut(CheckpointId(2), CheckpointId(1))), 1) if t.removed]
        assert sorted(k for t in gone if t.state == "v" for k in t.rows.column("k").to_pylist()) == list(range(7))
    backend.close()


def test_lists_are_not_changed_under_their_readers(make: MakeBackend) -> None:
    """A snapshot of a list or map holds the moment of its freeze, however often it changes before it is written."""
    cells = ObjectState(make, False)
    snapshots = Snapshots(cells)
    for number in range(4):
        cells.batch([(1, "extend", number), (1, "set", number), (2, "extend", number)])
        snapshots.freeze(False)
        cells.batch([(1, "extend", number), (1, "set", number + 1), (1, "discard", number)])
    snapshots.complete_all()
    cells.backend.close()


def test_keys_may_change_while_they_are_gone_through(make: MakeBackend) -> None:
    """A function may go through the keys of a state and change it on the way: it meets every key that stays, once."""
    cells = ObjectState(make, True)
    cells.batch([(key, "put", 1) for key in range(100)])
    met = []
    for keys in cells.backend.keys("v", 10):
        numbers = keys.column("k").to_pylist()
        met += numbers
        cells.batch([(number, "remove", 0) for number in numbers])
    assert sorted(met) == list(range(100))
    cells.check()
    cells.backend.close()
