"""`StateUndo` undoes the changes of keyed state that a call of a user function made before it failed.

`KeyedStates` binds states to cells that report their changes here, if the operator needs it. Rules:

- Each change records how to undo it. Undoing in reverse order restores the values, the time of their last update (for a
  time to live) and the order of map entries.
- Appending to a list records only the number of elements. The list is read only if it must be undone.
- An exception of a backend is recorded (`failure`), because the user function did not cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa

from tidegate.state.common.backend import CellSpec, KeyedBackend, KeyRef, KeyRefs, ListCells, MapCells, ValueCells


class StateUndo:
    """The changes of one call, from `begin` on."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.failure: BaseException | None = None
        """Exception that a backend has raised, or None."""

    def begin(self) -> None:
        """A call begins: what was changed before stays."""
        self._steps.clear()

    def note(self, step: Callable[..., None], *arguments: Any) -> None:
        """Note that `step(*arguments)` takes a change back."""
        self._steps.append((step, arguments))

    def back(self) -> None:
        """Take back all changes since `begin`. The keys must still be entered."""
        while self._steps:
            step, arguments = self._steps.pop()
            step(*arguments)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remember what is raised inside."""
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def backend(self, backend: KeyedBackend) -> KeyedBackend:
        """A backend whose cells report their changes here."""
        return cast(KeyedBackend, _Backend(backend, self))


class _Backend:
    """Makes cells of a backend that report their changes."""

    def __init__(self, backend: KeyedBackend, undo: StateUndo) -> None:
        self._backend, self._undo = backend, undo

    def values(self, spec: CellSpec) -> ValueCells:
        return _Values(self._backend.values(spec), self._undo)

    def lists(self, spec: CellSpec) -> ListCells:
        return _Lists(self._backend.lists(spec), self._undo)

    def maps(self, spec: CellSpec) -> MapCells:
        return _Maps(self._backend.maps(spec), self._undo)


class _Values:
    def __init__(self, cells: ValueCells, undo: StateUndo) -> None:
        self._cells, self._undo = cells, undo

    def get(self, ref: KeyRef) -> Any:
        with self._undo.watched():
            return self._cells.get(ref)

    def put(self, ref: KeyRef, value: Any) -> None:
        with self._undo.watched():
            self._note(ref)
            self._cells.put(ref, value)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._note(ref)
            self._cells.remove(ref)

    def get_many(self, refs: KeyRefs) -> pa.Array:
        with self._undo.watched():
            return self._cells.get_many(refs)

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        with self._undo.watched():
            self._undo.note(self._cells.put_many, refs, self._cells.get_many(refs))
            self._cells.put_many(refs, values)

    def remove_many(self, refs: KeyRefs) -> None:
        with self._undo.watched():
            self._undo.note(self._cells.put_many, refs, self._cells.get_many(refs))
            self._cells.remove_many(refs)

    def _note(self, ref: KeyRef) -> None:
        before = self._cells.get(ref)
        if before is None:
            self._undo.note(self._cells.remove, ref)
        else:
            self._undo.note(self._cells.put, ref, before)


class _Lists:
    def __init__(self, cells: ListCells, undo: StateUndo) -> None:
        self._cells, self._undo = cells, undo

    def get(self, ref: KeyRef) -> Collection[Any]:
        with self._undo.watched():
            return self._cells.get(ref)

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        with self._undo.watched():
            self._undo.note(self._shorten, ref, len(values))
            self._cells.extend(ref, values)

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, list(self._cells.get(ref)))
            self._cells.put(ref, values)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, list(self._cells.get(ref)))
            self._cells.remove(ref)

    def _shorten(self, ref: KeyRef, count: int) -> None:
        self._replace(ref, list(self._cells.get(ref))[:-count])

    def _replace(self, ref: KeyRef, values: list[Any]) -> None:
        if values:
            self._cells.put(ref, values)
        else:
            self._cells.remove(ref)


class _Maps:
    def __init__(self, cells: MapCells, undo: StateUndo) -> None:
        self._cells, self._undo = cells, undo

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        with self._undo.watched():
            return self._cells.get(ref, map_key)

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        with self._undo.watched():
            before = self._cells.get(ref, map_key)
            if before is None:
                self._undo.note(self._cells.discard, ref, map_key)
            else:
                self._undo.note(self._cells.put, ref, map_key, before)
            self._cells.put(ref, map_key, value)

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        with self._undo.watched():
            if self._cells.get(ref, map_key) is not None:
                # An entry that is put again would be the last one, so all of them are put again.
                self._undo.note(self._replace, ref, self._pairs(ref))
                self._cells.discard(ref, map_key)

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        with self._undo.watched():
            return self._pairs(ref)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, self._pairs(ref))
            self._cells.remove(ref)

    def _pairs(self, ref: KeyRef) -> list[tuple[Any, Any]]:
        found = self._cells.items(ref)
        return list(found.items() if isinstance(found, Mapping) else found)

    def _replace(self, ref: KeyRef, pairs: list[tuple[Any, Any]]) -> None:
        self._cells.remove(ref)
        for map_key, value in pairs:
            self._cells.put(ref, map_key, value)
