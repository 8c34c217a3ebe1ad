"""The same rows are late at any batch size, from whatever row on they are read again, and however splits take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_harness import context

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.operators.operator import Operator
from tidegate.actors.operators.watermarks.late_rows import LATE, LateRows
from tidegate.actors.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.actors.operators.windows.window_specs import EventTimeWindow, Session, Sliding, Tumbling
from tidegate.actors.protocol.errors import OperatorError
from tidegate.actors.protocol.side_outputs import SideOutput
from tidegate.actors.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.actors.sources.source import SourceSplit
from tidegate.actors.task.messages.events import SourceBatchRead
from tidegate.actors.task.pipeline.operator_chain import OperatorChain
from tidegate.actors.task.pipeline.source_cursor import SourceCursor
from tidegate.actors.task.pipeline.split_positions import SplitPosition, positions_from_tables
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import StateTable

BOUND = 5
WINDOWS = (Tumbling(10), Sliding(20, 10), Session(7))


@dataclass
class Reading:
    """A task that reads splits, and what has come of it."""

    splits: Sequence[Sequence[int]]
    window: EventTimeWindow
    allowed_ms: int = 0
    in_turn: bool = True
    kept: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def begin(self, positions: Sequence[SplitPosition] = ()) -> None:
        """Start, or start again from positions."""

        def judge() -> LateRows:
            return LateRows("t", self.window.last_end_ms, self.allowed_ms)

        def generator() -> WatermarkGenerator:
            made = WatermarkGenerator("t", BOUND)
            made.dues_behind = judge().dues
            return made

        made = (generator, judge)
        specs = [OperatorSpec(OperatorUid(f"op{number}"), f"op{number}", each) for number, each in enumerate(made)]

        def aside(side: SideOutput, batch: pa.RecordBatch) -> None:
            assert side == SideOutput(OperatorUid("op1"), LATE)
            self.late += batch.column("number").to_pylist()

        def out(batch: pa.RecordBatch) -> None:
            self.kept.extend(batch.column("number").to_pylist())

        self.chain = OperatorChain(specs, SubtaskIndex(0), 1, 16, out, output_aside=aside)
        fresh = [SplitPosition(SourceSplit(str(n), b"", len(rows))) for n, rows in enumerate(self.splits)]
        told = self.chain.splits if self.in_turn else None
        self.cursor = SourceCursor(positions or fresh, 10**6, in_turn=told, event_times=self.chain.splits)
        self.chain.open({})

    def read(self, rows: int) -> bool:
        """Read and process so many rows at most. Returns whether any were left."""
        ask = self.cursor.next_read(rows)
        if ask is None:
            return False
        number, stop = int(ask.split.split_id), ask.offset + ask.rows_max
        times = self.splits[number][ask.offset : stop]
        numbers = [1_000 * number + row for row in range(ask.offset, ask.offset + len(times))]
        batch = pa.record_batch({"t": pa.array(times, pa.int64()), "number": pa.array(numbers, pa.int64())})
        at_end = stop >= len(self.splits[number])
        self.cursor.batch_read(SourceBatchRead(0, ask.read, batch, ask.offset + len(times), at_end))
        rows_of_split, _ = self.cursor.take()
        if rows_of_split is None:
            self.chain.splits_moved()
        else:
            self.chain.process(rows_of_split)
        return True

    def restored(self) -> None:
        """Fail, and go on from a checkpoint, as it is stored."""
        frozen = self.cursor.freeze()
        tables = [StateTable(frozen.state, frozen.kind, chunk.rows) for chunk in frozen.chunks()]
        self.begin(positions_from_tables(tables))


def model(splits: Sequence[Sequence[int]], window: EventTimeWindow, allowed_ms: int, in_turn: bool) -> list[int]:
    """The rows that are late, one by one."""
    import numpy as np

    late, newest = [], MIN_WATERMARK_MS
    for number, times in enumerate(splits):
        newest = MIN_WATERMARK_MS if in_turn else newest
        for row, time in enumerate(times):
            due = int(window.last_end_ms(np.array([time]))[0]) - 1 + allowed_ms
            if newest > MIN_WATERMARK_MS and due <= newest - BOUND - 1:
                late.append(1_000 * number + row)
            newest = max(newest, time)
    return late


@given(
    st.lists(st.lists(st.integers(0, 120), max_size=30), min_size=1, max_size=3),
    st.sampled_from(WINDOWS),
    st.sampled_from([0, 12]),
    st.booleans(),
    st.integers(1, 31),
    st.integers(0, 2**32),
)
def test_the_same_rows_are_late(
    splits: list[list[int]], window: EventTimeWindow, allowed_ms: int, in_turn: bool, rows_max: int, seed: int
) -> None:
    """Those that a loop over the rows of each split finds; nothing is lost, and nothing is judged twice."""
    chance = Random(seed)
    task = Reading(splits, window, allowed_ms, in_turn)
    task.begin()
    while task.read(chance.randint(1, rows_max)):
        if chance.random() < 0.3:
            task.restored()
    assert sorted(task.late) == model(splits, window, allowed_ms, in_turn)
    assert sorted(task.late + task.kept) == [
        1_000 * number + row for number, times in enumerate(splits) for row in range(len(times))
    ]


def judged(operator: Operator, *times: int | None, after_ms: int | None = None) -> tuple[list[int], list[int], int]:
    """Rows that pass, those that are late, and the counter."""
    passed: list[int] = []
    late: list[int] = []
    place = replace(context(), emit_aside=lambda tag, batch: late.extend(batch.column("t").to_pylist()))
    operator.open(place, ())
    list(operator.advance_watermark(29, lambda batch: None))
    place.splits.rows_after_ms = after_ms
    batch = pa.record_batch({"t": pa.array(times, pa.int64())})
    operator.process(batch, lambda batch: passed.extend(batch.column("t").to_pylist()))
    (counter,) = place.metrics.read(place.uid)
    return passed, late, int(counter.value)


def test_the_split_counts_where_it_is_known() -> None:
    """Rows that come from another task are judged by the watermark that has come."""
    assert judged(LateRows("t", Tumbling(10).last_end_ms), 19, 20, 29, 30) == ([30], [19, 20, 29], 3)
    assert judged(LateRows("t", Tumbling(10).last_end_ms), 19, 20, 29, 30, after_ms=28) == ([20, 29, 30], [19], 1)
    assert judged(LateRows("t", Tumbling(10).last_end_ms, 1), 19, 20, 29, 30) == ([20, 29, 30], [19], 1)
    assert judged(LateRows("t", Tumbling(10).last_end_ms), 1, 2) == ([], [1, 2], 2)


def test_a_row_without_a_time_is_refused() -> None:
    """With the column, and what to do."""
    with pytest.raises(OperatorError, match=r"1 rows have no 't', .* nulls_to"):
        judged(LateRows("t", Tumbling(10).last_end_ms), 30, None)
