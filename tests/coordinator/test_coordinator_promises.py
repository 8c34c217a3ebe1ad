"""What the coordinator keeps whatever hangs, lags or fails: everything is counted, bounded, answered and deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT
from coordinators import PATH, SINK, SPEC, TARGET, Coordinator, files, kinds, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoints import checkpoint_cleaner
from tidegate.actors.coordinator.checkpoints.checkpoint_cleaner import SAVEPOINT_OUTAGE_MS
from tidegate.actors.coordinator.job_spec import pause_ms
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.running_job import Answer, answers_of
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId

HOOKED = replace(spec(tolerable_failures=1), hooks=("outside",))


def hook_fails(coordinator: Coordinator, checkpoint_id: int, how: str) -> list[do.CoordinatorInstruction]:
    """The master hook raises, or does not come back."""
    if how == "hung":
        return coordinator.fire(f"timeout:{checkpoint_id}")
    return coordinator.tell(ev.HookFailed(coordinator.at_ms, CheckpointId(checkpoint_id), "no"))


# --- failures are counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["raised", "hung"])
def test_failures_of_hooks_count_against_what_is_tolerated(how: str) -> None:
    """A job whose hook never works does not run on for ever without a checkpoint."""
    coordinator = Coordinator(HOOKED).run()
    coordinator.request("first")
    assert only(hook_fails(coordinator, 1, how), do.NotifyAborted) == [], "no task has heard of it"
    assert coordinator.status is JobStatus.RUNNING
    coordinator.request("second")

    hook_fails(coordinator, 2, how)

    assert coordinator.status is JobStatus.RESTARTING


@pytest.mark.parametrize("reason", [Reason.DECLINED, Reason.CANCEL_BARRIER, Reason.HOOK_FAILED])
def test_the_final_checkpoint_is_not_repeated_without_a_pause(reason: Reason) -> None:
    """Otherwise a job that is over, and tolerates failures, would fill its log as fast as it can."""
    job = spec(tolerable_failures=9)
    coordinator = Coordinator(replace(job, hooks=("outside",)) if reason is Reason.HOOK_FAILED else job).run()
    coordinator.end_of_data()
    event = (
        ev.HookFailed(0, CheckpointId(1), "no")
        if reason is Reason.HOOK_FAILED
        else ev.CheckpointDeclined(0, coordinator.state.attempt, SINK, CheckpointId(1), reason, "no")
    )

    found = coordinator.tell(event)

    assert [t.timer for t in only(found, do.SetTimer)] == ["final:0"]
    assert coordinator.state.pending == {}
    coordinator.fire("final:0", at_ms=SPEC.storage_retry_ms)
    assert list(coordinator.state.pending) == [2]


def test_the_pause_before_a_final_checkpoint_ends_with_the_attempt() -> None:
    """Its timer went down with the old generation: without an interval nothing else would ever wake the job."""
    coordinator = Coordinator(spec(interval_ms=None, tolerable_failures=9)).run()
    coordinator.end_of_data()
    coordinator.decline(1)
    coordinator.start(generation=2)
    coordinator.all_ready()

    assert [t.checkpoint_id for t in only(coordinator.end_of_data(), do.TriggerCheckpoint)] == [2]


# --- what is kept is bounded --------------------------------------------------------------------------------------


def test_checkpoints_are_deleted_while_sinks_lag_all_the_time() -> None:
    """Invariant 5: the sinks are never idle, and yet only so many checkpoints are kept as are not committed."""
    coordinator = Coordinator(spec(retained=1)).run()
    coordinator.complete(files(0, "f0"))
    deleted: list[int] = []
    for n in range(2, 20):
        coordinator.complete(files(n - 1, f"f{n - 1}"))
        found = coordinator.committed(n - 1)
        assert only(found, do.CommitSinks), "the next one is waiting already"
        deleted += [d.checkpoint_id for d in only(found, do.DiscardCheckpoint)]

    assert list(range(1, 19)) == deleted
    assert [c.checkpoint_id for c in coordinator.state.completed] == [19]


def test_checkpoints_that_are_not_committed_stay() -> None:
    """Invariants 5 and 6: a restored job commits what this one could not."""
    coordinator = Coordinator(spec(retained=1)).run()
    for n in range(3):
        coordinator.complete(files(n, f"f{n}"))

    assert only(coordinator.committed(1), do.DiscardCheckpoint) == [
        do.DiscardCheckpoint(CheckpointId(1), False, (), permit=ANY_PERMIT)
    ]
    assert [c.checkpoint_id for c in coordinator.state.completed] == [2, 3]


# --- savepoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SnapshotKind.TERMINATE, SnapshotKind.SUSPEND])
def test_the_copy_of_a_stop_that_takes_too_long_fails_the_stop(kind: SnapshotKind) -> None:
    """The tasks have ended their data, so it must not go on for ever; the folder is deleted afterwards."""
    coordinator = Coordinator(spec(restart=RestartStrategy.none())).run()
    coordinator.start_savepoint(kind)
    coordinator.acknowledge_all(1)

    found = coordinator.fire("timeout:1", at_ms=10_000)

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.reason, "copied" in (answer.error or "")) == (Reason.EXPIRED, True)
    assert only(found, do.DiscardSavepoint) == [], "somebody writes to it still"
    assert only(found, do.DeployAttempt)
    assert only(coordinator.exported(1), do.DiscardSavepoint) == [
        do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), permit=ANY_PERMIT)
    ]


def test_a_savepoint_that_waits_for_its_turn_too_long_has_expired() -> None:
    """It is complete in time, or fails: only its copy has a limit of its own."""
    coordinator = Coordinator(spec(max_concurrent=2)).run()
    coordinator.collect(coordinator.ask())
    coordinator.start_savepoint()
    assert coordinator.acknowledge_all(2) == []

    found = coordinator.fire("timeout:2", at_ms=10_000)

    assert [a.reason for a in only(found, do.CompleteRequest)] == [Reason.EXPIRED]
    assert list(coordinator.state.pending) == [1]


def test_a_deletion_of_a_savepoint_is_asked_for_again_by_the_next_generation() -> None:
    """A savepoint of a checkpoint that is none must not be found, also if the coordinator dies."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)
    delete = do.DiscardSavepoint(TARGET, SPEC.job_id, CheckpointId(1), permit=ANY_PERMIT)
    assert only(coordinator.voided(1), do.DiscardSavepoint) == [delete]

    assert only(coordinator.start(generation=2), do.DiscardSavepoint) == [delete]
    coordinator.tell(ev.SavepointDiscarded(0, CheckpointId(1)))
    assert only(coordinator.start(generation=3), do.DiscardSavepoint) == []


def test_the_deletion_of_a_savepoint_is_repeated_for_a_bounded_time() -> None:
    """Then it is the user's to delete, and the job ends."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint()
    coordinator.acknowledge_all(1)
    coordinator.written(1)
    coordinator.cancel()
    coordinator.exported(1)
    failed = ev.SavepointDiscardFailed(0, CheckpointId(1), "no answer")
    for number in range(20):
        away = replace(failed, away_ms=SAVEPOINT_OUTAGE_MS - 1)
        assert coordinator.tell(away) == [do.SetTimer("discard-savepoint:1", pause_ms(100, number + 1))]
        assert kinds(coordinator.fire("discard-savepoint:1")) == ["DiscardSavepoint"]

    assert kinds(coordinator.tell(replace(failed, away_ms=SAVEPOINT_OUTAGE_MS))) == ["EndJob"]


def test_deletions_of_checkpoints_that_are_repeated_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than that is left to the sweep, and nothing waits for it."""
    monkeypatch.setattr(checkpoint_cleaner, "DISCARDS_MAX", 2)
    coordinator = Coordinator(spec(retained=1)).run()
    for n in (1, 2, 3, 4):
        coordinator.complete()
        coordinator.committed(n)

    assert coordinator.tell(ev.CheckpointDiscardFailed(0, CheckpointId(3), "no answer")) == []
    again = coordinator.tell(ev.CheckpointDiscardFailed(0, CheckpointId(1), "no answer"))

    assert [timer.timer for timer in only(again, do.SetTimer)] == ["discard:1"]
    assert list(coordinator.state.discards) == [1, 2]


def test_deletions_of_savepoints_that_are_repeated_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more than that is left to the user, and nothing waits for it."""
    monkeypatch.setattr(checkpoint_cleaner, "DISCARDS_MAX", 2)
    coordinator = Coordinator(spec(tolerable_failures=9)).run()
    for n in (1, 2, 3):
        coordinator.start_savepoint(request=f"s{n}")
        coordinator.acknowledge_all(n)
        coordinator.written(n)
        coordinator.not_exported(n, permanent=True)

    assert coordinator.tell(ev.SavepointDiscardFailed(0, CheckpointId(3), "no answer")) == []
    again = coordinator.tell(ev.SavepointDiscardFailed(0, CheckpointId(1), "no answer"))

    assert [timer.timer for timer in only(again, do.SetTimer)] == ["discard-savepoint:1"]
    assert list(coordinator.state.savepoint_discards) == [1, 2]


def test_whoever_asked_is_answered_when_storage_never_says_what_became_of_it() -> None:
    """The job gives up; the copy, of which nobody knows whether it counts, is deleted."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)
    found = coordinator.write_failed(1, away_ms=SPEC.storage_outage_ms)

    assert [(a.request, a.reason) for a in only(found, do.CompleteRequest)] == [("wanted", Reason.METADATA_NOT_WRITTEN)]
    assert only(found, do.DiscardSavepoint)
    assert only(found, do.EndJob)


# --- answers ------------------------------------------------------------------------------------------------------


def test_a_request_is_answered_by_the_generation_that_follows() -> None:
    """A stop whose coordinator dies before the answer has left was no failure, and is not told as one."""
    coordinator = Coordinator().run()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)
    assert answers_of(coordinator.state) == {"wanted": None}
    coordinator.start(generation=2)
    assert answers_of(coordinator.state) == {"wanted": None}, "its fate is asked for"

    coordinator.written(1)

    assert answers_of(coordinator.state) == {"wanted": Answer(CheckpointId(1), None, PATH)}
    assert coordinator.status is JobStatus.SUSPENDED


def test_a_savepoint_that_is_copied_is_known_to_the_generation_that_follows() -> None:
    """Its answer is its path, or why there is none, although its checkpoint is complete."""
    for path, answer in ((PATH, Answer(CheckpointId(1), None, PATH)), (None, None)):
        coordinator = Coordinator().run()
        coordinator.start_savepoint()
        coordinator.acknowledge_all(1)
        coordinator.written(1)
        assert answers_of(coordinator.state) == {"wanted": None}
        coordinator.start(generation=2)
        assert answers_of(coordinator.state) == {"wanted": None}

        if path is not None:
            coordinator.exported(1)
            assert answers_of(coordinator.state) == {"wanted": answer}
        else:
            coordinator.not_exported(1, permanent=True)
            found = answers_of(coordinator.state)["wanted"]
            assert found is not None
            assert (found.checkpoint_id, "disk full" in (found.error or "")) == (None, True)


def test_a_request_that_failed_or_waits_is_known_to_the_generation_that_follows() -> None:
    """Also a request for which no checkpoint was started."""
    coordinator = Coordinator(spec(tolerable_failures=9)).run()
    coordinator.request("declined")
    coordinator.request("waits")
    coordinator.decline(1, "disk full")
    coordinator.request("queued")

    found = answers_of(coordinator.state)

    assert (found["waits"], found["queued"]) == (None, None)
    assert found["declined"] == Answer(None, "a task declined: sink[0]: disk full")
