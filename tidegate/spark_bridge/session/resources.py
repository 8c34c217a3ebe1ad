"""`SessionResources`: what a session asks of a cluster: by executors, cores, memory, task slots and placement."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidegate.actors.graph.slot_plan import Placement, slot_order, strategy_of
from tidegate.actors.ray.slots.wanted import Wanted
from tidegate.storage.errors import ConfigurationError

APP_MASTER_CPUS = 1
"""RayDP's app master is an actor that takes one CPU."""

EXECUTOR_MEMORY_MIN_BYTES = 450 * 2**20
"""Spark refuses smaller executors: this is 1.5 times the 300 MiB that it reserves for itself."""

_MEMORY = re.compile(r"(\d+)\s*([kmgt])i?b?", re.IGNORECASE)
_UNIT_BYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_executor_memory_bytes(memory: str | int) -> int:
    """Bytes of a size in Spark's notation ("512m", "1g", "1GB": powers of 1024), or of a number of bytes.

    Raises ConfigurationError for anything else, and for less than Spark accepts.
    """
    if isinstance(memory, str):
        match = _MEMORY.fullmatch(memory.strip())
        if match is None:
            raise ConfigurationError(f"executor_memory {memory!r} is not a size such as '512m' or '1g'")
        size_bytes = int(match[1]) * _UNIT_BYTES[match[2].lower()]
    else:
        size_bytes = memory
    if size_bytes < EXECUTOR_MEMORY_MIN_BYTES:
        raise ConfigurationError(
            f"executor_memory {memory!r} is too small: Spark starts no executor with less than "
            f"{EXECUTOR_MEMORY_MIN_BYTES // 2**20}m"
        )
    return size_bytes


@dataclass(frozen=True, slots=True)
class SessionResources:
    """Executors and slots of a session. Build it with `of`, which checks the numbers."""

    executors: int
    executor_cores: int
    executor_memory_bytes: int
    slots_per_executor: int
    placement: Placement = "spread"
    """How bundles lie on nodes, and slots in bundles."""

    @classmethod
    def of(
        cls,
        executors: int,
        executor_cores: int,
        executor_memory: str | int,
        slots_per_executor: int,
        placement: Placement = "spread",
    ) -> SessionResources:
        """Checked resources. Raises ConfigurationError, which names the wrong argument."""
        counts = {
            "executors": executors,
            "executor_cores": executor_cores,
            "slots_per_executor": slots_per_executor,
        }
        for name, count in counts.items():
            if count < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {count}")
        memory_bytes = parse_executor_memory_bytes(executor_memory)
        strategy_of(placement)
        return cls(executors, executor_cores, memory_bytes, slots_per_executor, placement)

    @property
    def slots(self) -> int:
        """Task slots of all executors."""
        return self.executors * self.slots_per_executor

    @property
    def cluster_cpus(self) -> int:
        """CPUs of a Ray cluster for this session alone: its bundles and RayDP's app master."""
        return self.executors * (self.executor_cores + self.slots_per_executor) + APP_MASTER_CPUS

    @property
    def executor_memory_mib(self) -> str:
        """The heap of an executor in Spark's notation (whole MiB, rounded down)."""
        return f"{self.executor_memory_bytes // 2**20}m"

    def bundles(self) -> list[dict[str, float]]:
        """One bundle for each executor: its cores, its heap, and one CPU for each slot."""
        cpus = float(self.executor_cores + self.slots_per_executor)
        return [{"CPU": cpus, "memory": float(self.executor_memory_bytes)} for _ in range(self.executors)]

    def wanted(self, app_name: str) -> Wanted:
        """What the session asks Ray for; RayDP puts executor i into bundle i."""
        labels = ["a Spark executor and its task slots"] * self.executors
        return Wanted(f"{app_name} (executors and slots)", self.bundles(), labels, strategy_of(self.placement))

    def bundle_of_slot(self, slot: int) -> int:
        """The bundle of a slot: in turn, so that few subtasks spread over many executors, or packed into few."""
        if not 0 <= slot < self.slots:
            raise ConfigurationError(f"slot {slot} is not one of the {self.slots} slots 0..{self.slots - 1}")
        return slot_order(self.executors, self.slots_per_executor, self.placement)[slot]
