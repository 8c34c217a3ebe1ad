"""What a vacuum takes away, and what whoever comes afterwards finds."""

from __future__ import annotations

import pytest
from plain_store import PlainStore
from table_logs import INFO, A, B, C, commit, file_of

from tidegate.storage.errors import TableError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.table_log import TableLog

NEWEST = Retention(10**9)
"""A moment long after everything."""


class Table:
    """A table whose clock says how many commits there were; `names` is what shows."""

    def __init__(self) -> None:
        self.store = PlainStore()
        self.now_ms = 0
        self.log = TableLog(self.store, entries_per_snapshot=4, now_ms=lambda: self.now_ms)
        self.log.create(INFO)
        self.log.claim(A)

    def commit(self, number: int, *names: str, job: str = A) -> int:
        """A commit of a job; its number in the table."""
        self.now_ms += 1
        commit(self.log, job, number, *names)  # type: ignore[arg-type]
        return self.log.history()[-1].number

    def compacted(self, name: str, *numbers: int, job: str = A) -> None:
        """The entries with these numbers become one."""
        self.now_ms += 1
        self.log.take_compacting(JobId(job), "n")
        assert self.log.compact(JobId(job), "n", set(numbers), 1, (file_of(name, len(numbers)),))

    def names(self, as_of: int | None = None) -> list[str]:
        """What shows, or showed then, to somebody who has just come."""
        files = TableLog(self.store).snapshot(as_of).files
        return [file.path.removeprefix("data/").removesuffix(".parquet") for file in files]

    def vacuum(self, retention: Retention, dry_run: bool = False) -> list[str]:
        """Names of the files that may be deleted."""
        paths = self.log.vacuum(retention, dry_run=dry_run)[0]
        return sorted(path.removeprefix("data/").removesuffix(".parquet") for path in paths)


def test_small_files_go_and_the_large_one_stands_in_for_them() -> None:
    """The commit before it cannot be read any more, the one that it covers can, and so can any later one."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    table.compacted("large", first, second)
    third = table.commit(3, "a3")

    assert table.vacuum(NEWEST, dry_run=True) == ["a1", "a2"]
    assert table.names(first) == ["a1"], "a dry run changes nothing"
    assert table.vacuum(NEWEST) == ["a1", "a2"]
    assert table.names(second) == ["large"]
    assert table.names(third) == table.names() == ["large", "a3"]
    with pytest.raises(TableError, match=rf"commit {first} .* deleted by a vacuum. Every commit from {third} on"):
        table.names(first)
    entries = len(table.log.entries())
    assert table.vacuum(NEWEST) == ["a1", "a2"], "they are still to be deleted, should the last one have been killed"
    assert len(table.log.entries()) == entries


def test_what_was_shown_within_the_time_stays() -> None:
    """A reader that began then goes on with the small files, though large ones are there."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    table.compacted("large", first, second)
    table.commit(3, "a3")
    assert table.vacuum(Retention(2)) == []
    assert table.names(second) == ["a1", "a2"]


def test_the_newest_commits_can_be_read_from_large_files() -> None:
    """However long ago that was: then nobody has begun to read the small ones."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    table.compacted("large", first, second)
    assert table.vacuum(NEWEST, dry_run=True) == ["a1", "a2"]
    assert table.vacuum(Retention(10**9, 2)) == ["a2"]
    assert table.names(first) == ["a1"]
    assert table.vacuum(NEWEST) == ["a1", "a2"]
    assert table.names(second) == table.names() == ["large"]


def test_rows_that_were_taken_back_go() -> None:
    """And a checkpoint that covers them is refused, with what to do."""
    table = Table()
    table.commit(1, "a1")
    table.commit(2, "a2")
    table.log.claim(B, (A, CheckpointId(1)))
    newest = table.commit(1, "b1", job=B)
    assert table.vacuum(NEWEST) == ["a2"]
    with pytest.raises(TableError, match=f"a vacuum has deleted rows .* since commit {newest} of the table exist"):
        table.log.claim(C, (A, CheckpointId(2)))
    with pytest.raises(TableError, match="a vacuum has deleted rows"):
        table.log.check_claim(INFO, C, (A, CheckpointId(2)))
    table.log.claim(C, (A, CheckpointId(1)))
    assert table.commit(1, "c1", job=C)
    assert table.names() == ["a1", "c1"]


def test_what_a_running_job_may_fall_back_to_stays() -> None:
    """Its checkpoints that are there, however old; and where it was started from, if it has none yet."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    third = table.commit(3, "a3")
    table.compacted("large", first, second, third)
    assert table.vacuum(Retention(10**9, 1, (CheckpointId(2),)), dry_run=True) == ["a3"]
    assert table.vacuum(Retention(10**9, 1, (CheckpointId(3),)), dry_run=True) == ["a1", "a2", "a3"]

    table.log.claim(B, (A, CheckpointId(1)))
    table.commit(1, "b1", job=B)
    assert table.vacuum(NEWEST, dry_run=True) == ["a2", "a3", "large"]
    table.log.claim(B, (A, CheckpointId(1)), next_checkpoint_id=2)
    assert "a1" not in table.vacuum(NEWEST, dry_run=True)


def test_what_was_taken_back_within_the_time_stays() -> None:
    """Somebody may have begun to read it just before."""
    table = Table()
    table.commit(1, "a1")
    table.commit(2, "a2")
    table.log.claim(B, (A, CheckpointId(1)))
    table.commit(1, "b1", job=B)
    assert table.vacuum(Retention(1)) == []
    assert table.vacuum(Retention(3)) == ["a2"]


def test_where_a_running_job_was_started_from_stays() -> None:
    """Though its rows are in a large file by now, together with those that it would take back."""
    table = Table()
    first = table.commit(1, "a1")
    table.log.claim(B, (A, CheckpointId(1)))
    second = table.commit(1, "b1", job=B)
    table.compacted("large", first, second, job=B)
    table.commit(2, "b2", job=B)
    assert table.vacuum(NEWEST) == ["b1"]
    table.log.claim(B, (A, CheckpointId(1)), next_checkpoint_id=3)
    table.commit(3, "b3", job=B)
    assert table.names() == ["a1", "b3"]


def test_what_the_next_commit_shows_stays() -> None:
    """Though it is hidden now, and was for long."""
    table = Table()
    table.commit(1, "a1")
    table.commit(2, "a2")
    table.log.claim(B, (A, CheckpointId(1)))
    table.commit(1, "b1", job=B)
    table.log.claim(C, (A, CheckpointId(2)))
    assert table.vacuum(NEWEST) == []
    table.commit(1, "c1", job=C)
    assert table.names() == ["a1", "a2", "c1"]
    assert table.vacuum(NEWEST) == ["b1"]


def test_what_a_later_claim_brings_back_stays() -> None:
    """Small files of which a large one was made show again: a job hides what was there before its line came."""
    table = Table()
    first = table.commit(1, "a1")
    table.log.claim(B, if_exists="overwrite")
    table.log.claim(C, (A, CheckpointId(1)))
    second = table.commit(1, "c1", job=C)
    table.compacted("large", first, second, job=C)
    later = JobId("d-1")
    table.log.claim(later, (B, CheckpointId(0)))

    assert table.names() == ["large"]
    assert table.vacuum(NEWEST) == ["a1"], "it hides a1, and shows c1 again"
    table.commit(1, "d1", job=later)
    assert table.names() == ["c1", "d1"]
    assert table.vacuum(NEWEST) == ["a1", "large"]


def test_a_file_that_another_entry_names_stays() -> None:
    """A large file is named again by a compaction."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    table.now_ms += 1
    table.log.take_compacting(A, "n")
    assert table.log.compact(A, "n", {first, second}, 1, (file_of("a1"), file_of("a2")))
    table.commit(3, "a3")
    assert table.vacuum(NEWEST) == []
    assert table.names() == ["a1", "a2", "a3"]


def test_files_that_a_job_brings_along_once_more_must_be_there() -> None:
    """Nobody had committed them when their job died; a job that did so was hidden since, and vacuumed."""
    table = Table()
    table.commit(1, "a1")
    left = (file_of("left"),)
    table.log.claim(B, (A, CheckpointId(2)), uncommitted=left)
    table.commit(1, "b1", job=B)
    table.log.claim(C, (A, CheckpointId(1)))
    table.commit(1, "c1", job=C)
    assert table.vacuum(NEWEST) == ["b1", "left"]
    with pytest.raises(TableError, match=r"deleted 1 files .* covers \(the first is data/left.parquet\)"):
        table.log.claim("d-1", (A, CheckpointId(2)), uncommitted=left)  # type: ignore[arg-type]


def test_a_table_without_commits_has_nothing_to_lose() -> None:
    """And no table is an error."""
    assert Table().vacuum(NEWEST) == []
    with pytest.raises(TableError, match="there is no table"):
        TableLog(PlainStore()).vacuum(NEWEST)


def test_a_large_file_that_has_gone_is_undone_if_the_small_ones_are_there() -> None:
    """A job went back behind it, and shows small files again; a checkpoint that covers no more finds them."""
    table = Table()
    first, second = table.commit(1, "a1"), table.commit(2, "a2")
    third = table.commit(3, "a3")
    table.compacted("large", first, second)
    table.log.claim(A, (A, CheckpointId(1)), next_checkpoint_id=4)
    table.commit(4, "a4")
    assert table.names() == ["a1", "a4"]
    assert table.vacuum(NEWEST) == ["a2", "a3", "large"]
    with pytest.raises(TableError, match="deleted by a vacuum"):
        table.names(third)
    assert table.names(first) == ["a1"]


def test_a_commit_without_files_between_deleted_ones_has_lost_nothing() -> None:
    """It only hides what a fallback takes back. The checkpoints after it are restored from the large file."""
    clock = [1_000]
    log = TableLog(PlainStore(), now_ms=lambda: clock[0])
    log.create(INFO)
    log.claim(A)
    commit(log, A, 1, "a1")
    commit(log, A, 2, "a2")
    log.claim(A, (A, CheckpointId(1)), next_checkpoint_id=3)
    commit(log, A, 3)
    commit(log, A, 4, "a4")
    log.take_compacting(A, "n")
    assert log.compact(A, "n", {entry.seq for entry in log.shown_entries()[1]}, 1, (file_of("large", 2),))
    clock[0] += 1_000
    commit(log, A, 5, "a5")
    deletable, _ = log.vacuum(Retention(clock[0], checkpoints=(CheckpointId(4), CheckpointId(5))))
    assert sorted(deletable) == ["data/a1.parquet", "data/a2.parquet", "data/a4.parquet"]
    log.claim(A, (A, CheckpointId(4)), next_checkpoint_id=6)
    commit(log, A, 6)
    assert [file.path for file in log.snapshot().files] == ["data/large.parquet"]
