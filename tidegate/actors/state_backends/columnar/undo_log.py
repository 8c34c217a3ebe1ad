"""`UndoLog`: what a backend in memory needs to be again what it was at a checkpoint, without reading anything.

Before a slot is changed, what it holds is noted, once for each freeze. So going back costs what has changed since, and
nothing where nothing has.

Rules:

- Every freeze begins a part of the log, by the number of its checkpoint. A part tells what slots held at its freeze;
  slots that were given to keys later had nothing then, and are not noted.
- Going back applies the parts from the newest one down to that of the checkpoint. Which checkpoint that is, the
  coordinator says; one that has no part here, by its number, cannot be gone back to.
- When a checkpoint is complete, nobody goes back to an older one: the parts before it go.
- The notes of all parts together have a limit. Beyond it the oldest part goes, at last the only one: then nothing is
  noted until the next freeze. With a limit of 0 nothing ever is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.storage.ids import CheckpointId

_PARTS_MAX = 16
"""Checkpoints that are gone back to at most: more than may be pending, and some that were given up."""


class Notes(Protocol):
    """What the slots of one state held at one freeze."""

    @property
    def size_bytes(self) -> int:
        """About how much memory they take."""
        ...

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted."""
        ...

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Slot i is now what was slot `kept[i]`; all that are noted are kept. `kept` is ascending."""
        ...


class UndoableState(Protocol):
    """A state that notes what it held."""

    @property
    def name(self) -> str:
        """Name of the state."""
        ...

    def begin_notes(self) -> Notes:
        """Note what changes from now on, beginning with nothing."""
        ...

    def end_notes(self) -> None:
        """Note nothing any more."""
        ...

    def undo(self, notes: Notes) -> None:
        """Be again what it was when these were begun, given that it is what it was when they were ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """From the freeze for a checkpoint to the next one that may be gone back to."""

    checkpoint_id: CheckpointId
    notes: list[Mapping[str, Notes]]
    """Those of each freeze in it, by state, oldest first."""


class UndoLog:
    """The log of one key space; a `SlotState` without rows of its own, so that slots which it needs are not given up.

    The limit is for it and the log `beside` it together.
    """

    name = "undo log"
    rows = 0

    def __init__(self, bytes_max: int, beside: UndoLog | None = None) -> None:
        self.bytes_max = bytes_max
        self._beside = beside
        self._states: list[UndoableState] = []
        self._parts: list[_Part] = []

    @property
    def size_bytes(self) -> int:
        """About how much memory all notes take."""
        return sum(notes.size_bytes for notes in self._notes())

    @property
    def empty(self) -> bool:
        """Whether there is no checkpoint to go back to."""
        return not self._parts

    def begin(self, checkpoint_id: CheckpointId, states: Iterable[UndoableState]) -> None:
        """All states were just frozen for a checkpoint, or loaded from it."""
        if self._parts and self._parts[-1].checkpoint_id >= checkpoint_id:
            self.clear()  # numbers only ever grow: whatever has come about, these parts are of something else
        if not self.bytes_max:
            return
        self._states = list(states)
        self._parts.append(_Part(checkpoint_id, [{state.name: state.begin_notes() for state in self._states}]))
        if len(self._parts) > _PARTS_MAX:
            # The oldest may be the only one that is complete. Of the one above it only the notes are needed.
            self._parts[0].notes.extend(self._parts.pop(1).notes)
        self.settle()

    def keeps(self, checkpoint_id: CheckpointId) -> bool:
        """Whether it is possible to go back to a checkpoint."""
        return any(part.checkpoint_id == checkpoint_id for part in self._parts)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint is complete."""
        self._parts = [part for part in self._parts if part.checkpoint_id >= checkpoint_id]
        if not self._parts:
            self.clear()

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Let all states be what they were at a checkpoint that is kept. It can be gone back to again."""
        assert self.keeps(checkpoint_id), f"checkpoint {checkpoint_id} is not kept"
        states = {state.name: state for state in self._states}
        while self._parts and self._parts[-1].checkpoint_id >= checkpoint_id:
            for notes in reversed(self._parts.pop().notes):
                for name, state in states.items():
                    state.undo(notes[name])
        self.clear()
        self.begin(checkpoint_id, states.values())

    def settle(self) -> None:
        """Keep to the limit."""
        others_bytes = 0 if self._beside is None else self._beside.size_bytes
        while self._parts and self.size_bytes + others_bytes > self.bytes_max:
            del self._parts[0]
        if not self._parts:
            self.clear()

    def clear(self) -> None:
        """There is nothing to go back to any more."""
        self._parts.clear()
        for state in self._states:
            state.end_notes()
        self._states = []

    def grow(self, slots: int) -> None:
        """New slots are not noted."""

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Which slots hold something once this has gone back, as far as they hold nothing now."""
        flags = np.zeros(slots, dtype=np.bool_)
        for notes in self._notes():
            flags[notes.slots()] = True
        return flags

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Slot i is now what was slot `kept[i]`."""
        for notes in self._notes():
            notes.rebuild(kept)

    def _notes(self) -> Iterator[Notes]:
        return (notes for part in self._parts for by_state in part.notes for notes in by_state.values())
