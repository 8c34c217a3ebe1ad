"""The undo log's notes: what slots of a state held at a freeze.

A vectorised state notes columns, cells note Python objects. Rules of a vectorised state:
- A page that the owner copies because a snapshot reads it is kept as it was: to go back is to put it back. None of its
  slots is noted alone.
- All other slots are noted one by one, before they change for the first time. To note a row costs several times as much
  as to copy one with its page. So a page of which `NOTED_SLOTS_MAX` slots are noted is kept from then on, too, if there
  is memory for it. To go back is then to put the page back, and after it what was noted before.
- A kept page that a snapshot still reads takes no memory of its own: the snapshot holds it in any case.
- Where memory is short, a kept page is exchanged for notes of its slots that have changed, unless most have. One that
  is still read is not, but for copies of a later snapshot: it would take more memory, not less.
- Once all pages are kept, and all but few slots have changed, or in all but few pages so many that none of these is
  exchanged any more, the others count as changed: to mark slots costs time for each row, and would hardly save memory.
  So do all of them at once where there is memory for several times as much, and where all slots had a row, so that
  none of them is needed for these notes alone.
- Noted rows are put together into pages of `PAGE_MEMORY`: what notes leave is there for copies of the next snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.state.columnar.dirty_slots import flags, words_for
from tidegate.state.common.page_memory import PAGE_MEMORY
from tidegate.state.common.pages import FormerPage, pages_for
from tidegate.state.kernels.paged import PAGE_BITS, PAGE_ROWS, Bitmap, mark_below, mark_first, mark_slots

NOTED_SLOTS_MAX = PAGE_ROWS // 4
EXCHANGED_SLOTS_MAX = PAGE_ROWS // 2
"""If more slots of a kept page have changed, to note them alone would gain little."""
MARKED_PARTS = 8
"""Fewer than one in so many slots has not changed, or one in so many pages can be exchanged: all count as changed."""
_NEVER = -(1 << 30)
_ALL_BITS = np.uint64((1 << 64) - 1)
StillRead: TypeAlias = Callable[[NDArray[np.int32], NDArray[np.int64]], NDArray[np.bool_]]
"""Which of these pages, in these versions, a snapshot still reads."""
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
    beyond_bytes: int = 0
    """About how much memory the values take to which the arrays refer."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays, and an estimate for their objects and values."""
        arrays: list[NDArray[Any]] = [self.slots, self.live, *self.values]
        arrays += [valid for valid in self.valid if valid is not None]
        return self.beyond_bytes + sum(array.nbytes + ENTRY_BYTES for array in arrays)

    def part(self, start: int, stop: int) -> NotedRows:
        """Some of the rows, in the same memory."""
        valid = tuple(None if valid is None else valid[start:stop] for valid in self.valid)
        values = tuple(values[start:stop] for values in self.values)
        beyond = self.beyond_bytes * (stop - start) // max(1, len(self.slots))
        return NotedRows(self.slots[start:stop], self.live[start:stop], values, valid, beyond)


class KeptPage(NamedTuple):
    """A former page of a vectorised state. Many are made at once, and a tuple takes a third of the time of a class."""

    version: int
    """Its version, by the pins."""
    live: FormerPage
    columns: tuple[FormerPage, ...]
    beyond_bytes: int = 0
    """As of `NotedRows`."""
    noted: Bitmap | None = None
    """Slots that had changed before, and are noted alone."""

    @property
    def page_bytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (array for former in (self.live, *self.columns) for array in former if array is not None)
        return sum(array.nbytes + ENTRY_BYTES for array in arrays)

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays, and of the values to which they refer."""
        return self.beyond_bytes + self.page_bytes

    def rows(self, page: int, slots: NDArray[np.int32]) -> NotedRows:
        """What some slots of it held, if it is page number `page`."""
        places = slots - (page << PAGE_BITS)
        valid = (None if valid is None else valid[places] for _, valid in self.columns)
        values = tuple(values[places] for values, _ in self.columns)
        beyond = self.beyond_bytes * len(slots) // PAGE_ROWS
        return NotedRows(slots, self.live[0][places], values, tuple(valid), beyond)


class TableNotes:
    """The `Notes` of a vectorised state, which had this many slots and rows at the freeze.

    `still_read` tells which pages a snapshot holds.
    """

    __slots__ = (
        "_all_changed",
        "_bits",
        "_is_kept",
        "_loose",
        "_noted_in",
        "_packed",
        "_page_bytes",
        "_shared",
        "_still_read",
        "_uncounted",
        "_versions",
        "kept",
        "rows",
        "size_bytes",
        "slots_below",
    )

    def __init__(self, slots_below: int, rows: int, still_read: StillRead) -> None:
        self.slots_below = slots_below
        """Slots from this one on were empty."""
        self.rows = rows
        self._still_read = still_read
        self._packed: list[NotedRows] = []
        """Notes of `PAGE_ROWS` rows each."""
        self._loose: list[NotedRows] = []
        """Others, with fewer rows in all."""
        self.kept: dict[int, KeptPage] = {}
        """Former pages, by their numbers."""
        self._is_kept: NDArray[np.bool_] = np.zeros(pages_for(slots_below), dtype=np.bool_)
        self._shared: NDArray[np.bool_] = self._is_kept.copy()
        """Of each page, whether it was kept and a snapshot still read it, when that was last looked at."""
        self._versions: NDArray[np.int64] = np.zeros(pages_for(slots_below), dtype=np.int64)
        self._page_bytes: NDArray[np.int64] = np.zeros(pages_for(slots_below), dtype=np.int64)
        """Version and bytes of each kept page."""
        self._noted_in: NDArray[np.int32] = np.zeros(pages_for(slots_below), dtype=np.int32)
        """Of each page, how many slots are noted alone. `_NEVER`: it is not kept again."""
        self._bits: Bitmap = np.zeros(words_for(slots_below), dtype=np.uint64)
        """Slots that have changed."""
        self._all_changed = False
        """Whether all of these have their bit."""
        self._uncounted = 0
        """How many slots were marked since it was last looked at how many bits are set."""
        self.size_bytes = self._bits.nbytes

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of these slots that must be noted now, because they have not been yet. Each once."""
        if self._all_changed:
            return np.zeros(0, dtype=np.int32)
        if len(self.kept) == len(self._is_kept):  # all of its pages
            mark_below(self._bits, self.slots_below, slots)
            self._count(len(slots))
            return np.zeros(0, dtype=np.int32)
        found = np.empty(len(slots), dtype=np.int32)
        found = found[: mark_first(self._bits, self.slots_below, slots, found)]
        return self.not_kept(found) if self.kept else found.copy()

    def add(self, rows: NotedRows) -> None:
        """Note these rows, of slots that `first` gave."""
        self._loose.append(rows)
        self.size_bytes += rows.size_bytes
        if sum(len(each.slots) for each in self._loose) >= PAGE_ROWS:
            loose, self._loose = self._loose, []
            for packed in _packed(loose):
                (self._packed if len(packed.slots) == PAGE_ROWS else self._loose).append(packed)
                self.size_bytes += packed.size_bytes
            self.size_bytes -= sum(each.size_bytes for each in loose)

    @property
    def noted(self) -> list[NotedRows]:
        """All rows that are noted without their page."""
        return [*self._packed, *self._loose]

    def dense(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages of which too many slots would be noted with these, which `first` gave."""
        self._noted_in += np.bincount(slots >> PAGE_BITS, minlength=len(self._noted_in)).astype(np.int32)
        return np.flatnonzero((self._noted_in > NOTED_SLOTS_MAX) & ~self._is_kept).astype(np.int32)

    def noted_before(self, slots: NDArray[np.int32], pages: NDArray[np.int32]) -> list[Bitmap]:
        """Of each page the slots that are noted, without these, which `first` gave."""
        before = self._bits.copy()
        mark_slots(now := np.zeros_like(before), slots)
        before &= ~now
        return [before[page * PAGE_ROWS // 64 : (page + 1) * PAGE_ROWS // 64].copy() for page in pages.tolist()]

    def not_kept(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Those of these slots whose page is not kept."""
        others: NDArray[np.int32] = slots[~self._is_kept[slots >> PAGE_BITS]]
        return others

    def keep(self, pages: NDArray[np.int32], former: Sequence[KeptPage]) -> None:
        """Keep pages, at least one and all of one layout, as they were, but for slots that are noted.

        Those of later slots alone are not needed.
        """
        there = pages < len(self._is_kept)
        if not there.all():
            pages, former = pages[there], [each for each, kept in zip(former, there.tolist(), strict=True) if kept]
        if not former:
            return
        self.kept.update(zip(pages.tolist(), former, strict=True))
        self._is_kept[pages] = True
        self._versions[pages] = [each.version for each in former]
        self._page_bytes[pages] = former[0].page_bytes
        self.size_bytes += len(former) * former[0].size_bytes

    @property
    def may_mark_all(self) -> bool:
        """Whether all pages are kept, all slots had a row, and it is still marked which of them change."""
        all_kept = len(self.kept) == len(self._is_kept)
        return all_kept and self.rows == self.slots_below and not self._all_changed

    def mark_all(self) -> None:
        """All slots count as changed: none of the kept pages is going to be exchanged."""
        self._bits.fill(_ALL_BITS)
        self._all_changed = True

    def shared_bytes(self) -> int:
        """Bytes of the kept pages that a snapshot still reads, as of now. O(pages)."""
        pages = np.flatnonzero(self._is_kept).astype(np.int32)
        shared = self._still_read(pages, self._versions[pages])
        self._shared[:] = False
        self._shared[pages] = shared
        return int(self._page_bytes[pages[shared]].sum())

    def numbers_in(self, position: int) -> Iterator[NDArray[np.int64]]:
        """All that is noted of the column at a position, which holds int64: numbers of its values."""
        yield from (rows.values[position] for rows in self.noted)
        yield from (former.columns[position][0] for former in self.kept.values())

    def shrink(self, shared_too: bool) -> bool:
        """Exchange a kept page for notes of its slots. False if there is none, or that would gain little.

        `shared_too`: also one that a snapshot still read when `shared_bytes` was last asked.
        """
        page = next((page for page in self.kept if shared_too or not self._shared[page]), None)
        return page is not None and self._exchange(page, EXCHANGED_SLOTS_MAX)

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted, alone or with their page."""
        return self._changed(0, self.slots_below)

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        while self.kept:
            self._exchange(next(iter(self.kept)), PAGE_ROWS)
        self.slots_below = int(np.searchsorted(kept, self.slots_below))
        for rows in self.noted:
            rows.slots[:] = np.searchsorted(kept, rows.slots)
        self._is_kept = np.zeros(pages_for(self.slots_below), dtype=np.bool_)
        self._shared = self._is_kept.copy()
        self._versions = np.zeros(len(self._is_kept), dtype=np.int64)
        self._page_bytes = self._versions.copy()
        self._noted_in = np.full(pages_for(self.slots_below), _NEVER, dtype=np.int32)
        self._bits = np.zeros(words_for(self.slots_below), dtype=np.uint64)
        self._all_changed, self._uncounted = False, 0
        self.first(np.concatenate([np.zeros(0, dtype=np.int32), *(rows.slots for rows in self.noted)]))

    def _count(self, slots: int) -> None:
        """So many slots were marked; all pages are kept. Look now and then whether hardly any is unmarked."""
        self._uncounted += slots
        if self._uncounted * MARKED_PARTS < self.slots_below:
            return
        self._uncounted = 0
        changed = np.bitwise_count(self._bits[: -(-self.slots_below // 64)])
        unchanged = self.slots_below - int(changed.sum())
        in_pages = np.add.reduceat(changed, range(0, len(changed), PAGE_ROWS // 64), dtype=np.int64)
        exchanged = int((in_pages <= EXCHANGED_SLOTS_MAX).sum())
        if unchanged * MARKED_PARTS < self.slots_below or exchanged * MARKED_PARTS < len(in_pages):
            self.mark_all()

    def _exchange(self, page: int, slots_max: int) -> bool:
        """Exchange a kept page for notes of its slots, if no more than so many have changed."""
        former = self.kept[page]
        slots = self._changed(page << PAGE_BITS, (page + 1) << PAGE_BITS)
        if former.noted is not None:
            slots = slots[~flags((former.noted,), 0, PAGE_ROWS)[slots - (page << PAGE_BITS)]]
        if len(slots) > slots_max:
            return False
        del self.kept[page]
        self._is_kept[page] = False
        self._noted_in[page] = _NEVER
        self.size_bytes -= former.size_bytes
        if len(slots):
            self.add(former.rows(page, slots))
        return True

    def _changed(self, start: int, stop: int) -> NDArray[np.int32]:
        stop = min(stop, self.slots_below)
        return (start + np.flatnonzero(flags((self._bits,), start, stop))).astype(np.int32)


def _packed(notes: list[NotedRows]) -> Iterator[NotedRows]:
    """The same rows, put together, `PAGE_ROWS` in each but the last."""
    parts: list[NotedRows] = []
    room = PAGE_ROWS
    for rows in notes:
        start = 0
        while start < len(rows.slots):
            stop = min(start + room, len(rows.slots))
            parts.append(rows.part(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield _together(parts, PAGE_ROWS)
                parts, room = [], PAGE_ROWS
    if parts:
        yield _together(parts, PAGE_ROWS - room)


def _together(parts: list[NotedRows], rows: int) -> NotedRows:
    """All of these notes, which have so many rows together."""

    def joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
        dtype = arrays[0].dtype
        whole = PAGE_MEMORY.page(rows, dtype) if rows == PAGE_ROWS else np.empty(rows, dtype=dtype)
        return np.concatenate(arrays, out=whole)

    def joined_valid(column: int) -> NDArray[np.uint8] | None:
        valid = [part.valid[column] for part in parts]
        if all(each is None for each in valid):
            return None
        ones = (np.ones(len(part.slots), dtype=np.uint8) for part in parts)
        return joined([one if each is None else each for each, one in zip(valid, ones, strict=True)])

    columns = range(len(parts[0].values))
    return NotedRows(
        joined([part.slots for part in parts]),
        joined([part.live for part in parts]),
        tuple(joined([part.values[column] for part in parts]) for column in columns),
        tuple(joined_valid(column) for column in columns),
        sum(part.beyond_bytes for part in parts),
    )


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

    def shared_bytes(self) -> int:
        """0: no snapshot holds what is noted."""
        return 0

    def shrink(self, shared_too: bool) -> bool:
        """False: each slot is noted alone."""
        return False

    def slots(self) -> NDArray[np.int32]:
        """The slots that are noted."""
        return np.fromiter(self.held, dtype=np.int32, count=len(self.held))

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        self.slots_below = int(np.searchsorted(kept, self.slots_below))
        slots = np.searchsorted(kept, self.slots()).tolist()
        self.held = dict(zip(slots, self.held.values(), strict=True))
