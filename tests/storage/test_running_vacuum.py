"""Old files that are deleted while a job commits: whoever needs what the table showed in its history finds it."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_store import PlainStore
from table_logs import SCHEMA, A, B

from tidegate.storage.errors import StorageError, TableError
from tidegate.storage.ids import AttemptNumber, CheckpointId
from tidegate.storage.tables import maintenance
from tidegate.storage.tables.maintenance import LOOKS_A_HISTORY, CompactionSettings, RunningCompaction, RunningVacuum
from tidegate.storage.tables.table_files import data_dir, read_table, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

HISTORY_MS = 1_000
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class Job:
    """A job that commits row n with checkpoint n, and keeps the newest checkpoints; its process upkeeps the table."""

    def __init__(self, files: dict[str, bytes] | None = None, retained: int = 1) -> None:
        self.store = PlainStore(files)
        self.now_ms = 10_000
        self.retained = retained
        self.newest = 0
        self.rows: list[int] = []
        self.there: list[int] = []
        """The checkpoints that are there."""
        self.shown: dict[int, tuple[int, list[int]]] = {}
        """By the number of each commit: when it was made, and the rows that the table showed with it."""
        self.covered: dict[int, tuple[int, list[int]]] = {}
        """The same by the number of each checkpoint."""
        self.begin()
        if not self.store.files:
            self.log.create(TableInfo.of(SCHEMA, "append"))
            self.log.claim(A)

    def begin(self) -> None:
        """Another process of the job."""
        self.log = TableLog(self.store, entries_per_snapshot=4, now_ms=lambda: self.now_ms)
        self.compaction = RunningCompaction(self.store, self.log, A, CompactionSettings(10**6, 3))
        self.vacuum = RunningVacuum(
            self.store, self.log, A, HISTORY_MS, lambda: tuple(map(CheckpointId, self.there)), lambda: self.now_ms
        )

    def commit(self) -> None:
        """The next checkpoint."""
        self.newest += 1
        path = f"{data_dir(A, AttemptNumber(0))}/{self.newest:06d}.parquet"
        rows = pa.record_batch([pa.array(["k"]), pa.array([self.newest])], schema=SCHEMA)
        file = write_data_file(self.store, path, [rows])
        number = self.log.commit(A, CheckpointId(self.newest), (file,)).seq
        self.rows = [*self.rows, self.newest]
        self.there = [*self.there, self.newest][-self.retained :]
        self.shown[number] = self.covered[self.newest] = (self.now_ms, self.rows)

    def fall_back(self) -> None:
        """The job goes on from the oldest of its checkpoints."""
        del self.there[1:]
        self.log.claim(A, (A, CheckpointId(self.there[0])), next_checkpoint_id=self.newest + 1)
        self.rows = self.covered[self.there[0]][1]

    def run(self, checkpoints: int, pause_ms: int = 100) -> None:
        """Commit, with a step of each kind after it."""
        for _ in range(checkpoints):
            self.now_ms += pause_ms
            self.commit()
            self.compaction.step()
            self.vacuum.step()

    def check(self) -> None:
        """What was shown within the history can be read, by number and by time; what cannot is an error."""
        known = {number: value for number, value in self.shown.items() if value[0] >= self.now_ms - HISTORY_MS}
        for number, (at_ms, rows) in known.items():
            for as_of in (number, EPOCH + dt.timedelta(milliseconds=at_ms)):
                assert read_table(PlainStore(self.store.files), as_of)["v"].to_pylist() == rows
        for number, (_, rows) in self.shown.items():
            try:
                found = read_table(PlainStore(self.store.files), number)
            except TableError as error:
                refused(error, number not in known)
            else:
                assert found["v"].to_pylist() == rows

    def check_restores(self) -> None:
        """A checkpoint that is there, or was taken within the history, can be restored; others are refused clearly."""
        for checkpoint, (at_ms, rows) in self.covered.items():
            files = dict(self.store.files)
            log = TableLog(PlainStore(files))
            try:
                log.claim(B, (A, CheckpointId(checkpoint)))
            except TableError as error:
                refused(error, at_ms < self.now_ms - HISTORY_MS and checkpoint not in self.there)
                continue
            log.commit(B, CheckpointId(1), ())
            assert read_table(PlainStore(files))["v"].to_pylist() == rows


def refused(error: TableError, may_be: bool) -> None:
    """What is not there any more is refused clearly, if it may be gone."""
    assert may_be, error
    assert "vacuum" in str(error)


def data_files(job: Job) -> int:
    """How many data files lie in the table."""
    return sum(name.endswith(".parquet") for name in job.store.files)


@pytest.mark.slow
def test_a_long_running_table_keeps_a_bounded_number_of_files() -> None:
    """Three times as long: no more files than a history has, and the few large ones."""
    job = Job()
    job.run(60)
    first = data_files(job)
    assert first < 40
    job.run(120)
    assert data_files(job) < first + 10
    job.check()
    job.check_restores()


def test_nothing_is_deleted_without_a_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within it nothing is: each small file is there beside the large one that stands for it."""
    job = Job()
    job.run(9, pause_ms=HISTORY_MS // LOOKS_A_HISTORY)
    assert all(f"{data_dir(A, AttemptNumber(0))}/{number:06d}.parquet" in job.store.files for number in range(1, 10))
    assert data_files(job) > 9


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([1, 40, 300, 700]), st.sampled_from("nkf")), max_size=6),
    st.integers(1, 12),
)
def test_whatever_happens_the_history_is_there(steps: list[tuple[int, int, str]], retained: int) -> None:
    """Commits at any pace, processes that are killed between two steps, and a job that falls back."""
    job = Job(retained=retained)
    for commits, pause_ms, then in steps:
        job.run(commits, pause_ms)
        if then == "k":
            job.begin()
        elif then == "f":
            job.fall_back()
        job.check()
    job.check_restores()


@pytest.mark.slow
@pytest.mark.parametrize("step", range(1, 12, 2))
def test_a_process_that_is_killed_leaves_nothing_for_ever(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the entry of the log and the last file, wherever: the next process deletes what is left."""
    monkeypatch.setattr(maintenance, "FILES_A_STEP", 4)
    job, requests = Job(), 0

    def fails(kind: str) -> None:
        nonlocal requests
        requests += kind in ("delete", "create")
        if requests == step:
            raise StorageError("killed")

    job.run(40, pause_ms=20)
    job.now_ms += 5 * HISTORY_MS
    job.commit()
    job.vacuum._store = PlainStore(job.store.files, fails)
    try:
        for _ in range(20):
            job.vacuum.step()
    except StorageError:
        job.begin()
    job.now_ms += HISTORY_MS
    while job.vacuum.step():
        job.check()
    named = {file.path for file in job.log.snapshot().files}
    assert {name for name in job.store.files if name.endswith(".parquet")} == named
    job.check()
    job.check_restores()


def test_a_commit_goes_on_beside_a_vacuum() -> None:
    """It comes between the moment at which the vacuum has read the log and the one at which it writes to it."""
    job = Job()
    job.run(40, pause_ms=20)
    job.now_ms += 5 * HISTORY_MS
    job.commit()
    came = False

    def between(kind: str) -> None:
        nonlocal came
        if kind == "create" and not came:
            came = True
            job.now_ms += 1
            job.commit()

    job.vacuum._store = PlainStore(job.store.files, between)
    assert job.vacuum.step()
    assert came
    job.check()
    job.run(5)
    job.check()


def test_a_process_that_has_lost_the_table_deletes_nothing() -> None:
    """The next owner does, who knows which checkpoints it may go back to."""
    job = Job()
    job.run(40, pause_ms=20)
    TableLog(job.store).claim(B, (A, CheckpointId(30)))
    job.now_ms += 5 * HISTORY_MS
    before = dict(job.store.files)
    assert not job.vacuum.step()
    assert job.store.files == before
