"""`needed_columns`: which columns of a source a program uses, so that the source need not read the others.

Rules:

- It goes back from the ends of the stream graph. What hands rows to a function of the user, or writes them, uses all of
  their columns. A `select`, or an aggregate, uses what it names, whatever follows.
- Columns by which rows are partitioned are used.
- What emits rows on the side, that some step reads, uses all columns.
- A column that the source does not have was named by a pattern, or is missing: then nothing is known, and all count.
- A source reads one column at least: without columns there are no rows.

Operators say which columns they use (`Operator.needed_columns`). Nothing is opened or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate.actors.graph.job_graph import JobGraph, SourceSpec
from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.connectors.source import ProjectableSource
from tidegate.operators.operator import Columns, together
from tidegate.storage.ids import OperatorUid


def needed_columns(nodes: Sequence[StreamNode]) -> Mapping[OperatorUid, tuple[str, ...]]:
    """For sources of which not all columns are used, those that are, in the order of the source. Inputs come first."""
    after: dict[int, Columns] = {}
    """What follows each node uses of its columns. What nothing follows is not in here."""
    read_aside: set[int] = set()
    """Operators of which a side output is read."""
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
    """The graph of these nodes, in which sources know which of their columns are used."""
    needed = needed_columns(nodes)
    return graph.with_sources(lambda spec: replace(spec, columns=needed.get(spec.uid)))


def with_projected_sources(graph: JobGraph) -> JobGraph:
    """The graph with sources that read only the columns which are used, where they can do that."""

    def projected(spec: SourceSpec) -> SourceSpec:
        if spec.columns is None or not isinstance(spec.source, ProjectableSource):
            return spec
        return replace(spec, source=spec.source.projected(spec.columns))

    return graph.with_sources(projected)
