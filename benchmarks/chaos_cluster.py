"""What `chaos.py` breaks beside processes of a job: a Ray of several nodes on this machine, an S3 server, a driver.

Rules: every process that is started here is known by its id and stopped by it. Nodes are raylets that think they are
machines (`LocalNodes`), or hosts with a network of their own (`chaos_links.py`). The head node has no CPUs, and is not
lost: a Ray without it is no Ray any more.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from chaos_job import SUBMITTED, Plan
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup

CPUS_A_NODE = 2
RAYLET = "raylet"
HEALTH_PERIOD_MS = 1_000


class Nodes(ABC):
    """A Ray on this machine: its head, and nodes that may be lost. `head`: options of the head node."""

    def __init__(self, **head: Any) -> None:
        # Ray's types know nothing of its clusters for tests.
        make: Any = Cluster
        self._cluster = make(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **head})
        self.address: str = self._cluster.address
        context: Any = ray.init(
            address=self.address, namespace="tidegate", log_to_driver=False, logging_level=logging.ERROR
        )
        self.logs = Path(context.address_info["session_dir"]) / "logs"

    @abstractmethod
    def start_one(self) -> None:
        """One more."""

    @property
    @abstractmethod
    def ids(self) -> set[str]:
        """Those that may be lost."""

    @abstractmethod
    def kill(self, node_id: str) -> None:
        """The raylet of a node; everything on the node goes with it."""

    @abstractmethod
    def clear_up(self, node_id: str) -> None:
        """What is left of a node that was lost."""

    def take_free_cpus(self) -> PlacementGroup | None:
        """Leave no CPU to anybody, until the group is removed. None where there is none."""
        free = int(ray.available_resources().get("CPU", 0))
        if free == 0:
            return None
        group: PlacementGroup = ray.util.placement_group([{"CPU": 1}] * free)
        ray.get(group.ready())
        return group

    def close(self) -> None:
        """Stop all of them."""
        ray.shutdown()
        self._cluster.shutdown()


class LocalNodes(Nodes):
    """Raylets that think they are machines, all at one address.

    A raylet that was killed refuses connections. Ray looks every `HEALTH_PERIOD_MS`, and gives a node up after five
    looks in vain. By default it looks every 3 s, so 15 s of each loss would be Ray's. A look may take as long as ever.
    """

    def __init__(self) -> None:
        super().__init__(_system_config={"health_check_period_ms": HEALTH_PERIOD_MS})
        self._nodes: dict[str, Any] = {}

    def start_one(self) -> None:
        """One more."""
        node = self._cluster.add_node(num_cpus=CPUS_A_NODE)
        self._nodes[node.node_id] = node

    @property
    def ids(self) -> set[str]:
        """Those that may be lost."""
        return set(self._nodes)

    def kill(self, node_id: str) -> None:
        """The raylet of a node; everything on the node goes with it."""
        (raylet,) = self._nodes[node_id].all_processes[RAYLET]
        os.kill(raylet.process.pid, signal.SIGKILL)

    def clear_up(self, node_id: str) -> None:
        """What is left of a node that was killed."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)


@contextmanager
def running(make: Callable[[], Nodes], count: int) -> Iterator[Nodes]:
    """A Ray of so many nodes beside its head, until the block ends."""
    nodes = make()
    try:
        for _ in range(count):
            nodes.start_one()
        yield nodes
    finally:
        nodes.close()


def start_driver(plan: Plan, address: str, limit_s: float) -> subprocess.Popen[str]:
    """A driver of its own that has submitted the job, detached. Raises RuntimeError."""
    path, log = plan.local / "plan", plan.local / "driver.log"
    path.write_bytes(pickle.dumps(plan))
    with log.open("w") as errors:
        driver = subprocess.Popen(
            [sys.executable, "-c", "import sys, chaos_job; chaos_job.drive(*sys.argv[1:])", address, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    limit = threading.Timer(limit_s, driver.kill)
    limit.start()
    assert driver.stdout is not None
    started = any(line.strip() == SUBMITTED for line in driver.stdout)
    limit.cancel()
    if started:
        return driver
    raise RuntimeError(f"the driver ended with {driver.wait()}: {log.read_text()[-2000:]}")


def end_of(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, which may have gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
