"""`PeerConnections`: how a worker's process reaches the other workers of its job, over sockets or by calls of Ray.

Rules:

- There is one `PeerConnection` for each pair of processes, for the life of both. The process with the smaller id
  connects, as soon as it has a deployment in which the other one is a neighbour. The other process accepts the
  connection at any time.
- Both ends offer memory for the rows of their direction. An end is open when the other one has mapped its memory, or
  has reported that it cannot map it. Then rows go over the socket too.
- Both processes use calls if no connection is possible: on different nodes, without sockets, or when the process that
  should connect cannot, for example in a container with a network of its own. It then calls `no_link` of the other one.
- A link that is open or uses calls is settled for the attempts that begin then. A connection that breaks while both
  processes live has lost what was on its way. It fails the attempts that use it, and later ones use calls.
- Frames and grants carry their attempt. The receiver drops those of an older attempt.
- A frame is a head, the batches as one Arrow stream, and the rest by pickle. The stream is in shared memory if it fits,
  else in the message. So each frame takes one path, whatever its size, and keeps its place in the sequence.
- Batches with types that a program has defined are pickled by cloudpickle, which sends classes that the receiver cannot
  import. Only processes of the same job, which have proved that, send what is unpickled here.
"""

from __future__ import annotations

import enum
import logging
import pickle
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

import cloudpickle
import pyarrow as pa

from tidegate.actors.ray.framed_connections import Bytes, Connections, FramedConnection, Kind, Message
from tidegate.actors.ray.shared_memory import EdgeSchema, ForeignSegment, FrameReader, FrameWriter, OwnSegment, Place
from tidegate.actors.ray.task_deployment import Peer
from tidegate.actors.task import instructions as do
from tidegate.protocol.failures import error_text
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Element
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, SubtaskIndex

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

    def broke(self, link: PeerConnection, reason: str) -> None:
        """A link broke that was open. On the mailbox."""


@dataclass(frozen=True, slots=True)
class Sync:
    """Stands for Ray's reference to a call."""

    _answered: Future[None] = field(default_factory=Future)

    def future(self) -> Future[None]:
        """Done when the other process has taken everything in, or with an error if something may be lost."""
        return self._answered


class PeerConnection:
    """The link to one other process: a `Transport` where it is a socket, and an `Listener`."""

    def __init__(self, links: PeerConnections, process_id: str, inbox: Inbox, memory_bytes: int) -> None:
        self.process_id = process_id
        self.way = Way.OPENING
        """For the mailbox alone."""
        self.peer: Peer | None = None
        """The other process, if this one connects."""
        self._links, self._inbox, self._memory_bytes = links, inbox, memory_bytes
        self._connection: FramedConnection | None = None
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

    def connected(self, connection: FramedConnection) -> None:
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


class PeerConnections:
    """The links of one process."""

    def __init__(self, process_id: str, node_id: str, memory_bytes: int, inbox: Inbox) -> None:
        self.process_id, self._node_id = process_id, node_id
        self._memory_bytes, self._inbox = memory_bytes, inbox
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self._links: dict[str, PeerConnection] = {}
        self._noted: set[str] = set()

    def use(self, connections: Connections) -> None:
        """This process listens: it may have connections."""
        self._connections = connections

    def to(self, peer: Peer) -> PeerConnection:
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

    def came(self, process_id: str) -> PeerConnection | None:
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

    def _link(self, process_id: str) -> tuple[PeerConnection, bool]:
        with self._lock:
            if (link := self._links.get(process_id)) is not None:
                return link, False
            shares = sum(one.way is not Way.CALLS for one in self._links.values()) < MEMORY_LINKS_MAX
            link = PeerConnection(self, process_id, self._inbox, self._memory_bytes if shares else 0)
            self._links[process_id] = link
            return link, True


Head: TypeAlias = tuple[int, int, int, int, int]
"""(attempt, edge, upstream, downstream, number): plain numbers cost Ray a tenth of what a dataclass does."""
ALIGNMENT = 64
"""Arrow reads fastest from addresses that are multiples of this."""
_FRAME = struct.Struct("<6q16x")
_CREDIT = struct.Struct("<6q")


def make_head(attempt: AttemptNumber, channel: ChannelId, number: int) -> Head:
    """Return the head of a frame (`number`: its first sequence) or of a grant (`number`: the total in bytes)."""
    return (attempt, channel.edge, channel.upstream, channel.downstream, number)


def read_head(head: Head) -> tuple[AttemptNumber, ChannelId, int]:
    """Return attempt, channel and number."""
    attempt, edge, upstream, downstream, number = head
    channel = ChannelId(edge, SubtaskIndex(upstream), SubtaskIndex(downstream))
    return AttemptNumber(attempt), channel, number


class FramePacker:
    """Packs the frames that go over one connection, for one thread. `writer`: of the shared memory, None without."""

    def __init__(self, writer: FrameWriter | None) -> None:
        self.writer = writer
        self._schemas: defaultdict[int, EdgeSchema] = defaultdict(EdgeSchema)
        """By edge."""

    def pack(self, head: Head, elements: Sequence[Element]) -> Sequence[Bytes]:
        """Return a frame in pieces."""
        batches = [element for element in elements if isinstance(element, pa.RecordBatch)]
        if not batches:
            return (_FRAME.pack(*head, 0), pickle.dumps((tuple(enumerate(elements)), None), 5))
        schema = self._schemas[head[1]]
        if not schema.is_that_of(batches):
            return (_FRAME.pack(*head, 0), pickled_elements((tuple(enumerate(elements)), None)))
        controls = tuple((i, e) for i, e in enumerate(elements) if not isinstance(e, pa.RecordBatch))
        place = None if self.writer is None else self.writer.write(batches, schema)
        if place is not None:
            return (_FRAME.pack(*head, 0), pickle.dumps((controls, tuple(place)), 5))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema.schema) as stream:
            for batch in batches:
                stream.write_batch(batch)
        rows = memoryview(sink.getvalue())
        return (_FRAME.pack(*head, len(rows)), rows, pickle.dumps((controls, None), 5))


def pickled_elements(elements: object) -> bytes:
    """Pickle elements with batches whose types a program has defined.

    By a pickle of its own: what Ray registers with its copy loses such types of schemas.
    """
    pickled: bytes = cloudpickle.dumps(elements, 5)
    return pickled


def read_elements(elements: tuple[Element, ...] | bytes) -> tuple[Element, ...]:
    """Read the elements that came with a call: as they are, or as `pickled_elements` has made them."""
    read: tuple[Element, ...] = pickle.loads(elements) if isinstance(elements, bytes) else elements
    return read


def unpack_frame(payload: bytes | memoryview, reader: FrameReader | None) -> tuple[Head, tuple[Element, ...]]:
    """Read what was packed. ProtocolError if its batches are not in the shared memory."""
    *head, rows_bytes = _FRAME.unpack_from(payload)
    body = memoryview(payload)[_FRAME.size :]
    controls, place = pickle.loads(body[rows_bytes:])
    elements: list[Element] = []
    if rows_bytes:
        with pa.ipc.open_stream(_aligned(body[:rows_bytes])) as stream:
            elements += stream
    elif place is not None:
        if reader is None:
            raise ProtocolError("a frame is in shared memory that this process does not map")
        elements += reader.read(Place(*place))
    for index, element in controls:
        elements.insert(index, element)
    attempt, edge, upstream, downstream, number = head
    return (attempt, edge, upstream, downstream, number), tuple(elements)


def pack_credit(head: Head, window_bytes: int) -> bytes:
    """Return a grant of credit as bytes."""
    return _CREDIT.pack(*head, window_bytes)


def unpack_credit(payload: bytes | memoryview) -> tuple[Head, int]:
    """Read what was packed."""
    attempt, edge, upstream, downstream, total_bytes, window_bytes = _CREDIT.unpack(payload)
    return (attempt, edge, upstream, downstream, total_bytes), window_bytes


def _aligned(rows: memoryview) -> pa.Buffer:
    """Return the bytes at an address that Arrow likes: where they are, if they are at one."""
    buffer = pa.py_buffer(rows)
    if buffer.address % ALIGNMENT == 0:
        return buffer
    copy = pa.allocate_buffer(len(rows))
    memoryview(copy).cast("B")[:] = rows
    return copy
