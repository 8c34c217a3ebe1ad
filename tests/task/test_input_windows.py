"""How much is in flight to a task: what it needs a certain time for, at the receiver and in the sender's queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pytest
from link import ATTEMPT, SOURCE, WORK, Subject, describe, only, work_graph

from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.output_gate import WINDOW_BYTES_AT_FIRST, BufferLimits
from tidegate.protocol.stream_elements import EndOfData, element_size_bytes

TARGET_MS = 200
MOST = 1024 * 1024
LIMITS = BufferLimits(
    credit_bytes=MOST, queue_bytes_max=MOST, frame_bytes_min=1, debloat_target_ms=TARGET_MS, window_bytes_min=1_000
)
BATCH = pa.record_batch({"x": pa.array(range(1_000), pa.int64())})
BATCH_BYTES = element_size_bytes(BATCH)


def worker(limits: BufferLimits = LIMITS, sources: int = 1) -> Subject:
    """A task with so many inputs and no outputs, that runs."""
    subject = Subject(describe(work_graph(sources=sources), WORK, limits=limits))
    subject.start()
    return subject


def turn(subject: Subject, batch_ms: int, waited_ms: int = 0) -> list[do.GrantCredit]:
    """One turn; the last one took so long for a whole batch, and was over for so long. What is granted."""
    last_turn_ms = subject.machine.chain.pace.rows * batch_ms // BATCH.num_rows
    return only(subject.tell(ev.TurnGranted(0, last_turn_ms, waited_ms)), do.GrantCredit)


def windows_of(subject: Subject, batches: int, batch_ms: int, waited_ms: int = 0, ahead: int = 0) -> list[int]:
    """The windows that a task grants while it takes batch after batch; `ahead` more are always waiting."""
    subject.arrive(0, *[BATCH] * ahead)
    granted: list[do.GrantCredit] = []
    channel = subject.machine.inputs[subject.descriptor.inputs[0]]
    for _ in range(batches):
        subject.arrive(0, BATCH)
        while len(channel.queue) > ahead:
            granted += turn(subject, batch_ms, waited_ms)
    return [grant.window_bytes for grant in granted]


def test_little_credit_hides_no_slow_receiver() -> None:
    """A window is also what waits at the sender: it is as a receiver wants it, and no more credit is granted."""
    little = replace(LIMITS, credit_bytes=2_000)
    subject = worker(little)
    slow = windows_of(subject, 40, batch_ms=100)
    assert slow[-1] == pytest.approx(BATCH_BYTES, rel=0.25)
    (channel,) = subject.machine.inputs
    assert channel.granted_bytes - channel.taken_bytes <= little.credit_bytes
    quick = windows_of(worker(little), 1_000, batch_ms=0)
    assert quick[-1] == MOST


def test_a_window_begins_small() -> None:
    """The receiver may be slow, and what was sent is not taken back; without a target it is all the credit."""
    assert worker().machine.inputs[worker().descriptor.inputs[0]].window_bytes == WINDOW_BYTES_AT_FIRST
    fixed = BufferLimits(credit_bytes=MOST)
    assert worker(fixed).machine.inputs[worker().descriptor.inputs[0]].window_bytes == MOST


def test_a_fast_receiver_grants_the_full_window() -> None:
    """Twice as much with each grant, up to all the credit there is."""
    windows = windows_of(worker(), 1_000, batch_ms=0)
    assert windows[0] <= 2 * WINDOW_BYTES_AT_FIRST
    assert windows == sorted(windows)
    assert windows[-1] == MOST


def test_a_slow_receiver_grants_what_it_does_in_half_of_its_time() -> None:
    """A batch takes 50 ms: two of them. It is told at once, before anything new is granted."""
    subject = worker()
    windows = windows_of(subject, 40, batch_ms=50)
    assert windows[0] < WINDOW_BYTES_AT_FIRST
    assert windows[-1] == pytest.approx(2 * BATCH_BYTES, rel=0.25)


def test_a_shrinking_window_takes_nothing_back() -> None:
    """What was granted stays granted: the new window comes with the old total, until what is in flight was taken."""
    subject = worker()
    windows_of(subject, 1_000, batch_ms=0)
    channel = subject.machine.inputs[subject.descriptor.inputs[0]]
    before_bytes = channel.granted_bytes
    subject.arrive(0, *[BATCH] * 50)
    told: list[do.GrantCredit] = []
    while not told:
        told = turn(subject, batch_ms=100)
    (grant,) = told
    assert grant.window_bytes < MOST
    assert grant.total_bytes == before_bytes == channel.granted_bytes


def test_a_task_without_a_target_grants_the_same_window_for_ever() -> None:
    """However slow it is."""
    limits = BufferLimits(credit_bytes=2 * BATCH_BYTES)
    assert set(windows_of(worker(limits), 20, batch_ms=10_000)) == {2 * BATCH_BYTES}


def test_waiting_counts_while_input_is_there() -> None:
    """A task that is held up by others, or by its own output, empties its queue as slowly as one that works slowly."""
    held_up = worker()
    windows_of(held_up, 40, batch_ms=0, waited_ms=50, ahead=1)
    assert held_up.machine.inputs[held_up.descriptor.inputs[0]].window_bytes == pytest.approx(2 * BATCH_BYTES, rel=0.25)


def test_waiting_for_input_counts_nothing() -> None:
    """A fast task with little to do has the full window."""
    assert windows_of(worker(), 1_000, batch_ms=0, waited_ms=5_000)[-1] == MOST


def test_parts_of_a_batch_are_measured_as_they_are_taken() -> None:
    """A batch that is cut into slow turns is no burst at its end."""
    subject = worker(BufferLimits(credit_bytes=MOST, debloat_target_ms=TARGET_MS, turn_rows_max=100))
    subject.arrive(0, BATCH)
    channel = subject.machine.inputs[subject.descriptor.inputs[0]]
    parts = []
    while subject.machine.runnable:
        turn(subject, batch_ms=1)
        parts.append(channel.last_bytes)
    assert sum(parts) == BATCH_BYTES
    assert max(parts) - min(parts) <= 1


def test_channels_that_have_ended_leave_their_time_to_the_others() -> None:
    """Two inputs have half of the time each; when one has ended the other one has all of it."""
    subject = worker(sources=2)
    windows_of(subject, 60, batch_ms=50)
    channel = subject.machine.inputs[subject.descriptor.inputs[0]]
    assert channel.window_bytes == pytest.approx(BATCH_BYTES, rel=0.25)
    subject.arrive(1, EndOfData(drain=True))
    windows_of(subject, 60, batch_ms=50)
    assert channel.window_bytes == pytest.approx(2 * BATCH_BYTES, rel=0.25)


# --- the sender -------------------------------------------------------------------------------------------------------


def sender(rows: int = 1_000_000, rows_max: int = 100_000) -> Subject:
    """A source with one receiver."""
    subject = Subject(describe(work_graph(rows=range(rows)), SOURCE, limits=LIMITS, rows_max=rows_max))
    subject.start()
    return subject


def window(subject: Subject, window_bytes: int, total_bytes: int) -> Sequence[do.TaskInstruction]:
    """A grant from the receiver."""
    channel = subject.descriptor.outputs[0].channels[0]
    return subject.tell(ev.CreditGranted(0, ATTEMPT, channel, total_bytes, window_bytes))


@pytest.mark.slow
@pytest.mark.parametrize("window_bytes", [10_000, 40_000])
def test_a_sender_queues_and_reads_no_more_than_a_small_window_wants(window_bytes: int) -> None:
    """Its queue is as large as the window, and its batches are half of that, up to the rows of those read before."""
    subject = sender()
    subject.read_all()
    window(subject, window_bytes, 10**8)
    for _ in range(20):
        subject.read_all()
        window(subject, window_bytes, 10**8)
    read_rows = subject.machine.outputs.turn_rows_max
    assert read_rows * 8 == pytest.approx(window_bytes / 2, rel=0.1)
    found = subject.read_all()
    sizes = [
        element_size_bytes(e) for f in only(found, do.SendFrame) for e in f.elements if isinstance(e, pa.RecordBatch)
    ]
    assert all(size <= 0.6 * window_bytes for size in sizes)


def test_a_sender_stops_where_its_queue_is_as_large_as_the_window() -> None:
    """Without credit it queues a window and one batch at most, and reads no further."""
    subject = sender()
    subject.read_all()
    for total_bytes in (200_000, 230_000, 260_000):
        window(subject, 10_000, total_bytes)
        subject.read_all()
    assert not subject.machine.runnable
    assert 10_000 <= subject.machine.outputs.queued_bytes <= 16_000


def test_a_sender_with_little_credit_queues_no_more_than_the_window_either() -> None:
    """The window says how quick its receiver is: a large queue in front of a slow one would hold barriers up."""
    limits = replace(LIMITS, credit_bytes=2_000)
    subject = Subject(describe(work_graph(rows=range(1_000_000)), SOURCE, limits=limits, rows_max=100_000))
    subject.start()
    subject.read_all()
    for total_bytes in (200_000, 230_000, 260_000):
        window(subject, 10_000, total_bytes)
        subject.read_all()
    assert not subject.machine.runnable
    assert 10_000 <= subject.machine.outputs.queued_bytes <= 16_000


def test_a_stale_window_changes_nothing() -> None:
    """Grants may come out of order: that with the larger total is the newer one."""
    subject = sender()
    channel = subject.machine.outputs[subject.descriptor.outputs[0].channels[0]]
    window(subject, 10_000, 300_000)
    window(subject, MOST, 200_000)
    assert channel.narrow_bytes == 10_000
    window(subject, MOST, 300_000)
    assert channel.narrow_bytes is None
