"""Sockets between processes of a job: who is let in, what slow and dead processes do to others, what is left."""

from __future__ import annotations

import hashlib
import hmac
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

from tidegate.actors.ray import framed_connections as module
from tidegate.actors.ray.framed_connections import LARGE_BYTES, Connections, FramedConnection, Kind, Message

TIMEOUT_S = 240.0
SECRET = b"the secret of the job"


@dataclass
class Hearing:
    """An ear that keeps what it hears."""

    events: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    connection: FramedConnection | None = None

    def connected(self, connection: FramedConnection) -> None:
        """There is a connection."""
        self.connection = connection

    def opened(self) -> None:
        """Messages can be sent."""
        self.events.put("opened")

    def received(self, message: Message) -> None:
        """A message came in."""
        self.events.put(bytes(message.payload))

    def over(self, reason: str) -> None:
        """Nothing follows."""
        self.events.put(("over", reason))

    def next(self) -> Any:
        """What happens next."""
        return received("an event", self.events)

    def send(self, payload: bytes) -> bool:
        """Send something."""
        assert self.connection is not None
        return self.connection.send(Kind.FRAME, payload)


def no_death(error: BaseException) -> None:
    """The reading thread must not die."""
    raise AssertionError from error


class Hub:
    """A process that listens, and keeps who comes."""

    def __init__(self, name: str = "hub", secret: bytes = SECRET) -> None:
        self.came: dict[str, Hearing] = {}
        self.refused: set[str] = set()
        self.connections = Connections(secret, name, self._came, no_death)
        self.address = self.connections.listen()

    def _came(self, process_id: str) -> Hearing | None:
        return None if process_id in self.refused else self.came.setdefault(process_id, Hearing())

    def connect(self, to: Hub, name: str = "hub") -> Hearing:
        """Connect to another one."""
        ear = Hearing()
        self.connections.connect(to.address, name, ear)
        return ear


def is_turned_away(stranger: socket.socket) -> bool:
    """Whether the other end closes, and sends nothing."""
    stranger.settimeout(TIMEOUT_S)
    try:
        return not stranger.recv(1)
    except ConnectionResetError:
        return True


@pytest.fixture
def hub() -> Hub:
    """The connections of a process."""
    return Hub()


@pytest.fixture
def pair(hub: Hub) -> tuple[Hearing, Hearing]:
    """Both ends of a connection: of the process that listened, and of the one that came."""
    other = Hub("other").connect(hub)
    until("the other end", lambda: "other" in hub.came)
    this = hub.came["other"]
    assert (this.next(), other.next()) == ("opened", "opened")
    return this, other


def test_both_ends_hear_each_other(pair: tuple[Hearing, Hearing]) -> None:
    """In order, whoever sends."""
    this, other = pair
    assert all(this.send(b"%d" % number) for number in range(100))
    assert other.send(b"credit")
    assert [other.next() for _ in range(100)] == [b"%d" % number for number in range(100)]
    assert this.next() == b"credit"


def test_a_message_larger_than_what_the_system_takes_arrives(pair: tuple[Hearing, Hearing]) -> None:
    """In pieces, and what is sent behind it too."""
    this, other = pair
    large = os.urandom(20 * LARGE_BYTES)
    assert this.send(large)
    assert this.send(b"small")
    assert other.next() == large
    assert other.next() == b"small"


def test_a_descriptor_comes_with_its_message(hub: Hub) -> None:
    """Also behind others: it is there when the message is heard."""
    there: list[int | None] = []
    came = Hearing()

    def received(message: Message) -> None:
        if message.kind is Kind.MEMORY:
            assert came.connection is not None
            there.append(came.connection.take_descriptor())
        came.events.put(message.kind)

    came.received = received  # type: ignore[method-assign]
    hub.came["other"] = came
    sends = Hub("other").connect(hub)
    assert sends.next() == "opened"
    assert sends.connection is not None
    reads, writes = os.pipe()
    sends.send(bytes(10 * LARGE_BYTES))
    sends.connection.send(Kind.MEMORY, descriptor=writes)
    assert [came.next() for _ in range(3)] == ["opened", Kind.FRAME, Kind.MEMORY]
    [descriptor] = there
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"mine")
    assert os.read(reads, 10) == b"mine"
    for each in (reads, writes, descriptor):
        os.close(each)


def proof(of: str, to: str, secret: bytes = SECRET) -> bytes:
    """What a process shows another one."""
    return hmac.digest(secret, f"{of}\0{to}".encode(), hashlib.sha256)[:16]


@pytest.mark.parametrize(
    "shown",
    [
        b"\x05short",
        b"\x05other" + bytes(16),
        b"\x05other" + proof("other", "hub", b"the secret of another job"),
        b"\x05other" + proof("third", "hub"),
        b"\x05other" + proof("other", "third"),
        b"\x05other" + proof("hub", "other"),
        b"\xff" + bytes(300),
    ],
    ids=["short", "no proof", "of another job", "of another process", "for another process", "an answer", "long"],
)
def test_who_does_not_prove_that_it_is_of_the_job_is_turned_away(hub: Hub, shown: bytes) -> None:
    """Unheard; the right one comes in."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(hub.address)
        stranger.sendall(shown + b"\x80evil")
        stranger.shutdown(socket.SHUT_WR)
        assert is_turned_away(stranger)
    assert hub.came == {}
    assert Hub("other").connect(hub).next() == "opened"


def test_a_process_that_is_refused_notices(hub: Hub) -> None:
    """It hears that nothing was opened."""
    hub.refused.add("other")
    assert Hub("other").connect(hub).next() == ("over", "the other end is gone")


def test_who_listens_there_now_is_not_spoken_to(hub: Hub) -> None:
    """The name may be somebody else's by then: it has to prove that it is the process that was meant."""
    for shown in (bytes(16), proof("other", "hub"), proof("meant", "third")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(b"\0" + os.urandom(8).hex().encode())
            listener.listen()
            ear = Hearing()
            hub.connections.connect(listener.getsockname(), "meant", ear)
            other, _ = listener.accept()
            with other:
                other.sendall(shown)
                kind, reason = ear.next()
        assert kind == "over"
        assert "not the expected process" in reason
        assert not ear.send(b"")


def test_other_users_are_not_let_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """On either side, whatever they know."""
    other = Hub("other")
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match="another user"):
        other.connect(hub)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(hub.address)
        assert is_turned_away(stranger)
    assert hub.came == {}


def test_an_address_that_cannot_be_reached_is_refused(hub: Hub) -> None:
    """The other end is in a container with a network of its own, or is gone."""
    with pytest.raises(OSError, match="refused"):
        hub.connections.connect(b"\0" + os.urandom(8).hex().encode(), "other", Hearing())


def test_the_number_of_connections_is_limited(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor is open for each. Who has too many makes none any more, and lets none in."""
    other = Hub("other")
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    assert other.connect(hub).next() == "opened"
    with pytest.raises(OSError, match=module.TOO_MANY):
        other.connect(hub)
    assert Hub("third").connect(hub).next()[0] == "over"


def test_strangers_who_say_nothing_are_few(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one goes, and who proves something still comes in."""
    monkeypatch.setattr(module, "STRANGERS_MAX", 2)
    strangers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
    for stranger in strangers:
        stranger.connect(hub.address)
    assert is_turned_away(strangers[0])
    assert Hub("other").connect(hub).next() == "opened"
    for stranger in strangers:
        stranger.close()


def test_what_cannot_be_understood_ends_the_connection(pair: tuple[Hearing, Hearing]) -> None:
    """Whoever hears it says so, and the other end hears that something is lost."""
    this, other = pair

    def refuse(message: Message) -> None:
        raise ValueError("of no use")

    other.received = refuse  # type: ignore[method-assign]
    assert this.send(b"what")
    assert other.next() == ("over", "ValueError: of no use")
    assert this.next()[0] == "over"


def test_a_connection_that_is_closed_while_both_live_is_heard_of_by_both(pair: tuple[Hearing, Hearing]) -> None:
    """It has lost what was on its way: neither end goes on as if nothing was."""
    this, other = pair
    assert this.connection is not None
    this.connection.cut()
    assert [ear.next()[0] for ear in pair] == ["over", "over"]
    assert not this.send(b"more")
    assert not other.send(b"more")


_OTHER = """
import sys, threading, queue
from tidegate.actors.ray.framed_connections import Connections
from tidegate.actors.ray.framed_connections import Kind
heard = queue.SimpleQueue()
class Ear:
    def connected(self, connection): self.connection = connection
    def opened(self): heard.put("opened")
    def received(self, message): heard.put(len(message.payload))
    def over(self, reason): heard.put(("over", reason))
ear = Ear()
hub = Connections(b"the secret of the job", "other", lambda process_id: ear, print)
if sys.argv[1] == "listens":
    print(hub.listen(), flush=True)
else:
    hub.connect(eval(sys.argv[1]), "hub", ear)
print(heard.get(), flush=True)
for line in sys.stdin:
    if line.startswith("say"):
        print(ear.connection.send(Kind.FRAME, line.strip().encode()), flush=True)
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

    def ask(self, text: str) -> str:
        """Tell it something; gives what it prints."""
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return self.line()


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
def test_a_process_that_does_not_read_holds_nobody_up(hub: Hub, process: Callable[[str], Other]) -> None:
    """What is sent to it waits, however much it is: credit bounds it. When it goes on it hears all, in order."""
    other = process(repr(hub.address))
    assert other.line() == "opened"
    ear = hub.came["other"]
    assert ear.next() == "opened"
    other.process.send_signal(signal.SIGSTOP)
    sizes = [100_000 + number for number in range(50)]
    for size_bytes in sizes:
        assert ear.send(bytes(size_bytes))
    other.process.send_signal(signal.SIGCONT)
    assert [other.ask("hear") for _ in sizes] == [str(size_bytes) for size_bytes in sizes]


@pytest.mark.slow
def test_a_process_that_is_killed_is_heard_of_and_leaves_nothing(hub: Hub, process: Callable[[str], Other]) -> None:
    """What it has sent is heard before its end."""
    other = process("listens")
    address = eval(other.line())
    came = Hearing()
    hub.connections.connect(address, "other", came)
    assert (came.next(), other.line()) == ("opened", "opened")
    assert address[1:].decode() in Path("/proc/net/unix").read_text()
    assert other.ask("say something") == "True"
    other.process.kill()
    assert came.next() == b"say something"
    assert came.next()[0] == "over"
    other.process.wait()
    assert address[1:].decode() not in Path("/proc/net/unix").read_text()


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
        monkeypatch.setattr(this, "received", fork)
        assert other.send(b"frame")
    else:
        fork()
    child = received("the child", children)
    assert this.connection is not None
    # As the system does with a process that has died, but for what others have of it.
    module._close_socket(this.connection._epoll, this.connection._socket)
    try:
        kind, _ = other.next()
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        for end in (reads, writes):
            os.close(end)
    assert kind == "over"


def test_a_process_that_has_no_files_left_takes_no_connection(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, does not turn in circles, and refuses who comes: that one goes on with calls."""
    other = Hub("other")

    def accept(self: socket.socket) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    assert other.connect(hub).next()[0] == "over"
    until("the end of it", lambda: caplog.records)
    assert len(caplog.records) == 1
    with pytest.raises(OSError, match="refused"):
        other.connect(hub)
    with pytest.raises(OSError, match="Too many open files"):
        hub.connect(other, "other")
