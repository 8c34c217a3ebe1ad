"""Which files are put together, and what a restored job finds of a table that was compacted."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_logs import A, B, C, X, commit, file_of, owner_of, shown_at, table_at

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import FencedError, InvariantError, TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.maintenance import rewrites_of, rewritten, worth_it
from tidegate.storage.tables.partitions import folder_of
from tidegate.storage.tables.table_files import data_dir, read_data_file, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_LIMIT = 100
_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


@given(st.lists(st.tuples(st.sampled_from(["", "p=1/", "p=2/"]), st.integers(1, 150)), max_size=30))
def test_small_neighbours_of_a_partition_come_together(given: list[tuple[str, int]]) -> None:
    """Every file once, in the order of its partition; large ones alone; none too large, and none could be larger."""
    files = [DataFile(f"data/j/0/{folder}{n}", 1, size, "") for n, (folder, size) in enumerate(given)]

    found = rewrites_of(files, _LIMIT)

    for folder in {folder_of(file.path) for file in files}:
        runs = [rewrite.files for rewrite in found if rewrite.folder == folder]
        assert [file for run in runs for file in run] == [file for file in files if folder_of(file.path) == folder]
        for run in runs:
            assert len(run) == 1 or all(file.size_bytes < _LIMIT // 2 for file in run)
            assert len(run) == 1 or sum(file.size_bytes for file in run) <= _LIMIT
        small = [run for run in runs if run[0].size_bytes < _LIMIT // 2]
        for run, following in pairwise(small):
            if runs.index(following) == runs.index(run) + 1:
                assert sum(file.size_bytes for file in run) + following[0].size_bytes > _LIMIT
    assert sum(len(rewrite.files) for rewrite in found) == len(files)
    assert worth_it(found) == (len(found) < len(files))


def _staged(store: FileSystemStore, name: str, columns: dict[str, list[object]], schema: pa.Schema) -> DataFile:
    path = f"{data_dir(A, AttemptNumber(0))}/{name}.parquet"
    return write_data_file(store, path, [pa.record_batch(list(columns.values()), schema=schema)])


def test_rows_keep_order_and_partition(memory_store: FileSystemStore) -> None:
    """A new file has the rows of all that it replaces, in the same folder; one that stands alone stays."""
    info = TableInfo.of(_SCHEMA, "append", (), ("k",))
    files = [_staged(memory_store, f"k={k}/{n}", {"k": [k], "v": [n]}, _SCHEMA) for n, k in enumerate(["a", "b", "a"])]

    new = rewritten(memory_store, info, "data/compaction_1/000000", "", rewrites_of(files, 10**6))

    assert [file.path for file in new] == ["data/compaction_1/000000/k=a/000000.parquet", files[1].path]
    assert read_data_file(memory_store, new[0]).to_pydict() == {"k": ["a", "a"], "v": [0, 2]}


def test_a_file_that_has_not_the_rows_of_the_log_is_never_replaced(memory_store: FileSystemStore) -> None:
    """Rows would be lost for good once nobody reads the old files."""
    files = [_staged(memory_store, str(n), {"k": ["a"], "v": [n]}, _SCHEMA) for n in range(2)]
    wrong = DataFile(files[0].path, 2, files[0].size_bytes, files[0].checksum)
    with pytest.raises(InvariantError, match="have 2 rows, but 3 rows according to the log"):
        rewritten(memory_store, TableInfo.of(_SCHEMA, "append"), "data/c/0", "", rewrites_of([wrong, files[1]], 10**6))


def test_of_an_upsert_table_the_newest_row_of_a_key_stays(memory_store: FileSystemStore) -> None:
    """With its version, so that it loses against a newer one elsewhere."""
    schema = _SCHEMA.append(pa.field(VERSION_COLUMN, pa.int64()))
    files = [
        _staged(memory_store, str(n), {"k": ["a", k], "v": [n, n], "version": [version, version]}, schema)
        for n, (k, version) in enumerate([("b", 5), ("c", 4)])
    ]
    info = TableInfo.of(_SCHEMA, "upsert", ("k",))
    (new,) = rewritten(memory_store, info, "data/c/000000", "", rewrites_of(files, 10**6))
    rows = read_data_file(memory_store, new).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [("a", 0, 5), ("b", 0, 5), ("c", 1, 4)]


def _compact(store: FileSystemStore, job: str, line: JobId) -> list[str]:
    """Put what a line shows into one file; the names of what was replaced."""
    log = TableLog(store)
    files = log.claim_compaction(JobId(job), line, owner_of(log))
    log.commit(JobId(job), CheckpointId(0), (file_of(job, sum(file.rows for file in files)),))
    return [file.path.removeprefix("data/").removesuffix(".parquet") for file in files]


def test_a_job_restored_behind_a_compaction_goes_on_from_the_large_files(memory_store: FileSystemStore) -> None:
    """If its checkpoint covers all that was replaced; from an older one it finds the files of then."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1")
    commit(log, A, 2, "a2")
    assert _compact(memory_store, "first", A) == ["a1", "a2"]
    assert shown_at(memory_store) == ["first"]

    TableLog(memory_store).claim(B, (A, CheckpointId(2)))
    commit(TableLog(memory_store), B, 1, "b1")
    assert shown_at(memory_store) == ["first", "b1"]
    assert _compact(memory_store, "second", A) == ["first", "b1"]
    TableLog(memory_store).claim(C, (B, CheckpointId(1)))
    commit(TableLog(memory_store), C, 1, "c1")
    assert shown_at(memory_store) == ["second", "c1"]

    TableLog(memory_store).claim(X, (A, CheckpointId(1)))
    commit(TableLog(memory_store), X, 1, "x1")
    assert shown_at(memory_store) == ["a1", "x1"]


def test_a_compaction_leaves_other_lines_alone(memory_store: FileSystemStore) -> None:
    """Rows that another job has appended stay in files of their own, whatever is restored afterwards."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1", "a2")
    log.claim(X, if_exists="append")
    commit(log, X, 1, "x1", "x2")
    assert _compact(memory_store, "ofA", A) == ["a1", "a2"]
    assert shown_at(memory_store) == ["x1", "x2", "ofA"]
    assert _compact(memory_store, "ofX", X) == ["x1", "x2"]
    assert shown_at(memory_store) == ["ofA", "ofX"]
    log.claim(B, (X, CheckpointId(1)))
    commit(log, B, 1)
    assert shown_at(memory_store) == ["ofA", "ofX"]
    log.claim(C, (A, CheckpointId(0)))
    commit(log, C, 1)
    assert shown_at(memory_store) == ["ofX"]


def test_whoever_takes_the_table_wins_over_a_compaction(memory_store: FileSystemStore) -> None:
    """Its commit is refused, and what shows is what had shown."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1", "a2")
    late = TableLog(memory_store)
    late.claim_compaction(JobId("late"), A, A)
    log.claim(B, if_exists="append")
    with pytest.raises(FencedError, match="is owned by 'b-1', not by 'late'"):
        late.commit(JobId("late"), CheckpointId(0), (file_of("late", 2),))
    commit(log, B, 1, "b1")
    assert shown_at(memory_store) == ["a1", "a2", "b1"]
    with pytest.raises(FencedError, match="is owned by 'b-1', not by 'a-1'"):
        late.claim_compaction(JobId("later"), A, A)


def test_a_table_that_is_about_to_change_is_not_compacted(memory_store: FileSystemStore) -> None:
    """Old rows would count as new ones, which the job that is to hide them had never seen."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "a1", "a2")
    log.claim(B, if_exists="overwrite")
    with pytest.raises(
        TableError, match=r"job 'b-1' has claimed the table .* will hide rows of it with its first commit"
    ):
        log.claim_compaction(JobId("early"), A, B)
    commit(log, B, 1, "b1", "b2")
    assert _compact(memory_store, "later", B) == ["b1", "b2"]


def test_rows_that_were_to_be_overwritten_do_not_come_back_in_a_large_file(memory_store: FileSystemStore) -> None:
    """B was to overwrite what A had written, and died; C, restored from it, does so, and leaves what came after B."""
    log = table_at(memory_store)
    log.claim(A)
    commit(log, A, 1, "old")
    log.claim(B, if_exists="overwrite")
    log.claim(X, (A, CheckpointId(1)))
    commit(log, X, 1, "new")
    assert _compact(memory_store, "both", A) == ["old", "new"]
    assert shown_at(memory_store) == ["both"]
    log.claim(C, (B, CheckpointId(0)))
    commit(log, C, 1, "c1")
    assert shown_at(memory_store) == ["new", "c1"]
