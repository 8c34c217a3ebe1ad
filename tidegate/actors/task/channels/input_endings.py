"""`InputEndings`: how far the inputs of a task have ended: first their data, then the channels themselves.

`EndOfData` ends the data of a channel, `EndOfPartition` the channel.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.actors.protocol.identity import ChannelId
from tidegate.actors.protocol.stream_elements import EndOfData


class InputEndings:
    """The ends of all input channels; `indices` tells which input of the first operator each channel leads to."""

    def __init__(self, indices: Mapping[ChannelId, int]) -> None:
        self._indices = indices
        self._data_open = set(indices)
        self._partitions_open = set(indices)
        self.end = EndOfData(drain=True)
        """How data has ended so far: for good, if it has everywhere; by a stop, if the newest end is one."""

    @property
    def data_over(self) -> bool:
        """Whether the data of all channels has ended."""
        return not self._data_open

    @property
    def partitions_over(self) -> bool:
        """Whether all channels have delivered their last element; so it is where there are none."""
        return not self._partitions_open

    def end_data(self, channel: ChannelId, end: EndOfData) -> int | None:
        """Data has ended on a channel. The input that has ended with it, if it was the last one of an input."""
        self._data_open.discard(channel)
        self.end = EndOfData(self.end.drain and end.drain, end.stop)
        index = self._indices[channel]
        return None if any(self._indices[c] == index for c in self._data_open) else index

    def end_partition(self, channel: ChannelId) -> None:
        """A channel has delivered its last element."""
        self._partitions_open.discard(channel)
