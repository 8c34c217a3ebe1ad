"""`Line`: what a coordinator and a process of one of its tasks say to each other: over a socket, or by calls of Ray.

A call that comes now and then wakes up some ten threads of Ray, and costs twenty times as much. Rules:

- It begins with calls. After a few, to either side, the coordinator offers a connection to a process on its node, by a
  call. `Connections` says who may take it.
- A message goes over the connection if all that was called before was answered. So messages arrive in order.
- Each is answered when it was handed on at the other end, as a call is. When the connection breaks, or takes no more,
  what was not answered is called. So a message may come twice, and none is lost unnoticed.
- A mention is not answered, and may get lost: a later one says more.
- A connection that has ended is not made again. A coordinator that takes over offers its own.
"""

from __future__ import annotations

import logging
import pickle
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

import ray

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.runtimes.ray.exchange.connections import Connection, Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.link import Kind, Message
from tidegate.actors.runtimes.ray.process.orders import Handle

log = logging.getLogger(__name__)

OFFER_AFTER_USES = 4
UNANSWERED_MAX = 1_000
"""Messages without an answer; what follows is called."""
_NUMBER = struct.Struct("<Q")

Doors: TypeAlias = Mapping[str, Any]
"""The methods by which a process takes in what is said to it, by name, from any thread."""


class Said:
    """A message; stands for Ray's reference to a call."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self._answered: Future[None] = Future()

    def future(self) -> Future[None]:
        """Done when the other process has taken it in, or with the error of the call."""
        return self._answered


class Line:
    """To one process, whose actor's handle this is. For any thread. `doors`: where what it says comes in."""

    def __init__(self, handle: Handle, doors: Doors) -> None:
        self._handle, self._doors = handle, doors
        self._lock = threading.RLock()
        self._end: _End | None = None
        """The connection, while it can be used."""
        self._offer: Callable[[], None] | None = None
        """Offers a connection; None: it is offered, or never will be."""
        self._uses = 0
        self._calls = 0
        """Calls that were not answered yet."""
        self._mentioned = False
        """Whether a mention was called, and no call after it."""
        self._said = 0
        self._unanswered: dict[int, Said] = {}
        """What was said over the connection, by its number."""

    def say(self, name: str, *arguments: Any) -> Said:
        """Call a method of the other process."""
        said = Said(name, arguments)
        with self._lock:
            if self._calls or self._mentioned or not self._say(said):
                self._call(said)
        self.used()
        return said

    def mention(self, name: str, *arguments: Any) -> None:
        """Call a method of the other process whose result nobody wants, and which it may miss."""
        with self._lock:
            end = self._end
            if end is None or not end.say(Kind.MENTIONED, pickle.dumps((name, arguments), 5)):
                self._mentioned = True
                getattr(self._handle, name).remote(*arguments)

    # --- of the coordinator ---------------------------------------------------------------------------------------

    def allow(self, connections: Connections, node_id: str, doors: Doors) -> None:
        """The process is on this node: it may be offered a connection."""
        self._doors, self._offer = doors, partial(self._offered, connections, node_id)

    def used(self) -> None:
        """Something was said, to or by the process: offer a connection if that was worth while."""
        with self._lock:
            self._uses += 1
            if self._uses < OFFER_AFTER_USES or self._offer is None:
                return
            offer, self._offer = self._offer, None
        offer()

    def _offered(self, connections: Connections, node_id: str) -> None:
        end = _End(self)
        try:
            offer = connections.offer(node_id, end, end.connected)
        except (OSError, RuntimeError) as error:
            _refused(error_text(error))
            return

        def answered(call: Future[str]) -> None:
            error = call.exception()
            if refusal := call.result() if error is None else error_text(error):
                connections.withdraw(offer)
                _refused(refusal)

        self._handle.link.remote(offer).future().add_done_callback(answered)

    # --- of the other process -------------------------------------------------------------------------------------

    def take(self, connections: Connections, offer: LinkOffer) -> str:
        """Take what the coordinator offers, in place of what another one has offered. Why it cannot be, or empty."""
        with self._lock:
            if self._end is not None:
                self._break(self._end)
            end = _End(self)
            try:
                # With the lock: whoever hears that it is open waits until the end has it. To connect waits for nobody.
                end.connected(connections.connect(offer, end))
            except (OSError, RuntimeError) as error:
                return error_text(error)
        return ""

    # --- with the lock --------------------------------------------------------------------------------------------

    def _say(self, said: Said) -> bool:
        """Say it over the connection; False: it has to be called."""
        if self._end is None:
            return False
        if len(self._unanswered) < UNANSWERED_MAX:
            message = pickle.dumps((said.name, said.arguments), 5)
            if self._end.say(Kind.SAID, _NUMBER.pack(self._said), message):
                self._unanswered[self._said] = said
                self._said += 1
                return True
        if self._unanswered:
            # A call would overtake them.
            self._break(self._end)
        return False

    def _call(self, said: Said) -> None:
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

    # --- on the thread of the connections -------------------------------------------------------------------------

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

    def heard(self, message: bytes | memoryview) -> None:
        """The other process has said something."""
        name, arguments = pickle.loads(message)
        self._doors[name](*arguments)

    def over(self, end: _End) -> None:
        """A connection has ended."""
        with self._lock:
            if end is self._end:
                self._break(end)


class _End:
    """One end of a connection, from its offer on; an `Ear`."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._connection: Connection | None = None

    def connected(self, connection: Connection) -> None:
        """The other end has come."""
        self._connection = connection

    def say(self, kind: Kind, *payload: bytes) -> bool:
        """Say something; False: it has to go another way."""
        return self._connection is not None and self._connection.say(kind, *payload)

    def cut(self) -> None:
        """Nothing more is said."""
        if self._connection is not None:
            self._connection.cut()

    def opened(self) -> None:
        """It can be used."""
        self._line.opened(self)

    def heard(self, message: Message) -> None:
        """The other end has said something, or has taken something in."""
        if message.kind is Kind.TAKEN_IN:
            self._line.answered(*_NUMBER.unpack(message.payload))
        elif message.kind is Kind.MENTIONED:
            self._line.heard(message.payload)
        else:
            self._line.heard(memoryview(message.payload)[_NUMBER.size :])
            if not self.say(Kind.TAKEN_IN, message.payload[: _NUMBER.size]):
                self.cut()

    def over(self, reason: str | None) -> None:
        """Nothing follows."""
        self._line.over(self)


class HasLine:
    """A part of the class of an actor to which a coordinator may offer a connection."""

    def __init__(self, coordinator: Handle, connections: Connections, doors: Doors) -> None:
        self._line = Line(coordinator, doors)
        self.__connections = connections

    @ray.method(concurrency_group="control", enable_task_events=False)
    def link(self, offer: LinkOffer) -> str:
        """The coordinator offers a connection. Returns why not; empty: it is taken."""
        return self._line.take(self.__connections, offer)


def _settle(said: Said, error: BaseException | None) -> None:
    if error is None:
        said.future().set_result(None)
    else:
        said.future().set_exception(error)


def _refused(reason: str) -> None:
    log.info("the coordinator and a process of its job speak by calls of Ray, not over a connection: %s", reason)
