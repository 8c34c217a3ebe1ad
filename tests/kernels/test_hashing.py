"""The key hash: equal to its specification for any column, and frozen, because checkpoints depend on it."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_reference import hash_columns_reference

from tidegate.state.kernels.hashing import hash_columns
from tidegate.storage.errors import ConfigurationError

_VALUES: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int8(): st.integers(-128, 127),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.bool_(): st.booleans(),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
    pa.string(): st.text(max_size=70),
    pa.large_string(): st.text(max_size=70),
    pa.binary(): st.binary(max_size=100),
    pa.date32(): st.dates(dt.date(1900, 1, 1), dt.date(2100, 1, 1)),
    pa.timestamp("us"): st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2100, 1, 1)),
    pa.dictionary(pa.int32(), pa.string()): st.sampled_from(["a", "b", "long " * 20]),
}


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    """Batches of 1 to 3 columns of any key type, with nulls, and sliced."""
    types = draw(st.lists(st.sampled_from(list(_VALUES)), min_size=1, max_size=3))
    rows = draw(st.integers(0, 12))
    columns = [pa.array(draw(st.lists(st.none() | _VALUES[t], min_size=rows, max_size=rows)), type=t) for t in types]
    batch = pa.RecordBatch.from_arrays(columns, names=[f"c{i}" for i in range(len(types))])
    start = draw(st.integers(0, rows))
    return batch.slice(start, draw(st.integers(0, rows - start)))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_kernel_equals_reference(batch: pa.RecordBatch) -> None:
    """For any types, nulls and slices the kernel is XXH64 of the canonical bytes, chained by seed."""
    names = batch.schema.names
    np.testing.assert_array_equal(hash_columns(batch, names), hash_columns_reference(batch, names))


def test_strings_of_any_length() -> None:
    """Each branch of XXH64 (stripes of 32, words of 8 and 4, single bytes) is right, in a column and at its end, and
    with the hash of a column before it."""
    many = pa.record_batch({"s": pa.array([bytes(range(200, 200 - length, -1)) for length in range(70)])})
    alone = [pa.record_batch({"s": pa.array(many["s"][row : row + 1].to_pylist())}) for row in range(34)]
    for batch in (many, many.slice(3, 12), many.slice(3, 15), *alone):
        with_number = batch.append_column("before", pa.array(np.arange(batch.num_rows)))
        for names in (["s"], ["before", "s"]):
            expected = hash_columns_reference(with_number, names)
            np.testing.assert_array_equal(hash_columns(with_number, names), expected)


def test_golden_values() -> None:
    """The format of key groups: these figures must never change."""
    batch = pa.record_batch(
        {
            "int": pa.array([5, -1, None], pa.int64()),
            "float": pa.array([1.5, 0.0, None]),
            "bool": pa.array([True, False, None]),
            "text": pa.array(["UA", "", "a string that is longer than thirty-two bytes"]),
            "date": pa.array([dt.date(2013, 1, 1), dt.date(1969, 12, 31), None]),
        }
    )
    hashes = {name: [f"{h:016x}" for h in hash_columns(batch, [name])] for name in batch.schema.names}
    hashes["all"] = [f"{h:016x}" for h in hash_columns(batch, batch.schema.names)]
    assert hashes == GOLDEN


GOLDEN = {
    "int": ["89be0b2dd5c2593d", "85d136adb773c6c9", "87cb37da11d27151"],
    "float": ["49f7b96b6b5ccaf9", "34c96acdcadb1bbb", "87cb37da11d27151"],
    "bool": ["9f29cb17a2a49995", "34c96acdcadb1bbb", "87cb37da11d27151"],
    "text": ["9e3abc9bbc6c67a2", "ef46db3751d8e999", "c857e4b8afd4cd54"],
    "date": ["5dd98b93eeba1a12", "85d136adb773c6c9", "87cb37da11d27151"],
    "all": ["29d2845d871b1be3", "bc3728afbc28f299", "043f94d0d5f9925f"],
}


def test_width_does_not_count() -> None:
    """The same number is the same key in every integer type, and a float32 is the float64 that it equals."""
    types = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()]
    assert len({int(hash_columns(pa.record_batch({"k": pa.array([5], t)}), ["k"])[0]) for t in types}) == 1
    floats = [pa.float32(), pa.float64()]
    assert len({int(hash_columns(pa.record_batch({"k": pa.array([0.5], t)}), ["k"])[0]) for t in floats}) == 1


def test_zeros_and_nans_are_one_key() -> None:
    """0.0 and -0.0 compare equal, so they are one key; so are all bit patterns of NaN."""
    odd_nan = np.array([0x7FF8000000000001, 0xFFF8000000000000], dtype=np.uint64).view(np.float64)
    batch = pa.record_batch({"k": np.concatenate([np.array([0.0, -0.0, np.nan]), odd_nan])})
    hashes = hash_columns(batch, ["k"])
    assert hashes[0] == hashes[1]
    assert len(set(hashes[2:].tolist())) == 1


def test_null_is_a_value_of_its_own() -> None:
    """Null differs from what lies beneath it, from the empty string, and counts by its place."""
    ints = pa.record_batch({"k": pa.array([0, None], pa.int64())})
    assert len(set(hash_columns(ints, ["k"]).tolist())) == 2
    texts = pa.record_batch({"a": ["", None, None, ""], "b": pa.array([None, "", None, ""])})
    assert len(set(hash_columns(texts, ["a", "b"]).tolist())) == 4


def test_column_order_counts() -> None:
    """(a, b) and (b, a) are different keys."""
    batch = pa.record_batch({"a": [1], "b": [2]})
    assert hash_columns(batch, ["a", "b"])[0] != hash_columns(batch, ["b", "a"])[0]


@pytest.mark.parametrize(
    ("encoded", "same_as"),
    [
        (pa.array(["x", None, "yy"]).dictionary_encode(), pa.array(["x", None, "yy"])),
        (pa.array(["x", None, "yy"], pa.string_view()), pa.array(["x", None, "yy"])),
        (pa.array([b"x", None, b"yy"], pa.binary_view()), pa.array(["x", None, "yy"])),
        (pa.array([b"ab", None, b"cd"], pa.binary(2)), pa.array(["ab", None, "cd"])),
    ],
)
def test_encoding_does_not_count(encoded: pa.Array, same_as: pa.Array) -> None:
    """Dictionaries, views and fixed-size binary hash as the strings that they hold, sliced or not."""
    for start in (0, 1):
        left = pa.record_batch({"k": encoded}).slice(start)
        right = pa.record_batch({"k": same_as}).slice(start)
        np.testing.assert_array_equal(hash_columns(left, ["k"]), hash_columns(right, ["k"]))


def test_hash_spreads_over_key_groups() -> None:
    """Consecutive integers fill 128 key groups evenly (within five standard deviations)."""
    rows = 128_000
    counts = np.bincount(
        (hash_columns(pa.record_batch({"k": np.arange(rows)}), ["k"]) % np.uint64(128)).astype(np.int64)
    )
    assert abs(counts - 1000).max() < 5 * 1000**0.5


def test_wrong_columns_are_named() -> None:
    """A missing column and a type that cannot be a key are the user's error, and say which column it is."""
    batch = pa.record_batch({"k": [[1], [2]]})
    with pytest.raises(ConfigurationError, match="'missing'"):
        hash_columns(batch, ["missing"])
    with pytest.raises(ConfigurationError, match=r"'k' of type list"):
        hash_columns(batch, ["k"])
