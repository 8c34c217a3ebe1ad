"""Unaligned checkpoints of a task: what a barrier overtakes in its queues, and what is stored of that."""

from __future__ import annotations

import pytest
from batches import batch, values
from link import (
    ATTEMPT,
    BY_X,
    FORCED,
    SOURCE,
    TIGHT,
    UNALIGNED,
    Subject,
    Summing,
    barrier,
    cancel,
    describe,
    handle_of,
    kinds,
    node,
    only,
    sent,
    stored,
    sums,
    timed,
    worker,
)

from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.subtask_checkpoints import outgoing_options
from tidegate.protocol.edges import Partitioning, PartitioningKind
from tidegate.protocol.stream_elements import (
    ALIGNED_BARRIER,
    Alignment,
    BarrierOptions,
    EndOfData,
    EndOfPartition,
)
from tidegate.storage.checkpoints.metadata import SnapshotKind
from tidegate.storage.ids import VertexId

# --- inputs -------------------------------------------------------------------------------------------------------


def test_an_unaligned_barrier_makes_the_snapshot_as_it_arrives() -> None:
    """Before anything that waits is processed: the cut of the state is here, and the barrier goes on at once."""
    subject = worker(sources=2)
    subject.feed(0, batch(5))
    subject.arrive(0, batch(1))

    found = subject.arrive(1, batch(2), barrier(1, UNALIGNED), batch(3))

    assert sums(found) == [5]
    assert sent(found)[0] == barrier(1, UNALIGNED), "also before what only waits for the linger time"
    (persist,) = only(found, do.PersistSnapshot)
    assert [position for _, position in persist.input_positions] == [1, 0]


def test_what_waits_or_comes_before_a_channels_barrier_is_stored_and_processed() -> None:
    """Of each channel everything up to its own barrier belongs to the checkpoint; nothing is held back meanwhile."""
    log: list[str] = []
    subject = worker(sources=2, log=log)
    subject.arrive(0, batch(1))
    found = subject.arrive(1, batch(2), barrier(1, UNALIGNED), batch(3))
    assert only(found, do.PersistChannelState) == [], "the barrier of channel 0 is not here yet"

    found = subject.turns() + subject.feed(0, batch(4))
    assert only(found, do.PersistChannelState) == []
    assert sorted(log[3:]) == [f"process [{x}]" for x in (1, 2, 3, 4)]
    found = subject.arrive(0, batch(5), barrier(1, UNALIGNED), batch(6))

    assert stored(found) == {("input", 0): [[1], [4], [5]], ("input", 1): [[2]]}


def test_the_end_of_a_channel_bounds_what_was_in_flight_as_its_barrier_does() -> None:
    """A channel that ends has no barrier to send: all of it belongs to the checkpoint."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1))
    subject.arrive(1, barrier(1, UNALIGNED))

    found = subject.arrive(0, batch(2), EndOfData(drain=True))
    assert only(found, do.PersistChannelState) == []
    found = subject.arrive(0, EndOfPartition())

    assert stored(found) == {("input", 0): [[1], [2]]}


def test_a_channel_whose_barrier_was_taken_has_nothing_in_flight() -> None:
    """Aligned until a newer barrier of the same checkpoint comes unaligned: the blocked channel's rows come after."""
    subject = worker(sources=2)
    subject.feed(0, barrier(1, timed(100)), batch(1))
    found = subject.arrive(1, batch(2), barrier(1, UNALIGNED))

    assert stored(found) == {("input", 1): [[2]]}
    assert subject.machine.runnable, "nobody is blocked any more"


def test_a_batch_that_was_cut_for_a_turn_is_in_flight_with_its_rest() -> None:
    """Rows that were processed are in the state, the rest of their batch is in flight: together all, once."""
    subject = worker(sources=2, limits=BufferLimits(turn_rows_max=2))
    subject.arrive(0, batch(1, 2, 3))
    subject.turns(1)

    found = subject.arrive(0, barrier(1, UNALIGNED)) + subject.arrive(1, barrier(1, UNALIGNED))

    assert sums(found) == [3]
    assert stored(found) == {("input", 0): [[3]], ("output", 0): [[1, 2]]}


# --- outputs ------------------------------------------------------------------------------------------------------


def test_an_unaligned_barrier_overtakes_what_waits_for_credit() -> None:
    """What it overtakes in an output queue is stored, and still sent, behind the barrier."""
    subject = worker(sources=1, limits=TIGHT)
    subject.feed(0, batch(1), batch(2), batch(3))

    found = subject.arrive(0, barrier(1, UNALIGNED))

    assert sent(found) == [barrier(1, UNALIGNED)]
    assert stored(found) == {("output", 0): [[2], [3]]}
    (persist,) = only(found, do.PersistSnapshot)
    assert [position for _, position in persist.output_positions] == [3]
    assert [values(e) for e in sent(subject.grant())] == [[2], [3]]


def test_what_operators_emit_before_the_barrier_is_overtaken_too() -> None:
    """Under back-pressure, too: prepare, barrier, in-flight elements, in this order."""
    subject = worker(sources=1, limits=TIGHT, emit_before_barrier=True)
    subject.feed(0, batch(1), batch(2))

    found = subject.arrive(0, barrier(1, UNALIGNED))

    assert kinds(found) == ["SendFrame", "PersistSnapshot", "PersistChannelState"]
    assert stored(found) == {("output", 0): [[2], [3]]}


def test_a_checkpoint_that_overtakes_nothing_stores_nothing() -> None:
    """Empty queues: no file for them, and the acknowledgement says that nothing was in flight."""
    subject = worker(sources=1)
    found = subject.feed(0, barrier(1, UNALIGNED))
    assert only(found, do.PersistChannelState) == []

    (ack,) = only(subject.persisted(1), do.Acknowledge)

    assert ack.state.in_flight is None
    assert ack.metrics.unaligned


# --- both parts ---------------------------------------------------------------------------------------------------


def overtaken() -> Subject:
    """A task whose snapshot of checkpoint 1 has both parts under way."""
    subject = worker(sources=1)
    subject.arrive(0, batch(1), barrier(1, UNALIGNED))
    return subject


@pytest.mark.parametrize("channels_first", [True, False])
def test_both_parts_have_to_be_durable(channels_first: bool) -> None:
    """The acknowledgement names the state and what was in flight, when the later of the two is written."""
    subject = overtaken()
    steps = [lambda: subject.persisted(1), lambda: subject.channels_persisted(1)]
    first, second = reversed(steps) if channels_first else steps

    assert only(first(), do.Acknowledge) == []
    (ack,) = only(second(), do.Acknowledge)

    assert (ack.state.handle, ack.state.in_flight) == (handle_of("state"), handle_of("channels"))
    assert (ack.metrics.in_flight_bytes, ack.metrics.unaligned) == (10, True)
    assert subject.channels_persisted(1) == [], "told twice is told once"


@pytest.mark.parametrize("channels_first", [True, False])
@pytest.mark.parametrize("end", ["abort", "newer", "failure"])
def test_whatever_ends_a_checkpoint_leaves_neither_part_behind(end: str, channels_first: bool) -> None:
    """The part that is durable is discarded at once, the other one when it is; nothing is acknowledged."""
    subject = overtaken()
    if channels_first:
        subject.channels_persisted(1)
    else:
        subject.persisted(1)
    early = "channels" if channels_first else "state"
    match end:
        case "abort":
            found = subject.abort(1)
        case "newer":
            subject.feed(0, barrier(2))
            subject.persisted(2)
            found = subject.completed(2)
        case _:
            found = subject.failed(1, channels=not channels_first)

    assert only(found, do.DiscardState) == [do.DiscardState((early,))]
    assert len(only(found, do.Decline)) == (end == "failure")
    late = subject.persisted(1) if channels_first else subject.channels_persisted(1)
    other = "state" if channels_first else "channels"
    assert late == ([] if end == "failure" else [do.DiscardState((other,))])


@pytest.mark.parametrize("durable", [True, False])
def test_a_cancelled_checkpoint_is_not_recorded_any_further(durable: bool) -> None:
    """A cancel barrier instead of a barrier: decline, pass it on, discard the state, forget what was in flight."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1), barrier(1, UNALIGNED))
    found = subject.persisted(1) if durable else []

    found += subject.feed(1, batch(2), cancel(1))
    found += [] if durable else subject.persisted(1)

    assert sent(found)[-1] == cancel(1)
    assert [d.checkpoint_id for d in only(found, do.Decline)] == [1]
    assert only(found, do.DiscardState) == [do.DiscardState(("state",))]
    assert only(subject.feed(1, barrier(1, UNALIGNED)), do.PersistChannelState) == []


def test_a_failed_write_of_either_part_is_declined_once() -> None:
    """Both parts may fail; the coordinator needs to know of one."""
    subject = overtaken()

    found = subject.failed(1, "no space", channels=True) + subject.failed(1, "no space either")

    assert [(d.attempt, d.message) for d in only(found, do.Decline)] == [(ATTEMPT, "no space")]


# --- edges that cannot be overtaken -------------------------------------------------------------------------------


def broadcast_then_hash(vertex: str, limits: BufferLimits) -> Subject:
    """A task of: two of `source`, broadcast to `mid`, by key to `down`."""
    source = node("source", parallelism=2, rows=range(8))
    mid = node("mid", (source, Partitioning(PartitioningKind.BROADCAST)), factory=Summing)
    down = node("down", (mid, BY_X), factory=Summing)
    subject = Subject(describe(translate([source, mid, down]), VertexId(vertex), limits=limits))
    subject.start()
    return subject


def test_a_barrier_overtakes_nothing_on_a_broadcast_edge() -> None:
    """It waits in line there, forced aligned, and nothing is stored of that edge."""
    subject = broadcast_then_hash(SOURCE, TIGHT)
    subject.read_all()
    queued_bytes = subject.machine.outputs.queued_bytes
    assert queued_bytes > 0

    found = subject.trigger(1, UNALIGNED)

    assert sent(found) == []
    assert only(found, do.PersistChannelState) == []
    assert sent(subject.grant())[-1] == barrier(1, FORCED)


def test_behind_a_broadcast_edge_the_barrier_overtakes_again() -> None:
    """Forced aligned blocks channels; what the task then sends is unaligned on the edge that allows it."""
    subject = broadcast_then_hash("mid", TIGHT)
    subject.feed(0, batch(1), batch(2), barrier(1, FORCED), batch(3))
    assert not subject.machine.runnable, "blocked"

    found = subject.arrive(1, barrier(1, FORCED))
    assert only(found, do.PersistSnapshot) == [], "a forced aligned barrier does not overtake"
    found = subject.turns()

    assert sums(found) == [3]
    assert barrier(1, UNALIGNED) in sent(found)
    assert stored(found) == {("output", 0): [[2]]}


@pytest.mark.parametrize(
    ("options", "on_unaligned_edge", "on_other_edge"),
    [
        (ALIGNED_BARRIER, ALIGNED_BARRIER, ALIGNED_BARRIER),
        (UNALIGNED, UNALIGNED, FORCED),
        (FORCED, UNALIGNED, FORCED),
        (timed(9), timed(9), timed(9, Alignment.FORCED_ALIGNED)),
        (timed(9, Alignment.FORCED_ALIGNED), timed(9), timed(9, Alignment.FORCED_ALIGNED)),
        (timed(9, Alignment.UNALIGNED), timed(9, Alignment.UNALIGNED), timed(9, Alignment.FORCED_ALIGNED)),
        (
            BarrierOptions(Alignment.AT_LEAST_ONCE),
            BarrierOptions(Alignment.AT_LEAST_ONCE),
            BarrierOptions(Alignment.AT_LEAST_ONCE),
        ),
        (
            BarrierOptions(kind=SnapshotKind.SAVEPOINT),
            BarrierOptions(kind=SnapshotKind.SAVEPOINT),
            BarrierOptions(kind=SnapshotKind.SAVEPOINT),
        ),
    ],
)
def test_options_of_the_barrier_that_goes_on(
    options: BarrierOptions, on_unaligned_edge: BarrierOptions, on_other_edge: BarrierOptions
) -> None:
    """Only what wanted to overtake is forced, and what was forced wants to overtake again, at once or in time."""
    assert on_unaligned_edge == outgoing_options(options, unaligned=True)
    assert on_other_edge == outgoing_options(options, unaligned=False)


def test_a_task_declines_when_too_much_passes_before_a_late_barrier() -> None:
    """What is recorded while one barrier is late is limited (invariant 10), and the task goes on without it."""
    subject = worker(sources=2, limits=BufferLimits(in_flight_bytes_max=2 * batch(1).nbytes))
    subject.arrive(0, barrier(1, UNALIGNED))
    for value in (1, 2):
        assert only(subject.feed(1, batch(value)), do.Decline) == []

    (decline,) = only(subject.feed(1, batch(3)), do.Decline)

    assert "in flight" in decline.message
    assert only(subject.feed(1, barrier(1, UNALIGNED)), do.PersistChannelState) == []
    assert only(subject.persisted(1), do.Acknowledge) == []
