"""Avro object files as a source: every codec, any position, other schemas, and broken files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_contract import check_source

from tidegate.connectors.files.source import source_of_files
from tidegate.connectors.formats.avro_file import AvroRows, avro_file_schema
from tidegate.storage.errors import ConfigurationError

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "item", "type": ["null", "string"]},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
    ],
}


def orders(count: int) -> list[dict[str, Any]]:
    """Rows with nulls and lists."""
    return [{"id": n, "item": f"i{n}" if n % 3 else None, "tags": ["t"] * (n % 4)} for n in range(count)]


def avro(
    rows: list[dict[str, Any]], schema: dict[str, Any] = SCHEMA, codec: str = "null", block_bytes: int = 50
) -> bytes:
    """A file of small blocks."""
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(schema), rows, codec=codec, sync_interval=block_bytes)
    return out.getvalue()


def opened(data: bytes, schema: pa.Schema | None = None, limit_bytes: int = 10**6) -> AvroRows:
    """The rows of a file."""
    found = avro_file_schema(io.BytesIO(data)) if schema is None else schema
    return AvroRows(io.BytesIO(data), len(data), found, lambda batch: batch, limit_bytes)


def all_rows(rows: AvroRows, rows_max: int = 7) -> list[dict[str, Any]]:
    """Returns all rows, from the first one on."""
    found: list[dict[str, Any]] = []
    while (batch := rows.read(len(found), rows_max)) is not None:
        found += batch.to_pylist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_a_file_is_read_from_its_begin_to_its_end(codec: str) -> None:
    """With its own columns, in blocks of any size."""
    for count, block_bytes in ((0, 50), (1, 50), (200, 50), (200, 10**6)):
        data = avro(orders(count), codec=codec, block_bytes=block_bytes)
        assert all_rows(opened(data)) == orders(count)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=8), st.integers(0, 50))
def test_rows_are_read_from_any_position(steps: list[tuple[int, int]], count: int) -> None:
    """Forward and back."""
    rows, expected = opened(avro(orders(count))), orders(count)
    for row, rows_max in steps:
        found = rows.read(row, rows_max)
        if row >= count:
            assert found is None
        else:
            assert found is not None
            assert 0 < found.num_rows <= rows_max
            assert found.to_pylist() == expected[row : row + found.num_rows]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_broken_file_is_an_error_or_has_other_values(data: st.DataObject) -> None:
    """A file that is cut is always an error. Its rows before the damage are right."""
    codec = data.draw(st.sampled_from(["null", "deflate"]))
    whole = avro(orders(40), codec=codec)
    head = len(avro([], codec=codec)) + 1
    at = data.draw(st.integers(head, len(whole) - 1))
    is_cut = data.draw(st.booleans())
    broken = whole[:at] if is_cut else whole[:at] + data.draw(st.binary(max_size=2)) + whole[at + 1 :]
    rows = opened(broken, avro_file_schema(io.BytesIO(whole)))
    found: list[dict[str, Any]] = []
    failed = False
    try:
        while (batch := rows.read(len(found), 5)) is not None:
            found += batch.to_pylist()
    except ValueError:
        failed = True
    if is_cut:
        assert found == orders(40)[: len(found)]
        assert failed or len(found) < 40, "a cut between two blocks is found by the size of the file"


def test_columns_are_compared_with_the_file(tmp_path: Path) -> None:
    """Some columns may be read, in wider types. A missing one and values that do not fit are errors with the record."""
    data = avro(orders(5))
    narrow = pa.schema([("item", pa.string()), ("id", pa.int8())])
    assert all_rows(opened(data, narrow)) == [{"item": row["item"], "id": row["id"]} for row in orders(5)]
    unknown = r"the schema has no field 'nr', which schema= names; name only fields of it: .*'tags'"
    with pytest.raises(ConfigurationError, match=unknown):
        opened(data, pa.schema([("nr", pa.int64())]))
    with pytest.raises(ConfigurationError, match="column 'id' is int64 and not string"):
        opened(data, pa.schema([("id", pa.string())]))
    wide = avro([*orders(3), {"id": 300, "item": None, "tags": []}], block_bytes=1)
    with pytest.raises(ValueError, match=r"record 3: column 'id': .*300.* does not fit int8"):
        all_rows(opened(wide, narrow))
    with pytest.raises(ConfigurationError, match=r"Avro block after record 0 has .* bytes, more than 100"):
        all_rows(opened(avro(orders(50), codec="deflate", block_bytes=10**6), limit_bytes=100))
    (tmp_path / "a.avro").write_bytes(b"no file of Avro")
    with pytest.raises(ConfigurationError, match=r"a\.avro cannot be read"):
        source_of_files(str(tmp_path / "*.avro"))


def test_columns_leave_types_that_have_none_unread(tmp_path: Path) -> None:
    """Without columns= the field is named, with the way out."""
    union = {"name": "u", "type": ["int", "string"]}
    schema = {**SCHEMA, "fields": [union, *SCHEMA["fields"]]}
    path = tmp_path / "a.avro"
    path.write_bytes(avro([{"u": n if n % 2 else "x", **row} for n, row in enumerate(orders(9))], schema))
    source = source_of_files(str(path), columns=["id"])
    assert source.schema == pa.schema([("id", pa.int64())])
    found = source.reader().read(source.splits()[0], 0, 100)
    assert found.batch is not None
    assert found.batch.column("id").to_pylist() == list(range(len(found.batch)))
    with pytest.raises(
        ConfigurationError,
        match=r"read: field 'u' is a union of int, string[^;']*; read the other fields, with schema= or columns=",
    ):
        source_of_files(str(path))


def test_files_are_a_source(tmp_path: Path) -> None:
    """By the contract of sources; a damaged file is a dead letter for its rest."""
    for number in range(3):
        (tmp_path / f"{number}.avro").write_bytes(avro(orders(20 + number)))
    check_source(source_of_files(str(tmp_path / "*.avro")))
    whole = (tmp_path / "1.avro").read_bytes()
    (tmp_path / "1.avro").write_bytes(whole[:-10] + b"x" * 10)
    source = source_of_files(str(tmp_path / "*.avro"), bad_rows="side")
    reader = source.reader()
    split = source.splits()[1]
    offset, rows = 0, 0
    letters: list[dict[str, Any]] = []
    while True:
        found = reader.read(split, offset, 100)
        rows += 0 if found.batch is None else found.batch.num_rows
        letters += [] if found.bad is None else found.bad.to_pylist()
        offset = found.next_offset
        if found.at_end:
            break
    assert 0 < rows < 21
    assert [letter["error"] for letter in letters] == [
        "a block cannot be read: ValueError: expected sync marker not found; the file is damaged: write it again"
    ]
