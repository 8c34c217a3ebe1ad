"""A table's log is as long as its history: what a cut leaves out, what stays, and who notices."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from plain_store import PlainStore
from table_logs import SCHEMA, A, B, C, commit, file_of
from test_running_vacuum import EPOCH, HISTORY_MS, Job

from tidegate.storage.checkpoints.metadata import TableHead
from tidegate.storage.codec import encode
from tidegate.storage.errors import CorruptionError, StorageError, TableError
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.tables.log import vacuum
from tidegate.storage.tables.log.tail import PARTS_FOLDER
from tidegate.storage.tables.log.vacuum import Retention
from tidegate.storage.tables.table_copy import copy_table
from tidegate.storage.tables.table_files import data_dir, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog


def cut_job(checkpoints: int = 120) -> Job:
    """A job whose log was cut several times."""
    job = Job()
    job.run(checkpoints)
    fold = job.log.state()
    assert fold is not None
    assert fold.cut is not None
    return job


def failing(kind: str, step: int) -> Callable[[str], None]:
    """Fails the request of a kind with this number, and all after it."""
    requests = 0

    def fails(asked: str) -> None:
        nonlocal requests
        requests += asked == kind
        if requests >= step:
            raise StorageError("killed")

    return fails


def log_bytes(job: Job) -> int:
    """How large the log is."""
    return sum(len(data) for name, data in job.store.files.items() if name.startswith("_tidegate/"))


@pytest.mark.slow
def test_a_log_does_not_grow_with_commits() -> None:
    """Three times the commits: as many entries and bytes, and a reader that reads all of it makes as many requests."""
    job = cut_job()

    def read() -> tuple[int, int]:
        store = PlainStore(job.store.files)
        return len(TableLog(store).entries()), sum(store.requests.values())

    (entries, requests), size = read(), log_bytes(job)
    job.run(240)
    assert read()[0] < entries + 20
    assert read()[1] < requests + 12
    assert log_bytes(job) < size * 1.5
    assert len(job.rows) == 360
    job.check()


@pytest.mark.slow
def test_what_is_left_out_is_refused_with_the_ways_out() -> None:
    """Versions, by number and by time, and checkpoints from before; what is newer is there."""
    job = cut_job()
    log = TableLog(job.store)
    oldest = log.history()[0]
    with pytest.raises(TableError, match=rf"commit 3 of .* deleted by a vacuum\. Every commit from {oldest.number} on"):
        log.snapshot(3)
    with pytest.raises(TableError, match=rf"deleted by a vacuum. Every commit from {oldest.number} on can be read"):
        log.snapshot(EPOCH + dt.timedelta(milliseconds=10_150))
    with pytest.raises(TableError, match=r"a vacuum has cut the log .* Restore a newer checkpoint, or write to anoth"):
        log.claim(B, (A, CheckpointId(3)))
    assert read_table(job.store, oldest.number).num_rows == oldest.rows == oldest.checkpoint_id
    job.check_restores()


def test_a_job_from_before_is_known_and_never_counts_as_new() -> None:
    """Also where it may add to what is there: its rows would be there twice."""
    job = cut_job(40)
    for _ in range(2):
        job.log.claim(B, (A, CheckpointId(job.newest)), if_exists="append")
        job.log = TableLog(job.store, entries_per_snapshot=4, now_ms=lambda: job.now_ms)
    for number in range(1, 60):
        job.now_ms += 100
        path = f"{data_dir(B, AttemptNumber(0))}/{number}.parquet"
        job.log.commit(B, CheckpointId(number), (file_of(path),))
        job.log.take_compacting(B, "n")
        fold = job.log.state()
        assert fold is not None
        shown = {entry.seq for entry in job.log.shown_entries()[1]}
        assert job.log.compact(B, "n", shown, 1, (file_of(f"large-{number}", len(shown)),))
    retention = Retention(job.now_ms - HISTORY_MS, checkpoints=(CheckpointId(59),))
    job.log.vacuum(retention)
    assert job.log.cut(retention, lambda paths: ())
    with pytest.raises(TableError, match="a vacuum has cut the log"):
        job.log.claim(C, (A, CheckpointId(40)), if_exists="append")
    assert job.log.uncommitted(B, CheckpointId(60), [CheckpointId(59), CheckpointId(60)]) == (60,)
    with pytest.raises(TableError, match="a vacuum has cut the log"):
        job.log.uncommitted(A, CheckpointId(41), [CheckpointId(41)])
    job.log.claim(C, (B, CheckpointId(59)))
    job.log.commit(C, CheckpointId(1), ())
    assert [file.path for file in job.log.snapshot().files] == ["data/large-59.parquet"]


def overwritten(jobs: int) -> tuple[TableLog, Retention]:
    """A table that many jobs have overwritten, one after the other, and of which the last one shows."""
    now_ms = 0
    log = TableLog(PlainStore({}), now_ms=lambda: now_ms)
    log.create(TableInfo.of(SCHEMA, "append"))
    for number in range(jobs):
        job = JobId(f"hourly-{number:08x}")
        log.claim(job, if_exists="overwrite")
        for checkpoint in (1, 2):
            now_ms += 100
            log.commit(job, CheckpointId(checkpoint), (file_of(f"{number}-{checkpoint}"),))
    retention = Retention(now_ms - 50, checkpoints=(CheckpointId(2),))
    log.vacuum(retention)
    return log, retention


@pytest.mark.slow
def test_a_log_of_more_than_a_thousand_jobs_is_cut() -> None:
    """The claim of each job stays, so a restore of the first job is refused and does not begin anew."""
    log, retention = overwritten(1_100)
    before = len(log.entries())
    assert log.cut(retention, lambda paths: ())
    assert len(log.entries()) < before // 2
    assert [file.path for file in log.snapshot().files] == ["data/1099-1.parquet", "data/1099-2.parquet"]
    with pytest.raises(TableError, match="a vacuum has cut the log"):
        log.claim(C, (JobId("hourly-00000000"), CheckpointId(2)), if_exists="append")


def test_a_cut_that_would_be_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every snapshot would have it. The log stays whole, and shows the same."""
    log, retention = overwritten(20)
    entries, files = log.entries(), log.snapshot().files
    fold = log.state()
    assert fold is not None
    cut = vacuum.cut_of("url", entries, fold, retention)
    size = len(encode(cut))
    monkeypatch.setattr(vacuum, "CUT_BYTES_MAX", size - 1)
    assert not log.cut(retention, lambda paths: ())
    assert (log.entries(), log.snapshot().files) == (entries, files)
    monkeypatch.setattr(vacuum, "CUT_BYTES_MAX", size)
    assert log.cut(retention, lambda paths: ())
    assert log.snapshot().files == files


def test_a_file_that_is_there_still_stays_named() -> None:
    """Whoever looks for files without an entry must not meet one that a vacuum has yet to delete."""
    job = Job()
    job.run(12, pause_ms=1)
    job.now_ms += 5 * HISTORY_MS
    job.commit()
    retention = Retention(job.now_ms - HISTORY_MS)
    deletable, _ = job.log.vacuum(retention)
    entries = len(job.log.entries())
    # The cut keeps the entry of the oldest commit that can be read, with its file, so that one does not hold it up.
    kept = f"{data_dir(A, AttemptNumber(0))}/000012.parquet"
    dropped = sorted(set(deletable) - {kept})
    there = set(dropped)
    assert len(dropped) == len(deletable) - 1
    for path in dropped:
        assert not job.log.cut(retention, there.intersection)
        assert there <= job.log.referenced_paths()
        there.remove(path)
    assert job.log.cut(retention, {kept}.intersection)
    assert len(job.log.entries()) < entries - 8
    assert set(deletable) & job.log.referenced_paths() == {kept}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["create", "write", "delete", "list"])
def test_wherever_a_process_dies_the_table_is_whole(kind: str) -> None:
    """Before any request of the cut, and of the snapshots after it; the next process goes on."""
    started = cut_job(40)
    for step in range(1, 42, 4):
        job = Job(dict(started.store.files))
        job.now_ms, job.newest, job.rows, job.there = started.now_ms, started.newest, started.rows, started.there
        job.shown, job.covered = dict(started.shown), dict(started.covered)
        job.store.before = failing(kind, step)
        try:
            job.run(14)
        except StorageError:
            job.store.before = None
            assert read_table(PlainStore(job.store.files))["v"].to_pylist() == job.rows
            job.begin()
            job.run(14)
        job.store.before = None
        job.check()
        job.check_restores()


@pytest.mark.slow
def test_readers_and_writers_that_have_read_before_the_cut_go_on() -> None:
    """A reader that holds an older list of files reads it to its end, and sees the table as it is when it looks."""
    job = Job()
    job.run(60)
    reader, follower = TableLog(PlainStore(job.store.files)), TableLog(PlainStore(job.store.files))
    held, read_to = reader.snapshot(), follower.entries()[-1].seq
    fold = job.log.state()
    assert fold is not None
    before = fold.cut
    job.run(8)
    assert all(file.path in job.store.files for file in held.files)
    job.run(60)
    fold = job.log.state()
    assert fold is not None
    assert fold.cut != before
    assert [file.path for file in reader.snapshot().files] == [file.path for file in job.log.snapshot().files]
    missed = [entry for entry in follower.entries_after(read_to) if fold.cut is None or entry.seq > fold.cut.seq]
    assert missed
    assert {entry.seq for entry in missed} <= {entry.seq for entry in job.log.entries()}


@pytest.mark.slow
def test_the_loss_of_the_newest_entries_is_noticed_after_a_cut() -> None:
    """By a process that knows the head from a checkpoint, as without a cut."""
    job = cut_job()
    head = job.log.head(A)
    del job.store.files[f"_tidegate/log/{head.seq:012d}"]
    other = TableLog(PlainStore(job.store.files))
    other.expect(A, TableHead(job.store.url, head.seq, head.commit))
    with pytest.raises((TableError, CorruptionError), match="lost entries"):
        other.snapshot()


@pytest.mark.slow
def test_a_part_that_the_cut_has_left_is_damage_where_it_is_missing() -> None:
    """An error, never a table with less in it."""
    job = cut_job()
    parts = [name for name in job.store.files if name.startswith(f"{PARTS_FOLDER}/") and name.count("-") == 2]
    assert parts
    for name in parts:
        del job.store.files[name]
    with pytest.raises(CorruptionError, match="a part of the log"):
        TableLog(PlainStore(job.store.files)).snapshot()


def test_a_log_with_nothing_to_leave_out_is_not_cut() -> None:
    """Without compactions every entry shows rows."""
    store = PlainStore()
    log = TableLog(store, now_ms=lambda: 1)
    log.create(TableInfo.of(Job().log.snapshot().info.arrow_schema, "append"))
    log.claim(A)
    for number in range(1, 40):
        commit(log, A, number, f"a{number}")
    retention = Retention(10**9)
    log.vacuum(retention)
    assert not log.cut(retention, lambda paths: ())
    assert len(log.entries()) == 41


@pytest.mark.slow
def test_a_copy_of_a_table_that_was_cut_goes_on() -> None:
    """It has the rows, the versions that were left, and refuses what the table refuses."""
    job = cut_job()
    copy = PlainStore()
    copied = copy_table(job.store, copy)
    assert {file.path for file in copied} == copy.files.keys()
    assert read_table(copy)["v"].to_pylist() == job.rows
    assert TableLog(copy).history() == job.log.history()
    log = TableLog(copy, entries_per_snapshot=4)
    with pytest.raises(TableError, match="a vacuum has cut the log"):
        log.claim(B, (A, CheckpointId(3)))
    log.claim(B, (A, CheckpointId(job.newest)))
    batch = read_table(copy).slice(0, 1).to_batches()[0]
    for number in range(1, 20):
        file = write_data_file(copy, f"{data_dir(B, AttemptNumber(0))}/{number}.parquet", [batch])
        log.commit(B, CheckpointId(number), (file,))
    assert read_table(copy)["v"].to_pylist() == [*job.rows, *[1] * 19]


def test_a_cut_table_can_be_copied_after_any_commit() -> None:
    """Also where a snapshot was just written, and the newest entry is read from a part."""
    job = cut_job(40)
    for _ in range(4):
        job.now_ms += 100
        job.commit()
        copy = PlainStore()
        copy_table(job.store, copy)
        assert read_table(copy)["v"].to_pylist() == job.rows
