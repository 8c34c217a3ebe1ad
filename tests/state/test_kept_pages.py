"""Pages that the undo log keeps instead of noting each row: which, and that all goes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_model import COLUMNS, KEYS, MAX_PARALLELISM, REMOVE, Table, key_batch, space_of, tables

from tidegate.state.columnar import paged_state
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

_ENOUGH = 1 << 30


@pytest.fixture(autouse=True)
def pins_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot pins its pages however few rows it has."""
    monkeypatch.setattr(paged_state, "GATHERED_ROWS_MAX", 0)


def _table(undo_bytes_max: int) -> tuple[Table, Any]:
    table = Table(
        lambda incremental: ColumnarBackend(MAX_PARALLELISM, tuple(KEYS.names), incremental, undo_bytes_max), True
    )
    return table, space_of(table.backend).undo


def _only_notes(undo: Any) -> Any:
    """What is noted since the newest freeze, of the only table."""
    (noted,) = undo._notes()
    return noted


def test_pages_that_were_copied_are_put_back() -> None:
    """Of 20,000 keys all change while a snapshot reads them: nothing is noted but five pages. What a snapshot that is
    still being written then reads does not change, neither by going back nor by what comes after."""
    table, undo = _table(_ENOUGH)
    table.batch([(key, 1.0) for key in range(20_000)])
    frozen = table.backend.freeze(Cut(CheckpointId(1)))
    table.batch([(key, 2.0) for key in range(20_000)])
    noted = _only_notes(undo)

    assert (sorted(noted.kept), noted.noted) == ([0, 1, 2, 3, 4], [])
    table.backend.go_back(CheckpointId(1))
    again = table.backend.table("t", COLUMNS)
    again.upsert(key_batch(range(20_000)))
    accumulate.count(again.column("n").pages, np.arange(20_000, dtype=np.int32), NO_MASK)
    assert {row["n"] for stored in tables(frozen) for row in stored.rows.to_pylist()} == {1}
    assert set(again.column("n").take(np.arange(20_000)).to_pylist()) == {2}


@pytest.mark.parametrize("exchanged", [False, True])
def test_pages_that_change_much_are_kept_from_then_on(exchanged: bool) -> None:
    """A quarter of their rows is noted one by one and no more, and what was noted before goes back as well; also where
    memory gets short, and a page is exchanged for the rest of its notes."""
    table, undo = _table(_ENOUGH)
    table.batch([(key, 1.0) for key in range(2 * PAGE_ROWS)])
    tables(table.backend.freeze(Cut(CheckpointId(1))))
    for start in range(0, PAGE_ROWS // 3, 100):
        table.batch([(key, 2.0) for key in range(start, start + 100)])
    noted = _only_notes(undo)
    assert list(noted.kept) == [0]
    assert PAGE_ROWS // 5 < sum(len(rows.slots) for rows in noted.noted) <= PAGE_ROWS // 4
    assert not exchanged or noted.shrink(shared_too=False)
    table.backend.go_back(CheckpointId(1))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(np.arange(2 * PAGE_ROWS)).to_pylist()) == {1}


@pytest.mark.parametrize("changed", [range(100, 2 * PAGE_ROWS), range(0, 2 * PAGE_ROWS, 2)], ids=["most", "half"])
def test_where_much_has_changed_everywhere_the_rest_goes_back_too(changed: range) -> None:
    """Nearly all, or more than half of each page: the rest is not marked any more. It goes back also where it has
    changed later, and slots have got other numbers."""
    (table, undo), keys = _table(_ENOUGH), range(2 * PAGE_ROWS)
    table.batch([(key, 1.0) for key in keys])
    table.backend.freeze(Cut(CheckpointId(1)))
    table.batch([(key, 2.0) for key in {*changed, 1, PAGE_ROWS + 1}])
    noted = _only_notes(undo)
    assert noted.slots().tolist() == [*keys]
    for value in (2.0, REMOVE):
        table.batch([(key, value) for key in range(5 * PAGE_ROWS)])
    assert noted.kept == {}
    table.backend.go_back(CheckpointId(1))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(again.upsert(key_batch(keys)).slots).to_pylist()) == {1}


@pytest.mark.parametrize(("limit", "removed"), [(_ENOUGH, 0), (1_000_000, 0), (_ENOUGH, 9)])
def test_slots_are_marked_only_where_that_may_help(limit: int, removed: int) -> None:
    """All pages are kept. With plenty of memory no page will be exchanged, so that all slots count as changed at once;
    but not where some had no row: these slots may be given up."""
    table, undo = _table(limit)
    table.batch([(key, 1.0) for key in range(20_000)])
    table.batch([(key, REMOVE) for key in range(removed)])
    frozen = table.backend.freeze(Cut(CheckpointId(1)))
    table.batch([(key, 2.0) for key in range(removed, 20_000, 100)])
    noted = _only_notes(undo)
    marked = limit == _ENOUGH and not removed
    assert len(noted.slots()) == (20_000 if marked else 200)
    assert sum(stored.rows.num_rows for stored in tables(frozen)) == 20_000 - removed
    table.backend.go_back(CheckpointId(1))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(np.arange(removed, 20_000)).to_pylist()) == {1}


def test_pages_are_exchanged_for_slots_where_memory_is_short() -> None:
    """Two pages fit into the limit, and the slots that have changed in the three others. While the snapshot holds all
    pages, to keep them takes nothing, and none is exchanged."""
    table, undo = _table(200_000)
    table.batch([(key, 1.0) for key in range(20_000)])
    frozen = table.backend.freeze(Cut(CheckpointId(1)))
    changed = range(0, 20_000, 100)
    table.batch([(key, 2.0) for key in changed])
    noted = _only_notes(undo)
    assert (len(noted.kept), noted.noted, undo.size_bytes > 200_000) == (5, [], True)
    before = tables(frozen)
    table.batch([(0, 2.0)])

    assert (len(noted.kept), undo.size_bytes <= 200_000) == (2, True)
    assert sorted(noted.slots().tolist()) == list(changed)
    assert sum(len(rows.slots) for rows in noted.noted) == sum(key // PAGE_ROWS not in noted.kept for key in changed)
    table.backend.go_back(CheckpointId(1))
    again = table.backend.table("t", COLUMNS)
    assert set(again.column("n").take(np.arange(20_000)).to_pylist()) == {1}
    assert sum(stored.rows.num_rows for stored in before) == 20_000


def test_what_a_snapshot_holds_does_not_count() -> None:
    """A state larger than the limit changes through and through while a snapshot of it waits to be written: its pages
    are kept, no row is noted beside them, and one can go back. What has been written counts, and is dropped."""
    table, undo = _table(60_000)
    table.batch([(key, 1.0) for key in range(20_000)])
    frozen = table.backend.freeze(Cut(CheckpointId(1)))
    for value in (2.0, 3.0):
        table.batch([(key, value) for key in range(20_000)])
    noted = _only_notes(undo)

    assert (len(noted.kept), noted.noted) == (5, [])
    assert undo.size_bytes > 60_000 > undo.own_bytes
    assert table.backend.kept(CheckpointId(1)) is not None
    rows = sum(stored.rows.num_rows for stored in tables(frozen))
    table.batch([(0, 4.0)])
    assert (rows, undo.size_bytes, table.backend.kept(CheckpointId(1))) == (20_000, 0, None)
