"""What `test_ray_on_spark.py` looks at: a driver with a Spark cluster of its own, and Ray in the executors of that.

A process has one Spark and one Ray, and that of the tests has others. So this is a program. It prints a line of JSON
for each thing that it has done.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patient_ray
import pyarrow as pa
import ray
from pyspark.sql import SparkSession
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray_jobs import Gated
from same_program import bounded, streamed
from story import tell
from topology import spark_on, standalone
from waiting import until

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayOnSparkSession, ensure_java
from tidegate.storage.errors import TidegateError

ROWS = 2_000


@contextmanager
def started_spark() -> Iterator[SparkSession]:
    """A master and a worker, and two executors of three cores: two of them for Ray, and one for Spark's own tasks."""
    # Ray lets ten seconds pass between two nodes on a machine, because of their ports.
    os.environ["RAY_ON_SPARK_RAY_WORKER_NODE_STARTUP_INTERVAL"] = "1"
    ensure_java()
    configs = {"spark.sql.shuffle.partitions": "2", "spark.log.level": "ERROR"}
    with standalone(2, 3, 512) as master, spark_on(master, 2, 3, 512, configs) as spark:
        yield spark


def tokens_of_nodes() -> list[str | None]:
    """What the processes have as their token that Ray starts in executors."""
    look: Any = ray.remote(num_cpus=0)(lambda: os.environ.get("RAY_AUTH_TOKEN"))
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    there = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [ray.get(look.options(scheduling_strategy=each).remote()) for each in there]


def lines_of_descent(pid: int) -> Iterator[tuple[int, str]]:
    """A process and those that it descends from: id and command line."""
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        yield pid, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        pid = int((folder / "stat").read_text().rpartition(")")[2].split()[1])


def executor_of(pid: int) -> int:
    """The process of the Spark executor in which a process of Ray lives."""
    return next(each for each, line in lines_of_descent(pid) if "CoarseGrainedExecutorBackend" in line)


def lose_an_executor(env: tg.StreamEnvironment, folder: Path) -> None:
    """Kill the executor in which the second subtask runs; the job goes on and finishes."""
    gate = folder / "gate"
    rows = pa.table({"x": range(ROWS)})
    out = env.from_source(Gated(MemorySource(rows, 2), gate), uid="rows").to_table(str(folder / "rows"), uid="table")
    checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
    job = env.execute("loss", checkpoints=checkpoints)
    until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
    executors = [executor_of(task.pid) for task in job.processes()]
    os.kill(executors[1], signal.SIGKILL)
    until("another attempt", lambda: job.progress().attempt > 0, job.progress)
    gate.touch()
    status = job.wait("4min")
    once = sorted(out.to_arrow()["x"].to_pylist()) == list(range(ROWS))
    tell(lost=executors[1], executors=executors, status=status, rows_once=once)


def lose_spark(env: tg.StreamEnvironment, folder: Path) -> None:
    """Stop the session while a job runs in its executors; the job ends, and says why."""
    rows = pa.table({"x": range(ROWS)})
    env.from_source(Gated(MemorySource(rows, 2), folder / "no gate"), uid="rows").to_table(str(folder / "lost"))
    checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
    job = env.execute("without Spark", checkpoints=checkpoints)
    until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
    env.spark.stop()
    try:
        ended = job.wait("4min")
    except TidegateError as error:
        ended = str(error)
    tell(ended=ended)


def main(folder: Path) -> None:
    """All of it."""
    patient_ray.await_sessions(RayOnSparkSession)
    with started_spark() as spark:
        tell(master=spark.sparkContext.master)
        with tg.StreamEnvironment.on_spark(
            spark,
            options=tg.DataPlaneOptions(source_rows_max=500),
            standbys=0,
            object_store_memory="80mb",
            include_dashboard=False,
            ray_options={"log_to_driver": False},
        ) as env:
            node: Any = ray._private.worker._global_node
            folder_of_ray = Path(node.get_temp_dir_path())
            tell(parallelism=env.parallelism, token=os.environ["RAY_AUTH_TOKEN"], tokens=tokens_of_nodes())
            tell(bounded=bounded(env, folder / "bounded"))
            tell(streamed=streamed(env, folder / "streamed"))
            lose_an_executor(env, folder)
            lose_spark(env, folder)
        tell(connected=ray.is_initialized(), token_after=os.environ.get("RAY_AUTH_TOKEN"))
        tell(folder_left=folder_of_ray.exists())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
