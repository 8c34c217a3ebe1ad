"""Looks at the executors of a Spark cluster before Ray starts in them: whether they have what a node needs.

A node of Ray that cannot start says so in the log of an executor, minutes later. What is looked at here is found at
once, and the error names the host: Python, ray and tidegate of the same version as in the driver, the program `ray`,
enough processors, and enough memory beside that of Spark.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.spark_bridge.quiet_loggers import without_logs_of
from tidegate.spark_bridge.ray_in_spark.executors import Executor, NodePlan
from tidegate.spark_bridge.spark_actions import run_spark_action
from tidegate.spark_bridge.worker_python import other_python_advice
from tidegate.storage.errors import ConfigurationError

MEMORY_A_SLOT_BYTES = 200 * 2**20
"""What a task's process takes before it holds any state."""
OBJECT_STORE_MIN_BYTES = 75 * 2**20
"""Ray starts no node with less."""
_LOGGERS_OF_TASKS = ("org.apache.spark.scheduler.TaskSetManager",)
_NO_WORKER = re.compile(
    r"PYTHON_VERSION_MISMATCH[^\n]*|Python in worker has different version[^\n]*|Cannot run program[^\n]*"
)
_PACKAGES = ("ray", "tidegate")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a Python worker of an executor has. `memory_bytes` None: not known."""

    host: str
    python: str
    versions: dict[str, str | None]
    """Of the packages that a node needs; None: not installed."""
    path: str
    """`PATH`, with the folder of this Python first."""
    has_ray: bool
    """Whether the program `ray` is found there."""
    processors: int
    memory_bytes: int | None


def look_at_hosts(spark: SparkSession, executors: Sequence[Executor], timeout_s: float) -> list[Surroundings]:
    """What the executors have: as many tasks of Spark as they have cores. SparkTimeoutError, SparkLostError."""
    tasks = sum(executor.cores for executor in executors)
    probe = _probe(_PACKAGES)
    context = spark.sparkContext

    def look() -> list[dict[str, Any]]:
        # Where workers have another Python, each task would print a stack trace of it; the error below names it once.
        with without_logs_of(context, _LOGGERS_OF_TASKS):
            return context.parallelize(range(tasks), tasks).mapPartitions(probe).collect()

    try:
        rows = run_spark_action(spark, look, timeout_s=timeout_s, what="looking at Spark's executors")
    except (PySparkException, Py4JError) as error:
        found = _NO_WORKER.search(str(error))
        if found is None:
            raise
        raise ConfigurationError(
            f"on_spark: Spark's executors do not run the Python of the driver ({found[0].strip()}). "
            f"{other_python_advice()}"
        ) from error
    return [Surroundings(**row) for row in rows]


def here() -> Surroundings:
    """What this process, the driver, has."""
    (row,) = _probe(_PACKAGES)(())
    return Surroundings(**row)


def refuse_unfit(driver: Surroundings, found: Sequence[Surroundings]) -> None:
    """Raise ConfigurationError for the first executor that has not what a node needs."""
    for there in found:
        what = _what_lacks(driver, there)
        if what is not None:
            raise ConfigurationError(
                f"on_spark: Ray cannot start in the Spark executor on {there.host}: {what}. Executors need the Python "
                "environment of the driver (PYSPARK_PYTHON, or spark.pyspark.python)"
            )


def refuse_scarce(
    plan: NodePlan, executors: Sequence[Executor], found: Sequence[Surroundings], object_store_bytes: int | None
) -> None:
    """Raise ConfigurationError for the first host with too few processors or too little memory for its Ray nodes."""
    on_host = Counter(executor.host for executor in executors)
    for there in found:
        if plan.slots_per_node > there.processors:
            raise ConfigurationError(
                f"on_spark: slots_per_executor={plan.slots_per_node}, and host {there.host} has {there.processors} "
                "processors: Ray starts no node with more CPUs than that. Lower slots_per_executor="
            )
        # Spark may call a host by another name than it does itself; then it has all executors, or at least one.
        nodes = min(plan.nodes, on_host[there.host] or (len(executors) if len(on_host) == 1 else 1))
        store = OBJECT_STORE_MIN_BYTES if object_store_bytes is None else object_store_bytes
        needed = nodes * (store + plan.slots_per_node * MEMORY_A_SLOT_BYTES)
        if there.memory_bytes is not None and there.memory_bytes < needed:
            raise ConfigurationError(
                f"on_spark: host {there.host} has {there.memory_bytes >> 20:,} MiB of memory left, and Ray needs at "
                f"least {needed >> 20:,} MiB there, outside Spark's heap: for {nodes} node(s) an object store of "
                f"{store >> 20:,} MiB and {plan.slots_per_node} slot(s) of {MEMORY_A_SLOT_BYTES >> 20} MiB each. Lower "
                "executors=, slots_per_executor= or object_store_memory=, or give Spark's executors less memory"
            )


def _what_lacks(driver: Surroundings, there: Surroundings) -> str | None:
    if there.python != driver.python:
        return f"its Python is {there.python}, and the driver's {driver.python}"
    for package, version in driver.versions.items():
        has = there.versions[package]
        if has != version:
            return f"it has {f'{package} {has}' if has else f'no {package}'}, and the driver {package} {version}"
    if not there.has_ray:
        return f"the program `ray` is not on its PATH ({there.path})"
    return None


def _probe(packages: Sequence[str]) -> Callable[[Iterable[object]], Iterator[dict[str, Any]]]:
    """What runs in executors. Spark sends it by value, so it needs nothing that an executor may lack."""

    def look(_: Iterable[object]) -> Iterator[dict[str, Any]]:
        import os
        import platform
        import shutil
        import socket
        import sys
        from importlib import metadata

        versions: dict[str, str | None] = {}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
        memory_bytes = None
        if os.path.exists("/proc/meminfo"):
            with open("/proc/meminfo") as lines:
                kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
            memory_bytes = kib[0] * 1024 if kib else None
        yield {
            "host": socket.gethostname(),
            "python": ".".join(platform.python_version_tuple()[:2]),
            "versions": versions,
            "path": path,
            "has_ray": shutil.which("ray", path=path) is not None,
            "processors": os.cpu_count() or 1,
            "memory_bytes": memory_bytes,
        }

    return look
