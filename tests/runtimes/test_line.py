"""What a coordinator and a worker's process say to each other: by calls, then over a socket, and by calls again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray_fakes import FIRST, SINK, TIMEOUT_S, Method, Process, task_processes
from waiting import received, until

from tidegate.actors.coordinator import events as co
from tidegate.actors.ray import control_channel as module
from tidegate.actors.ray.control_channel import COORDINATOR, ControlChannel
from tidegate.actors.ray.framed_connections import Connections, Listener
from tidegate.actors.task import events as ev
from tidegate.storage.ids import Generation

SECRET = b"the secret of the job"


def no_death(error: BaseException) -> None:
    """The receiving thread must not die."""
    raise AssertionError from error


@dataclass
class Handle:
    """Calls of the other process: they stay without an answer until the test answers them."""

    deliver: Method = field(default_factory=Method)
    counted: Method = field(default_factory=Method)

    def told(self) -> tuple[Future[Any], Any]:
        """The next call of `deliver`, and what it says."""
        call, (what,) = self.deliver.received()
        return call, what


class Pair:
    """A coordinator's line to a process, and the one back. What comes over the connection is in `received`."""

    def __init__(self) -> None:
        self.received: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.there, self.back = Handle(), Handle()
        self.line = ControlChannel(self.there, {})
        self.handlers: dict[str, Callable[..., object]] = {
            name: lambda what, name=name: self.received.put((name, what)) for name in ("deliver", "counted")
        }
        self.its_line = ControlChannel(self.back, self.handlers)
        self.hub = Connections(SECRET, COORDINATOR, lambda process_id: None, no_death)
        self.accepted: list[Any] = []
        """The process's ends of the connections that it has accepted."""
        self.its_hub = Connections(SECRET, "process", self._accept, no_death)
        self.address = self.its_hub.listen()

    def _accept(self, process_id: str) -> Listener:
        self.accepted.append(self.its_line.accept())
        return self.accepted[-1]

    def connect(self) -> None:
        """Have a connection that both ends can use."""
        self.line.join(self.hub, self.address, "process", self.handlers)
        until("the connection", lambda: self.line.connected and self.its_line.connected)

    def next(self) -> tuple[str, Any]:
        """What was heard next."""
        return received("a message", self.received)


@pytest.fixture
def pair() -> Pair:
    """Two processes that have spoken by calls alone."""
    return Pair()


def test_messages_go_over_the_connection_in_order_and_are_answered(pair: Pair) -> None:
    """Both ways, without a call."""
    pair.connect()
    said = [pair.line.send("deliver", number) for number in range(100)]
    assert [pair.next() for _ in range(100)] == [("deliver", number) for number in range(100)]
    for each in said:
        each.future().result(TIMEOUT_S)
    pair.its_line.send("deliver", "back").future().result(TIMEOUT_S)
    assert pair.next() == ("deliver", "back")
    assert pair.there.deliver.calls.empty()
    assert pair.back.deliver.calls.empty()


def test_a_message_does_not_overtake_a_call(pair: Pair) -> None:
    """As long as a call was not answered, what follows is called as well."""
    pair.line.send("deliver", "first")
    first, _ = pair.there.told()
    pair.connect()
    pair.line.send("deliver", "second")
    second, what = pair.there.told()
    assert what == "second"
    first.set_result(None)
    second.set_result(None)
    pair.line.send("deliver", "third").future().result(TIMEOUT_S)
    assert pair.next() == ("deliver", "third")


def test_a_message_does_not_overtake_a_mention_that_was_called(pair: Pair) -> None:
    """Nobody hears of its arrival, so a call goes behind it once."""
    pair.line.send_unacknowledged("counted", 1)
    pair.connect()
    pair.line.send("deliver", "called")
    call, what = pair.there.told()
    assert what == "called"
    call.set_result(None)
    pair.line.send("deliver", "said").future().result(TIMEOUT_S)
    assert pair.next() == ("deliver", "said")


def test_mentions_go_over_the_connection_and_have_no_answer(pair: Pair) -> None:
    """In order with what is said."""
    pair.connect()
    pair.line.send_unacknowledged("counted", 1)
    pair.line.send("deliver", 2).future().result(TIMEOUT_S)
    assert (pair.next(), pair.next()) == (("counted", 1), ("deliver", 2))
    assert pair.there.counted.calls.empty()


def test_what_was_not_answered_is_called_when_the_connection_breaks(pair: Pair) -> None:
    """In order, and so is what follows: it is not lost, and the failure of the call is that of the message."""
    pair.connect()
    holds, goes_on = threading.Event(), threading.Event()

    def hold(what: object) -> None:
        holds.set()
        assert goes_on.wait(TIMEOUT_S)

    pair.handlers["deliver"] = hold
    said = [pair.line.send("deliver", number) for number in range(3)]
    assert holds.wait(TIMEOUT_S)
    pair.accepted[-1].cut()
    calls = [pair.there.told() for _ in range(3)]
    goes_on.set()
    assert [what for _, what in calls] == [0, 1, 2]
    calls[0][0].set_exception(ConnectionError("gone"))
    calls[1][0].set_result(None)
    assert isinstance(said[0].future().exception(TIMEOUT_S), ConnectionError)
    assert said[1].future().result(TIMEOUT_S) is None
    assert not said[2].future().done()
    calls[2][0].set_result(None)
    pair.line.send("deliver", "later")
    assert pair.there.told()[1] == "later", "a connection that broke is not used again"


def test_what_the_connection_does_not_take_is_called_behind_all_that_was_said(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would overtake what was not answered: then all of it is called."""
    pair.connect()
    monkeypatch.setattr(module, "UNANSWERED_MAX", 2)
    holds = threading.Event()
    pair.handlers["deliver"] = lambda what: holds.wait(TIMEOUT_S)
    for number in range(3):
        pair.line.send("deliver", number)
    assert [pair.there.told()[1] for _ in range(3)] == [0, 1, 2]
    holds.set()


def test_a_large_message_goes_over_the_connection(pair: Pair) -> None:
    """In order with the others."""
    pair.connect()
    large = bytes(20 * 1024 * 1024)
    pair.line.send("deliver", large)
    pair.line.send("deliver", "small").future().result(TIMEOUT_S)
    assert (pair.next(), pair.next()) == (("deliver", large), ("deliver", "small"))
    assert pair.there.deliver.calls.empty()


def test_a_process_that_cannot_be_reached_is_called(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """It is in a container with a network of its own, for instance. That is noted."""
    caplog.set_level("INFO")
    pair.line.join(pair.hub, b"\0nobody", "process", pair.handlers)
    pair.line.send("deliver", "called")
    assert pair.there.told()[1] == "called"
    assert "refused" in caplog.text


def test_a_new_coordinator_takes_the_place_of_the_one_before(pair: Pair) -> None:
    """What that one has not answered is called, and what follows goes to the new one."""
    pair.connect()
    pair.handlers["deliver"] = lambda what: None
    new = Pair()
    new.its_line, new.its_hub, new.address = pair.its_line, pair.its_hub, pair.address
    new.handlers = {"deliver": lambda what: new.received.put(("new", what))}
    new.connect()
    until("the connection of before to end", lambda: not pair.line.connected)
    pair.its_line.send("deliver", "hello").future().result(TIMEOUT_S)
    assert new.next() == ("new", "hello")


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Process]]:
    """Makes the process of a sink, which has begun."""
    with task_processes(monkeypatch) as make:
        yield lambda: make(SINK).start()


def test_a_task_is_told_and_reports_over_the_connection(sink: Callable[[], Process], pair: Pair) -> None:
    """No call is made for it in either direction."""
    process = sink()
    actor: Any = process.actor
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    hub = Connections(actor.context.secret, COORDINATOR, lambda process_id: None, no_death)
    info = actor.info()

    def report(reports: tuple[Any, ...]) -> None:
        for each in reports:
            heard.put(each)

    handlers = {"report": report, "counted": lambda *_: heard.put(None)}
    pair.line.join(hub, info.address, info.actor_id, handlers)
    until("the connection", lambda: pair.line.connected and actor.channel.connected)
    process.settle()
    while not process.coordinator.counted.calls.empty():
        process.coordinator.counted.calls.get()
    # A mention that was called has a call behind it.
    actor.channel.send("report", (co.CancelRequested(0),)).future().result(TIMEOUT_S)
    while not process.coordinator.report.calls.empty():
        process.coordinator.report.calls.get()
    asked = ev.CoordinatorTookOver(0, FIRST, Generation(1))
    pair.line.send("deliver", ((SINK, FIRST, asked),)).future().result(TIMEOUT_S)
    while not isinstance(received("an answer", heard), co.TaskAnswered):
        pass
    assert process.coordinator.report.calls.empty()
    assert pair.there.deliver.calls.empty()
