"""`tidegate events --raw` and `--why`: each event of a job has a number, and a chain of causes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import CommandRunner
from failed_once import job_that_failed_once
from typer.testing import Result

from tidegate.actors.coordinator.events import StorageCameBack, TimerFired
from tidegate.cli import event_printing
from tidegate.cli.main import app
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.codec import encode
from tidegate.storage.files.envelope import seal
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import Generation, JobId


@pytest.fixture(scope="module")
def job_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job of which a task has failed once, with an error that names it."""
    return job_that_failed_once(tmp_path_factory.mktemp("events"))


def events(*arguments: object) -> Result:
    """Run `tidegate events --raw`."""
    return CommandRunner().invoke(app, ["events", "--raw", *map(str, arguments)])


def number_of(listing: str, pattern: str) -> int:
    """The number of the first event in a listing that reads so."""
    found = re.search(rf"event (\d+)  .*{pattern}", listing)
    assert found is not None, listing
    return int(found[1])


def test_a_restart_is_explained_by_the_failure(job_folder: Path) -> None:
    """The chain begins with the task that failed, in its own words, and ends with the task of the next attempt."""
    listing = events(job_folder).output
    ready = number_of(listing, r"TaskReady\(.*attempt=1")

    result = events(job_folder, "--why", ready)

    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert len(lines) == 3
    assert "of attempt 0 failed: OperatorError: operator 'map'" in lines[0]
    assert "ValueError: row 150 is odd" in lines[0]
    assert lines[1].endswith("it was time to start attempt 1")
    assert lines[2].split()[0] == str(ready)
    assert lines[2].endswith("of attempt 1 was ready")


def test_the_end_of_a_task_is_explained_by_its_last_checkpoint(job_folder: Path) -> None:
    """A task is over because a checkpoint that covers that was complete; that leads back to the beginning."""
    listing = events(job_folder.parent, "--job", "watched").output
    result = events(job_folder, "--why", number_of(listing, "TaskFinished"))
    lines = result.output.splitlines()
    assert re.search(r"checkpoint \d+ was completed$", lines[-2])
    assert lines[-1].endswith("finished")
    assert "does not have the cause" not in result.output


def test_every_event_of_a_job_has_words_and_a_beginning(job_folder: Path) -> None:
    """No chain breaks off, and no event is shown by the name of its class."""
    numbers = re.findall(r"event (\d+) ", events(job_folder).output)
    assert numbers == [str(number) for number in range(len(numbers))]
    for number in numbers:
        result = events(job_folder, "--why", number, "--all")
        assert result.exit_code == 0
        assert "does not have the cause" not in result.output
        assert re.search(r"[A-Z][a-z]+[A-Z][a-z]+$", result.output.strip()) is None


# --- what is asked for is not there -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["100000", "-1"])
def test_a_number_that_no_event_has(job_folder: Path, number: str) -> None:
    """The error says which there are."""
    result = events(job_folder, f"--why={number}")
    assert result.exit_code == 2
    known = r"its log has the events 0 to \d+; give the number of one of these"
    assert re.match(rf"Error: job watched-\w+ has no event -?\d+: {known}\n", result.output)


def test_a_folder_without_a_log(tmp_path: Path) -> None:
    """The error says so; a job must be chosen where there are several."""
    assert "there is no event log under" in events(tmp_path, "--why", 0).output
    store = open_store(str(tmp_path))
    for job in ("a-11111111", "b-22222222"):
        EventLog(store, JobId(job)).append(_entry(0, 0, None))
    result = events(tmp_path, "--why", 0)
    assert result.exit_code == 2
    assert "one of a-11111111, b-22222222" in " ".join(result.output.split())
    assert events(tmp_path, "--why", 0, "--job", "a").exit_code == 0


# --- logs that were cut or damaged ---------------------------------------------------------------------------------


def _entry(index: int, first: int, *causes: int | None) -> LogEntry:
    event = TimerFired(1_000 * index, "periodic:0")
    count = max(1, len(causes))
    return LogEntry(index, Generation(1), 1_000 * index, "n", (event,) * count, first, causes)


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A root."""
    return open_store(str(tmp_path))


def test_a_cause_that_was_cut_is_named(store: FileSystemStore) -> None:
    """Its number is known, and what became of it; numbers are those that they were before."""
    log = EventLog(store, JobId("job-12345678"))
    first = 0
    for index in range(8):
        log.append(_entry(index, first, *((first - 1 or None,) if index else (None, None))))
        first += 1 if index else 2
    log.write_snapshot(6, ())
    log.truncate(6, frozenset({0}))

    result = events(store.url, "--why", 8)

    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == ["5", "6", "7", "8"]
    assert "5  was folded into a snapshot, and cut from the log" in result.output
    assert "its log has the events 6 to 8; older ones" in events(store.url, "--why", 4).output


def test_a_cause_that_nobody_remembered(store: FileSystemStore) -> None:
    """Of an event that answers something the log should tell what; where it does not, that is said."""
    came_back = replace(_entry(0, 0, None), events=(StorageCameBack(5),))
    EventLog(store, JobId("job-12345678")).append(came_back)
    assert "The log does not have the cause\n" in events(store.url, "--why", 0).output


def test_an_entry_that_cannot_be_read(store: FileSystemStore) -> None:
    """The numbers of the others stay what they are."""
    log = EventLog(store, JobId("job-12345678"))
    for index in range(4):
        log.append(_entry(index, index, index - 1 if index else None))
    newer = encode(_entry(1, 1, 0)).replace(b"LogEntry", b"NewEntry")
    store.write(f"job-12345678/events/{1:012d}", [seal(b"TGEVENT", 1, newer)])
    result = events(store.url)
    assert result.exit_code == 1
    assert re.findall(r"event (\d)", result.output) == ["0", "2", "3"]
    assert "1 entries cannot be read" in events(store.url, "--why", 1).output
    assert "cannot be read" in events(store.url, "--why", 3).output


def test_a_long_chain_is_cut_in_the_middle(store: FileSystemStore) -> None:
    """How much is left out is said; `--all` prints it."""
    log = EventLog(store, JobId("job-12345678"))
    length = event_printing.LINES_MAX + 10
    log.append(_entry(0, 0, *(number - 1 if number else None for number in range(length))))
    lines = events(store.url, "--why", length - 1).output.splitlines()
    assert sum("10 events between them" in line for line in lines) == 1
    numbers = [line.split()[0] for line in lines if line.split()[0].isdigit()]
    assert len(numbers) == event_printing.LINES_MAX
    assert (numbers[0], numbers[-1]) == ("0", str(length - 1))
    assert len(events(store.url, "--why", length - 1, "--all").output.splitlines()) == length + 1
