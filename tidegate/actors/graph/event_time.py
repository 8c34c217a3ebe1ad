"""`with_event_time`: where watermarks are awaited, and where they are only news; and what rows are judged by.

Where nothing that follows does anything for event time (running aggregates, joins without windows, tables), a watermark
behind each batch costs more than it tells: it sends a small frame, and keeps small batches from being put together.
`OutputGate` lets such watermarks go along with what leaves by time. Rules:

- Operators say whether they wait (`Operator.waits_for_event_time`). One that generates watermarks lets none of those
  before it pass, so what follows it awaits its own.
- An edge whose downstream vertex waits, or has an edge behind it that is awaited, is awaited.
- One that generates watermarks is told how all operators behind it, up to the next one of its kind, tell rows apart by
  the watermark before them (`Operator.dues`). It cuts batches so that each of them meets the watermark that it would
  have met as a batch of its own.

Nothing is opened or run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeAlias

from tidegate.actors.graph.job_graph import JobGraph, JobVertex, OperatorSpec
from tidegate.operators.operator import Operator, OperatorFactory
from tidegate.operators.source_splits import Due
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.storage.ids import VertexId

Dues: TypeAlias = tuple[Due, ...]


def with_event_time(graph: JobGraph) -> JobGraph:
    """The graph, whose edges know whether watermarks are awaited on them."""
    awaited: dict[VertexId, bool] = {}
    dues: dict[VertexId, Dues] = {}
    told: list[JobVertex] = []
    for vertex in reversed(graph.vertices):
        followers = [edge.downstream for edge in graph.edges if edge.upstream == vertex.vertex]
        awaited[vertex.vertex] = _awaits(vertex, any(awaited[follower] for follower in followers))
        behind = dict.fromkeys(due for follower in followers for due in dues[follower])
        vertex, dues[vertex.vertex] = _judged(vertex, tuple(behind))
        told.insert(0, vertex)
    edges = tuple(replace(edge, event_time=awaited[edge.downstream]) for edge in graph.edges)
    return replace(graph, vertices=tuple(told), edges=edges)


def _judged(vertex: JobVertex, behind: Dues) -> tuple[JobVertex, Dues]:
    """The vertex, whose generators of watermarks know what judges their rows, and what judges those of its input."""
    operators: list[OperatorSpec] = []
    for spec in reversed(vertex.operators):
        operator = spec.factory()
        if operator.generates_watermarks:
            spec, behind = replace(spec, factory=partial(_told, spec.factory, behind)), ()
        else:
            behind = tuple(dict.fromkeys((*operator.dues, *behind)))
        operators.insert(0, spec)
    return replace(vertex, operators=tuple(operators)), behind


def _told(factory: OperatorFactory, dues: Dues) -> Operator:
    made = factory()
    if isinstance(made, WatermarkGenerator):
        made.dues_behind = dues
    return made


def _awaits(vertex: JobVertex, behind: bool) -> bool:
    """Whether anything in a chain waits for the watermarks of its input. `behind`: whether anything behind it does."""
    for spec in vertex.operators:
        operator = spec.factory()
        if operator.generates_watermarks:
            return False
        if operator.waits_for_event_time:
            return True
    return behind
