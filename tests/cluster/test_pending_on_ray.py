"""Ray reports the tasks that it cannot place, and how much room there is; a job reports who may wait for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
from waiting import until

import tidegate as tg
from tidegate.actors.ray.resource_waits import look_at_demand
from tidegate.storage.errors import JobFailedError

CPUS = 4_321


@pytest.mark.slow
def test_tasks_without_room_are_described(plain_ray: None) -> None:
    """Until they are cancelled."""
    large: Any = ray.remote(num_cpus=CPUS)(lambda: None)
    waiting = [large.remote() for _ in range(2)]
    until("the pending tasks", lambda: f"2 that need {CPUS} CPU each" in str(look_at_demand()), look_at_demand)
    assert f"No node has {CPUS} CPU, not even when it is empty. Free on the nodes" in str(look_at_demand())
    for reference in waiting:
        ray.cancel(reference)
    until("no pending tasks", lambda: f"need {CPUS} CPU" not in str(look_at_demand()), look_at_demand)


@pytest.mark.slow
def test_functions_that_wait_for_a_task_without_room_are_named(plain_ray: None, tmp_path: Path) -> None:
    """One that waits in `ray.get`, and one of `map_async` that awaits the task, with what Ray cannot place.

    The error of a call that had no result in time names it too.
    """
    large: Any = ray.remote(num_cpus=CPUS)(lambda: None)
    schema = {"x": int}

    def get(batch: pa.RecordBatch) -> pa.RecordBatch:
        ray.get(large.remote())
        return batch

    async def wait(row: dict[str, Any]) -> dict[str, Any]:
        await large.remote()
        return row

    checkpoints = tg.CheckpointConfig(storage=str(tmp_path / "checkpoints"))
    with tg.StreamEnvironment.ray(standbys=0) as env:
        rows = [env.from_batches(pa.table({"x": [0]}), uid=f"rows-{number}") for number in range(2)]
        rows[0].map_batches(get, schema=schema).to_table(str(tmp_path / "got"), uid="got")
        rows[1].map_async(wait, schema=schema, timeout="1h").to_table(str(tmp_path / "awaited"), uid="awaited")
        # A process for each function: both wait at once.
        job = env.execute("waits", progress="off", checkpoints=checkpoints, slot_sharing=False)
        until(
            "both functions",
            lambda: " and 1 more, in one call for " in str(job.progress().waits_for),
            job.progress,
        )
        waits_for = str(job.progress().waits_for)
        assert waits_for.startswith("a function in waits/rows-")
        assert f"while Ray has pending tasks or actors: 2 that need {CPUS} CPU each. " in waits_for

        late = env.from_batches(pa.table({"x": [0]})).map_async(wait, schema=schema, timeout="1ms")
        late.to_table(str(tmp_path / "late"))
        with pytest.raises(JobFailedError) as failed:
            env.execute("late", checkpoints=checkpoints, restart=tg.RestartStrategy.none()).wait("4min")
        assert "no result within 0.001 s (timeout=), while Ray has pending tasks or actors: " in str(failed.value)
        assert f"need {CPUS} CPU each" in str(failed.value)
        assert "leave CPUs free that are not slots" in str(failed.value)
        job.cancel()
