"""What `test_ray_on_spark.py` looks at: a driver with a Spark cluster of its own, and Ray in the executors of that.

A process has one Spark and one Ray, and that of the tests has others. So this is a program. It prints a line of JSON
for each thing that it has done.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import ray
from pyspark.sql import SparkSession
from ray_jobs import Gated
from same_program import bounded, streamed
from waiting import until

import tidegate as tg
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.spark_bridge import ensure_java
from tidegate.storage.errors import TidegateError

_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
ROWS = 2_000
_began = time.monotonic()


def tell(**facts: object) -> None:
    """A line for the test."""
    print(json.dumps({**facts, "second": round(time.monotonic() - _began, 1)}), flush=True)


def start_spark() -> SparkSession:
    """Three executors of one core: two for Ray, and one for Spark's own tasks."""
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["JDK_JAVA_OPTIONS"] = f"{os.environ.get('JDK_JAVA_OPTIONS', '')} {_JVM}"
    # Ray lets ten seconds pass between two nodes on a machine, because of their ports.
    os.environ["RAY_ON_SPARK_RAY_WORKER_NODE_STARTUP_INTERVAL"] = "1"
    ensure_java()
    builder = SparkSession.builder.master("local-cluster[3,1,512]").appName("on-spark-tests")
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.log.level": "ERROR",
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


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
    executors = [executor_of(task.pid) for task in job.tasks()]
    os.kill(executors[1], signal.SIGKILL)
    until("another attempt", lambda: job.progress().attempt > 0, job.progress)
    gate.touch()
    status = job.wait("4min")
    tell(lost=executors[1], executors=executors, status=status, rows=sorted(out.to_arrow()["x"].to_pylist()) == list(range(ROWS)))


def lose_spark(env: tg.StreamEnvironment, folder: Path) -> None:
    """Stop the session while a job runs in its executors; the job ends, and says why."""
    rows = pa.table({"x": range(ROWS)})
    env.from_source(Gated(MemorySource(rows, 2), folder / "no gate"), uid="rows").to_table(str(folder / "lost"))
    checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
    job = env.execute("without Spark", checkpoints=checkpoints)
    until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
    env.spark.stop()
    try:
        ended = job.wait("2min")
    except TidegateError as error:
        ended = str(error)
    tell(without_spark=ended)


def main(folder: Path) -> None:
    """All of it."""
    spark = start_spark()
    tell(spark=spark.sparkContext.master)
    options = tg.DataPlaneOptions(source_rows_max=500)
    with tg.StreamEnvironment.on_spark(
        spark,
        options=options,
        standbys=0,
        object_store_memory="80mb",
        include_dashboard=False,
        ray_options={"log_to_driver": False},
    ) as env:
        tell(parallelism=env.parallelism, nodes=sum(bool(node["Alive"]) for node in ray.nodes()))
        tell(bounded=bounded(env, folder / "bounded"))
        tell(streamed=streamed(env, folder / "streamed"))
        lose_an_executor(env, folder)
        lose_spark(env, folder)
    tell(closed=ray.is_initialized(), token=os.environ.get("RAY_AUTH_TOKEN"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
