"""The types of state in a snapshot: frozen on its way into a checkpoint, and as tables when it is read back.

Operators and backends make `FrozenState`, `state_file.py` writes it, and a restored operator receives `StateTable`s.

A snapshot has a synchronous part, `Operator.snapshot`, that runs on the task's thread, freezes references and must be
short. Its asynchronous part encodes and writes the frozen state piece by piece, while the task continues to process.

A keyed state may be stored in layers. The base is the whole state at some time. Each layer above it holds the changes
since the layer below: rows that were put, and keys that were removed. The newest layer of a key counts.
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
    """Describes what a snapshot has to contain.

    With `base` it has only the changes since the snapshot of that checkpoint, which is then the layer below. Otherwise
    it has the whole state. `canonical`: as rows, which every backend can read. Without `keyed` the keyed state is not
    frozen, because the changelog has it.
    """

    checkpoint_id: CheckpointId
    base: CheckpointId | None = None
    canonical: bool = False
    keyed: bool = True

    @property
    def in_order(self) -> bool:
        """True for a savepoint in canonical form: the whole state, sorted as in `canonical.py`, without layers."""
        return self.canonical and self.base is None


@wire
@dataclass(frozen=True, slots=True)
class StateTable:
    """Stored rows of one state, as a restored operator receives them: one file of one layer, or a part of it.

    `layer` 0 is the base. Tables come in the order of their layers. `removed` rows have only key columns.
    """

    state: str
    kind: StateKind
    rows: pa.RecordBatch
    removed: bool = False
    layer: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A piece of one state on its way to storage.

    Rows of keyed state are sorted by key group: group `first_group + i` has rows `group_rows[i]:group_rows[i + 1]`.
    For other state `group_rows` is empty.
    """

    rows: pa.RecordBatch
    first_group: int = 0
    group_rows: tuple[int, ...] = ()


class FrozenState(Protocol):
    """One state of one operator as it was when it was frozen. Later changes do not appear in it."""

    @property
    def state(self) -> str:
        """Name of the state."""
        ...

    @property
    def kind(self) -> StateKind:
        """How the state is divided when the parallelism changes."""
        ...

    @property
    def removed(self) -> bool:
        """Returns True if the rows are removed keys."""
        ...

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the rows, a bounded number at a time, and releases yielded rows. Called once, on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A small `FrozenState`: one table, which `rows` makes when it is written."""

    state: str
    kind: StateKind
    rows: Callable[[], pa.RecordBatch]
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the one chunk."""
        yield StateChunk(self.rows())


@dataclass(frozen=True, slots=True)
class FrozenChanged(ABC):
    """Base of a `FrozenState` that converts the rows of another one. Subclasses define how."""

    frozen: FrozenState

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.frozen.state

    @property
    def kind(self) -> StateKind:
        """How the state is divided when the parallelism changes."""
        return self.frozen.kind

    @property
    def removed(self) -> bool:
        """Returns True if the rows are removed keys."""
        return self.frozen.removed

    @abstractmethod
    def chunks(self) -> Iterator[StateChunk]:
        """Yields the converted rows."""


class FrozenNative(Protocol):
    """Files of a backend with files of its own, as they were when the state was frozen."""

    @property
    def uid(self) -> OperatorUid:
        """Returns the operator."""
        ...

    @property
    def backend(self) -> str:
        """Name of the backend that can read the files."""
        ...

    @property
    def folder(self) -> str:
        """Local folder of the files, which do not change."""
        ...

    @property
    def key_groups(self) -> tuple[int, int]:
        """First key group, and the one after the last."""
        ...

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        """Returns the names of the files, each with the key groups that need it (None for all). Runs on any thread."""
        ...

    def stored(self, base: NativeState) -> Mapping[str, NativeFile]:
        """Returns the stored files of an older checkpoint that equal files of these names here. Sizes must be equal."""
        ...

    def description(self) -> bytes:
        """Returns the description that the backend needs to read the files again."""
        ...

    def release(self) -> None:
        """Deletes the folder, once the files are stored or the snapshot was given up. Safe to repeat."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The frozen states of one operator.

    `states` are written whole into the file of their own checkpoint. `layer` goes onto a stack of layers that
    checkpoints share: all of the state, or the changes since the layer below. `native` does the same with files.
    """

    uid: OperatorUid
    states: tuple[FrozenState, ...] = ()
    layer: tuple[FrozenState, ...] = ()
    native: FrozenNative | None = None


def sorted_by_group(rows: pa.RecordBatch, groups: NDArray[np.uint16]) -> StateChunk:
    """Returns rows of keyed state sorted by key group, stably. Row i belongs to key group `groups[i]`."""
    if rows.num_rows == 0:
        return StateChunk(rows, 0, (0,))
    first = int(groups.min())
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups - first))))
    # NumPy's stable sort of 16-bit integers is a radix sort.
    order = pa.array(np.argsort(groups, kind="stable"))
    return StateChunk(rows.take(order), first, tuple(starts.tolist()))
