"""Code that input and output channels of a task share: merging of batches, in-flight elements, and channels with
work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeAlias, TypeVar

import pyarrow as pa

from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, Element, Watermark, element_size_bytes

MERGED_ROWS_MAX = 32_768
MERGED_BYTES_MAX = 1024 * 1024


def neighbours(elements: Iterable[Element], rows_max: int, bytes_max: int) -> list[tuple[pa.RecordBatch, int]]:
    """Returns the first waiting elements that can be merged into one batch within these limits, with the size of each.
    Empty unless there are two.
    """
    found: list[tuple[pa.RecordBatch, int]] = []
    rows = size_bytes = 0
    for element in elements:
        if not isinstance(element, pa.RecordBatch) or (rows := rows + element.num_rows) > rows_max:
            break
        if found and not _alike(found[0][0].schema, element.schema):
            break
        own_bytes = element_size_bytes(element)
        if (size_bytes := size_bytes + own_bytes) > bytes_max:
            break
        found.append((element, own_bytes))
    return found if len(found) > 1 else []


def merged(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch | None:
    """Returns the rows of all batches as one batch, in their order. None if Arrow cannot concatenate them."""
    try:
        return pa.concat_batches(batches)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _alike(schema: pa.Schema, other: pa.Schema) -> bool:
    return bool(schema.equals(other)) and not any(pa.types.is_dictionary(field.type) for field in schema)


InFlightElement: TypeAlias = pa.RecordBatch | Watermark


def keep_in_flight(held: list[InFlightElement], elements: Iterable[Element | None]) -> None:
    """Appends to `held` the elements of a channel that are in flight, in their order.

    These are the rows that an unaligned barrier overtakes, and the watermarks that decide whether they are late.
    `InputChannel`, `OutputChannel` and `ChannelRecorder` store them in a checkpoint. Rules:

    - A watermark keeps its place among the rows: after a restore each row meets the one that it would have met.
    - The watermark that the channel had reached before comes first. A row may be late by a watermark that was taken, or
      had left, before the barrier, and a function that reads the watermark does not get it from any state.
    - Of watermarks with no row between them the greatest counts, so there are never more of them than batches.
    - The end of event time is not kept: no row follows it, and a sender that is restored at its end repeats it.
    - Idleness is not kept either. After a restore both ends begin as active, and an idle sender announces it. If the
      receiver began as idle, no message would announce an active sender, and rows in time would be late.

    In a job without event time there are only rows. A None among `elements` is skipped.
    """
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            held.append(element)
        elif isinstance(element, Watermark) and element.timestamp_ms < MAX_WATERMARK_MS:
            last = held.pop() if held and isinstance(held[-1], Watermark) else element
            held.append(last if last.timestamp_ms > element.timestamp_ms else element)


def has_rows(held: Iterable[InFlightElement]) -> bool:
    """Returns whether rows are in flight.

    Watermarks without rows need not be stored: they make no row late, and senders repeat them after a restore.
    """
    return any(isinstance(element, pa.RecordBatch) for element in held)


ALWAYS_MARKED = 8
"""Number of channels up to which all of them are always marked."""
ChannelT = TypeVar("ChannelT")


class ReadyChannels(Generic[ChannelT]):
    """The channels of a task that may have work, in the order of the channels.

    Each turn looks through the queues of a task several times. Without marks, a turn of a task with a thousand channels
    did little else, and the cost of a checkpoint grew with the square of their number. Rules:

    - A mark means that a channel may have something. Access to a channel marks it; a caller that finds nothing in it
      may take the mark away. So a channel without a mark has nothing.
    - Marks are bits of one number, so that the next one behind a place is found without looking at each.
    - Few channels are always marked: to look at them all takes no longer than to look at the marks.
    """

    def __init__(self, channels: Sequence[ChannelT]) -> None:
        self._channels = list(channels)
        self._all = (1 << len(self._channels)) - 1
        self._always = len(self._channels) <= ALWAYS_MARKED
        self._bits = self._all if self._always else 0

    def __iter__(self) -> Iterator[ChannelT]:
        """Yields the channels that are marked when the iteration begins."""
        if self._bits == self._all:
            return iter(self._channels)
        return (self._channels[place] for place in places(self._bits))

    def mark(self, place: int) -> None:
        """Marks a channel, because it may have work."""
        self._bits |= 1 << place

    def mark_all(self) -> None:
        """Marks every channel."""
        self._bits = self._all

    def unmark(self, place: int) -> None:
        """Removes the mark of a channel that has no work."""
        if not self._always:
            self._bits &= ~(1 << place)

    def next(self, place: int, but: int = 0) -> int | None:
        """Returns the first marked index from this one on, wrapping around. `but` has the bits of channels to skip.
        None if there is none.
        """
        bits = self._bits & ~but
        behind = bits >> place
        if behind:
            return place + (behind & -behind).bit_length() - 1
        return (bits & -bits).bit_length() - 1 if bits else None


def places(bits: int) -> Iterator[int]:
    """Returns the positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
