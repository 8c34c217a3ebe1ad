"""Works out which rows of a source a program uses, so that the source need not read those that a filter drops.

Rules:

- It goes back from the ends of the stream graph. Filters say which rows count (`understood_filters.py`), and steps that
  only copy columns pass it on. Before any other operator all rows count: it may fail for a row, count it, or date it.
- What makes watermarks sees all rows. So only a filter in front of it keeps rows from being read.
- What several steps read counts if it does for one of them.
- Before an operator whose side output is read all rows count.

Operators say which rows they need (`Operator.needed_rows`). Nothing is opened or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tidegate.actors.graph.job_graph import JobGraph, SourceSpec
from tidegate.actors.graph.stream_graph import StreamNode
from tidegate.connectors.pushed_filters import Rows, either
from tidegate.connectors.source import FilterableSource
from tidegate.storage.ids import OperatorUid


def needed_rows(nodes: Sequence[StreamNode]) -> Mapping[OperatorUid, Rows]:
    """For sources of which not all rows are used, those that are. Inputs come first."""
    after: dict[int, Rows] = {}
    read_aside: set[int] = set()
    """Operators of which a side output is read."""
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
    """The graph of these nodes, in which sources know which of their rows are used."""
    needed = needed_rows(nodes)
    return graph.with_sources(lambda spec: replace(spec, rows=needed.get(spec.uid)))


def with_filtered_sources(graph: JobGraph) -> JobGraph:
    """The graph with sources that need not read the rows which are not used, where they can do that."""

    def filtered(spec: SourceSpec) -> SourceSpec:
        if spec.rows is None or not isinstance(spec.source, FilterableSource):
            return spec
        return replace(spec, source=spec.source.filtered(spec.rows))

    return graph.with_sources(filtered)
