"""What both key indexes share: the answer to an upsert, and the layout of an entry.

An entry is 16 bytes, so that a probe touches one cache line: a word (the key itself, or the hash of its
bytes) and a meta word, `epoch << 32 | slot + 1`, 0 when the entry is free. The epoch is the number of the
upsert that last met the key: that is how the distinct keys of a batch are found without another table. An
entry's home is given by the *high* bits of its hash (the low ones chose the key group and are alike within a
subtask), so a table grows by reading and writing forwards only. Tables are at most half full; probing is
linear.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidegate.actors.kernels.jit import kernel

CAPACITY_MIN = 1024
EPOCH_MAX = (1 << 31) - 1
SLOTS_MAX = (1 << 31) - 2

SLOT_MASK = np.int64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Upserted:
    """Result of an upsert of a batch of keys.

    `slots` has the slot of each row; `first_rows` the first row of each distinct key of the batch, ascending;
    `new_rows` those of `first_rows` whose key was not known: their slots are the next free ones, in order.
    """

    slots: NDArray[np.int32]
    first_rows: NDArray[np.int32]
    new_rows: NDArray[np.int32]


class Progress:
    """Where an upsert is: the kernel stops when the table is full and goes on in a larger one."""

    __slots__ = ("counters", "first_rows", "new_rows", "slots")

    def __init__(self, rows: int, size: int) -> None:
        self.slots = np.empty(rows, dtype=np.int32)
        self.first_rows = np.empty(rows, dtype=np.int32)
        self.new_rows = np.empty(rows, dtype=np.int32)
        self.counters = np.array([0, size, 0, 0], dtype=np.int64)
        """Next row, slots in use, first rows found, new rows found."""

    @property
    def done(self) -> bool:
        """Whether every row has its slot."""
        return int(self.counters[0]) == len(self.slots)

    @property
    def size(self) -> int:
        """Slots in use."""
        return int(self.counters[1])

    def result(self) -> Upserted:
        """The answer, once `done`."""
        assert self.done
        _, _, first, new = self.counters.tolist()
        return Upserted(self.slots, self.first_rows[:first], self.new_rows[:new])


@kernel
def forget_epochs(table: NDArray[np.int64]) -> None:
    """Set the epoch of every entry to 0, before epochs are used a second time."""
    for position in range(1, table.shape[0], 2):
        table[position] &= SLOT_MASK
