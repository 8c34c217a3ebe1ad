"""Connects a worker's process to the other workers of its job, over sockets or by calls of Ray.

Rules:

- There is one `PeerConnection` for each pair of processes, for the life of both. The process with the smaller id
  connects, as soon as it has a deployment in which the other process is a neighbour. The other process accepts the
  connection at any time.
- Each end offers shared memory for the rows that it sends. An end is open when the other end has mapped its memory, or
  has reported that it cannot map it. Without shared memory, rows go over the socket.
- Both processes use Ray calls if no connection is possible: on different nodes, without sockets, or when the process
  that should connect cannot, for example in a container with a separate network. That process then calls `no_link` of
  the other process.
- Attempts that begin after a connection has opened, or has switched to calls, keep this transport. A connection that
  breaks while both processes live has lost the messages on their way. It fails the attempts that use it, and later
  attempts use calls.
- Frames and grants carry their attempt. The receiver drops messages of an older attempt.
- A frame is a head, the batches as one Arrow stream, and the control elements by pickle. The stream is in shared memory
  if it fits, else in the message. So each frame takes one path, whatever its size, and keeps its place in the sequence.
- Batches with types that a program has defined are pickled by cloudpickle, which includes classes that the receiver
  cannot import. This process unpickles only messages of processes that have proved that they belong to the job.
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
"""Limit of connections of a process that use shared memory, because each mapping keeps descriptors open."""
_MAPPED = struct.Struct("<?")
_NUMBER = struct.Struct("<Q")


class Way(enum.Enum):
    """The transport to another process: a socket, Ray calls, or not decided yet (OPENING)."""

    OPENING = "not known yet"
    SOCKET = "socket"
    CALLS = "calls"


class Inbox(Protocol):
    """The interface to a worker process that receives the messages and events of its connections."""

    def frame_came(self, head: Head, elements: tuple[Element, ...]) -> None:
        """Receives a frame from another worker's socket. Called on any thread."""

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """Receives a credit grant from a socket. Called on any thread."""

    def later(self, action: Callable[[], object]) -> None:
        """Runs an action on the mailbox. Called on any thread."""

    def settled(self) -> None:
        """Called on the mailbox when the transport to another process is decided: its socket is open, or it uses
        Ray calls.
        """

    def broke(self, link: PeerConnection, reason: str) -> None:
        """Called on the mailbox when an open connection has broken."""


@dataclass(frozen=True, slots=True)
class Sync:
    """A pending confirmation that the other process has received all messages so far. Has the interface of a Ray
    call's reference.
    """

    _answered: Future[None] = field(default_factory=Future)

    def future(self) -> Future[None]:
        """Returns a future that is done when the other process has received the messages, or fails if they may be
        lost.
        """
        return self._answered


class PeerConnection:
    """The connection to one other process of the job: a `Listener`, and a `Transport` while it uses a socket."""

    def __init__(self, links: PeerConnections, process_id: str, inbox: Inbox, memory_bytes: int) -> None:
        self.process_id = process_id
        self.way = Way.OPENING
        """The transport to the other process. Set and read only on the mailbox."""
        self.peer: Peer | None = None
        """The other process if this process opens the connection, else None."""
        self._links, self._inbox, self._memory_bytes = links, inbox, memory_bytes
        self.connection: FramedConnection | None = None
        self._segment: OwnSegment | None = None
        """The shared memory that this end has offered and the other end has not answered yet, or None."""
        self.packer = FramePacker(None)
        self._reader: FrameReader | None = None
        self._syncs: dict[int, Future[None]] = {}
        self._synced = 0

    # --- on the mailbox ---------------------------------------------------------------------------------------------

    def send(self, frame: do.SendFrame) -> None:
        """Sends a frame. Does nothing if the connection has ended, because that fails the subtask as well."""
        head = make_head(frame.attempt, frame.channel, frame.first_sequence)
        self._send(Kind.FRAME, *self.packer.pack(head, frame.elements))

    def grant(self, grant: do.GrantCredit) -> None:
        """Sends a grant of credit to the other process."""
        head = make_head(grant.attempt, grant.channel, grant.total_bytes)
        self._send(Kind.CREDIT, pack_credit(head, grant.window_bytes))

    def sync(self) -> Sync:
        """Returns a `Sync` that is done when the other process has received all messages sent so far."""
        sync = Sync()
        if self.way is not Way.SOCKET:
            sync.future().set_exception(
                ConnectionError(
                    f"the connection to process {self.process_id} is closed; tasks restart from the newest checkpoint"
                )
            )
            return sync
        self._synced += 1
        self._syncs[self._synced] = sync.future()
        self._send(Kind.SYNC, _NUMBER.pack(self._synced))
        return sync

    def use_calls(self) -> None:
        """Switches to Ray calls, because the connection has ended or could not be opened."""
        self.way = Way.CALLS
        self.packer = FramePacker(None)
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
                self.packer = FramePacker(FrameWriter(segment))
        self.way = Way.SOCKET
        self._inbox.settled()

    def _answered(self, number: int) -> None:
        if (sync := self._syncs.pop(number, None)) is not None:
            sync.set_result(None)

    def cannot_open(self, reason: str) -> None:
        """Switches to Ray calls. If this process should have connected, reports the failure to the other process."""
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
            sync.set_exception(
                ConnectionError(
                    f"the connection to process {self.process_id} broke: {reason}; the tasks restart from the newest "
                    "checkpoint"
                )
            )
        if was_open:
            self._inbox.broke(self, reason)

    # --- from any thread --------------------------------------------------------------------------------------------

    @property
    def has_come(self) -> bool:
        """Returns whether a socket connection to the other process was ever made."""
        return self.connection is not None

    # --- on the reading thread, except `connected` of the process that connects -------------------------------------

    def connected(self, connection: FramedConnection) -> None:
        """Stores the connection for sending messages."""
        self.connection = connection

    def opened(self) -> None:
        """Called when the connection can be used. Offers shared memory for rows to the other end."""
        if self._memory_bytes:
            try:
                self._segment = OwnSegment(self._memory_bytes)
            except (OSError, ValueError) as error:
                log.warning(
                    "rows to process %s go over a socket, not through shared memory: %s",
                    self.process_id,
                    error_text(error),
                )
        self._send(Kind.MEMORY, descriptor=None if self._segment is None else self._segment.descriptor)

    def received(self, message: Message) -> None:
        """Handles a message from the other process."""
        kind, payload = message
        if kind is Kind.FRAME:
            self._inbox.frame_came(*unpack_frame(payload, self._reader))
        elif kind is Kind.CREDIT:
            self._inbox.credit_came(*unpack_credit(payload))
        elif kind is Kind.SYNC:
            # All earlier messages are in the mailbox.
            self._send(Kind.SYNCED, payload)
        elif kind is Kind.SYNCED:
            self._inbox.later(partial(self._answered, *_NUMBER.unpack(payload)))
        elif kind is Kind.MEMORY:
            self._map()
        else:
            self._inbox.later(partial(self._open, *_MAPPED.unpack(payload)))

    def over(self, reason: str) -> None:
        """Called when the connection has ended."""
        self._inbox.later(partial(self._ended, reason))

    def _map(self) -> None:
        """Maps the shared memory that the other end offers, if any, and reports to the other end whether that
        worked.
        """
        assert self.connection is not None
        descriptor = self.connection.take_descriptor()
        if descriptor is not None:
            try:
                self._reader = FrameReader(ForeignSegment.open(descriptor))
            except (OSError, ValueError) as error:
                log.warning("memory of process %s cannot be mapped: %s", self.process_id, error_text(error))
        self._send(Kind.MAPPED, _MAPPED.pack(self._reader is not None))

    def _send(self, kind: Kind, *payload: Bytes, descriptor: int | None = None) -> None:
        if self.connection is not None:
            self.connection.send(kind, *payload, descriptor=descriptor)


class PeerConnections:
    """The connections of one worker's process to the other processes of its job."""

    def __init__(self, process_id: str, node_id: str, memory_bytes: int, inbox: Inbox) -> None:
        self.process_id, self._node_id = process_id, node_id
        self._memory_bytes, self._inbox = memory_bytes, inbox
        self._connections: Connections | None = None
        self._lock = threading.Lock()
        self._links: dict[str, PeerConnection] = {}
        self._noted: set[str] = set()

    def use(self, connections: Connections) -> None:
        """Allows socket connections, because this process now listens."""
        self._connections = connections

    def to(self, peer: Peer) -> PeerConnection:
        """Returns the connection to another process. Whether it uses a socket or Ray calls is decided now or later, and
        then does not change.

        Call it on the mailbox only.
        """
        link, is_new = self._link(peer.process_id)
        if link.way is not Way.OPENING:
            return link
        if self._connections is None or not peer.address or not self._is_on_this_node(peer):
            link.use_calls()
        elif is_new and self.process_id < peer.process_id:
            link.peer = peer
            try:
                self._connections.connect(peer.address, peer.process_id, link)
            except OSError as error:
                link.cannot_open(error_text(error))
        return link

    def _is_on_this_node(self, peer: Peer) -> bool:
        """Returns whether a peer is another process on this node.

        The peer of a subtask may be in the subtask's own process, if the subtask was deployed alone.
        """
        return peer.node_id == self._node_id and peer.process_id != self.process_id

    def accept(self, process_id: str) -> PeerConnection | None:
        """Returns the listener for a socket connection from another process, or None if the two processes were
        connected before.

        May be called from any thread.
        """
        link, _ = self._link(process_id)
        return None if link.has_come else link

    def refused(self, process_id: str, reason: str) -> None:
        """Uses Ray calls to another process, because that process has reported that it cannot connect.

        Call it on the mailbox only.
        """
        link, _ = self._link(process_id)
        if link.way is Way.OPENING:
            link.use_calls()
            self.note(reason)
            self._inbox.settled()

    def note(self, reason: str) -> None:
        """Logs the reason why Ray calls are used instead of a socket. Each reason is logged once."""
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
"""Head of a frame: attempt, edge, upstream subtask, downstream subtask, and a number.

A tuple of integers costs Ray a tenth of a dataclass.
"""
ALIGNMENT = 64
"""Alignment of addresses in bytes, at which Arrow reads fastest."""
_FRAME = struct.Struct("<6q16x")
_CREDIT = struct.Struct("<6q")


def make_head(attempt: AttemptNumber, channel: ChannelId, number: int) -> Head:
    """Returns the head of a frame or a credit grant.

    `number` is the sequence number of the frame's first element, or the total bytes of the grant.
    """
    return (attempt, channel.edge, channel.upstream, channel.downstream, number)


def read_head(head: Head) -> tuple[AttemptNumber, ChannelId, int]:
    """Returns the attempt, the channel and the number of a head."""
    attempt, edge, upstream, downstream, number = head
    channel = ChannelId(edge, SubtaskIndex(upstream), SubtaskIndex(downstream))
    return AttemptNumber(attempt), channel, number


class FramePacker:
    """Converts the frames of one connection to bytes. Not thread-safe.

    `writer` writes rows to shared memory, or is None without shared memory.
    """

    def __init__(self, writer: FrameWriter | None) -> None:
        self.writer = writer
        self._schemas: defaultdict[int, EdgeSchema] = defaultdict(EdgeSchema)
        """The schema of each edge."""

    def pack(self, head: Head, elements: Sequence[Element]) -> Sequence[Bytes]:
        """Returns the bytes of a frame as several buffers."""
        batches = [element for element in elements if isinstance(element, pa.RecordBatch)]
        if not batches:
            return (_FRAME.pack(*head, 0), pickle.dumps((tuple(enumerate(elements)), None), 5))
        schema = self._schemas[head[1]]
        if not schema.fits(batches):
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
    """Pickles elements of a frame whose batches have extension types that the program defines.

    Uses cloudpickle itself, because Ray's own copy of it has reducers for schemas that lose extension types.
    """
    pickled: bytes = cloudpickle.dumps(elements, 5)
    return pickled


def read_elements(elements: tuple[Element, ...] | bytes) -> tuple[Element, ...]:
    """Returns the elements of a frame that arrived by a Ray call.

    The argument is the elements, or their bytes from `pickled_elements`.
    """
    read: tuple[Element, ...] = pickle.loads(elements) if isinstance(elements, bytes) else elements
    return read


def unpack_frame(payload: bytes | memoryview, reader: FrameReader | None) -> tuple[Head, tuple[Element, ...]]:
    """Returns the head and the elements of a frame. Raises ProtocolError if its rows are in shared memory that is
    not mapped.
    """
    *head, rows_bytes = _FRAME.unpack_from(payload)
    body = memoryview(payload)[_FRAME.size :]
    controls, place = pickle.loads(body[rows_bytes:])
    elements: list[Element] = []
    if rows_bytes:
        with pa.ipc.open_stream(_aligned(body[:rows_bytes])) as stream:
            elements += stream
    elif place is not None:
        if reader is None:
            raise ProtocolError(
                f"a frame is at {place} in shared memory that this process has not mapped; this is a bug in tidegate, "
                "please report it"
            )
        elements += reader.read(Place(*place))
    for index, element in controls:
        elements.insert(index, element)
    attempt, edge, upstream, downstream, number = head
    return (attempt, edge, upstream, downstream, number), tuple(elements)


def pack_credit(head: Head, window_bytes: int) -> bytes:
    """Returns a grant of credit as bytes."""
    return _CREDIT.pack(*head, window_bytes)


def unpack_credit(payload: bytes | memoryview) -> tuple[Head, int]:
    """Returns the head of a credit grant, and the size of the credit window in bytes."""
    attempt, edge, upstream, downstream, total_bytes, window_bytes = _CREDIT.unpack(payload)
    return (attempt, edge, upstream, downstream, total_bytes), window_bytes


def _aligned(rows: memoryview) -> pa.Buffer:
    """Returns a buffer with these bytes at an address that Arrow accepts. Copies the bytes only if they are not
    aligned.
    """
    buffer = pa.py_buffer(rows)
    if buffer.address % ALIGNMENT == 0:
        return buffer
    copy = pa.allocate_buffer(len(rows))
    memoryview(copy).cast("B")[:] = rows
    return copy
