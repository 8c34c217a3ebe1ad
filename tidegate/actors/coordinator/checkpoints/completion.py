"""Completes checkpoints: creates `_metadata`, and registers what is complete. The savepoint of a stop is copied before.

`CheckpointWriter` takes over from `CheckpointKeeper` when all tasks have acknowledged. Rules:

- One checkpoint is written at a time, and those acknowledged meanwhile wait. So checkpoints complete in the order of
  their numbers, and each names only sink files that no completed one covers (invariants 4 and 6).
- A newer checkpoint does not overtake a pending savepoint, because a user waits for that. It may overtake an older
  checkpoint, and subsumes it by completing.
- A savepoint completes as every checkpoint does, and is copied into its own folder afterwards (`savepoint_copies.py`).
- The savepoint of a stop is copied before its `_metadata` is created: if the copy fails, the job continues from an
  older checkpoint, before the end of its data. After `SAVEPOINT_OUTAGE_MS` without an answer it is given up.
- If nobody knows whether `_metadata` was created, a tombstone is created in its place. Whichever was first decides,
  even against a coordinator that was thought dead (invariant 4).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoints.abandonment import Abandoner
from tidegate.actors.coordinator.checkpoints.discards import Discarder
from tidegate.actors.coordinator.checkpoints.failure_manager import forgive
from tidegate.actors.coordinator.checkpoints.savepoint_copies import SavepointCopies, has_failed_for_good
from tidegate.actors.coordinator.checkpoints.sink_commits import SinkCommitter, open_commits
from tidegate.actors.coordinator.job.phases import JobStatus, PendingInput, PendingPhase
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.split_enumerator import pools
from tidegate.actors.coordinator.state.coordinator_context import CoordinatorContext
from tidegate.actors.coordinator.state.coordinator_state import CompletedCheckpoint, PendingCheckpoint
from tidegate.protocol.failure_reasons import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import (
    METADATA_VERSION,
    CheckpointMetadata,
    Committable,
    SnapshotKind,
    SubtaskState,
)
from tidegate.storage.ids import CheckpointId, OperatorUid, VertexId


class CheckpointWriter:
    """Writes the checkpoints of one job."""

    def __init__(
        self,
        context: CoordinatorContext,
        abandoner: Abandoner,
        commits: SinkCommitter,
        discards: Discarder,
        copies: SavepointCopies,
    ) -> None:
        self._context = context
        self._copies = copies
        self._abandoner = abandoner
        self._commits = commits
        self._discards = discards

    def proceed(self, at_ms: int) -> None:
        """Begin to write the checkpoint whose turn it is, if there is one."""
        while (pending := self._next()) is not None:
            operator = self._partly_finished(pending)
            if operator is None:
                self._begin(pending)
                return
            self._abandoner.give_up(pending, Reason.UNION_STATE_PARTLY_FINISHED, at_ms, operator)

    def take_over(self) -> None:
        """Find out what became of the checkpoints that the lost coordinator was writing."""
        for pending in self._context.state.pending.values():
            pending.inherited = True
            self._void(pending)

    # --- the copy of a stop ---------------------------------------------------------------------------------------

    def exported(self, event: ev.SavepointWritten) -> None:
        """The savepoint's own folder is whole: now create `_metadata`."""
        pending = self._export_over(event.checkpoint_id)
        if pending is not None:
            pending.failures = 0
            pending.path = event.path
            self._write(pending)

    def export_failed(self, event: ev.SavepointWriteFailed) -> None:
        """Try again, for a bounded time. If the folder itself is unfit, give up at once."""
        pending = self._export_over(event.checkpoint_id)
        if pending is None:
            return
        pending.failures += 1
        detail = has_failed_for_good(pending, event, self._context.spec.storage_outage_ms)
        if detail is not None:
            self._abandoner.give_up(pending, Reason.SAVEPOINT_NOT_WRITTEN, event.at_ms, detail)
            return
        pending.advance(PendingInput.EXPORT_FAILED)
        self._context.retry_later(f"export:{event.checkpoint_id}", event.at_ms, pending.failures)

    def _export_over(self, checkpoint_id: CheckpointId) -> PendingCheckpoint | None:
        """Nobody writes into the savepoint's folder any more. None if it was given up: then the folder goes."""
        pending = self._in(checkpoint_id, PendingPhase.EXPORTING)
        if pending is None:
            self._abandoner.export_answered(checkpoint_id)
        else:
            pending.export_asked = False
        return pending

    def repeat_export(self, checkpoint_id: CheckpointId) -> None:
        """The timer of the retry has fired."""
        pending = self._in(checkpoint_id, PendingPhase.EXPORTING)
        if pending is not None and not pending.export_asked:
            self._export(pending)

    # --- metadata -------------------------------------------------------------------------------------------------

    def written(self, event: ev.MetadataWritten) -> None:
        """The checkpoint is complete: tell tasks and users, commit, subsume. Does nothing if that was known."""
        pending = self._in(event.checkpoint_id, PendingPhase.WRITING, PendingPhase.VOIDING)
        if pending is None:
            return
        state, instruct = self._context.state, self._context.instruct
        metadata = pending.metadata
        invariants.check_complete(state, pending)
        assert metadata is not None
        pending.advance(PendingInput.METADATA_FOUND)
        del state.pending[event.checkpoint_id]
        state.completed = (
            *state.completed,
            CompletedCheckpoint(
                event.checkpoint_id, pending.triggered_at_ms, event.at_ms, metadata.size_bytes, metadata.final
            ),
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
            # Tasks that are down will start from it; those that run are told that it covers their files.
            for attempt, tasks in state.listening:
                instruct(do.NotifyCompleted(attempt, event.checkpoint_id, tasks))
        if pending.properties.copied_afterwards:
            self._copies.begin(pending, event.at_ms)
        else:
            self._copies.succeeded(pending, event.at_ms)
        self._abandoner.give_up_open(
            Reason.SUBSUMED, event.at_ms, f"{event.checkpoint_id} is complete", before=event.checkpoint_id
        )
        self._discards.pending_is_over()
        self._end_if_last(pending, metadata)

    def write_failed(self, event: ev.MetadataWriteFailed) -> None:
        """Nobody knows if the metadata is there: find out by trying to void it, for a bounded time."""
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
        """The timer of the retry has fired."""
        pending = self._in(checkpoint_id, PendingPhase.VOIDING)
        if pending is not None:
            self._void(pending)

    def voided(self, event: ev.CheckpointVoided) -> None:
        """The tombstone was there first: the checkpoint can never complete."""
        pending = self._in(event.checkpoint_id, PendingPhase.WRITING, PendingPhase.VOIDING)
        if pending is not None:
            reason = Reason.STORAGE_AWAY if pending.failures else Reason.METADATA_NOT_WRITTEN
            if pending.inherited and self._context.state.status is not JobStatus.ENDING:
                # This coordinator voided it when it took over: neither a task nor storage is to blame.
                reason = Reason.COORDINATOR_LOST
            self._abandoner.give_up(pending, reason, event.at_ms, "its metadata was not written", voided=True)

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
        pending.metadata = self._metadata(pending)
        if pending.properties.kind.stops:
            pending.advance(PendingInput.EXPORT)
            self._export(pending)
        else:
            self._write(pending)

    def _export(self, pending: PendingCheckpoint) -> None:
        permit = invariants.permit_export(pending)
        assert pending.metadata is not None and pending.properties.target is not None
        pending.export_asked = True
        contested = pending.checkpoint_id in self._context.state.lost_exports
        order = do.WriteSavepoint(pending.properties.target, pending.metadata, contested=contested, permit=permit)
        self._context.instruct(order)

    def _write(self, pending: PendingCheckpoint) -> None:
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
        if pending.properties.kind is SnapshotKind.SUSPEND:
            self._context.end = JobStatus.SUSPENDED
        elif pending.properties.kind is SnapshotKind.TERMINATE or metadata.final:
            self._context.end = JobStatus.FINISHED

    def _count_committed(self, pending: PendingCheckpoint) -> None:
        """Remember which sink files the completed checkpoint covers."""
        committed = self._context.state.committed_files
        for task, subtask in pending.acknowledged.items():
            for c in subtask.committables:
                end = c.first_index + len(c.files)
                committed[task, c.uid] = max(committed.get((task, c.uid), 0), end)

    def _metadata(self, pending: PendingCheckpoint) -> CheckpointMetadata:
        spec = self._context.spec
        committed, read = self._context.state.committed_files, self._context.state.read_splits
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
        """An operator with union list state that has finished in some of its subtasks only, if there is one.

        What a finished subtask had put into the union is lost, and the others would not notice.
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
    """Drop files that an earlier completed checkpoint covers: the task had not heard of it yet."""
    skip = min(max(0, committed - committable.first_index), len(committable.files))
    return replace(committable, first_index=committable.first_index + skip, files=committable.files[skip:])
