"""The command line shows what is there, and its exit code says whether it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints_on_disk import complete, flip_bit
from command_line import CommandRunner
from typer.testing import Result

from tidegate.actors.coordinator.events import CoordinatorStarted
from tidegate.cli.main import app
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.checkpoints.metadata import SplitPool, StoredSplit
from tidegate.storage.codec import encode
from tidegate.storage.files.envelope import seal
from tidegate.storage.files.file_system_store import FileSystemStore, open_store
from tidegate.storage.ids import Generation, JobId, OperatorUid

_JOB = "demo-1a2b3c4d"


@pytest.fixture
def store(tmp_path: Path) -> FileSystemStore:
    """A root with checkpoints 1 and 2 of one job."""
    opened = open_store(str(tmp_path))
    for number in (1, 2):
        complete(opened, _JOB, number, at_ms=1_700_000_000_000 + number)
    return opened


def _run(*arguments: str) -> Result:
    return CommandRunner().invoke(app, list(arguments))


def test_checkpoints_list_prints_a_table(store: FileSystemStore) -> None:
    """Each checkpoint's path, time and condition; damaged ones are told from readable ones."""
    flip_bit(store, f"{_JOB}/chk-2/_metadata", 50)

    result = _run("checkpoints", "list", store.url)

    lines = [line for line in result.output.splitlines() if "chk-" in line]
    assert result.exit_code == 0
    assert f"{store.url}/{_JOB}/chk-1" in lines[0]
    assert "2023-11-14 22:13:20.001" in lines[0]
    assert "readable" in lines[0]
    assert "damaged" in lines[1]


def test_a_path_is_never_cut(tmp_path: Path) -> None:
    """However long it and what stands beside it are: where there is no terminal, a line is a checkpoint."""
    deep = open_store(str(tmp_path / ("folder" * 20) / ("below" * 20)))
    complete(deep, _JOB, 1)
    flip_bit(deep, f"{_JOB}/chk-1/_metadata", 50)

    result = _run("checkpoints", "list", deep.url)

    (line,) = [line for line in result.output.splitlines() if "damaged" in line]
    assert f"{deep.url}/{_JOB}/chk-1" in line


def test_checkpoints_list_prints_that_there_are_none(store: FileSystemStore) -> None:
    """An empty list is a sentence, not an error."""
    result = _run("checkpoints", "list", store.url, "--job", "other")

    assert result.exit_code == 0
    assert f"No completed checkpoint under {store.url} of job other" in result.output


def test_checkpoints_show_prints_operators_and_states(store: FileSystemStore) -> None:
    """Its operators and where each state is, with rows and bytes."""
    result = _run("checkpoints", "show", f"{store.url}/{_JOB}/chk-1")

    assert result.exit_code == 0
    for expected in ("Checkpoint 1", "counts", "keyed", f"{_JOB}/chk-1/counts-1"):
        assert expected in result.output


def test_shows_splits_that_nobody_had_taken(store: FileSystemStore) -> None:
    """How many of each source, with how many rows, and the first of them."""
    files = tuple(StoredSplit(f"{number}.parquet", b"", 10) for number in range(1_234))
    partly = (StoredSplit("known", b"", 5), StoredSplit("unknown", b""))
    complete(store, _JOB, 3, pools=(SplitPool(OperatorUid("files"), files), SplitPool(OperatorUid("lines"), partly)))
    shown = _run("checkpoints", "show", f"{store.url}/{_JOB}/chk-3").output
    without = _run("checkpoints", "show", f"{store.url}/{_JOB}/chk-1").output

    title = "Splits that no subtask had taken"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.partition(title)[2].splitlines()]
    assert ["files", "1,234", "12,340", "0.parquet, 1.parquet, 2.parquet, ..."] in cells
    assert ["lines", "2", "?", "known, unknown"] in cells
    assert title not in without


def test_shows_splits_that_were_read_to_the_end(store: FileSystemStore) -> None:
    """Those of finished subtasks, which no state holds: in `show`, `inspect` and `diff`."""
    read = tuple(StoredSplit(f"{number}.parquet", b"", 10) for number in range(4))
    complete(store, _JOB, 3, read_splits=read)
    complete(store, _JOB, 4, read_splits=(*read, StoredSplit("4.parquet", b"", 10)))
    three, four = (f"{store.url}/{_JOB}/chk-{number}" for number in (3, 4))
    for command in ("show", "inspect"):
        shown = _run("checkpoints", command, three).output.partition("had read to the end")[2]
        assert ["files", "4", "40", "0.parquet, 1.parquet, 2.parquet, ..."] in _cells(shown)
    changed = _cells(_run("checkpoints", "diff", three, four).output.partition("Positions of sources")[2])
    assert ["files", "4.parquet", "? -> read"] in changed
    assert ["files", "splits read to the end", "4 -> 5"] in changed
    assert "had read" not in _run("checkpoints", "show", f"{store.url}/{_JOB}/chk-1").output


def _cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines()]


def test_checkpoints_verify_reports_by_exit_code(store: FileSystemStore) -> None:
    """0 and a count for a whole checkpoint; 1 and each problem for a damaged one."""
    path = f"{store.url}/{_JOB}/chk-1"
    whole = _run("checkpoints", "verify", path)
    flip_bit(store, f"{_JOB}/chk-1/counts-0", 100)
    damaged = _run("checkpoints", "verify", path)

    assert (whole.exit_code, "3 files" in whole.output) == (0, True)
    assert damaged.exit_code == 1
    assert "counts subtask 0: " in damaged.output
    assert "cannot be restored" in damaged.output


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (("checkpoints", "show", "nowhere"), 2, "<root>/<job>/chk-<number>"),
        (("checkpoints", "show", "memory://x/job-1/chk-1"), 1, "there is no file"),
        (("checkpoints", "list", "ftp://x"), 2, "'ftp'"),
        (("events", "ftp://x"), 2, "'ftp'"),
    ],
)
def test_errors_of_commands_are_one_sentence(arguments: tuple[str, ...], exit_code: int, named: str) -> None:
    """What the user did wrong, without a traceback, and an exit code."""
    result = _run(*arguments)

    assert result.exit_code == exit_code
    assert result.output.startswith("Error: ")
    assert named in result.output
    assert "Traceback" not in result.output


def test_prints_the_event_log(store: FileSystemStore) -> None:
    """Each entry's index, time and generation, and its events; jobs can be chosen."""
    started = CoordinatorStarted(1_700_000_000_000, Generation(1))
    EventLog(store, JobId(_JOB)).append(LogEntry(0, Generation(1), started.at_ms, "n", (started,), 0, (None,)))

    result = _run("events", store.url, "--job", "demo", "--raw")

    assert result.exit_code == 0
    for expected in (f"Job {_JOB}", "2023-11-14 22:13:20.000", "generation 1", "CoordinatorStarted(", "generation=1"):
        assert expected in result.output
    assert "No event log" in _run("events", store.url, "--job", "other").output


def test_entries_of_a_newer_version_do_not_end_the_list(store: FileSystemStore) -> None:
    """An event of an unknown type is named in its place, the entries after it are printed, and the exit code is 1."""
    log = EventLog(store, JobId(_JOB))
    for index in range(3):
        log.append(LogEntry(index, Generation(1), 0, "n", (f"event {index}",), index, (None,)))
    newer = encode(LogEntry(1, Generation(1), 0, "n", (), 1, ())).replace(b"LogEntry", b"NewEntry")
    store.write(f"{_JOB}/events/{1:012d}", [seal(b"TGEVENT", 1, newer)])

    result = _run("events", store.url, "--raw")

    assert result.exit_code == 1
    assert "unknown wire type 'NewEntry'" in result.output
    assert "event 2" in result.output
    assert "1 entries cannot be read" in result.output
