"""Rows that sinks stage in files until their commit."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pytest

from tidegate.connectors.staged_rows import RowStage, StagedPart, staged_rows
from tidegate.storage.errors import CorruptionError


class Files:
    """Files in memory."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}

    def write(self, chunks: Iterable[memoryview]) -> str:
        """Stores a file, and returns its path."""
        path = f"{len(self.content)}"
        self.content[path] = b"".join(chunks)
        return path

    def read(self, path: str) -> bytes:
        """Returns the content of a file."""
        return self.content[path]

    def rows(self, path: str, part: StagedPart) -> list[int]:
        """Returns the values of a staged file."""
        return [value for batch in staged_rows(self.read, path, part) for value in batch["v"].to_pylist()]


def batch(*values: int) -> pa.RecordBatch:
    """Returns a batch with these values."""
    return pa.record_batch({"v": pa.array(values, pa.int64())})


@pytest.mark.parametrize("compression", ["lz4", None])
def test_files_have_a_limited_size_and_keep_the_order(compression: str | None) -> None:
    """A batch that is larger than a file has a file of its own."""
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20, rows_max=3, compression=compression)
    for values in ([1], [2, 3], [], [4], [5, 6, 7, 8], [9]):
        stage.add(batch(*values))
    written = stage.take()
    assert [files.rows(path, part) for path, part in written] == [[1, 2, 3], [4], [5, 6, 7, 8], [9]]
    assert [part.rows for _, part in written] == [3, 1, 4, 1]
    assert stage.take() == []
    small = RowStage(files.write, bytes_max=16, compression=compression)
    for value in range(5):
        small.add(batch(value))
    assert [files.rows(path, part) for path, part in small.take()] == [[0, 1], [2, 3], [4]]


def test_each_file_is_converted_once() -> None:
    """The part has the rows that were written."""
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20, convert=lambda batches: [pa.concat_batches(batches).slice(1)])
    stage.add(batch(1, 2))
    stage.add(batch(3))
    ((path, part),) = stage.take()
    assert files.rows(path, part) == [2, 3]
    assert part.rows == 2


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_file_that_has_changed_is_refused(damage: str) -> None:
    """The error names the file."""
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20)
    stage.add(batch(1, 2, 3))
    ((path, part),) = stage.take()
    data = files.content[path]
    files.content[path] = data[:-1] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
    with pytest.raises(CorruptionError, match=f"staged rows in {path} have changed"):
        files.rows(path, part)


def test_a_commit_in_the_same_process_reads_no_file() -> None:
    """The first one. A repeated commit, one of another writer and one after `close` read it."""
    files = Files()

    def reads_of(path: str, part: StagedPart, writer: str) -> int:
        reads = []

        def read(path: str) -> bytes:
            reads.append(path)
            return files.read(path)

        assert [rows["v"].to_pylist() for rows in staged_rows(read, path, part, recent_of=writer)] == [[1]]
        return len(reads)

    stage = RowStage(files.write, bytes_max=1 << 20, recent_of="writer")
    stage.add(batch(1))
    ((path, part),) = stage.take()
    assert [reads_of(path, part, writer) for writer in ("other", "writer", "writer")] == [1, 0, 1]
    stage.add(batch(1))
    ((path, part),) = stage.take()
    stage.close()
    assert reads_of(path, part, "writer") == 1
