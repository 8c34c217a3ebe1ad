"""Which slots a job needs, which worker runs each subtask, and where workers go. Without Ray."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.util.placement_group import PlacementGroup
from ray_fakes import SINK, SOURCE, source_to_sink

from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex
from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.slot_plan import Placement, WorkerId, slot_order, slot_plan, strategy_of
from tidegate.actors.ray.placement import JobSlots, PoolOptions, Slot, SlotPlacement
from tidegate.actors.ray.reservation import common_slots
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId, SubtaskIndex, VertexId

GPU = Resources(1.0, 1.0)
NODE = "5" * 56
KINDS = (None, GPU, Resources(0.0, 0.5, (("fast", 2.0),)))

GROUPS = ("default", "scoring", "out")
FORWARD = Partitioning(PartitioningKind.FORWARD)
REBALANCE = Partitioning(PartitioningKind.REBALANCE)


def vertex(name: str, parallelism: int, group: str = "default", resources: Resources | None = None) -> JobVertex:
    """A vertex of a slot sharing group, or with slots of its own."""
    return JobVertex(VertexId(name), name, parallelism, (), None, resources, group)


@st.composite
def graphs(draw: st.DrawFn, *, slot_sharing: bool | None = None) -> JobGraph:
    """A job of a source and up to six vertices, some of which follow the one before them."""
    kinds = st.tuples(st.integers(1, 5), st.sampled_from(GROUPS), st.sampled_from(KINDS), st.booleans())
    vertices = [vertex("v0", 1)]
    edges: list[JobEdge] = []
    for number, (parallelism, group, resources, follows) in enumerate(draw(st.lists(kinds, max_size=6)), 1):
        vertices.append(vertex(f"v{number}", parallelism, group, resources))
        if follows:
            edges.append(JobEdge(len(edges), vertices[-2].vertex, vertices[-1].vertex, REBALANCE))
    sharing = draw(st.booleans()) if slot_sharing is None else slot_sharing
    return JobGraph(tuple(vertices), tuple(edges), slot_sharing=sharing)


def names(graph: JobGraph) -> dict[VertexId, str]:
    """What people call vertices."""
    return {vertex.vertex: vertex.name for vertex in graph.vertices}


@given(graphs())
def test_each_task_with_resources_has_a_bundle_to_itself_that_holds_them(graph: JobGraph) -> None:
    """Every other task shares the common slots; nothing is reserved that nobody uses."""
    plan = slot_plan(graph, names(graph))
    bundles = {task: plan.own_bundle(plan.workers[task]) for task in graph.tasks()}
    own = {task: bundle for task, bundle in bundles.items() if bundle is not None}
    assert sorted(own.values()) == list(range(len(plan.bundles))) == list(range(len(plan.labels)))
    for task in graph.tasks():
        resources = graph.vertex(task.vertex).resources
        assert (task in own) is (resources is not None)
        if resources is not None:
            assert plan.bundles[own[task]] == resources.bundle
            assert plan.labels[own[task]] == task.vertex
        assert (plan.workers[task] in plan.slots) is (resources is None)
    common = [vertex for vertex in graph.vertices if vertex.resources is None]
    assert sum(plan.groups.values()) == plan.width == len(set(plan.slots.values()))
    for group, slots in plan.groups.items():
        assert slots == max(vertex.parallelism for vertex in common if vertex.slot_group == group)
    assert plan.share * max(Counter(plan.slots.values()).values()) <= 1.0


@given(graphs())
def test_groups_share_no_slots_and_subtasks_of_a_vertex_share_none(graph: JobGraph) -> None:
    """The slots of one group follow those of another."""
    plan = slot_plan(graph, names(graph))
    slots_of: dict[str, set[int]] = {}
    for each in graph.vertices:
        if each.resources is None:
            slots = {plan.slots[plan.workers[task]] for task in graph.tasks() if task.vertex == each.vertex}
            assert len(slots) == each.parallelism
            slots_of.setdefault(each.slot_group, set()).update(slots)
    assert [slot for group in plan.groups for slot in sorted(slots_of[group])] == list(range(plan.width))


@given(graphs(slot_sharing=True))
def test_one_worker_runs_all_subtasks_of_a_common_slot(graph: JobGraph) -> None:
    """It takes the CPU of the slot."""
    plan = slot_plan(graph, names(graph))
    assert len(set(plan.slots.values())) == len(plan.slots)
    assert plan.share == 1.0


@given(graphs(slot_sharing=False))
def test_without_slot_sharing_each_subtask_has_a_worker_of_its_own(graph: JobGraph) -> None:
    """It is in a slot of its group; those in one slot share its CPU."""
    plan = slot_plan(graph, names(graph))
    assert len(set(plan.workers.values())) == len(graph.tasks())
    assert set(plan.slots) == {plan.workers[t] for t in graph.tasks() if graph.vertex(t.vertex).resources is None}
    assert plan.width == slot_plan(replace(graph, slot_sharing=True), names(graph)).width


def two_groups(slot_sharing: bool) -> JobGraph:
    """A source and a map with two subtasks each, and a step of another group with three, which both go to."""
    vertices = vertex("source", 2), vertex("map", 2), vertex("score", 3, "scoring"), vertex("train", 2, "x", GPU)
    ends = ((0, 1, FORWARD), (1, 2, REBALANCE), (2, 3, REBALANCE))
    edges = (JobEdge(n, vertices[up].vertex, vertices[to].vertex, how) for n, (up, to, how) in enumerate(ends))
    return JobGraph(vertices, tuple(edges), slot_sharing=slot_sharing)


def test_pipelines_that_are_narrower_than_their_group_are_in_slots_of_their_own() -> None:
    """However wide a step with resources is that belongs to one of them. Two of one subtask, beside one of three."""
    vertices = (vertex("wide", 3), vertex("a", 1), vertex("train", 3, "default", GPU), vertex("b", 1))
    graph = JobGraph(vertices, (JobEdge(0, VertexId("a"), VertexId("train"), REBALANCE),))
    plan = slot_plan(graph, names(graph))
    first = {each: plan.workers[TaskId(VertexId(each), SubtaskIndex(0))] for each in ("wide", "a", "b")}
    assert {name: plan.slots[worker] for name, worker in first.items()} == {"wide": 0, "a": 0, "b": 1}


def test_workers_are_called_by_their_slots() -> None:
    """Slots of the default group have no name of a group; a step with resources has its own name."""
    graph = two_groups(slot_sharing=True)
    plan = slot_plan(graph, names(graph))
    assert {worker: plan.names[worker] for worker in plan.workers.values()} == {
        WorkerId("group default", 0): "slot 1 of 2",
        WorkerId("group default", 1): "slot 2 of 2",
        WorkerId("group scoring", 0): "scoring slot 1 of 3",
        WorkerId("group scoring", 1): "scoring slot 2 of 3",
        WorkerId("group scoring", 2): "scoring slot 3 of 3",
        WorkerId("train", 0): "train (1/2)",
        WorkerId("train", 1): "train (2/2)",
    }
    assert (dict(plan.groups), plan.width) == ({"default": 2, "scoring": 3}, 5)
    assert plan.groups_text == "2 for slot sharing group 'default', 3 for slot sharing group 'scoring'"


def test_workers_of_a_job_without_slot_sharing_are_called_by_their_subtasks() -> None:
    """Two of them are in each slot of the default group, so each has half a CPU."""
    graph = two_groups(slot_sharing=False)
    plan = slot_plan(graph, names(graph))
    assert plan.names[WorkerId("map", 1)] == "map (2/2)"
    assert [plan.slots[WorkerId(name, 1)] for name in ("source", "map", "score")] == [1, 1, 3]
    assert (plan.share, plan.width) == (0.5, 5)


def test_a_job_of_the_default_group_says_nothing_of_groups() -> None:
    """Its user knows of none."""
    graph = JobGraph((vertex("source", 2),), ())
    assert slot_plan(graph, names(graph)).groups_text == ""


def test_a_detached_job_reserves_the_slots_of_each_group() -> None:
    """What it waits for names the group."""
    graph = two_groups(slot_sharing=True)
    wanted = common_slots(JobId("job-1"), slot_plan(graph, names(graph)), "spread")
    assert wanted.bundles == [{"CPU": 1.0}] * 5
    assert wanted.labels == ["the common slots"] * 2 + ["slot sharing group 'scoring'"] * 3


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
    with pytest.raises(ConfigurationError, match="give one of 'spread', 'pack', 'strict_pack'"):
        strategy_of(wrong)


def group(name: str) -> PlacementGroup:
    """Stands for a placement group."""
    return cast(PlacementGroup, name)


def job_slots(placement: SlotPlacement | None, resources: Resources | None = GPU) -> JobSlots:
    """Those of a source, and a sink with resources, each of which has a process of its own."""
    options = PoolOptions("job", "namespace", placement, 1, 0, open_store, own_slots=group("own"))
    return JobSlots(source_to_sink(resources=resources)[1], options)


def slot_of(slots: JobSlots, task: TaskId) -> Slot:
    """The slot of the worker that runs a task."""
    return slots.of(slots.plan.workers[task])


def test_slots_of_groups_lie_behind_each_other_in_the_reservation() -> None:
    """From the first slot of the job on."""
    placement = SlotPlacement(group("common"), (4, 5, 6, 7, 8, 9))
    options = PoolOptions("job", "namespace", placement, 1, 0, open_store, own_slots=group("own"))
    slots = JobSlots(two_groups(slot_sharing=True), options)
    workers = [WorkerId(f"group {name}", at) for name, width in slots.plan.groups.items() for at in range(width)]
    assert [slots.of(worker).bundle for worker in workers] == [5, 6, 7, 8, 9]


def test_a_task_with_resources_takes_its_bundle_whole() -> None:
    """In the group of its own; to spare processes it is in no bundle."""
    slot = slot_of(job_slots(SlotPlacement(group("common"), (4, 5))), SINK)
    options = slot.actor_options()
    assert {kind: options[kind] for kind in ("num_cpus", "num_gpus")} == {"num_cpus": 1.0, "num_gpus": 1.0}
    strategy = options["scheduling_strategy"]
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("own", 0)
    assert (slot.own, slot.bundle) == (True, None)


def test_other_tasks_share_the_common_slots_as_ever() -> None:
    """From the first slot of the job on; a step with resources takes no share of them."""
    slots = job_slots(SlotPlacement(group("common"), (4, 5)))
    options = slot_of(slots, SOURCE).actor_options()
    strategy = options.pop("scheduling_strategy")
    assert (strategy.placement_group, strategy.placement_group_bundle_index) == ("common", 5)
    assert options == {"num_cpus": 1.0}
    assert list(slots.bundles) == [5, 4], "those of spare processes: the job's come first"
    spare = slots.spare(4).actor_options()
    assert (spare["num_cpus"], spare["scheduling_strategy"].placement_group_bundle_index) == (0.0, 4)


def test_where_nothing_is_reserved_only_steps_with_resources_have_bundles() -> None:
    """Others go where Ray puts them, or away from a node that may be lost."""
    slots = job_slots(None)
    assert slot_of(slots, SOURCE).actor_options() == {"num_cpus": 0.0}
    assert slot_of(slots, SOURCE).actor_options(NODE)["scheduling_strategy"].node_id == NODE
    assert slot_of(slots, SINK).actor_options(NODE)["scheduling_strategy"].placement_group == "own"
    assert [(reserved, labels) for reserved, labels in slots.groups] == [("own", {0: "sink"})]
    assert slots.bundles == ()


def test_resources_with_names_are_told_to_ray() -> None:
    """As `ray.remote` takes them."""
    slots = job_slots(None, Resources(0.0, 0.5, (("fast", 2.0),)))
    options = slot_of(slots, SINK).actor_options()
    del options["scheduling_strategy"]
    assert options == {"num_cpus": 0.0, "num_gpus": 0.5, "resources": {"fast": 2.0}}
