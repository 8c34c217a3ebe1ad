"""Completes checkpoints after the last acknowledgement: creates `_metadata`, registers them, and commits their sink
files.

`CheckpointFinalizer` takes over from `CheckpointCoordinator` when all tasks have acknowledged. Rules:

- The metadata of one checkpoint is written at a time, and checkpoints that were acknowledged meanwhile wait. So
  checkpoints complete in the order of their ids, and each names only sink files that no completed one covers
  (invariants 4 and 6).
- A newer checkpoint does not overtake a pending savepoint, because a user waits for the savepoint. It may overtake an
  older checkpoint, and subsumes it by completing.
- A savepoint completes as every checkpoint does, and is then copied into its own folder (`savepoint_copies.py`).
- The savepoint of a stop is copied before its `_metadata` is created: if the copy fails, the job continues from an
  older checkpoint, before the end of its data. The copy is given up after `SAVEPOINT_OUTAGE_MS` without an answer.
- If it is unknown whether `_metadata` was created, a tombstone is created in its place. The first of the two files
  decides, even against an older coordinator that still runs (invariant 4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.checkpoint_aborter import CheckpointAborter, forgive
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import CheckpointCleaner
from tidegate.actors.coordinator.checkpoints.savepoint_copies import SavepointCopies, has_failed_for_good
from tidegate.actors.coordinator.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.coordinator_state import CompletedCheckpoint, PendingCheckpoint, SinkCommit
from tidegate.actors.coordinator.phases import JobStatus, PendingInput, PendingPhase
from tidegate.actors.coordinator.source_coordinator import pools
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    Committable,
    OpenCommits,
    SnapshotKind,
    SubtaskState,
    is_own_sink,
)
from tidegate.storage.ids import CheckpointId, OperatorUid, VertexId


class CheckpointFinalizer:
    """Completes the checkpoints of one job after their last acknowledgement."""

    def __init__(
        self,
        context: CoordinatorContext,
        aborter: CheckpointAborter,
        commits: SinkCommitter,
        cleaner: CheckpointCleaner,
        copies: SavepointCopies,
    ) -> None:
        self._context = context
        self._copies = copies
        self._aborter = aborter
        self._commits = commits
        self._cleaner = cleaner

    def proceed(self, at_ms: int) -> None:
        """Starts to write the metadata of the next acknowledged checkpoint, unless another one is being written."""
        while (pending := self._next()) is not None:
            operator = self._partly_finished(pending)
            if operator is None:
                self._begin(pending)
                return
            self._aborter.give_up(pending, Reason.UNION_STATE_PARTLY_FINISHED, at_ms, operator)

    def take_over(self) -> None:
        """Creates tombstones for the checkpoints whose `_metadata` the lost coordinator was writing.

        The result shows whether `_metadata` existed before, so whether the checkpoint is complete.
        """
        for pending in self._context.state.pending.values():
            pending.inherited = True
            self._void(pending)

    # --- the copy of a stop ---------------------------------------------------------------------------------------

    def exported(self, event: ev.SavepointWritten) -> None:
        """Creates `_metadata` of a stop's savepoint, because all files have been copied into the savepoint's folder."""
        pending = self._export_over(event.checkpoint_id)
        if pending is not None:
            pending.failures = 0
            pending.path = event.path
            self.write_metadata(pending)

    def export_failed(self, event: ev.SavepointWriteFailed) -> None:
        """Retries the failed copy of a stop's savepoint for a limited time. Aborts the savepoint if the folder cannot
        be used at all.
        """
        pending = self._export_over(event.checkpoint_id)
        if pending is None:
            return
        pending.failures += 1
        detail = has_failed_for_good(pending, event, self._context.spec.storage_outage_ms)
        if detail is not None:
            self._aborter.give_up(pending, Reason.SAVEPOINT_NOT_WRITTEN, event.at_ms, detail)
            return
        pending.advance(PendingInput.EXPORT_FAILED)
        self._context.retry_later(f"export:{event.checkpoint_id}", event.at_ms, pending.failures)

    def _export_over(self, checkpoint_id: CheckpointId) -> PendingCheckpoint | None:
        """Records that the copy of a stop's savepoint has ended.

        Returns the savepoint, or None if it was aborted meanwhile. Then its folder is deleted.
        """
        pending = self._in(checkpoint_id, PendingPhase.EXPORTING)
        if pending is None:
            self._aborter.export_answered(checkpoint_id)
        else:
            pending.export_asked = False
        return pending

    def repeat_export(self, checkpoint_id: CheckpointId) -> None:
        """Repeats the copy of a stop's savepoint, because its retry timer has fired."""
        pending = self._in(checkpoint_id, PendingPhase.EXPORTING)
        if pending is not None and not pending.export_asked:
            self._export(pending)

    # --- metadata -------------------------------------------------------------------------------------------------

    def written(self, event: ev.MetadataWritten) -> None:
        """Completes a checkpoint whose `_metadata` exists: registers it, notifies tasks and users, commits, and
        subsumes older ones.

        Ignores a repeated answer.
        """
        pending = self._in(event.checkpoint_id, PendingPhase.WRITING, PendingPhase.VOIDING)
        if pending is None:
            return
        state = self._context.state
        instruct = self._context.instruct
        metadata = pending.metadata
        invariants.check_complete(state, pending)
        assert metadata is not None
        pending.advance(PendingInput.METADATA_FOUND)
        del state.pending[event.checkpoint_id]
        state.completed = (
            *state.completed,
            CompletedCheckpoint(event.checkpoint_id, pending.triggered_at_ms, metadata.size_bytes, metadata.final),
        )
        state.shared.register(metadata)
        for subtask in metadata.subtasks:
            if subtask.finished and subtask.read_splits:
                state.read_splits[TaskId(subtask.vertex, subtask.subtask)] = subtask.read_splits
            else:
                state.read_splits.pop(TaskId(subtask.vertex, subtask.subtask), None)
        state.last_completed_at_ms = event.at_ms
        forgive(state)
        state.failures = self._context.spec.restart.after_checkpoint(state.failures)
        current = pending.attempt == state.attempt
        if current:
            self._count_committed(pending)
        committables = tuple(c for s in metadata.subtasks for c in s.committables)
        self._commits.add(event.checkpoint_id, pending.attempt, committables)
        if current and state.status in (JobStatus.RUNNING, JobStatus.RESTARTING):
            # Tasks that are down will start from it; running tasks are notified that it covers their files.
            for attempt, tasks in state.listening:
                instruct(do.NotifyCompleted(attempt, event.checkpoint_id, tasks))
        if pending.properties.copied_afterwards:
            self._copies.begin(pending, event.at_ms)
        else:
            self._copies.succeeded(pending, event.at_ms)
        self._aborter.give_up_open(
            Reason.SUBSUMED, event.at_ms, f"{event.checkpoint_id} is complete", before=event.checkpoint_id
        )
        self._cleaner.pending_is_over()
        self._end_if_last(pending, metadata)

    def write_failed(self, event: ev.MetadataWriteFailed) -> None:
        """Sets a timer to void a checkpoint whose metadata write failed. After `storage_outage_ms` without an answer
        the job ends.
        """
        pending = self._in(event.checkpoint_id, PendingPhase.WRITING, PendingPhase.VOIDING)
        if pending is None:
            return
        pending.advance(PendingInput.FATE_UNKNOWN)
        pending.failures += 1
        if event.away_ms >= self._context.spec.storage_outage_ms:
            self._context.storage_failure = (
                f"checkpoint storage does not answer: the fate of checkpoint {event.checkpoint_id} is unknown "
                f"after {pending.failures} attempts in {event.away_ms / 1000:g} s ({event.error}); restore with "
                "restore='latest' once it does"
            )
            return
        self._context.retry_later(f"void:{event.checkpoint_id}", event.at_ms, pending.failures)

    def repeat_void(self, checkpoint_id: CheckpointId) -> None:
        """Repeats the attempt to void a checkpoint, because its retry timer has fired."""
        pending = self._in(checkpoint_id, PendingPhase.VOIDING)
        if pending is not None:
            self._void(pending)

    def voided(self, event: ev.CheckpointVoided) -> None:
        """Aborts a checkpoint whose tombstone was created before its `_metadata`, so that it can never complete."""
        pending = self._in(event.checkpoint_id, PendingPhase.WRITING, PendingPhase.VOIDING)
        if pending is not None:
            reason = Reason.STORAGE_AWAY if pending.failures else Reason.METADATA_NOT_WRITTEN
            if pending.inherited and self._context.state.status is not JobStatus.ENDING:
                # This coordinator voided it when it took over: neither a task nor storage is to blame.
                reason = Reason.COORDINATOR_LOST
            self._aborter.give_up(pending, reason, event.at_ms, "its metadata was not written", voided=True)

    # --- steps ----------------------------------------------------------------------------------------------------

    def _in(self, checkpoint_id: CheckpointId, *phases: PendingPhase) -> PendingCheckpoint | None:
        pending = self._context.state.pending.get(checkpoint_id)
        return pending if pending is not None and pending.phase in phases else None

    def _next(self) -> PendingCheckpoint | None:
        if invariants.being_written(self._context.state):
            return None
        for candidate in self._context.state.pending.values():
            if candidate.phase is PendingPhase.ACKNOWLEDGED:
                return candidate
            if not candidate.properties.subsumable:
                return None
        return None

    def _begin(self, pending: PendingCheckpoint) -> None:
        pending.metadata = self.make_metadata(pending)
        if pending.properties.kind.stops:
            pending.advance(PendingInput.EXPORT)
            self._export(pending)
        else:
            self.write_metadata(pending)

    def _export(self, pending: PendingCheckpoint) -> None:
        permit = invariants.permit_export(pending)
        assert pending.metadata is not None and pending.properties.target is not None
        pending.export_asked = True
        contested = pending.checkpoint_id in self._context.state.lost_exports
        order = do.WriteSavepoint(pending.properties.target, pending.metadata, contested=contested, permit=permit)
        self._context.instruct(order)

    def write_metadata(self, pending: PendingCheckpoint) -> None:
        """Orders that `_metadata` of an acknowledged checkpoint is created."""
        assert pending.metadata is not None
        pending.advance(PendingInput.WRITE)
        permit = invariants.permit_completion(self._context.state, pending)
        self._context.instruct(do.WriteMetadata(pending.metadata, permit=permit))

    def _void(self, pending: PendingCheckpoint) -> None:
        assert pending.metadata is not None
        pending.advance(PendingInput.FATE_UNKNOWN)
        tombstone = replace(pending.metadata, operators=(), subtasks=(), void=True, final=False, hooks=(), pools=())
        self._context.instruct(do.VoidCheckpoint(tombstone))

    def _end_if_last(self, pending: PendingCheckpoint, metadata: CheckpointMetadata) -> None:
        state = self._context.state
        if state.stopping == pending.checkpoint_id:
            state.stopping = None
        end: JobStatus | None = None
        if pending.properties.kind is SnapshotKind.SUSPEND:
            end = JobStatus.SUSPENDED
        elif pending.properties.kind is SnapshotKind.TERMINATE or metadata.final:
            end = JobStatus.FINISHED
        if end is not None and self._context.spec.committing:
            # The job runs until its tasks have committed and left. If one fails until then, all start from this
            # checkpoint, and commit again.
            state.ends_as = end
        elif end is not None:
            self._context.end = end

    def _count_committed(self, pending: PendingCheckpoint) -> None:
        """Records, for each task and sink, up to which file index the completed checkpoint covers its sink files."""
        committed = self._context.state.committed_files
        for task, subtask in pending.acknowledged.items():
            for c in subtask.committables:
                end = c.first_index + len(c.files)
                committed[task, c.uid] = max(committed.get((task, c.uid), 0), end)

    def make_metadata(self, pending: PendingCheckpoint) -> CheckpointMetadata:
        """Returns the metadata of an acknowledged checkpoint."""
        spec = self._context.spec
        committed = self._context.state.committed_files
        read = self._context.state.read_splits
        subtasks = []
        for task in spec.tasks:
            subtask = pending.acknowledged.get(task)
            if subtask is None:
                # It had finished: it has no state any more, and an earlier checkpoint covers its sink files and has
                # what it had read.
                left = SubtaskState(task.vertex, task.subtask, None, finished=True, read_splits=read.get(task, ()))
                subtasks.append(left)
            elif subtask.committables:
                trimmed = (_uncommitted(c, committed.get((task, c.uid), 0)) for c in subtask.committables)
                subtasks.append(replace(subtask, committables=tuple(c for c in trimmed if c.files)))
            else:
                subtasks.append(subtask)
        return CheckpointMetadata(
            version=METADATA_VERSION,
            job_id=spec.job_id,
            job_name=spec.job_name,
            checkpoint_id=pending.checkpoint_id,
            attempt=pending.attempt,
            triggered_at_ms=pending.triggered_at_ms,
            operators=spec.operators,
            subtasks=tuple(subtasks),
            final=all(s.finished for s in subtasks),
            restored_from=None if spec.restore is None else spec.restore.pointer,
            kind=pending.properties.kind,
            hooks=pending.hooks,
            savepoint_format=pending.properties.savepoint_format if pending.properties.kind.is_savepoint else None,
            pools=pools(self._context.state, pending),
            table_heads=self._context.state.known_tables,
            open_commits=open_commits(self._context.state.commits),
        )

    def _partly_finished(self, pending: PendingCheckpoint) -> OperatorUid | None:
        """Returns an operator with union list state that only some of its subtasks have finished, or None.

        Such a checkpoint cannot be stored: the entries of the finished subtasks would be missing from the union.
        """
        state = self._context.state
        if not state.union_operators:
            return None
        finished = Counter(task.vertex for task in pending.finished)
        running: Counter[VertexId] = Counter()
        for task, subtask in pending.acknowledged.items():
            (finished if subtask.finished else running)[task.vertex] += 1
        return next(
            (
                info.uid
                for info in self._context.spec.operators
                if info.uid in state.union_operators and finished[info.vertex] and running[info.vertex]
            ),
            None,
        )


def _uncommitted(committable: Committable, committed: int) -> Committable:
    """Returns a task's sink files without those files whose index is below `committed`.

    An earlier completed checkpoint covers files with a lower index. The task reports them again until it is notified of
    that checkpoint.
    """
    skip = min(max(0, committed - committable.first_index), len(committable.files))
    return replace(committable, first_index=committable.first_index + skip, files=committable.files[skip:])


def open_commits(commits: Iterable[SinkCommit]) -> tuple[OpenCommits, ...]:
    """Returns, for each sink table, the checkpoints whose files are not committed to it yet. Sorted by the URL of the
    table.
    """
    found: dict[str, dict[CheckpointId, None]] = {}
    for commit in commits:
        for committable in commit.committables:
            if committable.files and not is_own_sink(committable.table):
                found.setdefault(committable.table, {})[commit.checkpoint_id] = None
    return tuple(OpenCommits(url, tuple(checkpoints)) for url, checkpoints in sorted(found.items()))


class SinkCommitter:
    """Commits the sink files of completed checkpoints.

    Rules:

    - Checkpoints are committed one at a time, in the order of their ids (invariant 6).
    - After each commit, older checkpoints that are no longer needed are subsumed (`subsume`).
    - The version of a table's log that a commit has seen is stored with later checkpoints (`table_heads`). If the log
      later ends before that version, it has lost entries, which `TableLog` reports to the next commit or restore.
    - A checkpoint that completes while commits are outstanding stores which ones (`open_commits`): a restore from it
      finds each of them in the table's log, or commits it again, or is refused.
    - The first completed checkpoint of an attempt is committed to every output table, even without files. If a table
      has a new owner, or was set back to an older checkpoint, this commit changes the visible content of the table.
    """

    def __init__(self, context: CoordinatorContext, cleaner: CheckpointCleaner) -> None:
        self._context = context
        self._cleaner = cleaner

    def add(self, checkpoint_id: CheckpointId, attempt: int, committables: tuple[Committable, ...]) -> None:
        """Queues the sink commit of a completed checkpoint behind the commits of earlier checkpoints."""
        state = self._context.state
        tables = self._context.spec.tables if attempt != state.told_attempt else ()
        state.told_attempt = attempt
        state.commits = (*state.commits, SinkCommit(checkpoint_id, committables, tables=tables))
        if len(state.commits) == 1:
            self.commit_next()

    def take_over(self) -> None:
        """Repeats the commit that the lost coordinator had ordered."""
        if self._context.state.commits:
            self.commit_next()

    def repeat(self, checkpoint_id: CheckpointId) -> None:
        """Repeats the sink commit of a checkpoint, because its retry timer has fired."""
        if self._is_first(checkpoint_id):
            self.commit_next()

    def committed(self, event: ev.SinksCommitted) -> None:
        """Records that the sink files of a checkpoint are committed, and the log version of each of its tables."""
        self._context.state.know_tables(event.heads)
        self._done(event.checkpoint_id)

    def _done(self, checkpoint_id: CheckpointId) -> None:
        if not self._is_first(checkpoint_id):
            return
        state = self._context.state
        state.commits = state.commits[1:]
        subsume(self._context, self._cleaner)
        if state.commits:
            self.commit_next()

    def failed(self, event: ev.SinkCommitFailed) -> None:
        """Schedules a retry of a failed sink commit, which is idempotent. After too long the job fails, and a restored
        job commits.
        """
        if not self._is_first(event.checkpoint_id):
            return
        spec = self._context.spec
        commit = self._context.state.commits[0]
        commit.failures += 1
        if event.fenced:
            # A job restored from this one would take the table from its new owner in turn.
            self._context.state.superseded = True
            self._context.storage_failure = (
                f"the sink files of checkpoint {event.checkpoint_id} are not committed, because a newer job is in "
                f"charge of their table ({event.error})"
            )
            return
        if event.permanent or event.away_ms >= spec.storage_outage_ms:
            self._context.storage_failure = (
                f"the sink files of checkpoint {event.checkpoint_id} could not be committed in "
                f"{commit.failures} attempts ({event.error}); a job restored from it commits them"
            )
            return
        self._context.retry_later(f"commit:{event.checkpoint_id}", event.at_ms, commit.failures)

    def _is_first(self, checkpoint_id: CheckpointId) -> bool:
        commits = self._context.state.commits
        return bool(commits) and commits[0].checkpoint_id == checkpoint_id

    def commit_next(self) -> None:
        """Orders the commit of the oldest completed checkpoint that is not committed."""
        commit = self._context.state.commits[0]
        permit = invariants.permit_commit(self._context.state, commit.checkpoint_id)
        if commit.committables or commit.tables:
            heads = self._context.state.known_tables
            self._context.instruct(
                do.CommitSinks(commit.checkpoint_id, commit.committables, commit.tables, heads, permit=permit)
            )
        else:
            self._done(commit.checkpoint_id)


def subsume(context: CoordinatorContext, cleaner: CheckpointCleaner) -> None:
    """Removes completed checkpoints that newer ones subsume from the retained ones (Flink's `CheckpointSubsumeHelper`).

    Rules:

    - The newest `retained` checkpoints stay, and all whose sink files are not committed yet, because a restore commits
      these files. The number of outstanding commits is limited, so the number of retained checkpoints is too.
    - A damaged checkpoint is removed once there is a newer undamaged one.
    - If all are damaged, none is removed: the job fails, and its checkpoints stay.
    - `CheckpointCleaner` deletes the files, and only with a permit that no retained checkpoint refers to them.
    """
    state = context.state
    if not state.completed:
        return
    kept = max(context.settings.retained, len(state.commits))
    subsumed = state.completed[:-kept]
    state.completed = state.completed[-kept:]
    for checkpoint in subsumed:
        cleaner.subsumed(checkpoint.checkpoint_id)
    newest = state.completed[-1].checkpoint_id
    superfluous = [d.checkpoint_id for d in state.damaged if d.checkpoint_id < newest]
    state.damaged = tuple(d for d in state.damaged if d.checkpoint_id > newest)
    for checkpoint_id in superfluous:
        cleaner.subsumed(checkpoint_id)
