"""Connections between processes of a job on the same node: framed messages over Unix sockets.

`FramedConnection` has the socket, `FrameCodec` converts messages to bytes and back, `Connections` accepts and opens
connections. Rules:

- A process listens from its start, on an abstract socket name that cannot be guessed. The name is not a file, so
  nothing is left behind, however the process ends.
- Only processes of the same user are accepted, and only if they prove that they have the secret of the job. Both ends
  prove it, for this pair of processes and this direction. No other bytes are read before the proof.
- One connection joins two processes, and lasts as long as both. It is not opened again when it breaks.
- One thread reads for all connections and waits for nothing else. `send` writes at once what the kernel accepts, and
  the reading thread writes the remaining bytes. `send` never blocks.
- Only the reading thread closes sockets, so it never acts on a file number that the kernel has given to a new socket.
- Processes that user code forks close the sockets, because other processes detect the end of a process by its
  connections.
- A message has a length and a kind. Messages are read whole, in the order in which they were sent, up to
  `MESSAGE_BYTES_MAX`. The credit of the channels limits the unwritten bytes. A large message is read into a separate
  buffer, which Arrow can use for its rows. At most one message carries a file descriptor, for shared memory.
"""

from __future__ import annotations

import enum
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from tidegate.protocol.failures import error_text
from tidegate.storage.errors import ProtocolError

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 512
"""Limit of connections of a process. It also uses at most an eighth of its limit of open files."""
STRANGERS_MAX = 64
"""Limit of connections that have not been authenticated. A new one beyond it closes the oldest one."""
READ_BYTES = 256 * 1024
PROOF_BYTES = 16
ID_BYTES_MAX = 200
_ID_SIZE = struct.Struct("<B")
_BACKLOG = 4096
_CREDENTIALS = struct.Struct("=iII")
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))
_CLOSED_IN_PROGRAMS = 0x40000000
"""The flag MSG_CMSG_CLOEXEC: programs that this process starts do not inherit a received descriptor."""
_READ, _WRITE = 1, 4
"""EPOLLIN and EPOLLOUT, which the `select` module lacks on other systems."""

TOO_MANY = "too many connections"


class Listener(Protocol):
    """Receives the events of a connection. Called on the reading thread, so no method may block."""

    def connected(self, connection: FramedConnection) -> None:
        """Called first, with the connection: on the caller's thread for `connect`, otherwise on the reading
        thread.
        """

    def opened(self) -> None:
        """Called when the process at the other end has proved its identity, so that messages can be sent."""

    def received(self, message: Message) -> None:
        """Called with each received message. An exception ends the connection."""

    def over(self, reason: str) -> None:
        """Called last, when the connection has ended."""


class FramedConnection:
    """One end of a connection. `send` and `cut` may be called from any thread."""

    def __init__(self, epoll: select.epoll, connected: socket.socket, codec: FrameCodec, listener: Listener) -> None:
        self._epoll, self._socket, self._codec, self._listener = epoll, connected, codec, listener
        self._lock = threading.Lock()
        self._waits_to_write = self._closed = False
        self._received: int | None = None
        """The file descriptor that the other end has sent, until `take_descriptor` returns it."""
        self._awaits_descriptor = True

    def send(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> bool:
        """Sends a message. Returns False if the connection has ended. Raises ProtocolError if the message is too
        large.
        """
        with self._lock:
            if self._closed:
                return False
            self._codec.send(kind, *payload, descriptor=descriptor)
            if not self._waits_to_write:
                self._write()
        return True

    def cut(self) -> None:
        """Closes the connection now. Unsent messages are lost."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Closes the socket in a forked process, without the lock, which may never be released there."""
        self._socket.close()

    def take_descriptor(self) -> int | None:
        """Returns the file descriptor that came with a message, or None. The caller closes it."""
        descriptor, self._received = self._received, None
        self._awaits_descriptor = False
        return descriptor

    def _write(self) -> None:
        """Writes as many of the queued bytes as the kernel accepts."""
        while True:
            pieces, descriptor = self._codec.unwritten()
            if not pieces:
                break
            try:
                self._codec.wrote(self._socket.sendmsg(pieces, _rights(descriptor)))
            except BlockingIOError:
                self._watch_for_writing(True)
                return
            except OSError:
                # The other end is gone. The reading thread notices it, after it has read everything that was sent
                # before.
                return
        self._watch_for_writing(False)

    def _watch_for_writing(self, waits: bool) -> None:
        if waits is not self._waits_to_write:
            self._waits_to_write = waits
            self._epoll.modify(self._socket, _READ | _WRITE if waits else _READ)

    # --- on the reading thread --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Registers the socket with epoll, and sends the proof of this process's identity."""
        # After registration the reading thread calls `opened` itself.
        was_open = self._codec.is_open
        self._epoll.register(self._socket, _READ)
        with self._lock:
            self._write()
        if was_open:
            self._listener.opened()

    def ready(self, space: memoryview) -> bool:
        """Writes queued bytes and reads messages, because epoll has reported the socket. Returns False if the
        connection has ended.
        """
        try:
            with self._lock:
                self._write()
            messages = self._read(space)
        except BlockingIOError:
            return True
        except OSError as error:
            return self._over(error_text(error))
        except Exception as error:  # noqa: BLE001 (the message is invalid: end the connection for both)
            return self._over(error_text(error))
        if messages is None:
            return self._over("the other end is gone")
        try:
            for message in messages:
                self._listener.received(message)
        except Exception as error:  # noqa: BLE001 (as above)
            return self._over(error_text(error))
        return True

    def _read(self, space: memoryview) -> list[Message] | None:
        """Reads once from the socket. Returns the messages that are now complete, or None at the end of the
        stream.
        """
        large = self._codec.space()
        if large is not None:
            size_bytes = self._socket.recv_into(large)
            return self._codec.filled(size_bytes) if size_bytes else None
        if self._awaits_descriptor:
            size_bytes, ancillary, _, _ = self._socket.recvmsg_into([space], _DESCRIPTOR_SPACE, _CLOSED_IN_PROGRAMS)
            self._keep_descriptors(ancillary)
        else:
            size_bytes = self._socket.recv_into(space)
        if not size_bytes:
            return None
        was_open = self._codec.is_open
        messages = self._codec.read(space[:size_bytes])
        if self._codec.is_open and not was_open:
            self._listener.opened()
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
            _close_socket(self._epoll, self._socket)
        if (descriptor := self.take_descriptor()) is not None:
            os.close(descriptor)
        self._listener.over(reason)
        return False


class Connections:
    """The connections of one process, and the thread that reads them. `died` is called with the error if the
    thread ends.
    """

    def __init__(
        self,
        secret: bytes,
        process_id: str,
        listener_for: Callable[[str], Listener | None],
        died: Callable[[BaseException], object],
    ) -> None:
        """Creates the object without any connection.

        `listener_for` returns the listener for a connection from the process with this id, or None to refuse it. It
        runs on the reading thread.
        """
        self._secret, self._process_id = secret, process_id
        self._listener_for, self._died = listener_for, died
        self._lock = threading.Lock()
        self._epoll: select.epoll | None = None
        self._listener: socket.socket | None = None
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._open: dict[int, FramedConnection] = {}
        self._current: FramedConnection | None = None
        """The connection that the reading thread is handling, or None."""
        self._unavailable = ""

    def listen(self) -> bytes:
        """Starts to accept connections. Returns the address for other processes of this node. Raises OSError."""
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

    def connect(self, address: bytes, process_id: str, listener: Listener) -> None:
        """Connects to the process `process_id` at an address on this node. Raises OSError if that fails."""
        with self._lock:
            epoll = self._start()
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        number = connected.fileno()
        try:
            connected.setblocking(False)
            connected.connect(address)
            if not _is_ours(connected):
                raise OSError(
                    f"a process of another user listens at the socket of process {process_id}; end that process, or "
                    "run the job as that user"
                )
            own = self._process_id.encode()
            shows = _ID_SIZE.pack(len(own)) + own + self._proof(self._process_id, process_id)
            connection = FramedConnection(
                epoll, connected, FrameCodec(shows, self._proof(process_id, self._process_id)), listener
            )
            listener.connected(connection)
            self._open[number] = connection
            connection.begin()
        except BaseException:
            self._open.pop(number, None)
            connected.close()
            raise

    def _proof(self, of: str, to: str) -> bytes:
        """Returns the bytes by which process `of` proves its identity to process `to`: an HMAC of both ids with the
        secret of the job.
        """
        text = f"{of}\0{to}".encode()
        return hmac.digest(self._secret, text, hashlib.sha256)[:PROOF_BYTES]

    def _start(self) -> select.epoll:
        """Starts the reading thread if it does not run. Raises OSError if no connection is possible."""
        if self._unavailable:
            raise OSError(self._unavailable)
        if not hasattr(select, "epoll"):
            raise OSError(
                "this system has no abstract socket names (only Linux has), so processes of one node use Ray's calls"
            )
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
        """Closes, in a forked process, the sockets of the parent."""
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
                        self._serve(number, connection, space)
                    elif number in self._strangers:
                        self._read_proof(epoll, number)
                    elif self._listener is not None:
                        self._accept(epoll, self._listener)
        except BaseException as error:  # noqa: BLE001 (without this thread the process has to end)
            self._unavailable = f"the thread that reads has died: {error_text(error)}"
            self._died(error)

    def _serve(self, number: int, connection: FramedConnection, space: memoryview) -> None:
        # Removed first: a new connection may get the same number once this socket is closed.
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
            # For example, the process can open no more files. The listener would stay ready forever, so it is closed.
            # Then connecting processes are refused instead of waiting for an accept.
            _close_socket(epoll, listener)
            self._listener = None
            log.warning("no connection is taken any more, frames go by calls of Ray: %s", error_text(error))
            self._unavailable = error_text(error)
            return
        stranger.setblocking(False)
        if self._is_full or not _is_ours(stranger):
            stranger.close()
            return
        if len(self._strangers) >= STRANGERS_MAX:
            _close_socket(epoll, self._strangers.pop(next(iter(self._strangers)))[0])
        self._strangers[stranger.fileno()] = stranger, bytearray()
        epoll.register(stranger, _READ)
        self._read_proof(epoll, stranger.fileno())

    def _read_proof(self, epoll: select.epoll, number: int) -> None:
        """Reads the proof of a process that has connected. Opens the connection once the proof is complete and
        valid.
        """
        stranger, shown = self._strangers[number]
        missing = PROOF_BYTES + (1 if not shown else 1 + shown[0]) - len(shown)
        try:
            # Reads no more than the proof. The bytes after it, and a descriptor that comes with them, belong to the
            # connection.
            more = stranger.recv(1 if not shown else missing)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        shown += more
        if not more or shown[0] > ID_BYTES_MAX:
            del self._strangers[number]
            _close_socket(epoll, stranger)
            return
        if len(shown) < 1 + shown[0] + PROOF_BYTES:
            return
        del self._strangers[number]
        process_id, proof = bytes(shown[1 : 1 + shown[0]]).decode(errors="replace"), bytes(shown[1 + shown[0] :])
        proved = hmac.compare_digest(proof, self._proof(process_id, self._process_id))
        listener = self._listener_for(process_id) if proved else None
        if listener is None:
            _close_socket(epoll, stranger)
            return
        epoll.unregister(stranger)
        connection = FramedConnection(
            epoll, stranger, FrameCodec(self._proof(self._process_id, process_id), b""), listener
        )
        listener.connected(connection)
        self._open[number] = connection
        connection.begin()


def _rights(descriptor: int | None) -> list[tuple[int, int, array[int]]]:
    """Returns the ancillary data for `sendmsg` that passes a file descriptor to the other process. Empty for None."""
    return [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]


def _close_socket(epoll: select.epoll, watched: socket.socket) -> None:
    """Removes a socket from epoll, and closes it. Otherwise epoll would still report a socket that a forked
    process holds.
    """
    with suppress(OSError, ValueError):
        epoll.unregister(watched)
    watched.close()


def _is_ours(connected: socket.socket) -> bool:
    """Returns whether the process at the other end belongs to this user."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())


MESSAGE_BYTES_MAX = 1 << 30
LARGE_BYTES = 256 * 1024
"""Size in bytes from which a message is read into a separate buffer."""
PIECES_MAX = 64
"""Limit of the number of buffers in one write."""
COPIED_BYTES_MAX = 4096
"""Size in bytes up to which the buffers of a message are joined, because a copy costs less than separate writes."""
MESSAGE_HEAD = struct.Struct("<IB")

Bytes: TypeAlias = bytes | bytearray | memoryview


class Kind(enum.IntEnum):
    """The kinds of messages: the first six between workers (`peer_connections.py`), the last three in a
    `ControlChannel`.
    """

    MEMORY = 1
    MAPPED = 2
    FRAME = 3
    CREDIT = 4
    SYNC = 5
    SYNCED = 6
    MESSAGE = 7
    ACKNOWLEDGED = 8
    UNACKNOWLEDGED = 9


class Message(NamedTuple):
    """A received message. `payload` is aligned for Arrow if it is large."""

    kind: Kind
    payload: bytes | memoryview


class FrameCodec:
    """Converts messages to bytes and back for one end of a connection, including the proofs at the beginning.

    `shows` is the proof that this end sends first. `expects` is the proof that the other end sends first, or empty if
    it was read already.
    """

    def __init__(self, shows: Bytes, expects: bytes) -> None:
        self._expects = expects
        self._unread = bytearray()
        """Received bytes of an incomplete message."""
        self._large: memoryview | None = None
        """The buffer for the payload of the large message that is being read, or None."""
        self._large_kind, self._large_bytes = Kind.FRAME, 0
        """The kind of the large message, and the number of its bytes that were read."""
        self._unwritten: deque[memoryview] = deque((memoryview(shows),) if shows else ())
        self._descriptor: int | None = None
        self._pieces_before_descriptor = 0

    @property
    def is_open(self) -> bool:
        """Returns whether the other end has proved its identity."""
        return not self._expects

    # --- writing ----------------------------------------------------------------------------------------------------

    def send(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> None:
        """Queues a message, with or without a file descriptor. Raises ProtocolError if the message is too large."""
        size_bytes = sum(map(len, payload))
        if size_bytes > MESSAGE_BYTES_MAX:
            raise ProtocolError(
                f"a message of {size_bytes} bytes exceeds the limit of {MESSAGE_BYTES_MAX} bytes between processes. "
                "Make batches smaller, for example with source_rows_max."
            )
        head = MESSAGE_HEAD.pack(size_bytes, kind)
        if descriptor is not None:
            self._descriptor, self._pieces_before_descriptor = descriptor, len(self._unwritten)
        pieces: Sequence[Bytes] = (b"".join((head, *payload)),) if size_bytes < COPIED_BYTES_MAX else (head, *payload)
        self._unwritten.extend(memoryview(piece) for piece in pieces if len(piece))

    def unwritten(self) -> tuple[list[memoryview], int | None]:
        """Returns the next buffers to write, and the file descriptor to send with their first byte, or None."""
        if self._descriptor is None:
            return list(islice(self._unwritten, PIECES_MAX)), None
        before = self._pieces_before_descriptor
        return list(islice(self._unwritten, min(before, PIECES_MAX) or 1)), None if before else self._descriptor

    def wrote(self, size_bytes: int) -> None:
        """Removes this number of bytes from the beginning of the queued buffers, because they were written."""
        if size_bytes and not self._pieces_before_descriptor:
            self._descriptor = None
        while size_bytes:
            piece = self._unwritten[0]
            if len(piece) > size_bytes:
                self._unwritten[0] = piece[size_bytes:]
                return
            size_bytes -= len(piece)
            self._unwritten.popleft()
            self._pieces_before_descriptor = max(0, self._pieces_before_descriptor - 1)

    # --- reading ----------------------------------------------------------------------------------------------------

    def space(self) -> memoryview | None:
        """Returns the buffer for the next bytes of a large message, to be confirmed with `filled`. None if bytes
        go to `read`.
        """
        return None if self._large is None else self._large[self._large_bytes :]

    def filled(self, size_bytes: int) -> list[Message]:
        """Records the number of bytes that were read into `space`. Returns the large message once it is complete,
        else nothing.
        """
        assert self._large is not None
        self._large_bytes += size_bytes
        if self._large_bytes < len(self._large):
            return []
        message, self._large = Message(self._large_kind, self._large), None
        return [message]

    def read(self, data: Bytes) -> list[Message]:
        """Adds received bytes. Returns the messages that are now complete. Raises ProtocolError for invalid
        bytes.
        """
        self._unread += data
        at = 0
        if self._expects:
            if len(self._unread) < len(self._expects):
                return []
            if self._unread[: len(self._expects)] != self._expects:
                raise ProtocolError(
                    "the process at the other end of a connection is not the expected process; the connection is closed"
                )
            at, self._expects = len(self._expects), b""
        messages: list[Message] = []
        with memoryview(self._unread) as unread:
            while len(unread) - at >= MESSAGE_HEAD.size:
                size_bytes, number = MESSAGE_HEAD.unpack_from(unread, at)
                if size_bytes > MESSAGE_BYTES_MAX or number not in _KINDS:
                    raise ProtocolError(
                        f"a connection received an invalid message of {size_bytes} bytes and kind {number}; the "
                        "connection is closed"
                    )
                begin, end = at + MESSAGE_HEAD.size, at + MESSAGE_HEAD.size + size_bytes
                if end > len(unread):
                    if size_bytes >= LARGE_BYTES:
                        self._begin_large(Kind(number), size_bytes, unread[begin:])
                        at = len(unread)
                    break
                messages.append(Message(Kind(number), bytes(unread[begin:end])))
                at = end
        del self._unread[:at]
        return messages

    def _begin_large(self, kind: Kind, size_bytes: int, begin: memoryview) -> None:
        self._large = memoryview(pa.allocate_buffer(size_bytes)).cast("B")
        self._large[: len(begin)] = begin
        self._large_kind, self._large_bytes = kind, len(begin)


_KINDS = frozenset(Kind)
