"""Coordinators that name no cause, or a wrong one. The oracle of causes has to notice it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers import event_log_writer
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.event_log_writer import CauseTracker, StoredFold
from tidegate.storage.ids import EventId
from tidegate.testing import Protocol

Patch = Callable[[], AbstractContextManager[Any]]


class NamesNoCause(CoordinatorDriver):
    """Breaks: what answers an order names the event from which the order followed. Here one kind of answer does not."""

    def take_in(self, event: co.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        super().take_in(event, None if isinstance(event, co.MetadataWritten) else cause, arrived_ms)


class NamesTheEventBefore(CoordinatorDriver):
    """Breaks: the cause is the event that made the order. Here it is the one before it."""

    def take_in(self, event: co.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        super().take_in(event, EventId(cause - 1) if cause else cause, arrived_ms)


class NamesWhatIsToCome(CoordinatorDriver):
    """Breaks: a cause comes before what it has brought about. Here a takeover has brought about itself."""

    def take_in(self, event: co.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        itself = isinstance(event, co.CoordinatorStarted)
        super().take_in(event, self.next_event if itself else cause, arrived_ms)


class CountsAnew(CoordinatorDriver):
    """Breaks: event numbers continue over coordinators. Here each coordinator begins at 0."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.next_event = EventId(0)


def _of_the_newest(self: CauseTracker, number: EventId, instruction: do.CoordinatorInstruction) -> None:
    _carried_out(self, EventId(number + 1), instruction)


_carried_out = CauseTracker.carried_out


def _without_orders(state: bytes, takeovers: Any, next_event: int, orders: object) -> StoredFold:
    return StoredFold(state, takeovers, next_event)


CAUSE_BREAKS: dict[str, tuple[int, Protocol]] = {
    "causes: what storage has written names none": (8, Protocol(coordinator=NamesNoCause)),
    "causes: the event before the right one is named": (8, Protocol(coordinator=NamesTheEventBefore)),
    "causes: an event is its own cause": (8, Protocol(coordinator=NamesWhatIsToCome)),
    "causes: a coordinator counts its events anew": (8, Protocol(coordinator=CountsAnew)),
}
"""Every such break of a host: its invariant, and the parts."""

CAUSE_PATCHES: dict[str, tuple[int, Patch]] = {
    "causes: an order follows from the event after": (
        8,
        lambda: patch.object(CauseTracker, "carried_out", _of_the_newest),
    ),
    "causes: a successor does not know what was asked": (
        8,
        lambda: patch.object(CauseTracker, "replayed", lambda *args: None),
    ),
    "causes: a fold of the log knows no orders": (
        8,
        lambda: patch.object(event_log_writer, "StoredFold", _without_orders),
    ),
}
"""Every such break of `CauseTracker`: its invariant, and the patch."""

CAUSE_FIXED: Mapping[str, Mapping[str, str | int]] = {
    rule: {"faults": "coordinator", "log": log}
    for rule, log in (
        ("causes: a coordinator counts its events anew", "long"),
        ("causes: a successor does not know what was asked", "long"),
        ("causes: a fold of the log knows no orders", "short"),
    )
}
"""Fixed values of the scenarios for these breaks: a coordinator has to take over."""
