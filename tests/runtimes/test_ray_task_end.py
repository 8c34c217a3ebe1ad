"""The process of a task on Ray, without Ray: when its task is over, and whose loss matters to it."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from ray_fakes import ROWS, SINK, SOURCE, Method, source_to_sink

from tidegate.actors.coordinator import events as co
from tidegate.actors.elements import Element, EndOfData, EndOfPartition
from tidegate.actors.identity import TaskId
from tidegate.actors.runtimes import ray_calls, ray_task
from tidegate.actors.runtimes.context import DataPlaneOptions, JobContext
from tidegate.actors.runtimes.ray_outcomes import Outcome
from tidegate.actors.task import events as ev
from tidegate.actors.task.outputs import BufferLimits
from tidegate.actors.task.source import SplitPosition
from tidegate.storage.filesystem import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, JobId, OperatorUid

TIMEOUT_S = 120.0
FIRST = AttemptNumber(0)
CHECKPOINT = CheckpointId(1)


@dataclass
class Actor:
    """A handle of another process of the job."""

    frame: Method = field(default_factory=Method)
    credit: Method = field(default_factory=Method)
    report: Method = field(default_factory=lambda: Method(answers=True))
    counted: Method = field(default_factory=Method)


class Process:
    """A task's process with its neighbours."""

    def __init__(self, context: JobContext, task: TaskId) -> None:
        self.coordinator, self.peer = Actor(), Actor()
        self.actor = ray_task.TaskProcess(context, self.coordinator, open_store)
        neighbour = SINK if task == SOURCE else SOURCE
        self.actor.deploy(ray_task.Order(task, FIRST, None, {neighbour: self.peer}))
        self.await_report(co.TaskReady)
        self.actor.tell(FIRST, ev.TasksStarted(0))

    def await_report(self, kind: type[co.CoordinatorEvent]) -> None:
        """Wait until the task reports this."""
        while not isinstance(self.coordinator.report.calls.get(timeout=TIMEOUT_S)[1][0], kind):
            pass

    def await_last_frame(self) -> Future[None]:
        """Wait until the task has sent the end; its call is still on its way."""
        while True:
            call, (_, elements) = self.peer.frame.calls.get(timeout=TIMEOUT_S)
            if isinstance(elements[-1], EndOfPartition):
                return call
            call.set_result(None)

    def take_checkpoint(self) -> None:
        """Trigger one and complete it."""
        self.actor.tell(FIRST, ev.CheckpointTriggered(0, FIRST, CHECKPOINT, 0))
        self.await_report(co.CheckpointAcknowledged)
        self.actor.tell(FIRST, ev.CheckpointCompleted(0, FIRST, CHECKPOINT))

    def settle(self) -> None:
        """Wait until all that was told has been taken in, and what that brought about as well."""
        for _ in range(3):
            done = threading.Event()
            self.actor._mailbox.post(done.set)
            assert done.wait(TIMEOUT_S)

    def outcome(self) -> Outcome:
        """How the attempt has ended."""
        ended: Future[Outcome] = Future()
        threading.Thread(target=lambda: ended.set_result(self.actor.run(FIRST)), daemon=True).start()
        return ended.result(TIMEOUT_S)

    def receive(self, first_sequence: int, *elements: Element) -> None:
        """A frame of the source comes in."""
        self.actor.frame((FIRST, 0, 0, 0, first_sequence), elements)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TaskId], Process]]:
    """Makes the process of a task of source -> sink whose calls are given up at once when they are lost."""
    for module in (ray_calls, ray_task):
        monkeypatch.setattr(module, "LOST_CALL_GRACE_MS", 0)
    monkeypatch.setattr(ray_task, "warm_up", lambda: None)
    source, graph = source_to_sink()
    root = open_store(f"memory://{uuid.uuid4().hex}")
    splits = {OperatorUid("source"): tuple(SplitPosition(split) for split in source.splits())}
    options = DataPlaneOptions(BufferLimits(credit_bytes=1_000))
    context = JobContext(JobId("job-12345678"), "job", root.url, graph, splits, options)
    made: list[Process] = []

    def make(task: TaskId) -> Process:
        made.append(Process(context, task))
        return made[-1]

    yield make
    for one in made:
        one.actor.drop(FIRST)
    root.delete_tree("")


def finishing(process: Process) -> Future[None]:
    """The call that carries the last elements of a source that has finished, from its own point of view."""
    process.actor.credit((FIRST, 0, 0, 0, 1_000_000))
    process.await_report(co.TaskReachedEndOfData)
    process.take_checkpoint()
    last = process.await_last_frame()
    process.await_report(co.TaskFinished)
    process.settle()
    return last


def test_a_task_is_over_when_its_last_elements_have_arrived(process: Callable[[TaskId], Process]) -> None:
    """Until then the death of its process must fail the attempt, so what is watched has to stay pending."""
    source = process(SOURCE)
    last = finishing(source)
    assert not source.actor._outcomes.of(FIRST).done()
    last.set_result(None)
    assert Outcome("finished") == source.outcome()


def test_a_task_whose_last_elements_are_lost_has_failed(process: Callable[[TaskId], Process]) -> None:
    """Its receivers would wait for them for ever."""
    source = process(SOURCE)
    finishing(source).set_exception(ConnectionError("gone"))
    outcome = source.outcome()
    assert outcome.kind == "failed"
    assert "gone" in str(outcome.reason)


def test_credit_for_a_sender_that_has_ended_may_get_lost(process: Callable[[TaskId], Process]) -> None:
    """Who has sent everything may be gone: the receiver goes on."""
    sink = process(SINK)
    sink.receive(0, ROWS)
    credit, _ = sink.peer.credit.calls.get(timeout=TIMEOUT_S)
    sink.receive(1, EndOfData(drain=True), EndOfPartition())
    sink.await_report(co.TaskReachedEndOfData)
    credit.set_exception(ConnectionError("gone"))
    sink.settle()
    sink.take_checkpoint()
    assert Outcome("finished") == sink.outcome()


def test_credit_for_a_sender_that_goes_on_must_arrive(process: Callable[[TaskId], Process]) -> None:
    """It would wait for it for ever."""
    sink = process(SINK)
    sink.receive(0, ROWS)
    sink.peer.credit.calls.get(timeout=TIMEOUT_S)[0].set_exception(ConnectionError("gone"))
    outcome = sink.outcome()
    assert outcome.kind == "failed"
    assert "gone" in str(outcome.reason)


def test_a_frame_without_elements_is_answered_with_credit(process: Callable[[TaskId], Process]) -> None:
    """So a sender whose grant was lost asks for it; the task must not break down at that."""
    sink = process(SINK)
    sink.receive(0)
    _, (head,) = sink.peer.credit.calls.get(timeout=TIMEOUT_S)
    assert head == (FIRST, 0, 0, 0, 1_000)
