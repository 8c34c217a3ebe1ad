"""Savepoints, stop with savepoint, master hooks and statistics through the handle of a job."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, WAIT_S, GatedSource, config, local, opening, rows

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.storage.checkpoints.metadata import SnapshotKind

ROWS, GATE = 40, 15


def pipeline(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tuple[tg.OutputTable, tg.OutputTable]:
    """All rows, and final sums."""
    stream = env.from_source(source, uid="source")
    sums = stream.key_by("k").aggregate(n=tg.count(), total=tg.sum("x"), emit="final", name="sums", uid="sums")
    return (
        stream.to_table(str(folder / "all"), uid="all"),
        sums.to_table(str(folder / "sums"), uid="sums-out"),
    )


def counted(sums: tg.OutputTable) -> int:
    """Rows that went into the sums."""
    return sum(sums.to_arrow()["n"].to_pylist())


def finish_from(path: str, folder: Path) -> None:
    """The same program restored from a savepoint, to its end: every row is there once."""
    with opening(GatedSource(ROWS, ROWS)) as source, local() as env:
        tables = pipeline(env, source, folder)
        job = env.execute("stopped", checkpoints=config(folder / "later"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
        assert rows(source.table()) == rows(tables[0].to_arrow())
        assert source.table().num_rows == counted(tables[1])


def test_a_savepoint_is_a_folder_of_its_own_and_the_job_goes_on(tmp_path: Path) -> None:
    """What the job deletes later, its checkpoints, is not needed to restore from it, nor is the folder's place."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute("stopped", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.savepoint(str(tmp_path / "savepoints"))
        assert job.status() == "running"
        assert SnapshotKind.SAVEPOINT is recovery.inspect(path).metadata.kind
        newest = job.statistics().latest_savepoint
        assert newest is not None
        assert (path, SnapshotKind.SAVEPOINT) == (newest.path, newest.kind)
        job.cancel()
        job.wait("4min")
    moved = tmp_path / "moved" / Path(path).name
    shutil.move(path, moved)
    shutil.rmtree(tmp_path / "checkpoints")

    finish_from(str(moved), tmp_path)


def test_a_job_that_is_stopped_ends_suspended_after_its_savepoint(tmp_path: Path) -> None:
    """Without drain nothing is finished; a restored job goes on as if nothing had happened."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        _, sums = pipeline(env, source, tmp_path)
        job = env.execute("stopped", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.stop(savepoint=str(tmp_path / "savepoints"), timeout="4min")

        assert job.status() == job.wait("4min") == "suspended"
        assert sums.to_arrow().num_rows == 0, "final sums come at the end of the data, which this is not"
        metadata = recovery.inspect(path).metadata
        assert (metadata.kind, metadata.final) == (SnapshotKind.SUSPEND, False)

    finish_from(path, tmp_path)


def test_a_job_that_is_drained_ends_finished_with_all_results_of_what_it_has_read(tmp_path: Path) -> None:
    """With drain operators finish before the savepoint, which is final."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        everything, sums = pipeline(env, source, tmp_path)
        job = env.execute("stopped", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        path = job.stop(drain=True, savepoint=str(tmp_path / "savepoints"), timeout="4min")

        assert job.status() == "finished"
        assert everything.to_arrow().num_rows == counted(sums) == 2 * GATE
        assert recovery.inspect(path).metadata.final


def test_a_stop_whose_savepoint_cannot_be_written_leaves_the_job_running(tmp_path: Path) -> None:
    """The job goes on from its newest checkpoint, though its strategy is never to restart."""

    savepoints = tmp_path / "savepoints"
    savepoints.write_text("a file where a folder should be")
    runtime = LocalRuntime()
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, tg.StreamEnvironment(runtime, 2) as env:
        tables = pipeline(env, source, tmp_path)
        plan = env.plan("stopped", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        # Should it be tried again, then not before this test has ended in vain.
        job = runtime.submit(replace(plan, spec=replace(plan.spec, storage_retry_ms=1_000 * 1_000)))
        source.await_gate(GATE)
        with pytest.raises(tg.CheckpointError, match="the savepoint could not be written"):
            job.request(SnapshotRequest(SnapshotKind.SUSPEND, str(savepoints)), WAIT_S)
        source.open_gate(GATE)

        end = job.wait(WAIT_S)
        assert end is not None
        assert (end.status, end.restarts) == ("finished", 1)
        assert rows(source.table()) == rows(tables[0].to_arrow())


def test_a_savepoint_needs_a_folder(tmp_path: Path) -> None:
    """It is named with the call or in the configuration; else the error says what to do."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute("stopped", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        with pytest.raises(tg.ConfigurationError, match=r"state\.savepoints\.dir"):
            job.savepoint()


class Hook:
    """Keeps the number of each checkpoint with it."""

    identifier = "outside"

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self.triggered: list[int] = []
        self.restored: list[tuple[int, bytes | None]] = []

    def trigger(self, checkpoint_id: int, timestamp_ms: int) -> bytes | None:
        if self.broken:
            raise ValueError("not today")
        assert timestamp_ms > 0
        self.triggered.append(checkpoint_id)
        return b"chk-%d" % checkpoint_id

    def restore(self, checkpoint_id: int, data: bytes | None) -> None:
        self.restored.append((checkpoint_id, data))


def test_master_hooks_are_told_of_checkpoints_and_get_their_data_back(tmp_path: Path) -> None:
    """What a hook gives is kept with the checkpoint, and given back before a job is deployed from it."""
    first, second = Hook(), Hook()
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute("hooked", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART, hooks=[first])
        source.await_gate(GATE)
        path = job.trigger_checkpoint("4min")
        assert recovery.inspect(path).metadata.hooks == (("outside", b"chk-1"),)
        job.cancel()
        job.wait("4min")
    assert (first.triggered, first.restored) == ([1], [])

    with opening(GatedSource(ROWS, ROWS)) as source, local() as env:
        pipeline(env, source, tmp_path)
        env.add_master_hook(second)
        job = env.execute("hooked", checkpoints=config(tmp_path / "later"), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
    assert second.restored == [(1, b"chk-1")]


def test_a_hook_that_raises_fails_the_checkpoint(tmp_path: Path) -> None:
    """The error says which hook, and what it raised; tolerated, the job goes on."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute(
            "hooked",
            checkpoints=config(tmp_path / "checkpoints", tolerable_failed_checkpoints=3),
            restart=NO_RESTART,
            hooks=[Hook(broken=True)],
        )
        source.await_gate(GATE)
        with pytest.raises(tg.CheckpointError, match="master hook 'outside' raised ValueError: not today"):
            job.trigger_checkpoint("4min")
        assert job.status() == "running"


def test_hooks_with_one_identifier_are_refused(tmp_path: Path) -> None:
    """Their data in a checkpoint could not be told apart."""
    with opening(GatedSource(ROWS, ROWS)) as source, local() as env:
        pipeline(env, source, tmp_path)
        with pytest.raises(tg.ConfigurationError, match="two master hooks have the identifier 'outside'"):
            env.execute("hooked", checkpoints=config(tmp_path / "checkpoints"), hooks=[Hook(), Hook()])


def test_statistics_tell_of_checkpoints_while_the_job_runs_and_after(tmp_path: Path) -> None:
    """Counts, sizes and durations of each vertex, and the same key figures as a dict."""
    with opening(GatedSource(ROWS, ROWS, gates=[GATE])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute("counted", checkpoints=config(tmp_path / "checkpoints"), restart=NO_RESTART)
        source.await_gate(GATE)
        job.trigger_checkpoint("4min")
        during = job.statistics()
        source.open_gate(GATE)
        assert job.wait("4min") == "finished"

    assert (during.triggered, during.completed, during.failed, during.in_progress) == (1, 1, 0, 0)
    newest = during.latest_completed
    assert newest is not None
    assert {v.vertex for v in newest.vertices} == {task.vertex for task in during.subtasks}
    assert newest.tasks == newest.acknowledged == len(during.subtasks)
    assert newest.state_bytes == sum(s.state_bytes for s in during.subtasks.values()) > 0
    metrics = job.metrics()
    assert metrics["checkpoint.count"] == job.statistics().completed >= 2
    assert metrics["checkpoint.failed_count"] == 0
    assert metrics["checkpoint.duration"] >= 0
