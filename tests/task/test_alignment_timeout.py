"""Checkpoints that are aligned at first: when an alignment takes too long, its barrier overtakes after all."""

from __future__ import annotations

import pytest
from batches import batch, values
from link import (
    TIGHT,
    Subject,
    barrier,
    handle_of,
    only,
    sent,
    stored,
    sums,
    timed,
    worker,
)

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.protocol.stream_elements import (
    Alignment,
)

ALIGNMENT = ev.TaskTimer.ALIGNMENT
HOUR_MS = 3_600_000


def test_an_alignment_that_takes_too_long_becomes_unaligned() -> None:
    """When the time is over the snapshot is taken as if the barrier had been unaligned from now on."""
    subject = worker(sources=2)
    found = subject.feed(0, barrier(1, timed(100)), batch(1))
    assert only(found, do.SetTaskTimer) == [do.SetTaskTimer(ALIGNMENT, 1_100)]
    subject.arrive(1, batch(2))
    assert subject.timer(ALIGNMENT, 1_099) == [], "not yet"

    found = subject.timer(ALIGNMENT, 1_100)
    assert sums(found) == [0]
    assert sent(found) == [barrier(1, timed(100, Alignment.UNALIGNED))]
    found = subject.arrive(1, batch(3), barrier(1, timed(100)))

    assert stored(found) == {("input", 1): [[2], [3]]}
    subject.persisted(1)
    (ack,) = only(subject.channels_persisted(1), do.Acknowledge)
    assert (ack.metrics.alignment_ms, ack.metrics.start_delay_ms, ack.metrics.unaligned) == (100, 0, True)


def test_an_alignment_is_over_in_time_though_the_clock_is_set_back_meanwhile() -> None:
    """The timer was set for a moment by the clock of then; that has come, whatever the clock says now."""
    subject = worker(sources=2)
    found = subject.feed(0, barrier(1, timed(100)), batch(1))
    (timer,) = only(found, do.SetTaskTimer)

    found = subject.tell(ev.TimerDue(timer.due_at_ms - HOUR_MS, ALIGNMENT, timer.due_at_ms))

    assert sums(found) == [0]
    assert sent(found) == [barrier(1, timed(100, Alignment.UNALIGNED))]


@pytest.mark.parametrize("where", ["input", "output"])
def test_an_alignment_takes_no_longer_where_the_clock_was_set_back_before_it(where: str) -> None:
    """Also by that of another machine, which triggered it: no alignment waits for longer than its whole timeout."""
    subject = worker(sources=2 if where == "input" else 1, limits=TIGHT)
    subject.feed(0, batch(1), batch(2))
    subject.at_ms -= HOUR_MS

    found = subject.feed(0, barrier(1, timed(100)))
    due_at_ms = subject.at_ms + 100
    assert only(found, do.SetTaskTimer)[-1] == do.SetTaskTimer(ALIGNMENT, due_at_ms)
    found = subject.tell(ev.TimerDue(due_at_ms, ALIGNMENT, due_at_ms))

    assert sent(found) == [barrier(1, timed(100, Alignment.UNALIGNED))]


def test_an_alignment_that_is_over_in_time_stores_nothing() -> None:
    """The timer that is due afterwards finds nothing to do."""
    subject = worker(sources=2)
    subject.feed(0, barrier(1, timed(100)))
    subject.feed(1, batch(1), barrier(1, timed(100)))

    (ack,) = only(subject.persisted(1), do.Acknowledge)
    assert (ack.state.in_flight, ack.metrics.unaligned) == (None, False)
    assert subject.timer(ALIGNMENT, 1_100) == []


def stuck() -> Subject:
    """An aligned barrier with 100 ms that waits behind two batches in an output queue."""
    subject = worker(sources=1, limits=TIGHT)
    found = subject.feed(0, batch(1), batch(2), batch(3), barrier(1, timed(100)), batch(4))
    assert only(found, do.SetTaskTimer)[-1] == do.SetTaskTimer(ALIGNMENT, 1_100)
    assert [values(e) for e in sent(found)] == [[1]]
    assert only(subject.persisted(1), do.Acknowledge) == []
    return subject


def test_a_barrier_that_is_stuck_in_an_output_queue_overtakes_when_its_time_is_over() -> None:
    """Exactly what was queued before it is stored, and the checkpoint waits for that."""
    subject = stuck()

    found = subject.timer(ALIGNMENT, 1_100)

    assert sent(found) == [barrier(1, timed(100, Alignment.UNALIGNED))]
    assert stored(found) == {("output", 0): [[2], [3]]}
    (ack,) = only(subject.channels_persisted(1), do.Acknowledge)
    assert (ack.state.handle, ack.state.in_flight) == (handle_of("state"), handle_of("channels"))
    assert [values(e) for e in sent(subject.grant())] == [[2], [3], [4]], "sent in order, and only once"


def test_a_barrier_that_leaves_in_time_stores_nothing() -> None:
    """The checkpoint was aligned after all; it is acknowledged as the barrier leaves."""
    subject = stuck()

    found = subject.grant()

    assert sent(found)[2] == barrier(1, timed(100))
    assert [a.state.in_flight for a in only(found, do.Acknowledge)] == [None]
    assert subject.timer(ALIGNMENT, 1_100) == []


def test_a_barrier_whose_checkpoint_was_aborted_overtakes_nothing() -> None:
    """The state is discarded, and the time that is over means nothing any more."""
    subject = stuck()

    assert only(subject.abort(1), do.DiscardState) == [do.DiscardState(("state",))]
    assert subject.timer(ALIGNMENT, 1_100) == []
    assert only(subject.grant(), do.PersistChannelState) == []
