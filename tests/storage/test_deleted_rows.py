"""Rows that say that their key was deleted go when small files are put together, where nothing older can come back."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from plain_store import PlainStore
from table_logs import SCHEMA, A, B

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import TableError
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId
from tidegate.storage.schemas.column_names import DELETED_COLUMN
from tidegate.storage.tables.maintenance import CompactionSettings, RunningCompaction, rewrites_of, rewritten
from tidegate.storage.tables.table_files import data_dir, read_data_file, read_table, stored_schema, write_data_file
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

INFO = TableInfo.of(SCHEMA, "upsert", ("k",), deletes=True)
Change = tuple[str, int | None]
"""A key, and its new value; None: it is deleted."""
MANY: list[Change] = [(f"other-{number * 7919 % 1000}", number) for number in range(1000)]
"""A file of these is a large one."""
LARGE_BYTES = 8_000


def staged(store: PlainStore, job: JobId, name: str, version: int, changes: Sequence[Change]) -> DataFile:
    """A file of a job, with the last change of each key."""
    last = dict(changes)
    columns = {
        "k": [*last], "v": [value or 0 for value in last.values()], "version": [version] * len(last),
        "deleted": [value is None for value in last.values()],
    }  # fmt: skip
    rows = pa.RecordBatch.from_arrays([pa.array(values) for values in columns.values()], schema=stored_schema(INFO))
    return write_data_file(store, f"{data_dir(job, AttemptNumber(0))}/{name}.parquet", [rows])


def deletions(store: PlainStore) -> int:
    """Rows that say that a key was deleted, in the files that show."""
    tables = [read_data_file(store, file) for file in TableLog(store).snapshot().files]
    return sum(table[DELETED_COLUMN].to_pylist().count(True) for table in tables)


def shown(store: PlainStore, as_of: int | None = None) -> dict[str, int]:
    """The rows of the table, as somebody who has just come reads them."""
    return {row["k"]: row["v"] for row in read_table(store, as_of).to_pylist()}


def compacted(store: PlainStore, line: JobId, name: str) -> None:
    """Put the files of a line together, in a table at rest."""
    log, job = TableLog(store), JobId(name)
    owner = log.owner()
    files = log.claim_compaction(job, line, None if owner is None else owner.job_id)
    begins = log.has_one_line()
    folder = data_dir(job, AttemptNumber(0))
    log.commit(
        job, CheckpointId(0), rewritten(store, INFO, folder, "", rewrites_of(files, 10**6), from_beginning=begins)
    )


def one_line(*commits: Sequence[Change]) -> PlainStore:
    """A table with the commits of one job."""
    store = PlainStore()
    log = TableLog(store)
    log.create(INFO)
    log.claim(A)
    for number, changes in enumerate(commits, 1):
        log.commit(A, CheckpointId(number), (staged(store, A, str(number), number, changes),))
    return store


def test_what_was_deleted_leaves_nothing_behind() -> None:
    """Also where nothing is left at all; the commits before can be read as they were."""
    store = one_line([("a", 1), ("b", 2)], [("a", None)], [("b", None), ("c", None)])
    compacted(store, A, "compaction_1")

    assert deletions(store) == 0
    assert TableLog(store).snapshot().rows == 0
    commits = [commit.number for commit in TableLog(store).history()]
    assert [shown(store, number) for number in commits] == [{"a": 1, "b": 2}, {"b": 2}, {}, {}]


def test_beside_a_running_job() -> None:
    """The files from the beginning on are put together again and again, and with them go the deletions."""
    store = one_line()
    log = TableLog(store)
    compaction = RunningCompaction(store, log, A, CompactionSettings(10**6, 2))
    for number in range(1, 33):
        changes: list[Change] = [(f"k{number}", number), (f"k{number - 1}", None)]
        log.commit(A, CheckpointId(number), (staged(store, A, str(number), number, changes),))
        while compaction.step():
            pass
    assert shown(store) == {"k32": 32}
    assert deletions(store) == 0
    assert all(shown(store, c.number) == {f"k{c.checkpoint_id}": c.checkpoint_id} for c in log.history())


def test_a_large_file_before_them_keeps_the_deletions() -> None:
    """What is in it is not read, and has older rows of the keys."""
    store = one_line([*MANY, ("a", 1), ("b", 2)], [("a", None)], [("b", 3)])
    large, *small = TableLog(store).snapshot().files
    assert sum(file.size_bytes for file in small) < large.size_bytes
    new = rewritten(store, INFO, "data/c/0", "", rewrites_of([large, *small], large.size_bytes), from_beginning=True)
    assert new[0] == large
    assert [row["k"] for row in read_data_file(store, new[1]).to_pylist() if row[DELETED_COLUMN]] == ["a"]


def test_rows_of_another_line_keep_the_deletions() -> None:
    """Else the row that the first job has written would come back."""
    store = one_line([("a", 1)])
    log = TableLog(store)
    log.claim(B, None, "append")
    for number, changes in enumerate([[("a", None)], [("b", 2)]], 1):
        log.commit(B, CheckpointId(number), (staged(store, B, str(number), (1 << 32) + number, changes),))
    compacted(store, B, "compaction_1")
    assert shown(store) == {"b": 2}


_CHANGES = st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(1, 99)), min_size=1, max_size=3)
_COMMIT = st.tuples(_CHANGES, st.sampled_from([False, False, False, True]), st.integers(0, 2))


class DeletedRows(RuleBasedStateMachine):
    """A table whose files are put together all the time, beside one with the same commits where they never are.

    As long as one line of jobs alone has written to it, each commit is compared with a dict as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store, self.plain = PlainStore(), PlainStore()
        self.jobs: list[tuple[JobId, JobId]] = []
        """With the line of each."""
        self.cuts: dict[tuple[JobId, int], tuple[int, dict[str, int]]] = {}
        """By job and checkpoint: the version of the sink then, and the rows of a table that one line has written."""
        self.pairs: list[tuple[int, int, dict[str, int] | None]] = []
        """Numbers of a commit in both tables, and the rows of the model."""
        self.compactions = 0
        self.left: dict[tuple[JobId, int], list[DataFile]] = {}
        """Files, in both tables, of checkpoints that their job has not committed."""
        for store in (self.store, self.plain):
            TableLog(store).create(INFO)
        self._begin(JobId("job-0"), JobId("job-0"), 0, {})
        for store in (self.store, self.plain):
            TableLog(store).claim(self.job)

    def _begin(self, job: JobId, line: JobId, version: int, rows: dict[str, int]) -> None:
        self.job, self.line, self.version, self.rows, self.checkpoint = job, line, version, dict(rows), 0
        self.jobs.append((job, line))
        self.cuts[job, 0] = version, dict(rows)
        self.at_rest = False
        self.compaction = RunningCompaction(self.store, TableLog(self.store), job, CompactionSettings(LARGE_BYTES, 2))

    @property
    def alone(self) -> bool:
        """Whether one line alone has claimed the table."""
        return len({line for _, line in self.jobs}) == 1

    @precondition(lambda self: not self.at_rest)
    @rule(commits=st.lists(_COMMIT, min_size=3, max_size=8))
    def checkpoints_complete(self, commits: list[tuple[list[Change], bool, int]]) -> None:
        """And are committed. After each come some steps of the job's own compaction."""
        for changes, large, steps in commits:
            self._complete(changes, large, True)
            for _ in range(steps):
                if self.compaction.step():
                    assert shown(self.store) == shown(self.plain)

    @precondition(lambda self: not self.at_rest)
    @rule(changes=_CHANGES)
    def one_is_not_committed(self, changes: list[Change]) -> None:
        """It is left to whoever is restored from it."""
        self._complete(changes, False, False)

    def _complete(self, changes: list[Change], large: bool, committed: bool) -> None:
        self.checkpoint += 1
        self.version += 1
        changes = [*(MANY if large else ()), *changes]
        for key, value in changes:
            self.rows.pop(key, None)
            if value is not None:
                self.rows[key] = value
        self.cuts[self.job, self.checkpoint] = self.version, dict(self.rows)
        files = [self._staged(store, changes) for store in (self.store, self.plain)] if changes else []
        if not committed and files:
            self.left[self.job, self.checkpoint], self.at_rest = files, True
            return
        self._commit([(file,) for file in files] or [(), ()])

    def _staged(self, store: PlainStore, changes: Sequence[Change]) -> DataFile:
        return staged(store, self.job, str(self.checkpoint), self.version, changes)

    def _commit(self, files: Sequence[tuple[DataFile, ...]]) -> None:
        for store, own in zip((self.store, self.plain), files, strict=True):
            TableLog(store).commit(self.job, CheckpointId(self.checkpoint), own)
        numbers = [TableLog(store).history() for store in (self.store, self.plain)]
        newest = [[c for c in commits if not c.job_id.startswith("compaction")] for commits in numbers]
        if newest[0] and newest[0][-1].number not in [pair[0] for pair in self.pairs]:
            model = dict(self.rows) if self.alone else None
            self.pairs.append((newest[0][-1].number, newest[1][-1].number, model))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        """A new job goes on from any checkpoint, and shows what it covers, also what nobody has committed."""
        source, number = data.draw(st.sampled_from(sorted(self.cuts)))
        version, rows = self.cuts[source, number]
        left = self.left.get((source, number))
        job, line = JobId(f"job-{len(self.jobs)}"), dict(self.jobs)[source]
        for at, store in enumerate((self.store, self.plain)):
            uncommitted = (left[at],) if left else ()
            TableLog(store).claim(job, (source, CheckpointId(number)), uncommitted=uncommitted)
        self._begin(job, line, version, rows)
        self._commit([(), ()])

    @precondition(lambda self: len(self.jobs) < 4)
    @rule(how=st.sampled_from(["append", "overwrite"]))
    def another_line(self, how: str) -> None:
        """A job that does not go on from anything."""
        job = JobId(f"job-{len(self.jobs)}")
        version = TableLog(self.plain).claims() << 32
        for store in (self.store, self.plain):
            TableLog(store).claim(job, None, "append" if how == "append" else "overwrite")
        self._begin(job, job, version, {})

    @rule(data=st.data())
    def compact_at_rest(self, data: st.DataObject) -> None:
        """Any line; then only a new job can go on."""
        lines = [*TableLog(self.store).files_by_line()]
        if not lines:
            return
        self.compactions += 1
        try:
            compacted(self.store, data.draw(st.sampled_from(lines)), f"compaction_{self.compactions}")
        except TableError:
            return  # a job is about to hide rows
        self.at_rest = True

    def teardown(self) -> None:
        """Whatever commit is read."""
        for number, plain, model in self.pairs:
            found = shown(self.store, number)
            assert found == shown(self.plain, plain)
            assert model is None or found == model


DeletedRows.TestCase.settings = settings(max_examples=30, stateful_step_count=8, deadline=None)
TestDeletedRows = pytest.mark.slow(DeletedRows.TestCase)
