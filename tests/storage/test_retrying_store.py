"""What fails once is tried again, what cannot pass is not, and what lasts is told with its cause."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.storage.errors import (
    AlreadyExistsError,
    CorruptionError,
    InvalidPathError,
    LogDeletedError,
    NotFoundError,
    StateTooLargeError,
    StorageError,
    may_be_awaited,
    may_pass,
)
from tidegate.storage.files import retrying_store as module
from tidegate.storage.files.file_system import OF_THIS_PROCESS
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.files.retrying_store import KEPT_BYTES_MAX, TRIES_MAX, RetryingStore, retrying
from tidegate.storage.files.store import Buffer


class Faulty(FileSystemStore):
    """A store whose next `failures` writes and reads of files whose path has `matches` in it fail.

    Writes fail when `taken` chunks have been taken, with `error` as the cause.
    """

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.failures = 0
        self.taken = 1
        self.matches = ""
        self.error: Exception = OSError(errno.EIO, os.strerror(errno.EIO))
        self.attempts: list[str] = []

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        """Write, or not."""
        self._count(path)
        if self._fails(path):
            for _, _chunk in zip(range(self.taken), chunks, strict=False):
                pass
            self._fail(path)
        return super().write(path, chunks)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Read, or not."""
        self._count(path)
        if self._fails(path):
            self._fail(path)
        return super().read(path, offset, length)

    def _count(self, path: str) -> None:
        if self.matches in path:
            self.attempts.append(path)

    def _fails(self, path: str) -> bool:
        if self.failures == 0 or self.matches not in path:
            return False
        self.failures -= 1
        return True

    def _fail(self, path: str) -> None:
        if isinstance(self.error, StorageError):
            raise self.error
        raise StorageError(f"cannot write {path}: {self.error}") from self.error


@pytest.fixture
def pauses() -> list[float]:
    """The pauses that were made, none of which was waited for."""
    return []


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    """The store behind."""
    return Faulty(str(tmp_path / "root"))


@pytest.fixture
def patient(faulty: Faulty, pauses: list[float]) -> RetryingStore:
    """The store under test."""
    return RetryingStore(faulty, pauses.append)


@pytest.mark.parametrize("taken", [0, 1, 3, 5])
@pytest.mark.parametrize("produced", [False, True])
def test_a_write_that_fails_is_repeated_whole(
    faulty: Faulty, patient: RetryingStore, pauses: list[float], taken: int, produced: bool
) -> None:
    """Wherever it broke off, also when its chunks come only once; nothing else is left behind."""
    faulty.failures, faulty.taken = 2, taken
    chunks = [b"ab", b"", memoryview(b"cd"), b"e"]

    assert patient.write("d/f", iter(chunks) if produced else chunks) == 5
    assert faulty.read("d/f") == b"abcde"
    assert pauses == [0.1, 0.2]
    assert os.listdir(f"{faulty.url}/d") == ["f"]


def test_a_read_that_fails_is_repeated(faulty: Faulty, patient: RetryingStore) -> None:
    """With the range that was asked for."""
    patient.write("f", [b"0123456789"])
    faulty.failures = TRIES_MAX - 1
    before = OF_THIS_PROCESS.retries

    assert patient.read("f", 2, 3) == b"234"
    assert OF_THIS_PROCESS.retries - before == TRIES_MAX - 1


def test_attempts_are_bounded(faulty: Faulty, patient: RetryingStore, pauses: list[float]) -> None:
    """What lasts is told, with its cause and the number of attempts, after some seconds."""
    faulty.failures = 100

    with pytest.raises(StorageError, match=rf"Input/output error.*the last of {TRIES_MAX} attempts"):
        patient.write("f", [b"x"])
    assert len(faulty.attempts) == TRIES_MAX
    assert 5 < sum(pauses) < 10


@pytest.mark.parametrize(
    "error",
    [
        NotFoundError("gone"),
        CorruptionError("damaged"),
        AlreadyExistsError("there"),
        InvalidPathError("is not a path inside"),
        StateTooLargeError("too many bytes"),
        LogDeletedError("deleted under its job"),
        PermissionError(errno.EACCES, "refused"),
        OSError(errno.EROFS, "read-only"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_cannot_pass_is_not_repeated(faulty: Faulty, patient: RetryingStore, error: Exception) -> None:
    """A refusal is no fault that goes by; the error is as it came."""
    faulty.failures, faulty.error = 1, error

    with pytest.raises(StorageError, match=str(error.args[-1])):
        patient.read("f")
    assert len(faulty.attempts) == 1


@pytest.mark.parametrize(
    ("code", "passes"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EACCES, False), (errno.EROFS, False)]
)
def test_tasks_and_coordinator_know_a_refusal_from_an_outage(code: int, passes: bool) -> None:
    """A full disk gets room again. A refusal is not repeated for a few seconds, but a job waits for either."""
    error = StorageError("cannot write")
    error.__cause__ = OSError(code, os.strerror(code))

    assert may_pass(error) is passes
    assert may_be_awaited(error)


def test_a_job_does_not_wait_for_a_file_that_is_in_the_way() -> None:
    """Somebody has to take it away, and what was there before is not known any more."""
    error = StorageError("cannot write")
    error.__cause__ = OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    assert not may_be_awaited(error)


def test_what_the_data_raises_is_not_repeated(faulty: Faulty, patient: RetryingStore) -> None:
    """State is read while it is written: its damage is not that of the file."""

    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise StorageError("the disk that it comes from is broken")

    with pytest.raises(StorageError, match="that it comes from"):
        patient.write("f", chunks())
    assert len(faulty.attempts) == 1


def test_what_was_let_go_is_not_repeated(faulty: Faulty, patient: RetryingStore) -> None:
    """Of data that is made as it is written only so much is kept; what lies there as a whole is no copy of ours."""
    large = bytes(KEPT_BYTES_MAX // 2 + 1)
    faulty.failures, faulty.taken = 1, 2
    with pytest.raises(StorageError):
        patient.write("f", iter([large, large]))
    faulty.failures = 1

    assert patient.write("f", [large, large]) == 2 * len(large)
    assert patient.write("g", iter([large, large])) == 2 * len(large)


def test_a_create_is_not_repeated(patient: RetryingStore) -> None:
    """It could lose against itself."""
    patient.create("f", b"x")

    with pytest.raises(AlreadyExistsError):
        patient.create("f", b"x")


def test_a_store_that_repeats_requests_is_left_alone(tmp_path: Path) -> None:
    """Loops of attempts around each other would multiply."""
    s3 = retrying(lambda url: open_store(url, key="k", secret="s"))("s3://bucket/x")

    assert isinstance(s3, FileSystemStore)
    assert isinstance(retrying(open_store)(str(tmp_path)), RetryingStore)


@pytest.fixture
def table_is_faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """The store of a table, with attempts that follow each other at once."""
    monkeypatch.setattr(module, "PAUSE_S_FIRST", 0.0)
    return Faulty(str(tmp_path / "out"))


@pytest.mark.parametrize("failures", [1, TRIES_MAX - 1])
def test_a_sink_file_that_fails_costs_no_restart(
    table_is_faulty: Faulty, tmp_path: Path, failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes on as if nothing had been; one line of the log says what happened. The table has each row once."""
    table_is_faulty.matches, table_is_faulty.failures = ".parquet", failures
    with caplog.at_level(logging.WARNING, "tidegate"):
        job, out = _job_with_table(table_is_faulty, tmp_path)

    assert job.status() == "finished"
    assert sorted(out.to_arrow()["n"].to_pylist()) == [20] * 5
    assert [r.getMessage() for r in caplog.records if "Attempt 1 of" in r.getMessage()] != []
    assert sum("Attempt" in r.getMessage() for r in caplog.records) == 1


def test_a_sink_file_that_cannot_be_written_fails_the_job_with_the_cause(
    table_is_faulty: Faulty, tmp_path: Path
) -> None:
    """After all attempts."""
    table_is_faulty.matches, table_is_faulty.failures = ".parquet", 1000

    with pytest.raises(tg.JobFailedError, match=r"cannot write .*parquet: .*Input/output error.*last of 7 attempts"):
        _job_with_table(table_is_faulty, tmp_path)


def test_state_that_fails_costs_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a restart, where no failed checkpoint is tolerated."""
    monkeypatch.setattr(module, "PAUSE_S_FIRST", 0.0)
    root = Faulty(str(tmp_path / "checkpoints"))
    root.matches, root.failures = "/chk-", 1

    job, out = _job_with_table(root, tmp_path)

    assert job.status() == "finished"
    assert root.failures == 0
    assert sorted(out.to_arrow()["n"].to_pylist()) == [20] * 5


def _job_with_table(faulty: Faulty, tmp_path: Path) -> tuple[tg.Job, tg.OutputTable]:
    """A job that neither restarts nor waits for storage, whose table or checkpoints rest in the store that fails."""

    def opened(url: str) -> FileSystemStore:
        return faulty if url == faulty.url else open_store(url)

    rows = pa.table({"k": [i % 5 for i in range(100)]})
    config = tg.CheckpointConfig(storage=tmp_path / "checkpoints", inline_threshold=0, storage_outage="1ms")
    with tg.StreamEnvironment(LocalRuntime(opened), 1, open_store=opened) as env:
        out = env.from_batches(rows).key_by("k").aggregate(n=tg.count(), emit="final").to_table(str(tmp_path / "out"))
        job = env.execute("faulty", checkpoints=config, restart=tg.RestartStrategy.none())
        job.wait("4min")
    return job, out
