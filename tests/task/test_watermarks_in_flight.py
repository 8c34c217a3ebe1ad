"""A row in flight meets after a restore the watermark that it would have met: watermarks are in flight as well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
from batches import ONE_ROW_BYTES, batch
from hypothesis import given, settings
from hypothesis import strategies as st
from link import (
    AS_SENT,
    BY_X,
    TIGHT,
    UNALIGNED,
    WORK,
    Subject,
    Summing,
    barrier,
    describe,
    node,
    only,
    sent,
    stored,
    timed,
    worker,
)

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.channels import InFlightElement, has_rows
from tidegate.actors.task.output_gate import OutputChannel
from tidegate.operators.operator import Emit, Operator
from tidegate.protocol.stream_elements import (
    MAX_WATERMARK_MS,
    MIN_WATERMARK_MS,
    Element,
    EndOfData,
    Watermark,
    WatermarkStatus,
)

Judged = list[tuple[int, int]]
"""Rows, each with the watermark that it has met."""


class Judging(Operator):
    """Tells of each row which watermark is there when it comes, as functions see it."""

    def __init__(self, told: Judged) -> None:
        self._told, self._reached_ms = told, MIN_WATERMARK_MS

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        self._told += [(x, self._reached_ms) for x in batch.column("x").to_pylist()]

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        self._reached_ms = watermark_ms
        return iter(())


# --- what is stored -------------------------------------------------------------------------------------------------


def test_watermarks_that_wait_at_the_receiver_keep_their_places() -> None:
    """The first row comes behind what the channel had reached; with no row between them the last one counts."""
    subject = worker(sources=1)
    subject.feed(0, batch(1), Watermark(5))

    found = subject.arrive(0, batch(2), Watermark(6), Watermark(7), batch(3), Watermark(8), barrier(1, UNALIGNED))

    assert stored(found)["input", 0] == [Watermark(5), [2], Watermark(7), [3], Watermark(8)]


def test_watermarks_that_arrive_before_a_late_barrier_keep_their_places() -> None:
    """As the rows that come after the snapshot, up to the barrier of their channel."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1), Watermark(3))
    subject.arrive(1, barrier(1, UNALIGNED))
    subject.feed(0, Watermark(4), batch(2), Watermark(5))

    found = subject.arrive(0, batch(3), barrier(1, UNALIGNED), Watermark(9))

    assert stored(found)["input", 0] == [[1], Watermark(4), [2], Watermark(5), [3]]


def test_watermarks_that_a_barrier_overtakes_at_the_sender_keep_their_places() -> None:
    """The first row there comes behind what has left."""
    subject = worker(sources=1, limits=TIGHT)
    subject.feed(0, batch(1), Watermark(5), batch(2), Watermark(6), batch(3))

    found = subject.arrive(0, barrier(1, UNALIGNED))

    assert stored(found) == {("output", 0): [Watermark(5), [2], Watermark(6), [3]]}
    assert sent(subject.grant())[1:2] == [Watermark(6)], "they still go on"


def test_a_barrier_that_overtakes_late_stores_watermarks_too() -> None:
    """One that was aligned until its time was over: what stands before it."""
    subject = worker(sources=1, limits=TIGHT)
    subject.feed(0, batch(1), batch(2), Watermark(6), batch(3), barrier(1, timed(100)), Watermark(7), batch(4))

    found = subject.timer(ev.TaskTimer.ALIGNMENT, 1_100)

    assert stored(found) == {("output", 0): [[2], Watermark(6), [3]]}


def test_a_watermark_that_goes_back_takes_nothing_back() -> None:
    """A sender that was restored further back may say less than what was in flight: that is not stored instead."""
    subject = worker(sources=1, in_flight={0: (Watermark(9), batch(1))})
    subject.turns()

    found = subject.arrive(0, Watermark(4), batch(2), barrier(1, UNALIGNED))

    assert stored(found)["input", 0] == [Watermark(9), [2]]


def test_watermarks_alone_are_not_stored() -> None:
    """They judge nothing, and come again: no file for them."""
    subject = worker(sources=1, limits=TIGHT)
    subject.feed(0, Watermark(5))

    found = subject.arrive(0, Watermark(6), barrier(1, UNALIGNED))

    assert only(found, do.PersistChannelState) == []


def test_the_end_of_event_time_and_idleness_are_not_stored() -> None:
    """Both are said again. A channel that began as idle would be told of no end of it: its sender begins as active."""
    subject = worker(sources=1)
    idle, active, last = WatermarkStatus(True), WatermarkStatus(False), Watermark(MAX_WATERMARK_MS)

    found = subject.arrive(0, batch(1), idle, active, batch(2), last, EndOfData(True), barrier(1, UNALIGNED))

    assert stored(found)["input", 0] == [[1], [2]]


def test_what_a_restored_channel_has_not_taken_is_stored_with_its_watermarks_again() -> None:
    """Of a checkpoint during recovery; what has come since is told apart."""
    subject = worker(sources=1, in_flight={0: (Watermark(5), batch(1), Watermark(6), batch(2), batch(3))})
    subject.turns(4)
    subject.arrive(0, Watermark(7), batch(4))

    found = subject.arrive(0, barrier(1, UNALIGNED))

    assert stored(found)["input", 0] == [Watermark(6), [3], Watermark(7), [4]]
    (persist,) = only(found, do.PersistChannelState)
    assert [part.recovered for part in persist.channels if part.direction is do.Direction.INPUT] == [2]


# --- what comes of it -----------------------------------------------------------------------------------------------


def receiver(told: Judged, in_flight: tuple[InFlightElement, ...]) -> Subject:
    """A started task with one input channel, on which this is restored."""
    source = node("source")
    work = node("work", (source, BY_X), factory=lambda: Judging(told))
    graph = translate([source, work, node("down", (work, BY_X), factory=Summing)])
    subject = Subject(describe(graph, WORK, limits=AS_SENT))
    subject.start(in_flight=[(subject.descriptor.inputs[0], in_flight)] if in_flight else ())
    return subject


@st.composite
def channels(draw: st.DrawFn) -> list[Element]:
    """What one sender sends, in its order."""
    found: list[Element] = []
    rows, watermark_ms = 0, 0
    for step in draw(st.lists(st.integers(-4, 3), max_size=20)):
        if step > 0:
            found.append(batch(*range(rows, rows + step)))
            rows += step
        else:
            watermark_ms -= step
            found.append(Watermark(watermark_ms))
    return found


def judged(elements: list[Element]) -> Judged:
    """Each row, with the watermark before it."""
    reached_ms, found = MIN_WATERMARK_MS, Judged()
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            found += [(x, reached_ms) for x in element.column("x").to_pylist()]
        elif isinstance(element, Watermark):
            reached_ms = element.timestamp_ms
    return found


@given(elements=channels(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_each_row_meets_the_watermark_that_it_would_have_met(elements: list[Element], data: st.DataObject) -> None:
    """Wherever barriers overtake, at the sender and the receiver, and in a life that has not taken all of the last."""
    told, in_flight, place = Judged(), tuple[InFlightElement, ...](), 0
    for checkpoint in range(1, data.draw(st.integers(1, 4), label="checkpoints") + 1):
        cut = data.draw(st.integers(place, len(elements)), label="cut")
        life = Judged()
        subject = receiver(life, in_flight)
        credit_bytes = data.draw(st.integers(1, 6 * ONE_ROW_BYTES), label="credit")
        output = OutputChannel(subject.descriptor.inputs[0], replace(AS_SENT, credit_bytes=credit_bytes))
        for element in begun_anew(elements, place, cut):
            output.put(element)
        while (frame := output.take_frame(flush=True)) is not None:
            subject.arrive(0, *frame[1])
        subject.turns(data.draw(st.integers(0, 12), label="turns"))
        told += life
        overtaken = output.overtake(barrier(checkpoint, UNALIGNED))
        found = subject.arrive(0, barrier(checkpoint, UNALIGNED))
        parts = [part for persist in only(found, do.PersistChannelState) for part in persist.channels]
        received = [e for part in parts if part.direction is do.Direction.INPUT for e in part.elements]
        in_flight, place = (*received, *(overtaken if has_rows(overtaken) else ())), cut
    life = Judged()
    receiver(life, in_flight).feed(0, *begun_anew(elements, place, len(elements)))
    assert told + life == judged(elements)


def begun_anew(elements: list[Element], place: int, end: int) -> list[Element]:
    """A part of what a sender sends. As a source after a restore, it begins with the watermark that it had reached."""
    before = [element for element in elements[:place] if isinstance(element, Watermark)]
    return [*before[-1:], *elements[place:end]]
