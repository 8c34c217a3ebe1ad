"""What a coordinator decides is said in one line each, with attempt, checkpoint and cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from coordinators import PATH, SINK, SOURCE, SPEC, Coordinator, part, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.job_history import DecisionLog, Line, bytes_text, seconds_text
from tidegate.actors.coordinator.job_spec import JobSpec, RestorePoint
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.task_reports import SnapshotMetrics
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import CheckpointId, Generation, JobId


class Told(Coordinator):
    """A coordinator whose decision_log is listened to."""

    def __init__(self, job: JobSpec = SPEC, details: bool = False) -> None:
        super().__init__(job)
        self.decision_log = DecisionLog(self.state, details)
        self.lines: list[Line] = []

    def tell(self, event: ev.CoordinatorEvent) -> list[do.CoordinatorInstruction]:
        follows = super().tell(event)
        self.lines += self.decision_log.lines_about(event, follows, self.state)
        return follows

    def new(self) -> list[str]:
        """What was said since the last call."""
        lines, self.lines = self.lines, []
        return [line.text for line in lines]


def test_a_job_begins_restarts_and_fails() -> None:
    """From the submission to the end of a job whose restart strategy allows one restart."""
    job = Told(spec(RestartStrategy.fixed_delay(1, 500)))
    job.submit()
    job.at_ms = 1_200
    job.all_ready()
    assert job.new() == [
        "Job job (job-12345678) was submitted, 2 tasks. It starts afresh",
        "Deploying attempt 0 afresh: all 2 tasks",
        "Attempt 0 is running, 1.2 s after its deployment",
    ]
    job.tell(ev.TaskFailed(1_300, job.state.attempt, SINK, "ValueError: odd"))
    job.fire("restart:1", 1_800)
    job.at_ms = 1_884
    job.all_ready()
    assert job.new() == [
        "Task sink[0] of attempt 0 failed: ValueError: odd",
        "Restarting all 2 tasks as attempt 1 in 500 ms",
        "Deploying attempt 1 afresh: all 2 tasks",
        "Attempt 1 is running, 84 ms after its deployment, 584 ms after the failure",
    ]
    job.tell(ev.TaskFailed(2_000, job.state.attempt, SINK, "ValueError: odd"))
    while not job.status.terminal:
        job.fire("ending", 100_000)
    first, *_, last = job.new()
    assert first == "Task sink[0] of attempt 1 failed: ValueError: odd"
    assert last.startswith("The job is failed: ")
    assert "ValueError: odd" in last


def test_a_job_says_where_it_starts_from() -> None:
    """The pointer of the checkpoint."""
    job = Told(spec(restore=RestorePoint("memory://job", JobId("job-87654321"), CheckpointId(7), final=False)))
    job.submit()
    submitted, deploying = job.new()
    assert submitted.endswith("It starts from memory://job/job-87654321/chk-7")
    assert deploying == "Deploying attempt 0 from memory://job/job-87654321/chk-7: all 2 tasks"


def test_a_checkpoint_is_triggered_and_completed() -> None:
    """Why it was triggered, how large it is and how long it took. Committed output is no news."""
    job = Told()
    job.run()
    job.new()
    job.at_ms = 1_000
    job.request()
    job.at_ms = 1_084
    job.acknowledge_all(1)
    job.written(1)
    assert job.new() == [
        "A user requested a checkpoint (request r)",
        "Triggering checkpoint 1 of attempt 0 (asked for)",
        "Completed checkpoint 1 (20 B, 84 ms)",
    ]


def test_a_periodic_checkpoint_that_takes_too_long() -> None:
    """It says so, and how far it had come."""
    job = Told()
    job.run()
    job.new()
    job.fire("periodic:0", 1_000)
    job.ack(1, SOURCE)
    job.fire("timeout:1", 12_000)
    triggered, failed, restarting = job.new()
    assert triggered == "Triggering checkpoint 1 of attempt 0 (periodic)"
    assert failed.startswith("Checkpoint 1 failed after 11.0 s: ")
    assert failed.endswith(" (1 of 2 tasks had acknowledged)")
    assert restarting == "Restarting all 2 tasks as attempt 1 in 500 ms", "this job tolerates no failed checkpoint"


def test_a_declined_checkpoint_names_the_task() -> None:
    """And the reason that the task gave."""
    job = Told()
    job.run()
    job.request()
    job.new()
    job.decline(1, "the disk is full", CheckpointFailureReason.DECLINED)
    declined, failed, _ = job.new()
    assert declined == "Checkpoint 1 was declined by task sink[0]: the disk is full"
    assert failed.startswith("Checkpoint 1 failed after 0 ms: ")


def test_a_savepoint_says_where_it_is() -> None:
    """Once its folder is whole."""
    job = Told()
    job.run()
    number = job.start_savepoint(SnapshotKind.SAVEPOINT)
    job.acknowledge_all(number)
    job.written(number)
    job.new()
    job.exported(number)
    copied, completed = job.new()
    assert copied == f"The folder of savepoint 1 was written: {PATH}"
    assert completed == f"Completed savepoint 1 (20 B, 0 ms) at {PATH}"


def test_details_are_made_where_somebody_asks() -> None:
    """What each task took for its part. Each line knows its checkpoint."""
    for details, expected in ((False, 1), (True, 3)):
        job = Told(details=details)
        job.run()
        job.request()
        job.lines = [line for line in job.lines if line.checkpoint == 1]
        metrics = SnapshotMetrics(start_delay_ms=1, alignment_ms=2, sync_ms=3, async_ms=4)
        for task in (SOURCE, SINK):
            job.tell(ev.CheckpointAcknowledged(10, job.state.attempt, task, CheckpointId(1), part(1, task), metrics))
        job.written(1)
        assert len([line for line in job.lines if line.checkpoint == 1]) == expected + 1
        if details:
            assert job.lines[1].text == (
                "source[0] acknowledged checkpoint 1 after 10 ms (10 B; start delay 1, alignment 2, sync 3, async 4 ms)"
            )


def test_a_successor_goes_on_where_the_state_is() -> None:
    """It says that it has taken over, and nothing of checkpoints that were over before."""
    job = Told()
    job.run()
    job.request()
    job.acknowledge_all(1)
    job.written(1)
    successor = Coordinator(machine=job.machine)
    decision_log = DecisionLog(job.state)
    event = ev.CoordinatorStarted(5, Generation(2))
    lines: Sequence[Line] = decision_log.lines_about(event, successor.tell(event), job.state)
    assert lines[0].text == "Coordinator generation 2 has taken over"
    assert not any("Completed" in line.text for line in lines)


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 ms"), (999, "999 ms"), (1_234, "1.2 s"), (200_500, "3 min 20 s"), (-5, "0 ms")]
)
def test_durations(number: int, text: str) -> None:
    """As people read them."""
    assert seconds_text(number) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (812, "812 B"), (1_900, "1.9 kB"), (1_234_567, "1.2 MB"), (5 * 10**9, "5.0 GB")]
)
def test_sizes(number: int, text: str) -> None:
    """As people read them."""
    assert bytes_text(number) == text


def test_a_failure_is_trouble_and_a_trigger_a_detail() -> None:
    """So that those who print can choose."""
    job = Told()
    job.run()
    job.request()
    job.tell(ev.TaskFailed(20, job.state.attempt, SINK, "odd"))
    kinds = {line.text.split()[0]: (line.trouble, line.restart, line.detail) for line in job.lines}
    assert kinds["Triggering"] == (False, False, True)
    assert kinds["Task"] == (True, True, False)
    assert kinds["Restarting"] == (False, True, False)
