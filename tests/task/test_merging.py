"""Small batches that wait on a channel are handed over as one: what that keeps, and where it ends."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa
import pytest
from batches import ONE_ROW_BYTES, batch, values
from hypothesis import given, settings
from hypothesis import strategies as st
from link import Subject, Summing, describe, work_graph

from tidegate.actors.task.channels import MERGED_BYTES_MAX
from tidegate.actors.task.input_gate import InputChannel
from tidegate.actors.task.instructions import GrantCredit
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.turn_pacer import BATCHES_A_WINDOW
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import (
    Barrier,
    Element,
    EndOfPartition,
    Watermark,
    WatermarkStatus,
    element_size_bytes,
)
from tidegate.storage.ids import CheckpointId, SubtaskIndex, VertexId

CHANNEL = ChannelId(0, SubtaskIndex(0), SubtaskIndex(0))
BIG = 1_000_000
CONTROLS = (Watermark(1), WatermarkStatus(True), Barrier(CheckpointId(1), 0))


def wide(*numbers: int) -> pa.RecordBatch:
    """Batches of another schema."""
    return pa.record_batch({"x": pa.array(numbers, pa.int64()), "y": pa.array(["y" * 20] * len(numbers))})


def flat(elements: list[Element]) -> list[object]:
    """Every row and every other element, in order, whatever batches the rows are in."""
    found: list[object] = []
    for element in elements:
        found += element.to_pylist() if isinstance(element, pa.RecordBatch) else [element]
    return found


@st.composite
def streams(draw: st.DrawFn) -> list[Element]:
    """Batches of two schemas with other elements between some of them; every row has a number of its own."""
    elements: list[Element] = []
    for number, what in enumerate(draw(st.lists(st.sampled_from("bbbbbwc"), min_size=1, max_size=25))):
        if what == "c":
            elements.append(draw(st.sampled_from(CONTROLS)))
            continue
        numbers = range(10 * number, 10 * number + draw(st.integers(1, 6)))
        elements.append((batch if what == "b" else wide)(*numbers))
    return elements


@given(data=st.data(), elements=streams(), rows_max=st.integers(1, 20), merged_rows=st.integers(1, 20))
@settings(max_examples=300)
def test_merged_and_unmerged_channels_give_the_same(
    data: st.DataObject, elements: list[Element], rows_max: int, merged_rows: int
) -> None:
    """All rows and elements in the same order; credit, numbers and rows count alike at each other element and the end.

    Nothing is held back: whatever waits can be taken, and a merged channel never takes more turns. No batch that was
    put together is longer than it may be.
    """
    merging, plain = InputChannel(CHANNEL, BIG, merged_rows), InputChannel(CHANNEL, BIG)
    found: list[Element] = []
    cuts: dict[InputChannel, list[tuple[int, int, int]]] = {merging: [], plain: []}
    expected: list[Element] = []
    turns = {merging: 0, plain: 0}
    originals = {id(element) for element in elements}
    start = size = 0
    while start < len(elements):
        size = data.draw(st.integers(1, len(elements) - start))
        for channel, into in ((merging, found), (plain, expected)):
            channel.accept(start, elements[start : start + size])
            while channel.waiting:
                into.append(channel.take(rows_max))
                turns[channel] += 1
                if not isinstance(into[-1], pa.RecordBatch) or not channel.waiting:
                    cuts[channel].append((channel.taken, channel.taken_bytes, channel.rows_taken))
        start += size

    assert flat(found) == flat(expected) == flat(elements)
    assert cuts[merging] == cuts[plain]
    assert turns[merging] <= turns[plain]
    assert merging.taken_bytes == sum(map(element_size_bytes, elements))
    for element in found:
        if isinstance(element, pa.RecordBatch) and id(element) not in originals:
            assert element.num_rows <= rows_max
    # Two batches stay apart only for a reason: another element, another schema, a limit, a cut, or a later frame.
    if size == len(elements) and rows_max >= 6:
        for one, other in pairwise(found):
            if isinstance(one, pa.RecordBatch) and isinstance(other, pa.RecordBatch):
                first = next(e for e in elements if isinstance(e, pa.RecordBatch) and flat([e])[0] == flat([other])[0])
                limit = min(rows_max, merged_rows)
                assert one.schema != other.schema or one.num_rows + first.num_rows > limit


def test_sizes_that_debloating_measures_are_those_of_all_parts() -> None:
    """Debloating counts bytes a second: what was put together counts in full, and what follows by itself."""
    channel = InputChannel(CHANNEL, BIG, 3)
    channel.accept(0, [batch(1), batch(2), batch(3), batch(4)])

    assert values(channel.take()) == [1, 2, 3]
    assert channel.last_bytes == 3 * ONE_ROW_BYTES
    assert values(channel.take()) == [4]
    assert channel.last_bytes == ONE_ROW_BYTES


@pytest.mark.parametrize("window_rows", [4, 8])
def test_half_of_the_window_is_put_together_at_most(window_rows: int) -> None:
    """While one batch is processed the sender must be able to send the next one."""
    channel = InputChannel(CHANNEL, window_rows * ONE_ROW_BYTES, BIG)
    channel.accept(0, [batch(n) for n in range(window_rows)])

    assert len(values(channel.take())) == window_rows // BATCHES_A_WINDOW


def test_large_batches_are_not_copied() -> None:
    """A batch that is beyond the bytes is handed over as it is, whatever is behind it."""
    large = pa.record_batch({"x": pa.array(range(MERGED_BYTES_MAX // 8), pa.int64())})
    channel = InputChannel(CHANNEL, 100 * MERGED_BYTES_MAX, BIG)
    channel.accept(0, [large, batch(1), batch(2)])

    assert channel.take() is large
    assert values(channel.take()) == [1, 2]


def test_what_cannot_be_put_together_comes_as_it_is() -> None:
    """Dictionaries would have to be read whole; nested ones of a small index may not fit into one."""
    plain = pa.array(["a", "b"]).dictionary_encode()
    names = [pa.array([f"{prefix}{n}" for n in range(100)]).dictionary_encode() for prefix in "ab"]
    small = [name.cast(pa.dictionary(pa.int8(), pa.string())) for name in names]
    nested = [pa.record_batch({"x": pa.StructArray.from_arrays([each], ["y"])}) for each in small]
    for batches in ([pa.record_batch({"x": plain})] * 2, nested):
        channel = InputChannel(CHANNEL, BIG, BIG)
        channel.accept(0, [*batches, EndOfPartition()])
        assert [channel.take() for _ in range(3)] == [*batches, EndOfPartition()]
        assert channel.taken == 3


@pytest.mark.parametrize(("limits", "calls"), [(BufferLimits(), 1), (BufferLimits(merged_rows_max=1), 3)])
def test_the_operators_of_a_task_get_one_batch(limits: BufferLimits, calls: int) -> None:
    """A task does as its limits say, and grants the same credit in the end."""
    log: list[str] = []
    subject = Subject(describe(work_graph(lambda: Summing(log)), VertexId("work"), limits=limits))
    subject.start()
    found = subject.feed(0, batch(1, 2), batch(3), batch(4), Watermark(7), batch(5))

    processed = [line for line in log if line.startswith("process")]
    assert len(processed) == calls + 1
    assert processed[-1] == "process [5]"
    assert [each for each in found if isinstance(each, GrantCredit)] == []
    assert subject.machine.inputs[subject.descriptor.inputs[0]].taken == 5
