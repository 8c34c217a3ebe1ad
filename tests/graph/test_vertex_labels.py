"""Names of vertices and tasks for people."""

from __future__ import annotations

from tidegate.actors.graph.job_graph import NAME_CHARACTERS_MAX, JobGraph, JobVertex, vertex_labels
from tidegate.storage.ids import VertexId


def labels(*names: str) -> list[str]:
    """Labels of vertices of these names."""
    vertices = tuple(JobVertex(VertexId(f"v{i}"), name, 1, ()) for i, name in enumerate(names))
    found = vertex_labels(JobGraph(vertices, ()))
    return [found[vertex.vertex] for vertex in vertices]


def test_a_short_chain_keeps_its_name() -> None:
    """What is short enough for people stays as it is."""
    assert labels("rows -> map", "totals") == ["rows -> map", "totals"]


def test_a_long_chain_is_called_by_its_ends() -> None:
    """The first and the last operator say where rows come from and where they go."""
    chain = " -> ".join(["flights", *(f"with columns {i}" for i in range(9)), "table"])
    assert labels(chain) == ["flights -> … -> table"]


def test_one_long_name_is_cut() -> None:
    """No name is longer than the limit, whatever an operator is called."""
    (label,) = labels("x" * 500)
    assert label == "x" * (NAME_CHARACTERS_MAX - 1) + "…"


def test_vertices_of_one_name_are_told_apart() -> None:
    """Labels are unique, also where a number that is added makes the name of another vertex."""
    assert labels("map", "map", "map 2", "map") == ["map", "map 2", "map 2 2", "map 3"]
