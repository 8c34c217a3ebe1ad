"""Rows that sinks stage in files until their commit."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tidegate.connectors import staged_rows as module
from tidegate.connectors.staged_rows import RowStage, StagedPart, forget_staged, staged_rows
from tidegate.storage.errors import CorruptionError, NotFoundError, StorageError, may_pass
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.retrying_store import KEPT_BYTES_MAX, RetryingStore
from tidegate.storage.files.store import Buffer


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


class OneFault(FileSystemStore):
    """A store whose first write fails, after all bytes have arrived."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.writes = 0

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Writes a file, except the first."""
        self.writes += 1
        size_bytes = super().write(path, chunks)
        if self.writes == 1:
            raise StorageError("503 slow down") from OSError(errno.EIO, "slow down")
        return size_bytes


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["lz4", None])
def test_a_large_file_is_written_again_after_a_fault(tmp_path: Path, compression: str | None) -> None:
    """Also one that is larger than what a store keeps of an iterator."""
    disk = OneFault(str(tmp_path))
    store = RetryingStore(disk, pause=lambda seconds: None)

    def write(chunks: Iterable[memoryview]) -> str:
        store.write("file", chunks)
        return "file"

    values = np.random.default_rng(1).integers(0, 1 << 62, KEPT_BYTES_MAX // 8 + 1000)
    stage = RowStage(write, bytes_max=64 << 20, compression=compression)
    stage.add(pa.record_batch({"v": values[:1000]}))
    stage.add(pa.record_batch({"v": values[1000:]}))
    ((path, part),) = stage.take()
    assert disk.writes == 2
    assert part.size_bytes > KEPT_BYTES_MAX
    found = pa.Table.from_batches(staged_rows(store.read, path, part))
    assert found["v"].to_numpy().tolist() == values.tolist()


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


@pytest.mark.parametrize("missing", [NotFoundError("no file"), FileNotFoundError(errno.ENOENT, "no file")])
def test_a_missing_file_fails_its_commit_at_once(missing: Exception) -> None:
    """An error of the storage would be tried again. The error names the file and the remedy."""
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20)
    stage.add(batch(1, 2, 3))
    ((path, part),) = stage.take()

    def read(path: str) -> bytes:
        raise missing

    with pytest.raises(CorruptionError, match=f"staged rows in {path} are missing, and 3 rows .*restore another") as e:
        list(staged_rows(read, path, part))
    assert not may_pass(e.value)


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


def is_read(files: Files, path: str, part: StagedPart, writer: str) -> bool:
    """Returns whether a commit reads the file of a writer, because it is not in memory."""
    reads = []

    def read(path: str) -> bytes:
        reads.append(path)
        return files.read(path)

    assert sum(rows.num_rows for rows in staged_rows(read, path, part, recent_of=writer)) == part.rows
    return bool(reads)


def test_two_writers_share_the_memory_for_recent_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest files of both are dropped."""
    rows = pa.record_batch({"v": pa.array(range(1000), pa.int64())})
    monkeypatch.setattr(module, "_RECENT", module.RecentFiles(3 * rows.nbytes))
    files = Files()
    stages = {writer: RowStage(files.write, bytes_max=1 << 20, recent_of=writer) for writer in ("a", "b")}
    written = []
    for writer in ("a", "b", "a", "b"):
        stages[writer].add(rows)
        ((path, part),) = stages[writer].take()
        written.append((path, part, writer))
    assert [is_read(files, *each) for each in written] == [True, False, False, False]


def test_staged_rows_do_not_keep_the_batch_of_a_slice_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of a large batch have few bytes, in the buffer and after the file was written."""
    monkeypatch.setattr(module, "_RECENT", module.RecentFiles(1 << 20))
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20, recent_of="writer")
    before = pa.total_allocated_bytes()
    written = []
    for _ in range(3):
        large = pa.concat_arrays([pa.array(range(1000), pa.int64())] * 1000)
        stage.add(pa.record_batch({"v": large}).slice(5, 100))
        del large
        assert pa.total_allocated_bytes() - before < 1 << 20
        written += stage.take()
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert [is_read(files, path, part, "writer") for path, part in written] == [False] * 3


def test_a_file_that_no_commit_reads_is_forgotten() -> None:
    """A token covers its rows already."""
    files = Files()
    stage = RowStage(files.write, bytes_max=1 << 20, recent_of="writer")
    stage.add(batch(1))
    ((path, part),) = stage.take()
    forget_staged([path, "other"], recent_of="writer")
    assert is_read(files, path, part, "writer")
