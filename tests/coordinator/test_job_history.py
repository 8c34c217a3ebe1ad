"""The recent past of a job, as a coordinator keeps it for pages: bounded, and the same for one that takes over."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from coordinators import SINK, SOURCE, SPEC, Coordinator, part, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import job_history as limits
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.job_history import DecisionLog, EndedCheckpoint, JobHistory
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.ids import CheckpointId


class Written(Coordinator):
    """Makes a coordinator with a `JobHistory`, and the events that it has handled."""

    def __init__(self, job: JobSpec = SPEC) -> None:
        super().__init__(job)
        self.job_history = JobHistory(self.state)
        self.decision_log = DecisionLog(self.state)
        self.told: list[ev.CoordinatorEvent] = []

    def tell(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        follows = super().tell(event)
        lines = self.decision_log.lines_about(event, follows, self.state)
        self.job_history.add(event, follows, lines, self.state)
        self.told.append(event)
        return follows

    def take(self, tasks: Sequence[object] = (SOURCE, SINK)) -> int:
        """Take a checkpoint; returns its number."""
        number = CheckpointId(self.state.next_checkpoint_id)
        self.request(f"r{number}")
        for task in (SOURCE, SINK):
            if task in tasks:
                metrics = SnapshotMetrics(start_delay_ms=number, sync_ms=3)
                state = part(number, task)
                self.tell(ev.CheckpointAcknowledged(self.at_ms, self.state.attempt, task, number, state, metrics))
        if len(tasks) == 2:
            self.tell(ev.MetadataWritten(self.at_ms, number))
        return number

    def breaks(self, reason: str = "ValueError: odd") -> None:
        """The sink fails, and the job is deployed anew."""
        self.tell(ev.TaskFailed(self.at_ms, self.state.attempt, SINK, reason))


def restarting(attempts: int = 1_000) -> JobSpec:
    """A job without periodic checkpoints that is restarted often."""
    return spec(RestartStrategy.fixed_delay(attempts, 500), interval_ms=None, tolerable_failures=1_000, history_max=5)


def test_a_restart_is_a_recovery_with_its_cause() -> None:
    """When it failed, when it was deployed, when it ran, and from which checkpoint."""
    job = Written(restarting()).run()
    number = job.take()
    job.at_ms = 1_000
    job.breaks()
    assert job.job_history.down_since_ms == 1_000
    job.fire("restart:1", 1_500)
    job.at_ms = 1_584
    job.all_ready()
    (recovery,) = job.job_history.past.recoveries
    assert (recovery.attempt, recovery.tasks, recovery.checkpoint) == (1, None, number)
    assert (recovery.deployed_at_ms, recovery.running_at_ms) == (1_500, 1_584)
    assert recovery.failure is not None
    assert (recovery.failure.at_ms, recovery.failure.task, recovery.failure.reason) == (1_000, SINK, "ValueError: odd")
    assert dict(job.job_history.past.since_ms)[JobStatus.RUNNING] == 1_584
    assert job.job_history.down_since_ms is None


def test_checkpoints_keep_what_each_subtask_measured() -> None:
    """Also those that have failed, with the subtasks that had acknowledged; more than the statistics remember."""
    job = Written(restarting()).run()
    good = [job.take() for _ in range(8)]
    given_up = job.take((SOURCE,))
    job.breaks()
    kept = {ended.record.checkpoint_id: ended for ended in job.job_history.checkpoints}
    assert list(kept) == [*good, given_up]
    assert kept[good[0]].subtasks[SINK].metrics.start_delay_ms == good[0]
    assert kept[given_up].record.reason is not None
    assert set(kept[given_up].subtasks) == {SOURCE}
    assert [ended.number for ended in job.job_history.ended_after(7)] == [8, 9]


def test_a_coordinator_that_takes_over_writes_the_same() -> None:
    """Out of the events of the log: failures, recoveries, checkpoints and lines."""
    job = Written(restarting()).run()
    job.take()
    job.at_ms = 900
    job.breaks()
    job.fire("restart:1", 1_500)
    job.all_ready()
    job.take()
    machine, replayed = CoordinatorMachine(), JobHistory()
    replayed.reset(machine.state)
    for event in job.told:
        replayed.replay(event, machine.handle(event), machine.state)
    assert replayed.past == job.job_history.past
    assert replayed.checkpoints == job.job_history.checkpoints


def test_one_that_begins_with_a_folded_log_knows_what_the_state_knows() -> None:
    """The checkpoints of the statistics, the newest with its subtasks, and since when the job runs."""
    job = Written(restarting()).run()
    for _ in range(8):
        job.take()
    after = JobHistory(job.state)
    assert [ended.record.checkpoint_id for ended in after.checkpoints] == [4, 5, 6, 7, 8]
    assert [bool(ended.subtasks) for ended in after.checkpoints] == [False] * 4 + [True]
    assert dict(after.past.since_ms) == {JobStatus.RUNNING: job.state.running_since_ms}


def test_everything_has_a_limit() -> None:
    """However often a job fails, and however much it says."""
    job = Written(restarting(1_000)).run()
    for number in range(1, limits.FAILURES_MAX + 10):
        job.breaks("E: " + "x" * 3_000)
        job.fire(f"restart:{number}")
        job.all_ready()
    for _ in range(limits.CHECKPOINTS_MAX + 5):
        job.take()
    past = job.job_history.past
    assert len(past.failures) == len(past.recoveries) == limits.FAILURES_MAX
    assert len(past.lines) <= limits.LINES_MAX
    assert max(len(line.text) for line in past.lines) == limits.LINE_CHARACTERS_MAX
    assert len(job.job_history.checkpoints) == limits.CHECKPOINTS_MAX
    assert job.job_history.checkpoints[-1].number == limits.CHECKPOINTS_MAX + 5


def test_subtasks_have_a_limit_over_all_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the oldest go first; their totals stay."""
    monkeypatch.setattr(limits, "SUBTASKS_MAX", 5)
    job = Written(restarting()).run()
    for _ in range(4):
        job.take()
    kept: tuple[EndedCheckpoint, ...] = job.job_history.checkpoints
    assert [len(ended.subtasks) for ended in kept] == [0, 0, 2, 2]
    assert all(ended.record.acknowledged == 2 for ended in kept)


def test_checkpoints_that_go_well_are_no_lines() -> None:
    """There may be many a second."""
    job = Written(restarting()).run()
    before = len(job.job_history.past.lines)
    for _ in range(5):
        job.take()
    asked = [line.text for line in job.job_history.past.lines[before:]]
    assert all("Completed" not in text for text in asked)
