"""Rules of incremental checkpoints, broken: what is built on what, what layers hold, how long shared files stay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from broken_tasks import restoring

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.actors.drivers.task_effects import TaskEffects
from tidegate.actors.task import events as ev
from tidegate.actors.task.incremental_base import IncrementalBase, IncrementalBases
from tidegate.actors.task.snapshots import SnapshotPart, TaskSnapshot
from tidegate.protocol.stream_elements import Barrier
from tidegate.recovery import deletion
from tidegate.state.columnar.change_tracking import DirtySlots
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.files.store import Store
from tidegate.storage.state.snapshot import StateTable
from tidegate.testing import Protocol

Patch = Callable[[], AbstractContextManager[Any]]


# --- how long files stay ----------------------------------------------------------------------------------------------


class _Deletes(CoordinatorDriver):
    """Deletes shared files of its own accord when a checkpoint is complete."""

    def _needed(self) -> set[int]:
        raise NotImplementedError

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        super().perform(instruction)
        if not isinstance(instruction, do.NotifyCompleted):
            return
        references = self.machine.state.shared.references
        kept = {path for number in self._needed() for path in references.get(number, ())}  # type: ignore[call-overload]
        store: Any = self.effects.open_store(self.effects.context.root)
        disk = store.disk
        reliable, disk.reliable = disk.reliable, True
        for path in {path for paths in references.values() for path in paths} - kept:
            store.delete(path)
        disk.reliable = reliable


class ForgetsWhatIsBuiltOn(_Deletes):
    """Breaks: what a pending checkpoint is built on stays. Here it goes with the checkpoint that is subsumed."""

    def _needed(self) -> set[int]:
        return {int(c.checkpoint_id) for c in self.machine.state.completed}


class CountsTheNewestOnly(_Deletes):
    """Breaks: a file stays while any checkpoint refers to it."""

    def _needed(self) -> set[int]:
        state = self.machine.state
        newest = {int(c.checkpoint_id) for c in state.completed[-1:]}
        return newest | {int(p.base) for p in state.pending.values() if p.base is not None}


class KeepsSharedFiles(CoordinatorDriver):
    """Breaks: a file goes with the last checkpoint that refers to it. Here it waits for the sweep."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.DiscardCheckpoint):
            instruction = replace(instruction, shared=())
        super().perform(instruction)


def _sweeps_all(store: Store, layout: CheckpointLayout, referenced: set[str]) -> None:
    store.delete_tree(layout.shared_dir())


# --- what is built on what --------------------------------------------------------------------------------------------

_begin = IncrementalBases.begin
_close = DirtySlots.close


def _builds_on_its_newest(self: IncrementalBases, barrier: Barrier, *args: Any) -> Any:
    newest = max(self._known, default=None)
    return _begin(self, replace(barrier, base=newest), *args)


def _changes_of_one(self: DirtySlots, checkpoint_id: Any, base: Any) -> Any:
    return _close(self, checkpoint_id, base)[-1:]


def _top_alone(self: TaskSnapshot) -> IncrementalBase:
    state = self.written[SnapshotPart.STATE]
    return IncrementalBase(self.checkpoint_id, () if state.layer is None else (state.layer,), state.native)


# --- what is restored -------------------------------------------------------------------------------------------------


def _changed(restored: ev.TaskRestored, change: Callable[[tuple[StateTable, ...]], Any]) -> ev.TaskRestored:
    return replace(restored, tables=tuple((uid, tuple(change(tables))) for uid, tables in restored.tables))


def _newest_first(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    # Of the base no key may come twice: it stays the first.
    return _changed(restored, lambda tables: sorted(tables, key=lambda table: -table.layer if table.layer else -100))


def _nothing_removed(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    return _changed(restored, lambda tables: [table for table in tables if not table.removed])


def _base_alone(effects: TaskEffects, restored: ev.TaskRestored) -> ev.TaskRestored:
    return _changed(restored, lambda tables: [table for table in tables if not table.layer])


LAYER_BREAKS: dict[str, tuple[int, Protocol]] = {
    "layers: what a checkpoint is built on goes": (5, Protocol(coordinator=ForgetsWhatIsBuiltOn)),
    "layers: what the newest does not need goes": (5, Protocol(coordinator=CountsTheNewestOnly)),
    "layers: shared files wait for the sweep": (5, Protocol(coordinator=KeepsSharedFiles)),
    "layers: the newest is restored first": (9, Protocol(task_effects=restoring(_newest_first))),
    "layers: removed keys are not removed": (9, Protocol(task_effects=restoring(_nothing_removed))),
    "layers: the base alone is restored": (9, Protocol(task_effects=restoring(_base_alone))),
}
"""Broken by other parts: the invariant, and the parts."""

LAYER_PATCHES: dict[str, tuple[int, Patch]] = {
    "layers: built on what nobody named": (5, lambda: patch.object(IncrementalBases, "begin", _builds_on_its_newest)),
    "layers: changes before an abort are left out": (9, lambda: patch.object(DirtySlots, "close", _changes_of_one)),
    "layers: those below are left out": (9, lambda: patch.object(TaskSnapshot, "lineage", property(_top_alone))),
    "layers: the sweep takes what is retained": (
        5,
        lambda: patch.object(deletion, "_sweep_shared", _sweeps_all),
    ),
}
"""Broken by a patch: the invariant, and the patch."""

LAYER_FIXED: Mapping[str, Mapping[str, Hashable]] = {
    "layers: changes before an abort are left out": {"state": "incremental", "faults": "tasks", "interval_ms": 60},
}
"""Fixed values: increments, aborted checkpoints, and a restart from a later one."""
