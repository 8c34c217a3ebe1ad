"""The log of a table against a model of it, by random jobs that claim, commit, fall back and race."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from table_logs import INFO, commit, file_of, owner_of

from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.errors import FencedError, TableError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import TableEntry, covers
from tidegate.storage.tables.log.tail import LOG_FOLDER
from tidegate.storage.tables.log.versions import TableVersions
from tidegate.storage.tables.table_log import TableLog


class TableLogMachine(RuleBasedStateMachine):
    """Jobs claim, restore, fall back and commit through two handles, one of which is always behind.

    The model does not know the log: it keeps what the table shows, what it is about to show, and for each job what its
    line had shown at each checkpoint. The log is compacted all the time, and the writers' clocks go wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.next: list[str] | None = None
        """What is shown with the next commit, where that differs."""
        self.owner: JobId | None = None
        self.jobs: list[JobId] = []
        self.lines: dict[JobId, JobId] = {}
        self.line_of: dict[str, JobId] = {}
        self.order: list[str] = []
        self.to_overwrite: dict[JobId, list[str]] = {}
        """What a line is to hide with its first commit."""
        self.own: dict[JobId, list[str]] = {}
        self.cuts: dict[JobId, dict[int, list[str]]] = {}
        self.found: dict[JobId, list[str]] = {}
        self.next_checkpoint: dict[JobId, int] = {}
        self.compacting = False
        """Whether a compaction owns the table that has not committed."""
        self.merged: dict[str, list[str]] = {}
        """Files that compactions have made, and those whose rows they hold."""
        self.clock_ms = 0
        self.newest_ms = 0
        self.versions: dict[int, tuple[int, list[str]]] = {}
        """When each commit was made, and what showed with it."""

    @initialize()
    def create(self) -> None:
        """An empty table, and two writers that know it."""
        self.store = open_store("memory://table-log-machine")
        self.store.delete_tree("")
        self.logs = [TableLog(self.store, entries_per_snapshot=3, now_ms=lambda: self.clock_ms) for _ in range(2)]
        self.reader = TableLog(self.store)
        for log in self.logs:
            log.create(INFO)

    @rule(log=st.integers(0, 1), if_exists=st.sampled_from(["error", "append", "overwrite"]))
    def claim_fresh(self, log: int, if_exists: Literal["error", "append", "overwrite"]) -> None:
        """A new job takes the table as it is, is to empty it, or is refused."""
        job = JobId(f"job-{len(self.jobs)}")
        if self.shown and if_exists == "error":
            with pytest.raises(TableError):
                self.logs[log].claim(job, None, if_exists)
            return
        self.logs[log].claim(job, None, if_exists)
        if self.shown and if_exists == "overwrite":
            self.to_overwrite[job] = list(self.order)
        self._claimed(job, job, [])

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data(), files=st.integers(0, 1))
    def claim_restored(self, log: int, data: st.DataObject, files: int) -> None:
        """A new job restores any checkpoint that any job ever took; sometimes files of it were left behind."""
        source = data.draw(st.sampled_from(self.jobs))
        number = data.draw(st.sampled_from([0, *self.cuts[source]]))
        job = JobId(f"job-{len(self.jobs)}")
        names = [f"{job}.left.{i}" for i in range(files)]
        self.logs[log].claim(job, (source, CheckpointId(number)), uncommitted=tuple(map(file_of, names)))
        self._written(names, self.lines[source])
        self._claimed(job, self.lines[source], self.cuts[source].get(number, self.found[source]) + names)

    @precondition(lambda self: self.owner is not None)
    @rule(log=st.integers(0, 1), files=st.integers(0, 2), now_ms=st.integers(1, 9))
    def commit(self, log: int, files: int, now_ms: int) -> None:
        """The owner completes a checkpoint, sometimes without output, at any time."""
        assert self.owner is not None
        self.clock_ms, before = now_ms, self.reader.snapshot().seq
        number = self.next_checkpoint[self.owner]
        names = [f"{self.owner}.{number}.{i}" for i in range(files)]
        commit(self.logs[log], self.owner, number, *names)
        self.next_checkpoint[self.owner] += 1
        self._written(names, self.lines[self.owner])
        if self.next is not None:
            self.shown, self.next = self.next, None
            self.to_overwrite.pop(self.lines[self.owner], None)
        self.shown = self.shown + names
        self.own[self.owner] = self.own[self.owner] + names
        self.cuts[self.owner][number] = self.own[self.owner]
        if (entry := self.reader.snapshot().seq) > before:
            self.newest_ms = max(self.newest_ms, now_ms)
            self.versions[entry] = self.newest_ms, self.shown

    @precondition(lambda self: self.jobs)
    @rule(log=st.integers(0, 1), data=st.data())
    def repeat(self, log: int, data: st.DataObject) -> None:
        """Any job repeats its claim and its last commit: nothing changes, and only the owner is not fenced."""
        job = data.draw(st.sampled_from(self.jobs))
        number = self.next_checkpoint[job] - 1
        names = [n for n in self.order if n.startswith(f"{job}.{number}.")]
        if job == self.owner:
            self.logs[log].claim(job, None, "overwrite")
            if names:
                commit(self.logs[log], job, number, *names)
            return
        with pytest.raises(FencedError):
            self.logs[log].claim(job, None, "append")
        with pytest.raises(FencedError):
            commit(self.logs[log], job, 10**6, "late")

    @precondition(lambda self: self.owner is not None and self.cuts[self.owner])
    @rule(log=st.integers(0, 1), data=st.data(), damaged=st.integers(0, 2))
    def fall_back(self, log: int, data: st.DataObject, damaged: int) -> None:
        """The owner restarts from an older checkpoint of its own; some of the newer ones were never committed."""
        assert self.owner is not None
        cuts = self.cuts[self.owner]
        number = data.draw(st.sampled_from(sorted(cuts)))
        first_late = self.next_checkpoint[self.owner]
        self.next_checkpoint[self.owner] += damaged
        for _ in range(2):
            self.logs[log].claim(
                self.owner, (self.owner, CheckpointId(number)), next_checkpoint_id=self.next_checkpoint[self.owner]
            )
        for late in range(first_late, first_late + damaged):
            commit(self.logs[1 - log], self.owner, late, "late")
        self.goes_on(self.owner, cuts[number])

    @invariant()
    def shows_what_the_model_shows(self) -> None:
        """A reader of its own, and one that has just come, see the model's rows, in order."""
        if hasattr(self, "reader"):
            expected = self.in_order(self.shown)
            for reader in (self.reader, TableLog(self.store)):
                assert self._paths(reader.snapshot().files) == expected
                assert reader.rows() == len(expected)

    @invariant()
    def keeps_few_files_and_everything_that_was_written(self) -> None:
        """Hidden rows stay referred to: a restore may show them again."""
        if hasattr(self, "reader"):
            assert self.reader.referenced_paths() == {f"data/{name}.parquet" for name in [*self.order, *self.merged]}
            assert len(self.store.list(LOG_FOLDER)) <= 3 * 3 + 2

    def teardown(self) -> None:
        """Whatever was hidden, shown again or compacted since: as of each commit, the table is what it was."""
        if not hasattr(self, "reader"):
            return
        reader = TableLog(self.store)
        entries = reader.entries()
        fold = reader.state()
        assert fold is not None
        versions = TableVersions("", entries, fold)
        assert [commit.number for commit in versions.commits()] == list(self.versions)
        newest_at = {at_ms: number for number, (at_ms, _) in self.versions.items()}
        for version in versions.commits():
            at_ms, names = self.versions[version.number]
            number, shown = versions.shown_at(version.number)
            files = [file for entry in entries if covers(shown, entry.seq) for file in entry.files]
            assert (number, self._paths(files), version.rows) == (version.number, self.in_order(names), len(names))
            assert version.at == _time(at_ms)
            assert versions.shown_at(_time(at_ms))[0] == newest_at[at_ms]
        for number, (_, names) in list(self.versions.items())[:1]:
            assert self._paths(reader.snapshot(number).files) == self.in_order(names)

    def _paths(self, files: Iterable[DataFile]) -> list[str]:
        return [file.path for file in files]

    def in_order(self, names: list[str]) -> list[str]:
        return [f"data/{name}.parquet" for name in sorted(names, key=self.order.index)]

    def _written(self, names: list[str], line: JobId) -> None:
        self.order += names
        self.line_of |= dict.fromkeys(names, line)

    def _claimed(self, job: JobId, line: JobId, own: list[str]) -> None:
        self.jobs.append(job)
        self.owner = job
        self.lines[job] = line
        self.found[job] = own
        self.cuts[job] = {}
        self.next_checkpoint[job] = 1
        self.goes_on(job, own)

    def goes_on(self, job: JobId, own: list[str]) -> None:
        line = self.lines[job]
        self.own[job] = own
        hidden = self.to_overwrite.get(line, [])
        shown = own + [n for n in self.shown if self.line_of[n] != line and n not in hidden]
        self.next = shown if sorted(shown) != sorted(self.shown) else None


def _time(at_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(at_ms / 1000, dt.UTC)


class CompactedTableMachine(TableLogMachine):
    """The same with compactions, at rest and beside the owner. The model knows of none: rows are what they would be."""

    @precondition(lambda self: self.shown)
    @rule(log=st.integers(0, 1), data=st.data(), killed=st.booleans())
    def compact(self, log: int, data: st.DataObject, killed: bool) -> None:
        """The files of a line become one, or nothing happens, where a job is about to hide rows. Some never commit."""
        handle = self.logs[log]
        line = data.draw(st.sampled_from(list(handle.files_by_line())))
        job = JobId(f"compaction_{handle.entries()[-1].seq + 1}")
        if self.next is not None and not self.compacting:
            with pytest.raises(TableError, match="will hide rows of it"):
                handle.claim_compaction(job, line, owner_of(handle))
            return
        replaced = self._expanded(handle.claim_compaction(job, line, owner_of(handle)))
        self.owner, self.compacting = None, True
        if killed:
            return
        handle.commit(job, CheckpointId(0), (file_of(str(job), len(replaced)),))
        self.merged[job] = replaced
        self.compacting, self.newest_ms = False, max(self.newest_ms, self.clock_ms)
        self.versions[self.reader.snapshot().seq] = self.newest_ms, list(self.shown)

    @precondition(lambda self: self.owner is not None)
    @rule(log=st.integers(0, 1), data=st.data(), late=st.sampled_from(["", "", "killed", "overtaken"]))
    def compact_beside_the_job(self, log: int, data: st.DataObject, late: str) -> None:
        """Entries of the owner's line become one; nothing happens where a claim is about to change what shows.

        Some never come so far, and some find that another process has begun to compact.
        """
        assert self.owner is not None
        handle = self.logs[log]
        mine = [e for e in handle.shown_entries()[1] if self._is_own(e)]
        first, last = (data.draw(st.integers(0, len(mine)), label=label) for label in ("first", "last"))
        members = {entry.seq for entry in mine[first:last]}
        files = [file for entry in mine[first:last] for file in entry.files]
        self.clock_ms += 1
        name = f"beside-{len(self.merged)}-{handle.take_compacting(self.owner, f'n{log}')}"
        if late == "overtaken":
            self.logs[1 - log].take_compacting(self.owner, f"n{1 - log}")
        if late == "killed" or not members:
            return
        new = (file_of(name, sum(file.rows for file in files)),)
        fold = handle.state()
        assert fold is not None
        done = handle.compact(self.owner, f"n{log}", members, 1, new)
        assert done == (late != "overtaken" and not fold.pending)
        if done:
            self.merged[name] = self._expanded(files)
            self.newest_ms = max(self.newest_ms, self.clock_ms)

    def _is_own(self, entry: TableEntry) -> bool:
        names = self._expanded(entry.files)
        return all(self.line_of[name] == self.lines[self.owner] for name in names)  # type: ignore[index]

    def _paths(self, files: Iterable[DataFile]) -> list[str]:
        return sorted(f"data/{name}.parquet" for name in self._expanded(files))

    def in_order(self, names: list[str]) -> list[str]:
        return sorted(super().in_order(names))

    def _expanded(self, files: Iterable[DataFile]) -> list[str]:
        names = [file.path.removeprefix("data/").removesuffix(".parquet") for file in files]
        return [one for name in names for one in self.merged.get(name, [name])]

    def goes_on(self, job: JobId, own: list[str]) -> None:
        super().goes_on(job, own)
        self.compacting = False


TestCompactedTableMachine = CompactedTableMachine.TestCase
TestCompactedTableMachine.settings = settings(max_examples=40, stateful_step_count=20)
TestTableLogMachine = TableLogMachine.TestCase
TestTableLogMachine.settings = settings(max_examples=60, stateful_step_count=25)
