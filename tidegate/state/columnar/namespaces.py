"""`ColumnarNamespaces`: a vectorised state in memory that finds the rows of a namespace without a scan of all.

Rule: the slots of each namespace are kept in memory, four bytes a row. They are derived: noted as rows come, and found
anew from the keys after a restore. A row that was removed may still be noted; who reads asks which rows live.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.state.columnar.key_space import KeySpace, key_pieces
from tidegate.state.columnar.undo_log import Notes
from tidegate.state.columnar.vector_table import ColumnarTable
from tidegate.state.common.backend import ValueSpec
from tidegate.state.kernels.columns import fixed_values
from tidegate.state.key_index.hash_table import Upserted

_FOUND_ROWS = 1 << 20
"""Keys whose namespaces are looked at together."""


class ColumnarNamespaces(ColumnarTable):
    """A `NamespacedTable` over the slots of a `KeySpace`."""

    def __init__(self, space: KeySpace, name: str, specs: Sequence[ValueSpec], incremental: bool) -> None:
        self._noted: dict[int, list[NDArray[np.int32]]] | None = {}
        """Slots of each namespace, some perhaps twice or without a row. None: to be found anew."""
        super().__init__(space, name, specs, incremental)

    def upsert(self, keys: pa.RecordBatch, new_only: bool = False) -> Upserted:
        """Begin a batch. Keys without a row get one."""
        upserted = super().upsert(keys, new_only)
        if len(upserted.new_rows) and self._noted is not None:
            note(self._noted, fixed_values(keys.column(0))[upserted.new_rows], upserted.slots[upserted.new_rows])
        return upserted

    def namespaces(self) -> NDArray[np.int64]:
        """The namespaces that have a row, ascending."""
        return np.array([name for name in sorted(self._found()) if len(self._slots(name))], dtype=np.int64)

    def scan_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in a namespace, in slot order, with their slots."""
        return self.scan_namespaces((namespace,), rows_max, groups)

    def drain_namespace(
        self, namespace: int, rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. Their values are there until the next one is."""
        return self.drain_namespaces((namespace,), rows_max, groups)

    def scan_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The keys in namespaces, one after the other, each in slot order, with their slots."""
        with self._space.reading():
            slots = self._slots_of(namespaces)
            if groups is not None:
                of = self._space.groups_of(slots)
                slots = slots[(of >= groups.start) & (of < groups.stop)]
            if len(slots):
                keys, _ = self._space.freeze()
                for start in range(0, len(slots), rows_max):
                    piece = slots[start : start + rows_max]
                    yield keys.take(piece), piece

    def drain_namespaces(
        self, namespaces: Sequence[int], rows_max: int, groups: range | None = None
    ) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """The same; the rows of a batch are removed when it is drawn. Their values are there until the next one is."""
        for keys, slots in self.scan_namespaces(namespaces, rows_max, groups):
            self.set_live(slots, np.zeros(len(slots), dtype=np.bool_))
            yield keys, slots
        self._space.settle()

    def load(self, rows: pa.RecordBatch, layer: int) -> None:
        """Put stored rows."""
        self._noted = None
        super().load(rows, layer)

    def undo(self, notes: Notes) -> None:
        """Restore what the state held when these notes began."""
        self._noted = None
        super().undo(notes)

    def rebuild(self, kept: NDArray[np.int32], slots: int) -> None:
        """Renumber slots: slot `kept[i]` becomes slot i."""
        if self._noted is not None:
            names = list(self._noted)
            parts = [part for name in names for part in self._noted[name]]
            noted = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
            of_parts = [number for number, name in enumerate(names) for _ in self._noted[name]]
            of = np.repeat(np.array(of_parts, dtype=np.int64), [len(part) for part in parts])
            # Of each namespace the slots that live, ascending, each once.
            living = np.unique((of[self.live(noted)] << 32) + noted[self.live(noted)])
            moved = np.searchsorted(kept, living & 0xFFFFFFFF).astype(np.int32)
            bounds = np.searchsorted(living >> 32, np.arange(len(names) + 1)).tolist()
            ranges = zip(names, bounds, bounds[1:], strict=False)
            self._noted = {name: [moved[start:stop]] for name, start, stop in ranges if stop > start}
        super().rebuild(kept, slots)

    def _slots(self, namespace: int) -> NDArray[np.int32]:
        """Slots of a namespace that have a row, ascending."""
        noted = self._found()
        parts = noted.get(namespace)
        if parts is None:
            return np.zeros(0, dtype=np.int32)
        slots = np.unique(np.concatenate(parts)) if len(parts) > 1 else parts[0]
        living = slots[self.live(slots)]
        if len(living):
            noted[namespace] = [living]
        else:
            del noted[namespace]
        return living

    def _slots_of(self, namespaces: Sequence[int]) -> NDArray[np.int32]:
        """The slots of several namespaces that have a row. One look at which of them live costs as much as many."""
        if len(namespaces) == 1:
            return self._slots(namespaces[0])
        noted = self._found()
        found = {name: parts for name in namespaces if (parts := noted.get(name)) is not None}
        if not found:
            return np.zeros(0, dtype=np.int32)
        slots = np.concatenate([part for parts in found.values() for part in parts])
        if all(len(parts) == 1 for parts in found.values()) and bool(self.live(slots).all()):
            return slots
        return np.concatenate([self._slots(name) for name in found])

    def _found(self) -> dict[int, list[NDArray[np.int32]]]:
        if self._noted is None:
            noted: dict[int, list[NDArray[np.int32]]] = {}
            for keys, slots in key_pieces(self._space, self.live, _FOUND_ROWS):
                note(noted, fixed_values(keys.column(0)), slots)
            self._noted = noted
        return self._noted


def note(noted: dict[int, list[NDArray[np.int32]]], namespaces: NDArray[np.int64], slots: NDArray[np.int32]) -> None:
    """Note slots, each once, under the namespace of each."""
    first = int(namespaces[0])
    if first == int(namespaces[-1]) and bool((namespaces == first).all()):
        noted.setdefault(first, []).append(np.sort(slots))  # a slot that got a row again is among new ones
        return
    order = np.lexsort((slots, namespaces))
    ordered, of = namespaces[order], slots[order]
    bounds = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(of)]
    for name, (start, stop) in zip(ordered[bounds[:-1]].tolist(), pairwise(bounds), strict=True):
        noted.setdefault(name, []).append(of[start:stop])
