"""What a coordinator does while its log cannot be written, and when it gives up."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from coordinator_runs import Run, running
from coordinators import SINK, SOURCE, SPEC, part

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator.job_spec import FIRST_PAUSE_MS
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.coordinator_driver import StorageOutages, replay
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import StorageError
from tidegate.storage.ids import AttemptNumber, CheckpointId

LIMIT_MS = 600_000


class Clock:
    """A monotonic clock that the test sets."""

    elapsed_ms = 0

    def monotonic_ms(self) -> int:
        """Returns the time in ms."""
        return self.elapsed_ms


@pytest.mark.parametrize("happens", [True, False])
def test_an_append_without_an_answer_is_repeated(happens: bool) -> None:
    """Whether the entry was written or not, repeating it decides; its instructions are carried out once."""
    run = Run()
    run.port.append_next()
    run.host.handle(ev.JobSubmitted(0, SPEC))

    run.port.append_next(StorageError("no answer"), happens=happens)
    assert run.port.deployed == []
    assert run.port.wait() == FIRST_PAUSE_MS
    run.port.settle()

    assert len(run.port.deployed) == 1
    assert run.events()[:2] == [["CoordinatorStarted"], ["JobSubmitted"]]


def test_a_log_that_cannot_be_written_stops_the_coordinator(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried for as long as an outage may last, with growing pauses; afterwards nothing is done or listened to."""
    run = Run()
    run.submit()
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    pauses = []
    with caplog.at_level(logging.WARNING):
        while not run.port.halted:
            run.port.append_next(StorageError("no answer"), happens=False)
            if run.port.later:
                pauses.append(run.port.wait())

    assert pauses[:7] == [200, 400, 800, 1_600, 3_200, 6_400, 10_000]
    assert max(pauses) == 10_000
    assert sum(pauses) == run.port.elapsed_ms == SPEC.storage_outage_ms
    (reason,) = run.port.halted
    assert reason == "the event log could not be written for 600 s (storage_outage is 600 s): no answer"
    assert len(run.port.deployed) == 1, "what was decided last is not acted on"
    told = [record.getMessage() for record in caplog.records]
    assert told[0].startswith("the event log cannot be reached (no answer); the job goes on without checkpoints")
    assert 5 <= len(told) <= 11, "at once, and then rarely"
    run.host.handle(ev.CancelRequested(0))
    assert run.port.appends == []


def test_an_outage_gives_up_the_checkpoint_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """While the log is away, nothing follows from anything; then the tasks are told of what was given up."""
    run = running()
    run.host.handle(ev.TimerFired(0, "periodic:0"))
    run.port.settle()
    run.host.handle(ev.TaskReachedEndOfData(0, AttemptNumber(0), SOURCE))
    run.port.wait()
    run.port.told.clear()
    run.port.append_next(StorageError("no answer"), happens=False)
    state = run.host.machine.state
    assert (state.failed_checkpoints, dict(state.pending), state.storage_away) == (1, {}, True)

    run.host.handle(ev.CheckpointAcknowledged(0, AttemptNumber(0), SINK, CheckpointId(1), part(1, SINK)))
    run.host.handle(ev.TaskFailed(0, AttemptNumber(0), SINK, "boom"))
    run.host.handle(ev.CheckpointRequested(0, "mine", SnapshotKind.SAVEPOINT, "memory://savepoints"))
    for _ in range(3):
        run.host.handle(ev.CancelRequested(0))
    assert (state.status, run.port.told, run.host.num_waiting) == (JobStatus.RUNNING, [], 3)
    (refused,) = run.port.answers
    assert (refused.request, refused.error) == ("mine", "checkpoint storage does not answer")

    with caplog.at_level(logging.WARNING):
        run.port.wait()
        run.port.append_next()
    assert "the event log can be reached again, after 0.2 s" in caplog.text
    assert run.port.told == []
    run.port.settle()
    assert run.events()[-2:] == [
        ["TaskReachedEndOfData"],
        ["StorageWentAway", "StorageCameBack", "CheckpointAcknowledged", "TaskFailed", "CancelRequested"],
    ]
    machine, _ = replay(run.log)
    assert machine.state == run.host.machine.state


def test_an_outage_that_is_over_begins_the_next_checkpoint() -> None:
    """A job without a failure besides goes on as before, and its attempt too."""
    run = running()
    run.port.told.clear()
    run.host.handle(ev.TimerFired(0, "periodic:0"))
    run.port.append_next(StorageError("No space left on device"), happens=False)
    run.port.wait()
    run.port.settle()

    state = run.host.machine.state
    assert (state.failed_checkpoints, list(state.pending), state.attempt) == (1, [2], 0)
    told = [(type(event).__name__, event.checkpoint_id) for task, event in run.port.told if task == SOURCE]
    assert told == [("CheckpointTriggered", 1), ("CheckpointAborted", 1), ("CheckpointTriggered", 2)]


def test_what_fails_for_want_of_storage_carries_for_how_long() -> None:
    """The machine has no clock: it is told, by one that nobody sets, and a success ends the count."""
    clock = Clock()
    outages = StorageOutages(clock.monotonic_ms)
    one, attempt = CheckpointId(1), AttemptNumber(0)
    pairs: tuple[tuple[ev.CoordinatorEvent, ev.CoordinatorEvent], ...] = (
        (ev.MetadataWriteFailed(0, one, "no answer"), ev.MetadataWritten(0, one)),
        (ev.SinkCommitFailed(0, one, "no answer"), ev.SinksCommitted(0, one)),
        (ev.SavepointWriteFailed(0, one, "no answer"), ev.SavepointWritten(0, one, "path")),
        (ev.SavepointDiscardFailed(0, one, "no answer"), ev.SavepointDiscarded(0, one)),
        (ev.CheckpointDiscardFailed(0, one, "no answer"), ev.CheckpointDiscarded(0, one)),
        (ev.HookRestoreFailed(0, attempt, "no answer", 0), ev.HooksRestored(0, attempt)),
    )
    for failed, worked in pairs:
        for wait_ms, expected_ms in ((0, 0), (5_000, 5_000), (7_000, 12_000)):
            clock.elapsed_ms += wait_ms
            timed = outages.timed(failed, LIMIT_MS)
            assert timed == replace(failed, away_ms=expected_ms)  # type: ignore[arg-type]
        outages.timed(worked, LIMIT_MS)
        assert outages.timed(failed, LIMIT_MS) == replace(failed, away_ms=0)  # type: ignore[arg-type]
    raised = ev.HookRestoreFailed(0, attempt, "a hook raised")
    assert outages.timed(raised, LIMIT_MS) == raised


@pytest.mark.parametrize("voided", [False, True])
def test_the_fate_of_a_checkpoint_is_asked_for_as_long_as_an_outage_may_last(voided: bool) -> None:
    """Its own time counts: a task that could not write an hour ago, or the checkpoint before, must not end the job."""
    clock = Clock()
    outages = StorageOutages(clock.monotonic_ms)
    declined = ev.CheckpointDeclined(
        0, AttemptNumber(0), SOURCE, CheckpointId(1), CheckpointFailureReason.STORAGE_AWAY, "no answer"
    )
    outages.timed(declined, LIMIT_MS)
    if voided:
        outages.timed(ev.MetadataWriteFailed(0, CheckpointId(1), "no answer"), LIMIT_MS)
        outages.timed(ev.CheckpointVoided(0, CheckpointId(1)), LIMIT_MS)
    clock.elapsed_ms += 3_600_000
    timed = outages.timed(ev.MetadataWriteFailed(0, CheckpointId(2), "no answer"), LIMIT_MS)
    assert isinstance(timed, ev.MetadataWriteFailed)
    assert timed.away_ms == 0
