"""The oracle of causes: looks whether each event of the log names the event that has brought it about.

A host knows causes by the names of orders. This knows them by what was seen: which instruction was carried out when I/O
was started or a timer set, and from which event it followed; and from which events tasks were told what they answer.
Rules:

- The events of a log are numbered without holes, over all coordinators.
- An event names a cause that is in the log, in an entry before its own.
- The cause is the event from which the order followed. Tasks may be told the same thing by a coordinator and by its
  successor: then each of the two events has made the order.
- An externally induced source begins a checkpoint without being told. If no task was told of it because the coordinator
  died first, the cause is the event from which the order would have followed: that the hooks were triggered.
- What answers an order has a cause, and what nobody has asked for has none. Only what comes so late that hosts have
  forgotten the order (`CHECKPOINTS_MAX`) may be without.
"""

from __future__ import annotations

from collections import deque

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.event_log_writer import CHECKPOINTS_MAX
from tidegate.storage.checkpoints.event_log import LogEntry
from tidegate.testing.oracle.violation import InvariantViolated

ORDERS_MAX = 2 * CHECKPOINTS_MAX
"""Orders to tasks that are remembered, of each kind: more than hosts remember."""
_Told = tuple[str, int]
"""What tasks are told, and of which attempt or checkpoint."""
_WITHOUT = (
    co.JobSubmitted,
    co.CoordinatorStarted,
    co.CheckpointRequested,
    co.CancelRequested,
    co.TaskFailed,
    co.ProcessGivenUp,
    co.StorageWentAway,
)
"""What nobody has asked for."""


class CausesOracle:
    """Of one job, over all of its coordinators."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, set[int]]] = {"deploy": {}, "trigger": {}, "complete": {}, "ask": {}}
        """From which events tasks were told something, by its kind, and by attempt or checkpoint."""
        self._hooks: dict[int, int] = {}
        """Of checkpoints with hooks: the event that says that these were triggered."""
        self._next_index = self._next_event = 0
        """Where the log goes on, as far as is known."""
        self._went_away: int | None = None
        """The newest event that says so of storage."""

    def carried_out(self, number: int, instruction: do.CoordinatorInstruction) -> None:
        """An instruction that follows from the event with this number goes out."""
        match instruction:
            case do.DeployAttempt(attempt=about):
                kind = "deploy"
            case do.AskTasks(generation=about):
                kind = "ask"
            case do.TriggerCheckpoint(checkpoint_id=about):
                kind = "trigger"
            case do.NotifyCompleted(checkpoint_id=about):
                kind = "complete"
            case _:
                return
        told = self._told[kind]
        told.setdefault(int(about), set()).add(number)
        if len(told) > ORDERS_MAX:
            del told[min(told)]

    def of_tasks(self, event: CoordinatorEvent) -> frozenset[int] | None:
        """The events from which a task was told what it answers with this; None if tasks do not say such things."""
        order = _answered_by_task(event)
        if order is not None:
            return frozenset(self._told[order[0]].get(order[1], ()))
        return frozenset() if isinstance(event, co.TaskReachedEndOfData | co.TaskFinished) else None

    def of_trigger(self, checkpoint_id: int) -> int | None:
        """The event from which a checkpoint was triggered."""
        return max(self._told["trigger"].get(checkpoint_id, ()), default=None)

    def replayed(self, next_index: int, next_event: int) -> None:
        """A coordinator has read the log, and wants to go on there."""
        if next_index >= self._next_index:
            if next_event < self._next_event:
                raise InvariantViolated(8, f"the next event is {next_event}, and {self._next_event - 1} is in the log")
            self._next_index, self._next_event = next_index, next_event

    def logged(self, entry: LogEntry, true: Truths) -> None:
        """An entry is in the log. `true`: what the coordinator that has written it could know of causes."""
        number = entry.first_event
        if number is None or len(entry.causes) != len(entry.events):
            raise InvariantViolated(8, f"entry {entry.index} has no numbers, or not a cause for each event")
        if entry.index >= self._next_index:
            if number != self._next_event:
                raise InvariantViolated(8, f"the next event is {self._next_event}, and was given the number {number}")
            self._next_index, self._next_event = entry.index + 1, number + len(entry.events)
        for event, cause in zip(entry.events, entry.causes, strict=True):
            # Storage comes back while nothing is carried out: it is the one answer that does not wait for the log.
            before = number if isinstance(event, co.StorageCameBack) else entry.first_event or 0
            self._check(event, number, cause, before, true)
            if isinstance(event, co.StorageWentAway):
                self._went_away = number
            if isinstance(event, co.HooksTriggered):
                self._hooks[int(event.checkpoint_id)] = number
                if len(self._hooks) > ORDERS_MAX:
                    del self._hooks[min(self._hooks)]
            number += 1

    def _check(self, event: CoordinatorEvent, number: int, cause: int | None, before: int, true: Truths) -> None:
        name = f"event {number}, {type(event).__name__},"
        if cause is not None and not 0 <= cause < before:
            raise InvariantViolated(8, f"{name} names {cause} as its cause, which is not in an entry before it")
        causes = self._true_causes(event, true)
        if causes is None or cause in causes or (cause is None and (not causes or self._is_forgotten(event))):
            return
        if not causes and cause is not None and cause == self._induced_by(event):
            return
        raise InvariantViolated(8, f"{name} names {cause} as its cause, and it was {sorted(causes) or None}")

    def _true_causes(self, event: CoordinatorEvent, true: Truths) -> frozenset[int] | None:
        if isinstance(event, _WITHOUT):
            return frozenset()
        if isinstance(event, co.StorageCameBack):
            return frozenset(() if self._went_away is None else (self._went_away,))
        return true.take(event)

    def _induced_by(self, event: CoordinatorEvent) -> int | None:
        """The event from which tasks would have been told of the checkpoint that this one speaks of."""
        match event:
            case co.CheckpointAcknowledged(checkpoint_id=about) | co.CheckpointDeclined(checkpoint_id=about):
                return self._hooks.get(int(about))
        return None

    def _is_forgotten(self, event: CoordinatorEvent) -> bool:
        order = _answered_by_task(event)
        return order is not None and sum(about > order[1] for about in self._told[order[0]]) >= CHECKPOINTS_MAX


class Truths:
    """The causes of what one coordinator has heard and not yet logged, in the order in which it came."""

    def __init__(self) -> None:
        self._heard: deque[tuple[CoordinatorEvent, frozenset[int] | None]] = deque()

    def heard(self, event: CoordinatorEvent, causes: frozenset[int] | None) -> None:
        """An event has come. None: what it answers was not seen, as when a test breaks the host."""
        self._heard.append((event, causes))

    def take(self, event: CoordinatorEvent) -> frozenset[int] | None:
        """The causes of an event that is logged. What came before it and is not logged never will be."""
        if all(heard is not event for heard, _ in self._heard):
            return None
        while True:
            heard, causes = self._heard.popleft()
            if heard is event:
                return causes


def _answered_by_task(event: CoordinatorEvent) -> _Told | None:
    match event:
        case co.TaskReady(attempt=about) | co.RestoreDelayed(attempt=about):
            return "deploy", int(about)
        case co.CheckpointDamaged(attempt=about):
            return "deploy", int(about)
        case co.TaskAnswered(generation=about):
            return "ask", int(about)
        case co.CheckpointAcknowledged(checkpoint_id=about) | co.CheckpointDeclined(checkpoint_id=about):
            return "trigger", int(about)
        case co.TaskReachedEndOfData(stop=int(about)):
            return "trigger", int(about)
        case co.TaskFinished(covered_by=int(about)):
            return "complete", int(about)
    return None
