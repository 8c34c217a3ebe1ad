"""The input side of a task: contiguous sequences, cumulative credit, channels served in turn."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.task.input_gate import InputChannel, InputGate
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier, EndOfPartition, Watermark, element_size_bytes
from tidegate.state.kernels.partition import compact
from tidegate.storage.codec import decode, encode
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import CheckpointId, SubtaskIndex

A, B, C = (ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(3))
BIG = 1_000_000


def nothing_blocked(channel: ChannelId) -> bool:
    """Every channel may be served."""
    return False


def test_elements_are_taken_in_the_order_of_their_numbers() -> None:
    """Frames that follow one another give their elements in order."""
    channel = InputChannel(A, BIG)
    channel.accept(0, [batch(1), Watermark(5)])
    channel.accept(2, [batch(2)])

    assert (values(channel.take()), channel.take(), values(channel.take())) == ([1], Watermark(5), [2])
    assert (channel.arrived, channel.taken) == (3, 3)


@pytest.mark.parametrize(("first", "elements"), [(0, 2), (0, 3), (1, 1), (2, 1)])
def test_what_came_before_is_dropped(first: int, elements: int) -> None:
    """A frame that was delivered before, in whole or in part, adds only what is new."""
    stream = [batch(n) for n in range(6)]
    channel = InputChannel(A, BIG)
    channel.accept(0, stream[:2])

    channel.accept(first, stream[first : first + elements])
    channel.accept(channel.arrived, stream[channel.arrived :])

    assert [values(channel.take()) for _ in range(6)] == [[n] for n in range(6)]


def test_a_gap_raises_and_changes_nothing() -> None:
    """Invariant 1: a lost frame is noticed at once, and the channel goes on where it was."""
    channel = InputChannel(A, BIG)
    channel.accept(0, [batch(0)])

    with pytest.raises(ProtocolError, match="element 2 arrived where 1 was due: 1 elements were lost"):
        channel.accept(2, [batch(2)])

    assert (channel.arrived, len(channel.queue)) == (1, 1)
    channel.accept(1, [batch(1)])
    assert [values(channel.take()) for _ in range(2)] == [[0], [1]]


def test_credit_is_granted_cumulatively_once_half_the_window_is_free() -> None:
    """A grant says how much may have been sent in total: the window plus what was taken. It is given once."""
    channel = InputChannel(A, 4 * ONE_ROW_BYTES)
    channel.accept(0, [batch(n) for n in range(4)])

    channel.take()
    assert channel.credit_to_grant() is None
    channel.take()
    assert channel.credit_to_grant() == 6 * ONE_ROW_BYTES
    assert channel.credit_to_grant() is None
    channel.take()
    channel.take()
    assert channel.credit_to_grant() == 8 * ONE_ROW_BYTES


def test_control_elements_take_no_credit() -> None:
    """Taking any number of control elements frees nothing."""
    channel = InputChannel(A, 1)
    channel.accept(0, [Barrier(CheckpointId(1), 0), Watermark(1), EndOfPartition()])
    for _ in range(3):
        channel.take()

    assert channel.credit_to_grant() is None


@given(rows=st.integers(0, 40), start=st.integers(0, 9), nulls=st.booleans())
@settings(max_examples=60)
def test_both_ends_of_a_channel_count_the_same(rows: int, start: int, nulls: bool) -> None:
    """A batch counts the same at the sender and, after any transport, at the receiver: otherwise credit drains away."""
    odd = None if nulls else 1
    whole = pa.record_batch(
        {
            "i": pa.array([odd, *range(start + rows)], pa.int64()),
            "b": pa.array([True, *[False] * (start + rows)]),
            "s": pa.array(["", *["wörter"] * (start + rows)]),
            "l": pa.array([[1, 2], *[[3]] * (start + rows)]),
        }
    )
    for sent in (whole.slice(start), compact(whole.slice(start))):
        for received in (pickle.loads(pickle.dumps(sent, protocol=5)), decode(encode(sent))):
            assert element_size_bytes(received) == element_size_bytes(sent)


def test_channels_are_served_in_turn() -> None:
    """Every channel that has something is served before one is served again."""
    gate = InputGate([A, B, C], BIG)
    for channel in (A, C):
        gate[channel].accept(0, [batch(n) for n in range(3)])
    served = []
    while (channel := gate.next_channel(nothing_blocked)) is not None:
        served.append(channel.channel)
        channel.take()
        gate.served()

    assert served == [A, C, A, C, A, C]


def test_a_blocked_channel_is_not_offered_and_still_receives() -> None:
    """Receiving never blocks: elements queue on a blocked channel while others are served."""
    gate = InputGate([A, B], BIG)
    gate[A].accept(0, [batch(1)])
    gate[A].accept(1, [batch(2)])
    gate[B].accept(0, [batch(3)])

    offered = gate.next_channel(lambda channel: channel == A)

    assert offered is gate[B]
    assert gate.next_channel(lambda channel: True) is None
    assert [channel.arrived - channel.taken for channel in gate] == [2, 1]


def test_what_was_in_flight_comes_first_on_all_channels() -> None:
    """A split may be read by another subtask after a restore: its new rows do not overtake the old channel's."""
    gate = InputGate([A, B], BIG)
    gate[B].accept(0, [batch(3)])
    gate.recover(A, [batch(1), batch(2)])

    taken = []
    while (channel := gate.next_channel(nothing_blocked)) is not None:
        taken += values(channel.take())
        gate.served()

    assert taken == [1, 2, 3]


def test_positions_count_what_was_taken() -> None:
    """The cut of a snapshot lies before what is still queued."""
    gate = InputGate([A, B], BIG)
    gate[A].accept(0, [Watermark(1), batch(1, 2), batch(3)])
    gate[A].take()
    gate[A].take()

    assert gate.positions() == ((A, 2), (B, 0))
    assert gate.row_positions() == ((A, 2), (B, 0))


def test_a_channel_of_another_task_is_refused() -> None:
    """A frame that went astray is a ProtocolError that names the channel."""
    with pytest.raises(ProtocolError, match=r"e0:2>0 is not an input"):
        InputGate([A, B], BIG)[C]
