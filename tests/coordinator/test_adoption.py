"""What a coordinator that takes over does about tasks that run: it asks them, and they go on in their attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SINK, SOURCE, SPEC, TARGET, TASKS, Coordinator, kinds, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation

JOB = replace(SPEC, adoption_timeout_ms=1_000)


def running(**settings: object) -> Coordinator:
    """A job that runs, and whose coordinator may be lost."""
    return Coordinator(replace(spec(**settings), adoption_timeout_ms=1_000)).run()


def answer(
    coordinator: Coordinator, task: TaskId, generation: int = 2, attempt: int = 0, **known: object
) -> list[do.CoordinatorInstruction]:
    """A task says what it is doing."""
    answered = ev.TaskAnswered(coordinator.at_ms, AttemptNumber(attempt), task, Generation(generation))
    return coordinator.tell(replace(answered, **known))


def test_tasks_that_run_are_asked_and_keep_their_attempt() -> None:
    """Nothing is cancelled, nothing is deployed, and the restart strategy is not asked."""
    coordinator = running()
    asked = coordinator.start(generation=2)
    assert kinds(asked) == ["SetTimer", "AskTasks", "SetTimer"]
    assert only(asked, do.AskTasks) == [do.AskTasks(AttemptNumber(0), TASKS, Generation(2))]
    for task in TASKS:
        assert not only(answer(coordinator, task), do.DeployAttempt)
    state = coordinator.state
    assert (coordinator.status, state.attempt, state.adoptions) == (JobStatus.RUNNING, 0, 1)
    assert state.last_failure == "the coordinator was lost; generation 2 has taken over"


def test_checkpoints_go_on_when_the_last_task_has_answered() -> None:
    """Before, the one that is due waits; afterwards the rhythm begins anew."""
    coordinator = running()
    coordinator.start(generation=2)
    assert not only(coordinator.request("mine"), do.TriggerCheckpoint)
    assert not only(answer(coordinator, SOURCE), do.TriggerCheckpoint)
    last = answer(coordinator, SINK)
    assert [trigger.checkpoint_id for trigger in only(last, do.TriggerCheckpoint)] == [1]
    assert [timer.timer for timer in only(last, do.SetTimer)] == ["periodic:0", "timeout:1"]


def test_what_was_pending_is_given_up_and_its_number_is_not_used_again() -> None:
    """The tasks are told, and whoever has asked for it gets the next one."""
    coordinator = running()
    number = coordinator.ask()
    coordinator.ack(number, SOURCE)
    told = coordinator.start(generation=2)
    assert only(told, do.NotifyAborted) == [do.NotifyAborted(AttemptNumber(0), CheckpointId(number), TASKS)]
    assert not only(told, do.CompleteRequest)
    answer(coordinator, SOURCE, snapshotted=CheckpointId(number))
    (trigger,) = only(answer(coordinator, SINK), do.TriggerCheckpoint)
    assert trigger.checkpoint_id == number + 1
    coordinator.collect(number + 1)
    (done,) = only(coordinator.written(number + 1), do.CompleteRequest)
    assert (done.request, done.checkpoint_id) == ("r1", number + 1)


def test_a_checkpoint_that_only_a_task_knows_of_is_aborted_again() -> None:
    """The generation in between was lost before it could tell; what is complete is left alone."""
    coordinator = running()
    completed = coordinator.complete()
    coordinator.ask()
    coordinator.start(generation=2)
    coordinator.start(generation=3)
    (aborted,) = only(answer(coordinator, SOURCE, generation=3, snapshotted=CheckpointId(2)), do.NotifyAborted)
    assert (aborted.checkpoint_id, aborted.tasks) == (2, (SOURCE,))
    assert not only(answer(coordinator, SINK, generation=3, snapshotted=CheckpointId(completed)), do.NotifyAborted)


def test_the_fate_of_a_checkpoint_that_was_being_written_is_asked_for() -> None:
    """It turns out to be complete while tasks are asked: they are told so, and its output is committed."""
    coordinator = running()
    number = coordinator.ask()
    coordinator.collect(number)
    assert only(coordinator.start(generation=2), do.VoidCheckpoint)
    found = coordinator.written(number)
    assert [told.checkpoint_id for told in only(found, do.NotifyCompleted)] == [number]
    assert coordinator.status is JobStatus.RUNNING


def test_a_checkpoint_that_its_successor_has_voided_is_no_failure() -> None:
    """However few may fail: the coordinator was lost, and nothing else. Whoever has asked for it gets the next one."""
    coordinator = running(tolerable_failures=0)
    number = coordinator.ask()
    coordinator.collect(number)
    coordinator.start(generation=2)
    for task in TASKS:
        answer(coordinator, task)
    after = coordinator.voided(number)
    assert (coordinator.status, coordinator.state.attempt) == (JobStatus.RUNNING, 0)
    assert coordinator.state.consecutive_failures == 0
    assert not only(after, do.CompleteRequest)
    assert [trigger.checkpoint_id for trigger in only(after, do.TriggerCheckpoint)] == [number + 1]


def test_a_stop_that_its_successor_has_voided_is_answered_where_the_job_ends() -> None:
    """It was cancelled meanwhile: nobody tries the stop again."""
    coordinator = running()
    number = coordinator.start_savepoint(SnapshotKind.SUSPEND, "stop")
    coordinator.acknowledge_all(number)
    coordinator.exported(number)
    coordinator.start(generation=2)
    coordinator.cancel()
    (answered,) = only(coordinator.voided(number), do.CompleteRequest)
    assert (answered.request, answered.reason) == ("stop", Reason.METADATA_NOT_WRITTEN)


def test_who_does_not_answer_has_failed() -> None:
    """The questions are repeated until then; the region goes back, and the strategy has been asked."""
    coordinator = running()
    (adopt, ask) = only(coordinator.start(generation=2), do.SetTimer)
    assert (adopt.timer, adopt.due_at_ms, ask.timer, ask.due_at_ms) == ("adopt:2", 1_000, "ask:2", 200)
    answer(coordinator, SOURCE)
    (again,) = only(coordinator.fire("ask:2", 200), do.AskTasks)
    assert again.tasks == (SINK,)
    failed = coordinator.fire("adopt:2", 1_000)
    assert only(failed, do.CancelAttempt)
    assert [timer.timer for timer in only(failed, do.SetTimer)] == ["restart:1"]
    assert coordinator.status is JobStatus.RESTARTING
    assert coordinator.state.last_failure is not None
    assert "has not answered within 1000 ms" in coordinator.state.last_failure
    assert coordinator.state.failures.in_a_row == 1


def test_a_strategy_without_restarts_ends_the_job_only_where_a_task_is_lost() -> None:
    """With all tasks there the job goes on however often its coordinator is lost."""
    coordinator = Coordinator(replace(JOB, restart=RestartStrategy.none())).run()
    for generation in range(2, 12):
        coordinator.start(generation)
        for task in TASKS:
            answer(coordinator, task, generation)
    assert (coordinator.status, coordinator.state.attempt, coordinator.state.adoptions) == (JobStatus.RUNNING, 0, 10)
    coordinator.start(generation=12)
    coordinator.fire("adopt:12", 5_000)
    assert coordinator.status is JobStatus.FAILED


def test_what_a_task_had_told_the_one_before_counts() -> None:
    """Nobody knows whether that was written down: the end of its data, and that it is over."""
    coordinator = running(interval_ms=None)
    coordinator.start(generation=2)
    answer(coordinator, SOURCE, ended=True, finished=True)
    assert SOURCE in coordinator.state.finished
    (final,) = only(answer(coordinator, SINK, ended=True), do.TriggerCheckpoint)
    assert final.tasks == (SINK,), "all upstream tasks have finished"


def test_a_task_that_was_not_told_to_start_is_told_so() -> None:
    """The log says that it runs: the instruction was lost with its coordinator."""
    coordinator = running()
    coordinator.start(generation=2)
    assert only(answer(coordinator, SOURCE, started=False), do.StartTasks) == [
        do.StartTasks(AttemptNumber(0), (SOURCE,))
    ]
    assert not only(answer(coordinator, SINK), do.StartTasks)


def test_a_stop_that_tasks_were_told_of_is_tried_again_by_a_new_attempt() -> None:
    """They have ended their data, so nothing is there to go on; the request stays."""
    coordinator = running()
    coordinator.start_savepoint(SnapshotKind.SUSPEND, "stop")
    taken_over = coordinator.start(generation=2)
    assert only(taken_over, do.DeployAttempt)[0].attempt == 1
    assert not only(taken_over, do.CompleteRequest)
    (trigger,) = only(coordinator.all_ready(), do.TriggerCheckpoint)
    assert trigger.options.kind is SnapshotKind.SUSPEND


def test_what_was_being_deployed_is_deployed_anew() -> None:
    """Nobody knows how far it had come. No failure: the strategy is not asked."""
    coordinator = Coordinator(JOB)
    coordinator.submit()
    again = coordinator.start(generation=2)
    assert kinds(again) == ["CancelAttempt", "DeployAttempt", "SetTimer"]
    assert coordinator.state.failures.in_a_row == 0


def test_answers_to_others_change_nothing() -> None:
    """Of another generation, in another attempt, or for the second time."""
    coordinator = running()
    coordinator.start(generation=2)
    coordinator.start(generation=3)
    for late in ({"generation": 2}, {"generation": 3, "attempt": 1}):
        assert coordinator.machine.ignores(
            ev.TaskAnswered(0, AttemptNumber(late.get("attempt", 0)), SOURCE, Generation(late["generation"]))
        )
    answer(coordinator, SOURCE, generation=3)
    assert coordinator.machine.ignores(ev.TaskAnswered(0, AttemptNumber(0), SOURCE, Generation(3)))
    assert SINK in coordinator.state.adopting


def test_a_task_knows_of_no_checkpoint_that_the_log_lacks() -> None:
    """Else it obeys somebody else, and the number would be given away a second time."""
    coordinator = running()
    coordinator.start(generation=2)
    with pytest.raises(InvariantError, match="4: a task has taken part in no checkpoint that the log lacks"):
        answer(coordinator, SOURCE, snapshotted=CheckpointId(1))


def test_a_task_may_fail_while_it_is_asked() -> None:
    """That is a failure like any other, and nobody waits for an answer of those that start anew."""
    coordinator = running()
    coordinator.start(generation=2)
    coordinator.fail()
    assert coordinator.state.adopting == {}
    coordinator.fire("restart:1", 600)
    coordinator.all_ready()
    assert (coordinator.status, coordinator.state.attempt) == (JobStatus.RUNNING, 1)
    assert coordinator.ask() == 1


def test_without_the_setting_everything_starts_anew() -> None:
    """Also requests of checkpoints end."""
    coordinator = Coordinator().run()
    coordinator.request("mine")
    taken_over = coordinator.start(generation=2)
    assert only(taken_over, do.DeployAttempt)
    assert only(taken_over, do.CompleteRequest)[0].reason is Reason.COORDINATOR_LOST


def test_the_savepoint_of_a_stop_that_the_lost_coordinator_was_copying_is_voided() -> None:
    """It may still copy, and nobody hears when that ends. Each generation orders it again until it is done."""
    coordinator = running()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    for generation in (2, 3):
        (order,) = only(coordinator.start(generation=generation), do.DiscardSavepoint)
        assert (order.checkpoint_id, order.target, order.voided) == (1, TARGET, True)
    coordinator.tell(ev.SavepointDiscarded(coordinator.at_ms, CheckpointId(1), exported=True))
    assert (coordinator.state.lost_exports, coordinator.state.savepoint_discards) == ({}, {})
    assert not only(coordinator.start(generation=4), do.DiscardSavepoint)


def test_a_savepoint_whose_copy_had_answered_is_only_deleted() -> None:
    """Nobody writes to its folder any more: it was given up before, or its checkpoint was voided."""
    coordinator = running()
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)
    coordinator.start(generation=2)
    (order,) = only(coordinator.voided(1), do.DiscardSavepoint)
    assert not order.voided
