"""What `test_lost_nodes_on_ray.py` looks at: jobs on several nodes, of which one is lost and one has no memory left.

The nodes are raylets on this machine. The memory monitor of a raylet ends processes of that raylet alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from programs import running_of
from ray.cluster_utils import Cluster
from ray_jobs import Gated
from story import tell
from waiting import until

import tidegate as tg
from tidegate.actors.ray.ray_job import RayJob
from tidegate.connectors.memory_source import MemorySource
from tidegate.storage.errors import JobFailedError

ROWS = 600
STORE_BYTES = 100 * 2**20
CPUS = 3
EATEN_BYTES = 4 * 2**30
SPARED_BYTES = 2 * 2**30
THRESHOLD = "RAY_memory_usage_threshold"
MONITOR = "RAY_memory_monitor_refresh_ms"
PIECE_BYTES = 64 * 2**20


@contextmanager
def raylets() -> Iterator[Any]:
    """A Ray with one node, to which others can be added, and to which this process is connected.

    A node that has died is known to be lost after a few seconds.
    """
    os.environ |= {"RAY_health_check_period_ms": "1000"}
    # Ray's types know nothing of its clusters for tests.
    make: Any = Cluster
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = make(initialize_head=True, head_node_args=head)
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def nodes_of(job: tg.Job) -> list[str]:
    """Ids of the nodes on which tasks of a job run."""
    return sorted({task.node_id for task in job.processes()})


def lost(cluster: Any, folder: Path) -> None:
    """A node is lost that has half of the job's tasks, while each node has an idle slot of the reservation.

    It is not the node of the coordinator, which goes on.
    """
    nodes = [cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES) for _ in range(2)]
    gate = folder / "gate"
    with tg.StreamEnvironment.ray(parallelism=2, slots=4, placement="spread", standbys=0) as env:
        rows = env.from_source(Gated(MemorySource(pa.table({"x": range(ROWS)}), 4), gate), uid="rows").key_by("x")
        out = rows.aggregate(n=tg.count(), uid="count").to_table(
            str(folder / "out"), mode="upsert", keys=["x"], uid="to"
        )
        checkpoints = tg.CheckpointConfig(interval="200ms", storage=str(folder / "checkpoints"))
        job = env.execute("moves", progress="off", checkpoints=checkpoints)
        until("a checkpoint", lambda: job.progress().completed_checkpoints > 0, job.progress)
        before = nodes_of(job)
        running = running_of(job)
        assert isinstance(running, RayJob)
        stays, goes = sorted(nodes, key=lambda node: node.node_id != running.coordinator().node_id)
        os.kill(goes.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        until(
            "all tasks on the other node",
            lambda: job.status() == "running" and nodes_of(job) == [stays.node_id],
            lambda: (job.progress(), job.processes()),
        )
        gate.touch()
        status = job.wait("4min")
        once = sorted(row["x"] for row in out.to_arrow().to_pylist() if row["n"] == 1) == list(range(ROWS))
        nodes_before = before == sorted(node.node_id for node in nodes)
        tell(on_both=nodes_before, moved=status, losses=job.progress().coordinator_losses, rows_once=once)


def memory_used() -> float:
    """How much of this machine's memory is in use, as a part of all, if `SPARED_BYTES` more were."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
    total = kilobytes["MemTotal"]
    return (total - kilobytes["MemAvailable"] + SPARED_BYTES / 1024) / total


def short_of_memory(cluster: Any, folder: Path) -> None:
    """A function takes memory on a node whose monitor allows little more than is in use there."""
    os.environ |= {THRESHOLD: f"{memory_used():.4f}", MONITOR: "250"}
    node = cluster.add_node(num_cpus=CPUS, object_store_memory=STORE_BYTES)
    del os.environ[THRESHOLD]
    place = node.node_id

    def eat(batch: pa.RecordBatch) -> pa.RecordBatch:
        if ray.get_runtime_context().get_node_id() == place:
            eaten: list[Any] = []
            while len(eaten) * PIECE_BYTES < EATEN_BYTES:
                eaten.append(np.ones(PIECE_BYTES, np.uint8))
        return batch

    with tg.StreamEnvironment.ray(parallelism=2, slots=2, placement="spread", standbys=0) as env:
        source = MemorySource(pa.table({"x": range(ROWS)}), 4)
        rows = env.from_source(Gated(source, folder / "gate"), uid="rows")
        rows.map_batches(eat, schema=source.schema, uid="eats").to_table(str(folder / "out"), uid="to")
        checkpoints = tg.CheckpointConfig(storage=str(folder / "checkpoints"))
        try:
            job = env.execute("eats", progress="off", checkpoints=checkpoints, restart=tg.RestartStrategy.none())
            job.wait("4min")
        except JobFailedError as error:
            tell(failure=str(error), node=place)


def main(folder: Path) -> None:
    """All of it."""
    with raylets() as cluster:
        lost(cluster, folder / "lost")
        short_of_memory(cluster, folder / "memory")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
