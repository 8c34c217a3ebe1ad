"""A stop with savepoint that meets a failure: the next attempt carries it out, or it is refused for certain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinators import PATH, SOURCE, Coordinator, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import RETRIES_MAX
from tidegate.actors.coordinator.coordinator_state import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import AttemptNumber


def in_the_next_attempt(coordinator: Coordinator, kind: SnapshotKind) -> None:
    """The stop is the first thing there, and it succeeds; whoever asked hears of that alone."""
    (trigger,) = only(coordinator.all_ready(), do.TriggerCheckpoint)
    assert trigger.options.kind is kind
    number = trigger.checkpoint_id
    coordinator.acknowledge_all(number, finished=kind is SnapshotKind.TERMINATE)
    coordinator.exported(number)
    assert only(coordinator.written(number), do.CompleteRequest) == [do.CompleteRequest("wanted", number, None, PATH)]


def meets_a_task_that_leaves(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """What is asked for again, at once, in the next attempt."""
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    return coordinator.tell(ev.TaskFinished(0, AttemptNumber(0), SOURCE))


def fails_while_collecting(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """A task dies between the trigger and the last acknowledgement."""
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.ack(1, SOURCE)
    return coordinator.fail()


def fails_while_copying(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """A task dies while the savepoint is being copied."""
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    return coordinator.fail() + coordinator.not_exported(1)


def fails_and_is_voided(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """A task dies while it is not known whether the savepoint is complete, and then it is not."""
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    coordinator.acknowledge_all(1)
    coordinator.exported(1)
    coordinator.write_failed(1)
    coordinator.fail()
    coordinator.fire("void:1")
    return coordinator.voided(1)


def is_asked_for_late(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """A user asks while the job restarts."""
    coordinator.fail()
    return coordinator.request("wanted", SnapshotKind.SUSPEND)


def loses_its_coordinator(coordinator: Coordinator) -> list[do.CoordinatorInstruction]:
    """Its successor takes over."""
    coordinator.start_savepoint(SnapshotKind.SUSPEND)
    return coordinator.start(2)


INTERRUPTIONS = (
    meets_a_task_that_leaves,
    fails_while_collecting,
    fails_while_copying,
    fails_and_is_voided,
    is_asked_for_late,
    loses_its_coordinator,
)


@pytest.mark.parametrize("interrupt", INTERRUPTIONS)
def test_a_stop_outlives_its_attempt(interrupt: Callable[[Coordinator], list[do.CoordinatorInstruction]]) -> None:
    """Nobody is told that it failed: the next attempt carries it out."""
    coordinator = Coordinator().run()

    found = interrupt(coordinator)

    assert only(found, do.CompleteRequest) == []
    coordinator.fire("restart:1")
    in_the_next_attempt(coordinator, SnapshotKind.SUSPEND)
    ends = coordinator.all_finished()
    for number in list(coordinator.state.savepoint_discards):
        ends += coordinator.tell(ev.SavepointDiscarded(0, number))
    assert only(ends, do.EndJob) == [do.EndJob("suspended", None)]


@pytest.mark.parametrize("kind", [SnapshotKind.SUSPEND, SnapshotKind.TERMINATE])
def test_a_stop_waits_for_a_job_that_is_deployed(kind: SnapshotKind) -> None:
    """Whoever stops a job just after having started it need not look when it runs."""
    coordinator = Coordinator()
    coordinator.submit()

    assert only(coordinator.request("wanted", kind), do.CompleteRequest) == []

    in_the_next_attempt(coordinator, kind)


def test_a_job_that_is_to_be_stopped_takes_no_other_request() -> None:
    """Neither before the next attempt, nor in place of the stop that waits."""
    coordinator = Coordinator().run()
    fails_while_collecting(coordinator)

    refused = {
        kind: only(coordinator.request("late", kind), do.CompleteRequest)[0].reason
        for kind in (SnapshotKind.CHECKPOINT, SnapshotKind.SUSPEND)
    }

    assert refused == {
        SnapshotKind.CHECKPOINT: Reason.NOT_ALL_REQUIRED_TASKS_RUNNING,
        SnapshotKind.SUSPEND: Reason.SCHEDULER_SHUTDOWN,
    }
    coordinator.fire("restart:1")
    in_the_next_attempt(coordinator, SnapshotKind.SUSPEND)


@pytest.mark.parametrize("interrupt", INTERRUPTIONS)
@pytest.mark.parametrize("ends", ["no restart", "cancelled"])
def test_a_stop_that_waits_is_refused_when_the_job_ends(
    interrupt: Callable[[Coordinator], list[do.CoordinatorInstruction]], ends: str
) -> None:
    """Then it is certain, and said once; nobody waits for ever."""
    coordinator = Coordinator().run()
    interrupt(coordinator)
    coordinator.fire("restart:1")

    found = coordinator.cancel() if ends == "cancelled" else []
    for _ in range(3 if ends == "no restart" else 0):  # one more than the job restarts
        found += coordinator.fail("boom")
        coordinator.fire(f"restart:{coordinator.state.attempt + 1}")

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.request, answer.reason) == ("wanted", Reason.JOB_ENDING)
    assert coordinator.state.requests == ()


def test_a_stop_that_makes_every_attempt_fail_is_refused_in_the_end() -> None:
    """A drain runs code that nothing else runs: a job that would go on without it is not restarted for ever."""
    coordinator = Coordinator(spec(restart=RestartStrategy.fixed_delay(1_000, 500))).run()
    coordinator.request("wanted", SnapshotKind.TERMINATE)

    for attempt in range(RETRIES_MAX):
        assert only(coordinator.fail("it never finishes"), do.CompleteRequest) == []
        coordinator.fire(f"restart:{attempt + 1}")
        coordinator.all_ready()
    (answer,) = only(coordinator.fail("it never finishes"), do.CompleteRequest)

    assert (answer.reason, "it never finishes" in (answer.error or "")) == (Reason.JOB_FAILOVER, True)
    assert coordinator.status is JobStatus.RESTARTING
