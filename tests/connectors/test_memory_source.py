"""Arrow data in memory as a replayable source."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from huge_rows import HugeRows
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source

from tidegate.connectors.memory_source import MemorySource, _MemoryReader
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
