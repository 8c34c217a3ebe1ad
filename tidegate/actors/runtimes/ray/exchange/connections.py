"""`Connections`: the sockets of a task's process to the processes of its neighbours on the same node.

Frames and grants of credit go over them in a fraction of the time of a call of Ray. `Link` says what is said and heard.
Rules:

- One connection joins two processes, for all channels between their tasks, in one attempt.
- Who sends frames listens, on an abstract name that nobody can guess, and offers a connection by a call of Ray. The
  receiver connects, or refuses: it may be on another node, or in a container with a network of its own. The name is the
  system's, not a file's: nothing is left behind, however the process ends.
- Only processes of the same user are let in, and only those that show the token of an offer, once. Both ends show one.
- One thread receives for all connections, and never waits for anything else. Whoever sends writes at once what the
  system takes; the rest is written by that thread. No send ever waits.
- Only that thread closes sockets: a number that it has heard of is never another connection's by then.
- Processes that user code forks close them: the end of a process is noticed by its connections.
"""

from __future__ import annotations

import logging
import os
import resource
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.ray.exchange.link import TOKEN_BYTES, Bytes, Kind, Link, Message

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
"""Of a process, and no more than a quarter of the files that it may open."""
STRANGERS_MAX = 64
"""Connections on which nothing was shown yet; the oldest one goes."""
READ_BYTES = 256 * 1024
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("=iII")
_READ, _WRITE = 1, 4
"""EPOLLIN and EPOLLOUT, which other systems do not have."""

TOO_MANY = "too many connections"


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """Where a process listens, and what each end shows: the one that connects `token`, the other one `answer`."""

    node_id: str
    name: bytes
    token: bytes
    answer: bytes


class Ear(Protocol):
    """Who hears of a connection; on its thread, so nothing of it may wait."""

    def opened(self) -> None:
        """Both ends have shown their tokens, as far as this one knows: something can be said."""

    def heard(self, message: Message) -> None:
        """The other end has said something."""

    def over(self, reason: str | None) -> None:
        """Nothing follows. None: all that was said was heard; else why it may not have been."""


class Connection:
    """One end of a connection. `say`, `end` and `cut` are for any thread."""

    def __init__(self, epoll: select.epoll, connected: socket.socket, link: Link, ear: Ear) -> None:
        self._epoll, self._socket, self._link, self._ear = epoll, connected, link, ear
        self._lock = threading.Lock()
        self._waits_to_write = self._closed = False
        self._reason = ""
        """Why it ends, if this end knows."""

    def say(self, kind: Kind, *payload: Bytes) -> bool:
        """Say something; False: it has to go another way."""
        with self._lock:
            said = not self._closed and self._link.say(kind, *payload)
            if said and not self._waits_to_write:
                self._write()
        return said

    def end(self) -> None:
        """Everything was said. The connection ends when the other end has heard it."""
        with self._lock:
            if not self._closed:
                self._link.end()
                self._write()

    def cut(self) -> None:
        """End the connection now, whatever was said."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Let go of the socket in a process that was forked off, where nobody gives the lock back."""
        self._socket.close()

    def _write(self) -> None:
        """Write what the system takes."""
        while pieces := self._link.unwritten():
            try:
                self._link.wrote(self._socket.sendmsg(pieces))
            except BlockingIOError:
                self._wait_to_write(True)
                return
            except OSError as error:
                # The other end is gone. The receiving thread hears so, behind all that it had still said.
                self._reason = self._reason or error_text(error)
                return
        self._wait_to_write(False)

    def _wait_to_write(self, waits: bool) -> None:
        if waits is not self._waits_to_write:
            self._waits_to_write = waits
            self._epoll.modify(self._socket, _READ | _WRITE if waits else _READ)

    # --- on the receiving thread ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the socket watched, and show the token."""
        # Once it is watched the other thread tells of what it hears.
        was_open = self._link.is_open
        self._epoll.register(self._socket, _READ)
        with self._lock:
            self._write()
        if was_open:
            self._ear.opened()

    def ready(self, space: memoryview) -> bool:
        """The socket can be read, or written. False: the connection is over."""
        try:
            with self._lock:
                self._write()
            size_bytes = self._socket.recv_into(space)
        except BlockingIOError:
            return not self._link.is_over or self._over(None)
        except OSError as error:
            return self._ended(error_text(error))
        if not size_bytes:
            return self._ended("the other end is gone")
        try:
            self._hear(space[:size_bytes])
        except Exception as error:  # noqa: BLE001 (what came is of no use: whoever listens is told)
            return self._over(error_text(error))
        return not self._link.is_over or self._over(None)

    def _hear(self, data: memoryview) -> None:
        with self._lock:
            was_open = self._link.is_open
            messages = self._link.heard(data)
        if self._link.is_open and not was_open:
            self._ear.opened()
        for message in messages:
            self._ear.heard(message)
        if self._link.heard_end:
            # Not earlier: this says that all of it was taken in.
            self.end()

    def _ended(self, reason: str) -> bool:
        # An end that was not let in has said nothing that counts, and has heard nothing.
        lost = self._link.is_open and not self._link.heard_end
        return self._over(self._reason or reason if lost else None)

    def _over(self, reason: str | None) -> bool:
        with self._lock:
            self._closed = True
            _let_go(self._epoll, self._socket)
        self._ear.over(reason)
        return False


class Connections:
    """Those of one process. `died` hears when the receiving thread could not go on."""

    def __init__(self, died: Callable[[BaseException], object]) -> None:
        self._died = died
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._name = b""
        self._offers: dict[bytes, tuple[bytes, Ear, Callable[[Connection], object]]] = {}
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._open: dict[int, Connection] = {}
        self._current: Connection | None = None
        """The one that the receiving thread is busy with."""
        self._given_up = ""

    def give_up(self, reason: str) -> None:
        """Nothing is offered or taken any more: connections do not hold in this process."""
        self._given_up = self._given_up or reason

    def offer(self, node_id: str, ear: Ear, connected: Callable[[Connection], object]) -> LinkOffer:
        """An offer for one other process. `connected` gets the connection, on the receiving thread. OSError."""
        with self._lock:
            self._start()
            if self._listener is None:
                self._listen()
            token, answer = secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(TOKEN_BYTES)
            self._offers[token] = answer, ear, connected
            return LinkOffer(node_id, self._name, token, answer)

    def withdraw(self, offer: LinkOffer) -> None:
        """Nobody is to come any more."""
        with self._lock:
            self._offers.pop(offer.token, None)

    def connect(self, offer: LinkOffer, ear: Ear) -> Connection:
        """Take an offer. OSError if that cannot be."""
        with self._lock:
            epoll = self._start()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        number = connected.fileno()
        try:
            connected.setblocking(False)
            connected.connect(offer.name)
            if not _is_ours(connected):
                raise OSError("somebody else listens there")
            connection = Connection(epoll, connected, Link(offer.token, offer.answer), ear)
            self._open[number] = connection
            connection.begin()
        except BaseException:
            self._open.pop(number, None)
            connected.close()
            raise
        return connection

    def _start(self) -> select.epoll:
        """Have what every connection needs, or OSError."""
        if self._given_up:
            raise OSError(self._given_up)
        if not hasattr(select, "epoll"):
            raise OSError("this system has no names for sockets that are no files (Linux)")
        limit = min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        if len(self._open) + len(self._offers) >= limit:
            raise OSError(TOO_MANY)
        if self._epoll is None:
            epoll = select.epoll()
            threading.Thread(target=self._run, args=(epoll,), name="tidegate-link", daemon=True).start()
            os.register_at_fork(after_in_child=self._forked)
            self._epoll = epoll
        return self._epoll

    def _listen(self) -> None:
        assert self._epoll is not None
        name = b"\0tidegate-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(name)
            listener.listen(_BACKLOG)
            self._listener, self._name = listener, name
            self._epoll.register(listener, _READ)
        except BaseException:
            self._listener = None
            listener.close()
            raise

    def _forked(self) -> None:
        """In a process that was forked off: let go of what is its parent's."""
        for connection in [*self._open.values(), *([] if self._current is None else [self._current])]:
            connection.abandon()
        for stranger, _ in list(self._strangers.values()):
            stranger.close()
        if self._listener is not None:
            self._listener.close()
        if self._epoll is not None:
            self._epoll.close()

    # --- on the receiving thread ----------------------------------------------------------------------------------

    def _run(self, epoll: select.epoll) -> None:
        space = memoryview(bytearray(READ_BYTES))
        try:
            while True:
                for number, _ in epoll.poll():
                    if (connection := self._open.get(number)) is not None:
                        self._go_on(number, connection, space)
                    elif number in self._strangers:
                        self._listen_to(epoll, number)
                    elif self._listener is not None:
                        self._accept(epoll, self._listener)
        except BaseException as error:  # noqa: BLE001 (the thread is gone: the task cannot go on)
            self.give_up(f"the thread that receives has died: {error_text(error)}")
            self._died(error)

    def _go_on(self, number: int, connection: Connection, space: memoryview) -> None:
        # Once it is closed its number may be that of a new one.
        self._current = connection
        del self._open[number]
        if connection.ready(space):
            self._open[number] = connection
        self._current = None

    def _accept(self, epoll: select.epoll, listener: socket.socket) -> None:
        try:
            stranger, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # No file can be opened any more, say. The listener would be ready for ever.
            epoll.unregister(listener)
            log.warning("no connection is taken any more, frames go by calls of Ray: %s", error_text(error))
            self.give_up(error_text(error))
            return
        stranger.setblocking(False)
        if not _is_ours(stranger):
            stranger.close()
            return
        if len(self._strangers) >= STRANGERS_MAX:
            _let_go(epoll, self._strangers.pop(next(iter(self._strangers)))[0])
        self._strangers[stranger.fileno()] = stranger, bytearray()
        epoll.register(stranger, _READ)
        self._listen_to(epoll, stranger.fileno())

    def _listen_to(self, epoll: select.epoll, number: int) -> None:
        """Somebody who has not shown a token yet has said something, or left."""
        stranger, shown = self._strangers[number]
        try:
            more = stranger.recv(TOKEN_BYTES - len(shown))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        shown += more
        if more and len(shown) < TOKEN_BYTES:
            return
        del self._strangers[number]
        with self._lock:
            found = self._offers.pop(bytes(shown), None)
        if found is None:
            _let_go(epoll, stranger)
            return
        epoll.unregister(stranger)
        answer, ear, connected = found
        connection = Connection(epoll, stranger, Link(answer, b""), ear)
        connected(connection)
        self._open[number] = connection
        connection.begin()


def _let_go(epoll: select.epoll, watched: socket.socket) -> None:
    """Close a socket. Unwatched first: where a process that was forked off still has it, it would be heard of."""
    with suppress(OSError, ValueError):
        epoll.unregister(watched)
    watched.close()


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is one of this user's."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
