"""The undo log's notes: what slots of a state held at a freeze.

A vectorised state notes columns, cells note Python objects.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.paged import Bitmap, mark_first
from tidegate.actors.state_backends.columnar.dirty_slots import words_for

ENTRY_BYTES = 100
"""Estimated memory of a dictionary entry, without the object that it holds."""


@dataclass(frozen=True, slots=True)
class NotedRows:
    """The former rows of some slots of a vectorised state."""

    slots: NDArray[np.int32]
    live: NDArray[np.uint8]
    """Whether the slot had a row."""
    values: tuple[NDArray[Any], ...]
    """One array for each column."""
    valid: tuple[NDArray[np.uint8] | None, ...]
    """One array for each column; None if the column had never had a null."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays, and an estimate for their objects."""
        arrays: list[NDArray[Any]] = [self.slots, self.live, *self.values]
        arrays += [valid for valid in self.valid if valid is not None]
        return sum(array.nbytes + ENTRY_BYTES for array in arrays)


class TableNotes:
    """The `Notes` of a vectorised state, which had this many slots and rows at the freeze."""

    __slots__ = ("_bits", "noted", "rows", "size_bytes", "slots_below")

    def __init__(self, slots_below: int, rows: int) -> None:
        self.slots_below = slots_below
        """Slots from this one on were empty."""
        self.rows = rows
        self.noted: list[NotedRows] = []
        self._bits: Bitmap = np.zeros(words_for(slots_below), dtype=np.uint64)
        self.size_bytes = self._bits.nbytes

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of these slots that must be noted now, because they have not been yet. Each once."""
        found = np.empty(len(slots), dtype=np.int32)
        return found[: mark_first(self._bits, self.slots_below, slots, found)].copy()

    def add(self, rows: NotedRows) -> None:
        """Note these rows, of slots that `first` gave."""
        self.noted.append(rows)
        self.size_bytes += rows.size_bytes

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted."""
        return np.concatenate([np.zeros(0, dtype=np.int32), *(rows.slots for rows in self.noted)])

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        self.slots_below = int(np.searchsorted(kept, self.slots_below))
        for rows in self.noted:
            rows.slots[:] = np.searchsorted(kept, rows.slots)
        self._bits = np.zeros(words_for(self.slots_below), dtype=np.uint64)
        self.first(self.slots())


class CellNotes:
    """The `Notes` of cells."""

    __slots__ = ("held", "rows", "size_bytes", "slots_below")

    def __init__(self, slots_below: int, rows: int) -> None:
        self.slots_below = slots_below
        """Slots from this one on were empty."""
        self.rows = rows
        self.held: dict[int, Any] = {}
        self.size_bytes = 0

    def add(self, slot: int, held: Any) -> None:
        """Note what a slot holds, if it is not noted yet. Objects inside a list or map are not counted."""
        if slot < self.slots_below and slot not in self.held:
            self.held[slot] = held
            self.size_bytes += ENTRY_BYTES + sys.getsizeof(held)

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted."""
        return np.fromiter(self.held, dtype=np.int32, count=len(self.held))

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        self.slots_below = int(np.searchsorted(kept, self.slots_below))
        slots = np.searchsorted(kept, self.slots()).tolist()
        self.held = dict(zip(slots, self.held.values(), strict=True))
