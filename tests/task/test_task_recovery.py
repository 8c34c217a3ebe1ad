"""A task that starts with elements which were in flight at its checkpoint: they come first, and are stored again."""

from __future__ import annotations

import pytest
from batches import ONE_ROW_BYTES, batch
from frozen_tables import tables_of
from link import (
    ATTEMPT,
    SOURCE,
    UNALIGNED,
    WORK,
    FrozenSum,
    Subject,
    Summing,
    barrier,
    describe,
    kinds,
    only,
    sent,
    stored,
    work_graph,
    worker,
)

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import FrozenPositions, SplitPosition
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, EndOfData, Watermark
from tidegate.storage.errors import ProtocolError


def test_what_was_in_flight_is_processed_before_what_arrives() -> None:
    """In its order, and it is not counted in the positions of this attempt."""
    log: list[str] = []
    subject = worker(sources=1, log=log, in_flight={0: (batch(1), batch(2))})

    found = subject.feed(0, batch(3), barrier(1))

    assert log[1:] == ["process [1]", "process [2]", "process [3]", "prepare", "snapshot"]
    (persist,) = only(found, do.PersistSnapshot)
    assert [position for _, position in persist.input_positions] == [1]
    assert [s.states for s in persist.snapshots] == [(FrozenSum(6),)]


def test_input_that_arrives_before_the_task_is_restored_waits_behind_what_was_in_flight() -> None:
    """Whenever a frame comes: what was in flight is older."""
    log: list[str] = []
    subject = Subject(describe(work_graph(lambda: Summing(log)), WORK))
    subject.arrive(0, batch(3))
    assert not subject.machine.runnable

    subject.start(in_flight=[(subject.descriptor.inputs[0], (batch(1), batch(2)))])
    subject.turns()

    assert log == ["open", "process [1]", "process [2]", "process [3]"]


def test_a_task_with_input_in_flight_waits_until_every_task_is_ready() -> None:
    """What it emits needs somebody to take it."""
    subject = Subject(describe(work_graph(downstream=True), WORK))
    in_flight = ((subject.descriptor.inputs[0], (batch(1),)),)
    subject.tell(ev.TaskRestored(subject.at_ms, (), in_flight=in_flight))
    assert not subject.machine.runnable

    subject.tell(ev.TasksStarted(subject.at_ms))

    assert subject.machine.runnable


def test_what_was_in_flight_takes_no_credit() -> None:
    """Nobody has sent it in this attempt, so nobody gets credit for it."""
    limits = BufferLimits(credit_bytes=2 * ONE_ROW_BYTES)
    subject = worker(sources=1, limits=limits, in_flight={0: tuple(batch(n) for n in range(9))})

    assert only(subject.turns(), do.GrantCredit) == []
    (grant,) = only(subject.feed(0, batch(9)), do.GrantCredit)
    assert grant.total_bytes == 3 * ONE_ROW_BYTES


def test_a_checkpoint_during_recovery_stores_what_is_still_in_flight_again() -> None:
    """What waits since the restore comes first, then what has arrived in this attempt; their numbers are told."""
    subject = worker(sources=2, in_flight={0: (batch(1), batch(2), batch(3))})
    subject.turns(1)
    subject.arrive(0, batch(4))
    subject.arrive(1, barrier(1, UNALIGNED))

    found = subject.arrive(0, batch(5), barrier(1, UNALIGNED))

    assert stored(found)["input", 0] == [[2], [3], [4], [5]]
    (persist,) = only(found, do.PersistChannelState)
    assert [part.recovered for part in persist.channels if part.direction is do.Direction.INPUT] == [2]


def test_an_aligned_checkpoint_during_recovery_waits_for_it() -> None:
    """Its barrier stands behind what was in flight, so all of that is in the state."""
    subject = worker(sources=1, in_flight={0: (batch(1), batch(2))})
    assert only(subject.arrive(0, barrier(1)), do.PersistSnapshot) == []

    found = subject.turns()

    assert [s.states for s in only(found, do.PersistSnapshot)[0].snapshots] == [(FrozenSum(3),)]
    assert only(subject.persisted(1), do.Acknowledge)[0].state.in_flight is None


def test_a_finished_task_with_input_in_flight_is_refused() -> None:
    """Its operators had seen the end of their input, so such a checkpoint contradicts itself."""
    subject = Subject(describe(work_graph(downstream=True), WORK))
    with pytest.raises(ProtocolError, match=r"work\[0\] has finished and was restored with input of e0:0>0"):
        subject.start(finished=True, in_flight=[(subject.descriptor.inputs[0], (batch(1),))])


def test_a_source_that_was_restored_as_finished_ends_at_once() -> None:
    """It reads nothing, though splits are there, and says the end again: event time, then data."""
    subject = Subject(describe(work_graph(rows=range(5)), SOURCE))
    found = subject.start(finished=True) + subject.turns()

    assert kinds(found) == ["ReportReady", "SendFrame", "ReportEndOfData", "SendFrame"]
    assert sent(found) == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True)]
    assert subject.machine.status is TaskStatus.END_OF_DATA
    subject.trigger(1)
    assert only(subject.persisted(1), do.Acknowledge)[0].state.finished
    assert only(subject.completed(1), do.ReportFinished) == [do.ReportFinished(ATTEMPT)]


def test_a_source_that_was_drained_in_the_middle_of_a_split_reads_no_further() -> None:
    """Its operators had finished with the savepoint; rows that come now would find nobody."""
    subject = Subject(describe(work_graph(rows=range(5)), SOURCE))
    split = subject.descriptor.splits[0].split
    (positions,) = tables_of(FrozenPositions((SplitPosition(split, 2),)))
    found = subject.start(("source", positions), finished=True)

    assert only(found + subject.turns(), do.ReadSource) == []
    assert subject.machine.status is TaskStatus.END_OF_DATA


def test_finished_tasks_wait_for_the_end_of_their_inputs_too() -> None:
    """A task between two that had finished passes the end on only when it comes."""
    subject = Subject(describe(work_graph(downstream=True), WORK))
    assert kinds(subject.start(finished=True)) == ["ReportReady"]
    assert not subject.machine.runnable

    found = subject.feed(0, Watermark(MAX_WATERMARK_MS), EndOfData(drain=True))

    assert sent(found) == [Watermark(MAX_WATERMARK_MS), EndOfData(drain=True)]
    assert subject.tell(ev.TimerDue(subject.at_ms, ev.TaskTimer.PROCESSING_TIME)) == []
