"""`CoordinatorState`: the whole state of the coordinator, computed from the events of its log (a fold).

The state can be written to storage, which keeps replay short and lets the log be truncated.

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
    """Counts which completed checkpoints refer to which shared files (Flink's `SharedStateRegistry`).

    Rules:

    - It is part of the state that is computed from the event log, so no crash loses or miscounts a reference (invariant
      5).
    - A checkpoint is based on the newest retained checkpoint that has shared files. A canonical savepoint has none,
      because it contains all state itself.
    - A checkpoint refers to files of its base and to files of its own. It may also refer to files of changelogs, which
      tasks write outside of their checkpoints. A later checkpoint never refers again to a changelog file that an
      earlier one dropped.
    - A checkpoint that is no longer retained keeps its references while a pending checkpoint is based on it, and until
      its metadata is deleted. Then the files to which no other checkpoint refers are deleted. No new reference can
      appear, because new checkpoints are based on retained ones.

    `references` has the shared files of each completed checkpoint. Only a checkpoint in `references` can be a base.
    """

    references: dict[CheckpointId, tuple[str, ...]] = field(default_factory=dict)
    left: frozenset[CheckpointId] = frozenset()
    """Checkpoints that could not be deleted. Their shared files stay until the sweep at the end of the job."""
    stateless: frozenset[CheckpointId] = frozenset()
    """Checkpoints that refer to files of sinks only, and have no shared state."""

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
        there is no such file, which is the legal case.
        """
        known = frozenset(() if base is None else self.references.get(base, ()))
        changelogs = f"{CheckpointLayout(metadata.job_id).changelog_dir()}/"
        own = own_folder(metadata.job_id, metadata.checkpoint_id), changelogs
        paths = (path for subtask in metadata.subtasks for path in subtask.shared_paths)
        return next((path for path in paths if path not in known and not path.startswith(own)), None)

    def can_be_base(self, checkpoint_id: CheckpointId) -> bool:
        """Returns whether an incremental checkpoint can be based on this checkpoint."""
        return checkpoint_id in self.references and checkpoint_id not in self.stateless

    def release(self, checkpoint_id: CheckpointId) -> tuple[str, ...]:
        """Removes the references of a checkpoint. Returns its files to which no other checkpoint refers."""
        self.stateless -= {checkpoint_id}
        paths = self.references.pop(checkpoint_id, ())
        needed = {path for others in self.references.values() for path in others}
        return tuple(path for path in paths if path not in needed)

    def leave(self, checkpoint_id: CheckpointId) -> None:
        """Records that the deletion of a checkpoint was given up. Its files are not deleted as long as the job runs."""
        if checkpoint_id in self.references:
            self.left |= {checkpoint_id}

    def not_needed(self, own: CheckpointId, job_id: JobId, paths: Iterable[str]) -> tuple[str, ...]:
        """Returns the files among `paths` that were written for checkpoint `own` and to which no completed checkpoint
        refers.
        """
        needed = {path for others in self.references.values() for path in others}
        return tuple(p for p in paths if p.startswith(own_folder(job_id, own)) and p not in needed)

    def not_retained(self, retained: Container[CheckpointId]) -> tuple[CheckpointId, ...]:
        """Returns the checkpoints that have references and are not in `retained`. Pending checkpoints may be based on
        them.
        """
        return tuple(n for n in self.references if n not in retained and n not in self.left)


def own_folder(job_id: JobId, checkpoint_id: CheckpointId) -> str:
    """Returns the prefix of the paths of the shared files that were written for one checkpoint."""
    return f"{CheckpointLayout(job_id).shared_checkpoint_dir(checkpoint_id)}/"


@wire
@dataclass(slots=True)
class TakenSplits:
    """The splits that belong to one subtask of a source, as indices of the source's splits.

    `restored` were in the checkpoint from which the subtask started. `given` were assigned afterwards, in this order.
    The coordinator does not record how many of the splits the subtask has begun to read; only the snapshots of the
    subtask do.
    """

    restored: tuple[int, ...] = ()
    restored_count: int = 0
    """The number of splits in the restored checkpoint, including splits that the source no longer has."""
    given: tuple[int, ...] = ()
    told_all: bool = False
    """True if the subtask gets no more splits: it was notified of the end, or had finished in the checkpoint."""
    waits: bool = False
    """True if the subtask has read its splits of the first part of a two-part source, and waits for the second part."""
    has_second: bool = False
    """True if the subtask was assigned its share of the second part of the source, which may be empty."""

    @property
    def has_read_first(self) -> bool:
        """Returns whether the subtask has read all its splits of the first part of a `TwoPartSource`."""
        return self.waits or self.has_second or self.told_all

    @property
    def all(self) -> tuple[int, ...]:
        """Returns the indices of all splits of the subtask, restored or assigned. No other subtask may get them."""
        return self.restored + self.given

    @property
    def last(self) -> int:
        """Returns the highest index among the splits of the subtask, or -1 if it has none."""
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
"""A time in ms before every real time."""
GIVEN_UP_MAX = 100
"""Limit of the remembered processes that get no more tasks. A coordinator cannot leave more of them alive."""
TaskSet = dict[TaskId, None]
"""A set of tasks in the order in which they were added. It is a dict, which the codec can write and which grows in
place.
"""


class AcknowledgeResult(enum.Enum):
    """The outcome of a task's acknowledgement of a checkpoint (Flink's `TaskAcknowledgeResult`).

    SUCCESS: the acknowledgement was added to the checkpoint. DUPLICATE: the task had acknowledged before. UNKNOWN: the
    task does not take part in the checkpoint. DISCARDED: the checkpoint is not pending any more.
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
    """Tasks that have to acknowledge the checkpoint and have not done so yet."""
    finished: tuple[TaskId, ...] = ()
    """Tasks that had finished when the checkpoint was triggered. They do not acknowledge."""
    trigger: tuple[TaskId, ...] = ()
    """Tasks to trigger once the master hooks have answered."""
    properties: CheckpointProperties = CHECKPOINT
    requests: tuple[str, ...] = ()
    retries: int = 0
    """The number of times that a request of this checkpoint went back into the queue (the maximum over its requests).
    """
    base: CheckpointId | None = None
    """The completed checkpoint on which this one may be based. Its files stay until this checkpoint has ended."""
    phase: PendingPhase = PendingPhase.COLLECTING
    hooks: tuple[tuple[str, bytes], ...] = ()
    acknowledged: dict[TaskId, SubtaskState] = field(default_factory=dict)
    subtasks: dict[TaskId, SubtaskStatistics] = field(default_factory=dict)
    """The statistics of each acknowledgement, by task."""
    metadata: CheckpointMetadata | None = None
    failures: int = 0
    """The number of failed tries to copy the savepoint, or to complete the checkpoint."""
    export_asked: bool = False
    """True while an answer to a `WriteSavepoint` is outstanding."""
    path: str | None = None
    """Path of the savepoint's own folder, once that is complete."""
    inherited: bool = False
    """True if the coordinator was lost before it learned whether the checkpoint's `_metadata` was created."""

    def acknowledge(self, task: TaskId, state: SubtaskState) -> AcknowledgeResult:
        """Adds the acknowledgement of a task. Returns SUCCESS, or another result that names why the acknowledgement is
        ignored.
        """
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
        """Moves the checkpoint to its next phase. Raises ProtocolError, and changes nothing, if this phase does not
        allow the input.
        """
        self.phase = next_phase(self.phase, input)

    @property
    def fully_acknowledged(self) -> bool:
        """Returns whether every task of the plan has acknowledged (invariant 4)."""
        return not self.waiting


@wire
@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint whose `_metadata` is written. That file has the state handles, which this object omits."""

    checkpoint_id: CheckpointId
    triggered_at_ms: int
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
    """Sink files of a completed checkpoint that are not known to be committed.

    `tables` are the URLs of tables that get a commit even if there are no new files for them.
    """

    checkpoint_id: CheckpointId
    committables: tuple[Committable, ...]
    failures: int = 0
    tables: tuple[str, ...] = ()


@wire
@dataclass(slots=True)
class CheckpointDiscard:
    """A checkpoint that is to be deleted. `voided`: the checkpoint has a tombstone, which is not deleted.

    `shared` are the shared files to delete with it. None means all shared files that were written for the checkpoint,
    because it never completed.
    """

    voided: bool
    shared: tuple[str, ...] | None
    failures: int = 0


@wire
@dataclass(slots=True)
class SavepointDiscard:
    """The folder of a failed savepoint below the URL `target`, which is to be deleted."""

    target: str
    failures: int = 0
    asked: bool = False
    """True while an answer to a `DiscardSavepoint` is outstanding."""


@wire
@dataclass(slots=True)
class CoordinatorState:
    """The whole state of a coordinator, which a new coordinator gets from the log."""

    spec: JobSpec | None = None
    status: JobStatus = JobStatus.CREATED
    generation: Generation = Generation(0)
    attempt: AttemptNumber = AttemptNumber(-1)
    """Number of the newest attempt. Each deployment has a new number, whether it is of the whole job or of some
    regions.
    """
    older_attempts: dict[TaskId, AttemptNumber] = field(default_factory=dict)
    """The attempts of tasks that continued while other tasks were deployed again. Tasks without an entry are in the
    newest attempt.
    """
    down: TaskSet = field(default_factory=dict)
    """Tasks that were stopped and wait for the next deployment. They always form whole regions."""
    adopting: TaskSet = field(default_factory=dict)
    """Running tasks that have not yet reported their status to the coordinator that took over."""
    given_up: dict[str, None] = field(default_factory=dict)
    """Processes that get no more tasks and were to be killed, at most `GIVEN_UP_MAX`. Some may still be alive."""
    adoptions: int = 0
    """The number of coordinators that took over and received the status of all running tasks."""
    restoring_hooks: bool = False
    """True while the deployment waits for the restore of master hooks, before its tasks are deployed."""
    deploy_delays: int = 0
    """The number of reports, over all attempts, that a task waits for storage to restore its state.

    `deploy_delayed`: whether there was such a report in this attempt.
    """
    deploy_delayed: bool = False
    hook_failures: int = 0
    ready: TaskSet = field(default_factory=dict)
    """Tasks that have restored their state, and were not stopped afterwards."""
    ended: TaskSet = field(default_factory=dict)
    """Tasks whose operators have reached the end of their data."""
    finished: TaskSet = field(default_factory=dict)
    """Tasks that have finished completely."""
    splits: dict[TaskId, TakenSplits] = field(default_factory=dict)
    """The splits of each subtask of a source with assigned splits. The splits of a stopped task count until it is ready
    again.
    """
    read_splits: dict[TaskId, tuple[StoredSplit, ...]] = field(default_factory=dict)
    """The splits of those source subtasks that had finished in the newest completed checkpoint.

    Later checkpoints list these splits too, although the subtasks take no part in them.
    """
    rows_before: dict[TaskId, int] = field(default_factory=dict)
    """For each subtask of a source, the number of rows of its splits that were read before the checkpoint from which it
    started.
    """
    next_checkpoint_id: CheckpointId = CheckpointId(1)
    pending: dict[CheckpointId, PendingCheckpoint] = field(default_factory=dict)
    """Pending checkpoints, in the order of their ids."""
    completed: tuple[CompletedCheckpoint, ...] = ()
    damaged: tuple[DamagedCheckpoint, ...] = ()
    """Damaged completed checkpoints that were skipped at a restore, newest first. They stay until a newer checkpoint is
    complete.
    """
    fallback: CheckpointId | None = None
    """The checkpoint to which the output tables have to be set back before tasks are deployed, or None."""
    table_failures: int = 0
    commits: tuple[SinkCommit, ...] = ()
    """Outstanding sink commits of completed checkpoints, oldest first."""
    table_heads: dict[str, TableHead] = field(default_factory=dict)
    """The newest known entry in the log of each output table, by the URL of the table."""
    told_attempt: int = -1
    """The newest attempt whose first completed checkpoint was queued for a commit to all output tables."""
    committed_files: dict[tuple[TaskId, OperatorUid], int] = field(default_factory=dict)
    """For each sink of each task, the number of its files in this attempt that belong to completed checkpoints."""
    union_operators: dict[OperatorUid, None] = field(default_factory=dict)
    """Operators with union list state, as far as known from acknowledgements."""
    shared: SharedStateRegistry = field(default_factory=SharedStateRegistry)
    """The references of completed checkpoints to shared files."""
    discards: dict[CheckpointId, CheckpointDiscard] = field(default_factory=dict)
    """Checkpoints that are to be deleted."""
    copies: dict[CheckpointId, PendingCheckpoint] = field(default_factory=dict)
    """Savepoints with a complete checkpoint that are being copied into the user's folder. Savepoints of stops are in
    `pending`.
    """
    exports: dict[CheckpointId, str] = field(default_factory=dict)
    """Targets (URLs) of savepoints that were aborted during their copy, and whose copy has not ended yet."""
    lost_exports: dict[CheckpointId, None] = field(default_factory=dict)
    """Savepoints that a replaced coordinator may still be copying. An entry stays until the savepoint is complete or
    voided.
    """
    savepoint_discards: dict[CheckpointId, SavepointDiscard] = field(default_factory=dict)
    waits_for_copies: bool = False
    """True while the end of the job waits only for the deletion of the folders of failed savepoints."""
    left_copies: bool = False
    """True once the end of the job no longer waits for the deletion of the folders of failed savepoints."""
    requests: tuple[CheckpointRequest, ...] = ()
    """Queued requests for checkpoints that have not been started."""
    due_since_ms: int | None = None
    """Time, in ms, since which a periodic checkpoint is due. None if none is due."""
    final_not_before_ms: int = NEVER_MS
    """Time, in ms, before which a failed final checkpoint is not tried again."""
    ends_as: JobStatus | None = None
    """The status in which the job ends once its tasks have committed the rows of its completed last checkpoint.

    None while there is no such checkpoint, or if no task commits.
    """
    leaving: tuple[int, int] = (-1, -1)
    """The newest generation and attempt, in this order, for which a timer repeats the notification of the last
    checkpoint.
    """
    notified: int = 0
    """The number of times that the notification of the completed last checkpoint was repeated."""
    stopping: CheckpointId | None = None
    """Id of the pending savepoint after which the job ends, or None."""
    restart_due: bool = False
    """True once the delay before the restart has passed."""
    failures: FailureHistory = field(default_factory=FailureHistory)
    """The history of failures on which the restart strategy decides."""
    last_fingerprint: str = ""
    same_failures: int = 0
    """The number of consecutive failures with `last_fingerprint`. 0 if the fingerprint is empty."""
    running_since_ms: int | None = None
    """Time, in ms, at which all tasks of the attempt began to run. None while some do not run."""
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
    """True if the job ends without waiting for storage: storage did not answer for too long, or a newer job claimed a
    table.
    """
    superseded: bool = False
    """True if a newer job has claimed a table of this job."""
    statistics: CheckpointStatistics = field(default_factory=CheckpointStatistics)

    def move(self, input: JobInput) -> None:
        """Moves the job to its next status. Raises ProtocolError, and changes nothing, if this status does not allow
        the input.
        """
        self.status = next_status(self.status, input)

    @property
    def kept(self) -> tuple[CheckpointId, ...]:
        """Returns the completed checkpoints that must not be deleted: the retained ones and the damaged ones."""
        return (*(c.checkpoint_id for c in self.completed), *(d.checkpoint_id for d in self.damaged))

    def know_tables(self, heads: Iterable[TableHead]) -> None:
        """Records the sequence number of the newest log entry of some tables. A number lower than the recorded one
        changes nothing.
        """
        for head in heads:
            known = self.table_heads.get(head.url)
            if known is None or known.seq <= head.seq:
                self.table_heads[head.url] = head

    @property
    def known_tables(self) -> tuple[TableHead, ...]:
        """Returns the newest known entry in the log of each table, ordered by the URL of the table."""
        return tuple(head for _, head in sorted(self.table_heads.items()))

    @property
    def under_way(self) -> dict[CheckpointId, PendingCheckpoint]:
        """Returns the checkpoints that have not ended, by id: pending ones, and savepoints that are being copied."""
        return self.copies | self.pending

    def attempt_of(self, task: TaskId) -> AttemptNumber:
        """Returns the current attempt of a task or, if it was stopped, its last attempt."""
        return self.older_attempts.get(task, self.attempt)

    def is_current(self, task: TaskId, attempt: AttemptNumber) -> bool:
        """Returns whether messages of a task from this attempt are accepted: the task was neither stopped nor deployed
        again.
        """
        return attempt == self.attempt_of(task) and task not in self.down

    def takes_part(self, pending: PendingCheckpoint, task: TaskId, attempt: AttemptNumber) -> bool:
        """Returns whether a message of a task from this attempt belongs to a checkpoint: no task was deployed since its
        trigger.
        """
        return pending.attempt == self.attempt and self.is_current(task, attempt)

    def by_attempt(self, tasks: Iterable[TaskId]) -> list[tuple[AttemptNumber, tuple[TaskId, ...]]]:
        """Groups tasks by their current attempt.

        Returns pairs of an attempt and the tasks among `tasks` that run in it, oldest attempt first.
        """
        found: dict[AttemptNumber, list[TaskId]] = {}
        for task in tasks:
            found.setdefault(self.attempt_of(task), []).append(task)
        return [(attempt, tuple(found[attempt])) for attempt in sorted(found)]

    @property
    def listening(self) -> list[tuple[AttemptNumber, tuple[TaskId, ...]]]:
        """Returns the running tasks, grouped by attempt as in `by_attempt`.

        Running tasks are ready and have not finished. They are notified of the outcome of each checkpoint.
        """
        assert self.spec is not None
        return self.by_attempt(task for task in self.spec.tasks if task in self.ready and task not in self.finished)

    def stop(self, tasks: Iterable[TaskId]) -> None:
        """Marks tasks as stopped until the next deployment. Their earlier reports no longer count."""
        for task in tasks:
            self.down[task] = None
            for told in (self.ready, self.ended, self.finished, self.adopting):
                told.pop(task, None)

    def give_up(self, process: str) -> None:
        """Records that a process gets no more tasks, also under later coordinators."""
        self.given_up[process] = None
        while len(self.given_up) > GIVEN_UP_MAX:
            del self.given_up[next(iter(self.given_up))]

    def begin_attempt(self) -> tuple[TaskId, ...] | None:
        """Starts the next attempt with the stopped tasks. Returns them in the order of the job, or None if these are
        all tasks.
        """
        assert self.spec is not None
        # Before the first attempt no task was stopped.
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
