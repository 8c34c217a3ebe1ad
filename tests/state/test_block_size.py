"""Blocks of rows that are put together: of bounded memory, whatever the rows are made of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tidegate.state.columnar import key_space, paged_state
from tidegate.state.columnar.columnar_backend import ColumnarBackend
from tidegate.state.columnar.key_space import BLOCK_ROWS, ROWS_AT_FIRST, BlockSize, FrozenKeys, KeyColumns
from tidegate.state.columnar.paged_state import FrozenSlots, GatheredSlots
from tidegate.state.columnar.row_table import ColumnarRows
from tidegate.state.common.backend import StateDescriptor
from tidegate.state.kernels.paged import PAGE_ROWS
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateChunk

_KEYS = pa.schema({"k": pa.int64()})
_BLOCK_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_space, "BLOCK_BYTES", _BLOCK_BYTES)
    monkeypatch.setattr(paged_state, "GATHERED_BYTES_MAX", _BLOCK_BYTES // 16)


def _append(rows: ColumnarRows, texts: list[str]) -> None:
    first = rows.rows
    keys = pa.record_batch({"k": np.arange(first, first + len(texts))})
    rows.append(keys, pa.record_batch({"text": texts}))
    rows.done()


def _backend() -> tuple[ColumnarBackend, ColumnarRows]:
    backend = ColumnarBackend(16, ("k",), True)
    rows = backend.rows("r", pa.schema({"text": pa.string()}))
    backend.fix_keys(_KEYS)
    return backend, rows


def _texts(chunks: list[StateChunk]) -> dict[int, str]:
    return {row["k"]: row["text"] for chunk in chunks for row in chunk.rows.to_pylist()}


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each batch that is taken or placed out of key columns."""
    taken: list[int] = []

    def counted(function: Callable[..., pa.RecordBatch]) -> Callable[..., pa.RecordBatch]:
        def call(*arguments: object) -> pa.RecordBatch:
            found = function(*arguments)
            taken.append(found.nbytes)
            return found

        return call

    for name in ("take", "placed"):
        monkeypatch.setattr(FrozenKeys, name, counted(getattr(FrozenKeys, name)))
    return taken


@pytest.mark.parametrize("canonical", [False, True])
def test_rows_of_a_table_are_written_in_blocks_of_bounded_bytes(canonical: bool, blocks: list[int]) -> None:
    """Large rows among small ones, also where a page of them is more than a block."""
    backend, rows = _backend()
    wanted = [["small"] * 3_000, ["large" * 200] * 6_000, ["small"] * 3_000]
    for texts in wanted:
        _append(rows, texts)
    (state,) = backend.freeze(Cut(CheckpointId(1), canonical=canonical))
    chunks = list(state.chunks())
    assert _texts(chunks) == dict(enumerate(text for texts in wanted for text in texts))
    # A canonical savepoint has whole key groups together.
    assert max(blocks) <= 2 * _BLOCK_BYTES
    assert sum(blocks) // len(blocks) > _BLOCK_BYTES // 5


def test_rows_get_new_slots_in_blocks_of_bounded_bytes(blocks: list[int]) -> None:
    """When those of removed rows are given up."""
    backend, rows = _backend()
    for start in range(3):
        _append(rows, [str(start) + "large" * 100] * 3_000)
    rows.remove(np.arange(2_000, 8_000, dtype=np.int32))
    blocks.clear()
    rows.done()
    assert max(blocks) <= _BLOCK_BYTES
    assert sum(blocks) > 3_000 * 500
    (state,) = backend.freeze(Cut(CheckpointId(1)))
    found = _texts(list(state.chunks()))
    assert found == {key: f"{key // 3_000}" + "large" * 100 for key in (*range(2_000), *range(8_000, 9_000))}


@pytest.mark.parametrize(("text", "gathered"), [("x", True), ("x" * 1_000, False)])
def test_large_rows_are_not_gathered_at_a_freeze(text: str, gathered: bool) -> None:
    """A task stands still meanwhile: what lies in key columns counts as well."""
    backend, rows = _backend()
    _append(rows, ["first"])
    list(backend.freeze(Cut(CheckpointId(1)))[0].chunks())
    _append(rows, [text] * 500)
    put, _ = backend.freeze(Cut(CheckpointId(2), CheckpointId(1)))
    assert isinstance(put, GatheredSlots if gathered else FrozenSlots)
    assert len(_texts(list(put.chunks()))) == 500


@pytest.mark.parametrize("canonical", [False, True])
def test_objects_are_measured_while_they_are_written(canonical: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how large they are: the first block has few rows, others have as many as the one before says."""
    sizes: list[int] = []
    learn = BlockSize.learn

    def counted(size: BlockSize, values: list[pa.Array]) -> None:
        sizes.append(values[0].nbytes)
        learn(size, values)

    monkeypatch.setattr(BlockSize, "learn", counted)
    backend = ColumnarBackend(1_000, ("k",), False)
    cells = backend.values(StateDescriptor("v", pa.string()))
    backend.fix_keys(_KEYS)
    keys = 5 * PAGE_ROWS
    for slot in backend.enter(pa.record_batch({"k": range(keys)})):
        cells.put(slot, "x" * 1_000)
    backend.leave()
    (state,) = backend.freeze(Cut(CheckpointId(1), canonical=canonical))
    assert sum(chunk.rows.num_rows for chunk in state.chunks()) == keys
    assert sizes[0] < 1_100 * ROWS_AT_FIRST
    assert max(sizes[1:]) < _BLOCK_BYTES * 11 // 10
    assert sum(sizes[1:]) // len(sizes[1:]) > _BLOCK_BYTES // 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9_000), st.sampled_from([0, 3, 700, 5_000])), min_size=1, max_size=6),
    st.sampled_from([None, 0, 8, 900]),
)
def test_blocks_are_full_and_hold_no_more_than_they_may(chunks: list[tuple[int, int]], value_bytes: int | None) -> None:
    """Of any slots in any order, and all of them are in one."""
    keys = KeyColumns(pa.schema({"s": pa.large_string()}))
    sizes: list[int] = []
    for rows, text_bytes in chunks:
        keys.append(pa.record_batch({"s": pa.array(["x" * text_bytes] * rows, pa.large_string())}))
        sizes += [text_bytes] * rows
    frozen = keys.freeze()
    slots: NDArray[np.int32] = np.random.default_rng(len(sizes)).permutation(len(sizes)).astype(np.int32)
    size, left = BlockSize(frozen, value_bytes), slots
    most = ROWS_AT_FIRST if value_bytes is None else BLOCK_ROWS
    while len(left):
        rows = size.rows(left)
        assert 1 <= rows <= most
        block, left = left[:rows], left[rows:]
        row_bytes = size.bytes_of(block)
        assert len(block) == 1 or int(row_bytes.sum()) <= _BLOCK_BYTES
        if len(left) > 0 and rows < min(most, PAGE_ROWS):
            assert int(row_bytes.sum()) + int(size.bytes_of(left[:1])[0]) > _BLOCK_BYTES
