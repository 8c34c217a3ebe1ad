"""One contract for what carries frames: the queue of a worker, sockets with and without memory, and calls of Ray."""

from __future__ import annotations

import gc
import queue
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from ray import cloudpickle
from ray._private import arrow_serialization
from ray_fakes import LaterMailbox, Method, Reference
from waiting import until

from tidegate.actors.drivers.worker import QueueTransport, Transport
from tidegate.actors.ray import framed_connections as links
from tidegate.actors.ray.actor_calls import Deliveries
from tidegate.actors.ray.framed_connections import Connections
from tidegate.actors.ray.peer_connections import (
    Head,
    PeerConnection,
    PeerConnections,
    Way,
    read_elements,
    read_head,
)
from tidegate.actors.ray.peer_transports import OrderedFrames, PeerCalls
from tidegate.actors.ray.task_deployment import Peer
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.input_gate import InputChannel
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import Barrier, Element, EndOfPartition, Watermark
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId, SubtaskIndex, VertexId

FIRST, SECOND = AttemptNumber(0), AttemptNumber(1)
RECEIVER = TaskId(VertexId("receiver"), SubtaskIndex(0))
CHANNELS = tuple(ChannelId(0, SubtaskIndex(up), SubtaskIndex(0)) for up in (0, 1))
MEMORY_BYTES = 256 * 1024


def numbers(start: int, rows: int = 1_000) -> pa.RecordBatch:
    """Rows with numbers from here on."""
    return pa.record_batch({"n": pa.array(range(start, start + rows), pa.int64())})


class Temperature(pa.ExtensionType):  # type: ignore[misc]
    """A type of a user's."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.warmth")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Temperature:
        return cls()


class Receiver:
    """A subtask that runs its first attempt."""

    def __init__(self) -> None:
        self.inputs = {channel: InputChannel(channel, 1_000_000) for channel in CHANNELS}
        self.granted: list[ev.CreditGranted] = []
        self.dropped: list[AttemptNumber] = []
        self.frames = OrderedFrames(self._take, lambda delay_ms, action: None)

    def deliver(self, task: TaskId, attempt: AttemptNumber, event: Any, sort: bool = False) -> None:
        """As `Worker.deliver` does."""
        if attempt != FIRST:
            self.dropped.append(attempt)
        elif isinstance(event, ev.CreditGranted):
            self.granted.append(event)
        elif sort:
            self.frames.arrived(event)
        else:
            self._take(event)

    def _take(self, event: ev.FrameArrived) -> None:
        self.inputs[event.channel].accept(event.first_sequence, event.elements)

    def taken(self, channel: ChannelId = CHANNELS[0]) -> list[Element]:
        """What has arrived on a channel."""
        return list(self.inputs[channel].queue)


class InQueue:
    """The queue of a worker."""

    def __init__(self) -> None:
        self.receiver = Receiver()
        self._queue: deque[Callable[[], object]] = deque()
        self.transport: Transport = QueueTransport(RECEIVER, self._queue, self.receiver.deliver, lambda: 0)

    def settle(self) -> None:
        """Have everything taken in that was sent."""
        while self._queue:
            self._queue.popleft()()


@dataclass
class ByCalls:
    """Calls of Ray, which come in any order, and some twice. The data is pickled as Ray does."""

    receiver: Receiver = field(default_factory=Receiver)

    def __post_init__(self) -> None:
        self._way = random.Random(7)
        # Ray registers this when a process begins. It loses types that a program has defined.
        cloudpickle.CloudPickler.dispatch.setdefault(pa.Schema, arrow_serialization._arrow_schema_reduce)
        self._calls: list[tuple[str, bytes, Reference]] = []
        self.frame, self.credit = _Called(self, "frame"), _Called(self, "credit")
        self.mailbox = LaterMailbox()
        self.deliveries = Deliveries(self.mailbox, lambda action: action())  # type: ignore[arg-type]
        self.transport: Transport = PeerCalls(self, self.deliveries, lambda channel: False)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Reference:
        """Ray takes a call."""
        reference = Reference()
        self._calls.append((name, cloudpickle.dumps(arguments), reference))
        return reference

    def settle(self) -> None:
        """Ray carries out all calls."""
        calls, self._calls = self._calls, []
        again = [(name, data, Reference()) for name, data, _ in calls if self._way.random() < 0.3]
        for name, data, reference in self._way.sample([*calls, *again], len(calls) + len(again)):
            head, what = cloudpickle.loads(data)
            attempt, channel, number = read_head(head)
            event: Any = (
                ev.FrameArrived(0, attempt, channel, number, read_elements(what))
                if name == "frame"
                else ev.CreditGranted(0, attempt, channel, number, what)
            )
            self.receiver.deliver(RECEIVER, attempt, event, sort=True)
            if not reference.call.done():
                reference.call.set_result(None)


@dataclass
class _Called:
    ray: ByCalls
    name: str

    def options(self, num_returns: int) -> _Called:
        return self

    def remote(self, *arguments: Any) -> Reference:
        return self.ray.call(self.name, arguments)


class Process:
    """A worker's process with its mailbox, which the test empties."""

    def __init__(self, name: str, memory_bytes: int) -> None:
        self.name = name
        self.receiver = Receiver()
        self.no_link = Method()
        self.broken: list[tuple[PeerConnection, str]] = []
        self._mailbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.links = PeerConnections(name, "node", memory_bytes, self)
        self.connections = Connections(b"secret", name, self.links.accept, lambda error: None)
        self.links.use(self.connections)
        self.peer = Peer(self, name, "node", self.connections.listen())

    def frame_came(self, head: Head, elements: tuple[Element, ...]) -> None:
        """A frame came over a socket."""
        attempt, channel, number = read_head(head)
        event = ev.FrameArrived(0, attempt, channel, number, elements)
        self._mailbox.put(lambda: self.receiver.deliver(RECEIVER, attempt, event))

    def credit_came(self, head: Head, window_bytes: int) -> None:
        """A grant came."""
        attempt, channel, number = read_head(head)
        event = ev.CreditGranted(0, attempt, channel, number, window_bytes)
        self._mailbox.put(lambda: self.receiver.deliver(RECEIVER, attempt, event))

    def later(self, action: Callable[[], object]) -> None:
        """Have something done by the test."""
        self._mailbox.put(action)

    @property
    def num_waiting(self) -> int:
        """The number of messages in the mailbox."""
        return self._mailbox.qsize()

    def settled(self) -> None:
        """A link is settled."""

    def broke(self, link: PeerConnection, reason: str) -> None:
        """A link broke."""
        self.broken.append((link, reason))

    def act(self) -> bool:
        """Do what is in the mailbox. Returns False, for conditions that are looked at again and again."""
        while not self._mailbox.empty():
            self._mailbox.get()()
        return False


class OverSocket:
    """A socket between two processes."""

    memory_bytes = 0

    def __init__(self) -> None:
        self.sender, self.other = Process("a", self.memory_bytes), Process("b", self.memory_bytes)
        self.receiver = self.other.receiver
        self.link = self.sender.links.to(self.other.peer)
        self.back = self.other.links.to(self.sender.peer)
        self.transport: Transport = self.link
        until("the link", lambda: self.act() or Way.OPENING not in (self.link.way, self.back.way))

    def act(self) -> bool:
        """Let both processes do what is in their mailboxes."""
        return self.sender.act() or self.other.act()

    def settle(self) -> None:
        """Wait until everything was taken in."""
        sync = self.link.sync().future()
        until("what was sent", lambda: self.act() or sync.done())
        self.act()


class OverMemory(OverSocket):
    """A socket between two processes that share memory."""

    memory_bytes = MEMORY_BYTES


Ends = InQueue | ByCalls | OverSocket


@pytest.fixture(params=[InQueue, ByCalls, OverSocket, OverMemory])
def ends(request: pytest.FixtureRequest) -> Ends:
    """Both ends of a transport."""
    made: Ends = request.param()
    return made


def send(ends: Ends, first: int, *elements: Element, channel: ChannelId = CHANNELS[0], attempt: int = FIRST) -> None:
    """Send a frame. The last of the credit goes with it."""
    ends.transport.send(do.SendFrame(AttemptNumber(attempt), channel, first, elements, exhausts_credit=True))


def test_elements_arrive_once_and_in_order(ends: Ends) -> None:
    """Of each channel, rows and barriers, whatever their size."""
    sent: dict[ChannelId, list[Element]] = {channel: [] for channel in CHANNELS}
    for number in range(60):
        for channel in CHANNELS:
            elements: tuple[Element, ...] = (
                (numbers(number, 1 + 3_000 * (number % 3)), Watermark(number))
                if number % 2
                else (Barrier(CheckpointId(number), 0),)
            )
            send(ends, len(sent[channel]), *elements, channel=channel)
            sent[channel] += elements
        if number % 20 == 19:
            ends.settle()
    for channel in CHANNELS:
        assert ends.receiver.taken(channel) == sent[channel]


def test_a_large_frame_arrives_in_its_place(ends: Ends) -> None:
    """Also where it does not fit into memory."""
    large = numbers(0, 2_000_000)
    send(ends, 0, numbers(1))
    send(ends, 1, large)
    send(ends, 2, EndOfPartition())
    ends.settle()
    assert ends.receiver.taken() == [numbers(1), large, EndOfPartition()]


def test_types_of_users_arrive(ends: Ends) -> None:
    """They are told by their classes."""
    rows = pa.ExtensionArray.from_storage(Temperature(), pa.array([1, 2], pa.int64()))
    send(ends, 0, pa.RecordBatch.from_arrays([rows], ["t"]), Watermark(1))
    ends.settle()
    arrived, watermark = ends.receiver.taken()
    assert isinstance(arrived, pa.RecordBatch)
    assert (arrived.column("t").type, watermark) == (Temperature(), Watermark(1))


def test_what_belongs_to_another_attempt_is_dropped(ends: Ends) -> None:
    """A sender that was given up may live on. What it sends is never taken for this attempt."""
    send(ends, 0, numbers(7), attempt=SECOND)
    send(ends, 0, numbers(1))
    ends.settle()
    assert ends.receiver.taken() == [numbers(1)]
    assert set(ends.receiver.dropped) == {SECOND}


def test_grants_arrive(ends: Ends) -> None:
    """Totals, so the largest counts."""
    for total_bytes in (10, 20):
        ends.transport.grant(do.GrantCredit(FIRST, CHANNELS[0], total_bytes, 5))
    ends.settle()
    assert {(grant.total_bytes, grant.window_bytes) for grant in ends.receiver.granted} == {(10, 5), (20, 5)}


def test_rows_that_are_kept_do_not_change(ends: Ends) -> None:
    """However much is sent behind them."""
    for number in range(300):
        send(ends, number, numbers(number))
        if number % 30 == 29:
            ends.settle()
            gc.collect()
    assert ends.receiver.taken() == [numbers(number) for number in range(300)]


def test_rows_go_through_memory_where_they_fit() -> None:
    """What does not fit goes over the socket, and keeps its place: nothing waits for room."""
    ends = OverMemory()
    writer = ends.link.packer.writer
    assert writer is not None
    sent = [numbers(number, 40_000 if number % 4 == 3 else 1_000) for number in range(100)]
    for number, rows in enumerate(sent):
        send(ends, number, rows)
        assert writer.taken_bytes <= MEMORY_BYTES
    assert 0 < writer.num_frames <= 75
    ends.settle()
    assert ends.receiver.taken() == sent


@pytest.mark.parametrize("ends", [OverSocket, OverMemory], indirect=True)
def test_sync_is_answered_when_all_was_taken_in(ends: OverSocket) -> None:
    """Not before: the mailbox of the other process has it then."""
    send(ends, 0, numbers(1, 100_000))
    sync = ends.link.sync().future()
    until("the answer", lambda: ends.sender.act() or sync.done())
    assert ends.other.num_waiting == 1
    ends.other.act()
    assert ends.receiver.taken() == [numbers(1, 100_000)]


@pytest.mark.parametrize("ends", [OverSocket, OverMemory], indirect=True)
def test_a_break_is_reported_once_and_ends_what_waits(ends: OverSocket) -> None:
    """Both ends report it. What waits for an answer fails, and calls are used from then on."""
    connection = ends.link.connection
    assert connection is not None
    ends.other.frame_came = lambda head, elements: connection.cut()  # type: ignore[method-assign]
    send(ends, 0, numbers(1))
    until("the break", lambda: ends.act() or bool(ends.sender.broken and ends.other.broken))
    sync = ends.link.sync().future()
    assert isinstance(sync.exception(), ConnectionError)
    send(ends, 1, numbers(2))
    ends.transport.grant(do.GrantCredit(FIRST, CHANNELS[0], 1, 1))
    for process, other in ((ends.sender, ends.other), (ends.other, ends.sender)):
        assert len(process.broken) == 1
        assert process.links.to(other.peer).way is Way.CALLS
    assert ends.sender.no_link.calls.empty(), "the other end knows by itself"


def test_what_waits_for_an_answer_when_a_connection_breaks_fails() -> None:
    """It may be lost."""
    ends = OverSocket()
    assert ends.back.connection is not None
    sync = ends.link.sync().future()
    ends.other.later(ends.back.connection.cut)
    # The answer to the first one may have come; to the second one it cannot.
    ends.back._send = lambda *_, **__: None  # type: ignore[method-assign]
    second = ends.link.sync().future()
    until("the break", lambda: ends.act() or bool(ends.sender.broken))
    assert sync.done()
    assert isinstance(second.exception(0), ConnectionError)


def test_a_frame_that_is_too_large_fails_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loudly, with what to do."""
    monkeypatch.setattr(links, "MESSAGE_BYTES_MAX", 100_000)
    with pytest.raises(ProtocolError, match="source_rows_max"):
        send(OverSocket(), 0, numbers(0, 100_000))
