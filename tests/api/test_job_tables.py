"""Output tables of local jobs: who may write them, and what they show when."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import (
    NO_RESTART,
    GatedSource,
    WatchedStore,
    config,
    finish,
    is_commit,
    local,
    nothing,
    opening,
    rows,
)
from waiting import until

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime

# --- tables -------------------------------------------------------------------------------------------------------


def write_once(tmp_path: Path, run: int, **options: object) -> tg.OutputTable:
    """A job that writes one row to the one table."""
    data = pa.table({"x": [run]})
    with local(parallelism=1) as env:
        table = env.from_batches(data).to_table(str(tmp_path / "table"), **options)  # type: ignore[arg-type]
        finish(env, tmp_path / "checkpoints")
    return table


def test_a_table_with_rows_is_refused_extended_or_replaced(tmp_path: Path) -> None:
    """`if_exists` decides for a job that is not restored; an error leaves the table as it is."""
    table = write_once(tmp_path, 1)
    with pytest.raises(tg.TableError, match=r'shows 1 rows already; give if_exists="overwrite"'):
        write_once(tmp_path, 2)
    assert rows(table.to_arrow()) == [(1,)]

    assert rows(write_once(tmp_path, 3, if_exists="append").to_arrow()) == [(1,), (3,)]
    assert rows(write_once(tmp_path, 4, if_exists="overwrite").to_arrow()) == [(4,)]


def test_another_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    """A job that writes other columns than the table has does not start."""
    write_once(tmp_path, 1)
    with local(parallelism=1) as env:
        env.from_batches(pa.table({"x": ["text"]})).to_table(str(tmp_path / "table"), if_exists="append")
        with pytest.raises(tg.TableError, match="column 'x' is int64 in the table, string in the job"):
            env.execute("other", checkpoints=config(tmp_path / "checkpoints"))


def test_a_running_table_shows_committed_rows_only(tmp_path: Path) -> None:
    """Rows are visible with the checkpoint that covers them, not before, and they stay visible."""
    committed = threading.Semaphore(0)

    def note_commit(path: str) -> None:
        if is_commit(path):
            committed.release()

    runtime = LocalRuntime(lambda url: WatchedStore(url, before=nothing, after=note_commit))
    with opening(GatedSource(30, gates=[10, 20])) as source, tg.StreamEnvironment(runtime, 2) as env:
        table = env.from_source(source, parallelism=1).to_table(str(tmp_path / "table"))
        job = env.execute("gated", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        assert table.to_arrow().num_rows == 0

        job.trigger_checkpoint("4min")
        until("the commit", lambda: committed.acquire(blocking=False))
        first = sorted(table.to_arrow()["x"].to_pylist())
        assert first == list(range(10))
        source.open_gate(10)
        source.await_gate(20)
        assert sorted(table.to_arrow()["x"].to_pylist()) == first, "no checkpoint, no rows"

        source.open_gate(20)
        assert job.wait("4min") == "finished"
        assert sorted(table.to_arrow()["x"].to_pylist()) == list(range(30))
        assert table.rows_committed() == 30


def test_a_table_that_was_deleted_under_its_job_fails_it(tmp_path: Path) -> None:
    """What cannot be committed any more is said at once, and the checkpoint that covers the rows stays."""
    with opening(GatedSource(30, gates=[10])) as source, local() as env:
        env.from_source(source, parallelism=1).to_table(str(tmp_path / "table"))
        job = env.execute("robbed", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        shutil.rmtree(tmp_path / "table")
        source.open_gate(10)
        with pytest.raises(
            tg.JobFailedError, match=r"checkpoint \d+ could not be committed.*has lost entries.*the log is gone"
        ):
            job.wait("4min")
        assert recovery.list_checkpoints(str(tmp_path / "checkpoints"))


def test_a_table_is_read_as_it_was(tmp_path: Path) -> None:
    """By the numbers and times of `history`, whatever a later job has replaced."""
    write_once(tmp_path, 1)
    write_once(tmp_path, 2, if_exists="append")
    table = write_once(tmp_path, 3, if_exists="overwrite")
    commits = [commit for commit in table.history() if commit.files_added]

    assert [(c.rows_added, c.rows, c.shown) for c in commits] == [(1, 1, False), (1, 2, False), (1, 1, True)]
    assert len({c.job_id for c in commits}) == 3
    versions = [[(1,)], [(1,), (2,)], [(3,)]]
    assert [rows(table.to_arrow(as_of=c.number)) for c in commits] == versions
    assert [rows(table.to_arrow(as_of=c.at)) for c in commits if c.at is not None] == versions
    with pytest.raises(tg.TableError, match=r"never had a commit 1: give one of \d+ to \d+"):
        table.to_arrow(as_of=1)
