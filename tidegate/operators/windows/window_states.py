"""`StateOfWindows`: state of a key and window, as a map of the key from the end of a window to what the state has.

`ProcessWindowContext.window_state` binds it. Rules:

- The function uses a view: the state that it has declared, whose key is that of the call, and whose window as well.
- What a window has is one value of the map, so to add to a list or a map of a window costs what that holds. It is
  replaced and never changed, because a snapshot may have it.
- It goes with the window (`forget`), so it takes no time to live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from tidegate.operators.state.keyed_state import KeyedState
from tidegate.operators.state.ttl import Clock
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.cells import CellSpec, KeyRef, MapCells
from tidegate.storage.errors import ConfigurationError

Place = Callable[[], int]
"""The end of the window that a function works on. ConfigurationError where it works on none."""


class StateOfWindows(KeyedState):
    """A declared state, of each key and window. `view` is what the function gets, once this is bound."""

    _cells: MapCells
    view: KeyedState

    def __init__(self, declared: KeyedState, place: Place) -> None:
        if not isinstance(declared, KeyedState):
            raise ConfigurationError(f"window_state takes a state such as tg.ValueState, not {declared!r}")
        if declared.ttl is not None:
            raise ConfigurationError(
                f"state {declared.name!r} of a window goes when the window is over; leave ttl= out, or bind it with "
                "context.state for the key"
            )
        super().__init__(declared.name, None)
        self._declared, self._place = declared, place

    @property
    def stored_field(self) -> pa.Field:
        """A map from the end of the window, in milliseconds, to what the declared state stores."""
        key = pa.field("key", pa.int64(), nullable=False)
        return pa.field(self.name, pa.map_(key, self._declared.stored_field.with_name("value")))

    def expires(self, column_type: pa.DataType) -> bool:
        """Whether what is stored expires."""
        return False

    def forget(self, end_ms: int) -> None:
        """The window of the current key with this end is over."""
        self._cells.discard(self._ref(), end_ms)

    def _bind(self, backend: KeyedBackend, spec: CellSpec, clock: Clock | None) -> None:
        assert spec.migrate is not None, "a state without a conversion"
        self._cells = backend.maps(spec)
        views = cast(KeyedBackend, _Views(self._cells, self._place))
        self.view = self._declared.bound(self._scope, views, None, spec.migrate)


class _Views:
    """Cells of the window that a function works on, as a backend gives those of a key."""

    def __init__(self, cells: MapCells, place: Place) -> None:
        self._cells, self._place = cells, place

    def values(self, spec: CellSpec) -> _Values:
        return _Values(self._cells, self._place)

    def lists(self, spec: CellSpec) -> _Lists:
        return _Lists(self._cells, self._place)

    def maps(self, spec: CellSpec) -> _Maps:
        return _Maps(self._cells, self._place)


class _Values:
    """`ValueCells` of a window, but for the methods for many keys: a call is for one."""

    def __init__(self, cells: MapCells, place: Place) -> None:
        self._cells, self._place = cells, place

    def get(self, ref: KeyRef) -> Any:
        return self._cells.get(ref, self._place())

    def put(self, ref: KeyRef, value: Any) -> None:
        self._cells.put(ref, self._place(), value)

    def remove(self, ref: KeyRef) -> None:
        self._cells.discard(ref, self._place())


class _Lists(_Values):
    """`ListCells` of a window."""

    def get(self, ref: KeyRef) -> Collection[Any]:
        return super().get(ref) or ()

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        self.put(ref, [*self.get(ref), *values])


class _Maps:
    """`MapCells` of a window. Entries are stored as Arrow gives a map: a list of pairs."""

    def __init__(self, cells: MapCells, place: Place) -> None:
        self._whole = _Values(cells, place)

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        return self._held(ref).get(_one_nan(map_key))

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        self._whole.put(ref, [*(self._held(ref) | {_one_nan(map_key): value}).items()])

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        held = self._held(ref)
        if held.pop(_one_nan(map_key), None) is None:
            return
        if held:
            self._whole.put(ref, [*held.items()])
        else:
            self._whole.remove(ref)

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        return self._held(ref)

    def remove(self, ref: KeyRef) -> None:
        self._whole.remove(ref)

    def _held(self, ref: KeyRef) -> dict[Any, Any]:
        return {_one_nan(key): value for key, value in self._whole.get(ref) or ()}


def _one_nan(map_key: Any) -> Any:
    """A dictionary finds a NaN by identity alone."""
    return math.nan if map_key != map_key else map_key
