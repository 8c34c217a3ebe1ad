"""`SlotFlags`: a bool for each slot. Timers note in it which slots stand in a queue."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SlotFlags:
    """Flags, all clear at first."""

    __slots__ = ("_flags",)

    def __init__(self) -> None:
        self._flags: NDArray[np.bool_] = np.zeros(1024, dtype=np.bool_)

    def grow(self, slots: int) -> None:
        """Make room for this many slots."""
        if slots > len(self._flags):
            added = np.zeros(max(slots, 2 * len(self._flags)) - len(self._flags), dtype=np.bool_)
            self._flags = np.concatenate((self._flags, added))

    def set(self, slots: NDArray[np.int32]) -> None:
        """Set the flags of these slots."""
        self._flags[slots] = True

    def clear(self, slots: NDArray[np.int32]) -> None:
        """Clear the flags of these slots."""
        self._flags[slots] = False

    def of(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """The flags of these slots."""
        return self._flags[slots]

    def only(self, slots: NDArray[np.int32], total: int) -> None:
        """Set the flags of these slots, clear all others, and have `total` slots in all."""
        self._flags = np.zeros(max(1024, total), dtype=np.bool_)
        self._flags[slots] = True
