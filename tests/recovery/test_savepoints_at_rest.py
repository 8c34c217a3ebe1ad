"""Savepoints, and what was in flight, are found, shown and verified like everything else of a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from any_permit import ANY_PERMIT
from checkpoints_on_disk import MAX_PARALLELISM, UID, complete, flip_bit
from command_line import CommandRunner

from tidegate import recovery
from tidegate.cli.main import app
from tidegate.recovery.savepoints import write_savepoint
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, create_metadata
from tidegate.storage.errors import NotFoundError
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import JobId, SubtaskIndex
from tidegate.storage.state.in_flight import ChannelEnd, InFlightRows, write_in_flight

JOB = "demo-1a2b3c4d"


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A checkpoint root."""
    return open_store(str(tmp_path / "checkpoints"))


def with_in_flight(store: FileSystemStore, number: int) -> CheckpointMetadata:
    """A checkpoint whose last subtask had rows in flight."""
    metadata = complete(store, JOB, number, at_ms=number * 100)
    layout = CheckpointLayout(JobId(JOB))
    last = metadata.subtasks[-1]
    held = InFlightRows(
        ChannelEnd("source->counts#0", "input", SubtaskIndex(0), last.subtask), (pa.record_batch({"x": [1, 2, 3]}),)
    )
    path = layout.channels_file(metadata.checkpoint_id, last.vertex, last.subtask)
    handle = write_in_flight(store, path, [held], inline_bytes_max=0)
    found = replace(metadata, subtasks=(*metadata.subtasks[:-1], replace(last, in_flight=handle)))
    store.delete(layout.metadata(metadata.checkpoint_id))
    create_metadata(store, found)
    return found


def savepoint(store: FileSystemStore, number: int, target: str) -> str:
    """A savepoint of a job that has kept nothing else."""
    return write_savepoint(open_store, store.url, target, with_in_flight(store, number), ANY_PERMIT)


def test_in_flight_rows_are_verified(store: FileSystemStore) -> None:
    """Their files count, and damage in them makes a checkpoint one that cannot be restored."""
    with_in_flight(store, 1)
    path = f"{store.url}/{JOB}/chk-1"
    whole = recovery.verify(path)
    assert (whole.ok, whole.files) == (True, 4)

    flip_bit(store, f"{JOB}/chk-1/counts-1-channels", 100)

    report = recovery.verify(path)
    assert not report.ok
    assert "counts subtask 1: " in report.problems[0]
    assert "counts-1-channels is damaged" in report.problems[0]
    assert recovery.latest(store.url) is None


def test_a_savepoint_is_read_like_a_checkpoint(store: FileSystemStore, tmp_path: Path) -> None:
    """Inspected, verified and read, also where it was moved to and its job's checkpoints are gone."""
    path = savepoint(store, 3, str(tmp_path / "savepoints"))
    moved = str(shutil.move(path, tmp_path / "moved" / Path(path).name))
    shutil.rmtree(tmp_path / "checkpoints")

    metadata = recovery.inspect(moved).metadata
    report = recovery.verify(f"{moved}/_metadata")

    assert (metadata.job_id, metadata.checkpoint_id) == (JOB, 3)
    assert (report.ok, report.files) == (True, 4)
    tables = recovery.load_operator_state(open_store(moved), metadata, UID)
    assert [group for table in tables for group in table.rows["group"].to_pylist()] == [
        group for group in range(MAX_PARALLELISM) for _ in range(2)
    ]
    with pytest.raises(NotFoundError):
        recovery.inspect(path)


@pytest.mark.parametrize("name", ["counts-0", "counts-1-channels", "_metadata"])
def test_damage_in_a_savepoint_is_found(store: FileSystemStore, tmp_path: Path, name: str) -> None:
    """In every file of it."""
    path = savepoint(store, 3, str(tmp_path))
    flip_bit(open_store(path), name, 90)

    report = recovery.verify(path)

    assert not report.ok
    assert f"{path}/{name} is damaged" in report.problems[0]


def test_savepoints_are_listed(store: FileSystemStore, tmp_path: Path) -> None:
    """In their folder by job and time, whole or damaged; a folder without `_metadata` is none."""
    for number in (2, 1):
        savepoint(store, number, str(tmp_path / "savepoints"))
    damaged = savepoint(store, 4, str(tmp_path / "savepoints"))
    flip_bit(open_store(damaged), "_metadata", 40)
    open_store(str(tmp_path / "savepoints")).write(f"savepoint-{JOB}-5/counts-0", [b"unfinished"])

    found = recovery.list_checkpoints(str(tmp_path / "savepoints"), job="demo")

    assert [(s.checkpoint_id, s.savepoint, s.verified) for s in found] == [
        (4, True, False),
        (1, True, None),
        (2, True, None),
    ]
    assert found[1].path == f"{tmp_path}/savepoints/savepoint-{JOB}-1"
    assert recovery.list_checkpoints(str(tmp_path / "savepoints"), job="other") == []


def test_a_savepoint_among_checkpoints(store: FileSystemStore) -> None:
    """The latest is the checkpoint that the savepoint is a copy of, as long as it is whole."""
    path = savepoint(store, 3, store.url)
    first = recovery.latest(store.url)
    assert first is not None
    assert (first.path, first.savepoint) == (f"{store.url}/{JOB}/chk-3", False)

    store.delete(f"{JOB}/chk-3/counts-0")

    second = recovery.latest(store.url)
    assert second is not None
    assert (second.path, second.savepoint, second.verified) == (path, True, True)


def test_the_command_line_knows_savepoints(store: FileSystemStore) -> None:
    """Listed with their path, shown with what is in flight, verified."""
    path = savepoint(store, 3, store.url)

    listed, shown, verified = (
        CommandRunner().invoke(app, ["checkpoints", *arguments])
        for arguments in (["list", store.url], ["show", path], ["verify", path])
    )

    assert (listed.exit_code, shown.exit_code, verified.exit_code) == (0, 0, 0)
    assert path in listed.output
    assert f"Savepoint 3 of job {JOB}" in shown.output
    in_flight = next(line for line in shown.output.splitlines() if "source->counts#0" in line)
    assert "input:0>1" in in_flight
    assert "in flight" in in_flight
    assert f"{path} is whole: 4 files" in verified.output
