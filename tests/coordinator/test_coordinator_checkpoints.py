"""The coordinator's rules for checkpoints: trigger, collect, complete, commit, subsume."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT
from coordinators import SINK, SOURCE, SPEC, TASKS, Coordinator, discarding, files, handle, kinds, only, spec
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import REQUESTS_MAX
from tidegate.actors.coordinator.job_spec import pause_ms
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.storage.ids import CheckpointId, SubtaskIndex, VertexId

TOLERANT = spec(tolerable_failures=5)


def timer(instructions: list[do.CoordinatorInstruction], name: str) -> int:
    """When the one timer whose name starts so is due."""
    (found,) = [i.due_at_ms for i in only(instructions, do.SetTimer) if i.timer.startswith(name)]
    return found


# --- trigger ------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32), min_pause_ms=st.integers(0, 3_000), interval_ms=st.integers(1, 2_000))
@settings(max_examples=100)
def test_the_first_periodic_checkpoint_comes_after_a_random_delay(
    seed: int, min_pause_ms: int, interval_ms: int
) -> None:
    """Between the minimum pause and the interval, so that jobs that start together do not checkpoint together."""
    job = replace(spec(interval_ms=interval_ms, min_pause_ms=min_pause_ms), seed=seed)
    coordinator = Coordinator(job)
    coordinator.submit()
    coordinator.at_ms = 5_000

    delay_ms = timer(coordinator.all_ready(), "periodic:") - 5_000

    assert min(min_pause_ms, interval_ms) <= delay_ms <= interval_ms


def test_seeds_spread_the_first_checkpoint() -> None:
    """The delay depends on the seed."""
    delays = set()
    for seed in range(20):
        coordinator = Coordinator(replace(SPEC, seed=seed))
        coordinator.submit()
        delays.add(timer(coordinator.all_ready(), "periodic:"))

    assert len(delays) > 10


def test_no_checkpoint_before_every_task_runs() -> None:
    """The plan needs all tasks; a request comes too early, and a periodic timer is not even set."""
    coordinator = Coordinator()
    coordinator.submit()

    refused = coordinator.request()

    assert [i.error for i in only(refused, do.CompleteRequest)] == [
        "not all required tasks are running: the job is deploying"
    ]
    assert "SetTimer" in kinds(coordinator.all_ready())


def test_a_trigger_goes_to_the_sources_and_periodic_ones_follow() -> None:
    """Only sources are told; the next periodic trigger is one interval later, and an expiry is set."""
    coordinator = Coordinator().run()

    found = coordinator.fire("periodic:0", at_ms=700)

    assert only(found, do.TriggerCheckpoint) == [
        do.TriggerCheckpoint(coordinator.state.attempt, CheckpointId(1), 700, (SOURCE,))
    ]
    assert (timer(found, "periodic:"), timer(found, "timeout:1")) == (1_700, 10_700)


def test_one_checkpoint_at_a_time() -> None:
    """A periodic trigger that comes while one is pending is made up for when that is over."""
    coordinator = Coordinator().run()
    coordinator.fire("periodic:0", at_ms=1_000)
    assert only(coordinator.fire("periodic:0", at_ms=2_000), do.TriggerCheckpoint) == []

    coordinator.collect(1)

    assert [t.checkpoint_id for t in only(coordinator.written(1), do.TriggerCheckpoint)] == [2]


def test_a_pause_separates_checkpoints() -> None:
    """`min_pause_ms` counts from the end of the last one; requests of users do not wait for it."""
    coordinator = Coordinator(spec(min_pause_ms=700)).run()
    coordinator.fire("periodic:0", at_ms=1_000)
    coordinator.at_ms = 1_900
    coordinator.collect(1)
    coordinator.written(1)

    found = coordinator.fire("periodic:0", at_ms=2_000)
    assert only(found, do.TriggerCheckpoint) == []
    assert only(found, do.SetTimer)[-1] == do.SetTimer("periodic:0", 2_600)
    assert len(only(coordinator.fire("periodic:0", at_ms=2_600), do.TriggerCheckpoint)) == 1

    coordinator.collect(2)
    coordinator.written(2)
    assert len(only(coordinator.request(), do.TriggerCheckpoint)) == 1


def test_without_an_interval_only_requests_trigger() -> None:
    """`interval_ms=None` sets no periodic timer."""
    coordinator = Coordinator(spec(interval_ms=None))
    coordinator.submit()

    assert [i.timer for i in only(coordinator.all_ready(), do.SetTimer)] == []
    assert coordinator.ask() == 1


def test_requests_are_answered_with_the_checkpoint_that_was_triggered_for_them() -> None:
    """Those that come while one is pending wait for the next, together; each is answered once."""
    coordinator = Coordinator().run()
    coordinator.request("first")
    coordinator.request("second")
    coordinator.request("third")
    coordinator.collect(1)

    found = coordinator.written(1)
    assert only(found, do.CompleteRequest) == [do.CompleteRequest("first", CheckpointId(1), None)]
    coordinator.collect(2)

    answers = only(coordinator.written(2), do.CompleteRequest)
    assert [(a.request, a.checkpoint_id) for a in answers] == [("second", 2), ("third", 2)]


@pytest.mark.slow
def test_waiting_requests_are_bounded() -> None:
    """Beyond the limit a request is refused at once."""
    coordinator = Coordinator().run()
    coordinator.ask()
    for n in range(REQUESTS_MAX):
        assert coordinator.request(str(n)) == []

    (refused,) = only(coordinator.request("one more"), do.CompleteRequest)

    assert CheckpointFailureReason.TOO_MANY_REQUESTS is refused.reason


# --- acknowledgements ---------------------------------------------------------------------------------------------


def test_metadata_is_written_once_when_all_tasks_have_acknowledged() -> None:
    """Invariant 4: the last acknowledgement writes, with every task's part; a duplicate changes nothing."""
    coordinator = Coordinator().run()
    coordinator.ask()
    assert coordinator.ack(1, SOURCE) == []
    assert coordinator.ack(1, SOURCE) == []

    (write,) = only(coordinator.ack(1, SINK), do.WriteMetadata)

    metadata = write.metadata
    assert [(s.vertex, s.handle) for s in metadata.subtasks] == [(t.vertex, handle(1, t)) for t in TASKS]
    assert (metadata.checkpoint_id, metadata.void, metadata.final) == (1, False, False)
    assert (metadata.job_name, metadata.operators) == (SPEC.job_name, SPEC.operators)
    assert coordinator.ack(1, SINK) == []


@pytest.mark.parametrize("when", ["collecting", "writing", "completed"])
def test_a_duplicate_never_deletes_state_that_counts(when: str) -> None:
    """The state of an acknowledgement that comes twice is the state that is already part of the checkpoint."""
    coordinator = Coordinator().run()
    coordinator.ask()
    coordinator.ack(1, SOURCE)
    if when != "collecting":
        coordinator.ack(1, SINK)
    if when == "completed":
        coordinator.written(1)

    assert only(coordinator.ack(1, SOURCE), do.DiscardFiles) == []


@pytest.mark.parametrize("loss", ["coordinator", "task"])
def test_a_duplicate_that_outlives_its_attempt_deletes_nothing(loss: str) -> None:
    """Storage may have completed the checkpoint already; the answer is on its way, or lost with a coordinator."""
    coordinator = Coordinator().run()
    coordinator.ask()
    coordinator.ack(1, SOURCE)
    coordinator.ack(1, SINK)
    if loss == "coordinator":
        coordinator.start(2)
    else:
        coordinator.fail()
    assert coordinator.state.pending[CheckpointId(1)].phase.being_written

    assert only(coordinator.ack(1, SOURCE), do.DiscardFiles) == []


def test_refused_state_is_discarded() -> None:
    """Of an unknown task, of a checkpoint that was given up, of another attempt, of one never triggered."""
    coordinator = Coordinator(TOLERANT).run()
    coordinator.ask()
    stranger = TaskId(VertexId("stranger"), SubtaskIndex(0))
    assert only(coordinator.ack(1, stranger), do.DiscardFiles) == [discarding(1, stranger)]

    coordinator.decline(1)
    assert only(coordinator.ack(1, SOURCE), do.DiscardFiles) == [discarding(1, SOURCE)]
    coordinator.ask()
    assert only(coordinator.ack(2, SINK, attempt=7), do.DiscardFiles) == [discarding(2, SINK)]
    assert only(coordinator.ack(9, SINK), do.DiscardFiles) == [discarding(9, SINK)]
    assert coordinator.state.pending[CheckpointId(2)].acknowledged == {}


# --- giving up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["timeout", "decline"])
def test_a_checkpoint_that_is_given_up_is_aborted_and_deleted(how: str) -> None:
    """Tasks are told, its folder is deleted, its request is answered; a tolerated failure fails nothing."""
    coordinator = Coordinator(TOLERANT).run()
    coordinator.request("wanted")
    coordinator.ack(1, SOURCE)

    found = coordinator.fire("timeout:1", at_ms=10_000) if how == "timeout" else coordinator.decline(1)

    assert kinds(found) == ["DiscardCheckpoint", "NotifyAborted", "CompleteRequest"]
    (aborted,) = only(found, do.NotifyAborted)
    assert (aborted.checkpoint_id, aborted.tasks) == (1, TASKS)
    reason = only(found, do.CompleteRequest)[0].error or ""
    assert (
        "expired before it was complete: 1 tasks missing, sink[0] among them"
        if how == "timeout"
        else "declined: sink[0]"
    ) in reason
    assert coordinator.status is JobStatus.RUNNING
    assert coordinator.ask() == 2, "ids are never used twice"


def test_a_timeout_after_the_last_acknowledgement_is_nothing() -> None:
    """What is being written can no longer expire, and nor can what is over."""
    coordinator = Coordinator(spec(tolerable_failures=0)).run()
    coordinator.ask()
    coordinator.collect(1)

    assert coordinator.fire("timeout:1", at_ms=20_000) == []
    assert coordinator.decline(1) == []
    coordinator.written(1)
    assert coordinator.fire("timeout:1", at_ms=20_000) == []


def test_failures_in_a_row_fail_the_attempt_and_a_success_forgives() -> None:
    """`tolerable_failures` counts checkpoints that failed since the last one that completed."""
    coordinator = Coordinator(spec(tolerable_failures=1)).run()
    coordinator.decline(coordinator.ask())
    coordinator.complete()
    coordinator.decline(coordinator.ask())
    assert coordinator.status is JobStatus.RUNNING

    coordinator.decline(coordinator.ask(), "disk full")

    assert coordinator.status is JobStatus.RESTARTING
    assert coordinator.state.last_failure == (
        "checkpoint 4 failed (a task declined: sink[0]: disk full); 2 in a row, 1 tolerated"
    )


# --- completing ---------------------------------------------------------------------------------------------------


def test_completion_is_told_after_the_metadata_is_there() -> None:
    """No task hears of a completed checkpoint before its metadata is written."""
    coordinator = Coordinator().run()
    checkpoint_id = coordinator.ask()
    coordinator.ack(1, SOURCE)
    assert kinds(coordinator.ack(1, SINK)) == ["WriteMetadata"]

    found = coordinator.written(checkpoint_id)

    assert only(found, do.NotifyCompleted) == [do.NotifyCompleted(coordinator.state.attempt, CheckpointId(1), TASKS)]
    assert coordinator.written(checkpoint_id) == [], "told twice is told once"


def test_retained_checkpoints_are_the_newest_and_older_ones_go_after_the_commit() -> None:
    """Invariant 5: a checkpoint is deleted only when newer ones are complete and its files are visible."""
    coordinator = Coordinator(spec(retained=2)).run()
    for n in (1, 2, 3):
        coordinator.complete(files(0, *(f"f{i}" for i in range(n))))
    assert [c.checkpoint_id for c in coordinator.state.completed] == [1, 2, 3]

    found = coordinator.committed(1)

    assert only(found, do.DiscardCheckpoint) == [
        do.DiscardCheckpoint(CheckpointId(1), voided=False, shared=(), permit=ANY_PERMIT)
    ]
    assert only(coordinator.committed(2) + coordinator.committed(3), do.DiscardCheckpoint) == []
    assert [c.checkpoint_id for c in coordinator.state.completed] == [2, 3]


def test_without_sink_files_a_checkpoint_subsumes_at_once() -> None:
    """Nothing to commit is committed."""
    coordinator = Coordinator().run()
    coordinator.complete()
    checkpoint_id = coordinator.ask()
    coordinator.collect(checkpoint_id)

    assert only(coordinator.written(checkpoint_id), do.DiscardCheckpoint) == [
        do.DiscardCheckpoint(CheckpointId(1), voided=False, shared=(), permit=ANY_PERMIT)
    ]


def test_a_deletion_that_fails_is_tried_again_as_long_as_an_outage_may_last() -> None:
    """What storage keeps refusing to delete is left to the sweep at the end, and forgotten."""
    coordinator = Coordinator().run()
    coordinator.complete()
    coordinator.complete()
    failed = do.DiscardCheckpoint(CheckpointId(1), voided=False, shared=(), permit=ANY_PERMIT)
    outage_ms = SPEC.storage_outage_ms
    for number in range(20):
        found = coordinator.tell(ev.CheckpointDiscardFailed(0, CheckpointId(1), "busy", outage_ms - 1))
        assert found == [do.SetTimer("discard:1", pause_ms(100, number + 1))]
        assert coordinator.fire("discard:1") == [failed]
    assert coordinator.tell(ev.CheckpointDiscardFailed(0, CheckpointId(1), "busy", outage_ms)) == []
    assert coordinator.state.discards == {}
