"""Splits without rows that hold event time back are logged by name, once, unless `idleness=` was given."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from source_reads import answer, at

from tidegate.actors.task.source_cursor import QUIET_MS, QUIET_NAMED_MAX, SourceCursor
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.connectors.source import SourceSplit
from tidegate.operators.operator import OperatorContext
from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.watermarks.watermark_generator import WatermarkGenerator
from tidegate.storage.ids import OperatorUid, SubtaskIndex


class Subtask:
    """A subtask of a source, and the step behind it that makes watermarks. `parallelism`: that of both."""

    def __init__(self, *names: str, parallelism: int = 1, idleness_ms: int | None = None) -> None:
        turns = SourceSplits()
        self.generator = WatermarkGenerator("t", idleness_ms=idleness_ms)
        self.source = SourceCursor(
            [SplitPosition(SourceSplit(name, b"")) for name in names],
            rows_max=1,
            read_ahead=1,
            in_turn=turns,
            idleness_ms=idleness_ms,
            event_times=turns,
            awaited=self.generator,
        )
        where = OperatorContext(OperatorUid("times"), "timestamps", SubtaskIndex(0), parallelism, 16)
        self.generator.open(replace(where, splits=turns), ())

    def run(self, since_ms: int, until_ms: int, **times: int) -> None:
        """Read all splits every second. `times`: those that have a row each time, with its timestamp."""
        for at_ms in range(since_ms, until_ms + 1, 1_000):
            for _ in self.source.split_ids:
                self.source.resume()
                read = self.source.next_read()
                assert read is not None
                name, empty = read.split.split_id, 0
                for split, _ in read.others:
                    if name not in times:
                        name, empty = split.split_id, empty + 1
                answered = replace(at(answer(read, int(name in times)), at_ms), empty=empty)
                if empty:
                    offset = read.others[empty - 1][1]
                    answered = replace(answered, next_offset=offset + int(name in times))
                self.source.batch_read(answered)
                while self.source.has_batch:
                    if self.source.take().batch is not None:
                        self.generator.process(pa.record_batch({"t": [times[name]]}), lambda batch: None)


def test_one_line_names_the_splits_that_hold_event_time_back(caplog: pytest.LogCaptureFixture) -> None:
    """Those that have had no rows, and not the one that has."""
    subtask = Subtask("a[0]", "a[1]", "a[2]")
    subtask.run(0, QUIET_MS - 1_000, **{"a[1]": 50})
    assert caplog.messages == []
    subtask.run(QUIET_MS, 3 * QUIET_MS, **{"a[1]": 60})
    (line,) = caplog.messages
    assert line.startswith(
        "no rows for 30 s from a[0], a[2], so event time stands still at timestamps (uid 'times'), and windows"
    )
    assert "give idleness=" in line


def test_a_split_that_is_ahead_of_others_holds_nothing_back(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once the others have passed it."""
    subtask = Subtask("a[0]", "a[1]")
    subtask.run(0, 0, **{"a[0]": 50, "a[1]": 10})
    subtask.run(1_000, 2 * QUIET_MS, **{"a[1]": 20})
    assert caplog.messages == []
    subtask.run(2 * QUIET_MS, 3 * QUIET_MS, **{"a[1]": 60})
    (line,) = caplog.messages
    assert line.startswith("no rows for 30 s from a[0], so")


@pytest.mark.parametrize(("parallelism", "lines"), [(1, 0), (2, 1)])
def test_a_source_that_is_quiet_as_a_whole(parallelism: int, lines: int, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is held back by the only split there is. One of several subtasks does not know of the others."""
    subtask = Subtask("a[0]", parallelism=parallelism)
    subtask.run(0, 0, **{"a[0]": 50})
    subtask.run(1_000, 2 * QUIET_MS)
    assert len(caplog.messages) == lines


def test_with_idleness_nothing_is_held_back(caplog: pytest.LogCaptureFixture) -> None:
    """So nothing is logged."""
    Subtask("a[0]", "a[1]", idleness_ms=2 * QUIET_MS).run(0, 3 * QUIET_MS, **{"a[1]": 50})
    assert caplog.messages == []


def test_a_line_has_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    """However many splits there are."""
    Subtask(*map(str, range(QUIET_NAMED_MAX + 5))).run(0, 2 * QUIET_MS)
    (line,) = caplog.messages
    assert f"{QUIET_NAMED_MAX - 1} and 5 more, so" in line
