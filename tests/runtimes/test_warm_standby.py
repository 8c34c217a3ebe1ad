"""A spare process that follows the subtasks of a worker: what it takes in, and to whom it gives it. Without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_fakes import FIRST, SINK, SOURCE, TIMEOUT_S, Actor, Process, task_processes
from waiting import until

from tidegate.actors.coordinator.job_spec import RestorePoint
from tidegate.actors.ray import warm_standby, worker_actor
from tidegate.actors.ray.task_deployment import Peer, TaskDeployment
from tidegate.protocol.identity import TaskId
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId


def at(checkpoint_id: int) -> RestorePoint:
    """A checkpoint of the job."""
    return RestorePoint("root", JobId("job-12345678"), CheckpointId(checkpoint_id), final=False)


class Follower:
    """Takes its time over each checkpoint, as a test says."""

    made: list[Follower]

    def __init__(self, task: TaskId, *_: object) -> None:
        self.task = task
        self.checkpoint_id: int | None = None
        self.begun: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.closed = False
        Follower.made.append(self)

    def follow(self, restore: RestorePoint) -> None:
        self.begun.append(restore.checkpoint_id)
        assert self.may_end.acquire(timeout=TIMEOUT_S)
        self.checkpoint_id = restore.checkpoint_id

    def take(self, restore: RestorePoint) -> dict[Any, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Process]]:
    """Makes the process of a task of source -> sink."""
    Follower.made = []
    monkeypatch.setattr(warm_standby, "StateFollower", Follower)
    with task_processes(monkeypatch) as make:
        yield make


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Who has held the state of the tasks that begin."""
    given: list[object] = []
    module: Any = worker_actor
    make_effects = module.TaskEffects

    def effects(*arguments: Any, **named: Any) -> Any:
        given.append(arguments[-1])
        return make_effects(*arguments, **named)

    monkeypatch.setattr(module, "TaskEffects", effects)
    return given


@pytest.fixture
def spare(process: Callable[[TaskId], Process]) -> worker_actor.WorkerProcess:
    """A process without a task."""
    return worker_actor.WorkerProcess(process(SINK).actor.context, Actor(), open_store)


def test_of_checkpoints_that_complete_meanwhile_the_newest_counts(spare: worker_actor.WorkerProcess) -> None:
    """One is taken in after the other; and it says how far it is."""
    assert spare.held().follows == {}
    spare.follow(SINK, at(1))
    until("it reads", lambda: bool(Follower.made and Follower.made[0].begun))
    for number in (2, 3):
        spare.follow(SINK, at(number))
    assert spare.held().follows == {SINK: None}
    (follower,) = Follower.made
    for _ in range(2):
        follower.may_end.release()
    until("the newest", lambda: spare.held().follows == {SINK: 3})
    assert follower.begun == [1, 3]


@pytest.mark.parametrize("task", [SINK, SOURCE])
def test_a_task_gets_what_was_held_for_it(spare: worker_actor.WorkerProcess, given: list[object], task: TaskId) -> None:
    """Another one gets nothing, and what was held goes. A process that has a task follows nobody."""
    spare.follow(SINK, at(1))
    until("it follows", lambda: spare.held().follows)
    (follower,) = Follower.made
    follower.may_end.release()
    neighbour = SOURCE if task == SINK else SINK
    spare.deploy(TaskDeployment((task,), FIRST, None, {neighbour: Peer(Actor(), "peer", "node", b"")}))
    until("it has a task", lambda: task in spare.worker.subtasks)
    assert spare.held().follows == {}
    assert (follower in given, follower.closed) == (task == SINK, task == SOURCE)
    spare.follow(SOURCE, at(2))
    spare.drop((task,), AttemptNumber(1_000))
    assert spare.held().follows == {}


def test_all_subtasks_of_a_worker_are_followed(spare: worker_actor.WorkerProcess) -> None:
    """One after the other: however fast checkpoints of one complete, the other one has its turn."""
    for task, number in ((SINK, 1), (SOURCE, 1), (SINK, 2)):
        spare.follow(task, at(number))
    until("it follows both", lambda: spare.held().follows == {SINK: None, SOURCE: None})
    sink, source = Follower.made
    sink.may_end.release()
    until("it reads for the other one", lambda: source.begun == [1])
    assert sink.begun == [1]
    for one in (sink, source):
        one.may_end.release()
    until("it holds the state of both", lambda: spare.held().follows == {SINK: 2, SOURCE: 1})
    assert (sink.begun, source.begun) == ([1, 2], [1])


def test_each_subtask_of_a_worker_gets_what_was_held_for_it(
    spare: worker_actor.WorkerProcess, given: list[object]
) -> None:
    """All of them, with one order. Of one that is not in the order what was held goes."""
    for task in (SINK, SOURCE):
        spare.follow(task, at(1))
    until("it follows both", lambda: len(spare.held().follows) == 2)
    sink, source = Follower.made
    for one in (sink, source):
        one.may_end.release()
    until("it holds the state of both", lambda: spare.held().follows == {SINK: 1, SOURCE: 1})
    spare.deploy(TaskDeployment((SOURCE, SINK), FIRST, None, {}))
    until("it runs both", lambda: len(spare.worker.subtasks) == 2)
    assert given[-2:] == [source, sink]
    assert (sink.closed, source.closed, spare.held().follows) == (False, False, {})
    spare.drop((SOURCE, SINK), AttemptNumber(1_000))
