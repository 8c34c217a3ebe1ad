"""Filters leave exactly the rows that match, of a table of any partitions, and open no other file."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest
from counting_store import CountingStore
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.errors import ConfigurationError, CorruptionError
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.partitions import HIVE_NULL, PartitionFilter, matching_files, partition_folders
from tidegate.storage.tables.table_files import data_dir, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_JOB = JobId("demo-1")
_SCHEMA = pa.schema([("s", pa.string()), ("n", pa.int16()), ("b", pa.bool_()), ("d", pa.date32()), ("row", pa.int64())])
_BY = ("s", "n", "b", "d")
_VALUES = {
    "s": st.none() | st.sampled_from(["", "a", "a/b.parquet", "é", HIVE_NULL, "%2E"]),
    "n": st.none() | st.integers(-2, 2),
    "b": st.none() | st.booleans(),
    "d": st.none() | st.dates(dt.date(2012, 12, 31), dt.date(2013, 1, 2)),
}
_ROWS = st.lists(st.tuples(*_VALUES.values()), min_size=1, max_size=12)
_COMPARED = {"=": "__eq__", "!=": "__ne__", "<": "__lt__", "<=": "__le__", ">": "__gt__", ">=": "__ge__"}


@st.composite
def _filters(draw: st.DrawFn) -> PartitionFilter:
    name = draw(st.sampled_from(_BY))
    comparison = draw(st.sampled_from([*_COMPARED, "in"]))
    if comparison == "in":
        return name, "in", draw(st.lists(_VALUES[name], max_size=3))
    value = draw(_VALUES[name] if comparison in ("=", "!=") else _VALUES[name].filter(lambda one: one is not None))
    return name, comparison, value


def _matches(row: dict[str, Any], given: PartitionFilter) -> bool:
    name, comparison, value = given
    found = row[name]
    if comparison == "in":
        assert isinstance(value, list)
        return found in value
    if found is None or value is None:
        return comparison == ("=" if found is value else "!=") and None in (value,)
    return bool(getattr(found, _COMPARED[comparison])(value))


def _table(rows: list[tuple[Any, ...]], upsert: bool = False) -> tuple[CountingStore, pa.RecordBatch]:
    """A table with a file for each row; in mode upsert the row is its version too."""
    store = CountingStore("memory://partition-filters")
    store.delete_tree("")
    log = TableLog(store)
    log.create(TableInfo.of(_SCHEMA, "upsert" if upsert else "append", _BY if upsert else (), _BY))
    log.claim(_JOB)
    batch = pa.record_batch([*([row[i] for row in rows] for i in range(4)), list(range(len(rows)))], schema=_SCHEMA)
    files = []
    for number, folder in enumerate(partition_folders(batch, _BY)):
        one = batch.slice(number, 1)
        if upsert:
            one = one.append_column(VERSION_COLUMN, pa.array([number], pa.int64()))
        path = f"{data_dir(_JOB, AttemptNumber(0))}/{folder}/{number}.parquet"
        files.append(write_data_file(store, path, [one]))
    log.commit(_JOB, CheckpointId(1), tuple(files))
    return store, batch


@settings(max_examples=60)
@given(_ROWS, st.lists(_filters(), max_size=2))
def test_what_is_read_are_the_rows_that_match(rows: list[tuple[Any, ...]], filters: list[PartitionFilter]) -> None:
    """As a comparison of each row would have it; files of other partitions are not opened."""
    store, batch = _table(rows)
    store.reads.clear()

    found = read_table(store, filters=filters)

    expected = [row for row in batch.to_pylist() if all(_matches(row, given) for given in filters)]
    assert found.to_pylist() == expected
    assert found.schema == _SCHEMA
    assert len([path for path in store.reads if path.startswith("data/")]) == len(expected)


def test_the_newest_row_of_a_key_is_found_in_its_partition() -> None:
    """Filters and versions do not get into each other's way; no file at all is an empty table."""
    store, _ = _table([("a", 1, None, None), ("a", 2, None, None), ("a", 1, None, None)], upsert=True)
    assert read_table(store, filters=[("n", "=", 1)])["row"].to_pylist() == [2]
    assert read_table(store, filters=[("n", "=", 1), ("s", "!=", "a")]).equals(_SCHEMA.empty_table())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("row", "=", 1), r"the table is partitioned only by \['s', 'n', 'b', 'd'\]; filter the rows"),
        (("n", "~", 1), "comparisons are \"in\" and '=', '!=', '<'"),
        (("n", "=", "1"), "'1' is not a value of a column of type int16"),
        (("n", "=", True), "True is not a value of a column of type int16"),
        (("b", "=", 1), "1 is not a value of a column of type bool"),
        (("d", ">", dt.datetime(2013, 1, 1, tzinfo=dt.UTC)), "is not a value of a column of type date32"),
        (("s", "in", "abc"), '"in" takes several values'),
        (("s", "in", [1]), "1 is not a value of a column of type string"),
        (("n", "<", None), 'nothing is less or greater than None; use "=" or "!="'),
        (("n", "="), "give column, comparison and value"),
        ("n = 1", "give column, comparison and value"),
    ],
)
def test_a_filter_that_is_none_is_refused(given: Any, said: str) -> None:
    """It is named, with what is wrong with it."""
    store, _ = _table([("a", 1, True, dt.date(2013, 1, 1))])
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_table(store, filters=[given])
    assert str(caught.value).startswith(f"filter {given!r}")


def test_tables_without_partitions_have_no_filters() -> None:
    """And a file that lies where no partition is does not count as one."""
    plain = TableInfo.of(_SCHEMA, "append")
    with pytest.raises(ConfigurationError, match="partitioned not at all"):
        matching_files(plain, (), [("n", "=", 1)])
    store, _ = _table([("a", 1, True, None)])
    (file,) = TableLog(store).snapshot().files
    with pytest.raises(CorruptionError, match="not the folder of a partition by 1 columns"):
        matching_files(TableInfo.of(_SCHEMA, "append", (), ("n",)), (file,), [("n", "=", 1)])
