"""Pipelined regions partition the tasks of a job, along its channels."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.graph.regions import Joined, pipelined_regions
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import SubtaskIndex, VertexId

Parallelism = dict[VertexId, int]


def tasks_of(parallelism: Parallelism) -> list[TaskId]:
    """All subtasks."""
    return [TaskId(vertex, SubtaskIndex(i)) for vertex, subtasks in parallelism.items() for i in range(subtasks)]


def channels(parallelism: Parallelism, edges: Sequence[Joined]) -> list[tuple[TaskId, TaskId]]:
    """Each pair of tasks that a channel joins."""
    return [
        (TaskId(upstream, SubtaskIndex(i)), TaskId(downstream, SubtaskIndex(j)))
        for upstream, downstream, pointwise in edges
        for i in range(parallelism[upstream])
        for j in range(parallelism[downstream])
        if i == j or not pointwise
    ]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[Parallelism, list[Joined]]:
    """Vertices in topological order, and edges that go down it; a pointwise one joins equal parallelisms."""
    subtasks = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    vertices = [VertexId(f"v{i}") for i in range(len(subtasks))]
    pairs = [(i, j) for j in range(len(subtasks)) for i in range(j)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=6)) if pairs else []
    edges = [(vertices[i], vertices[j], subtasks[i] == subtasks[j] and draw(st.booleans())) for i, j in chosen]
    return dict(zip(vertices, subtasks, strict=True)), edges


@given(graphs())
def test_regions_are_the_connected_parts_of_a_job(graph: tuple[Parallelism, list[Joined]]) -> None:
    """Each task is in one region; whatever a channel joins is in the same; and nothing else is."""
    parallelism, edges = graph
    tasks, joined = tasks_of(parallelism), channels(parallelism, edges)

    regions = pipelined_regions(tasks, edges)

    assert sorted(task for region in regions for task in region) == sorted(tasks)
    region_of = {task: number for number, region in enumerate(regions) for task in region}
    assert all(region_of[sender] == region_of[receiver] for sender, receiver in joined)
    for region in regions:
        found, to_visit = {region[0]}, [region[0]]
        while to_visit:
            task = to_visit.pop()
            new = {b for a, b in joined if a == task} | {a for a, b in joined if b == task}
            to_visit += sorted(new - found)
            found |= new
        assert found == set(region), "a region is connected"


def test_subtasks_that_nothing_joins_are_regions_of_their_own() -> None:
    """A chain that runs in one vertex loses one subtask at a time; the order is that of the job."""
    parallelism = {VertexId("a"): 2, VertexId("b"): 2, VertexId("c"): 1}
    a0, a1, b0, b1, c0 = tasks_of(parallelism)
    pointwise = [(VertexId("a"), VertexId("b"), True)]
    assert pipelined_regions(tasks_of(parallelism), pointwise) == ((a0, b0), (a1, b1), (c0,))
    assert pipelined_regions(tasks_of(parallelism), [(VertexId("a"), VertexId("b"), False)]) == (
        (a0, a1, b0, b1),
        (c0,),
    )
