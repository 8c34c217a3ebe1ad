"""Folders in which RocksDB works: those of processes that are gone go, also other jobs'; those of the living stay."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ray_fakes import SINK, SOURCE

from tidegate.actors.drivers import work_folders
from tidegate.actors.drivers.work_folders import prepare_work, work_folder
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import AttemptNumber, JobId
from tidegate.storage.process_id import ProcessId, this_process

OLD, NEW = JobId("old-1"), JobId("new-1")
FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """That of this node."""
    return str(tmp_path / "tidegate-state")


@pytest.fixture(scope="module")
def gone() -> ProcessId:
    """A process of this machine that has been killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        child.kill()
    return replace(this_process(), pid=child.pid, began="0")


def work(
    monkeypatch: pytest.MonkeyPatch, folder: str, process: ProcessId, job: JobId, task: TaskId, attempt: AttemptNumber
) -> Path:
    """What a process that began an attempt, and has written something, leaves when it is killed."""
    with monkeypatch.context() as patch:
        patch.setattr(work_folders, "this_process", lambda: process)
        patch.setattr(work_folders, "is_there", lambda process: True)  # All are, while they work.
        prepare_work(folder, job, task, attempt)
    state = Path(work_folder(folder, job, task, attempt)) / "uid" / "000001.sst"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"state")
    return state


def test_what_killed_processes_left_goes_with_the_next_attempt_on_the_node(
    monkeypatch: pytest.MonkeyPatch, folder: str, gone: ProcessId
) -> None:
    """Their job is over, or their task goes on elsewhere: nobody else would ever delete it."""
    for job, task in ((OLD, SOURCE), (OLD, SINK), (NEW, SINK)):
        work(monkeypatch, folder, gone, job, task, FIRST)

    prepare_work(folder, NEW, SOURCE, SECOND)

    assert [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file()] == [
        "new-1/source-0/process-1"
    ]
    assert os.listdir(folder) == ["new-1"]


@pytest.mark.parametrize("whose", ["this", "another container's", "nobody's"])
def test_what_is_not_known_to_be_abandoned_stays(
    monkeypatch: pytest.MonkeyPatch, folder: str, gone: ProcessId, whose: str
) -> None:
    """Of a process in another container that shares the disk nothing is known."""
    process = {"this": this_process(), "another container's": replace(gone, place="elsewhere"), "nobody's": gone}[whose]
    state = work(monkeypatch, folder, process, OLD, SINK, FIRST)
    if whose == "nobody's":
        (state.parents[2] / "process-0").write_bytes(b"half")

    prepare_work(folder, NEW, SINK, FIRST)

    assert state.read_bytes() == b"state"


def test_an_earlier_attempt_of_the_task_goes_whoever_made_it(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """The next attempt of the same process."""
    work(monkeypatch, folder, this_process(), NEW, SINK, FIRST)

    state = work(monkeypatch, folder, this_process(), NEW, SINK, SECOND)

    assert sorted(os.listdir(state.parents[2])) == ["attempt-1", "process-1"]


def test_an_empty_folder_that_goes_meanwhile_is_made_again(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """Whoever clears up may see it before its first file is in it."""
    make_inside, left = work_folders.make_inside, [3]

    def made_and_deleted(folder: str, relative: str) -> str:
        path = make_inside(folder, relative)
        if left[0]:
            left[0] -= 1
            os.rmdir(path)
        return path

    monkeypatch.setattr(work_folders, "make_inside", made_and_deleted)
    prepare_work(folder, NEW, SINK, FIRST)
    assert os.listdir(os.path.join(folder, "new-1", "sink-0")) == ["process-0"]
