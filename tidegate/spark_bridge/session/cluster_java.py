"""Checks whether Spark can run on the Java of each node, in a Ray cluster that somebody else started.

There Ray starts Java workers with the environment of its own daemon, which we cannot change. With a wrong Java the app
master would die minutes later. This check finds it at once and names the node. The session runs it unless it has
started Ray itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tidegate.spark_bridge.errors import SparkTimeoutError
from tidegate.spark_bridge.session.java import add_opens_options, is_supported, parse_java_major
from tidegate.storage.errors import ConfigurationError

_CHECK_TIMEOUT_S = 120.0
"""For a new process on each node and its `java -version`, which take a minute on a very busy machine."""
_JAVA_TIMEOUT_S = 150.0
"""Longer than the driver waits: it is the driver that says what has taken too long."""
_STRONG_ENCAPSULATION_MAJOR = 16


@dataclass(frozen=True, slots=True)
class NodeJava:
    """The `java` on a node's PATH (path and major version, None without one), and its options."""

    path: str | None
    major: int | None
    options: str


def java_problem(java: NodeJava) -> str | None:
    """Why Spark on RayDP cannot use this Java. None if it can."""
    if java.path is None:
        return "there is no java on its PATH"
    if not is_supported(java.major):
        return f"its java ({java.path}) is version {java.major or 'unknown'}, and Spark needs 8 to 17"
    assert java.major is not None
    missing = [option for option in add_opens_options() if option not in java.options]
    if java.major >= _STRONG_ENCAPSULATION_MAJOR and missing:
        return f"JDK_JAVA_OPTIONS there lacks {missing[0]}"
    return None


def check_cluster_java() -> None:
    """Raise ConfigurationError naming the first live node whose Java cannot run Spark executors."""
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    probe = ray.remote(num_cpus=0, max_retries=0)(_node_java)
    asked = {
        node_id: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)).remote()
        for node_id in nodes
    }
    try:
        found: list[NodeJava] = ray.get(list(asked.values()), timeout=_CHECK_TIMEOUT_S)
    except GetTimeoutError as error:
        raise SparkTimeoutError(
            f"the nodes of the Ray cluster did not say within {_CHECK_TIMEOUT_S:g} s which Java they have. Check "
            "that the cluster is alive, and that its machines have time for a small task."
        ) from error
    for node_id, java in zip(asked, found, strict=True):
        problem = java_problem(java)
        if problem is not None:
            raise ConfigurationError(
                f"Ray node {nodes[node_id]} cannot run Spark executors: {problem}. Call "
                "tidegate.spark_bridge.ensure_java() before ray.init, or start the node with JAVA_HOME, PATH "
                "and JDK_JAVA_OPTIONS as it sets them."
            )


def _node_java() -> NodeJava:
    path = shutil.which("java")
    if path is None:
        return NodeJava(None, None, "")
    done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    major = parse_java_major(done.stderr + done.stdout)
    return NodeJava(path, major, os.environ.get("JDK_JAVA_OPTIONS", ""))
