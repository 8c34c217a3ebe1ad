"""Staged files as a source: exact rows from any offset, and nothing but what was staged."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Callable, Iterable
from pathlib import Path

import cloudpickle
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source

from tidegate.connectors.pushed_filters import ColumnTest
from tidegate.connectors.source import ReadResult, SourceSplit
from tidegate.connectors.staged_parquet import (
    MANIFEST_PATH,
    FileLimits,
    ParquetReader,
    ParquetSource,
    write_files,
    write_manifest,
)
from tidegate.storage.errors import (
    AlreadyExistsError,
    ConfigurationError,
    CorruptionError,
    NotFoundError,
    StorageError,
)
from tidegate.storage.files.file_system_store import open_store

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("flag", pa.bool_()),
        ("small", pa.int8()),
        ("real", pa.float64()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("amount", pa.decimal128(12, 2)),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("wall", pa.timestamp("us")),
        ("took", pa.duration("us")),
        ("tags", pa.list_(pa.field("element", pa.string()))),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("point", pa.struct([("x", pa.int32()), ("y", pa.float32())])),
    ]
)
DAY = dt.datetime(2013, 1, 1)


def table_of(rows: int, first_id: int = 0) -> pa.Table:
    """Rows with values of every kind that depend on their id; every fifth row has nulls."""

    def row(i: int) -> dict[str, object]:
        if i % 5 == 4:
            return {"id": i}
        return {
            "id": i,
            "flag": i % 2 == 0,
            "small": i % 100,
            "real": i / 3,
            "text": f"t{i % 7}",
            "raw": bytes([i % 256]),
            "amount": decimal.Decimal(i) / 100,
            "day": (DAY + dt.timedelta(days=i)).date(),
            "at": (DAY + dt.timedelta(seconds=i)).replace(tzinfo=dt.UTC),
            "wall": DAY + dt.timedelta(microseconds=i),
            "took": dt.timedelta(microseconds=i),
            "tags": [f"a{i}", None][: i % 3],
            "counts": [("k", i)],
            "point": {"x": i, "y": float(i)},
        }

    return pa.Table.from_pylist([row(first_id + i) for i in range(rows)], schema=SCHEMA)


def stage(url: str, parts: Iterable[pa.Table], limits: FileLimits, batch_rows: int = 7) -> ParquetSource:
    """Stage tables as Spark's executors would, one partition each."""
    store = open_store(url)
    files = [
        file
        for number, part in enumerate(parts)
        for file in write_files(store, f"data/part-{number}", part.to_batches(max_chunksize=batch_rows), SCHEMA, limits)
    ]
    write_manifest(store, SCHEMA, tuple(files))
    return ParquetSource.open(url)


def read_all(reader: ParquetReader, split: SourceSplit, rows_max: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    """A split from its first to its last row, checking that offsets advance by what was read."""
    batches, offset = [], 0
    while True:
        result = reader.read(split, offset, rows_max)
        if result.batch is not None:
            assert result.batch.num_rows <= rows_max
            batches.append(result.batch)
        assert result.next_offset == offset + (result.batch.num_rows if result.batch is not None else 0)
        assert result.at_end == (result.next_offset == split.rows)
        offset = result.next_offset
        if result.at_end:
            return pa.Table.from_batches(batches, schema)


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[ParquetSource, tuple[pa.Table, ...]]:
    """Two files of 100 rows in row groups of 32, and what is in them."""
    parts = (table_of(100), table_of(100, first_id=1000))
    url = str(tmp_path_factory.mktemp("staged"))
    return stage(url, parts, FileLimits(rows_per_group=32)), parts


@settings(max_examples=60, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 100), st.integers(1, 130)), max_size=12))
def test_any_sequence_of_reads_returns_exactly_the_rows(
    staged: tuple[ParquetSource, tuple[pa.Table, ...]], reads: list[tuple[int, int, int]]
) -> None:
    """Whatever was read before, a read gives the rows from its offset on, a number that repeats."""
    source, parts = staged
    reader, fresh = source.reader(), source.reader()
    for which, offset, rows_max in reads:
        split = source.splits()[which]
        result = reader.read(split, offset, rows_max)
        expected = parts[which].slice(offset, result.next_offset - offset)
        if result.batch is None:
            assert offset == result.next_offset == 100
        else:
            result.batch.validate(full=True)
            assert 0 < result.batch.num_rows <= rows_max
            assert pa.Table.from_batches([result.batch]).equals(expected)
        assert result.at_end == (result.next_offset == 100)
        assert fresh.read(split, offset, rows_max) == result
        fresh.close()
    reader.close()


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 60),
    group=st.integers(1, 20),
    file_rows=st.integers(1, 40),
    batch=st.integers(1, 70),
    rows_max=st.integers(1, 70),
    tiny=st.booleans(),
)
def test_files_hold_every_row_once_in_order_within_their_limits(
    rows: int, group: int, file_rows: int, batch: int, rows_max: int, tiny: bool
) -> None:
    """However rows are cut into batches, groups and files, the splits in order give them back."""
    url = f"memory://cuts-{rows}-{group}-{file_rows}-{batch}-{rows_max}-{tiny}"
    open_store(url).delete_tree("")
    table = table_of(rows)
    limits = FileLimits(
        rows_per_group=min(group, file_rows),
        file_rows_max=file_rows,
        group_bytes_max=400 if tiny else 1 << 20,
    )
    source = stage(url, [table], limits, batch)
    assert source.rows == rows
    assert all(0 < split.rows < file_rows + limits.rows_per_group for split in source.splits())
    reader = source.reader()
    parts = [read_all(reader, split, rows_max) for split in source.splits()]
    assert pa.concat_tables([SCHEMA.empty_table(), *parts]).equals(table)


def test_files_end_at_their_size_in_bytes(tmp_path: Path) -> None:
    """A limit in bytes closes a file although its limit in rows is far away."""
    limits = FileLimits(rows_per_group=50, file_bytes_max=1)
    assert [file.rows for file in stage(str(tmp_path), [table_of(120)], limits).files] == [50, 50, 20]


def test_it_keeps_the_contract(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """Every row of every file, in order."""
    source, tables = staged
    assert len(check_source(source)) == sum(table.num_rows for table in tables)


def test_it_reads_only_the_columns_that_are_wanted(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """The same rows at the same offsets, whatever is read, and again of what is left of it."""
    source, tables = staged
    names = ["small", "tags", "counts", "point"]
    narrow = source.projected(["flag", *names]).projected(names)
    check_source(narrow)
    assert narrow.splits() == source.splits()
    for split, table in zip(narrow.splits(), tables, strict=True):
        assert read_all(narrow.reader(), split, 5, narrow.schema).equals(table.select(names))


def test_it_passes_over_row_groups_that_a_filter_drops(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """From any row on, into the last row group as well; what it reads are the same rows at the same offsets."""
    source, (part, _) = staged
    wanted = source.filtered(((ColumnTest("id", "==", pl.lit(40).meta.serialize()),),))
    split, reader = wanted.splits()[0], wanted.reader()
    assert reader.read(split, 0, 5) == ReadResult(None, 32, at_end=False, skipped=32)
    assert reader.read(split, 31, 5) == ReadResult(None, 32, at_end=False, skipped=1)
    read = reader.read(split, 32, 5)
    assert read.batch is not None
    assert pa.Table.from_batches([read.batch]).equals(part.slice(32, 5))
    assert reader.read(split, 64, 5) == ReadResult(None, 100, at_end=True, skipped=36)
    assert reader.read(split, 100, 5) == ReadResult(None, 100, at_end=True)
    check_source(wanted)


def test_a_source_travels_and_opens_again(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """A source that was pickled, or opened by url alone, has the same splits and rows."""
    source, parts = staged
    for other in (cloudpickle.loads(cloudpickle.dumps(source)), ParquetSource.open(source.url)):
        assert other == source
        assert read_all(other.reader(), other.splits()[1], 40).equals(parts[1])


def test_a_batch_is_a_view_of_its_row_group(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """Reading a part of a decoded row group copies nothing."""
    reader = staged[0].reader()
    split = staged[0].splits()[0]
    first, second = (reader.read(split, offset, 8).batch for offset in (0, 8))
    assert first is not None
    assert second is not None
    assert first.column("id").buffers()[1].address == second.column("id").buffers()[1].address


def test_an_offset_outside_a_split_is_refused(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """A position of another source does not silently read nothing."""
    source, _ = staged
    for offset, rows_max in ((101, 1), (-1, 1), (0, 0)):
        with pytest.raises(ConfigurationError, match="which has 100 rows"):
            source.reader().read(source.splits()[0], offset, rows_max)


def flip(data: bytes) -> bytes:
    """One bit in the middle is another."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize(
    "damage",
    [flip, lambda d: d[:-1], lambda d: d + b"x", lambda d: b""],
    ids=["bit", "cut", "grown", "empty"],
)
def test_a_file_that_is_not_the_staged_one_is_refused(
    tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]
) -> None:
    """A flipped bit, a missing or an additional byte is found before a row is given out."""
    url = str(tmp_path) if kind == "local" else f"memory://damage-{tmp_path.name}"
    source = stage(url, [table_of(50)], FileLimits(rows_per_group=32))
    store = open_store(url)
    path = source.files[0].path
    store.write(path, [damage(store.read(path))])
    with pytest.raises(CorruptionError, match="is not what was staged"):
        source.reader().read(source.splits()[0], 0, 1)


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_file_that_is_gone_is_named(tmp_path: Path, kind: str) -> None:
    """The error names the file."""
    url = str(tmp_path) if kind == "local" else f"memory://gone-{tmp_path.name}"
    source = stage(url, [table_of(5)], FileLimits())
    open_store(url).delete(source.files[0].path)
    with pytest.raises(NotFoundError, match="part-0-0000"):
        source.reader().read(source.splits()[0], 0, 1)


def test_a_source_of_another_schema_is_refused(staged: tuple[ParquetSource, tuple[pa.Table, ...]]) -> None:
    """A file whose footer contradicts the source is an error, not a batch of another schema."""
    source, _ = staged
    other = ParquetSource(source.url, source.files, pa.schema([("id", pa.string())]))
    with pytest.raises(CorruptionError, match="the manifest has"):
        other.reader().read(other.splits()[0], 0, 1)


def test_nothing_staged_is_an_error_and_staging_twice_too(tmp_path: Path) -> None:
    """A folder without a manifest is no source; one with a manifest takes no second one."""
    with pytest.raises(NotFoundError, match="no staged DataFrame"):
        ParquetSource.open(str(tmp_path))
    stage(str(tmp_path), [], FileLimits())
    assert ParquetSource.open(str(tmp_path)).splits() == ()
    with pytest.raises(AlreadyExistsError, match="holds a staged DataFrame already"):
        write_manifest(open_store(str(tmp_path)), SCHEMA, ())


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_a_damaged_manifest_is_refused(tmp_path: Path, at: int) -> None:
    """Any flipped bit of the manifest is found."""
    stage(str(tmp_path), [table_of(5)], FileLimits())
    store = open_store(str(tmp_path))
    data = bytearray(store.read(MANIFEST_PATH))
    data[at] ^= 1
    store.write(MANIFEST_PATH, [bytes(data)])
    with pytest.raises(CorruptionError, match=MANIFEST_PATH):
        ParquetSource.open(str(tmp_path))


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    """An error of the input while a file is written comes through, and no file with its name is there."""
    store = open_store(str(tmp_path))

    def batches() -> Iterable[pa.RecordBatch]:
        yield table_of(40).to_batches()[0]
        raise ValueError("upstream died")

    with pytest.raises(ValueError, match="upstream died"):
        list(write_files(store, "part", batches(), SCHEMA, FileLimits(rows_per_group=8)))
    assert store.list("") == []


def test_a_store_that_fails_is_reported(tmp_path: Path) -> None:
    """A folder that cannot be written to is a StorageError."""
    (tmp_path / "file").write_text("in the way")
    store = open_store(str(tmp_path / "file"))
    with pytest.raises(StorageError):
        list(write_files(store, "part", table_of(3).to_batches(), SCHEMA, FileLimits()))


def test_a_string_that_is_not_utf8_is_not_staged() -> None:
    """Spark casts any bytes to a string, and nothing behind it could read them."""
    text = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
    )
    batch = pa.record_batch({"s": text})
    store = open_store("memory://not-utf8")
    with pytest.raises(ConfigurationError, match="column 's' has a string that is not UTF-8"):
        list(write_files(store, "part", [batch], batch.schema, FileLimits()))
