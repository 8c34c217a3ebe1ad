"""`PeerLinks`: how a worker's process reaches the other workers of its job: over sockets, or by calls of Ray.

Rules:

- There is one `PeerLink` for each pair of processes, for the life of both. The process with the smaller id connects, as
  soon as it has an order in which the other one is a neighbour. The other process takes the connection whether or not
  it has such an order.
- Both ends offer memory for the rows of their direction. An end counts as open when the other one has taken its
  memory, or has reported that it cannot map it: then rows go over the socket too.
- Where no connection is possible, both processes use calls: on different nodes, without sockets, or when the process
  that should connect cannot, in a container with a network of its own for example. It then calls `no_link` of the other
  process.
- Once a link is open or uses calls, that is settled for the attempts that begin then. A connection that breaks while
  both processes live has lost what was on its way. It fails the attempts that use it, and later ones use calls.
- Frames and grants carry the attempt that they are for. The receiver drops those of an older attempt.
"""

from __future__ import annotations

import enum
import logging
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from tidegate.actors.ray.exchange.connections import Connection, Connections
from tidegate.actors.ray.exchange.frames import FrameReader, FrameWriter
from tidegate.actors.ray.exchange.link import Bytes, Kind, Message
from tidegate.actors.ray.exchange.messages import (
    FramePacker,
    Head,
    make_head,
    pack_credit,
    unpack_credit,
    unpack_frame,
)
from tidegate.actors.ray.exchange.shared_segment import ForeignSegment, OwnSegment
from tidegate.actors.ray.process.orders import Peer
from tidegate.actors.task.messages import instructions as do
from tidegate.protocol.failure_reasons import error_text
from tidegate.protocol.stream_elements import Element

log = logging.getLogger(__name__)

MEMORY_LINKS_MAX = 128
"""Links of a process that share memory, at most: each mapping keeps descriptors open."""
_MAPPED = struct.Struct("<?")
_NUMBER = struct.Struct("<Q")


class Way(enum.Enum):
    """How the other process is reached."""

    OPENING = "not known yet"
    SOCKET = "socket"
    CALLS = "calls"


class Inbox(Protocol):
    """What a worker's process does with what comes over links."""

    def frame_came(self, head: Head, elements: tuple[Element, ...]) -> None:
        """A frame came over a socket. From any thread."""

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """A grant came. From any thread."""

    def later(self, action: Callable[[], object]) -> None:
        """Have an action run on the mailbox. From any thread."""

    def settled(self) -> None:
        """Another link is open, or uses calls. On the mailbox."""

    def broke(self, link: PeerLink, reason: str) -> None:
        """A link broke that was open. On the mailbox."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Stands for Ray's reference to a call."""

    _answered: Future[None] = field(default_factory=Future)

    def future(self) -> Future[None]:
        """Done when the other process has taken everything in, or with an error if something may be lost."""
        return self._answered


class PeerLink:
    """The link to one other process: a `Transport` where it is a socket, and an `Ear`."""

    def __init__(self, links: PeerLinks, process_id: str, inbox: Inbox, memory_bytes: int) -> None:
        self.process_id = process_id
        self.way = Way.OPENING
        """For the mailbox alone."""
        self.peer: Peer | None = None
        """The other process, if this one connects."""
        self._links, self._inbox, self._memory_bytes = links, inbox, memory_bytes
        self._connection: Connection | None = None
        self._segment: OwnSegment | None = None
        """The memory that is being offered."""
        self._packer = FramePacker(None)
        self._reader: FrameReader | None = None
        self._syncs: dict[int, Future[None]] = {}
        self._synced = 0

    # --- on the mailbox ---------------------------------------------------------------------------------------------

    def send(self, frame: do.SendFrame) -> None:
        """Send a frame. Nothing happens if the connection is over: that fails the subtask as well."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        self._say(Kind.FRAME, *self._packer.pack(head, frame.elements))

    def grant(self, grant: do.GrantCredit) -> None:
        """Grant credit."""
        head = make_head(grant.attempt, grant.channel, grant.total_bytes)
        self._say(Kind.CREDIT, pack_credit(head, grant.window_bytes))

    def sync(self) -> Sync:
        """Return what is done when the other process has taken in all that was sent so far."""
        sync = Sync()
        if self.way is not Way.SOCKET:
            sync.future().set_exception(ConnectionError(f"the connection to process {self.process_id} is over"))
            return sync
        self._synced += 1
        self._syncs[self._synced] = sync.future()
        self._say(Kind.SYNC, _NUMBER.pack(self._synced))
        return sync

    def use_calls(self) -> None:
        """There is no connection, or none any more."""
        self.way = Way.CALLS
        self._packer = FramePacker(None)
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.hide()

    def _open(self, mapped: bool) -> None:
        if self.way is not Way.OPENING:
            return
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.hide()
            if mapped:
                self._packer = FramePacker(FrameWriter(segment))
        self.way = Way.SOCKET
        self._inbox.settled()

    def _answered(self, number: int) -> None:
        if (sync := self._syncs.pop(number, None)) is not None:
            sync.set_result(None)

    def cannot_open(self, reason: str) -> None:
        """There will be no connection. The process that should have connected tells the other one."""
        self.use_calls()
        self._links.note(reason)
        if self.peer is not None:
            self.peer.handle.no_link.remote(self._links.process_id, reason)

    def _ended(self, reason: str) -> None:
        was_open = self.way is Way.SOCKET
        self._reader = None
        if self.way is Way.OPENING:
            self.cannot_open(reason)
            self._inbox.settled()
        self.use_calls()
        syncs, self._syncs = self._syncs, {}
        for sync in syncs.values():
            sync.set_exception(ConnectionError(f"the connection to process {self.process_id} broke: {reason}"))
        if was_open:
            self._inbox.broke(self, reason)

    # --- from any thread --------------------------------------------------------------------------------------------

    @property
    def has_come(self) -> bool:
        """Whether there is a connection, or was one."""
        return self._connection is not None

    # --- on the reading thread, except `connected` of the process that connects -------------------------------------

    def connected(self, connection: Connection) -> None:
        """There is a connection."""
        self._connection = connection

    def opened(self) -> None:
        """Offer memory for rows."""
        if self._memory_bytes:
            try:
                self._segment = OwnSegment(self._memory_bytes)
            except (OSError, ValueError) as error:
                log.warning(
                    "rows to process %s go over a socket, not through shared memory: %s",
                    self.process_id,
                    error_text(error),
                )
        self._say(Kind.MEMORY, descriptor=None if self._segment is None else self._segment.descriptor)

    def heard(self, message: Message) -> None:
        """A message came in."""
        kind, payload = message
        if kind is Kind.FRAME:
            self._inbox.frame_came(*unpack_frame(payload, self._reader))
        elif kind is Kind.CREDIT:
            self._inbox.credit_came(*unpack_credit(payload))
        elif kind is Kind.SYNC:
            # All that came before is in the mailbox.
            self._say(Kind.SYNCED, payload)
        elif kind is Kind.SYNCED:
            self._inbox.later(partial(self._answered, *_NUMBER.unpack(payload)))
        elif kind is Kind.MEMORY:
            self._map()
        else:
            self._inbox.later(partial(self._open, *_MAPPED.unpack(payload)))

    def over(self, reason: str) -> None:
        """The connection has ended."""
        self._inbox.later(partial(self._ended, reason))

    def _map(self) -> None:
        """The other end offers memory, or has none to offer."""
        assert self._connection is not None
        descriptor = self._connection.take_descriptor()
        if descriptor is not None:
            try:
                self._reader = FrameReader(ForeignSegment.open(descriptor))
            except (OSError, ValueError) as error:
                log.warning("memory of process %s cannot be mapped: %s", self.process_id, error_text(error))
        self._say(Kind.MAPPED, _MAPPED.pack(self._reader is not None))

    def _say(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> None:
        if self._connection is not None:
            self._connection.send(kind, *payload, descriptor=descriptor)


class PeerLinks:
    """The links of one process."""

    def __init__(self, process_id: str, node_id: str, memory_bytes: int, inbox: Inbox) -> None:
        self.process_id, self._node_id = process_id, node_id
        self._memory_bytes, self._inbox = memory_bytes, inbox
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self._links: dict[str, PeerLink] = {}
        self._noted: set[str] = set()

    def use(self, connections: Connections) -> None:
        """This process listens: it may have connections."""
        self._connections = connections

    def to(self, peer: Peer) -> PeerLink:
        """Return the link to another process, on the mailbox. It is settled now or later, and stays so."""
        link, is_new = self._link(peer.process_id)
        if link.way is not Way.OPENING:
            return link
        if self._connections is None or not peer.address or not self._is_beside(peer):
            link.use_calls()
        elif is_new and self.process_id < peer.process_id:
            link.peer = peer
            try:
                self._connections.connect(peer.address, peer.process_id, link)
            except OSError as error:
                link.cannot_open(error_text(error))
        return link

    def _is_beside(self, peer: Peer) -> bool:
        """Whether the other process is on this node. It is this process itself where one subtask begins alone."""
        return peer.node_id == self._node_id and peer.process_id != self.process_id

    def came(self, process_id: str) -> PeerLink | None:
        """Return who takes a connection from another process; None if there was one. From any thread."""
        link, _ = self._link(process_id)
        return None if link.has_come else link

    def refused(self, process_id: str, reason: str) -> None:
        """The other process reports, by a call, that it cannot connect. On the mailbox."""
        link, _ = self._link(process_id)
        if link.way is Way.OPENING:
            link.use_calls()
            self.note(reason)
            self._inbox.settled()

    def note(self, reason: str) -> None:
        """Log once for each reason that a link uses calls."""
        if reason not in self._noted:
            self._noted.add(reason)
            log.warning("frames between two processes go by calls of Ray, not over a socket: %s", reason)

    def _link(self, process_id: str) -> tuple[PeerLink, bool]:
        with self._lock:
            if (link := self._links.get(process_id)) is not None:
                return link, False
            shares = sum(one.way is not Way.CALLS for one in self._links.values()) < MEMORY_LINKS_MAX
            link = PeerLink(self, process_id, self._inbox, self._memory_bytes if shares else 0)
            self._links[process_id] = link
            return link, True
