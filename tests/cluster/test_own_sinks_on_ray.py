"""Calls that wait and sinks of the user's on Ray: processes are killed in the middle, and each row is written once."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import committing_sinks
import pyarrow as pa
import sink_contract
from ray import cloudpickle

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.spark_bridge import RayDPSession

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(committing_sinks)
cloudpickle.register_pickle_by_value(sink_contract)

ROWS = pa.table({"k": [x % 5 for x in range(3_000)], "x": list(range(3_000))})


def test_rows_are_written_once_through_the_loss_of_a_process(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Writers run in the processes of tasks, the committer in that of the coordinator; a process dies in the middle.

    Calls of `map_async` are under way in it: those whose results no checkpoint has are made again.
    """
    flag = tmp_path / "killed"

    async def dies_once(row: dict[str, int]) -> dict[str, int]:
        await asyncio.get_running_loop().run_in_executor(None, flag.exists)
        if row["x"] == 2_000 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return row

    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    sink = sink_contract.SqliteSink(tmp_path / "out")
    with tg.StreamEnvironment(runtime, parallelism=2, options=tg.DataPlaneOptions(source_rows_max=100)) as env:
        rows = env.from_batches(ROWS, splits=2).map_async(dies_once, schema=ROWS.schema, capacity=50, ordered=False)
        rows.to_sink(sink, uid="sink", flush_bytes=2_000)
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("own sinks", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(3, 0))
        assert job.wait("4min") == "finished"
    assert flag.exists()
    assert sorted(row["x"] for row in sink.rows()) == list(range(3_000))  # type: ignore[type-var]
    assert sink.rows("staged") == []


def test_subtasks_commit_once_through_the_loss_of_their_process(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """A process dies before its commit, and another after it: the restored tasks commit the same checkpoint again."""
    runtime = RayRuntime(SlotPlacement.of_session(raydp_session), standbys=0)
    sink = committing_sinks.DyingLedger(tmp_path / "out")
    with tg.StreamEnvironment(runtime, parallelism=2, options=tg.DataPlaneOptions(source_rows_max=100)) as env:
        env.from_batches(ROWS, splits=2).to_sink(sink, uid="sink", flush_bytes=2_000)
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("committing", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(5, 0))
        assert job.wait("4min") == "finished"
    assert (tmp_path / "out.before").exists()
    assert (tmp_path / "out.after").exists()
    assert sorted(row["x"] for row in sink.rows()) == list(range(3_000))  # type: ignore[type-var]
