"""How frames travel between tasks on Ray: one contract for Ray's calls, memory that is shared, and connections."""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.protocol.identity import ChannelId, TaskId
from tidegate.actors.protocol.stream_elements import Barrier, Element, EndOfPartition, Watermark
from tidegate.actors.runtimes.ray.exchange import frame_exchange
from tidegate.actors.runtimes.ray.exchange.frame_exchange import ELSEWHERE, Incoming, Outgoing, Packed
from tidegate.actors.runtimes.ray.exchange.frames import FrameReader, FrameWriter, OneSchema, Place
from tidegate.actors.runtimes.ray.exchange.link import TOKEN_BYTES, Kind, Link
from tidegate.actors.runtimes.ray.exchange.messages import pack_frame, unpack_frame
from tidegate.actors.runtimes.ray.exchange.shared_segment import FRAMES_MAX, ForeignSegment, Offer, OwnSegment
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, SubtaskIndex, VertexId

SIZE_BYTES = 256 * 1024
TASK = TaskId(VertexId("source"), SubtaskIndex(0))
CHANNEL, OTHER = (ChannelId(0, SubtaskIndex(0), SubtaskIndex(down)) for down in (0, 1))
BARRIER = Barrier(CheckpointId(1), 5)
HEAD = (0, 0, 0, 0, 17)


def numbers(start: int, rows: int = 1_000) -> pa.RecordBatch:
    """Rows with numbers from here on."""
    return pa.record_batch({"n": pa.array(range(start, start + rows), pa.int64())})


@dataclass
class Ends:
    """Both ends of the channels of a task. `receiver_on`: the receiver's node. `connected`: by a connection."""

    receiver_on: str
    size_bytes: int = SIZE_BYTES
    connected: bool = False
    offers: list[tuple[ChannelId, Offer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(TASK, "node", self.size_bytes, lambda channel, offer: self._offered(channel, offer))
        self.incoming = Incoming(self.receiver_on)
        self.schema = OneSchema()
        self.said, self.heard = Link(b"1" * TOKEN_BYTES, b""), Link(b"2" * TOKEN_BYTES, b"1" * TOKEN_BYTES)
        self.over_connection = 0
        """Frames that went over the connection."""

    def _offered(self, channel: ChannelId, offer: Offer) -> None:
        self.offers.append((channel, offer))

    def settle(self) -> None:
        """Let the receiver answer what was offered."""
        for channel, offer in self.offers:
            self.outgoing.answered(channel, self.incoming.take(channel, offer))
        self.offers.clear()

    def carried(self, channel: ChannelId, *elements: Element) -> Packed:
        """What Ray's call, or the connection, carries of a frame, on the other side of it."""
        packed: Packed = self.outgoing.pack(channel, elements)
        message = pack_frame((HEAD, *packed), self.schema) if self.connected else None
        if message is None or not self.said.say(Kind.FRAME, *message):
            called: Packed = pickle.loads(pickle.dumps(packed))
            return called
        self.over_connection += 1
        written = b"".join(self.said.unwritten())
        self.said.wrote(len(written))
        [heard] = self.heard.heard(written)
        head, *rest = unpack_frame(heard.payload)
        assert head == HEAD
        return (rest[0], rest[1])

    def send(self, channel: ChannelId, *elements: Element) -> Any:
        """A frame goes over a channel; gives what arrives."""
        return self.incoming.unpack(channel, self.carried(channel, *elements))


@pytest.fixture(params=["shared memory", "Ray's calls", "connection", "connection and shared memory"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Channels that have carried enough to share memory, where both ends are on one node."""
    monkeypatch.setattr(frame_exchange, "OFFER_AFTER_BYTES", 1)
    way = request.param
    made = Ends("node" if "memory" in way else "elsewhere", connected="connection" in way)
    for channel in (CHANNEL, OTHER):
        made.send(channel, numbers(0, 1))
    made.settle()
    assert (made.carried(CHANNEL, numbers(0, 1))[1] is not None) == (made.receiver_on == "node")
    made.incoming.unpack(CHANNEL, made.carried(CHANNEL, numbers(0, 1)))
    assert bool(made.over_connection) == made.connected
    return made


@pytest.mark.parametrize(
    "elements",
    [
        (),
        (BARRIER,),
        (numbers(0),),
        (numbers(0), BARRIER, numbers(7), Watermark(3), EndOfPartition()),
        (Watermark(1), Watermark(2), numbers(0), numbers(9)),
        (numbers(0), pa.record_batch({"other": ["schema"]})),
        (pa.record_batch({"s": pa.array(["a", None, "ü" * 300]), "l": pa.array([[1], None, []])}),),
        (pa.record_batch({"d": pa.array(["a", "b", "a"]).dictionary_encode()}),),
        (
            pa.record_batch({"d": pa.array(["a", "b"]).dictionary_encode()}),
            pa.record_batch({"d": pa.array(["c", "a"]).dictionary_encode()}),
        ),
        (pa.record_batch({"n": pa.nulls(3), "b": pa.array([True, None, False])}),),
        (numbers(0).slice(100, 7),),
        (numbers(0, 100_000),),
    ],
    ids=lambda elements: "-".join(type(element).__name__ for element in elements) or "nothing",
)
def test_what_goes_in_comes_out(ends: Ends, elements: tuple[Element, ...]) -> None:
    """Elements of every kind, in their order, whether the batches fit or not."""
    for _ in range(3):
        assert ends.send(CHANNEL, *elements) == elements


def test_schemas_keep_what_people_wrote_into_them(ends: Ends) -> None:
    """Metadata of a schema and of its fields arrive: two schemas that differ in that alone are not taken for one."""
    for text in (b"one", b"two"):
        schema = pa.schema([pa.field("n", pa.int64(), metadata={b"unit": text})], metadata={b"of": text})
        [arrived] = ends.send(CHANNEL, pa.record_batch({"n": [1]}, schema=schema)) or []
        assert arrived.schema.equals(schema, check_metadata=True)


class Temperature(pa.ExtensionType):  # type: ignore[misc]
    """A type of a user's, which a receiver that has not registered it would take for its storage."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.temperature")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> Temperature:
        return cls()


def test_types_of_users_arrive(ends: Ends) -> None:
    """Also inside of other types: they are told by their classes."""
    rows = pa.ExtensionArray.from_storage(Temperature(), pa.array([1, 2], pa.int64()))
    nested = pa.StructArray.from_arrays([rows], ["t"])
    [arrived] = ends.send(CHANNEL, pa.RecordBatch.from_arrays([rows, nested], ["t", "nested"]))
    assert arrived.column("t").type == Temperature()
    assert arrived.column("nested").type.field(0).type == Temperature()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.integers(0, 1), st.integers(1, 6_000)),
            st.tuples(st.just("let go"), st.integers(0, 30), st.just(0)),
        ),
        max_size=60,
    )
)
def test_rows_that_somebody_holds_never_change(steps: list[tuple[str, int, int]]) -> None:
    """However long batches or parts of them are held, and in whatever order they are let go of."""
    ends = Ends("node")
    for channel in (CHANNEL, OTHER):
        ends.send(channel, numbers(0, 10_000))
    ends.settle()
    held: list[tuple[pa.RecordBatch, pa.RecordBatch]] = []
    shared = 0
    for number, (step, which, rows) in enumerate(steps):
        if step == "send":
            sent = numbers(number * 1_000_000, rows)
            packed = ends.carried((CHANNEL, OTHER)[which], sent)
            shared += packed[1] is not None
            elements: Any = ends.incoming.unpack((CHANNEL, OTHER)[which], packed)
            [arrived] = elements
            held.append((sent.slice(rows // 2), arrived.slice(rows // 2)))
            del arrived, elements
        elif held:
            del held[which % len(held)]
        assert all(sent == arrived for sent, arrived in held)
    assert shared or not any(step == "send" for step, _, _ in steps)


@pytest.fixture
def link() -> tuple[FrameWriter, FrameReader]:
    """Both ends of one segment."""
    own = OwnSegment(SIZE_BYTES)
    return FrameWriter(own), FrameReader(ForeignSegment.open(own.offer("node")))


def test_memory_is_used_again(link: tuple[FrameWriter, FrameReader]) -> None:
    """Many times what fits goes through, as long as the receiver lets go of it."""
    writer, reader = link
    for number in range(600):
        place = writer.write([numbers(number)])
        assert place is not None
        assert place.offset < 3 * 8_500
        assert reader.read(place) == [numbers(number)]


def test_kept_rows_use_up_half_of_the_memory_at_most(link: tuple[FrameWriter, FrameReader]) -> None:
    """An operator that keeps all its input does not end the exchange: what comes is copied from then on."""
    writer, reader = link
    kept = []
    for number in range(200):
        place = writer.write([numbers(number)])
        assert place is not None
        kept += reader.read(place) or []
    assert writer.taken_bytes <= SIZE_BYTES // 2 + 2 * 8_500
    assert kept == [numbers(number) for number in range(200)]


def test_what_does_not_fit_goes_another_way(link: tuple[FrameWriter, FrameReader]) -> None:
    """Nothing waits for room, and nothing is written over: a full memory says so, and has room again later."""
    writer, reader = link
    places: list[Place] = []
    while (place := writer.write([numbers(len(places))])) is not None:
        places.append(place)
    assert len(places) > 10
    assert writer.write([numbers(0, 1)]) is not None, "a small one still fits"
    assert [reader.read(place) for place in places] == [[numbers(number)] for number in range(len(places))]
    assert writer.write([numbers(0)]) is not None


def test_the_number_of_frames_is_limited(link: tuple[FrameWriter, FrameReader]) -> None:
    """There is a word for so many, and for no more."""
    writer, _ = link
    small = numbers(0, 1)
    assert all(writer.write([small]) is not None for _ in range(FRAMES_MAX))
    assert writer.write([small]) is None


def test_a_frame_that_comes_twice_is_dropped(link: tuple[FrameWriter, FrameReader]) -> None:
    """Its place may be that of another frame by then."""
    writer, reader = link
    first = writer.write([numbers(1)])
    assert first is not None
    assert reader.read(first) == [numbers(1)]
    second = writer.write([numbers(2)])
    assert second is not None
    assert second.offset == first.offset
    assert reader.read(first) is None
    assert reader.read(second) == [numbers(2)]


def test_frames_may_come_out_of_order(link: tuple[FrameWriter, FrameReader]) -> None:
    """Ray may send again what was on its way when a connection broke, behind what was sent meanwhile."""
    writer, reader = link
    places = [writer.write([numbers(number)]) for number in range(4)]
    held: dict[int, Any] = {}
    for number in (2, 0, 2, 3, 0, 1, 3, 2, 1):
        place = places[number]
        assert place is not None
        batches = reader.read(place)
        assert (batches is None) == (number in held)
        held.setdefault(number, batches)
    assert held == {number: [numbers(number)] for number in range(4)}


def test_a_place_that_is_not_the_frames_is_refused(link: tuple[FrameWriter, FrameReader]) -> None:
    """What lies there is never taken for rows of this frame."""
    writer, reader = link
    place = writer.write([numbers(1)])
    assert place is not None
    with pytest.raises(ProtocolError, match="is not where its sender says"):
        reader.read(place._replace(number=place.number + 1))


def test_a_frame_in_memory_that_was_never_taken_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not get lost silently: the receiver of another attempt knows nothing of this one's memory."""
    with pytest.raises(ProtocolError, match="never taken"):
        Incoming("node").unpack(CHANNEL, ((), tuple(Place(0, 0, 0, 64, False))))


def test_memory_of_another_attempt_is_never_read() -> None:
    """What the sender of an older attempt still writes is not in what the new one's receiver has taken."""
    old, new = OwnSegment(SIZE_BYTES), OwnSegment(SIZE_BYTES)
    zombie, writer = FrameWriter(old), FrameWriter(new)
    reader = FrameReader(ForeignSegment.open(new.offer("node")))
    place = writer.write([numbers(1)])
    assert place is not None
    for number in range(20):
        zombie.write([numbers(100 * number)])
    assert reader.read(place) == [numbers(1)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda offer: replace(offer, node_id="elsewhere"), f"^{ELSEWHERE}$"),
        (lambda offer: replace(offer, token=bytes(16)), "somebody else"),
        (lambda offer: replace(offer, size_bytes=offer.size_bytes + 1), "gone"),
        (lambda offer: replace(offer, pid=2**22 + 1), "No such file"),
    ],
)
def test_memory_that_is_not_the_offered_one_is_refused(spoil: Callable[[Offer], Offer], words: str) -> None:
    """Its process id or its descriptor may have become somebody else's."""
    own = OwnSegment(SIZE_BYTES)
    refusal = Incoming("node").take(CHANNEL, spoil(own.offer("node")))
    with pytest.raises(OSError, match=words):
        raise OSError(refusal)


def test_a_refusal_is_noted_once_and_rows_go_on(caplog: pytest.LogCaptureFixture) -> None:
    """That the other end is on another node is no news."""
    ends = Ends("node")
    for channel in (CHANNEL, OTHER):
        ends.send(channel, numbers(0, 10_000))
    for channel, _ in ends.offers:
        ends.outgoing.answered(channel, "Permission denied")
    assert [record.getMessage() for record in caplog.records] == [
        f"rows of {TASK} go through Ray's object store, not through shared memory: Permission denied"
    ]
    assert ends.send(CHANNEL, numbers(1)) == (numbers(1),)
    far = Ends("elsewhere")
    far.send(CHANNEL, numbers(0, 10_000))
    far.settle()
    assert len(caplog.records) == 1


def test_a_system_without_such_memory_is_noted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows go by Ray's calls."""

    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(os, "memfd_create", refuse)
    ends = Ends("node")
    for _ in range(3):
        assert ends.send(CHANNEL, numbers(0, 10_000)) == (numbers(0, 10_000),)
    assert not ends.offers
    assert "Cannot allocate memory" in caplog.records[0].getMessage()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("size_bytes", "rows"), [(0, 10_000), (SIZE_BYTES, 100)], ids=["switched off", "little rows"])
def test_no_memory_is_made_where_none_is_needed(size_bytes: int, rows: int) -> None:
    """A channel with little to say needs none, nor does one of a job that wants none."""
    ends = Ends("node", size_bytes)
    ends.send(CHANNEL, numbers(0, rows))
    assert not ends.offers


def test_only_so_many_channels_share_memory(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A descriptor is kept open for each: the rest go by Ray's calls, on either side, and arrive all the same."""
    monkeypatch.setattr(frame_exchange, "CHANNELS_MAX", 1)
    ends = Ends("node")
    for channel in (CHANNEL, OTHER):
        assert ends.send(channel, numbers(0, 10_000)) == (numbers(0, 10_000),)
    assert [channel for channel, _ in ends.offers] == [CHANNEL]
    ends.settle()
    assert ends.carried(CHANNEL, numbers(1))[1] is not None
    assert ends.send(OTHER, numbers(1)) == (numbers(1),)
    own = OwnSegment(SIZE_BYTES)
    assert ends.incoming.take(OTHER, own.offer("node")) == frame_exchange.TOO_MANY
    assert ends.incoming.take(CHANNEL, own.offer("node")) == ""
    assert len(caplog.records) == 1


def _memory_of_this_process() -> list[str]:
    """The anonymous memory of ours that is mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tidegate" in line]


def test_memory_goes_with_the_attempt_and_with_its_rows() -> None:
    """The sender lets go at its end; rows that the receiver holds stay whole, and take the memory with them."""
    gc.collect()
    before = len(_memory_of_this_process())
    ends = Ends("node")
    ends.send(CHANNEL, numbers(0, 10_000))
    ends.settle()
    arrived = ends.send(CHANNEL, numbers(5))
    ends.outgoing.close()
    del ends
    gc.collect()
    assert arrived == (numbers(5),)
    del arrived
    gc.collect()
    assert len(_memory_of_this_process()) == before
