"""On Ray the processes of a job are forked from one server on their node, unless the job says that they are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from ray import cloudpickle

import tidegate as tg
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCHEMA = pa.schema([("pid", pa.int64()), ("parent", pa.int64()), ("command", pa.string()), ("job", pa.string())])


class WhoIsIt(tg.BatchFunction):
    """In place of each batch a row of the process that has it."""

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Its id, its parent's, and what that was started with."""
        parent = os.getppid()
        command = Path(f"/proc/{parent}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        row = {"pid": os.getpid(), "parent": parent, "command": command, "job": os.environ["RAY_JOB_ID"]}
        return pa.RecordBatch.from_pylist([row], schema=SCHEMA)


@pytest.mark.parametrize("forked", [True, False])
def test_tasks_of_a_job_have_one_parent(
    raydp_session: RayDPSession, tmp_path: Path, forked: bool, request: pytest.FixtureRequest
) -> None:
    """Two tasks are two processes of the same server; where the setting says so, each was started by Ray alone."""
    if forked and request.config.getoption("no_fork"):
        pytest.skip("--no-fork")
    bundles = tuple(raydp_session.bundle_of_slot(slot) for slot in range(raydp_session.slots))
    runtime = RayRuntime(SlotPlacement(raydp_session.placement_group, bundles), standbys=0)
    rows = pa.table({"k": pa.array(range(100))})
    with tg.StreamEnvironment(runtime, parallelism=2) as env:
        found = env.from_source(MemorySource(rows, 4)).map_batches(WhoIsIt(), schema=SCHEMA).collect()
        config = tg.CheckpointConfig(storage=str(tmp_path), **({} if forked else {"fork_processes": False}))
        assert env.execute("forked", checkpoints=config).wait("4min") == "finished"
        seen = found.to_arrow().to_pylist()
    assert len({row["pid"] for row in seen}) == 2
    assert len({row["job"] for row in seen}) == 1
    assert len({row["parent"] for row in seen}) == 1
    assert all(("fork_server" in row["command"]) == forked for row in seen)
