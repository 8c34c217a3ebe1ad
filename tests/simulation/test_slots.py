"""Slots, whose subtasks share a process: what is lost with it, what stays, and what they send each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pipelines import keyed
from restored_graphs import REBALANCE, graph_of

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.storage.errors import StorageError
from tidegate.storage.ids import AttemptNumber, SubtaskIndex, VertexId
from tidegate.testing import Faults
from tidegate.testing.oracle import InvariantViolated
from tidegate.testing.oracle.task_oracles import LocalQueuesOracle
from tidegate.testing.runtime.run import STORAGE, JobRun, JobSetting, Simulation, Slots
from tidegate.testing.runtime.simulated_job import SimulatedJob
from tidegate.testing.simulated import SMALL_BUFFERS

SETTLE_MS_MAX = 300_000
PARALLELISM = 2
STRIKES_AFTER = 3
"""Completed checkpoints: in the first one no rows have come to the aggregates."""


def run(slots: Slots, strike: Callable[[SimulatedJob], None]) -> JobRun:
    """Run a job without other faults, and strike when checkpoints with keyed state are complete."""
    simulation = Simulation(1, Faults())
    checkpoints = CheckpointConfig(interval="100ms", storage=STORAGE, inline_threshold=1_000)
    options = DataPlaneOptions(limits=SMALL_BUFFERS, source_rows_max=8)
    job = simulation.prepare(JobSetting(keyed, PARALLELISM, checkpoints, options, slots=slots))

    def look() -> None:
        state = None if job.coordinator is None else job.coordinator.machine.state
        if state is not None and state.status is JobStatus.RUNNING and state.completed_checkpoints >= STRIKES_AFTER:
            strike(job)
        else:
            job.world.after(1, look)

    job.world.after(0, look)
    return simulation.finish(job, SETTLE_MS_MAX)


def raises(job: SimulatedJob, task: TaskId) -> None:
    """Let a subtask fail by what it raises."""

    def fail() -> None:
        raise StorageError("away")

    process = job.processes.of(task)
    process.guarded(process.subtasks[task], fail)


@pytest.mark.parametrize("slots", ["shared", "halves", "apart"])
def test_a_process_takes_its_slot_along(slots: Slots) -> None:
    """Restarts all subtasks of one slot, or the single subtask of a slot. All rows come once."""
    lost: list[TaskId] = []
    failed: list[TaskId] = []

    def strike(job: SimulatedJob) -> None:
        process = job.processes.of(job.spec.tasks[-1])
        lost.extend(process.unfinished)
        report = job.report

        def listen(event: co.CoordinatorEvent) -> None:
            if isinstance(event, co.TaskFailed):
                failed.append(event.task)
            report(event)

        job.report = listen  # type: ignore[method-assign]
        job.processes.end(process, "process died")

    struck, reference = run(slots, strike), run(slots, lambda job: None)
    assert (struck.violation, struck.status, struck.rows) == (None, "finished", reference.rows)
    assert struck.restarts == 1
    assert failed == lost
    vertices = {task.vertex for task in struck.job.spec.tasks}
    wanted = {"shared": len(vertices), "halves": (len(vertices) + 1) // 2, "apart": 1}[slots]
    assert len(lost) == wanted
    assert {task.subtask for task in lost} == {PARALLELISM - 1}


def test_a_subtask_that_raises_fails_alone() -> None:
    """Its process continues, and all other subtasks go back to the checkpoint with the state they have left in it."""
    found = run("shared", lambda job: raises(job, job.spec.tasks[0]))
    assert (found.violation, found.status, found.restarts) == (None, "finished", 1)
    assert {process.name.rpartition("#")[2] for process in found.job.processes.known} == {"0"}
    assert found.job.watch.coverage.counts["state_kept"] > 0


def test_a_subtask_whose_end_was_not_reported_fails_with_its_process() -> None:
    """Unsent reports of a process are lost with it."""

    def strike(job: SimulatedJob) -> None:
        task = job.spec.tasks[0]
        process = job.processes.of(task)
        subtask = process.stop(task)
        assert subtask is not None
        process.finished[task] = subtask
        assert task not in process.unfinished
        process.unreported.append(co.TaskFinished(job.world.wall_ms, subtask.attempt, task))
        assert task in process.unfinished
        job.processes.end(process, "process died")

    found = run("shared", strike)
    assert (found.violation, found.status, found.restarts) == (None, "finished", 1)


# --- the oracle of local queues ---------------------------------------------------------------------------------------

OLD, NEW = "slot 1 of 1#0", "slot 1 of 1#1"
INSIDE = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))
OUTSIDE = ChannelId(0, SubtaskIndex(0), SubtaskIndex(1))
FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)
RECEIVER = TaskId(VertexId("b"), SubtaskIndex(0))


def sent(sequence: int, channel: ChannelId = INSIDE) -> do.SendFrame:
    """A frame that leaves its sender in the first attempt."""
    return do.SendFrame(FIRST, channel, sequence, ())


def arrived(sequence: int, attempt: AttemptNumber = FIRST) -> ev.FrameArrived:
    """A frame that reaches its receiver."""
    return ev.FrameArrived(0, attempt, INSIDE, sequence, ())


@pytest.fixture
def oracle() -> LocalQueuesOracle:
    """Two vertices of two subtasks, each of which sends to both. Two frames are in the queue of the first slot."""
    oracle = LocalQueuesOracle(graph_of({"a": 2, "b": 2}, ("a", "b", REBALANCE)))
    assert not oracle.sent(OLD, sent(0, OUTSIDE))
    assert oracle.sent(OLD, sent(0))
    assert oracle.sent(OLD, sent(1))
    return oracle


def test_frames_come_in_their_order_before_the_next_turn(oracle: LocalQueuesOracle) -> None:
    """Then nothing is left that the process would take along."""
    oracle.arrived(OLD, arrived(0))
    oracle.arrived(OLD, arrived(1))
    oracle.turn(OLD, {RECEIVER: FIRST})
    assert not oracle.ended(OLD)


def test_what_was_sent_to_a_subtask_that_is_over_need_not_come(oracle: LocalQueuesOracle) -> None:
    """The receiver has failed, or is in another attempt by now."""
    oracle.turn(OLD, {RECEIVER: SECOND})
    oracle.turn(OLD, {})


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        pytest.param(lambda oracle: oracle.arrived(OLD, arrived(1)), "before frame 0", id="out of order"),
        pytest.param(lambda oracle: oracle.arrived(NEW, arrived(0)), "without being sent", id="in another process"),
        pytest.param(
            lambda oracle: oracle.arrived(OLD, arrived(0, SECOND)), "without being sent", id="another attempt"
        ),
        pytest.param(lambda oracle: oracle.turn(OLD, {RECEIVER: FIRST}), "takes a turn before", id="after a turn"),
    ],
)
def test_a_queue_that_breaks_a_rule_is_seen(
    oracle: LocalQueuesOracle, wrong: Callable[[LocalQueuesOracle], None], says: str
) -> None:
    """Whatever it is."""
    with pytest.raises(InvariantViolated, match=says):
        wrong(oracle)


def test_nothing_comes_twice_or_after_the_end(oracle: LocalQueuesOracle) -> None:
    """A frame that has come is not in the queue any more, nor is one of a process that has ended."""
    oracle.arrived(OLD, arrived(0))
    with pytest.raises(InvariantViolated, match="for a second time"):
        oracle.arrived(OLD, arrived(0))
    assert oracle.ended(OLD)
    with pytest.raises(InvariantViolated, match="without being sent"):
        oracle.arrived(OLD, arrived(1))
