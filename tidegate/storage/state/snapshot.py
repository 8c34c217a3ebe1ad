"""The types of state in a snapshot: frozen on its way into a checkpoint, and as tables when it is read back.

Operators and backends create `FrozenState`, `state_file.py` writes it, and a restored operator receives `StateTable`s.

A snapshot has a short synchronous part, `Operator.snapshot`, which runs on the task's thread and freezes references to
the state. Its asynchronous part encodes and writes the frozen state chunk by chunk, while the task continues to
process.

A keyed state may be stored in layers. The base is the whole state at some time. Each layer above it holds the changes
since the layer below: rows that were put, and keys that were removed. The newest layer that has a key defines its row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tidegate.storage.checkpoints.metadata import NativeFile, NativeState, StateKind
from tidegate.storage.codec import wire
from tidegate.storage.ids import CheckpointId, OperatorUid


@dataclass(frozen=True, slots=True)
class Cut:
    """Describes the requested content of a snapshot.

    With `base` the snapshot has only the changes since the snapshot of that checkpoint, which is then the layer below
    this one. Otherwise it has the whole state. `canonical`: the state is written as rows that every backend can read.
    Without `keyed`, keyed state is not included, because the changelog has it.
    """

    checkpoint_id: CheckpointId
    base: CheckpointId | None = None
    canonical: bool = False
    keyed: bool = True

    @property
    def in_order(self) -> bool:
        """Returns whether this is a savepoint in the canonical format: the whole state, sorted as in `canonical.py`,
        without layers.
        """
        return self.canonical and self.base is None


@wire
@dataclass(frozen=True, slots=True)
class StateTable:
    """Stored rows of one state, as a restored operator receives them: all rows of one file of one layer, or some of
    them.

    `layer` 0 is the base. Tables are passed in the order of their layers. `removed`: the rows are deleted keys, and
    have only key columns.
    """

    state: str
    kind: StateKind
    rows: pa.RecordBatch
    removed: bool = False
    layer: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """Some rows of one state, to be written to storage.

    Rows of keyed state are sorted by key group: group `first_group + i` has the rows `group_rows[i]:group_rows[i + 1]`.
    For other state `group_rows` is empty.
    """

    rows: pa.RecordBatch
    first_group: int = 0
    group_rows: tuple[int, ...] = ()


class FrozenState(Protocol):
    """One state of one operator as it was at the time of the snapshot. Later changes of the state do not affect it."""

    @property
    def state(self) -> str:
        """Returns the name of the state."""
        ...

    @property
    def kind(self) -> StateKind:
        """Returns how the state is redistributed when the parallelism changes."""
        ...

    @property
    def removed(self) -> bool:
        """Returns True if the rows of this snapshot are deleted keys."""
        ...

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows in bounded chunks, and releases yielded rows. Called once, on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A small `FrozenState` with one table, which the function `rows` builds when the state is written."""

    state: str
    kind: StateKind
    rows: Callable[[], pa.RecordBatch]
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Yields all rows of the table as a single chunk."""
        yield StateChunk(self.rows())


@dataclass(frozen=True, slots=True)
class FrozenChanged(ABC):
    """Base of a `FrozenState` that converts the rows of the wrapped state `frozen`.

    Subclasses define the conversion.
    """

    frozen: FrozenState

    @property
    def state(self) -> str:
        """Returns the name of the state."""
        return self.frozen.state

    @property
    def kind(self) -> StateKind:
        """Returns how the state is redistributed when the parallelism changes."""
        return self.frozen.kind

    @property
    def removed(self) -> bool:
        """Returns True if the rows of the snapshot are deleted keys."""
        return self.frozen.removed

    @abstractmethod
    def chunks(self) -> Iterator[StateChunk]:
        """Yields the converted rows in chunks."""


class FrozenNative(Protocol):
    """The local files of a state backend (RocksDB) as they were at the time of the snapshot."""

    @property
    def uid(self) -> OperatorUid:
        """Returns the uid of the operator whose state the files contain."""
        ...

    @property
    def backend(self) -> str:
        """Returns the name of the backend that can read the files."""
        ...

    @property
    def folder(self) -> str:
        """Returns the local folder with the files, which do not change."""
        ...

    @property
    def key_groups(self) -> tuple[int, int]:
        """Returns the range of the subtask's key groups: the first one, and the one after the last."""
        ...

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        """Returns, by file name, the range (first, end) of key groups that need the file, or None if all need it.

        Runs on any thread.
        """
        ...

    def stored(self, base: NativeState) -> Mapping[str, NativeFile]:
        """Returns, by local name, the stored files of an older checkpoint that equal local files of the same size."""
        ...

    def description(self) -> bytes:
        """Returns the bytes that the backend needs to open the files again (`NativeState.description`)."""
        ...

    def release(self) -> None:
        """Deletes the local folder, after the files were stored or the snapshot was aborted. Safe to repeat."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The frozen states of one operator.

    `states` are written completely into the file of this checkpoint. `layer` is added to a stack of layers that
    checkpoints share: the whole keyed state, or the changes since the layer below. `native` has the keyed state as
    files of the backend, which checkpoints share too.
    """

    uid: OperatorUid
    states: tuple[FrozenState, ...] = ()
    layer: tuple[FrozenState, ...] = ()
    native: FrozenNative | None = None


def sorted_by_group(rows: pa.RecordBatch, groups: NDArray[np.uint16]) -> StateChunk:
    """Returns the rows of keyed state as a chunk, stably sorted by key group.

    Row i belongs to key group `groups[i]`.
    """
    if rows.num_rows == 0:
        return StateChunk(rows, 0, (0,))
    first = int(groups.min())
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups - first))))
    # NumPy's stable sort of 16-bit integers is a radix sort.
    order = pa.array(np.argsort(groups, kind="stable"))
    return StateChunk(rows.take(order), first, tuple(starts.tolist()))
