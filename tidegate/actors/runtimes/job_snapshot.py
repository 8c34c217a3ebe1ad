"""`JobSnapshot`: the status of a job for pages and scripts. A runtime sends one to a web server at most once a second.

Rules:

- Its size is limited, and it consists of immutable objects that the coordinator has anyway, so it costs little compared
  with a checkpoint. Any thread may create it.
- The caller passes which parts it has already (`Known`). Parts that do not change are sent once: the graph, the
  settings, finished checkpoints, and the history.
- It contains no code and no values of rows. Error texts come from events, which limit their length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tidegate.actors.coordinator.checkpoint_statistics import (
    CheckpointRecord,
    RestoredCheckpoint,
    SubtaskStatistics,
)
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.job_history import EndedCheckpoint, JobHistory, Past
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.job_context import JobContext
from tidegate.actors.graph.job_graph import DEFAULT_GROUP, JobVertex
from tidegate.actors.runtimes.job_metrics import JobTimes, RecoveryEnds, job_values
from tidegate.actors.runtimes.running_job import Answer, JobCard, JobProgress, TaskProcessInfo
from tidegate.actors.runtimes.task_metrics import VertexMetrics
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.ids import AttemptNumber, CheckpointId, VertexId

REQUESTS_MAX = 100
"""Limit of requests that one call answers."""


@dataclass(frozen=True, slots=True)
class PlanVertex:
    """A vertex of the job graph for pages. `operators` are their names, first the source or first operator.

    `slot_group` is None if the vertex has its own slots.
    """

    vertex: VertexId
    name: str
    parallelism: int
    operators: tuple[str, ...]
    slot_group: str | None = DEFAULT_GROUP


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """An edge of the job graph for pages. `ship_strategy` is HASH, FORWARD, REBALANCE or BROADCAST."""

    upstream: VertexId
    downstream: VertexId
    ship_strategy: str


@dataclass(frozen=True, slots=True)
class About:
    """The properties of a job that do not change while it runs: graph and settings. `vertices` are in topological
    order.
    """

    vertices: tuple[PlanVertex, ...]
    edges: tuple[PlanEdge, ...]
    max_parallelism: int
    checkpoints: CheckpointSettings
    restart: RestartStrategy
    backend: str
    changelog: bool
    configuration: Mapping[str, str]

    @staticmethod
    def of(context: JobContext, spec: JobSpec) -> About:
        """Returns the properties from the context and the spec of a job."""
        graph, backend = context.graph, context.options.backend
        return About(
            tuple(_vertex(each) for each in graph.vertices),
            tuple(PlanEdge(e.upstream, e.downstream, e.partitioning.kind.value.upper()) for e in graph.edges),
            graph.max_parallelism,
            spec.checkpoints,
            spec.restart,
            backend.kind,
            backend.changelog,
            context.configuration,
        )


@dataclass(frozen=True, slots=True)
class TaskNow:
    """The present state of a task: its status as Flink names it, its attempt, and its process, if it has one."""

    task: TaskId
    status: str
    attempt: int
    pid: int | None = None
    node_id: str | None = None
    actor: str | None = None
    """The name of its Ray actor. The name of a process that was a standby does not contain the task."""


@dataclass(frozen=True, slots=True)
class PendingNow:
    """A pending checkpoint, with the statistics of the tasks that have acknowledged it."""

    checkpoint_id: CheckpointId
    kind: SnapshotKind
    savepoint_format: SavepointFormat
    triggered_at_ms: int
    tasks: int
    subtasks: Mapping[TaskId, SubtaskStatistics]
    vertex_tasks: Mapping[VertexId, int]
    """The number of tasks of each vertex that take part."""


@dataclass(frozen=True, slots=True)
class CheckpointsNow:
    """The checkpoints of a job: their numbers over all attempts, the newest of each kind, and the pending ones."""

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0
    latest_completed: CheckpointRecord | None = None
    latest_savepoint: CheckpointRecord | None = None
    latest_failed: CheckpointRecord | None = None
    latest_restored: RestoredCheckpoint | None = None
    pending: tuple[PendingNow, ...] = ()
    kept: tuple[CheckpointId, ...] = ()
    """Ids of the completed checkpoints that have not been deleted."""


@dataclass(frozen=True, slots=True)
class Known:
    """The parts of a job's snapshot that a caller already has.

    `generation` is the generation of the coordinator that sent them, or 0 if the caller has none. `past_version` is the
    version of the history.
    """

    generation: int = 0
    ended: int = 0
    """`EndedCheckpoint.number` of the newest finished checkpoint that the caller has."""
    past_version: int = -1


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The status of a job at one time. Times are in ms since the epoch, by the coordinator's clock.

    `about` and `past` are None if the caller has them. `ended` are finished checkpoints that the caller lacks, oldest
    first.
    """

    card: JobCard
    at_ms: int
    status: JobStatus
    ending: JobStatus | None
    """The status in which the job is going to end, or None until that is decided."""
    progress: JobProgress
    running_since_ms: int | None
    known: Known
    about: About | None = None
    tasks: tuple[TaskNow, ...] = ()
    checkpoints: CheckpointsNow = CheckpointsNow()
    ended: tuple[EndedCheckpoint, ...] = ()
    past: Past | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the job, by Flink's names."""
    vertices: tuple[VertexMetrics, ...] = ()
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """The answers to the requests of the caller."""
    recovery_ends: Mapping[AttemptNumber, RecoveryEnds] = field(default_factory=dict)
    """The `RecoveryEnds` of the newest recoveries, by attempt."""


def snapshot_of(
    card: JobCard,
    about: About | None,
    state: CoordinatorState,
    job_history: JobHistory,
    progress: JobProgress,
    now_ms: int,
    *,
    known: Known = Known(),
    processes: Iterable[TaskProcessInfo] = (),
    vertices: tuple[VertexMetrics, ...] = (),
    answers: Mapping[str, Answer] | None = None,
    recovery_ends: Mapping[AttemptNumber, RecoveryEnds] | None = None,
) -> JobSnapshot:
    """Returns the status of the job without the parts that the caller has (`known`).

    Pass `about=None` only for a caller that has it.
    """
    past = job_history.past
    news = known if known.generation == state.generation else Known()
    ended = job_history.ended_after(news.ended)
    last = Known(state.generation, ended[-1].number if ended else news.ended, past.version)
    return JobSnapshot(
        card,
        now_ms,
        state.status,
        state.ending_status,
        progress,
        state.running_since_ms,
        last,
        about=None if news.generation else about,
        tasks=tasks_now(state, {each.task: each for each in processes}),
        checkpoints=_checkpoints_now(state),
        ended=ended,
        past=None if past.version == news.past_version else past,
        values=_values(state, progress, card, job_history, now_ms),
        vertices=vertices,
        answers={} if answers is None else answers,
        recovery_ends={} if recovery_ends is None else recovery_ends,
    )


_AT_END = {
    JobStatus.FINISHED: "FINISHED",
    JobStatus.SUSPENDED: "FINISHED",
    JobStatus.CANCELLED: "CANCELED",
    JobStatus.FAILED: "FAILED",
}


def tasks_now(state: CoordinatorState, processes: Mapping[TaskId, TaskProcessInfo]) -> tuple[TaskNow, ...]:
    """Returns the present state of all tasks, in the order of the graph."""
    if state.spec is None:
        return ()
    found = []
    for task in state.spec.tasks:
        process = processes.get(task)
        status = _status_of(task, state, process is not None)
        now = TaskNow(task, status, max(0, state.attempt_of(task)))
        if process is not None:
            now = replace(now, pid=process.pid, node_id=process.node_id, actor=process.actor)
        found.append(now)
    return tuple(found)


def _status_of(task: TaskId, state: CoordinatorState, has_process: bool) -> str:
    if task in state.finished:
        return "FINISHED"
    if state.status.terminal:
        return _AT_END[state.status]
    if task in state.ready:
        return "RUNNING"
    if state.attempt < 0 or state.status is JobStatus.CREATED:
        return "CREATED"
    if task in state.down or state.status is JobStatus.RESTARTING:
        return "SCHEDULED"
    return "INITIALIZING" if has_process else "DEPLOYING"


def _checkpoints_now(state: CoordinatorState) -> CheckpointsNow:
    statistics = state.statistics
    return CheckpointsNow(
        statistics.triggered,
        statistics.in_progress,
        statistics.completed,
        statistics.failed,
        statistics.restored,
        statistics.latest_completed,
        statistics.latest_savepoint,
        statistics.latest_failed,
        statistics.latest_restored,
        tuple(_pending_now(state, each) for each in list(state.under_way.values())),
        state.kept,
    )


def _pending_now(state: CoordinatorState, pending: PendingCheckpoint) -> PendingNow:
    taking_part = Counter(task.vertex for task in (() if state.spec is None else state.spec.tasks))
    taking_part.subtract(task.vertex for task in pending.finished)
    return PendingNow(
        pending.checkpoint_id,
        pending.properties.kind,
        pending.properties.savepoint_format,
        pending.triggered_at_ms,
        sum(taking_part.values()),
        dict(pending.subtasks),
        dict(taking_part),
    )


def _vertex(vertex: JobVertex) -> PlanVertex:
    source = () if vertex.source is None else (vertex.source.name,)
    names = (*source, *(spec.name for spec in vertex.operators))
    slot_group = vertex.slot_group if vertex.resources is None else None
    return PlanVertex(vertex.vertex, vertex.name, vertex.parallelism, names, slot_group)


def _values(
    state: CoordinatorState, progress: JobProgress, card: JobCard, job_history: JobHistory, now_ms: int
) -> dict[str, float]:
    times = JobTimes(card.submitted_at_ms, job_history.down_since_ms).at(state, now_ms)
    values = job_values(state, progress, times, now_ms)
    return {metric.flink: value for metric, value in values.items() if metric.flink is not None}
