"""Checks that a coordinator logs before it acts, and that each event of the log names its cause (invariant 8).

A crash between an action and its log entry is rare in a run, and damage from it is rarer still. So `Ledger` checks each
instruction: the event from which the state machine derived the instruction must be in the log, because a successor
would otherwise miss the instruction. The instruction must also have the number of that event.

Drivers find causes by the names of orders. `CausesOracle` uses observations instead: which instruction was executed
when I/O or a timer started, from which event it followed, and from which events the orders followed that tasks answer.
Rules:

- The events of a log are numbered without gaps, over all coordinators.
- An event names a cause that is in an earlier entry of the log.
- The cause is the event from which the order followed. If a coordinator and its successor both send tasks the same
  order, each of the two events is a cause.
- The notification that a checkpoint is complete is repeated. A coordinator may die after it has logged the event from
  which a notification follows, and before it sends it. The log does not show that, so that event is a cause too, of an
  answer to any other of these notifications.
- An externally induced source begins a checkpoint without an order. If the coordinator died before it sent an order,
  the cause is the event from which the order would have followed: the hooks were triggered.
- An answer to an order has a cause, and an event without an order has none. An answer that arrives after drivers have
  forgotten the order (`CHECKPOINTS_MAX`) may have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, Ordered
from tidegate.actors.drivers.event_log_writer import CHECKPOINTS_MAX
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.ids import EventId
from tidegate.testing.oracle import InvariantViolated

ORDERS_MAX = 2 * CHECKPOINTS_MAX
"""Number of remembered orders to tasks, of each kind. Drivers remember fewer."""
_Told = tuple[str, int]
"""The kind of an order to tasks, with its attempt, checkpoint or generation."""
_WITHOUT = (
    co.JobSubmitted,
    co.CoordinatorStarted,
    co.CheckpointRequested,
    co.CancelRequested,
    co.TaskFailed,
    co.ProcessGivenUp,
    co.StorageWentAway,
)
"""Classes of events that are not an answer to an order."""


class CausesOracle:
    """Checks the causes of the logged events of one job, over all of its coordinators."""

    def __init__(self) -> None:
        self._told: dict[str, dict[int, set[int]]] = {"deploy": {}, "trigger": {}, "complete": {}, "ask": {}}
        """Numbers of the events from which orders to tasks followed, by kind of order and by attempt, checkpoint or
        generation.
        """
        self._unsent: dict[int, set[int]] = {}
        """Numbers of the events from which the notification of a complete checkpoint followed, sent or not, by
        checkpoint.
        """
        self._hooks: dict[int, int] = {}
        """For each checkpoint with master hooks, the number of the event that the hooks were triggered."""
        self._next_index = self._next_event = 0
        """Number of the next entry and of the next event, as far as observed."""
        self._went_away: int | None = None
        """Number of the newest event that reports an outage of storage."""

    def carried_out(self, number: int, instruction: do.CoordinatorInstruction) -> None:
        """Records that an instruction is executed, which follows from event `number`."""
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

    def decided(self, number: int, instruction: do.CoordinatorInstruction) -> None:
        """Records that an instruction follows from event `number`, which the coordinator is about to log."""
        if isinstance(instruction, do.NotifyCompleted):
            self._unsent.setdefault(int(instruction.checkpoint_id), set()).add(number)
            if len(self._unsent) > ORDERS_MAX:
                del self._unsent[min(self._unsent)]

    def of_tasks(self, event: CoordinatorEvent) -> frozenset[int] | None:
        """Returns the numbers of the events that caused the order to which `event` is an answer.

        Returns None if tasks do not send events of this kind.
        """
        order = _answered_by_task(event)
        if order is not None:
            return frozenset(self._told[order[0]].get(order[1], ()))
        return frozenset() if isinstance(event, co.TaskReachedEndOfData | co.TaskFinished) else None

    def of_trigger(self, checkpoint_id: int) -> int | None:
        """Returns the number of the event that caused the trigger of a checkpoint, or None."""
        return max(self._told["trigger"].get(checkpoint_id, ()), default=None)

    def replayed(self, next_index: int, next_event: int) -> None:
        """Checks the position at which a coordinator that has read the log will continue it."""
        if next_index >= self._next_index:
            if next_event < self._next_event:
                raise InvariantViolated(
                    8, f"a new coordinator begins with event {next_event}, but the log ends with {self._next_event - 1}"
                )
            self._next_index = next_index
            self._next_event = next_event

    def logged(self, entry: LogEntry, true: Truths) -> None:
        """Checks an entry that was written to the log. `true` has the actual causes of the events that its coordinator
        has received.
        """
        number = entry.first_event
        if number is None or len(entry.causes) != len(entry.events):
            raise InvariantViolated(
                8, f"entry {entry.index} of the event log lacks event numbers, or the cause of an event"
            )
        if entry.index >= self._next_index:
            if number != self._next_event:
                raise InvariantViolated(
                    8, f"entry {entry.index} of the event log begins with event {number} instead of {self._next_event}"
                )
            self._next_index = entry.index + 1
            self._next_event = number + len(entry.events)
        for event, cause in zip(entry.events, entry.causes, strict=True):
            # Storage comes back while nothing is carried out. This is the only answer that does not wait for the log.
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
            raise InvariantViolated(8, f"{name} has the cause {cause} in the log, but no earlier entry has that event")
        causes = self._true_causes(event, true)
        if causes is None or cause in causes or (cause is None and (not causes or self._is_forgotten(event))):
            return
        if not causes and cause is not None and cause == self._induced_by(event):
            return
        if causes and isinstance(event, co.TaskFinished) and cause in self._unsent.get(event.covered_by or 0, ()):
            return
        raise InvariantViolated(
            8, f"{name} has the cause {cause} in the log, but was caused by {sorted(causes) or None}"
        )

    def _true_causes(self, event: CoordinatorEvent, true: Truths) -> frozenset[int] | None:
        if isinstance(event, _WITHOUT):
            return frozenset()
        if isinstance(event, co.StorageCameBack):
            return frozenset(() if self._went_away is None else (self._went_away,))
        return true.take(event)

    def _induced_by(self, event: CoordinatorEvent) -> int | None:
        """Returns the number of the event from which an order for the checkpoint of `event` would have followed, or
        None.
        """
        match event:
            case co.CheckpointAcknowledged(checkpoint_id=about) | co.CheckpointDeclined(checkpoint_id=about):
                return self._hooks.get(int(about))
        return None

    def _is_forgotten(self, event: CoordinatorEvent) -> bool:
        order = _answered_by_task(event)
        return order is not None and sum(about > order[1] for about in self._told[order[0]]) >= CHECKPOINTS_MAX


class Truths:
    """The actual causes of the events that one coordinator has received and not logged yet, in order of arrival."""

    def __init__(self) -> None:
        self._heard: deque[tuple[CoordinatorEvent, frozenset[int] | None]] = deque()

    def heard(self, event: CoordinatorEvent, causes: frozenset[int] | None) -> None:
        """Adds a received event with its causes.

        `causes` is None if the order that the event answers was not observed, for example because a test breaks the
        driver.
        """
        self._heard.append((event, causes))

    def take(self, event: CoordinatorEvent) -> frozenset[int] | None:
        """Returns the causes of an event that is logged, or None if unknown.

        Drops earlier events that are not logged.
        """
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


@dataclass(slots=True, eq=False)
class _Fact:
    """An event that the state machine has handled, with the instructions that followed.

    `number` is the number of the event in the log, or None before it is logged.
    """

    event: CoordinatorEvent
    instructions: Instructions
    number: int | None = None


Instructions = Sequence[do.CoordinatorInstruction]
CarriedOut = Callable[[do.CoordinatorInstruction, CoordinatorEvent, Instructions], None]


class Ledger:
    """Records the instructions of one coordinator's state machine, and which events are logged.

    `carried_out` is called with each executed instruction, the event from which it follows, and all instructions that
    follow from that event.
    """

    def __init__(self, causes: CausesOracle, note: Callable[..., None], carried_out: CarriedOut | None = None) -> None:
        """`note` adds a logged event to the trace, with its number and the number of its `cause`."""
        self.cause: int | None = None
        """Number of the event from which the coordinator's current action follows, or None if unknown."""
        self._causes = causes
        self._note = note
        self._carried_out = carried_out
        self._truths = Truths()
        self._answers: int | None = None
        self._waiting: dict[int, deque[_Fact]] = {}
        """Events that are not logged yet, by object id.

        A message that arrives twice is one event that is handled twice.
        """
        self._follows: dict[int, tuple[do.CoordinatorInstruction, _Fact]] = {}
        """Instructions that are not executed yet, with the event from which each follows, by object id."""
        self._hear: Callable[[CoordinatorEvent], None] | None = None

    def watch(self, host: CoordinatorDriver, machine: CoordinatorMachine, event_log: EventLog) -> None:
        """Starts observing a coordinator driver, its state machine and its event log."""
        decide = machine.handle
        log = event_log.append
        carry_out = host.carry_out
        perform = host.perform
        look_up = host.causes.of
        self._hear = host.handle

        def handle(event: CoordinatorEvent) -> list[do.CoordinatorInstruction]:
            instructions = decide(event)
            # Also where nothing follows. Else instructions of a second copy of a message would count for the first.
            fact = _Fact(event, instructions)
            self._waiting.setdefault(id(event), deque()).append(fact)
            self._follows |= {id(instruction): (instruction, fact) for instruction in instructions}
            return instructions

        def append(entry: LogEntry, *, look: bool = True) -> int:
            # Before the entry is written: it may be in the log even where this coordinator receives an error.
            for number, event in enumerate(entry.events, entry.first_event or 0):
                for instruction in self._instructions_of(event):
                    self._causes.decided(number, instruction)
            size_bytes = log(entry, look=look)
            self._causes.logged(entry, self._truths)
            for number, (event, cause) in enumerate(
                zip(entry.events, entry.causes, strict=True), entry.first_event or 0
            ):
                self._note("logs event", number, event, cause=cause)
                self._has_number(event, number)
            return size_bytes

        def stamped(ordered: Ordered) -> None:
            _, fact = self._follows.get(id(ordered.instruction), (None, None))
            if fact is not None and fact.number not in (None, ordered.cause):
                raise InvariantViolated(
                    8,
                    f"{type(ordered.instruction).__name__} carries the cause {ordered.cause}, but event {fact.number} "
                    "has caused it",
                )
            carry_out(ordered)

        def act(instruction: do.CoordinatorInstruction) -> None:
            before = self.cause
            self.cause = self.done(instruction)
            try:
                perform(instruction)
            finally:
                self.cause = before

        def of(event: CoordinatorEvent) -> EventId | None:
            named = look_up(event)
            answered = None if self._answers is None else frozenset((self._answers,))
            self._truths.heard(event, answered or self._causes.of_tasks(event))
            return named

        machine.handle = handle  # type: ignore[method-assign]
        event_log.append = append  # type: ignore[method-assign]
        host.carry_out = stamped  # type: ignore[method-assign]
        host.perform = act  # type: ignore[method-assign]
        host.causes.of = of  # type: ignore[method-assign]

    def _instructions_of(self, event: CoordinatorEvent) -> Instructions:
        """Returns the instructions that follow from an event that is not logged yet."""
        facts = self._waiting.get(id(event))
        return facts[0].instructions if facts else ()

    def _has_number(self, event: CoordinatorEvent, number: int) -> None:
        facts = self._waiting.get(id(event))
        if facts:
            facts.popleft().number = number
            if not facts:
                del self._waiting[id(event)]

    def hear(self, event: CoordinatorEvent, cause: int | None) -> None:
        """Passes the answer to an instruction to the coordinator. `cause` is the event that caused the instruction."""
        assert self._hear is not None
        self._answers = cause
        try:
            self._hear(event)
        finally:
            self._answers = None

    def done(self, instruction: do.CoordinatorInstruction) -> int | None:
        """Checks that an instruction may be executed, because its event is logged. Returns the number of the event, or
        None if unknown.
        """
        _, fact = self._follows.pop(id(instruction), (None, None))
        if fact is None:
            return None
        if fact.number is None:
            raise InvariantViolated(
                8,
                f"the coordinator executes {type(instruction).__name__} before it has logged the cause, "
                f"{type(fact.event).__name__}",
            )
        self._causes.carried_out(fact.number, instruction)
        if self._carried_out is not None:
            self._carried_out(instruction, fact.event, fact.instructions)
        return fact.number
