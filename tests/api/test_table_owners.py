"""Who may write to a table, and when readers see what a new owner does."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, await_events, config, finish, local, opening

import tidegate as tg
from tidegate.recovery import list_checkpoints
from tidegate.storage.errors import StorageError
from tidegate.storage.files.file_system_store import FileSystemStore
from tidegate.storage.ids import JobId
from tidegate.storage.tables.table_files import read_table
from tidegate.storage.tables.table_info import IfExists
from tidegate.storage.tables.table_log import TableLog

ROWS = 40


def numbers_in(folder: Path) -> list[int]:
    """What the table shows."""
    found: list[int] = read_table(FileSystemStore(str(folder / "out")))["x"].to_pylist()
    return sorted(found)


def write(folder: Path, *xs: int, if_exists: IfExists = "error", name: str = "once") -> tg.Job:
    """A job that writes some rows, and ends."""
    with local(1) as env:
        table = pa.table({"k": [0] * len(xs), "x": pa.array(xs, pa.int64())}, GatedSource.schema)
        env.from_batches(table).to_table(str(folder / "out"), if_exists=if_exists)
        return finish(env, folder / name)


def overwrite(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tg.OutputTable:
    """All rows of a source in place of those that are there."""
    return env.from_source(source, uid="source").to_table(str(folder / "out"), uid="out", if_exists="overwrite")


def test_overwriting_shows_the_old_rows_until_the_first_checkpoint(tmp_path: Path) -> None:
    """And then, in one step, those of the new job."""
    write(tmp_path, 1000)
    with opening(GatedSource(ROWS, gates=[10])) as source, local(1) as env:
        overwrite(env, source, tmp_path)
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        assert numbers_in(tmp_path) == [1000]
        job.trigger_checkpoint("4min")
        await_events(job, "SinksCommitted", 1)
        assert numbers_in(tmp_path) == list(range(10))
        source.open_all()
        assert job.wait("4min") == "finished"
    assert numbers_in(tmp_path) == list(range(ROWS))


def test_a_job_that_fails_at_once_overwrites_nothing(tmp_path: Path) -> None:
    """Readers see the old rows, and so does the next job."""
    write(tmp_path, 1000)

    def fail(row: dict[str, int]) -> dict[str, int]:
        raise ValueError("at once")

    with local(1) as env:
        stream = env.from_source(GatedSource(ROWS), uid="source").map(fail, schema=GatedSource.schema)
        stream.to_table(str(tmp_path / "out"), if_exists="overwrite")
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match="at once"):
            job.wait("4min")

    assert numbers_in(tmp_path) == [1000]
    write(tmp_path, 1001, if_exists="append", name="later")
    assert numbers_in(tmp_path) == [1000, 1001]


def test_a_job_without_rows_overwrites_as_well(tmp_path: Path) -> None:
    """It has finished, and the table holds what it wrote: nothing."""
    write(tmp_path, 1000)
    write(tmp_path, if_exists="overwrite", name="empty")

    assert numbers_in(tmp_path) == []


@pytest.mark.parametrize("if_exists", ["error", "append", "overwrite"])
def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path, if_exists: IfExists) -> None:
    """It is told of the owner and what to do, and the owner goes on; once that has ended there is nothing to refuse."""
    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        overwrite(env, source, tmp_path)
        first = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        first.trigger_checkpoint("4min")
        await_events(first, "SinksCommitted", 1)
        with pytest.raises(
            tg.ConfigurationError, match=rf"being written by job {first.job_id}, .*stop or cancel it first"
        ):
            write(tmp_path, 1000, if_exists=if_exists, name="second")
        source.open_gate(10)
        source.await_gate(20)
        first.trigger_checkpoint("4min")
        await_events(first, "SinksCommitted", 2)
        assert numbers_in(tmp_path) == list(range(20))
        first.cancel()
        first.wait("4min")

    if if_exists != "error":
        write(tmp_path, 1000, if_exists=if_exists, name="second")
        assert numbers_in(tmp_path) == [*(range(20) if if_exists == "append" else ()), 1000]


def test_an_owner_that_cannot_be_asked_does_not_hold_the_table(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its checkpoints were in the memory of processes that are gone; the new job says so, and goes on."""
    write(tmp_path, 1)
    TableLog(FileSystemStore(str(tmp_path / "out"))).claim(JobId("old-1"), if_exists="append", home="gone://memory")

    write(tmp_path, 2, if_exists="append", name="second")

    assert numbers_in(tmp_path) == [1, 2]
    assert "belongs to job old-1, and gone://memory does not show whether that job lives" in caplog.text


def test_an_owner_that_may_live_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checkpoint storage does not answer: the new job is refused, and told why."""
    write(tmp_path, 1)

    def away(*_: object) -> bool:
        raise StorageError("no answer")

    monkeypatch.setattr("tidegate.api.tables.output_tables.is_alive", away)
    with pytest.raises(
        StorageError, match=r"cannot check whether job test-job-.*cannot be read: no answer\. Make sure"
    ):
        write(tmp_path, 2, if_exists="append", name="second")
    assert numbers_in(tmp_path) == [1]


def test_rows_of_another_job_stay_when_one_is_restored(tmp_path: Path) -> None:
    """A runs, B adds a row, A is restored from a checkpoint before its newest: B's row is there, each of A's once."""

    def append(env: tg.StreamEnvironment, source: GatedSource) -> None:
        env.from_source(source, uid="source").to_table(str(tmp_path / "out"), uid="out", if_exists="append")

    settings = config(tmp_path / "checkpoints", num_retained=3, retention="retain_on_cancellation")
    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        append(env, source)
        first = env.execute("job", checkpoints=settings, restart=NO_RESTART)
        source.await_gate(10)
        path = first.trigger_checkpoint("4min")
        source.open_gate(10)
        source.await_gate(20)
        first.trigger_checkpoint("4min")
        await_events(first, "SinksCommitted", 2)
        first.cancel()
        first.wait("4min")
    write(tmp_path, 1000, if_exists="append", name="other")

    with opening(GatedSource(ROWS, gates=[15])) as source, local(1) as env:
        append(env, source)
        again = env.execute("job", checkpoints=settings, restart=NO_RESTART, restore=path)
        source.await_gate(15)
        assert numbers_in(tmp_path) == [*range(20), 1000]
        source.open_all()
        assert again.wait("4min") == "finished"
    assert numbers_in(tmp_path) == [*range(ROWS), 1000]


def test_a_restored_final_checkpoint_shows_what_it_covers(tmp_path: Path) -> None:
    """A finished job that is restored takes no checkpoint any more: its table goes back to the end of that job."""

    def start(env: tg.StreamEnvironment, source: GatedSource, restore: str | None = None) -> tg.Job:
        env.from_source(source, uid="source").to_table(str(tmp_path / "out"), uid="out")
        settings = config(tmp_path / "checkpoints", num_retained=3, retention="retain_on_cancellation")
        return env.execute("job", checkpoints=settings, restart=NO_RESTART, restore=restore)

    with opening(GatedSource(20, gates=[10])) as source, local(1) as env:
        job = start(env, source)
        source.await_gate(10)
        early = job.trigger_checkpoint("4min")
        source.open_all()
        assert job.wait("4min") == "finished"
        final = list_checkpoints(str(tmp_path / "checkpoints"))[-1].path
    with opening(GatedSource(20, gates=[15])) as source, local(1) as env:
        job = start(env, source, early)
        source.await_gate(15)
        job.trigger_checkpoint("4min")
        await_events(job, "SinksCommitted", 1)
        job.cancel()
        job.wait("4min")
    assert numbers_in(tmp_path) == list(range(15))

    with local(1) as env:
        assert start(env, GatedSource(20), final).wait("4min") == "finished"
    assert numbers_in(tmp_path) == list(range(20))
