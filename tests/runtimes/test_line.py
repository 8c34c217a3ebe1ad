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
from tidegate.actors.ray.framed_connections import Connections
from tidegate.actors.task import events as ev
from tidegate.storage.ids import Generation

SECRET = b"the secret of the job"


def no_death(error: BaseException) -> None:
    """The receiving thread must not die."""
    raise AssertionError from error


@dataclass
class Handle:
    """Calls of the other process: they stay without an answer until the test answers them."""

    tell: Method = field(default_factory=Method)
    counted: Method = field(default_factory=Method)

    def told(self) -> tuple[Future[Any], Any]:
        """The next call of `tell`, and what it says."""
        call, (what,) = self.tell.received()
        return call, what


class Pair:
    """A coordinator's line to a process, and the one back. What comes over the connection is in `heard`."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.there, self.back = Handle(), Handle()
        self.line = ControlChannel(self.there, {})
        self.doors: dict[str, Callable[..., object]] = {
            name: lambda what, name=name: self.heard.put((name, what)) for name in ("tell", "counted")
        }
        self.its_line = ControlChannel(self.back, self.doors)
        self.hub = Connections(SECRET, COORDINATOR, lambda process_id: None, no_death)
        self.its_hub = Connections(SECRET, "process", lambda process_id: self.its_line.came(), no_death)
        self.address = self.its_hub.listen()

    def connect(self) -> None:
        """Have a connection that both ends can use."""
        self.line.join(self.hub, self.address, "process", self.doors)
        until("the connection", lambda: self.line._end is not None and self.its_line._end is not None)

    def next(self) -> tuple[str, Any]:
        """What was heard next."""
        return received("a message", self.heard)


@pytest.fixture
def pair() -> Pair:
    """Two processes that have spoken by calls alone."""
    return Pair()


def test_messages_go_over_the_connection_in_order_and_are_answered(pair: Pair) -> None:
    """Both ways, without a call."""
    pair.connect()
    said = [pair.line.say("tell", number) for number in range(100)]
    assert [pair.next() for _ in range(100)] == [("tell", number) for number in range(100)]
    for each in said:
        each.future().result(TIMEOUT_S)
    pair.its_line.say("tell", "back").future().result(TIMEOUT_S)
    assert pair.next() == ("tell", "back")
    assert pair.there.tell.calls.empty()
    assert pair.back.tell.calls.empty()


def test_a_message_does_not_overtake_a_call(pair: Pair) -> None:
    """As long as a call was not answered, what follows is called as well."""
    pair.line.say("tell", "first")
    first, _ = pair.there.told()
    pair.connect()
    pair.line.say("tell", "second")
    second, what = pair.there.told()
    assert what == "second"
    first.set_result(None)
    second.set_result(None)
    pair.line.say("tell", "third").future().result(TIMEOUT_S)
    assert pair.next() == ("tell", "third")


def test_a_message_does_not_overtake_a_mention_that_was_called(pair: Pair) -> None:
    """Nobody hears of its arrival, so a call goes behind it once."""
    pair.line.send_unacknowledged("counted", 1)
    pair.connect()
    pair.line.say("tell", "called")
    call, what = pair.there.told()
    assert what == "called"
    call.set_result(None)
    pair.line.say("tell", "said").future().result(TIMEOUT_S)
    assert pair.next() == ("tell", "said")


def test_mentions_go_over_the_connection_and_have_no_answer(pair: Pair) -> None:
    """In order with what is said."""
    pair.connect()
    pair.line.send_unacknowledged("counted", 1)
    pair.line.say("tell", 2).future().result(TIMEOUT_S)
    assert (pair.next(), pair.next()) == (("counted", 1), ("tell", 2))
    assert pair.there.counted.calls.empty()


def test_what_was_not_answered_is_called_when_the_connection_breaks(pair: Pair) -> None:
    """In order, and so is what follows: it is not lost, and the failure of the call is that of the message."""
    pair.connect()
    holds, goes_on = threading.Event(), threading.Event()

    def hold(what: object) -> None:
        holds.set()
        assert goes_on.wait(TIMEOUT_S)

    pair.its_line._doors = {"tell": hold}
    said = [pair.line.say("tell", number) for number in range(3)]
    assert holds.wait(TIMEOUT_S)
    assert pair.line._end is not None
    pair.line._end.cut()
    calls = [pair.there.told() for _ in range(3)]
    goes_on.set()
    assert [what for _, what in calls] == [0, 1, 2]
    calls[0][0].set_exception(ConnectionError("gone"))
    calls[1][0].set_result(None)
    assert isinstance(said[0].future().exception(TIMEOUT_S), ConnectionError)
    assert said[1].future().result(TIMEOUT_S) is None
    assert not said[2].future().done()
    calls[2][0].set_result(None)
    pair.line.say("tell", "later")
    assert pair.there.told()[1] == "later", "a connection that broke is not used again"


def test_what_the_connection_does_not_take_is_called_behind_all_that_was_said(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would overtake what was not answered: then all of it is called."""
    pair.connect()
    monkeypatch.setattr(module, "UNANSWERED_MAX", 2)
    holds = threading.Event()
    pair.its_line._doors = {"tell": lambda what: holds.wait(TIMEOUT_S)}
    for number in range(3):
        pair.line.say("tell", number)
    assert [pair.there.told()[1] for _ in range(3)] == [0, 1, 2]
    holds.set()


def test_a_large_message_goes_over_the_connection(pair: Pair) -> None:
    """In order with the others."""
    pair.connect()
    large = bytes(20 * 1024 * 1024)
    pair.line.say("tell", large)
    pair.line.say("tell", "small").future().result(TIMEOUT_S)
    assert (pair.next(), pair.next()) == (("tell", large), ("tell", "small"))
    assert pair.there.tell.calls.empty()


def test_a_process_that_cannot_be_reached_is_called(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """It is in a container with a network of its own, for instance. That is noted."""
    caplog.set_level("INFO")
    pair.line.join(pair.hub, b"\0nobody", "process", pair.doors)
    pair.line.say("tell", "called")
    assert pair.there.told()[1] == "called"
    assert "refused" in caplog.text


def test_a_new_coordinator_takes_the_place_of_the_one_before(pair: Pair) -> None:
    """What that one has not answered is called, and what follows goes to the new one."""
    pair.connect()
    pair.line._doors = {"tell": lambda what: None}
    new = Pair()
    new.its_line, new.its_hub, new.address = pair.its_line, pair.its_hub, pair.address
    new.doors = {"tell": lambda what: new.heard.put(("new", what))}
    new.connect()
    until("the connection of before to end", lambda: pair.line._end is None)
    pair.its_line.say("tell", "hello").future().result(TIMEOUT_S)
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
    hub = Connections(actor._context.secret, COORDINATOR, lambda process_id: None, no_death)
    info = actor.info()

    def report(reports: tuple[Any, ...]) -> None:
        for each in reports:
            heard.put(each)

    doors = {"report": report, "counted": lambda *_: heard.put(None)}
    pair.line.join(hub, info.address, info.actor_id, doors)
    until("the connection", lambda: pair.line._end is not None and actor._line._end is not None)
    process.settle()
    while not process.coordinator.counted.calls.empty():
        process.coordinator.counted.calls.get()
    # A mention that was called has a call behind it.
    actor._line.say("report", (co.CancelRequested(0),)).future().result(TIMEOUT_S)
    while not process.coordinator.report.calls.empty():
        process.coordinator.report.calls.get()
    asked = ev.CoordinatorTookOver(0, FIRST, Generation(1))
    pair.line.say("tell", ((SINK, FIRST, asked),)).future().result(TIMEOUT_S)
    while not isinstance(received("an answer", heard), co.TaskAnswered):
        pass
    assert process.coordinator.report.calls.empty()
    assert pair.there.tell.calls.empty()
