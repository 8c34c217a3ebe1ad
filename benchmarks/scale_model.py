"""What an aligned checkpoint would take on clusters that are not here, from the unit costs that `scale.py` measures.

Four things pass one after the other or at once, and the slowest names itself:

    coordinator   one process: triggers, acknowledgements and their events, one after the other
    exchange      a barrier on each channel: all processors share the work, and a task does its own part in turn; within
                  a node over a socket, to other nodes by a call of Ray
    storage       bytes by the network of a node, or requests by the rate that a store allows a prefix
    files         open files (sockets) of a process: each pair of tasks that have a channel has a connection

Ray's GCS is not among them: it is asked when actors start, and not by a checkpoint.

Rules: unit costs are measured, limits of others are published and named here; what comes out is never a
measurement. Times of data in front of a barrier are left out: they are the job's own, and unaligned ones pass it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.files.s3_files import PART_BYTES

NETWORK_BYTES_S = 1.25e9
"""Of a node: 10 Gbit/s."""

PUTS_S = 3_500
"""Requests that write, a second and prefix: what Amazon publishes for S3."""

FILES_A_PROCESS = 65_536
"""Open files that Ray's guide tells operators to allow (`ulimit -n`)."""


@dataclass(frozen=True)
class UnitCosts:
    """Processor ms: of a checkpoint, of each subtask, of each channel; and the coordinator's own of each subtask.

    `channel_ms`: of one between nodes; `near_channel_ms`: within a node.
    """

    fixed_ms: float
    subtask_ms: float
    near_channel_ms: float
    channel_ms: float
    coordinator_ms: float
    """A subtask, in the coordinator's process; part of `subtask_ms`."""

    files_a_peer: float
    """Open files of a task's process for each task that it has a channel with."""


@dataclass(frozen=True)
class Cluster:
    """A job of so many sources and keyed subtasks, each source with a channel to each keyed one, and where it runs."""

    sources: int
    keyed: int
    nodes: int
    cores_a_node: int
    state_tb: float
    """Written by this checkpoint, over all keyed subtasks, in units of 1e12 bytes."""

    @property
    def subtasks(self) -> int:
        """All."""
        return self.sources + self.keyed

    @property
    def channels(self) -> int:
        """From each source to each keyed subtask."""
        return self.sources * self.keyed


PAPER = (
    Cluster(32, 32, 8, 8, 0.01),
    Cluster(128, 128, 32, 8, 0.1),
    Cluster(500, 500, 125, 8, 1.0),
    Cluster(2_000, 2_000, 500, 8, 4.0),
    Cluster(5_000, 5_000, 1_250, 8, 10.0),
)


@dataclass(frozen=True)
class Paper:
    """Seconds of each part, open files of a task's process, and what limits first."""

    coordinator_s: float
    exchange_s: float
    storage_s: float
    files_a_process: float
    gives_way: str


def predict(cluster: Cluster, costs: UnitCosts) -> Paper:
    """The parts of one checkpoint. Tasks are spread evenly over nodes."""
    coordinator_s = (costs.fixed_ms + cluster.subtasks * costs.coordinator_ms) / 1e3
    cores = cluster.nodes * cluster.cores_a_node
    # Tasks are spread evenly: of all channels, one in so many as there are nodes stays within one.
    channel_ms = costs.channel_ms + (costs.near_channel_ms - costs.channel_ms) / cluster.nodes
    work_ms = cluster.channels * channel_ms + cluster.subtasks * (costs.subtask_ms - costs.coordinator_ms)
    one_task_ms = (cluster.sources + cluster.keyed) / 2 * channel_ms + costs.subtask_ms - costs.coordinator_ms
    exchange_s = max(work_ms / cores, one_task_ms) / 1e3
    state_bytes = cluster.state_tb * 1e12
    bytes_s = state_bytes / (cluster.nodes * NETWORK_BYTES_S)
    requests = cluster.subtasks + state_bytes / PART_BYTES
    requests_s = requests / PUTS_S if state_bytes else 0.0
    files = max(cluster.sources, cluster.keyed) * costs.files_a_peer
    parts = {
        "coordinator": coordinator_s,
        "exchange": exchange_s,
        "network": bytes_s,
        "requests of the store": requests_s,
    }
    slowest = max(parts, key=lambda name: parts[name])
    if files > FILES_A_PROCESS:
        slowest = "open files of a process"
    return Paper(coordinator_s, exchange_s, max(bytes_s, requests_s), files, slowest)
