"""A restored job takes over what its checkpoint covers, whatever other jobs have done to the tables since."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import (
    NO_RESTART,
    SMALL,
    WAIT_S,
    GatedSource,
    WatchedStore,
    await_events,
    config,
    finish,
    is_commit,
    local,
    nothing,
    opening,
    thought_dead,
)

import tidegate as tg
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import CheckpointId, JobId
from tidegate.storage.tables.log.entries import TableEntryKind
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_log import TableLog

ROWS = 40


def program(env: tg.StreamEnvironment, source: GatedSource, folder: Path, table: str = "out") -> tg.OutputTable:
    """All rows, added to a table."""
    return env.from_source(source, uid="source").to_table(str(folder / table), uid="out", if_exists="append")


def start(env: tg.StreamEnvironment, folder: Path, restore: str | None = None) -> tg.Job:
    """Execute what was made."""
    return env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)


def restored_from(job: tg.Job) -> str:
    """Path of the checkpoint that a job was restored from."""
    submitted = next(event for event in job.events() if type(event).__name__ == "JobSubmitted")
    pointer: str = submitted.spec.restore.pointer
    return pointer


def numbers_in(folder: Path, table: str = "out") -> list[int]:
    """What a table shows."""
    found: list[int] = read_table(FileSystemStore(str(folder / table)))["x"].to_pylist()
    return sorted(found)


def commits_in(folder: Path, table: str = "out") -> list[tuple[JobId | None, CheckpointId | None]]:
    """Job and checkpoint of every commit to a table."""
    entries = TableLog(FileSystemStore(str(folder / table))).entries()
    return [(e.job_id, e.checkpoint_id) for e in entries if e.kind is TableEntryKind.COMMITTED]


def append_from_elsewhere(folder: Path, table: str = "out") -> None:
    """Another job claims the table and adds a row to it."""
    with local(1) as env:
        env.from_batches(pa.table({"k": [0], "x": [1000]}, GatedSource.schema)).to_table(
            str(folder / table), if_exists="append"
        )
        finish(env, folder / "other checkpoints")


@pytest.fixture
def taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that lives is taken for dead, as one that sleeps for longer than its lease."""
    monkeypatch.setattr("tidegate.api.tables.output_tables.is_alive", lambda *_: False)


@pytest.mark.usefixtures("taken_for_dead")
def test_a_checkpoint_that_was_fenced_off_is_shown_by_the_restore(tmp_path: Path) -> None:
    """Completed, never committed, and the table is another job's by now: the first commit of the new job shows it.

    What the other job wrote stays, and a checkpoint of the new job covers the taken over rows as well.
    """
    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        program(env, source, tmp_path)
        old = start(env, tmp_path)
        source.await_gate(10)
        old.trigger_checkpoint("4min")
        await_events(old, "SinksCommitted", 1)
        append_from_elsewhere(tmp_path)
        source.open_gate(10)
        source.await_gate(20)
        fenced = old.trigger_checkpoint("4min")
        with pytest.raises(tg.JobFailedError, match=r"checkpoint 2 are not committed.*is owned by"):
            old.wait("4min")
    assert numbers_in(tmp_path) == [*range(10), 1000]

    with opening(GatedSource(ROWS, gates=[30])) as source, local(1) as env:
        program(env, source, tmp_path)
        new = start(env, tmp_path, "latest")
        source.await_gate(30)
        assert restored_from(new) == fenced
        assert numbers_in(tmp_path) == [*range(10), 1000]
        new.trigger_checkpoint("4min")
        await_events(new, "SinksCommitted", 1)
        assert numbers_in(tmp_path) == [*range(30), 1000]
        new.cancel()
        new.wait("4min")

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path)
        assert start(env, tmp_path, "latest").wait("4min") == "finished"
    assert numbers_in(tmp_path) == [*range(ROWS), 1000]


@pytest.mark.usefixtures("taken_for_dead")
def test_the_latest_is_of_the_job_that_took_over(tmp_path: Path) -> None:
    """The old job still runs and completes another checkpoint: its successor's is the one to go on from."""
    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        program(env, source, tmp_path)
        old = start(env, tmp_path)
        source.await_gate(10)
        path = old.trigger_checkpoint("4min")
        await_events(old, "SinksCommitted", 1)
        thought_dead(old)

        with opening(GatedSource(ROWS, gates=[15])) as second, local(1) as other:
            program(other, second, tmp_path)
            successor = start(other, tmp_path, path)
            second.await_gate(15)
            expected = successor.trigger_checkpoint("4min")
            successor.cancel()
            successor.wait("4min")

        source.open_gate(10)
        source.await_gate(20)
        zombie = old.trigger_checkpoint("4min")
        with pytest.raises(tg.JobFailedError, match=f"is owned by '{successor.job_id}'") as evicted:
            old.wait("4min")
        assert "restore" not in str(evicted.value), "restored, it would evict its successor"
    assert Path(zombie, "_metadata").exists()

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path)
        job = start(env, tmp_path, "latest")
        assert job.wait("4min") == "finished"
    assert restored_from(job) == expected
    assert numbers_in(tmp_path) == list(range(ROWS))


# --- tables that the new job does not have ------------------------------------------------------------------------


def left_uncommitted(folder: Path) -> JobId:
    """A job that completes a checkpoint over its first ten rows and cannot commit it."""

    def away(path: str) -> None:
        if is_commit(path):
            raise StorageError("the table's storage is away")

    runtime = LocalRuntime(lambda url: WatchedStore(url, before=away, after=nothing))
    with opening(GatedSource(ROWS, gates=[10])) as source, tg.StreamEnvironment(runtime, 1, options=SMALL) as env:
        program(env, source, folder)
        submission = env.plan("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART)
        running = runtime.submit(replace(submission, spec=replace(submission.spec, storage_outage_ms=0)))
        source.await_gate(10)
        running.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S)
        progress = running.wait(WAIT_S)
    assert progress is not None
    assert progress.status == "failed"
    assert numbers_in(folder) == []
    return submission.spec.job_id


def test_a_table_that_the_new_job_does_not_write_is_committed_for_the_old_one(tmp_path: Path) -> None:
    """The sink was moved to another url: what the checkpoint covers is in the old table, the rest in the new one."""
    old = left_uncommitted(tmp_path)

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path, "moved")
        assert start(env, tmp_path, "latest").wait("4min") == "finished"

    assert (numbers_in(tmp_path), numbers_in(tmp_path, "moved")) == (list(range(10)), list(range(10, ROWS)))
    assert commits_in(tmp_path) == [(old, 1)]


def test_a_table_of_another_owner_that_the_new_job_does_not_write_is_refused(tmp_path: Path) -> None:
    """The rows could not be shown without taking the table from its owner, so the restore says why and what to do."""
    left_uncommitted(tmp_path)
    append_from_elsewhere(tmp_path)

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path, "moved")
        with pytest.raises(
            tg.ConfigurationError, match=r"covers 10 rows of the table at .*out .*another job has claimed"
        ):
            start(env, tmp_path, "latest")
    assert numbers_in(tmp_path) == [1000]
    assert not (tmp_path / "moved").exists() or not list((tmp_path / "moved").rglob("0*"))

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path)
        assert start(env, tmp_path, "latest").wait("4min") == "finished"
    assert numbers_in(tmp_path) == [*range(ROWS), 1000], "the way out that the error names"


@pytest.mark.parametrize("table", ["out", "moved"])
def test_a_table_that_is_gone_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, table: str) -> None:
    """Whoever deleted the table does not want its rows: the restore says so and goes on, to the same url or another."""
    left_uncommitted(tmp_path)
    shutil.rmtree(tmp_path / "out")

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path, table)
        assert start(env, tmp_path, "latest").wait("4min") == "finished"

    assert numbers_in(tmp_path, table) == list(range(10, ROWS))
    assert f"the table at {tmp_path / 'out'} is gone" in caplog.text


@pytest.mark.parametrize("table", ["out", "moved"])
def test_rows_whose_files_are_gone_are_not_committed(tmp_path: Path, table: str) -> None:
    """A commit that names them would make the table unreadable. The restore is refused, and the table is as it was."""
    left_uncommitted(tmp_path)
    for file in (tmp_path / "out").rglob("*.parquet"):
        file.unlink()

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path, table)
        with pytest.raises(tg.TableError, match=r"covers 10 rows of the table at .*out that .* their files are gone"):
            start(env, tmp_path, "latest")

    assert numbers_in(tmp_path) == []
    assert commits_in(tmp_path) == []


# --- versions -----------------------------------------------------------------------------------------------------

Values = Callable[[dict[str, int]], dict[str, int]]


def upsert(env: tg.StreamEnvironment, source: GatedSource, folder: Path, base: int) -> tg.OutputTable:
    """The newest value of each of five keys, values told apart by job."""
    values: Values = lambda row: {"k": row["k"], "x": base + row["x"]}  # noqa: E731
    stream = env.from_source(source, uid="source").map(values, schema=source.schema, uid="values")
    return stream.to_table(str(folder / "newest"), mode="upsert", keys=["k"], uid="out", if_exists="append")


def monday(folder: Path) -> None:
    """Three checkpoints, and the final one: versions 1 to 4 of every key."""
    with opening(GatedSource(20, gates=[5, 10, 15])) as source, local(1) as env:
        upsert(env, source, folder, 100)
        job = env.execute("monday", checkpoints=config(folder / "monday"), restart=NO_RESTART)
        for gate in (5, 10, 15):
            source.await_gate(gate)
            job.trigger_checkpoint("4min")
            source.open_gate(gate)
        assert job.wait("4min") == "finished"
    assert numbers_in(folder, "newest") == [115, 116, 117, 118, 119]


def test_a_job_that_adds_to_an_upsert_table_wins_over_the_rows_that_it_found(tmp_path: Path) -> None:
    """However many versions of a key there are already."""
    monday(tmp_path)

    with local(1) as env:
        upsert(env, GatedSource(3), tmp_path, 200)
        assert start(env, tmp_path).wait("4min") == "finished"

    assert numbers_in(tmp_path, "newest") == [118, 119, 200, 201, 202]


def test_a_restored_job_wins_over_the_rows_that_it_found(tmp_path: Path) -> None:
    """Over those of the checkpoint, and over those that were there before the job it goes on from."""
    monday(tmp_path)
    with opening(GatedSource(8, gates=[3])) as source, local(1) as env:
        upsert(env, source, tmp_path, 200)
        job = start(env, tmp_path)
        source.await_gate(3)
        job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")

    with local(1) as env:
        upsert(env, GatedSource(8), tmp_path, 300)
        assert start(env, tmp_path, "latest").wait("4min") == "finished"

    assert numbers_in(tmp_path, "newest") == [303, 304, 305, 306, 307]


def test_a_table_that_is_new_to_a_restored_job_is_won_as_well(tmp_path: Path) -> None:
    """The sink was not in the checkpoint, so it starts without a version, and the table has many."""
    monday(tmp_path)
    with opening(GatedSource(8, gates=[3])) as source, local(1) as env:
        env.from_source(source, uid="source").to_table(str(tmp_path / "rows"), uid="rows")
        job = start(env, tmp_path)
        source.await_gate(3)
        job.trigger_checkpoint("4min")
        job.cancel()
        job.wait("4min")

    with local(1) as env:
        stream = env.from_source(GatedSource(8), uid="source")
        stream.to_table(str(tmp_path / "rows"), uid="rows")
        stream.to_table(str(tmp_path / "newest"), mode="upsert", keys=["k"], uid="out", if_exists="append")
        assert start(env, tmp_path, "latest").wait("4min") == "finished"

    assert numbers_in(tmp_path, "newest") == [3, 4, 5, 6, 7]
