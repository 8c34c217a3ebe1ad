"""Tables that get columns: what is added, what is refused, and what older files and older commits say."""

from __future__ import annotations

import pyarrow as pa
import pytest
from plain_store import PlainStore
from table_logs import A, B

from tidegate.storage.errors import TableError
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.tables.maintenance import CompactionSettings, RunningCompaction
from tidegate.storage.tables.table_files import data_dir, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_FIRST = pa.schema([("k", pa.string()), ("v", pa.int64())])
_NEW = [pa.field("w", pa.list_(pa.int32())), pa.field("d", pa.dictionary(pa.int8(), pa.string()))]
_SECOND = pa.schema([*_FIRST, *_NEW])


def written(store: PlainStore, job: JobId, number: int, rows: list[dict[str, object]], schema: pa.Schema) -> None:
    """A commit of a job, with a file of these columns."""
    path = f"{data_dir(job, AttemptNumber(0))}/{number}.parquet"
    file = write_data_file(store, path, [pa.RecordBatch.from_pylist(rows, schema=schema)])
    TableLog(store).commit(job, CheckpointId(number), (file,))


def test_older_rows_have_nulls_and_older_commits_their_columns() -> None:
    """Also where a job of the line goes on with the table, and where files were put together."""
    store = PlainStore()
    log = TableLog(store, entries_per_snapshot=3)
    log.create(TableInfo.of(_FIRST, "append"))
    log.claim(A)
    for number in (1, 2):
        written(store, A, number, [{"k": "a", "v": number}], _FIRST)
    before = TableLog(store).history()[-1].number
    log.check_claim(TableInfo.of(_SECOND, "append"), B, (A, CheckpointId(2)), evolves=True)
    assert TableLog(store).snapshot().info.arrow_schema.names == ["k", "v"], "a check changes nothing"

    for _ in range(2):
        log.create(TableInfo.of(_SECOND, "append"), evolves=True)
    log.claim(B, (A, CheckpointId(2)))
    assert read_table(store)["w"].to_pylist() == [None, None]
    written(store, B, 1, [{"k": "b", "v": 3, "w": [1], "d": "x"}], _SECOND)
    expected = [
        {"k": "a", "v": 1, "w": None, "d": None},
        {"k": "a", "v": 2, "w": None, "d": None},
        {"k": "b", "v": 3, "w": [1], "d": "x"},
    ]
    assert read_table(store).to_pylist() == expected
    assert read_table(store, before).to_pylist() == [{"k": "a", "v": 1}, {"k": "a", "v": 2}]
    assert [entry.info.added for entry in log.entries() if entry.info is not None] == [(), ("w", "d")]

    assert RunningCompaction(store, TableLog(store), B, CompactionSettings(10**6, 2)).step()
    assert len(TableLog(store).snapshot().files) == 1
    assert read_table(store).to_pylist() == expected


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ([("k", pa.string())], "only the table has a column 'v'"),
        ([("k", pa.string()), ("v", pa.int32())], "column 'v' is int64 in the table, int32 in the job"),
        ([("w", pa.int64()), ("k", pa.string()), ("v", pa.int64())], "columns after the existing ones"),
        ([("k", pa.string()), ("v", pa.int64()), pa.field("w", pa.int64(), False)], "'w' is new .* and not nullable"),
    ],
)
def test_nothing_else_may_change(fields: list[pa.Field], text: str) -> None:
    """Neither when it is checked nor when the table is opened; the table stays as it was."""
    store = PlainStore()
    log = TableLog(store)
    log.create(TableInfo.of(_FIRST, "append"))
    wanted = TableInfo.of(pa.schema(fields), "append")
    with pytest.raises(TableError, match=text):
        log.check_claim(wanted, A, evolves=True)
    with pytest.raises(TableError, match=text):
        log.create(wanted, evolves=True)
    assert log.snapshot().info == TableInfo.of(_FIRST, "append")


def test_without_the_option_a_new_column_is_refused_with_the_way_to_add_it() -> None:
    """And only where that would help."""
    log = TableLog(PlainStore())
    log.create(TableInfo.of(_FIRST, "append"))
    with pytest.raises(TableError, match=r"only the job has a column 'w'.*schema_evolution=\"add_columns\""):
        log.create(TableInfo.of(_SECOND, "append"))
    with pytest.raises(TableError, match=r"cast the columns$"):
        log.create(TableInfo.of(pa.schema([("k", pa.string())]), "append"))


def test_other_properties_of_a_table_never_change() -> None:
    """With the option as without it."""
    log = TableLog(PlainStore())
    log.create(TableInfo.of(_FIRST, "append"))
    with pytest.raises(TableError, match="has mode 'append', the job writes with 'upsert'"):
        log.create(TableInfo.of(_SECOND, "upsert", ("k",)), evolves=True)


def test_a_file_that_lacks_another_column_is_damaged() -> None:
    """Nulls stand for columns that were added, and for nothing else."""
    store = PlainStore()
    log = TableLog(store)
    log.create(TableInfo.of(_FIRST, "append"))
    log.claim(A)
    written(store, A, 1, [{"k": "a"}], pa.schema([("k", pa.string())]))
    with pytest.raises(Exception, match="does not have the columns of its table"):
        read_table(store)
