"""A coordinator machine driven by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from any_permit import ANY_PERMIT

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_spec import CheckpointSettings, JobEdgeInfo, JobSpec, RestorePoint
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    Committable,
    DataFile,
    OperatorInfo,
    SnapshotKind,
    StateHandle,
    SubtaskState,
)
from tidegate.storage.ids import (
    AttemptNumber,
    CheckpointId,
    Generation,
    JobId,
    OperatorUid,
    SubtaskIndex,
    VertexId,
)

InstructionT = TypeVar("InstructionT")

SOURCE = TaskId(VertexId("source"), SubtaskIndex(0))
SINK = TaskId(VertexId("sink"), SubtaskIndex(0))
TASKS = (SOURCE, SINK)
OPERATORS = tuple(
    OperatorInfo(OperatorUid(t.vertex), t.vertex, t.vertex, parallelism=1, max_parallelism=128) for t in TASKS
)
SPEC = JobSpec(
    job_id=JobId("job-12345678"),
    job_name="job",
    root="memory://job",
    tasks=TASKS,
    sources=(SOURCE,),
    operators=OPERATORS,
    checkpoints=CheckpointSettings(interval_ms=1_000, timeout_ms=10_000),
    restart=RestartStrategy.fixed_delay(2, 500),
    edges=(JobEdgeInfo(SOURCE.vertex, SINK.vertex, pointwise=False),),
    storage_attempts_max=3,
    storage_retry_ms=100,
)


TARGET = "memory://savepoints"
PATH = f"{TARGET}/savepoint-job-12345678-1"


def spec(restart: RestartStrategy | None = None, restore: RestorePoint | None = None, **settings: object) -> JobSpec:
    """The usual job with other checkpoint settings, restart strategy or restore point."""
    changed = replace(SPEC, checkpoints=replace(SPEC.checkpoints, **settings), restore=restore)
    return changed if restart is None else replace(changed, restart=restart)


def handle(checkpoint_id: int, task: TaskId) -> StateHandle:
    """The state file of one task in one checkpoint."""
    return StateHandle(f"{SPEC.job_id}/chk-{checkpoint_id}/{task.vertex}-0", None, 10, "sum", ())


def discarding(checkpoint_id: int, task: TaskId) -> do.DiscardFiles:
    """What deletes that file."""
    path = handle(checkpoint_id, task).path
    assert path is not None
    return do.DiscardFiles(CheckpointId(checkpoint_id), (path,), permit=ANY_PERMIT)


def files(first_index: int, *names: str) -> Committable:
    """Sink files, the first with this number."""
    uid = OperatorUid(SINK.vertex)
    return Committable(uid, SINK.subtask, "table", first_index, tuple(DataFile(n, 1, 1, "sum") for n in names))


def part(checkpoint_id: int, task: TaskId, *committables: Committable, finished: bool = False) -> SubtaskState:
    """One task's part of a checkpoint."""
    return SubtaskState(task.vertex, task.subtask, handle(checkpoint_id, task), committables, finished)


class Coordinator:
    """One machine with a clock; methods tell it facts and return what it asks for."""

    def __init__(self, job: JobSpec = SPEC, machine: CoordinatorMachine | None = None) -> None:
        self.machine = machine if machine is not None else CoordinatorMachine()
        self.spec = job
        self.at_ms = 0

    @property
    def state(self) -> CoordinatorState:
        return self.machine.state

    @property
    def status(self) -> JobStatus:
        return self.state.status

    def tell(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        return self.machine.handle(event)

    def start(self, generation: int = 1) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.CoordinatorStarted(self.at_ms, Generation(generation)))

    def submit(self) -> list[do.CoordinatorInstruction]:
        return self.start() + self.tell(ev.JobSubmitted(self.at_ms, self.spec))

    def all_ready(self) -> list[do.CoordinatorInstruction]:
        return [i for task in TASKS for i in self.tell(ev.TaskReady(self.at_ms, self.state.attempt, task))]

    def run(self) -> Coordinator:
        """Submitted and running."""
        self.submit()
        self.all_ready()
        assert self.status is JobStatus.RUNNING
        return self

    def fire(self, timer: str, at_ms: int | None = None) -> list[do.CoordinatorInstruction]:
        self.at_ms = self.at_ms if at_ms is None else at_ms
        return self.tell(ev.TimerFired(self.at_ms, timer))

    def request(
        self, request: str = "r", kind: SnapshotKind = SnapshotKind.CHECKPOINT
    ) -> list[do.CoordinatorInstruction]:
        target = TARGET if kind.is_savepoint else None
        return self.tell(ev.CheckpointRequested(self.at_ms, request, kind, target))

    def start_savepoint(self, kind: SnapshotKind = SnapshotKind.SAVEPOINT, request: str = "wanted") -> int:
        """Trigger a savepoint; returns its number."""
        (trigger,) = only(self.request(request, kind), do.TriggerCheckpoint)
        return trigger.checkpoint_id

    def acknowledge_all(self, checkpoint_id: int, finished: bool = False) -> list[do.CoordinatorInstruction]:
        return [i for task in TASKS for i in self.ack(checkpoint_id, task, finished=finished)]

    def exported(self, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.SavepointWritten(self.at_ms, CheckpointId(checkpoint_id), PATH))

    def not_exported(
        self, checkpoint_id: int, permanent: bool = False, away_ms: int = 0
    ) -> list[do.CoordinatorInstruction]:
        failed = ev.SavepointWriteFailed(self.at_ms, CheckpointId(checkpoint_id), "disk full", permanent, away_ms)
        return self.tell(failed)

    def ack(
        self,
        checkpoint_id: int,
        task: TaskId,
        *committables: Committable,
        finished: bool = False,
        attempt: int | None = None,
    ) -> list[do.CoordinatorInstruction]:
        number = self.state.attempt if attempt is None else AttemptNumber(attempt)
        state = part(checkpoint_id, task, *committables, finished=finished)
        pending = self.state.pending.get(CheckpointId(checkpoint_id))
        kind = SnapshotKind.CHECKPOINT if pending is None else pending.properties.kind
        return self.tell(
            ev.CheckpointAcknowledged(self.at_ms, number, task, CheckpointId(checkpoint_id), state, kind=kind)
        )

    def decline(
        self,
        checkpoint_id: int,
        message: str = "cannot",
        reason: CheckpointFailureReason = CheckpointFailureReason.DECLINED,
    ) -> list[do.CoordinatorInstruction]:
        return self.tell(
            ev.CheckpointDeclined(
                self.at_ms,
                self.state.attempt,
                SINK,
                CheckpointId(checkpoint_id),
                reason,
                message,
            )
        )

    def written(self, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.MetadataWritten(self.at_ms, CheckpointId(checkpoint_id)))

    def voided(self, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.CheckpointVoided(self.at_ms, CheckpointId(checkpoint_id)))

    def write_failed(
        self, checkpoint_id: int, error: str = "no answer", away_ms: int = 0
    ) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.MetadataWriteFailed(self.at_ms, CheckpointId(checkpoint_id), error, away_ms))

    def committed(self, checkpoint_id: int) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.SinksCommitted(self.at_ms, CheckpointId(checkpoint_id)))

    def commit_failed(
        self, checkpoint_id: int, error: str = "no answer", away_ms: int = 0
    ) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.SinkCommitFailed(self.at_ms, CheckpointId(checkpoint_id), error, away_ms=away_ms))

    def fail(self, reason: str = "boom", attempt: int | None = None) -> list[do.CoordinatorInstruction]:
        number = self.state.attempt if attempt is None else AttemptNumber(attempt)
        return self.tell(ev.TaskFailed(self.at_ms, number, SINK, reason))

    def cancel(self) -> list[do.CoordinatorInstruction]:
        return self.tell(ev.CancelRequested(self.at_ms))

    def end_of_data(self) -> list[do.CoordinatorInstruction]:
        return [i for task in TASKS for i in self.tell(ev.TaskReachedEndOfData(self.at_ms, self.state.attempt, task))]

    def all_finished(self) -> list[do.CoordinatorInstruction]:
        return [i for task in TASKS for i in self.tell(ev.TaskFinished(self.at_ms, self.state.attempt, task))]

    def ask(self) -> int:
        """Trigger a checkpoint by request; returns its number."""
        (trigger,) = only(self.request(f"r{self.state.next_checkpoint_id}"), do.TriggerCheckpoint)
        return trigger.checkpoint_id

    def collect(self, checkpoint_id: int, *committables: Committable, finished: bool = False) -> CheckpointMetadata:
        """Every task acknowledges; returns the metadata that is to be written."""
        self.ack(checkpoint_id, SOURCE, finished=finished)
        (write,) = only(self.ack(checkpoint_id, SINK, *committables, finished=finished), do.WriteMetadata)
        return write.metadata

    def complete(self, *committables: Committable) -> int:
        """A whole checkpoint, but for the commit of its sink files; returns its number."""
        checkpoint_id = self.ask()
        self.collect(checkpoint_id, *committables)
        self.written(checkpoint_id)
        return checkpoint_id


def only(instructions: Sequence[do.CoordinatorInstruction], kind: type[InstructionT]) -> list[InstructionT]:
    """The instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def kinds(instructions: Sequence[do.CoordinatorInstruction]) -> list[str]:
    """Names of the instructions, in order."""
    return [type(i).__name__ for i in instructions]
