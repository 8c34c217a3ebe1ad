"""Coordinators that break one rule: completing, committing, deleting, restoring, and being the only one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from without_faults import reliably

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.storage.checkpoints import permits
from tidegate.storage.checkpoints.event_log import EventLog, LogEntry
from tidegate.storage.checkpoints.permits import CommitPermit
from tidegate.storage.codec import encode
from tidegate.storage.files.envelope import seal
from tidegate.storage.ids import EventId
from tidegate.testing import Protocol


class CommitsOnAcknowledgement(CoordinatorDriver):
    """Breaks: sinks commit when the checkpoint is complete. Here each acknowledgement commits."""

    def handle(self, event: co.CoordinatorEvent) -> None:
        if isinstance(event, co.CheckpointAcknowledged) and event.state.committables:
            forged = CommitPermit(permits._DECIDED, event.checkpoint_id)
            self.perform(do.CommitSinks(event.checkpoint_id, event.state.committables, permit=forged))
        super().handle(event)


class CompletesWithoutLast(CoordinatorDriver):
    """Breaks: a checkpoint is complete when every task has acknowledged it."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.WriteMetadata):
            metadata = instruction.metadata
            instruction = replace(instruction, metadata=replace(metadata, subtasks=metadata.subtasks[:-1]))
        super().perform(instruction)


class CommitsHalf(CoordinatorDriver):
    """Breaks: everything that a completed checkpoint covers is committed."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.CommitSinks):
            instruction = replace(instruction, committables=instruction.committables[:-1])
        super().perform(instruction)


class NeverCommits(CoordinatorDriver):
    """Breaks: a sink commits the files that a completed checkpoint covers. Here it only reports the commit."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.CommitSinks):
            instruction = replace(instruction, committables=())
        super().perform(instruction)


class DeletesNewest(CoordinatorDriver):
    """Breaks: what a retained checkpoint refers to is never deleted."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        super().perform(instruction)
        if isinstance(instruction, do.NotifyCompleted):
            store = self.effects.open_store(self.effects.context.root)
            folder = self.effects.context.layout.checkpoint_dir(instruction.checkpoint_id)
            for name in reliably(store, "list", folder):
                if name != "_metadata":
                    reliably(store, "delete", f"{folder}/{name}")


class NeverDeletes(CoordinatorDriver):
    """Breaks: files without a reference are deleted. Here subsumed checkpoints stay."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.DiscardCheckpoint):
            self.handle(co.CheckpointDiscarded(self._port.now_ms(), instruction.checkpoint_id))
            return
        super().perform(instruction)


class RestoresAfresh(CoordinatorDriver):
    """Breaks: an attempt is restored from the newest completed checkpoint. Here every one starts anew."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.DeployAttempt):
            instruction = replace(instruction, restore=None)
        super().perform(instruction)


class NeverRestarts(CoordinatorDriver):
    """Breaks: a job whose task has failed starts again. Here a second attempt is decided on and never deployed."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if not (isinstance(instruction, do.DeployAttempt) and instruction.attempt > 0):
            super().perform(instruction)


class DeafToDoubt(CoordinatorDriver):
    """Breaks: the fate of a checkpoint is found out. Here a write that failed counts as never done."""

    def handle(self, event: co.CoordinatorEvent) -> None:
        if isinstance(event, co.MetadataWriteFailed):
            event = co.CheckpointVoided(event.at_ms, event.checkpoint_id)
        super().handle(event)


class TellsTooEarly(CoordinatorDriver):
    """Breaks: tasks are notified that a checkpoint is complete once it is. Here before its metadata is written."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.WriteMetadata):
            metadata = instruction.metadata
            tasks = self.machine.state.spec.tasks if self.machine.state.spec is not None else ()
            super().perform(do.NotifyCompleted(metadata.attempt, metadata.checkpoint_id, tasks))
        super().perform(instruction)


class _Overwriting(EventLog):
    """An event log that replaces an entry of the same number."""

    def append(self, entry: LogEntry, *, look: bool = True) -> int:
        return self._store.write(self._entry_path(entry.index), (seal(b"TGEVENT", 1, encode(entry)),))


class IgnoresFences(CoordinatorDriver):
    """Breaks: the first writer of a log entry wins. Here entries are overwritten."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        (event_log,) = (each for each in arguments if isinstance(each, EventLog))
        event_log.__class__ = _Overwriting


class HidesSinkFiles(CoordinatorDriver):
    """Breaks: a checkpoint records the sink files that it covers."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.WriteMetadata):
            metadata = instruction.metadata
            subtasks = tuple(replace(s, committables=()) for s in metadata.subtasks)
            instruction = replace(instruction, metadata=replace(metadata, subtasks=subtasks))
        super().perform(instruction)


class NeverAnswers(CoordinatorDriver):
    """Breaks: a request for a checkpoint is answered with its result."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if not isinstance(instruction, do.CompleteRequest):
            super().perform(instruction)


class KeepsFailedSavepoints(CoordinatorDriver):
    """Breaks: the folder of a savepoint that failed is deleted."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.DiscardSavepoint):
            self.handle(co.SavepointDiscarded(self._port.now_ms(), instruction.checkpoint_id))
            return
        super().perform(instruction)


class DropsWhatIsHeld(CoordinatorDriver):
    """Breaks: what changes the state is logged. Here an event without instructions is forgotten."""

    def take_in(self, event: co.CoordinatorEvent, cause: EventId | None, arrived_ms: int) -> None:
        before = len(self._instructions)
        super().take_in(event, cause, arrived_ms)
        if len(self._instructions) == before and self._log.in_charge and event in self._held[-1:]:
            self._held.pop()
            self._held_causes.pop()
            self.next_event = EventId(self.next_event - 1)


class ActsBeforeLogging(CoordinatorDriver):
    """Breaks: what follows from an event is done when the event is durable. Here it is done when that is asked for."""

    def append_held(self) -> None:
        instructions, self._instructions = self._instructions, []
        super().append_held()
        for ordered in instructions:
            self.carry_out(ordered)


COORDINATOR_BREAKS: dict[str, tuple[int, Protocol]] = {
    "complete without the last task": (4, Protocol(coordinator=CompletesWithoutLast)),
    "tasks are told of a completion too early": (4, Protocol(coordinator=TellsTooEarly)),
    "state of the newest checkpoint is deleted": (5, Protocol(coordinator=DeletesNewest)),
    "subsumed checkpoints stay": (5, Protocol(coordinator=NeverDeletes)),
    "a write that failed counts as never done": (5, Protocol(coordinator=DeafToDoubt)),
    "sinks commit on acknowledgement": (6, Protocol(coordinator=CommitsOnAcknowledgement)),
    "half of a checkpoint is committed": (6, Protocol(coordinator=CommitsHalf)),
    "a checkpoint hides its sink files": (6, Protocol(coordinator=HidesSinkFiles)),
    "requests are not answered": (7, Protocol(coordinator=NeverAnswers)),
    "the folder of a failed savepoint stays": (5, Protocol(coordinator=KeepsFailedSavepoints)),
    "nothing is committed": (6, Protocol(coordinator=NeverCommits)),
    "every attempt starts afresh": (7, Protocol(coordinator=RestoresAfresh)),
    "an attempt is never deployed again": (7, Protocol(coordinator=NeverRestarts)),
    "what is decided is done before it is logged": (8, Protocol(coordinator=ActsBeforeLogging)),
    "what is held is forgotten": (8, Protocol(coordinator=DropsWhatIsHeld)),
    "two coordinators write one log": (8, Protocol(coordinator=IgnoresFences)),
}
