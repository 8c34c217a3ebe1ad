"""What stands in for Ray: calls of actors that end when a test says so, a job of two tasks, and their processes."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa
import pytest
from waiting import received, watched

from tidegate.actors.coordinator import events as co
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.slot_plan import WorkerId
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.ray import actor_calls as deliveries
from tidegate.actors.ray import actor_calls as ray_calls
from tidegate.actors.ray import worker_actor as ray_worker
from tidegate.actors.ray.actor_calls import Ended, Outcome, Report
from tidegate.actors.ray.health_endpoint import ProcessInfo
from tidegate.actors.ray.task_deployment import Peer, TaskDeployment
from tidegate.actors.task import events as ev
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.functions.batch_functions import MapBatches
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.protocol.stream_elements import Element, EndOfPartition
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId, OperatorUid, SubtaskIndex, VertexId

R = TypeVar("R")
Function = Callable[[pa.RecordBatch], pa.RecordBatch]

TIMEOUT_S = 240.0
FIRST, LAST_ATTEMPT, LAST_GENERATION = AttemptNumber(0), AttemptNumber(1_000), Generation(1_000)
CHECKPOINT = CheckpointId(1)
SOURCE, SINK = (TaskId(VertexId(name), SubtaskIndex(0)) for name in ("source", "sink"))
SOURCE_WORKER, SINK_WORKER = (WorkerId(str(task.vertex), 0) for task in (SOURCE, SINK))
"""The workers of the two where they share no slot."""
ROWS = pa.record_batch({"k": pa.array(range(1_000), pa.int64())})


@dataclass
class Reference:
    """An object reference whose call ends when the test says so."""

    call: Future[Any] = field(default_factory=Future)

    def future(self) -> Future[Any]:
        return self.call


@dataclass
class LaterMailbox:
    """A mailbox that does everything at once, and what is due later when the test says so."""

    later: list[Callable[[], object]] = field(default_factory=list)

    def post(self, action: Callable[[], object]) -> None:
        action()

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        self.later.append(action)

    def pass_time(self) -> None:
        """Do what was due later."""
        due, self.later = self.later, []
        for action in due:
            action()


@dataclass
class Method:
    """A method of an actor: calls are kept, with their arguments."""

    calls: queue.SimpleQueue[tuple[Future[Any], tuple[Any, ...]]] = field(default_factory=queue.SimpleQueue)
    answers: bool = False

    names: list[str] = field(default_factory=list)
    """Those that calls were given."""

    def options(self, num_returns: int = 1, name: str | None = None) -> Method:
        if name is not None:
            self.names.append(name)
        return self

    def remote(self, *arguments: object) -> Reference:
        reference = Reference()
        if self.answers:
            reference.call.set_result(None)
        self.calls.put((reference.call, arguments))
        return reference

    def received(self) -> tuple[Future[Any], tuple[Any, ...]]:
        """Wait for the next call. Returns what ends it, and its arguments."""
        return received("a call", self.calls)


class Reports:
    """The method of a coordinator that takes reports, one by one for the test. Answers at once."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._failure: str | None = None

    def remote(self, reports: tuple[Report, ...]) -> Reference:
        for report in reports:
            if isinstance(report, Ended) and report.outcome.kind == "failed":
                self._failure = f"a task has failed: {report.outcome.reason}"
            self.calls.put(report)
        reference = Reference()
        reference.call.set_result(None)
        return reference

    def failure(self) -> str | None:
        """Return why an attempt has failed, or None."""
        return self._failure

    def received(self) -> Report:
        """Wait for the next report."""
        return received("a report", self.calls)

    def so_far(self) -> list[Report]:
        """Return what has been reported since somebody has looked."""
        return [self.calls.get_nowait() for _ in range(self.calls.qsize())]


def source_to_sink(
    function: Function = lambda batch: batch, resources: Resources | None = None, slot_sharing: bool = False
) -> tuple[MemorySource, JobGraph]:
    """A source of `ROWS`, and a graph in which it sends them to a sink by key, which calls the function.

    With `resources` the sink has slots of its own. Without `slot_sharing` each of the two has a process of its own.
    """
    source = MemorySource.of(ROWS, 1)
    rows = StreamNode(OperatorUid("source"), "source", 1, source.schema, source=source)
    by_key = Partitioning(PartitioningKind.HASH, ("k",))
    sink = StreamNode(
        OperatorUid("sink"),
        "sink",
        1,
        None,
        factory=lambda: MapBatches(function),
        inputs=((rows, by_key),),
        resources=resources,
    )
    return source, replace(translate([rows, sink]), slot_sharing=slot_sharing)


@dataclass
class Actor:
    """A handle of another process of the job."""

    frame: Method = field(default_factory=Method)
    no_link: Method = field(default_factory=Method)
    credit: Method = field(default_factory=Method)
    report: Reports = field(default_factory=Reports)
    counted: Method = field(default_factory=Method)
    live: Method = field(default_factory=Method)
    membership: Method = field(default_factory=Method)


class Process:
    """A worker's process with one task or both, and the process of the other task."""

    def __init__(self, context: JobContext, *tasks: TaskId) -> None:
        """`tasks`: what it runs. The first one is what `tell`, `running` and `over` are about."""
        self.coordinator, self.peer = Actor(), Actor()
        watched.add(self.coordinator.report.failure)
        self.task, self.tasks = tasks[0], tasks
        self._outcomes: dict[tuple[TaskId, AttemptNumber], Outcome] = {}
        self.actor = ray_worker.WorkerProcess(context, self.coordinator, open_store)
        others = {task: self.as_peer for task in (SOURCE, SINK) if task not in tasks}
        self.order = TaskDeployment(tasks, FIRST, None, others)
        self.actor.deploy(self.order)

    @property
    def as_peer(self) -> Peer:
        """How the process of the other task is reached: by calls alone, it does not listen."""
        return Peer(self.peer, "peer", "node", b"")

    @property
    def running(self) -> Any:
        """The task that runs, or None."""
        return self.actor.worker.subtasks.get(self.task)

    @property
    def runs(self) -> tuple[TaskId, ...]:
        """The tasks that run, once all that was sent has been taken in."""
        self.settle()
        return tuple(self.actor.worker.subtasks)

    def tell(self, event: ev.TaskEvent, attempt: AttemptNumber = FIRST) -> None:
        """The coordinator sends the task an event."""
        self.tell_all(event, self.task, attempt=attempt)

    def tell_all(self, event: ev.TaskEvent, *tasks: TaskId, attempt: AttemptNumber = FIRST) -> None:
        """The coordinator sends these tasks an event, with one message."""
        self.actor.deliver(tuple((task, attempt, event) for task in tasks or self.tasks))

    def drop(self, attempt: AttemptNumber, generation: Generation = ev.UNFENCED) -> None:
        """The coordinator stops an attempt of all tasks."""
        self.actor.drop(self.tasks, attempt, generation)

    def start(self) -> Process:
        """Wait until all tasks are ready, and let them begin."""
        for _ in self.tasks:
            self.await_report(co.TaskReady)
        self.tell_all(ev.TasksStarted(0))
        return self

    def await_report(self, kind: type[R]) -> R:
        """Wait until the task reports this."""
        while True:
            report = self.coordinator.report.received()
            if isinstance(report, kind):
                return report

    def await_last_frame(self) -> Future[None]:
        """Wait until the task has sent the end; its call is still on its way."""
        while True:
            call, (_, elements) = self.peer.frame.received()
            if isinstance(elements[-1], EndOfPartition):
                return call
            call.set_result(None)

    def take_checkpoint(self) -> None:
        """Trigger one and complete it."""
        self.tell(ev.CheckpointTriggered(0, FIRST, CHECKPOINT, 0))
        self.await_report(co.CheckpointAcknowledged)
        self.tell(ev.CheckpointCompleted(0, FIRST, CHECKPOINT))

    def settle(self) -> None:
        """Wait until all that was sent has been taken in, and what that brought about as well."""
        for _ in range(3):
            done = threading.Event()
            self.actor.mailbox.post(done.set)
            assert done.wait(TIMEOUT_S)

    @property
    def over(self) -> bool:
        """Whether the end of an attempt is reported, or was."""
        self.settle()
        return self.task in self.actor.ended

    def outcome(self, attempt: AttemptNumber = FIRST) -> Outcome:
        """Wait for the end of an attempt of a task. If it has failed, that ends no waits any more."""
        watched.remove(self.coordinator.report.failure)
        while True:
            report = self.coordinator.report.received()
            if isinstance(report, Ended):
                self._outcomes[report.task, report.attempt] = report.outcome
                if report.attempt == attempt:
                    return report.outcome

    def outcome_of(self, task: TaskId, attempt: AttemptNumber = FIRST) -> Outcome:
        """Wait for the end of an attempt of this task."""
        while (task, attempt) not in self._outcomes:
            self.outcome(attempt)
        return self._outcomes[task, attempt]

    def receive(self, first_sequence: int, *elements: Element) -> None:
        """A frame of the source comes in."""
        self.actor.frame((FIRST, 0, 0, 0, first_sequence), elements)


@contextmanager
def task_processes(
    monkeypatch: pytest.MonkeyPatch, function: Function = lambda batch: batch
) -> Iterator[Callable[..., Process]]:
    """Makes processes of tasks of source -> sink(function) whose calls are given up at once when they are lost."""
    for module in (ray_calls, deliveries):
        monkeypatch.setattr(module, "LOST_CALL_GRACE_MS", 0)
    for costly in ("keep_freed_memory", "close_sockets_in_children"):
        monkeypatch.setattr(ray_worker, costly, lambda *_: None)
    monkeypatch.setattr(
        ray_worker.WorkerProcess,
        "info",
        lambda self: ProcessInfo(1, "node", actor_id=f"{id(self):x}", address=self.address),
    )
    source, graph = source_to_sink(function)
    root = open_store(f"memory://{uuid.uuid4().hex}")
    splits = {OperatorUid("source"): tuple(SplitPosition(split) for split in source.splits())}
    options = DataPlaneOptions(BufferLimits(credit_bytes=1_000), sockets=True)
    context = JobContext(JobId("job-12345678"), "job", root.url, graph, splits, options)
    made: list[Process] = []

    def make(*tasks: TaskId) -> Process:
        made.append(Process(context, *tasks))
        return made[-1]

    yield make
    for one in made:
        # A task that went on would count its rows while another test has broken that, and end this whole process.
        one.drop(LAST_ATTEMPT, LAST_GENERATION)
        assert not one.actor.worker.subtasks
    root.delete_tree("")
