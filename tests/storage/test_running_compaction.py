"""Small files that are put together while a job commits: same rows in the same order, whatever fails or races."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from plain_store import PlainStore
from table_logs import SCHEMA, A, B, X

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import CorruptionError, StorageError
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.schemas.column_names import VERSION_COLUMN
from tidegate.storage.tables.maintenance import CompactionSettings, RunningCompaction
from tidegate.storage.tables.table_files import (
    compacted_dir,
    data_dir,
    read_table,
    write_data_file,
)
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_APPEND = TableInfo.of(SCHEMA, "append")
_SETTINGS = CompactionSettings(10**6, 3)


class Job:
    """A job that commits a row with each checkpoint; its process compacts beside that."""

    def __init__(self, store: PlainStore, info: TableInfo = _APPEND, settings: CompactionSettings = _SETTINGS) -> None:
        self.store = store
        self.info = info
        self.log = TableLog(store, entries_per_snapshot=4)
        if not store.files:
            self.log.create(info)
        if self.log.owner() is None:
            self.log.claim(A)
        self.compaction = RunningCompaction(store, self.log, A, settings)

    def commit(self, number: int) -> None:
        """Of checkpoint n, with row n."""
        self.log.commit(A, CheckpointId(number), (self.staged(number),))

    def staged(self, number: int) -> DataFile:
        """The file of a checkpoint."""
        columns: list[pa.Array] = [pa.array([f"key-{number % 2}"]), pa.array([number])]
        schema = SCHEMA
        if self.info.mode == "upsert":
            columns, schema = [*columns, pa.array([number])], SCHEMA.append(pa.field(VERSION_COLUMN, pa.int64()))
        path = f"{data_dir(A, AttemptNumber(0))}/{number:06d}.parquet"
        return write_data_file(self.store, path, [pa.record_batch(columns, schema=schema)])

    def run(self, first: int, last: int) -> None:
        """Commit, with a step after each."""
        for number in range(first, last + 1):
            self.commit(number)
            self.compaction.step()


def values(files: dict[str, bytes], as_of: int | None = None) -> list[int]:
    """Column v, as somebody who has just come reads it."""
    found: list[int] = read_table(PlainStore(files), as_of)["v"].to_pylist()
    return found


def leftovers(files: dict[str, bytes]) -> list[str]:
    """Files of compactions that no entry names."""
    known = TableLog(PlainStore(files)).referenced_paths()
    return [name for name in files if name.startswith(f"{compacted_dir(A)}/") and name not in known]


def test_files_stay_few_and_rows_in_order() -> None:
    """After forty commits of a row, three of each level at most; every commit can still be read as it was."""
    job = Job(PlainStore())
    job.run(1, 40)

    snapshot = job.log.snapshot()
    assert len(snapshot.files) <= 8
    assert values(job.store.files) == list(range(1, 41))
    history = job.log.history()
    assert [commit.rows for commit in history] == list(range(1, 41))
    assert all(commit.shown for commit in history)
    for commit in history:
        assert values(job.store.files, commit.number) == list(range(1, commit.checkpoint_id + 1))
    assert leftovers(job.store.files) == []


def test_large_files_are_named_again_and_not_written() -> None:
    """Files of half the size that is wanted and more are large enough."""
    job = Job(PlainStore(), settings=CompactionSettings(64, 2))
    job.run(1, 8)
    while job.compaction.step():
        pass
    assert len(job.log.snapshot().files) == 8
    assert len(job.log.shown_entries()[1]) == 1
    assert not any(name.startswith(compacted_dir(A)) for name in job.store.files)
    assert values(job.store.files) == list(range(1, 9))


def test_of_an_upsert_table_the_newest_rows_stay() -> None:
    """And lose against newer ones elsewhere; the table has fewer rows to read."""
    job = Job(PlainStore(), TableInfo.of(SCHEMA, "upsert", ("k",)))
    job.run(1, 21)
    assert sorted(values(job.store.files)) == [20, 21]
    assert job.log.rows() < 10
    assert job.log.rows() == job.log.snapshot().rows


@pytest.mark.slow
def test_any_checkpoint_can_be_restored_and_rolled_back_to() -> None:
    """The rows behind it are gone, and no other, though they were in files with rows that stay."""
    for number in range(1, 14):
        job = Job(PlainStore())
        job.run(1, 13)
        files = dict(job.store.files)

        restored = TableLog(PlainStore(files))
        restored.claim(B, (A, CheckpointId(number)))
        restored.commit(B, CheckpointId(1), ())
        assert values(files) == list(range(1, number + 1))

        job.log.claim(A, (A, CheckpointId(number)), next_checkpoint_id=14)
        assert not job.compaction.step()
        assert values(job.store.files) == list(range(1, 14)), "a claim changes nothing yet"
        job.run(14, 30)
        assert values(job.store.files) == [*range(1, number + 1), *range(14, 31)]
        assert len(job.log.snapshot().files) <= 12


def test_rows_of_another_job_stay_in_files_of_their_own() -> None:
    """Otherwise they would be hidden with those of the line."""
    store = PlainStore()
    log = TableLog(store)
    log.create(_APPEND)
    log.claim(X)
    for number in range(5):
        path = f"{data_dir(X, AttemptNumber(0))}/{number}.parquet"
        row = pa.record_batch([pa.array(["x"]), pa.array([-number])], schema=SCHEMA)
        log.commit(X, CheckpointId(number + 1), (write_data_file(store, path, [row]),))
    log.claim(A, None, "append")
    job = Job(store)
    job.run(1, 9)
    assert values(store.files) == [0, -1, -2, -3, -4, *range(1, 10)]
    back = TableLog(store)
    back.claim(B, (A, CheckpointId(0)))
    back.commit(B, CheckpointId(1), ())
    assert values(store.files) == [0, -1, -2, -3, -4]


class KilledError(Exception):
    """The process is gone."""


@pytest.mark.slow
def test_wherever_it_is_killed_no_row_is_lost_or_doubled() -> None:
    """Before any request of a compaction. A process that comes after it goes on, and deletes what was left."""
    job = Job(PlainStore())
    job.run(1, 8)
    job.commit(9)
    start = dict(job.store.files)
    kills = 0
    for survived in range(1_000):
        files, left = dict(start), survived

        def kill(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError

        store = PlainStore(files, kill)
        try:
            compaction = RunningCompaction(store, TableLog(store, entries_per_snapshot=4), A, _SETTINGS)
            done = compaction.step()
        except KilledError:
            kills += 1
            done = False
        assert values(files) == list(range(1, 10))
        after = Job(PlainStore(files))
        after.run(10, 13)
        after.compaction.close()
        assert values(files) == list(range(1, 14))
        assert leftovers(files) == []
        assert len(after.log.snapshot().files) <= 8
        if done:
            assert kills > 10
            return
    pytest.fail("the compaction never came to its end")


@pytest.mark.slow
@pytest.mark.parametrize("happens", ["commits", "falls back", "is lost", "is compacted by another process"])
def test_whatever_comes_in_between_readers_see_whole_checkpoints(happens: str) -> None:
    """At any request of a compaction something else is written to the log, by a process that does not wait for it."""

    def commits(log: TableLog, job: Job) -> list[int]:
        log.commit(A, CheckpointId(10), (job.staged(10),))
        return list(range(1, 11))

    def falls_back(log: TableLog, job: Job) -> list[int]:
        log.claim(A, (A, CheckpointId(5)), next_checkpoint_id=10)
        log.commit(A, CheckpointId(10), (job.staged(10),))
        return [*range(1, 6), 10]

    def is_lost(log: TableLog, job: Job) -> list[int]:
        log.claim(B, (A, CheckpointId(5)))
        log.commit(B, CheckpointId(1), (job.staged(10),))
        return [*range(1, 6), 10]

    def is_compacted(log: TableLog, job: Job) -> list[int]:
        RunningCompaction(PlainStore(job.store.files), log, A, _SETTINGS).step()
        return list(range(1, 10))

    acts: dict[str, Callable[[TableLog, Job], list[int]]] = {
        "commits": commits,
        "falls back": falls_back,
        "is lost": is_lost,
        "is compacted by another process": is_compacted,
    }
    job = Job(PlainStore())
    job.run(1, 8)
    job.commit(9)
    start = dict(job.store.files)
    for at in range(1_000):
        if not interrupted(dict(start), at, acts[happens]):
            assert at > 10
            return
    pytest.fail("the compaction never came to its end")


def interrupted(files: dict[str, bytes], at: int, act: Callable[[TableLog, Job], list[int]]) -> bool:
    """A compaction, before the request number `at` of which something happens; whether there were so many."""
    expected = list(range(1, 10))
    requests = 0

    def before(_: str) -> None:
        nonlocal requests, expected
        requests += 1
        if requests == at + 1:
            other = Job(PlainStore(files))
            expected = act(other.log, other)
            assert values(files) == expected

    store = PlainStore(files, before)
    compaction = RunningCompaction(store, TableLog(store, entries_per_snapshot=4), A, _SETTINGS)
    for _ in range(2):
        compaction.step()
        assert values(files) == expected
    return requests > at


def test_a_process_that_only_seemed_dead_changes_nothing_any_more() -> None:
    """Another one has begun to compact, and deleted the files that it had written and not told of."""
    job = Job(PlainStore())
    job.run(1, 8)
    job.commit(9)
    other = TableLog(job.store)
    late = RunningCompaction(job.store, job.log, A, _SETTINGS)

    assert not late.step(lambda: other.take_compacting(A, "other") and None)
    assert values(job.store.files) == list(range(1, 10))
    assert leftovers(job.store.files) != []
    RunningCompaction(job.store, other, A, _SETTINGS).step()
    assert leftovers(job.store.files) == []
    assert values(job.store.files) == list(range(1, 10))


def test_the_end_of_a_job_deletes_what_was_written_for_nothing() -> None:
    """And adds nothing to the log of a table that was never compacted."""
    job = Job(PlainStore())
    job.run(1, 2)
    entries = len(job.log.entries())
    job.compaction.close()
    assert len(job.log.entries()) == entries

    job.commit(3)

    def stop() -> None:
        raise StorageError("no room")

    job.run(4, 9)
    job.commit(10)
    job.store.files[f"{compacted_dir(A)}/000000000001-000009-000000.parquet"] = b"left"
    with pytest.raises(StorageError, match="no room"):
        job.compaction.step(stop)
    job.compaction.close()
    assert leftovers(job.store.files) == []
    assert values(job.store.files) == list(range(1, 11))


def test_a_damaged_file_is_never_put_into_a_large_one() -> None:
    """What is wrong stays where it is, for whoever reads the table."""
    job = Job(PlainStore())
    job.run(1, 2)
    job.commit(3)
    path = f"{data_dir(A, AttemptNumber(0))}/000002.parquet"
    job.store.files[path] = job.store.files[path][:-1] + b"?"
    entries = len(job.log.entries())
    with pytest.raises(CorruptionError, match=r"000002\.parquet is damaged"):
        job.compaction.step()
    assert [e.rewrite for e in job.log.entries()[entries:]] in ([], [None])


def test_whoever_does_not_own_the_table_leaves_it_alone() -> None:
    """A job that has lost it, and one that has yet to commit."""
    job = Job(PlainStore())
    for number in range(1, 5):
        job.commit(number)
    TableLog(job.store).claim(B, (A, CheckpointId(4)))
    assert not job.compaction.step()
    restored = RunningCompaction(job.store, TableLog(job.store), B, _SETTINGS)
    assert not restored.step()
    TableLog(job.store).commit(B, CheckpointId(1), (job.staged(5),))
    assert not job.compaction.step()
    assert job.log.take_compacting(JobId("nobody"), "n") is None
    assert restored.step()
    assert values(job.store.files) == [1, 2, 3, 4, 5]
