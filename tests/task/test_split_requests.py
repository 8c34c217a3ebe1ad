"""A source task asks for splits when it has read those that it has, until it is told that there are no more."""

from __future__ import annotations

import pytest
from batches import batch

from tidegate.actors.task.events import SourceBatchRead, SplitsAssigned, TaskTimer
from tidegate.actors.task.instructions import ReadSource, RequestSplits, SetTaskTimer, TaskInstruction
from tidegate.actors.task.source_cursor import ASK_AGAIN_MS, SourceCursor, SplitRequests
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import SourceSplit
from tidegate.storage.errors import ProtocolError
from tidegate.storage.ids import AttemptNumber, CheckpointId

ATTEMPT = AttemptNumber(3)
ONE, TWO, THREE = (SourceSplit(name, b"", 2) for name in ("one", "two", "three"))


class Reading:
    """A cursor that asks for splits, and what it wants next."""

    def __init__(self, *restored: SourceSplit) -> None:
        positions = [SplitPosition(split) for split in restored]
        self.cursor = SourceCursor(positions, 2, requests=SplitRequests(ATTEMPT))

    def wants(self) -> tuple[TaskInstruction, ...]:
        return tuple(self.cursor.next_steps(2, 100))

    def reads(self) -> str:
        """It wants to read a split, and reads it to the end."""
        (read,) = self.wants()
        assert isinstance(read, ReadSource)
        self.cursor.batch_read(SourceBatchRead(0, read.read, batch(0, 1), 2, at_end=True))
        return read.split.split_id

    def gets(self, first: int, *splits: SourceSplit) -> None:
        self.cursor.told(SplitsAssigned(0, ATTEMPT, first, splits))


def question(first: int) -> tuple[TaskInstruction, ...]:
    """It asks, and sets the timer to ask again."""
    return RequestSplits(ATTEMPT, first), SetTaskTimer(TaskTimer.SPLITS, 100 + ASK_AGAIN_MS)


def test_it_asks_when_all_that_it_has_was_read() -> None:
    """Not before, also after a restore; once, while what was read waits to be processed; and it ends when told so."""
    source = Reading(ONE)
    assert source.reads() == "one"
    assert source.wants() == question(0)
    assert source.wants() == ()
    assert not source.cursor.at_end
    source.gets(0, TWO, THREE)
    assert [source.reads()] == ["two"]
    for _ in range(2):
        source.cursor.take()
    assert source.reads() == "three"
    assert source.wants() == question(2)
    source.gets(2)
    source.cursor.take()
    assert source.cursor.at_end
    assert source.wants() == ()


def test_an_answer_counts_once() -> None:
    """However often it comes, and also when it comes late."""
    source = Reading()
    assert source.wants() == question(0)
    source.gets(0, ONE)
    source.gets(0, ONE)
    assert source.cursor.split_ids == ("one",)
    source.gets(1, TWO)
    source.gets(0, ONE, TWO)
    assert source.cursor.split_ids == ("one", "two")
    source.gets(2)
    source.gets(2)
    assert source.cursor.split_ids == ("one", "two")


def test_a_question_is_repeated_until_it_is_answered() -> None:
    """It or its answer may get lost."""
    source = Reading()
    assert source.wants() == question(0)
    source.cursor.timer_due(TaskTimer.SPLITS)
    assert source.wants() == question(0)
    source.gets(0, ONE)
    source.cursor.timer_due(TaskTimer.SPLITS)
    assert source.reads() == "one"


def test_an_answer_from_nowhere_is_refused() -> None:
    """Splits before it would be missing."""
    with pytest.raises(ProtocolError, match="from number 1 on were assigned to a task with 0 splits"):
        Reading().gets(1, ONE)


def test_a_snapshot_has_what_was_taken_in() -> None:
    """Splits that were not begun as well: the coordinator counts them as taken."""
    source = Reading(ONE)
    source.reads()
    source.wants()
    source.gets(0, TWO)
    assert [position.split for position in source.cursor.freeze(CheckpointId(1)).positions] == [ONE, TWO]
