"""Watches that a coordinator logs first and acts afterwards: what it does follows from events that are durable.

A crash in between is rare in a run, and its damage rarer still. So this looks at each instruction: the event from which
the machine has derived it is in the log, or else a successor would know nothing of what was done. And the instruction
is stamped with the number of that event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver, Ordered
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.ids import EventId
from tidegate.testing.oracle.decisions.causes import CausesOracle, Truths
from tidegate.testing.oracle.violation import InvariantViolated


@dataclass(slots=True, eq=False)
class _Fact:
    """An event that the machine has taken in, and what follows from it.

    `number`: by which the log knows it; None while it is not there.
    """

    event: CoordinatorEvent
    instructions: Instructions
    number: int | None = None


Instructions = Sequence[do.CoordinatorInstruction]
CarriedOut = Callable[[do.CoordinatorInstruction, CoordinatorEvent, Instructions], None]


class Ledger:
    """What the machine of one coordinator incarnation has decided, and what of it is logged.

    `carried_out` is told of each instruction that is carried out, what it follows from, and what follows beside it.
    """

    def __init__(self, causes: CausesOracle, note: Callable[..., None], carried_out: CarriedOut | None = None) -> None:
        """`note` adds an event that is logged, its number and (`cause`) that of its cause to the trace."""
        self.cause: int | None = None
        """The event from which follows what the coordinator is doing now; None if that is not known."""
        self._causes = causes
        self._note = note
        self._carried_out = carried_out
        self._truths = Truths()
        self._answers: int | None = None
        self._waiting: dict[int, deque[_Fact]] = {}
        """Events that are not logged, by identity: a message that comes twice is one event, taken in twice."""
        self._follows: dict[int, tuple[do.CoordinatorInstruction, _Fact]] = {}
        """Instructions that are not carried out, and what they follow from."""
        self._hear: Callable[[CoordinatorEvent], None] | None = None

    def watch(self, host: CoordinatorDriver, machine: CoordinatorMachine, event_log: EventLog) -> None:
        """Follow what a host does from now on."""
        decide, log, carry_out, perform = machine.handle, event_log.append, host._carry_out, host._perform
        look_up = host._causes.of
        self._hear = host.handle

        def handle(event: CoordinatorEvent) -> list[do.CoordinatorInstruction]:
            instructions = decide(event)
            # Also where nothing follows: what follows from the second copy of a message is not taken for the first's.
            fact = _Fact(event, instructions)
            self._waiting.setdefault(id(event), deque()).append(fact)
            self._follows |= {id(instruction): (instruction, fact) for instruction in instructions}
            return instructions

        def append(entry: LogEntry, *, look: bool = True) -> int:
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
                    f"{type(ordered.instruction).__name__} is stamped with event {ordered.cause}, "
                    f"and follows from event {fact.number}",
                )
            carry_out(ordered)

        def act(instruction: do.CoordinatorInstruction) -> None:
            before, self.cause = self.cause, self.done(instruction)
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
        host._carry_out = stamped  # type: ignore[method-assign]
        host._perform = act  # type: ignore[method-assign]
        host._causes.of = of  # type: ignore[method-assign]

    def _has_number(self, event: CoordinatorEvent, number: int) -> None:
        facts = self._waiting.get(id(event))
        if facts:
            facts.popleft().number = number
            if not facts:
                del self._waiting[id(event)]

    def hear(self, event: CoordinatorEvent, cause: int | None) -> None:
        """The coordinator hears the answer to an instruction that followed from the event with this number."""
        assert self._hear is not None
        self._answers = cause
        try:
            self._hear(event)
        finally:
            self._answers = None

    def done(self, instruction: do.CoordinatorInstruction) -> int | None:
        """An instruction is carried out; returns the number of the event that it follows from, if that was seen."""
        _, fact = self._follows.pop(id(instruction), (None, None))
        if fact is None:
            return None
        if fact.number is None:
            raise InvariantViolated(
                8, f"{type(instruction).__name__} is carried out, and {type(fact.event).__name__} is not logged yet"
            )
        self._causes.carried_out(fact.number, instruction)
        if self._carried_out is not None:
            self._carried_out(instruction, fact.event, fact.instructions)
        return fact.number
