"""Gates of many channels: they look at those that have something, and do what gates that look at all would do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from batches import ONE_ROW_BYTES, batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task import channels
from tidegate.actors.task.channels import ReadyChannels, places
from tidegate.actors.task.input_gate import InputChannel, InputGate
from tidegate.actors.task.output_gate import BufferLimits, OutputChannel, OutputGate
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Element, EndOfData, Watermark
from tidegate.storage.ids import CheckpointId, SubtaskIndex

WIDE = 10**9
CHANNELS = 20
IN = [ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(CHANNELS)]
OUT = [ChannelId(0, SubtaskIndex(0), SubtaskIndex(i)) for i in range(CHANNELS)]
LIMITS = BufferLimits(
    credit_bytes=4 * ONE_ROW_BYTES,
    queue_bytes_max=3 * ONE_ROW_BYTES,
    frame_bytes_min=2 * ONE_ROW_BYTES,
    frame_bytes_max=4 * ONE_ROW_BYTES,
)
LOOKS_MAX = 4
"""Looks at channels for each element that is taken: to find it, that it has gone, and whether a turn is worth it."""


@given(bits=st.integers(0, 2**40), but=st.integers(0, 2**40), place=st.integers(0, 41))
def test_the_next_place_is_found_around_the_end(bits: int, but: int, place: int) -> None:
    """The first one that is set and not left out, from a place on and then from the first."""
    channels = ReadyChannels([None] * 41)
    for each in places(bits):
        channels.mark(each)
    left = [each for each in range(41) if bits >> each & 1 and not but >> each & 1]
    assert channels.next(place, but) == next((n for n in [*(n for n in left if n >= place), *left]), None)
    assert list(places(bits)) == [each for each in range(41) if bits >> each & 1]


class _InTurn:
    """What the input gate is to do, by looking at each channel."""

    def __init__(self, gate: InputGate) -> None:
        self._channels = list(gate)
        self._turn = 0

    def next(self, blocked: Callable[[ChannelId], bool]) -> InputChannel | None:
        recovering = any(channel.recovered for channel in self._channels)
        for channel in self._channels[self._turn :] + self._channels[: self._turn]:
            ready = channel.recovered if recovering else channel.waiting
            if ready and not blocked(channel.channel):
                self._turn = self._channels.index(channel)
                return channel
        return None

    def served(self) -> None:
        self._turn = (self._turn + 1) % len(self._channels)


@given(data=st.data())
@settings(max_examples=120)
def test_an_input_gate_serves_whom_one_that_looks_at_all_would(data: st.DataObject) -> None:
    """Elements come, are taken, are restored; channels are blocked one after the other for a checkpoint, and all are
    free at its end, or go free one by one where no checkpoint is named; one whose data is over is no open channel."""
    gate = InputGate(IN, WIDE)
    model = _InTurn(gate)
    some = st.integers(0, CHANNELS - 1)
    for place in data.draw(st.lists(some, max_size=3)):
        gate.recover(IN[place], [batch(1), batch(2)])
    blocked: set[ChannelId] = set()
    checkpoint, over, named = 1, set[ChannelId](), data.draw(st.booleans())
    for step in data.draw(
        st.lists(st.sampled_from(["come", "come", "end", "take", "take", "block", "free"]), max_size=60)
    ):
        if step in ("come", "end"):
            channel = IN[data.draw(some)]
            if channel not in over:
                over |= {channel} if step == "end" else set()
                element: Element = EndOfData(drain=False) if step == "end" else batch(3)
                gate[channel].accept(gate[channel].arrived, [element])
        elif step == "block":
            blocked.add(IN[data.draw(some)])
        elif step == "free" and named:
            blocked.clear()
            checkpoint += 1
        elif step == "free" and blocked:
            blocked.remove(data.draw(st.sampled_from([channel for channel in IN if channel in blocked])))
        blocks_for = CheckpointId(checkpoint) if blocked and named else None
        ready = any(channel.waiting and channel.channel not in blocked for channel in gate)
        assert gate.waits(blocked.__contains__, blocks_for) == ready
        found = gate.next_channel(blocked.__contains__, blocks_for)
        assert found is model.next(blocked.__contains__)
        if step == "take" and found is not None:
            found.take()
            gate.served()
            model.served()
        assert gate.open_channels == max(1, sum(not channel.data_over for channel in gate))


@given(data=st.data())
@settings(max_examples=120)
def test_an_output_gate_does_what_one_that_looks_at_all_would(data: st.DataObject) -> None:
    """Rows and watermarks are put, turns end, credit comes, frames leave: the same ones in the same order. Windows are
    narrow, so that what was put since the last turn counts, also where it has left."""
    unawaited = OUT[::3]
    gates = []
    for always in (0, CHANNELS):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(channels, "ALWAYS_MARKED", always)
            gates.append(OutputGate(OUT, replace(LIMITS, debloat_target_ms=100), unawaited))
            for channel in OUT:
                gates[-1][channel].grant(4 * ONE_ROW_BYTES, 2 * ONE_ROW_BYTES)
    some, watermark_ms = st.integers(0, CHANNELS - 1), 0
    for step in data.draw(st.lists(st.sampled_from(["put", "put", "mark", "turn", "grant", "flush"]), max_size=50)):
        place, number = data.draw(some), data.draw(st.integers(1, 9))
        watermark_ms += step == "mark"
        frames = []
        for gate in gates:
            if step == "put":
                gate[OUT[place]].put(batch(*range(number)))
            elif step == "mark":
                gate.broadcast(Watermark(watermark_ms))
            elif step == "turn":
                gate.turn_over(number)
            elif step == "grant":
                gate[OUT[place]].grant(gate[OUT[place]].sent_bytes + number * ONE_ROW_BYTES, number * ONE_ROW_BYTES)
            frames.append(gate.take_frames(step == "flush"))
        one, other = gates
        assert [(c, n, len(e)) for c, n, e in frames[0]] == [(c, n, len(e)) for c, n, e in frames[1]]
        assert (one.over_limit, one.empty, one.starved()) == (other.over_limit, other.empty, other.starved())
        assert (one.lingering, one.starving, one.turn_rows_max) == (
            other.lingering,
            other.starving,
            other.turn_rows_max,
        )


@pytest.mark.parametrize("blocks", [False, True])
def test_a_turn_does_not_look_at_channels_that_have_nothing(blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand channels each gets an element: a few looks for each, whatever the number of the others. So it is
    where those that have been served are blocked, and more waits there."""
    channels = [ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(1_000)]
    gate, looks = InputGate(channels, WIDE), 0
    waiting = InputChannel.waiting.fget  # type: ignore[attr-defined]

    def counted(channel: InputChannel) -> bool:
        nonlocal looks
        looks += 1
        return bool(waiting(channel))

    monkeypatch.setattr(InputChannel, "waiting", property(counted))
    blocked: set[ChannelId] = set()
    blocks_for = CheckpointId(1) if blocks else None
    for channel in channels:
        gate[channel].accept(0, [batch(1), batch(2)] if blocks else [batch(1)])
        found = gate.next_channel(blocked.__contains__, blocks_for)
        assert found is gate[channel]
        found.take()
        gate.served()
        blocked |= {channel} if blocks else set()
        assert not gate.waits(blocked.__contains__, blocks_for)
        assert gate.next_channel(blocked.__contains__, blocks_for) is None
    assert looks <= LOOKS_MAX * len(channels)


def test_sending_does_not_look_at_channels_that_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row after the other goes to one of a thousand channels, and leaves."""
    channels = [ChannelId(0, SubtaskIndex(0), SubtaskIndex(i)) for i in range(1_000)]
    gate, looks = OutputGate(channels, BufferLimits(frame_bytes_min=1)), 0
    limit, idle = (getattr(OutputChannel, name).fget for name in ("over_limit", "idle"))

    def counted(of: Callable[[OutputChannel], bool]) -> property:
        def look(channel: OutputChannel) -> bool:
            nonlocal looks
            looks += 1
            return of(channel)

        return property(look)

    monkeypatch.setattr(OutputChannel, "over_limit", counted(limit))
    monkeypatch.setattr(OutputChannel, "idle", counted(idle))
    for channel in channels:
        gate[channel].put(batch(1))
        assert not gate.over_limit
        assert [frame[0] for frame in gate.take_frames(flush=False)] == [channel]
        gate.turn_over(1)
    assert looks <= LOOKS_MAX * len(channels)
