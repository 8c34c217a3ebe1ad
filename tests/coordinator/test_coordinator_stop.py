"""Savepoints and stop with savepoint in the coordinator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT
from coordinators import PATH, SINK, SOURCE, SPEC, TARGET, Coordinator, files, kinds, only, part, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import SAVEPOINT_OUTAGE_MS
from tidegate.actors.coordinator.invariants import COPIES_MAX
from tidegate.actors.coordinator.job_spec import COPIES_TIMEOUT_MS, JobSpec
from tidegate.actors.coordinator.phases import JobStatus, PendingPhase
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.stream_elements import Alignment, BarrierOptions
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind, TableHead
from tidegate.storage.ids import AttemptNumber, CheckpointId

NEVER = RestartStrategy.none()
STOPS = [(SnapshotKind.SUSPEND, "suspended"), (SnapshotKind.TERMINATE, "finished")]


# --- savepoints ---------------------------------------------------------------------------------------------------


def copying(job: JobSpec = SPEC) -> Coordinator:
    """A job whose savepoint 1 is complete, and is being copied."""
    coordinator = Coordinator(job).run()
    coordinator.start_savepoint()
    coordinator.acknowledge_all(1)
    assert "WriteSavepoint" in kinds(coordinator.written(1))
    return coordinator


def test_a_savepoint_is_copied_when_its_checkpoint_is_complete() -> None:
    """Acknowledged -> written -> copied -> answered with the path of the copy."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint()
    (write,) = only(coordinator.acknowledge_all(1), do.WriteMetadata)
    found = coordinator.written(1)
    assert only(found, do.WriteSavepoint) == [do.WriteSavepoint(TARGET, write.metadata, True, permit=ANY_PERMIT)]
    assert only(found, do.CompleteRequest) == []
    assert [c.checkpoint_id for c in coordinator.state.completed] == [1]
    assert (coordinator.state.completed_checkpoints, coordinator.state.statistics.in_progress) == (0, 1)

    found = coordinator.exported(1)

    assert found == [do.CompleteRequest("wanted", CheckpointId(1), None, PATH)]
    assert (coordinator.state.completed_checkpoints, coordinator.state.statistics.in_progress) == (1, 0)


def test_checkpoints_complete_and_commit_while_a_savepoint_is_copied() -> None:
    """The copy never ends: newer checkpoints are taken, committed and subsumed, and the copied one stays."""
    coordinator = copying()
    for number in range(2, 7):
        coordinator.ask()
        coordinator.collect(number, files(number, f"f{number}"))
        assert [c.checkpoint_id for c in only(coordinator.written(number), do.CommitSinks)] == [number]
        deleted = only(coordinator.committed(number), do.DiscardCheckpoint)
        assert 1 not in [d.checkpoint_id for d in deleted]
    assert [c.checkpoint_id for c in coordinator.state.completed] == [6]

    found = coordinator.exported(1)

    assert only(found, do.CompleteRequest) == [do.CompleteRequest("wanted", CheckpointId(1), None, PATH)]
    assert [d.checkpoint_id for d in only(found, do.DiscardCheckpoint)] == [1]
    newest = coordinator.state.statistics.latest_completed
    assert newest is not None
    assert newest.checkpoint_id == 6


def test_what_is_copied_does_not_hear_of_later_commits() -> None:
    """The metadata is that of the moment when all tasks had acknowledged it, also where the copy is repeated."""
    coordinator = Coordinator().run()
    coordinator.complete(files(0, "f0"))
    coordinator.tell(ev.SinksCommitted(0, CheckpointId(1), (TableHead("table", 4, CheckpointId(1)),)))
    coordinator.start_savepoint()
    coordinator.ack(2, SOURCE)
    coordinator.ack(2, SINK, files(1, "f1"))
    (copy,) = only(coordinator.written(2), do.WriteSavepoint)
    coordinator.tell(ev.SinksCommitted(0, CheckpointId(2), (TableHead("table", 5, CheckpointId(2)),)))
    coordinator.complete(files(2, "f2"))

    coordinator.not_exported(2)
    (again,) = only(coordinator.fire("export:2"), do.WriteSavepoint)

    assert again.metadata == copy.metadata
    assert [head.seq for head in again.metadata.table_heads] == [4]
    assert [head.seq for head in coordinator.state.known_tables] == [5]


def test_a_copy_has_a_limit_of_its_own() -> None:
    """It counts from the completion of the checkpoint. A copy that hangs is told to stop; then its folder goes."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint()
    coordinator.acknowledge_all(1)
    coordinator.at_ms = 4_000
    assert do.SetTimer("copy:1", 4_000 + SPEC.checkpoints.timeout_ms) in coordinator.written(1)
    assert coordinator.fire("timeout:1") == []

    found = coordinator.fire("copy:1")

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.reason, TARGET in (answer.error or "")) == (Reason.SAVEPOINT_NOT_WRITTEN, True)
    assert kinds(found) == ["StopCopy", "CompleteRequest"]
    assert kinds(coordinator.not_exported(1)) == ["DiscardSavepoint"]
    assert coordinator.status is JobStatus.RUNNING
    assert coordinator.state.failed_checkpoints == 1


def test_a_bounded_number_of_savepoints_is_copied_side_by_side() -> None:
    """The next one is refused, given-up copies included, until one has ended. A stop has a place of its own."""
    coordinator = Coordinator().run()
    for number in range(1, COPIES_MAX + 1):
        coordinator.start_savepoint(request=f"s{number}")
        coordinator.acknowledge_all(number)
        coordinator.written(number)
    coordinator.fire("copy:1")

    (answer,) = only(coordinator.request("more", SnapshotKind.SAVEPOINT), do.CompleteRequest)

    assert answer.reason is Reason.TOO_MANY_REQUESTS
    assert f"{COPIES_MAX} savepoints are still being copied" in (answer.error or "")
    stop = only(coordinator.request("stop", SnapshotKind.SUSPEND), do.TriggerCheckpoint)
    assert [t.checkpoint_id for t in stop] == [COPIES_MAX + 1]
    assert only(coordinator.decline(COPIES_MAX + 1), do.DeployAttempt)
    coordinator.all_ready()
    coordinator.not_exported(1)
    coordinator.tell(ev.SavepointDiscarded(0, CheckpointId(1)))
    assert coordinator.start_savepoint(request="more") == COPIES_MAX + 2


@pytest.mark.parametrize(
    ("settings", "checkpoint", "savepoint"),
    [
        ({}, BarrierOptions(Alignment.ALIGNED), Alignment.ALIGNED),
        ({"exactly_once": False}, BarrierOptions(Alignment.AT_LEAST_ONCE), Alignment.AT_LEAST_ONCE),
        ({"unaligned": True}, BarrierOptions(Alignment.UNALIGNED), Alignment.ALIGNED),
        ({"unaligned": True, "aligned_timeout_ms": 0}, BarrierOptions(Alignment.UNALIGNED), Alignment.ALIGNED),
        ({"unaligned": True, "aligned_timeout_ms": 70}, BarrierOptions(Alignment.ALIGNED, 70), Alignment.ALIGNED),
    ],
)
def test_barriers_travel_as_the_settings_say_and_those_of_savepoints_are_aligned(
    settings: dict[str, object], checkpoint: BarrierOptions, savepoint: Alignment
) -> None:
    """A savepoint holds no in-flight data, whatever the job's checkpoints do."""
    coordinator = Coordinator(spec(**settings)).run()
    (trigger,) = only(coordinator.request(), do.TriggerCheckpoint)
    assert checkpoint == trigger.options
    coordinator.collect(1)
    coordinator.written(1)

    (trigger,) = only(coordinator.request("s", SnapshotKind.SAVEPOINT), do.TriggerCheckpoint)

    assert BarrierOptions(savepoint, None, SnapshotKind.SAVEPOINT) == trigger.options


def test_a_copy_that_fails_is_repeated_as_long_as_an_outage_may_last() -> None:
    """Then the savepoint has failed, what is left of the copy is deleted, and no tolerance counts that."""
    coordinator = copying(spec(tolerable_failures=0))
    for attempt in (1, 2):
        assert coordinator.not_exported(1) == [do.SetTimer("export:1", 100 * attempt)]
        assert kinds(coordinator.fire("export:1")) == ["WriteSavepoint"]

    found = coordinator.not_exported(1, away_ms=SAVEPOINT_OUTAGE_MS)

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.reason, "disk full" in (answer.error or "")) == (Reason.SAVEPOINT_NOT_WRITTEN, True)
    assert only(found, do.DiscardSavepoint) == [
        do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), permit=ANY_PERMIT)
    ]
    assert coordinator.status is JobStatus.RUNNING


def test_the_savepoint_of_a_stop_that_fails_after_it_was_copied_is_deleted() -> None:
    """The user never finds a savepoint whose checkpoint is none."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)

    found = coordinator.voided(1)

    assert only(found, do.DiscardSavepoint) == [
        do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), permit=ANY_PERMIT)
    ]
    assert only(found, do.CompleteRequest)[0].reason is Reason.METADATA_NOT_WRITTEN


@pytest.mark.parametrize("written", [True, False])
def test_the_copy_of_a_stop_is_deleted_when_nobody_writes_to_it_any_more(written: bool) -> None:
    """The attempt fails while the copy is being written; the next one does not wait for that."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    found = coordinator.fail()
    assert only(found, do.DiscardSavepoint) == []
    assert only(found, do.StopCopy) == [do.StopCopy(CheckpointId(1))]
    assert only(coordinator.fire("restart:1"), do.DeployAttempt)

    found = coordinator.exported(1) if written else coordinator.not_exported(1)

    assert found == [do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), permit=ANY_PERMIT)]
    assert coordinator.state.exports == {}


def test_a_copy_goes_on_when_its_attempt_fails() -> None:
    """All of the savepoint is in storage: it needs no task, and no attempt waits for it."""
    coordinator = copying()
    assert only(coordinator.fail(), do.StopCopy) == []
    (deploy,) = only(coordinator.fire("restart:1"), do.DeployAttempt)
    assert deploy.restore is not None
    assert deploy.restore.checkpoint_id == 1

    assert kinds(coordinator.exported(1)) == ["CompleteRequest"]


def test_a_savepoint_that_is_copied_at_the_end_fails() -> None:
    """Its user hears of that at once. Its copy is told to stop, and what it has written is deleted."""
    coordinator = copying()

    found = coordinator.cancel()

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.request, answer.reason) == ("wanted", Reason.JOB_ENDING)
    assert "still being copied" in (answer.error or "")
    assert only(found, do.StopCopy) == [do.StopCopy(CheckpointId(1))]
    assert only(found, do.EndJob) == []
    assert kinds(coordinator.not_exported(1)) == ["DiscardSavepoint"]
    assert kinds(coordinator.tell(ev.SavepointDiscarded(0, CheckpointId(1)))) == ["EndJob"]


def test_a_savepoint_that_completes_at_the_end_fails() -> None:
    """Storage was deciding about its checkpoint when the job began to end: it is complete, and is not copied."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint()
    coordinator.acknowledge_all(1)
    assert only(coordinator.cancel(), do.CompleteRequest) == []

    found = coordinator.written(1)

    assert [(a.request, a.reason) for a in only(found, do.CompleteRequest)] == [("wanted", Reason.JOB_ENDING)]
    assert only(found, do.WriteSavepoint) == []
    assert only(found, do.EndJob)


def test_a_job_that_ends_does_not_wait_for_a_copy_for_long() -> None:
    """The folder may be anywhere, and so unreachable."""
    coordinator = copying()
    assert do.SetTimer("copies", COPIES_TIMEOUT_MS) in coordinator.cancel()

    assert kinds(coordinator.fire("copies", at_ms=COPIES_TIMEOUT_MS)) == ["EndJob"]
    assert kinds(coordinator.exported(1)) == ["DiscardSavepoint"]


def test_the_wait_for_copies_begins_when_the_end_waits_for_nothing_else() -> None:
    """Storage may be away as a whole: the wait must not be over when it is back. Deletions are tried again then."""
    coordinator = copying()
    coordinator.ask()
    coordinator.collect(2, files(0, "f0"))
    coordinator.written(2)
    assert only(coordinator.cancel(), do.SetTimer) == []
    coordinator.not_exported(1)
    coordinator.tell(ev.SavepointDiscardFailed(0, CheckpointId(1), "away"))
    coordinator.at_ms = 30_000

    found = coordinator.committed(2)

    assert [d.checkpoint_id for d in only(found, do.DiscardSavepoint)] == [1]
    assert do.SetTimer("copies", 30_000 + COPIES_TIMEOUT_MS) in found
    assert kinds(coordinator.tell(ev.SavepointDiscarded(0, CheckpointId(1)))) == ["EndJob"]


def test_a_new_generation_copies_again() -> None:
    """The answers went down with the old one, which may still be copying: a folder that fails then is voided."""
    coordinator = copying()

    found = coordinator.start(generation=2)

    (copy,) = only(found, do.WriteSavepoint)
    assert (copy.metadata.checkpoint_id, copy.complete) == (1, True)
    assert do.SetTimer("copy:1", SPEC.checkpoints.timeout_ms) in found
    (discard,) = only(coordinator.not_exported(1, permanent=True), do.DiscardSavepoint)
    assert discard.voided


def test_a_new_generation_answers_for_a_copy_that_the_lost_one_has_begun() -> None:
    """Nothing is to be voided once the savepoint is whole."""
    coordinator = copying()
    coordinator.start(generation=2)

    assert coordinator.exported(1) == [do.CompleteRequest("wanted", CheckpointId(1), None, PATH)]
    assert coordinator.state.lost_exports == {}


def test_a_new_generation_voids_the_copy_of_a_stop_that_was_under_way() -> None:
    """Its answer went down with the old one."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)

    found = coordinator.start(generation=2)

    assert only(found, do.DiscardSavepoint) == [
        do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), voided=True, permit=ANY_PERMIT)
    ]


# --- stop ---------------------------------------------------------------------------------------------------------


def stop(coordinator: Coordinator, kind: SnapshotKind = SnapshotKind.SUSPEND) -> int:
    """Ask for the end, and let every task take part."""
    number = coordinator.start_savepoint(kind)
    coordinator.acknowledge_all(number, finished=kind is SnapshotKind.TERMINATE)
    coordinator.exported(number)
    return number


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_job_ends_after_its_savepoint_and_its_tasks(kind: SnapshotKind, status: str) -> None:
    """Written -> tasks are told -> tasks leave -> suspended, or finished where it was drained."""
    coordinator = Coordinator().run()
    found = coordinator.written(stop(coordinator, kind))
    assert only(found, do.CompleteRequest) == [do.CompleteRequest("wanted", CheckpointId(1), None, PATH)]
    assert only(found, do.NotifyCompleted)
    assert only(found, do.CancelAttempt) == []

    assert only(coordinator.all_finished(), do.EndJob) == [do.EndJob(status, None)]
    assert coordinator.status.value == status


def test_a_stop_ends_everything_else_that_is_pending_and_refuses_what_comes() -> None:
    """The scheduler is shut down: no periodic checkpoint, no request, one savepoint."""
    coordinator = Coordinator().run()
    coordinator.request("before")
    coordinator.request("queued")

    found = coordinator.request("stop", SnapshotKind.SUSPEND)

    assert {a.request: a.reason for a in only(found, do.CompleteRequest)} == {
        "before": Reason.SCHEDULER_SHUTDOWN,
        "queued": Reason.SCHEDULER_SHUTDOWN,
    }
    assert [t.checkpoint_id for t in only(found, do.TriggerCheckpoint)] == [2]
    assert only(coordinator.fire("periodic:0", at_ms=5_000), do.TriggerCheckpoint) == []
    for kind in SnapshotKind:
        assert only(coordinator.request("late", kind), do.CompleteRequest)[0].reason is Reason.SCHEDULER_SHUTDOWN


def lose_copy(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """Every attempt to copy fails, for as long as an outage may last."""
    coordinator.acknowledge_all(2)
    for _ in range(20):
        assert kinds(coordinator.not_exported(2, away_ms=SAVEPOINT_OUTAGE_MS - 1)) == ["SetTimer"]
        assert kinds(coordinator.fire("export:2")) == ["WriteSavepoint"]
    return coordinator.not_exported(2, away_ms=SAVEPOINT_OUTAGE_MS)


def no_folder(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """What was asked for is a folder that can never be written: one attempt is enough to know."""
    coordinator.acknowledge_all(2)
    return coordinator.not_exported(2, permanent=True)


def void(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """A tombstone is where the metadata was to be."""
    coordinator.acknowledge_all(2)
    coordinator.exported(2)
    return coordinator.voided(2)


FAILURES: dict[str, tuple[Callable[[Coordinator], list[do.CoordinatorInstruction]], Reason]] = {
    "declined": (lambda c: c.decline(2), Reason.DECLINED),
    "expired": (lambda c: c.fire("timeout:2"), Reason.EXPIRED),
    "voided": (void, Reason.METADATA_NOT_WRITTEN),
    "not copied": (lose_copy, Reason.SAVEPOINT_NOT_WRITTEN),
    "unfit folder": (no_folder, Reason.SAVEPOINT_NOT_WRITTEN),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_stop_that_fails_restarts_the_attempt_at_no_charge(how: str) -> None:
    """Its tasks had ended their data; the job goes on from its newest checkpoint, also if it may never restart."""
    coordinator = Coordinator(spec(restart=NEVER)).run()
    coordinator.complete()
    coordinator.start_savepoint(SnapshotKind.TERMINATE)
    act, reason = FAILURES[how]

    found = act(coordinator)

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.request, answer.reason) == ("wanted", reason)
    (deploy,) = only(found, do.DeployAttempt)
    assert deploy.restore is not None
    assert deploy.restore.checkpoint_id == 1
    assert coordinator.state.failures.in_a_row == 0
    assert [t.timer for t in only(coordinator.all_ready(), do.SetTimer)] == ["periodic:1"], "checkpoints go on"
    assert coordinator.ask() == 3


@pytest.mark.parametrize(("kind", "status"), STOPS)
def test_a_stop_that_meets_a_task_that_leaves_is_carried_out_by_the_next_attempt(
    kind: SnapshotKind, status: str
) -> None:
    """No task of that has begun when it is triggered, so it is the first thing there; whoever asked waits."""
    coordinator = Coordinator(spec(restart=NEVER, max_concurrent=2)).run()
    coordinator.ask()
    coordinator.collect(1, finished=False)
    coordinator.start_savepoint(kind)
    coordinator.written(1)

    found = coordinator.tell(ev.TaskFinished(0, AttemptNumber(0), SOURCE))

    assert only(found, do.CompleteRequest) == []
    (deploy,) = only(found, do.DeployAttempt)
    assert deploy.restore is not None
    assert deploy.restore.checkpoint_id == 1
    assert only(coordinator.request("late"), do.CompleteRequest)[0].reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING
    (trigger,) = only(coordinator.all_ready(), do.TriggerCheckpoint)
    assert (trigger.checkpoint_id, trigger.attempt, trigger.options.kind) == (3, 1, kind)
    coordinator.acknowledge_all(3)
    coordinator.exported(3)
    found = coordinator.written(3)
    assert only(found, do.CompleteRequest) == [do.CompleteRequest("wanted", CheckpointId(3), None, PATH)]
    assert only(coordinator.all_finished(), do.EndJob) == [do.EndJob(status, None)]


def test_a_stop_that_fails_before_its_trigger_changes_nothing() -> None:
    """No task has been told, so the attempt goes on."""
    coordinator = Coordinator(replace(spec(restart=NEVER), hooks=("hook",))).run()
    coordinator.request("wanted", SnapshotKind.SUSPEND)

    found = coordinator.tell(ev.HookFailed(0, CheckpointId(1), "no"))

    assert kinds(found) == ["CompleteRequest"]
    assert coordinator.status is JobStatus.RUNNING
    assert kinds(coordinator.request())[0] == "TriggerHooks"


def test_a_stop_that_meets_a_task_that_leaves_before_its_trigger_is_triggered_again_at_once() -> None:
    """No task has been told, so the attempt goes on, and the hooks are called anew."""
    coordinator = Coordinator(replace(spec(restart=NEVER), hooks=("hook",))).run()
    coordinator.request("wanted", SnapshotKind.SUSPEND)

    found = coordinator.tell(ev.TaskFinished(0, AttemptNumber(0), SOURCE))

    assert [hooks.checkpoint_id for hooks in only(found, do.TriggerHooks)] == [2]
    assert (only(found, do.CompleteRequest), only(found, do.CancelAttempt)) == ([], [])
    (trigger,) = only(coordinator.tell(ev.HooksTriggered(0, CheckpointId(2), ())), do.TriggerCheckpoint)
    assert (trigger.tasks, trigger.options.kind) == ((SINK,), SnapshotKind.SUSPEND)


def test_a_task_that_fails_during_a_stop_is_a_failure_as_always() -> None:
    """The stop is answered, the restart strategy decides."""
    coordinator = Coordinator(spec(restart=NEVER)).run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)

    found = coordinator.fail("boom")

    assert only(found, do.CompleteRequest)[0].reason in (Reason.JOB_FAILOVER, Reason.JOB_ENDING)
    assert only(found, do.EndJob) == [do.EndJob("failed", "sink[0]: boom")]


def test_a_stop_whose_fate_is_unknown_when_the_attempt_fails_ends_the_job_if_it_is_complete() -> None:
    """Invariant 7: nothing is deployed before the fate is known; the savepoint covers everything."""
    coordinator = Coordinator().run()
    stop(coordinator)
    coordinator.write_failed(1)
    coordinator.fail()
    assert only(coordinator.fire("restart:1"), do.DeployAttempt) == []
    coordinator.fire("void:1")

    found = coordinator.written(1)

    assert only(found, do.DeployAttempt) == []
    assert only(found, do.EndJob) == [do.EndJob("suspended", None)]


def test_the_files_of_a_stopped_job_are_committed_before_it_ends() -> None:
    """Invariant 6: what the savepoint covers is visible when the job is over."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.ack(1, SOURCE)
    coordinator.ack(1, SINK, files(0, "f0"))
    coordinator.exported(1)
    assert only(coordinator.written(1), do.CommitSinks)
    assert coordinator.all_finished() == []

    assert only(coordinator.committed(1), do.EndJob) == [do.EndJob("suspended", None)]


def test_a_savepoint_that_is_not_ready_keeps_newer_checkpoints_waiting() -> None:
    """The user wants that one, so it is not subsumed; they come after it."""
    coordinator = Coordinator(spec(max_concurrent=2)).run()
    coordinator.start_savepoint()
    coordinator.ask()
    assert coordinator.acknowledge_all(2) == []
    assert coordinator.state.pending[CheckpointId(2)].phase is PendingPhase.ACKNOWLEDGED

    assert kinds(coordinator.acknowledge_all(1)) == ["WriteMetadata"]
    assert [w.metadata.checkpoint_id for w in only(coordinator.written(1), do.WriteMetadata)] == [2]


@pytest.mark.parametrize("kind", [SnapshotKind.SAVEPOINT, SnapshotKind.SUSPEND, SnapshotKind.TERMINATE])
def test_what_a_source_began_as_a_checkpoint_is_no_part_of_a_savepoint(kind: SnapshotKind) -> None:
    """An externally induced source may begin number 1 before it hears that 1 is a savepoint: its data has not ended."""
    coordinator = Coordinator(spec(tolerable_failures=0)).run()
    coordinator.request("s", kind)

    early = ev.CheckpointAcknowledged(0, AttemptNumber(0), SOURCE, CheckpointId(1), part(1, SOURCE))
    (answer,) = only(coordinator.tell(early), do.CompleteRequest)

    assert answer.reason is Reason.DECLINED
    assert "as a checkpoint before it was told" in (answer.error or "")
    assert CheckpointId(1) not in coordinator.state.pending
