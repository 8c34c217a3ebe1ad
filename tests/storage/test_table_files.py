"""Data files come back as written, tables show one row a key, and nothing that is referred to is deleted."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_strategies import record_batches

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import CorruptionError, NotFoundError, TableError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid, SubtaskIndex
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables import table_files
from tidegate.storage.tables.table_files import (
    data_dir,
    data_file_name,
    delete_unreferenced,
    newest_rows,
    read_data_file,
    read_table,
    write_data_file,
    write_joined_file,
)
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_JOB = JobId("demo-1")
_SCHEMA = pa.schema([("k", pa.string()), ("f", pa.float64()), ("v", pa.int64())])
_VERSIONED = _SCHEMA.append(pa.field(VERSION_COLUMN, pa.int64()))


def _rows(*rows: tuple[object, ...], schema: pa.Schema = _VERSIONED) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def _claimed(store: FileSystemStore, info: TableInfo) -> TableLog:
    log = TableLog(store)
    log.create(info)
    log.claim(_JOB)
    return log


def _commit(store: FileSystemStore, log: TableLog, number: int, batch: pa.RecordBatch) -> DataFile:
    file = write_data_file(store, f"{data_dir(_JOB, AttemptNumber(0))}/{number}.parquet", [batch])
    log.commit(_JOB, CheckpointId(number), (file,))
    return file


@given(batch=record_batches(columns_min=1).filter(lambda b: b.num_columns > 0))
@settings(max_examples=25)
def test_data_files_come_back(batch: pa.RecordBatch) -> None:
    """Rows of any schema are read as they were written, and the file is described truly."""
    store = open_store("memory://table-files")
    file = write_data_file(store, "data/f.parquet", [batch, batch])

    found = read_data_file(store, file)

    assert found.schema.equals(batch.schema)
    assert found.equals(pa.Table.from_batches([batch, batch]))
    assert (file.rows, file.size_bytes) == (2 * batch.num_rows, len(store.read(file.path)))


def test_row_groups_have_a_limit(store: FileSystemStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """So readers decode few rows at a time, and pass over row groups, whoever has written the file."""
    monkeypatch.setattr(table_files, "_GROUP_ROWS", 10)
    batch = pa.record_batch({"n": range(25)})
    files = [
        write_data_file(store, "data/a.parquet", [batch]),
        write_joined_file(store, "data/b.parquet", batch.schema, [pa.Table.from_batches([batch])]),
    ]
    for file in files:
        metadata = pq.read_metadata(pa.BufferReader(store.read(file.path)))
        assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10, 10, 5]
        assert read_data_file(store, file).column("n").to_pylist() == list(range(25))


def test_append_tables_show_all_rows_in_order(store: FileSystemStore) -> None:
    """On every store: what was committed, in the order of the commits; what was only written is not there."""
    log = _claimed(store, TableInfo.of(_SCHEMA, "append"))
    first, second, third = (_rows((name, None, i), schema=_SCHEMA) for i, name in enumerate("xyx"))
    _commit(store, log, 1, first)
    _commit(store, log, 2, second)
    write_data_file(store, "data/demo-1/000000/3.parquet", [third])

    assert read_table(store).equals(pa.Table.from_batches([first, second]))


def test_an_empty_table_has_its_schema(memory_store: FileSystemStore) -> None:
    """Before the first commit there are no rows, but there are columns; without a table there is an error."""
    with pytest.raises(TableError, match="there is no table"):
        read_table(memory_store)
    _claimed(memory_store, TableInfo.of(_SCHEMA, "upsert", ("k",)))

    assert read_table(memory_store).equals(_SCHEMA.empty_table())


_key_rows = st.lists(
    st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([0.0, 1.5, None]), st.integers(-5, 5)), max_size=5
)


@given(commits=st.lists(_key_rows, max_size=5), keys=st.sampled_from([("k",), ("f",), ("k", "f")]))
@settings(max_examples=25)
def test_upsert_tables_show_the_newest_row_of_a_key(
    commits: list[list[tuple[str | None, float | None, int]]], keys: tuple[str, ...]
) -> None:
    """One row for each distinct key, null keys included, that of the highest version; no version column."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    log = _claimed(store, TableInfo.of(_SCHEMA, "upsert", keys))
    newest: dict[tuple[object, ...], tuple[object, ...]] = {}
    for number, rows in enumerate(commits, start=1):
        # A sink puts at most one row of a key into a file.
        distinct = {tuple(row[_SCHEMA.get_field_index(key)] for key in keys): row for row in rows}
        newest |= distinct
        _commit(store, log, number, _rows(*((*row, number) for row in distinct.values())))

    found = read_table(store)
    store.delete_tree("")

    assert found.schema.equals(_SCHEMA)
    assert sorted(map(repr, (tuple(row.values()) for row in found.to_pylist()))) == sorted(map(repr, newest.values()))


def test_versions_count_not_the_order_of_commits(memory_store: FileSystemStore) -> None:
    """A file committed later whose version is lower does not win."""
    log = _claimed(memory_store, TableInfo.of(_SCHEMA, "upsert", ("k",)))
    _commit(memory_store, log, 1, _rows(("x", None, 1, 8)))
    _commit(memory_store, log, 2, _rows(("x", None, 2, 7)))

    assert read_table(memory_store).to_pylist() == [{"k": "x", "f": None, "v": 1}]


def test_damaged_and_lost_files_are_never_skipped(memory_store: FileSystemStore) -> None:
    """Reading a table fails rather than showing fewer or other rows."""
    log = _claimed(memory_store, TableInfo.of(_SCHEMA, "append"))
    file = _commit(memory_store, log, 1, _rows(("x", 1.0, 1), schema=_SCHEMA))
    whole = memory_store.read(file.path)

    for damaged in (whole[:-1], bytes([whole[0] ^ 1]) + whole[1:], b""):
        memory_store.write(file.path, [damaged])
        with pytest.raises(CorruptionError, match=r"/1\.parquet is damaged"):
            read_table(memory_store)
    memory_store.delete(file.path)
    with pytest.raises(NotFoundError):
        read_table(memory_store)


def test_a_file_with_other_columns_is_damage(memory_store: FileSystemStore) -> None:
    """A file that lacks a column of its table, or is no Parquet, is named."""
    log = _claimed(memory_store, TableInfo.of(_SCHEMA, "upsert", ("k",)))
    file = _commit(memory_store, log, 1, _rows(("x", 1.0, 1), schema=_SCHEMA))

    with pytest.raises(CorruptionError, match=r"1.parquet does not have the columns .*" + VERSION_COLUMN):
        read_table(memory_store)
    memory_store.write("data/no.parquet", [b"no parquet"])
    with pytest.raises(CorruptionError, match="cannot be decoded"):
        read_data_file(
            memory_store, replace(file, path="data/no.parquet", size_bytes=10, checksum="xxh3:420dc0bd34ea1748")
        )


def test_deletes_what_nobody_refers_to(store: FileSystemStore) -> None:
    """On every store: only files of this job's past attempts that no entry, also of hidden rows, refers to."""
    log = _claimed(store, TableInfo.of(_SCHEMA, "append"))
    batch = _rows(("x", 1.0, 1), schema=_SCHEMA)
    kept = write_data_file(store, "data/demo-1/000000/kept.parquet", [batch])
    hidden = write_data_file(store, "data/demo-1/000001/hidden.parquet", [batch])
    log.commit(_JOB, CheckpointId(1), (kept,))
    log.commit(_JOB, CheckpointId(2), (hidden,))
    log.claim(JobId("other-1"), (_JOB, CheckpointId(1)))
    log.commit(JobId("other-1"), CheckpointId(1), ())
    for path in ("demo-1/000000/a", "demo-1/000001/b", "demo-1/000002/c", "demo-1/000010/d", "other-1/000000/e"):
        write_data_file(store, f"data/{path}.parquet", [batch])

    assert delete_unreferenced(store, _JOB, before_attempt=2) == 2
    assert delete_unreferenced(store, _JOB, before_attempt=2) == 0
    assert store.exists("data/demo-1/000002/c.parquet")
    assert delete_unreferenced(store, _JOB, before_attempt=None) == 2

    left = [
        f"{job}/{attempt}/{name}"
        for job in store.list("data")
        for attempt in store.list(f"data/{job}")
        for name in store.list(f"data/{job}/{attempt}")
    ]
    assert left == ["demo-1/000000/kept.parquet", "demo-1/000001/hidden.parquet", "other-1/000000/e.parquet"]
    assert read_table(store).num_rows == 1


def test_deletes_what_a_killed_writer_left(local_store: FileSystemStore) -> None:
    """Half-written files of a dead attempt go too, though listings do not show them."""
    _claimed(local_store, TableInfo.of(_SCHEMA, "append"))
    torn = Path(local_store.url, "data/demo-1/000000/.tmp-torn")
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"x")

    assert delete_unreferenced(local_store, _JOB, before_attempt=None) == 1
    assert not torn.exists()


@pytest.mark.parametrize("uid", ["orders", "_orders", ".orders", "größe", "a b", "a[b]*?{c,d}", "100%", "a..b"])
def test_no_uid_makes_a_data_file_hidden_or_a_pattern(uid: str) -> None:
    """Spark passes over names that begin with `_` or `.`, and takes brackets and stars for a pattern."""
    name = data_file_name(SubtaskIndex(1), 23, OperatorUid(uid))
    assert name.startswith("part-1-000023-")
    assert name.endswith(".parquet")
    assert re.fullmatch(r"[-\w.%~]+", name, re.ASCII)


def test_names_of_data_files_differ_where_uids_do() -> None:
    """Nothing of a uid is left out of the name."""
    uids = ["a_b", "a%5Fb", "a-b", "_ab", "a.b", "A_b"]
    assert len({data_file_name(SubtaskIndex(0), 0, OperatorUid(uid)) for uid in uids}) == len(uids)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.timestamp("us", "+05:30"), [0, 1, None]),
        (pa.timestamp("ns", "+05:45"), [0, 1, None]),
        (pa.decimal256(50, 2), [Decimal("-1.50"), Decimal(10) ** 40, None]),
        (pa.decimal128(38, 2), [Decimal("-1.50"), Decimal(10) ** 30, None]),
        (pa.time64("ns"), [0, 1, None]),
        (pa.duration("s"), [0, 1, None]),
        (pa.binary(2), [b"ab", b"cd", None]),
        (pa.bool_(), [False, True, None]),
    ],
)
@pytest.mark.parametrize("order", [True, False])
def test_keys_of_any_type_are_told_apart(kind: pa.DataType, values: list[object], order: bool) -> None:
    """The newest row of each counts, or that with the greatest value in a column of such a type."""
    schema = pa.schema([("k", kind), ("o", kind), (VERSION_COLUMN, pa.int64())])
    first, second, null = values
    keys = [first, second, first, null, null, second]
    orders = [second, first, first, null, first, second]
    table = pa.table([pa.array(keys, kind), pa.array(orders, kind), range(6)], schema=schema)
    if order and (pa.types.is_fixed_size_binary(kind) or pa.types.is_boolean(kind)):
        return
    info = TableInfo.of(schema.remove(2), mode="upsert", keys=["k"], order_by="o" if order else None)
    newest = newest_rows(table, info).column(VERSION_COLUMN).to_pylist()
    assert newest == ([0, 4, 5] if order else [2, 4, 5])
