"""Tasks that break one rule: channels, barriers, in-flight data, what is restored, and finishing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from without_faults import reliably

from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.barrier_aligner import BarrierAligner, BarrierInput, BarrierState, Step
from tidegate.actors.task.barrier_handler import BarrierTracker, Outcome
from tidegate.actors.task.input_gate import InputChannel
from tidegate.actors.task.output_gate import OutputChannel
from tidegate.actors.task.subtask_checkpoints import ChannelRecorder
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Barrier, Element
from tidegate.storage.checkpoints.metadata import StateKind
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import StateTable
from tidegate.testing import Protocol

# --- channels ---------------------------------------------------------------------------------------------------------


class _Gullible(InputChannel):
    __slots__ = ()

    def accept(self, first_sequence: int, elements: Sequence[Element]) -> Sequence[Element]:
        self.queue.extend(elements)
        self.arrived += len(elements)
        return elements


class _Careless(InputChannel):
    __slots__ = ()

    def accept(self, first_sequence: int, elements: Sequence[Element]) -> Sequence[Element]:
        return super().accept(min(first_sequence, self.arrived), elements)


class _Forgetful(InputChannel):
    """The fifth element of each channel gets lost between the queue and the operators."""

    __slots__ = ()

    def take(self, *args: Any) -> Element:
        if self.taken == 4 and self.queue and isinstance(self.queue[0], pa.RecordBatch) and len(self.queue) > 1:
            super().take()
        return super().take(*args)


class _Lossy(InputChannel):
    """The last row of what was put together gets lost."""

    __slots__ = ()

    def take_merged(self, rows_max: int) -> pa.RecordBatch | None:
        batch = super().take_merged(rows_max)
        return None if batch is None else batch.slice(0, batch.num_rows - 1)


class _Grasping(InputChannel):
    """Puts a batch together with the one behind the next element."""

    __slots__ = ()

    def take_merged(self, rows_max: int) -> pa.RecordBatch | None:
        if len(self.queue) > 2 and isinstance(self.queue[2], pa.RecordBatch):
            self.queue[1], self.queue[2] = self.queue[2], self.queue[1]
        return super().take_merged(rows_max)


class _Unbounded(OutputChannel):
    __slots__ = ()

    @property
    def over_limit(self) -> bool:
        return False


def _with_inputs(kind: type[InputChannel]) -> Callable[..., TaskMachine]:
    def make(descriptor: Any) -> TaskMachine:
        machine = TaskMachine(descriptor)
        for channel in machine.inputs:
            channel.__class__ = kind
        return machine

    return make


def _ignores_credit(descriptor: Any) -> TaskMachine:
    machine = TaskMachine(descriptor)
    for channel in machine.outputs.channels.values():
        channel.grant(2**60, 2**60)
    return machine


def _ignores_limits(descriptor: Any) -> TaskMachine:
    machine = TaskMachine(descriptor)
    for channel in machine.outputs.channels.values():
        channel.__class__ = _Unbounded
    return machine


# --- barriers ---------------------------------------------------------------------------------------------------------

Act = Callable[[BarrierAligner, Step], Outcome]


class _Tabled(BarrierAligner):
    """An aligner with some entries of its transition table replaced."""

    changes: Mapping[tuple[BarrierState, BarrierInput], Act]

    def apply(self, given: BarrierInput, step: Step) -> Outcome:
        act = self.changes.get((self._state, given))
        return super().apply(given, step) if act is None else act(self, step)


def _with_table(changes: Mapping[tuple[BarrierState, BarrierInput], Act]) -> Callable[..., TaskMachine]:
    def make(descriptor: Any) -> TaskMachine:
        machine = TaskMachine(descriptor)
        handler = machine.checkpoints.handler
        if isinstance(handler, BarrierAligner):
            handler.__class__ = _Tabled
            handler.changes = changes  # type: ignore[attr-defined]
        return machine

    return make


def _snapshot_at_once(aligner: BarrierAligner, step: Step) -> Outcome:
    assert step.barrier is not None
    aligner.begin(step, BarrierState.ALIGNING)
    aligner.mark_over(step.checkpoint_id)
    return Outcome(snapshot=step.barrier)


def _ignore(aligner: BarrierAligner, step: Step) -> Outcome:
    return Outcome()


def _never_blocks(descriptor: Any) -> TaskMachine:
    machine = TaskMachine(descriptor)
    machine.checkpoints.blocks = lambda channel: False  # type: ignore[method-assign]
    return machine


class _Hasty(BarrierTracker):
    """At-least-once: counts the first barrier for all."""

    def _count(self, barrier: Barrier, at_ms: int, channel: ChannelId | None) -> Outcome:
        if self._is_over(barrier.checkpoint_id):
            return Outcome()
        self._close(barrier.checkpoint_id)
        return Outcome(snapshot=barrier)


def _hasty_tracker(descriptor: Any) -> TaskMachine:
    machine = TaskMachine(descriptor)
    if isinstance(machine.checkpoints.handler, BarrierTracker):
        machine.checkpoints.handler.__class__ = _Hasty
    return machine


_S, _I = BarrierState, BarrierInput
_SNAPSHOT_FIRST: dict[tuple[BarrierState, BarrierInput], Act] = {(_S.IDLE, _I.TAKEN): _snapshot_at_once}
_STUCK_ALIGNING: dict[tuple[BarrierState, BarrierInput], Act] = {(_S.ALIGNING, _I.TAKEN): _ignore}
_NEVER_OVERTAKES: dict[tuple[BarrierState, BarrierInput], Act] = {
    (_S.IDLE, _I.OVERTAKING): _ignore,
    (_S.IDLE, _I.TIMEOUT): _ignore,
}
_ENDS_ARE_IGNORED: dict[tuple[BarrierState, BarrierInput], Act] = {
    (state, _I.ENDED): _ignore for state in (_S.IDLE, _S.TRIGGERED, _S.ALIGNING)
}
_TRIGGERED_AT_ONCE: dict[tuple[BarrierState, BarrierInput], Act] = {(_S.IDLE, _I.TRIGGER): _snapshot_at_once}


# --- in-flight data ---------------------------------------------------------------------------------------------------


class _NoInputs(ChannelRecorder):
    def input_waits(self, channel: ChannelId, batches: Any, recovered: int, barrier_arrived: bool) -> None:
        super().input_waits(channel, (), 0, barrier_arrived)


class _NoLaterInputs(ChannelRecorder):
    def arrived(self, channel: ChannelId, elements: Any) -> None:
        super().arrived(channel, [e for e in elements if not isinstance(e, pa.RecordBatch)])


class _NoOutputs(ChannelRecorder):
    def output_overtaken(self, channel: ChannelId, batches: Any) -> None:
        super().output_overtaken(channel, ())


class _NotAgain(ChannelRecorder):
    def input_waits(self, channel: ChannelId, batches: Any, recovered: int, barrier_arrived: bool) -> None:
        super().input_waits(channel, batches[recovered:], 0, barrier_arrived)


def _with_recorder(kind: type[ChannelRecorder]) -> Callable[..., TaskMachine]:
    def make(descriptor: Any) -> TaskMachine:
        machine = TaskMachine(descriptor)
        checkpoints = machine.checkpoints
        record, send = checkpoints.record_inputs, checkpoints.send_barrier

        def record_inputs(recorder: ChannelRecorder) -> None:
            recorder.__class__ = kind
            record(recorder)

        def send_barrier(barrier: Barrier, recorder: ChannelRecorder, at_ms: int) -> bool:
            recorder.__class__ = kind
            return send(barrier, recorder, at_ms)

        checkpoints.record_inputs = record_inputs  # type: ignore[method-assign]
        checkpoints.send_barrier = send_barrier  # type: ignore[method-assign]
        return machine

    return make


# --- finishing --------------------------------------------------------------------------------------------------------


class _LeavesAtOnce(TaskMachine):
    """Breaks: a task whose operators have finished waits for a checkpoint that covers that."""

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        self.covered_by = self.covered_by or CheckpointId(1)
        return super().handle(event)


class _HidesTheEnd(TaskMachine):
    """Breaks: a checkpoint records which operators had finished."""

    def handle(self, event: ev.TaskEvent) -> list[do.TaskInstruction]:
        return [
            replace(i, state=replace(i.state, finished=False)) if isinstance(i, do.Acknowledge) else i
            for i in super().handle(event)
        ]


class _EndsTooEarly(TaskMachine):
    """Breaks: data has ended when it has ended on every channel."""

    def __init__(self, descriptor: Any) -> None:
        super().__init__(descriptor)
        self._endings.__class__ = _HastyEndings


def _hasty_endings() -> type[Any]:
    from tidegate.actors.task.task_machine import InputEndings

    class Hasty(InputEndings):
        @property
        def data_over(self) -> bool:
            return len(self._data_open) < len(self._indices)

    return Hasty


_HastyEndings = _hasty_endings()


# --- files and what is restored ---------------------------------------------------------------------------------------


class AcknowledgesBeforeDurable(TaskEffects):
    """Breaks: a snapshot is acknowledged when it is durable. The file is never written."""

    def persist(self, instruction: do.PersistSnapshot, *args: Any) -> Any:
        event = super().persist(instruction, *args)
        if isinstance(event, ev.SnapshotPersisted) and event.handle is not None and event.handle.path is not None:
            reliably(self._open_store(self._context.root), "delete", event.handle.path)
        return event


class LosesChannelFiles(TaskEffects):
    """Breaks: the in-flight data of a complete checkpoint is durable."""

    def persist_channel_state(self, instruction: do.PersistChannelState) -> Any:
        event = super().persist_channel_state(instruction)
        if isinstance(event, ev.ChannelStatePersisted) and event.handle is not None and event.handle.path is not None:
            reliably(self._open_store(self._context.root), "delete", event.handle.path)
        return event


class LosesDataFiles(TaskEffects):
    """Breaks: a sink file is durable before it is acknowledged."""

    def stage(self, instruction: do.StageFile) -> Any:
        event = super().stage(instruction)
        if isinstance(event, ev.FileStaged):
            reliably(self._open_store(self._tables[instruction.uid]), "delete", event.file.path)
        return event


class _Restores(TaskEffects):
    """Restores, and changes what was restored."""

    change: Callable[[TaskEffects, ev.TaskRestored], ev.TaskRestored]

    def restore(self, restore: Any) -> ev.TaskRestored | ev.DamageFound:
        restored = super().restore(restore)
        return type(self).change(self, restored) if isinstance(restored, ev.TaskRestored) else restored


def restoring(change: Callable[[Any, ev.TaskRestored], ev.TaskRestored]) -> type[TaskEffects]:
    """Effects that restore something else."""
    return type("Restoring", (_Restores,), {"change": staticmethod(change)})


def _no_positions(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    source = effects.descriptor.source
    return replace(restored, tables=tuple(t for t in restored.tables if source is None or t[0] != source.uid))


def _no_keyed_state(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    def empty(table: StateTable) -> StateTable:
        return table if table.kind is not StateKind.KEYED else replace(table, rows=table.rows.slice(0, 0))

    return replace(restored, tables=tuple((uid, tuple(empty(t) for t in tables)) for uid, tables in restored.tables))


def _no_in_flight(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    return replace(restored, in_flight=())


def _in_flight_twice(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    return replace(restored, in_flight=tuple((channel, batches * 2) for channel, batches in restored.in_flight))


def _nothing_finished(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    return replace(restored, finished=False, tables=() if restored.finished else restored.tables)


TASK_BREAKS: dict[str, tuple[int, Protocol]] = {
    "duplicates are accepted": (1, Protocol(task_machine=_with_inputs(_Gullible))),
    "gaps are ignored": (1, Protocol(task_machine=_with_inputs(_Careless))),
    "an element is skipped": (1, Protocol(task_machine=_with_inputs(_Forgetful))),
    "a row is lost where batches are put together": (1, Protocol(task_machine=_with_inputs(_Lossy))),
    "batches are put together over a barrier": (1, Protocol(task_machine=_with_inputs(_Grasping))),
    "an element passes a blocked channel": (2, Protocol(task_machine=_never_blocks)),
    "a snapshot is taken at the first barrier": (3, Protocol(task_machine=_with_table(_SNAPSHOT_FIRST))),
    "at-least-once takes its snapshot at the first barrier": (3, Protocol(task_machine=_hasty_tracker)),
    "a trigger does not wait for channels to end": (3, Protocol(task_machine=_with_table(_TRIGGERED_AT_ONCE))),
    "what waits in an input is not in flight": (3, Protocol(task_machine=_with_recorder(_NoInputs))),
    "what arrives before the last barrier is not in flight": (3, Protocol(task_machine=_with_recorder(_NoLaterInputs))),
    "what is overtaken in an output is not in flight": (3, Protocol(task_machine=_with_recorder(_NoOutputs))),
    "restored in-flight data is not in flight again": (3, Protocol(task_machine=_with_recorder(_NotAgain))),
    "the second barrier is ignored": (7, Protocol(task_machine=_with_table(_STUCK_ALIGNING))),
    "a barrier that overtakes is ignored": (7, Protocol(task_machine=_with_table(_NEVER_OVERTAKES))),
    "a channel that ends is waited for": (7, Protocol(task_machine=_with_table(_ENDS_ARE_IGNORED))),
    "credit is ignored": (10, Protocol(task_machine=_ignores_credit)),
    "output queues have no limit": (10, Protocol(task_machine=_ignores_limits)),
    "a task leaves before its final checkpoint": (4, Protocol(task_machine=_LeavesAtOnce)),
    "a checkpoint hides what has finished": (6, Protocol(task_machine=_HidesTheEnd)),
    "data ends with the first channel": (7, Protocol(task_machine=_EndsTooEarly)),
    "acknowledged before the file is durable": (5, Protocol(task_effects=AcknowledgesBeforeDurable)),
    "in-flight data is acknowledged and not durable": (5, Protocol(task_effects=LosesChannelFiles)),
    "sink files are acknowledged and not durable": (5, Protocol(task_effects=LosesDataFiles)),
    "positions are not restored": (9, Protocol(task_effects=restoring(_no_positions))),
    "keyed state is not restored": (9, Protocol(task_effects=restoring(_no_keyed_state))),
    "in-flight data is not restored": (9, Protocol(task_effects=restoring(_no_in_flight))),
    "in-flight data is restored twice": (9, Protocol(task_effects=restoring(_in_flight_twice))),
    "operators that had finished run again": (9, Protocol(task_effects=restoring(_nothing_finished))),
}
