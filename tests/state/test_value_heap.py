"""Values of varying width that a column keeps: numbers mean the same for ever, and garbage is bounded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from backend_model import KEYS, columnar_backend, key_batch
from hypothesis import given
from hypothesis import strategies as st

from tidegate.state.columnar import key_space, paged_state
from tidegate.state.common import table_columns
from tidegate.state.common.backend import ValueSpec
from tidegate.state.common.table_columns import ValueHeap, values_of
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

_VALUES = st.lists(st.none() | st.lists(st.none() | st.text(max_size=3), max_size=3), max_size=6)
_TYPE = pa.list_(pa.string())


@given(steps=st.lists(st.tuples(_VALUES, st.sets(st.integers(0, 40), max_size=20) | st.none()), max_size=12))
def test_numbers_mean_the_same_for_ever(steps: list[tuple[list[list[str | None] | None], set[int] | None]]) -> None:
    """Values are found under their numbers in any order, also those that others were let go of beside them, and a
    reader that had the chunks before goes on with them. Numbers of what is gone may be told of again."""
    heap = ValueHeap(_TYPE)
    alive: dict[int, list[str | None] | None] = {0: None}
    before: list[tuple[table_columns.HeapChunks, dict[int, list[str | None] | None]]] = []
    for values, kept in steps:
        numbers = heap.append(pa.array([None, *values], _TYPE).slice(1))
        alive |= dict(zip(numbers.tolist(), values, strict=True))
        before.append((heap.chunks, dict(alive)))
        if kept is not None:
            heap.collect([np.array(sorted(kept)), np.array([1, 2])])
            alive = {number: value for number, value in alive.items() if number in kept | {0, 1, 2}}
    for chunks, found in [*before, (heap.chunks, alive)]:
        asked = np.array([*found, *reversed(found)], dtype=np.int64)
        assert values_of(chunks, asked, _TYPE).to_pylist() == [found[number] for number in asked.tolist()]


def test_garbage_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the values of some keys are replaced, the heap is never larger than twice what is alive, what came
    at once, and the least that is looked at."""
    monkeypatch.setattr(table_columns, "GARBAGE_BYTES_MIN", 1000)
    heap, sizes = ValueHeap(pa.string()), []
    for turn in range(200):
        numbers = heap.append(pa.array([f"{turn} {key:04}" for key in range(50)]))
        if heap.is_due:
            heap.collect([numbers])
        sizes.append(heap.size_bytes)
    alive = ValueHeap(pa.string())
    alive.append(pa.array(["199 0000"] * 50))
    assert max(sizes) <= 3 * alive.size_bytes + 1000
    assert len(heap.chunks) <= 4


def test_a_value_keeps_no_batch_alive() -> None:
    """One value out of a large batch takes its own memory alone."""
    before = pa.total_allocated_bytes()
    heap = ValueHeap(pa.string())
    heap.append(pa.array(["x" * 1000] * 10_000).slice(5, 1))
    assert pa.total_allocated_bytes() - before < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("canonical", [False, True])
def test_large_rows_are_written_in_small_blocks(monkeypatch: pytest.MonkeyPatch, canonical: bool) -> None:
    """As many at a time as a limit of bytes allows, but pages at least; and none is gathered at a freeze."""
    monkeypatch.setattr(key_space, "BLOCK_BYTES", 10 * PAGE_ROWS * 100)
    monkeypatch.setattr(paged_state, "CHUNK_ROWS_MIN", 1 << 30)
    monkeypatch.setattr(paged_state, "GATHERED_BYTES_MAX", 100_000)
    groups = {}
    for text_bytes in (1, 1_000):
        backend = columnar_backend(True)
        table = backend.table("t", [ValueSpec("text", pa.large_string())])
        backend.fix_keys(KEYS)
        keys = range(3 * PAGE_ROWS)
        texts = pa.array(["x" * text_bytes] * len(keys), pa.large_string())
        table.column("text").put(table.upsert(key_batch(keys)).slots, texts)
        table.done()
        (state,) = backend.freeze(Cut(CheckpointId(1), canonical=canonical))
        chunks = list(state.chunks())
        assert sum(chunk.rows.num_rows for chunk in chunks) == len(keys)
        groups[text_bytes] = len(chunks)
        if canonical:
            continue
        table.column("text").put(table.upsert(key_batch(range(500))).slots, texts.slice(0, 500))
        table.done()
        changed = backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))[0]
        assert isinstance(changed, paged_state.GatheredSlots) == (text_bytes == 1)
        assert sum(chunk.rows.num_rows for chunk in changed.chunks()) == 500
    assert groups[1_000] > groups[1]
