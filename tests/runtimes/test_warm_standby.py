"""A spare process that follows a task: what it takes in, and to whom it gives it. Without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_fakes import FIRST, SINK, SOURCE, TIMEOUT_S, Actor, Process, task_processes
from waiting import until

from tidegate.actors.coordinator.job.job_spec import RestorePoint
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.runtimes.ray.process.orders import Order
from tidegate.actors.runtimes.ray.task import task_actor, warm_standby
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
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TaskId], Process]]:
    """Makes the process of a task of source -> sink."""
    Follower.made = []
    monkeypatch.setattr(warm_standby, "StateFollower", Follower)
    with task_processes(monkeypatch) as make:
        yield make


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Who has held the state of the tasks that begin."""
    given: list[object] = []
    module: Any = task_actor
    make_effects = module.TaskEffects

    def effects(*arguments: Any, **named: Any) -> Any:
        given.append(arguments[-1])
        return make_effects(*arguments, **named)

    monkeypatch.setattr(module, "TaskEffects", effects)
    return given


@pytest.fixture
def spare(process: Callable[[TaskId], Process]) -> task_actor.TaskProcess:
    """A process without a task."""
    return task_actor.TaskProcess(process(SINK).actor._context, Actor(), open_store)


def test_of_checkpoints_that_complete_meanwhile_the_newest_counts(spare: task_actor.TaskProcess) -> None:
    """One is taken in after the other; and it says how far it is."""
    assert spare.held().follows is None
    spare.follow(SINK, at(1))
    until("it reads", lambda: bool(Follower.made and Follower.made[0].begun))
    for number in (2, 3):
        spare.follow(SINK, at(number))
    assert spare.held().follows == (SINK, None)
    (follower,) = Follower.made
    for _ in range(2):
        follower.may_end.release()
    until("the newest", lambda: spare.held().follows == (SINK, 3))
    assert follower.begun == [1, 3]


@pytest.mark.parametrize("task", [SINK, SOURCE])
def test_a_task_gets_what_was_held_for_it(spare: task_actor.TaskProcess, given: list[object], task: TaskId) -> None:
    """Another one gets nothing, and what was held goes. A process that has a task follows nobody."""
    spare.follow(SINK, at(1))
    until("it follows", lambda: spare.held().follows is not None)
    (follower,) = Follower.made
    follower.may_end.release()
    neighbour = SOURCE if task == SINK else SINK
    spare.deploy(Order(task, FIRST, None, {neighbour: Actor()}))
    until("it has a task", lambda: spare._running is not None)
    assert spare.held().follows is None
    assert (follower in given, follower.closed) == (task == SINK, task == SOURCE)
    spare.follow(SOURCE, at(2))
    spare.drop(AttemptNumber(1_000))
    assert spare.held().follows is None


def test_who_is_to_follow_another_task_lets_go_of_the_first(spare: task_actor.TaskProcess) -> None:
    """There is room for one."""
    spare.follow(SINK, at(1))
    spare.follow(SOURCE, at(1))
    until("it follows the other one", lambda: spare.held().follows == (SOURCE, None))
    first, second = Follower.made
    assert first.closed
    for one in (first, second):
        one.may_end.release()
    until("it holds that", lambda: spare.held().follows == (SOURCE, 1))
