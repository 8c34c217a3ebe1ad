"""Where Ray goes in a Spark cluster: what is refused, and what is left to Spark."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tidegate.spark_bridge.executors import Executor, NodePlan, refuse_master
from tidegate.storage.errors import ConfigurationError


def executors(*cores: int) -> list[Executor]:
    """Executors with so many cores."""
    return [Executor(str(number), "127.0.0.1", count) for number, count in enumerate(cores)]


@pytest.mark.parametrize(
    ("cores", "nodes", "slots"),
    [
        ((1, 1), 1, 1),
        ((1, 1, 1), 2, 1),
        ((2, 2), 2, 1),
        ((4, 4), 2, 3),
        ((8, 4), 2, 3),
        ((2,), 1, 1),
    ],
)
def test_by_default_spark_keeps_a_core_of_each_executor(cores: tuple[int, ...], nodes: int, slots: int) -> None:
    """Of executors with one core it keeps an executor."""
    assert NodePlan.of(executors(*cores)) == NodePlan(nodes, slots)


@settings(max_examples=40)
@given(
    cores=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    nodes=st.one_of(st.none(), st.integers(1, 8)),
    slots=st.one_of(st.none(), st.integers(1, 6)),
    task_cpus=st.integers(1, 2),
)
def test_a_plan_fits_and_leaves_spark_a_core(
    cores: list[int], nodes: int | None, slots: int | None, task_cpus: int
) -> None:
    """Whatever is asked for: every node has its cores in one executor, and a task of Spark finds its own."""
    try:
        plan = NodePlan.of(executors(*cores), nodes, slots, task_cpus)
    except ConfigurationError:
        assume(False)
        raise
    assert plan.nodes == (nodes or plan.nodes)
    assert plan.slots_per_node == (slots or plan.slots_per_node)
    assert plan.slots + task_cpus <= sum(cores)
    assert sum(count // plan.slots_per_node for count in cores) >= plan.nodes
    bundles = [plan.bundle_of_slot(slot) for slot in range(plan.slots)]
    assert [bundles.count(index) for index in range(plan.nodes)] == [bundle["CPU"] for bundle in plan.bundles()]


@pytest.mark.parametrize(
    ("cores", "nodes", "slots", "text"),
    [
        (
            (1,),
            None,
            None,
            "1 Ray node of 1 core and Spark's own tasks, of 1 core each, do not fit into the 1 executor",
        ),
        ((1, 1), 2, None, "2 Ray nodes of 1 core and Spark's own tasks"),
        ((2, 2), None, 4, "1 Ray node of 4 cores"),
        ((2, 2), 5, 1, "5 Ray nodes of 1 core"),
        ((4, 2), 2, 3, "into the 2 executors of 2 to 4 core"),
        ((2, 2), 0, None, "executors must be at least 1, not 0"),
        ((2, 2), None, 0, "slots_per_executor must be at least 1, not 0"),
        ((), None, None, "Spark has no executors"),
    ],
)
def test_what_does_not_fit_is_refused(cores: tuple[int, ...], nodes: int | None, slots: int | None, text: str) -> None:
    """The error says what was to go where."""
    with pytest.raises(ConfigurationError, match=text):
        NodePlan.of(executors(*cores), nodes, slots)


@pytest.mark.parametrize("master", ["spark://10.0.0.7:7077", "local-cluster[2,1,1024]", "yarn"])
def test_clusters_that_can_have_ray(master: str) -> None:
    """Those in which `ray.util.spark` can start a node, and whose executors stay."""
    refuse_master(master, False)
    with pytest.raises(ConfigurationError, match=r"spark\.dynamicAllocation\.enabled=false"):
        refuse_master(master, True)


@pytest.mark.parametrize(
    ("master", "text"),
    [
        ("local", "has no executors for Ray"),
        ("local[*]", r"master 'local\[\*\]'"),
        ("local[2,3]", "has no executors for Ray"),
        ("k8s://https://10.0.0.7", "not under master 'k8s"),
        ("ray://127.0.0.1:6379", r"StreamEnvironment\.raydp"),
    ],
)
def test_clusters_without_place_for_ray_are_refused(master: str, text: str) -> None:
    """The error says what to use instead."""
    with pytest.raises(ConfigurationError, match=text):
        refuse_master(master, False)
