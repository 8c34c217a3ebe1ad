"""Files that `to_files` writes: what other readers find in them, and that a commit makes them visible once."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import tidegate as tg
from tidegate.connectors.files.encoders import WrittenFormat, file_encoding
from tidegate.connectors.files.sink import FileSink
from tidegate.connectors.files.source import source_of_files
from tidegate.connectors.formats.raw import RawFormat
from tidegate.storage.errors import ConfigurationError, NotFoundError
from tidegate.testing import check_committing_sink

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("price", pa.decimal128(9, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("t", pa.time64("us")),
        ("f", pa.float64()),
        ("ok", pa.bool_()),
    ]
)
ROWS: list[dict[str, Any]] = [
    {
        "id": 1,
        "name": 'ä, "b"\n;',
        "price": Decimal("-12.50"),
        "at": datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
        "day": date(1969, 12, 31),
        "t": time(23, 59, 59, 999_999),
        "f": 0.1,
        "ok": True,
    },
    dict.fromkeys(COLUMNS.names) | {"id": 2},
    dict.fromkeys(COLUMNS.names) | {"id": 2**60, "name": ""},
]


def written(folder: Path, format: WrittenFormat, *batches: pa.RecordBatch, compression: str | None = None) -> Path:
    """Returns a file with some rows."""
    encoding = file_encoding(format, batches[0].schema, compression)
    encoder = encoding.encoder()
    for batch in batches:
        encoder.add(batch)
    path = folder / f"rows{encoding.suffix}"
    path.write_bytes(b"".join(encoder.finish()))
    return path


def rows_of(path: Path, schema: pa.Schema) -> list[dict[str, Any]]:
    """Returns the rows of a file as a source reads it."""
    source = source_of_files(str(path), schema=schema)
    reader = source.reader()
    found: list[dict[str, Any]] = []
    for split in source.splits():
        offset, at_end = 0, False
        while not at_end:
            result = reader.read(split, offset, 1_000)
            found += [] if result.batch is None else result.batch.to_pylist()
            offset, at_end = result.next_offset, result.at_end
    reader.close()
    return found


@pytest.mark.parametrize("format", ["parquet", "avro", "csv", "json"])
def test_a_source_reads_the_same_rows(format: WrittenFormat, tmp_path: Path) -> None:
    """Rows of several batches come back from the file, with nulls, and in slices."""
    batch = pa.RecordBatch.from_pylist(ROWS, COLUMNS)
    path = written(tmp_path, format, batch.slice(1), batch, batch.slice(0, 0), batch.slice(2))
    assert path.suffix == f".{format}"
    assert rows_of(path, COLUMNS) == [*ROWS[1:], *ROWS, *ROWS[2:]]


def test_other_readers_read_the_files(tmp_path: Path) -> None:
    """fastavro reads Avro, with its types and codecs; Arrow reads Parquet and CSV."""
    batch = pa.RecordBatch.from_pylist(ROWS, COLUMNS)
    for codec, found_codec in ((None, "deflate"), ("none", "null")):
        with written(tmp_path, "avro", batch, batch.slice(1), compression=codec).open("rb") as file:
            reader: Any = fastavro.reader(file)
            assert list(reader) == [*ROWS, *ROWS[1:]]
            assert reader.codec == found_codec
    table = pq.read_table(written(tmp_path, "parquet", batch, compression="gzip"))
    assert table.to_pylist() == ROWS
    assert table.schema == COLUMNS
    options = pa_csv.ParseOptions(newlines_in_values=True)
    assert pa_csv.read_csv(written(tmp_path, "csv", batch), parse_options=options).column("id").to_pylist() == [
        row["id"] for row in ROWS
    ]


def test_avro_files_have_nested_values_and_a_schema_of_the_users_own(tmp_path: Path) -> None:
    """Fields without a column have their default."""
    inner = pa.struct([("a", pa.list_(pa.int32())), ("m", pa.map_(pa.string(), pa.float32()))])
    columns = pa.schema([("id", pa.int32()), ("inner", inner), ("kind", pa.dictionary(pa.int8(), pa.string()))])
    row = {"id": 1, "inner": {"a": [1, None], "m": [("x", 0.5)]}, "kind": "new"}
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], columns)
    with written(tmp_path, "avro", batch).open("rb") as file:
        found: Any = fastavro.reader(file)
        first, second = found
    assert first == row | {"inner": {"a": [1, None], "m": {"x": 0.5}}}
    assert second == dict.fromkeys(row)
    schema = {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["old", "new"]}},
            {"name": "more", "type": "int", "default": 7},
        ],
    }
    batch = pa.RecordBatch.from_pylist([{"id": 5, "kind": "old"}])
    with written(tmp_path, tg.AvroFormat(schema), batch).open("rb") as file:
        reader: Any = fastavro.reader(file)
        assert list(reader) == [{"id": 5, "kind": "old", "more": 7}]
        assert reader.writer_schema["name"] == "shop.Order"


@pytest.mark.parametrize(
    ("format", "kind", "text"),
    [
        ("avro", pa.uint64(), "to_files.*column 'v' is uint64, which Avro does not have"),
        ("avro", pa.time64("ns"), "column 'v' is time64.ns., which Avro does not have"),
        ("avro", pa.map_(pa.int32(), pa.int32()), "column 'v' is map"),
        ("json", pa.duration("us"), "to_files.*column 'v' is duration"),
        ("csv", pa.list_(pa.int32()), "column 'v' is list"),
        ("parquet", pa.run_end_encoded(pa.int32(), pa.int32()), "to_files.format='parquet'.: the columns cannot"),
        (tg.AvroFormat({"type": "record", "name": "R", "fields": []}), pa.int32(), "no field for column 'v'"),
        (tg.AvroFormat("long"), pa.int64(), "must be a record"),
        (tg.AvroFormat(registry="http://localhost:1"), pa.int64(), "contains its schema"),
        ("orc", pa.int64(), "give 'parquet', 'avro', 'csv' or 'json'"),
        (RawFormat(), pa.binary(), "give 'parquet'"),
    ],
)
def test_columns_that_a_format_cannot_hold_are_refused(format: WrittenFormat, kind: pa.DataType, text: str) -> None:
    """When the program is made, with the name of the column."""
    with pytest.raises(ConfigurationError, match=text):
        file_encoding(format, pa.schema([("v", kind)]), None)


def test_codecs_are_checked() -> None:
    """Text has none."""
    columns = pa.schema([("v", pa.int64())])
    for format, codec, text in (
        ("avro", "zip", "give one of deflate, none"),
        ("parquet", "deflate", "give one of zstd"),
        ("json", "gzip", "is for Avro and Parquet"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            file_encoding(format, columns, codec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("format", "values", "text"),
    [
        ("json", pa.array([1.5, float("nan")]), "column 'v' is NaN or infinite"),
        ("csv", pa.array([1.5, None]), "would be a blank line"),
        ("parquet", pa.array([0, 2**62], pa.timestamp("s")), "column 'v' .* out of range in a Parquet file"),
    ],
)
def test_a_row_that_a_file_cannot_hold_is_an_error(format: WrittenFormat, values: pa.Array, text: str) -> None:
    """It is never omitted."""
    batch = pa.record_batch({"v": values})
    encoder = file_encoding(format, batch.schema, None).encoder()
    with pytest.raises(ConfigurationError, match=text):
        encoder.add(batch)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["avro", "json"])
def test_the_sink_keeps_the_contract(format: WrittenFormat, tmp_path: Path) -> None:
    """It is killed at each step, and commits come again."""
    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])
    batches = [pa.RecordBatch.from_pylist([{"k": n, "x": n * i} for n in range(5)], schema) for i in range(1, 4)]
    folder = tmp_path / "out"
    sink = FileSink(folder.as_uri(), file_encoding(format, schema, None), 10, buckets=4)

    def visible() -> list[dict[str, Any]]:
        return [row for path in sorted(folder.glob("*")) for row in rows_of(path, schema)]

    check_committing_sink(sink, batches, visible)


@pytest.mark.slow
def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """A commit that is repeated reads nothing of checkpoint storage. A large file is copied in pieces."""

    class Files:
        def __init__(self) -> None:
            self.data: dict[str, bytes] = {}

        def write(self, chunks: Any) -> str:
            self.data[str(len(self.data))] = b"".join(chunks)
            return str(len(self.data) - 1)

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path not in self.data:
                raise NotFoundError(path)
            return self.data[path][offset:][:length]

    files = Files()
    context = tg.CommittingContext("job-1", "job", "uid/with slash", "name", 0, 1, 1, range(4), files)
    schema = pa.schema([("s", pa.string())])
    sink = FileSink(tmp_path.as_uri(), file_encoding("csv", schema, None), 1 << 30)
    sink.check()
    writer = sink.open_writer(context)
    assert writer.prepare(1) == []
    writer.write(pa.record_batch({"s": ["x" * 2**20] * 20}))
    prepared = writer.prepare(2)
    committer = sink.open_committer(context)
    committer.commit(tg.CommitToken("job-1", 2), prepared)
    (path,) = tmp_path.iterdir()
    assert path.name == "part-job-1-uid-with slash-0-1-000000.csv"
    assert path.stat().st_size == 20 * (2**20 + 1) + 2
    files.data.clear()
    committer.commit(tg.CommitToken("job-1", 2), prepared)
    path.unlink()
    with pytest.raises(NotFoundError):
        committer.commit(tg.CommitToken("job-1", 2), prepared)
