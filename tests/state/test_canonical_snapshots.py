"""A canonical snapshot is the same bytes, whichever backend held the state and whatever became of it before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from backend_model import (
    BACKENDS,
    KEYS,
    MAX_PARALLELISM,
    WITH_INCREMENTS,
    MakeBackend,
    ObjectState,
    Table,
    composed,
    key_batch,
    state_tables,
    tables,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from row_model import RowsOfKeys
from varying_model import VaryingTable

from tidegate.state.columnar.paged_state import sortable_keys
from tidegate.state.common.backend import KeyedBackend, StateDescriptor
from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import CorruptionError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.canonical import FrozenCanonical
from tidegate.storage.state.snapshot import Cut, FrozenState, StateTable
from tidegate.storage.state.state_file import write_state

SAVEPOINT = Cut(CheckpointId(5), canonical=True)
CHANGES = st.lists(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.sampled_from(["put", "remove", "extend", "replace", "clear", "set", "set", "discard", "empty"]),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=12,
    ),
    min_size=1,
    max_size=6,
)


def _file(frozen: Sequence[FrozenState]) -> bytes:
    """The bytes of a state file of these states."""
    states = [(OperatorUid("op"), FrozenCanonical(state)) for state in sorted(frozen, key=lambda state: state.state)]
    handle = write_state(open_store("memory://none"), "none", states, inline_bytes_max=1 << 30)
    assert handle is None or handle.inline is not None
    return b"" if handle is None else bytes(handle.inline or b"")


def _changed(make: MakeBackend, changes: list[list[tuple[int, str, int]]], restored: bool) -> ObjectState:
    cells = ObjectState(make, True)
    for number, batch in enumerate(changes):
        if restored and number == len(changes) // 2:
            cells = ObjectState(make, True, tables(cells.backend.freeze(Cut(CheckpointId(1), canonical=True))))
        cells.batch(batch)
    return cells


@given(changes=CHANGES, restored=st.booleans())
@settings(max_examples=6)
def test_the_bytes_are_the_same_on_every_backend(changes: list[list[tuple[int, str, int]]], restored: bool) -> None:
    """Values, lists and maps whose entries came in any order; one backend was restored on the way."""
    files = {}
    for number, (name, make) in enumerate(BACKENDS.items()):
        files[name] = _file(_changed(make, changes, restored and number == 0).backend.freeze(SAVEPOINT))

    assert len(set(files.values())) == 1


def test_rows_are_sorted_by_key_group_and_key() -> None:
    """On every backend, with more rows than one chunk has; keys of each group by the bytes of the key."""
    for make in BACKENDS.values():
        cells = ObjectState(make, True)
        cells.batch([(number, "put", number % 9) for number in reversed(range(400))])
        states = {state.state: state for state in cells.backend.freeze(SAVEPOINT)}
        (table,) = state_tables(FrozenCanonical(states["v"]))
        keys = table.rows.select(KEYS.names)
        groups = (hash_columns(keys, KEYS.names) % MAX_PARALLELISM).astype("u2")
        order = sortable_keys(keys, groups).to_pylist()
        assert order == sorted(order)
        assert keys.num_rows == 400


@pytest.mark.parametrize("kind", [Table, VaryingTable])
def test_vectorised_state_has_the_same_bytes_too(kind: type[Table]) -> None:
    """Rows of aggregates: plain numbers, and texts and lists."""
    files = set()
    for make in BACKENDS.values():
        table = kind(make, True)
        table.batch([((key * 7) % 500, float(key)) for key in range(500)])
        table.batch([(key, None) for key in range(300, 600, 3)])
        files.add(_file(table.backend.freeze(SAVEPOINT)))
    assert len(files) == 1


def test_row_tables_have_the_same_bytes_too() -> None:
    """Rows of any columns, those of a key in the order in which they came."""
    files = set()
    for make in BACKENDS.values():
        rows = RowsOfKeys(make, True)
        rows.batch([((key * 7) % 50, "append", key % 6) for key in range(100)])
        rows.batch([(key, "remove", key) for key in range(0, 50, 3)] + [(key, "append", 5) for key in range(9)])
        files.add(_file(rows.backend.freeze(SAVEPOINT)))
    assert len(files) == 1


def test_map_keys_that_are_floats_come_in_the_same_order() -> None:
    """One zero, and numbers ascend, also below it."""
    files = set()
    for make in BACKENDS.values():
        backend = make(False)
        cells = backend.maps(StateDescriptor("m", pa.map_(pa.float64(), pa.int64())))
        backend.fix_keys(KEYS)
        (ref,) = backend.enter(key_batch([1]))
        for number, key in enumerate((2.5, -0.0, -7.0, 1e300, -1e-9)):
            cells.put(ref, key, number)
        backend.leave()
        (state,) = backend.freeze(SAVEPOINT)
        (found,) = state_tables(FrozenCanonical(state))
        assert [key for key, _ in found.rows.to_pylist()[0]["m"]] == [-7.0, -1e-9, 0.0, 2.5, 1e300]
        files.add(_file(backend.freeze(SAVEPOINT)))
    assert len(files) == 1


def test_what_is_frozen_does_not_change_and_is_let_go() -> None:
    """Rows that are changed and keys that come while a canonical snapshot is written are not in it."""
    for make in BACKENDS.values():
        cells = ObjectState(make, True)
        cells.batch([(number, what, 1) for number in range(50) for what in ("put", "extend", "set")])
        expected = cells.expected()
        frozen = cells.backend.freeze(SAVEPOINT)
        cells.batch([(number, what, 2) for number in range(30, 70) for what in ("put", "extend", "set")])
        assert composed(tables(frozen)) == expected
        cells.check()


@pytest.mark.parametrize("name", WITH_INCREMENTS)
def test_nothing_is_built_on_a_canonical_snapshot(name: str) -> None:
    """What has changed since the snapshot before it is in the increment after it, under that one's number."""
    cells = ObjectState(BACKENDS[name], True)
    cells.batch([(1, "put", 1), (2, "put", 1)])
    base = tables(cells.backend.freeze(Cut(CheckpointId(3))))
    cells.batch([(2, "put", 2), (1, "remove", 0)])
    # A number of another kind, as the savepoint of a job with a changelog has it.
    cells.backend.freeze(Cut(CheckpointId(1_000), canonical=True))
    cells.batch([(3, "put", 3)])

    increment = tables(cells.backend.freeze(Cut(CheckpointId(4), CheckpointId(3))), layer=1)

    assert composed([*base, *increment]) == cells.expected()


@pytest.mark.parametrize("numbers", [([1, 2, 3], [3, 4]), ([3, 4], [1, 2], [2, 5]), ([1, 2], [2, 1]), ([4, 4],)])
def test_a_key_that_comes_twice_is_found_however_rows_are_sorted(numbers: Sequence[Sequence[int]]) -> None:
    """Rows in ascending order are not looked up one by one; a key that comes again breaks the order."""
    for make in BACKENDS.values():
        sources = [ObjectState(make, False) for _ in numbers]
        cells = ObjectState(make, False)
        parts = []
        for source, keys in zip(sources, numbers, strict=True):
            source.batch([(key, "put", 1) for key in dict.fromkeys(keys)])
            (part,) = (t for t in tables(source.backend.freeze(SAVEPOINT)) if t.state == "v")
            doubled = [part.rows] * (1 + (len(keys) > len(set(keys))))
            parts += [replace(part, rows=rows) for rows in doubled]
        with pytest.raises(CorruptionError, match="holds a key twice"):
            load_all(cells.backend, parts)


def load_all(backend: KeyedBackend, parts: Sequence[StateTable]) -> None:
    """Take in all that was stored."""
    for part in parts:
        backend.load(part)
    backend.loaded()
