"""A source task does not read splits that are too far ahead of their group, and tells how far it is itself."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from tidegate.actors.task.events import SourceBatchRead, TaskTimer, WatermarkAnnounced
from tidegate.actors.task.instructions import ReadSource, ReportWatermark, SetTaskTimer
from tidegate.actors.task.source_cursor import SourceCursor, SplitAlignment
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import SourceSplit
from tidegate.operators.operator import OperatorContext
from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber, OperatorUid, SubtaskIndex

ATTEMPT = AttemptNumber(2)
DRIFT_MS, INTERVAL_MS, IDLENESS_MS = 100, 50, 1_000
A, B = (SourceSplit(name, b"", 1_000) for name in "ab")


class Source:
    """A source task with two splits, as far as event time goes. What is read is processed at once."""

    def __init__(self, in_turn: bool = True, **restored: int) -> None:
        splits = SourceSplits()
        options = WatermarkAlignment("group", DRIFT_MS, INTERVAL_MS)
        generator = WatermarkGenerator("t", idleness_ms=IDLENESS_MS if in_turn else None, alignment=options)
        self.alignment = SplitAlignment(ATTEMPT, options, generator, splits)
        times = {name: ((OperatorUid("times"), time),) for name, time in restored.items()}
        self.cursor = SourceCursor(
            [SplitPosition(split, event_times=times.get(split.split_id, ())) for split in (A, B)],
            rows_max=10,
            in_turn=splits if in_turn else None,
            idleness_ms=IDLENESS_MS,
            event_times=splits,
            alignment=self.alignment,
        )
        self.generator, self.splits, self.at_ms = generator, splits, 0
        where = OperatorContext(OperatorUid("times"), "times", SubtaskIndex(0), 1, 16)
        generator.open(replace(where, splits=splits), ())
        self.read: ReadSource | None = None
        self.told: list[ReportWatermark] = []
        self.timers: list[SetTaskTimer] = []

    def wants(self) -> ReadSource | None:
        """The read that is under way, or else the next one, if there is one."""
        for step in self.cursor.next_steps(10, self.at_ms):
            if isinstance(step, ReadSource):
                self.read = step
            elif isinstance(step, SetTaskTimer):
                self.timers.append(step)
            else:
                assert isinstance(step, ReportWatermark)
                assert step.attempt == ATTEMPT
                self.told.append(step)
        return self.read

    def reads(self, time: int | None, *, at_end: bool = False) -> str | None:
        """The split that is read now: a row at this time, or nothing. None: no split is read."""
        read = self.wants()
        if read is None:
            return None
        self.read = None
        batch = None if time is None else pa.record_batch({"t": [time]})
        offset = read.offset + (time is not None)
        pause_ms = self.cursor.batch_read(SourceBatchRead(self.at_ms, read.read, batch, offset, at_end))
        if pause_ms is not None:
            self.cursor.resume()
        taken = self.cursor.take()[0] if self.cursor.has_batch else None
        if taken is not None:
            self.generator.process(taken, lambda _: None)
        return read.split.split_id

    def hears(self, watermark_ms: int) -> None:
        """The coordinator tells how far the group is."""
        self.cursor.told(WatermarkAnnounced(0, ATTEMPT, watermark_ms))

    def tells(self) -> list[tuple[int | None, bool]]:
        """What the coordinator has been told since: the watermark, and whether the task waits."""
        self.wants()
        told, self.told = [(each.watermark_ms, each.waits) for each in self.told], []
        return told


def test_a_split_that_is_ahead_is_not_read_until_its_group_has_come_nearer() -> None:
    """The other splits of the task are; at the drift itself a split is still read."""
    source = Source()
    source.hears(0)
    assert [source.reads(DRIFT_MS + 2), source.reads(5)] == ["a", "b"]
    assert [source.reads(6), source.reads(7)] == ["b", "b"]
    source.hears(1)
    assert [source.reads(8), source.reads(DRIFT_MS + 3)] == ["a", "b"]
    source.hears(MAX_WATERMARK_MS)
    assert {source.reads(9), source.reads(10)} == {"a", "b"}


def test_a_read_that_tries_many_splits_leaves_out_those_that_are_ahead() -> None:
    """After a pause all that may be read are tried at once, and no others."""
    source = Source()
    source.hears(0)
    assert [source.reads(DRIFT_MS + 2), source.reads(None)] == ["a", "b"]
    read = source.wants()
    assert read is not None
    assert (read.split.split_id, read.others) == ("b", ())
    assert source.reads(None) == "b"
    source.hears(MAX_WATERMARK_MS)
    read = source.wants()
    assert read is not None
    assert {read.split.split_id, *(split.split_id for split, _ in read.others)} == {"a", "b"}


def test_splits_that_are_read_one_after_the_other_wait_together() -> None:
    """They have one watermark, and the next split is not begun meanwhile."""
    source = Source(in_turn=False)
    source.hears(0)
    assert source.reads(DRIFT_MS + 2, at_end=True) == "a"
    assert source.reads(0) is None
    source.hears(1)
    assert source.reads(0) == "b"


@pytest.mark.parametrize("in_turn", [True, False])
def test_before_the_first_answer_a_source_reads_until_it_has_a_watermark(in_turn: bool) -> None:
    """Also after a restore, where it has one at once: nobody knows how far the others are."""
    source = Source(in_turn)
    assert [source.reads(0), source.reads(0 if in_turn else 1)] == (["a", "b"] if in_turn else ["a", None])
    assert source.reads(1) is None
    restored = Source(in_turn, a=7, b=7)
    assert restored.reads(8) is None
    assert restored.tells() == [(6, True)]
    restored.hears(6)
    assert restored.reads(8) == "a"


def test_it_tells_how_far_it_is_at_every_interval_and_when_it_has_to_wait() -> None:
    """Once each time that it has to; the timer is set again each time it has told."""
    source = Source()
    assert source.tells() == [(MIN_WATERMARK_MS, False)]
    assert source.timers == [SetTaskTimer(TaskTimer.WATERMARKS, INTERVAL_MS)]
    source.hears(0)
    assert [source.reads(500), source.reads(400)] == ["a", "b"]
    assert source.tells() == [(399, True)]
    assert source.tells() == []
    source.cursor.timer_due(TaskTimer.WATERMARKS)
    assert source.tells() == [(399, True)]
    assert len(source.timers) == 2
    source.hears(300)
    assert source.reads(401) == "b"
    source.cursor.timer_due(TaskTimer.WATERMARKS)
    assert source.tells() == [(400, False)]


def test_a_source_that_waits_tells_at_once_where_rows_that_were_read_ahead_have_moved_it() -> None:
    """Or the group would wait for where it was, until the interval is over."""
    source = Source(in_turn=False)
    source.hears(0)
    assert source.reads(150) == "a"
    source.tells()
    assert source.tells() == []
    source.generator.process(pa.record_batch({"t": [180]}), lambda _: None)
    assert source.tells() == [(179, True)]
    assert source.tells() == []


def test_a_split_that_is_held_is_not_idle() -> None:
    """The time for which it was held counts for no idleness; one that has nothing is idle, and does not count."""
    source = Source()
    source.hears(0)
    assert [source.reads(500), source.reads(5)] == ["a", "b"]
    source.at_ms = 10 * IDLENESS_MS
    assert source.reads(6) == "b"
    source.hears(500)
    assert source.reads(None) == "a"
    assert source.splits.active == {0, 1}
    source.at_ms = 11 * IDLENESS_MS
    assert [source.reads(7), source.reads(None)] == ["b", "a"]
    assert source.splits.active == {1}
    source.told.clear()
    source.cursor.timer_due(TaskTimer.WATERMARKS)
    assert source.tells() == [(6, False)]


def test_splits_at_their_end_and_idle_ones_hold_nobody_back() -> None:
    """The watermark of a task without any other split is none, or the last one."""
    source = Source()
    source.hears(MAX_WATERMARK_MS)
    assert [source.reads(5, at_end=True), source.reads(9)] == ["a", "b"]
    assert source.alignment.lowest_ms == 8
    assert source.reads(9, at_end=True) == "b"
    assert source.alignment.lowest_ms == MAX_WATERMARK_MS
    source = Source(in_turn=True)
    source.splits.active, source.splits.idle = set(), {0, 1}
    assert source.alignment.lowest_ms is None


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_end_is_told_at_once(in_turn: bool) -> None:
    """When the last rows have been processed, and not at the next interval: who waits for this task goes on."""
    source = Source(in_turn)
    source.hears(MAX_WATERMARK_MS)
    assert source.reads(5, at_end=True) == "a"
    source.tells()
    assert source.reads(9, at_end=True) == "b"
    assert source.tells() == [(None, False)]
    source.cursor.timer_due(TaskTimer.WATERMARKS)
    assert source.tells() == []


def test_the_drift_is_that_to_the_slowest_member() -> None:
    """Known when both are; never negative, as the group may have gone on since."""
    source = Source(in_turn=False)
    assert source.alignment.drift_ms is None
    source.hears(30)
    assert source.alignment.drift_ms is None
    source.reads(71)
    assert source.alignment.drift_ms == 40
    source.hears(90)
    assert source.alignment.drift_ms == 0


def test_a_read_does_not_go_on_where_a_split_may_become_free() -> None:
    """What the group is told meanwhile frees it, and the read that is under way leaves it out."""
    source = Source()
    for _ in range(20):
        read = source.wants()
        assert read is not None
        assert read.patience_ms == 0
        source.reads(None)
