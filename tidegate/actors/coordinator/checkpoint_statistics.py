"""Statistics of a job's checkpoints: counts, summaries, a history, and the newest of each kind (Flink's
`CheckpointStatsTracker`).

The modules in `checkpoints/` update the statistics, and the handle of a job shows them. Times are in ms, sizes in
bytes. They are part of the coordinator's state, so a new coordinator continues with them. Their size is limited: the
history has aggregates of each vertex for the last `history_max` checkpoints, and only the newest completed checkpoint
has details of subtasks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.storage.checkpoints.metadata import SnapshotKind, SubtaskState
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, VertexId


@wire
@dataclass(frozen=True, slots=True)
class Summary:
    """Count, sum, minimum and maximum of some numbers. All are 0 if there are no numbers."""

    count: int = 0
    total: int = 0
    min: int = 0
    max: int = 0

    @property
    def avg(self) -> float:
        """Mean of the numbers, 0 if there are none."""
        return self.total / self.count if self.count else 0.0

    def add(self, value: int) -> Summary:
        """Returns a new summary that includes one more number, `value`."""
        if not self.count:
            return Summary(1, value, value, value)
        return Summary(self.count + 1, self.total + value, min(self.min, value), max(self.max, value))

    @staticmethod
    def of(values: Iterable[int]) -> Summary:
        """Returns the summary of some numbers."""
        numbers = list(values)
        return Summary(len(numbers), sum(numbers), min(numbers), max(numbers)) if numbers else Summary()


@wire
@dataclass(frozen=True, slots=True)
class SubtaskStatistics:
    """Statistics of one subtask's part of a checkpoint. Times are in ms, sizes in bytes.

    `end_to_end_ms` is the time from the trigger to the acknowledgement. `state_bytes` is the size of all state of the
    subtask, and `incremental_bytes` the part that was written for this checkpoint.
    """

    end_to_end_ms: int
    metrics: SnapshotMetrics
    state_bytes: int
    incremental_bytes: int
    in_flight_bytes: int

    @staticmethod
    def of(end_to_end_ms: int, metrics: SnapshotMetrics, state: SubtaskState) -> SubtaskStatistics:
        """Returns the statistics of a task's acknowledgement. The sizes count all files to which its `state` refers."""
        in_flight_bytes = 0 if state.in_flight is None else state.in_flight.size_bytes
        return SubtaskStatistics(
            end_to_end_ms, metrics, state.size_bytes - in_flight_bytes, metrics.incremental_bytes, in_flight_bytes
        )


@wire
@dataclass(frozen=True, slots=True)
class VertexStatistics:
    """Statistics of one vertex in a checkpoint, over the subtasks that acknowledged it.

    `subtasks` is their number, and `unaligned` the number of them with an unaligned snapshot.
    """

    vertex: VertexId
    subtasks: int
    end_to_end_ms: Summary
    start_delay_ms: Summary
    alignment_ms: Summary
    sync_ms: Summary
    async_ms: Summary
    state_bytes: Summary
    incremental_bytes: Summary
    in_flight_bytes: Summary
    unaligned: int


@wire
@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Statistics of a checkpoint that has completed or failed. `reason` is the reason of the failure, or None.

    `state_bytes` is the size of all its state, `incremental_bytes` the part that was written for this checkpoint, and
    `in_flight_bytes` the data that unaligned barriers overtook. `tasks` is the number of tasks, with the finished ones.
    `path` is the folder of a savepoint.
    """

    checkpoint_id: CheckpointId
    kind: SnapshotKind
    triggered_at_ms: int
    ended_at_ms: int
    tasks: int
    acknowledged: int
    state_bytes: int
    incremental_bytes: int
    in_flight_bytes: int
    vertices: tuple[VertexStatistics, ...]
    reason: CheckpointFailureReason | None = None
    message: str | None = None
    path: str | None = None
    requests: tuple[str, ...] = ()
    """Ids of the users' requests for this checkpoint, which a new coordinator can still answer."""

    @property
    def duration_ms(self) -> int:
        """Returns the time from the trigger to the end of the checkpoint, in ms."""
        return self.ended_at_ms - self.triggered_at_ms


@wire
@dataclass(frozen=True, slots=True)
class RestoredCheckpoint:
    """The checkpoint from which an attempt was started. `pointer` is its path."""

    checkpoint_id: CheckpointId
    at_ms: int
    pointer: str


@wire
@dataclass(frozen=True, slots=True)
class PassedOverCheckpoint:
    """A damaged checkpoint that was skipped at a restore. `reason` describes the damage."""

    checkpoint_id: CheckpointId
    at_ms: int
    reason: str


@wire
@dataclass(slots=True)
class CheckpointStatistics:
    """Checkpoint statistics of one job over all attempts.

    `history` has the ended checkpoints, and begins with the oldest checkpoint. `by_kind` has the number of completed
    checkpoints of each kind.
    """

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0
    passed_over: int = 0
    """Damaged checkpoints that were skipped for an older one."""
    by_kind: dict[str, int] = field(default_factory=dict)
    duration_ms: Summary = Summary()
    state_bytes: Summary = Summary()
    in_flight_bytes: Summary = Summary()
    history: tuple[CheckpointRecord, ...] = ()
    latest_completed: CheckpointRecord | None = None
    latest_savepoint: CheckpointRecord | None = None
    latest_failed: CheckpointRecord | None = None
    latest_restored: RestoredCheckpoint | None = None
    latest_passed_over: PassedOverCheckpoint | None = None
    subtasks: dict[TaskId, SubtaskStatistics] = field(default_factory=dict)
    """Statistics of the subtasks in the newest completed checkpoint."""

    def was_triggered(self) -> None:
        """Records that a checkpoint was triggered."""
        self.triggered += 1
        self.in_progress += 1

    def has_completed(
        self, record: CheckpointRecord, subtasks: dict[TaskId, SubtaskStatistics], history_max: int
    ) -> None:
        """Records a completed checkpoint, or a savepoint whose copy is complete, possibly after newer checkpoints."""
        self.in_progress -= 1
        self.completed += 1
        self.by_kind[record.kind.value] = self.by_kind.get(record.kind.value, 0) + 1
        self.duration_ms = self.duration_ms.add(record.duration_ms)
        self.state_bytes = self.state_bytes.add(record.state_bytes)
        self.in_flight_bytes = self.in_flight_bytes.add(record.in_flight_bytes)
        if self.latest_completed is None or record.checkpoint_id > self.latest_completed.checkpoint_id:
            self.latest_completed = record
            self.subtasks = subtasks
        latest = self.latest_savepoint
        if record.kind.is_savepoint and (latest is None or record.checkpoint_id > latest.checkpoint_id):
            self.latest_savepoint = record
        self._remember(record, history_max)

    def has_failed(self, record: CheckpointRecord, history_max: int) -> None:
        """Records that a pending checkpoint has failed."""
        self.in_progress -= 1
        self.failed += 1
        self.latest_failed = record
        self._remember(record, history_max)

    def was_restored(self, restored: RestoredCheckpoint) -> None:
        """Records that an attempt starts from a checkpoint."""
        self.restored += 1
        self.latest_restored = restored

    def was_passed_over(self, damaged: PassedOverCheckpoint) -> None:
        """Records that a restore skipped a damaged checkpoint."""
        self.passed_over += 1
        self.latest_passed_over = damaged

    def copy(self) -> CheckpointStatistics:
        """Returns a copy that later changes of this object do not affect."""
        return replace(self, by_kind=dict(self.by_kind))

    def _remember(self, record: CheckpointRecord, history_max: int) -> None:
        self.history = (*self.history, record)[-history_max:] if history_max > 0 else ()


def vertex_statistics(subtasks: dict[TaskId, SubtaskStatistics]) -> tuple[VertexStatistics, ...]:
    """Returns the aggregated statistics of each vertex, sorted by the name of the vertex. The cost is linear in the
    subtasks.
    """
    by_vertex: dict[VertexId, list[SubtaskStatistics]] = {}
    for task, subtask in subtasks.items():
        by_vertex.setdefault(task.vertex, []).append(subtask)
    return tuple(
        VertexStatistics(
            vertex,
            len(parts),
            Summary.of(p.end_to_end_ms for p in parts),
            Summary.of(p.metrics.start_delay_ms for p in parts),
            Summary.of(p.metrics.alignment_ms for p in parts),
            Summary.of(p.metrics.sync_ms for p in parts),
            Summary.of(p.metrics.async_ms for p in parts),
            Summary.of(p.state_bytes for p in parts),
            Summary.of(p.incremental_bytes for p in parts),
            Summary.of(p.in_flight_bytes for p in parts),
            sum(p.metrics.unaligned for p in parts),
        )
        for vertex, parts in sorted(by_vertex.items())
    )
