"""The model of a table's log with vacuums and cuts: what a reader may see stays, and the rest is a clear error."""

from __future__ import annotations

import re
from unittest.mock import patch

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from table_logs import commit, file_of
from test_table_model import CompactedTableMachine, _time

from tidegate.storage.errors import TableError
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log import vacuum
from tidegate.storage.tables.log.entries import covers
from tidegate.storage.tables.log.tail import LOG_FOLDER
from tidegate.storage.tables.log.vacuum import Retention, deletable_files
from tidegate.storage.tables.log.versions import TableVersions
from tidegate.storage.tables.table_log import TableLog

_LATER_MS = 10**9


class VacuumedTableMachine(CompactedTableMachine):
    """Jobs, compactions, and vacuums by anybody at any time, of which the model knows only what must be left."""

    def __init__(self) -> None:
        super().__init__()
        self.cut_at: dict[tuple[JobId, int], int] = {}
        """The newest commit of the table at each checkpoint."""
        self.retention: Retention | None = None
        """That of the newest vacuum, where no cut came after it."""
        self.dropped: set[str] = set()
        """Files that no entry names any more."""

    @rule(log=st.integers(0, 1), commits=st.integers(1, 4), known=st.booleans())
    def vacuum(self, log: int, commits: int, known: bool) -> None:
        """The newest commits stay, and sometimes the checkpoints of the owner."""
        cuts = self.cuts.get(self.owner, {}) if self.owner is not None and known else {}
        retention = Retention(_LATER_MS, commits, tuple(map(CheckpointId, cuts)))
        would, _ = self.logs[log].vacuum(retention, dry_run=True)
        done, readable_from = self.logs[1 - log].vacuum(retention)
        assert would == done
        assert readable_from <= max([0, *list(self.versions)[-commits:][:1], self.readable_from])
        self.retention = retention

    @precondition(lambda self: self.retention is not None)
    @rule(log=st.integers(0, 1), undeleted=st.integers(0, 5))
    def cut(self, log: int, undeleted: int) -> None:
        """What the vacuum has left without files is left out, also later, unless one of the files is there still."""
        assert self.retention is not None
        before = self.reader.entries()
        with patch.object(vacuum, "DROPPED_MIN", 1):
            done = self.logs[log].cut(self.retention, lambda paths: set(paths) if undeleted == 0 else ())
        after = {entry.seq for entry in self.reader.entries()}
        assert done == bool({entry.seq for entry in before} - after)
        self.dropped |= {file.path for entry in before for file in entry.files}
        self.dropped -= self.reader.referenced_paths()
        self.retention = None

    @invariant()
    def keeps_few_files_and_everything_that_was_written(self) -> None:
        """But for what was cut off, which was gone."""
        if hasattr(self, "reader"):
            written = {f"data/{name}.parquet" for name in [*self.order, *self.merged]}
            assert self.reader.referenced_paths() == written - self.dropped
            assert len(self.store.list(LOG_FOLDER)) <= 3 * 3 + 2

    @rule(log=st.integers(0, 1), files=st.integers(0, 2), now_ms=st.integers(1, 9))
    @precondition(lambda self: self.owner is not None)
    def commit(self, log: int, files: int, now_ms: int) -> None:
        """As ever."""
        super().commit(log, files, now_ms)
        assert self.owner is not None
        number = self.next_checkpoint[self.owner] - 1
        self.cut_at[self.owner, number] = max(self.versions, default=0)

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data(), files=st.integers(0, 1))
    def claim_restored(self, log: int, data: st.DataObject, files: int) -> None:
        """Refused only where a vacuum took rows away; then nothing has changed."""
        source = data.draw(st.sampled_from(self.jobs))
        number = data.draw(st.sampled_from([0, *self.cuts[source]]))
        job = JobId(f"job-{len(self.jobs)}")
        names = [f"{job}.left.{i}" for i in range(files)]
        try:
            self.logs[log].claim(job, (source, CheckpointId(number)), uncommitted=tuple(map(file_of, names)))
        except TableError as error:
            self._may_be_refused(error, source, number)
            return
        self._written(names, self.lines[source])
        self._claimed(job, self.lines[source], self.cuts[source].get(number, self.found[source]) + names)

    @precondition(lambda self: self.owner is not None and self.cuts[self.owner])
    @rule(log=st.integers(0, 1), data=st.data(), damaged=st.integers(0, 2))
    def fall_back(self, log: int, data: st.DataObject, damaged: int) -> None:
        """Likewise."""
        assert self.owner is not None
        number = data.draw(st.sampled_from(sorted(self.cuts[self.owner])))
        first_late = self.next_checkpoint[self.owner]
        origin = (self.owner, CheckpointId(number))
        try:
            self.logs[log].claim(self.owner, origin, next_checkpoint_id=first_late + damaged)
        except TableError as error:
            self._may_be_refused(error, *origin)
            return
        self.next_checkpoint[self.owner] += damaged
        for late in range(first_late, first_late + damaged):
            commit(self.logs[1 - log], self.owner, late, "late")
        self.goes_on(self.owner, self.cuts[self.owner][number])

    @property
    def readable_from(self) -> int:
        """From which commit on everything must be there."""
        fold = self.reader.state()
        assert fold is not None
        return fold.vacuum.readable_from

    def _may_be_refused(self, error: TableError, job: JobId, number: int) -> None:
        assert re.match("a vacuum has (deleted|cut)", str(error)), error
        assert self.cut_at.get((job, number), 0) < self.readable_from

    @invariant()
    def shows_nothing_that_was_deleted(self) -> None:
        """Not now, and not with the next commit."""
        if not hasattr(self, "reader"):
            return
        fold = self.reader.state()
        assert fold is not None
        entries = self.reader.entries()
        gone = deletable_files(entries, fold.vacuum)
        named = [
            f.path for e in entries if covers(fold.shown, e.seq) or covers(fold.shown_next, e.seq) for f in e.files
        ]
        assert not gone.keys() & set(named)

    def teardown(self) -> None:
        """As of each commit that must be readable the table is what it was; of earlier ones too, or it is an error."""
        if not hasattr(self, "reader"):
            return
        reader = TableLog(self.store)
        entries, fold = reader.entries(), reader.state()
        assert fold is not None
        versions, gone = TableVersions("", entries, fold), deletable_files(entries, fold.vacuum)
        history = versions.commits()
        assert [commit.number for commit in history] == list(self.versions)[-len(history) :]
        assert len(history) == len(self.versions) or fold.cut is not None
        for version in history:
            at_ms, names = self.versions[version.number]
            assert (version.at, version.rows) == (_time(at_ms), len(names))
            own = [name for name in names if name.startswith(f"{version.job_id}.{version.checkpoint_id}.")]
            assert version.shown == (set(own) <= set(self.shown)) or version.job_id.startswith("compaction")
        for number, (_, names) in self.versions.items():
            try:
                _, shown = versions.shown_at(number)
            except TableError:
                assert number < fold.vacuum.readable_from
                continue
            files = [file for entry in entries if covers(shown, entry.seq) for file in entry.files]
            assert self._paths(files) == self.in_order(names)
            assert not gone.keys() & {file.path for file in files}


TestVacuumedTableMachine = VacuumedTableMachine.TestCase
TestVacuumedTableMachine.settings = settings(max_examples=60, stateful_step_count=40, phases=[Phase.generate])
TestVacuumedTableMachine.pytestmark = [pytest.mark.slow]
