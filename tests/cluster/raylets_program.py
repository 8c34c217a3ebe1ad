"""What `test_raydp_on_raylets.py` looks at: RayDP twice, one after the other, on a Ray of several nodes that goes on.

The nodes are raylets on this machine, which ask for no token, while this process has one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import patient_ray
import pyarrow as pa
import ray
from ray.cluster_utils import Cluster
from ray_jobs import Gated
from same_program import bounded
from story import tell
from waiting import until

import tidegate as tg
from tidegate.connectors.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession, ensure_java

ROWS = 2_000
STORE_BYTES = 100 * 2**20
EXECUTOR_NAME = "raydp-executor"


@contextmanager
def raylets() -> Iterator[str]:
    """The address of a Ray of two nodes, with room for an executor and its slot each, and for RayDP's master."""
    ensure_java()
    # Ray's types know nothing of its clusters for tests.
    make: Any = Cluster
    # At the address of the machine: Ray does not find nodes again that are at that of the loopback.
    head = {"num_cpus": 3, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = make(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def raydp(address: str, executors: int) -> Iterator[tg.StreamEnvironment]:
    """Executors on different nodes, with a slot each."""
    with tg.StreamEnvironment.raydp(
        executors=executors,
        executor_cores=1,
        executor_memory="512m",
        slots_per_executor=1,
        placement="spread",
        standbys=0,
        ray_address=address,
        ray_options={"log_to_driver": False},
        spark_configs={"spark.sql.shuffle.partitions": "2"},
        include_dashboard=False,
    ) as env:
        yield env


def nodes_of_executors() -> list[str]:
    """Ids of the nodes on which executors of Spark live."""
    actors: dict[str, Any] = ray._private.state.actors()
    executors = [each for each in actors.values() if str(each["Name"]).startswith(EXECUTOR_NAME)]
    return sorted(each["Address"]["NodeID"] for each in executors if each["State"] == "ALIVE")


def placed(env: tg.StreamEnvironment, folder: Path) -> None:
    """A job that runs until it was seen where its tasks are; then it ends."""
    gate, rows = folder / "gate", pa.table({"x": range(ROWS)})
    stream = env.from_source(Gated(MemorySource(rows, 4), gate), uid="rows").key_by("x")
    out = stream.aggregate(n=tg.count(), uid="count").to_table(str(folder / "out"), mode="upsert", keys=["x"], uid="to")
    job = env.execute("placed", checkpoints=tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints")))
    until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
    tasks = [task.node_id for task in job.processes()]
    gate.touch()
    status = job.wait("4min")
    once = sorted(row["x"] for row in out.to_arrow().to_pylist() if row["n"] == 1) == list(range(ROWS))
    tell(executors=nodes_of_executors(), tasks=tasks, status=status, rows_once=once)


def main(folder: Path) -> None:
    """All of it."""
    patient_ray.await_sessions(RayDPSession)
    with raylets() as address:
        with raydp(address, 2) as env:
            placed(env, folder / "placed")
        tell(connected=ray.is_initialized())
        with raydp(address, 1) as env:
            tell(again=bounded(env, folder / "again"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
