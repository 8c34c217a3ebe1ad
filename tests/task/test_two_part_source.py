"""A source with two parts: the first is read split after split, and the second in turn when the first was processed."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from tidegate.actors.task.events import SourceBatchRead, SplitsAssigned, TaskTimer
from tidegate.actors.task.instructions import ReadSource, ReportWatermark, RequestSplits
from tidegate.actors.task.source_cursor import SourceCursor, SplitAlignment, SplitRequests
from tidegate.actors.task.split_positions import SplitPosition, positions_from_tables
from tidegate.connectors.source import SourceSplit
from tidegate.operators.operator import OperatorContext
from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber, CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import StateTable

ATTEMPT = AttemptNumber(1)
TIMES = OperatorUid("times")
ONE, TWO = (SourceSplit(name, b"", 2) for name in ("one", "two"))
P, Q = (SourceSplit(name, b"") for name in ("then p", "then q"))
FINDER = SourceSplit("then finder", b"", 0)


def is_second(split: SourceSplit) -> bool:
    """Whether a split belongs to the second part."""
    return split.split_id.startswith("then ")


class Subtask:
    """A subtask of such a source, with the step that makes watermarks behind it."""

    def __init__(
        self,
        *positions: SplitPosition,
        requests: bool = True,
        idleness_ms: int | None = None,
        alignment: WatermarkAlignment | None = None,
    ) -> None:
        self.splits = SourceSplits()
        self.generator = WatermarkGenerator("t", idleness_ms=idleness_ms, alignment=alignment)
        self.cursor = SourceCursor(
            positions,
            rows_max=1,
            in_turn=self.splits,
            idleness_ms=idleness_ms,
            requests=SplitRequests(ATTEMPT) if requests else None,
            event_times=self.splits,
            alignment=None if alignment is None else SplitAlignment(ATTEMPT, alignment, self.generator, self.splits),
            is_second=is_second,
        )
        where = OperatorContext(TIMES, "times", SubtaskIndex(0), 2, 16)
        self.generator.open(replace(where, splits=self.splits), ())
        self.given = 0
        self.at_ms = 100

    def wants(self) -> ReadSource | RequestSplits | None:
        """The read or the request for splits that comes next, if there is one."""
        steps = self.cursor.next_steps(1, self.at_ms)
        return next((step for step in steps if isinstance(step, ReadSource | RequestSplits)), None)

    def reads(self, time_ms: int | None, *, at_end: bool = False) -> str:
        """Reads a row of the split that comes next, without processing it. None: the split has nothing."""
        read = self.wants()
        assert isinstance(read, ReadSource)
        batch = None if time_ms is None else pa.record_batch({"t": [time_ms]})
        offset = read.offset + (time_ms is not None)
        if self.cursor.batch_read(SourceBatchRead(self.at_ms, read.read, batch, offset, at_end)) is not None:
            self.cursor.resume()
        return read.split.split_id

    def processes(self) -> None:
        """Processes all that was read."""
        while self.cursor.has_batch:
            batch = self.cursor.take().batch
            if batch is None:
                self.generator.splits_moved()
            else:
                self.generator.process(batch, lambda _: None)

    def gets(self, *splits: SourceSplit) -> None:
        """The answer of the coordinator comes."""
        self.cursor.told(SplitsAssigned(self.at_ms, ATTEMPT, self.given, splits))
        self.given += len(splits)
        self.processes()

    def restored(self) -> tuple[SplitPosition, ...]:
        """The positions of a checkpoint that is taken now."""
        frozen = self.cursor.freeze(CheckpointId(1))
        return positions_from_tables([StateTable(frozen.state, frozen.kind, chunk.rows) for chunk in frozen.chunks()])


def test_the_second_part_is_requested_when_the_first_was_processed() -> None:
    """Not when it was read: a checkpoint could lack rows that others believe to be in it."""
    task = Subtask(SplitPosition(ONE))
    assert task.reads(1_000) == "one"
    assert task.reads(1_001, at_end=True) == "one"
    assert task.wants() is None
    task.processes()
    assert task.wants() == RequestSplits(ATTEMPT, 0)


def test_the_first_part_is_read_in_order_and_the_second_in_turn() -> None:
    """Splits of the first part wait for each other; splits of the second do not."""
    task = Subtask()
    assert isinstance(task.wants(), RequestSplits)
    task.gets(ONE, TWO)
    assert [task.reads(1_000), task.reads(1_001, at_end=True)] == ["one", "one"]
    task.processes()
    assert task.reads(1_002, at_end=True) == "two"
    task.processes()
    assert isinstance(task.wants(), RequestSplits)
    task.gets(P, Q)
    assert [task.reads(1_003), task.reads(1_003)] == ["then p", "then q"]
    task.processes()
    assert [task.reads(1_004), task.reads(1_004)] == ["then p", "then q"]


def test_splits_of_the_second_part_wait_in_a_restored_task() -> None:
    """Also if the first part ended for all other subtasks before. They may have rows to read again."""
    task = Subtask(SplitPosition(P, 7), SplitPosition(ONE, 1))
    assert task.reads(1_000, at_end=True) == "one"
    task.processes()
    assert isinstance(task.wants(), RequestSplits)
    task.cursor.timer_due(TaskTimer.SPLITS)
    assert isinstance(task.wants(), RequestSplits)
    task.gets()
    assert not task.cursor.at_end
    assert task.reads(1_001) == "then p"


def test_a_task_without_a_coordinator_that_assigns_goes_on_by_itself() -> None:
    """It has all splits from the beginning."""
    task = Subtask(SplitPosition(P), SplitPosition(ONE), requests=False)
    assert task.reads(1_000, at_end=True) == "one"
    task.processes()
    assert task.reads(1_001, at_end=True) == "then p"
    task.processes()
    assert task.cursor.at_end


def test_a_task_without_a_share_ends() -> None:
    """It gets no splits of the second part."""
    task = Subtask(SplitPosition(ONE, 2, at_end=True))
    assert isinstance(task.wants(), RequestSplits)
    assert not task.cursor.at_end
    task.gets()
    assert task.cursor.at_end


def test_event_time_continues_where_the_first_part_ended() -> None:
    """It stands until every split of the second part has rows, and never goes back; also after a restore."""
    task = Subtask(SplitPosition(ONE))
    task.reads(5_000, at_end=True)
    task.processes()
    assert task.generator.watermark_ms == 4_999
    task.wants()
    task.gets(P, Q)
    task.reads(9_000)
    task.processes()
    assert task.generator.watermark_ms == 4_999
    for again in (task, Subtask(*task.restored(), requests=False)):
        found = set()
        for _ in range(2):
            found.add(again.reads(4_000))
            again.processes()
            assert again.generator.watermark_ms == 4_999
        assert found == {"then p", "then q"}
    again.reads(9_000)
    again.reads(9_000)
    again.processes()
    assert again.generator.watermark_ms == 8_999


def test_a_task_that_waits_keeps_its_event_time() -> None:
    """Rows of the second part may be as old. With an idleness the task becomes idle after that time."""
    patient = Subtask(SplitPosition(ONE))
    patient.reads(5_000, at_end=True)
    patient.processes()
    patient.wants()
    patient.at_ms += 3_600_000
    patient.cursor.timer_due(TaskTimer.SPLITS)
    patient.wants()
    assert not patient.cursor.has_batch
    assert not patient.splits.all_idle

    hasty = Subtask(SplitPosition(ONE), idleness_ms=1_000)
    hasty.reads(5_000, at_end=True)
    hasty.processes()
    hasty.wants()
    hasty.at_ms += 1_000
    hasty.cursor.timer_due(TaskTimer.SPLITS)
    assert hasty.wants() is None
    hasty.processes()
    assert hasty.splits.all_idle
    assert isinstance(hasty.wants(), RequestSplits)
    hasty.gets(P)
    assert not hasty.splits.all_idle


def test_a_task_with_finders_alone_is_idle() -> None:
    """Its steps notice it at the switch, although no row comes."""
    task = Subtask()
    task.wants()
    task.gets(FINDER)
    assert task.splits.all_idle


def test_a_task_that_waits_holds_nothing_back_in_its_group() -> None:
    """Otherwise the task that still reads the first part would wait for it, and it for that task."""
    task = Subtask(alignment=WatermarkAlignment("group", 100, 50))
    (report,) = (step for step in task.cursor.next_steps(1, 100) if isinstance(step, ReportWatermark))
    assert report.watermark_ms is None
    task.gets(P)
    task.cursor.timer_due(TaskTimer.WATERMARKS)
    (report,) = (step for step in task.cursor.next_steps(1, 200) if isinstance(step, ReportWatermark))
    assert report.watermark_ms == MIN_WATERMARK_MS
