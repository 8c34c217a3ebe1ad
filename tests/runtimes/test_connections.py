"""Sockets between processes of tasks: who is let in, what slow and dead processes do to others, what is left."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from waiting import received, until

from tidegate.actors.runtimes.ray.exchange import connections as module
from tidegate.actors.runtimes.ray.exchange.connections import Connection, Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.link import MESSAGE_BYTES_MAX, TOKEN_BYTES, Kind, Message

TIMEOUT_S = 240.0


@dataclass
class Hearing:
    """An ear that keeps what it hears."""

    events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    connection: Connection | None = None

    def connected(self, connection: Connection) -> None:
        """The other end has come."""
        self.connection = connection

    def opened(self) -> None:
        """Something can be said."""
        self.events.put("opened")

    def heard(self, message: Message) -> None:
        """Something was said."""
        self.events.put(message.payload)

    def over(self, reason: str | None) -> None:
        """Nothing follows."""
        self.events.put(("over", reason))

    def next(self) -> Any:
        """What happens next."""
        return received("an event", self.events)

    def say(self, payload: bytes) -> bool:
        """Say something."""
        assert self.connection is not None
        return self.connection.say(Kind.FRAME, payload)


def no_death(error: BaseException) -> None:
    """The receiving thread must not die."""
    raise AssertionError from error


def is_turned_away(stranger: socket.socket) -> bool:
    """Whether the other end closes, and says nothing."""
    stranger.settimeout(TIMEOUT_S)
    try:
        return not stranger.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture
def hub() -> Connections:
    """The connections of a process."""
    return Connections(no_death)


def offered(hub: Connections) -> tuple[LinkOffer, Hearing]:
    """An offer, and who hears of what comes of it."""
    ear = Hearing()
    return hub.offer("node", ear, ear.connected), ear


@pytest.fixture
def pair(hub: Connections) -> tuple[Hearing, Hearing]:
    """Both ends of a connection: of the one that has offered it, and of the one that came."""
    offer, this = offered(hub)
    other = Hearing()
    other.connected(Connections(no_death).connect(offer, other))
    assert (this.next(), other.next()) == ("opened", "opened")
    return this, other


def test_both_ends_hear_each_other_and_end_together(pair: tuple[Hearing, Hearing]) -> None:
    """What is said before the end is heard before it, whoever ends."""
    this, other = pair
    assert this.connection is not None
    assert all(this.say(b"%d" % number) for number in range(100))
    assert other.say(b"credit")
    this.connection.end()
    assert not this.say(b"late")
    assert [other.next() for _ in range(101)] == [*(b"%d" % number for number in range(100)), ("over", None)]
    assert (this.next(), this.next()) == (b"credit", ("over", None))
    assert not other.say(b"late")


def test_a_message_larger_than_what_the_system_takes_arrives(pair: tuple[Hearing, Hearing]) -> None:
    """In pieces, and what is said behind it too."""
    this, other = pair
    large = os.urandom(MESSAGE_BYTES_MAX)
    assert this.say(large)
    assert other.next() == large
    assert this.say(b"small")
    assert other.next() == b"small"


def test_an_offer_is_for_one_who_shows_its_token(hub: Connections) -> None:
    """Others are turned away unheard; the right one comes in once."""
    offer, ear = offered(hub)
    for shown in (b"x" * TOKEN_BYTES, b"short"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(offer.name)
            stranger.sendall(shown + b"\x80evil")
            stranger.shutdown(socket.SHUT_WR)
            assert is_turned_away(stranger)
    came = Hearing()
    came.connected(hub.connect(offer, came))
    assert (ear.next(), came.next()) == ("opened", "opened")
    again = Hearing()
    hub.connect(offer, again)
    assert again.next() == ("over", None), "it was not let in, and nothing is lost"
    assert ear.events.empty()


def test_who_listens_there_now_is_not_spoken_to(hub: Connections) -> None:
    """The name may be somebody else's by then: it has to show the answer of the offer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0" + os.urandom(8).hex().encode())
        listener.listen()
        ear = Hearing()
        connection = hub.connect(LinkOffer("node", listener.getsockname(), b"t" * 16, b"a" * 16), ear)
        other, _ = listener.accept()
        with other:
            other.sendall(b"b" * TOKEN_BYTES)
            kind, reason = ear.next()
    assert kind == "over"
    assert "not the one that was meant" in reason
    assert not connection.say(Kind.CREDIT, b"")


def test_other_users_are_not_let_in(hub: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side, whatever they know."""
    offer, ear = offered(hub)
    other = Connections(no_death)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="somebody else"):
        other.connect(offer, Hearing())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(offer.name)
        assert is_turned_away(stranger)
    assert ear.events.empty()


def test_an_offer_that_cannot_be_reached_is_refused(hub: Connections) -> None:
    """The other end is in a container with a network of its own, or is gone, or has nothing left to say."""
    with pytest.raises(OSError, match="refused"):
        hub.connect(LinkOffer("node", b"\0" + os.urandom(8).hex().encode(), bytes(16), bytes(16)), Hearing())
    offer, ear = offered(hub)
    hub.withdraw(offer)
    came = Hearing()
    hub.connect(offer, came)
    assert came.next() == ("over", None)
    assert ear.events.empty()


def test_the_number_of_connections_is_limited(hub: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor is open for each; who was given up makes none any more."""
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    offer, _ = offered(hub)
    for more in (lambda: offered(hub), lambda: hub.connect(offer, Hearing())):
        with pytest.raises(OSError, match=module.TOO_MANY):
            more()
    hub.withdraw(offer)
    hub.give_up("it broke")
    with pytest.raises(OSError, match="it broke"):
        offered(hub)


def test_strangers_who_say_nothing_are_few(hub: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one goes, and who shows a token still comes in."""
    monkeypatch.setattr(module, "STRANGERS_MAX", 2)
    offer, ear = offered(hub)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for stranger in strangers:
        stranger.connect(offer.name)
    assert is_turned_away(strangers[0])
    hub.connect(offer, Hearing())
    assert ear.next() == "opened"
    for stranger in strangers:
        stranger.close()


def test_what_cannot_be_understood_ends_the_connection(pair: tuple[Hearing, Hearing]) -> None:
    """Whoever hears it says so, and the other end hears that something is lost."""
    this, other = pair

    def refuse(message: Message) -> None:
        raise ValueError("of no use")

    other.heard = refuse  # type: ignore[method-assign]
    assert this.say(b"what")
    assert this.connection is not None
    this.connection.end()
    assert other.next() == ("over", "ValueError: of no use")
    kind, reason = this.next()
    assert (kind, reason is None) == ("over", False), "END is answered by who has taken everything in, and no other"


def test_a_connection_that_is_closed_while_both_live_is_heard_of_by_both(pair: tuple[Hearing, Hearing]) -> None:
    """It has lost what was on its way: neither end goes on as if nothing was."""
    this, other = pair
    assert this.connection is not None
    this.connection.cut()
    for ear in pair:
        kind, reason = ear.next()
        assert kind == "over"
        assert reason is not None
    assert not this.say(b"more")
    assert not other.say(b"more")


_OTHER = """
import sys, threading, queue
from tidegate.actors.runtimes.ray.exchange.connections import Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.link import Kind
heard = queue.SimpleQueue()
class Ear:
    def opened(self): heard.put("opened")
    def heard(self, message): heard.put(len(message.payload))
    def over(self, reason): heard.put(("over", reason))
    def connected(self, connection): self.connection = connection
ear, hub = Ear(), Connections(print)
if sys.argv[1] == "offers":
    offer = hub.offer("node", ear, ear.connected)
    print([offer.node_id, offer.name, offer.token, offer.answer], flush=True)
else:
    ear.connected(hub.connect(LinkOffer(*eval(sys.stdin.readline())), ear))
print(heard.get(), flush=True)
for line in sys.stdin:
    if line.startswith("say"):
        print(ear.connection.say(Kind.FRAME, line.strip().encode()), flush=True)
    else:
        print(heard.get(), flush=True)
"""


class Other:
    """Another process with one end of a connection."""

    def __init__(self, role: str) -> None:
        command = [sys.executable, "-c", _OTHER, role]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str) -> None:
        """Tell it something."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def ask(self, text: str) -> str:
        """Tell it something; gives what it prints."""
        self.tell(text)
        return self.line()

    def connected(self, hub: Connections) -> Hearing:
        """Connect it with this process, which offers."""
        offer, ear = offered(hub)
        self.tell(repr([offer.node_id, offer.name, offer.token, offer.answer]))
        assert (self.line(), ear.next()) == ("opened", "opened")
        return ear


@pytest.fixture
def process() -> Iterator[Callable[[str], Other]]:
    """Makes other processes, and ends them."""
    made: list[Other] = []

    def make(role: str) -> Other:
        made.append(Other(role))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.process.communicate()


@pytest.mark.slow
def test_a_process_that_does_not_read_holds_nobody_up(hub: Connections, process: Callable[[str], Other]) -> None:
    """What is said to it goes another way after a while. When it goes on it hears all that was said, in order."""
    other = process("connects")
    ear = other.connected(hub)
    other.process.send_signal(signal.SIGSTOP)
    said = 0
    while ear.say(bytes(10_000 + said)):
        said += 1
        assert said < 10_000
    other.process.send_signal(signal.SIGCONT)
    assert [other.ask("hear") for _ in range(said)] == [str(10_000 + number) for number in range(said)]
    assert ear.say(b"again")
    assert other.ask("hear") == "5"


@pytest.mark.slow
def test_a_process_that_is_killed_is_heard_of_and_leaves_nothing(
    hub: Connections, process: Callable[[str], Other]
) -> None:
    """A receiver: what was on its way to it may be lost. A sender: what it has said is heard before its end."""
    receiver, sender = process("connects"), process("offers")
    ear = receiver.connected(hub)
    receiver.process.kill()
    kind, reason = ear.next()
    assert kind == "over"
    assert reason is not None

    offer, came = LinkOffer(*eval(sender.line())), Hearing()
    hub.connect(offer, came)
    assert (came.next(), sender.line()) == ("opened", "opened")
    assert offer.name[1:].decode() in Path("/proc/net/unix").read_text()
    assert sender.ask("say something") == "True"
    sender.process.kill()
    assert came.next() == b"say something"
    kind, reason = came.next()
    assert kind == "over"
    assert reason is not None
    sender.process.wait()
    assert offer.name[1:].decode() not in Path("/proc/net/unix").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True])
def test_a_process_that_user_code_forks_does_not_hold_connections_open(
    pair: tuple[Hearing, Hearing], busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives on when this one has died: the other end must hear of that. Also if one was just being heard."""
    this, other = pair
    reads, writes = os.pipe()
    children: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fork(*heard: Message) -> None:
        pid = os.fork()
        if not pid:
            os.read(reads, 1)
            os._exit(0)
        children.put(pid)

    if busy:
        monkeypatch.setattr(this, "heard", fork)
        assert other.say(b"frame")
    else:
        fork()
    child = received("the child", children)
    assert this.connection is not None
    # As the system does with a process that has died, but for what others have of it.
    module._let_go(this.connection._epoll, this.connection._socket)
    try:
        kind, reason = other.next()
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        for end in (reads, writes):
            os.close(end)
    assert kind == "over"
    assert reason is not None


def test_a_process_that_has_no_files_left_takes_no_connection(
    hub: Connections, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, and does not turn in circles; what was offered stays with calls."""
    offer, ear = offered(hub)

    def accept(self: socket.socket) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(offer.name)
        until("the end of all offers", lambda: hub._given_up)
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="Too many open files"):
        offered(hub)
    assert ear.events.empty()
