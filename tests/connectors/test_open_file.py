"""A file that was taken and is another one by now: no row of it comes, and the error names it."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tidegate.connectors.files.open_file import OF_FILES, FileAt, OpenFile, OpenText, UnreadableFileError, difference_of
from tidegate.connectors.files.text_rows import TextFormat
from tidegate.storage.files.file_system import FileInfo
from tidegate.storage.files.file_system_store import FileSystemStore

SCHEMA = pa.schema([("x", pa.int64())])
PATH = "a.parquet"


def parquet(first: int) -> bytes:
    """Six numbers in row groups of three; as many bytes whatever the first one is."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table({"x": range(first, first + 6)}, SCHEMA),
        sink,
        row_group_size=3,
        use_dictionary=False,
        compression="none",
    )
    data: bytes = sink.getvalue().to_pybytes()
    return data


def opened(store: FileSystemStore, file: FileAt) -> OpenFile:
    """The file, as it was taken."""
    return OpenFile(store, file, OF_FILES, SCHEMA)


@pytest.mark.parametrize("kind", ["local", "s3"])
@pytest.mark.parametrize("rows_before", [0, 3])
def test_no_row_of_another_file_comes(request: pytest.FixtureRequest, kind: str, rows_before: int) -> None:
    """Also if that has as many bytes, and whether rows have been read before; on S3 within the same second, too."""
    store: FileSystemStore = request.getfixturevalue(f"{kind}_store")
    store.write(PATH, [parquet(0)])
    taken = FileAt.of(store.info(PATH))
    file = opened(store, taken)
    if rows_before:
        first = file.read(0, rows_before)
        assert first is not None
        assert first["x"].to_pylist() == [0, 1, 2]
    store.write(PATH, [parquet(100)])
    if kind == "local":
        later = taken.modified_at_ms + 1
        os.utime(f"{store.url}/{PATH}", ns=(later * 10**6, later * 10**6))
    assert store.info(PATH).size_bytes == taken.size_bytes
    for read in (lambda: file.read(rows_before, 10), lambda: opened(store, taken)):
        with pytest.raises(UnreadableFileError, match=r"a\.parquet was changed after the job found it.*rename"):
            read()


def test_a_file_that_is_written_into_is_another_one(local_store: FileSystemStore) -> None:
    """It is still the file of that name, of that size."""
    local_store.write(PATH, [parquet(0)])
    path = Path(local_store.url, PATH)
    os.utime(path, ns=(10**9, 10**9))
    file = opened(local_store, FileAt.of(local_store.info(PATH)))
    with path.open("r+b") as there:
        there.write(parquet(100))
    with pytest.raises(UnreadableFileError, match=r"bytes of 1970-01-01T00:00:01\.000\+00:00 and has"):
        file.read(0, 10)


def test_a_file_that_grows_behind_the_last_row_that_was_read_is_another_one(local_store: FileSystemStore) -> None:
    """All of it had been read at once: only a look behind its last row can tell."""
    local_store.write("a.csv", [b"x\n0\n1\n2\n"])
    file = OpenText(local_store, FileAt.of(local_store.info("a.csv")), OF_FILES, TextFormat("csv"), SCHEMA)
    assert file.read_rows(0, 2) is not None
    with Path(local_store.url, "a.csv").open("ab") as there:
        there.write(b"3\n")
    rest = file.read_rows(2, 10)
    assert rest is not None
    assert rest.batch is not None
    assert rest.batch["x"].to_pylist() == [2]
    with pytest.raises(UnreadableFileError, match=r"it had 8 bytes of .* and has 10 bytes"):
        file.read_rows(3, 10)


def test_a_file_that_goes_while_it_is_read_is_an_error_at_once(store: FileSystemStore) -> None:
    """A restart does not help, so it is no fault of the storage."""
    store.write(PATH, [parquet(0)])
    file = opened(store, FileAt.of(store.info(PATH)))
    assert file.read(0, 10) is not None
    store.delete(PATH)
    with pytest.raises(UnreadableFileError, match=r"a\.parquet was deleted before.*Correct it.*bad_rows"):
        file.read(3, 10)


BEFORE = FileAt("a", 10, 5_000, 0, "one")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (FileInfo("a", 10, 5_000, "one"), None),
        (FileInfo("a", 10, 5_000), None),
        (FileInfo("a", 10, 5_000, "two"), "it had the ETag one and has two"),
        (FileInfo("a", 1_000, 5_000, "one"), "it had 10 bytes of 1970-01-01T00:00:05.000+00:00 and has 1,000 bytes of"),
        (FileInfo("a", 10, 6_000, "one"), "has 10 bytes of 1970-01-01T00:00:06.000+00:00"),
    ],
    ids=str,
)
def test_a_file_is_told_by_size_time_and_tag(now: FileInfo, said: str | None) -> None:
    """A tag counts where both are known: listings have none, nor have checkpoints of earlier versions."""
    difference = difference_of(BEFORE, now)
    assert difference is None if said is None else said in str(difference)
    if said is not None and "ETag" in said:
        assert difference_of(FileAt("a", 10, 5_000), now) is None
