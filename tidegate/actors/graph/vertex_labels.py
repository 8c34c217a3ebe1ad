"""Short names of vertices and tasks for people: Ray's dashboard shows them as names of processes and of calls."""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import VertexId

NAME_CHARACTERS_MAX = 48


def vertex_labels(graph: JobGraph) -> dict[VertexId, str]:
    """Short names for people, one for each vertex, all different."""
    labels: dict[VertexId, str] = {}
    taken: set[str] = set()
    for vertex in graph.vertices:
        label = _shortened([part.strip() for part in vertex.name.split("->")])
        number = 2
        unique = label
        while unique in taken:
            unique = f"{label} {number}"
            number += 1
        labels[vertex.vertex] = unique
        taken.add(unique)
    return labels


def task_names(graph: JobGraph) -> dict[TaskId, str]:
    """Returns short names of tasks: each that of its vertex, and which of its subtasks it is, from 1 on."""
    labels = vertex_labels(graph)
    return {
        task: f"{labels[task.vertex]} ({task.subtask + 1}/{graph.vertex(task.vertex).parallelism})"
        for task in graph.tasks()
    }


def _shortened(parts: Sequence[str]) -> str:
    """A chain by its operators, or by its ends where that is too long."""
    whole = " -> ".join(parts)
    if len(whole) > NAME_CHARACTERS_MAX and len(parts) > 2:
        whole = f"{parts[0]} -> … -> {parts[-1]}"
    return whole if len(whole) <= NAME_CHARACTERS_MAX else whole[: NAME_CHARACTERS_MAX - 1] + "…"
