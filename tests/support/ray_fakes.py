"""What stands in for Ray: calls of actors that end when a test says so, a job of two tasks, and their processes."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from waiting import received, watched

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.resources import Resources
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.hosts.job_context import DataPlaneOptions, JobContext
from tidegate.actors.operators.batches.map_and_filter import MapBatches
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.partitioning import Partitioning, PartitioningKind
from tidegate.actors.protocol.stream_elements import Element, EndOfPartition
from tidegate.actors.runtimes.ray.process import calls as ray_calls
from tidegate.actors.runtimes.ray.process.orders import Order
from tidegate.actors.runtimes.ray.process.outcomes import Outcome, Outcomes
from tidegate.actors.runtimes.ray.process.process_info import ProcessInfo
from tidegate.actors.runtimes.ray.task import deliveries
from tidegate.actors.runtimes.ray.task import task_actor as ray_task
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.actors.task.channels.output_gate import BufferLimits
from tidegate.actors.task.messages import events as ev
from tidegate.actors.task.pipeline.split_positions import SplitPosition
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.ids import AttemptNumber, CheckpointId, Generation, JobId, OperatorUid, SubtaskIndex, VertexId

Function = Callable[[pa.RecordBatch], pa.RecordBatch]

TIMEOUT_S = 240.0
FIRST, LAST_ATTEMPT, LAST_GENERATION = AttemptNumber(0), AttemptNumber(1_000), Generation(1_000)
CHECKPOINT = CheckpointId(1)
SOURCE, SINK = (TaskId(VertexId(name), SubtaskIndex(0)) for name in ("source", "sink"))
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


class WatchedOutcomes(Outcomes):
    """Ends waits of the test when an attempt has failed that no later one has replaced."""

    def __init__(self) -> None:
        super().__init__()
        watched.add(self.failure)

    def failure(self) -> str | None:
        """Return why an attempt has failed, or None."""
        ended = [future.result() for future in list(self._futures.values()) if future.done()]
        return next((f"a task has failed: {each.reason}" for each in ended if each.kind == "failed"), None)


def source_to_sink(
    function: Function = lambda batch: batch, resources: Resources | None = None
) -> tuple[MemorySource, JobGraph]:
    """A source of `ROWS`, and a graph in which it sends them to a sink by key, which calls the function.

    With `resources` the sink has slots of its own.
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
    return source, translate([rows, sink])


@dataclass
class Actor:
    """A handle of another process of the job."""

    frame: Method = field(default_factory=Method)
    offer: Method = field(default_factory=Method)
    credit: Method = field(default_factory=Method)
    report: Method = field(default_factory=lambda: Method(answers=True))
    counted: Method = field(default_factory=Method)
    live: Method = field(default_factory=Method)
    knows: Method = field(default_factory=Method)


class Process:
    """A task's process with its neighbours."""

    def __init__(self, context: JobContext, task: TaskId) -> None:
        self.coordinator, self.peer = Actor(), Actor()
        self.actor = ray_task.TaskProcess(context, self.coordinator, open_store)
        neighbour = SINK if task == SOURCE else SOURCE
        self.order = Order(task, FIRST, None, {neighbour: self.peer})
        self.actor.deploy(self.order)

    def start(self) -> Process:
        """Wait until the task is ready, and let it begin."""
        self.await_report(co.TaskReady)
        self.actor.tell(FIRST, ev.TasksStarted(0))
        return self

    def await_report(self, kind: type[co.CoordinatorEvent]) -> None:
        """Wait until the task reports this."""
        while not isinstance(self.coordinator.report.received()[1][0], kind):
            pass

    def await_last_frame(self) -> Future[None]:
        """Wait until the task has sent the end; its call is still on its way."""
        while True:
            call, (_, elements) = self.peer.frame.received()
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
        """Wait for the end of the attempt. If it has failed, that ends no waits any more."""
        watched.remove(self.actor._outcomes.failure)
        ended: Future[Outcome] = Future()
        threading.Thread(target=lambda: ended.set_result(self.actor.run(FIRST)), daemon=True).start()
        return ended.result(TIMEOUT_S)

    def receive(self, first_sequence: int, *elements: Element) -> None:
        """A frame of the source comes in."""
        self.actor.frame((FIRST, 0, 0, 0, first_sequence), elements)


@contextmanager
def task_processes(
    monkeypatch: pytest.MonkeyPatch, function: Function = lambda batch: batch
) -> Iterator[Callable[[TaskId], Process]]:
    """Makes processes of tasks of source -> sink(function) whose calls are given up at once when they are lost."""
    for module in (ray_calls, deliveries):
        monkeypatch.setattr(module, "LOST_CALL_GRACE_MS", 0)
    for costly in ("prepare", "close_sockets_in_children"):
        monkeypatch.setattr(ray_task, costly, lambda *_: None)
    monkeypatch.setattr(ray_task, "Outcomes", WatchedOutcomes)
    monkeypatch.setattr(ray_task.TaskProcess, "info", lambda self: ProcessInfo(1, "node"))
    source, graph = source_to_sink(function)
    root = open_store(f"memory://{uuid.uuid4().hex}")
    splits = {OperatorUid("source"): tuple(SplitPosition(split) for split in source.splits())}
    options = DataPlaneOptions(BufferLimits(credit_bytes=1_000), sockets=True)
    context = JobContext(JobId("job-12345678"), "job", root.url, graph, splits, options)
    made: list[Process] = []

    def make(task: TaskId) -> Process:
        made.append(Process(context, task))
        return made[-1]

    yield make
    for one in made:
        # A task that went on would count its rows while another test has broken that, and end this whole process.
        one.actor.drop(LAST_ATTEMPT, LAST_GENERATION)
        assert one.actor._running is None
    root.delete_tree("")
