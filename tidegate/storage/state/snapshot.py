"""The types of state in a snapshot: frozen on its way into a checkpoint, and as tables when it is read back.

Operators and backends make `FrozenState`; `state_file.py` writes it; a restored operator is given `StateTable`s.

A snapshot has a synchronous part, `Operator.snapshot`, that runs on the task's thread, freezes references and must be
short, and an asynchronous part that encodes and writes what was frozen, piece by piece, beside processing.

A keyed state may lie in layers: the base is the whole state as it once was, each layer above it holds what had changed
when it was written: rows that were put, and keys that were removed. Of a key the newest layer counts.
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
    """What a snapshot is to hold.

    With `base` only what has changed since the snapshot of that checkpoint, which is then the layer below; else the
    whole state. `canonical`: as rows, which every backend can read. Without `keyed` the keyed state is not frozen: the
    changelog has it.
    """

    checkpoint_id: CheckpointId
    base: CheckpointId | None = None
    canonical: bool = False
    keyed: bool = True

    @property
    def in_order(self) -> bool:
        """Whether the whole state is wanted in the order of `canonical.py`, for a savepoint: nothing is built on it."""
        return self.canonical and self.base is None


@wire
@dataclass(frozen=True, slots=True)
class StateTable:
    """Rows of one state, as an operator is restored from them: of one file of one layer, or a part of that.

    `layer` 0 is the base. Tables come in the order of their layers; `removed` rows are key columns alone.
    """

    state: str
    kind: StateKind
    rows: pa.RecordBatch
    removed: bool = False
    layer: int = 0


@dataclass(frozen=True, slots=True)
class StateChunk:
    """A piece of one state on its way to storage.

    Rows of keyed state are sorted by key group: `group_rows[i]:group_rows[i + 1]` are those of group `first_group + i`.
    Of other state `group_rows` is empty.
    """

    rows: pa.RecordBatch
    first_group: int = 0
    group_rows: tuple[int, ...] = ()


class FrozenState(Protocol):
    """One state of one operator as it was when it was frozen; later changes do not show in it."""

    @property
    def state(self) -> str:
        """Name of the state."""
        ...

    @property
    def kind(self) -> StateKind:
        """How it is split when the parallelism changes."""
        ...

    @property
    def removed(self) -> bool:
        """Whether the rows are keys that are gone."""
        ...

    def chunks(self) -> Iterator[StateChunk]:
        """Produce the rows, a bounded number at a time, and let go of what was produced. Called once, on any thread."""
        ...


@dataclass(frozen=True, slots=True)
class FrozenTable:
    """A `FrozenState` that is small: one table, made by `rows` when it is written."""

    state: str
    kind: StateKind
    rows: Callable[[], pa.RecordBatch]
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        """The one chunk."""
        yield StateChunk(self.rows())


@dataclass(frozen=True, slots=True)
class FrozenChanged(ABC):
    """A `FrozenState` that is another one with changed rows; a subclass says which."""

    frozen: FrozenState

    @property
    def state(self) -> str:
        """Name of the state."""
        return self.frozen.state

    @property
    def kind(self) -> StateKind:
        """How it is split when the parallelism changes."""
        return self.frozen.kind

    @property
    def removed(self) -> bool:
        """Whether the rows are keys that are gone."""
        return self.frozen.removed

    @abstractmethod
    def chunks(self) -> Iterator[StateChunk]:
        """The rows as they are stored."""


class FrozenNative(Protocol):
    """Files of a backend that writes files of its own, as they were when the state was frozen."""

    @property
    def uid(self) -> OperatorUid:
        """The operator."""
        ...

    @property
    def backend(self) -> str:
        """Which backend can read the files."""
        ...

    @property
    def folder(self) -> str:
        """Local folder that holds the files; they do not change."""
        ...

    @property
    def key_groups(self) -> tuple[int, int]:
        """First key group, and the one after the last."""
        ...

    def files(self) -> Mapping[str, tuple[int, int] | None]:
        """Names of the files, each with the key groups for which it is needed (None: for any). On any thread."""
        ...

    def stored(self, base: NativeState) -> Mapping[str, NativeFile]:
        """By name, files of an older checkpoint that are the same as those of that name here, if of the same size."""
        ...

    def description(self) -> bytes:
        """What the backend needs to read them again."""
        ...

    def release(self) -> None:
        """Delete the folder: the files are stored, or the snapshot was given up. Again is the same as once."""
        ...


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The frozen states of one operator.

    `states` are written whole into the file of their checkpoint alone. `layer` goes on a stack of layers that
    checkpoints share: all of the state, or what has changed since the layer below. `native` likewise, as files.
    """

    uid: OperatorUid
    states: tuple[FrozenState, ...] = ()
    layer: tuple[FrozenState, ...] = ()
    native: FrozenNative | None = None


def sorted_by_group(rows: pa.RecordBatch, groups: NDArray[np.uint16]) -> StateChunk:
    """The rows of keyed state, row i of key group `groups[i]`, sorted by key group; their order within one stays."""
    if rows.num_rows == 0:
        return StateChunk(rows, 0, (0,))
    first = int(groups.min())
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups - first))))
    # NumPy's stable sort of 16-bit integers is a radix sort.
    order = pa.array(np.argsort(groups, kind="stable"))
    return StateChunk(rows.take(order), first, tuple(starts.tolist()))
