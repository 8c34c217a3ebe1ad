"""Watches that a coordinator logs first and acts afterwards: what it does follows from events that are durable.

A crash in between is rare in a run, and its damage rarer still. So this looks at each instruction: the event from which
the machine has derived it is in the log, or else a successor would know nothing of what was done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.messages import instructions as do
from tidegate.actors.coordinator.messages.events import CoordinatorEvent
from tidegate.actors.hosts.coordinator.coordinator_host import CoordinatorHost
from tidegate.simulation.oracle.violation import InvariantViolated
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry

Instructions = Sequence[do.CoordinatorInstruction]
CarriedOut = Callable[[do.CoordinatorInstruction, CoordinatorEvent, Instructions], None]


class Ledger:
    """What the machine of one coordinator incarnation has decided, and what of it is logged.

    `carried_out` is told of each instruction that is carried out, what it follows from, and what follows beside it.
    """

    def __init__(self, carried_out: CarriedOut | None = None) -> None:
        self._carried_out = carried_out
        self._waiting: dict[int, CoordinatorEvent] = {}
        """Events that are not logged, by identity."""
        self._follows: dict[int, tuple[do.CoordinatorInstruction, CoordinatorEvent, Instructions]] = {}
        """Instructions that are not carried out, what they follow from, and all that follows from that."""

    def watch(self, host: CoordinatorHost, machine: CoordinatorMachine, event_log: EventLog) -> None:
        """Follow what a host does from now on."""
        decide, log, perform = machine.handle, event_log.append, host._perform

        def handle(event: CoordinatorEvent) -> list[do.CoordinatorInstruction]:
            instructions = decide(event)
            if instructions:
                self._waiting[id(event)] = event
                self._follows |= {id(instruction): (instruction, event, instructions) for instruction in instructions}
            return instructions

        def append(entry: LogEntry, *, look: bool = True) -> int:
            size_bytes = log(entry, look=look)
            for event in entry.events:
                self._waiting.pop(id(event), None)
            return size_bytes

        def act(instruction: do.CoordinatorInstruction) -> None:
            self.done(instruction)
            perform(instruction)

        machine.handle = handle  # type: ignore[method-assign]
        event_log.append = append  # type: ignore[method-assign]
        host._perform = act  # type: ignore[method-assign]

    def done(self, instruction: do.CoordinatorInstruction) -> None:
        """An instruction is carried out."""
        known = self._follows.pop(id(instruction), None)
        if known is None:
            return
        if id(known[1]) in self._waiting:
            raise InvariantViolated(
                8, f"{type(instruction).__name__} is carried out, and {type(known[1]).__name__} is not logged yet"
            )
        if self._carried_out is not None:
            self._carried_out(*known)
