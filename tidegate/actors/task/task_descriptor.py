"""`TaskDescriptor`: the settings of one task, with which it is deployed. `TaskStatus`: the states of a task."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tidegate.actors.graph.job_graph import JobGraph, OperatorSpec, SourceSpec
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import ExternallyInducedSource
from tidegate.operators.batch_rows import BatchRows, rows_of_a_turn
from tidegate.operators.local_aggregation import LocalAggregation
from tidegate.protocol.edges import Partitioning, SideOutput
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.ids import AttemptNumber, JobId


@dataclass(frozen=True, slots=True)
class OutputEdge:
    """The outgoing edge of one task, with a channel for each downstream subtask that the task sends to."""

    partitioning: Partitioning
    downstream_parallelism: int
    channels: tuple[ChannelId, ...]
    unaligned: bool = True
    """True if barriers may overtake on this edge."""
    side: SideOutput | None = None
    """The side output that the edge carries, or None for the output of the chain."""
    combines: LocalAggregation | None = None
    """How rows of a batch are combined before they are partitioned, or None for not at all."""
    event_time: bool = True
    """True if an operator behind the edge waits for watermarks."""


@dataclass(frozen=True, slots=True)
class TaskDescriptor:
    """The operators, channels and settings of one task in one attempt, for the task machine."""

    task: TaskId
    name: str
    attempt: AttemptNumber
    parallelism: int
    max_parallelism: int
    operators: tuple[OperatorSpec, ...]
    source: SourceSpec | None
    splits: tuple[SplitPosition, ...]
    inputs: tuple[ChannelId, ...]
    outputs: tuple[OutputEdge, ...]
    limits: BufferLimits
    source_rows_max: int
    input_indices: tuple[int, ...] = ()
    """For each channel in `inputs`, the input of the first operator that receives its rows."""
    exactly_once: bool = True
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """The options of the keyed state backend. Its folder belongs to this task alone."""
    asks_for_splits: bool = False
    """True if the coordinator assigns the splits of the source."""
    job_id: JobId = JobId("")
    """The id of the job, which commit tokens contain."""

    @property
    def turn_rows(self) -> BatchRows:
        """Returns the limits of the number of rows that a turn processes."""
        return rows_of_a_turn((spec.batch_rows for spec in self.operators), self.limits.turn_rows_max)

    @property
    def externally_induced(self) -> bool:
        """Returns whether the reader of the source decides where checkpoints begin."""
        return self.source is not None and isinstance(self.source.source, ExternallyInducedSource)


def describe_task(
    graph: JobGraph,
    task: TaskId,
    attempt: AttemptNumber,
    splits: tuple[SplitPosition, ...],
    limits: BufferLimits,
    source_rows_max: int,
    exactly_once: bool = True,
    backend: StateBackendOptions | None = None,
    asks_for_splits: bool = False,
    job_id: JobId = JobId(""),
) -> TaskDescriptor:
    """Returns the descriptor of one task.

    `splits`: the splits that a source task reads if it starts without a checkpoint.
    """
    vertex = graph.vertex(task.vertex)
    inputs = tuple(
        (channel, edge.input)
        for edge in graph.edges
        if edge.downstream == task.vertex
        for channel in graph.channels(edge)
        if channel.downstream == task.subtask
    )
    outputs = tuple(
        OutputEdge(
            edge.partitioning,
            graph.vertex(edge.downstream).parallelism,
            tuple(channel for channel in graph.channels(edge) if channel.upstream == task.subtask),
            graph.supports_unaligned(edge),
            edge.side,
            edge.combines,
            edge.event_time,
        )
        for edge in graph.edges
        if edge.upstream == task.vertex
    )
    return TaskDescriptor(
        task=task,
        name=f"{vertex.name} ({task.subtask + 1}/{vertex.parallelism})",
        attempt=attempt,
        parallelism=vertex.parallelism,
        max_parallelism=graph.max_parallelism,
        operators=vertex.operators,
        source=vertex.source,
        splits=splits,
        inputs=tuple(channel for channel, _ in inputs),
        outputs=outputs,
        limits=limits,
        source_rows_max=source_rows_max,
        input_indices=tuple(index for _, index in inputs),
        exactly_once=exactly_once,
        backend=backend if backend is not None else StateBackendOptions(),
        asks_for_splits=asks_for_splits,
        job_id=job_id,
    )


class TaskStatus(enum.Enum):
    """The states of a task.

    - CREATED: the task was created, and reads its state.
    - READY: its state is restored and its operators are open (`TaskRestored`).
    - RUNNING: all tasks of the attempt are ready (`TasksStarted`).
    - FINISHING: all input has ended, and the operators emit their remaining rows, as there is room for them.
    - END_OF_DATA: the operators have finished. The task still takes part in checkpoints, because a checkpoint commits
      the rows of its sinks.
    - FINISHED: a final checkpoint is complete, `EndOfPartition` arrived on all inputs, and all output was sent.
    """

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    FINISHING = "finishing"
    END_OF_DATA = "end_of_data"
    FINISHED = "finished"
