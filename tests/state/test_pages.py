"""Pages: values by slot, copy-on-write, and who lets go of what when."""

from __future__ import annotations

import threading
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.state.columnar.change_tracking import DirtySlots, flags
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.pages import PagedColumn, Pins, pages_for
from tidegate.state.kernels.paged import PAGE_ROWS, gathered, mark_slots, revive, scatter, touched_pages
from tidegate.state.kernels.partition import places_by_group
from tidegate.storage.ids import CheckpointId

_TYPES = [pa.int8(), pa.uint16(), pa.int32(), pa.float16(), pa.float64(), pa.date32(), pa.timestamp("us")]
_SLOTS = st.lists(st.integers(0, 3 * PAGE_ROWS - 1), min_size=1, max_size=20)


def _slots(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, dtype=np.int32)


@settings(max_examples=60)
@given(st.sampled_from(_TYPES), _SLOTS, st.data())
def test_values_are_found_by_slot(data_type: pa.DataType, slots: list[int], data: st.DataObject) -> None:
    """What is put to a slot is there and nowhere else, nulls and values of every width, in whatever page."""
    column = PagedColumn(ValueSpec("x", data_type, 7))
    column.grow(3)
    distinct = list(dict.fromkeys(slots))
    numbers = data.draw(st.lists(st.none() | st.integers(0, 100), min_size=len(distinct), max_size=len(distinct)))
    raw = pa.from_numpy_dtype(column.dtype)
    values = pa.array([None if n is None else column.dtype.type(n) for n in numbers], raw).view(data_type)
    column.put(_slots(*distinct), values)
    assert values.equals(column.take(_slots(*distinct)))
    others = _slots(*sorted(set(range(0, 3 * PAGE_ROWS, 97)) - set(distinct)))
    assert np.all(column.raw(others) == 7)


def test_rows_of_a_mask_beside_a_store() -> None:
    """`scatter` and `gathered` reach the first and the last slot of a page and the first of the next one."""
    column = PagedColumn(ValueSpec("x", pa.int64(), 0))
    column.grow(2)
    edges = _slots(0, PAGE_ROWS - 1, PAGE_ROWS, 2 * PAGE_ROWS - 1)
    scatter(column.pages, edges, np.array([1, 2, 3, 4]))
    assert gathered(column.pages, edges, column.dtype).tolist() == [1, 2, 3, 4]
    assert int(column.raw(np.arange(2 * PAGE_ROWS)).sum()) == 10


@settings(max_examples=30)
@given(st.sampled_from(_TYPES), _SLOTS, st.booleans(), st.data())
def test_frozen_values_come_to_their_places(
    data_type: pa.DataType, slots: list[int], nulls: bool, data: st.DataObject
) -> None:
    """Frozen values of ascending slots, sorted by key group, are those that are taken in that order."""
    column = PagedColumn(ValueSpec("x", data_type, 7))
    column.grow(3)
    ascending = _slots(*sorted(set(slots)))
    values = pa.array(np.arange(len(ascending)).astype(column.dtype)).view(data_type)
    column.put(ascending, pc.if_else(pc.equal(pa.array(ascending % 3), 0), None, values) if nulls else values)
    groups = data.draw(st.lists(st.integers(4, 6), min_size=len(ascending), max_size=len(ascending)))
    places = places_by_group(np.array(groups, dtype=np.uint16))
    frozen = column.freeze()
    assert frozen.take(ascending, places).equals(frozen.take(ascending[places.rows()]))


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(_TYPES), st.integers(0, 2 * PAGE_ROWS), st.integers(1, PAGE_ROWS + 9), st.booleans())
def test_frozen_runs_come_to_their_places(data_type: pa.DataType, first: int, rows: int, nulls: bool) -> None:
    """The same of slots that follow one another, from anywhere in a page to anywhere in another one."""
    column, between = (PagedColumn(ValueSpec("x", data_type, 7)) for _ in range(2))
    for pages in range(1, 5):  # no two of its pages are neighbours in memory
        column.grow(pages)
        between.grow(pages)
    run = np.arange(first, first + rows, dtype=np.int32)
    values = pa.array((run % 101).astype(column.dtype)).view(data_type)
    column.put(run, pc.if_else(pc.equal(pa.array(run % 3), 0), None, values) if nulls else values)
    places = places_by_group((run * 7 % 5).astype(np.uint16))
    frozen = column.freeze()
    assert frozen.take(run, places).equals(frozen.take(run).take(pa.array(places.rows())))


@given(_SLOTS, st.sets(st.integers(0, 2)))
def test_touched_pages_are_the_pinned_ones(slots: list[int], pinned: set[int]) -> None:
    """Each page that is pinned and has one of the slots, once."""
    pins = np.array([int(page in pinned) for page in range(3)], dtype=np.int32)
    found = touched_pages(_slots(*slots), pins).tolist()
    assert sorted(found) == sorted({slot // PAGE_ROWS for slot in slots} & pinned)


@given(st.lists(st.integers(0, 300), max_size=30), st.sets(st.integers(0, 300)))
def test_revived_rows(slots: list[int], live: set[int]) -> None:
    """The rows whose slot had no flag are found, in order, and then every slot has one."""
    column = PagedColumn(ValueSpec("live", pa.uint8(), 0))
    column.grow(1)
    scatter(column.pages, _slots(*live), np.ones(len(live), dtype=np.uint8))
    distinct = list(dict.fromkeys(slots))
    rows = np.arange(len(distinct), dtype=np.int32)
    revived = np.empty(len(distinct), dtype=np.int32)
    found = revive(column.pages, _slots(*distinct), rows, revived)
    assert revived[:found].tolist() == [row for row, slot in enumerate(distinct) if slot not in live]
    assert np.all(column.raw(_slots(*distinct)) == 1)


def test_kernels_refuse_what_is_no_pages() -> None:
    """An array of values where addresses belong is a type error and no wild write."""
    with pytest.raises(numba.TypingError):
        scatter(np.zeros(4), _slots(0), np.zeros(1))  # type: ignore[arg-type]


def test_new_slots_hold_the_identity_and_no_value() -> None:
    """New pages hold the identity; once nulls are kept their slots are null until they are set."""
    column = PagedColumn(ValueSpec("x", pa.int64(), 7))
    column.grow(1)
    column.start_nulls()
    column.grow(2)
    assert column.take(_slots(3, PAGE_ROWS + 3)).to_pylist() == [7, None]
    column.reset(_slots(3))
    assert column.take(_slots(3)).to_pylist() == [None]
    assert column.raw(_slots(3, PAGE_ROWS + 3)).tolist() == [7, 7]


def _copied(column: PagedColumn, pins: Pins, slot: int) -> bool:
    """Write 1 more to a slot as an owner does; whether its page was copied."""
    touched = touched_pages(_slots(slot), pins.counts)
    column.copy_pages(touched)
    pins.replaced(touched)
    scatter(column.pages, _slots(slot), column.raw(_slots(slot)) + 1)
    return len(touched) > 0


def test_a_page_is_copied_once_for_each_snapshot() -> None:
    """A pinned page is copied at the first write; its copy is not, until the next snapshot pins it."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    column.grow(2)
    pins.grow(2)
    assert not _copied(column, pins, 0)
    first, first_pins = column.freeze(), pins.pin()
    assert _copied(column, pins, 0)
    assert not _copied(column, pins, 1)
    second, second_pins = column.freeze(), pins.pin()
    assert _copied(column, pins, 0)
    assert _copied(column, pins, PAGE_ROWS)
    assert [f.raw(_slots(0, 1, PAGE_ROWS)).tolist() for f in (first, second)] == [[1, 0, 0], [2, 1, 0]]
    assert column.raw(_slots(0, 1, PAGE_ROWS)).tolist() == [3, 1, 1]
    first_pins.release(2)
    second_pins.release(2)
    assert not pins.any()


def test_letting_go_of_an_old_page_is_not_letting_go_of_its_copy() -> None:
    """The first snapshot lets go after its page was copied and the copy pinned by a second one: that stays pinned."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    column.grow(1)
    pins.grow(1)
    first_pins = pins.pin()
    assert _copied(column, pins, 0)
    second, second_pins = column.freeze(), pins.pin()
    first_pins.release(1)
    first_pins.release(1)
    assert _copied(column, pins, 0)
    assert second.raw(_slots(0)).tolist() == [1]
    second_pins.release(1)
    assert not pins.any()


def test_pages_that_were_let_go_of_are_written_in_place() -> None:
    """Letting go of the first page alone leaves the second pinned; pages that came later are nobody's."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    column.grow(2)
    pins.grow(2)
    held = pins.pin()
    column.grow(40)
    pins.grow(40)
    held.release(1)
    assert [_copied(column, pins, page * PAGE_ROWS) for page in (0, 1, 2, 39)] == [False, True, False, False]
    held.release(2)
    assert not pins.any()


def test_pages_are_copied_together() -> None:
    """Values and validity of each: what was frozen stays, what is written shows, and no two have one version."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    column.grow(4)
    pins.grow(4)
    firsts = _slots(0, PAGE_ROWS, 2 * PAGE_ROWS, 3 * PAGE_ROWS)
    column.put(firsts, pa.array([1, None, 3, 4]))
    frozen, pinned = column.freeze(), pins.pin()

    former = column.copy_pages(_slots(1, 3))
    versions = pins.replaced(_slots(1, 3))
    column.put(firsts[[1, 3]], pa.array([20, None]))

    assert column.take(firsts).to_pylist() == [1, 20, 3, None]
    assert frozen.take(firsts).to_pylist() == [1, None, 3, 4]
    assert pins.counts[:4].tolist() == [1, 0, 1, 0]
    for page, of_page in zip((1, 3), former, strict=True):
        column.put_back(page, of_page)
    pins.put_back(_slots(1, 3), versions)
    assert column.take(firsts).to_pylist() == [1, None, 3, 4]
    assert pins.counts[:4].tolist() == [1, 1, 1, 1]
    column.copy_pages(_slots(3, 1))
    again = pins.replaced(_slots(3, 1))
    column.copy_pages(_slots(1, 3))
    assert len({*again.tolist(), *pins.replaced(_slots(1, 3)).tolist()}) == 3
    pinned.release(4)
    assert not pins.counts[[0, 2]].any()


@given(st.integers(0, 2 * PAGE_ROWS), st.integers(0, PAGE_ROWS), st.booleans())
def test_a_run_of_slots_is_cut_out(start: int, length: int, gap: bool) -> None:
    """Ascending slots have the same values whether they are a run or not."""
    column = PagedColumn(ValueSpec("x", pa.int64(), 0))
    column.extend(0, pa.array(np.arange(3 * PAGE_ROWS)))
    slots = np.arange(start, start + length, dtype=np.int32)
    slots = np.delete(slots, length // 2) if gap and length else slots

    assert np.array_equal(column.freeze().raw_ascending(slots), slots)


def test_a_page_that_was_put_back_belongs_to_the_snapshot_that_reads_it() -> None:
    """It is copied again before it changes, and written in place once the snapshot is done. That the page was replaced
    in between, and the copy pinned, changes nothing."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    column.grow(1)
    pins.grow(1)
    first, first_pins = column.freeze(), pins.pin()
    (former,), version = column.copy_pages(_slots(0)), pins.replaced(_slots(0))
    second_pins = pins.pin()
    scatter(column.pages, _slots(0), np.array([5]))

    column.put_back(0, former)
    pins.put_back(_slots(0), version)

    assert column.raw(_slots(0)).tolist() == [0]
    assert pins.counts[0] == 1
    second_pins.release(1)
    assert pins.counts[0] == 1
    assert _copied(column, pins, 0)
    assert first.raw(_slots(0)).tolist() == [0]
    column.put_back(0, former)
    pins.put_back(_slots(0), version)
    first_pins.release(1)
    assert not _copied(column, pins, 0)


def test_a_page_of_before_the_first_null_has_all_values() -> None:
    """It comes back as it was, though the column has nulls by now."""
    column = PagedColumn(ValueSpec("x", pa.int64(), 7))
    column.grow(1)
    (former,) = column.copy_pages(_slots(0))
    column.start_nulls()
    column.reset(_slots(3))

    column.put_back(0, former)

    assert column.take(_slots(3)).to_pylist() == [7]


def test_letting_go_on_other_threads() -> None:
    """Snapshots that let go on threads of their own, while the owner copies, leave no pin and no changed value."""
    column, pins = PagedColumn(ValueSpec("x", pa.int64(), 0)), Pins()
    pages = 64
    column.grow(pages)
    pins.grow(pages)
    slots = np.arange(0, pages * PAGE_ROWS, PAGE_ROWS, dtype=np.int32)
    wrong: list[list[int]] = []
    threads = []
    for turn in range(20):
        frozen, held = column.freeze(), pins.pin()

        def write(expected: int = turn, frozen: Any = frozen, held: Any = held) -> None:
            for page in range(pages):
                value = frozen.raw(slots[page : page + 1]).tolist()
                if value != [expected]:
                    wrong.append(value)
                held.release(page + 1)
                frozen.drop_pages(page, page + 1)

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        for slot in slots.tolist():
            _copied(column, pins, slot)
    for thread in threads:
        thread.join(timeout=240)
    assert wrong == []
    assert not pins.any()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 400), max_size=5), st.integers(0, 8), st.booleans()), min_size=1, max_size=40
    )
)
def test_dirty_slots_since_any_base(steps: list[tuple[set[int], int, bool]]) -> None:
    """What has changed since a base is in the bitmaps of every later snapshot on it, for bases that only go up.

    With few snapshots on one base nothing else is.
    """
    dirty = DirtySlots()
    dirty.grow(401)
    changed: dict[int, set[int]] = {}
    base = 0
    for number, (slots, back, incremental) in enumerate(steps, start=1):
        dirty.mark(_slots(*slots))
        changed[number] = slots
        base = max(base, number - 1 - back) if incremental else base
        bitmaps = dirty.close(CheckpointId(number), CheckpointId(base) if incremental else None)
        told = set(np.flatnonzero(flags(bitmaps, 0, 401)).tolist())
        since = {slot for n in range(base + 1, number + 1) for slot in changed[n]}
        assert since <= told
        assert len(bitmaps) <= 16
        if incremental and number - base < 16:
            assert since == told
    mark_slots(np.zeros(7, dtype=np.uint64), _slots(400))


def test_marks_of_before_growing_stay() -> None:
    """A bitmap that grows keeps what is marked, in the first slots and in the last."""
    dirty = DirtySlots()
    for slots in (10, 1000, 100_000):
        dirty.grow(slots)
        dirty.mark(_slots(slots - 1))
    marked = dirty.marked(100_000)
    assert np.flatnonzero(marked).tolist() == [9, 999, 99_999]
    assert pages_for(0) == 0
