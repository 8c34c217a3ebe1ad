"""Several checkpoints at a time at one task, and checkpoints that block nobody."""

from __future__ import annotations

import pytest
from batches import batch, values
from link import UNALIGNED, FrozenSum, barrier, cancel, file_of, handle_of, only, sent, stored, worker

from tidegate.actors.task import instructions as do
from tidegate.protocol.failures import CheckpointFailureReason
from tidegate.protocol.stream_elements import Alignment, BarrierOptions, EndOfData, EndOfPartition

AT_LEAST_ONCE = BarrierOptions(Alignment.AT_LEAST_ONCE)


def totals(found: list[do.TaskInstruction]) -> list[tuple[int, int]]:
    """Checkpoint and sum of every snapshot among these."""
    return [
        (persist.checkpoint_id, state.total)
        for persist in only(found, do.PersistSnapshot)
        for snapshot in persist.snapshots
        for state in snapshot.states
        if isinstance(state, FrozenSum)
    ]


# --- concurrent checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_snapshots_may_become_durable_in_any_order(order: tuple[int, ...]) -> None:
    """Each is acknowledged with its own state as soon as that is written."""
    subject = worker(sources=1)
    found = subject.feed(0, batch(1), barrier(1), batch(2), barrier(2), batch(4), barrier(3))
    assert totals(found) == [(1, 1), (2, 3), (3, 7)]

    acks = [a for n in order for a in only(subject.persisted(n, f"state {n}"), do.Acknowledge)]

    assert [(a.checkpoint_id, a.state.handle) for a in acks] == [(n, handle_of(f"state {n}")) for n in order]
    assert [subject.completed(n) for n in (1, 2, 3)] == [[], [], []]


def test_two_unaligned_checkpoints_record_each_its_own_part() -> None:
    """What waits before the second barrier of a channel belongs to both, what comes between them to the second only."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1), barrier(1, UNALIGNED))
    first = subject.arrive(1, batch(2), barrier(1, UNALIGNED))
    assert stored(first) == {("input", 0): [[1]], ("input", 1): [[2]]}
    subject.arrive(0, batch(3), barrier(2, UNALIGNED))

    second = subject.arrive(1, batch(4), barrier(2, UNALIGNED))

    assert stored(second) == {("input", 0): [[1], [3]], ("input", 1): [[2], [4]]}
    subject.channels_persisted(2, "second")
    subject.channels_persisted(1, "first")
    acks = [a for n in (2, 1) for a in only(subject.persisted(n), do.Acknowledge)]
    assert [a.state.in_flight for a in acks] == [handle_of("second"), handle_of("first")]


def test_a_newer_unaligned_checkpoint_supersedes_the_one_that_is_collected() -> None:
    """The older one is given up here with its reason, downstream is told, and its state is not left behind."""
    subject = worker(sources=2)
    subject.arrive(0, batch(1), barrier(1, UNALIGNED))
    subject.persisted(1, "old")

    found = subject.arrive(0, barrier(2, UNALIGNED))

    assert [(d.checkpoint_id, d.reason) for d in only(found, do.Decline)] == [(1, CheckpointFailureReason.SUBSUMED)]
    assert only(found, do.DiscardState) == [do.DiscardState(("old",))]
    assert cancel(1) in sent(found)
    assert stored(subject.arrive(1, batch(2), barrier(1, UNALIGNED), batch(3), barrier(2, UNALIGNED))) == {
        ("input", 0): [[1]],
        ("input", 1): [[2], [3]],
    }


def test_a_checkpoint_that_lacks_nothing_more_is_not_given_up_for_a_newer_one() -> None:
    """Its last channel has ended, though that is not processed yet: all that was in flight is known and stored."""
    subject = worker(sources=2)
    subject.arrive(0, barrier(1, UNALIGNED))
    found = subject.arrive(1, batch(1), EndOfData(drain=True), EndOfPartition())
    assert stored(found) == {("input", 1): [[1]]}
    subject.persisted(1)

    found = subject.arrive(0, barrier(2, UNALIGNED))

    assert only(found, do.Decline) == []
    assert cancel(1) not in sent(found)
    assert [a.checkpoint_id for a in only(subject.channels_persisted(1), do.Acknowledge)] == [1]


def test_an_older_checkpoint_that_completes_late_commits_its_files_once() -> None:
    """Files of checkpoint 1 are asked for by 2 as well, and by nobody after 2 is complete, in whichever order."""
    subject = worker(sources=1, sink=True)
    subject.feed(0, batch(1), barrier(1), batch(2), barrier(2))
    for index in (0, 1):
        subject.staged(index)
    subject.persisted(1)
    subject.persisted(2)
    subject.completed(2)
    assert subject.completed(1) == []

    subject.feed(0, batch(3), barrier(3))
    subject.staged(2)

    (ack,) = only(subject.persisted(3), do.Acknowledge)
    assert [(c.first_index, c.files) for c in ack.state.committables] == [(2, (file_of(2),))]


# --- at least once ------------------------------------------------------------------------------------------------


def test_at_least_once_blocks_nobody() -> None:
    """Rows behind a barrier are processed before the last barrier is here, and so are in the state."""
    subject = worker(sources=2, exactly_once=False)
    found = subject.feed(0, batch(1), barrier(1, AT_LEAST_ONCE), batch(2))
    assert only(found, do.PersistSnapshot) == []

    found += subject.feed(1, batch(4), barrier(1, AT_LEAST_ONCE))

    assert totals(found) == [(1, 7)]
    assert [values(e) for e in sent(found)[:-1]] == [[1], [2], [4]]
    assert sent(found)[-1] == barrier(1, AT_LEAST_ONCE)
    assert only(subject.persisted(1), do.Acknowledge)[0].state.in_flight is None


def test_at_least_once_counts_several_checkpoints_at_a_time() -> None:
    """Barriers of one channel may be ahead of those of another; each checkpoint is taken at its last one."""
    subject = worker(sources=2, exactly_once=False)
    found = subject.feed(0, barrier(1, AT_LEAST_ONCE), batch(1), barrier(2, AT_LEAST_ONCE), batch(2))
    found += subject.feed(1, barrier(1, AT_LEAST_ONCE), batch(4), barrier(2, AT_LEAST_ONCE))

    assert totals(found) == [(1, 3), (2, 7)]
