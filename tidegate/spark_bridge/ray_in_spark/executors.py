"""Where Ray can run in a Spark cluster that exists: its executors, and how many Ray nodes go into them.

`ray_session.py` starts the nodes there. A Ray node is a Spark task that never ends. Rules:
* A node takes a core of its executor for each of its task slots, for as long as it lives. Spark needs what is left for
  its own tasks, so Ray never takes all.
* A node that takes more than half the cores of an executor has the executor to itself. That is the default where
  executors have three cores or more: all but one. Spark alone decides where smaller ones go.
* Executors of one core hold either Ray or Spark's tasks. One of them is left to Spark.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspark import SparkContext

from tidegate.spark_bridge.errors import SparkTimeoutError
from tidegate.storage.errors import ConfigurationError

SETTLE_S = 5.0
"""Where nobody says how many executors there will be: those that are there when none has come for so long."""
POLL_S = 0.2

IN_EXECUTOR = "spark_executor"
"""A resource of Ray's nodes in executors: one each, so that slots are in different ones, and not on Ray's head."""

_LOCAL = re.compile(r"local(\[.*\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,.*\]")
_HOSTING = ("spark://", "local-cluster[")


@dataclass(frozen=True, slots=True)
class Executor:
    """An executor that is registered."""

    name: str
    host: str
    cores: int


def refuse_master(master: str, dynamic_allocation: bool) -> None:
    """Raise ConfigurationError for a Spark cluster in which Ray cannot run."""
    if _LOCAL.fullmatch(master):
        raise ConfigurationError(
            f"on_spark: this Spark runs in the driver alone (master {master!r}) and has no executors for Ray. Use a "
            "cluster, or local-cluster[executors,cores,memory_mb] on one machine; or StreamEnvironment.raydp()"
        )
    if not master.startswith(_HOSTING) and master != "yarn":
        raise ConfigurationError(
            f"on_spark: Ray runs in the executors of a standalone cluster, of YARN, or of local-cluster, not under "
            f"master {master!r}. StreamEnvironment.raydp() starts Spark on Ray instead"
        )
    if dynamic_allocation:
        raise ConfigurationError(
            "on_spark: this Spark asks for executors as its own tasks need them, and gives them back. Ray stays: start "
            "Spark with spark.dynamicAllocation.enabled=false"
        )


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How many Ray nodes, and how many task slots (each a core of Spark's) in each of them."""

    nodes: int
    slots_per_node: int

    @classmethod
    def of(
        cls, executors: Sequence[Executor], nodes: int | None = None, slots: int | None = None, task_cpus: int = 1
    ) -> NodePlan:
        """A plan for these executors; None: as many as can be. ConfigurationError if that leaves Spark no core.

        `task_cpus`: how many cores a task of Spark takes (`spark.task.cpus`).
        """
        for name, count in (("executors", nodes), ("slots_per_executor", slots)):
            if count is not None and count < 1:
                raise ConfigurationError(f"on_spark: {name} must be at least 1, not {count}")
        if not executors:
            raise ConfigurationError("on_spark: Spark has no executors; see why none has registered with it")
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
        """Task slots of all nodes."""
        return self.nodes * self.slots_per_node

    def bundles(self) -> list[dict[str, float]]:
        """What is reserved: a bundle of all CPUs of each node."""
        return [{"CPU": float(self.slots_per_node), IN_EXECUTOR: 1.0} for _ in range(self.nodes)]

    def bundle_of_slot(self, slot: int) -> int:
        """The bundle of a slot. Round robin, so that few subtasks spread over many executors."""
        return slot % self.nodes


def await_executors(context: SparkContext, wanted: int | None, timeout_s: float) -> list[Executor]:
    """The executors of a Spark cluster, once those have registered that were asked for when it was started.

    `wanted`: at least so many are waited for. SparkTimeoutError where there are fewer in time.
    """
    expected = max(wanted or 0, _expected(context) or 0)
    deadline = time.monotonic() + timeout_s
    seen: list[Executor] = []
    changed = time.monotonic()
    while True:
        found, now = registered(context), time.monotonic()
        if len(found) != len(seen):
            seen, changed = found, now
        if found and len(found) >= expected and (expected or now - changed >= SETTLE_S):
            return found
        if now > deadline:
            raise SparkTimeoutError(
                f"on_spark: {len(found)} of {max(expected, 1)} Spark executors have registered within {timeout_s:g} s. "
                "Has Spark's cluster room for them, and does their Java start?"
            )
        time.sleep(POLL_S)


def registered(context: SparkContext) -> list[Executor]:
    """The executors that Spark's driver knows now."""
    found: Any = context._jsc.sc().statusStore().executorList(True)
    every = (found.apply(i) for i in range(found.size()))
    return [
        Executor(each.id(), each.hostPort().rpartition(":")[0] or each.hostPort(), each.totalCores())
        for each in every
        if each.id() != "driver" and each.totalCores() > 0
    ]


def _expected(context: SparkContext) -> int | None:
    """How many executors were asked for, as far as the configuration says."""
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
