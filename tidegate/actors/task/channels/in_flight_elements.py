"""What of a channel is in flight: the rows that an unaligned barrier overtakes, and the watermarks that judge them.

`InputChannel`, `OutputChannel` and `ChannelRecorder` ask here what a checkpoint keeps. Rules:

- A watermark keeps its place among the rows: after a restore each row meets the one that it would have met.
- What the channel had reached before comes first. A row may be late by a watermark that was taken, or had left, before
  the barrier, and a function that looks at the watermark is not told it by any state.
- Of watermarks with no row between them the greatest counts, so there are never more of them than batches.
- The end of event time is not kept: no row follows it, and a sender that is restored at its end says it again.
- Nor is whether the channel is idle. After a restore both ends begin as active, and a sender that is idle says so. If
  the receiver began as idle nobody would tell it that the sender is active, and rows in time would be late.

In a job without event time there are only rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import pyarrow as pa

from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, Element, Watermark

InFlightElement: TypeAlias = pa.RecordBatch | Watermark


def keep_in_flight(held: list[InFlightElement], elements: Iterable[Element | None]) -> None:
    """Add to what is held of a channel what counts of these elements, in their order. None is nothing."""
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            held.append(element)
        elif isinstance(element, Watermark) and element.timestamp_ms < MAX_WATERMARK_MS:
            last = held.pop() if held and isinstance(held[-1], Watermark) else element
            held.append(last if last.timestamp_ms > element.timestamp_ms else element)


def has_rows(held: Iterable[InFlightElement]) -> bool:
    """Whether anything is in flight: watermarks alone judge nothing, and come again."""
    return any(isinstance(element, pa.RecordBatch) for element in held)
