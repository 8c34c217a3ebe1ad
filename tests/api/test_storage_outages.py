"""Jobs whose checkpoint storage is away for a while, full, or gone for good."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, opening
from waiting import until

import tidegate as tg
from tidegate.actors.coordinator import coordinator_context
from tidegate.actors.drivers import event_log_writer, task_driver
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.storage.errors import StorageError
from tidegate.storage.files import retrying_store as retrying
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.files.store import Buffer

ROWS = 60


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outages of tests are short, and so are the pauses between two attempts."""
    for module in (event_log_writer, task_driver, coordinator_context):
        monkeypatch.setattr(module, "pause_ms", lambda first_ms, failures: 1)
    monkeypatch.setattr(retrying, "TRIES_MAX", 1)  # Short ones are survived before anybody else hears of them.


class Storage:
    """Storage of jobs; while it is `away`, a number of the operations that match fail with its error."""

    def __init__(self, error: str = "the endpoint does not answer", cause: OSError | None = None) -> None:
        self.error = error
        self.cause = cause
        self.fails: dict[str, int] = {}
        """How many more creates and writes of paths with this part fail."""
        self.failed = 0

    def open(self, url: str) -> FileSystemStore:
        """A store of it."""
        return _Store(url, self)

    def touch(self, path: str) -> None:
        """An operation fails, if it is to."""
        for part, left in self.fails.items():
            if part in path and left:
                self.fails[part] = left - 1
                self.failed += 1
                raise StorageError(self.error) from self.cause


class _Store(FileSystemStore):
    def __init__(self, url: str, storage: Storage) -> None:
        super().__init__(url)
        self._storage = storage

    def create(self, path: str, data: Buffer) -> None:
        self._storage.touch(f"{self.url}/{path}")
        super().create(path, data)

    def delete_tree(self, prefix: str) -> None:
        self._storage.touch(f"{self.url}/delete {prefix.rpartition('/')[2]}")
        super().delete_tree(prefix)

    def write(self, path: str, chunks: Iterable[Buffer]) -> int:
        self._storage.touch(f"{self.url}/{path}")
        return super().write(path, chunks)


def started(source: GatedSource, folder: Path, storage: Storage, **settings: object) -> tuple[tg.Job, tg.OutputTable]:
    """A job that counts by key, with checkpoints on request."""
    env = tg.StreamEnvironment(LocalRuntime(storage.open), 1, options=tg.DataPlaneOptions(source_rows_max=10))
    counts = env.from_source(source, uid="source").key_by("k").aggregate(n=tg.count(), emit="final", uid="counts")
    table = counts.to_table(str(folder / "out"), uid="out")
    settings = {"inline_threshold": 0, **settings}
    return env.execute("job", checkpoints=config(folder / "checkpoints", **settings), restart=NO_RESTART), table


@pytest.mark.parametrize(
    ("what", "times"), [("/events/", 8), ("/_metadata", 1), ("/chk-", 2), ("_tidegate/log/", 5), ("data/", 5)]
)
def test_an_outage_of_each_kind_of_file_is_survived(
    tmp_path: Path, what: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The job goes on in its first attempt, and its table has every row once; a warning says what is away."""
    storage = Storage()
    with opening(GatedSource(ROWS, gates=[30])) as source, caplog.at_level(logging.WARNING):
        job, table = started(source, tmp_path, storage, interval="10ms")
        source.await_gate(30)
        storage.fails[what] = times
        source.open_gate(30)
        assert job.wait(f"{WAIT_S}s") == "finished"

    progress = job.progress()
    assert (progress.restarts, storage.failed) == (0, times)
    assert sum(table.to_arrow()["n"].to_pylist()) == ROWS
    assert "cannot be reached (the endpoint does not answer" in caplog.text
    assert "can be reached again, after" in caplog.text


@pytest.mark.parametrize("what", ["/events/", "/_metadata", "/chk-", "_tidegate/log/", "data/"])
def test_a_job_reports_what_storage_it_waits_for(tmp_path: Path, what: str) -> None:
    """What, since when, and why: for as long as the outage lasts, whichever part of the job meets it."""
    storage = Storage("No space left on device")
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, storage, interval="10ms")
        source.await_gate(30)
        assert job.progress().waits_for is None
        storage.fails[what] = 1_000_000_000
        source.open_gate(30)
        until("a word of the outage", lambda: job.progress().waits_for, lambda: job.progress())
        waits_for = str(job.metrics()["waits_for"])
        storage.fails.clear()
        assert job.wait(f"{WAIT_S}s") == "finished"
    assert re.search(r", which has failed for \d+ s: .*No space left on device", waits_for)
    assert job.progress().waits_for is None


@pytest.mark.parametrize("refusal", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("what", ["/events/", "/_metadata", "/chk-", "_tidegate/log/", "data/"])
def test_a_job_waits_for_the_permission_to_write(tmp_path: Path, what: str, refusal: int) -> None:
    """As for storage that is away: it reports what it waits for, uses up no restart, and ends right afterwards."""
    storage = Storage(f"cannot write: {os.strerror(refusal)}", OSError(refusal, os.strerror(refusal)))
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, table = started(source, tmp_path, storage, interval="10ms")
        source.await_gate(30)
        storage.fails[what] = 1_000_000_000
        source.open_gate(30)
        until("a word of the refusal", lambda: job.progress().waits_for, lambda: job.progress())
        waits_for = str(job.metrics()["waits_for"])
        storage.fails.clear()
        assert job.wait(f"{WAIT_S}s") == "finished"
    assert os.strerror(refusal) in waits_for
    assert (job.progress().restarts, job.progress().waits_for) == (0, None)
    assert sum(table.to_arrow()["n"].to_pylist()) == ROWS


@pytest.mark.slow
def test_a_savepoint_into_a_folder_that_refuses_it_fails_at_once(tmp_path: Path) -> None:
    """Its user waits for it, and the job does not."""
    storage = Storage("cannot write: Permission denied", PermissionError(errno.EACCES, "Permission denied"))
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, storage, interval=None)
        source.await_gate(30)
        storage.fails = {"savepoint-": 1_000_000_000}
        with pytest.raises(tg.CheckpointError, match="Permission denied"):
            job.savepoint(str(tmp_path / "savepoints"))
        assert job.status() == "running"
        source.open_gate(30)
        assert job.wait(f"{WAIT_S}s") == "finished"


def test_savepoints_and_deletions_survive_an_outage_as_everything_else_does(tmp_path: Path) -> None:
    """More than ten attempts fail, and then the savepoint is whole, and nothing of what was subsumed is left."""
    storage = Storage()
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, storage, interval=None)
        source.await_gate(30)
        storage.fails = {"savepoint-": 11, "delete chk-": 11}
        savepoint = job.savepoint(str(tmp_path / "savepoints"))
        job.trigger_checkpoint()
        assert tg.recovery.verify(savepoint).ok
        until("the deletion", lambda: [n for n in os.listdir(job.root + "/" + job.job_id) if "chk" in n] == ["chk-2"])
        source.open_gate(30)
        assert job.wait(f"{WAIT_S}s") == "finished"
    assert (job.progress().restarts, storage.failed) == (0, 22)


def test_a_savepoint_is_given_up_when_its_folder_stays_away(tmp_path: Path) -> None:
    """After the time that is allowed; the job goes on."""
    storage = Storage()
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, storage, interval=None, storage_outage="50ms")
        source.await_gate(30)
        storage.fails = {"savepoint-": 10**9}
        with pytest.raises(tg.CheckpointError, match=r"the endpoint does not answer \(\d+ attempts in 0"):
            job.savepoint(str(tmp_path / "savepoints"))
        assert job.status() == "running"
        job.trigger_checkpoint()
        source.open_gate(30)
        assert job.wait(f"{WAIT_S}s") == "finished"


def test_a_checkpoint_that_an_outage_takes_away_is_counted(tmp_path: Path) -> None:
    """It has failed, for a reason that does not count against the job; who had asked for it is told."""
    storage = Storage(f"cannot write: {os.strerror(errno.ENOSPC)}")
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, storage)
        source.await_gate(30)
        storage.fails["/chk-"] = 1
        with pytest.raises(tg.CheckpointError, match=r"checkpoint storage does not answer: .*No space left on device"):
            job.trigger_checkpoint()
        assert (job.status(), job.progress().failed_checkpoints) == ("running", 1)
        job.trigger_checkpoint()
        source.open_gate(30)
        assert job.wait(f"{WAIT_S}s") == "finished"
    assert job.progress().restarts == 0


def test_storage_that_does_not_come_back_fails_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After the time that is allowed: in the status, where it is waited for, and in the log."""
    storage = Storage()
    with opening(GatedSource(ROWS, gates=[30])) as source, caplog.at_level(logging.ERROR):
        job, _ = started(source, tmp_path, storage, interval="10ms", storage_outage="20ms")
        source.await_gate(30)
        storage.fails["/events/"] = 10**9
        with pytest.raises(tg.JobFailedError, match=r"could not be written .*the endpoint does not answer"):
            job.wait(f"{WAIT_S}s")
    assert job.status() == "failed"
    assert "the endpoint does not answer" in str(job.progress().reason)
    assert any(r.levelno == logging.ERROR and "its coordinator stops" in r.getMessage() for r in caplog.records)


def test_a_folder_that_is_deleted_under_a_job_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has taken over: the log is gone."""
    monkeypatch.setattr(event_log_writer, "LOOK_MS", 0)
    with opening(GatedSource(ROWS, gates=[30])) as source:
        job, _ = started(source, tmp_path, Storage())
        source.await_gate(30)
        shutil.rmtree(tmp_path / "checkpoints" / job.job_id)
        with pytest.raises(tg.CheckpointError):
            job.trigger_checkpoint()
        with pytest.raises(tg.JobFailedError, match="Was the folder deleted while the job was running") as caught:
            job.wait(f"{WAIT_S}s")
    assert "newer coordinator" not in str(caught.value)
