"""`Connections`: the sockets of a process of a job to other processes of that job on the same node.

`Link` says how messages are framed, `PeerLink` and `Line` what they mean. Rules:

- A process listens from its start, on an abstract name that cannot be guessed. The name is the system's, not a file's:
  nothing is left behind, however the process ends.
- Only processes of the same user are let in, and of those only such as prove that they have the secret of the job. Both
  ends prove it, for this pair of processes and this direction.
- One connection joins two processes, and lasts as long as both. It is not made again when it breaks.
- One thread reads for all connections, and never waits for anything else. A send writes at once what the system takes.
  That thread writes the rest. No send ever waits.
- Only that thread closes sockets: a number that it was told of is never another connection's by then.
- Processes that user code forks close them: the end of a process is noticed by its connections.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import resource
import secrets
import select
import socket
import struct
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from tidegate.actors.ray.exchange.link import Bytes, Kind, Link, Message
from tidegate.protocol.failure_reasons import error_text

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
"""Connections of a process, at most; and no more than an eighth of the files that it may open."""
STRANGERS_MAX = 64
"""Connections that have proved nothing yet; the oldest one is closed for a new one."""
READ_BYTES = 256 * 1024
PROOF_BYTES = 16
ID_BYTES_MAX = 200
_ID_SIZE = struct.Struct("<B")
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("=iII")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))
_CLOSED_IN_PROGRAMS = 0x40000000
"""MSG_CMSG_CLOEXEC: a descriptor that comes is not inherited by programs."""
_READ, _WRITE = 1, 4
"""EPOLLIN and EPOLLOUT, which other systems do not have."""

TOO_MANY = "too many connections"


class Ear(Protocol):
    """Takes what happens on a connection. Called on the reading thread, so nothing in it may wait."""

    def connected(self, connection: Connection) -> None:
        """There is a connection. Called before anything else, by `connect` on the thread of its caller."""

    def opened(self) -> None:
        """The other end has proved who it is: messages can be sent."""

    def heard(self, message: Message) -> None:
        """A message came in. What this raises ends the connection."""

    def over(self, reason: str) -> None:
        """The connection has ended. Nothing follows."""


class Connection:
    """One end of a connection. `send` and `cut` are for any thread."""

    def __init__(self, epoll: select.epoll, connected: socket.socket, link: Link, ear: Ear) -> None:
        self._epoll, self._socket, self._link, self._ear = epoll, connected, link, ear
        self._lock = threading.Lock()
        self._waits_to_write = self._closed = False
        self._received: int | None = None
        """The descriptor that the other end has sent, until it is taken."""
        self._awaits_descriptor = True

    def send(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> bool:
        """Send a message. Returns whether the connection has not ended. ProtocolError if the message is too large."""
        with self._lock:
            if self._closed:
                return False
            self._link.send(kind, *payload, descriptor=descriptor)
            if not self._waits_to_write:
                self._write()
        return True

    def cut(self) -> None:
        """End the connection now, whatever was sent."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close the socket in a process that was forked off, in which the lock may never be released."""
        self._socket.close()

    def take_descriptor(self) -> int | None:
        """Return the descriptor that came with a message, None if none came. The caller closes it."""
        descriptor, self._received = self._received, None
        self._awaits_descriptor = False
        return descriptor

    def _write(self) -> None:
        """Write what the system takes."""
        while True:
            pieces, descriptor = self._link.unwritten()
            if not pieces:
                break
            try:
                self._link.wrote(self._socket.sendmsg(pieces, _rights(descriptor)))
            except BlockingIOError:
                self._wait_to_write(True)
                return
            except OSError:
                # The other end is gone. The reading thread notices, behind all that it had still sent.
                return
        self._wait_to_write(False)

    def _wait_to_write(self, waits: bool) -> None:
        if waits is not self._waits_to_write:
            self._waits_to_write = waits
            self._epoll.modify(self._socket, _READ | _WRITE if waits else _READ)

    # --- on the reading thread --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the socket watched, and prove who this is."""
        # Once it is watched the other thread tells what it reads.
        was_open = self._link.is_open
        self._epoll.register(self._socket, _READ)
        with self._lock:
            self._write()
        if was_open:
            self._ear.opened()

    def ready(self, space: memoryview) -> bool:
        """The socket can be read, or written. Returns False if the connection has ended."""
        try:
            with self._lock:
                self._write()
            messages = self._read(space)
        except BlockingIOError:
            return True
        except OSError as error:
            return self._over(error_text(error))
        except Exception as error:  # noqa: BLE001 (what came is of no use: both ends are told)
            return self._over(error_text(error))
        if messages is None:
            return self._over("the other end is gone")
        try:
            for message in messages:
                self._ear.heard(message)
        except Exception as error:  # noqa: BLE001 (as above)
            return self._over(error_text(error))
        return True

    def _read(self, space: memoryview) -> list[Message] | None:
        """Read once. Returns the messages that are whole now; None: nothing follows."""
        large = self._link.space()
        if large is not None:
            size_bytes = self._socket.recv_into(large)
            return self._link.filled(size_bytes) if size_bytes else None
        if self._awaits_descriptor:
            size_bytes, ancillary, _, _ = self._socket.recvmsg_into([space], _DESCRIPTOR_SPACE, _CLOSED_IN_PROGRAMS)
            self._keep_descriptors(ancillary)
        else:
            size_bytes = self._socket.recv_into(space)
        if not size_bytes:
            return None
        was_open = self._link.is_open
        messages = self._link.read(space[:size_bytes])
        if self._link.is_open and not was_open:
            self._ear.opened()
        return messages

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array("i", data[: len(data) - len(data) % struct.calcsize("i")])
                for descriptor in found:
                    if self._received is None:
                        self._received = descriptor
                    else:
                        os.close(descriptor)

    def _over(self, reason: str) -> bool:
        with self._lock:
            self._closed = True
            _let_go(self._epoll, self._socket)
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)
        self._ear.over(reason)
        return False


class Connections:
    """The connections of one process. `died` takes the error with which the reading thread has ended."""

    def __init__(
        self, secret: bytes, process_id: str, came: Callable[[str], Ear | None], died: Callable[[BaseException], object]
    ) -> None:
        """`came`: gives who takes a connection from a process of this id, None to refuse it; on the reading thread."""
        self._secret, self._process_id = secret, process_id
        self._came, self._died = came, died
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._open: dict[int, Connection] = {}
        self._current: Connection | None = None
        """The one that the reading thread is busy with."""
        self._given_up = ""

    def listen(self) -> bytes:
        """Listen from now on. Returns the address at which processes of this node reach this one. OSError."""
        with self._lock:
            epoll = self._start()
        name = b"\0tidegate-" + secrets.token_hex(16).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(name)
            listener.listen(_BACKLOG)
            self._listener = listener
            epoll.register(listener, _READ)
        except BaseException:
            self._listener = None
            listener.close()
            raise
        return name

    def connect(self, address: bytes, process_id: str, ear: Ear) -> None:
        """Connect to the process of this id that listens there. OSError if that cannot be."""
        with self._lock:
            epoll = self._start()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        number = connected.fileno()
        try:
            connected.setblocking(False)
            connected.connect(address)
            if not _is_ours(connected):
                raise OSError("a process of another user listens there")
            own = self._process_id.encode()
            shows = _ID_SIZE.pack(len(own)) + own + self._proof(self._process_id, process_id)
            connection = Connection(epoll, connected, Link(shows, self._proof(process_id, self._process_id)), ear)
            ear.connected(connection)
            self._open[number] = connection
            connection.begin()
        except BaseException:
            self._open.pop(number, None)
            connected.close()
            raise

    def _proof(self, of: str, to: str) -> bytes:
        """What a process shows another one: whoever sees it cannot show it to a third one."""
        told = f"{of}\0{to}".encode()
        return hmac.digest(self._secret, told, hashlib.sha256)[:PROOF_BYTES]

    def _start(self) -> select.epoll:
        """Have what every connection needs, or OSError."""
        if self._given_up:
            raise OSError(self._given_up)
        if not hasattr(select, "epoll"):
            raise OSError("this system has no names for sockets that are no files (Linux)")
        if self._is_full:
            raise OSError(TOO_MANY)
        if self._epoll is None:
            epoll = select.epoll()
            threading.Thread(target=self._run, args=(epoll,), name="tidegate-link", daemon=True).start()
            os.register_at_fork(after_in_child=self._forked)
            self._epoll = epoll
        return self._epoll

    @property
    def _is_full(self) -> bool:
        return len(self._open) >= min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)

    def _forked(self) -> None:
        """Close in a process that was forked off what is its parent's."""
        for connection in [*self._open.values(), *([] if self._current is None else [self._current])]:
            connection.abandon()
        for stranger, _ in list(self._strangers.values()):
            stranger.close()
        if self._listener is not None:
            self._listener.close()
        if self._epoll is not None:
            self._epoll.close()

    # --- on the reading thread --------------------------------------------------------------------------------------

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
        except BaseException as error:  # noqa: BLE001 (the thread is gone: the process cannot go on)
            self._given_up = f"the thread that reads has died: {error_text(error)}"
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
            # No file can be opened any more, say. The listener would be ready for ever. Closed, it refuses whoever
            # comes, who is answered by no accept else.
            _let_go(epoll, listener)
            self._listener = None
            log.warning("no connection is taken any more, frames go by calls of Ray: %s", error_text(error))
            self._given_up = error_text(error)
            return
        stranger.setblocking(False)
        if self._is_full or not _is_ours(stranger):
            stranger.close()
            return
        if len(self._strangers) >= STRANGERS_MAX:
            _let_go(epoll, self._strangers.pop(next(iter(self._strangers)))[0])
        self._strangers[stranger.fileno()] = stranger, bytearray()
        epoll.register(stranger, _READ)
        self._listen_to(epoll, stranger.fileno())

    def _listen_to(self, epoll: select.epoll, number: int) -> None:
        """A process that has proved nothing yet has sent something, or left."""
        stranger, shown = self._strangers[number]
        missing = PROOF_BYTES + (1 if not shown else 1 + shown[0]) - len(shown)
        try:
            # Not more than the proof: what follows it is for the connection, with the descriptor that may come with it.
            more = stranger.recv(1 if not shown else missing)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        shown += more
        if not more or shown[0] > ID_BYTES_MAX:
            del self._strangers[number]
            _let_go(epoll, stranger)
            return
        if len(shown) < 1 + shown[0] + PROOF_BYTES:
            return
        del self._strangers[number]
        process_id, proof = bytes(shown[1 : 1 + shown[0]]).decode(errors="replace"), bytes(shown[1 + shown[0] :])
        proved = hmac.compare_digest(proof, self._proof(process_id, self._process_id))
        ear = self._came(process_id) if proved else None
        if ear is None:
            _let_go(epoll, stranger)
            return
        epoll.unregister(stranger)
        connection = Connection(epoll, stranger, Link(self._proof(self._process_id, process_id), b""), ear)
        ear.connected(connection)
        self._open[number] = connection
        connection.begin()


def _rights(descriptor: int | None) -> list[tuple[int, int, array[int]]]:
    """What sends a descriptor along."""
    return [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]


def _let_go(epoll: select.epoll, watched: socket.socket) -> None:
    """Close a socket. Unwatched first: where a process that was forked off still has it, it would be reported."""
    with suppress(OSError, ValueError):
        epoll.unregister(watched)
    watched.close()


def _is_ours(connected: socket.socket) -> bool:
    """Whether the process at the other end is one of this user's."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
