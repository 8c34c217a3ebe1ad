"""The stream graph, which a program builds from `StreamNode` objects, and `translate`, which turns it into a job graph.

An operator is chained to its input, and gets batches by a plain call, if it has one input, of the same parallelism,
resources and slot sharing group, without repartitioning, and no other operator reads that input. An operator that reads
a side output is not chained, because tagged rows leave the chain at any operator.

An operator for which the program names no slot sharing group is in the group of its inputs. If these have different
groups, or if there are none, it is in the group "default" (Flink's `StreamGraphGenerator.determineSlotSharingGroup`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from tidegate.actors.graph.job_graph import (
    DEFAULT_GROUP,
    MAX_PARALLELISM,
    JobEdge,
    JobGraph,
    JobVertex,
    OperatorSpec,
    SourceSpec,
)
from tidegate.actors.graph.resources import Resources
from tidegate.connectors.committing_sink import CommittingSink
from tidegate.connectors.sink import Sink
from tidegate.connectors.source import Source, is_unbounded
from tidegate.operators.batch_rows import BatchRows
from tidegate.operators.functions.async_map import AsyncFunction
from tidegate.operators.local_aggregation import CombiningMode, LocalAggregation
from tidegate.operators.operator import OperatorFactory
from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.protocol.edges import ErrorTag, OutputTag, Partitioning, PartitioningKind, SideOutput
from tidegate.storage.checkpoints.metadata import StateMeaning
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.ids import OperatorUid, VertexId
from tidegate.storage.schemas.column_names import columns_text
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT

FORWARD = Partitioning(PartitioningKind.FORWARD)
REBALANCE = Partitioning(PartitioningKind.REBALANCE)


@dataclass(frozen=True, eq=False, slots=True)
class StreamNode:
    """A source, an operator or a side output in the stream graph. `schema` is None if it is known only when the job
    runs.

    - `inputs`: the input nodes, each with its partitioning. None is forward if the parallelisms are equal, else
      rebalanced.
    - `ordinals[i]`: for an operator with several inputs, the number of the input at which `inputs[i]` arrives, from 0.
      Empty means input 0.
    - `side_outputs`: the tags under which the operator may emit rows.
    - `taps`: for a side output, the node that emits it and the name of the tag. Such a node is only an input of other
      nodes.
    - `combines`: how senders may combine rows for the operator before they send them, or None for not at all.
    - `slot_group`: the slot sharing group that the program names, or None for the group of the inputs.
    - `meaning`: description of the operator's state for checks at a restore, or None for an operator without state.
    - `retimes`: the column of event time, if the operator changes its values. `event_time_check`: checks that a
      function keeps the event time, or None.
    - `computes`: a canonical text of what the operator computes, or empty for a function of the user.
    - `key_texts`: keys of the next step that the operator computes, by name, with their expressions as text.
    - `retracts`: name of the step that needs each retraction exactly once, or None.
    """

    uid: OperatorUid
    name: str
    parallelism: int
    schema: pa.Schema | None
    source: Source | None = None
    factory: OperatorFactory | None = None
    table: str | None = None
    inputs: tuple[tuple[StreamNode, Partitioning | None], ...] = ()
    ordinals: tuple[int, ...] = ()
    batch_rows: BatchRows | None = None
    resources: Resources | None = None
    slot_group: str | None = None
    side_outputs: tuple[OutputTag, ...] = ()
    taps: tuple[StreamNode, str] | None = None
    sink: Sink | None = None
    committing: CommittingSink | None = None
    calls: AsyncFunction | None = None
    retracts: str | None = None
    combines: LocalAggregation | None = None
    meaning: StateMeaning | None = None
    computes: str = ""
    key_texts: Mapping[str, str] = field(default_factory=dict)
    retimes: str | None = None
    event_time_check: EventTimeCheck | None = None

    def __post_init__(self) -> None:
        if [self.source, self.factory, self.taps].count(None) != 2:
            raise AssertionError(
                "a stream node must be a source, an operator, or a side output, and exactly one of these; this is a "
                "bug in tidegate, please report it"
            )
        if self.ordinals and len(self.ordinals) != len(self.inputs):
            raise AssertionError(
                f"a stream node has {len(self.ordinals)} ordinals for {len(self.inputs)} inputs; this is a bug in "
                "tidegate, please report it"
            )

    @property
    def maker(self) -> StreamNode:
        """Returns the source or operator node that produces the rows of this node."""
        return self if self.taps is None else self.taps[0]

    @property
    def writes(self) -> bool:
        """Returns whether the operator writes rows to a table or a sink."""
        return self.table is not None or self.sink is not None or self.committing is not None

    def tells_splits(self, parallelism: int) -> bool:
        """Returns whether an operator of this parallelism after this node gets the split of each row.

        True if this node is an unbounded source of the same parallelism.
        """
        return self.source is not None and is_unbounded(self.source) and self.parallelism == parallelism

    def side_output(self, tag: str) -> StreamNode:
        """Returns the node of a side output of this operator. Raises ConfigurationError if the operator has no
        such tag.
        """
        schemas = {known.name: known.schema for known in self.side_outputs}
        if tag not in schemas:
            has = f"it has {', '.join(map(repr, schemas))}" if schemas else "it has none"
            raise ConfigurationError(
                f"operator {self.name!r} (uid {self.uid!r}) has no side output {tag!r}: {has}; name it in side_outputs "
                "of the step that emits it, and call side_output on the stream that this step returns"
            )
        return StreamNode(self.uid, self.name, self.parallelism, schemas[tag], taps=(self, tag))


def default_max_parallelism(parallelism: int) -> int:
    """Returns the default number of key groups for an operator of this parallelism.

    Flink's rule (`KeyGroupRangeAssignment.computeDefaultMaxParallelism`): 1.5 times the parallelism, rounded up to a
    power of two, and at least 128.
    """
    widest = 1 << (parallelism + parallelism // 2 - 1).bit_length()
    return min(max(MAX_PARALLELISM, widest), MAX_PARALLELISM_LIMIT)


def translate(
    nodes: Sequence[StreamNode],
    max_parallelism: int | None = None,
    combining: CombiningMode = "auto",
    *,
    slot_sharing: bool = True,
) -> JobGraph:
    """Returns the job graph of all nodes, which are given in the order of their creation (inputs first).

    `max_parallelism` is the number of key groups, or None for `default_max_parallelism` of the widest operator.
    `combining`: whether rows are combined before they are sent to aggregates. `slot_sharing`: whether the subtasks of a
    slot share a worker. Raises ConfigurationError for two operators with one uid, a parallelism out of range, or a job
    without a source.
    """
    if max_parallelism is None:
        max_parallelism = default_max_parallelism(max((node.parallelism for node in nodes), default=1))
    _check(nodes, max_parallelism)
    readers: dict[int, int] = {}
    for node in nodes:
        for upstream, _ in node.inputs:
            readers[id(upstream)] = readers.get(id(upstream), 0) + 1
    groups = _slot_groups(nodes)
    chains: list[list[StreamNode]] = []
    chain_of: dict[int, int] = {}
    for node in nodes:
        chained_to = _chainable_input(node, readers, groups)
        if chained_to is not None:
            index = chain_of[id(chained_to)]
            chains[index].append(node)
        else:
            index = len(chains)
            chains.append([node])
        chain_of[id(node)] = index
    names = _shown_names(nodes)
    vertices = tuple(_vertex(chain, names, groups[id(chain[0])]) for chain in chains)
    edges: list[JobEdge] = []
    read_aside = {upstream.taps for node in nodes for upstream, _ in node.inputs if upstream.taps is not None}
    for chain in chains:
        head = chain[0]
        ordinals = head.ordinals or (0,) * len(head.inputs)
        for (upstream, partitioning), ordinal in zip(head.inputs, ordinals, strict=True):
            same = upstream.parallelism == head.parallelism
            if partitioning is None or (partitioning.kind is PartitioningKind.FORWARD and not same):
                partitioning = FORWARD if same else REBALANCE
            from_vertex = vertices[chain_of[id(upstream.maker)]].vertex
            side = None if upstream.taps is None else SideOutput(upstream.uid, upstream.taps[1])
            combines = None
            if head.combines is not None and combining != "off" and (head, head.combines.unless_read) not in read_aside:
                combines = replace(head.combines, mode=combining)
            edges.append(JobEdge(len(edges), from_vertex, _vertex_id(head), partitioning, ordinal, side, combines))
    return JobGraph(vertices, tuple(edges), max_parallelism, slot_sharing)


def _check(nodes: Sequence[StreamNode], max_parallelism: int) -> None:
    if not any(node.source is not None for node in nodes):
        raise ConfigurationError(
            "the job has no source; begin a stream with a method of the environment, such as from_files, from_rows or "
            "from_batches"
        )
    seen: dict[OperatorUid, StreamNode] = {}
    for node in nodes:
        if not 1 <= node.parallelism <= max_parallelism:
            raise ConfigurationError(
                f"operator {node.name!r}: parallelism {node.parallelism} is not between 1 and {max_parallelism}, "
                "the number of key groups (max_parallelism)"
            )
        if node.uid in seen:
            raise ConfigurationError(
                f"operators {seen[node.uid].name!r} and {node.name!r} both have uid {node.uid!r}; give one of them "
                "another uid=, because a restore finds the state of an operator by its uid. If a notebook cell ran "
                "twice, the steps of its first run are still in the program: create the environment and its streams "
                "again"
            )
        seen[node.uid] = node


def _slot_groups(nodes: Sequence[StreamNode]) -> dict[int, str]:
    """Returns the name of the slot sharing group of each node, by `id(node)`. In `nodes`, inputs come first."""
    groups: dict[int, str] = {}
    for node in nodes:
        of_inputs = {groups[id(upstream.maker)] for upstream, _ in node.inputs}
        inherited = of_inputs.pop() if len(of_inputs) == 1 else DEFAULT_GROUP
        groups[id(node)] = inherited if node.slot_group is None else node.slot_group
    return groups


def _chainable_input(node: StreamNode, readers: Mapping[int, int], groups: Mapping[int, str]) -> StreamNode | None:
    if len(node.inputs) != 1:
        return None
    upstream, partitioning = node.inputs[0]
    forward = partitioning is None or partitioning.kind is PartitioningKind.FORWARD
    alone = upstream.taps is None and readers[id(upstream)] == 1
    alike = upstream.parallelism == node.parallelism and upstream.resources == node.resources
    together = groups[id(upstream.maker)] == groups[id(node)]
    return upstream if forward and alone and alike and together else None


def _shown_names(nodes: Sequence[StreamNode]) -> dict[OperatorUid, str]:
    """Returns the displayed name of each operator: its name, or its uid if several operators have that name."""
    counts = Counter(node.name for node in nodes)
    return {node.uid: node.name if counts[node.name] == 1 else node.uid for node in nodes}


def _vertex(chain: Sequence[StreamNode], names: Mapping[OperatorUid, str], slot_group: str) -> JobVertex:
    head = chain[0]
    source = None if head.source is None else SourceSpec(head.uid, names[head.uid], head.source, makes=_makes(head))
    operators = tuple(
        OperatorSpec(
            node.uid,
            names[node.uid],
            node.factory,
            node.table,
            node.batch_rows,
            node.sink,
            node.calls,
            node.meaning,
            tuple(tag.name for tag in node.side_outputs if isinstance(tag, ErrorTag)),
            _makes(node),
            node.committing,
        )
        for node in chain
        if node.factory is not None
    )
    name = " -> ".join(names[node.uid] for node in chain)
    return JobVertex(_vertex_id(head), name, head.parallelism, operators, source, head.resources, slot_group)


def _makes(node: StreamNode) -> str:
    """Returns a canonical text about how a node makes its rows, which a restore compares.

    The text does not depend on the order of columns.
    """
    columns = "columns that are not known" if node.schema is None else columns_text(sorted(node.schema, key=_name_of))
    return f"{node.computes} {columns}".lstrip()


def _name_of(field: pa.Field) -> str:
    return str(field.name)


def _vertex_id(head: StreamNode) -> VertexId:
    return VertexId(head.uid)
