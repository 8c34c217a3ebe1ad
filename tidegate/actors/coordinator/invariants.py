"""What must always hold in a coordinator, and what must hold before it does something that cannot be taken back.

Each rule is one predicate, and its docstring says why the rule is as it is. The functions are of three kinds:

- predicates look at the state and say yes or no; they change nothing;
- `check_*` raise `InvariantError` where a predicate says no. `check_state` looks at everything that holds between two
  events, so it runs after each event and is cheap: its cost does not grow with the number of tasks;
- `permit_*` check, and give the permit (`storage/checkpoints/permits.py`) without which what follows cannot be done.

The numbers are those of the invariants in `docs/architecture.md`. The oracle of the simulator looks at the same rules
from outside (`tidegate/simulation/oracle`); `tests/simulation/broken_predicates.py` weakens the predicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.actors.coordinator.job.phases import JobStatus, PendingPhase
from tidegate.actors.coordinator.requests.request_decider import REQUESTS_MAX
from tidegate.actors.coordinator.state.coordinator_state import CoordinatorState, PendingCheckpoint
from tidegate.actors.graph.regions import cut_edge
from tidegate.actors.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints import permits
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import CheckpointId, Generation

COPIES_MAX = 2
"""Copies of savepoints under way, those that were given up among them, before savepoints are refused: each may hold a
thread of the coordinator's process, and others are needed to write checkpoints."""

_OVER = (PendingPhase.COMPLETED, PendingPhase.FAILED)


# --- between any two events -------------------------------------------------------------------------------------------


def is_spent(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether a number was given to a checkpoint already (4).

    `<` and not `<=`: `next_checkpoint_id` is the first number that nobody has. Were it somebody's, the next trigger
    would give it away a second time, and two checkpoints would write into one folder.
    """
    return checkpoint_id < state.next_checkpoint_id


def is_in_its_time(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Whether a pending checkpoint may be in its phase while the job is in its status (7).

    What is open collects acknowledgements, exists only while the job runs, and ends with the attempt. What storage
    decides may outlive the attempt: nobody can call back a create that is on its way. What is over is not pending.
    """
    return pending.phase not in _OVER and (not pending.phase.open or state.status is JobStatus.RUNNING)


def is_whole_while_running(state: CoordinatorState) -> bool:
    """Whether nothing is down while the job counts as running (4, 7): a checkpoint taken then would have a hole."""
    return state.status is not JobStatus.RUNNING or not state.down


def is_base_held(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Whether the files are still there that a pending checkpoint is built on (5).

    They may belong to a checkpoint that is retained no longer. The registry knows it nevertheless until the pending one
    is over: the tasks were told of that base, and will refer to its files.
    """
    return pending.base is None or state.shared.can_be_base(pending.base)


def is_covered(pending: PendingCheckpoint) -> bool:
    """Whether every task of the plan has acknowledged, so that the cut has no hole (4).

    "Enough" tasks is no cut: what the missing one had received and not yet passed on would be lost by a restore.
    """
    return not pending.waiting


def being_written(state: CoordinatorState) -> int:
    """How many checkpoints storage is deciding about (4, 6): one at most.

    So checkpoints complete in the order of their numbers, and the sink files of each are those that no completed one
    covers. With two at once the newer could be complete first, and both would name the same files.
    """
    return sum(pending.phase.being_written for pending in state.pending.values())


def is_stop_pending(state: CoordinatorState) -> bool:
    """Whether the savepoint after which the job ends is still on its way (7): else the job would wait for ever."""
    return state.stopping is None or state.stopping in state.pending


def are_ascending(checkpoint_ids: Iterable[CheckpointId]) -> bool:
    """Whether completed checkpoints are in the order of their numbers (4, 7): the last one is what a restart takes.

    `<` and not `<=`: an equal number would be a checkpoint that was completed twice.
    """
    before = 0
    for checkpoint_id in checkpoint_ids:
        if not before < checkpoint_id:
            return False
        before = checkpoint_id
    return True


def is_queue_bounded(state: CoordinatorState) -> bool:
    """Whether no more requests wait than the queue takes (10). `<=`: the limit is the size of a full queue."""
    return len(state.requests) <= REQUESTS_MAX


def is_queue_in_its_time(state: CoordinatorState) -> bool:
    """Whether somebody will answer those who wait (7).

    While no attempt runs, only a stop waits: the next attempt begins with it. A job that ends has told everybody.
    """
    if state.status is JobStatus.RUNNING:
        return True
    waits = state.status in (JobStatus.DEPLOYING, JobStatus.RESTARTING)
    return not state.requests or (waits and all(r.properties.kind.stops for r in state.requests))


def check_state(state: CoordinatorState) -> None:
    """Everything of the above; called after each event."""
    for checkpoint_id, pending in state.pending.items():
        _require(is_spent(state, checkpoint_id), "4: no number is given to a second checkpoint")
        _require(is_in_its_time(state, pending), "7: acknowledgements are collected only while the job runs")
        _require(is_base_held(state, pending), "5: what a pending checkpoint is built on stays")
        if pending.phase.being_written:
            _require(is_covered(pending), "4: only a fully acknowledged checkpoint is written")
    _require(is_whole_while_running(state), "7: a job runs when all of its tasks do")
    _require(being_written(state) <= 1, "4: one checkpoint is written at a time")
    _require(is_stop_pending(state), "7: a stop waits for its savepoint")
    _require(are_ascending(c.checkpoint_id for c in state.completed), "4: completed checkpoints ascend")
    _require(not state.completed or is_spent(state, state.completed[-1].checkpoint_id), "4: numbers are not used twice")
    _require(is_queue_bounded(state), "10: requests wait in a queue of bounded length")
    _require(is_queue_in_its_time(state), "7: who waits for a checkpoint is answered by an attempt, or by the end")


# --- before an attempt ------------------------------------------------------------------------------------------------


def is_newer(state: CoordinatorState, generation: Generation) -> bool:
    """Whether a coordinator may take over (8).

    `>` and not `>=`: two coordinators that both believe to be generation n would both take the log for theirs.
    """
    return generation > state.generation


def is_fate_known(state: CoordinatorState) -> bool:
    """Whether nothing that an attempt starts from can change any more (7).

    A pending checkpoint may turn out to be complete, and the attempt would have started from the one before it: what
    the newer one had committed would be processed twice. Where tables are taken back to an older checkpoint, all that
    is to be committed is committed first: what comes later would not be hidden.
    """
    return not state.pending and (state.fallback is None or not state.commits)


def is_start_newest(state: CoordinatorState, checkpoint_id: CheckpointId | None) -> bool:
    """Whether an attempt starts from the newest checkpoint that is not known to be damaged (7).

    None, or a checkpoint of another job, is right only as long as this job has completed none and passed over none:
    later it would process again what it has committed.
    """
    if state.completed:
        return checkpoint_id == state.completed[-1].checkpoint_id
    return not state.damaged


def is_wait_bounded(strategy: RestartStrategy, delay_ms: int) -> bool:
    """Whether a restart is put off for no longer than its strategy may (7).

    A wait that grows without a bound is a job that never comes back, and says nothing of it.
    """
    return 0 <= delay_ms <= strategy.wait_ms_max


def check_wait(strategy: RestartStrategy, delay_ms: int) -> None:
    """Before the next attempt is waited for."""
    _require(is_wait_bounded(strategy, delay_ms), "7: a restart is put off for a bounded time")


def check_deploy(state: CoordinatorState) -> None:
    """Before a new attempt begins."""
    _require(is_fate_known(state), "7: an attempt begins when the fate of every checkpoint is known")


def goes_on(state: CoordinatorState, tasks: Iterable[TaskId]) -> TaskId | None:
    """A task among these that runs, if there is one (1, 7): deployed again it would process the same rows twice."""
    return next((task for task in tasks if task in state.ready), None)


def check_deployed(state: CoordinatorState, tasks: Sequence[TaskId] | None) -> None:
    """Before these tasks (None: all) are deployed in an attempt that has just begun."""
    if tasks is not None and state.spec is not None:
        _require(goes_on(state, tasks) is None, "7: what runs keeps its attempt")
        edges = ((edge.upstream, edge.downstream, edge.pointwise) for edge in state.spec.edges)
        _require(cut_edge(tasks, state.spec.tasks, edges) is None, "1: what channels join goes back together")


def check_start(state: CoordinatorState, checkpoint_id: CheckpointId | None) -> None:
    """Before tasks are deployed that start from this checkpoint."""
    _require(is_start_newest(state, checkpoint_id), "7: an attempt starts from the newest checkpoint that is whole")


# --- before a checkpoint is exported, or completed --------------------------------------------------------------------


def may_copy(state: CoordinatorState) -> bool:
    """Whether another savepoint may be triggered, which will be copied (10). `<`: it counts itself, too. What was
    triggered before is copied in any case: where `max_concurrent` may be pending, all but one of these come on top."""
    return len(state.exports) + any(p.export_asked for p in state.pending.values()) < COPIES_MAX


def may_export(pending: PendingCheckpoint) -> bool:
    """Whether a savepoint may be copied into its own folder now (4).

    All of it has to be there. And no other copy of it may be under way: its answer would be taken for that of this one,
    while this one still writes.
    """
    return (
        pending.phase is PendingPhase.EXPORTING
        and is_covered(pending)
        and pending.metadata is not None
        and pending.properties.target is not None
        and not pending.export_asked
    )


def may_complete(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Whether `_metadata` may be created, which makes the checkpoint complete (4).

    All tasks of the *job* have to be in it, as acknowledged or as finished before: those of the plan alone could be too
    few, if the plan forgot one. A savepoint's own folder is whole before, so that nobody is told of half a savepoint.
    """
    return (
        pending.phase is PendingPhase.WRITING
        and is_covered(pending)
        and pending.metadata is not None
        and len(pending.metadata.subtasks) == len(pending.acknowledged) + len(pending.finished)
        and (pending.path is not None or not pending.properties.kind.is_savepoint)
        and being_written(state) <= 1
    )


def may_count_as_complete(state: CoordinatorState, pending: PendingCheckpoint) -> bool:
    """Whether a checkpoint whose `_metadata` was found may join the completed ones (4, 5).

    It is newer than all of them: `>` and not `>=`, because it completes once.
    """
    return (
        is_covered(pending)
        and pending.metadata is not None
        and all(pending.checkpoint_id > completed.checkpoint_id for completed in state.completed[-1:])
    )


def permit_export(pending: PendingCheckpoint) -> permits.ExportPermit:
    """To copy a savepoint into its own folder."""
    _require(may_export(pending), "4: a savepoint is exported once all of it is there, by one copy at a time")
    return permits.ExportPermit(permits._DECIDED, pending.checkpoint_id)


def permit_completion(state: CoordinatorState, pending: PendingCheckpoint) -> permits.CompletionPermit:
    """To create `_metadata`."""
    _require(may_complete(state, pending), "4: a checkpoint completes with every task, and after its savepoint")
    return permits.CompletionPermit(permits._DECIDED, pending.checkpoint_id)


def strange_file(state: CoordinatorState, pending: PendingCheckpoint) -> str | None:
    """A shared file that is neither the checkpoint's own nor one of its base, if it names such a file (5).

    Nobody would know how long that has to stay: its owner may be deleted, and take the file along.
    """
    return None if pending.metadata is None else state.shared.strange_file(pending.metadata, pending.base)


def check_complete(state: CoordinatorState, pending: PendingCheckpoint) -> None:
    """Before a checkpoint joins those that are complete."""
    _require(may_count_as_complete(state, pending), "4: each checkpoint completes once, whole, and after older ones")
    strange = strange_file(state, pending)
    _require(strange is None, f"5: {strange} is neither a file of the checkpoint nor of the one that it is built on")


# --- before sink files are committed ----------------------------------------------------------------------------------


def may_commit(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether the sink files of a checkpoint may become visible (6).

    An acknowledgement is not enough: the checkpoint may still fail, and a restore would write the same rows again. One
    that is damaged is complete all the same: its rows are part of the job's output. And its turn has come: a table
    remembers the newest checkpoint it took in, so an older one after it would be dropped.
    """
    first = state.commits[0].checkpoint_id if state.commits else None
    return checkpoint_id == first and checkpoint_id in state.kept


def permit_commit(state: CoordinatorState, checkpoint_id: CheckpointId) -> permits.CommitPermit:
    """To make sink files visible."""
    _require(may_commit(state, checkpoint_id), "6: sinks commit what a completed checkpoint covers, in order")
    return permits.CommitPermit(permits._DECIDED, checkpoint_id)


# --- before something is deleted --------------------------------------------------------------------------------------


def is_needed(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether a checkpoint has to stay (5).

    It is retained, also if it is damaged: somebody may mend it. Or its sink files are not visible yet: until then it is
    the only thing that names them. Or a pending checkpoint is built on it, and is going to refer to its files.
    """
    return (
        checkpoint_id in state.kept
        or any(commit.checkpoint_id == checkpoint_id for commit in state.commits)
        or is_built_on(state, checkpoint_id)
    )


def is_built_on(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether a pending checkpoint may still refer to files of this one (5), once it is complete."""
    return any(pending.base == checkpoint_id for pending in state.pending.values())


def may_delete(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether a checkpoint was given up or subsumed (5): nobody needs it, and storage is not deciding about it."""
    return checkpoint_id not in state.pending and not is_needed(state, checkpoint_id)


def may_delete_shared(state: CoordinatorState, paths: Iterable[str]) -> bool:
    """Whether no completed checkpoint refers to any of these files (5)."""
    paths = set(paths)
    return not paths or all(paths.isdisjoint(others) for others in state.shared.references.values())


def is_counted(state: CoordinatorState, checkpoint_id: CheckpointId, task: TaskId) -> bool:
    """Whether a pending checkpoint holds the acknowledgement of a task (4, 5).

    What comes again is a duplicate then, also when its attempt is over: its files are those of the first one, and
    storage may have completed the checkpoint already, while the answer is still on its way.
    """
    pending = state.pending.get(checkpoint_id)
    return pending is not None and task in pending.acknowledged


def may_delete_refused(state: CoordinatorState, number: CheckpointId, task: TaskId, shared: Iterable[str]) -> bool:
    """Whether the files of an acknowledgement that was refused may go (5): no checkpoint has them, or may get them."""
    return number not in state.kept and not is_counted(state, number, task) and may_delete_shared(state, shared)


def may_delete_savepoint(state: CoordinatorState, checkpoint_id: CheckpointId) -> bool:
    """Whether the folder of a savepoint that failed may go (5): nobody may still be writing to it.

    Deleted under the hands of a copy that is under way, it would be there again afterwards, half of it.
    """
    pending = state.pending.get(checkpoint_id)
    return checkpoint_id not in state.exports and (pending is None or not pending.export_asked)


def permit_deletion(
    state: CoordinatorState, checkpoint_id: CheckpointId, shared: Iterable[str] | None
) -> permits.DeletePermit:
    """To delete a checkpoint, and these shared files with it; None: those that were written for it alone."""
    _require(may_delete(state, checkpoint_id), "5: what is retained, not committed or built on is never deleted")
    _require(may_delete_shared(state, shared or ()), "5: a shared file goes with the last one that refers to it")
    return permits.DeletePermit(permits._DECIDED, checkpoint_id)


def permit_refused_deletion(
    state: CoordinatorState, checkpoint_id: CheckpointId, task: TaskId, shared: Iterable[str]
) -> permits.DeletePermit:
    """To delete the files of an acknowledgement of a task that was refused, these shared ones among them."""
    _require(may_delete_refused(state, checkpoint_id, task, shared), "5: what a checkpoint refers to stays")
    return permits.DeletePermit(permits._DECIDED, checkpoint_id)


def permit_savepoint_deletion(state: CoordinatorState, checkpoint_id: CheckpointId) -> permits.DeletePermit:
    """To delete the folder of a savepoint."""
    _require(may_delete_savepoint(state, checkpoint_id), "5: nobody deletes a folder that is being written")
    return permits.DeletePermit(permits._DECIDED, checkpoint_id)


def may_sweep(state: CoordinatorState) -> bool:
    """Whether what a job does not leave behind may go (5): it is over, and storage is not deciding about a checkpoint.

    Ending is not over: a savepoint or a last checkpoint may still complete, and would have lost its files.
    """
    return state.status.terminal and not state.pending


def permit_sweep(state: CoordinatorState) -> permits.EndPermit:
    """To delete all that a job has written and does not leave behind."""
    _require(may_sweep(state), "5: files of a job go when nobody writes for it any more")
    return permits.EndPermit(permits._DECIDED, frozenset(state.kept), tables_settled=not state.commits)


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"invariant {rule}")
