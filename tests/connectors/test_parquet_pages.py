"""What page headers of Parquet files report: sizes and the longest text, for all writers; damage is an error."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidegate.connectors.formats.parquet_pages import PageSizes, measure_pages
from tidegate.storage.errors import ConfigurationError

LONGEST = 2_005
TEXTS = ["", "a" * 700, None, f"{'a' * 2_000}12345", "a" * 1_999, "b", None, *(f"abc{n}" for n in range(300))]
COLUMNS = {
    "s": pa.array(TEXTS),
    "l.list.element": pa.array([[text] * ((at + 1) % 3) for at, text in enumerate(TEXTS)]),
    "t.x": pa.array([None if at % 5 == 1 else {"x": text} for at, text in enumerate(TEXTS)]),
}


def written(path: str, **options: Any) -> bytes:
    """A file with one of the columns."""
    column = path.split(".", maxsplit=1)[0]
    file = io.BytesIO()
    pq.write_table(pa.table({column: COLUMNS[path]}), file, **options)
    return file.getvalue()


def measured(data: bytes, decoded_bytes_max: int = 2**30, damage: bytes = b"") -> PageSizes:
    """The pages of the only column. `damage` replaces the first bytes of its first header."""
    parquet = pq.ParquetFile(pa.BufferReader(data))
    chunk = parquet.metadata.row_group(0).column(0)
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data = data[:begin] + damage + data[begin + len(damage) :]
    return measure_pages(pa.BufferReader(data), chunk, parquet.schema.column(0), decoded_bytes_max)


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("path", COLUMNS)
def test_the_longest_text_is_found(codec: str, version: str, path: str) -> None:
    """Of texts that share their begin, in both versions of pages, with nulls and within lists and structs.

    What is found is the longest shared begin and the longest rest, so it is at most twice as much.
    """
    options: dict[str, Any] = {"use_dictionary": False, "column_encoding": {path: "DELTA_BYTE_ARRAY"}}
    found = measured(written(path, compression=codec, data_page_version=version, **options))
    assert LONGEST <= found.value_bytes <= 2 * LONGEST


def test_sizes_are_those_of_the_largest_page() -> None:
    """A dictionary is a page as well. Of plain texts the page with most bytes a value counts."""
    table, file = pa.table({"s": ["a" * 10_000, "b" * 50_000]}), io.BytesIO()
    pq.write_table(table, file, use_dictionary=True, compression="zstd")
    assert 60_000 < measured(file.getvalue()).largest_bytes < 61_000
    plain = measured(written("s", use_dictionary=False, data_page_size=100, write_batch_size=4, compression="zstd"))
    # The second page is the one with two long texts: 2,005 and 1,999 bytes, of which one begins the third.
    assert 700 / 4 < plain.value_bytes < LONGEST
    assert plain.largest_bytes > LONGEST
    assert measured(written("s", use_dictionary=False, compression="none")).largest_bytes == 0


def test_a_page_over_the_limit_is_not_decompressed() -> None:
    """Its texts count as if they were as long as the page."""
    file, options = io.BytesIO(), {"use_dictionary": False, "column_encoding": {"s": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"s": ["a" * 9_000, "b" * 50_000]}), file, compression="zstd", **options)
    found = measured(file.getvalue(), decoded_bytes_max=1_000)
    assert found.value_bytes > 59_000
    assert found.value_bytes != measured(file.getvalue()).value_bytes


def test_a_page_over_the_limit_whose_bytes_are_in_the_file_is_decompressed() -> None:
    """Its texts are as long as without a limit."""
    data = written("s", use_dictionary=False, column_encoding={"s": "DELTA_BYTE_ARRAY"}, compression="none")
    assert measured(data, decoded_bytes_max=1_000).value_bytes == measured(data).value_bytes


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (b"\x00", "is damaged"),
        (b"\x15\x00\x15\x01", "is damaged"),
        (b"\x1f", "is damaged"),
        (b"\x18\xff\xff\xff\x7f", "is cut"),
        (b"\x19\xf2\xff\xff\xff\xff\xff\xff\xff\x7f", "is cut"),
        (b"\x19\x1c" + b"\x19\x1c" * 20, "is damaged"),
    ],
    ids=["no fields", "a negative size", "no type", "long bytes", "a long list", "deep lists"],
)
def test_a_damaged_header_is_an_error(damage: bytes, words: str) -> None:
    """It ends soon, with the place."""
    data = written("s", use_dictionary=False, write_statistics=False)
    with pytest.raises(ConfigurationError, match=words):
        measured(data, damage=damage)
