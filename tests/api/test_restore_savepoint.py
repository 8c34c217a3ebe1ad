"""A job is restored from a savepoint, wherever that lies and whatever became of the checkpoints of its job."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import polars as pl
import pyarrow as pa
import pytest
from any_permit import ANY_PERMIT
from local_jobs import NO_RESTART, GatedSource, await_events, config, finish, local, opening

import tidegate as tg
from tidegate import recovery
from tidegate.recovery.savepoints import write_savepoint
from tidegate.storage.checkpoints.metadata import create_metadata
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.table_files import read_table

ROWS, STOP = 60, 20


def program(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tuple[tg.OutputTable, tg.CollectedRows]:
    """Running sums per key in a table, and all rows collected."""
    rows = env.from_source(source, uid="source")
    sums = rows.key_by("k").aggregate(total=tg.sum("x"), uid="sums")
    return sums.to_table(str(folder / "out"), uid="out", mode="upsert", keys=("k",)), rows.collect(uid="all")


def saved(folder: Path, stop: int = STOP, restore: str | None = None) -> str:
    """A job that stops in the middle after a checkpoint, and a savepoint of that checkpoint; its path."""
    with opening(GatedSource(ROWS, ROWS, gates=[stop])) as source, local(2, 7) as env:
        program(env, source, folder)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        source.await_gate(stop)
        checkpoint = job.trigger_checkpoint("4min")
        job.cancel()
        assert job.wait("4min") == "cancelled"
    metadata = recovery.inspect(checkpoint).metadata
    return write_savepoint(open_store, str(folder / "checkpoints"), str(folder / "savepoints"), metadata, ANY_PERMIT)


def resume(folder: Path, restore: str, parallelism: int = 2) -> tg.Job:
    """The same program to its end; what it writes is right then."""
    source = GatedSource(ROWS, ROWS)
    with local(parallelism) as env:
        table, collected = program(env, source, folder)
        job = env.execute("job", checkpoints=config(folder / "checkpoints"), restart=NO_RESTART, restore=restore)
        assert job.wait("4min") == "finished"
    xs = source.table()["x"].to_pylist()
    expected = {k: sum(x for x in xs if x % 5 == k) for k in range(5)}
    found = table.to_arrow()
    assert expected == dict(zip(found["k"].to_pylist(), found["total"].to_pylist(), strict=True))
    assert sorted(xs) == sorted(collected.to_arrow()["x"].to_pylist())
    return job


def delete_checkpoints(folder: Path) -> None:
    """All that the jobs have checkpointed; what their tasks own stays."""
    for path in (folder / "checkpoints").glob("*/chk-*"):
        shutil.rmtree(path)


def submitted_restore(job: tg.Job) -> str:
    """What a job was restored from."""
    submitted = next(event for event in job.events() if type(event).__name__ == "JobSubmitted")
    pointer: str = submitted.spec.restore.pointer
    return pointer


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("suffix", ["", "/_metadata"])
def test_a_job_goes_on_from_a_savepoint(tmp_path: Path, parallelism: int, suffix: str) -> None:
    """Moved elsewhere, without the checkpoints of its job, at any parallelism; no row is lost or counted twice."""
    path = saved(tmp_path)
    moved = str(shutil.move(path, tmp_path / "elsewhere" / Path(path).name))
    delete_checkpoints(tmp_path)

    job = resume(tmp_path, f"{moved}{suffix}", parallelism)

    assert submitted_restore(job) == moved
    assert recovery.inspect(job.checkpoints()[-1].path).metadata.restored_from == moved


def test_a_line_of_jobs_goes_through_savepoints(tmp_path: Path) -> None:
    """Rows that the first job had collected are there after the third, though the savepoint between them is gone."""
    first = saved(tmp_path)
    second = saved(tmp_path, STOP + 20, restore=first)
    shutil.rmtree(first)
    delete_checkpoints(tmp_path)

    resume(tmp_path, second)


def test_rows_after_the_savepoint_are_made_again(tmp_path: Path) -> None:
    """The job went on and wrote more; restored from the savepoint, these rows are hidden and written once."""
    path = saved(tmp_path)
    saved(tmp_path, STOP + 20, restore="latest")

    resume(tmp_path, path)


def test_files_that_were_not_committed_belong_to_the_savepoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job took the table before they were committed: whoever restores the savepoint shows them nevertheless."""
    # As when the job sleeps for longer than its lease.
    monkeypatch.setattr("tidegate.api.tables.output_tables.is_alive", lambda *_: False)

    def append(env: tg.StreamEnvironment, source: GatedSource) -> None:
        env.from_source(source, uid="source").to_table(str(tmp_path / "out"), uid="out", if_exists="append")

    with opening(GatedSource(ROWS, gates=[10, 20])) as source, local(1) as env:
        append(env, source)
        old = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(10)
        old.trigger_checkpoint("4min")
        await_events(old, "SinksCommitted", 1)
        with local(1) as other:
            other.from_batches(pa.table({"k": [0], "x": [1000]}, GatedSource.schema)).to_table(
                str(tmp_path / "out"), if_exists="append"
            )
            finish(other, tmp_path / "other checkpoints")
        source.open_gate(10)
        source.await_gate(20)
        fenced = old.trigger_checkpoint("4min")
        with pytest.raises(tg.JobFailedError, match="is owned by"):
            old.wait("4min")
    metadata = recovery.inspect(fenced).metadata
    path = write_savepoint(
        open_store, str(tmp_path / "checkpoints"), str(tmp_path / "savepoints"), metadata, ANY_PERMIT
    )
    delete_checkpoints(tmp_path)

    with local(1) as env:
        append(env, GatedSource(ROWS))
        job = env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"

    assert sorted(read_table(open_store(str(tmp_path / "out")))["x"].to_pylist()) == [*range(ROWS), 1000]


def test_a_savepoint_whose_checkpoint_was_given_up_is_refused(tmp_path: Path) -> None:
    """Its job has gone on without the rows that it covers, and may have deleted their files. A copy would hide that."""
    path = saved(tmp_path)
    metadata = recovery.inspect(path).metadata
    store = open_store(str(tmp_path / "checkpoints"))
    store.delete(f"{metadata.job_id}/chk-{metadata.checkpoint_id}/_metadata")
    create_metadata(store, replace(metadata, operators=(), subtasks=(), void=True))

    with pytest.raises(tg.ConfigurationError, match="was given up"):
        resume(tmp_path, path)
    with pytest.raises(tg.ConfigurationError, match="was given up"):
        recovery.relocate(path, str(tmp_path / "elsewhere"))
    with pytest.raises(tg.ConfigurationError, match="was given up"):
        recovery.SavepointWriter(str(tmp_path / "repaired"), base=path)


def test_a_path_without_a_savepoint_is_refused(tmp_path: Path) -> None:
    """The error says where to look."""
    missing = str(tmp_path / "savepoints" / "savepoint-job-12345678-3")

    with local(1) as env:
        program(env, GatedSource(ROWS), tmp_path)
        with pytest.raises(tg.ConfigurationError, match=f"no completed .* list {tmp_path}/savepoints` lists"):
            env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=missing)


def _files(folder: Path) -> list[str]:
    return sorted(str(found) for found in folder.rglob("*") if found.is_file())


def _changed(env: tg.StreamEnvironment, folder: Path, uid: str, evolution: Literal["add_columns"] | None) -> None:
    """The program with one more column in its table, and one more in the collected rows."""
    rows = env.from_source(GatedSource(ROWS, ROWS), uid="source")
    sums = rows.key_by("k").aggregate(total=tg.sum("x"), n=tg.count(), uid="sums")
    sums.to_table(str(folder / "out"), uid="out", mode="upsert", keys=("k",), schema_evolution=evolution)
    rows.with_columns(twice=pl.col("x") * 2).collect(uid=uid)


@pytest.mark.parametrize(
    ("uid", "evolution", "refused"),
    [
        ("all again", None, "only the job has a column 'n'"),
        (
            "all",
            "add_columns",
            "with other columns: only the job has a column 'twice'. Give collect() another uid, so that it begins",
        ),
        ("all again", "add_columns", None),
    ],
)
def test_other_columns_of_tables_and_collected_rows_are_found_before_the_restore(
    uid: str, evolution: Literal["add_columns"] | None, refused: str | None, tmp_path: Path
) -> None:
    """`check_restore` reports what `execute` raises, and no file has changed then."""
    path = saved(tmp_path)
    before = _files(tmp_path)
    with local(2) as env:
        _changed(env, tmp_path, uid, evolution)
        report = env.check_restore(path)
        assert _files(tmp_path) == before
        if refused is None:
            assert report.ok
            assert (
                env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=path).wait("4min")
                == "finished"
            )
        else:
            assert report.refused is not None
            assert refused in report.refused
            with pytest.raises(tg.TableError) as raised:
                env.execute("job", checkpoints=config(tmp_path / "checkpoints"), restore=path)
            assert str(raised.value) == report.refused
            assert _files(tmp_path) == before
