"""Several checkpoints at a time, refused parts, union state, retention, and what a checkpoint costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from any_permit import ANY_PERMIT
from coordinators import (
    OPERATORS,
    SINK,
    SOURCE,
    Coordinator,
    files,
    handle,
    only,
    part,
    spec,
)

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.job_spec import JobSpec, Retention
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.failures import CheckpointFailureReason as Reason
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import OperatorInfo, SectionRef, StateHandle, StateKind, SubtaskState
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId

THREE = spec(max_concurrent=3, retained=9, tolerable_failures=0)


# --- concurrent checkpoints ---------------------------------------------------------------------------------------


def collecting(count: int) -> Coordinator:
    """So many checkpoints at once."""
    coordinator = Coordinator(THREE).run()
    assert list(range(1, count + 1)) == [coordinator.ask() for _ in range(count)]
    return coordinator


def test_no_more_checkpoints_than_allowed_collect_at_once() -> None:
    """The next one starts when one of them is over."""
    coordinator = Coordinator(spec(max_concurrent=3, tolerable_failures=9)).run()
    assert [coordinator.ask() for _ in range(3)] == [1, 2, 3]
    assert coordinator.request("fourth") == []

    found = coordinator.decline(2)

    assert [t.checkpoint_id for t in only(found, do.TriggerCheckpoint)] == [4]


def test_a_newer_checkpoint_that_completes_subsumes_older_ones() -> None:
    """The older ones are given up, their tasks and users told; nobody counts that."""
    coordinator = collecting(3)
    coordinator.collect(2)

    found = coordinator.written(2)

    assert {a.request: a.reason for a in only(found, do.CompleteRequest)} == {"r1": Reason.SUBSUMED, "r2": None}
    assert [a.checkpoint_id for a in only(found, do.NotifyAborted)] == [1]
    assert list(coordinator.state.pending) == [3]
    assert coordinator.status is JobStatus.RUNNING


def test_checkpoints_are_written_one_at_a_time_and_their_files_are_committed_in_order() -> None:
    """Invariants 5 and 6: what is acknowledged while another is written waits, and then asks for the rest only."""
    coordinator = collecting(2)
    coordinator.collect(1, files(0, "f0"))
    coordinator.ack(2, SOURCE)
    assert coordinator.ack(2, SINK, files(0, "f0", "f1")) == []

    found = coordinator.written(1)

    (write,) = only(found, do.WriteMetadata)
    assert (files(1, "f1"),) == write.metadata.subtasks[1].committables
    assert only(coordinator.written(2), do.CommitSinks) == []
    assert only(coordinator.committed(1), do.CommitSinks) == [
        do.CommitSinks(CheckpointId(2), (files(1, "f1"),), permit=ANY_PERMIT)
    ]


def test_an_older_checkpoint_goes_on_when_a_newer_one_fails() -> None:
    """Only a completed checkpoint subsumes."""
    coordinator = Coordinator(replace(THREE, checkpoints=replace(THREE.checkpoints, tolerable_failures=9))).run()
    coordinator.ask()
    coordinator.ask()
    coordinator.collect(2)
    assert coordinator.acknowledge_all(1) == []

    assert [w.metadata.checkpoint_id for w in only(coordinator.voided(2), do.WriteMetadata)] == [1]


# --- acknowledgements ---------------------------------------------------------------------------------------------


def test_a_refused_acknowledgement_loses_its_state_and_what_was_in_flight() -> None:
    """Both files are deleted."""
    coordinator = Coordinator().run()
    in_flight = replace(handle(9, SINK), path="job/chk-9/sink-0-channels")
    state = replace(part(9, SINK), in_flight=in_flight)

    found = coordinator.tell(ev.CheckpointAcknowledged(0, AttemptNumber(0), SINK, CheckpointId(9), state))

    assert found == [
        do.DiscardFiles(CheckpointId(9), ("job-12345678/chk-9/sink-0", "job/chk-9/sink-0-channels"), permit=ANY_PERMIT)
    ]


@pytest.mark.parametrize("reason", list(Reason))
def test_only_counted_reasons_bring_the_attempt_down(reason: Reason) -> None:
    """One failure is enough where none is tolerated; other reasons do not count."""
    coordinator = Coordinator(spec(tolerable_failures=0)).run()
    coordinator.ask()

    coordinator.tell(ev.CheckpointDeclined(0, AttemptNumber(0), SINK, CheckpointId(1), reason, "because"))

    assert coordinator.status is (JobStatus.RESTARTING if reason.counted else JobStatus.RUNNING)


# --- union state --------------------------------------------------------------------------------------------------

A, B = (TaskId(VertexId("source"), SubtaskIndex(i)) for i in range(2))
UNION = replace(
    spec(tolerable_failures=0, retained=9),
    tasks=(A, B),
    sources=(A, B),
    edges=(),
    operators=(OperatorInfo(OPERATORS[0].uid, "source", A.vertex, 2, 128),),
)


def union_part(checkpoint_id: int, task: TaskId, kind: StateKind, finished: bool = False) -> SubtaskState:
    """A subtask with one section of this kind."""
    section = SectionRef(OPERATORS[0].uid, "splits", kind, 0, 10, 1)
    state = StateHandle(f"{task}-{checkpoint_id}", None, 10, "sum", (section,))
    return SubtaskState(task.vertex, task.subtask, state, finished=finished)


@pytest.mark.parametrize(
    ("kind", "finished", "refused"),
    [
        (StateKind.UNION, (True, False), True),
        (StateKind.UNION, (False, False), False),
        (StateKind.UNION, (True, True), False),
        (StateKind.LIST, (True, False), False),
    ],
)
def test_union_state_of_an_operator_that_has_finished_in_part_fails_the_checkpoint(
    kind: StateKind, finished: tuple[bool, bool], refused: bool
) -> None:
    """What the finished subtasks had put into the union would be lost; nobody's fault."""
    coordinator = Coordinator(UNION)
    coordinator.submit()
    for task in (A, B):
        coordinator.tell(ev.TaskReady(0, AttemptNumber(0), task))
    coordinator.request("wanted")
    found: list[do.CoordinatorInstruction] = []
    for task, over in zip((A, B), finished, strict=True):
        state = union_part(1, task, kind, over)
        found = coordinator.tell(ev.CheckpointAcknowledged(0, AttemptNumber(0), task, CheckpointId(1), state))

    assert bool(only(found, do.WriteMetadata)) is not refused
    reasons = [a.reason for a in only(found, do.CompleteRequest)]
    assert reasons == ([Reason.UNION_STATE_PARTLY_FINISHED] if refused else [])
    assert coordinator.status is JobStatus.RUNNING


# --- retention ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retention", "end", "kept"),
    [
        (Retention.NEVER_RETAIN, "failed", False),
        (Retention.NEVER_RETAIN, "cancelled", False),
        (Retention.NEVER_RETAIN, "finished", True),
        (Retention.RETAIN_ON_FAILURE, "failed", True),
        (Retention.RETAIN_ON_FAILURE, "cancelled", False),
        (Retention.RETAIN_ON_CANCELLATION, "failed", True),
        (Retention.RETAIN_ON_CANCELLATION, "cancelled", True),
    ],
)
def test_what_is_kept_depends_on_how_the_job_ends(retention: Retention, end: str, kept: bool) -> None:
    """What is not kept is no longer among the completed ones when the job is over, and so is swept."""
    coordinator = Coordinator(spec(restart=RestartStrategy.none(), retention=retention)).run()
    coordinator.complete()
    if end == "failed":
        coordinator.fail()
    elif end == "cancelled":
        coordinator.cancel()
    else:
        coordinator.end_of_data()
        coordinator.collect(2, finished=True)
        coordinator.written(2)
        coordinator.all_finished()

    assert coordinator.status.value == end
    assert bool(coordinator.state.completed) is kept


def test_checkpoints_whose_files_were_never_committed_stay_whatever_the_retention_says() -> None:
    """Invariant 6: only a job that is restored from them can still commit."""
    coordinator = Coordinator(spec(restart=RestartStrategy.none(), retention=Retention.NEVER_RETAIN)).run()
    coordinator.complete(files(0, "f0"))
    coordinator.commit_failed(1, away_ms=600_000)

    assert coordinator.status is JobStatus.FAILED
    assert [c.checkpoint_id for c in coordinator.state.completed] == [1]


# --- cost ---------------------------------------------------------------------------------------------------------


def comparisons(monkeypatch: pytest.MonkeyPatch, subtasks: int) -> int:
    """How often tasks are compared or hashed for one checkpoint of a job with so many sources and sinks."""
    tasks = tuple(TaskId(v, SubtaskIndex(i)) for v in (SOURCE.vertex, SINK.vertex) for i in range(subtasks))
    job: JobSpec = replace(spec(retained=1), tasks=tasks, sources=tasks[:subtasks])
    coordinator = Coordinator(job)
    coordinator.submit()
    for task in tasks:
        coordinator.tell(ev.TaskReady(0, AttemptNumber(0), task))
    for task in tasks[: subtasks // 2]:
        coordinator.tell(ev.TaskFinished(0, AttemptNumber(0), task))
    count = 0
    equal, hashed = TaskId.__eq__, TaskId.__hash__

    def counted_eq(self: TaskId, other: object) -> bool:
        nonlocal count
        count += 1
        return equal(self, other)

    def counted_hash(self: TaskId) -> int:
        nonlocal count
        count += 1
        return hashed(self)

    with monkeypatch.context() as patch:
        patch.setattr(TaskId, "__eq__", counted_eq)
        patch.setattr(TaskId, "__hash__", counted_hash)
        coordinator.request()
        for task in tasks[subtasks // 2 :]:
            state = SubtaskState(task.vertex, task.subtask, None)
            coordinator.tell(ev.CheckpointAcknowledged(0, AttemptNumber(0), task, CheckpointId(1), state))
        assert only(coordinator.written(1), do.NotifyCompleted)
    return count


def test_the_cost_of_a_checkpoint_grows_with_the_number_of_tasks_and_not_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten times the tasks, ten times the steps: no acknowledgement looks at all tasks."""
    few, many = comparisons(monkeypatch, 20), comparisons(monkeypatch, 200)

    assert 9 * few < many < 11 * few
