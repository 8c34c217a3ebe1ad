"""The contract of state backends: what operators ask of one, vectorised and key by key.

Every backend passes the same contract tests.

Rules: a backend holds the keyed state of one operator in one subtask and is used by one thread. A state is a table with
a row for each key that has it: that is the form in which it is stored, read and moved between backends. Between `enter`
(or `VectorTable.upsert`) and `leave` (`VectorTable.done`) of a batch the backend may hold what was changed in a working
set of its own; a snapshot is only taken after `leave`. What is put in is of the declared type already; null is absence.

A backend may keep what it needs to go back to a checkpoint (`kept`, `go_back`), so that the task of the next attempt,
in the same process, goes on with it and reads nothing. Operators see what a restore would have given them.

Freezing (`freeze`) is the synchronous part of a snapshot and must not grow with the state. What it returns does not
change any more, and is encoded by another thread while processing goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.actors.kernels.key_index.entries import Upserted
from tidegate.actors.state_backends.common.timers import KeyedTimers
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, FrozenNative, FrozenState, StateTable

KeyRef: TypeAlias = Any
"""How a backend knows a key within a batch: a slot, or encoded bytes. Only good until `leave`."""


Migrate: TypeAlias = Callable[[pa.RecordBatch], pa.RecordBatch]
"""Makes stored rows of one schema into those of another."""


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One state of a row-wise function: its name, and the Arrow type of its column in the stored table.

    A list state has a list type, a map state a map type; `has_expired` tells of a stored value (of a list or map: of an
    element's value) whether its time to live is over, None where nothing expires. `metadata` is that of the column's
    field. `migrate` makes of rows that a backend finds in files of its own what the state is now.
    """

    name: str
    column_type: pa.DataType
    has_expired: Callable[[Any], bool] | None = None
    metadata: Mapping[bytes, bytes] | None = None
    migrate: Migrate | None = None

    @property
    def field(self) -> pa.Field:
        """The field of the column in the stored table."""
        return pa.field(self.name, self.column_type, metadata=self.metadata)


class ValueCells(Protocol):
    """One Python value for each key."""

    def get(self, ref: KeyRef) -> Any:
        """The value; None where there is none."""
        ...

    def put(self, ref: KeyRef, value: Any) -> None:
        """Keep a value that is not None."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Forget the value, if there is one."""
        ...


class ListCells(Protocol):
    """A list of Python values for each key; an empty one is absence."""

    def get(self, ref: KeyRef) -> Sequence[Any]:
        """The values, not to be changed by the caller; empty where there are none."""
        ...

    def extend(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Append values; what was there is not read or written again where the backend can avoid that."""
        ...

    def put(self, ref: KeyRef, values: Sequence[Any]) -> None:
        """Replace the list."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Forget the list."""
        ...


class MapCells(Protocol):
    """A map of Python values for each key; an empty one is absence."""

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
        """Entries as they are now, in the order in which the backend keeps them (the same on every run)."""
        ...

    def remove(self, ref: KeyRef) -> None:
        """Forget the map."""
        ...


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """A value column of a vectorised table: its name, its Arrow type, and what a new row holds (also beneath a null).

    The type has a `storage_dtype`.
    """

    name: str
    data_type: pa.DataType
    identity: int | float


class ValueColumn(Protocol):
    """A column of a vectorised table, whose memory kernels change in place between `upsert` and `done`.

    `pages` are addresses of pages of `PAGE_ROWS` values each (`kernels/paged.py` has the access to them).
    """

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the values in the pages: the `storage_dtype` of the spec's type."""
        ...

    @property
    def pages(self) -> NDArray[np.uintp]:
        """Addresses of the pages of values, good until `done`."""
        ...

    @property
    def valid_pages(self) -> NDArray[np.uintp]:
        """Addresses of the pages of validity (uint8, 1 where a value is); empty while nothing has been null."""
        ...

    def track_nulls(self) -> NDArray[np.uintp]:
        """Begin to keep validity, if that has not begun, and `valid_pages`.

        Rows have values so far, but for those that came with this batch: these are null until they are marked.
        """
        ...

    def take(self, slots: NDArray[Any]) -> pa.Array:
        """Values of some slots, as an Arrow array of the column's type (a copy)."""
        ...

    def raw(self, slots: NDArray[Any]) -> NDArray[Any]:
        """Values of some slots in `dtype` (a copy), whatever lies beneath a null."""
        ...


class VectorTable(Protocol):
    """A table whose values are of fixed width, changed a batch at a time."""

    @property
    def rows(self) -> int:
        """Keys that have a row (of a backend that does not count: an estimate)."""
        ...

    def upsert(self, keys: pa.RecordBatch) -> Upserted:
        """Begin with a batch: the slot of each row's key; keys without a row get one with the columns' identities.

        `new_rows` are the rows of those (not always the highest slots). Where a column keeps validity they are null.
        The rows of these slots may be changed until `done`. Slots of another batch mean other keys.
        """
        ...

    def column(self, name: str) -> ValueColumn:
        """A value column; always the same object."""
        ...

    def done(self) -> None:
        """End of the batch."""
        ...

    def scan(self, rows_max: int) -> Iterator[tuple[pa.RecordBatch, NDArray[Any]]]:
        """All keys in batches, each with the slots where `column(...).take` finds their values until the next one."""
        ...


class KeyedBackend(Protocol):
    """The keyed state of one operator in one subtask."""

    def fix_keys(self, schema: pa.Schema) -> None:
        """Names and types of the stored key columns; called once, before the first key, after all states are bound."""
        ...

    def table(self, name: str, columns: Sequence[ValueSpec]) -> VectorTable:
        """A vectorised state; `columns` are those of its values."""
        ...

    def retype(self, name: str, columns: Sequence[ValueSpec], migrate: Migrate) -> VectorTable:
        """A vectorised state that takes the place of one with the same name and other types, and its rows.

        Only before the first batch after a restore. Raises what `migrate` raises.
        """
        ...

    def values(self, spec: CellSpec) -> ValueCells:
        """A state with one value for each key."""
        ...

    def lists(self, spec: CellSpec) -> ListCells:
        """A state with a list for each key."""
        ...

    def maps(self, spec: CellSpec) -> MapCells:
        """A state with a map for each key."""
        ...

    @property
    def timers(self) -> KeyedTimers:
        """Moments at which keys want to be called; a state like the others, of the name `TIMERS_STATE`."""
        ...

    def enter(self, keys: pa.RecordBatch) -> Sequence[KeyRef]:
        """Begin with a batch of keys (stored key columns): the ref of each row's key."""
        ...

    def leave(self) -> None:
        """End of the batch: refs are no good any more."""
        ...

    def sweep(self, keys_max: int) -> None:
        """Look at up to so many keys, where the last call ended, and forget what has expired (Flink's incremental
        cleanup)."""
        ...

    def keys(self, state: str, rows_max: int) -> Iterator[pa.RecordBatch]:
        """Keys that have a state of that name, in batches, for functions that go through all of them."""
        ...

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """About how many rows `freeze` would give with that base, and how many without; 0 where files are shared."""
        ...

    def freeze(self, cut: Cut) -> Sequence[FrozenState]:
        """All states as they are now, or with `cut.base` only what has changed since that."""
        ...

    def freeze_native(self, cut: Cut) -> FrozenNative | None:
        """All states as files of the backend's own, where it has such and `cut` is not canonical; else `freeze` it is.

        None also while there is no key.
        """
        ...

    def keep(self, checkpoint_id: CheckpointId) -> None:
        """What the backend holds now, after a restore, is the state of a checkpoint of this job."""
        ...

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """A checkpoint is complete: nobody goes back to an older one."""
        ...

    @property
    def goes_back(self) -> bool:
        """Whether there is a checkpoint that it can go back to."""
        ...

    def kept(self, checkpoint_id: CheckpointId) -> Sequence[StateTable] | None:
        """A table without rows for each state, where `go_back` leads to that checkpoint; else None. Changes nothing."""
        ...

    def go_back(self, checkpoint_id: CheckpointId) -> None:
        """Be what it was at the freeze for a checkpoint for which `kept` is not None.

        Afterwards the backend is like one that was opened on files: its keys are fixed and its states bound again.
        """
        ...

    @property
    def stored_keys(self) -> pa.Schema | None:
        """Key columns of the files that the backend was opened on, or of the checkpoint that it went back to.

        `fix_keys` wants them. None for a backend that begins empty.
        """
        ...

    def stored_schema(self, state: str) -> pa.Schema | None:
        """Key columns and value columns of a state that is there already: in files, or since `go_back`.

        It has that without any `load`. None where there is no such state.
        """
        ...

    def expect(self, keys: int) -> None:
        """So many keys at most are about to be loaded in layer 0: what they need can be had at once. A hint."""
        ...

    def load(self, table: StateTable) -> None:
        """Take a stored table in: rows are put, or keys removed.

        CorruptionError for a key that is twice in layer 0, here or in `loaded`.
        """
        ...

    def loaded(self) -> None:
        """No stored table is left; before the first batch. CorruptionError for a key that was twice in layer 0."""
        ...

    def close(self) -> None:
        """Release files."""
        ...
