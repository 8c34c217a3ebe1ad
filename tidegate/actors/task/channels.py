"""Helpers for the input and output channels of a task: merging of batches, in-flight elements, and channels with
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
    """Returns the first batches of a queue that can be merged into one within these limits, each with its size in
    bytes.

    Empty if fewer than two batches can be merged.
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
    """Returns the rows of all batches as one batch, in order. None if Arrow cannot concatenate them."""
    try:
        return pa.concat_batches(batches)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _alike(schema: pa.Schema, other: pa.Schema) -> bool:
    return bool(schema.equals(other)) and not any(pa.types.is_dictionary(field.type) for field in schema)


InFlightElement: TypeAlias = pa.RecordBatch | Watermark


def keep_in_flight(held: list[InFlightElement], elements: Iterable[Element | None]) -> None:
    """Appends to `held` the elements of a channel that are in flight, in order, and skips None.

    These are the rows that an unaligned barrier overtakes, and the watermarks that decide whether they are late. In a
    job without event time there are only rows. `InputChannel`, `OutputChannel` and `ChannelRecorder` store them in a
    checkpoint. Rules:

    - A watermark keeps its place among the rows, so that each row meets the same watermark after a restore.
    - The watermark that the channel had reached before comes first. A row may be late by a watermark that was taken, or
      had been sent, before the barrier, and no state stores the watermark for functions that read it.
    - Of consecutive watermarks only the greatest is kept, so there are never more watermarks than batches.
    - The end of event time is not kept: rows cannot follow it, and a sender that is restored at its end repeats it.
    - Idleness is not kept either. After a restore both ends begin as active, and an idle sender announces it. If the
      receiver began as idle, no message would announce an active sender, and rows in time would be late.
    """
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            held.append(element)
        elif isinstance(element, Watermark) and element.timestamp_ms < MAX_WATERMARK_MS:
            last = held.pop() if held and isinstance(held[-1], Watermark) else element
            held.append(last if last.timestamp_ms > element.timestamp_ms else element)


def has_rows(held: Iterable[InFlightElement]) -> bool:
    """Returns whether in-flight elements contain rows. In-flight elements without rows need not be stored: senders
    repeat their watermarks after a restore.
    """
    return any(isinstance(element, pa.RecordBatch) for element in held)


ALWAYS_MARKED = 8
"""Up to this number of channels, all channels are always marked."""
ChannelT = TypeVar("ChannelT")


class ReadyChannels(Generic[ChannelT]):
    """The channels of a task that may have work, in the order of the channels.

    Each turn looks through the queues of a task several times. Without marks, a turn of a task with a thousand channels
    did little else, and the cost of a checkpoint grew with the square of their number. Rules:

    - A marked channel may have work. An unmarked channel has none. Access to a channel marks it, and a caller that
      finds no work may unmark it.
    - The marks are the bits of one integer, so the next marked channel is found without a loop.
    - Up to `ALWAYS_MARKED` channels are always marked, because a loop over them costs no more.
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
        """Marks the channel with index `place`, because it may have work."""
        self._bits |= 1 << place

    def mark_all(self) -> None:
        """Marks every channel as one that may have work."""
        self._bits = self._all

    def unmark(self, place: int) -> None:
        """Removes the mark of the channel with index `place`, because it has no work."""
        if not self._always:
            self._bits &= ~(1 << place)

    def next(self, place: int, but: int = 0) -> int | None:
        """Returns the index of the first marked channel at or after `place`, wrapping around, or None.

        `but` has the bits of the channels to skip.
        """
        bits = self._bits & ~but
        behind = bits >> place
        if behind:
            return place + (behind & -behind).bit_length() - 1
        return (bits & -bits).bit_length() - 1 if bits else None


def places(bits: int) -> Iterator[int]:
    """Yields the positions of the bits that are set, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
