"""A table whose log has lost what storage had acknowledged fails its job, and is not restored as if it were whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from local_jobs import GatedSource, await_events, config, local, opening

import tidegate as tg
from tidegate.storage.checkpoints.metadata import OpenCommits, TableHead, decode_metadata, encode_metadata
from tidegate.storage.ids import CheckpointId

ROWS = 40


def lose(folder: Path, count: int) -> None:
    """The newest entries of a table's log vanish."""
    log = folder / "_tidegate" / "log"
    for entry in sorted(path for path in log.iterdir() if path.name.isdigit())[-count:]:
        entry.unlink()


@pytest.mark.slow
def test_a_job_fails_whose_table_loses_entries_while_it_commits(tmp_path: Path) -> None:
    """With restarts: the loss is named at once, and nothing is committed beside it."""
    out = tmp_path / "out"
    with local(1) as env:
        env.from_rate(200, uid="rate").to_table(str(out), uid="out")
        restart = tg.RestartStrategy.fixed_delay(3, "10ms")
        job = env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restart=restart)
        await_events(job, "SinksCommitted", 5)
        lose(out, 2)
        with pytest.raises(tg.JobFailedError, match="has lost entries"):
            job.wait("4min")
        assert "TaskFailed" not in {type(event).__name__ for event in job.events()}


def stopped(folder: Path, retained: int) -> str:
    """A job that has committed checkpoint 1, and stops with savepoint 2 while that commit is outstanding."""
    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        table = env.from_source(source, uid="rows").to_table(str(folder / "out"), uid="out")
        settings = config(folder / "c").model_copy(update={"num_retained": retained})
        job = env.execute("job", checkpoints=settings)
        source.await_gate(10)
        job.trigger_checkpoint("4min")
        await_events(job, "SinksCommitted", 1)
        source.open_gate(10)
        source.await_gate(20)
        savepoint = job.stop(savepoint=str(folder / "savepoints"))
        assert job.wait("4min") == "suspended"
    path = Path(savepoint) / "_metadata"
    metadata = decode_metadata(path.read_bytes())
    assert metadata.expected_commits(table.url) == (1,)
    outstanding = OpenCommits(table.url, (CheckpointId(1),))
    metadata = replace(metadata, table_heads=(TableHead(table.url, 1),), open_commits=(outstanding,))
    path.write_bytes(encode_metadata(metadata))
    return savepoint


def restored(folder: Path, savepoint: str) -> list[int]:
    """What the table shows in the end, if a job is restored from the savepoint."""
    with opening(GatedSource(ROWS)) as source, local(1) as env:
        table = env.from_source(source, uid="rows").to_table(str(folder / "out"), uid="out")
        source.open_all()
        assert env.execute("job", checkpoints=config(folder / "c"), restore=savepoint).wait("4min") == "finished"
        return sorted(table.to_arrow()["x"].to_pylist())


def test_a_commit_that_was_outstanding_and_is_lost_is_noticed(tmp_path: Path) -> None:
    """The checkpoint that it was for is gone: nobody can commit its rows again."""
    savepoint = stopped(tmp_path, retained=1)
    lose(tmp_path / "out", 2)
    with pytest.raises(
        tg.TableError, match=r"has lost entries: checkpoint 1 of .* was committed, and its commit is missing"
    ):
        restored(tmp_path, savepoint)


def test_a_commit_that_was_outstanding_and_is_lost_is_made_again(tmp_path: Path) -> None:
    """The checkpoint that it was for is retained, so its files come with the claim."""
    savepoint = stopped(tmp_path, retained=3)
    lose(tmp_path / "out", 2)
    assert restored(tmp_path, savepoint) == list(range(ROWS))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_commit_that_was_outstanding_and_is_there_is_enough(tmp_path: Path, lost: int) -> None:
    """That of the savepoint itself is made again."""
    savepoint = stopped(tmp_path, retained=1)
    if lost:
        lose(tmp_path / "out", lost)
    assert restored(tmp_path, savepoint) == list(range(ROWS))


@pytest.mark.slow
def test_a_job_is_restored_from_before_the_loss(tmp_path: Path) -> None:
    """A savepoint that knows the entries is refused. One from before they were made is restored."""
    out = tmp_path / "out"

    def start(restore: str | None) -> tg.Job:
        env.from_rate(200, uid="rate").to_table(str(out), uid="out", if_exists="append" if restore else "error")
        return env.execute("job", checkpoints=config(tmp_path / "c", interval="20ms"), restore=restore)

    with local(1) as env:
        job = start(None)
        await_events(job, "SinksCommitted", 3)
        before = job.savepoint(str(tmp_path / "before"))
        commits = sum(type(event).__name__ == "SinksCommitted" for event in job.events())
        await_events(job, "SinksCommitted", commits + 8)
        after = job.stop(savepoint=str(tmp_path / "after"))
        assert job.wait("4min") == "suspended"
    lose(out, 4)
    with local(1) as env, pytest.raises(tg.TableError, match="has lost entries"):
        start(after)
    with local(1) as env:
        job = start(before)
        await_events(job, "SinksCommitted", 2)
        job.stop(savepoint=str(tmp_path / "again"))
        assert job.wait("4min") == "suspended"
    rows = sorted(tg.open_table(str(out)).to_arrow()["value"].to_pylist())
    assert rows == list(range(len(rows)))
