"""`InputEndings`: which inputs of a task have ended.

`EndOfData` ends the data of a channel: when all data has ended, the task machine finishes the operators.
`EndOfPartition` ends the channel itself: the task ends only when all channels have.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import EndOfData


class InputEndings:
    """The ends of all input channels; `indices` tells which input of the first operator each channel leads to."""

    def __init__(self, indices: Mapping[ChannelId, int]) -> None:
        self._indices = indices
        self._data_open = set(indices)
        self._partitions_open = set(indices)
        self.end = EndOfData(drain=True)
        """How data has ended so far. It drains if all channels say so; `stop` is what the newest end says."""

    @property
    def data_over(self) -> bool:
        """Whether the data of all channels has ended."""
        return not self._data_open

    @property
    def partitions_over(self) -> bool:
        """Whether all channels have delivered their last element. True for a task without channels."""
        return not self._partitions_open

    def end_data(self, channel: ChannelId, end: EndOfData) -> int | None:
        """Data has ended on a channel. Returns the input whose last channel this was, or None."""
        self._data_open.discard(channel)
        self.end = EndOfData(self.end.drain and end.drain, end.stop)
        index = self._indices[channel]
        return None if any(self._indices[c] == index for c in self._data_open) else index

    def end_partition(self, channel: ChannelId) -> None:
        """A channel has delivered its last element."""
        self._partitions_open.discard(channel)
