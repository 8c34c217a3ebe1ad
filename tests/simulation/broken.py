"""Protocols with one rule broken on purpose. The oracle has to see each of them, or its silence means nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.identity import ChannelId
from tidegate.actors.runtimes.coordinator_host import CoordinatorHost
from tidegate.actors.runtimes.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as task_do
from tidegate.actors.task.aligner import BarrierAligner
from tidegate.actors.task.inputs import InputChannel
from tidegate.actors.task.machine import TaskMachine
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state import StateTable
from tidegate.testing import Protocol


class _LeakyAligner(BarrierAligner):
    """Lets one element pass a blocked channel at each alignment."""

    def __init__(self, channels: frozenset[ChannelId]) -> None:
        super().__init__(channels)
        self._leaked: CheckpointId | None = None

    def blocks(self, channel: ChannelId) -> bool:
        return super().blocks(channel) and self._leaked == self.pending

    def leak(self, channel: ChannelId) -> bool:
        """Whether a blocked channel is being served."""
        if super().blocks(channel) and self._leaked != self.pending:
            self._leaked = self.pending
            return True
        return False


class PassesBlockedChannel(TaskMachine):
    """Breaks: nothing of a channel is processed between its barrier and the snapshot (invariant 2)."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        if descriptor.inputs:
            self._aligner: BarrierAligner = _LeakyAligner(frozenset(descriptor.inputs))

    def _process(self, channel: ChannelId, element: Any, at_ms: int) -> None:
        if isinstance(self._aligner, _LeakyAligner) and self._aligner.leak(channel) and hasattr(element, "num_rows"):
            self._process_batch(element)
        else:
            super()._process(channel, element, at_ms)


class SnapshotsOnFirstBarrier(TaskMachine):
    """Breaks: a snapshot waits for the barrier of every channel (invariant 3)."""

    def _process(self, channel: ChannelId, element: Any, at_ms: int) -> None:
        from tidegate.actors.elements import Barrier

        if isinstance(element, Barrier) and len(self._descriptor.inputs) > 1:
            seen = getattr(self, "_seen", 0)
            if element.checkpoint_id > seen:
                self._seen = element.checkpoint_id
                self._take_snapshot(element, at_ms)
        else:
            super()._process(channel, element, at_ms)


class AcceptsDuplicates(TaskMachine):
    """Breaks: an element that came before is dropped (invariant 1)."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        for channel in descriptor.inputs:
            self._inputs[channel].__class__ = _Gullible


class _Gullible(InputChannel):
    __slots__ = ()

    def accept(self, first_sequence: int, elements: Any) -> None:
        self.queue.extend(elements)
        self.arrived += len(elements)


class IgnoresGaps(TaskMachine):
    """Breaks: a gap in the sequence fails the task (invariant 1)."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        for channel in descriptor.inputs:
            self._inputs[channel].__class__ = _Careless


class _Careless(InputChannel):
    __slots__ = ()

    def accept(self, first_sequence: int, elements: Any) -> None:
        super().accept(min(first_sequence, self.arrived), elements)


class IgnoresCredit(TaskMachine):
    """Breaks: a sender sends only what it has credit for (invariant 10)."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        for edge in descriptor.outputs:
            for channel in edge.channels:
                self._outputs[channel].grant(2**60)


class AcknowledgesBeforeDurable(TaskEffects):
    """Breaks: a snapshot is acknowledged when it is durable. The file is never written (invariant 5)."""

    def persist(self, instruction: task_do.PersistSnapshot) -> ev.SnapshotPersisted | ev.SnapshotFailed:
        event = super().persist(instruction)
        if isinstance(event, ev.SnapshotPersisted) and event.handle is not None and event.handle.path is not None:
            store = self._open_store(self._context.root)
            _reliably(store, lambda: store.delete(event.handle.path))
        return event


class ForgetsPositions(TaskEffects):
    """Breaks: a restored source goes on where the snapshot was (invariant 9)."""

    def restore(self, restore: Any) -> ev.TaskRestored:
        restored = super().restore(restore)
        source = self._descriptor.source
        kept = tuple(t for t in restored.tables if source is None or t[0] != source.uid)
        return replace(restored, tables=kept)


class DropsKeyedState(TaskEffects):
    """Breaks: a restored operator has the state of its snapshot (invariant 9)."""

    def restore(self, restore: Any) -> ev.TaskRestored:
        restored = super().restore(restore)

        def empty(table: StateTable) -> StateTable:
            if not table.key_group_rows:
                return table
            return replace(table, rows=table.rows.slice(0, 0), key_group_rows=(0,) * len(table.key_group_rows))

        return replace(
            restored, tables=tuple((uid, tuple(empty(t) for t in tables)) for uid, tables in restored.tables)
        )


class CommitsOnAcknowledgement(CoordinatorHost):
    """Breaks: sinks commit when the checkpoint is complete. Here each acknowledgement commits (invariant 6)."""

    def handle(self, event: co.CoordinatorEvent) -> None:
        if isinstance(event, co.CheckpointAcknowledged) and event.state.committables:
            self._perform(do.CommitSinks(event.checkpoint_id, event.state.committables))
        super().handle(event)


class CompletesWithoutLast(CoordinatorHost):
    """Breaks: a checkpoint is complete when every task has acknowledged it (invariant 4)."""

    def _perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.WriteMetadata):
            metadata = instruction.metadata
            instruction = do.WriteMetadata(replace(metadata, subtasks=metadata.subtasks[:-1]))
        super()._perform(instruction)


class DeletesNewest(CoordinatorHost):
    """Breaks: what a retained checkpoint refers to is never deleted (invariant 5)."""

    def _perform(self, instruction: do.CoordinatorInstruction) -> None:
        super()._perform(instruction)
        if isinstance(instruction, do.NotifyCompleted) and not instruction.final:
            store = self._effects._open_store(self._effects._context.root)
            folder = self._effects._context.layout.checkpoint_dir(instruction.checkpoint_id)
            for name in [n for n in _reliably(store, lambda: store.list(folder)) if n != "_metadata"]:
                _reliably(store, lambda name=name: store.delete(f"{folder}/{name}"))


def _reliably(store: Any, action: Any) -> Any:
    disk = store._disk
    reliable, disk.reliable = disk.reliable, True
    try:
        return action()
    finally:
        disk.reliable = reliable


BROKEN = {
    "an element passes a blocked channel": Protocol(task_machine=PassesBlockedChannel),
    "a snapshot is taken at the first barrier": Protocol(task_machine=SnapshotsOnFirstBarrier),
    "duplicates are accepted": Protocol(task_machine=AcceptsDuplicates),
    "gaps are ignored": Protocol(task_machine=IgnoresGaps),
    "credit is ignored": Protocol(task_machine=IgnoresCredit),
    "acknowledged before the file is durable": Protocol(task_effects=AcknowledgesBeforeDurable),
    "positions are not restored": Protocol(task_effects=ForgetsPositions),
    "keyed state is not restored": Protocol(task_effects=DropsKeyedState),
    "sinks commit on acknowledgement": Protocol(coordinator=CommitsOnAcknowledgement),
    "complete without the last task": Protocol(coordinator=CompletesWithoutLast),
    "state of the newest checkpoint is deleted": Protocol(coordinator=DeletesNewest),
}
