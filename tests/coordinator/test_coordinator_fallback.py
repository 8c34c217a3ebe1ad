"""A damaged checkpoint is passed over for the one before it, down to the oldest; tables, files and restarts follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SPEC, Coordinator, files, kinds, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job_spec import RestorePoint, Retention
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.codec import decode, encode
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId

ELSEWHERE = RestorePoint("memory://old", JobId("job-00000000"), CheckpointId(7), final=False)


def running(checkpoints: int, retained: int = 3, **settings: object) -> Coordinator:
    """A job with some completed checkpoints, all of them committed."""
    coordinator = Coordinator(spec(RestartStrategy.fixed_delay(1, 500), retained=retained, **settings)).run()  # type: ignore[arg-type]
    for number in range(1, checkpoints + 1):
        coordinator.complete(files(number - 1, f"f{number}"))
        coordinator.committed(number)
    return coordinator


def restarted(coordinator: Coordinator) -> Coordinator:
    """Its attempt has failed, and the next one is being deployed."""
    coordinator.fail()
    coordinator.fire(f"restart:{coordinator.state.attempt + 1}")
    assert coordinator.status is JobStatus.DEPLOYING
    return coordinator


def damaged(coordinator: Coordinator, checkpoint_id: int, reason: str = "cut") -> list[do.CoordinatorInstruction]:
    """A task finds the checkpoint of its attempt damaged."""
    attempt = coordinator.state.attempt
    return coordinator.tell(ev.CheckpointDamaged(coordinator.at_ms, attempt, CheckpointId(checkpoint_id), reason))


def taken_back(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """The tables have followed."""
    return coordinator.tell(ev.TablesTakenBack(coordinator.at_ms, coordinator.state.attempt))


def not_taken_back(coordinator: Coordinator, fenced: bool = False) -> list[do.CoordinatorInstruction]:
    """They have not."""
    attempt = coordinator.state.attempt
    return coordinator.tell(ev.TablesNotTakenBack(coordinator.at_ms, attempt, "no answer", fenced))


def restored(told: list[do.CoordinatorInstruction]) -> list[int | None]:
    """Checkpoints from which attempts are deployed."""
    return [None if d.restore is None else d.restore.checkpoint_id for d in only(told, do.DeployAttempt)]


def test_the_one_before_is_restored_and_the_tables_are_taken_back_first() -> None:
    """At once, and no restart strategy is asked; what other tasks find out about the same one changes nothing."""
    coordinator = restarted(running(3))
    assert coordinator.state.attempt == 1

    told = damaged(coordinator, 3)
    assert only(told, do.TakeTablesBack) == [
        do.TakeTablesBack(AttemptNumber(2), CheckpointId(2), "checkpoint 3 is damaged (cut)")
    ]
    assert restored(told) == []
    stale = ev.CheckpointDamaged(coordinator.at_ms, AttemptNumber(1), CheckpointId(3), "cut")
    assert coordinator.tell(stale) == []

    assert restored(taken_back(coordinator)) == [2]
    assert coordinator.state.failures.in_a_row == 1
    assert [c.checkpoint_id for c in coordinator.state.completed] == [1, 2]
    assert coordinator.state.kept == (1, 2, 3)
    statistics = coordinator.state.statistics
    assert (statistics.passed_over, statistics.latest_passed_over and statistics.latest_passed_over.reason) == (
        1,
        "cut",
    )
    coordinator.all_ready()
    assert coordinator.status is JobStatus.RUNNING


def test_down_to_the_oldest_and_then_the_job_fails_with_all_reasons() -> None:
    """Not afresh, not again from one that is known to be damaged, and all of them stay for whoever can mend them."""
    coordinator = restarted(running(2))

    damaged(coordinator, 2, "cut")
    taken_back(coordinator)
    told = damaged(coordinator, 1, "gone")

    (end,) = only(told, do.EndJob)
    assert (end.status, restored(told), only(told, do.TakeTablesBack)) == ("failed", [], [])
    for part in ("no checkpoint is left", "checkpoint 2 is damaged (cut)", "checkpoint 1 is damaged (gone)"):
        assert part in (end.reason or "")
    assert coordinator.state.kept == (2, 1)


def test_what_the_user_has_named_is_not_replaced_by_a_fresh_start() -> None:
    """Nor tried again."""
    coordinator = Coordinator(spec(restore=ELSEWHERE))
    coordinator.submit()

    (end,) = only(damaged(coordinator, 7), do.EndJob)
    assert end.status == "failed"
    assert f"{ELSEWHERE.pointer}, from which the job starts, cannot be restored: cut" in (end.reason or "")


def test_what_the_user_has_named_is_not_gone_back_to() -> None:
    """When all of the job's own are damaged: its own rows would come twice."""
    coordinator = Coordinator(spec(restore=ELSEWHERE)).run()
    coordinator.complete()
    restarted(coordinator)

    (end,) = only(damaged(coordinator, 1), do.EndJob)
    assert end.status == "failed"


@pytest.mark.parametrize("checkpoint_id", [1, 2, 4])
def test_only_what_the_attempt_starts_from_is_passed_over(checkpoint_id: int) -> None:
    """A report about another one, or after the start, is none."""
    coordinator = restarted(running(3))
    assert damaged(coordinator, checkpoint_id) == []
    coordinator.all_ready()
    assert damaged(coordinator, 3) == []
    assert [c.checkpoint_id for c in coordinator.state.completed] == [1, 2, 3]


def test_tables_are_taken_back_after_everything_is_committed() -> None:
    """A commit that came after that would show rows that are processed again."""
    coordinator = running(2)
    coordinator.complete(files(2, "late"))
    restarted(coordinator)

    told = damaged(coordinator, 3)
    assert only(told, do.TakeTablesBack) == []
    coordinator.commit_failed(3)
    assert only(coordinator.fire("commit:3"), do.CommitSinks)
    told = coordinator.committed(3)
    assert [t.checkpoint_id for t in only(told, do.TakeTablesBack)] == [2]
    assert restored(taken_back(coordinator)) == [2]


def test_what_is_committed_when_no_checkpoint_is_left() -> None:
    """The job fails with the reason, after the commits that were under way; the damaged ones stay."""
    coordinator = running(0, retained=1)
    coordinator.complete(files(0, "late"))
    restarted(coordinator)

    assert only(damaged(coordinator, 1), do.EndJob) == []
    told = coordinator.committed(1)
    (end,) = only(told, do.EndJob)
    assert (end.status, coordinator.state.kept, only(told, do.DiscardCheckpoint)) == ("failed", (1,), [])
    assert "no checkpoint is left to restart from: checkpoint 1 is damaged (cut)" in (end.reason or "")


def test_taking_tables_back_is_tried_again_and_given_up_as_an_attempt() -> None:
    """Nothing is deployed before it has happened, also not by the next attempt or the next coordinator."""
    coordinator = restarted(running(2))
    damaged(coordinator, 2)

    for _ in range(SPEC.storage_attempts_max - 1):
        (timer,) = only(not_taken_back(coordinator), do.SetTimer)
        assert only(coordinator.fire(timer.timer), do.TakeTablesBack)
    (end,) = only(not_taken_back(coordinator), do.EndJob)
    assert "the tables could not be taken back to checkpoint 1 in 3 attempts: no answer" in (end.reason or "")

    coordinator = restarted(running(2))
    damaged(coordinator, 2)
    again = Coordinator(machine=CoordinatorMachine(decode(encode(coordinator.state))))
    told = again.start(2)
    assert ([t.checkpoint_id for t in only(told, do.TakeTablesBack)], restored(told)) == ([1], [])
    assert restored(taken_back(again)) == [1]


def test_tables_are_taken_back_through_an_outage() -> None:
    """As long as one may last; the limit of the deployment begins anew meanwhile."""
    coordinator = restarted(running(2))
    damaged(coordinator, 2)
    attempt = coordinator.state.attempt
    failed = ev.TablesNotTakenBack(0, attempt, "no answer", away_ms=SPEC.storage_outage_ms - 1)

    for _ in range(20):
        assert [t.timer for t in only(coordinator.tell(failed), do.SetTimer)] == [
            f"deploy:{attempt}",
            f"tables:{attempt}",
        ]
        assert only(coordinator.fire(f"tables:{attempt}"), do.TakeTablesBack)
    assert restored(taken_back(coordinator)) == [1]


def test_a_limit_holds_for_tables_too() -> None:
    """An attempt that waits for them for too long has failed."""
    coordinator = restarted(running(2))
    damaged(coordinator, 2)
    coordinator.fire(f"deploy:{coordinator.state.attempt}")
    text = "the tables were not taken back within 600000 ms (jobmanager.deploy-timeout)"
    assert coordinator.state.last_failure == text


def test_a_table_of_another_job_ends_it() -> None:
    """A newer job is in charge: to go on would be to write beside it."""
    coordinator = restarted(running(2))
    damaged(coordinator, 2)

    (end,) = only(not_taken_back(coordinator, fenced=True), do.EndJob)
    assert (end.status, coordinator.state.superseded) == ("failed", True)


@pytest.mark.parametrize("retention", list(Retention))
def test_what_a_newer_job_may_have_gone_on_from_stays(retention: Retention) -> None:
    """Whatever is retained of a job that fails: the newer one has no checkpoint of its own at first."""
    coordinator = restarted(running(2, retention=retention))
    damaged(coordinator, 2)

    (end,) = only(not_taken_back(coordinator, fenced=True), do.EndJob)
    assert "a newer job is in charge" in (end.reason or "")
    assert coordinator.state.kept == (1, 2)


def test_a_damaged_checkpoint_goes_when_a_newer_one_is_there() -> None:
    """And not before, not even when a pending checkpoint ends; then it is one of those that are not retained."""
    coordinator = restarted(running(3, retained=2, tolerable_failures=1))
    damaged(coordinator, 3)
    taken_back(coordinator)
    coordinator.all_ready()
    assert coordinator.state.kept == (2, 3)

    failed = coordinator.ask()
    assert 3 not in [d.checkpoint_id for d in only(coordinator.decline(failed), do.DiscardCheckpoint)]
    newer = coordinator.ask()
    coordinator.collect(newer, files(0, "again"))
    coordinator.written(newer)
    told = coordinator.committed(newer)

    assert [d.checkpoint_id for d in only(told, do.DiscardCheckpoint)] == [3]
    assert coordinator.state.kept == (2, newer)


def test_hooks_follow_the_tables() -> None:
    """They are given what they had kept with the checkpoint that is restored."""
    job = Coordinator(spec(retained=2))
    job.spec = replace(job.spec, hooks=("hook",))
    job.submit()
    job.all_ready()
    for number in (1, 2):
        job.request(f"r{number}")
        job.tell(ev.HooksTriggered(0, CheckpointId(number), (("hook", b"kept"),)))
        job.collect(number)
        job.written(number)
    job.fail()
    assert kinds(job.fire("restart:1"))[0] == "RestoreHooks"

    told = damaged(job, 2)
    assert "RestoreHooks" not in kinds(told)
    (hooks,) = only(taken_back(job), do.RestoreHooks)
    assert hooks.restore.checkpoint_id == 1
    assert restored(job.tell(ev.HooksRestored(0, job.state.attempt))) == [1]


def test_restarts_are_counted_from_the_newest_checkpoint() -> None:
    """A job that gets on may fail as often as it likes; one that does not get on may not."""
    coordinator = Coordinator(spec(RestartStrategy.fixed_delay(1, 500))).run()
    for number in range(1, 5):
        restarted(coordinator).all_ready()
        coordinator.complete()
        coordinator.committed(number)
    assert coordinator.state.attempt == 4

    restarted(coordinator).all_ready()
    (end,) = only(coordinator.fail(), do.EndJob)
    assert end.status == "failed"
