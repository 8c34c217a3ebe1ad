"""Event time of a task over its channels."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task.task_machine import WatermarkValve
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Watermark, WatermarkStatus
from tidegate.storage.ids import SubtaskIndex

A, B = (ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(2))
IDLE, ACTIVE = WatermarkStatus(True), WatermarkStatus(False)


def test_the_minimum_counts_and_never_goes_back() -> None:
    """Nothing is emitted before every channel has spoken; then the minimum, whenever it advances."""
    valve = WatermarkValve([A, B])

    assert valve.watermark(A, Watermark(5)) == []
    assert valve.watermark(B, Watermark(3)) == [Watermark(3)]
    assert valve.watermark(B, Watermark(2)) == []
    assert valve.watermark(B, Watermark(9)) == [Watermark(5)]


def test_an_idle_channel_does_not_hold_event_time_back() -> None:
    """The others count alone as long as one is idle; a channel that is back takes nothing back."""
    valve = WatermarkValve([A, B])
    valve.watermark(A, Watermark(5))

    assert valve.status(B, IDLE) == [Watermark(5)]
    assert valve.status(B, ACTIVE) == []
    assert valve.watermark(A, Watermark(8)) == []
    assert valve.watermark(B, Watermark(7)) == [Watermark(7)]


def test_the_status_is_sent_on_when_all_channels_share_it() -> None:
    """A task is idle when all its channels are, and active as soon as one is; each change is told once."""
    valve = WatermarkValve([A, B])

    assert valve.status(A, IDLE) == []
    assert valve.status(B, IDLE) == [IDLE]
    assert valve.status(B, IDLE) == []
    assert valve.status(A, ACTIVE) == [ACTIVE]


def test_when_all_are_idle_the_furthest_counts() -> None:
    """Also one that was idle before the one that held it back, and what it says later; the idleness comes behind."""
    valve = WatermarkValve([A, B])
    assert valve.watermark(A, Watermark(5)) == []
    assert valve.status(A, IDLE) == []

    assert valve.status(B, IDLE) == [Watermark(5), IDLE]
    assert valve.watermark(A, Watermark(8)) == [Watermark(8)]
    assert valve.status(B, ACTIVE) == [ACTIVE]
    assert valve.watermark(B, Watermark(7)) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.integers(0, 20).map(Watermark), st.booleans().map(WatermarkStatus))),
        max_size=40,
    )
)
@settings(max_examples=100)
def test_emitted_watermarks_only_grow_and_never_pass_an_active_channel(
    history: list[tuple[int, Watermark | WatermarkStatus]],
) -> None:
    """Whatever channels say, event time grows strictly and stays at or below that of every active channel."""
    channels = [ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(3)]
    valve = WatermarkValve(channels)
    at_ms: dict[ChannelId, int] = dict.fromkeys(channels, -1)
    idle: set[ChannelId] = set()
    last_ms = -1
    for index, element in history:
        channel = channels[index]
        if isinstance(element, Watermark):
            at_ms[channel] = max(at_ms[channel], element.timestamp_ms)
            emitted = valve.watermark(channel, element)
        else:
            (idle.add if element.idle else idle.discard)(channel)
            emitted = valve.status(channel, element)
        for out in emitted:
            if isinstance(out, Watermark):
                assert out.timestamp_ms > last_ms
                active = [at_ms[c] for c in channels if c not in idle]
                assert out.timestamp_ms == (min(active) if active else max(at_ms.values()))
                last_ms = out.timestamp_ms
