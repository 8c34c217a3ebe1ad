"""Questions of the driver to a coordinator on Ray whose replies get lost; without Ray."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from tidegate.actors.coordinator.checkpoint_statistics import CheckpointStatistics
from tidegate.actors.coordinator.coordinator_state import CoordinatorState
from tidegate.actors.ray import coordinator_status as ray_answers
from tidegate.actors.ray import ray_job
from tidegate.actors.ray.coordinator_status import LOST, Answers, JobView
from tidegate.actors.ray.ray_job import RayJob
from tidegate.actors.runtimes.running_job import Answer, JobCard, JobProgress, SnapshotRequest, progress_of
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.errors import CheckpointError, JobFailedError
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import CheckpointId, JobId

DONE = Answer(CheckpointId(7), None, "memory://savepoint")
RUNNING = replace(progress_of(CoordinatorState(), {}), status="running")
Reply = Callable[[], object]


@dataclass
class Coordinator:
    """An actor whose replies are those of a script, by method; the last one goes on."""

    replies: dict[str, list[Reply]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: (name, arguments))

    def reply(self, call: tuple[str, tuple[object, ...]], timeout: float) -> object:
        """In place of `ray.get`."""
        name, _ = call
        self.asked.append(name)
        script = self.replies[name]
        return (script.pop(0) if len(script) > 1 else script[0])()


def view(progress: JobProgress = RUNNING, **ended: Any) -> Reply:
    """A reply to `view`."""
    return lambda: JobView(progress, True, bool(ended), None, **ended)


def lost() -> object:
    """A reply that does not come."""
    raise GetTimeoutError("no reply")


def gone() -> object:
    """The actor was let go."""
    raise ActorDiedError()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> tuple[RayJob, Coordinator]:
    """A job and its coordinator."""
    coordinator = Coordinator({"view": [view()], "request": [lambda: None]})
    monkeypatch.setattr(ray_job, "RETRY_STEP_S", 0.0)
    monkeypatch.setattr(ray_job.ray, "get", coordinator.reply)
    monkeypatch.setattr(ray_job.ray, "kill", lambda actor, no_restart: None)
    context = SimpleNamespace(release=lambda: None)
    card = JobCard(JobId("job-1"), "job", "memory://nothing", None, False, 0)
    return RayJob(card, coordinator, context, range(0), open_store), coordinator  # type: ignore[arg-type]


def test_an_answer_stays_after_it_was_given() -> None:
    """Its reply may get lost: the savepoint was taken all the same."""
    answers = Answers()
    assert answers.expect("request")
    assert not answers.expect("request"), "asked again, it is the same request"
    assert answers.wait("request", 0) is None
    answers.give("request", DONE)
    answers.give("request", LOST)
    assert [answers.wait("request", 0) for _ in range(2)] == [DONE, DONE]
    assert answers.given() == {"request": DONE}


def test_the_oldest_answers_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that nobody asks for any more; requests without an answer stay."""
    monkeypatch.setattr(ray_answers, "KEPT_MAX", 2)
    answers = Answers()
    answers.expect("pending")
    for name in "abc":
        answers.expect(name)
        answers.give(name, DONE)
    answers.expect("d")
    assert [name for name in ("pending", *"abcd") if answers.has(name)] == ["pending", "b", "c", "d"]
    assert answers.wait("a", 0) == LOST


def test_what_a_predecessor_has_decided_is_the_answer() -> None:
    """And what it has left open is answered later."""
    answers = Answers()
    answers.inherit({"over": DONE, "open": None})
    assert answers.wait("over", 0) == DONE
    assert answers.wait("open", 0) is None


def test_a_driver_whose_reply_gets_lost_asks_again(job: tuple[RayJob, Coordinator]) -> None:
    """It gets the answer that was given."""
    handle, coordinator = job
    coordinator.replies["request"] = [lost, lambda: None]
    coordinator.replies["answer"] = [lambda: None, lost, lambda: DONE]
    assert handle.request(SnapshotRequest(SnapshotKind.SAVEPOINT), 60) == DONE


def test_an_answer_that_comes_with_the_end_is_not_lost(job: tuple[RayJob, Coordinator]) -> None:
    """Another thread hears the end of the job, and lets the coordinator go before this one has its answer."""
    handle, coordinator = job
    asked: list[tuple[object, ...]] = []

    def remember(*arguments: object) -> tuple[str, tuple[object, ...]]:
        asked.append(arguments)
        return "request", arguments

    handle._coordinator = SimpleNamespace(
        request=SimpleNamespace(remote=remember), view=coordinator.view, answer=coordinator.answer
    )

    def end_meanwhile() -> object:
        finished = replace(RUNNING, status="suspended")
        answers = {asked[0][0]: DONE}
        coordinator.replies["view"] = [view(finished, statistics=CheckpointStatistics(), answers=answers)]
        waiter = threading.Thread(target=handle.wait, args=(60,))
        waiter.start()
        waiter.join()
        return gone()

    coordinator.replies["answer"] = [end_meanwhile]
    assert handle.request(SnapshotRequest(SnapshotKind.SUSPEND), 60) == DONE


def test_a_request_that_the_end_of_the_job_has_overtaken_says_so(job: tuple[RayJob, Coordinator]) -> None:
    """Nobody waits for it."""
    handle, coordinator = job
    finished = replace(RUNNING, status="finished")
    coordinator.replies["view"] = [view(finished, statistics=CheckpointStatistics())]
    with pytest.raises(CheckpointError, match="no savepoint was taken: the job is finished"):
        handle.request(SnapshotRequest(SnapshotKind.SAVEPOINT), 60)


def restarting() -> object:
    """Ray looks for a place for the actor."""
    raise ActorUnavailableError("The actor is temporarily unavailable", None)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (lost, "for 120 s (Ray does not report that its process has ended, and it answers no call: it hangs or is"),
        (restarting, "for 600 s (the connection to it broke"),
    ],
)
def test_a_driver_does_not_wait_for_ever_for_a_silent_coordinator(
    reply: Reply, said: str, job: tuple[RayJob, Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`wait` raises an error that names how the coordinator is silent. Another call waits on."""
    handle, coordinator = job
    clock = iter(range(0, 100_000, 100))
    monkeypatch.setattr(ray_job.time, "monotonic", lambda: next(clock))
    finished = replace(RUNNING, status="finished")
    coordinator.replies["view"] = [reply]
    with pytest.raises(JobFailedError, match=re.escape(f"has not answered {said}")):
        handle.wait(None)
    coordinator.replies["view"] = [view(finished, statistics=CheckpointStatistics())]
    assert handle.wait(None) == finished
