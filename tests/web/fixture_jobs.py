"""Jobs as a web server has seen them, made by hand: one that runs, one that restarts, one that has failed.

The job reads, sums by key in two subtasks, and writes. Times are in ms since the epoch, near `START_MS`.
"""

from __future__ import annotations

from dataclasses import replace

from tidegate.actors.coordinator.checkpoint_statistics import (
    CheckpointRecord,
    RestoredCheckpoint,
    SubtaskStatistics,
    vertex_statistics,
)
from tidegate.actors.coordinator.job_history import EndedCheckpoint, Failure, Line, Past, Recovery
from tidegate.actors.coordinator.job_spec import CheckpointSettings
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.job_snapshot import (
    About,
    CheckpointsNow,
    JobSnapshot,
    Known,
    PendingNow,
    PlanEdge,
    PlanVertex,
    TaskNow,
)
from tidegate.actors.runtimes.running_job import JobCard, JobProgress
from tidegate.actors.runtimes.task_metrics import SubtaskMetrics, VertexMetrics
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SavepointFormat, SnapshotKind
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, SubtaskIndex, VertexId
from tidegate.web.jobs import SeenJob, View

START_MS = 1_763_923_200_000
NOW_MS = START_MS + 61_000
JOB_ID = JobId("main-1a2b3c4d")
SOURCE, SUM, SINK = VertexId("flights"), VertexId("sum-by-key"), VertexId("to-table")
TASKS = (
    TaskId(SOURCE, SubtaskIndex(0)),
    TaskId(SUM, SubtaskIndex(0)),
    TaskId(SUM, SubtaskIndex(1)),
    TaskId(SINK, SubtaskIndex(0)),
)
CAUSE = "ValueError: a delay is missing; operator 'sum by key', row {'origin': 'JFK'}"


def about() -> About:
    """What does not change."""
    return About(
        vertices=(
            PlanVertex(SOURCE, "flights", 1, ("flights", "only delayed")),
            PlanVertex(SUM, "sum by key", 2, ("sum by key",)),
            PlanVertex(SINK, "to table", 1, ("to table",), "out"),
        ),
        edges=(PlanEdge(SOURCE, SUM, "HASH"), PlanEdge(SUM, SINK, "REBALANCE")),
        max_parallelism=128,
        checkpoints=CheckpointSettings(interval_ms=1_000, aligned_timeout_ms=100, unaligned=True),
        restart=RestartStrategy.exponential_delay(),
        backend="columnar",
        changelog=False,
        configuration={"execution.checkpointing.interval": "1000", "restart-strategy.type": "exponential-delay"},
    )


def measured(index: int, in_flight_bytes: int = 0) -> SubtaskStatistics:
    """What a subtask has told of its part in a checkpoint."""
    unaligned = in_flight_bytes > 0
    metrics = SnapshotMetrics(12 + index, 5 * index, 3, 41 + index, 4_000, 1_500, in_flight_bytes, unaligned)
    return SubtaskStatistics(61 + 10 * index, metrics, 4_000 + index, 1_500, in_flight_bytes)


def ended(
    number: int,
    kind: SnapshotKind = SnapshotKind.CHECKPOINT,
    reason: CheckpointFailureReason | None = None,
    in_flight_bytes: int = 0,
    subtasks_kept: bool = True,
) -> EndedCheckpoint:
    """A checkpoint that is over; of a failed one all but the sink have acknowledged."""
    tasks = TASKS if reason is None else TASKS[:-1]
    subtasks = {task: measured(index, in_flight_bytes) for index, task in enumerate(tasks)}
    triggered_ms = START_MS + 1_000 * number
    record = CheckpointRecord(
        CheckpointId(number),
        kind,
        triggered_ms,
        triggered_ms + 84 + number,
        tasks=len(TASKS),
        acknowledged=len(tasks),
        state_bytes=sum(each.state_bytes for each in subtasks.values()),
        incremental_bytes=sum(each.incremental_bytes for each in subtasks.values()),
        in_flight_bytes=sum(each.in_flight_bytes for each in subtasks.values()),
        vertices=vertex_statistics(subtasks),
        reason=reason,
        message=None if reason is None else f"{reason.value}: to table[0] did not answer",
        path=f"/savepoints/savepoint-{JOB_ID}-{number}" if kind.is_savepoint else None,
    )
    told = SavepointFormat.CANONICAL if kind.is_savepoint else None
    return EndedCheckpoint(number, record, subtasks if subtasks_kept else {}, told)


def history() -> tuple[EndedCheckpoint, ...]:
    """Twenty: one unaligned, one failed, one savepoint; of the oldest keeps only totals."""
    return (
        ended(1, subtasks_kept=False),
        *(ended(number) for number in range(2, 17)),
        ended(17, in_flight_bytes=640),
        ended(18, reason=CheckpointFailureReason.EXPIRED),
        ended(19, SnapshotKind.SAVEPOINT),
        ended(20),
    )


def past() -> Past:
    """One restart of the two tasks that sum, after one of them has failed."""
    failure = Failure(START_MS + 21_000, AttemptNumber(0), TASKS[1], CAUSE)
    lines = (
        Line(START_MS, f"Job main ({JOB_ID}) was submitted, 4 tasks. It starts afresh"),
        Line(START_MS + 18_500, "Checkpoint 18 failed after 30.0 s: it expired", CheckpointId(18), None, trouble=True),
        Line(START_MS + 21_000, f"Task sum-by-key[0] failed: {CAUSE}", None, AttemptNumber(0), True, True),
        Line(
            START_MS + 22_640, "Attempt 1 is running, 640 ms after its deployment", None, AttemptNumber(1), False, True
        ),
    )
    recovery = Recovery(AttemptNumber(1), 2, CheckpointId(17), failure, START_MS + 22_000, START_MS + 22_640)
    since = ((JobStatus.DEPLOYING, START_MS + 22_000), (JobStatus.RUNNING, START_MS + 22_640))
    return Past(9, lines, (failure,), (recovery,), since)


def vertices() -> tuple[VertexMetrics, ...]:
    """The source is held up by the second of the two tasks that sum; the sink has not reported."""

    def told(subtask: int, busy_ms: float, held_up_ms: float, watermark_ms: int | None) -> SubtaskMetrics:
        return SubtaskMetrics(
            subtask, 1, NOW_MS - 300, 91_234, 5_000, 912_340, 50_000, 1_200.0, 3.0, 12_000.0, 30.0,
            busy_ms, held_up_ms, 1_000 - busy_ms - held_up_ms, held_up_ms > 0, 0, watermark_ms, watermark_ms,
        )  # fmt: skip

    return (
        VertexMetrics(SOURCE, "flights", 1, (told(0, 200.0, 700.0, None),)),
        VertexMetrics(SUM, "sum by key", 2, (told(0, 300.0, 0.0, NOW_MS - 5_000), told(1, 950.0, 0.0, NOW_MS - 9_000))),
        VertexMetrics(SINK, "to table", 1),
    )


def progress(status: str, attempt: int = 1, reason: str | None = None) -> JobProgress:
    """At a glance."""
    return JobProgress(status, reason, attempt, attempt, 18, 1, 20, 104, 22_000, CAUSE, {SOURCE: 91_234})


def running_job() -> SeenJob:
    """It runs; checkpoint 21 is under way, and two of its tasks have acknowledged."""
    pending = PendingNow(
        CheckpointId(21),
        SnapshotKind.CHECKPOINT,
        SavepointFormat.CANONICAL,
        NOW_MS - 200,
        4,
        {TASKS[0]: measured(0), TASKS[1]: measured(1)},
        {SOURCE: 1, SUM: 2, SINK: 1},
    )
    over = history()
    now = CheckpointsNow(
        triggered=21,
        in_progress=1,
        completed=19,
        failed=1,
        restored=1,
        latest_completed=over[-1].record,
        latest_savepoint=over[-2].record,
        latest_failed=over[-3].record,
        latest_restored=RestoredCheckpoint(CheckpointId(17), START_MS + 22_000, f"/ckpt/{JOB_ID}/chk-17"),
        pending=(pending,),
        kept=(CheckpointId(20),),
    )
    card = JobCard(JOB_ID, "main", "/ckpt", "/savepoints", False, START_MS)
    snapshot = JobSnapshot(
        card=card,
        at_ms=NOW_MS,
        status=JobStatus.RUNNING,
        ending=None,
        progress=progress("running"),
        running_since_ms=START_MS + 22_640,
        known=Known(1, 20, 9),
        about=about(),
        tasks=tuple(TaskNow(task, "RUNNING", 1, 4_000 + index, "node-a") for index, task in enumerate(TASKS)),
        checkpoints=now,
        ended=over,
        past=past(),
        values={"uptime": 38_360, "downtime": 0, "numRestarts": 1, "lastCheckpointDuration": 104},
        vertices=vertices(),
    )
    return SeenJob(snapshot, about(), over, past(), NOW_MS)


def restarting_job() -> SeenJob:
    """A task has failed for the second time; the two that sum wait for their next attempt."""
    job = running_job()
    failure = Failure(NOW_MS - 700, AttemptNumber(1), TASKS[2], "WorkerCrashedError: the process of the task has died")
    before = past()
    now = replace(
        before,
        version=10,
        failures=(*before.failures, failure),
        since_ms=((JobStatus.RUNNING, START_MS + 22_640), (JobStatus.RESTARTING, NOW_MS - 700)),
    )
    tasks = tuple(replace(t, status="SCHEDULED") if t.task.vertex == SUM else t for t in job.snapshot.tasks)
    checkpoints = replace(job.snapshot.checkpoints, pending=(), in_progress=0)
    snapshot = replace(
        job.snapshot,
        status=JobStatus.RESTARTING,
        progress=progress("restarting"),
        running_since_ms=None,
        tasks=tasks,
        checkpoints=checkpoints,
        past=now,
        vertices=(),
    )
    return replace(job, snapshot=snapshot, past=now)


def failed_job() -> SeenJob:
    """It has failed, and is over."""
    job = restarting_job()
    reason = "no restart is left: WorkerCrashedError: the process of the task has died"
    now = replace(job.past, version=11, since_ms=(*job.past.since_ms, (JobStatus.FAILED, NOW_MS - 100)))
    card = replace(job.snapshot.card, job_id=JobId("other-00ff00ff"), name="other")
    tasks = tuple(replace(task, status="FAILED", pid=None, node_id=None) for task in job.snapshot.tasks)
    snapshot = replace(
        job.snapshot, card=card, status=JobStatus.FAILED, progress=progress("failed", 1, reason), tasks=tasks, past=now
    )
    return replace(job, snapshot=snapshot, past=now)


def view_of(*jobs: SeenJob) -> View:
    """A view of these jobs."""
    return View({job.job_id: job for job in jobs}, NOW_MS)
