"""What an executor must have before Ray starts in it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidegate.spark_bridge.executors import Executor, NodePlan, Surroundings, here, refuse_scarce, refuse_unfit
from tidegate.storage.errors import ConfigurationError

DRIVER = Surroundings("driver", "3.11", {"ray": "2.60.0", "tidegate": "0.1.0"}, "/bin", True, 4, 2**32)
WORKER = replace(DRIVER, host="worker-7")
TWO = [Executor("0", "worker-7", 4), Executor("1", "worker-7", 4)]
MIB = 2**20


def test_a_process_suits_itself() -> None:
    """The look is the same in driver and executors, and finds what tests have."""
    found = here()
    refuse_unfit(found, [found])
    assert found.processors >= 1
    assert found.memory_bytes is None or found.memory_bytes > 0


@pytest.mark.parametrize(
    ("there", "text"),
    [
        (replace(WORKER, python="3.12"), r"executor on worker-7: its Python is 3\.12, and the driver's 3\.11"),
        (replace(WORKER, versions={"ray": "2.59.0", "tidegate": "0.1.0"}), r"it has ray 2\.59\.0, and the driver ray"),
        (
            replace(WORKER, versions={"ray": "2.60.0", "tidegate": None}),
            r"no tidegate, and the driver tidegate 0\.1\.0",
        ),
        (replace(WORKER, has_ray=False), "the program `ray` is not on its PATH"),
    ],
)
def test_an_executor_with_another_python_is_refused(there: Surroundings, text: str) -> None:
    """The first one that lacks something is named, and what it lacks."""
    with pytest.raises(ConfigurationError, match=text):
        refuse_unfit(DRIVER, [WORKER, there])


def test_more_slots_than_processors_are_refused() -> None:
    """Spark may count more cores than a host has; Ray does not."""
    refuse_scarce(NodePlan(2, 4), TWO, [WORKER], None)
    with pytest.raises(ConfigurationError, match="slots_per_executor=5, and host worker-7 has 4 processors"):
        refuse_scarce(NodePlan(1, 5), TWO, [WORKER], None)


def test_a_host_without_memory_is_refused() -> None:
    """All nodes of a host count, each with its object store and its slots."""
    needed = 2 * (100 + 3 * 200) * MIB
    refuse_scarce(NodePlan(2, 3), TWO, [replace(WORKER, memory_bytes=needed)], 100 * MIB)
    with pytest.raises(
        ConfigurationError, match=r"worker-7 has 1,399 MiB of memory left, and Ray needs at least 1,400"
    ):
        refuse_scarce(NodePlan(2, 3), TWO, [replace(WORKER, memory_bytes=needed - 1)], 100 * MIB)
    refuse_scarce(NodePlan(2, 3), TWO, [replace(WORKER, memory_bytes=None)], 100 * MIB)


def test_hosts_that_spark_calls_otherwise_count_as_one_node() -> None:
    """Where there are several and none of them is called as in Spark's list."""
    apart = [Executor("0", "10.0.0.7", 4), Executor("1", "10.0.0.8", 4)]
    one = replace(WORKER, memory_bytes=(75 + 200) * MIB)
    refuse_scarce(NodePlan(2, 1), apart, [one], None)
    with pytest.raises(ConfigurationError, match="for 1 node"):
        refuse_scarce(NodePlan(2, 1), apart, [replace(one, memory_bytes=274 * MIB)], None)
