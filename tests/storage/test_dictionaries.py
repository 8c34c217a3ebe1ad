"""Dictionary columns rest in one form, in which the values of any number of batches can meet."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import TableError
from tidegate.storage.files.envelope import checksum_of
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.schemas.arrow_types import (
    check_dictionaries,
    decoded_type,
    widened,
    widened_schema,
    widened_type,
)
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.table_files import read_data_file, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo, TableMode
from tidegate.storage.tables.table_log import TableLog

_JOB = JobId("demo-1")
_SMALL = pa.dictionary(pa.int8(), pa.string())
_WIDE = pa.dictionary(pa.int32(), pa.string())
_WORDS = st.sampled_from(["a", "b", "c"])

# Types with dictionaries, what becomes of them, and values.
_TYPES: tuple[tuple[pa.DataType, pa.DataType, st.SearchStrategy[Any]], ...] = (
    (_SMALL, _WIDE, _WORDS),
    (pa.dictionary(pa.uint64(), pa.string(), True), pa.dictionary(pa.int32(), pa.string(), True), _WORDS),
    (pa.dictionary(pa.int8(), pa.large_binary()), pa.dictionary(pa.int32(), pa.large_binary()), st.binary(max_size=2)),
    (pa.dictionary(pa.int16(), pa.int64()), pa.int64(), st.integers(-2, 2)),
    (pa.list_(_SMALL), pa.list_(_WIDE), st.lists(st.none() | _WORDS, max_size=3)),
    (pa.large_list(_SMALL), pa.large_list(_WIDE), st.lists(_WORDS, max_size=3)),
    (pa.list_(_SMALL, 2), pa.list_(_WIDE, 2), st.lists(_WORDS, min_size=2, max_size=2)),
    (pa.list_(pa.dictionary(pa.int8(), pa.int32())), pa.list_(pa.int32()), st.lists(st.integers(0, 2), max_size=3)),
    (
        pa.struct({"s": _SMALL, "x": pa.int8()}),
        pa.struct({"s": _WIDE, "x": pa.int8()}),
        st.builds(lambda s: {"s": s, "x": 1}, _WORDS),
    ),
    (pa.map_(pa.string(), _SMALL), pa.map_(pa.string(), _WIDE), st.lists(st.tuples(_WORDS, _WORDS), max_size=2)),
)


def _words(*prefixes: str) -> list[pa.Array]:
    """For each prefix a column of 100 words of its own, with indexes of int8."""
    return [pa.array([f"{prefix}{n}" for n in range(100)], _SMALL) for prefix in prefixes]


def _table(store: FileSystemStore, info: TableInfo, *files: DataFile) -> TableLog:
    log = TableLog(store)
    log.create(info)
    log.claim(_JOB)
    for number, file in enumerate(files, start=1):
        log.commit(_JOB, CheckpointId(number), (file,))
    return log


def _older_info(schema: pa.Schema, mode: TableMode = "append", keys: tuple[str, ...] = ()) -> TableInfo:
    """Info as it was written before dictionaries were widened."""
    return TableInfo(schema.serialize().to_pybytes(), mode, keys)


def _plain(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    return column.to_pylist()  # type: ignore[no-any-return]


@settings(max_examples=200)
@given(st.data())
def test_values_are_the_same_in_the_form_that_rests(data: st.DataObject) -> None:
    """Of any type, also of a slice: the wanted type, the same values, in a form that can be joined and written."""
    small, wide, values = data.draw(st.sampled_from(_TYPES))
    rows = data.draw(st.lists(st.none() | values, max_size=8))
    start = data.draw(st.integers(0, len(rows)))
    batch = pa.record_batch([pa.array(rows, small).slice(start)], names=["x"])

    found = widened(batch)

    found.validate(full=True)
    assert wide == widened_type(small) == widened_type(wide) == found.schema.field("x").type
    assert _plain(batch.column("x")) == _plain(found.column("x"))
    assert _plain(batch.column("x")) * 2 == _plain(pa.concat_batches([found, found]).column("x"))
    check_dictionaries(batch.schema)


def test_nulls_of_a_dictionary_become_nulls_of_rows(memory_store: FileSystemStore) -> None:
    """Arrow makes dictionaries that hold a null, also inside of lists, but neither joins nor writes them."""
    indexes = pa.array([0, 1, 2, None], pa.int8())
    words = pa.DictionaryArray.from_arrays(indexes, pa.array(["a", None, "b"]))
    numbers = pa.DictionaryArray.from_arrays(indexes, pa.array([1, None, 2]))
    lists = pa.ListArray.from_arrays([0, 1, 2, 3, 4], words)
    batch = widened(pa.record_batch({"w": words, "n": numbers, "l": lists}))

    found = read_data_file(memory_store, write_data_file(memory_store, "f", [batch, batch]))

    assert _plain(found.column("w")) == ["a", None, "b", None] * 2
    assert _plain(found.column("n")) == [1, None, 2, None] * 2
    assert _plain(found.column("l")) == [["a"], [None], ["b"], [None]] * 2
    assert 2 * len(words) == pa.concat_batches([batch, batch]).num_rows


def test_what_has_no_dictionary_is_not_touched() -> None:
    """Not even copied; and what is said about a field that has one stays."""
    batch = pa.record_batch({"x": [1], "s": [["a"]], "m": [{"a": 1}]})
    assert widened(batch) is batch
    field = pa.field("x", _SMALL, nullable=False, metadata={"a": "b"})
    schema = pa.schema([field], metadata={"c": "d"})
    assert pa.schema([field.with_type(_WIDE)], {"c": "d"}).equals(widened_schema(schema), check_metadata=True)
    assert pa.list_(pa.string()) == decoded_type(pa.list_(_SMALL))


@pytest.mark.parametrize(
    "data_type",
    [
        pa.dictionary(pa.int8(), pa.string_view()),
        pa.list_(pa.dictionary(pa.int8(), pa.binary_view())),
        pa.list_view(_SMALL),
        pa.run_end_encoded(pa.int32(), _SMALL),
        pa.dense_union([pa.field("a", _SMALL)]),
    ],
    ids=str,
)
def test_a_dictionary_that_cannot_be_kept_is_refused(data_type: pa.DataType) -> None:
    """When the table is described, long before rows come; the column is named."""
    with pytest.raises(TableError, match=r"column 'odd' has type .* tables cannot store; cast it"):
        TableInfo.of(pa.schema({"x": pa.int64(), "odd": data_type}), "append")


_MOMENT = dt.datetime(2026, 11, 21, 10, 30, tzinfo=dt.UTC)


_VALUES: tuple[tuple[pa.DataType, Any], ...] = (
    (pa.int8(), 5),
    (pa.float64(), 0.5),
    (pa.bool_(), True),
    (pa.date32(), dt.date(2026, 11, 21)),
    (pa.timestamp("s", "UTC"), _MOMENT),
    (pa.duration("s"), dt.timedelta(seconds=90)),
    (pa.decimal128(9, 2), Decimal("1.25")),
    (pa.binary(2), b"ab"),
    (pa.struct({"a": pa.string()}), {"a": "b"}),
    (pa.large_string(), "a"),
)


@pytest.mark.parametrize(
    ("value_type", "value", "older"),
    [
        (value_type, value, older)
        for value_type, value in _VALUES
        for older in (False, True)
        # Dictionaries of nested values could not be written before, so there is no older table of them.
        if not (older and pa.types.is_nested(value_type))
    ],
    ids=str,
)
def test_dictionaries_of_anything_come_back(
    memory_store: FileSystemStore, value_type: pa.DataType, value: Any, older: bool
) -> None:
    """Parquet has dictionaries of strings and binary only; values come back all the same, in their own units."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, None], pa.int8()), pa.array([value], value_type))
    batch = pa.record_batch({"x": column})
    info = _older_info(batch.schema) if older else TableInfo.of(batch.schema, "append")
    file = write_data_file(memory_store, "f", [batch if older else widened(batch)])
    _table(memory_store, info, file)

    assert widened_type(column.type) == read_data_file(memory_store, file).schema.field("x").type
    found = read_table(memory_store)
    assert info.arrow_schema.equals(found.schema)
    assert [value, None] == _plain(found.column("x"))


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize("older", [False, True])
def test_files_with_different_dictionaries_are_one_table(
    memory_store: FileSystemStore, mode: TableMode, older: bool
) -> None:
    """Files of 100 words each make a table of 200, also where the table is older and each file has small indexes."""
    batches = [pa.record_batch({"k": words, "v": words}) for words in _words("a", "b", "a")]
    keys = ("k",) if mode == "upsert" else ()
    make = _older_info if older else TableInfo.of
    files = []
    for number, batch in enumerate(batches):
        versions = pa.array([number] * 100, pa.int64())
        stored = batch.append_column(VERSION_COLUMN, versions) if mode == "upsert" else batch
        files.append(write_data_file(memory_store, f"f{number}", [stored if older else widened(stored)]))
    _table(memory_store, make(batches[0].schema, mode, keys), *files)

    found = read_table(memory_store).combine_chunks()

    assert pa.schema({"k": _WIDE, "v": _WIDE}).equals(found.schema)
    shown = batches if mode == "append" else batches[1:]
    assert sorted(row["k"] for batch in shown for row in batch.to_pylist()) == sorted(_plain(found.column("k")))
    assert len(found.column("v").chunk(0).dictionary) == 200


def test_a_file_that_outgrew_its_indexes_is_read(memory_store: FileSystemStore) -> None:
    """Older files may hold more words than Arrow's schema in them can count: they are committed, so they count."""
    first, second = (
        pa.record_batch(
            {
                "w": words,
                "l": pa.array([[word] for word in words.to_pylist()], pa.list_(_SMALL)),
                "d": pa.array(range(100), pa.duration("s")),
                "t": pa.array(range(100), pa.uint32()),
            }
        )
        for words in _words("a", "b")
    )
    whole = pa.Table.from_batches([first, second])
    sink = pa.BufferOutputStream()
    pq.write_table(whole, sink, compression="zstd")
    data = memoryview(sink.getvalue())
    with pytest.raises(pa.ArrowInvalid, match="not in range"):
        pq.ParquetFile(pa.BufferReader(data)).read()
    size_bytes = memory_store.write("f", (data,))
    _table(memory_store, _older_info(whole.schema), DataFile("f", 200, size_bytes, checksum_of(data)))

    found = read_table(memory_store)

    assert widened_schema(whole.schema).equals(found.schema)
    assert whole.to_pylist() == found.to_pylist()


def test_a_job_goes_on_with_an_older_table(memory_store: FileSystemStore) -> None:
    """The same program describes its table by wide dictionaries now: that is no other schema."""
    schema = pa.schema({"k": _SMALL, "n": pa.dictionary(pa.int8(), pa.int64())})
    log = _table(memory_store, _older_info(schema))

    log.create(TableInfo.of(schema, "append"))

    with pytest.raises(TableError, match=r"column 'k' is dictionary.* in the table, string in the job"):
        log.create(TableInfo.of(schema.set(0, pa.field("k", pa.string())), "append"))
