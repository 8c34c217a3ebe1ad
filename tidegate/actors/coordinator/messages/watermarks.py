"""A source task tells how far it is in event time, and the coordinator how far the slowest member of its group is.

Neither is logged, nor known to the coordinator machine: a lost message is made good by the next one.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.protocol.identity import TaskId
from tidegate.storage.codec import wire
from tidegate.storage.ids import AttemptNumber


@wire
@dataclass(frozen=True, slots=True)
class WatermarkReported:
    """The lowest watermark of a source task's splits; None: all are idle, and nobody has to wait for them.

    `waits`: the task has nothing to read until others have come nearer.
    """

    at_ms: int
    attempt: AttemptNumber
    task: TaskId
    watermark_ms: int | None
    waits: bool


@wire
@dataclass(frozen=True, slots=True)
class AnnounceWatermark:
    """Tell a source task the lowest watermark of its group."""

    attempt: AttemptNumber
    task: TaskId
    watermark_ms: int
