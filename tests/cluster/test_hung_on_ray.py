"""Processes that live and do not get on: found, named with what they were doing, and replaced for one restart."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pyarrow as pa
from ray_jobs import keyed_job, until

from tidegate.actors.drivers.job_context import HeartbeatSettings
from tidegate.actors.ray.health_endpoint import state_of
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.runtimes.running_job import JobProgress
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.spark_bridge import RayDPSession

WAIT_S = 240.0
AT_ONCE = RestartStrategy.fixed_delay(attempts=3, delay=0)
SILENT = HeartbeatSettings(interval_ms=500, timeout_ms=15_000)
BUSY = HeartbeatSettings(interval_ms=500, timeout_ms=60_000, call_timeout_ms=5_000)


def running_with_a_checkpoint(progress: JobProgress) -> bool:
    """Whether the present attempt has processed rows, and there is something to restore."""
    return progress.status == "running" and progress.completed_checkpoints > 0 and "totals" in progress.rows_in


def all_slots(session: RayDPSession) -> SlotPlacement:
    """Those of the session."""
    return SlotPlacement.of_session(session)


def test_a_stopped_process_is_replaced_for_one_restart(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """After SIGSTOP the job goes on in a spare process, says which task hung, and no row is lost or doubled."""
    gate = tmp_path / "gate"
    keyed = keyed_job(tmp_path, gate, name="stopped", restart=AT_ONCE, parallelism=1, heartbeats=SILENT)
    runtime = RayRuntime(all_slots(raydp_session), standbys=1)
    try:
        job = runtime.submit(keyed.submission)
        until("a standby", job.progress, lambda _: job.standbys() == 1)
        until("a checkpoint", job.progress, running_with_a_checkpoint)
        victim = {process.task: process for process in job.tasks()}[keyed.submission.spec.tasks[-1]]
        os.kill(victim.pid, signal.SIGSTOP)
        until("a restart", job.progress, lambda p: p.restarts == 1 and running_with_a_checkpoint(p))
        after = {process.task: process for process in job.tasks()}
        assert after[victim.task].actor == "stopped/standby#0"
        until("the end of the process", job.progress, lambda _: state_of(victim.pid) in ("", "Z"))
        gate.touch()
        end = job.wait(WAIT_S)
        assert end is not None
        assert (end.status, end.restarts) == ("finished", 1)
        assert end.last_failure is not None
        task, _, failure = end.last_failure.partition(": ")
        assert task in {str(each) for each in keyed.submission.spec.tasks}
        assert failure.startswith(f"it hangs: the process {victim.actor}, pid {victim.pid}, has not")
        assert "it is stopped, by a signal (SIGSTOP)" in end.last_failure
        assert keyed.table().equals(keyed.expected)
    finally:
        runtime.stop()


def test_a_function_that_never_returns_is_named_and_costs_one_restart(
    raydp_session: RayDPSession, tmp_path: Path
) -> None:
    """Heartbeats are answered all the time; it is the call that takes too long, and the failure shows where it is."""
    gate, fuse = tmp_path / "gate", tmp_path / "fuse"
    fuse.touch()

    def waits_for_ever(batch: pa.RecordBatch) -> pa.RecordBatch:
        if fuse.exists():
            fuse.unlink()
            threading.Event().wait()
        return batch

    keyed = keyed_job(
        tmp_path, gate, name="busy", function=waits_for_ever, restart=AT_ONCE, parallelism=1, heartbeats=BUSY
    )
    runtime = RayRuntime(all_slots(raydp_session), standbys=0)
    try:
        gate.touch()
        job = runtime.submit(keyed.submission)
        end = job.wait(WAIT_S)
        assert end is not None
        assert (end.status, end.restarts) == ("finished", 1)
        assert end.last_failure is not None
        assert end.last_failure.startswith(f"{keyed.submission.spec.tasks[0]}: it hangs: the process busy/slot 1 of 1")
        assert "has been busy with one call" in end.last_failure
        assert "waits_for_ever (" in end.last_failure
        assert keyed.table().equals(keyed.expected)
    finally:
        runtime.stop()
