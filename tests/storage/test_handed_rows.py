"""What waits to be handed on, what was, and what becomes of its rows: whatever jobs are restored meanwhile."""

from __future__ import annotations

from random import Random

import pyarrow as pa
import pytest
from faulty_store import FaultyStore
from table_logs import INFO, SCHEMA, A, B, C, table_at

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import CorruptionError, FencedError, StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.tables.handed_rows import HANDED_FOLDER, HandedRows, WaitingCommit, newest_mark
from tidegate.storage.tables.table_copy import copy_table
from tidegate.storage.tables.table_files import data_dir, read_files, write_data_file
from tidegate.storage.tables.table_log import TableLog


def written(store: FileSystemStore, job: JobId, value: int) -> DataFile:
    """A file with one row."""
    batch = pa.record_batch({"k": ["key"], "v": [value]}, SCHEMA)
    return write_data_file(store, f"{data_dir(job, AttemptNumber(0))}/{value}.parquet", [batch])


def committed(store: FileSystemStore, job: JobId, *numbers: int) -> None:
    """A job commits a row with each checkpoint, whose value is the checkpoint's number."""
    for number in numbers:
        TableLog(store).commit(job, CheckpointId(number), (written(store, job, number),))


def following(store: FileSystemStore, job: JobId, **options: int) -> HandedRows:
    """What the driver of a job knows after its first look."""
    rows = HandedRows(store, job, **options)
    rows.refresh()
    return rows


def values(rows: HandedRows) -> list[int]:
    """The rows that wait, in order."""
    return [value for commit in rows.waiting() for value in values_of(rows, commit)]


def values_of(rows: HandedRows, commit: WaitingCommit) -> list[int]:
    """The rows of a commit."""
    found: list[int] = read_files(rows.store, rows.info, commit.files)["v"].to_pylist()
    return found


def hand_on(rows: HandedRows, count: int = 1) -> list[int]:
    """Hand on the next commits; their numbers."""
    commits = rows.waiting()[:count]
    for commit in commits:
        rows.done(commit)
    return [commit.number for commit in commits]


def data_files(store: FileSystemStore) -> int:
    """How many data files are there."""
    return sum(len(store.list(f"data/{job}/000000")) for job in store.list("data"))


def test_commits_wait_in_order_until_they_are_marked(memory_store: FileSystemStore) -> None:
    """Each is the next one until then, also for a driver that comes later; then its rows are gone."""
    table_at(memory_store).claim(A)
    rows = following(memory_store, A)
    assert (rows.waiting(), rows.owned) == ((), True)
    committed(memory_store, A, 1, 2)
    assert rows.refresh()
    assert not rows.refresh()
    assert values(rows) == values(following(memory_store, A)) == [1, 2]

    assert hand_on(rows) == [2]

    committed(memory_store, A, 3)
    rows.refresh()
    assert values(rows) == values(following(memory_store, A)) == [2, 3]
    assert data_files(memory_store) == 2
    assert hand_on(following(memory_store, A), 2) == [3, 4]
    assert following(memory_store, A).waiting() == ()
    assert data_files(memory_store) == 0


def test_what_was_taken_back_waits_no_longer_unless_somebody_goes_back_to_it(memory_store: FileSystemStore) -> None:
    """B starts from an older checkpoint of A, C from a newer one: each hands on what its checkpoint covers, once."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, 1, 2, 3, 4)
    assert hand_on(following(memory_store, A)) == [2]

    TableLog(memory_store).claim(B, (A, CheckpointId(2)))
    assert values(following(memory_store, B)) == [2]
    committed(memory_store, B, 11, 12)
    of_b = following(memory_store, B)
    assert values(of_b) == [2, 11, 12]
    assert hand_on(of_b, 2) == [3, 7]

    TableLog(memory_store).claim(C, (A, CheckpointId(4)))
    of_c = following(memory_store, C)
    assert values(of_c) == [3, 4]
    assert hand_on(of_c, 2) == [4, 5]
    committed(memory_store, C, 21)
    of_c.refresh()
    assert values(of_c) == values(following(memory_store, C)) == [21]


def test_a_job_that_falls_back_takes_back_what_waits(memory_store: FileSystemStore) -> None:
    """An owner that goes on from an older checkpoint of its own makes the rows again, under other numbers."""
    log = table_at(memory_store)
    log.claim(A)
    committed(memory_store, A, 1, 2, 3)
    rows = following(memory_store, A)
    log.claim(A, (A, CheckpointId(1)), next_checkpoint_id=5)
    rows.refresh()
    assert values(rows) == [1]
    committed(memory_store, A, 5)
    rows.refresh()
    assert values(rows) == [1, 5]


def test_what_a_claim_brings_along_is_handed_on_once(memory_store: FileSystemStore) -> None:
    """Two jobs, one after the other, are restored from a checkpoint whose files nobody had committed."""
    log = table_at(memory_store)
    log.claim(A)
    committed(memory_store, A, 1)
    assert hand_on(following(memory_store, A)) == [2]
    two, three = written(memory_store, A, 2), written(memory_store, A, 3)
    log.claim(B, (A, CheckpointId(2)), uncommitted=(two,))
    assert hand_on(following(memory_store, B)) == [3]

    log.claim(C, (A, CheckpointId(3)), uncommitted=(two, three))

    of_c = following(memory_store, C)
    assert values(of_c) == [3]
    assert hand_on(of_c) == [4]
    assert following(memory_store, C).waiting() == ()
    log.claim(JobId("d-1"), (A, CheckpointId(3)), uncommitted=(two, three))
    assert following(memory_store, JobId("d-1")).waiting() == ()


def test_rows_that_were_left_behind_are_deleted_by_the_next_driver(memory_store: FileSystemStore) -> None:
    """A driver died between the mark and the deletion."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, 1, 2)
    hand_on(following(memory_store, A))
    written(memory_store, A, 1)
    assert data_files(memory_store) == 2

    assert values(following(memory_store, A)) == [2]

    assert data_files(memory_store) == 1


def test_of_two_drivers_one_makes_a_mark(memory_store: FileSystemStore) -> None:
    """The other one is told, and has changed nothing."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, 1, 2, 3)
    first, second = following(memory_store, A), following(memory_store, A)
    hand_on(first)

    with pytest.raises(FencedError, match="another driver hands on the rows"):
        second.done(second.waiting()[1])

    assert values(following(memory_store, A)) == [2, 3]


def test_a_mark_whose_answer_was_lost_is_made_again(memory_store: FileSystemStore) -> None:
    """It is there, and it is this driver's own."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, 1, 2)
    store = FaultyStore(memory_store.url)
    rows = following(store, A)
    (first, _) = rows.waiting()
    store.lose_next_answer = True
    with pytest.raises(StorageError, match="before the answer came"):
        rows.done(first)

    rows.done(first)

    assert values(rows) == values(following(memory_store, A)) == [2]
    assert data_files(memory_store) == 1


def test_a_driver_sees_that_its_job_has_lost_the_table(memory_store: FileSystemStore) -> None:
    """The claim of another job says so."""
    table_at(memory_store).claim(A)
    rows = following(memory_store, A)
    TableLog(memory_store).claim(B, (A, CheckpointId(1)))
    rows.refresh()
    assert not rows.owned
    assert following(memory_store, B).owned


def test_there_are_few_marks_and_damage_is_seen(memory_store: FileSystemStore) -> None:
    """The newest two stay; one that was changed is not believed."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, *range(1, 9))
    rows = following(memory_store, A)
    hand_on(rows, 8)

    names = memory_store.list(HANDED_FOLDER)
    assert len(names) == 2
    assert newest_mark(memory_store)[1].entries == ((2, 9),)
    memory_store.write(f"{HANDED_FOLDER}/{names[-1]}", (b"something else",))
    with pytest.raises(CorruptionError, match=names[-1]):
        HandedRows(memory_store, A)


def test_a_held_job_finds_a_file_of_its_own(memory_store: FileSystemStore) -> None:
    """It is there while the job is held, whatever was there before."""
    table_at(memory_store).claim(A)
    rows = following(memory_store, A)
    for held in (True, True, False, False, True):
        rows.hold(held)
        assert memory_store.exists(f"_tidegate/hold-{A}") == rows.held == held


def test_a_long_log_is_followed_in_parts(memory_store: FileSystemStore) -> None:
    """Whatever the log is compacted to, and however much of it a driver remembers: each commit once, in order."""
    random, log = Random(5), TableLog(memory_store, entries_per_snapshot=3)
    log.create(INFO)
    log.claim(A)
    rows, numbers, number = following(memory_store, A, remembered_max=4), [], 0
    for _ in range(40):
        for _ in range(random.randrange(5)):
            number += 1
            log.commit(A, CheckpointId(number), (DataFile(f"data/{A}/000000/{number}", 1, 1, "xxh3:0"),))
        rows.refresh()
        if random.random() < 0.2:
            rows = following(memory_store, A, remembered_max=4)
        numbers += hand_on(rows, random.randrange(4))
    numbers += hand_on(rows, number)
    assert numbers == list(range(2, number + 2))
    assert len(newest_mark(memory_store)[1].entries) == 1


def test_a_copy_does_without_rows_that_were_handed_on(memory_store: FileSystemStore) -> None:
    """What waits is copied, also what is being handed on meanwhile; what is lost otherwise is an error."""
    table_at(memory_store).claim(A)
    committed(memory_store, A, 1, 2, 3, 4)
    rows = following(memory_store, A)
    hand_on(rows)
    copy = FileSystemStore(f"{memory_store.url}-copy")

    class HandingOn(FileSystemStore):
        """The next commit is handed on while the first file is read."""

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            if path.startswith("data/") and rows.waiting()[0].number == 3:
                hand_on(rows)
            return super().read(path, offset, length)

    copied = copy_table(HandingOn(memory_store.url), copy)

    assert sorted(file.path.rpartition("/")[2] for file in copied if file.path.startswith("data/")) == [
        "3.parquet",
        "4.parquet",
    ]
    TableLog(copy).claim(B, (A, CheckpointId(4)))
    assert values(following(copy, B)) == [3, 4]
    memory_store.delete(rows.waiting()[0].files[0].path)
    with pytest.raises(StorageError, match=r"3\.parquet"):
        copy_table(memory_store, copy)


def test_entries_after_another_one_are_read_alone(memory_store: FileSystemStore) -> None:
    """Wherever they lie by now: in parts, or one by one."""
    log = TableLog(memory_store, entries_per_snapshot=3)
    log.create(INFO)
    log.claim(A)
    for number in range(1, 9):
        log.commit(A, CheckpointId(number), (DataFile(f"data/{number}", 1, 1, "xxh3:0"),))
    for seq in range(-1, 11):
        assert [entry.seq for entry in TableLog(memory_store).entries_after(seq)] == list(range(seq + 1, 10))
