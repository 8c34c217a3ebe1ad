"""How frames become messages, and how their rows are kept in memory that two processes map."""

from __future__ import annotations

import gc
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.ray.peer_connections import (
    FramePacker,
    Head,
    pack_credit,
    unpack_credit,
    unpack_frame,
)
from tidegate.actors.ray.shared_memory import (
    ALIGNMENT,
    FRAMES_MAX,
    EdgeSchema,
    ForeignSegment,
    FrameReader,
    FrameWriter,
    OwnSegment,
    Place,
    SharedMemoryAllocator,
)
from tidegate.protocol.stream_elements import Barrier, Element, EndOfPartition, Watermark
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId

SIZE_BYTES = 256 * 1024
BARRIER = Barrier(CheckpointId(1), 5)
HEAD: Head = (3, 1, 2, 7, 17)


def numbers(start: int, rows: int = 1_000) -> pa.RecordBatch:
    """Rows with numbers from here on."""
    return pa.record_batch({"n": pa.array(range(start, start + rows), pa.int64())})


def memory() -> tuple[FrameWriter, FrameReader]:
    """Both ends of one segment."""
    own = OwnSegment(SIZE_BYTES)
    assert own.descriptor is not None
    return FrameWriter(own), FrameReader(ForeignSegment.open(os.dup(own.descriptor)))


class Ends:
    """Both ends of a connection, without it."""

    def __init__(self, shared: bool) -> None:
        writer, self.reader = memory() if shared else (None, None)
        self.packer = FramePacker(writer)

    def sent(self, elements: tuple[Element, ...], head: Head = HEAD) -> bytes:
        """The message of a frame."""
        return b"".join(self.packer.pack(head, elements))

    def send(self, *elements: Element) -> tuple[Element, ...]:
        """Send a frame. Returns what arrives."""
        head, arrived = unpack_frame(self.sent(elements), self.reader)
        assert head == HEAD
        return arrived


@pytest.fixture(params=["shared memory", "socket"])
def ends(request: pytest.FixtureRequest) -> Ends:
    """Connections with and without memory."""
    return Ends(request.param == "shared memory")


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
        assert ends.send(*elements) == elements


@given(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 5), st.integers(-(2**63), 2**63 - 1))
def test_heads_and_grants_come_out_as_they_went_in(head: Head, window_bytes: int) -> None:
    """Each number, whatever it is."""
    assert unpack_credit(pack_credit(head, window_bytes)) == (head, window_bytes)
    assert unpack_frame(b"".join(FramePacker(None).pack(head, (BARRIER,))), None) == (head, (BARRIER,))


def test_rows_are_in_shared_memory_where_they_fit() -> None:
    """The message carries their place alone; else it carries them."""
    ends = Ends(shared=True)
    kept = [ends.send(numbers(0, 10_000))]
    assert len(ends.sent((numbers(0),))) < 300
    assert len(ends.sent((numbers(0, 100_000),))) > 800_000
    assert kept == [(numbers(0, 10_000),)]


def test_edges_of_different_schemas_share_a_connection(ends: Ends) -> None:
    """Each frame has the schema of its own rows."""
    for number in range(6):
        edge = number % 2
        rows = pa.record_batch({f"of {edge}": [number]})
        _, arrived = unpack_frame(ends.sent((rows,), (0, edge, 0, 0, number)), ends.reader)
        assert arrived == (rows,)


def test_schemas_keep_what_people_wrote_into_them(ends: Ends) -> None:
    """Metadata of a schema and of its fields arrive: two schemas that differ in that alone are not taken for one."""
    for text in (b"one", b"two"):
        schema = pa.schema([pa.field("n", pa.int64(), metadata={b"unit": text})], metadata={b"of": text})
        [arrived] = ends.send(pa.record_batch({"n": [1]}, schema=schema))
        assert isinstance(arrived, pa.RecordBatch)
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
    """Also inside of other types: they are told by their classes. Control elements keep their places among them."""
    rows = pa.ExtensionArray.from_storage(Temperature(), pa.array([1, 2], pa.int64()))
    nested = pa.StructArray.from_arrays([rows], ["t"])
    sent = pa.RecordBatch.from_arrays([rows, nested], ["t", "nested"])
    first, barrier, last = ends.send(numbers(0), BARRIER, sent)
    assert (first, barrier) == (numbers(0), BARRIER)
    assert isinstance(last, pa.RecordBatch)
    assert last.column("t").type == Temperature()
    assert last.column("nested").type.field(0).type == Temperature()


def test_large_rows_over_the_socket_are_not_copied_again() -> None:
    """Where the message was read to memory that Arrow likes, they stay."""
    ends = Ends(shared=False)
    message = ends.sent((numbers(0, 100_000),))
    memory = pa.allocate_buffer(len(message))
    memoryview(memory).cast("B")[:] = message
    _, [arrived] = unpack_frame(memoryview(memory).cast("B"), None)
    assert isinstance(arrived, pa.RecordBatch)
    address = arrived.column("n").buffers()[1].address
    assert memory.address < address < memory.address + memory.size


@given(st.lists(st.one_of(st.integers(1, 3_000), st.integers(-20, -1)), max_size=60))
def test_parts_of_memory_never_overlap(steps: list[int]) -> None:
    """Whatever is taken and given back: positive numbers take so many bytes, negative ones give a part back."""
    extents = SharedMemoryAllocator(16 * 1024)
    taken: dict[int, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        if step > 0:
            gap = extents.gap(step)
            if gap is None:
                continue
            extents.take(number, gap[0], step)
            taken[number] = gap[0], gap[0] + step
        elif taken:
            gone = sorted(taken)[step % len(taken)]
            extents.give_back(gone)
            del taken[gone]
        assert sorted(extents.numbers) == sorted(taken)
        in_order = sorted(taken.values())
        assert all(begin % ALIGNMENT == 0 and end <= 16 * 1024 for begin, end in in_order)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(in_order))
    for number in taken:
        extents.give_back(number)
    assert extents.taken_bytes == 0
    assert extents.gap(16 * 1024) == (0, 16 * 1024)


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
    ends = Ends(shared=True)
    held: list[tuple[pa.RecordBatch, pa.RecordBatch]] = []
    for number, (step, which, rows) in enumerate(steps):
        if step == "send":
            sent = numbers(number * 1_000_000, rows)
            [arrived] = ends.send(sent)
            assert isinstance(arrived, pa.RecordBatch)
            held.append((sent.slice(rows // 2), arrived.slice(rows // 2)))
            del arrived
        elif held:
            del held[which % len(held)]
        assert all(sent == arrived for sent, arrived in held)


@pytest.fixture
def shared() -> tuple[FrameWriter, FrameReader]:
    """Both ends of one segment."""
    return memory()


def write(writer: FrameWriter, rows: pa.RecordBatch) -> Place | None:
    """Write a frame of one batch."""
    schema = EdgeSchema()
    assert schema.fits([rows])
    return writer.write([rows], schema)


def test_memory_is_used_again(shared: tuple[FrameWriter, FrameReader]) -> None:
    """Many times what fits goes through, as long as the receiver lets go of it."""
    writer, reader = shared
    for number in range(600):
        place = write(writer, numbers(number))
        assert place is not None
        assert place.offset < 3 * 8_500
        assert reader.read(place) == [numbers(number)]


def test_kept_rows_use_up_half_of_the_memory_at_most(shared: tuple[FrameWriter, FrameReader]) -> None:
    """An operator that keeps all its input does not end the exchange: what comes is copied from then on."""
    writer, reader = shared
    kept = []
    for number in range(200):
        place = write(writer, numbers(number))
        assert place is not None
        kept += reader.read(place)
    assert writer.taken_bytes <= SIZE_BYTES // 2 + 2 * 8_500
    assert kept == [numbers(number) for number in range(200)]


def test_nothing_waits_for_room(shared: tuple[FrameWriter, FrameReader]) -> None:
    """Nor is anything written over: a full memory says so, and has room again later."""
    writer, reader = shared
    places: list[Place] = []
    while (place := write(writer, numbers(len(places)))) is not None:
        places.append(place)
    assert len(places) > 10
    assert write(writer, numbers(0, 1)) is not None, "a small one still fits"
    assert [reader.read(place) for place in places] == [[numbers(number)] for number in range(len(places))]
    assert write(writer, numbers(0)) is not None


def test_the_number_of_frames_is_limited(shared: tuple[FrameWriter, FrameReader]) -> None:
    """There is a word for so many, and for no more."""
    writer, _ = shared
    small = numbers(0, 1)
    assert all(write(writer, small) is not None for _ in range(FRAMES_MAX))
    assert write(writer, small) is None


def test_a_place_that_is_not_the_frames_is_refused(shared: tuple[FrameWriter, FrameReader]) -> None:
    """What is there is never taken for rows of this frame."""
    writer, reader = shared
    place = write(writer, numbers(1))
    assert place is not None
    with pytest.raises(ProtocolError, match="is not at the place that its sender reported"):
        reader.read(place._replace(number=place.number + 1))


def test_a_place_in_memory_that_is_not_mapped_is_refused() -> None:
    """Its rows must not get lost silently."""
    message = Ends(shared=True).sent((numbers(1),))
    with pytest.raises(ProtocolError, match="has not mapped"):
        unpack_frame(message, None)


def _memory_of_this_process() -> list[str]:
    """The anonymous memory of ours that is mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:tidegate" in line]


def test_memory_goes_with_the_connection_and_with_its_rows() -> None:
    """Rows that the receiver holds stay whole, and take the memory with them."""
    gc.collect()
    before = len(_memory_of_this_process())
    ends = Ends(shared=True)
    arrived: Any = ends.send(numbers(5))
    del ends
    gc.collect()
    assert arrived == (numbers(5),)
    assert len(_memory_of_this_process()) > before
    del arrived
    gc.collect()
    assert len(_memory_of_this_process()) == before
