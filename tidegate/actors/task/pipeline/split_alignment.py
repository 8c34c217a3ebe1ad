"""`SplitAlignment`: which splits of a source task are too far ahead of their group in event time to be read now.

`SourceCursor` asks before each read. The coordinator tells how far the slowest split of the group is
(`tidegate/actors/coordinator/alignment.py`). Rules, Flink's for watermark alignment:

- A split is held while its watermark is more than `max_drift` ahead of the lowest one of the group. The slowest one is
  never held, so the group goes on.
- Only reading is held: what was read before is processed, and barriers, savepoints and the end of the job pass as ever.
- Splits that are idle, or at their end, do not count. A split that is held is not idle.
- Nobody knows at the start how far the others are. A split that has a watermark by then waits for the first answer.
- The task tells its own lowest watermark again and again, and at once when it has nothing left to read. What was read
  ahead moves it on after that: it is told at once as well, or the others would wait for where the task was.
- A task that has come to its end tells so at once: the others need not wait for it until their next turn.
- So whatever is lost, an answer comes with the next one: a message, or a coordinator, may delay a split and never stop
  it.
- Nothing of this is in a checkpoint. It says when rows are read, and not which.
"""

from __future__ import annotations

from tidegate.actors.task.messages import instructions as do
from tidegate.actors.task.messages.events import TaskTimer
from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.storage.ids import AttemptNumber


class SplitAlignment:
    """Of one task in one attempt."""

    def __init__(
        self,
        attempt: AttemptNumber,
        alignment: WatermarkAlignment,
        generator: WatermarkGenerator,
        splits: SourceSplits,
    ) -> None:
        self._attempt = attempt
        self._alignment = alignment
        self._generator = generator
        self._splits = splits
        self.group_ms: int | None = None
        """The lowest watermark of the group, as the coordinator has told it last."""
        self._due = True
        """Whether it is time to tell the coordinator how far this task is."""
        self._waits_at: tuple[int | None] | None = None
        """The watermark with which the coordinator was told that the task has nothing to read until others have come
        nearer; None: it has something."""
        self._ended = False
        """Whether the coordinator was told that the task holds nobody back any more."""

    @property
    def lowest_ms(self) -> int | None:
        """The watermark of the slowest split that counts: MIN_WATERMARK_MS before it has one; None if all are idle."""
        if not self._splits.in_turn:
            return self._generator.split_watermark_ms(None)
        if self._splits.active:
            return min(self._generator.split_watermark_ms(split) for split in self._splits.active)
        return None if self._splits.idle else MAX_WATERMARK_MS

    @property
    def drift_ms(self) -> int | None:
        """How far the task is ahead of the slowest member of the group; None where one of them is not known."""
        known = (MIN_WATERMARK_MS, MAX_WATERMARK_MS, None)
        lowest_ms = self.lowest_ms
        if lowest_ms is None or self.group_ms is None or {lowest_ms, self.group_ms} & set(known):
            return None
        return max(0, lowest_ms - self.group_ms)

    def holds(self, split: int | None) -> bool:
        """Whether a split may not be read now; None: those that are read one after the other."""
        ahead_ms = self._generator.split_watermark_ms(split)
        if self.group_ms is None:
            return ahead_ms > MIN_WATERMARK_MS
        return ahead_ms > self.group_ms + self._alignment.max_drift_ms

    def announced(self, group_ms: int) -> None:
        """The coordinator has told the lowest watermark of the group."""
        self.group_ms = group_ms

    def timer_due(self) -> None:
        """An interval is over."""
        self._due = True

    def steps(self, at_ms: int, waits: bool, at_end: bool) -> tuple[do.TaskInstruction, ...]:
        """What to tell the coordinator now. `waits`: all splits that can be read are held; `at_end`: all were read."""
        if at_end:
            ended, self._ended = self._ended, True
            return () if ended else (do.ReportWatermark(self._attempt, None, False),)
        told, self._waits_at = self._waits_at, (self.lowest_ms,) if waits else None
        if not self._due:
            return (self._report(waits),) if waits and self._waits_at != told else ()
        self._due = False
        again = do.SetTaskTimer(TaskTimer.WATERMARKS, at_ms + self._alignment.update_interval_ms)
        return self._report(waits), again

    def _report(self, waits: bool) -> do.ReportWatermark:
        return do.ReportWatermark(self._attempt, self.lowest_ms, waits)
