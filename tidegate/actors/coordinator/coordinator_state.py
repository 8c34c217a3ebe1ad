"""`CoordinatorState`: all state of the coordinator, computed from the events of its log (a fold).

The codec can write it: a stored fold keeps replay short, and lets the log be truncated. A new field needs a default,
because folds of older versions lack it.

Sets of tasks are dicts that grow in place, so the cost of an event does not grow with the number of tasks.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from tidegate.actors.coordinator.checkpoint_requests import (
    CHECKPOINT,
    CheckpointProperties,
    CheckpointRequest,
)
from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics, SubtaskStatistics
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.coordinator.phases import (
    JobInput,
    JobStatus,
    PendingInput,
    PendingPhase,
    next_phase,
    next_status,
)
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import FailureHistory
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, Committable, StoredSplit, SubtaskState, TableHead
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId, OperatorUid


@wire
@dataclass(slots=True)
class SharedStateRegistry:
    """Stores which completed checkpoints refer to which shared files (Flink's `SharedStateRegistry`).

    Rules:

    - It is part of the state that is computed from the event log, so no crash loses or miscounts a reference (invariant
      5).
    - A checkpoint is built on the newest retained one that has shared files. A canonical savepoint has none: it is
      whole.
    - It refers to files of that base and to files of its own. It may also refer to files of changelogs, which tasks
      write outside of their checkpoints. A later checkpoint never refers again to a changelog file that an earlier one
      dropped.
    - A checkpoint that is no longer retained keeps its references while a pending one is built on it, and until its
      metadata is gone. Then the files to which no other checkpoint refers are deleted. No new reference can appear: new
      checkpoints are built on retained ones.

    The shared files of completed checkpoints. Only a checkpoint that has some can be a base.
    """

    references: dict[CheckpointId, tuple[str, ...]] = field(default_factory=dict)
    left: frozenset[CheckpointId] = frozenset()
    """Checkpoints that could not be deleted. The files to which they refer stay until the sweep."""
    stateless: frozenset[CheckpointId] = frozenset()
    """Checkpoints that refer to files of sinks, and have no shared state."""

    def register(self, metadata: CheckpointMetadata) -> None:
        """Records the files to which a completed checkpoint refers."""
        has_state = any(subtask.layers or subtask.native for subtask in metadata.subtasks)
        if not has_state:
            if not any(subtask.sink_paths for subtask in metadata.subtasks):
                return
            self.stateless |= {metadata.checkpoint_id}
        both = ((*subtask.shared_paths, *subtask.sink_paths) for subtask in metadata.subtasks)
        paths = dict.fromkeys(path for found in both for path in found)
        self.references[metadata.checkpoint_id] = tuple(paths)

    def strange_file(self, metadata: CheckpointMetadata, base: CheckpointId | None) -> str | None:
        """Returns a shared file that belongs neither to the checkpoint, nor to its base, nor to a changelog. None if
        there is none.
        """
        known = frozenset(() if base is None else self.references.get(base, ()))
        changelogs = f"{CheckpointLayout(metadata.job_id).changelog_dir()}/"
        own = own_folder(metadata.job_id, metadata.checkpoint_id), changelogs
        paths = (path for subtask in metadata.subtasks for path in subtask.shared_paths)
        return next((path for path in paths if path not in known and not path.startswith(own)), None)

    def can_be_base(self, checkpoint_id: CheckpointId) -> bool:
        """Returns whether another checkpoint can be built on this one."""
        return checkpoint_id in self.references and checkpoint_id not in self.stateless

    def release(self, checkpoint_id: CheckpointId) -> tuple[str, ...]:
        """Removes the references of a checkpoint. Returns the files to which no checkpoint refers now."""
        self.stateless -= {checkpoint_id}
        paths = self.references.pop(checkpoint_id, ())
        needed = {path for others in self.references.values() for path in others}
        return tuple(path for path in paths if path not in needed)

    def leave(self, checkpoint_id: CheckpointId) -> None:
        """Records that a checkpoint could not be deleted and is not retried. Its files stay as long as the job runs."""
        if checkpoint_id in self.references:
            self.left |= {checkpoint_id}

    def not_needed(self, own: CheckpointId, job_id: JobId, paths: Iterable[str]) -> tuple[str, ...]:
        """Returns the files among `paths` that were written for checkpoint `own` and to which no completed checkpoint
        refers."""
        needed = {path for others in self.references.values() for path in others}
        return tuple(p for p in paths if p.startswith(own_folder(job_id, own)) and p not in needed)

    def not_retained(self, retained: Container[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints that are not retained, and keep their references only for pending ones."""
        return tuple(n for n in self.references if n not in retained and n not in self.left)


def own_folder(job_id: JobId, checkpoint_id: CheckpointId) -> str:
    """Returns the prefix of the paths of the shared files that were written for one checkpoint."""
    return f"{CheckpointLayout(job_id).shared_checkpoint_dir(checkpoint_id)}/"


@wire
@dataclass(slots=True)
class TakenSplits:
    """The splits that one subtask has, given by their index in the source.

    It was restored with some of them, and was given the remaining ones in this order. Only its snapshots show how many
    of these it has taken.
    """

    restored: tuple[int, ...] = ()
    restored_count: int = 0
    """Number of splits with which the subtask was restored, including splits that the source no longer has."""
    given: tuple[int, ...] = ()
    told_all: bool = False
    """True if the subtask expects no more splits: it was notified, or had finished in the checkpoint."""
    waits: bool = False
    """True if the subtask has processed all of the first part of its source, and waits for the second part."""
    has_second: bool = False
    """True if the subtask was given its share of the second part, which may be empty."""

    @property
    def has_read_first(self) -> bool:
        """Returns whether the subtask has no splits of the first part left to read."""
        return self.waits or self.has_second or self.told_all

    @property
    def all(self) -> tuple[int, ...]:
        """Returns every split that no other subtask may get."""
        return self.restored + self.given

    @property
    def last(self) -> int:
        """Returns the last of its splits in the order of the source, or -1 if it has none."""
        return max(self.all, default=-1)


__all__ = [
    "NEVER_MS",
    "AcknowledgeResult",
    "CheckpointDiscard",
    "CompletedCheckpoint",
    "CoordinatorState",
    "DamagedCheckpoint",
    "JobStatus",
    "PendingCheckpoint",
    "SavepointDiscard",
    "SinkCommit",
    "TaskSet",
]
NEVER_MS = -(2**62)
"""A time in ms before all others."""
GIVEN_UP_MAX = 100
"""Limit of remembered processes that were given up. A coordinator cannot leave more of them alive."""
TaskSet = dict[TaskId, None]
"""A set of tasks in the order in which they were added. It is a dict, which the codec supports and which grows in
place.
"""


class AcknowledgeResult(enum.Enum):
    """The result of an acknowledgement (Flink's `TaskAcknowledgeResult`).

    UNKNOWN: the plan does not include the task. DISCARDED: the checkpoint is not pending any more.
    """

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"
    DISCARDED = "discarded"


@wire
@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was started and is neither complete nor aborted."""

    checkpoint_id: CheckpointId
    attempt: AttemptNumber
    triggered_at_ms: int
    waiting: TaskSet
    """Tasks of the plan that have not acknowledged yet."""
    finished: tuple[TaskId, ...] = ()
    """Tasks that had finished when the checkpoint was triggered. They do not acknowledge."""
    trigger: tuple[TaskId, ...] = ()
    """Tasks to trigger once the hooks have answered."""
    properties: CheckpointProperties = CHECKPOINT
    requests: tuple[str, ...] = ()
    retries: int = 0
    """How many times a request of this checkpoint has gone back into the queue (the maximum over its requests)."""
    base: CheckpointId | None = None
    """The completed checkpoint on which this one may be based. Its files stay until this checkpoint has ended."""
    phase: PendingPhase = PendingPhase.COLLECTING
    hooks: tuple[tuple[str, bytes], ...] = ()
    acknowledged: dict[TaskId, SubtaskState] = field(default_factory=dict)
    subtasks: dict[TaskId, SubtaskStatistics] = field(default_factory=dict)
    """The measurements of each acknowledgement, by task."""
    metadata: CheckpointMetadata | None = None
    failures: int = 0
    """How many times its copy or its completion has failed."""
    export_asked: bool = False
    """True while an answer to a `WriteSavepoint` is outstanding."""
    path: str | None = None
    """Path of the savepoint's own folder, once that is complete."""
    inherited: bool = False
    """True if the coordinator was lost while storage was deciding about this checkpoint."""

    def acknowledge(self, task: TaskId, state: SubtaskState) -> AcknowledgeResult:
        """Adds one task's part of the checkpoint, and returns whether it counts."""
        if task in self.acknowledged:
            return AcknowledgeResult.DUPLICATE
        if task not in self.waiting:
            return AcknowledgeResult.UNKNOWN
        if self.phase is not PendingPhase.COLLECTING:
            return AcknowledgeResult.DISCARDED
        del self.waiting[task]
        self.acknowledged[task] = state
        return AcknowledgeResult.SUCCESS

    def advance(self, input: PendingInput) -> None:
        """Moves to the next phase. Raises ProtocolError, and changes nothing, if the input is not allowed in this
        phase.
        """
        self.phase = next_phase(self.phase, input)

    @property
    def fully_acknowledged(self) -> bool:
        """Returns whether every task of the plan has acknowledged (invariant 4)."""
        return not self.waiting


@wire
@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint whose `_metadata` is written. Its state handles are in that file, and not in this object."""

    checkpoint_id: CheckpointId
    triggered_at_ms: int
    completed_at_ms: int
    size_bytes: int
    final: bool


@wire
@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A completed checkpoint that could not be restored, and the reason."""

    checkpoint_id: CheckpointId
    reason: str


@wire
@dataclass(slots=True)
class SinkCommit:
    """Sink files of a completed checkpoint that may not be visible yet. `tables` get a commit even without files."""

    checkpoint_id: CheckpointId
    committables: tuple[Committable, ...]
    failures: int = 0
    tables: tuple[str, ...] = ()


@wire
@dataclass(slots=True)
class CheckpointDiscard:
    """A checkpoint that is to be deleted. If it was voided, its tombstone stays.

    `shared` are the shared files to delete with it. None stands for all that were written for it, because it never
    completed.
    """

    voided: bool
    shared: tuple[str, ...] | None
    failures: int = 0


@wire
@dataclass(slots=True)
class SavepointDiscard:
    """The folder of a failed savepoint, under `target`, that is to be deleted."""

    target: str
    failures: int = 0
    asked: bool = False
    """True while an answer to a `DiscardSavepoint` is outstanding."""


@wire
@dataclass(slots=True)
class CoordinatorState:
    """The whole state of a coordinator."""

    spec: JobSpec | None = None
    status: JobStatus = JobStatus.CREATED
    generation: Generation = Generation(0)
    attempt: AttemptNumber = AttemptNumber(-1)
    """Number of the newest attempt. Each deployment has its own number, whether of the whole job or of some regions."""
    older_attempts: dict[TaskId, AttemptNumber] = field(default_factory=dict)
    """Attempts of tasks that continued while other tasks were deployed again. Tasks without an entry are in the newest
    attempt.
    """
    down: TaskSet = field(default_factory=dict)
    """Tasks that were stopped and wait for the next deployment. They always form whole regions."""
    adopting: TaskSet = field(default_factory=dict)
    """Running tasks that have not yet answered the coordinator that took over."""
    given_up: dict[str, None] = field(default_factory=dict)
    """The newest processes that get no more tasks, and that were to be ended. Some may still be alive."""
    adoptions: int = 0
    """How many times all running tasks have answered a coordinator that took over."""
    restoring_hooks: bool = False
    """True while the attempt waits for master hooks to be restored before its tasks are deployed."""
    deploy_delays: int = 0
    """How many times a task had to wait for storage to restore its state. `deploy_delayed` is whether that happened in
    this attempt.
    """
    deploy_delayed: bool = False
    hook_failures: int = 0
    ready: TaskSet = field(default_factory=dict)
    """Tasks that have restored their state, and were not stopped since."""
    ended: TaskSet = field(default_factory=dict)
    """Tasks whose operators have finished."""
    finished: TaskSet = field(default_factory=dict)
    """Tasks that have finished completely."""
    splits: dict[TaskId, TakenSplits] = field(default_factory=dict)
    """For sources with assigned splits, the splits that each subtask has taken. For a stopped task they count until it
    is ready again.
    """
    read_splits: dict[TaskId, tuple[StoredSplit, ...]] = field(default_factory=dict)
    """The splits of subtasks of a source that had finished in the newest completed checkpoint. Later checkpoints list
    them too, although the subtask takes no part in them.
    """
    rows_before: dict[TaskId, int] = field(default_factory=dict)
    """For each subtask of a source, the number of rows of its splits that were read before the checkpoint from which it
    started.
    """
    next_checkpoint_id: CheckpointId = CheckpointId(1)
    pending: dict[CheckpointId, PendingCheckpoint] = field(default_factory=dict)
    """Pending checkpoints, in the order of their numbers."""
    completed: tuple[CompletedCheckpoint, ...] = ()
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Damaged completed checkpoints that were skipped at a restore, newest first. They stay until a newer one is
    complete.
    """
    fallback: CheckpointId | None = None
    """The checkpoint to which tables have to be taken back before tasks are deployed, or None."""
    table_failures: int = 0
    commits: tuple[SinkCommit, ...] = ()
    """Completed checkpoints whose sink files may not be visible yet, oldest first."""
    table_heads: dict[str, TableHead] = field(default_factory=dict)
    """The newest known head of the log of each table, by URL."""
    told_attempt: int = -1
    """The newest attempt whose first completed checkpoint was committed to all output tables, or is being committed."""
    committed_files: dict[tuple[TaskId, OperatorUid], int] = field(default_factory=dict)
    """For each sink subtask of this attempt, the number of its files that belong to completed checkpoints."""
    union_operators: dict[OperatorUid, None] = field(default_factory=dict)
    """Operators with union list state, as far as known from acknowledgements."""
    shared: SharedStateRegistry = field(default_factory=SharedStateRegistry)
    """The references of completed checkpoints to shared files."""
    discards: dict[CheckpointId, CheckpointDiscard] = field(default_factory=dict)
    """Checkpoints that are to be deleted."""
    copies: dict[CheckpointId, PendingCheckpoint] = field(default_factory=dict)
    """Savepoints with a complete checkpoint that are being copied into their folder. Savepoints of stops are in
    `pending`.
    """
    exports: dict[CheckpointId, str] = field(default_factory=dict)
    """Targets of savepoints that were aborted while they were being copied."""
    lost_exports: dict[CheckpointId, None] = field(default_factory=dict)
    """Savepoints that a replaced coordinator may still be copying. They are listed until they are voided."""
    savepoint_discards: dict[CheckpointId, SavepointDiscard] = field(default_factory=dict)
    waits_for_copies: bool = False
    """True while the end of the job waits only for the deletion of failed savepoints."""
    left_copies: bool = False
    """True once the end of the job no longer waits for the deletion of failed savepoints."""
    requests: tuple[CheckpointRequest, ...] = ()
    """Requests for checkpoints that have not been started."""
    due_since_ms: int | None = None
    """Time, in ms, since which a periodic checkpoint is due that could not start yet."""
    final_not_before_ms: int = NEVER_MS
    """Time, in ms, before which a failed final checkpoint is not tried again."""
    ends_as: JobStatus | None = None
    """The status in which the job ends once its tasks have committed the rows of its last checkpoint, which is
    complete. None while there is no such checkpoint, or if no task commits.
    """
    leaving: tuple[int, int] = (-1, -1)
    """The newest generation and attempt for which a timer repeats the notification of the completed last checkpoint."""
    notified: int = 0
    """How many times that notification was repeated."""
    stopping: CheckpointId | None = None
    """Number of the pending savepoint after which the job ends, or None."""
    restart_due: bool = False
    """True once the delay before the restart has passed."""
    failure_times_ms: tuple[int, ...] = ()
    """Times of the failures since the newest completed checkpoint. Only in states that older versions stored."""
    failures: FailureHistory = field(default_factory=FailureHistory)
    """The failures that the restart strategy counts."""
    last_fingerprint: str = ""
    same_failures: int = 0
    """How many times in a row a task has failed with `last_fingerprint`. 0 if that is empty."""
    running_since_ms: int | None = None
    """Time, in ms, since which all tasks of the attempt run. None while they do not."""
    consecutive_failures: int = 0
    """Number of counted checkpoint failures since the last completed checkpoint, or since the attempt began."""
    failed_checkpoints: int = 0
    completed_checkpoints: int = 0
    last_completed_at_ms: int = NEVER_MS
    last_failure: str | None = None
    ending_status: JobStatus | None = None
    ending_reason: str | None = None
    storage_away: bool = False
    """True while the event log cannot be written. No checkpoint is started then."""
    gave_up: bool = False
    """True if the job ends without waiting for storage, because storage did not answer for too long or a newer job
    controls it.
    """
    superseded: bool = False
    """True if a newer job has claimed a table of this job."""
    statistics: CheckpointStatistics = field(default_factory=CheckpointStatistics)

    def __post_init__(self) -> None:
        if self.failure_times_ms:
            self.failures = FailureHistory(len(self.failure_times_ms))
            self.failure_times_ms = ()

    def move(self, input: JobInput) -> None:
        """Moves to the next status of the job. Raises ProtocolError, and changes nothing, if the input is not allowed
        in this status.
        """
        self.status = next_status(self.status, input)

    @property
    def kept(self) -> tuple[CheckpointId, ...]:
        """Returns the completed checkpoints that must not be deleted: the retained ones and the damaged ones."""
        return (*(c.checkpoint_id for c in self.completed), *(d.checkpoint_id for d in self.damaged))

    def know_tables(self, heads: Iterable[TableHead]) -> None:
        """Records how far the logs of some tables have got. An older report changes nothing."""
        for head in heads:
            known = self.table_heads.get(head.url)
            if known is None or known.seq <= head.seq:
                self.table_heads[head.url] = head

    @property
    def known_tables(self) -> tuple[TableHead, ...]:
        """Returns the newest known position in the log of each table, ordered by URL."""
        return tuple(head for _, head in sorted(self.table_heads.items()))

    @property
    def under_way(self) -> dict[CheckpointId, PendingCheckpoint]:
        """Returns the checkpoints that have not ended: pending ones, and savepoints that are being copied."""
        return self.copies | self.pending

    def attempt_of(self, task: TaskId) -> AttemptNumber:
        """Returns the current attempt of a task or, if it was stopped, its last attempt."""
        return self.older_attempts.get(task, self.attempt)

    def is_current(self, task: TaskId, attempt: AttemptNumber) -> bool:
        """Returns whether messages of a task in this attempt are accepted: it was neither stopped nor deployed again
        since.
        """
        return attempt == self.attempt_of(task) and task not in self.down

    def takes_part(self, pending: PendingCheckpoint, task: TaskId, attempt: AttemptNumber) -> bool:
        """Returns whether a task in this attempt is part of a checkpoint: no task was deployed since its trigger."""
        return pending.attempt == self.attempt and self.is_current(task, attempt)

    def by_attempt(self, tasks: Iterable[TaskId]) -> list[tuple[AttemptNumber, tuple[TaskId, ...]]]:
        """Returns these tasks, grouped by their attempts, oldest attempt first."""
        found: dict[AttemptNumber, list[TaskId]] = {}
        for task in tasks:
            found.setdefault(self.attempt_of(task), []).append(task)
        return [(attempt, tuple(found[attempt])) for attempt in sorted(found)]

    @property
    def listening(self) -> list[tuple[AttemptNumber, tuple[TaskId, ...]]]:
        """Returns the running tasks that have not finished, by attempt. They are notified of the outcome of each
        checkpoint.
        """
        assert self.spec is not None
        return self.by_attempt(task for task in self.spec.tasks if task in self.ready and task not in self.finished)

    def stop(self, tasks: Iterable[TaskId]) -> None:
        """Marks tasks as waiting for the next deployment. Their earlier reports no longer count."""
        for task in tasks:
            self.down[task] = None
            for told in (self.ready, self.ended, self.finished, self.adopting):
                told.pop(task, None)

    def give_up(self, process: str) -> None:
        """Records that a process gets no more tasks, under any coordinator."""
        self.given_up[process] = None
        while len(self.given_up) > GIVEN_UP_MAX:
            del self.given_up[next(iter(self.given_up))]

    def begin_attempt(self) -> tuple[TaskId, ...] | None:
        """Moves the stopped tasks to the next attempt. Returns these tasks in the order of the job, or None for all
        tasks.
        """
        assert self.spec is not None
        # The fold of an older version has no `down`: there a job restarted as a whole.
        again = tuple(task for task in self.spec.tasks if task in self.down) or self.spec.tasks
        whole = len(again) == len(self.spec.tasks)
        if whole:
            self.ready = {}
            self.ended = {}
            self.finished = {}
            self.older_attempts = {}
            self.committed_files = {}
        else:
            for task in self.spec.tasks:
                self.older_attempts.setdefault(task, self.attempt)
            for task in again:
                del self.older_attempts[task]
            self.committed_files = {key: n for key, n in self.committed_files.items() if key[0] not in self.down}
        self.down = {}
        self.attempt = AttemptNumber(self.attempt + 1)
        return None if whole else again
