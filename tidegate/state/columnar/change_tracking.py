"""Tracks which slots of a state have changed since a snapshot, for incremental snapshots.

`DirtySlots` has one bitmap for the changes since the last freeze. A freeze files it in a `ChangeHistory` and starts an
empty one, so its cost does not grow with the state. `ChangeHistory` also serves RocksDB, whose collections hold keys:
- A freeze files the collection of changes since the last freeze, under the number of its checkpoint.
- A snapshot with base B contains the collections that were filed after B. Older collections are then dropped, because
  no later snapshot has an older base.
- Keeping too many changes is always safe. Beyond `COLLECTIONS_MAX` collections the two oldest are merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidegate.state.common.options import COLLECTIONS_MAX
from tidegate.state.kernels.paged import Bitmap, mark_slots
from tidegate.storage.ids import CheckpointId

_WORDS_MIN = 16

Bitmaps: TypeAlias = tuple[Bitmap, ...]
"""A slot is marked if any of these has its bit. A bitmap may be shorter than the number of slots."""
C = TypeVar("C")


class DirtySlots:
    """The changed slots of one state, with one bit for each slot."""

    __slots__ = ("_current", "_history")

    def __init__(self) -> None:
        self._current: Bitmap = np.zeros(_WORDS_MIN, dtype=np.uint64)
        self._history: ChangeHistory[Bitmap] = ChangeHistory(_merged)

    @staticmethod
    def none_of(slots: int) -> DirtySlots:
        """Returns an object for a state with `slots` slots, none of which has changed."""
        dirty = DirtySlots()
        dirty.grow(slots)
        return dirty

    def grow(self, slots: int) -> None:
        """Makes room for a state with `slots` slots. New slots are unchanged."""
        words = words_for(slots)
        if words > len(self._current):
            larger = np.zeros(max(words, 2 * len(self._current)), dtype=np.uint64)
            larger[: len(self._current)] = self._current
            self._current = larger

    def mark(self, slots: NDArray[np.int32]) -> None:
        """Marks these slots of the state as changed."""
        mark_slots(self._current, slots)

    def unmark(self, slots: NDArray[np.int32]) -> None:
        """Removes the marks that `mark` has set for these distinct slots since the last freeze."""
        bits = np.uint64(1) << (slots & 63).astype(np.uint64)
        np.bitwise_and.at(self._current, slots >> 6, ~bits)

    def close(self, checkpoint_id: CheckpointId, base: CheckpointId | None) -> Bitmaps:
        """Stores the marks since the last freeze under this checkpoint, and begins new ones. Returns the bitmaps of
        changed slots.

        With `base`, the bitmaps have only the changes since that checkpoint.
        """
        if base is not None:
            self._history.drop(base)
        self._history.file(checkpoint_id, self._current)
        self._current = np.zeros(len(self._current), dtype=np.uint64)
        return tuple(self._history)

    def drop(self, base: CheckpointId) -> None:
        """Drops the changes up to the checkpoint `base`, because no later snapshot has an older base."""
        self._history.drop(base)

    def changed_since(self, base: CheckpointId, slots: int) -> int:
        """Returns how many of the first `slots` slots a snapshot based on the checkpoint `base` would contain. O(slots
        / 64).
        """
        since = (*self._history.since(base), self._current)
        return int(np.bitwise_count(union(since, 0, slots)).sum())

    def marked(self, slots: int) -> NDArray[np.bool_]:
        """Returns a mask of the first `slots` slots: True for a slot that has changed since the oldest possible base of
        a snapshot.

        Later snapshots contain such slots. O(slots).
        """
        return flags((*self._history, self._current), 0, slots)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the slots of the state: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""

        def moved(bitmap: Bitmap) -> Bitmap:
            packed = np.zeros(words_for(len(kept)) * 8, dtype=np.uint8)
            bits = np.packbits(flags((bitmap,), 0, slots)[kept], bitorder="little")
            packed[: len(bits)] = bits
            return packed.view(np.uint64)

        self._history.replace(moved)
        self._current = moved(self._current)


def live_or_marked(live: NDArray[np.bool_], dirty: DirtySlots | None) -> NDArray[np.bool_]:
    """Returns a mask of slots: True if the slot has the state, or if a later snapshot may record its removal.
    O(slots).
    """
    return live if dirty is None else live | dirty.marked(len(live))


def words_for(slots: int) -> int:
    """Returns how many 64-bit words a bitmap of `slots` slots has."""
    return slots // 64 + 1


def union(bitmaps: Bitmaps, start: int, stop: int) -> Bitmap:
    """Returns the union of bitmaps for the slots from `start` to `stop` (exclusive). `start` must be a multiple
    of 64.
    """
    first, last = start // 64, (stop + 63) // 64
    bits = np.zeros(last - first, dtype=np.uint64)
    for bitmap in bitmaps:
        part = bitmap[first:last]
        bits[: len(part)] |= part
    return bits


def _merged(oldest: Bitmap, second: Bitmap) -> Bitmap:
    return union((oldest, second), 0, max(len(oldest), len(second)) * 64)


def flags(bitmaps: Bitmaps, start: int, stop: int) -> NDArray[np.bool_]:
    """Returns the union of bitmaps as one bool for each slot from `start` to `stop` (exclusive)."""
    bits = np.unpackbits(union(bitmaps, start, stop).view(np.uint8), bitorder="little", count=stop - start)
    return bits.view(np.bool_)


def slots_in(bitmaps: Bitmaps, stop: int) -> NDArray[np.int32]:
    """Returns the slots below `stop` that are marked in any of the bitmaps, ascending. O(stop / 64 + marked slots)."""
    words = union(bitmaps, 0, stop)
    found = np.flatnonzero(words)
    bits = np.unpackbits(words[found].view(np.uint8), bitorder="little").reshape(-1, 64)
    rows, positions = np.nonzero(bits)
    slots = found[rows] * 64 + positions
    return slots[slots < stop].astype(np.int32)


def marked(bitmaps: Bitmaps) -> int:
    """Returns the number of bits that are set in the bitmaps. A slot that is marked in several bitmaps is counted
    several times.
    """
    return sum(int(np.bitwise_count(bitmap).sum()) for bitmap in bitmaps)


class ChangeHistory(Generic[C]):
    """The changes between checkpoints: one collection of changes for each checkpoint, oldest first.

    `merge(older, newer)` returns a new collection with the changes of both.
    """

    __slots__ = ("_filed", "_merge")

    def __init__(self, merge: Callable[[C, C], C]) -> None:
        self._filed: list[tuple[CheckpointId, C]] = []
        self._merge = merge

    def __iter__(self) -> Iterator[C]:
        return (collection for _, collection in self._filed)

    def since(self, base: CheckpointId) -> Iterator[C]:
        """Returns the collections of changes after the checkpoint `base`."""
        return (collection for number, collection in self._filed if number > base)

    def drop(self, base: CheckpointId) -> list[C]:
        """Removes and returns the collections of changes up to the checkpoint `base`."""
        dropped = [collection for number, collection in self._filed if number <= base]
        self._filed = [entry for entry in self._filed if entry[0] > base]
        return dropped

    def file(self, checkpoint_id: CheckpointId, collection: C) -> None:
        """Stores the collection of changes between the previous freeze and the freeze for this checkpoint."""
        self._filed.append((checkpoint_id, collection))
        if len(self._filed) > COLLECTIONS_MAX:
            (_, oldest), (number, second) = self._filed[:2]
            self._filed[:2] = [(number, self._merge(oldest, second))]

    def replace(self, change: Callable[[C], C]) -> None:
        """Replaces each stored collection of changes by the result of `change`."""
        self._filed = [(number, change(collection)) for number, collection in self._filed]
