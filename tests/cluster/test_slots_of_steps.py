"""Steps with resources on Ray: their processes have what they ask for, also after a failure, and give it back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import ray
from ray import cloudpickle
from ray_jobs import Gated
from waiting import until

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

ROWS = pa.table({"k": range(2_000)})
SHOWN = pa.schema({"k": pa.int64(), "gpus": pa.string(), "pid": pa.int64(), "group": pa.string()})
WAIT_S = 240

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Look(tg.BatchFunction):
    """Adds to rows what the process that they pass has of Ray."""

    def open(self, context: tg.BatchContext) -> None:
        where = ray.get_runtime_context()
        self.seen = (
            ",".join(where.get_accelerator_ids()["GPU"]) + "/" + os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            os.getpid(),
            where.get_placement_group_id() or "",
        )

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = batch.num_rows
        columns = [pa.array([value] * rows) for value in self.seen]
        return pa.RecordBatch.from_arrays([batch["k"], *columns], schema=SHOWN)


def test_a_step_with_a_gpu_has_it_after_a_kill_too(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """In the same bundle, which only its job has; rows count once, and all is given back at the end."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    try:
        check(runtime, raydp_session.placement_group.id.hex(), tmp_path)
    finally:
        runtime.stop()


def check(runtime: RayRuntime, common: str, folder: Path) -> None:
    """One job, of which the process with the GPU is killed."""
    env, gate = tg.StreamEnvironment(runtime, 1), folder / "gate"
    rows = env.from_source(Gated(MemorySource(ROWS, 2), gate), uid="rows", name="rows")
    seen = rows.map_batches(Look(), schema=SHOWN, name="score", uid="score", num_gpus=1).collect()
    job = env.execute(
        "with a gpu",
        checkpoints=tg.CheckpointConfig(storage=str(folder / "checkpoints"), interval="150ms"),
        restart=tg.RestartStrategy.fixed_delay(3, "0ms"),
    )
    until("rows in a checkpoint", lambda: (job.progress().last_checkpoint or 0) > 1, job.progress)
    victim = next(process for process in job.processes() if process.task.vertex == "score")
    assert ray.available_resources().get("GPU", 0.0) == 0.0
    os.kill(victim.pid, signal.SIGKILL)
    until("a restart", lambda: job.progress().restarts == 1 and job.progress().status == "running", job.progress)
    successor = next(process for process in job.processes() if process.task.vertex == "score")
    assert successor.actor.endswith("/score (1/1)#1")
    env.from_batches(ROWS).map_batches(Look(), schema=SHOWN, name="more", num_gpus=2).collect()
    with pytest.raises(tg.ConfigurationError, match=r"for more has no node\. No node has 2 GPU, not even when"):
        env.execute("too much", checkpoints=tg.CheckpointConfig(storage=str(folder / "too much")))
    gate.touch()
    assert job.wait(f"{WAIT_S}s") == "finished"
    found = seen.to_arrow()
    assert sorted(found["k"].to_pylist()) == ROWS["k"].to_pylist()
    assert set(found["gpus"].to_pylist()) == {"0/0"}
    assert set(found["pid"].to_pylist()) == {victim.pid, successor.pid}
    (group,) = set(found["group"].to_pylist())
    assert group not in ("", common)
    until("the GPU is free", lambda: ray.available_resources().get("GPU", 0.0) == 1.0, ray.available_resources)
