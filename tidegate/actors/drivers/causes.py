"""`Causes`: finds the cause of each event that comes in.

Most events answer an order of the coordinator. The cause of such an event is the event from which the order followed.

Rules:

- An event of the log has a number, one more than the event before it. The number is the event's id.
- An order counts as given when it is carried out: then the event that it follows from is in the log. So a cause is
  always an earlier event, and no other coordinator has given its number to something else.
- What the machine ignores is not logged and has no number. No instruction follows from it, so nobody names it as cause.
- Like the machine's state it is a fold over the log. So a successor knows the orders of its predecessors, whose answers
  it may still get. What only the lost process could have heard (its timers, its I/O) is forgotten.
- It is bounded. An order that has one answer is forgotten with that; of orders to tasks the newest are kept. An answer
  that comes after `CHECKPOINTS_MAX` others has no cause, like an event that begins a chain; its words say what it
  answers.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.actors.coordinator.messages import causes
from tidegate.actors.coordinator.messages import events as ev
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.causes import OrderName
from tidegate.storage.ids import EventId

CHECKPOINTS_MAX = 200
"""Orders to tasks that are remembered, of each kind. What a task answers after so many others names no cause: the
checkpoint is long over, and such an answer changes little."""

StoredOrders = tuple[tuple[str, int | str, int], ...]
"""Kind, what it is about, and the event that it followed from."""


class Causes:
    """Of one job, for one coordinator. Nothing of it decides anything."""

    def __init__(self, stored: StoredOrders = ()) -> None:
        self._orders: dict[OrderName, EventId] = {}
        for kind, about, number in stored:
            self._remember((kind, about), EventId(number))

    def of(self, event: ev.CoordinatorEvent) -> EventId | None:
        """The cause of an event that has just come in; None if it begins something, or nobody remembers."""
        for order in causes.orders_answered(event):
            number = self._orders.get(order)
            if number is not None:
                if order[0] not in causes.BY_MANY:
                    del self._orders[order]
                return number
        return None

    def taken_in(self, number: EventId, event: ev.CoordinatorEvent) -> None:
        """This event has got this number."""
        if isinstance(event, ev.CoordinatorStarted):
            self._orders = {order: cause for order, cause in self._orders.items() if order[0] in causes.BY_MANY}
        elif isinstance(event, ev.StorageWentAway):
            self._remember(causes.STORAGE_AWAY, number)

    def carried_out(self, number: EventId, instruction: do.CoordinatorInstruction) -> None:
        """An instruction that follows from the event with this number goes out."""
        order = causes.order_named(instruction)
        if order is not None:
            self._remember(order, number)

    def replayed(
        self, number: EventId, event: ev.CoordinatorEvent, instructions: Iterable[do.CoordinatorInstruction]
    ) -> None:
        """What has been carried out, or would have been, when this event was logged."""
        self.of(event)
        self.taken_in(number, event)
        for instruction in instructions:
            self.carried_out(number, instruction)

    def dropped(self, timer: str) -> None:
        """A timer was dropped before it fired."""
        self._orders.pop(("timer", timer), None)

    def stored(self) -> StoredOrders:
        """What is remembered, to be kept with the fold of the log."""
        return tuple((kind, about, number) for (kind, about), number in self._orders.items())

    def _remember(self, order: OrderName, number: EventId) -> None:
        known = self._orders.pop(order, None) is not None
        self._orders[order] = number
        if order[0] in causes.BY_MANY and not known:
            same = [other for other in self._orders if other[0] == order[0]]
            for old in same[: max(0, len(same) - CHECKPOINTS_MAX)]:
                del self._orders[old]
