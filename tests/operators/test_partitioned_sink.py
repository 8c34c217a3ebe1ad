"""Rows of a partitioned table come out by partition: all of them, in order, each under the folder of its values."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_harness import opened, run

from tidegate.operators.sinks.sink import StagedRows
from tidegate.operators.sinks.table_sink import PARTITIONS_MAX, PartitionedTableSink, TableSink, table_sink
from tidegate.protocol.failures import OperatorError
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.partitions import HIVE_NULL, folder_name
from tidegate.storage.tables.table_info import TableInfo

_TEXTS = st.none() | st.sampled_from(["", "AA", "a/b", "..", "é", HIVE_NULL])
_SCHEMA = pa.schema([("s", pa.string()), ("n", pa.int32()), ("row", pa.int64())])


def _sink(*partition_by: str, file_bytes_max: int = 1 << 20) -> PartitionedTableSink:
    sink = PartitionedTableSink("append", (), partition_by, file_bytes_max)
    opened(sink)
    return sink


@settings(max_examples=60)
@given(st.lists(st.lists(st.tuples(_TEXTS, st.none() | st.integers(-1, 1)), max_size=10), max_size=4))
def test_every_row_is_staged_once_in_the_folder_of_its_values(parts: list[list[tuple[str | None, int | None]]]) -> None:
    """Against a model: a list for each partition, in the order in which partitions come first."""
    sink, model, row = _sink("s", "n"), {}, 0
    for part in parts:
        columns = [[s for s, _ in part], [n for _, n in part], list(range(row, row + len(part)))]
        run(sink, [pa.record_batch(columns, schema=_SCHEMA)])
        for s, n in part:
            model.setdefault(f"{folder_name('s', s)}/{folder_name('n', n)}", []).append((s, n, row))
            row += 1

    staged = sink.take_files(force=True)

    found = {
        files.folder: [tuple(r.values()) for batch in files.batches for r in batch.to_pylist()] for files in staged
    }
    assert len(staged) == len(found)
    assert list(found.items()) == list(model.items())
    assert sink.take_files(force=True) == []


def test_what_waits_is_bounded_in_bytes_over_all_partitions() -> None:
    """Enough rows are staged without force, whatever partitions they are of."""
    sink = _sink("x", file_bytes_max=100)
    batch = pa.record_batch({"x": pa.array(range(8), pa.int64()), "y": pa.array(range(8), pa.int8())})
    run(sink, [batch])
    assert sink.take_files(force=False) == []
    run(sink, [batch])
    assert [files.folder for files in sink.take_files(force=False)] == [f"x={x}" for x in range(8)]


def test_categories_booleans_and_dates_are_partitions() -> None:
    """The text of a value is that of Hive; a dictionary is as its values."""
    sink = _sink("c", "b", "d")
    days = pa.array([dt.date(2013, 1, 1), None], pa.date32())
    run(
        sink,
        [pa.record_batch({"c": pa.array(["x", "x"]).dictionary_encode(), "b": [True, False], "d": days, "v": [1, 2]})],
    )
    assert [files.folder for files in sink.take_files(force=True)] == [
        "c=x/b=true/d=2013-01-01",
        f"c=x/b=false/d={HIVE_NULL}",
    ]


def test_upsert_keeps_the_last_row_of_each_key_under_one_version() -> None:
    """The rows of one take have one version, in all partitions."""
    sink = PartitionedTableSink("upsert", ("k", "p"), ("p",))
    opened(sink)
    run(sink, [pa.record_batch({"k": [1, 2, 1, 1], "p": ["a", "b", "a", "b"], "v": [1, 2, 3, 4]})])
    found = {files.folder: pa.Table.from_batches(files.batches).to_pydict() for files in sink.take_files(force=True)}
    assert found == {
        "p=b": {"k": [2, 1], "p": ["b", "b"], "v": [2, 4], VERSION_COLUMN: [1, 1]},
        "p=a": {"k": [1], "p": ["a"], "v": [3], VERSION_COLUMN: [1]},
    }


def test_too_many_partitions_and_too_long_values_are_refused() -> None:
    """The error names operator, column and limit; as many as may be are written."""
    sink = _sink("x")
    numbers = list(range(PARTITIONS_MAX + 1))
    run(sink, [pa.record_batch({"x": numbers[1:], "y": numbers[1:]})])
    assert len(sink.take_files(force=True)) == PARTITIONS_MAX
    run(sink, [pa.record_batch({"x": numbers, "y": numbers})])
    with pytest.raises(
        OperatorError, match=r"op-uid.* 1001 rows have 1001 different partitions by \['x'\], .* at most 1000"
    ):
        sink.take_files(force=True)
    longest = _sink("s")
    run(longest, [pa.record_batch({"s": ["é" * 32], "y": [1]})])
    with pytest.raises(OperatorError, match="partition column 's' has a value of 65 bytes"):
        run(longest, [pa.record_batch({"s": [None, "é" * 32 + "x"], "y": [1, 1]})])


def test_the_sink_of_a_table_fits_it() -> None:
    """Partitioned or not; without partitions a file lies in the folder of its attempt."""
    schema = pa.schema([("x", pa.int64()), ("y", pa.int64())])
    plain, split = (table_sink(TableInfo.of(schema, "append", (), by)) for by in ((), ("x",)))
    batch = pa.record_batch({"x": [1, 2], "y": [1, 2]})
    for sink in (plain, split):
        opened(sink)
        run(sink, [batch])
    assert type(plain) is TableSink
    assert plain.take_files(force=False) == []
    assert plain.take_files(force=True) == [StagedRows("", (batch,))]
    assert [files.folder for files in split.take_files(force=True)] == ["x=1", "x=2"]
