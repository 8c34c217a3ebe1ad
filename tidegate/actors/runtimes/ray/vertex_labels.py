"""Short names of vertices for people: they are part of the names of processes, which Ray's dashboard shows."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.storage.ids import VertexId

NAME_CHARACTERS_MAX = 48


def vertex_labels(graph: JobGraph) -> dict[VertexId, str]:
    """Short names for people, one for each vertex, all different."""
    labels: dict[VertexId, str] = {}
    for vertex in graph.vertices:
        label = _shortened([part.strip() for part in vertex.name.split("->")])
        taken = set(labels.values())
        number = 2
        unique = label
        while unique in taken:
            unique = f"{label} {number}"
            number += 1
        labels[vertex.vertex] = unique
    return labels


def _shortened(parts: Sequence[str]) -> str:
    """A chain by its operators, or by its ends where that is too long."""
    whole = " -> ".join(parts)
    if len(whole) > NAME_CHARACTERS_MAX and len(parts) > 2:
        whole = f"{parts[0]} -> … -> {parts[-1]}"
    return whole if len(whole) <= NAME_CHARACTERS_MAX else whole[: NAME_CHARACTERS_MAX - 1] + "…"
