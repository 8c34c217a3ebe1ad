"""`tidegate checkpoints sweep` lists what is left behind, and deletes it only when told to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from checkpoints_on_disk import complete
from command_line import CommandRunner
from typer.testing import Result

from tidegate.cli.main import app
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import Generation, JobId

_JOB = "demo-1a2b3c4d"
_ORPHAN = f"{_JOB}/chk-2/counts-0"


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A root with one job that died long ago: checkpoint 1 is complete, of checkpoint 2 there is a file."""
    opened = open_store(str(tmp_path))
    EventLog(opened, JobId(_JOB)).append(LogEntry(0, Generation(1), 5, "nonce", (), 0, ()))
    complete(opened, _JOB, 1)
    opened.write(_ORPHAN, [bytes(1234)])
    for path in tmp_path.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return opened


def _run(*arguments: str) -> Result:
    return CommandRunner().invoke(app, ["checkpoints", "sweep", *arguments])


def test_sweep_lists_orphans_without_deleting(store: FileSystemStore) -> None:
    """Each orphan with its size, the sum, and what to do."""
    result = _run(store.url)

    assert result.exit_code == 0
    assert f"1,234  {store.url}/{_ORPHAN}" in result.output
    assert "1 files, 1,234 bytes; --delete deletes them" in result.output
    assert store.exists(_ORPHAN)


def test_sweep_deletes_with_the_option(store: FileSystemStore) -> None:
    """Only what it had listed; then there is nothing more."""
    result = _run(store.url, "--job", "demo", "--delete")

    assert (result.exit_code, "1 files, 1,234 bytes, were deleted" in result.output) == (0, True)
    assert not store.exists(_ORPHAN)
    assert store.exists(f"{_JOB}/chk-1/counts-0")
    assert "No orphaned file" in _run(store.url).output


def test_leaves_a_job_that_may_run(store: FileSystemStore) -> None:
    """Exit code 1 says that it was left out; --force does it, --grace says how long is long enough."""
    log = Path(store.url, _JOB, "events", f"{0:012d}")
    os.utime(log)

    result = _run(store.url, "--delete")
    assert (result.exit_code, store.exists(_ORPHAN)) == (1, True)
    assert f"Job {_JOB} may be running" in result.output
    assert "0 files, 0 bytes, were deleted" in result.output
    assert _run(store.url, "--delete", "--force").exit_code == 0
    assert not store.exists(_ORPHAN)


def test_sweep_of_one_job_ignores_others(store: FileSystemStore) -> None:
    """--job is a name or an id, as in the other commands."""
    assert "No orphaned file" in _run(store.url, "--job", "other").output
    assert "1 files" in _run(store.url, "--job", _JOB).output


@pytest.mark.parametrize("grace", ["soon", "-1"])
def test_refuses_a_grace_that_is_none(store: FileSystemStore, grace: str) -> None:
    """Wrong usage is one sentence and exit code 2."""
    result = _run(store.url, "--grace", grace)

    assert (result.exit_code, "--grace" in result.output) == (2, True)
