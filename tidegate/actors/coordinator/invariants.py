"""The rules of the coordinator as predicates, which hold at all times or before an action that cannot be undone.

All parts of the coordinator call them. Each docstring gives the reason of its rule. The functions are of three kinds:

- Predicates read the state and return a bool. They change nothing.
- `check_*` raise `InvariantError` if a predicate is false. `check_state` checks the rules that hold between any two
  events. It runs after each event, and its cost does not grow with the number of tasks.
- `permit_*` check, and return the permit (`tidegate/storage/checkpoints/permits.py`) without which the step cannot be
  taken.

Numbers in brackets are the invariants of `docs/architecture.md`. The oracle of the simulator checks the same rules from
outside (`tidegate/testing/oracle`). `tests/simulation/broken_predicates.py` weakens the predicates.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tidegate.actors.coordinator.checkpoint_requests import REQUESTS_MAX
from tidegate.actors.coordinator.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.coordinator.events import TaskAnswered
from tidegate.actors.coordinator.phases import JobStatus, PendingPhase
from tidegate.actors.graph.regions import cut_edge
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints import permits
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, Generation

COPIES_MAX = 4
"""Limit of savepoints that are copied, or deleted after a failure, at the same time.

The savepoint of a stop may be copied in addition. Each copy may block a thread of the coordinator's process while
storage does not answer.
"""


_OVER = (PendingPhase.COMPLETED, PendingPhase.FAILED)


def is_spent(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Returns whether a checkpoint id was already used (invariant 4).

    The comparison is `<`, because `next_checkpoint_id` is the first free id. A checkpoint with that id could be
    triggered a second time, and two checkpoints would write into one folder.
    """
    return checkpoint_id < state.next_checkpoint_id


def is_in_its_time(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Returns whether a pending checkpoint may be in its phase at the present status of the job (invariant 7).

    A checkpoint whose `_metadata` is not being written yet exists only while the job runs, and ends with the attempt.
    Once `_metadata` is being written, the checkpoint may outlive the attempt, because the write cannot be called back.
    A completed or failed checkpoint is not pending.
    """
    return pending.phase not in _OVER and (not pending.phase.open or state.status is JobStatus.RUNNING)


def is_whole_while_running(state: CoordinatorState) -> bool:
    """Returns whether no task is stopped while the status of the job is RUNNING (invariants 4 and 7).

    Otherwise a checkpoint would lack the state of that task.
    """
    return state.status is not JobStatus.RUNNING or not state.down


def is_base_held(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Returns whether the files of the earlier checkpoint on which a pending checkpoint is based still exist (invariant
    5).

    True if the pending checkpoint has no base. The registry keeps these files until the pending checkpoint has ended,
    even if the earlier checkpoint is no longer retained, because the snapshots of the tasks will refer to them.
    """
    return pending.base is None or state.shared.can_be_base(pending.base)


def is_covered(pending: PendingCheckpoint) -> bool:
    """Returns whether every task has acknowledged the checkpoint, so that it can be completed (invariant 4).

    A restore without one task would lose the rows that this task had received and not yet passed on.
    """
    return not pending.waiting


def being_written(state: CoordinatorState) -> int:
    """Returns the number of checkpoints that are being written to storage. At most one is allowed (invariants 4 and 6).

    So checkpoints complete in the order of their ids, and each names only sink files that no completed checkpoint
    covers. With two at once the newer could complete first, and both would name the same files.
    """
    return sum(pending.phase.being_written for pending in state.pending.values())


def is_stop_pending(state: CoordinatorState) -> bool:
    """Returns whether the savepoint of a stop that has begun is still pending (invariant 7). Otherwise the job
    would wait forever.
    """
    return state.stopping is None or state.stopping in state.pending


def are_ascending(checkpoint_ids: Iterable[CheckpointId]) -> bool:
    """Returns whether the ids of completed checkpoints ascend (invariants 4 and 7). A restart uses the last one.

    `<` and not `<=`: with an equal id a checkpoint would have completed twice.
    """
    before = 0
    for checkpoint_id in checkpoint_ids:
        if not before < checkpoint_id:
            return False
        before = checkpoint_id
    return True


def is_queue_bounded(state: CoordinatorState) -> bool:
    """Returns whether at most `REQUESTS_MAX` checkpoint requests are queued (invariant 10)."""
    return len(state.requests) <= REQUESTS_MAX


def is_queue_in_its_time(state: CoordinatorState) -> bool:
    """Returns whether the queue has no request that may never be answered (invariant 7).

    While no attempt runs, only requests for a stop may be queued: the next attempt begins with the stop. A job that
    ends has answered all requests.
    """
    if state.status is JobStatus.RUNNING:
        return True
    waits = state.status in (JobStatus.DEPLOYING, JobStatus.RESTARTING)
    return not state.requests or (waits and all(r.properties.kind.stops for r in state.requests))


def is_ending(state: CoordinatorState) -> bool:
    """Returns whether the job is ending or has ended (invariant 7). Copies of savepoints are then aborted, and
    users answered.
    """
    return state.status is JobStatus.ENDING or state.status.terminal


def check_state(state: CoordinatorState) -> None:
    """Raises InvariantError if the state breaks one of the rules that hold between events. Called after each
    event.
    """
    for checkpoint_id, pending in state.pending.items():
        _require(is_spent(state, checkpoint_id), "4: each checkpoint has a new id")
        _require(is_in_its_time(state, pending), "7: acknowledgements are collected only while the job runs")
        _require(is_base_held(state, pending), "5: the base of a pending checkpoint is not deleted")
        if pending.phase.being_written:
            _require(is_covered(pending), "4: only a fully acknowledged checkpoint is written")
    _require(not state.copies or not is_ending(state), "7: a job that ends copies no savepoint any more")
    for checkpoint_id in state.copies:
        _require(checkpoint_id not in state.pending, "4: a savepoint is copied once its checkpoint is complete")
    _require(are_copies_bounded(state), "10: the number of savepoint copies is limited")
    _require(is_whole_while_running(state), "7: no task is stopped while the job runs")
    _require(being_written(state) <= 1, "4: one checkpoint is written at a time")
    _require(is_stop_pending(state), "7: a stop waits for its savepoint")
    _require(are_ascending(c.checkpoint_id for c in state.completed), "4: completed checkpoints ascend")
    _require(
        not state.completed or is_spent(state, state.completed[-1].checkpoint_id),
        "4: checkpoint ids are not used twice",
    )
    _require(is_queue_bounded(state), "10: the queue of checkpoint requests is limited")
    _require(is_queue_in_its_time(state), "7: only requests for a stop wait while no attempt runs")


def is_newer(state: CoordinatorState, generation: Generation) -> bool:
    """Returns whether a coordinator of this generation may take over (invariant 8).

    `>` and not `>=`: two coordinators of one generation would both assume that they own the log.
    """
    return generation > state.generation


def is_fate_known(state: CoordinatorState) -> bool:
    """Returns whether an attempt may begin, because no checkpoint is pending any more (invariant 7).

    A pending checkpoint may turn out to be complete. An attempt from the checkpoint before it would process rows again
    that the newer one has committed. If tables are set back, all outstanding commits must be done too, because a later
    commit would become visible.
    """
    return not state.pending and (state.fallback is None or not state.commits)


def is_start_newest(state: CoordinatorState, checkpoint_id: CheckpointId | None) -> bool:
    """Returns whether an attempt starts from the newest checkpoint that is not known to be damaged (invariant 7).

    A start without state, or from another job's checkpoint, is allowed only while this job has neither completed nor
    skipped a checkpoint of its own. Later it would process committed rows again.
    """
    if state.completed:
        return checkpoint_id == state.completed[-1].checkpoint_id
    return not state.damaged


def is_wait_bounded(strategy: RestartStrategy, delay_ms: int) -> bool:
    """Returns whether the delay of a restart, in ms, is within the restart strategy's limit (invariant 7)."""
    return 0 <= delay_ms <= strategy.wait_ms_max


def check_wait(strategy: RestartStrategy, delay_ms: int) -> None:
    """Raises InvariantError if the delay of a restart, in ms, exceeds the restart strategy's limit."""
    _require(is_wait_bounded(strategy, delay_ms), "7: a restart is delayed for a limited time")


def check_deploy(state: CoordinatorState) -> None:
    """Raises InvariantError if a new attempt must not begin yet, because a checkpoint is still pending."""
    _require(is_fate_known(state), "7: an attempt begins when no checkpoint is pending")


def first_running(state: CoordinatorState, tasks: Iterable[TaskId]) -> TaskId | None:
    """Returns the first of `tasks` that runs, or None (invariants 1 and 7).

    A task that runs must not be deployed, because rows would be processed twice.
    """
    return next((task for task in tasks if task in state.ready), None)


def check_deployed(state: CoordinatorState, tasks: Sequence[TaskId] | None) -> None:
    """Raises InvariantError if the tasks `tasks` (None for all) must not be deployed together.

    None of them may run, and they must form whole regions.
    """
    if tasks is not None and state.spec is not None:
        _require(first_running(state, tasks) is None, "7: a running task is not deployed again")
        edges = ((edge.upstream, edge.downstream, edge.pointwise) for edge in state.spec.edges)
        _require(
            cut_edge(tasks, state.spec.tasks, edges) is None, "1: tasks that a channel joins are deployed together"
        )


def check_start(state: CoordinatorState, checkpoint_id: CheckpointId | None) -> None:
    """Raises InvariantError if the checkpoint is not the newest undamaged one. None means a start without state."""
    _require(is_start_newest(state, checkpoint_id), "7: an attempt starts from the newest undamaged checkpoint")


def copies_under_way(state: CoordinatorState) -> int:
    """Returns the number of savepoints that may block a thread (invariant 10): running or later copies, and
    deletions.
    """
    pending = {number for number, each in state.pending.items() if each.properties.kind.is_savepoint}
    return len(pending | state.copies.keys() | state.exports.keys() | state.savepoint_discards.keys())


def may_copy(state: CoordinatorState, kind: SnapshotKind) -> bool:
    """Returns whether another savepoint of this kind may be triggered, given the limit of copies (invariant 10).

    The comparison is `<`, because the copy of this savepoint is not in the number yet. A stop may exceed the limit by
    one, so that copies which hang do not keep a job from being stopped.
    """
    return copies_under_way(state) < COPIES_MAX + kind.stops


def are_copies_bounded(state: CoordinatorState) -> bool:
    """Returns whether at most `COPIES_MAX` savepoints, and the savepoint of a stop, are being copied (invariant
    10).
    """
    return copies_under_way(state) <= COPIES_MAX + 1


def may_export(pending: PendingCheckpoint) -> bool:
    """Returns whether the savepoint of a stop may be copied into its own folder now (invariant 4).

    All its files must exist, and no other copy of the savepoint may be running: the answers of the two copies could be
    confused.
    """
    return (
        pending.phase is PendingPhase.EXPORTING
        and is_covered(pending)
        and pending.metadata is not None
        and pending.properties.target is not None
        and not pending.export_asked
    )


def may_complete(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Returns whether `_metadata` may be created, which completes the checkpoint (invariant 4).

    All tasks of the *job* have to be in it, as acknowledged or as finished before, because the plan may have missed
    one. The folder of a stop's savepoint must be complete before, because a job must not end with an incomplete
    savepoint.
    """
    return (
        pending.phase is PendingPhase.WRITING
        and is_covered(pending)
        and pending.metadata is not None
        and len(pending.metadata.subtasks) == len(pending.acknowledged) + len(pending.finished)
        and (pending.path is not None or not pending.properties.kind.stops)
        and being_written(state) <= 1
    )


def may_count_as_complete(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Returns whether a checkpoint whose `_metadata` was found may be added to the completed ones (invariants 4 and 5).

    It has to be newer than all completed checkpoints. `>` and not `>=`: a checkpoint completes once.
    """
    return (
        is_covered(pending)
        and pending.metadata is not None
        and all(pending.checkpoint_id > completed.checkpoint_id for completed in state.completed[-1:])
    )


def permit_export(pending: PendingCheckpoint) -> permits.ExportPermit:
    """Returns the permit to copy the savepoint of a stop into its own folder. Raises InvariantError if that is
    not allowed.
    """
    _require(may_export(pending), "4: a savepoint is copied once all its files exist, by one copy at a time")
    return permits.ExportPermit(permits._DECIDED, pending.checkpoint_id)


def may_copy_complete(state: CoordinatorState, savepoint: PendingCheckpoint) -> bool:
    """Returns whether a savepoint with a complete checkpoint may be copied into its own folder now (invariants 4 and
    5).

    Its checkpoint must not be deleted during the copy (`is_needed`), and no other copy of it may be running.
    """
    return (
        state.copies.get(savepoint.checkpoint_id) is savepoint
        and savepoint.phase is PendingPhase.COMPLETED
        and savepoint.checkpoint_id not in state.discards
        and savepoint.checkpoint_id not in state.exports
        and not savepoint.export_asked
    )


def permit_copy(state: CoordinatorState, savepoint: PendingCheckpoint) -> permits.ExportPermit:
    """Returns the permit to copy a savepoint whose checkpoint is complete. Raises InvariantError if that is not
    allowed.
    """
    _require(may_copy_complete(state, savepoint), "4: a savepoint is copied while its checkpoint exists, by one copy")
    return permits.ExportPermit(permits._DECIDED, savepoint.checkpoint_id)


def permit_completion(state: CoordinatorState, pending: PendingCheckpoint) -> permits.CompletionPermit:
    """Returns the permit to create a checkpoint's `_metadata`. Raises InvariantError if that is not allowed."""
    _require(may_complete(state, pending), "4: a checkpoint completes with every task, and after its savepoint")
    return permits.CompletionPermit(permits._DECIDED, pending.checkpoint_id)


def strange_file(state: CoordinatorState, pending: PendingCheckpoint) -> str | None:
    """Returns a shared file that belongs neither to the checkpoint, nor to its base, nor to a changelog (invariant 5).
    Normally None.

    It would be unknown how long such a file has to stay: the checkpoint that owns it may be deleted with the file.
    """
    return None if pending.metadata is None else state.shared.strange_file(pending.metadata, pending.base)


def check_complete(state: CoordinatorState, pending: PendingCheckpoint) -> None:
    """Raises InvariantError if a checkpoint must not be registered as completed."""
    _require(
        may_count_as_complete(state, pending), "4: each checkpoint completes once, with all tasks, and after older ones"
    )
    strange = strange_file(state, pending)
    _require(strange is None, f"5: {strange} is neither a file of the checkpoint nor of its base")


def may_commit(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Returns whether the sink files of a checkpoint may be committed now (invariant 6).

    The checkpoint must be complete: otherwise it may still fail, and a restore would write the same rows again. A
    damaged one is complete too. Older checkpoints must be committed first, because a table ignores an older checkpoint
    after a newer one.
    """
    first = state.commits[0].checkpoint_id if state.commits else None
    return checkpoint_id == first and checkpoint_id in state.kept


def permit_commit(state: CoordinatorState, checkpoint_id: CheckpointId) -> permits.CommitPermit:
    """Returns the permit to commit the sink files of a checkpoint. Raises InvariantError if that is not allowed."""
    _require(may_commit(state, checkpoint_id), "6: sinks commit only completed checkpoints, in order")
    return permits.CommitPermit(permits._DECIDED, checkpoint_id)


def is_needed(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Returns whether a checkpoint must not be deleted (invariant 5), for one of four reasons.

    It is retained, even if damaged, because an administrator may repair it. Or its sink files are not committed yet,
    and only it names them. Or a pending checkpoint is based on it. Or it is a savepoint that is being copied.
    """
    return (
        checkpoint_id in state.kept
        or any(commit.checkpoint_id == checkpoint_id for commit in state.commits)
        or is_built_on(state, checkpoint_id)
        or checkpoint_id in state.copies
    )


def is_built_on(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Returns whether a pending checkpoint is based on this checkpoint, and will refer to its files (invariant
    5).
    """
    return any(pending.base == checkpoint_id for pending in state.pending.values())


def may_delete(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Returns whether a checkpoint may be deleted (invariant 5): it is neither pending nor needed."""
    return checkpoint_id not in state.pending and not is_needed(state, checkpoint_id)


def may_delete_shared(state: CoordinatorState, paths: Iterable[str]) -> bool:
    """Returns whether no completed checkpoint refers to any of these files (invariant 5)."""
    paths = set(paths)
    return not paths or all(paths.isdisjoint(others) for others in state.shared.references.values())


def is_counted(state: CoordinatorState, checkpoint_id: CheckpointId, task: TaskId) -> bool:
    """Returns whether a pending checkpoint already has an acknowledgement of a task (invariants 4 and 5).

    A second acknowledgement is a duplicate, even from an older attempt. Its files stay, because it names the same files
    as the first.
    """
    pending = state.pending.get(checkpoint_id)
    return pending is not None and task in pending.acknowledged


def may_delete_refused(state: CoordinatorState, number: CheckpointId, task: TaskId, shared: Iterable[str]) -> bool:
    """Returns whether the files of a refused acknowledgement may be deleted (invariant 5): no checkpoint refers
    to them, or will.
    """
    return number not in state.kept and not is_counted(state, number, task) and may_delete_shared(state, shared)


def may_delete_savepoint(state: CoordinatorState, checkpoint_id: CheckpointId, voided: bool) -> bool:
    """Returns whether the folder of a failed savepoint may be deleted (invariant 5): no copy into it is running.

    The copy of a replaced coordinator cannot be waited for. There, a tombstone has to stay (`voided`), so that the
    folder cannot become complete.
    """
    pending = state.pending.get(checkpoint_id)
    late = checkpoint_id in state.lost_exports and not voided
    copied = checkpoint_id in state.exports or checkpoint_id in state.copies
    return not late and not copied and (pending is None or not pending.export_asked)


def permit_deletion(
    state: CoordinatorState, checkpoint_id: CheckpointId, shared: Iterable[str] | None
) -> permits.DeletePermit:
    """Returns the permit to delete a checkpoint and these shared files. Raises InvariantError if that is not allowed.

    `shared`: None means all shared files that were written for a checkpoint that never completed.
    """
    _require(
        may_delete(state, checkpoint_id), "5: a retained checkpoint, an uncommitted one, or a base is never deleted"
    )
    _require(
        may_delete_shared(state, shared or ()), "5: a shared file is deleted with the last checkpoint that refers to it"
    )
    return permits.DeletePermit(permits._DECIDED, checkpoint_id)


def permit_refused_deletion(
    state: CoordinatorState, checkpoint_id: CheckpointId, task: TaskId, shared: Iterable[str]
) -> permits.DeletePermit:
    """Returns the permit to delete the files of a refused acknowledgement, `shared` among them. Raises
    InvariantError.
    """
    _require(
        may_delete_refused(state, checkpoint_id, task, shared), "5: files to which a checkpoint refers are not deleted"
    )
    return permits.DeletePermit(permits._DECIDED, checkpoint_id)


def permit_savepoint_deletion(state: CoordinatorState, number: CheckpointId, voided: bool) -> permits.DeletePermit:
    """Returns the permit to delete the folder of a savepoint. Raises InvariantError if that is not allowed.

    `voided`: a tombstone is created in the folder first, and stays.
    """
    _require(may_delete_savepoint(state, number, voided), "5: a folder is not deleted while a copy writes to it")
    return permits.DeletePermit(permits._DECIDED, number)


def may_sweep(state: CoordinatorState) -> bool:
    """Returns whether a job's files may be deleted, except retained ones (invariant 5): it has ended, and no checkpoint
    is pending.

    While a job is ending, a savepoint or the last checkpoint may still complete, and needs its files. A job that gave
    up does not wait for that, so all files of its pending checkpoints stay (`EndPermit.undecided`).
    """
    return state.status.terminal and (not state.pending or state.gave_up)


def permit_sweep(state: CoordinatorState) -> permits.EndPermit:
    """Returns the permit to delete all files of a job that it does not retain. Raises InvariantError if that is
    not allowed.
    """
    _require(may_sweep(state), "5: files of a job are deleted only after its end")
    heads = state.known_tables
    return permits.EndPermit(
        permits._DECIDED,
        frozenset(state.kept),
        tables_settled=not state.commits and not state.pending,
        undecided=frozenset(state.pending),
        heads=heads,
    )


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {rule}; this is a bug in tidegate, please report it")


def may_trigger(state: CoordinatorState) -> bool:
    """Returns whether a checkpoint may start: every running task has answered the new coordinator (invariants 7 and 8).

    A task that has not answered may be dead, and the checkpoint would wait for it. Or it still obeys the previous
    coordinator, which may be alive and may have triggered other checkpoints.
    """
    return not state.adopting


def knows_its_checkpoints(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Returns whether the log contains every checkpoint in which the answering task has taken part (invariant 4).

    If the task has a snapshot for the next free id, it obeys a coordinator that writes another log, and two checkpoints
    would share the id.
    """
    return answer.snapshotted < state.next_checkpoint_id


def runs_by_the_log(state: CoordinatorState, answer: TaskAnswered) -> bool:
    """Returns whether the log agrees that the answering task runs, and in the attempt that the task reports (invariant
    7).
    """
    return state.is_current(answer.task, answer.attempt) and answer.task in state.ready


def check_trigger(state: CoordinatorState) -> None:
    """Raises InvariantError if no checkpoint may start now, because a task has not answered the new coordinator."""
    _require(may_trigger(state), "8: no checkpoint begins before every task has answered its new coordinator")


def check_answer(state: CoordinatorState, answer: TaskAnswered) -> None:
    """Raises InvariantError if the new coordinator must not adopt the answering task, because its log contradicts
    the answer.
    """
    _require(runs_by_the_log(state, answer), "7: a task that is adopted runs in its current attempt")
    _require(knows_its_checkpoints(state, answer), "4: a task has taken part in no checkpoint that the log lacks")


def is_untaken(splits: Collection[int], taken: Collection[int]) -> bool:
    """Returns whether none of the splits belongs to a subtask (invariant 9). The rows of a split with two readers would
    be processed twice.

    A stopped subtask keeps its splits until it is ready and reports which splits its checkpoint had.
    """
    return not any(split in taken for split in splits)


def may_tell_end(left: Collection[int], others_ask: bool) -> bool:
    """Returns whether a subtask may be notified that it gets no more splits (invariant 7).

    `left`: the unassigned splits. If there are any, another subtask must still request splits (`others_ask`), or they
    would never be read.
    """
    return not left or others_ask


def is_answerable(first: int, given: int) -> bool:
    """Returns whether a request for splits is valid (invariant 7). `first`: splits that the subtask has, `given`:
    splits assigned to it.

    The comparison is `<=`, because a repeated request has a lower number than the subtask has splits.
    """
    return first <= given


def is_prefix(in_snapshot: int, restored: int, given: int) -> bool:
    """Returns whether a snapshot has all `restored` splits of its subtask, and no more than these and the `given` ones
    (invariant 3).

    All arguments are numbers of splits. `given`: splits that were assigned to the subtask since the restore. So each
    split is either in the snapshot of one subtask or in the checkpoint's pool of unassigned splits.
    """
    return restored <= in_snapshot <= restored + given


def check_assigned(splits: Collection[int], taken: Collection[int]) -> None:
    """Raises InvariantError if a split that is to be assigned already belongs to a subtask."""
    _require(is_untaken(splits, taken), "9: a split is given to one subtask")


def check_told_end(left: Collection[int], others_ask: bool) -> None:
    """Raises InvariantError if a subtask must not be notified of the end of its source, because splits would
    remain unread.
    """
    _require(may_tell_end(left, others_ask), "7: a source ends when all of its splits are taken")


def check_question(first: int, given: int) -> None:
    """Raises InvariantError if a subtask that requests splits claims to have more splits than were assigned to it."""
    _require(is_answerable(first, given), "7: a subtask has taken no more splits than it was given")


def check_snapshot(in_snapshot: int, restored: int, given: int) -> None:
    """Raises InvariantError if the number of splits in a subtask's snapshot is too low or too high (`is_prefix`)."""
    _require(is_prefix(in_snapshot, restored, given), "3: a snapshot has the first splits that its subtask was given")
