"""`JobGraph`: the graph that runs. Its vertices are chains of operators, and its edges repartition rows between them.

`translate` creates it from the stream graph. The coordinator deploys its tasks, checkpoints name its operators and
edges, and a restore maps the state of a checkpoint onto it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tidegate.actors.graph.resources import Resources
from tidegate.connectors.committing_sink import CommittingSink
from tidegate.connectors.pushed_filters import Rows
from tidegate.connectors.sink import Sink
from tidegate.connectors.source import Source
from tidegate.operators.batch_rows import BatchRows
from tidegate.operators.functions.async_map import AsyncFunction
from tidegate.operators.local_aggregation import LocalAggregation
from tidegate.operators.operator import OperatorFactory
from tidegate.protocol.edges import Partitioning, PartitioningKind, SideOutput
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.storage.checkpoints.metadata import OperatorInfo, StateMeaning
from tidegate.storage.ids import OperatorUid, SubtaskIndex, VertexId

DEFAULT_GROUP = "default"
"""Name of the slot sharing group of steps for which the program names none."""
MAX_PARALLELISM = 128
"""Smallest default number of key groups. `default_max_parallelism` returns more for jobs with many subtasks."""


@dataclass(frozen=True, slots=True)
class OperatorSpec:
    """Describes one operator of a chain, and how to create it.

    `table` is the URL of the output table of a table sink. For a user's `sink` it is an id of that sink
    (`own_sink_place`).
    """

    uid: OperatorUid
    name: str
    factory: OperatorFactory
    table: str | None = None
    batch_rows: BatchRows | None = None
    """Limits of the number of rows of a batch for the operator, or None for the defaults."""
    sink: Sink | None = None
    calls: AsyncFunction | None = None
    """The asynchronous function of the operator (`map_async`), or None."""
    meaning: StateMeaning | None = None
    """Description of the operator's state for checks at a restore. None for an operator without state."""
    error_tags: tuple[str, ...] = ()
    """The tags of the side outputs that receive rows for which the operator's function fails."""
    makes: str = ""
    """Canonical description of the rows that the operator emits, as far as the program shows it. For checks at a
    restore.
    """
    committing: CommittingSink | None = None
    """The user's `CommittingSink` to which the operator writes, or None."""


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Describes the source at the head of a vertex."""

    uid: OperatorUid
    name: str
    source: Source
    columns: tuple[str, ...] | None = None
    """The columns that the program uses, or None if it uses all columns or that is unknown."""
    rows: Rows = None
    """The rows that the program uses, or None if it uses all rows or that is unknown."""
    makes: str = ""
    """Canonical description of the columns of the source."""


@dataclass(frozen=True, slots=True)
class JobVertex:
    """A chain of operators that run in one task, `parallelism` times."""

    vertex: VertexId
    name: str
    parallelism: int
    operators: tuple[OperatorSpec, ...]
    source: SourceSpec | None = None
    resources: Resources | None = None
    """The resources of each of the vertex's own slots, or None if it shares slots with other vertices of its
    group.
    """
    slot_group: str = DEFAULT_GROUP
    """Name of the slot sharing group. Slot i of the group holds subtask i of each of its vertices without own
    resources.
    """

    @property
    def uids(self) -> tuple[OperatorUid, ...]:
        """Returns the uids of the vertex: of its source, if it has one, and then of its operators in order."""
        return tuple(spec.uid for spec in (*((self.source,) if self.source is not None else ()), *self.operators))

    @property
    def head(self) -> OperatorUid:
        """Returns the uid of the source or first operator of the chain, where input arrives."""
        return self.source.uid if self.source is not None else self.operators[0].uid

    @property
    def tail(self) -> OperatorUid:
        """Returns the uid of the last operator of the chain, which emits the output."""
        if self.operators:
            return self.operators[-1].uid
        assert self.source is not None, "a vertex has an operator or a source"
        return self.source.uid


@dataclass(frozen=True, slots=True)
class JobEdge:
    """An edge of the job graph, on which batches go from vertex `upstream` to vertex `downstream`, repartitioned.

    `index`: the position of the edge in the graph. `input`: the input of the first downstream operator that receives
    the batches. Several edges may share an input (a union). `side`: the side output that the edge carries, or None for
    the output of the chain. `combines`: how senders may combine rows before they send them, or None. `event_time`:
    whether a later operator waits for watermarks (`with_event_time`).
    """

    index: int
    upstream: VertexId
    downstream: VertexId
    partitioning: Partitioning
    input: int = 0
    side: SideOutput | None = None
    combines: LocalAggregation | None = None
    event_time: bool = True


@dataclass(frozen=True, slots=True)
class JobGraph:
    """The graph of a whole job. Vertices are in topological order. `max_parallelism` is the number of key groups."""

    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]
    max_parallelism: int = MAX_PARALLELISM
    slot_sharing: bool = True
    """True if the subtasks of a slot share a worker. False if each subtask has its own worker."""

    def vertex(self, vertex: VertexId) -> JobVertex:
        """Returns the vertex with this id."""
        return next(v for v in self.vertices if v.vertex == vertex)

    def with_sources(self, changed: Callable[[SourceSpec], SourceSpec]) -> JobGraph:
        """Returns this graph with each source `s` replaced by `changed(s)`."""
        vertices = tuple(v if v.source is None else replace(v, source=changed(v.source)) for v in self.vertices)
        return replace(self, vertices=vertices)

    def tasks(self) -> tuple[TaskId, ...]:
        """Returns all subtasks, in topological order."""
        return tuple(TaskId(v.vertex, SubtaskIndex(i)) for v in self.vertices for i in range(v.parallelism))

    @property
    def table_urls(self) -> tuple[str, ...]:
        """Returns the URLs of the output tables, in the order of their operators."""
        specs = (spec for vertex in self.vertices for spec in vertex.operators if spec.sink is None)
        return tuple(spec.table for spec in specs if spec.table is not None)

    @property
    def sinks(self) -> Mapping[str, OperatorSpec]:
        """Returns the operators that write to a user's `Sink`, which commits in the coordinator, by the id of the
        sink.
        """
        specs = (spec for vertex in self.vertices for spec in vertex.operators if spec.sink is not None)
        return {spec.table: spec for spec in specs if spec.table is not None}

    @property
    def committing(self) -> Mapping[OperatorUid, OperatorSpec]:
        """Returns the operators that write to a user's `CommittingSink`, which commits in its tasks, by uid."""
        specs = (spec for vertex in self.vertices for spec in vertex.operators)
        return {spec.uid: spec for spec in specs if spec.committing is not None}

    def keyed_tasks(self) -> tuple[TaskId, ...]:
        """Returns the subtasks that may have keyed state. Creates one operator of each specification to find out."""
        keyed = {v.vertex for v in self.vertices if any(spec.factory().has_keyed_state for spec in v.operators)}
        return tuple(task for task in self.tasks() if task.vertex in keyed)

    def operator_infos(self) -> tuple[OperatorInfo, ...]:
        """Returns the description of each operator for checkpoint metadata. In a chain, the source comes first."""
        return tuple(
            OperatorInfo(
                spec.uid,
                spec.name,
                v.vertex,
                v.parallelism,
                self.max_parallelism,
                self._keys(v, spec.uid),
                spec.meaning if isinstance(spec, OperatorSpec) else None,
                spec.makes,
                self._inputs(v, spec.uid),
                spec.columns if isinstance(spec, SourceSpec) else None,
            )
            for v in self.vertices
            for spec in ((v.source,) if v.source is not None else ()) + v.operators
        )

    def _inputs(self, vertex: JobVertex, uid: OperatorUid) -> tuple[OperatorUid, ...]:
        """Returns the uids of the operators that send rows to an operator: in its chain, or over edges."""
        place = vertex.uids.index(uid)
        if place:
            return (vertex.uids[place - 1],)
        return tuple(sorted({self.emitter(edge) for edge in self.edges if edge.downstream == vertex.vertex}))

    def _keys(self, vertex: JobVertex, uid: OperatorUid) -> tuple[str, ...]:
        """Returns the key columns by which rows are sent to an operator. Empty for an operator that is not the first of
        its chain.
        """
        if uid != vertex.head:
            return ()
        return next(
            (e.partitioning.keys for e in self.edges if e.downstream == vertex.vertex and e.partitioning.keys), ()
        )

    def edge_name(self, edge: JobEdge) -> str:
        """Returns the name of an edge in checkpoints, made of the uids of the two operators that the edge joins.

        The name does not depend on how operators are chained.
        """
        ends = edge.upstream, edge.downstream, edge.side
        between = [e.index for e in self.edges if (e.upstream, e.downstream, e.side) == ends]
        tag = "" if edge.side is None else f"[{edge.side.tag}]"
        return f"{self.emitter(edge)}{tag}->{edge.downstream}#{between.index(edge.index)}"

    def emitter(self, edge: JobEdge) -> OperatorUid:
        """Returns the uid of the operator that emits the rows of an edge."""
        return self.vertex(edge.upstream).tail if edge.side is None else edge.side.operator

    def channels(self, edge: JobEdge) -> tuple[ChannelId, ...]:
        """Returns the channels of an edge: subtask i to subtask i for a forward edge, all to all for any other edge."""
        up = self.vertex(edge.upstream).parallelism
        down = self.vertex(edge.downstream).parallelism
        if edge.partitioning.kind is PartitioningKind.FORWARD:
            assert up == down, "a forward edge joins equal parallelisms"
            return tuple(ChannelId(edge.index, SubtaskIndex(i), SubtaskIndex(i)) for i in range(up))
        return tuple(ChannelId(edge.index, SubtaskIndex(i), SubtaskIndex(j)) for i in range(up) for j in range(down))

    def supports_unaligned(self, edge: JobEdge) -> bool:
        """Returns whether a barrier may overtake in-flight data on an edge (Flink's rule).

        False for a forward or broadcast edge, because its in-flight batches could not be routed again at another
        parallelism. False also for all other edges into the same vertex, because their barriers would arrive long
        before the aligned ones.
        """
        fixed = (PartitioningKind.FORWARD, PartitioningKind.BROADCAST)
        return not any(e.downstream == edge.downstream and e.partitioning.kind in fixed for e in self.edges)

    def receiver(self, channel: ChannelId) -> TaskId:
        """Returns the task at the downstream end of a channel."""
        return TaskId(self.edges[channel.edge].downstream, channel.downstream)

    def sender(self, channel: ChannelId) -> TaskId:
        """Returns the task at the upstream end of a channel."""
        return TaskId(self.edges[channel.edge].upstream, channel.upstream)

    def neighbours(self) -> dict[TaskId, set[TaskId]]:
        """Returns, for each task, the tasks with which it shares a channel."""
        found: dict[TaskId, set[TaskId]] = {task: set() for task in self.tasks()}
        for edge in self.edges:
            for channel in self.channels(edge):
                sender = self.sender(channel)
                receiver = self.receiver(channel)
                found[sender].add(receiver)
                found[receiver].add(sender)
        return found


NAME_CHARACTERS_MAX = 48


def vertex_labels(graph: JobGraph) -> dict[VertexId, str]:
    """Returns a short, unique name for people for each vertex."""
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


def _shortened(parts: Sequence[str]) -> str:
    """Joins the names of a chain's operators. If that is longer than `NAME_CHARACTERS_MAX`, uses only the first
    and the last.
    """
    whole = " -> ".join(parts)
    if len(whole) > NAME_CHARACTERS_MAX and len(parts) > 2:
        whole = f"{parts[0]} -> … -> {parts[-1]}"
    return whole if len(whole) <= NAME_CHARACTERS_MAX else whole[: NAME_CHARACTERS_MAX - 1] + "…"
