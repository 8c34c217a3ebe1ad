"""The plan of a checkpoint and what finished tasks mean for one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SINK, SOURCE, SPEC, TASKS, Coordinator, only, spec

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.checkpoint_requests import RETRIES_MAX
from tidegate.actors.coordinator.checkpoints.checkpoint_coordinator import CheckpointPlan, NoPlan, make_plan
from tidegate.actors.coordinator.job_spec import JobEdgeInfo, JobSpec
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.actors.runtimes.running_job import Answer, answers_of
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SnapshotKind, SubtaskState
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId


def task(name: str) -> TaskId:
    """`a1` is subtask 1 of vertex a."""
    return TaskId(VertexId(name[0]), SubtaskIndex(int(name[1:])))


def tasks(names: str) -> tuple[TaskId, ...]:
    """Several of them, by their names."""
    return tuple(task(name) for name in names.split())


def job(names: str, sources: str, edges: str) -> JobSpec:
    """`a>b` joins all to all, `a=b` subtask to subtask."""
    return replace(
        SPEC,
        tasks=tasks(names),
        sources=tasks(sources),
        edges=tuple(JobEdgeInfo(VertexId(e[0]), VertexId(e[2]), pointwise=e[1] == "=") for e in edges.split()),
    )


ALL_TO_ALL = job("a0 a1 b0 b1", "a0 a1", "a>b")
POINTWISE = job("a0 a1 b0 b1 c0", "a0 a1", "a=b b>c")
DIAMOND = job("a0 b0 c0 d0", "a0", "a>b a>c b>d c>d")
JOIN = job("a0 a1 b0 b1 c0 c1", "a0 a1 b0 b1", "a>c b=c")


@pytest.mark.parametrize(
    ("graph", "finished", "triggered"),
    [
        (ALL_TO_ALL, "", "a0 a1"),
        (ALL_TO_ALL, "a0", "a1"),
        (ALL_TO_ALL, "a0 a1", "b0 b1"),
        (ALL_TO_ALL, "a0 a1 b1", "b0"),
        (ALL_TO_ALL, "a0 a1 b0 b1", ""),
        (POINTWISE, "a1", "a0 b1"),
        (POINTWISE, "a0 a1", "b0 b1"),
        (POINTWISE, "a0 a1 b0", "b1"),
        (POINTWISE, "a0 a1 b0 b1", "c0"),
        (DIAMOND, "a0", "b0 c0"),
        (DIAMOND, "a0 b0", "c0"),
        (DIAMOND, "a0 b0 c0", "d0"),
        (JOIN, "a0 a1 b1", "b0 c1"),
        (JOIN, "b0 b1", "a0 a1"),
        (JOIN, "a0 a1 b0 b1", "c0 c1"),
    ],
)
def test_the_plan_triggers_whoever_hears_of_no_barrier_otherwise(graph: JobSpec, finished: str, triggered: str) -> None:
    """Tasks none of whose upstream tasks still runs are triggered; all that have not finished are waited for."""
    over = dict.fromkeys(tasks(finished))

    plan = make_plan(graph, dict.fromkeys(graph.tasks), over)

    assert isinstance(plan, CheckpointPlan)
    assert set(tasks(triggered)) == set(plan.trigger)
    assert set(graph.tasks) - set(over) == set(plan.wait)
    assert set(over) == set(plan.finished)


@pytest.mark.parametrize("finished", ["", "a0"])
def test_there_is_no_plan_while_a_task_is_missing(finished: str) -> None:
    """A task that neither runs nor has finished is named."""
    running = dict.fromkeys(tasks("a0 a1 b0"))

    assert NoPlan(task("b1")) == make_plan(ALL_TO_ALL, running, dict.fromkeys(tasks(finished)))


def finish(coordinator: Coordinator, who: TaskId) -> list[do.CoordinatorInstruction]:
    """The task leaves."""
    return coordinator.tell(ev.TaskFinished(coordinator.at_ms, coordinator.state.attempt, who))


def end(coordinator: Coordinator, who: TaskId) -> list[do.CoordinatorInstruction]:
    """The operators of the task finish."""
    return coordinator.tell(ev.TaskReachedEndOfData(coordinator.at_ms, coordinator.state.attempt, who))


def source_left() -> Coordinator:
    """A job whose source finished, was covered by checkpoint 1, and left; its sink goes on."""
    coordinator = Coordinator(spec(retained=9)).run()
    end(coordinator, SOURCE)
    coordinator.ask()
    coordinator.ack(1, SOURCE, finished=True)
    coordinator.ack(1, SINK)
    coordinator.written(1)
    assert finish(coordinator, SOURCE) == []
    return coordinator


def test_a_task_that_left_is_neither_triggered_nor_waited_for_nor_told() -> None:
    """Its part of the checkpoint says that it has finished; the rest of the job goes on with checkpoints."""
    coordinator = source_left()

    (trigger,) = only(coordinator.request(), do.TriggerCheckpoint)
    assert trigger.tasks == (SINK,)
    (write,) = only(coordinator.ack(2, SINK), do.WriteMetadata)
    source, sink = write.metadata.subtasks
    assert SubtaskState(SOURCE.vertex, SOURCE.subtask, None, finished=True) == source
    assert not sink.finished
    assert not write.metadata.final

    assert only(coordinator.written(2), do.NotifyCompleted) == [
        do.NotifyCompleted(AttemptNumber(0), CheckpointId(2), (SINK,))
    ]


def test_the_job_ends_when_the_last_task_has_left() -> None:
    """The others left before; the checkpoint that covers the last finish is the final one."""
    coordinator = source_left()
    (trigger,) = only(end(coordinator, SINK), do.TriggerCheckpoint)
    (write,) = only(coordinator.ack(trigger.checkpoint_id, SINK, finished=True), do.WriteMetadata)
    assert write.metadata.final
    coordinator.written(trigger.checkpoint_id)

    assert [do.EndJob("finished", None)] == only(finish(coordinator, SINK), do.EndJob)


def test_a_task_that_leaves_while_it_is_waited_for_aborts_that_checkpoint_only() -> None:
    """The next checkpoint knows that it has finished; the failure is nobody's fault; who asked still waits."""
    coordinator = Coordinator(spec(tolerable_failures=0)).run()
    coordinator.request("wanted")

    found = finish(coordinator, SOURCE)

    assert [i.checkpoint_id for i in only(found, do.DiscardCheckpoint)] == [1]
    assert only(found, do.CompleteRequest) == []
    assert [(t.checkpoint_id, t.tasks) for t in only(found, do.TriggerCheckpoint)] == [(2, (SINK,))]
    assert coordinator.status is JobStatus.RUNNING
    coordinator.ack(2, SINK)
    assert only(coordinator.written(2), do.CompleteRequest) == [do.CompleteRequest("wanted", CheckpointId(2), None)]
    assert answers_of(coordinator.state) == {"wanted": Answer(CheckpointId(2), None)}


def test_a_savepoint_that_meets_a_task_that_leaves_is_taken_again_until_it_does_not() -> None:
    """It is still a savepoint, under its name; a task that is closing may be met a bounded number of times."""
    coordinator = Coordinator(spec(tolerable_failures=0)).run()
    coordinator.start_savepoint()
    for number in range(1, RETRIES_MAX + 1):
        found = coordinator.decline(number, "bye", CheckpointFailureReason.TASK_CLOSING)
        assert only(found, do.CompleteRequest) == []
        (trigger,) = only(found, do.TriggerCheckpoint)
        assert (trigger.checkpoint_id, trigger.options.kind) == (number + 1, SnapshotKind.SAVEPOINT)
        assert answers_of(coordinator.state) == {"wanted": None}

    found = coordinator.decline(RETRIES_MAX + 1, "bye", CheckpointFailureReason.TASK_CLOSING)

    (answer,) = only(found, do.CompleteRequest)
    assert (answer.request, answer.reason) == ("wanted", CheckpointFailureReason.TASK_CLOSING)
    assert only(found, do.TriggerCheckpoint) == []


def test_a_task_that_leaves_after_it_has_acknowledged_aborts_nothing() -> None:
    """Its part of the checkpoint is there already."""
    coordinator = Coordinator().run()
    coordinator.ask()
    coordinator.ack(1, SOURCE, finished=True)

    assert finish(coordinator, SOURCE) == []
    assert len(only(coordinator.ack(1, SINK), do.WriteMetadata)) == 1


def test_a_new_attempt_waits_for_every_task_again() -> None:
    """What finished belongs to an attempt: the next one deploys all tasks, and state tells some that they finished."""
    coordinator = source_left()
    coordinator.fail()
    coordinator.fire("restart:1")
    coordinator.all_ready()

    assert [t.tasks for t in only(coordinator.request(), do.TriggerCheckpoint)] == [(SOURCE,)]
    assert set(TASKS) == set(coordinator.state.pending[CheckpointId(2)].waiting)
