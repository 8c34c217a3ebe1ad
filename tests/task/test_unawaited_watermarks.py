"""Watermarks that nobody waits for: they make no small frames, keep no batches apart, and still arrive in order."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task.output_gate import BufferLimits, OutputChannel, OutputGate
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    Barrier,
    Element,
    EndOfData,
    Watermark,
    WatermarkStatus,
)
from tidegate.storage.ids import CheckpointId, SubtaskIndex

A = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))
LIMITS = BufferLimits(frame_bytes_min=4 * ONE_ROW_BYTES)
CONTROLS = (Barrier(CheckpointId(1), 0), WatermarkStatus(True), WatermarkStatus(False), EndOfData(drain=True))


def sent(channel: OutputChannel, flush: bool = False) -> list[Element]:
    """All that leaves now."""
    found: list[Element] = []
    while (frame := channel.take_frame(flush)) is not None:
        found += frame[1]
    return found


def queued(*elements: Element) -> OutputChannel:
    """A channel behind which nobody waits, with these elements."""
    channel = OutputChannel(A, LIMITS, awaited=False)
    for element in elements:
        channel.put(element)
    return channel


def test_a_watermark_waits_for_the_linger_time() -> None:
    """Rows fill their frames as if it were not there; the newest one goes with what leaves by time, behind the rows."""
    rows = [batch(n) for n in range(5)]
    channel = queued(rows[0], Watermark(1), rows[1], Watermark(2))
    assert sent(channel) == []
    assert channel.lingering

    for row in rows[2:]:
        channel.put(row)
    assert sent(channel) == rows
    assert channel.lingering, "a gate sets the timer for a watermark alone, too"
    assert sent(channel, flush=True) == [Watermark(2)]
    assert not channel.lingering


@pytest.mark.parametrize("control", [*CONTROLS, Watermark(MAX_WATERMARK_MS)])
def test_other_elements_and_the_end_of_event_time_do_not_wait(control: Element) -> None:
    """A barrier is as urgent as ever, and no watermark comes behind the element that was sent after it."""
    rows = [batch(1), batch(2)]
    before = [] if isinstance(control, Watermark) else [Watermark(7)]

    assert sent(queued(rows[0], Watermark(7), rows[1], control)) == [*rows, *before, control]


def test_what_leaves_by_time_makes_frames_no_smaller_for_a_watermark_alone() -> None:
    """A stream that stands still would otherwise begin again with the smallest frames."""
    limits = replace(LIMITS, credit_bytes=ONE_ROW_BYTES, frame_bytes_max=64 * ONE_ROW_BYTES)
    channel = OutputChannel(A, limits, awaited=False)
    for n in range(5):
        channel.put(batch(n))
    sent(channel), sent(channel)  # no credit for the second one: frames grow
    channel.grant(10**9, 10**9)
    sent(channel, flush=True)
    grown = channel.frame_bytes
    channel.put(Watermark(1))

    assert sent(channel, flush=True) == [Watermark(1)]
    assert channel.frame_bytes == grown


@given(data=st.data(), rows=st.lists(st.sampled_from("bbbwwc"), max_size=30))
@settings(max_examples=100)
def test_the_same_rows_and_controls_leave_in_the_same_order(data: st.DataObject, rows: str) -> None:
    """Whenever frames leave: without watermarks nothing differs; those that leave ascend, the last one leaves too.

    None leaves before the rows that were before it.
    """
    lazy, eager = OutputGate([A], LIMITS, [A]), OutputGate([A], LIMITS)
    found: dict[OutputGate, list[Element]] = {lazy: [], eager: []}
    for number, kind in enumerate(rows):
        for gate, into in found.items():
            if kind == "b":
                gate[A].put(batch(number))
            else:
                gate.broadcast(Watermark(number) if kind == "w" else CONTROLS[number % len(CONTROLS)])
            if data.draw(st.booleans()):
                into += [each for _, _, frame in gate.take_frames(data.draw(st.booleans())) for each in frame]
    for gate, into in found.items():
        into += [each for _, _, frame in gate.take_frames(flush=True) for each in frame]
        assert gate.empty
        assert not gate.lingering

    plain = {gate: [each for each in into if not isinstance(each, Watermark)] for gate, into in found.items()}
    assert [str(each) for each in plain[lazy]] == [str(each) for each in plain[eager]]
    reached = -1
    for element in found[lazy]:
        if isinstance(element, Watermark):
            assert element.timestamp_ms > reached
            reached = element.timestamp_ms
        elif isinstance(element, pa.RecordBatch):
            (number,) = element.column("x").to_pylist()
            assert reached < number or rows[reached] == "w"
    assert lazy.watermark_ms == eager.watermark_ms
    newest = [number for number, kind in enumerate(rows) if kind == "w"]
    assert reached == (newest[-1] if newest else -1)
