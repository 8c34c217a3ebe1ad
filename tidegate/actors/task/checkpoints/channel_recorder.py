"""Records what an unaligned barrier overtakes, from the snapshot until the barrier of every channel has arrived.

`SubtaskCheckpoints` has one recorder for each snapshot that may overtake. Rules that it keeps (Flink's
ChannelStateWriter; Chandy and Lamport, "Distributed Snapshots"):

- Input channel: what waits when the snapshot is taken belongs to the checkpoint. So does what arrives afterwards, up to
  the channel's barrier or its end.
- Output channel: what the barrier has overtaken in the queue belongs to the checkpoint. A barrier that may overtake
  later (an aligned one with a timeout) keeps its channel open until it has left, or has overtaken.
- Watermarks keep their places among the rows (`in_flight_elements.py`). Where there are no rows, nothing is kept.
- A batch is referred to, never copied. The queues bound what waits. They do not bound what arrives while a barrier is
  late: whoever owns the recorder looks at `size_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from tidegate.actors.task.channels.in_flight_elements import InFlightElement, has_rows, keep_in_flight
from tidegate.actors.task.messages.instructions import Direction, InFlight
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Element, ends_in_flight
from tidegate.storage.ids import CheckpointId


class ChannelRecorder:
    """The in-flight elements of one snapshot."""

    def __init__(self, checkpoint_id: CheckpointId) -> None:
        self.checkpoint_id = checkpoint_id
        self._held: dict[tuple[Direction, ChannelId], list[InFlightElement]] = {}
        self._recovered: dict[ChannelId, int] = {}
        self._open_inputs: set[ChannelId] = set()
        self._open_outputs: set[ChannelId] = set()
        self.size_bytes = 0
        """Bytes of all batches that are held."""

    @property
    def complete(self) -> bool:
        """Whether nothing can be added any more."""
        return not self._open_inputs and not self._open_outputs

    @property
    def open_outputs(self) -> Iterable[ChannelId]:
        """Output channels whose barrier may still overtake something."""
        return tuple(self._open_outputs)

    def input_waits(
        self, channel: ChannelId, elements: Sequence[InFlightElement], recovered: int, barrier_arrived: bool
    ) -> None:
        """These wait on an input as the snapshot is taken. The first `recovered` of them were restored."""
        self._hold(Direction.INPUT, channel, elements)
        self._recovered[channel] = recovered
        if not barrier_arrived:
            self._open_inputs.add(channel)

    def arrived(self, channel: ChannelId, elements: Iterable[Element]) -> None:
        """New elements have been queued on an input."""
        if channel not in self._open_inputs:
            return
        for element in elements:
            if ends_in_flight(element, self.checkpoint_id):
                self._open_inputs.discard(channel)
                return
            self._hold(Direction.INPUT, channel, (element,))

    def output_overtaken(self, channel: ChannelId, elements: Sequence[InFlightElement]) -> None:
        """The barrier has overtaken these in an output queue."""
        self._hold(Direction.OUTPUT, channel, elements)
        self._open_outputs.discard(channel)

    def output_waits(self, channel: ChannelId) -> None:
        """The barrier waits in an output queue, and may overtake what is before it later."""
        self._open_outputs.add(channel)

    def output_left(self, channel: ChannelId) -> None:
        """The barrier has left in its turn: nothing of this channel is in flight."""
        self._open_outputs.discard(channel)

    def channels(self) -> tuple[InFlight, ...]:
        """What was recorded, without channels that have no rows."""
        assert self.complete
        return tuple(
            InFlight(
                channel,
                direction,
                tuple(held),
                self._recovered.get(channel, 0) if direction is Direction.INPUT else 0,
            )
            for (direction, channel), held in self._held.items()
            if has_rows(held)
        )

    def _hold(self, direction: Direction, channel: ChannelId, elements: Sequence[Element]) -> None:
        keep_in_flight(self._held.setdefault((direction, channel), []), elements)
        self.size_bytes += sum(element.nbytes for element in elements if isinstance(element, pa.RecordBatch))
