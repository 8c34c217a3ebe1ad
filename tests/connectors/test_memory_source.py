"""Arrow data in memory as a replayable source."""

from __future__ import annotations

import pickle
from decimal import Decimal

import pyarrow as pa
import pytest
from huge_rows import HugeRows
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source

from tidegate.connectors.memory_source import MemorySource, _MemoryReader, digest_of
from tidegate.storage.errors import ConfigurationError


def rows_of(source: MemorySource, rows_max: int) -> list[int]:
    """All rows, read split by split in pieces."""
    reader = source.reader()
    rows: list[int] = []
    for split in source.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, rows_max)
            assert result.next_offset - offset == (0 if result.batch is None else result.batch.num_rows) <= rows_max
            rows += [] if result.batch is None else result.batch.column("x").to_pylist()
            offset, at_end = result.next_offset, result.at_end
    reader.close()
    return rows


@given(chunks=st.lists(st.integers(0, 9), max_size=4), splits=st.integers(1, 6), rows_max=st.integers(1, 12))
@settings(max_examples=60)
def test_every_row_is_in_one_split_in_order(chunks: list[int], splits: int, rows_max: int) -> None:
    """However the data is chunked and split, reading all splits gives all rows; ids of splits differ."""
    data = pa.table({"x": pa.chunked_array([pa.array(range(n), pa.int64()) for n in chunks], pa.int64())})
    source = MemorySource.of(data, splits)

    assert rows_of(pickle.loads(pickle.dumps(source)), rows_max) == data.column("x").to_pylist()
    assert len({split.split_id for split in source.splits()}) == splits
    assert sum(split.rows for split in source.splits()) == data.num_rows


def test_the_same_read_gives_the_same_rows() -> None:
    """Replay: another reader, and the same one later, answer a read as before, also in the middle of a split."""
    source = MemorySource.of(pa.record_batch({"x": list(range(10))}), 2)
    split = source.splits()[1]
    reader = source.reader()
    first = reader.read(split, 1, 3)
    reader.read(split, 0, 5)

    for again in (reader.read(split, 1, 3), source.reader().read(split, 1, 3)):
        assert again == first
    assert first.batch.column("x").to_pylist() == [6, 7, 8]


def test_data_may_come_as_batches() -> None:
    """A list of batches of one schema is one input; without any batch there is no schema, and that is refused."""
    source = MemorySource.of([pa.record_batch({"x": [1]}), pa.record_batch({"x": [2]})], 1)

    assert rows_of(source, 10) == [1, 2]
    assert source.schema == pa.schema([("x", pa.int64())])
    with pytest.raises(ConfigurationError, match="at least one batch"):
        MemorySource.of([], 1)
    with pytest.raises(ConfigurationError, match=r"splits=0"):
        MemorySource.of(pa.table({"x": [1]}), 0)


def test_batches_whose_dictionaries_cannot_be_joined_are_refused_with_advice() -> None:
    """pandas categoricals have int8 indexes, which cannot count the values of many batches together."""
    small = pa.dictionary(pa.int8(), pa.string())
    batches = [pa.record_batch({"c": pa.array([f"{start + i}" for i in range(100)], small)}) for start in (0, 1_000)]

    with pytest.raises(ConfigurationError, match=r"cannot be joined.*int32"):
        MemorySource.of(batches, splits=1)


def test_it_keeps_the_contract() -> None:
    """With splits that have rows, and one that has none."""
    assert check_source(MemorySource.of(pa.table({"x": [1, 2, 3]}), 4)) == [{"x": 1}, {"x": 2}, {"x": 3}]


_TYPES: list[tuple[pa.DataType, list[object]]] = [
    (pa.int8(), [1, None, 3]),
    (pa.float64(), [0.5, None, 2.0]),
    (pa.bool_(), [True, None, False]),
    (pa.decimal128(10, 2), [Decimal("1.5"), None, Decimal("2.5")]),
    (pa.timestamp("us", "UTC"), [1, None, 3]),
    (pa.string(), ["a", None, "bc"]),
    (pa.large_binary(), [b"ab", None, b"c"]),
    (pa.binary(2), [b"ab", None, b"cd"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", None, "b"]),
    (pa.list_(pa.string()), [["a", None], None, []]),
    (pa.large_list(pa.int64()), [[1, 2], None, [3]]),
    (pa.list_(pa.int32(), 2), [[1, 2], None, [3, None]]),
    (pa.list_view(pa.int64()), [[1, None], None, []]),
    (pa.large_list_view(pa.string()), [["a"], None, []]),
    (pa.struct([("x", pa.int8()), ("y", pa.string())]), [{"x": 1, "y": None}, None, {"x": 2, "y": "b"}]),
    (pa.map_(pa.string(), pa.int64()), [[("a", 1)], None, [("b", None)]]),
    (pa.month_day_nano_interval(), [(1, 2, 3), None, (1, 2, 4)]),
]


@pytest.mark.parametrize(("kind", "values"), _TYPES, ids=[str(kind) for kind, _ in _TYPES])
def test_a_digest_depends_on_the_values_alone(kind: pa.DataType, values: list[object]) -> None:
    """Not on the place of the values in larger buffers; each other value, null or order makes another one."""

    def digest(values: list[object], around: int = 0) -> str:
        array = pa.array([*values[:around], *values, *values[:around]], kind)
        return digest_of(pa.table({"c": array.slice(around, len(values))}))

    first, null, last = values
    assert {digest(values, around) for around in range(4)} == {digest(values)}
    others = [[last, null, first], [first, null, first], [first, null, null], [first, last, null], [first, null], []]
    assert len({digest(values), *map(digest, others)}) == 1 + len(others)


def test_a_digest_does_not_depend_on_the_order_of_a_dictionary() -> None:
    """Nor is a dictionary decoded, whose values may be larger than an array of all of them can be."""

    def digest(indexes: list[int | None], values: list[str]) -> str:
        return digest_of(pa.table({"c": pa.DictionaryArray.from_arrays(pa.array(indexes, pa.int32()), values)}))

    assert digest([0, 1, None, 0], ["a", "b"]) == digest([2, 1, None, 2], ["unused", "b", "a"])
    assert digest([0, 1, None, 0], ["a", "b"]) != digest([1, 0, None, 1], ["a", "b"])
    assert digest([0] * 3_000, ["x" * 1_000_000]) != digest([0] * 3_000, ["y" * 1_000_000])


def test_a_digest_does_not_depend_on_bytes_under_nulls() -> None:
    """Arrow leaves any bytes there."""
    bits = pa.array([True, False]).buffers()[1]
    arrays = [pa.Array.from_buffers(pa.int64(), 2, [bits, pa.array([1, hidden]).buffers()[1]]) for hidden in (2, 3)]
    assert arrays[0].to_pylist() == [1, None]
    assert digest_of(pa.table({"c": arrays[0]})) == digest_of(pa.table({"c": arrays[1]}))


def test_more_strings_than_a_batch_holds_come_one_batch_after_the_other() -> None:
    """Whatever a read asks for: what does not come with it comes with the next one."""
    data = pa.table({"x": pa.chunked_array([[1, 2], [3], [4, 5]])})
    (split,) = MemorySource.of(data, 1).splits()
    reader = _MemoryReader(HugeRows(data))
    found: list[int] = []
    while len(found) < 5:
        result = reader.read(split, len(found), 100)
        found += result.batch.column("x").to_pylist()
        assert (result.next_offset, result.at_end) == (len(found), len(found) == 5)
    assert found == [1, 2, 3, 4, 5]
