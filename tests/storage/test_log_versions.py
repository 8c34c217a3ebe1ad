"""Which version of a table a number or a time is, what is said where there is none, and what old tables have."""

from __future__ import annotations

import datetime as dt
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from table_logs import INFO, A, B, C, commit, file_of

from tidegate.storage.errors import CodecError, ConfigurationError, TableError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId
from tidegate.storage.tables.log.versions import AsOf
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_log import TableLog

OLD_TABLE = Path(__file__).parent / "old_tables" / "de78a60-append.zip"


def at(ms: int) -> dt.datetime:
    """So many milliseconds after the epoch."""
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=ms)


@pytest.fixture
def table(memory_store: FileSystemStore) -> TableLog:
    """Commits 2 and 3 of A; then of B, restored from the first (entry 4): 5, by a clock that is behind, and 6."""
    times = iter([100, 200, 150, 300])
    log = TableLog(memory_store, now_ms=lambda: next(times))
    log.create(INFO)
    log.claim(A)
    commit(log, A, 1, "a1")
    commit(log, A, 2, "a2", "a2.2")
    log.claim(B, (A, CheckpointId(1)))
    commit(log, B, 1)
    commit(log, B, 2, "b2")
    return log


def names(log: TableLog, as_of: AsOf) -> list[str]:
    """Of the files as of then."""
    return [file.path.removeprefix("data/").removesuffix(".parquet") for file in log.snapshot(as_of).files]


def test_as_of_a_commit_the_table_is_what_it_was(table: TableLog) -> None:
    """Also with rows that were hidden since; the newest is what shows now."""
    assert [names(table, number) for number in (2, 3, 5, 6)] == [["a1"], ["a1", "a2", "a2.2"], ["a1"], ["a1", "b2"]]
    assert table.snapshot(6) == table.snapshot()
    assert table.snapshot(3).seq == 3


def test_as_of_a_time_the_newest_commit_by_then_counts(table: TableLog) -> None:
    """To the millisecond, in any zone; a clock that is behind makes no commit older than the one before it."""
    assert [table.snapshot(at(ms)).seq for ms in (100, 199, 200, 299, 300, 10**9)] == [2, 2, 5, 5, 6, 6]
    assert table.snapshot(at(150).astimezone(dt.timezone(dt.timedelta(hours=9)))).seq == 2


def test_history_tells_of_each_commit(table: TableLog) -> None:
    """Number, time, job, checkpoint, its rows and files, all rows, and whether its rows show now."""
    assert [
        (c.number, c.at, c.job_id, c.checkpoint_id, c.rows_added, c.files_added, c.rows, c.shown)
        for c in table.history()
    ] == [
        (2, at(100), A, 1, 1, 1, 1, True),
        (3, at(200), A, 2, 2, 2, 3, False),
        (5, at(200), B, 1, 0, 0, 1, True),
        (6, at(300), B, 2, 1, 1, 2, True),
    ]


@pytest.mark.parametrize(
    ("as_of", "said"),
    [
        (1, "never had a commit 1: give one of 2 to 6"),
        (7, "never had a commit 7: give one of 2 to 6"),
        (-1, "never had a commit -1"),
        (
            4,
            "4 is not a commit .*: a job became its owner there. For the version at that point give as_of=3",
        ),
        (at(99), r"nothing had been committed to the table at .* by .*: its first commit, 2, was made at 1970-01-01"),
    ],
)
def test_what_never_was_is_refused(table: TableLog, as_of: AsOf, said: str) -> None:
    """The error names what there is."""
    with pytest.raises(TableError, match=said):
        table.snapshot(as_of)


@pytest.mark.parametrize("as_of", [True, "3", 2.0, dt.datetime(2026, 1, 1), dt.date(2026, 1, 1)])
def test_what_is_no_version_is_refused(table: TableLog, as_of: AsOf) -> None:
    """A time without a zone is no moment."""
    with pytest.raises(ConfigurationError, match=r"as_of=.*time zone"):
        table.snapshot(as_of)


def test_rows_that_were_put_together_twice_are_shown(memory_store: FileSystemStore) -> None:
    """A compaction at rest is a commit; its rows, and those of the commits before it, are in a larger file later."""
    log = TableLog(memory_store)
    log.create(INFO)
    log.claim(A)
    commit(log, A, 1, "a1")
    commit(log, A, 2, "a2")
    log.claim_compaction(C, A, A)
    commit(log, C, 1, "at-rest")
    log.claim(B, (A, CheckpointId(2)))
    commit(log, B, 1, "b1")
    log.take_compacting(B, "n")
    assert log.compact(B, "n", {entry.seq for entry in log.shown_entries()[1]}, 1, (file_of("large", 3),))
    assert [(known.job_id, known.shown) for known in log.history()] == [(A, True), (A, True), (C, True), (B, True)]


def test_before_the_first_commit_there_is_no_version(memory_store: FileSystemStore) -> None:
    """Nor is there one of what is no table."""
    log = TableLog(memory_store)
    for said, prepare in (("there is no table", lambda: None), ("nothing was committed", lambda: log.create(INFO))):
        _refused(log, said, prepare)
    assert log.history() == ()


def _refused(log: TableLog, said: str, prepare: Callable[[], None]) -> None:
    prepare()
    with pytest.raises(TableError, match=said):
        log.snapshot(2)


def test_a_table_in_another_format_is_refused(memory_store: FileSystemStore) -> None:
    """The error names the file, its version, and the version that can be read."""
    with zipfile.ZipFile(OLD_TABLE) as archive:
        for name in archive.namelist():
            memory_store.write(name, (archive.read(name),))
    with pytest.raises(
        CodecError, match=r"snapshot-000000000025 has format version 2, and this tidegate reads version 3"
    ):
        read_table(memory_store)
