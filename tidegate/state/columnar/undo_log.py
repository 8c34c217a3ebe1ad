"""`UndoLog`: lets a backend in memory go back to a checkpoint without reading anything.

Before a slot changes for the first time after a freeze, its contents are noted. So to go back costs only what has
changed since. Rules:
- Every freeze begins a part of the log, under the number of its checkpoint. A part notes what slots held at its freeze.
  Slots that got a key later were empty then, and are not noted.
- To go back, parts are undone from the newest to that of the checkpoint. The coordinator chooses the checkpoint. If it
  has no part here, the backend cannot go back to it.
- When a checkpoint completes, nobody goes back to an older one, and the parts before it are dropped.
- All notes together have a memory limit. Pages that a snapshot holds in any case, until it has written them, do not
  count. Beyond the limit notes take less memory where they can, the oldest first. Then the oldest part is dropped. When
  the last one is dropped, nothing is noted until the next freeze. With a limit of 0 nothing is ever noted.
- A page that a snapshot reads is copied in any case, and kept in the newest part. What older parts keep gives way to
  such copies (`make_room`): with them, all that is noted takes no more than the limit, or the state itself and an
  eighth, or `COPIES_BYTES_MIN`, whichever is most.
- A part that alone outgrows the limit was noted in vain. Once that has happened twice in a row, the next freeze begins
  none, after the third time the next two, then four, up to `_SKIPPED_MAX`. A part that fits ends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tidegate.storage.ids import CheckpointId

COPIES_BYTES_MIN = 1 << 25
"""For so much memory older checkpoints are kept, however small the state is."""
PLENTY = 3
"""So many times as much as there is: notes of several checkpoints, and what other states of the operator note."""
_SKIPPED_MAX = 8
_PARTS_MAX = 16
"""At most so many checkpoints can be gone back to: more than may be pending, and some that failed."""


class Notes(Protocol):
    """What the slots of one state held at one freeze."""

    @property
    def size_bytes(self) -> int:
        """About how much memory the notes take."""
        ...

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted."""
        ...

    def shared_bytes(self) -> int:
        """How much of it a snapshot holds in any case, as of now."""
        ...

    def shrink(self, shared_too: bool) -> bool:
        """Take less memory, a step at a time. False if that cannot be.

        `shared_too`: also less of what a snapshot held in any case when `shared_bytes` was last asked.
        """
        ...

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumber: slot `kept[i]` becomes slot i. `kept` ascends, and contains all noted slots."""
        ...


class UndoableState(Protocol):
    """A state that can note what its slots held."""

    @property
    def name(self) -> str:
        """Name of the state."""
        ...

    def begin_notes(self) -> Notes:
        """Start new notes: from now on note each slot before it changes."""
        ...

    def end_notes(self) -> None:
        """Stop noting changes."""
        ...

    def undo(self, notes: Notes) -> None:
        """Go from the state at the end of these notes back to the state at their beginning."""
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """From the freeze for one checkpoint to the next freeze that one can go back to."""

    checkpoint_id: CheckpointId
    notes: list[Mapping[str, Notes]]
    """The notes of each freeze in this part, by state, oldest first."""


class UndoLog:
    """The undo log of one key space. `bytes_max` limits this log and those `beside` it together.

    It is a `SlotState` without rows, so that a rebuild keeps the slots that it has noted.
    """

    name = "undo log"
    rows = 0

    def __init__(self, bytes_max: int, *beside: UndoLog) -> None:
        self.bytes_max = bytes_max
        self._beside = beside
        self._states: list[UndoableState] = []
        self._parts: list[_Part] = []
        self._outgrown = 0
        """How many parts in a row have outgrown the limit, each alone."""
        self._to_skip = 0

    @property
    def size_bytes(self) -> int:
        """About how much memory all notes take."""
        return sum(notes.size_bytes for notes in self._notes())

    @property
    def own_bytes(self) -> int:
        """The same without what a snapshot holds in any case. The limit is for these."""
        return sum(notes.size_bytes - notes.shared_bytes() for notes in self._notes())

    @property
    def empty(self) -> bool:
        """Whether there is no checkpoint to go back to."""
        return not self._parts

    def begin(self, checkpoint_id: CheckpointId, states: Iterable[UndoableState], after_freeze: bool = False) -> None:
        """All states were just frozen for this checkpoint, or loaded from it. Begin a part.

        `after_freeze`: so that none need be begun, where it would be in vain.
        """
        if self._parts and self._parts[-1].checkpoint_id >= checkpoint_id:
            self.clear()  # checkpoint numbers only grow, so these parts belong to something else
        if not self.bytes_max:
            return
        if self._parts:
            self._outgrown = self._to_skip = 0
        if after_freeze and self._to_skip:
            self._to_skip -= 1
            return
        self._states = list(states)
        self._parts.append(_Part(checkpoint_id, [{state.name: state.begin_notes() for state in self._states}]))
        if len(self._parts) > _PARTS_MAX:
            # The oldest checkpoint may be the only complete one, so it stays. The second is merged into it.
            self._parts[0].notes.extend(self._parts.pop(1).notes)
        self.settle()

    def keeps(self, checkpoint_id: CheckpointId) -> bool:
        """Whether one can go back to this checkpoint."""
        return any(part.checkpoint_id == checkpoint_id for part in self._parts)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint has completed: drop the parts before it."""
        self._parts = [part for part in self._parts if part.checkpoint_id >= checkpoint_id]
        if not self._parts:
            self.clear()

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Restore all states at a checkpoint that is kept. One can go back to it again later."""
        assert self.keeps(checkpoint_id), f"checkpoint {checkpoint_id} is not kept"
        states = {state.name: state for state in self._states}
        while self._parts and self._parts[-1].checkpoint_id >= checkpoint_id:
            for notes in reversed(self._parts.pop().notes):
                for name, state in states.items():
                    state.undo(notes[name])
        self.clear()
        self.begin(checkpoint_id, states.values())

    def settle(self) -> None:
        """Shrink notes and drop the oldest parts until the limit holds."""
        if self._parts and not self._is_small and not self._fit(self._limit_bytes, spared=0, shared_too=False):
            self._to_skip = min(1 << self._outgrown >> 1, _SKIPPED_MAX)
            self._outgrown += 1
            self.clear()

    def make_room(self, copies_bytes: int, state_bytes: int) -> None:
        """So much is about to be kept or noted of a state that takes `state_bytes` in all: older parts give way."""
        allowed_bytes = self.bytes_max - sum(log.size_bytes for log in self._beside)
        bytes_max = max(state_bytes + state_bytes // 8, COPIES_BYTES_MIN, allowed_bytes) - copies_bytes
        if self.size_bytes > bytes_max:
            self._fit(bytes_max, spared=1, shared_too=True)

    def has_room(self, size_bytes: int) -> bool:
        """Whether so much more can be kept, and nothing gives way."""
        return self.own_bytes + size_bytes <= self._limit_bytes

    def has_plenty(self, size_bytes: int) -> bool:
        """Whether `PLENTY` times as much can be kept, and copied meanwhile, and nothing gives way."""
        return PLENTY * size_bytes <= COPIES_BYTES_MIN and self.has_room(PLENTY * size_bytes)

    def clear(self) -> None:
        """Drop everything: there is no checkpoint to go back to any more."""
        self._parts.clear()
        for state in self._states:
            state.end_notes()
        self._states = []

    def notes_of(self, state: str) -> Iterator[Notes]:
        """All notes of one state."""
        return (notes[state] for part in self._parts for notes in part.notes if state in notes)

    def grow(self, slots: int) -> None:
        """Nothing to do: new slots are not noted."""

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Slots that are noted: they may be empty now, but not after going back."""
        flags = np.zeros(slots, dtype=np.bool_)
        for notes in self._notes():
            flags[notes.slots()] = True
        return flags

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        for notes in self._notes():
            notes.rebuild(kept)

    @property
    def _limit_bytes(self) -> int:
        return self.bytes_max - sum(log.own_bytes for log in self._beside)

    @property
    def _is_small(self) -> bool:
        """Whether the limit holds even if all counts. Quick."""
        return self.size_bytes + sum(log.size_bytes for log in self._beside) <= self.bytes_max

    def _fit(self, bytes_max: int, spared: int, shared_too: bool) -> bool:
        """Shrink and drop parts until the rest takes so much, but for the newest `spared`. False if no part is left.

        `shared_too`: what a snapshot holds in any case counts as well, and may shrink.
        """
        shared = [sum(notes.shared_bytes() for notes in self._notes([part])) for part in self._parts]
        counted_bytes = bytes_max if shared_too else bytes_max + sum(shared)
        for notes in self._notes(self._parts[: len(self._parts) - spared]):
            while self.size_bytes > counted_bytes and notes.shrink(shared_too):
                pass
        while len(self._parts) > spared and self.size_bytes > counted_bytes:
            del self._parts[0]
            counted_bytes -= 0 if shared_too else shared.pop(0)
        return bool(self._parts)

    def _notes(self, parts: Sequence[_Part] | None = None) -> Iterator[Notes]:
        parts = self._parts if parts is None else parts
        return (notes for part in parts for by_state in part.notes for notes in by_state.values())
