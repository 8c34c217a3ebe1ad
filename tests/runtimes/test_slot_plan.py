"""Which slots a job needs, and where its processes go. Without Ray."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SOURCE, source_to_sink

from tidegate.actors.graph.job_graph import JobGraph, JobVertex
from tidegate.actors.graph.resources import Resources
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.ray.fleet_options import FleetOptions, SlotPlacement
from tidegate.actors.runtimes.ray.slots.job_slots import JobSlots
from tidegate.actors.runtimes.ray.slots.slot_plan import Placement, slot_order, slot_plan, strategy_of
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import SubtaskIndex, VertexId

GPU = Resources(1.0, 1.0)
NODE = "5" * 56
KINDS = (None, GPU, Resources(0.0, 0.5, (("fast", 2.0),)))

graphs = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(KINDS)), min_size=1, max_size=6).map(
    lambda vertices: JobGraph(
        tuple(
            JobVertex(VertexId(f"v{number}"), f"v{number}", parallelism, (), None, resources)
            for number, (parallelism, resources) in enumerate([(1, None), *vertices])
        ),
        (),
    )
)


def names(graph: JobGraph) -> dict[VertexId, str]:
    """What people call vertices."""
    return {vertex.vertex: vertex.name for vertex in graph.vertices}


@given(graphs)
def test_each_task_with_resources_has_a_bundle_to_itself_that_holds_them(graph: JobGraph) -> None:
    """Every other task shares the common slots; nothing is reserved that nobody uses."""
    plan = slot_plan(graph, names(graph))
    own = {task: bundle for task in graph.tasks() if (bundle := plan.own_bundle(task)) is not None}
    assert sorted(own.values()) == list(range(len(plan.bundles))) == list(range(len(plan.labels)))
    for task in graph.tasks():
        resources = graph.vertex(task.vertex).resources
        assert (task in own) is (resources is not None)
        if resources is not None:
            assert plan.bundles[own[task]] == resources.bundle
            assert plan.labels[own[task]] == task.vertex
    common = [vertex for vertex in graph.vertices if vertex.resources is None]
    assert plan.width == max(vertex.parallelism for vertex in common)
    assert plan.share * len(common) <= 1.0


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["spread", "pack", "strict_pack"]), st.data())
def test_slots_fill_bundles_in_turn_or_one_after_the_other(
    bundles: int, each: int, placement: Placement, data: st.DataObject
) -> None:
    """A bundle has as many slots as it has room for; the first slots are in many bundles, or in few."""
    order = slot_order(bundles, each, placement)
    assert Counter(order) == dict.fromkeys(range(bundles), each)
    few = data.draw(st.integers(1, len(order)))
    used = len(set(order[:few]))
    assert used == (min(few, bundles) if placement == "spread" else -(-few // each))


@pytest.mark.parametrize("wrong", ["SPREAD", "strict_spread", None, 3, ["pack"]])
def test_an_unknown_placement_is_refused(wrong: Any) -> None:
    """With those that there are."""
    with pytest.raises(ConfigurationError, match="it is one of 'spread', 'pack', 'strict_pack'"):
        strategy_of(wrong)


def group(name: str) -> PlacementGroup:
    """Stands for a placement group."""
    return cast(PlacementGroup, name)


def job_slots(placement: SlotPlacement | None, resources: Resources | None = GPU) -> JobSlots:
    """Those of a source, and a sink with resources."""
    options = FleetOptions("job", "namespace", placement, 1, 0, open_store, own_slots=group("own"))
    return JobSlots(source_to_sink(resources=resources)[1], options)


def test_a_task_with_resources_takes_its_bundle_whole() -> None:
    """In the group of its own; to spare processes it is in no bundle."""
    slot = job_slots(SlotPlacement(group("common"), (4, 5))).of(SINK)
    options = slot.actor_options()
    assert {kind: options[kind] for kind in ("num_cpus", "num_gpus")} == {"num_cpus": 1.0, "num_gpus": 1.0}
    strategy = options["scheduling_strategy"]
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("own", 0)
    assert (slot.own, slot.bundle) == (True, None)


def test_other_tasks_share_the_common_slots_as_ever() -> None:
    """From the first slot of the job on; a step with resources takes no share of them."""
    slots = job_slots(SlotPlacement(group("common"), (4, 5)))
    options = slots.of(SOURCE).actor_options()
    strategy = options.pop("scheduling_strategy")
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("common", 5)
    assert options == {"num_cpus": 1.0}
    assert slots.of(TaskId(SOURCE.vertex, SubtaskIndex(1))).bundle == 4
    assert list(slots.bundles) == [5, 4], "those of spare processes: the job's come first"
    spare = slots.spare(4).actor_options()
    assert (spare["num_cpus"], spare["scheduling_strategy"].placement_group_bundle_index) == (0.0, 4)


def test_where_nothing_is_reserved_only_steps_with_resources_have_bundles() -> None:
    """Others go where Ray puts them, or away from a node that may be lost."""
    slots = job_slots(None)
    assert slots.of(SOURCE).actor_options() == {"num_cpus": 0.0}
    assert slots.of(SOURCE).actor_options(NODE)["scheduling_strategy"].node_id == NODE
    assert slots.of(SINK).actor_options(NODE)["scheduling_strategy"].placement_group == "own"
    assert [(reserved, labels) for reserved, labels in slots.groups] == [("own", {0: "sink"})]
    assert slots.bundles == ()


def test_resources_with_names_are_told_to_ray() -> None:
    """As `ray.remote` takes them."""
    slots = job_slots(None, Resources(0.0, 0.5, (("fast", 2.0),)))
    options = slots.of(SINK).actor_options()
    del options["scheduling_strategy"]
    assert options == {"num_cpus": 0.0, "num_gpus": 0.5, "resources": {"fast": 2.0}}
