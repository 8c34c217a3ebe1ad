"""Keyed state in columns: frozen copies, stored tables, and what loading refuses."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.kernels.hashing import hash_columns
from tidegate.storage.columnar import ColumnarState, KeyColumns, ValueSpec
from tidegate.storage.errors import CorruptionError
from tidegate.storage.metadata import StateKind

_KEY = pa.schema({"k": pa.int64()})
_SPECS = (ValueSpec("n", pa.int64(), 0), ValueSpec("day", pa.date32(), 7))


def _state() -> ColumnarState:
    return ColumnarState("s", _KEY, _SPECS, 8, lambda keys: hash_columns(keys, ["k"]))


@settings(max_examples=60)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 99), st.none() | st.dates(dt.date(2000, 1, 1), dt.date(2030, 1, 1)))),
        max_size=5,
    )
)
def test_stored_rows_come_back(parts: list[list[tuple[int, dt.date | None]]]) -> None:
    """Tables loaded one after the other, nulls in any of them, are stored again as the same rows by key group."""
    schema = pa.schema([*_KEY, pa.field("n", pa.int64()), pa.field("day", pa.date32())])
    state = _state()
    stored = []
    key = 0
    for part in parts:
        rows = [{"k": key + i, "n": n, "day": day} for i, (n, day) in enumerate(part)]
        key += len(part)
        stored += rows
        if rows:
            state.append_stored(pa.RecordBatch.from_pylist(rows, schema))
    assert state.rows == len(stored)
    table = state.freeze().materialize()
    assert (table.state, table.kind) == ("s", StateKind.KEYED)
    assert sorted(table.rows.to_pylist(), key=lambda row: row["k"]) == stored
    groups = (hash_columns(table.rows, ["k"]) % np.uint64(8)).tolist()
    assert groups == sorted(groups)
    sizes = Counter(groups)
    assert list(np.diff(table.key_group_rows)) == [sizes[group] for group in range(8)]


def test_frozen_values_do_not_change() -> None:
    """What was frozen stays, while values change in place, become null, and the columns grow."""
    state = _state()
    state.append(pa.record_batch({"k": [1, 2]}))
    state.column("n").values[:2] = [10, 20]
    frozen = state.freeze()
    state.column("n").values[:2] = 0
    state.column("day").track_nulls(0)
    state.append(pa.record_batch({"k": range(3, 5000)}))
    rows = sorted(frozen.materialize().rows.to_pylist(), key=lambda row: row["k"])
    week = dt.date(1970, 1, 8)
    assert rows == [{"k": 1, "n": 10, "day": week}, {"k": 2, "n": 20, "day": week}]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms())
@settings(max_examples=40)
def test_snapshots_share_an_order_only_while_no_key_is_added(added: list[int], chance: random.Random) -> None:
    """Values and keys of every snapshot belong together, in whatever order the snapshots are written."""
    state = _state()
    frozen = []
    keys = 0
    for step, count in enumerate(added):
        if count:
            state.append(pa.record_batch({"k": range(keys, keys + count)}))
            keys += count
        state.column("n").values[:keys] = [key * 100 + step for key in range(keys)]
        frozen.append((step, keys, state.freeze()))
    chance.shuffle(frozen)
    for step, known, snapshot in frozen:
        rows = snapshot.materialize().rows.to_pylist()
        assert sorted((row["k"], row["n"]) for row in rows) == [(key, key * 100 + step) for key in range(known)]


def test_new_slots_hold_the_identity() -> None:
    """A new slot holds what the column was told, and is null once nulls are tracked, also beyond the first growth."""
    state = _state()
    state.append(pa.record_batch({"k": range(3)}))
    state.column("day").track_nulls(3)
    state.append(pa.record_batch({"k": range(3, 4000)}))
    slots = np.array([0, 2, 3, 3999])
    assert state.column("n").take(slots).to_pylist() == [0, 0, 0, 0]
    assert state.column("day").values[slots].tolist() == [7, 7, 7, 7]
    assert state.column("day").take(slots).is_valid().to_pylist() == [True, True, False, False]


def test_number_of_key_chunks_is_logarithmic() -> None:
    """A thousand batches with a new key each do not leave a thousand chunks."""
    keys = KeyColumns(_KEY)
    for k in range(1000):
        keys.append(pa.record_batch({"k": [k]}))
    assert len(keys.chunks()) <= 11
    assert pa.Table.from_batches(keys.chunks())["k"].to_pylist() == list(range(1000))


def test_keys_come_in_bounded_batches() -> None:
    """`key_chunks` gives every key once, in slot order, with its slot."""
    state = _state()
    for start in (0, 7, 100):
        state.append(pa.record_batch({"k": range(start, start + 5)}))
    pieces = list(state.key_chunks(4))
    assert all(piece.num_rows <= 4 for _, piece in pieces)
    assert [slot + i for slot, piece in pieces for i in range(piece.num_rows)] == list(range(15))
    assert [k for _, p in pieces for k in p.column("k").to_pylist()] == [*range(5), *range(7, 12), *range(100, 105)]


def test_table_of_another_state_is_refused() -> None:
    """Columns that do not match are named, both as found and as expected."""
    rows = pa.record_batch({"k": [1], "n": pa.array([1], pa.int32()), "day": [dt.date(2020, 1, 1)]})
    with pytest.raises(CorruptionError, match=r"\(k: int64, n: int32, day: date32\[day\]\)"):
        _state().append_stored(rows)
