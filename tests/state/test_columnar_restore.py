"""The backend in memory takes a stored base in by appending it: over many pages it is what it was, and goes on."""

from __future__ import annotations

import pytest
from backend_model import ObjectState, Snapshots, Table, columnar_backend

from tidegate.state.columnar import key_space
from tidegate.state.kernels.paged import PAGE_ROWS

_PRELOADED = PAGE_ROWS + 900


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("nulls_from", [None, 0, PAGE_ROWS // 2])
@pytest.mark.parametrize("piece_bytes_max", [1 << 30, 1])
def test_a_restored_table_is_the_one_that_was_stored(
    nulls_from: int | None, piece_bytes_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From chunks that end anywhere in a page, with nulls from the first chunk on, from a later one, or none; then keys
    are found again, new ones get slots of their own, and an increment holds what has changed since."""
    monkeypatch.setattr(key_space, "PIECE_BYTES", piece_bytes_max)
    table = Table(columnar_backend, True)
    table.batch(
        [(key, None if nulls_from is not None and key >= nulls_from and key % 2 else 1.0) for key in range(_PRELOADED)]
    )
    snapshots = Snapshots(table)
    snapshots.freeze(False)
    snapshots.complete_all()
    assert snapshots.completed is not None
    _, stored = snapshots.completed
    assert len(stored) > 10

    again = Table(columnar_backend, True, stored)

    again.check()
    snapshots = Snapshots(again, snapshots.completed)
    again.batch([(key, 2.0) for key in range(_PRELOADED - 3, _PRELOADED + 3)])
    snapshots.freeze(True)
    snapshots.complete_all()
    again.check()
    assert snapshots.completed is not None
    assert sum(table.rows.num_rows for table in snapshots.completed[1] if table.layer) == 6


@pytest.mark.usefixtures("small_blocks")
def test_restored_cells_are_those_that_were_stored() -> None:
    """The same for values, lists and maps, of which only the first is appended: the others ask for keys."""
    cells = ObjectState(columnar_backend, True)
    cells.batch([(key, what, 1) for key in range(_PRELOADED) for what in ("put", "extend", "set")[: 1 + key % 3]])
    snapshots = Snapshots(cells)
    snapshots.freeze(False)
    snapshots.complete_all()
    assert snapshots.completed is not None

    again = ObjectState(columnar_backend, True, snapshots.completed[1])

    again.check()
    again.batch([(key, "remove", 1) for key in range(0, _PRELOADED, 7)])
    snapshots = Snapshots(again, snapshots.completed)
    snapshots.freeze(True)
    snapshots.complete_all()
    again.check()
