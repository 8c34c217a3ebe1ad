"""`ControlChannel`: messages between a coordinator and a worker's process, over a socket or by calls of Ray.

A single call of Ray wakes some ten threads, and costs twenty times as much as a message over a socket. Rules:

- The coordinator connects to a process on its node as soon as the process has started. Until then, and without a
  connection, messages are Ray calls.
- A message goes over the connection once all earlier calls were answered. So messages arrive in order.
- Each message is acknowledged when the other process has handled it. When the connection breaks, or too many messages
  wait, unacknowledged messages are sent by Ray calls. So a message may arrive twice, and a lost message is always
  reported.
- A message of `send_unacknowledged` may get lost, because a later message replaces it.
- A broken connection is not opened again. A new coordinator opens its own.
"""

from __future__ import annotations

import logging
import pickle
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

from tidegate.actors.ray.framed_connections import Bytes, Connections, FramedConnection, Kind, Message
from tidegate.actors.ray.task_deployment import Handle
from tidegate.protocol.failures import error_text

log = logging.getLogger(__name__)

COORDINATOR = "coordinator"
"""Process id of every coordinator on its connections. The connection of a new coordinator replaces an older one."""
UNANSWERED_MAX = 1_000
"""Limit of messages without acknowledgement on a connection. Beyond it, messages are sent by Ray calls."""
_NUMBER = struct.Struct("<Q")

Handlers: TypeAlias = Mapping[str, Any]
"""The methods that handle received messages, by name. They are called from any thread."""


class PendingSend:
    """A message to another process that is not acknowledged yet. It has the same interface as Ray's reference to a
    call.
    """

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self._answered: Future[None] = Future()

    def future(self) -> Future[None]:
        """Returns a future that is done when the other process has handled the message, or fails with the error."""
        return self._answered


class ControlChannel:
    """The channel for messages to one process: a socket connection or, without one, calls of its Ray actor `handle`.

    May be used from any thread. `handlers` has the functions, by name, that handle messages from the process.
    """

    def __init__(self, handle: Handle, handlers: Handlers) -> None:
        self._handle, self._handlers = handle, handlers
        self._lock = threading.RLock()
        self._end: _End | None = None
        """This end of the connection, or None while messages are sent by Ray calls."""
        self._calls = 0
        """Number of Ray calls without an answer."""
        self._unacknowledged_call = False
        """True if an unacknowledged message was sent by a Ray call, and no acknowledged call came after it."""
        self._next_number = 0
        self._unanswered: dict[int, PendingSend] = {}
        """Messages that were sent over the connection and are not acknowledged, by number."""

    @property
    def connected(self) -> bool:
        """Returns whether messages are sent over a socket connection, and not by Ray calls. May change at any time."""
        return self._end is not None

    def send(self, name: str, *arguments: Any) -> PendingSend:
        """Sends a message, which calls method `name` of the other process and is acknowledged."""
        pending = PendingSend(name, arguments)
        with self._lock:
            if self._calls or self._unacknowledged_call or not self._try_send(pending):
                self._call(pending)
        return pending

    def send_unacknowledged(self, name: str, *arguments: Any) -> None:
        """Sends a message, which calls method `name` of the other process, and which may be lost."""
        with self._lock:
            end = self._end
            if end is None or not end.send(Kind.UNACKNOWLEDGED, pickle.dumps((name, arguments), 5)):
                self._unacknowledged_call = True
                getattr(self._handle, name).remote(*arguments)

    def join(self, connections: Connections, address: bytes, process_id: str, handlers: Handlers) -> None:
        """Opens a socket connection from the coordinator to a worker process, for the messages of this channel.

        `address` is the process's socket address. `handlers` has the functions, by name, that handle messages from the
        process.
        """
        self._handlers = handlers
        try:
            connections.connect(address, process_id, _End(self))
        except OSError as error:
            log.info(
                "messages to process %s go by calls of Ray, not over a connection: %s", process_id, error_text(error)
            )

    def accept(self) -> _End:
        """Returns the listener for a new connection from a coordinator, and closes the previous connection. Runs on the
        reading thread.
        """
        with self._lock:
            if self._end is not None:
                self._break(self._end)
        return _End(self)

    # --- with the lock --------------------------------------------------------------------------------------------

    def _try_send(self, pending: PendingSend) -> bool:
        """Sends a message over the connection. Returns False if the message must be sent by a Ray call instead."""
        if self._end is None:
            return False
        if len(self._unanswered) < UNANSWERED_MAX:
            message = pickle.dumps((pending.name, pending.arguments), 5)
            if self._end.send(Kind.MESSAGE, _NUMBER.pack(self._next_number), message):
                self._unanswered[self._next_number] = pending
                self._next_number += 1
                return True
        if self._unanswered:
            # A call would overtake the unacknowledged messages.
            self._break(self._end)
        return False

    def _call(self, pending: PendingSend) -> None:
        def answered(call: Future[Any]) -> None:
            with self._lock:
                self._calls -= 1
            _settle(pending, call.exception())

        self._calls += 1
        self._unacknowledged_call = False
        try:
            call = getattr(self._handle, pending.name).remote(*pending.arguments).future()
        except Exception as error:  # noqa: BLE001 (reported to the sender through the future)
            self._calls -= 1
            _settle(pending, error)
            return
        call.add_done_callback(answered)

    def _break(self, end: _End) -> None:
        end.cut()
        self._end = None
        unanswered, self._unanswered = self._unanswered, {}
        for pending in unanswered.values():
            self._call(pending)

    # --- on the reading thread -------------------------------------------------------------------------

    def opened(self, end: _End) -> None:
        """Makes the channel send its messages over this connection from now on."""
        with self._lock:
            self._end = end

    def answered(self, number: int) -> None:
        """Completes the future of the message with this number, because the other process has acknowledged it."""
        with self._lock:
            pending = self._unanswered.pop(number, None)
        if pending is not None:
            _settle(pending, None)

    def received(self, message: Bytes) -> None:
        """Handles a message from the other process."""
        name, arguments = pickle.loads(message)
        self._handlers[name](*arguments)

    def over(self, end: _End) -> None:
        """Makes the channel send its messages by Ray calls from now on, because the connection has ended."""
        with self._lock:
            if end is self._end:
                self._break(end)


class _End:
    """One end of a `ControlChannel`'s socket connection (a `Listener`), which passes received messages to the
    channel.
    """

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._connection: FramedConnection | None = None

    def connected(self, connection: FramedConnection) -> None:
        """Stores the connection for sending messages."""
        self._connection = connection

    def send(self, kind: Kind, *payload: Bytes) -> bool:
        """Sends a message. Returns False if the connection has ended."""
        return self._connection is not None and self._connection.send(kind, *payload)

    def cut(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.cut()

    def opened(self) -> None:
        """Called when the connection can be used."""
        self._channel.opened(self)

    def received(self, message: Message) -> None:
        """Handles a message or an acknowledgement from the other end."""
        if message.kind is Kind.ACKNOWLEDGED:
            self._channel.answered(*_NUMBER.unpack(message.payload))
        elif message.kind is Kind.UNACKNOWLEDGED:
            self._channel.received(message.payload)
        else:
            self._channel.received(memoryview(message.payload)[_NUMBER.size :])
            self.send(Kind.ACKNOWLEDGED, message.payload[: _NUMBER.size])

    def over(self, reason: str) -> None:
        """Called when the connection has ended."""
        self._channel.over(self)


def _settle(pending: PendingSend, error: BaseException | None) -> None:
    if error is None:
        pending.future().set_result(None)
    else:
        pending.future().set_exception(error)
