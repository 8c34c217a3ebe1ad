"""`NeighbourLinks`: the connections of one task of one attempt to the tasks that it has channels with.

Rules:

- `Ways` says which way something goes, `Connections` has the sockets. What comes over a connection is handed to the
  doors that calls of Ray come to: everything behind them is the same.
- A connection belongs to an attempt of both its ends, and goes with it. So nothing of an older attempt comes over it.
- A task that has finished says END, and has ended when its receivers have answered: they have heard all then.
- A connection that breaks while both tasks run has lost what was on its way, and nobody knows what. It is like a call
  that did not arrive: after a while, when the attempt should be gone if a process has died, the task fails.
  The process makes no connections from then on.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from tidegate.actors.protocol.failure_reasons import error_text
from tidegate.actors.protocol.identity import TaskId
from tidegate.actors.protocol.stream_elements import element_size_bytes
from tidegate.actors.runtimes.ray.exchange.connections import Connection, Connections, LinkOffer
from tidegate.actors.runtimes.ray.exchange.frame_exchange import ELSEWHERE, Elements
from tidegate.actors.runtimes.ray.exchange.frame_heads import Head
from tidegate.actors.runtimes.ray.exchange.frames import OneSchema
from tidegate.actors.runtimes.ray.exchange.link import Bytes, Kind, Message
from tidegate.actors.runtimes.ray.exchange.messages import Frame, pack_credit, pack_frame, unpack_credit, unpack_frame
from tidegate.actors.runtimes.ray.exchange.ways import Way, Ways

log = logging.getLogger(__name__)


class Doors(Protocol):
    """Where frames and credit come in, from any thread."""

    def frame(self, head: Head, elements: tuple[object, ...], place: tuple[object, ...] | None = None) -> None:
        """A frame."""

    def credit(self, head: Head, window_bytes: int) -> None:
        """A grant."""


class NeighbourLinks:
    """Everything runs on the mailbox. `later` posts to it; `offer` asks by a call of Ray, `watch` hears of an end."""

    def __init__(
        self,
        connections: Connections,
        node_id: str,
        wanted: bool,
        doors: Doors,
        later: Callable[[Callable[[], None]], object],
        offer: Callable[[TaskId, LinkOffer], object],
        watch: Callable[[TaskLink], object],
    ) -> None:
        self._connections, self._node_id, self._doors = connections, node_id, doors
        self._later, self._offer, self._watch = later, offer, watch
        self._ways = Ways(wanted)
        self._links: dict[TaskId, TaskLink] = {}
        self._schemas: dict[TaskId, OneSchema] = {}
        self._noted: set[str] = set()

    def send(self, receiver: TaskId, frame: Frame) -> bool:
        """Send a frame; False: it has to go by a call."""
        if self._ways.of(receiver) is not Way.CONNECTION:
            return False
        packed = pack_frame(frame, self._schemas.setdefault(receiver, OneSchema()))
        return packed is not None and self._links[receiver].say(Kind.FRAME, *packed)

    def grant(self, sender: TaskId, head: Head, window_bytes: int) -> bool:
        """Grant credit; False: it has to go by a call."""
        if self._ways.of(sender) is not Way.CONNECTION:
            return False
        return self._links[sender].say(Kind.CREDIT, pack_credit(head, window_bytes))

    def called(self, receiver: TaskId, elements: Elements) -> None:
        """A frame went by a call."""
        if self._ways.of(receiver) is not Way.CALLS:
            return
        if not self._ways.called(receiver, sum(map(element_size_bytes, elements))):
            return
        link = TaskLink(receiver, True, self._doors, self._later, self._opened)
        try:
            link.offer = self._connections.offer(self._node_id, link, link.connected)
        except (OSError, RuntimeError) as error:
            self._refused(receiver, error_text(error))
            return
        self._begin(link)
        self._offer(receiver, link.offer)

    def answered(self, receiver: TaskId, refusal: str) -> None:
        """The receiver has heard of the offer, and comes, or says why not."""
        if refusal and self._ways.of(receiver) is Way.OFFERED:
            self._refused(receiver, refusal)
            self._links.pop(receiver).cut(self._connections)

    def take(self, sender: TaskId, offer: LinkOffer) -> str:
        """A sender offers a connection. Why it cannot be; empty: it is tried. From any thread."""
        if offer.node_id != self._node_id:
            return ELSEWHERE
        self._later(lambda: self._connect(sender, offer))
        return ""

    def finish(self) -> list[TaskLink]:
        """The task has finished: what ends when the receivers have heard everything."""
        links, self._links = self._links, {}
        return [link for link in links.values() if link.finish(self._connections)]

    def close(self) -> None:
        """The task is over."""
        for link in self._links.values():
            link.cut(self._connections)
        self._links.clear()

    def _connect(self, sender: TaskId, offer: LinkOffer) -> None:
        if self._ways.of(sender) is not Way.CALLS or sender in self._links:
            return
        link = TaskLink(sender, False, self._doors, self._later, self._opened)
        try:
            link.connected(self._connections.connect(offer, link))
        except (OSError, RuntimeError) as error:
            self._refused(sender, error_text(error))
            return
        self._begin(link)

    def _begin(self, link: TaskLink) -> None:
        self._links[link.neighbour] = link
        self._watch(link)
        link.future().add_done_callback(lambda _: self._later(lambda: self._ways.ended(link.neighbour)))

    def _opened(self, link: TaskLink) -> None:
        if link is self._links.get(link.neighbour):
            self._ways.opened(link.neighbour)

    def _refused(self, neighbour: TaskId, reason: str) -> None:
        self._ways.ended(neighbour)
        if reason != ELSEWHERE and reason not in self._noted:
            self._noted.add(reason)
            log.warning("what goes to %s goes by calls of Ray, not over a connection: %s", neighbour, reason)


class _Wish(enum.Enum):
    """What the task wants of a connection that may not be there yet."""

    KEEP = "keep"
    END = "end"
    CUT = "cut"


class TaskLink:
    """The connection to one neighbour, from its offer on; an `Ear`. `future` is done when it is over."""

    def __init__(
        self,
        neighbour: TaskId,
        sends: bool,
        doors: Doors,
        later: Callable[[Callable[[], None]], object],
        opened: Callable[[TaskLink], None],
    ) -> None:
        self.neighbour, self.sends = neighbour, sends
        self.offer: LinkOffer | None = None
        self._doors, self._later, self._told_open = doors, later, opened
        self._connection: Connection | None = None
        self._wish = _Wish.KEEP
        self._gone: Future[None] = Future()

    def future(self) -> Future[None]:
        """With an error if something may be lost."""
        return self._gone

    # --- on the mailbox -------------------------------------------------------------------------------------------

    def say(self, kind: Kind, *payload: Bytes) -> bool:
        """Say something; False: it has to go another way."""
        return self._connection is not None and self._connection.say(kind, *payload)

    def finish(self, connections: Connections) -> bool:
        """The task has said everything. Whether somebody has to hear it."""
        self._leave(_Wish.END, connections)
        return self.sends and self._connection is not None

    def cut(self, connections: Connections) -> None:
        """The task is over, whatever was said."""
        self._leave(_Wish.CUT, connections)

    def _leave(self, wish: _Wish, connections: Connections) -> None:
        if self.offer is not None:
            connections.withdraw(self.offer)
        self._wish = wish
        self._carry_out()

    def _carry_out(self) -> None:
        # Of two threads one comes last here, and sees both the wish and the connection.
        connection = self._connection
        if connection is None or self._wish is _Wish.KEEP:
            return
        if self._wish is _Wish.END:
            connection.end()
        else:
            connection.cut()

    # --- on the receiving thread ----------------------------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """The other end has come."""
        self._connection = connection
        self._carry_out()

    def opened(self) -> None:
        """It can be used."""
        self._later(lambda: self._told_open(self))

    def heard(self, message: Message) -> None:
        """The neighbour has sent something."""
        if message.kind is Kind.FRAME:
            self._doors.frame(*unpack_frame(message.payload))
        else:
            self._doors.credit(*unpack_credit(message.payload))

    def over(self, reason: str | None) -> None:
        """Nothing follows."""
        if reason is None:
            self._gone.set_result(None)
        else:
            self._gone.set_exception(ConnectionError(f"the connection with {self.neighbour} broke: {reason}"))
