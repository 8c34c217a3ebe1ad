"""Completed checkpoints whose sink files are not visible yet: there are few of them, and committing stays cheap."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import count

from any_permit import ANY_PERMIT
from coordinators import SPEC, Coordinator, files, only, spec
from link import node

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import COMMITS_WAITING_MAX
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.coordinator_effects import CoordinatorEffects
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.stream_graph import translate
from tidegate.storage.checkpoints.metadata import OpenCommits, TableHead
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.tail import LOG_FOLDER
from tidegate.storage.tables.table_info import TableInfo
from tidegate.storage.tables.table_log import TableLog

_numbers = count()


def backlog(job: Coordinator) -> None:
    """As many commits wait as may."""
    for number in range(COMMITS_WAITING_MAX):
        job.complete(files(number, f"f{number}"))
    assert [c.checkpoint_id for c in job.state.commits] == [n + 1 for n in range(COMMITS_WAITING_MAX)]


def test_sinks_that_lag_hold_checkpoints_back() -> None:
    """No checkpoint is triggered while too many wait, by request or by time; the first that is visible makes room."""
    job = Coordinator().run()
    backlog(job)

    assert only(job.request("waits"), do.TriggerCheckpoint) == []
    assert only(job.fire(f"periodic:{job.state.attempt}", at_ms=60_000), do.TriggerCheckpoint) == []

    (trigger,) = only(job.committed(1), do.TriggerCheckpoint)
    assert trigger.checkpoint_id == COMMITS_WAITING_MAX + 1
    assert job.collect(trigger.checkpoint_id).checkpoint_id == trigger.checkpoint_id
    assert do.CompleteRequest("waits", trigger.checkpoint_id, None) in job.written(trigger.checkpoint_id)


def test_checkpoints_by_time_go_on_when_sinks_have_caught_up() -> None:
    """The one that was due is taken as soon as there is room, and then they come in their interval again."""
    job = Coordinator(spec(interval_ms=1_000)).run()
    backlog(job)
    timer = f"periodic:{job.state.attempt}"
    for at_ms in (60_000, 61_000):
        assert only(job.fire(timer, at_ms), do.TriggerCheckpoint) == []

    (trigger,) = only(job.committed(1), do.TriggerCheckpoint)
    job.collect(trigger.checkpoint_id)
    job.written(trigger.checkpoint_id)
    assert only(job.committed(2), do.TriggerCheckpoint) == [], "two were due; one is enough"
    assert len(only(job.fire(timer, 62_000), do.TriggerCheckpoint)) == 1


def test_the_final_checkpoint_waits_for_room_and_is_taken() -> None:
    """A job at the end of its data finishes once its sinks have caught up."""
    job = Coordinator().run()
    backlog(job)
    assert only(job.end_of_data(), do.TriggerCheckpoint) == []

    (trigger,) = only(job.committed(1), do.TriggerCheckpoint)
    assert job.collect(trigger.checkpoint_id, finished=True).final
    job.written(trigger.checkpoint_id)
    job.all_finished()
    ends = [end for number in range(2, COMMITS_WAITING_MAX + 1) for end in only(job.committed(number), do.EndJob)]
    assert [end.status for end in ends] == ["finished"]


def test_a_fenced_commit_fails_the_job_at_once() -> None:
    """The table is another job's, and that does not pass: no other attempt, and no restart."""
    job = Coordinator().run()
    job.complete(files(0, "f0"))

    told = job.tell(ev.SinkCommitFailed(job.at_ms, CheckpointId(1), "the table is owned by 'b'", fenced=True))

    assert only(told, do.SetTimer) == []
    (end,) = only(told, do.EndJob)
    assert (end.status, job.status) == ("failed", JobStatus.FAILED)
    assert "a newer job is in charge of their table (the table is owned by 'b')" in (end.reason or "")


def test_the_first_checkpoint_of_an_attempt_is_committed_to_every_table() -> None:
    """Without files too: what a table shows may be about to be replaced. Later ones without files need no commit."""
    job = Coordinator(replace(SPEC, tables=("a", "b"))).run()
    for checkpoint_id, tables in ((1, ("a", "b")), (2, ())):
        job.ask()
        job.collect(CheckpointId(checkpoint_id))
        commits = only(job.written(CheckpointId(checkpoint_id)), do.CommitSinks)
        assert commits == [do.CommitSinks(CheckpointId(checkpoint_id), (), tables, permit=ANY_PERMIT)] * bool(tables)
        job.committed(checkpoint_id)

    job.fail()
    job.fire("restart:1")
    job.all_ready()
    job.ask()
    job.collect(CheckpointId(3))
    assert only(job.written(CheckpointId(3)), do.CommitSinks) == [
        do.CommitSinks(CheckpointId(3), (), ("a", "b"), permit=ANY_PERMIT)
    ]


def test_a_checkpoint_knows_the_commits_that_are_made_and_those_that_are_outstanding() -> None:
    """So a restore from it notices a commit that is lost, whenever it was made."""
    claimed = TableHead("table", 1)
    job = Coordinator(replace(SPEC, table_heads=(claimed,))).run()
    first = job.complete(files(0, "f0"))
    metadata = job.collect(job.ask(), files(1, "f1"))
    assert metadata.table_heads == (claimed,)
    assert metadata.open_commits == (OpenCommits("table", (first,)),)
    assert metadata.expected_commits("table") == (first,)

    job.written(metadata.checkpoint_id)
    committed = TableHead("table", 2, first)
    (commit,) = only(job.tell(ev.SinksCommitted(job.at_ms, first, (committed,))), do.CommitSinks)
    assert commit.heads == (committed,)
    metadata = job.collect(job.ask())
    assert (metadata.table_heads, metadata.expected_commits("table")) == ((committed,), (1, 2))


# --- the I/O ------------------------------------------------------------------------------------------------------


class CountingStore(FileSystemStore):
    """Counts which entries of table logs are read, and how often a log is listed."""

    def __init__(self, url: str, found: Counter[str], listed: Counter[str]) -> None:
        super().__init__(url)
        self._found, self._listed = found, listed

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Counted where there is something."""
        data = super().read(path, offset, length)
        self._found[path] += 1
        return data

    def list(self, prefix: str) -> list[str]:
        """Counted."""
        self._listed[prefix] += 1
        return super().list(prefix)


class AwayStore(FileSystemStore):
    """Does not answer."""

    def list(self, prefix: str) -> list[str]:
        """What a log begins with."""
        raise StorageError("no answer")


def test_a_tables_log_is_read_once_however_many_commits_there_are() -> None:
    """Commits that each read all commits before them grow slower and slower until checkpoints cannot be kept up.

    What is read besides is the entry before the one that is made.
    """
    table = f"memory://commit-backlog-{next(_numbers)}"
    source = node("source")
    context = JobContext(SPEC.job_id, SPEC.job_name, f"{table}-root", translate([source]), {})
    log = TableLog(FileSystemStore(table))
    log.create(TableInfo.of(source.schema, "append"))
    log.claim(SPEC.job_id)
    found: Counter[str] = Counter()
    listed: Counter[str] = Counter()
    effects = CoordinatorEffects(context, lambda url: CountingStore(url, found, listed), lambda: 7)

    for number in map(CheckpointId, range(1, 11)):
        commit = do.CommitSinks(number, (replace(files(number, f"f{number}"), table=table),), permit=ANY_PERMIT)
        assert effects.commit_sinks(commit) == ev.SinksCommitted(7, number, (TableHead(table, number + 1, number),))

    assert len(log.entries()) == 12
    assert max(found.values()) <= 2
    assert listed == {LOG_FOLDER: 1}


def claimed_by_another() -> tuple[str, JobContext, TableLog]:
    """A table of another job, the context of ours, and the table's log."""
    table = f"memory://commit-backlog-{next(_numbers)}"
    source = node("source")
    context = JobContext(SPEC.job_id, SPEC.job_name, f"{table}-root", translate([source]), {})
    log = TableLog(FileSystemStore(table))
    log.create(TableInfo.of(source.schema, "append"))
    log.claim(JobId("other-1"))
    return table, context, log


def test_a_table_without_files_is_told_where_that_changes_what_it_shows() -> None:
    """A job that overwrites a table and has no rows: nothing is shown with its first checkpoint."""
    table, context, log = claimed_by_another()
    log.commit(JobId("other-1"), CheckpointId(1), files(0, "f0").files)
    log.claim(SPEC.job_id, if_exists="overwrite")
    effects = CoordinatorEffects(context, FileSystemStore, lambda: 7)

    assert effects.commit_sinks(do.CommitSinks(CheckpointId(1), (), (table,), permit=ANY_PERMIT)) == ev.SinksCommitted(
        7, CheckpointId(1), (TableHead(table, 4, CheckpointId(1)),)
    )

    assert log.snapshot().files == ()


def test_a_commit_to_another_jobs_table_is_told_apart_from_storage_that_is_away() -> None:
    """Only the former is final: `fenced` says that it need not be tried again."""
    table, context, _ = claimed_by_another()
    commit = do.CommitSinks(CheckpointId(1), (replace(files(0, "f0"), table=table),), permit=ANY_PERMIT)

    fenced = CoordinatorEffects(context, FileSystemStore, lambda: 7).commit_sinks(commit)
    away = CoordinatorEffects(context, AwayStore, lambda: 7).commit_sinks(commit)

    assert isinstance(fenced, ev.SinkCommitFailed)
    assert (fenced.fenced, "is owned by 'other-1'" in fenced.error) == (True, True)
    assert away == ev.SinkCommitFailed(7, CheckpointId(1), "no answer", fenced=False)
