"""Rules of tasks that go back from memory, broken: to which checkpoint, and what is there then."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np

from tidegate.state.columnar.object_state import ObjectState
from tidegate.state.columnar.undo_log import ObjectNotes, TableNotes, UndoLog
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.storage.state.stored_rows import TIMERS_STATE

Patch = Callable[[], AbstractContextManager[Any]]

_go_back, _table_undo, _cells_undo = UndoLog.go_back, ColumnarTable.undo, ObjectState.undo


def _both(table: Any, cells: Any) -> Patch:
    """Patches the same method of vectorized states and of object states."""

    def patched() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(patch.object(ColumnarTable, "undo", table))
        stack.enter_context(patch.object(ObjectState, "undo", cells))
        return stack

    return patched


# --- to which checkpoint ----------------------------------------------------------------------------------------------


def _to_the_newest(self: UndoLog, checkpoint_id: Any) -> None:
    # The newest freeze belongs to an aborted checkpoint, or there is no older one.
    newest = self._parts[-1].checkpoint_id
    _go_back(self, newest)


def _keeps_any(self: UndoLog, checkpoint_id: Any) -> bool:
    return bool(self._parts)


def _to_the_oldest(self: UndoLog, checkpoint_id: Any) -> None:
    known = {part.checkpoint_id for part in self._parts}
    _go_back(self, checkpoint_id if checkpoint_id in known else min(known))


def _to_a_checkpoint_that_is_not_there() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(patch.object(UndoLog, "keeps", _keeps_any))
    stack.enter_context(patch.object(UndoLog, "go_back", _to_the_oldest))
    return stack


def _stays(self: UndoLog, checkpoint_id: Any) -> None:
    states = self._states
    self.clear()
    self.begin(checkpoint_id, states)


# --- what is there then -----------------------------------------------------------------------------------------------


def _with_new_keys(undo: Any) -> Any:
    def undone(self: Any, notes: Any) -> None:
        below, notes.slots_below = notes.slots_below, self._space.slots
        undo(self, notes)
        notes.slots_below = below
        self._rows = int(self.live(np.arange(self._space.slots, dtype=np.int32)).sum())

    return undone


def _notes_again(self: TableNotes, slots: Any) -> Any:
    # What a slot held at its last change takes the place of what it held at the freeze.
    return np.unique(slots[slots < self.slots_below])


def _holds_again(self: ObjectNotes, slot: int, held: Any) -> None:
    if slot < self.slots_below:
        self.held[slot] = held


def _the_last_change_alone() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(patch.object(TableNotes, "first", _notes_again))
    stack.enter_context(patch.object(ObjectNotes, "add", _holds_again))
    return stack


def _oldest_first(self: UndoLog, checkpoint_id: Any) -> None:
    # Of a slot that has changed before and after a freeze the later value wins.
    for part in self._parts:
        part.notes.reverse()
    start = next(n for n, part in enumerate(self._parts) if part.checkpoint_id == checkpoint_id)
    self._parts[start:] = reversed(self._parts[start:])
    states = {state.name: state for state in self._states}
    for part in reversed(self._parts[start:]):
        for notes in reversed(part.notes):
            for name, state in states.items():
                state.undo(notes[name])
    self.clear()
    self.begin(checkpoint_id, states.values())


def _of_others(self: UndoLog, checkpoint_id: Any) -> None:
    if [state.name for state in self._states] != [TIMERS_STATE]:
        _go_back(self, checkpoint_id)


_TIMERS_STAY = "undo: timers stay what they were when the task ended"

UNDO_PATCHES: dict[str, tuple[int, Patch]] = {
    "undo: back to a checkpoint that was given up": (9, lambda: patch.object(UndoLog, "go_back", _to_the_newest)),
    "undo: back to a checkpoint that is not there": (9, _to_a_checkpoint_that_is_not_there),
    "undo: nothing is undone": (9, lambda: patch.object(UndoLog, "go_back", _stays)),
    "undo: keys that came since stay": (9, _both(_with_new_keys(_table_undo), _with_new_keys(_cells_undo))),
    "undo: the last change alone is undone": (9, _the_last_change_alone),
    "undo: a later freeze wins": (9, lambda: patch.object(UndoLog, "go_back", _oldest_first)),
    _TIMERS_STAY: (9, lambda: patch.object(UndoLog, "go_back", _of_others)),
}
"""Every such break: its invariant, and the patch."""

_KEPT = {
    "survivors": "keep",
    "state": "incremental",
    "faults": "tasks",
    "interval_ms": 60,
    "min_pause_ms": 0,
    "rows": 120,
}

UNDO_FIXED: Mapping[str, Mapping[str, Hashable]] = dict.fromkeys(UNDO_PATCHES, _KEPT) | {
    _TIMERS_STAY: {**_KEPT, "topology": "timers"}
}
"""Fixed values of the scenarios for these breaks: tasks are stopped because another one has died, after many
checkpoints.
"""
