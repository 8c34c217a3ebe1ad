"""`with_event_time`: on which edges watermarks are awaited, and on which they are only news.

Where nothing that follows does anything for event time (running aggregates, joins without windows, tables), a watermark
behind each batch costs more than it tells: it sends a small frame, and keeps small batches from being put together.
`OutputGate` lets such watermarks go along with what leaves by time. Rules:

- Operators say whether they wait (`Operator.waits_for_event_time`). One that generates watermarks lets none of those
  before it pass, so what follows it awaits its own.
- An edge whose downstream vertex waits, or has an edge behind it that is awaited, is awaited.

Nothing is opened or run.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.actors.graph.job_graph import JobGraph, JobVertex
from tidegate.storage.ids import VertexId


def with_event_time(graph: JobGraph) -> JobGraph:
    """The graph, whose edges know whether watermarks are awaited on them."""
    awaited: dict[VertexId, bool] = {}
    for vertex in reversed(graph.vertices):
        behind = any(awaited[edge.downstream] for edge in graph.edges if edge.upstream == vertex.vertex)
        awaited[vertex.vertex] = _awaits(vertex, behind)
    return replace(graph, edges=tuple(replace(edge, event_time=awaited[edge.downstream]) for edge in graph.edges))


def _awaits(vertex: JobVertex, behind: bool) -> bool:
    """Whether anything in a chain waits for the watermarks of its input. `behind`: whether anything behind it does."""
    for spec in vertex.operators:
        operator = spec.factory()
        if operator.generates_watermarks:
            return False
        if operator.waits_for_event_time:
            return True
    return behind
