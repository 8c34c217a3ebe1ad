"""A connection between two processes, without its socket: what is sent is read whole and in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.ray import framed_connections as links
from tidegate.actors.ray.framed_connections import LARGE_BYTES, MESSAGE_BYTES_MAX, PIECES_MAX, FrameCodec, Kind, Message
from tidegate.storage.errors import ProtocolError

PROOF = b"1" * 16

PAYLOADS = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([4_000, 5_000, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES]).map(
        lambda size: bytes([size % 251]) * size
    ),
)


def feed(link: FrameCodec, data: bytes, size_bytes: int) -> list[Message]:
    """Give a link bytes as a socket would, at most this many at once."""
    messages, at = [], 0
    while at < len(data):
        space = link.space()
        if space is None:
            piece = data[at : at + size_bytes]
            messages += link.read(piece)
        else:
            piece = data[at : at + min(size_bytes, len(space))]
            space[: len(piece)] = piece
            messages += link.filled(len(piece))
        at += len(piece)
    return messages


def write(link: FrameCodec, size_bytes: int) -> bytes:
    """Take bytes as a socket would."""
    written = b"".join(link.unwritten()[0])[:size_bytes]
    link.wrote(len(written))
    return written


@given(st.lists(PAYLOADS, max_size=12), st.sampled_from([1_000, 70_000, LARGE_BYTES, 10_000_000]), st.data())
def test_what_is_sent_is_read_whole_and_in_order(payloads: list[bytes], read_bytes: int, data: st.DataObject) -> None:
    """Whatever its size, and however the system cuts it into pieces on both sides."""
    sender, reader = FrameCodec(PROOF, b""), FrameCodec(b"", PROOF)
    read: list[Message] = []
    for payload in payloads:
        half = len(payload) // 2
        sender.send(Kind.FRAME, payload[:half], payload[half:])
        if data.draw(st.booleans()):
            read += feed(reader, write(sender, data.draw(st.sampled_from([1, 17, 5_000, 400_000]))), read_bytes)
    while rest := write(sender, 1_000_000):
        read += feed(reader, rest, read_bytes)
    assert [bytes(message.payload) for message in read] == payloads
    assert all(message.kind is Kind.FRAME for message in read)


def test_a_large_message_is_read_to_where_arrow_likes_it() -> None:
    """Its rows need not be copied again."""
    reader = FrameCodec(b"", b"")
    data = links.MESSAGE_HEAD.pack(LARGE_BYTES, Kind.FRAME) + b"x" * LARGE_BYTES
    [message] = feed(reader, data, 10_000)
    assert isinstance(message.payload, memoryview)
    assert links.pa.py_buffer(message.payload).address % 64 == 0


@pytest.mark.parametrize("before", [0, 1, PIECES_MAX, PIECES_MAX + 5])
@pytest.mark.parametrize("size_bytes", [1, 3, 1_000_000])
def test_a_descriptor_goes_with_the_first_byte_of_its_message(before: int, size_bytes: int) -> None:
    """Not earlier and not twice: else the reader would have it for another message."""
    link = FrameCodec(b"", b"")
    written = bytearray()
    link.wrote(0)
    for number in range(before):
        link.send(Kind.CREDIT, b"%03d" % number)
    link.send(Kind.MEMORY, b"memory", descriptor=7)
    link.send(Kind.FRAME, b"behind it")
    at = (links.MESSAGE_HEAD.size + 3) * before
    while True:
        pieces, descriptor = link.unwritten()
        if not pieces:
            break
        assert (descriptor is not None) == (len(written) == at)
        took = b"".join(pieces)[:size_bytes]
        assert descriptor is None or took
        written += took
        link.wrote(len(took))
    kinds = [message.kind for message in FrameCodec(b"", b"").read(written)]
    assert kinds == [*[Kind.CREDIT] * before, Kind.MEMORY, Kind.FRAME]


def test_nothing_is_read_of_a_process_that_has_proved_nothing() -> None:
    """Neither before nor behind another proof."""
    speaker, link = FrameCodec(b"3" * 16, b""), FrameCodec(b"", PROOF)
    speaker.send(Kind.FRAME, b"evil")
    data = write(speaker, 1_000)
    assert link.read(data[:15]) == []
    with pytest.raises(ProtocolError, match="not the expected process"):
        link.read(data[15:])
    assert not link.is_open


@pytest.mark.parametrize(
    "data",
    [links.MESSAGE_HEAD.pack(MESSAGE_BYTES_MAX + 1, Kind.FRAME), links.MESSAGE_HEAD.pack(0, max(Kind) + 1)],
    ids=["too large", "no kind"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    """It is never taken for one."""
    with pytest.raises(ProtocolError, match="invalid message"):
        FrameCodec(b"", b"").read(data)


def test_a_message_that_is_too_large_fails_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loudly, and what was sent before is not harmed."""
    monkeypatch.setattr(links, "MESSAGE_BYTES_MAX", 1_000)
    link = FrameCodec(b"", b"")
    link.send(Kind.FRAME, bytes(1_000))
    with pytest.raises(ProtocolError, match="1001 bytes exceeds the limit"):
        link.send(Kind.FRAME, bytes(1_001))
    assert [len(message.payload) for message in FrameCodec(b"", b"").read(write(link, 10_000))] == [1_000]
