"""What pages take of memory while a snapshot is written and all rows change."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from tidegate.state.columnar import key_space, paged_state, undo_log
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.columnar.key_space import BLOCK_ROWS
from tidegate.state.common import pages
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.page_memory import SLAB_BYTES, PageMemory
from tidegate.state.kernels import accumulate
from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.state.kernels.partition import Places
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

_COLUMNS = [ValueSpec(f"n{number}", pa.int64(), 0) for number in range(16)]
_ROWS = 8 * BLOCK_ROWS
_STATE_BYTES = _ROWS * (8 * len(_COLUMNS) + 1 + 2)
"""Of columns, of the flags that tell which slots have a row, and of key groups."""
_SIZES = 4
"""Of pages, and of buffers for a block that is encoded: each has a slab that is not full."""


class _Counts:
    """A table of so many keys, all of which change with each `count`."""

    def __init__(self, undo_bytes_max: int = 1 << 30) -> None:
        self.backend = ColumnarBackend(16, ("k",), True, undo_bytes_max)
        self.backend.fix_keys(pa.schema({"k": pa.int64()}))
        self._table = self.backend.table("t", _COLUMNS)
        self.counted = 0

    def count(self) -> None:
        """Add one to all columns of all rows."""
        self.counted += 1
        for first in range(0, _ROWS, BLOCK_ROWS):
            self.count_keys(np.arange(first, first + BLOCK_ROWS))

    def count_keys(self, keys: NDArray[np.int64]) -> None:
        """Add one to all columns of some rows."""
        slots = self._table.upsert(pa.record_batch({"k": keys})).slots
        for spec in _COLUMNS:
            accumulate.count(self._table.column(spec.name).pages, slots, NO_MASK)
        self._table.done()


@pytest.mark.slow
@pytest.mark.parametrize("undo_bytes_max", [_STATE_BYTES, 2 * _STATE_BYTES])
def test_pages_are_held_twice_at_most_and_an_eighth(undo_bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows change before a snapshot has written anything, and while it is written. Checkpoint after checkpoint
    pages take no more than that, or three times as much where twice the state may be kept to go back. And what is
    written is what there was."""
    memory = PageMemory()
    for module in (pages, undo_log, key_space):
        monkeypatch.setattr(module, "PAGE_MEMORY", memory)
    counts = _Counts(undo_bytes_max)
    bytes_max = _STATE_BYTES + max(_STATE_BYTES, undo_bytes_max) * 9 // 8 + _SIZES * SLAB_BYTES
    counts.count()
    assert memory.bytes >= _STATE_BYTES - SLAB_BYTES
    for number in range(1, 4):
        (frozen, *_) = counts.backend.freeze(Cut(CheckpointId(number)))
        expected = counts.counted
        counts.count()
        rows = 0
        for chunk in frozen.chunks():
            assert all((chunk.rows.column(spec.name).to_numpy() == expected).all() for spec in _COLUMNS)
            rows += chunk.rows.num_rows
            if rows >= _ROWS // 2 and counts.counted == expected + 1:
                counts.count()
        assert rows == _ROWS
        assert memory.bytes <= bytes_max
        counts.backend.completed(CheckpointId(number))
        counts.count()


@pytest.mark.slow
@pytest.mark.parametrize("changed", [1, 3])
def test_no_block_of_an_increment_has_more_rows_than_one_of_all_rows(
    changed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many slots have changed, so many rows are encoded together, and a page is held until its last one is."""
    blocks: list[int] = []
    places_by_group = paged_state.places_by_group

    def counted(groups: NDArray[np.uint16]) -> Places:
        blocks.append(len(groups))
        return places_by_group(groups)

    monkeypatch.setattr(paged_state, "places_by_group", counted)
    for module in (key_space, paged_state):
        monkeypatch.setattr(module, "BLOCK_ROWS", 2 * PAGE_ROWS)
    counts = _Counts()
    counts.count()
    for frozen in counts.backend.freeze(Cut(CheckpointId(1))):
        list(frozen.chunks())
    keys = np.arange(_ROWS)[np.arange(_ROWS) % 4 < changed]
    counts.count_keys(keys)
    blocks.clear()
    put, _ = counts.backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))
    written = [chunk.rows for chunk in put.chunks()]
    assert sorted(np.concatenate([rows.column("k").to_numpy() for rows in written]).tolist()) == keys.tolist()
    assert all((rows.column("n3").to_numpy() == 2).all() for rows in written)
    assert len(keys) == sum(blocks)
    assert max(blocks) == 2 * PAGE_ROWS
