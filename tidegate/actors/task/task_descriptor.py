"""`TaskDescriptor`: the place of one task in the job, which the task gets when it is deployed. `TaskStatus`: the states
of a task.
"""

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
    """The output of one task over one edge: a channel for each downstream subtask that it reaches."""

    partitioning: Partitioning
    downstream_parallelism: int
    channels: tuple[ChannelId, ...]
    unaligned: bool = True
    """True if barriers may overtake on this edge."""
    side: SideOutput | None = None
    """The side output whose rows it carries; None for the output of the chain."""
    combines: LocalAggregation | None = None
    """The way in which rows of a batch are combined before they are split; None if they are not combined."""
    event_time: bool = True
    """True if an operator behind it waits for watermarks."""


@dataclass(frozen=True, slots=True)
class TaskDescriptor:
    """The place of a task in its job, with all settings that the task machine needs."""

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
    """For each of `inputs`, the number of the input of the first operator to which it leads."""
    exactly_once: bool = True
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """The backend of keyed state. Its folder belongs to this task alone."""
    asks_for_splits: bool = False
    """True if the coordinator assigns the splits of the source."""
    job_id: JobId = JobId("")
    """The job. Commit tokens contain it."""

    @property
    def turn_rows(self) -> BatchRows:
        """Returns the least and the most rows of a turn."""
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
    """Returns the descriptor of one task. `splits`: the splits with which a source task starts if it restores
    nothing.
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

    CREATED -> READY its state is restored and its operators are open (`TaskRestored`) READY -> RUNNING every task of
    the attempt is ready (`TasksStarted`) RUNNING -> FINISHING all input has ended; the operators emit what they have
    left, as there is room for it FINISHING -> END_OF_DATA the operators have finished; the task still takes part in
    checkpoints, because what its sinks hold is committed by one END_OF_DATA -> FINISHED a final checkpoint is complete,
    `EndOfPartition` came on all inputs, and all output has left
    """

    CREATED = "created"
    READY = "ready"
    RUNNING = "running"
    FINISHING = "finishing"
    END_OF_DATA = "end_of_data"
    FINISHED = "finished"
