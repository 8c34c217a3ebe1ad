"""What a session asks of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.graph.slot_plan import Placement
from tidegate.spark_bridge.session import SessionResources, parse_executor_memory_bytes
from tidegate.storage.errors import ConfigurationError


@given(
    executors=st.integers(1, 8),
    cores=st.integers(1, 4),
    slots=st.integers(1, 5),
    memory=st.integers(450, 4096),
)
def test_every_slot_finds_its_cpu_in_its_bundle(executors: int, cores: int, slots: int, memory: int) -> None:
    """Bundles hold the executor and one CPU a slot; slots spread evenly, and the cluster holds all of it."""
    resources = SessionResources.of(executors, cores, f"{memory}m", slots)
    bundles = resources.bundles()
    free = [bundle["CPU"] - cores for bundle in bundles]
    for slot in range(resources.slots):
        free[resources.bundle_of_slot(slot)] -= 1
        assert max(free) - min(free) <= 1
    assert free == [0] * executors
    assert all(bundle["memory"] == memory * 2**20 for bundle in bundles)
    assert resources.cluster_cpus == sum(bundle["CPU"] for bundle in bundles) + 1
    assert resources.executor_memory_mib == f"{memory}m"


def test_packed_slots_fill_one_executor_after_the_other() -> None:
    """A job of few subtasks is beside few executors; spread, it is beside many."""
    packed, spread = (SessionResources.of(3, 1, "1g", 2, placement) for placement in ("pack", "spread"))
    assert [packed.bundle_of_slot(slot) for slot in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [spread.bundle_of_slot(slot) for slot in range(6)] == [0, 1, 2, 0, 1, 2]
    assert packed.bundles() == spread.bundles()


@pytest.mark.parametrize("placement", ["spread", "pack", "strict_pack"])
def test_an_executor_and_its_slots_are_asked_for_together(placement: Placement) -> None:
    """In one bundle each, which lie on nodes as was said; what is missing is told of executors."""
    wanted = SessionResources.of(2, 1, "1g", 3, placement).wanted("delays")
    assert (wanted.name, wanted.strategy) == ("delays (executors and slots)", placement.upper())
    assert wanted.bundles == [{"CPU": 4.0, "memory": 2.0**30}] * 2
    assert {need.label for need in wanted.needs} == {"a Spark executor and its task slots"}
    assert wanted.one_node is (placement == "strict_pack")


def test_an_unknown_placement_is_refused() -> None:
    """Before anything has started."""
    with pytest.raises(ConfigurationError, match="placement='STRICT_SPREAD' is unknown; give one of 'spread', 'pack'"):
        SessionResources.of(1, 1, "1g", 1, "STRICT_SPREAD")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("512m", 512 << 20), ("1g", 1 << 30), ("1GB", 1 << 30), (" 600 MiB ", 600 << 20), (1 << 30, 1 << 30)],
)
def test_memory_is_understood_as_spark_does(memory: str | int, expected: int) -> None:
    """Units are powers of 1024 in any case; a number is bytes."""
    assert parse_executor_memory_bytes(memory) == expected


@pytest.mark.parametrize("memory", ["1.5g", "lots", "", "512", "449m", 1000])
def test_memory_that_spark_would_refuse_is_refused_at_once(memory: str | int) -> None:
    """Not a size, or less than Spark's minimum: an error that names the setting and its value."""
    with pytest.raises(ConfigurationError, match="executor_memory"):
        parse_executor_memory_bytes(memory)


@pytest.mark.parametrize("wrong", ["executors", "executor_cores", "slots_per_executor"])
def test_counts_below_one_are_refused_by_name(wrong: str) -> None:
    """The error names the argument."""
    counts = {"executors": 1, "executor_cores": 1, "slots_per_executor": 1} | {wrong: 0}
    with pytest.raises(ConfigurationError, match=f"{wrong} must be at least 1"):
        SessionResources.of(executor_memory="1g", **counts)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_does_not_exist_is_refused(slot: int) -> None:
    """Slots are numbered from 0."""
    with pytest.raises(ConfigurationError, match="slot"):
        SessionResources.of(2, 1, "1g", 2).bundle_of_slot(slot)
