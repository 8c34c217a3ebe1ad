"""Which columns a table may be partitioned by, and what the folders of partitions are called."""

from __future__ import annotations

from urllib.parse import unquote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.storage.errors import TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.tables.partitions import HIVE_NULL, TEXT_BYTES_MAX, folder_name
from tidegate.storage.tables.table_files import data_dir, delete_unreferenced, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_SCHEMA = pa.schema(
    [("k", pa.string()), ("n", pa.int64()), ("f", pa.float64()), ("at", pa.timestamp("us")), ("l", pa.list_(pa.int8()))]
)
_JOB = JobId("demo-1")


@given(st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: len(text.encode()) <= TEXT_BYTES_MAX))
def test_a_text_is_the_name_of_one_folder(text: str) -> None:
    """No separators, nothing hidden or special, not too long, no file's ending, told from null; and it comes back."""
    name = folder_name("column", text)

    assert name.isascii()
    assert "/" not in name
    assert len(name) < 255
    assert not name.endswith(".parquet")
    assert name != f"column={HIVE_NULL}"
    assert unquote(name.partition("=")[2]) == text


def test_a_null_and_a_text_that_reads_so_differ() -> None:
    """Hive's word is for nulls alone. The name of a column is encoded only where it could not be that of a folder."""
    assert folder_name("a=b.c", None) == f"a%3Db.c={HIVE_NULL}"
    assert folder_name("größe: a+b", 1) == "größe: a+b=1"
    assert folder_name(".c", 1) == "%2Ec=1"
    assert folder_name("c", HIVE_NULL) == f"c=%5F{HIVE_NULL[1:]}"
    assert folder_name("c", "x.parquet") == "c=x%2Eparquet"


@pytest.mark.parametrize(
    ("partition_by", "keys", "said"),
    [
        (("x",), (), "partition column 'x' is not among the table's columns"),
        (("k", "k"), (), "names a column twice"),
        (("f",), (), "column 'f' is double, which cannot be a partition: use a column of integers"),
        (("at",), (), "column 'at' is timestamp"),
        (("l",), (), "cannot be a partition"),
        (("n",), ("k",), r"partition column 'n' is not among the keys \['k'\]"),
    ],
)
def test_what_cannot_be_a_partition_is_refused(partition_by: tuple[str, ...], keys: tuple[str, ...], said: str) -> None:
    """With the column, and what to do."""
    with pytest.raises(TableError, match=said):
        TableInfo.of(_SCHEMA, "upsert" if keys else "append", keys, partition_by)


def test_a_partition_needs_rows_and_a_name_that_fits() -> None:
    """Not every column can be one, and a folder's name has an end."""
    with pytest.raises(TableError, match="leaves no column"):
        TableInfo.of(pa.schema([("k", pa.string())]), "append", (), ("k",))
    with pytest.raises(TableError, match="too long for the name of a folder"):
        TableInfo.of(pa.schema([("k" * 61, pa.string()), ("v", pa.int8())]), "append", (), ("k" * 61,))


def test_a_table_keeps_its_partitioning(memory_store: FileSystemStore) -> None:
    """A job that writes it otherwise is refused, and told the difference."""
    TableLog(memory_store).create(TableInfo.of(_SCHEMA, "append", (), ("k", "n")))
    with pytest.raises(TableError, match=r"has partition_by \('k', 'n'\), the job writes with \('n', 'k'\)"):
        TableLog(memory_store).create(TableInfo.of(_SCHEMA, "append", (), ("n", "k")))


def test_what_nobody_refers_to_goes_from_partitions_too(store: FileSystemStore) -> None:
    """Files of partitions are looked at one by one; a folder of which one is needed is not taken for empty."""
    schema = pa.schema([("p", pa.string()), ("v", pa.int64())])
    log = TableLog(store)
    log.create(TableInfo.of(schema, "append", (), ("p",)))
    log.claim(_JOB)
    batch = pa.record_batch([["x"], [1]], schema=schema)
    folders = [f"{data_dir(_JOB, AttemptNumber(n))}/p=x" for n in range(2)]
    kept, *others = [
        write_data_file(store, path, [batch])
        for path in (f"{folders[0]}/a.parquet", f"{folders[0]}/b.parquet", f"{folders[1]}/c.parquet")
    ]
    log.commit(_JOB, CheckpointId(1), (kept,))

    assert delete_unreferenced(store, _JOB, before_attempt=1) == 1
    assert store.list(folders[0]) == ["a.parquet"]
    assert delete_unreferenced(store, _JOB, before_attempt=None) == 1
    assert [store.exists(file.path) for file in (kept, *others)] == [True, False, False]
    assert read_table(store).to_pydict() == {"p": ["x"], "v": [1]}
