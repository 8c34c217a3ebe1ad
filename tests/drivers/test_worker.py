"""`Worker`: the subtasks of one slot, driven by hand; their hosts only note what they are made to do."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.worker import IoPool, Subtask, Transport, Worker, io_pool
from tidegate.actors.graph.job_graph import JobEdge, JobGraph, JobVertex
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber, SubtaskIndex, VertexId

SOURCE, SINK = VertexId("source"), VertexId("sink")
GRAPH = JobGraph(
    (JobVertex(SOURCE, "source", 2, ()), JobVertex(SINK, "sink", 2, ())),
    (JobEdge(0, SOURCE, SINK, Partitioning(PartitioningKind.REBALANCE)),),
)
FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)
WAIT_S = 60.0


def task_of(vertex: VertexId, index: int = 0) -> TaskId:
    """A subtask of the graph."""
    return TaskId(vertex, SubtaskIndex(index))


class Host:
    """Stands for a machine in its host. It always has something to do, unless it is made idle."""

    def __init__(self, name: str, did: list[str]) -> None:
        self.name, self.did = name, did
        self.machine = SimpleNamespace(runnable=True)
        self.finished = False
        self.turns: list[Callable[[], object]] = []
        """What the next turns do."""
        self.closed = threading.Event()
        self.closes: Callable[[], object] = lambda: None

    def turn(self) -> bool:
        """Note it, and do what was given for it."""
        self.did.append(f"turn of {self.name}")
        if self.turns:
            self.turns.pop(0)()
        return True

    def handle(self, event: Any) -> None:
        """Note it."""
        self.did.append(f"{self.name} <- {event}")

    def hand_over(self) -> dict[str, str]:
        """The state that it leaves."""
        return {"state": self.name}

    def hurry(self) -> None:
        """Note it."""
        self.did.append(f"hurry of {self.name}")

    def close(self) -> None:
        """Note it."""
        self.did.append(f"close of {self.name}")
        self.closed.set()
        self.closes()


class NotingTransport:
    """Notes what leaves the worker."""

    def __init__(self, did: list[str]) -> None:
        self.did = did

    def send(self, frame: do.SendFrame) -> None:
        """Note it."""
        self.did.append(f"sent out: {frame.first_sequence}")

    def grant(self, grant: do.GrantCredit) -> None:
        """Note it."""
        self.did.append(f"granted out: {grant.total_bytes}")


class NotingSubtask(Subtask):
    """Notes what leaves the worker."""

    def __init__(
        self, did: list[str], worker: Worker, task: TaskId, attempt: AttemptNumber, beside: Collection[TaskId]
    ) -> None:
        super().__init__(worker, task, attempt, beside)
        self.did = did

    def report(self, event: CoordinatorEvent) -> None:
        self.did.append(f"report of {self.task}")

    def connect_out(self, neighbour: TaskId) -> Transport:
        return NotingTransport(self.did)


class Runtime:
    """A worker with what a runtime does for it."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.posted: list[Callable[[], object]] = []
        self.came = threading.Condition()
        self.timers: list[tuple[int, Callable[[], object]]] = []
        self.worker = Worker(GRAPH, self)

    def post(self, action: Callable[[], object]) -> None:
        """Keep it until the test lets it run."""
        with self.came:
            self.posted.append(action)
            self.came.notify_all()

    def run_posted(self) -> None:
        """Wait until something was posted, and run all that was."""
        with self.came:
            assert self.came.wait_for(lambda: self.posted, WAIT_S)
            posted, self.posted = self.posted, []
        for action in posted:
            action()

    def call_later(self, delay_ms: int, action: Callable[[], object]) -> None:
        """Keep it."""
        self.timers.append((delay_ms, action))

    def failed(self, subtask: Subtask, error: BaseException) -> None:
        """Note it, and let go of the subtask."""
        self.did.append(f"{subtask.task.vertex} failed: {error!r}")
        subtask.retire()

    def finished(self, subtask: Subtask) -> None:
        """Note it, and let go of the subtask."""
        self.did.append(f"{subtask.task.vertex} finished")
        subtask.retire()

    def acted(self, subtask: Subtask) -> None:
        """Nothing."""

    def begin(
        self, *tasks: TaskId, attempt: AttemptNumber = FIRST, pool: IoPool | None = None
    ) -> tuple[list[NotingSubtask], list[Any]]:
        """Begin an attempt of subtasks; returns them and their hosts."""
        pool = IoPool(0, "io", lambda error: None) if pool is None else pool
        subtasks = [NotingSubtask(self.did, self.worker, task, attempt, tasks) for task in tasks]
        hosts: list[Any] = [Host(str(task.vertex), self.did) for task in tasks]
        for subtask, host in zip(subtasks, hosts, strict=True):
            subtask.begin(host, pool)
            self.worker.add(subtask)
        return subtasks, hosts


@pytest.fixture
def runtime() -> Runtime:
    """A worker without subtasks."""
    return Runtime()


def frame(number: int, receiver: int = 0, attempt: AttemptNumber = FIRST) -> do.SendFrame:
    """A frame of the first source subtask."""
    channel = ChannelId(0, SubtaskIndex(0), SubtaskIndex(receiver))
    return do.SendFrame(attempt, channel, number, ())


def grant(total_bytes: int, sender: int = 0) -> do.GrantCredit:
    """Credit of the first sink subtask."""
    return do.GrantCredit(FIRST, ChannelId(0, SubtaskIndex(sender), SubtaskIndex(0)), total_bytes, 10)


def test_subtasks_take_turns(runtime: Runtime) -> None:
    """One that always has something to do holds up no other one."""
    _, (source, sink) = runtime.begin(task_of(SOURCE), task_of(SINK))
    for _ in range(4):
        assert runtime.worker.turn()
    assert runtime.did == ["turn of source", "turn of sink"] * 2

    sink.machine.runnable = False
    runtime.did.clear()
    assert runtime.worker.turn()
    assert runtime.worker.turn()
    assert runtime.did == ["turn of source"] * 2

    source.machine.runnable = False
    assert not runtime.worker.turn()


def test_who_was_passed_over_has_the_next_turn(runtime: Runtime) -> None:
    """A subtask that gets something to do waits for one turn of each other one at most."""
    _, hosts = runtime.begin(task_of(SOURCE), task_of(SOURCE, 1), task_of(SINK))
    hosts[1].name = "other source"
    hosts[2].machine.runnable = False
    runtime.worker.turn()
    hosts[2].machine.runnable = True
    for _ in range(3):
        runtime.worker.turn()
    assert runtime.did == ["turn of source", "turn of other source", "turn of sink", "turn of source"]


def test_frames_and_credit_arrive_in_order_before_the_next_turn(runtime: Runtime) -> None:
    """What subtasks of a worker send each other does not leave it, and overtakes nothing."""
    (source, sink), hosts = runtime.begin(task_of(SOURCE), task_of(SINK))
    events: list[ev.TaskEvent] = []

    def handle(host: Host, event: ev.TaskEvent) -> None:
        events.append(event)
        runtime.did.append(f"event of {host.name}")

    for host in hosts:
        host.handle = partial(handle, host)

    def send() -> None:
        source.send_frame(frame(0))
        source.send_frame(frame(1))
        sink.grant_credit(grant(5))
        source.send_frame(frame(2))

    hosts[0].turns = [send]
    runtime.worker.turn()
    assert runtime.did == ["turn of source"]
    runtime.worker.turn()
    into_sink = "event of sink"
    assert runtime.did == ["turn of source", into_sink, into_sink, "event of source", into_sink, "turn of sink"]
    assert [event.first_sequence for event in events if isinstance(event, ev.FrameArrived)] == [0, 1, 2]
    assert [event.total_bytes for event in events if isinstance(event, ev.CreditGranted)] == [5]


def test_what_is_for_another_worker_leaves(runtime: Runtime) -> None:
    """Also if a subtask of that name runs here: it did not begin the attempt with the sender."""
    (source,), _ = runtime.begin(task_of(SOURCE))
    (sink,), _ = runtime.begin(task_of(SINK))
    source.send_frame(frame(3, receiver=0))
    source.send_frame(frame(4, receiver=1))
    sink.grant_credit(grant(5, sender=1))
    assert not runtime.worker.queue
    assert runtime.did == ["sent out: 3", "sent out: 4", "granted out: 5"]


def test_a_frame_for_another_attempt_is_dropped(runtime: Runtime) -> None:
    """One that was on its way when an attempt was replaced must not come into the next one."""
    (source, sink), _ = runtime.begin(task_of(SOURCE), task_of(SINK))
    source.send_frame(frame(0))
    assert runtime.worker.stop(task_of(SINK)) is sink
    sink.retire()
    _, (again,) = runtime.begin(task_of(SINK), attempt=SECOND)
    again.name = "sink again"
    runtime.did.clear()
    runtime.worker.turn()
    assert not any(each.startswith("sink again <-") for each in runtime.did)
    event = ev.FrameArrived(0, SECOND, ChannelId(0, SubtaskIndex(0), SubtaskIndex(0)), 0, ())
    assert runtime.worker.deliver(task_of(SINK), SECOND, event)
    assert any(each.startswith("sink again <-") for each in runtime.did)
    assert not runtime.worker.deliver(task_of(SINK), FIRST, event)


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3), KeyboardInterrupt()])
def test_what_a_subtask_raises_has_failed_it_alone(runtime: Runtime, error: BaseException) -> None:
    """The failure is reported before what the subtask holds is closed; the others go on."""
    _, (source, _) = runtime.begin(task_of(SOURCE), task_of(SINK))

    def fail() -> None:
        raise error

    source.turns = [fail]
    runtime.worker.turn()
    assert runtime.did == ["turn of source", f"source failed: {error!r}", "hurry of source", "close of source"]
    assert runtime.worker.subtasks.keys() == {task_of(SINK)}
    runtime.did.clear()
    runtime.worker.turn()
    runtime.worker.turn()
    assert runtime.did == ["turn of sink"] * 2
    assert not runtime.worker.kept(task_of(SOURCE))


def test_a_subtask_that_has_finished_runs_no_more(runtime: Runtime) -> None:
    """The runtime hears of it when the worker does not run it any more."""
    (source, _), (host, _) = runtime.begin(task_of(SOURCE), task_of(SINK))
    host.turns = [lambda: setattr(host, "finished", True)]
    runtime.worker.turn()
    assert runtime.did == ["turn of source", "source finished", "hurry of source", "close of source"]
    assert not runtime.worker.guarded(source, host.turn)
    runtime.did.clear()
    runtime.worker.turn()
    runtime.worker.turn()
    assert runtime.did == ["turn of sink"] * 2


def test_state_goes_to_the_next_attempt_of_the_same_subtask(runtime: Runtime) -> None:
    """Once, and to no other one."""
    runtime.begin(task_of(SOURCE), task_of(SINK))
    for task in (task_of(SOURCE), task_of(SINK)):
        assert runtime.worker.stop(task) is not None
        assert runtime.worker.stop(task) is None
    assert not runtime.worker.kept(task_of(SINK, 1))
    kept: Any = runtime.worker.kept(task_of(SINK))
    assert kept == {"state": "sink"}
    assert not runtime.worker.kept(task_of(SINK))
    runtime.worker.forget()
    assert not runtime.worker.kept(task_of(SOURCE))


def test_what_io_brings_is_taken_in_on_the_workers_thread(runtime: Runtime) -> None:
    """An event, or the failure of the subtask."""
    pool = io_pool(GRAPH, (), "io", lambda error: None)
    (source, sink), _ = runtime.begin(task_of(SOURCE), task_of(SINK), pool=pool)
    brought: Any = "what was read"
    source.run_io(lambda: brought)
    runtime.run_posted()
    assert runtime.did == ["source <- what was read"]

    def fail() -> None:
        raise ValueError("no file")

    sink.run_io(fail)
    runtime.run_posted()
    assert runtime.did[1:] == ["sink failed: ValueError('no file')", "hurry of sink", "close of sink"]
    assert runtime.worker.stop(task_of(SOURCE)) is source
    source.retire()


def test_a_subtask_is_closed_once_its_io_has_returned(runtime: Runtime) -> None:
    """I/O that waits for a thread is dropped, and so is what comes of I/O that was under way."""
    pool = IoPool(1, "io", lambda error: None)
    (source, sink), (host, other) = runtime.begin(task_of(SOURCE), task_of(SINK), pool=pool)
    began, goes_on = threading.Event(), threading.Event()
    brought: Any = "too late"

    def block() -> Any:
        began.set()
        assert goes_on.wait(WAIT_S)
        return brought

    source.run_io(block)
    source.run_io(lambda: runtime.did.append("dropped work of source"))
    after: Any = "after it"
    sink.run_io(lambda: after)
    assert began.wait(WAIT_S)

    runtime.worker.stop(task_of(SOURCE))
    source.retire()
    assert runtime.did == ["hurry of source"]
    assert not host.closed.is_set()
    goes_on.set()
    assert host.closed.wait(WAIT_S)
    while not any(each.startswith("sink <-") for each in runtime.did):
        runtime.run_posted()
    assert runtime.did == ["hurry of source", "close of source", "sink <- after it"]

    runtime.worker.stop(task_of(SINK))
    sink.retire()
    assert other.closed.is_set()


def test_threads_end_with_the_last_subtask_that_uses_them(runtime: Runtime) -> None:
    """One that is over leaves the threads to the others of its attempt; the next attempt has its own."""
    pool, next_pool = IoPool(1, "io", lambda error: None), IoPool(1, "io", lambda error: None)
    (source, sink), (_, host) = runtime.begin(task_of(SOURCE), task_of(SINK), pool=pool)
    runtime.worker.stop(task_of(SOURCE))
    source.retire()
    (again,), _ = runtime.begin(task_of(SOURCE), attempt=SECOND, pool=next_pool)
    assert not pool.closed

    def broken() -> None:
        raise OSError("cannot be closed")

    host.closes = broken
    runtime.worker.stop(task_of(SINK))
    with pytest.raises(OSError, match="cannot be closed"):
        sink.retire()
    assert pool.closed
    assert pool.join(WAIT_S)
    assert not next_pool.closed
    runtime.worker.stop(task_of(SOURCE))
    again.retire()
    assert next_pool.join(WAIT_S)


def test_a_timer_that_is_far_away_does_not_keep_a_subtask_that_is_over(runtime: Runtime) -> None:
    """Each attempt of a job would leave its state behind, for as long as users set timers ahead."""
    (source,), hosts = runtime.begin(task_of(SOURCE))
    told: list[Any] = []
    hosts[0].handle = told.append
    source.set_timer(do.SetTaskTimer(ev.TaskTimer.PROCESSING_TIME, 0), 0)
    runtime.timers.pop()[1]()
    assert [event.timer for event in told] == [ev.TaskTimer.PROCESSING_TIME]

    source.set_timer(do.SetTaskTimer(ev.TaskTimer.PROCESSING_TIME, MAX_WATERMARK_MS), MAX_WATERMARK_MS)
    runtime.worker.stop(task_of(SOURCE))
    source.retire()
    over = weakref.ref(source)
    del source
    gc.collect()
    assert over() is None
    runtime.timers.pop()[1]()


def test_an_action_that_is_due_when_the_subtask_is_over_is_dropped(runtime: Runtime) -> None:
    """Whether it was posted or put off."""
    (source,), _ = runtime.begin(task_of(SOURCE))
    act = partial(runtime.did.append, "acted")
    source.call_later(3, act)
    source.later(act)
    runtime.run_posted()
    runtime.timers[0][1]()
    assert runtime.did == ["acted", "acted"]
    source.later(act)
    runtime.worker.stop(task_of(SOURCE))
    runtime.run_posted()
    runtime.timers[0][1]()
    assert runtime.did == ["acted", "acted"]
    source.retire()
