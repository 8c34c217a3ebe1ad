"""What a function for checkpoints gets when jobs and drivers fail, and others are restored from their checkpoints."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_calls import Calls, HeldCalls, calling, checkpoint_at, interrupted, resumed, running
from local_jobs import (
    NO_RESTART,
    WAIT_S,
    GatedSource,
    WatchedStore,
    config,
    is_commit,
    local,
    nothing,
    opening,
    thought_dead,
)

import tidegate as tg
from tidegate import recovery
from tidegate.actors.local.local_runtime import LocalRuntime
from tidegate.actors.runtimes.running_job import SnapshotRequest
from tidegate.api.job_with_services import JobWithServices
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError
from tidegate.storage.tables.handed_rows import HandedRows


def test_a_restored_job_goes_on_after_what_was_done(tmp_path: Path) -> None:
    """What was marked is not called again, and ids go on, though checkpoints of the new job count from 1."""
    first, second = Calls(), Calls()
    interrupted(tmp_path, first, 10, 20, 30)
    job = resumed(tmp_path, second)

    assert first.rows == list(range(20))
    assert second.rows == list(range(20, 40))
    assert min(second.ids) > max(first.ids)
    assert job.checkpoints()[0].checkpoint_id == 1


def test_what_was_committed_and_not_called_is_called_by_the_next_driver(tmp_path: Path) -> None:
    """Under the ids that it had."""
    held = HeldCalls(ValueError("too late"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.api.checkpoint_calls.LEAVE_WAIT_S", 0.01)
        interrupted(tmp_path, held, 10, 20, 30, called=0)
    second = Calls()
    resumed(tmp_path, second)
    held.go.set()

    assert second.ids[:2] == [2, 3]
    assert [rows for _, rows in second.all[:2]] == [list(range(10)), list(range(10, 20))]
    assert second.rows == list(range(40))


def test_a_call_whose_mark_was_lost_is_made_again_with_the_same_id(tmp_path: Path) -> None:
    """The driver dies between the call and its mark: whoever takes the rows of an id once has each row once."""
    first = Calls()

    def lost(self: HandedRows, commit: object) -> None:
        raise OSError("the driver is gone")

    text = r"for_each_checkpoint \(uid 'out'\): OSError: the driver is gone"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HandedRows, "done", lost)
        with running(tmp_path, first, 10, 20) as now, pytest.raises(tg.JobFailedError, match=text):
            now.job.wait("4min")
    second = Calls()
    resumed(tmp_path, second)

    assert first.all == second.all[:1] == [(2, list(range(10)))]
    second.all += first.all
    assert second.by_id == list(range(40))


def test_rows_that_were_taken_back_come_under_new_ids(tmp_path: Path) -> None:
    """From an older checkpoint: what was called stays done, and its rows come again; others come once."""
    first, second, third = Calls(), Calls(), Calls()
    paths = interrupted(tmp_path, first, 10, 20, 30, 35)
    assert first.ids == [2, 3, 4]

    resumed(tmp_path, second, restore=paths[0])

    assert min(second.ids) > 4
    assert second.rows == list(range(10, 40))
    resumed(tmp_path, third, restore=paths[2])
    assert min(third.ids) > max(second.ids)
    assert third.rows == list(range(30, 40))


def test_rows_of_a_checkpoint_that_was_never_committed_come_once(tmp_path: Path) -> None:
    """The table's storage is away when checkpoints complete: whoever restores the job brings their files along."""
    away = threading.Event()

    def hold(path: str) -> None:
        if is_commit(path):
            assert away.wait(WAIT_S)
            raise StorageError("the table's storage is away")

    with opening(GatedSource(40, gates=[10, 20, 30])) as source:
        runtime = LocalRuntime(lambda url: WatchedStore(url, before=hold, after=nothing))
        env = tg.StreamEnvironment(runtime, 1, options=tg.DataPlaneOptions(source_rows_max=10))
        calling(env, source, Calls())
        submission = env.plan("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        running = runtime.submit(replace(submission, spec=replace(submission.spec, storage_outage_ms=0)))
        for gate in (10, 20):
            source.await_gate(gate)
            running.request(SnapshotRequest(SnapshotKind.CHECKPOINT), WAIT_S)
            source.open_gate(gate)
        away.set()
        progress = running.wait(WAIT_S)
    assert progress is not None
    assert progress.status == "failed"

    calls = Calls()
    resumed(tmp_path, calls)

    assert calls.all[0][1] == list(range(20))
    assert calls.rows == list(range(40))


def test_a_finished_job_whose_function_failed_at_the_end_is_restored(tmp_path: Path) -> None:
    """Nothing is left to process; the restored job hands out what waits, and is over."""

    def fail(number: int) -> None:
        raise ValueError("the database is away")

    with local(1) as env:
        calling(env, GatedSource(40), Calls(fail), retries=0)
        job = env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART)
        with pytest.raises(tg.JobFailedError, match="was called once, and failed: ValueError: the database is away"):
            job.wait("4min")
    calls = Calls()
    resumed(tmp_path, calls)
    assert calls.all == [(2, list(range(40)))]
    resumed(tmp_path, calls)
    assert len(calls.all) == 1


def test_a_job_that_restarts_calls_with_each_row_once(tmp_path: Path) -> None:
    """A task fails between two checkpoints, twice: the driver lives, and no call is repeated."""
    failed: list[int] = []

    def fail_twice(row: dict[str, int]) -> bool:
        if row["x"] in (150, 250) and row["x"] not in failed:
            failed.append(row["x"])
            raise ValueError("again")
        return True

    calls = Calls()
    with opening(GatedSource(400, gates=[120, 200])) as source, local(1, 10) as env:
        env.from_source(source, uid="source").filter(fail_twice).for_each_checkpoint(calls, uid="out")
        restart = tg.RestartStrategy.fixed_delay(9, "1ms")
        job = env.execute("calls", checkpoints=config(tmp_path), restart=restart)
        for gate in (120, 200):
            checkpoint_at(source, job, gate)
        assert job.wait("4min") == "finished"
    assert failed == [150, 250]
    assert calls.rows == list(range(400))


def test_a_driver_whose_job_was_taken_over_makes_no_more_calls(tmp_path: Path) -> None:
    """A newer job owns the table: it makes the calls that wait, and the old one fails."""
    old, new = HeldCalls(), Calls()
    with running(tmp_path, old, 10, 20, 30) as now:
        old.await_call()
        thought_dead(now.job)
        resumed(tmp_path, new)
        old.go.set()
        now.source.open_gate(30)
        with pytest.raises(tg.JobFailedError):
            now.job.wait("4min")

    assert new.ids[:2] == [2, 3]
    assert new.rows == list(range(40))
    assert old.ids == [2]


def test_the_call_that_runs_when_its_job_is_cancelled_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next job is restored at once, and makes its calls when that one is noted."""
    first, second, wait = HeldCalls(), Calls(), JobWithServices.wait

    def go_and_wait(self: JobWithServices, timeout_s: float | None) -> object:
        first.go.set()
        return wait(self, timeout_s)

    with running(tmp_path, first, 10, 20, 30) as now:
        first.await_call()
        now.job.cancel()
        monkeypatch.setattr(JobWithServices, "wait", go_and_wait)
        calling(now.env, GatedSource(40), second)
        job = now.env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART, restore="latest")
        assert job.wait("4min") == "finished"
    assert first.all == [(2, list(range(10)))]
    assert second.rows == list(range(10, 40))


def test_a_relocated_savepoint_knows_what_was_done(tmp_path: Path) -> None:
    """It has the rows that wait, and not those that were handed on: the old place is not needed."""
    first = HeldCalls(ValueError("too late"), from_id=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidegate.api.checkpoint_calls.LEAVE_WAIT_S", 0.01)
        with running(tmp_path / "old", first, 10, 20, 30) as now:
            now.source.await_gate(30)
            first.await_calls(1)
            savepoint = now.job.savepoint(tmp_path / "savepoints", "4min")
            now.job.cancel()
            assert now.job.wait("4min") == "cancelled"
    moved = recovery.relocate(savepoint, str(tmp_path / "new"))
    first.go.set()
    shutil.rmtree(tmp_path / "old")
    shutil.rmtree(tmp_path / "savepoints")

    second = Calls()
    resumed(tmp_path / "later", second, restore=moved)

    assert first.ids[:1] == [2]
    assert [number for number, _ in second.all[:2]] == [3, 4]
    assert second.rows == list(range(10, 40))


def test_collect_does_not_take_over_rows_that_are_gone(tmp_path: Path) -> None:
    """A changed program that collects under the uid is told so, by `check_restore` as well."""
    interrupted(tmp_path, Calls(), 10, 20)
    with local(1) as env:
        env.from_source(GatedSource(40), uid="source").collect(uid="out")
        refused = env.check_restore("latest", "calls", checkpoints=config(tmp_path)).refused
        assert refused is not None
        assert "give collect() another uid" in refused
        with pytest.raises(tg.ConfigurationError, match=r"collect \(uid 'out'\): .* give collect\(\) another uid"):
            env.execute("calls", checkpoints=config(tmp_path), restart=NO_RESTART, restore="latest")
