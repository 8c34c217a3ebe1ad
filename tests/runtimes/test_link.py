"""A connection between two tasks' processes, without sockets: what is said is heard, or its loss is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.actors.protocol.identity import ChannelId, TaskId
from tidegate.actors.protocol.stream_elements import Watermark
from tidegate.actors.runtimes.ray.exchange import link as links
from tidegate.actors.runtimes.ray.exchange.link import MESSAGE_BYTES_MAX, TOKEN_BYTES, WAITING_BYTES_MAX, Kind, Link
from tidegate.actors.runtimes.ray.exchange.ways import OFFER_AFTER_BYTES, OFFER_AFTER_CALLS, Way, Ways
from tidegate.actors.runtimes.ray.task.frame_order import FrameOrder
from tidegate.actors.task.channels.input_gate import InputChannel
from tidegate.actors.task.messages.events import FrameArrived
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, SubtaskIndex, VertexId

FIRST, SECOND = b"1" * TOKEN_BYTES, b"2" * TOKEN_BYTES
NEIGHBOUR = TaskId(VertexId("sink"), SubtaskIndex(0))
CHANNEL = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))


@dataclass
class End:
    """One end, with what is on its way to it."""

    link: Link
    coming: bytearray = field(default_factory=bytearray)
    said: list[bytes] = field(default_factory=list)
    heard: list[bytes] = field(default_factory=list)
    cut: bool = False
    ended: bool = False

    def say(self, payload: bytes) -> bool:
        """Say something; whether it will be written."""
        said = self.link.say(Kind.FRAME, payload)
        if said:
            self.said.append(payload)
        return said

    def write(self, size_bytes: int, to: End) -> None:
        """The system takes so many bytes, if there are so many."""
        taken = b"".join(self.link.unwritten())[:size_bytes]
        self.link.wrote(len(taken))
        if not self.cut and not to.cut:
            to.coming += taken

    def hear(self, size_bytes: int) -> None:
        """So many bytes are read."""
        data = bytes(self.coming[:size_bytes])
        del self.coming[:size_bytes]
        self.heard += [message.payload for message in self.link.heard(data)]
        if self.link.heard_end:
            self.link.end()


def two_ends() -> tuple[End, End]:
    """The one that listened, which has seen the other one's token, and the one that has connected."""
    return End(Link(SECOND, b"")), End(Link(FIRST, SECOND), bytearray())


PAYLOADS = st.one_of(st.binary(max_size=20), st.integers(4_000, 5_000).map(bytes))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 1), PAYLOADS),
        st.tuples(st.sampled_from(["write", "hear"]), st.integers(0, 1), st.sampled_from([1, 7, 100, 100_000])),
        st.tuples(st.sampled_from(["end", "cut"]), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_is_said_is_heard_in_order_or_its_loss_is_known(steps: list[tuple[str, int, bytes | int]]) -> None:
    """However it is cut into pieces, and wherever it breaks: who has heard END has heard everything."""
    ends = two_ends()
    # What the connecting end has shown was taken away before.
    ends[1].write(TOKEN_BYTES, End(Link(b"", b"")))
    for what, which, how in steps:
        this, other = ends[which], ends[1 - which]
        if what == "say":
            assert isinstance(how, bytes)
            this.say(how)
        elif what == "end":
            this.link.end()
            this.ended = True
        elif what == "cut":
            this.cut = True
        else:
            assert isinstance(how, int)
            this.write(how, other) if what == "write" else this.hear(how)
        for one, peer in (ends, ends[::-1]):
            assert one.heard == peer.said[: len(one.heard)]
            if one.link.heard_end:
                assert one.heard == peer.said
            if one.link.heard_end and not peer.ended:
                assert peer.heard == one.said, "an END that answers says that all was heard"
    if any(end.cut for end in ends):
        return
    for end in ends:
        end.link.end()
    for _ in range(3):
        for this, other in (ends, ends[::-1]):
            while this.link.unwritten():
                this.write(1_000_000, other)
            other.hear(1_000_000)
    assert all(end.link.is_over for end in ends)
    assert ends[0].heard == ends[1].said


def test_nothing_is_heard_of_who_has_not_shown_the_token() -> None:
    """Neither before nor behind another token."""
    speaker = Link(b"3" * TOKEN_BYTES, b"")
    assert speaker.say(Kind.FRAME, b"evil")
    link = Link(FIRST, SECOND)
    data = b"".join(speaker.unwritten())
    assert link.heard(data[: TOKEN_BYTES - 1]) == []
    with pytest.raises(ProtocolError, match="not the one"):
        link.heard(data[TOKEN_BYTES - 1 :])
    assert not link.is_open
    assert not link.say(Kind.CREDIT, b"")


@pytest.mark.parametrize(
    "data",
    [
        links._HEAD.pack(MESSAGE_BYTES_MAX + 1, Kind.FRAME),
        links._HEAD.pack(0, 9),
        links._HEAD.pack(0, Kind.END) + links._HEAD.pack(0, Kind.CREDIT),
    ],
    ids=["too large", "no kind", "behind the end"],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    """It is never taken for one."""
    with pytest.raises(ProtocolError, match="what is no message"):
        Link(FIRST, b"").heard(data)


def test_what_waits_is_bounded() -> None:
    """Who does not read makes the other one go another way, and hears all that was said before when it reads again."""
    this, other = two_ends()
    piece = bytes(100_000)
    while this.say(piece):
        assert len(this.said) < 100
    assert sum(map(len, this.said)) <= WAITING_BYTES_MAX
    assert not this.say(bytes(MESSAGE_BYTES_MAX + 1))
    while this.link.unwritten():
        this.write(70_000, other)
        other.hear(70_000)
    assert other.heard == this.said
    assert this.say(piece)


def frame(number: int) -> FrameArrived:
    """One element."""
    return FrameArrived(0, AttemptNumber(0), CHANNEL, number, (Watermark(number),))


@given(st.data())
def test_frames_are_taken_in_order_whichever_way_they_go(data: st.DataObject) -> None:
    """Calls come whenever they like; a connection opens late, is full at times, and may break. Nothing is skipped.

    What is lost is behind an end that has not heard END, on either side: that fails the task.
    """
    ways, order, receiver = Ways(True), FrameOrder(), InputChannel(CHANNEL, 1_000)
    this, other = two_ends()
    this.write(TOKEN_BYTES, other)
    calls: list[int] = []

    def take(number: int) -> None:
        for one in order.arrived(frame(number)):
            receiver.accept(one.first_sequence, one.elements)

    def pass_on(size_bytes: int) -> None:
        this.write(size_bytes, other)
        heard = len(other.heard)
        other.hear(size_bytes)
        for payload in other.heard[heard:]:
            take(int(payload))

    offered = sent = 0
    for step in data.draw(st.lists(st.sampled_from(["send", "call", "bytes", "open", "break"]), max_size=60)):
        if step == "send":
            if ways.of(NEIGHBOUR) is not Way.CONNECTION or not this.say(b"%d" % sent):
                calls.append(sent)
                offered += ways.called(NEIGHBOUR, 0)
            sent += 1
        elif step == "call" and calls:
            take(calls.pop(data.draw(st.integers(0, len(calls) - 1))))
        elif step == "bytes":
            pass_on(data.draw(st.integers(1, 30)))
        elif step == "open" and ways.of(NEIGHBOUR) is Way.OFFERED:
            ways.opened(NEIGHBOUR)
        elif step == "break" and ways.of(NEIGHBOUR) is Way.CONNECTION:
            this.cut = True
            ways.ended(NEIGHBOUR)
    assert offered <= 1
    if not this.cut:
        this.link.end()
    while this.link.unwritten():
        pass_on(1_000)
    for number in calls:
        take(number)
    taken = [element.timestamp_ms for element in receiver.queue if isinstance(element, Watermark)]
    assert taken == list(range(len(taken)))
    assert len(taken) == sent or (this.cut and not other.link.heard_end and not this.link.heard_end)


def test_a_connection_is_offered_once_and_when_it_is_worth_it() -> None:
    """Also where it is refused, and only where the job wants it. What has ended is not used again."""
    ways = Ways(True)
    assert [ways.called(NEIGHBOUR, 0) for _ in range(OFFER_AFTER_CALLS + 3)].index(True) == OFFER_AFTER_CALLS - 1
    assert ways.of(NEIGHBOUR) is Way.OFFERED
    ways.ended(NEIGHBOUR)
    ways.opened(NEIGHBOUR)
    assert ways.of(NEIGHBOUR) is Way.ENDED
    assert not ways.called(NEIGHBOUR, OFFER_AFTER_BYTES)
    assert Ways(True).called(NEIGHBOUR, OFFER_AFTER_BYTES)
    unwanted = Ways(False)
    unwanted.opened(NEIGHBOUR)
    assert not any(unwanted.called(NEIGHBOUR, OFFER_AFTER_BYTES) for _ in range(10))
    assert unwanted.of(NEIGHBOUR) is Way.ENDED
