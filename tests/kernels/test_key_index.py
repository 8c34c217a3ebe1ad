"""Key → slot: any keys in any batches get the slots that a dict would give them."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import upsert_reference

from tidegate.state.kernels.columns import NO_MASK
from tidegate.state.key_index.hash_table import (
    CAPACITY_MIN,
    SLOTS_MAX,
    capacity_after,
    capacity_for,
    home_of,
    keys_max,
)
from tidegate.state.key_index.int_index import IntIndex
from tidegate.state.key_index.key_index import KeyIndex
from tidegate.storage.errors import ConfigurationError

_SMALL: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int16(): st.integers(-5, 5),
    pa.int64(): st.integers(-5, 5) | st.sampled_from([2**63 - 1, -(2**63)]),
    pa.float64(): st.sampled_from([0.0, -0.0, 1.5, math.nan, math.inf]),
    pa.bool_(): st.booleans(),
    pa.string(): st.sampled_from(["", "a", "b", "ab", "x" * 40, "x" * 39 + "y"]),
    pa.binary(): st.binary(max_size=3),
    pa.decimal128(5, 2): st.decimals(-9, 9, places=2),
}


@st.composite
def streams(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """A few batches of one schema, with few distinct keys, nulls and slices."""
    types = draw(st.lists(st.sampled_from(list(_SMALL)), min_size=1, max_size=3))
    batches = []
    for _ in range(draw(st.integers(1, 4))):
        rows = draw(st.integers(0, 15))
        columns = [pa.array(draw(st.lists(st.none() | _SMALL[t], min_size=rows, max_size=rows)), type=t) for t in types]
        batch = pa.RecordBatch.from_arrays(columns, names=[f"c{i}" for i in range(len(types))])
        batches.append(batch.slice(draw(st.integers(0, rows))))
    return batches


def _keys(batch: pa.RecordBatch) -> list[Hashable]:
    def plain(value: object) -> Hashable:
        assert isinstance(value, Hashable)
        return "NaN" if isinstance(value, float) and math.isnan(value) else value

    return [tuple(map(plain, row)) for row in zip(*(c.to_pylist() for c in batch.columns), strict=True)]


@settings(max_examples=200, deadline=None)
@given(streams())
def test_slots_equal_those_of_a_dict(batches: list[pa.RecordBatch]) -> None:
    """Slots, first rows and new rows are those of a dict from key to its number, whatever the key types."""
    index = KeyIndex(tuple(batches[0].schema.names))
    model: dict[Hashable, int] = {}
    for batch in batches:
        result = index.upsert(batch)
        expected = upsert_reference(model, _keys(batch))
        assert (
            result.slots.tolist(),
            result.first_rows.tolist(),
            result.new_rows.tolist(),
        ) == expected
        assert index.size == len(model)


@pytest.mark.parametrize("columns", [("i",), ("s",), ("i", "s"), ("few", "i")])
def test_growing_within_a_batch(columns: tuple[str, ...]) -> None:
    """A batch that makes the table double several times gives the slots of a dict, and so does a second pass."""
    rng = np.random.default_rng(7)
    numbers = rng.integers(0, 30_000, 40_000)
    texts = pa.array([f"key-{n}" * (n % 4) for n in numbers])
    few = pa.array([None if n % 3 == 0 else int(n % 3) for n in numbers], pa.int64())
    batch = pa.record_batch({"i": numbers, "s": texts, "few": few})
    index = KeyIndex(columns)
    model: dict[Hashable, int] = {}
    for part in (batch, batch.slice(100, 20_000)):
        result = index.upsert(part)
        slots, first_rows, new_rows = upsert_reference(model, _keys(part.select(list(columns))))
        assert result.slots.tolist() == slots
        assert result.first_rows.tolist() == first_rows
        assert result.new_rows.tolist() == new_rows


@pytest.mark.parametrize("columns", [("i",), ("s",), ("i", "j")])
def test_memory_of_an_index(columns: tuple[str, ...]) -> None:
    """A table that has grown is at least a third full, and one that was filled at once at least half, however many keys
    there are."""
    entry_bytes = {("i",): 16, ("s",): 24, ("i", "j"): 32}[columns]
    for keys in (100_000, 140_000, 190_000):
        numbers = np.arange(keys)
        texts = pa.array(numbers).cast(pa.string())
        batch = pa.record_batch({"i": numbers, "j": numbers, "s": texts}).select(list(columns))
        grown, filled = KeyIndex(columns), KeyIndex(columns)
        for start in range(0, keys, 10_000):
            grown.upsert(batch.slice(start, 10_000))
        assert filled.fill(batch)
        assert grown.size_bytes < 3 * entry_bytes * keys + keys
        assert filled.size_bytes < 2 * entry_bytes * keys + keys


@pytest.mark.parametrize("entry_words", [2, 3, 4])
def test_an_index_never_has_more_keys_than_there_are_slots(entry_words: int) -> None:
    """However it grows: there would be no number for a slot more. Every table has room for the keys that are asked for,
    and for more than the one before it."""
    entries, keys = CAPACITY_MIN, 0
    while keys < SLOTS_MAX:
        assert keys < keys_max(entries, entry_words) <= SLOTS_MAX
        assert keys_max(capacity_for(keys + 1, entry_words), entry_words) > keys
        assert int(home_of(np.uint64(2**64 - 1), entries)) == entries - 1
        keys = int(keys_max(entries, entry_words))
        if keys < SLOTS_MAX:
            entries = capacity_after(entries, entry_words)
    refused = r"has 2,147,483,647 keys, but an index holds at most 2,147,483,646: restore .* at a higher parallelism"
    with pytest.raises(ConfigurationError, match=refused):
        capacity_after(entries, entry_words)
    with pytest.raises(ConfigurationError, match=refused):
        capacity_for(SLOTS_MAX + 1, entry_words)
    assert keys_max(capacity_for(SLOTS_MAX, entry_words), entry_words) == SLOTS_MAX


def test_column_bounds_are_part_of_the_key() -> None:
    """Columns whose bytes, one behind the other, are the same in two rows make different keys."""
    batch = pa.record_batch({"a": ["ab", "a", "ab"], "b": ["c", "bc", "c"]})
    assert KeyIndex(("a", "b")).upsert(batch).slots.tolist() == [0, 1, 0]
    looks_like_a_border = b"\x01" + bytes(8)
    batch = pa.record_batch({"a": [b"", looks_like_a_border], "b": [looks_like_a_border, b""]})
    assert KeyIndex(("a", "b")).upsert(batch).slots.tolist() == [0, 1]


def test_batches_do_not_see_each_other() -> None:
    """A key that an earlier batch seen is seen for the first time again, null included, also after growing."""
    index = KeyIndex(("k",))
    for rows in (5, 5, 3000, 5):
        batch = pa.record_batch({"k": pa.array([*range(rows), None, 0, None], pa.int64())})
        assert index.upsert(batch).first_rows.tolist() == list(range(rows + 1))


def test_no_mask_means_no_nulls() -> None:
    """Without a mask every row is a key in the table, with the word 0 among them."""
    result = IntIndex().upsert(np.array([0, 1, 0], dtype=np.int64), NO_MASK)
    assert result.slots.tolist() == [0, 1, 0]


@settings(max_examples=200, deadline=None)
@given(streams(), st.integers(0, 4), st.sampled_from([0, 1, 3_000]))
def test_filling_gives_the_slots_of_upserts(batches: list[pa.RecordBatch], before: int, to_come: int) -> None:
    """Keys of which none comes twice get the slots that an upsert gives them, whatever was there before, and however
    many are said to follow; others are told of."""
    index, reference = KeyIndex(tuple(batches[0].schema.names)), KeyIndex(tuple(batches[0].schema.names))
    for batch in batches[:before]:
        index.upsert(batch)
        reference.upsert(batch)
    for batch in batches[before:]:
        known = index.size
        expected = reference.upsert(batch)

        filled = index.fill(batch, to_come)

        assert (len(expected.new_rows) == batch.num_rows) == filled
        if not filled:
            return
        assert (index.size, expected.slots.tolist()) == (known + batch.num_rows, list(range(known, index.size)))
    for batch in batches:
        assert reference.upsert(batch).slots.tolist() == index.upsert(batch).slots.tolist()


@pytest.mark.parametrize("columns", [("i",), ("s",), ("i", "s"), ("few", "i")])
def test_filling_many_keys(columns: tuple[str, ...]) -> None:
    """So many that the table has several parts; what was there stays, and a key that comes twice is found."""
    numbers = np.random.default_rng(7).permutation(150_000)
    texts = pa.array([f"key-{n}" * (n % 3) + str(n) for n in numbers])
    batch = pa.record_batch({"i": numbers, "s": texts, "few": numbers % 3})
    index = KeyIndex(columns)
    index.upsert(batch.slice(0, 5_000))

    assert index.fill(batch.slice(5_000))

    assert np.array_equal(index.upsert(batch).slots, np.arange(len(numbers)))
    last = {name: batch.column(name)[-1].as_py() for name in batch.schema.names}
    more = pa.record_batch({"i": [200_000, last["i"]], "s": ["new", last["s"]], "few": [0, last["few"]]})
    assert not index.fill(more)


def test_an_index_for_very_many_keys() -> None:
    """Its bitmap of seen keys is in no cache, so a block of rows meets its keys at once: with the same result."""
    index = IntIndex()
    assert index.fill(np.arange(8, dtype=np.int64), NO_MASK, keys_to_come=9_000_000)
    model: dict[Hashable, int] = {key: key for key in range(8)}
    rows = np.random.default_rng(5)
    for _ in range(3):
        words, valid = rows.integers(0, 20, 100), (rows.random(100) > 0.1).astype(np.uint8)
        keys = [int(word) if there else None for word, there in zip(words, valid, strict=True)]
        result = index.upsert(words, valid)
        expected = upsert_reference(model, keys)
        assert (result.slots.tolist(), result.first_rows.tolist(), result.new_rows.tolist()) == expected
