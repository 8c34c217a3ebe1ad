"""`PagedState`: what every state over a `KeySpace` shares, whether kernels or Python functions change it.

It notes what has changed, for incremental snapshots and for the undo log. It freezes for a snapshot, which takes one
reference a page: the pages are pinned, and the owner copies one before it writes to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.state.columnar.dirty_slots import Bitmaps, DirtySlots, live_or_marked
from tidegate.state.columnar.frozen_slots import FrozenSlots, FrozenValues
from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.sorted_slots import SortedSlots
from tidegate.state.columnar.undo_log import Notes
from tidegate.state.common.pages import pages_for
from tidegate.state.common.pins import Pins
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut

N = TypeVar("N", bound=Notes)


class PagedState(ABC, Generic[N]):
    """A `SlotState` and an `UndoableState`, whose notes are an `N`. `columns` are the names of its value columns."""

    def __init__(self, space: KeySpace, name: str, columns: Iterable[str], incremental: bool) -> None:
        self.name = name
        self._space = space
        self._value_names = tuple(columns)
        self._pins = Pins()
        self.dirty = DirtySlots() if incremental else None
        self._notes: N | None = None
        """The undo log's notes: what slots held before they changed."""
        self._rows = 0

    @property
    def rows(self) -> int:
        """Keys that have the state."""
        return self._rows

    @abstractmethod
    def live(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of these slots have the state."""

    def grow(self, slots: int) -> None:
        """Grow to this many slots."""
        self._pins.grow(pages_for(slots))
        if self.dirty is not None:
            self.dirty.grow(slots)

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Which slots have the state, or lost it and a later snapshot may have to say so."""
        return live_or_marked(self.live(np.arange(slots, dtype=np.int32)), self.dirty)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        self._pins = Pins()
        self._pins.grow(pages_for(len(kept)))
        if self.dirty is not None:
            self.dirty.rebuild(kept, slots)

    def freeze(self, cut: Cut) -> tuple[FrozenSlots | SortedSlots, ...]:
        """All rows, or what has changed since the base. Takes one reference a page."""
        if cut.in_order:
            return (self._sorted(),) if self._rows else ()
        dirty = None if self.dirty is None else self.dirty.close(cut.checkpoint_id, cut.base)
        if self._space.schema is None:
            return ()
        if cut.base is None:
            return (self._frozen(None, False),) if self._rows else ()
        assert dirty is not None, "an incremental snapshot of a state that keeps no changes"
        self._space.look_again()
        return self._frozen(dirty, False), self._frozen(dirty, True)

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Rows that are marked as changed since the base, and all rows."""
        return 0 if self.dirty is None else self.dirty.changed_since(base, self._space.slots), self.rows

    @abstractmethod
    def begin_notes(self) -> N:
        """Note changes from now on."""

    def end_notes(self) -> None:
        """Stop noting changes."""
        self._notes = None

    @abstractmethod
    def undo(self, notes: Notes) -> None:
        """Restore what the state held when these notes began."""

    @abstractmethod
    def _frozen_values(self, removed: bool) -> FrozenValues:
        """The current values. `removed`: only which slots have the state is asked."""

    def _sorted_values(self) -> FrozenValues:
        """The current values, as a canonical savepoint has them."""
        return self._frozen_values(removed=False)

    def _went_back(self, rows: int) -> None:
        """The state has so many rows again as at the freeze that it was taken back to. Nothing has changed since."""
        self._rows = rows
        if self.dirty is not None:
            self.dirty = DirtySlots.none_of(self._space.slots)

    def _frozen(self, dirty: Bitmaps | None, removed: bool) -> FrozenSlots:
        keys, groups = self._space.freeze()
        values, slots = self._frozen_values(removed), self._space.slots
        pinned, all_live = self._pins.pin(), self.rows == slots
        return FrozenSlots(
            self.name, self._value_names, keys, groups, slots, values, pinned, dirty, removed, all_live=all_live
        )

    def _sorted(self) -> SortedSlots:
        """For a canonical savepoint. No later snapshot builds on it, so the collected changes stay."""
        keys, groups = self._space.freeze()
        values, slots = self._sorted_values(), self._space.slots
        return SortedSlots(self.name, self._value_names, keys, groups, slots, values, self._pins.pin())
