"""Two processes of tasks on one node, without Ray: what they say to each other over a socket, and what its end does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from ray_fakes import CHECKPOINT, FIRST, ROWS, SINK, SOURCE, TIMEOUT_S, Process, task_processes
from waiting import until

from tidegate.actors.coordinator.messages import events as co
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import EndOfPartition
from tidegate.actors.runtimes.ray.exchange import ways
from tidegate.actors.runtimes.ray.exchange.connections import Connection, Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.link import Message
from tidegate.actors.runtimes.ray.exchange.messages import unpack_frame
from tidegate.actors.runtimes.ray.exchange.ways import Way
from tidegate.actors.runtimes.ray.process import calls as ray_calls
from tidegate.actors.runtimes.ray.task import deliveries
from tidegate.actors.task.messages import events as ev
from tidegate.storage.ids import AttemptNumber, Generation

SECOND = AttemptNumber(1)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TaskId], Process]]:
    """Makes processes of tasks that offer a connection after their first frame."""
    monkeypatch.setattr(ways, "OFFER_AFTER_CALLS", 1)
    with task_processes(monkeypatch) as maker:
        yield maker


def way(process: Process, neighbour: TaskId) -> Way:
    """How a process reaches its neighbour."""
    running: Any = process.actor._running
    found: Way = running.channels._links._ways.of(neighbour)
    return found


def connection(process: Process, neighbour: TaskId) -> Connection:
    """The one to a neighbour."""
    running: Any = process.actor._running
    found: Connection = running.channels._links._links[neighbour]._connection
    return found


def carry_calls(source: Process, sink: Process) -> None:
    """Let what the source has called arrive at the sink."""
    while not source.peer.frame.calls.empty():
        call, arguments = source.peer.frame.received()
        sink.actor.frame(*arguments)
        call.set_result(None)


def connect(source: Process, sink: Process) -> None:
    """Let the sink take what the source offers."""
    call, (head, offer) = source.peer.offer.received()
    actor: Any = sink.actor
    call.set_result(actor.offer(head, offer))
    for process, neighbour in ((source, SINK), (sink, SOURCE)):
        until("the connection", lambda p=process, n=neighbour: way(p, n) is Way.CONNECTION)


@pytest.fixture
def pair(make: Callable[[TaskId], Process]) -> tuple[Process, Process]:
    """Source and sink: all rows have gone by calls, and the end will go over the connection."""
    source, sink = make(SOURCE).start(), make(SINK).start()
    source.await_report(co.TaskReachedEndOfData)
    connect(source, sink)
    carry_calls(source, sink)
    return source, sink


def test_barriers_ends_and_credit_go_over_the_connection(pair: tuple[Process, Process]) -> None:
    """From when it is there no call of Ray is made for them, and both tasks finish."""
    source, sink = pair
    source.take_checkpoint()
    sink.await_report(co.CheckpointAcknowledged)
    sink.actor.tell(FIRST, ev.CheckpointCompleted(0, FIRST, CHECKPOINT))
    assert [source.outcome().kind, sink.outcome().kind] == ["finished", "finished"]
    assert source.peer.frame.calls.empty()


def test_a_connection_that_breaks_while_both_live_fails_both_tasks_once(pair: tuple[Process, Process]) -> None:
    """Nobody knows what was on its way. Their processes make no connections from then on: calls do not break so."""
    connection(pair[1], SOURCE).cut()
    for process in pair:
        outcome = process.outcome()
        assert (outcome.kind, "broke" in (outcome.reason or "")) == ("failed", True)
        with pytest.raises(OSError, match="broke while both its ends lived"):
            process.actor._connections.connect(LinkOffer("node", b"\0none", b"", b""), None)  # type: ignore[arg-type]


def begin_again(process: Process) -> None:
    """The process is given the next attempt of its task."""
    process.order = replace(process.order, attempt=SECOND, generation=Generation(1))
    process.actor.deploy(process.order)
    process.await_report(co.TaskReady)
    process.actor.tell(SECOND, ev.TasksStarted(0))


def test_the_next_attempt_in_the_same_processes_has_a_connection_of_its_own(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the old one fails nothing that begins, and nothing that was said over it is taken by the new one."""
    for module in (ray_calls, deliveries):
        monkeypatch.setattr(module, "LOST_CALL_GRACE_MS", 600_000)
    source, sink = pair
    old = connection(source, SINK)
    begin_again(sink)
    until("the end of the old connection", lambda: old._closed)
    begin_again(source)
    source.await_report(co.TaskReachedEndOfData)
    connect(source, sink)
    carry_calls(source, sink)
    for process in pair:
        process.actor.tell(SECOND, ev.CheckpointTriggered(0, SECOND, CHECKPOINT, 0))
        process.await_report(co.CheckpointAcknowledged)
        process.actor.tell(SECOND, ev.CheckpointCompleted(0, SECOND, CHECKPOINT))
    assert [process.actor.run(SECOND).kind for process in pair] == ["finished", "finished"]


def test_what_an_older_attempt_offers_is_refused(pair: tuple[Process, Process]) -> None:
    """Its sender may live on."""
    _, sink = pair
    actor: Any = sink.actor
    assert "another attempt" in actor.offer((7, 0, 0, 0, 0), LinkOffer("node", b"\0none", bytes(16), bytes(16)))
    assert actor.offer((FIRST, 0, 0, 0, 0), LinkOffer("elsewhere", b"\0none", b"", b"")) == "another node"
    assert way(sink, SOURCE) is Way.CONNECTION


class Receiver:
    """Stands for the process of a sink: listens when it is told to."""

    def __init__(self, source: Process) -> None:
        self.reads = threading.Event()
        self.reads.set()
        self.elements: list[Any] = []
        self.over_with: list[str | None] = []
        self.connections = Connections(lambda error: None)
        call, (_, offer) = source.peer.offer.received()
        self.connection = self.connections.connect(offer, self)
        call.set_result("")
        until("the connection", lambda: way(source, SINK) is Way.CONNECTION)

    def opened(self) -> None:
        """The source is there."""

    def heard(self, message: Message) -> None:
        """The source has sent something."""
        assert self.reads.wait(TIMEOUT_S)
        self.elements += unpack_frame(message.payload)[1]

    def over(self, reason: str | None) -> None:
        """Nothing follows."""
        self.over_with.append(reason)


@pytest.fixture
def receiver(make: Callable[[TaskId], Process]) -> tuple[Process, Receiver]:
    """A source, and who hears it."""
    source = make(SOURCE).start()
    source.await_report(co.TaskReachedEndOfData)
    found = Receiver(source)
    while not source.peer.frame.calls.empty():
        source.peer.frame.received()[0].set_result(None)
    return source, found


def test_a_task_that_has_finished_is_over_when_its_end_was_heard(receiver: tuple[Process, Receiver]) -> None:
    """Until then its process is needed, as if it had not finished."""
    source, sink = receiver
    sink.reads.clear()
    source.take_checkpoint()
    until("the end of the task", lambda: source.actor._running is None)
    source.settle()
    assert source.actor._outcomes.of(FIRST).done() is False
    sink.reads.set()
    assert source.outcome().kind == "finished"
    assert isinstance(sink.elements[-1], EndOfPartition)
    until("the end of the connection", lambda: sink.over_with == [None])


def test_a_task_whose_end_was_not_heard_has_failed(receiver: tuple[Process, Receiver]) -> None:
    """Though it had finished: nobody may skip what was lost."""
    source, sink = receiver
    sink.reads.clear()
    source.take_checkpoint()
    until("the end of the task", lambda: source.actor._running is None)
    sink.connection.cut()
    sink.reads.set()
    outcome = source.outcome()
    assert outcome.kind == "failed"
    assert "the last messages did not arrive" in (outcome.reason or "")


def test_a_refusal_leaves_calls_and_is_noted_once(
    make: Callable[[TaskId], Process], caplog: pytest.LogCaptureFixture
) -> None:
    """That the receiver is on another node is no news."""
    for refusal, notes in (("another node", 0), ("ConnectionRefusedError: no", 1)):
        source = make(SOURCE).start()
        source.await_report(co.TaskReachedEndOfData)
        source.peer.offer.received()[0].set_result(refusal)
        until("the refusal", lambda p=source: way(p, SINK) is Way.ENDED)
        source.settle()  # The line is logged after the way has ended.
        assert len([r for r in caplog.records if "calls of Ray" in r.getMessage()]) == notes
        source.take_checkpoint()
        source.await_last_frame().set_result(None)


def test_rows_go_over_the_connection_where_no_memory_is_shared(
    make: Callable[[TaskId], Process],
) -> None:
    """They are those that were sent."""
    sink, source = make(SINK).start(), make(SOURCE).start()
    connect(source, sink)
    running: Any = source.actor._running
    assert running.channels._links.send(SINK, ((FIRST, 0, 0, 0, 0), (ROWS, EndOfPartition()), None))
    until("the rows", lambda: sink.actor._running.host.rows_in == ROWS.num_rows)  # type: ignore[union-attr]
