"""The predicates of the coordinator, each just inside and just outside of what it allows."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import PATH, SINK, SOURCE, SPEC, TARGET, files, part

from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.checkpoint_requests import (
    CHECKPOINT,
    REQUESTS_MAX,
    CheckpointProperties,
    CheckpointRequest,
)
from tidegate.actors.coordinator.coordinator_state import (
    CheckpointDiscard,
    CompletedCheckpoint,
    CoordinatorState,
    DamagedCheckpoint,
    PendingCheckpoint,
    SavepointDiscard,
    SharedStateRegistry,
    SinkCommit,
)
from tidegate.actors.coordinator.phases import JobStatus, PendingPhase
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import METADATA_VERSION, CheckpointMetadata, SnapshotKind, StateHandle
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation

ONE, TWO, THREE = CheckpointId(1), CheckpointId(2), CheckpointId(3)
SAVEPOINT = CheckpointProperties(SnapshotKind.SAVEPOINT, TARGET)
STOP = CheckpointProperties(SnapshotKind.SUSPEND, TARGET)


def done(checkpoint_id: int) -> CompletedCheckpoint:
    """A checkpoint that is complete."""
    return CompletedCheckpoint(CheckpointId(checkpoint_id), 0, 0, final=False)


def metadata(checkpoint_id: int = 3) -> CheckpointMetadata:
    """What both tasks have in a checkpoint."""
    subtasks = part(checkpoint_id, SOURCE), part(checkpoint_id, SINK)
    number = CheckpointId(checkpoint_id)
    return CheckpointMetadata(
        METADATA_VERSION, SPEC.job_id, "job", number, AttemptNumber(0), 0, operators=(), subtasks=subtasks
    )


def pending(phase: PendingPhase = PendingPhase.WRITING, **changes: object) -> PendingCheckpoint:
    """A checkpoint that every task has acknowledged."""
    acknowledged = {task: part(3, task) for task in (SOURCE, SINK)}
    whole = PendingCheckpoint(
        THREE, AttemptNumber(0), 0, {}, phase=phase, acknowledged=acknowledged, metadata=metadata()
    )
    return replace(whole, **changes)


def state(*waiting: PendingCheckpoint, **changes: object) -> CoordinatorState:
    """A job that runs, has completed 1 and 2, and has these pending."""
    usual = CoordinatorState(
        spec=SPEC,
        status=JobStatus.RUNNING,
        generation=Generation(4),
        next_checkpoint_id=CheckpointId(4),
        pending={one.checkpoint_id: one for one in waiting},
        completed=(done(1), done(2)),
    )
    return replace(usual, **changes)


def broken(broken_state: CoordinatorState, text: str) -> None:
    """Whoever checks the state hears of it."""
    with pytest.raises(InvariantError, match=text):
        invariants.check_state(broken_state)


# --- between any two events -------------------------------------------------------------------------------------------


def test_the_next_number_is_nobodys() -> None:
    """A number is given away once: the next one is the first that is free."""
    assert invariants.is_spent(state(), THREE)
    assert not invariants.is_spent(state(), CheckpointId(4))
    invariants.check_state(state(pending()))
    broken(state(pending(), next_checkpoint_id=THREE), "invariant 4: each checkpoint has a new id")
    broken(state(next_checkpoint_id=TWO), "invariant 4: checkpoint ids")


@pytest.mark.parametrize("phase", PendingPhase)
def test_what_is_open_is_there_only_while_the_job_runs(phase: PendingPhase) -> None:
    """What storage decides outlives the attempt, and nothing else does."""
    one = pending(phase)
    over = phase in (PendingPhase.COMPLETED, PendingPhase.FAILED)
    assert invariants.is_in_its_time(state(one), one) is not over
    leaving = state(one, status=JobStatus.RESTARTING)
    assert invariants.is_in_its_time(leaving, one) is (phase in (PendingPhase.WRITING, PendingPhase.VOIDING))
    if phase.open or over:
        broken(leaving, "invariant 7: acknowledgements")


def test_nothing_is_down_while_a_job_runs() -> None:
    """A checkpoint of the others would have a hole; a job that restarts takes none."""
    assert invariants.is_whole_while_running(state())
    assert invariants.is_whole_while_running(state(down={SINK: None}, status=JobStatus.RESTARTING))
    broken(state(down={SINK: None}), "invariant 7: no task is stopped")


def test_what_is_built_on_stays() -> None:
    """The registry knows the base as long as somebody builds on it."""
    one = pending(base=TWO)
    assert invariants.is_base_held(state(), pending())
    assert invariants.is_base_held(state(shared=SharedStateRegistry({TWO: ()})), one)
    assert not invariants.is_base_held(state(shared=SharedStateRegistry({ONE: ()})), one)
    broken(state(one), "invariant 5")


def test_one_missing_task_is_too_many() -> None:
    """No task may be missing from what is written."""
    assert invariants.is_covered(pending())
    assert not invariants.is_covered(pending(waiting={SINK: None}))
    broken(state(pending(waiting={SINK: None})), "invariant 4: only a fully")


def test_one_checkpoint_is_written_at_a_time() -> None:
    """One is the limit, whatever storage does with it."""
    exporting = pending(PendingPhase.EXPORTING)
    collecting = pending(PendingPhase.COLLECTING, checkpoint_id=TWO)
    assert invariants.being_written(state(exporting, collecting)) == 1
    assert invariants.being_written(state(exporting, pending(checkpoint_id=TWO))) == 2
    broken(state(exporting, pending(checkpoint_id=TWO)), "invariant 4: one checkpoint is written")


def test_a_stop_waits_for_a_savepoint_that_is_pending() -> None:
    """A job that waits for nothing would wait for ever."""
    assert invariants.is_stop_pending(state())
    assert invariants.is_stop_pending(state(pending(), stopping=THREE))
    broken(state(pending(), stopping=TWO), "invariant 7: a stop")


def test_completed_checkpoints_ascend_and_none_comes_twice() -> None:
    """The last one is the newest."""
    assert invariants.are_ascending([])
    assert invariants.are_ascending([ONE, THREE])
    assert not invariants.are_ascending([ONE, ONE])
    assert not invariants.are_ascending([TWO, ONE])
    broken(state(completed=(done(2), done(2))), "invariant 4: completed")


def test_a_full_queue_is_the_limit() -> None:
    """As many requests as the queue takes, and not one more."""
    full = tuple(CheckpointRequest(f"r{number}", 0) for number in range(REQUESTS_MAX))
    assert invariants.is_queue_bounded(state(requests=full))
    broken(state(requests=(*full, CheckpointRequest("one more", 0))), "invariant 10")


@pytest.mark.parametrize("status", JobStatus)
def test_who_waits_is_answered_by_an_attempt_or_by_the_end(status: JobStatus) -> None:
    """Any request waits while the job runs, a stop also for the next attempt, and nobody after the end."""
    stop = CheckpointRequest("stop", 0, CheckpointProperties(SnapshotKind.SUSPEND, TARGET))
    begins = status in (JobStatus.DEPLOYING, JobStatus.RESTARTING)
    for waiting, allowed in (((), True), ((stop,), begins), ((CheckpointRequest("one", 0),), False)):
        asked = state(requests=waiting, status=status)
        assert invariants.is_queue_in_its_time(asked) is (allowed or status is JobStatus.RUNNING)
        if not invariants.is_queue_in_its_time(asked):
            broken(asked, "invariant 7: only requests")


# --- before an attempt ------------------------------------------------------------------------------------------------


def test_a_coordinator_of_the_same_generation_does_not_take_over() -> None:
    """Two coordinators of one number would both believe to be in charge."""
    assert invariants.is_newer(state(), Generation(5))
    assert not invariants.is_newer(state(), Generation(4))


def test_an_attempt_begins_when_every_fate_is_known() -> None:
    """Neither a checkpoint nor, before a fallback, a commit may come after it began."""
    assert invariants.is_fate_known(state())
    assert not invariants.is_fate_known(state(pending(PendingPhase.VOIDING)))
    waiting = (SinkCommit(TWO, ()),)
    assert invariants.is_fate_known(state(commits=waiting))
    assert not invariants.is_fate_known(state(commits=waiting, fallback=ONE))
    with pytest.raises(InvariantError, match="invariant 7"):
        invariants.check_deploy(state(pending()))


def test_a_restart_waits_no_longer_than_its_strategy_may() -> None:
    """The longest wait is allowed, and neither one more millisecond nor a moment that is over."""
    strategy = RestartStrategy.fixed_delay(2, "10s")
    for delay_ms in (0, strategy.wait_ms_max):
        invariants.check_wait(strategy, delay_ms)
    for delay_ms in (-1, strategy.wait_ms_max + 1):
        with pytest.raises(InvariantError, match="invariant 7: a restart"):
            invariants.check_wait(strategy, delay_ms)


def test_what_runs_is_not_deployed_again() -> None:
    """A task that goes on would process the same rows twice, and one alone would have channels without a sender."""
    both = (SOURCE, SINK)
    invariants.check_deployed(state(), both)
    invariants.check_deployed(state(ready={SINK: None}), None)
    with pytest.raises(InvariantError, match="invariant 7: a running task"):
        invariants.check_deployed(state(ready={SINK: None}), both)
    with pytest.raises(InvariantError, match="invariant 1: tasks that a channel joins"):
        invariants.check_deployed(state(), (SINK,))


def test_an_attempt_starts_from_the_newest() -> None:
    """Of completed ones the last; afresh only where nothing was completed."""
    assert invariants.is_start_newest(state(), TWO)
    assert not invariants.is_start_newest(state(), ONE)
    assert not invariants.is_start_newest(state(), None)
    assert invariants.is_start_newest(state(completed=()), None)
    assert not invariants.is_start_newest(state(completed=(), damaged=(DamagedCheckpoint(TWO, "torn"),)), None)
    with pytest.raises(InvariantError, match="invariant 7"):
        invariants.check_start(state(), ONE)


# --- before a checkpoint is exported, or completed --------------------------------------------------------------------


def test_savepoints_under_way_are_bounded_wherever_they_are() -> None:
    """Copied, given up and still copied, deleted, or not complete yet: the last one may start, one more may not."""
    copied = pending(PendingPhase.COMPLETED, properties=SAVEPOINT, export_asked=True)
    kinds = SnapshotKind.SAVEPOINT, SnapshotKind.SUSPEND
    full: dict[str, object] = {
        "copies": {copied.checkpoint_id: copied},
        "exports": {ONE: TARGET},
        "savepoint_discards": {ONE: SavepointDiscard(TARGET), TWO: SavepointDiscard(TARGET)},
    }
    assert invariants.copies_under_way(state(**full)) == 3
    assert [invariants.may_copy(state(**full), kind) for kind in kinds] == [True, True]
    one_more = pending(PendingPhase.COLLECTING, properties=SAVEPOINT, checkpoint_id=CheckpointId(9))
    assert [invariants.may_copy(state(one_more, **full), kind) for kind in kinds] == [False, True]
    stop = pending(PendingPhase.EXPORTING, properties=STOP, checkpoint_id=CheckpointId(10))
    both = state(one_more, stop, **full)
    assert [invariants.may_copy(both, kind) for kind in kinds] == [False, False]
    assert invariants.are_copies_bounded(both)
    third = replace(both, exports={ONE: TARGET, CheckpointId(11): TARGET})
    assert not invariants.are_copies_bounded(third)


@pytest.mark.parametrize("status", JobStatus)
def test_a_job_that_ends_has_no_copies(status: JobStatus) -> None:
    """Nobody would answer whoever waits for them."""
    copied = pending(PendingPhase.COMPLETED, properties=SAVEPOINT, export_asked=True)
    one = state(copies={THREE: copied}, status=status)
    if status is JobStatus.ENDING or status.terminal:
        broken(one, "invariant 7: a job that ends copies no savepoint")
    else:
        invariants.check_state(one)


@pytest.mark.parametrize(
    ("change", "of_state"),
    [
        ({"phase": PendingPhase.WRITING}, {}),
        ({"export_asked": True}, {}),
        ({}, {"copies": {}}),
        ({}, {"exports": {THREE: TARGET}}),
        ({}, {"discards": {THREE: CheckpointDiscard(False, ())}}),
    ],
)
def test_a_savepoint_is_copied_while_its_checkpoint_stays(
    change: dict[str, object], of_state: dict[str, object]
) -> None:
    """Each condition alone is enough to refuse it."""
    one = pending(PendingPhase.COMPLETED, properties=SAVEPOINT)
    invariants.permit_copy(state(copies={THREE: one}), one)
    one = replace(one, **change)
    with pytest.raises(InvariantError, match="invariant 4"):
        invariants.permit_copy(state(**{"copies": {THREE: one}, **of_state}), one)


@pytest.mark.parametrize(
    "change",
    [
        {"phase": PendingPhase.ACKNOWLEDGED},
        {"waiting": {SINK: None}},
        {"metadata": None},
        {"properties": CHECKPOINT},
        {"export_asked": True},
    ],
)
def test_a_savepoint_is_exported_whole_and_by_one_copy_at_a_time(change: dict[str, object]) -> None:
    """Each condition alone is enough to refuse it."""
    one = pending(PendingPhase.EXPORTING, properties=SAVEPOINT)
    invariants.permit_export(one)
    with pytest.raises(InvariantError, match="invariant 4"):
        invariants.permit_export(replace(one, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"phase": PendingPhase.ACKNOWLEDGED},
        {"waiting": {SINK: None}},
        {"metadata": None},
        {"acknowledged": {SOURCE: part(3, SOURCE)}},
        {"properties": STOP},
    ],
)
def test_a_checkpoint_completes_with_every_task_of_the_job(change: dict[str, object]) -> None:
    """Each condition alone is enough to refuse it."""
    invariants.permit_completion(state(pending()), pending())
    one = pending(**change)
    with pytest.raises(InvariantError, match="invariant 4"):
        invariants.permit_completion(state(one), one)


def test_what_finished_before_or_was_exported_may_complete() -> None:
    """Tasks that had finished are covered; a savepoint has a folder of its own before."""
    finished = pending(acknowledged={SOURCE: part(3, SOURCE)}, finished=(SINK,))
    assert invariants.may_complete(state(finished), finished)
    exported = pending(properties=SAVEPOINT, path=PATH)
    assert invariants.may_complete(state(exported), exported)
    assert not invariants.may_complete(state(exported, pending(checkpoint_id=TWO)), exported), "one at a time"


def test_a_checkpoint_completes_once_and_after_older_ones() -> None:
    """The newest completed one is older."""
    assert invariants.may_count_as_complete(state(), pending())
    assert invariants.may_count_as_complete(state(completed=()), pending())
    assert not invariants.may_count_as_complete(state(completed=(done(3),)), pending())
    assert not invariants.may_count_as_complete(
        state(completed=(done(1), CompletedCheckpoint(CheckpointId(4), 0, 0, False))), pending()
    )
    assert not invariants.may_count_as_complete(state(), pending(waiting={SINK: None}))
    with pytest.raises(InvariantError, match="invariant 4"):
        invariants.check_complete(state(), pending(metadata=None))


def test_shared_files_are_a_checkpoints_own_or_those_of_its_base() -> None:
    """A file of somebody else would go with its owner."""
    below = f"{SPEC.job_id}/shared/chk-2/sink-0"
    layer = StateHandle(below, None, 10, "sum", ())
    built = replace(metadata(), subtasks=(replace(part(3, SINK), layers=(layer,)),))
    known = state(shared=SharedStateRegistry({TWO: (below,)}))
    assert invariants.strange_file(known, pending(metadata=built, base=TWO)) is None
    assert invariants.strange_file(known, pending(metadata=built)) == below
    with pytest.raises(InvariantError, match=r"invariant 5: .*/chk-2/sink-0 is neither"):
        invariants.check_complete(known, pending(metadata=built))


# --- before sink files are committed ----------------------------------------------------------------------------------


def test_sinks_commit_what_is_complete_and_in_order() -> None:
    """Neither too early, nor out of turn, nor again."""
    waiting = state(commits=(SinkCommit(ONE, (files(0, "f"),)), SinkCommit(TWO, ())))
    invariants.permit_commit(waiting, ONE)
    assert not invariants.may_commit(waiting, TWO), "its turn has not come"
    assert not invariants.may_commit(state(), ONE), "it is committed already"
    with pytest.raises(InvariantError, match="invariant 6"):
        invariants.permit_commit(state(commits=(SinkCommit(THREE, ()),)), THREE)


def test_what_is_damaged_is_complete_all_the_same() -> None:
    """Its rows are part of the output."""
    damaged = state(completed=(done(1),), damaged=(DamagedCheckpoint(TWO, "torn"),))
    assert invariants.may_commit(replace(damaged, commits=(SinkCommit(TWO, ()),)), TWO)
    assert not invariants.may_commit(replace(damaged, commits=(SinkCommit(THREE, ()),)), THREE)


# --- before something is deleted --------------------------------------------------------------------------------------


def test_a_checkpoint_goes_when_nobody_needs_it() -> None:
    """Each reason alone is enough to keep it."""
    four = CheckpointId(4)
    assert invariants.may_delete(state(pending()), four)
    assert not invariants.may_delete(state(pending()), THREE), "storage may be deciding about it"
    assert not invariants.may_delete(state(), TWO), "it is retained"
    assert not invariants.may_delete(state(damaged=(DamagedCheckpoint(four, "torn"),)), four), "somebody may mend it"
    assert not invariants.may_delete(state(commits=(SinkCommit(four, ()),)), four), "nothing else names its files"
    assert not invariants.may_delete(state(pending(base=four)), four), "one that is pending is built on it"
    assert invariants.is_built_on(state(pending(base=four)), four)
    assert not invariants.is_built_on(state(pending(base=four)), TWO)
    with pytest.raises(InvariantError, match="invariant 5: a retained checkpoint"):
        invariants.permit_deletion(state(), TWO, None)


def test_a_shared_file_goes_with_the_last_that_refers_to_it() -> None:
    """One reference is enough to keep it."""
    shared = state(shared=SharedStateRegistry({ONE: ("a", "b"), TWO: ("b",)}))
    assert invariants.may_delete_shared(shared, ())
    assert invariants.may_delete_shared(shared, ("c",))
    assert not invariants.may_delete_shared(shared, ("c", "b"))
    with pytest.raises(InvariantError, match="invariant 5: a shared file"):
        invariants.permit_deletion(shared, THREE, ("a",))


def test_files_of_a_refused_acknowledgement_go_unless_the_checkpoint_is_complete() -> None:
    """What is complete keeps what was acknowledged."""
    shared = state(shared=SharedStateRegistry({TWO: ("b",)}))
    invariants.permit_refused_deletion(shared, THREE, SINK, ("c",))
    for checkpoint_id, paths in ((TWO, ("c",)), (THREE, ("b",))):
        with pytest.raises(InvariantError, match="invariant 5"):
            invariants.permit_refused_deletion(shared, checkpoint_id, SINK, paths)


def test_files_that_a_pending_checkpoint_has_counted_stay() -> None:
    """Storage may have completed it already; a task that it still waits for has nothing in it."""
    one = pending(acknowledged={SOURCE: part(3, SOURCE)})
    invariants.permit_refused_deletion(state(one), THREE, SINK, ())
    with pytest.raises(InvariantError, match="invariant 5: files to which a checkpoint refers"):
        invariants.permit_refused_deletion(state(one), THREE, SOURCE, ())


def test_a_folder_is_not_deleted_while_somebody_writes_to_it() -> None:
    """A copy that is under way, or that was given up and has not answered, may still write."""
    copied = pending(PendingPhase.EXPORTING, export_asked=True)
    invariants.permit_savepoint_deletion(state(pending()), THREE, voided=False)
    for written in (state(copied), state(exports={THREE: TARGET}), state(copies={THREE: copied})):
        for voided in (False, True):
            with pytest.raises(InvariantError, match="invariant 5"):
                invariants.permit_savepoint_deletion(written, THREE, voided)


def test_a_folder_that_a_lost_coordinator_may_write_to_gets_a_tombstone() -> None:
    """Nobody hears whether it still does, so nobody can wait for that."""
    lost = state(lost_exports={THREE: None})
    invariants.permit_savepoint_deletion(lost, THREE, voided=True)
    with pytest.raises(InvariantError, match="invariant 5"):
        invariants.permit_savepoint_deletion(lost, THREE, voided=False)


def test_a_job_is_swept_when_it_is_over_and_storage_decides_nothing() -> None:
    """Ending is not over; what may still complete keeps its files."""
    invariants.permit_sweep(state(status=JobStatus.FINISHED))
    for early in (state(status=JobStatus.ENDING), state(pending(), status=JobStatus.FINISHED)):
        with pytest.raises(InvariantError, match="invariant 5: files of a job"):
            invariants.permit_sweep(early)
