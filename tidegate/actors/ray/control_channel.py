"""`ControlChannel`: messages between a coordinator and a worker's process, over a socket or by calls of Ray.

A call of Ray that comes now and then wakes some ten threads, and costs twenty times as much as a socket. Rules:

- The coordinator connects to a process on its node as soon as the process has started. Until then, and without a
  connection, messages are calls.
- A message goes over the connection once all earlier calls were answered. So messages arrive in order.
- Each message is acknowledged when the other end has handed it on, as a call is. When the connection breaks, or too
  many messages wait, unacknowledged ones are sent by calls. So a message may come twice, and none is lost unnoticed.
- An unacknowledged send (`send_unacknowledged`) may get lost: a later one replaces it.
- A connection that has ended is not made again. A coordinator that takes over makes its own.
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
"""The process id of a coordinator on connections: of all that a job has had the newest one is heard."""
UNANSWERED_MAX = 1_000
"""Messages without an answer; what follows is called."""
_NUMBER = struct.Struct("<Q")

Handlers: TypeAlias = Mapping[str, Any]
"""The methods by which a process takes in what is said to it, by name, from any thread."""


class PendingSend:
    """A message; stands for Ray's reference to a call."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self._answered: Future[None] = Future()

    def future(self) -> Future[None]:
        """Done when the other process has taken it in, or with the error of the call."""
        return self._answered


class ControlChannel:
    """To one process, whose actor's handle this is. For any thread. `doors`: where what it says comes in."""

    def __init__(self, handle: Handle, doors: Handlers) -> None:
        self._handle, self._doors = handle, doors
        self._lock = threading.RLock()
        self._end: _End | None = None
        """The connection, while it can be used."""
        self._calls = 0
        """Calls that were not answered yet."""
        self._mentioned = False
        """Whether a mention was called, and no call after it."""
        self._said = 0
        self._unanswered: dict[int, PendingSend] = {}
        """What was said over the connection, by its number."""

    def say(self, name: str, *arguments: Any) -> PendingSend:
        """Call a method of the other process."""
        said = PendingSend(name, arguments)
        with self._lock:
            if self._calls or self._mentioned or not self._say(said):
                self._call(said)
        return said

    def send_unacknowledged(self, name: str, *arguments: Any) -> None:
        """Call a method of the other process whose result nobody wants, and which it may miss."""
        with self._lock:
            end = self._end
            if end is None or not end.send(Kind.UNACKNOWLEDGED, pickle.dumps((name, arguments), 5)):
                self._mentioned = True
                getattr(self._handle, name).remote(*arguments)

    def join(self, connections: Connections, address: bytes, process_id: str, doors: Handlers) -> None:
        """Connect to the process, from the coordinator's. `doors`: where what it says comes in."""
        self._doors = doors
        try:
            connections.connect(address, process_id, _End(self))
        except OSError as error:
            log.info("process %s is told by calls of Ray, not over a connection: %s", process_id, error_text(error))

    def came(self) -> _End:
        """The coordinator connects, or another one that has taken its place. On the reading thread."""
        with self._lock:
            if self._end is not None:
                self._break(self._end)
        return _End(self)

    # --- with the lock --------------------------------------------------------------------------------------------

    def _say(self, said: PendingSend) -> bool:
        """Say it over the connection; False: it has to be called."""
        if self._end is None:
            return False
        if len(self._unanswered) < UNANSWERED_MAX:
            message = pickle.dumps((said.name, said.arguments), 5)
            if self._end.send(Kind.MESSAGE, _NUMBER.pack(self._said), message):
                self._unanswered[self._said] = said
                self._said += 1
                return True
        if self._unanswered:
            # A call would overtake them.
            self._break(self._end)
        return False

    def _call(self, said: PendingSend) -> None:
        def answered(call: Future[Any]) -> None:
            with self._lock:
                self._calls -= 1
            _settle(said, call.exception())

        self._calls += 1
        self._mentioned = False
        try:
            call = getattr(self._handle, said.name).remote(*said.arguments).future()
        except Exception as error:  # noqa: BLE001 (whoever has said it hears that it did not arrive)
            self._calls -= 1
            _settle(said, error)
            return
        call.add_done_callback(answered)

    def _break(self, end: _End) -> None:
        end.cut()
        self._end = None
        unanswered, self._unanswered = self._unanswered, {}
        for said in unanswered.values():
            self._call(said)

    # --- on the reading thread -------------------------------------------------------------------------

    def opened(self, end: _End) -> None:
        """A connection can be used."""
        with self._lock:
            self._end = end

    def answered(self, number: int) -> None:
        """The other process has taken a message in."""
        with self._lock:
            said = self._unanswered.pop(number, None)
        if said is not None:
            _settle(said, None)

    def heard(self, message: Bytes) -> None:
        """The other process has said something."""
        name, arguments = pickle.loads(message)
        self._doors[name](*arguments)

    def over(self, end: _End) -> None:
        """A connection has ended."""
        with self._lock:
            if end is self._end:
                self._break(end)


class _End:
    """One end of a connection; an `Listener`."""

    def __init__(self, line: ControlChannel) -> None:
        self._line = line
        self._connection: FramedConnection | None = None

    def connected(self, connection: FramedConnection) -> None:
        """There is a connection."""
        self._connection = connection

    def send(self, kind: Kind, *payload: Bytes) -> bool:
        """Send a message. Returns False if the connection has ended."""
        return self._connection is not None and self._connection.send(kind, *payload)

    def cut(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.cut()

    def opened(self) -> None:
        """It can be used."""
        self._line.opened(self)

    def heard(self, message: Message) -> None:
        """The other end has said something, or has taken something in."""
        if message.kind is Kind.ACKNOWLEDGED:
            self._line.answered(*_NUMBER.unpack(message.payload))
        elif message.kind is Kind.UNACKNOWLEDGED:
            self._line.heard(message.payload)
        else:
            self._line.heard(memoryview(message.payload)[_NUMBER.size :])
            self.send(Kind.ACKNOWLEDGED, message.payload[: _NUMBER.size])

    def over(self, reason: str) -> None:
        """The connection has ended."""
        self._line.over(self)


def _settle(said: PendingSend, error: BaseException | None) -> None:
    if error is None:
        said.future().set_result(None)
    else:
        said.future().set_exception(error)
