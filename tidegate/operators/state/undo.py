"""`StateUndo` undoes the changes of keyed state that a call of a user function made before it failed.

If the operator needs it, `KeyedStates` binds states to a wrapped backend, which records all changes in a `StateUndo`.
Rules:

- For each change, a function that undoes it is recorded. Undoing in reverse order restores the values, the time of
  their last update (for a time to live) and the order of map entries.
- For an append to a list, only the number of added elements is recorded. The list is read only if the append must be
  undone.
- An exception of a backend is recorded (`failure`), because the user function did not cause it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import pyarrow as pa

from tidegate.state.common.backend import (
    InternalListState,
    InternalMapState,
    InternalValueState,
    KeyedBackend,
    KeyRef,
    KeyRefs,
    StateDescriptor,
)


class StateUndo:
    """Records the changes of keyed state in one call of a function, and can undo them."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.failure: BaseException | None = None
        """The exception that the state backend raised, or None."""

    def begin(self) -> None:
        """Starts to record the changes of a call. Earlier changes can no longer be undone."""
        self._steps.clear()

    def note(self, step: Callable[..., None], *arguments: Any) -> None:
        """Records one change of state, which the call `step(*arguments)` would undo."""
        self._steps.append((step, arguments))

    def back(self) -> None:
        """Undoes all changes since `begin`. The keys of the call must still be available in the backend."""
        while self._steps:
            step, arguments = self._steps.pop()
            step(*arguments)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Returns a context manager for calls of the backend.

        If the backend raises, stores the exception in `failure` and raises it again.
        """
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def backend(self, backend: KeyedBackend) -> KeyedBackend:
        """Returns a wrapper of a backend whose states record their changes in this object."""
        return cast(KeyedBackend, _Backend(backend, self))


class _Backend:
    """Wraps a state backend. Its states record their changes in a `StateUndo`."""

    def __init__(self, backend: KeyedBackend, undo: StateUndo) -> None:
        self._backend, self._undo = backend, undo

    def values(self, spec: StateDescriptor) -> InternalValueState:
        return _Values(self._backend.values(spec), self._undo)

    def lists(self, spec: StateDescriptor) -> InternalListState:
        return _Lists(self._backend.lists(spec), self._undo)

    def maps(self, spec: StateDescriptor) -> InternalMapState:
        return _Maps(self._backend.maps(spec), self._undo)


class _Values:
    def __init__(self, internal: InternalValueState, undo: StateUndo) -> None:
        self._internal, self._undo = internal, undo

    def get(self, ref: KeyRef) -> Any:
        with self._undo.watched():
            return self._internal.get(ref)

    def put(self, ref: KeyRef, value: Any) -> None:
        with self._undo.watched():
            self._note(ref)
            self._internal.put(ref, value)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._note(ref)
            self._internal.remove(ref)

    def get_many(self, refs: KeyRefs) -> pa.Array:
        with self._undo.watched():
            return self._internal.get_many(refs)

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        with self._undo.watched():
            self._undo.note(self._internal.put_many, refs, self._internal.get_many(refs))
            self._internal.put_many(refs, values)

    def remove_many(self, refs: KeyRefs) -> None:
        with self._undo.watched():
            self._undo.note(self._internal.put_many, refs, self._internal.get_many(refs))
            self._internal.remove_many(refs)

    def _note(self, ref: KeyRef) -> None:
        before = self._internal.get(ref)
        if before is None:
            self._undo.note(self._internal.remove, ref)
        else:
            self._undo.note(self._internal.put, ref, before)


class _Lists:
    def __init__(self, internal: InternalListState, undo: StateUndo) -> None:
        self._internal, self._undo = internal, undo

    def get(self, ref: KeyRef) -> Collection[Any]:
        with self._undo.watched():
            return self._internal.get(ref)

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        with self._undo.watched():
            self._undo.note(self._shorten, ref, len(values))
            self._internal.extend(ref, values)

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, list(self._internal.get(ref)))
            self._internal.put(ref, values)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, list(self._internal.get(ref)))
            self._internal.remove(ref)

    def _shorten(self, ref: KeyRef, count: int) -> None:
        self._replace(ref, list(self._internal.get(ref))[:-count])

    def _replace(self, ref: KeyRef, values: list[Any]) -> None:
        if values:
            self._internal.put(ref, values)
        else:
            self._internal.remove(ref)


class _Maps:
    def __init__(self, internal: InternalMapState, undo: StateUndo) -> None:
        self._internal, self._undo = internal, undo

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        with self._undo.watched():
            return self._internal.get(ref, map_key)

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        with self._undo.watched():
            before = self._internal.get(ref, map_key)
            if before is None:
                self._undo.note(self._internal.discard, ref, map_key)
            else:
                self._undo.note(self._internal.put, ref, map_key, before)
            self._internal.put(ref, map_key, value)

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        with self._undo.watched():
            if self._internal.get(ref, map_key) is not None:
                # An entry that is put again would be the last one, so all of them are put again.
                self._undo.note(self._replace, ref, self._pairs(ref))
                self._internal.discard(ref, map_key)

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        with self._undo.watched():
            return self._pairs(ref)

    def remove(self, ref: KeyRef) -> None:
        with self._undo.watched():
            self._undo.note(self._replace, ref, self._pairs(ref))
            self._internal.remove(ref)

    def _pairs(self, ref: KeyRef) -> list[tuple[Any, Any]]:
        found = self._internal.items(ref)
        return list(found.items() if isinstance(found, Mapping) else found)

    def _replace(self, ref: KeyRef, pairs: list[tuple[Any, Any]]) -> None:
        self._internal.remove(ref)
        for map_key, value in pairs:
            self._internal.put(ref, map_key, value)
