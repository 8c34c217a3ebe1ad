"""`HotNamespaces`: the hot rows of a state with namespaces, and what the database may have of each namespace.

`CachedNamespaces` has one. Rules, beside those of `HotRows`:
- A namespace is *cold* in a key group where the database may have a row that is not here. Only there are keys looked
  up in the database. What a window gets is new, so as long as rows fit into memory nothing is read.
- A namespace is *written* in a key group where the database may have any row of it. If it is drained, its rows there
  are removed as a range, and its slots are free at once; if it was never written, it leaves no trace.
- Ranges wait until something else is written (`take_gone`), and are removed before it. Until then nobody looks there,
  because a namespace that is drained is not cold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace
from tidegate.state.columnar.namespaces import ColumnarNamespaces, note
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.key_index.hash_table import Upserted
from tidegate.state.rocksdb.cached.hot_rows import Fetch, HotRows
from tidegate.storage.state.snapshot import FrozenState

_RANGE_ROWS = 4
"""Rows are removed as a range from as many a key group: a range costs the database more than a row."""

Flags = dict[int, NDArray[np.bool_]]
"""By namespace, one flag a key group. A namespace without any has no entry."""


class HotNamespaces(HotRows, ColumnarNamespaces):
    """`HotRows` in namespaces. `groups` is the number of all key groups."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], fetch: Fetch, groups: int) -> None:
        self._groups = groups
        self._cold: Flags = {}
        self._written: Flags = {}
        self._gone: Flags = {}
        super().__init__(space, name, specs, fetch)

    @property
    def size_bytes(self) -> int:
        """About how much memory the rows take."""
        return super().size_bytes + 4 * self._space.slots

    @property
    def unwritten(self) -> bool:
        """Whether anything has changed since the last snapshot."""
        return bool(self._gone) or super().unwritten

    def stored(self, found: Mapping[int, Sequence[int]]) -> None:
        """The database has rows in these namespaces, of these key groups; none is here."""
        for namespace, groups in found.items():
            for flags in (self._cold, self._written):
                self._set(flags, namespace, groups)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch: bring in the rows of keys that are not here. Keys without a row get one."""
        known = self._space.slots
        upserted = super().upsert(keys, new_only)
        self._note_new(keys, upserted.slots, np.union1d(_beyond(upserted, known), upserted.new_rows))
        return upserted

    def show(self, keys: pa.RecordBatch, columns: Sequence[pa.Array]) -> NDArray[np.int32]:
        """As of `HotRows`."""
        known = self._space.slots
        slots = super().show(keys, columns)
        self._note_new(keys, slots, np.flatnonzero(slots >= known))
        return slots

    def changed(self) -> Sequence[FrozenState]:
        """As of `HotRows`. All namespaces count as written from now on, and those that have no row anywhere no more."""
        found = self._found()
        for namespace in [each for each in self._written if each not in found and each not in self._cold]:
            del self._written[namespace]
        for namespace in found:
            self._written[namespace] = np.ones(self._groups, dtype=np.bool_)
        return super().changed()

    def cold_groups(self, namespace: int, groups: range) -> list[int]:
        """Those of some key groups where the database may have rows of a namespace that are not here."""
        flags = self._cold.get(namespace)
        if flags is None:
            return []
        found: list[int] = (np.flatnonzero(flags[groups.start : groups.stop]) + groups.start).tolist()
        return found

    def warm(self, namespace: int, group: int) -> None:
        """All rows of a namespace in a key group are here."""
        self._clear_flags(self._cold, namespace, range(group, group + 1))

    def drained(self, namespace: int, groups: range, slots: NDArray[np.int32]) -> None:
        """A namespace has no row in some key groups any more. All that it had are here, in these slots, and removed."""
        assert self.dirty is not None
        flags = self._written.get(namespace)
        of = flags[groups.start : groups.stop] if flags is not None else np.zeros(0, dtype=np.bool_)
        written = np.flatnonzero(of) + groups.start
        if len(written) and len(slots) < _RANGE_ROWS * len(written):
            return  # each is removed from the database
        # One that got a row again, from who was given the former one, is new.
        self.dirty.unmark(slots[~self.live(slots)])
        if len(written):
            self._set(self._gone, namespace, written)
            self._clear_flags(self._written, namespace, groups)

    def forget_empty(self, namespace: int) -> None:
        """Do not know a namespace any more, if it has no row here."""
        self._slots(namespace)

    def take_gone(self) -> list[tuple[int, list[int]]]:
        """Namespaces, and key groups, that are to be removed before anything else is written. Only once."""
        gone, self._gone = self._gone, {}
        return [(namespace, np.flatnonzero(flags).tolist()) for namespace, flags in gone.items()]

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i. Others may have rows, which go to the database."""
        stays = np.zeros(slots, dtype=np.bool_)
        stays[kept] = True
        left: dict[int, list[NDArray[np.int32]]] = {}
        for namespace in list(self._found()):
            of = self._slots(namespace)
            moved = np.searchsorted(kept, of[stays[of]]).astype(np.int32)
            if len(moved):
                left[namespace] = [moved]
        self._noted = None
        super().rebuild(kept, slots)
        self._noted = left

    def _perhaps_stored(self, keys: pa.RecordBatch, upserted: Upserted) -> NDArray[np.int32]:
        """Of the rows with new keys those that the database may have."""
        new = upserted.new_rows
        if not self._cold or not len(new):
            return new[:0]
        names, groups = fixed_values(keys.column(0))[new], self._space.groups_of(upserted.slots[new])
        wanted = np.zeros(len(new), dtype=np.bool_)
        for namespace in np.unique(names).tolist():
            if (flags := self._cold.get(namespace)) is not None:
                of = names == namespace
                wanted[of] = flags[groups[of]]
        return new[wanted]

    def _leave(self, gone: NDArray[np.int32]) -> None:
        """These slots have rows, which are in the database now, and nowhere else."""
        groups = self._space.groups_of(gone)
        names = fixed_values(self._space.keys_of(gone).column(0))
        for namespace in np.unique(names).tolist():
            of = np.unique(groups[names == namespace])
            for flags in (self._cold, self._written):
                self._set(flags, namespace, of)

    def _note_new(self, keys: pa.RecordBatch, slots: NDArray[np.int32], rows: NDArray[np.int64]) -> None:
        if len(rows) and self._noted is not None:
            note(self._noted, fixed_values(keys.column(0))[rows], slots[rows])

    def _set(self, flags: Flags, namespace: int, groups: Sequence[int] | NDArray[np.int64]) -> None:
        flags.setdefault(namespace, np.zeros(self._groups, dtype=np.bool_))[groups] = True

    def _clear_flags(self, flags: Flags, namespace: int, groups: range) -> None:
        found = flags.get(namespace)
        if found is not None:
            found[groups.start : groups.stop] = False
            if not found.any():
                del flags[namespace]


def _beyond(upserted: Upserted, known: int) -> NDArray[np.int32]:
    """The first rows of keys that have got a slot beyond the first ones."""
    return upserted.first_rows[upserted.slots[upserted.first_rows] >= known]
