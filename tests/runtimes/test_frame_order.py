"""Frames that come late, twice and in any order are handed on in theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray_fakes import FIRST, ROWS, SINK, task_processes

from tidegate.actors.coordinator.events import TaskReachedEndOfData
from tidegate.actors.ray import peer_transports as frame_order
from tidegate.actors.ray.peer_transports import GAP_MS_MAX, FrameOrder, OrderedFrames
from tidegate.actors.ray.worker_actor import WorkerProcess
from tidegate.actors.task.events import FrameArrived
from tidegate.actors.task.input_gate import InputChannel
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import EndOfData, EndOfPartition, Watermark
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import SubtaskIndex

CHANNELS = tuple(ChannelId(0, SubtaskIndex(upstream), SubtaskIndex(0)) for upstream in (0, 1))


def frame(channel: ChannelId, first: int, elements: int = 1) -> FrameArrived:
    """So many elements, each with its number as its time."""
    return FrameArrived(0, FIRST, channel, first, tuple(Watermark(first + n) for n in range(elements)))


def sent(sizes: list[int], channel: ChannelId) -> list[FrameArrived]:
    """What a sender sends on a channel, in frames of these sizes."""
    frames, number = [], 0
    for size in sizes:
        frames.append(frame(channel, number, size))
        number += size
    return frames


class Receiver:
    """A task's input, as its machine sees it."""

    def __init__(self) -> None:
        self.inputs = {channel: InputChannel(channel, 1_000) for channel in CHANNELS}
        self.later: list[tuple[int, Callable[[], None]]] = []
        self.frames = OrderedFrames(self.take, lambda delay_ms, action: self.later.append((delay_ms, action)))

    def take(self, arrived: FrameArrived) -> None:
        """A frame is handed on; a gap fails the task."""
        self.inputs[arrived.channel].accept(arrived.first_sequence, arrived.elements)

    def times(self, channel: ChannelId) -> list[int]:
        """What has been taken in."""
        return [element.timestamp_ms for element in self.inputs[channel].queue if isinstance(element, Watermark)]

    def pass_time(self) -> None:
        """What was due later happens."""
        due, self.later = self.later, []
        for _, action in due:
            action()


@given(st.data())
def test_whatever_ray_does_each_element_is_taken_once_and_in_order(data: st.DataObject) -> None:
    """Frames come in any order, and some twice; of two channels each has an order of its own."""
    sizes = [data.draw(st.lists(st.integers(1, 3), max_size=8)) for _ in CHANNELS]
    frames = [one for channel, of in zip(CHANNELS, sizes, strict=True) for one in sent(of, channel)]
    again = data.draw(st.lists(st.sampled_from(frames), max_size=8)) if frames else []
    receiver = Receiver()
    for one in data.draw(st.permutations([*frames, *again])):
        receiver.frames.arrived(one)
    for channel, of in zip(CHANNELS, sizes, strict=True):
        assert receiver.times(channel) == list(range(sum(of)))
    assert receiver.frames.num_early == 0
    receiver.pass_time()
    assert receiver.later == []


def test_a_frame_that_never_comes_fails_the_task_after_a_while() -> None:
    """Not at once: it may be on its way. What follows has a time of its own, from when the frame before it came."""
    receiver = Receiver()
    one, _, three, _, five = sent([1, 1, 1, 1, 1], CHANNELS[0])
    for arrived in (one, three, five):
        receiver.frames.arrived(arrived)
    assert [delay_ms for delay_ms, _ in receiver.later] == [GAP_MS_MAX]
    receiver.frames.arrived(frame(CHANNELS[0], 1))
    receiver.pass_time()
    assert receiver.times(CHANNELS[0]) == [0, 1, 2]
    assert [delay_ms for delay_ms, _ in receiver.later] == [GAP_MS_MAX]
    with pytest.raises(ProtocolError, match="element 4 arrived where 3 was due"):
        receiver.pass_time()


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In number, over all channels of the task; in bytes by the credit of each."""
    monkeypatch.setattr(frame_order, "EARLY_MAX", 2)
    order = FrameOrder()
    assert order.arrived(frame(CHANNELS[0], 1)) == order.arrived(frame(CHANNELS[1], 1)) == ()
    assert order.arrived(frame(CHANNELS[1], 1)) == (), "it has come before"
    given_up = order.arrived(frame(CHANNELS[1], 2))
    assert [one.first_sequence for one in given_up] == [1, 2]
    assert (order.gap(CHANNELS[0]), order.gap(CHANNELS[1])) == (0, None)


def test_ray_repeats_what_has_a_number_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ever: as long as the process lives. The process puts what comes early in order."""
    retries = {name: getattr(call, "__ray_max_task_retries__", None) for name, call in vars(WorkerProcess).items()}
    assert {name: n for name, n in retries.items() if n is not None} == {"frame": -1, "credit": -1, "no_link": -1}
    with task_processes(monkeypatch) as make:
        sink = make(SINK).start()
        sink.receive(1, EndOfData(drain=True), EndOfPartition())
        sink.receive(0, ROWS)
        sink.receive(0, ROWS)
        sink.await_report(TaskReachedEndOfData)
        sink.take_checkpoint()
        assert sink.outcome().kind == "finished"
