"""`InputWindows`: how much the senders of a task may have in flight to it, and the grants of credit that say so.

The task machine calls it when turns begin and end. `Debloater` computes the size. Rules:

- Without a target time (`debloat_target_ms`) every window is all the credit there is. With one it may be larger than
  that: it is also the size of the sender's queue.
- A sender hears at once of a window that has become smaller: else no grant would come before all that is in flight was
  processed. It hears of a larger one with the next grant.
- A channel whose data has ended leaves its share of the time to the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidegate.actors.task.channels.debloating import Debloater
from tidegate.actors.task.channels.input_gate import InputChannel, InputGate
from tidegate.actors.task.channels.turn_pacer import TaskPacers
from tidegate.actors.task.messages.instructions import GrantCredit
from tidegate.actors.task.pipeline.task_descriptor import TaskDescriptor


class InputWindows:
    """Measures how fast a task processes its input, and sizes the windows by it."""

    def __init__(self, descriptor: TaskDescriptor, gate: InputGate, pacer: TaskPacers) -> None:
        limits = descriptor.limits
        self._attempt, self._gate, self._pacer = descriptor.attempt, gate, pacer
        self._debloater: Debloater | None = None
        if descriptor.inputs and limits.debloat_target_ms:
            first_bytes, most_bytes = limits.first_window_bytes, limits.widest_window_bytes
            least_bytes = min(limits.window_bytes_min, most_bytes)
            self._debloater = Debloater(limits.debloat_target_ms, first_bytes, least_bytes, most_bytes)
        self._taken_bytes = self._taken_rows = 0
        """Of this turn, for `next_turn` to measure."""
        self._waiting = False
        """Whether input was waiting when the last turn was over."""

    def next_turn(self, last_turn_ms: int, waited_ms: int) -> Iterator[GrantCredit]:
        """A turn begins. The last took `last_turn_ms`, and ended `waited_ms` ago. Yields grants of smaller windows."""
        debloater = self._debloater
        if debloater is None:
            return
        debloater.took(self._taken_bytes, self._taken_rows, last_turn_ms + (waited_ms if self._waiting else 0))
        self._taken_bytes = self._taken_rows = 0
        if not debloater.resize(self._gate.open_channels, self._pacer.fixed_ms, self._pacer.rows_min):
            return
        for channel in self._gate:
            shrinks = debloater.window_bytes < channel.window_bytes
            channel.window_bytes = debloater.window_bytes
            if shrinks and not channel.data_over:
                yield self.grant(channel)

    def taken(self, channel: InputChannel, rows: int) -> Iterator[GrantCredit]:
        """An element, or `rows` rows of a batch, was taken and processed. Yields the grant that is due, if any."""
        self._taken_bytes += channel.last_bytes
        self._taken_rows += rows
        if channel.credit_to_grant() is not None:
            yield self.grant(channel)

    def turn_over(self, waiting: bool) -> None:
        """The turn is over. `waiting`: whether more input is there."""
        self._waiting = waiting

    def grant(self, channel: InputChannel) -> GrantCredit:
        """What a channel has been granted in total, and its window."""
        return GrantCredit(self._attempt, channel.channel, channel.granted_bytes, channel.window_bytes)
