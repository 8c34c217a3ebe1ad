"""`UndoLog`: lets a backend in memory return to a checkpoint without reading anything.

Before a slot changes for the first time after a freeze, its contents are noted. Going back therefore costs only as much
as has changed since. Rules:
- Every freeze begins a part of the log, under the number of its checkpoint. A part holds the former contents of slots
  as of its freeze. Slots that got a key later were empty at the freeze, and are not noted.
- To go back, parts are undone from the newest to the part of the checkpoint. The coordinator chooses the checkpoint. If
  it has no part here, the backend cannot go back to it.
- When a checkpoint completes, older ones are not needed any more, and the parts before it are dropped.
- All notes together have a memory limit. Pages that a snapshot holds anyway, until it has written them, do not count.
  Beyond the limit, notes are shrunk where possible, the oldest first. Then the oldest part is dropped. When the last
  part is dropped, nothing is noted until the next freeze. With a limit of 0 nothing is ever noted.
- A page that a snapshot reads is copied anyway, and the former page is kept in the newest part. Older parts are dropped
  to make room for such copies (`make_room`). Including them, all notes take at most the limit, nine eighths of the
  state, or `COPIES_BYTES_MIN`, whichever is largest.
- A part that alone exceeds the limit was noted in vain. After two such parts in a row the next freeze begins no part,
  after the third the next two, then four, up to `_SKIPPED_MAX`. A part that fits resets this.

A vectorised state notes columns (`TableNotes`), object state notes Python objects (`ObjectNotes`). Rules of
`TableNotes`:
- When the owner copies a page because a snapshot reads it, the former page is kept, and going back restores it. Its
  slots are not noted individually.
- All other slots are noted one by one, before they first change. Noting a row costs several times as much as copying it
  with its page, so a page with `NOTED_SLOTS_MAX` noted slots is kept from then on, if there is memory for it. Going
  back restores the page, and then the slots that were noted before.
- When memory is short, a kept page is exchanged for notes of its changed slots, unless most have changed. A page that
  is still read is exchanged only to make room for copies of a later snapshot: otherwise the exchange would take more
  memory, not less.
- Once all pages are kept, and nearly all slots have changed, or nearly all pages have too many changed slots for an
  exchange, the remaining slots count as changed. Marking slots costs time per row, and would hardly save memory. All
  slots count as changed at once if memory allows several times as much, and all slots had a row.
- Noted rows are packed into pages of `PAGE_MEMORY`, whose memory is then free for copies of the next snapshot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.state.columnar.change_tracking import flags, words_for
from tidegate.state.common.page_memory import PAGE_MEMORY
from tidegate.state.common.pages import FormerPage, pages_for
from tidegate.state.kernels.paged import PAGE_BITS, PAGE_ROWS, Bitmap, mark_below, mark_first, mark_slots
from tidegate.storage.ids import CheckpointId

COPIES_BYTES_MIN = 1 << 25
"""Notes may always take this much memory, however small the state is."""
PLENTY = 3
"""The factor for `has_plenty`. It leaves memory for several checkpoints, and for other states of the operator."""
_SKIPPED_MAX = 8
_PARTS_MAX = 16
"""The log covers at most this many checkpoints: more than may be pending, plus some that failed."""
NOTED_SLOTS_MAX = PAGE_ROWS // 4
EXCHANGED_SLOTS_MAX = PAGE_ROWS // 2
"""If more slots of a kept page have changed, exchanging the page for notes of its slots would gain little."""
MARKED_PARTS = 8
"""With 8, all slots count as changed when less than 1/8 are unchanged, or less than 1/8 of the pages exchangeable."""
_NEVER = -(1 << 30)
_ALL_BITS = np.uint64((1 << 64) - 1)
StillRead: TypeAlias = Callable[[NDArray[np.int32], NDArray[np.int64]], NDArray[np.bool_]]
"""Returns for each of these pages, in this version, whether a snapshot still reads it."""
ENTRY_BYTES = 100
"""Estimated memory of a dictionary entry, without the object that it holds."""


class Notes(Protocol):
    """Undo data of one state: the contents that its slots had at one checkpoint, for the slots that changed later."""

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of the undo data, in bytes."""
        ...

    def slots(self) -> NDArray[np.int32]:
        """Returns the slots whose former contents are recorded."""
        ...

    def shared_bytes(self) -> int:
        """Returns the size in bytes of recorded pages that a snapshot references as well. Dropping the undo data would
        not free them.
        """
        ...

    def shrink(self, shared_too: bool) -> bool:
        """Reduces the memory of the undo data by one step. Returns False if that is not possible.

        With `shared_too`, memory that a snapshot referenced at the last call of `shared_bytes` may be reduced as well.
        """
        ...

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumbers the recorded slots: slot `kept[i]` becomes slot i. `kept` ascends, and contains all recorded
        slots.
        """
        ...


class UndoableState(Protocol):
    """A state that can record the former contents of its slots before they change."""

    @property
    def name(self) -> str:
        """Returns the name of the state."""
        ...

    def begin_notes(self) -> Notes:
        """Starts to record former contents: from now on, each slot is recorded before it first changes."""
        ...

    def end_notes(self) -> None:
        """Stops recording the former contents of slots."""
        ...

    def undo(self, notes: Notes) -> None:
        """Restores the contents that the state had when `notes` began. The state must be as it was when `notes`
        ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Part:
    """The undo data from the freeze for one checkpoint to the next freeze."""

    checkpoint_id: CheckpointId
    notes: list[Mapping[str, Notes]]
    """The notes of each freeze in this part, by state, oldest first."""


class UndoLog:
    """The undo log of one key space, by which its states can be rewound to a checkpoint.

    `bytes_max` limits the total memory of this log and the logs `others`. The log is a `SlotState` without rows, so
    that slots that it has recorded are not dropped.
    """

    name = "undo log"
    used_slots = 0

    def __init__(self, bytes_max: int, *others: UndoLog) -> None:
        self.bytes_max = bytes_max
        self._others = others
        self._states: list[UndoableState] = []
        self._parts: list[_Part] = []
        self._outgrown = 0
        """Number of consecutive parts that have exceeded the limit on their own."""
        self._to_skip = 0

    @property
    def size_bytes(self) -> int:
        """Returns the estimated memory of all undo data, in bytes."""
        return sum(notes.size_bytes for notes in self._notes())

    @property
    def own_bytes(self) -> int:
        """Returns the memory of the undo data in bytes, without pages that a snapshot references anyway. The limit
        applies to this number.
        """
        return sum(notes.size_bytes - notes.shared_bytes() for notes in self._notes())

    @property
    def empty(self) -> bool:
        """Returns whether there is no checkpoint to which the states can be rewound."""
        return not self._parts

    def begin(self, checkpoint_id: CheckpointId, states: Iterable[UndoableState], after_freeze: bool = False) -> None:
        """Begins the undo data for this checkpoint, for which all states were just frozen, or from which they were
        loaded.

        With `after_freeze`, nothing is recorded for a while if earlier undo data exceeded the limit.
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
            # The oldest checkpoint may be the only complete one, so it stays. The second part is merged into it.
            self._parts[0].notes.extend(self._parts.pop(1).notes)
        self.settle()

    def keeps(self, checkpoint_id: CheckpointId) -> bool:
        """Returns whether the states can be rewound to this checkpoint."""
        return any(part.checkpoint_id == checkpoint_id for part in self._parts)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """Drops the undo data for earlier checkpoints, because this checkpoint has completed."""
        self._parts = [part for part in self._parts if part.checkpoint_id >= checkpoint_id]
        if not self._parts:
            self.clear()

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Restores the contents of all states at this checkpoint, to which they can be rewound again later."""
        assert self.keeps(checkpoint_id), f"checkpoint {checkpoint_id} is not kept"
        states = {state.name: state for state in self._states}
        while self._parts and self._parts[-1].checkpoint_id >= checkpoint_id:
            for notes in reversed(self._parts.pop().notes):
                for name, state in states.items():
                    state.undo(notes[name])
        self.clear()
        self.begin(checkpoint_id, states.values())

    def settle(self) -> None:
        """Reduces undo data, and drops the oldest, until the memory limit holds."""
        if self._parts and not self._is_small and not self._fit(self._limit_bytes, spared=0, shared_too=False):
            self._to_skip = min(1 << self._outgrown >> 1, _SKIPPED_MAX)
            self._outgrown += 1
            self.clear()

    def make_room(self, copies_bytes: int, state_bytes: int) -> None:
        """Reduces or drops older undo data, before copies of `copies_bytes` bytes are recorded for a state of
        `state_bytes` bytes.
        """
        allowed_bytes = self.bytes_max - sum(log.size_bytes for log in self._others)
        bytes_max = max(state_bytes + state_bytes // 8, COPIES_BYTES_MIN, allowed_bytes) - copies_bytes
        if self.size_bytes > bytes_max:
            self._fit(bytes_max, spared=1, shared_too=True)

    def has_room(self, size_bytes: int) -> bool:
        """Returns whether `size_bytes` more bytes can be recorded without reducing or dropping undo data."""
        return self.own_bytes + size_bytes <= self._limit_bytes

    def has_plenty(self, size_bytes: int) -> bool:
        """Returns whether `PLENTY` times `size_bytes` bytes can be recorded without reducing or dropping undo data."""
        return PLENTY * size_bytes <= COPIES_BYTES_MIN and self.has_room(PLENTY * size_bytes)

    def clear(self) -> None:
        """Drops all undo data, so that the states cannot be rewound to any checkpoint."""
        self._parts.clear()
        for state in self._states:
            state.end_notes()
        self._states = []

    def notes_of(self, state: str) -> Iterator[Notes]:
        """Yields the undo data of one state, for each checkpoint."""
        return (notes[state] for part in self._parts for notes in part.notes if state in notes)

    def grow(self, slots: int) -> None:
        """Does nothing, because the contents of new slots are not recorded."""

    def needed(self, slots: int) -> NDArray[np.bool_]:
        """Returns a mask of the slots whose former contents are recorded.

        Such a slot may be empty now, but is not after a rewind.
        """
        flags = np.zeros(slots, dtype=np.bool_)
        for notes in self._notes():
            flags[notes.slots()] = True
        return flags

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumbers the recorded slots: slot `kept[i]` becomes slot i. `slots` is the number of slots before."""
        for notes in self._notes():
            notes.rebuild(kept)

    @property
    def _limit_bytes(self) -> int:
        return self.bytes_max - sum(log.own_bytes for log in self._others)

    @property
    def _is_small(self) -> bool:
        """Returns whether the limit would hold even if memory shared with snapshots were included. Cheap to compute."""
        return self.size_bytes + sum(log.size_bytes for log in self._others) <= self.bytes_max

    def _fit(self, bytes_max: int, spared: int, shared_too: bool) -> bool:
        """Reduces and drops undo data, except for the newest `spared` checkpoints, until its size is at most
        `bytes_max`. Returns False if none remains.

        With `shared_too`, the size includes memory that a snapshot references anyway, and this memory may be reduced.
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


@dataclass(frozen=True, slots=True)
class NotedRows:
    """The former rows of some slots of a vectorised state, recorded in the undo log."""

    slots: NDArray[np.int32]
    live: NDArray[np.uint8]
    """1 for each slot that had a row."""
    values: tuple[NDArray[Any], ...]
    """One array for each column."""
    valid: tuple[NDArray[np.uint8] | None, ...]
    """One array for each column; None if the column had never had a null."""
    beyond_bytes: int = 0
    """Estimated bytes of the values outside the arrays, to which the arrays refer by number."""

    @property
    def size_bytes(self) -> int:
        """Returns the size of the arrays in bytes, with an estimate for Python objects and values of variable width."""
        arrays: list[NDArray[Any]] = [self.slots, self.live, *self.values]
        arrays += [valid for valid in self.valid if valid is not None]
        return self.beyond_bytes + sum(array.nbytes + ENTRY_BYTES for array in arrays)

    def part(self, start: int, stop: int) -> NotedRows:
        """Returns the recorded rows with the indices from `start` to `stop` (exclusive), without a copy."""
        valid = tuple(None if valid is None else valid[start:stop] for valid in self.valid)
        values = tuple(values[start:stop] for values in self.values)
        beyond = self.beyond_bytes * (stop - start) // max(1, len(self.slots))
        return NotedRows(self.slots[start:stop], self.live[start:stop], values, valid, beyond)


class KeptPage(NamedTuple):
    """A former page of a vectorised state, recorded in the undo log.

    A tuple, because many are created at once, and a tuple takes a third of the time of a dataclass.
    """

    version: int
    """The page's version in `Pins`."""
    live: FormerPage
    columns: tuple[FormerPage, ...]
    beyond_bytes: int = 0
    """Estimated bytes of the values outside the arrays, as in `NotedRows`."""
    noted: Bitmap | None = None
    """Slots that changed before the page was kept, and are noted individually."""

    @property
    def page_bytes(self) -> int:
        """Returns the size of the page's arrays in bytes."""
        arrays = (array for former in (self.live, *self.columns) for array in former if array is not None)
        return sum(array.nbytes + ENTRY_BYTES for array in arrays)

    @property
    def size_bytes(self) -> int:
        """Returns the size in bytes of the page's arrays, and of the values to which they refer."""
        return self.beyond_bytes + self.page_bytes

    def rows(self, page: int, slots: NDArray[np.int32]) -> NotedRows:
        """Returns the recorded rows of some slots of this page. `page` is the number of this page."""
        places = slots - (page << PAGE_BITS)
        valid = (None if valid is None else valid[places] for _, valid in self.columns)
        values = tuple(values[places] for values, _ in self.columns)
        beyond = self.beyond_bytes * len(slots) // PAGE_ROWS
        return NotedRows(slots, self.live[0][places], values, tuple(valid), beyond)


class TableNotes:
    """The undo data (`Notes`) of a vectorised state, which had `slots` slots and `rows` rows at the freeze.

    `still_read` returns which pages a snapshot still reads.
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
        """The number of slots at the freeze. Slots from this number on were empty."""
        self.rows = rows
        self._still_read = still_read
        self._packed: list[NotedRows] = []
        """Notes of `PAGE_ROWS` rows each."""
        self._loose: list[NotedRows] = []
        """Further notes, with fewer than `PAGE_ROWS` rows in total."""
        self.kept: dict[int, KeptPage] = {}
        """Former pages, by their numbers."""
        self._is_kept: NDArray[np.bool_] = np.zeros(pages_for(slots_below), dtype=np.bool_)
        self._shared: NDArray[np.bool_] = self._is_kept.copy()
        """For each page, whether it was kept and still read by a snapshot at the last call of `shared_bytes`."""
        self._versions: NDArray[np.int64] = np.zeros(pages_for(slots_below), dtype=np.int64)
        self._page_bytes: NDArray[np.int64] = np.zeros(pages_for(slots_below), dtype=np.int64)
        """Version and bytes of each kept page."""
        self._noted_in: NDArray[np.int32] = np.zeros(pages_for(slots_below), dtype=np.int32)
        """For each page, how many slots are noted individually. `_NEVER` if the page must not be kept again."""
        self._bits: Bitmap = np.zeros(words_for(slots_below), dtype=np.uint64)
        """Slots that have changed."""
        self._all_changed = False
        """True once all slots count as changed."""
        self._uncounted = 0
        """Number of slots that were marked since the set bits were last counted."""
        self.size_bytes = self._bits.nbytes

    def first(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the slots among `slots` that must be recorded now because they were not recorded before, each
        once.
        """
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
        """Records the former rows of slots that `first` has returned."""
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
        """Returns the rows that were recorded one by one, and not with their page."""
        return [*self._packed, *self._loose]

    def dense(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the pages that would have too many recorded rows together with `slots`, which `first` has
        returned.
        """
        self._noted_in += np.bincount(slots >> PAGE_BITS, minlength=len(self._noted_in)).astype(np.int32)
        return np.flatnonzero((self._noted_in > NOTED_SLOTS_MAX) & ~self._is_kept).astype(np.int32)

    def noted_before(self, slots: NDArray[np.int32], pages: NDArray[np.int32]) -> list[Bitmap]:
        """Returns, for each page, a bitmap of the slots recorded before, without `slots`, which `first` has
        returned.
        """
        before = self._bits.copy()
        mark_slots(now := np.zeros_like(before), slots)
        before &= ~now
        return [before[page * PAGE_ROWS // 64 : (page + 1) * PAGE_ROWS // 64].copy() for page in pages.tolist()]

    def not_kept(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Returns the slots among `slots` whose former page is not recorded."""
        others: NDArray[np.int32] = slots[~self._is_kept[slots >> PAGE_BITS]]
        return others

    def keep(self, pages: NDArray[np.int32], former: Sequence[KeptPage]) -> None:
        """Records former pages, at least one, all with one layout. Rows that were recorded one by one stay recorded.

        Pages with only slots that were added after the freeze are ignored.
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
        """Returns whether `mark_all` may be called. All pages must be recorded, and all slots must have had a row.
        Changed slots must still be marked one by one.
        """
        all_kept = len(self.kept) == len(self._is_kept)
        return all_kept and self.rows == self.slots_below and not self._all_changed

    def mark_all(self) -> None:
        """Marks all slots as changed. From now on, no recorded page is replaced by recorded rows."""
        self._bits.fill(_ALL_BITS)
        self._all_changed = True

    def shared_bytes(self) -> int:
        """Returns the size in bytes of the recorded pages that a snapshot still reads. O(pages)."""
        pages = np.flatnonzero(self._is_kept).astype(np.int32)
        shared = self._still_read(pages, self._versions[pages])
        self._shared[:] = False
        self._shared[pages] = shared
        return int(self._page_bytes[pages[shared]].sum())

    def numbers_in(self, position: int) -> Iterator[NDArray[np.int64]]:
        """Yields the recorded value numbers of the int64 column with the index `position`."""
        yield from (rows.values[position] for rows in self.noted)
        yield from (former.columns[position][0] for former in self.kept.values())

    def shrink(self, shared_too: bool) -> bool:
        """Replaces a recorded page by the recorded rows of its changed slots, to save memory. Returns False if no page
        is left, or if that would save little.

        With `shared_too`, the page may be one that a snapshot still read at the last call of `shared_bytes`.
        """
        page = next((page for page in self.kept if shared_too or not self._shared[page]), None)
        return page is not None and self._exchange(page, EXCHANGED_SLOTS_MAX)

    def slots(self) -> NDArray[np.int32]:
        """Returns the slots whose former contents are recorded, one by one or with their page."""
        return self._changed(0, self.slots_below)

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumbers the recorded slots: slot `kept[i]` becomes slot i."""
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
        """Marks all slots as changed if only few are not marked yet.

        Called after `slots` slots were marked, while all pages are recorded. Counts the unmarked slots only from time
        to time.
        """
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
        """Replaces a recorded page by the recorded rows of its changed slots, if at most `slots_max` have changed.

        Returns whether that was done.
        """
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
    """Divides recorded rows again, into batches of `PAGE_ROWS` rows. The last batch may have fewer."""
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
    """Joins recorded rows into one part. `rows` is the total number of rows."""

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


class ObjectNotes:
    """The undo data (`Notes`) of an object state: the former Python object of each changed slot."""

    __slots__ = ("held", "rows", "size_bytes", "slots_below")

    def __init__(self, slots_below: int, rows: int) -> None:
        self.slots_below = slots_below
        """Slots from this one on were empty."""
        self.rows = rows
        self.held: dict[int, Any] = {}
        self.size_bytes = 0

    def add(self, slot: int, held: Any) -> None:
        """Records the former object of a slot, unless the slot is recorded already.

        The estimated size does not include objects inside a list or map.
        """
        if slot < self.slots_below and slot not in self.held:
            self.held[slot] = held
            self.size_bytes += ENTRY_BYTES + sys.getsizeof(held)

    def shared_bytes(self) -> int:
        """Returns 0, because no snapshot references the recorded objects."""
        return 0

    def shrink(self, shared_too: bool) -> bool:
        """Returns False, because there are no recorded pages that could be replaced."""
        return False

    def slots(self) -> NDArray[np.int32]:
        """Returns the slots whose former objects are recorded."""
        return np.fromiter(self.held, dtype=np.int32, count=len(self.held))

    def rebuild(self, kept: NDArray[np.int32]) -> None:
        """Renumbers the recorded slots: slot `kept[i]` becomes slot i."""
        self.slots_below = int(np.searchsorted(kept, self.slots_below))
        slots = np.searchsorted(kept, self.slots()).tolist()
        self.held = dict(zip(slots, self.held.values(), strict=True))
