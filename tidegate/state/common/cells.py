"""`CellSpec` and cells: states of a backend with one Python value, list or map for each key.

`KeyedBackend` makes them, and says when a batch begins and ends. Values that are put in have the declared type already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
from numpy.typing import NDArray

KeyRef: TypeAlias = Any
"""How a backend refers to a key within a batch: a slot, or encoded bytes. Valid until `leave`."""

KeyRefs: TypeAlias = NDArray[Any]
"""The refs of many keys, in an array."""

Migrate: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Turns stored rows of one schema into rows of another."""


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One state of a row-wise function: its name, and the Arrow type of its column in the stored table.

    A list state has a list type, a map state a map type. `has_expired` tells whether the time to live of a stored value
    is over; for a list or map it gets the value of one element. None: nothing expires. `metadata` is that of the
    column's field. `migrate` converts rows that a backend finds in its own files to the current type. `by_batch`: the
    program reads and writes values by the batch, so they are best kept as columns. `expired_ms` says which values have
    expired then, if any do: those whose `updated_ms`, the last field, is that moment or before.
    """

    name: str
    column_type: pa.DataType
    has_expired: Callable[[Any], bool] | None = None
    metadata: Mapping[bytes, bytes] | None = None
    migrate: Migrate | None = None
    by_batch: bool = False
    expired_ms: Callable[[], int] | None = None

    @property
    def field(self) -> pa.Field:
        """The field of the column in the stored table."""
        return pa.field(self.name, self.column_type, metadata=self.metadata)


class ValueCells(Protocol):
    """One Python value for each key. The methods for many keys take what `enter_batch` gave, or some of it."""

    def get(self, ref: KeyRef) -> Any:
        """The value; None where there is none."""
        ...

    def put(self, ref: KeyRef, value: Any) -> None:
        """Set the value, which is not None."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the value, if there is one."""
        ...

    def get_many(self, refs: KeyRefs) -> pa.Array:
        """The value of each key, null where there is none. A key may be given twice, here and below."""
        ...

    def put_many(self, refs: KeyRefs, values: pa.Array) -> None:
        """Set the value of each key, of the column's type; null removes it. The last of several for a key counts."""
        ...

    def remove_many(self, refs: KeyRefs) -> None:
        """Remove the values of these keys."""
        ...


class ListCells(Protocol):
    """A list of Python values for each key. An empty list is the same as none."""

    def get(self, ref: KeyRef) -> Collection[Any]:
        """The values, in order; empty if there are none. They may change with the next call."""
        ...

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Append values. Where it can, a backend neither reads nor rewrites the values already there."""
        ...

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Replace the list."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the list."""
        ...


class MapCells(Protocol):
    """A map of Python values for each key. An empty map is the same as none."""

    def get(self, ref: KeyRef, map_key: Any) -> Any:
        """The value at a map key; None where there is none."""
        ...

    def put(self, ref: KeyRef, map_key: Any, value: Any) -> None:
        """Set one entry."""
        ...

    def discard(self, ref: KeyRef, map_key: Any) -> None:
        """Remove one entry, if it is there."""
        ...

    def items(self, ref: KeyRef) -> Mapping[Any, Any] | Iterable[tuple[Any, Any]]:
        """The current entries, in the backend's own order, which is the same on every run."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Remove the map."""
        ...
