"""What a job says of itself before its tasks run: what is the case, and at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from tidegate.actors.coordinator.coordinator_state import CoordinatorState, JobStatus
from tidegate.actors.ray import ray_job
from tidegate.actors.ray.ray_job import RayJob
from tidegate.actors.runtimes.running_job import JobCard, not_taken, progress_of
from tidegate.protocol.identity import TaskId
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import JobId, VertexId


@pytest.mark.parametrize("status", list(JobStatus))
def test_a_job_is_called_what_it_is(status: JobStatus) -> None:
    """Only one that ends is still called running: what is told of it is its end."""
    state = CoordinatorState()
    state.status = status
    expected = "running" if status is JobStatus.ENDING else status.value
    assert progress_of(state, {}).status == expected


class Deploys:
    """A task during whose look the coordinator deploys another one, as its own thread may."""

    def __init__(self, state: CoordinatorState) -> None:
        self._state = state

    @property
    def vertex(self) -> VertexId:
        """The vertex, after the other task was deployed."""
        self._state.rows_before[TaskId(VertexId("rows"), len(self._state.rows_before))] = 7
        return VertexId("rows")


def test_progress_is_read_while_tasks_are_deployed() -> None:
    """The driver's call gets what is there, and does not fail because a dictionary has grown."""
    state = CoordinatorState()
    state.rows_before[cast(TaskId, Deploys(state))] = 3
    state.rows_before[cast(TaskId, Deploys(state))] = 4
    assert progress_of(state, {}).rows_before == {"rows": 7}
    assert len(state.rows_before) > 2


class SlowRay:
    """Ray, with a coordinator that does not answer before it is told to. No call may wait."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Any = None

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        """Whether the answer is there."""
        assert timeout < 1
        return (references, []) if self.answer is not None else ([], references)

    def get(self, reference: Any, timeout: float) -> Any:
        """Only an answer that is there may be taken."""
        assert self.answer is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def view(self, wait_s: float) -> str:
        """A call."""
        self.calls += 1
        return "reference"


def test_a_coordinator_that_is_starting_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is created until the coordinator tells otherwise; one call is under way at a time."""
    slow = SlowRay()
    monkeypatch.setattr(ray_job, "ray", slow)
    coordinator = SimpleNamespace(view=SimpleNamespace(remote=slow.view))
    card = JobCard(JobId("job-1"), "job", "memory://nothing", None, False, 0)
    job: Any = RayJob(card, coordinator, None, range(0), open_store)
    assert [job.progress().status for _ in range(3)] == ["created"] * 3
    assert slow.calls == 1

    state = CoordinatorState()
    state.status = JobStatus.DEPLOYING
    slow.answer = ray_job.JobView(progress_of(state, {}), True, False, None, None)
    assert job.progress().status == "deploying"


def test_a_job_whose_coordinator_is_lost_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tasks go on, so nothing has restarted as far as anybody knows; that nobody can be asked is told beside it."""
    slow = SlowRay()
    monkeypatch.setattr(ray_job, "ray", slow)
    coordinator = SimpleNamespace(view=SimpleNamespace(remote=slow.view))
    card = JobCard(JobId("job-1"), "job", "memory://nothing", None, False, 0)
    job: Any = RayJob(card, coordinator, None, range(0), open_store)
    state = CoordinatorState()
    state.status = JobStatus.RUNNING

    def told(answer: Any) -> tuple[str, bool]:
        slow.answer = answer
        progress = job.progress()
        return progress.status, progress.coordinator_answers

    there = ray_job.JobView(progress_of(state, {}), True, False, None, None)
    replaying = ray_job.JobView(progress_of(CoordinatorState(), {}), False, False, None, None)
    assert told(there) == ("running", True)
    assert told(RayActorError()) == ("running", False)
    assert told(replaying) == ("running", False)
    assert told(None) == ("running", False)
    assert told(there) == ("running", True)


@pytest.mark.parametrize(
    ("kind", "why", "told"),
    [
        (SnapshotKind.SUSPEND, "a task declined: map[0]: full", "full; the job continues"),
        (SnapshotKind.SUSPEND, "the attempt failed: boom", "newest checkpoint and continues: request it again"),
        (SnapshotKind.TERMINATE, "the job is ending: boom", "the job is ending: boom"),
        (SnapshotKind.TERMINATE, "not all required tasks are running: the job is finished", "the job is finished"),
        (SnapshotKind.TERMINATE, "its metadata could not be written: storage is away", "storage is away"),
        (SnapshotKind.SAVEPOINT, "a task declined: map[0]: full", "map[0]: full"),
        (SnapshotKind.CHECKPOINT, None, "None"),
    ],
)
def test_who_is_refused_a_stop_hears_whether_the_job_goes_on(kind: SnapshotKind, why: str | None, told: str) -> None:
    """Else they would take it for stopped, or start it a second time."""
    assert str(not_taken(kind, why)).endswith(told)
