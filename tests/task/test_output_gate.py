"""The output side of a task: frames, credit and the limit of its queues; and both sides joined by a bad link."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task.input_gate import InputGate
from tidegate.actors.task.output_gate import BufferLimits, OutputChannel, OutputGate
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier, Element, Watermark, element_size_bytes
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, SubtaskIndex

A, B = (ChannelId(0, SubtaskIndex(0), SubtaskIndex(i)) for i in range(2))
BARRIER = Barrier(CheckpointId(1), 0)
WIDE = 10**9
LIMITS = BufferLimits(
    credit_bytes=100 * ONE_ROW_BYTES,
    queue_bytes_max=8 * ONE_ROW_BYTES,
    frame_bytes_min=4 * ONE_ROW_BYTES,
    frame_bytes_max=16 * ONE_ROW_BYTES,
    frame_elements_max=1_000,
)


def channel_with(elements: Iterable[Element], limits: BufferLimits = LIMITS) -> OutputChannel:
    """A channel with these elements queued."""
    channel = OutputChannel(A, limits)
    for element in elements:
        channel.put(element)
    return channel


def frame_sizes(channel: OutputChannel, flush: bool = False) -> list[int]:
    """Number of elements of each frame that leaves now."""
    sizes = []
    while (frame := channel.take_frame(flush)) is not None:
        sizes.append(len(frame[1]))
    return sizes


def test_a_frame_leaves_when_enough_is_queued() -> None:
    """Below the frame size elements wait for more; at it they leave together."""
    channel = channel_with(batch(n) for n in range(3))
    assert channel.take_frame(flush=False) is None

    channel.put(batch(3))

    frame = channel.take_frame(flush=False)
    assert frame is not None
    assert (frame[0], [values(e) for e in frame[1]]) == (0, [[0], [1], [2], [3]])
    assert channel.queued_bytes == 0


def test_a_frame_leaves_when_its_time_is_over() -> None:
    """The linger timer flushes what is there, however little."""
    assert frame_sizes(channel_with([batch(0)]), flush=True) == [1]


@pytest.mark.parametrize("control", [BARRIER, Watermark(1)])
def test_a_control_element_is_urgent_and_keeps_its_place(control: Element) -> None:
    """A control element takes what is queued before it along at once, and overtakes nothing."""
    channel = channel_with([batch(0), control, batch(1)])

    frame = channel.take_frame(flush=False)

    assert frame is not None
    assert (values(frame[1][0]), frame[1][1], values(frame[1][2])) == ([0], control, [1])
    assert frame_sizes(channel_with([batch(0)])) == []


def test_numbers_go_on_over_frames() -> None:
    """A frame starts with the number after the last one's end."""
    channel = channel_with([batch(0), BARRIER])
    channel.take_frame(flush=False)
    channel.put(BARRIER)

    frame = channel.take_frame(flush=False)

    assert frame is not None
    assert (frame[0], channel.next_sequence) == (2, 3)


def test_frames_are_bounded_in_bytes_and_elements() -> None:
    """A frame holds at most `frame_bytes_max` bytes, or one element, and `frame_elements_max` elements."""
    assert frame_sizes(channel_with(batch(n) for n in range(40))) == [16, 16, 8]
    few = replace(LIMITS, frame_elements_max=10)
    assert frame_sizes(channel_with((batch(n) for n in range(24)), few)) == [10, 10, 4]
    huge = batch(*range(10_000))
    assert frame_sizes(channel_with([huge, huge], replace(LIMITS, credit_bytes=10**9))) == [1, 1]


def test_batches_leave_on_credit_and_the_last_one_may_overdraw() -> None:
    """Without credit nothing leaves; one byte of it lets one element of any size pass."""
    limits = replace(LIMITS, credit_bytes=2 * ONE_ROW_BYTES + 1)
    channel = channel_with((batch(n) for n in range(6)), limits)
    assert frame_sizes(channel) == [3]
    assert not channel.sendable

    channel.grant(2 * ONE_ROW_BYTES, WIDE)
    assert frame_sizes(channel, flush=True) == [], "a stale grant takes nothing back and gives nothing"
    channel.grant(4 * ONE_ROW_BYTES, WIDE)
    assert frame_sizes(channel, flush=True) == [1]
    channel.grant(4 * ONE_ROW_BYTES, WIDE)
    assert frame_sizes(channel, flush=True) == [], "a grant that comes twice counts once"
    channel.grant(5 * ONE_ROW_BYTES, WIDE)
    channel.grant(4 * ONE_ROW_BYTES, WIDE)
    assert frame_sizes(channel, flush=True) == [1], "a grant that comes late takes nothing back"


def test_control_elements_need_no_credit_but_wait_for_the_batch_before_them() -> None:
    """A barrier leaves without credit, unless a batch that needs some is queued before it."""
    limits = replace(LIMITS, credit_bytes=ONE_ROW_BYTES)
    channel = channel_with([batch(0), BARRIER, batch(1), BARRIER], limits)

    assert frame_sizes(channel) == [2]
    assert frame_sizes(channel, flush=True) == []
    channel.grant(2 * ONE_ROW_BYTES, WIDE)
    assert frame_sizes(channel) == [2]


def test_frames_grow_while_the_receiver_is_slow_and_shrink_when_time_flushes_them() -> None:
    """After waiting for credit it takes more bytes to fill a frame; after leaving by time it takes fewer again."""
    channel = channel_with((batch(n) for n in range(5)), replace(LIMITS, credit_bytes=4 * ONE_ROW_BYTES))
    assert frame_sizes(channel) == [4]
    channel.grant(1_000 * ONE_ROW_BYTES, WIDE)
    for n in range(6):
        channel.put(batch(n))
    assert frame_sizes(channel) == [], "7 batches fill no frame of 8"
    channel.put(batch(6))
    assert frame_sizes(channel) == [8]

    channel.put(batch(7))
    assert frame_sizes(channel, flush=True) == [1]
    for n in range(4):
        channel.put(batch(n))
    assert frame_sizes(channel) == [4]


def test_a_full_queue_says_so() -> None:
    """`over_limit` is back-pressure: one full channel is enough, and it ends when credit has emptied the queue."""
    gate = OutputGate([A, B], replace(LIMITS, credit_bytes=ONE_ROW_BYTES))
    for n in range(9):
        gate[B].put(batch(n))
    gate.take_frames(flush=True)
    assert gate.over_limit

    gate[B].grant(2 * ONE_ROW_BYTES, WIDE)
    gate.take_frames(flush=True)

    assert not gate.over_limit
    assert not gate.lingering
    assert not gate.empty


def test_the_gate_broadcasts_control_elements_and_knows_its_positions() -> None:
    """Every channel gets the element once, under a number of its own."""
    gate = OutputGate([A, B], LIMITS)
    gate[B].put(batch(1))

    gate.broadcast(BARRIER)

    assert gate.row_positions() == ((A, 0), (B, 1))
    assert [(c, first, len(e)) for c, first, e in gate.take_frames(flush=False)] == [(A, 0, 1), (B, 0, 2)]
    with pytest.raises(ProtocolError):
        gate[ChannelId(9, SubtaskIndex(0), SubtaskIndex(0))]


@given(data=st.data())
@settings(max_examples=150)
def test_a_link_that_repeats_frames_loses_and_reorders_nothing(data: st.DataObject) -> None:
    """Two gates, frames delivered late and repeatedly, grants late, twice and out of order.

    Everything arrives once and in order, a queue at the receiver never holds more than the credit and one element,
    and everything is delivered in the end.
    """
    sizes = st.integers(1, 60)
    script = data.draw(st.lists(st.one_of(sizes, st.just(0)), min_size=1, max_size=30))
    elements: list[Element] = [batch(*range(n)) if n else Watermark(i) for i, n in enumerate(script)]
    largest = max((element_size_bytes(e) for e in elements), default=0)
    limits = BufferLimits(
        credit_bytes=data.draw(st.integers(1, 3_000)),
        queue_bytes_max=10_000,
        frame_bytes_min=data.draw(st.integers(1, 500)),
        frame_bytes_max=data.draw(st.integers(500, 2_000)),
        frame_elements_max=data.draw(st.integers(1, 5)),
    )
    out, into = OutputGate([A], limits), InputGate([A], limits.credit_bytes)
    wire: list[tuple[int, tuple[Element, ...]]] = []
    grants: list[int] = []
    old: list[tuple[int, tuple[Element, ...]]] = []
    taken: list[Element] = []
    waiting = list(elements)

    def receive() -> None:
        taken.append(into[A].take())
        total_bytes = into[A].credit_to_grant()
        if total_bytes is not None:
            grants.append(total_bytes)

    def send(flush: bool) -> None:
        wire.extend((first, frame) for _, first, frame in out.take_frames(flush))

    for action in data.draw(st.lists(st.sampled_from("puffdrtgG"), max_size=120)):
        if action in "pu" and waiting:
            out[A].put(waiting.pop(0))
            send(flush=False)
        elif action == "f":
            send(flush=True)
        elif action == "d" and wire:
            old.append(wire[0])
            into[A].accept(*wire.pop(0))
        elif action == "r" and old:
            into[A].accept(*data.draw(st.sampled_from(old)))
        elif action == "t" and into[A].queue:
            receive()
        elif action in "gG" and grants:
            out[A].grant(data.draw(st.sampled_from(grants)), limits.credit_bytes)
        queued_bytes = sum(element_size_bytes(e) for e in into[A].queue)
        assert queued_bytes <= limits.credit_bytes + largest

    for element in waiting:
        out[A].put(element)
    while not (out.empty and not wire and not into[A].queue):
        before = (out[A].next_sequence - len(out[A].queue), into[A].arrived, len(taken))
        send(flush=True)
        while wire:
            into[A].accept(*wire.pop(0))
        while into[A].queue:
            receive()
        for total_bytes in grants:
            out[A].grant(total_bytes, limits.credit_bytes)
        after = (out[A].next_sequence - len(out[A].queue), into[A].arrived, len(taken))
        assert after != before, "the link makes progress as long as anything waits"
    assert [e.num_rows if isinstance(e, pa.RecordBatch) else e for e in taken] == [
        e.num_rows if isinstance(e, pa.RecordBatch) else e for e in elements
    ]
