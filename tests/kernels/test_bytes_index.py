"""Strings → slot: those of a dict, for short keys, which lie in their entries, and for long ones, which do not."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import upsert_reference
from memory_end import ending_with_memory
from numpy.typing import NDArray

from tidegate.state.kernels import hashing
from tidegate.state.kernels.columns import NO_MASK, Strings, key_column, key_form
from tidegate.state.key_index.bytes_index import SHORT_BYTES, BytesIndex, hash_keys
from tidegate.state.key_index.key_index import KeyIndex

_TEXT = "wörter mit gleichem Anfang, länger als jeder Eintrag"
_ZEROS = bytes(SHORT_BYTES + 2)
_BINARY = st.one_of(
    st.integers(0, 45).map(lambda length: _TEXT.encode()[:length]),
    st.integers(0, 45).map(lambda length: _TEXT.encode()[:length] + b"\0"),
    st.integers(0, len(_ZEROS)).map(lambda length: _ZEROS[:length]),
    st.integers(0, 45).map(lambda length: b"\xff" * length),
    st.binary(max_size=20),
)
_TEXTS = st.integers(0, 45).map(lambda length: _TEXT[:length]) | st.text(max_size=18)
_TYPES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.binary(): _BINARY,
    pa.large_binary(): _BINARY,
    pa.string(): _TEXTS,
    pa.large_string(): _TEXTS,
    pa.dictionary(pa.int32(), pa.string()): _TEXTS,
    pa.string_view(): _TEXTS,
    pa.binary(15): st.binary(min_size=15, max_size=15) | st.sampled_from([_ZEROS[:15], b"\xff" * 15]),
    pa.binary(16): st.binary(min_size=16, max_size=16) | st.sampled_from([_ZEROS[:16], b"\xff" * 16]),
}


def _form(column: pa.Array) -> Strings:
    form = key_form(key_column(pa.record_batch({"k": column}), "k"), "k")
    assert isinstance(form, Strings)
    return form


@st.composite
def columns(draw: st.DrawFn) -> list[pa.Array]:
    """A few columns of one type, with keys that begin alike, nulls and slices."""
    data_type = draw(st.sampled_from(list(_TYPES)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        values = draw(st.lists(st.none() | _TYPES[data_type], max_size=20))
        start = draw(st.integers(0, len(values)))
        column = pa.array(values, type=data_type)
        found.append(column.slice(start, draw(st.integers(0, len(values) - start))))
    return found


def _same_for_all(keys: Strings) -> NDArray[np.uint64]:
    return np.full(len(keys.offsets) - 1, 42, dtype=np.uint64)


@settings(max_examples=300, deadline=None)
@given(columns(), st.booleans())
def test_slots_equal_those_of_a_dict(batches: list[pa.Array], hashed: bool) -> None:
    """For any length, wherever a string lies in its column, and if all keys have one hash as well."""
    index = BytesIndex()
    model: dict[Hashable, int] = {}
    for column in batches:
        keys = _form(column)
        result = index.upsert(keys, (hash_keys if hashed else _same_for_all)(keys))
        expected = upsert_reference(model, column.to_pylist())
        assert (result.slots.tolist(), result.first_rows.tolist(), result.new_rows.tolist()) == expected
        assert index.size == len(model)


@settings(max_examples=100, deadline=None)
@given(columns(), st.booleans())
def test_filling_gives_the_same_slots(batches: list[pa.Array], hashed: bool) -> None:
    """And finds a key that comes twice."""
    index, seen = BytesIndex(), list[object]()
    hashes_of = hash_keys if hashed else _same_for_all
    for column in batches:
        keys = _form(column)
        seen += column.to_pylist()
        filled = index.fill(keys, hashes_of(keys), keys_to_come=5)
        assert filled == (len(set(seen)) == len(seen))
        if not filled:
            return
        found = index.upsert(keys, hashes_of(keys))
        assert found.slots.tolist() == list(range(len(seen) - len(column), len(seen)))
        assert not len(found.new_rows)


@pytest.mark.parametrize("hashed", [42, 2**64 - 1])
def test_equal_hashes_are_told_apart_by_bytes(hashed: int) -> None:
    """With a hash that is the same for all keys, every key still has a slot of its own; after the last entry of a table
    the first one follows."""
    texts = [None if i % 50 == 49 else f"key-{i % 700}" + "x" * (i % 7 * 3) for i in range(1500)]
    form = _form(pa.array(texts))
    index = BytesIndex()
    model: dict[Hashable, int] = {}
    for _ in range(2):
        result = index.upsert(form, np.full(len(texts), hashed, dtype=np.uint64))
        slots, first_rows, new_rows = upsert_reference(model, texts)
        assert result.slots.tolist() == slots
        assert result.first_rows.tolist() == first_rows
        assert result.new_rows.tolist() == new_rows


def test_long_keys_that_end_otherwise() -> None:
    """Each byte of a long key counts, and so does where it ends."""
    one = "0123456789" * 5
    texts = [one[:at] + "x" + one[at + 1 :] for at in range(50)] + [one[:length] for length in range(51)]
    form = _form(pa.array(texts * 2))
    slots = BytesIndex().upsert(form, _same_for_all(form)).slots.tolist()
    assert slots == [*range(101), *range(101)]


def test_short_and_long_keys_while_table_and_arena_grow() -> None:
    """Many of both, in one batch and in a second one, and with a null that comes when the table is full."""
    rng = np.random.default_rng(3)
    numbers = rng.integers(0, 30_000, 60_000)
    texts = [None if n == 7 else f"{n}" + "." * (n % 40) for n in numbers.tolist()]
    column = pa.array(texts)
    index, model = KeyIndex(("k",)), dict[Hashable, int]()
    for part in (column, column.slice(10_000, 30_000)):
        result = index.upsert(pa.record_batch({"k": part}))
        expected = upsert_reference(model, part.to_pylist())
        assert (result.slots.tolist(), result.first_rows.tolist(), result.new_rows.tolist()) == expected


@pytest.mark.parametrize("length", [20, 200])
def test_a_full_table_and_a_full_arena(length: int) -> None:
    """Whichever is full first, and if it is null that finds the table full."""
    for keys in (255, 256, 257, 300):
        texts = [f"{n:0{length}}" for n in range(keys)]
        for null_at in (0, keys - 2, keys - 1, keys):
            column = pa.array([*texts[:null_at], None, *texts[null_at:]], pa.string())
            form = _form(column)
            index = BytesIndex()
            assert index.upsert(form, hash_keys(form)).slots.tolist() == list(range(keys + 1))
            assert index.upsert(form, hash_keys(form)).slots.tolist() == list(range(keys + 1))


def test_bytes_beneath_nulls_are_no_keys() -> None:
    """Short or long, in an upsert or when filled: they take no memory either."""
    texts = pa.array(["a", "b", "c" * 40, "d" * 40])
    nulls = pa.py_buffer(bytes([0b1001]))
    column = pa.StringArray.from_buffers(4, *texts.buffers()[1:], nulls)
    assert column.to_pylist() == ["a", None, None, "d" * 40]
    form = _form(column)
    assert BytesIndex().upsert(form, hash_keys(form)).slots.tolist() == [0, 1, 1, 2]
    one, other = _form(column.slice(2)), _form(pa.array([None, "d" * 40]))
    indexes = [BytesIndex(), BytesIndex()]
    for index, keys in zip(indexes, (one, other), strict=True):
        assert index.fill(keys, hash_keys(keys))
    assert indexes[0].size_bytes == indexes[1].size_bytes
    for keys in (_form(pa.array(["e" * 40])), form):
        first, second = (index.upsert(keys, hash_keys(keys)).slots.tolist() for index in indexes)
        assert first == second


def test_key_longer_than_the_arena() -> None:
    """One key of a megabyte is a key like any other."""
    batch = pa.record_batch({"s": ["x" * 1_000_000, "y", "x" * 1_000_000, "x" * 999_999]})
    assert KeyIndex(("s",)).upsert(batch).slots.tolist() == [0, 1, 0, 2]


def test_a_hash_is_that_of_the_bytes() -> None:
    """Alone, before other bytes, and where the column ends: a key has one hash, and others have others."""
    texts = [_TEXT.encode()[:length] for length in range(46)] + [_ZEROS[:length] for length in range(1, 18)]
    alone = [int(hash_keys(_form(pa.array([text])))[0]) for text in texts]
    between = hash_keys(_form(pa.array([b"+" * 30, *texts, b"+" * 30]).slice(1, len(texts))))
    assert between.tolist() == alone
    assert len({hashed >> 32 for hashed in alone}) == len(texts)


def test_bytes_that_end_where_memory_does() -> None:
    """Strings are read in words, but nothing behind a column's bytes is: that may be memory of nobody."""
    for length in [0, 1, 7, 8, 9, 15, 16, 17, 23, 33]:
        text = (_TEXT * 2).encode()[: 2 * length]
        elsewhere = _form(pa.array([text[:length], text[length:]]))
        with ending_with_memory(text) as data:
            keys = Strings(np.array([0, length, 2 * length]), data, NO_MASK)
            assert hashing.hash_forms([keys], 2).tolist() == hashing.hash_forms([elsewhere], 2).tolist()
            assert hash_keys(keys).tolist() == hash_keys(elsewhere).tolist()
            known = BytesIndex()
            known.upsert(elsewhere, hash_keys(elsewhere))
            assert not len(known.upsert(keys, hash_keys(keys)).new_rows)


def test_memory_of_long_keys() -> None:
    """Their bytes come to the table, with as much again in an arena that has grown."""
    for keys in (60_000, 100_000):
        batch = pa.record_batch({"s": [f"{n:040}" for n in range(keys)]})
        grown, filled = KeyIndex(("s",)), KeyIndex(("s",))
        for start in range(0, keys, 10_000):
            grown.upsert(batch.slice(start, 10_000))
        assert filled.fill(batch)
        assert grown.size_bytes < (3 * 24 + 2 * 40 + 1) * keys
        assert filled.size_bytes < (2 * 24 + 40 + 1) * keys
