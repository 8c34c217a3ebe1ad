"""What the backend in memory promises beyond the contract: pages and blocks, compaction, writers beside changes."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest
from backend_model import (
    COLUMNS,
    KEYS,
    LIST,
    MAX_PARALLELISM,
    VALUE,
    ObjectState,
    Snapshots,
    Table,
    columnar_backend,
    composed,
    key_batch,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.columnar import key_space
from tidegate.state.columnar import paged_state as frozen
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.common.backend import KeyedBackend, StateDescriptor, ValueSpec
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

_SPREAD = 397
_PRELOADED = PAGE_ROWS + 900
_NUMBERS = st.integers(0, _PRELOADED // _SPREAD + 5)
_CELL_CHANGES = st.tuples(
    _NUMBERS.map(lambda n: n * _SPREAD),
    st.sampled_from(["put", "remove", "extend", "clear", "set", "discard", "empty"]),
    st.integers(0, 5),
)
_ROWS = st.tuples(_NUMBERS.map(lambda n: n * _SPREAD), st.none() | st.integers(-9, 9).map(float))
_MOSTLY_GONE = ("put", "remove", "remove", "extend", "clear")
_SNAPSHOT_STEPS = st.tuples(st.just("freeze"), st.booleans()) | st.tuples(
    st.sampled_from(["write", "write", "complete", "abort"]), st.integers(0, 3)
)


def _run(snapshots: Snapshots, steps: list[tuple[str, Any]]) -> None:
    for what, argument in steps:
        if what == "batch":
            snapshots.subject.batch(argument)
        else:
            getattr(snapshots, what)(argument)
    snapshots.freeze(True)
    snapshots.complete_all()
    snapshots.subject.check()


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=20)
@given(st.lists(st.tuples(st.just("batch"), st.lists(_ROWS, min_size=1, max_size=8)) | _SNAPSHOT_STEPS, max_size=20))
def test_tables_over_many_pages(steps: list[tuple[str, Any]]) -> None:
    """Writers that stop between two blocks while rows of all pages change still hold the moment of their freeze."""
    table = Table(columnar_backend, True)
    table.batch([(key, 1.0) for key in range(_PRELOADED)])
    _run(Snapshots(table), steps)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.just("batch"), st.lists(_CELL_CHANGES, min_size=1, max_size=8)) | _SNAPSHOT_STEPS, max_size=20
    )
)
def test_cells_over_many_pages(steps: list[tuple[str, Any]]) -> None:
    """The same for values, lists and maps."""
    cells = ObjectState(columnar_backend, True)
    changes = [(key, what, 1) for key in range(0, _PRELOADED, 3) for what in ("put", "extend", "set")]
    cells.batch(changes)
    _run(Snapshots(cells), steps)


@pytest.mark.parametrize("incremental", [False, True])
@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(
            st.just("batch"),
            st.lists(
                st.tuples(st.integers(0, 60), st.sampled_from(_MOSTLY_GONE), st.just(1)),
                min_size=1,
                max_size=20,
            ),
        )
        | _SNAPSHOT_STEPS,
        max_size=25,
    )
)
def test_compaction_is_not_seen(incremental: bool, steps: list[tuple[str, Any]]) -> None:
    """Rebuilding as soon as more than half of four slots are dead changes nothing of what is read or stored."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_space, "COMPACTED_SLOTS_MIN", 4)
        cells = ObjectState(columnar_backend, incremental)
        snapshots = Snapshots(cells)
        for what, argument in steps:
            if what == "batch":
                cells.batch(argument)
            else:
                getattr(snapshots, what)(argument and incremental if what == "freeze" else argument)
        snapshots.freeze(incremental)
        snapshots.complete_all()
        cells.check()


def _refs(backend: KeyedBackend, keys: list[int]) -> list[int]:
    refs = list(backend.enter(key_batch(keys)))
    backend.leave()
    return refs


def test_dead_slots_are_given_up() -> None:
    """Of 10,000 keys 9,000 are removed: then the rest lies in the first thousand slots, in the order it had."""
    cells = ObjectState(columnar_backend, False)
    cells.batch([(key, "put", 1) for key in range(10_000)])
    assert list(range(10_000)) == _refs(cells.backend, list(range(10_000)))
    before = cells.backend.freeze(Cut(CheckpointId(1)))
    expected = cells.expected()
    cells.batch([(key, "remove", 0) for key in range(10_000) if key % 10])
    assert list(range(1000)) == _refs(cells.backend, list(range(0, 10_000, 10)))
    cells.check()
    assert composed(tables(before)) == expected


def test_dead_slots_that_a_snapshot_has_to_tell_of_are_kept() -> None:
    """While the base holds removed keys they keep their slots; with a base that does not, these are given up."""
    cells = ObjectState(columnar_backend, True)
    snapshots = Snapshots(cells)
    cells.batch([(key, "put", 1) for key in range(10_000)])
    snapshots.freeze(False)
    snapshots.complete(0)
    cells.batch([(key, "remove", 0) for key in range(9_000)])
    assert _refs(cells.backend, [9_999]) == [9_999]
    snapshots.freeze(True)
    snapshots.complete(0)
    snapshots.freeze(True)
    snapshots.complete(0)
    cells.batch([(9_999, "put", 2)])
    assert _refs(cells.backend, [9_999]) == [999]
    snapshots.freeze(True)
    snapshots.complete(0)
    assert snapshots.completed is not None
    ObjectState(columnar_backend, True, snapshots.completed[1]).check()


def test_tables_keep_up_with_compaction() -> None:
    """A table and cells share the slots: rows of the table stay its own when dead slots of the cells go."""
    backend = columnar_backend(False)
    table, values = backend.table("t", COLUMNS), backend.values(VALUE)
    backend.fix_keys(KEYS)
    for ref in backend.enter(key_batch(range(10_000))):
        values.put(ref, "x")
    backend.leave()
    upserted = table.upsert(key_batch(range(9_990, 10_010)))
    assert list(range(20)) == upserted.new_rows.tolist()
    accumulate.count(table.column("n").pages, upserted.slots, NO_MASK)
    table.done()
    for ref in backend.enter(key_batch(range(9_995))):
        values.remove(ref)
    backend.leave()
    assert list(range(20)) == _refs(backend, list(range(9_990, 10_010)))
    upserted = table.upsert(key_batch([10_009, 5, 9_990]))
    assert upserted.new_rows.tolist() == [1]
    accumulate.count(table.column("n").pages, upserted.slots, NO_MASK)
    assert table.column("n").take(upserted.slots).to_pylist() == [2, 1, 2]
    table.done()
    assert table.rows == 21
    assert values.rows == 5


def test_a_row_that_comes_back_begins_anew() -> None:
    """A row that a layer removed and the input brings back has the identity again, and is null where nulls are kept."""
    first = Table(columnar_backend, False)
    first.batch([(1, 5.0), (2, None)])
    (stored,) = tables(first.backend.freeze(Cut(CheckpointId(1))))
    gone = StateTable("t", stored.kind, key_batch([1]), removed=True, layer=1)
    second = Table(columnar_backend, False, [stored, gone])
    second.check()
    assert second.table.rows == 1
    second.batch([(1, None), (3, 1.0)])
    second.batch([(1, -7.0)])
    second.check()


def test_writing_while_another_thread_reads() -> None:
    """A writer on its own thread gets every row as it was frozen, while each batch changes all of them."""
    table = Table(columnar_backend, False)
    keys = key_batch(range(5 * PAGE_ROWS))

    def add() -> None:
        upserted = table.table.upsert(keys)
        accumulate.count(table.table.column("n").pages, upserted.slots, NO_MASK)
        table.table.done()

    add()
    counts: dict[int, set[int]] = {}

    def write(number: int, states: Any) -> None:
        counts[number] = {n for t in tables(states) for n in t.rows.column("n").to_pylist()}

    threads = []
    for number in range(1, 8):
        states = table.backend.freeze(Cut(CheckpointId(number)))
        threads.append(threading.Thread(target=write, args=(number, states)))
        threads[-1].start()
        add()
    for thread in threads:
        thread.join(timeout=240)
    assert {number: {number} for number in range(1, 8)} == counts


def test_only_the_pages_that_change_are_copied() -> None:
    """A change after a freeze copies one page; once the writer is past it, none."""
    table = Table(columnar_backend, False)
    table.batch([(key, 1.0) for key in range(4 * PAGE_ROWS)])
    pages = table.table.column("n").pages.tolist()
    with pytest.MonkeyPatch.context() as patch:
        for module in (key_space, frozen):
            patch.setattr(module, "BLOCK_ROWS", PAGE_ROWS)
        patch.setattr(frozen, "CHUNK_ROWS_MIN", PAGE_ROWS)
        patch.setattr(frozen, "CHUNK_BYTES_MIN", 0)
        (state,) = table.backend.freeze(Cut(CheckpointId(1)))
        chunks = state.chunks()
        next(chunks)
        next(chunks)
        table.batch([(0, 1.0), (3 * PAGE_ROWS, 1.0)])
        now = table.table.column("n").pages.tolist()
        assert [address != before for address, before in zip(now, pages, strict=True)] == [False, False, False, True]
        list(chunks)
        pages = table.table.column("n").pages.tolist()
        table.batch([(PAGE_ROWS, 1.0), (3 * PAGE_ROWS, 1.0)])
        assert pages == table.table.column("n").pages.tolist()


def test_chunks_are_of_a_bounded_size() -> None:
    """Of 150,000 keys no chunk has few rows, none more than two blocks, and every row is there."""
    backend = ColumnarBackend(MAX_PARALLELISM, ("k",), False)
    table = backend.table("t", COLUMNS)
    backend.fix_keys(pa.schema({"k": pa.int64()}))
    table.upsert(pa.record_batch({"k": range(150_000)}))
    table.done()
    (state,) = backend.freeze(Cut(CheckpointId(1)))
    sizes = [chunk.rows.num_rows for chunk in state.chunks()]
    assert sum(sizes) == 150_000
    assert min(sizes) >= frozen.CHUNK_ROWS_MIN
    assert max(sizes) <= 2 * frozen.BLOCK_ROWS


def test_keys_of_several_types_and_long_strings() -> None:
    """Keys are stored in their own types, whatever lies in how many chunks of them."""
    schema = pa.schema({"text": pa.string(), "day": pa.date32()})
    backend = ColumnarBackend(MAX_PARALLELISM, tuple(schema.names), True)
    lists = backend.lists(LIST)
    backend.fix_keys(schema)
    for start in range(0, 3000, 100):
        numbers = range(start, start + 100)
        keys = pa.record_batch(
            [[None if n % 50 == 0 else f"{n}" * 50 for n in numbers], pa.array(numbers, pa.int32()).cast(pa.date32())],
            schema=schema,
        )
        for ref, number in zip(backend.enter(keys), numbers, strict=True):
            lists.put(ref, [number])
        backend.leave()
    (state, *_) = backend.freeze(Cut(CheckpointId(1)))
    rows = [row for chunk in state.chunks() for row in chunk.rows.to_pylist()]
    assert len(rows) == 3000
    assert all(row["text"] == (None if row["l"][0] % 50 == 0 else f"{row['l'][0]}" * 50) for row in rows)


def test_changes_of_a_table_outlast_compaction() -> None:
    """A row that changed before dead slots were given up is in the next increment, and no other is."""
    backend = columnar_backend(True)
    table, values = backend.table("t", COLUMNS), backend.values(VALUE)
    backend.fix_keys(KEYS)
    for ref in backend.enter(key_batch(range(10_000))):
        values.put(ref, "x")
    backend.leave()
    table.upsert(key_batch(range(9_990, 10_010)))
    table.done()
    tables(backend.freeze(Cut(CheckpointId(1))))
    for ref in backend.enter(key_batch(range(10_000))):
        values.remove(ref)
    backend.leave()
    for number in (2, 3):
        tables(backend.freeze(Cut(CheckpointId(number), CheckpointId(number - 1))))
    upserted = table.upsert(key_batch([10_009]))
    assert upserted.slots.tolist() == [10_009]
    accumulate.count(table.column("n").pages, upserted.slots, NO_MASK)
    table.done()
    assert _refs(backend, [10_009]) == [19]
    (changed,) = tables(backend.freeze(Cut(CheckpointId(4), CheckpointId(3))), layer=1)
    assert changed.rows.select(["k", "n"]).to_pylist() == [{"k": 10_009, "n": 1}]


def test_a_few_changes_are_gathered_when_they_are_frozen() -> None:
    """They pin no page: what comes next is changed in place, and the frozen rows stay what they were."""
    backend = ColumnarBackend(8, ("k",), incremental=True)
    table = backend.table("t", [ValueSpec("n", pa.int64(), 0)])
    backend.fix_keys(pa.schema([("k", pa.int64())]))

    def put(keys: range, value: int) -> None:
        upserted = table.upsert(pa.record_batch({"k": list(keys)}))
        table.column("n").paged.put(upserted.slots, pa.array([value] * len(keys)))
        table.done()

    put(range(20_000), 1)
    backend.freeze(Cut(CheckpointId(1)))[0]  # never written
    put(range(100), 2)
    changed, gone = backend.freeze(Cut(CheckpointId(2), base=CheckpointId(1)))
    pages = table.column("n").pages.copy()
    put(range(100), 3)

    assert {2} == {n for chunk in changed.chunks() for n in chunk.rows.column("n").to_pylist()}
    assert list(gone.chunks()) == []
    assert pages.tolist() == table.column("n").pages.tolist()


def test_changes_that_lie_far_apart_are_gathered() -> None:
    """In the order of the slots, without any that is not marked; a key that is gone is told of as such."""
    backend = ColumnarBackend(8, ("k",), incremental=True)
    table = backend.table("t", [ValueSpec("n", pa.int64(), 0)])
    backend.fix_keys(pa.schema([("k", pa.int64())]))
    table.upsert(pa.record_batch({"k": list(range(200_000))}))
    table.done()
    backend.freeze(Cut(CheckpointId(1)))
    for changed in ([199_999, 0], [63, 64, 65_535, 65_536, 131_071]):
        table.upsert(pa.record_batch({"k": changed}))
        table.done()

    put, gone = backend.freeze(Cut(CheckpointId(2), base=CheckpointId(1)))

    found = [key for chunk in put.chunks() for key in chunk.rows.column("k").to_pylist()]
    assert sorted(found) == [0, 63, 64, 65_535, 65_536, 131_071, 199_999]
    assert list(gone.chunks()) == []


def test_values_of_functions_are_not_gathered() -> None:
    """However few they are, each may be large: they are encoded by who writes the snapshot."""
    backend = ColumnarBackend(8, ("k",), incremental=True)
    cells = backend.values(StateDescriptor("v", pa.int64()))
    backend.fix_keys(pa.schema([("k", pa.int64())]))
    backend.freeze(Cut(CheckpointId(1)))
    cells.put(backend.enter(pa.record_batch({"k": [1]}))[0], "no number")
    backend.leave()

    changed, _ = backend.freeze(Cut(CheckpointId(2), base=CheckpointId(1)))
    with pytest.raises(pa.ArrowInvalid):
        list(changed.chunks())


def test_what_has_changed_is_counted_as_a_snapshot_would_hold_it() -> None:
    """Each slot once, whatever lies between, and none that changed up to the base; of cells as of columns."""
    cells = ObjectState(columnar_backend, True)
    cells.batch([(key, "put", 1) for key in range(6)])
    cells.backend.freeze(Cut(CheckpointId(1)))
    cells.batch([(key, "put", 2) for key in (0, 1, 2)])
    cells.backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))
    cells.batch([(2, "put", 3), (3, "remove", 0)])

    assert cells.backend.changed_rows(CheckpointId(1)) == (4, 5)
    assert cells.backend.changed_rows(CheckpointId(2)) == (2, 5)
