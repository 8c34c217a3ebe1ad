"""Rows that wait on the disk to be taken in are all there, in their order, and memory holds few of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.errors import StorageError
from tidegate.storage.state.handover import Handover, Spool, SpooledTables, taken
from tidegate.storage.state.snapshot import StateTable

Drawn = tuple[str, int, bool, list[int], bool]


def table(state: str, layer: int, removed: bool, values: list[int], wide: bool) -> StateTable:
    """A table; a wide one has another type."""
    rows = pa.record_batch({"k": pa.array(values, pa.int64() if wide else pa.int32())})
    return StateTable(state, StateKind.KEYED, rows, removed, layer)


TABLES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.booleans(), st.lists(st.integers(0, 9)), st.booleans()),
    max_size=12,
)


@settings(max_examples=50)
@given(drawn=TABLES, memory_bytes=st.integers(0, 100))
def test_what_is_kept_comes_back_in_its_order(drawn: Sequence[Drawn], memory_bytes: int) -> None:
    """Tables of any states, layers and schemas; what comes first stays in memory, up to the bound, the rest waits."""
    tables = [table(*of) for of in drawn]
    with tempfile.TemporaryDirectory() as folder:
        kept = Spool(f"{folder}/spool", memory_bytes).keep(iter(tables))
        held = [each for each in kept if isinstance(each, StateTable)]
        assert sum(each.rows.nbytes for each in held) <= memory_bytes
        assert held == tables[: len(held)]
        handover = Handover(kept)
        shown = [(each.state, each.layer, each.removed, each.rows.schema) for each in handover]
        assert set(shown) == {(each.state, each.layer, each.removed, each.rows.schema) for each in tables}

        assert list(taken(handover)) == tables

        assert not [file for file in Path(folder).rglob("*") if file.is_file()]


def test_state_of_subtasks_does_not_wait(tmp_path: Path) -> None:
    """It lives in memory in every backend, and is looked at before it is taken in."""
    whole = StateTable("l", StateKind.LIST, pa.record_batch({"l": list(range(100))}))
    keyed = table("a", 0, False, [1], True)

    first, second = Spool(str(tmp_path / "spool"), 0).keep([whole, keyed])

    assert first is whole
    assert isinstance(second, SpooledTables)


def test_a_restore_that_is_tried_again_writes_anew(tmp_path: Path) -> None:
    """What the one before has left in the folder does not count."""
    for values in ([1, 2], [3]):
        kept = Spool(str(tmp_path / "spool"), 0).keep([table("a", 0, False, values, True)])
    assert [each.rows.column("k").to_pylist() for each in taken(Handover(kept))] == [[3]]


def test_a_folder_that_cannot_be_used_is_an_error_of_the_storage(tmp_path: Path) -> None:
    """It says what to do; so a restore waits for room on the disk."""
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageError, match="Free some space there"):
        Spool(str(tmp_path / "file"), 0).keep([table("a", 0, False, [1], True)])
