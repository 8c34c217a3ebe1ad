"""Plans where Ray runs in an existing Spark cluster: in which executors, with how many nodes, and whether they are
suitable.

`ray_on_spark.py` starts the nodes. A Ray node is a Spark task that never ends. Rules:

- While it runs, a node uses one core of its executor for each of its task slots. Spark needs cores for its own tasks,
  so Ray never uses all.
- A node that uses more than half of the cores of an executor is the only one there. This is the default for executors
  with three or more cores: all cores but one. Spark alone decides where smaller nodes run.
- An executor with one core runs either Ray or Spark's tasks. One such executor remains for Spark.
- A Ray node that cannot start only reports it in the log of an executor, minutes later. Executors are therefore checked
  first, and the error names the host. They need the same versions of Python, ray and tidegate as the driver, the
  program `ray`, enough processors, and enough memory in addition to Spark's.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from tidegate.spark_bridge.errors import SparkTimeoutError
from tidegate.spark_bridge.spark_calls import run_spark_action, without_logs_of
from tidegate.spark_bridge.worker_python import other_python_advice
from tidegate.storage.errors import ConfigurationError

SETTLE_S = 5.0
"""Seconds without a new executor after which the list of executors counts as complete, if their number is unknown."""
POLL_S = 0.2

IN_EXECUTOR = "spark_executor"
"""Name of the Ray resource of nodes in executors.

Each node has one, so that task slots are in different nodes and never on Ray's head node.
"""

_LOCAL = re.compile(r"local(\[.*\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,.*\]")
_HOSTING = ("spark://", "local-cluster[")


@dataclass(frozen=True, slots=True)
class Executor:
    """A registered executor of Spark."""

    name: str
    host: str
    cores: int


def refuse_master(master: str, dynamic_allocation: bool) -> None:
    """Raises ConfigurationError for a kind of Spark cluster in which Ray cannot run."""
    if _LOCAL.fullmatch(master):
        raise ConfigurationError(
            f"on_spark: this Spark runs in the driver alone (master {master!r}) and has no executors for Ray. Use a "
            "cluster, or local-cluster[executors,cores,memory_mb] on one machine; or StreamEnvironment.raydp()"
        )
    if not master.startswith(_HOSTING) and master != "yarn":
        raise ConfigurationError(
            f"on_spark: Ray runs in the executors of a standalone cluster, of YARN, or of local-cluster, not under "
            f"master {master!r}. Use one of these, or StreamEnvironment.raydp(), which starts Spark on Ray"
        )
    if dynamic_allocation:
        raise ConfigurationError(
            "on_spark: this Spark requests executors when its tasks need them, and releases them. Ray needs them: "
            "start Spark with spark.dynamicAllocation.enabled=false"
        )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How many Ray nodes there are, and how many task slots each has. A slot uses one core of Spark."""

    nodes: int
    slots_per_node: int

    @classmethod
    def of(
        cls, executors: Sequence[Executor], nodes: int | None = None, slots: int | None = None, task_cpus: int = 1
    ) -> NodePlan:
        """Returns a plan with `nodes` nodes, or with as many nodes as possible if it is None.

        `task_cpus` is the number of cores of a Spark task (`spark.task.cpus`). Raises ConfigurationError if the nodes
        and one Spark task do not fit into the executors.
        """
        for name, count in (("executors", nodes), ("slots_per_executor", slots)):
            if count is not None and count < 1:
                raise ConfigurationError(f"on_spark: {name} must be at least 1, not {count}")
        if not executors:
            raise ConfigurationError(
                "on_spark: Spark has no executors; read the log of Spark's master for why no executor has registered"
            )
        least = min(executor.cores for executor in executors)
        each = slots if slots is not None else max(1, least - task_cpus)
        fitting = sum(executor.cores // each for executor in executors)
        cores = sum(executor.cores for executor in executors)
        spare = (cores - task_cpus) // each
        wanted = nodes if nodes is not None else min(len(executors), fitting, spare)
        if wanted < 1 or wanted > min(fitting, spare):
            raise ConfigurationError(
                f"on_spark: {_nodes(max(wanted, 1))} of {_cores(each)} and Spark's own tasks, of {_cores(task_cpus)} "
                f"each, do not fit into {_described(executors)}. A slot takes a core for as long as Ray runs. Lower "
                "executors= or slots_per_executor=, or start Spark with more cores (spark.executor.cores) or executors"
            )
        return cls(wanted, each)

    @property
    def slots(self) -> int:
        """Returns the number of task slots of all nodes together."""
        return self.nodes * self.slots_per_node

    def bundles(self) -> list[dict[str, float]]:
        """Returns the bundles of the placement group: one for each node, with all its CPUs."""
        return [{"CPU": float(self.slots_per_node), IN_EXECUTOR: 1.0} for _ in range(self.nodes)]

    def bundle_of_slot(self, slot: int) -> int:
        """Returns the index of the bundle of a slot.

        Slots are distributed round robin, so that a few subtasks already use many executors.
        """
        return slot % self.nodes


def await_executors(context: SparkContext, wanted: int | None, timeout_s: float) -> list[Executor]:
    """Waits until all requested executors have registered, and returns them.

    `wanted` is the minimum number to wait for, or None. Raises SparkTimeoutError if fewer register in time.
    """
    expected = max(wanted or 0, _expected(context) or 0)
    deadline = time.monotonic() + timeout_s
    seen: list[Executor] = []
    changed = time.monotonic()
    while True:
        found = registered(context)
        now = time.monotonic()
        if len(found) != len(seen):
            seen = found
            changed = now
        if found and len(found) >= expected and (expected or now - changed >= SETTLE_S):
            return found
        if now > deadline:
            raise SparkTimeoutError(
                f"on_spark: {len(found)} of {max(expected, 1)} Spark executors have registered within {timeout_s:g} "
                "s. Check that Spark's cluster has enough free cores and memory, and that Java starts on its hosts"
            )
        time.sleep(POLL_S)


def registered(context: SparkContext) -> list[Executor]:
    """Returns the executors that are currently registered."""
    found: Any = context._jsc.sc().statusStore().executorList(True)
    every = (found.apply(i) for i in range(found.size()))
    return [
        Executor(each.id(), each.hostPort().rpartition(":")[0] or each.hostPort(), each.totalCores())
        for each in every
        if each.id() != "driver" and each.totalCores() > 0
    ]


def _expected(context: SparkContext) -> int | None:
    """Returns the number of executors in Spark's configuration, or None if it is not set."""
    if found := _LOCAL_CLUSTER.fullmatch(str(context.master)):
        return int(found[1])
    instances = context.getConf().get("spark.executor.instances")
    return int(instances) if instances else None


def _nodes(count: int) -> str:
    return f"{count} Ray node{'' if count == 1 else 's'}"


def _cores(count: int) -> str:
    return f"{count} core{'' if count == 1 else 's'}"


def _described(executors: Sequence[Executor]) -> str:
    cores = sorted({executor.cores for executor in executors})
    many = f"{cores[0]}" if len(cores) == 1 else f"{cores[0]} to {cores[-1]}"
    return f"the {len(executors)} executor{'' if len(executors) == 1 else 's'} of {many} core(s) that Spark has"


MEMORY_A_SLOT_BYTES = 200 * 2**20
"""Memory of a worker process without state, in bytes."""
OBJECT_STORE_MIN_BYTES = 75 * 2**20
"""Size of the smallest object store with which Ray starts a node, in bytes."""
_LOGGERS_OF_TASKS = ("org.apache.spark.scheduler.TaskSetManager",)
_NO_WORKER = re.compile(
    r"PYTHON_VERSION_MISMATCH[^\n]*|Python in worker has different version[^\n]*|Cannot run program[^\n]*"
)
_PACKAGES = ("ray", "tidegate")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The environment of a Python worker in an executor, such as its packages. `memory_bytes` is None if unknown."""

    host: str
    python: str
    versions: dict[str, str | None]
    """The versions of the packages that a node needs. None: not installed."""
    path: str
    """`PATH`, with the folder of this Python at its beginning."""
    has_ray: bool
    """True if the program `ray` is found in this path."""
    processors: int
    memory_bytes: int | None


def look_at_hosts(spark: SparkSession, executors: Sequence[Executor], timeout_s: float) -> list[Surroundings]:
    """Returns the environments of all executors. To find them, it runs one Spark task for each core.

    Raises SparkTimeoutError or SparkLostError.
    """
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
    """Returns the environment of this process, which is the driver."""
    (row,) = _probe(_PACKAGES)(())
    return Surroundings(**row)


def refuse_unfit(driver: Surroundings, found: Sequence[Surroundings]) -> None:
    """Raises ConfigurationError for the first executor that lacks something that a node needs."""
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
    """Raises ConfigurationError for the first host with too few processors or too little memory for its Ray nodes."""
    on_host = Counter(executor.host for executor in executors)
    for there in found:
        if plan.slots_per_node > there.processors:
            raise ConfigurationError(
                f"on_spark: slots_per_executor={plan.slots_per_node}, and host {there.host} has {there.processors} "
                "processors: Ray starts no node with more CPUs than that. Lower slots_per_executor="
            )
        # Spark's name of a host may differ from the host's own. Then assume all executors on it, or at least one.
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
    """Returns the function that runs in executors.

    Spark pickles it by value, so it imports only the standard library.
    """

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
