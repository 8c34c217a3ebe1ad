"""Lets Ray and Spark take the time that a busy machine needs to start.

Ray has no setting for two of its limits, so they are lifted in the process that starts it:

- A node has 30 s to be known to its cluster.
- The agents of a node write their ports to files, and the raylet aborts if that takes longer than 15 s. Here the ports
  are chosen, and the files written, before the raylet starts.
"""

from __future__ import annotations

import os
import random
import socket
from functools import partial
from pathlib import Path
from typing import Any

import waiting

SESSION_S = 900.0
"""For each step of the start of a session: five Java processes start in it."""
SETTINGS = {
    # A process that has not registered in time is ended and started anew: a busy machine would get busier by that.
    "RAY_worker_register_timeout_seconds": "240",
    "RAY_agent_register_timeout_ms": "240000",
    # How long a process that answers late is thought to live. One that has died is noticed by its broken connection.
    "RAY_health_check_timeout_ms": "60000",
    # Statistics that no test reads cost a processor a few percent of its time, for each node.
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "AUTOSCALER_UPDATE_INTERVAL_S": "60",
}
"""Settings of Ray in the environment of the process that starts it."""
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
_PORTS = range(20_000, 32_000)
"""Between the ports of Ray's workers and those that Linux gives to connections."""


def set_intervals() -> None:
    """Sets timeouts and intervals of each Ray that this process, and the processes that it starts, will start."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def await_nodes() -> None:
    """Makes this process wait longer for nodes of Ray that it starts."""
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    module: Any = services
    params: Any = RayParams
    node: Any = Node
    look, check, start = module.get_node, params.update_pre_selected_port, node.start_raylet
    if hasattr(look, "patient"):
        return

    def get_node(address: str, node_id: str) -> Any:
        found: list[Any] = []

        def is_known() -> bool:
            try:
                found.append(look(address, node_id))
            except RuntimeError:
                return False
            return True

        waiting.until("a node of Ray", is_known)
        return found[0]

    def update_pre_selected_port(self: Any) -> Any:
        for name, port in zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True):
            setattr(self, name, port)
        return check(self)

    def start_raylet(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in AGENT_PORTS:
            Path(self.get_session_dir_path(), f"{name}_{self.node_id}").write_text(str(getattr(self._ray_params, name)))
        return start(self, *args, **kwargs)

    get_node.patient = True  # type: ignore[attr-defined]
    module.get_node = get_node
    params.update_pre_selected_port = update_pre_selected_port
    node.start_raylet = start_raylet


def free_ports(count: int) -> list[int]:
    """Returns ports at which nothing listens."""
    found: list[int] = []
    # Tests may seed the generator of all, and two of them must not take the same ports.
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"{count} ports between {_PORTS.start} and {_PORTS.stop} are not free")


def await_sessions(kind: Any) -> None:
    """Makes the environments of this process wait longer for sessions of this class."""
    kind.start = partial(kind.start, start_timeout_s=SESSION_S)
