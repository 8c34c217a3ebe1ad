"""Analyses a program without running it: which columns and rows its sources must read, and which steps need watermarks.

- `needed_columns` and `needed_rows` find which columns and rows of a source a program uses.
- `with_event_time` finds on which edges later steps wait for watermarks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from tidegate.actors.graph.job_graph import JobGraph, JobVertex, OperatorSpec, SourceSpec
from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.connectors.pushed_filters import Rows, either
from tidegate.connectors.source import FilterableSource, ProjectableSource
from tidegate.operators.operator import Columns, Operator, OperatorFactory, together
from tidegate.operators.source_splits import Due
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.storage.ids import OperatorUid, VertexId


def needed_columns(nodes: Sequence[StreamNode]) -> Mapping[OperatorUid, tuple[str, ...]]:
    """Returns the columns of each source that a program uses, so that the source reads only these columns.

    The result has only sources with unused columns, and their used columns in the order of the source. Rules:

    - The analysis goes from the ends of the stream graph to its sources. An operator that passes rows to a function of
      the user, or writes them, uses all of their columns. A `select`, or an aggregate, uses the columns that it names,
      whatever follows. Operators declare that by `Operator.needed_columns`.
    - Columns by which rows are partitioned are used.
    - An operator with a side output that is read uses all columns.
    - If a needed column is not in the source, it was named by a pattern or is missing. All columns are then read.
    - A source reads one column at least: without columns there are no rows.
    """
    after: dict[int, Columns] = {}
    """The columns of each node that later nodes use. Nodes without later nodes are not in here."""
    read_aside: set[int] = set()
    """Operators with a side output that a step reads."""
    found: dict[OperatorUid, tuple[str, ...]] = {}
    for node in reversed(nodes):
        used = after.get(id(node))
        if node.source is not None and node.schema is not None and id(node) in after:
            names = node.schema.names
            if used is not None and used <= set(names) and len(used) < len(names):
                found[node.uid] = tuple(name for name in names if name in used) or (names[0],)
        if node.factory is None:
            continue
        alone = len(node.inputs) == 1 or not any(node.ordinals)
        alone = alone and node.table is None and id(node) not in read_aside
        wanted = node.factory().needed_columns(used) if alone else None
        for upstream, partitioning in node.inputs:
            keys = frozenset(() if partitioning is None else partitioning.keys)
            before = after.get(id(upstream.maker), frozenset[str]())
            after[id(upstream.maker)] = together(before, together(wanted, keys))
            if upstream.taps is not None:
                read_aside.add(id(upstream.maker))
    return found


def with_needed_columns(graph: JobGraph, nodes: Sequence[StreamNode]) -> JobGraph:
    """Returns the job graph with `SourceSpec.columns` set to the columns of each source that the program uses."""
    needed = needed_columns(nodes)
    return graph.with_sources(lambda spec: replace(spec, columns=needed.get(spec.uid)))


def with_projected_sources(graph: JobGraph) -> JobGraph:
    """Returns the job graph in which each `ProjectableSource` reads only the columns that the program uses."""

    def projected(spec: SourceSpec) -> SourceSpec:
        if spec.columns is None or not isinstance(spec.source, ProjectableSource):
            return spec
        return replace(spec, source=spec.source.projected(spec.columns))

    return graph.with_sources(projected)


def needed_rows(nodes: Sequence[StreamNode]) -> Mapping[OperatorUid, Rows]:
    """Returns the rows of each source that a program uses, so that the source need not read rows that a filter drops.

    The result has only sources with unused rows. Rules:

    - The analysis goes from the ends of the stream graph to its sources. Filters define which rows are needed, and
      steps that only copy columns pass this on. Any other operator needs all rows, because it may fail for a row, count
      it, or take event time from it. Operators declare that by `Operator.needed_rows`.
    - A watermark generator needs all rows. Only a filter before it can keep rows from being read.
    - A row that several steps read is needed if one of them needs it.
    - An operator with a side output that is read needs all rows.
    """
    after: dict[int, Rows] = {}
    read_aside: set[int] = set()
    """Operators with a side output that a step reads."""
    found: dict[OperatorUid, Rows] = {}
    for node in reversed(nodes):
        used = after.get(id(node))
        if node.source is not None and used is not None:
            found[node.uid] = used
        if node.factory is None:
            continue
        alone = len(node.inputs) == 1 or not any(node.ordinals)
        alone = alone and node.table is None and id(node) not in read_aside
        wanted = node.factory().needed_rows(used) if alone else None
        for upstream, _ in node.inputs:
            maker = id(upstream.maker)
            after[maker] = either(after[maker], wanted) if maker in after else wanted
            if upstream.taps is not None:
                read_aside.add(maker)
    return found


def with_needed_rows(graph: JobGraph, nodes: Sequence[StreamNode]) -> JobGraph:
    """Returns the job graph with `SourceSpec.rows` set to the rows of each source that the program uses."""
    needed = needed_rows(nodes)
    return graph.with_sources(lambda spec: replace(spec, rows=needed.get(spec.uid)))


def with_filtered_sources(graph: JobGraph) -> JobGraph:
    """Returns the job graph in which each `FilterableSource` gets the filter of the program.

    Such a source need not return rows that the filter drops.
    """

    def filtered(spec: SourceSpec) -> SourceSpec:
        if spec.rows is None or not isinstance(spec.source, FilterableSource):
            return spec
        return replace(spec, source=spec.source.filtered(spec.rows))

    return graph.with_sources(filtered)


Dues: TypeAlias = tuple[Due, ...]


def with_event_time(graph: JobGraph) -> JobGraph:
    """Returns the job graph with `event_time` set on each edge, and with the lateness rules that watermark generators
    need.

    If no later operator uses event time (running aggregates, joins without windows, tables), a watermark after each
    batch is wasteful: it sends a small frame, and keeps small batches from being merged. `OutputGate` sends such
    watermarks together with the batches that it sends after a time. Rules:

    - Operators declare whether they wait for watermarks (`Operator.waits_for_event_time`). An operator that generates
      watermarks stops all watermarks before it, so later operators wait for its own.
    - `event_time` is True for an edge if its downstream vertex waits, or has an outgoing edge with `event_time`.
    - An operator that generates watermarks gets, from all operators behind it up to the next generator, the rules by
      which they judge a row late (`Operator.dues`). It cuts batches so that each row meets the watermark that it would
      have met in a batch of its own.
    """
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
    """Returns a vertex whose watermark generators have the lateness rules (`Operator.dues`) of later operators.

    Also returns the lateness rules that apply to the rows of the vertex's input. `behind`: the rules of later vertices.
    """
    operators: list[OperatorSpec] = []
    for spec in reversed(vertex.operators):
        operator = spec.factory()
        if operator.generates_watermarks:
            spec = replace(spec, factory=partial(_told, spec.factory, behind))
            behind = ()
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
    """Returns whether an operator of the vertex, or a later vertex (`behind`), waits for the watermarks of the
    vertex's input.
    """
    for spec in vertex.operators:
        operator = spec.factory()
        if operator.generates_watermarks:
            return False
        if operator.waits_for_event_time:
            return True
    return behind
