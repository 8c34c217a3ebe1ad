"""What stops when a task has failed: its region, and everything where that concerns the job."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coordinators import SPEC, Coordinator, kinds, only

from tidegate.actors.coordinator import events as ev
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator import invariants
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.coordinator.job_spec import FailoverStrategy, JobEdgeInfo, JobSpec, RestorePoint
from tidegate.actors.coordinator.phases import JobStatus
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.storage.checkpoints.metadata import (
    Committable,
    DataFile,
    OperatorInfo,
    SectionRef,
    SnapshotKind,
    StateHandle,
    StateKind,
    SubtaskState,
)
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import InvariantError
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex, VertexId

A0, A1, B, C = (
    TaskId(VertexId(vertex), SubtaskIndex(index)) for vertex, index in (("a", 0), ("a", 1), ("b", 0), ("c", 0))
)
"""Two subtasks that nothing joins, and a source with its sink: three regions."""
JOB = replace(
    SPEC,
    tasks=(A0, A1, B, C),
    sources=(A0, A1, B),
    operators=tuple(
        OperatorInfo(OperatorUid(vertex), vertex, VertexId(vertex), parallelism, max_parallelism=128)
        for vertex, parallelism in (("a", 2), ("b", 1), ("c", 1))
    ),
    edges=(JobEdgeInfo(B.vertex, C.vertex, pointwise=True),),
    restart=RestartStrategy.fixed_delay(100, 500),
    failover=FailoverStrategy.REGION,
)


class Regions(Coordinator):
    """A job of three regions."""

    def __init__(self, job: JobSpec = JOB) -> None:
        super().__init__(job)
        self.submit()
        self.ready(*job.tasks)

    def ready(self, *tasks: TaskId) -> list[do.CoordinatorInstruction]:
        """These tasks have restored their state."""
        return [i for t in tasks for i in self.tell(ev.TaskReady(self.at_ms, self.state.attempt_of(t), t))]

    def lose(self, task: TaskId) -> list[do.CoordinatorInstruction]:
        """A task's process dies."""
        return self.tell(ev.TaskFailed(self.at_ms, self.state.attempt_of(task), task, "gone"))

    def restart(self) -> list[do.CoordinatorInstruction]:
        """The delay is over, and what is down is deployed."""
        return self.fire(f"restart:{self.state.attempt + 1}", self.at_ms + 500)

    def part_of(self, number: int, task: TaskId, state: SubtaskState | None = None) -> list[do.CoordinatorInstruction]:
        """A task acknowledges a checkpoint."""
        own = SubtaskState(task.vertex, task.subtask, None) if state is None else state
        attempt = self.state.attempt_of(task)
        return self.tell(ev.CheckpointAcknowledged(self.at_ms, attempt, task, CheckpointId(number), own))

    def take_checkpoint(self) -> int:
        """One that completes."""
        number = int(only(self.request(f"r{self.at_ms}"), do.TriggerCheckpoint)[0].checkpoint_id)
        for task in self.spec.tasks:
            self.part_of(number, task)
        self.tell(ev.MetadataWritten(self.at_ms, CheckpointId(number)))
        return number

    def attempts(self) -> list[int]:
        """Of each task."""
        return [int(self.state.attempt_of(task)) for task in self.spec.tasks]


def test_only_the_region_of_a_failed_task_restarts() -> None:
    """The others keep their attempt; the restart takes what the checkpoint has of the region alone."""
    job = Regions()
    number = job.take_checkpoint()
    lost = job.lose(C)
    assert only(lost, do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0), (B, C))]
    assert job.status is JobStatus.RESTARTING
    (deploy,) = only(job.restart(), do.DeployAttempt)
    assert deploy.tasks == (B, C)
    assert deploy.restore is not None
    assert deploy.restore.checkpoint_id == number

    started = job.ready(B, C)

    assert only(started, do.StartTasks) == [do.StartTasks(AttemptNumber(1), (B, C))]
    assert job.status is JobStatus.RUNNING
    assert job.attempts() == [0, 0, 1, 1]


def test_one_region_fails_fifty_times_and_the_others_keep_their_attempt() -> None:
    """However often one starts anew."""
    job = Regions()
    for _ in range(50):
        job.lose(A1)
        job.restart()
        job.ready(A1)
    assert job.attempts() == [0, 50, 0, 0]
    triggers = only(job.request(), do.TriggerCheckpoint)
    assert [(t.attempt, t.tasks) for t in triggers] == [(0, (A0, B)), (50, (A1,))], "each is told in its own attempt"


def test_a_region_that_fails_while_another_one_is_deployed_waits_for_its_turn() -> None:
    """The deployment that is under way goes on, and starts; then the other one follows."""
    job = Regions()
    job.lose(A0)
    job.restart()
    lost = job.lose(C)
    assert only(lost, do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0), (B, C))]
    assert job.status is JobStatus.DEPLOYING
    assert only(job.restart(), do.DeployAttempt) == []

    found = job.ready(A0)

    assert only(found, do.StartTasks) == [do.StartTasks(AttemptNumber(1), (A0,))]
    assert [deploy.tasks for deploy in only(found, do.DeployAttempt)] == [(B, C)]
    job.ready(B, C)
    assert job.status is JobStatus.RUNNING
    assert job.attempts() == [1, 0, 2, 2]


def test_of_several_regions_that_are_deployed_one_may_fail() -> None:
    """What is ready of the others starts as soon as nothing of the attempt is waited for any more."""
    job = Regions()
    job.lose(A0)
    job.lose(C)
    (deploy,) = only(job.restart(), do.DeployAttempt)
    assert deploy.tasks == (A0, B, C)
    job.ready(B, C)
    found = job.lose(A0)
    assert only(found, do.StartTasks) == [do.StartTasks(AttemptNumber(1), (B, C))]
    assert job.status is JobStatus.RESTARTING
    assert job.attempts()[1:] == [0, 1, 1]


def test_a_pending_checkpoint_is_given_up_and_those_that_go_on_are_told() -> None:
    """An acknowledgement of one that goes on counts no more: the region that failed will have no part in it."""
    job = Regions()
    job.request()
    job.part_of(1, A0)
    lost = job.lose(C)
    assert only(lost, do.NotifyAborted) == [do.NotifyAborted(AttemptNumber(0), CheckpointId(1), (A0, A1))]
    assert [answer.request for answer in only(lost, do.CompleteRequest)] == ["r"]
    assert job.part_of(1, A1) == []
    assert not job.state.pending


def test_a_checkpoint_that_is_being_written_is_awaited_and_those_that_go_on_hear_of_it() -> None:
    """Its fate decides what the failed region starts from, and which files of the others are covered."""
    job = Regions()
    job.request()
    for task in JOB.tasks:
        job.part_of(1, task)
    job.lose(C)
    assert only(job.restart(), do.DeployAttempt) == []

    found = job.tell(ev.MetadataWritten(job.at_ms, CheckpointId(1)))

    assert only(found, do.NotifyCompleted) == [do.NotifyCompleted(AttemptNumber(0), CheckpointId(1), (A0, A1))]
    (deploy,) = only(found, do.DeployAttempt)
    assert deploy.tasks == (B, C)
    assert deploy.restore is not None
    assert deploy.restore.checkpoint_id == 1


def test_files_of_those_that_go_on_are_named_once() -> None:
    """A subtask that has not heard that a checkpoint covers its files names them again, also after a restart."""

    def written(*names: str) -> SubtaskState:
        files = tuple(DataFile(name, 1, 1, "sum") for name in names)
        return SubtaskState(A0.vertex, A0.subtask, None, (Committable(OperatorUid("a"), A0.subtask, "t", 0, files),))

    job = Regions()
    for number, part, new, after in ((1, ("f0", "f1"), ["f0", "f1"], C), (2, ("f0", "f1", "f2"), ["f2"], A0)):
        job.request(f"r{number}")
        job.part_of(number, A0, written(*part))
        found = [i for task in (A1, B, C) for i in job.part_of(number, task)]
        (write,) = only(found, do.WriteMetadata)
        files = [file.path for subtask in write.metadata.subtasks for c in subtask.committables for file in c.files]
        assert files == new
        job.tell(ev.MetadataWritten(job.at_ms, CheckpointId(number)))
        job.tell(ev.SinksCommitted(job.at_ms, CheckpointId(number)))
        job.lose(after)
        job.restart()
        job.ready(*(task for task in JOB.tasks if task not in job.state.ready))
    assert not job.state.committed_files, "a subtask that is deployed anew counts from the start"


def test_what_a_stopped_task_still_says_is_ignored() -> None:
    """Its region goes back: it has not finished, whatever it had on its way."""
    job = Regions()
    job.lose(B)
    for late in (ev.TaskFinished, ev.TaskReachedEndOfData):
        assert job.machine.ignores(late(job.at_ms, AttemptNumber(0), C))
    assert job.machine.ignores(ev.TaskFailed(job.at_ms, AttemptNumber(0), C, "its peer is gone"))
    job.restart()
    job.ready(B, C)
    assert job.machine.ignores(ev.TaskFinished(job.at_ms, AttemptNumber(0), C))
    assert not job.machine.ignores(ev.TaskFinished(job.at_ms, AttemptNumber(0), A0))


def test_a_failure_takes_the_whole_job_back_while_a_stop_is_pending() -> None:
    """The others have ended their data at the savepoint: they cannot go on without it."""
    job = Regions()
    job.start_savepoint(SnapshotKind.SUSPEND)
    assert only(job.lose(A0), do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0))]
    assert only(job.restart(), do.DeployAttempt)[0].tasks is None


def test_a_damaged_checkpoint_takes_the_whole_job_back() -> None:
    """An older one is next, and the tables go back to what it covers: so do all tasks."""
    job = Regions(replace(JOB, checkpoints=replace(JOB.checkpoints, retained=2)))
    job.take_checkpoint()
    job.at_ms += 1
    newest = job.take_checkpoint()
    job.lose(A0)
    job.restart()
    found = job.tell(ev.CheckpointDamaged(job.at_ms, AttemptNumber(1), CheckpointId(newest), "a checksum is wrong"))
    assert do.CancelAttempt(AttemptNumber(1)) in found
    assert only(found, do.TakeTablesBack)[0].checkpoint_id == newest - 1
    deployed = job.tell(ev.TablesTakenBack(job.at_ms, AttemptNumber(2)))
    assert only(deployed, do.DeployAttempt)[0].tasks is None


@pytest.mark.parametrize(
    "job",
    [replace(JOB, hooks=("outside",)), replace(JOB, failover=FailoverStrategy.FULL)],
    ids=["hooks", "full"],
)
def test_some_jobs_restart_as_a_whole(job: JobSpec) -> None:
    """A master hook stands for something that all tasks may share; and users may want it so."""
    coordinator = Regions(job)
    assert only(coordinator.lose(A0), do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0))]


def test_subtasks_with_union_state_go_back_together() -> None:
    """Each gets what all had: one alone would take over what the others still have."""
    job = Regions()
    job.request()
    section = SectionRef(OperatorUid("a"), "counts", StateKind.UNION, 0, 10, 1)
    handle = StateHandle("f", None, 10, "sum", (section,))
    job.part_of(1, A0, SubtaskState(A0.vertex, A0.subtask, handle))
    for task in (A1, B, C):
        job.part_of(1, task)
    job.tell(ev.MetadataWritten(job.at_ms, CheckpointId(1)))
    assert only(job.lose(A1), do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0), (A0, A1))]


def test_nobody_knows_which_vertices_of_another_job_have_union_state() -> None:
    """Until this job has a checkpoint of its own, the subtasks of a vertex go back together."""
    old = RestorePoint("memory://old", SPEC.job_id, CheckpointId(7), final=False)
    job = Regions(replace(JOB, restore=old))
    assert only(job.lose(A1), do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(0), (A0, A1))]
    job.restart()
    job.ready(A0, A1)
    job.take_checkpoint()
    assert only(job.lose(A1), do.CancelAttempt) == [do.CancelAttempt(AttemptNumber(1), (A1,))]


def test_a_new_coordinator_goes_on_with_what_is_down() -> None:
    """Its state is the fold of the log: also which regions were down, and of which attempt the others are."""
    job = Regions()
    job.lose(A0)
    job.restart()
    job.ready(A0)
    job.lose(C)
    stored = decode(encode(job.state))
    assert isinstance(stored, CoordinatorState)
    assert stored == job.state
    job.machine = CoordinatorMachine(stored)
    assert only(job.restart(), do.DeployAttempt)[0].tasks == (B, C)
    assert job.attempts() == [1, 0, 2, 2]


def test_an_older_fold_restarts_as_a_whole() -> None:
    """It says nothing of what is down, and a job restarted as a whole."""
    job = Regions(replace(JOB, failover=FailoverStrategy.FULL))
    job.lose(A0)
    job.state.down = {}
    (deploy,) = only(job.restart(), do.DeployAttempt)
    assert deploy.tasks is None
    assert kinds(job.ready(*JOB.tasks))[0] == "StartTasks"


def test_what_runs_is_not_deployed_a_second_time() -> None:
    """Nor is a channel cut: the last look before tasks are deployed."""
    job = Regions()
    with pytest.raises(InvariantError, match="not deployed again"):
        invariants.check_deployed(job.state, (A0,))
    job.state.stop((B, C))
    invariants.check_deployed(job.state, (B, C))
    with pytest.raises(InvariantError, match="are deployed together"):
        invariants.check_deployed(job.state, (B,))
    with pytest.raises(InvariantError, match="no task is stopped"):
        invariants.check_state(job.state)
