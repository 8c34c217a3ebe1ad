"""Regions on Ray: a pipeline whose processes die leaves those of another one alone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow as pa
from ray_jobs import Gated
from waiting import until

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime
from tidegate.actors.runtimes.running_job import TaskProcessInfo
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

DEATHS = 2
TASKS = 4
"""A source and a sink in each pipeline."""
WAIT_S = 240


def test_a_pipeline_that_is_killed_leaves_the_other_one_alone(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Its processes and its attempt stay, through all restarts of the other one; no row is lost or doubled."""
    assert raydp_session.slots > 0
    runtime = RayRuntime(standbys=0)
    try:
        check(runtime, tmp_path)
    finally:
        runtime.stop()


def check(runtime: RayRuntime, folder: Path) -> None:
    """Two pipelines, of which one dies again and again."""
    rows, gate = pa.table({"k": list(range(2_000))}), folder / "gate"
    env = tg.StreamEnvironment(runtime, 1)
    streams = {
        name: env.from_source(Gated(MemorySource(rows, 2), gate), uid=name, name=name, slot_sharing_group=name)
        .rebalance()
        .collect()
        for name in ("steady", "flaky")
    }
    job = env.execute(
        "two on ray",
        checkpoints=tg.CheckpointConfig(storage=str(folder / "checkpoints"), interval="150ms"),
        restart=tg.RestartStrategy.fixed_delay(DEATHS, "0ms"),
    )

    def runs_again(restarts: int) -> bool:
        progress = job.progress()
        return progress.status == "running" and progress.restarts == restarts and len(job.processes()) == TASKS

    until("all processes", lambda: runs_again(0), job.progress)
    steady: set[TaskProcessInfo] | None = None
    for death in range(1, DEATHS + 1):
        victim = next(process for process in job.processes() if process.task.vertex == "flaky")
        os.kill(victim.pid, signal.SIGKILL)
        until("a restart", lambda death=death: runs_again(death), job.progress)  # type: ignore[misc]
        now = {process for process in job.processes() if process.attempt == 0}
        assert {process.task.vertex for process in now} >= {"steady"}
        assert [process.attempt for process in job.processes() if process not in now] == [death, death]
        assert steady in (None, now), "neither their attempt nor their processes change"
        steady = now
    gate.touch()
    assert job.wait(f"{WAIT_S}s") == "finished"
    for stream in streams.values():
        assert stream.to_arrow().sort_by("k").equals(rows)
